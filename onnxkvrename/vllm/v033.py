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
from onnxkvrename.vllm.nixl import NixlRegion, count_blocks, explain_unknown_blocks, transfer_v033
from onnxkvrename.vllm.specs import MLA_KINDS, Condition, KvCacheSpec
from onnxkvrename.vllm.uniform_specs import KvCacheGroup
from onnxkvrename.vllm.v024 import (
    Allocation,
    CanonicalKvCacheRef,
    CanonicalKvCaches,
    GroupLayer,
    Placement,
    build_requirement,
    build_single_tensor_caches,
    combine_states,
    compute_padding_share,
    decide_condition,
)

KV_CACHE_LAYOUTS = ("LBNHC", "LBHNC", "BLNHC", "BLHNC", "BHLNC", "LHBNC")
"""Orders of layer, block, head, token and content, outermost first; as vLLM prefers them.

The first one is taken where no attention backend, no connector and no user says otherwise.
"""

_REMOVED_ALLOCATIONS = ("canonical", "packed")
_REMOVAL_REASON = "vLLM 0.33 has none: in a layout with B outermost one block holds all layers"


def build_allocations_v033(
    specs: Sequence[KvCacheSpec],
    layer_outermost: Grouping,
    block_outermost: Grouping,
    tokens: tuple[int, ...],
) -> tuple[Allocation, ...]:
    """What each layout makes of groups of ``specs``.

    The layouts of one kind go by one grouping, 0 or 1.
    """
    groupings = (layer_outermost, block_outermost)
    if not any(grouping.groups for grouping in groupings):
        return ()
    return (
        *(_build_allocation(name, specs, groupings, tokens) for name in KV_CACHE_LAYOUTS),
        *(
            Allocation(name, "not met", (Condition("version", "not met", _REMOVAL_REASON),), 0)
            for name in _REMOVED_ALLOCATIONS
        ),
    )


def is_block_outermost(layout: str) -> bool:
    """Whether blocks are outermost, so that one holds all layers."""
    return layout.startswith("B")


def _build_allocation(
    layout: str,
    specs: Sequence[KvCacheSpec],
    groupings: tuple[Grouping, Grouping],
    tokens: tuple[int, ...],
) -> Allocation:
    at = int(is_block_outermost(layout))
    groups = groupings[at].groups
    conditions = tuple(_list_conditions(layout, specs, groupings[at]))
    state = combine_states(conditions)
    default = layout == KV_CACHE_LAYOUTS[0]
    if state == "not met":
        return Allocation(layout, state, conditions, at, default=default)
    size = max(group.bytes_per_block for group in groups)
    placements = tuple(_build_placements(layout, groups, size))
    regions = _build_regions(layout, groups, placements, size)
    unknown = _explain_unknown_regions(layout, groups) or explain_unknown_blocks(groups)
    return Allocation(
        layout,
        state,
        conditions,
        at,
        size,
        compute_padding_share(groups, size),
        placements,
        _build_canonical_caches(layout, groups, placements),
        tuple(
            transfer_v033(count, count_blocks(groups, count), regions, unknown) for count in tokens
        ),
        default,
    )


def _list_conditions(
    layout: str, specs: Iterable[KvCacheSpec], grouping: Grouping
) -> Iterator[Condition]:
    if grouping.refusal is not None:
        yield Condition("groups", "not met", grouping.refusal.reason)
        return
    compact = set(layout[:2]) == {"L", "B"}
    shapes = {(_count_heads(spec), _count_block_tokens(spec), spec.page_size) for spec in specs}
    yield decide_condition(
        "pages alike",
        len(shapes) == 1 or compact,
        "pages are alike" if len(shapes) == 1 else "a page is one piece of memory",
        otherwise="pages differ in heads, tokens or size, and are not one piece of memory",
    )
    yield decide_condition(
        "one page size",
        grouping.uniform_page_size is not None
        or (compact and (is_block_outermost(layout) or len(grouping.groups) == 1)),
        "all groups fit into the same memory",
        otherwise="pages are of several sizes, and not side by side in a block",
    )
    if layout == KV_CACHE_LAYOUTS[0]:
        why = "no attention backend, no connector and no VLLM_KV_CACHE_LAYOUT asks for another"
    else:
        why = "all attention backends take it, and they, a connector or the user ask for it"
    yield build_requirement("layout", why)
    yield build_requirement(
        "page content", "the backend stores key and value as they are, unaligned"
    )


def _build_placements(
    layout: str, groups: Iterable[KvCacheGroup], size: int
) -> Iterator[Placement]:
    """Each group from byte 0, its layers with the same spec together."""
    for number, group in enumerate(groups):
        offset = 0
        for specs in _group_identical_specs(group):
            page, count = specs[0].page_size, len(specs)
            inner = page if set(layout[:2]) == {"L", "B"} else page // _count_heads(specs[0])
            members = tuple(GroupLayer(number, spec.layer) for spec in specs)
            if is_block_outermost(layout):
                yield Placement(members, page, offset, inner, size)
            else:
                yield Placement(members, page, offset, page, inner, per_block=True)
            offset += count * page


def _group_identical_specs(group: KvCacheGroup) -> list[list[KvCacheSpec]]:
    found: dict[KvCacheSpec, list[KvCacheSpec]] = {}
    for spec in group.specs:
        found.setdefault(
            spec.without_layer if group.has_per_layer_specs else group.first_spec.without_layer, []
        ).append(spec)
    return list(found.values())


def _build_canonical_caches(
    layout: str, groups: tuple[KvCacheGroup, ...], placements: Sequence[Placement]
) -> CanonicalKvCaches | None:
    """The offloading connector's view; not known where heads stand outside of blocks.

    Blocks that hold more than a page are one tensor. Else layers at one place
    share a tensor, which are counted in the order of the groups.
    """
    specs = {
        GroupLayer(at, spec.layer): spec for at, group in enumerate(groups) for spec in group.specs
    }
    if layout == "LHBNC" and any(_count_heads(spec) > 1 for spec in specs.values()):
        return None
    stride = placements[0].block_stride
    if is_block_outermost(layout) and any(spec.page_size != stride for spec in specs.values()):
        attention = [spec for spec in specs.values() if spec.kind != "mamba"]
        strided = any(spec.page_size != stride for spec in attention)
        return build_single_tensor_caches(groups, stride) if strided else None
    at = {member: place for member, place, _ in _locate_members(placements)}
    places = {(at[member], spec.page_size): spec.page_size for member, spec in specs.items()}
    numbers = {place: number for number, place in enumerate(places)}
    references = tuple(
        tuple(
            CanonicalKvCacheRef(
                numbers[at[GroupLayer(number, spec.layer)], spec.page_size], spec.unpadded_page_size
            )
            for spec in group.specs
        )
        for number, group in enumerate(groups)
    )
    return CanonicalKvCaches(tuple(places.values()), references)


def _locate_members(placements: Iterable[Placement]) -> Iterator[tuple[GroupLayer, int, int]]:
    """Each layer with where its first page is, and the size of a page."""
    for place in placements:
        for at, member in enumerate(place.members):
            yield member, place.offset + at * place.layer_stride, place.page_size


def _build_regions(
    layout: str, groups: Sequence[KvCacheGroup], placements: Sequence[Placement], size: int
) -> tuple[NixlRegion, ...] | None:
    """The regions that NIXL registers; ``None`` where they are not known."""
    if _explain_unknown_regions(layout, groups) is not None:
        return None
    specs = [spec for group in groups for spec in group.specs]
    mla = any(spec.kind in MLA_KINDS for spec in specs)
    everything = NixlRegion(size, frozenset(place.members[0].group for place in placements))
    if is_block_outermost(layout) and (
        mla or not all(_is_contiguous_page(layout, spec) for spec in specs)
    ):
        return (everything,)
    apart = _count_heads(specs[0]) if layout == "LHBNC" else 1
    found: dict[tuple[int, int], set[int]] = {}
    for member, place, page in _locate_members(placements):
        found.setdefault((place, page), set()).add(member.group)
    return tuple(
        NixlRegion(page // apart, frozenset(theirs), apart) for (_, page), theirs in found.items()
    )


def _explain_unknown_regions(layout: str, groups: Iterable[KvCacheGroup]) -> str | None:
    """Why the regions that NIXL registers are not known; ``None`` where they are."""
    specs = [spec for group in groups for spec in group.specs]
    mla = {spec.kind in MLA_KINDS for spec in specs}
    if any(spec.kind == "mamba" for spec in specs):
        return "which regions NIXL registers for states"
    if len(mla) > 1:
        return "which regions NIXL registers where only some layers are MLA"
    if (
        is_block_outermost(layout)
        and True not in mla
        and len({_is_contiguous_page(layout, s) for s in specs}) > 1
    ):
        return "which regions NIXL registers where only some pages are one piece of memory"
    return None


def _is_contiguous_page(layout: str, spec: KvCacheSpec) -> bool:
    """Whether a page is one piece of memory in the order of its logical axes, and full."""
    if spec.page_size_padded is not None:
        return False
    ordered = layout == "BLHNC" or _count_heads(spec) == 1
    return ordered or (layout == "BLNHC" and _count_block_tokens(spec) == 1)


def _count_heads(spec: KvCacheSpec) -> int:
    return 1 if spec.kind == "mamba" else spec.kv_heads


def _count_block_tokens(spec: KvCacheSpec) -> int:
    return 1 if spec.kind == "mamba" else spec.block_size or 1
