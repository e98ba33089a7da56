"""Where vLLM 0.33 puts the pages of groups: one allocation, in the order of a layout.

After vLLM 0.33.0: ``v1/kv_cache_layout.py``, ``v1/kv_cache_interface.py``
(``compute_layout_strides``), ``v1/core/kv_cache_planning.py``
(``get_kv_cache_config_from_groups``, ``validate_kv_cache_layout``),
``v1/attention/backends/utils.py`` (``resolve_kv_cache_layout``,
``get_supported_kv_cache_layouts``), and the offloading and NIXL connectors. No layer asks for
an alignment of its blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from onnxkvrename.vllm.groups import Grouping
from onnxkvrename.vllm.nixl import Region, blocks_of, through, untold
from onnxkvrename.vllm.specs import MLA, Condition, Spec
from onnxkvrename.vllm.uniform_specs import Group
from onnxkvrename.vllm.v024 import (
    Arrangement,
    Canonical,
    Member,
    Placement,
    Reference,
    judged,
    padding_share,
    requires,
    state_of,
    whole_block,
)

LAYOUTS = ("LBNHC", "LBHNC", "BLNHC", "BLHNC", "BHLNC", "LHBNC")
"""Orders of layer, block, head, token and content, outermost first; as vLLM prefers them.

The first one is taken where no attention backend, no connector and no user says otherwise.
"""

_GONE = ("canonical", "packed")
_WITHOUT = "vLLM 0.33 has none: in a layout with B outermost one block holds all layers"


def arrangements(
    specs: Sequence[Spec],
    layer_outermost: Grouping,
    block_outermost: Grouping,
    tokens: tuple[int, ...],
) -> tuple[Arrangement, ...]:
    """What each layout makes of groups of ``specs``.

    The layouts of one kind go by one grouping, 0 or 1.
    """
    groupings = (layer_outermost, block_outermost)
    if not any(grouping.groups for grouping in groupings):
        return ()
    return (
        *(_arrangement(name, specs, groupings, tokens) for name in LAYOUTS),
        *(
            Arrangement(name, "not met", (Condition("version", "not met", _WITHOUT),), 0)
            for name in _GONE
        ),
    )


def outermost(layout: str) -> bool:
    """Whether blocks are outermost, so that one holds all layers."""
    return layout.startswith("B")


def _arrangement(
    layout: str,
    specs: Sequence[Spec],
    groupings: tuple[Grouping, Grouping],
    tokens: tuple[int, ...],
) -> Arrangement:
    at = int(outermost(layout))
    groups = groupings[at].groups
    conditions = tuple(_conditions(layout, specs, groupings[at]))
    state = state_of(conditions)
    default = layout == LAYOUTS[0]
    if state == "not met":
        return Arrangement(layout, state, conditions, at, default=default)
    size = max(group.bytes_per_block for group in groups)
    placements = tuple(_placements(layout, groups, size))
    regions = _regions(layout, groups, placements, size)
    unknown = _unknown(layout, groups) or untold(groups)
    return Arrangement(
        layout,
        state,
        conditions,
        at,
        size,
        padding_share(groups, size),
        placements,
        _view(layout, groups, placements),
        tuple(through(count, blocks_of(groups, count), regions, unknown) for count in tokens),
        default,
    )


def _conditions(layout: str, specs: Iterable[Spec], grouping: Grouping) -> Iterator[Condition]:
    if grouping.refusal is not None:
        yield Condition("groups", "not met", grouping.refusal.reason)
        return
    compact = set(layout[:2]) == {"L", "B"}
    shapes = {(_heads(spec), _tokens(spec), spec.page) for spec in specs}
    yield judged(
        "pages alike",
        len(shapes) == 1 or compact,
        "pages are alike" if len(shapes) == 1 else "a page is one piece of memory",
        otherwise="pages differ in heads, tokens or size, and are not one piece of memory",
    )
    yield judged(
        "one page size",
        grouping.uniform_page_size is not None
        or (compact and (outermost(layout) or len(grouping.groups) == 1)),
        "all groups fit into the same memory",
        otherwise="pages are of several sizes, and not side by side in a block",
    )
    if layout == LAYOUTS[0]:
        why = "no attention backend, no connector and no VLLM_KV_CACHE_LAYOUT asks for another"
    else:
        why = "all attention backends take it, and they, a connector or the user ask for it"
    yield requires("layout", why)
    yield requires("page content", "the backend stores key and value as they are, unaligned")


def _placements(layout: str, groups: Iterable[Group], size: int) -> Iterator[Placement]:
    """Each group from byte 0, its layers with the same spec together."""
    for number, group in enumerate(groups):
        offset = 0
        for specs in _alike(group):
            page, count = specs[0].page, len(specs)
            inner = page if set(layout[:2]) == {"L", "B"} else page // _heads(specs[0])
            members = tuple(Member(number, spec.layer) for spec in specs)
            if outermost(layout):
                yield Placement(members, page, offset, inner, size)
            else:
                yield Placement(members, page, offset, page, inner, per_block=True)
            offset += count * page


def _alike(group: Group) -> list[list[Spec]]:
    found: dict[Spec, list[Spec]] = {}
    for spec in group.specs:
        found.setdefault(spec.alike if group.mixed else group.first.alike, []).append(spec)
    return list(found.values())


def _view(
    layout: str, groups: tuple[Group, ...], placements: Sequence[Placement]
) -> Canonical | None:
    """The offloading connector's view; not known where heads stand outside of blocks.

    Blocks that hold more than a page are one tensor. Else layers at one place
    share a tensor, which are counted in the order of the groups.
    """
    specs = {
        Member(at, spec.layer): spec for at, group in enumerate(groups) for spec in group.specs
    }
    if layout == "LHBNC" and any(_heads(spec) > 1 for spec in specs.values()):
        return None
    stride = placements[0].block_stride
    if outermost(layout) and any(spec.page != stride for spec in specs.values()):
        attention = [spec for spec in specs.values() if spec.kind != "mamba"]
        strided = any(spec.page != stride for spec in attention)
        return whole_block(groups, stride) if strided else None
    at = {member: place for member, place, _ in _located(placements)}
    places = {(at[member], spec.page): spec.page for member, spec in specs.items()}
    numbers = {place: number for number, place in enumerate(places)}
    references = tuple(
        tuple(
            Reference(numbers[at[Member(number, spec.layer)], spec.page], spec.unpadded)
            for spec in group.specs
        )
        for number, group in enumerate(groups)
    )
    return Canonical(tuple(places.values()), references)


def _located(placements: Iterable[Placement]) -> Iterator[tuple[Member, int, int]]:
    """Each layer with where its first page is, and the size of a page."""
    for place in placements:
        for at, member in enumerate(place.members):
            yield member, place.offset + at * place.layer_stride, place.page_size


def _regions(
    layout: str, groups: Sequence[Group], placements: Sequence[Placement], size: int
) -> tuple[Region, ...] | None:
    """The regions that NIXL registers; ``None`` where they are not known."""
    if _unknown(layout, groups) is not None:
        return None
    specs = [spec for group in groups for spec in group.specs]
    mla = any(spec.kind in MLA for spec in specs)
    everything = Region(size, frozenset(place.members[0].group for place in placements))
    if outermost(layout) and (mla or not all(_piece(layout, spec) for spec in specs)):
        return (everything,)
    apart = _heads(specs[0]) if layout == "LHBNC" else 1
    found: dict[tuple[int, int], set[int]] = {}
    for member, place, page in _located(placements):
        found.setdefault((place, page), set()).add(member.group)
    return tuple(
        Region(page // apart, frozenset(theirs), apart) for (_, page), theirs in found.items()
    )


def _unknown(layout: str, groups: Iterable[Group]) -> str | None:
    """Why the regions that NIXL registers are not known; ``None`` where they are."""
    specs = [spec for group in groups for spec in group.specs]
    mla = {spec.kind in MLA for spec in specs}
    if any(spec.kind == "mamba" for spec in specs):
        return "which regions NIXL registers for states"
    if len(mla) > 1:
        return "which regions NIXL registers where only some layers are MLA"
    if outermost(layout) and True not in mla and len({_piece(layout, s) for s in specs}) > 1:
        return "which regions NIXL registers where only some pages are one piece of memory"
    return None


def _piece(layout: str, spec: Spec) -> bool:
    """Whether a page is one piece of memory in the order of its logical axes, and full."""
    if spec.padded is not None:
        return False
    ordered = layout == "BLHNC" or _heads(spec) == 1
    return ordered or (layout == "BLNHC" and _tokens(spec) == 1)


def _heads(spec: Spec) -> int:
    return 1 if spec.kind == "mamba" else spec.heads


def _tokens(spec: Spec) -> int:
    return 1 if spec.kind == "mamba" else spec.block_size or 1
