"""Where vLLM 0.24 puts the pages of groups: a tensor for each place, or one block for all.

After vLLM 0.24.0: ``v1/core/kv_cache_utils.py`` (``get_kv_cache_config_from_groups``,
``_use_packed_kv_cache_config``, ``_get_kv_cache_config_packed``),
``v1/worker/kv_connector_model_runner_mixin.py`` (``use_uniform_kv_cache``),
``prefer_cross_layer_blocks`` of the NIXL and the offloading connector,
``distributed/kv_transfer/kv_connector/v1/offloading/worker.py`` (``CanonicalKVCaches``); and
vllm-project/vllm#37885, which 0.24.0 does not have.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from onnxkvrename.vllm.groups import Grouping
from onnxkvrename.vllm.nixl import Transfer, blocks_of, moved
from onnxkvrename.vllm.specs import MLA, Condition, State
from onnxkvrename.vllm.uniform_specs import Group


class Member(NamedTuple):
    """A layer, by its group's number and its own."""

    group: int
    layer: int


class Placement(NamedTuple):
    """Where pages are: vLLM's ``KVCacheTensor``.

    Block b of the l-th member starts at ``offset + l * layer_stride + b *
    block_stride`` bytes; without a ``layer_stride`` all members share the
    place. ``per_block`` says that ``offset`` and ``layer_stride`` are times the
    number of blocks.
    """

    members: tuple[Member, ...]
    page_size: int
    offset: int
    layer_stride: int
    block_stride: int
    per_block: bool = False


class Reference(NamedTuple):
    """A layer's data in the canonical view: a tensor, and the bytes that count of its pages."""

    tensor: int
    page_size: int


class Canonical(NamedTuple):
    """The canonical view: unique tensors of ``(blocks, page_size)`` bytes, by their page sizes.

    ``references`` has those of each group.
    """

    tensors: tuple[int, ...]
    references: tuple[tuple[Reference, ...], ...]


class Arrangement(NamedTuple):
    """A way of putting the pages of groups into memory.

    ``grouping`` is the number of the grouping that it goes by; ``padding_share``
    the part of a block that holds nothing, over one block of each group. ``default`` says
    that vLLM takes it unless something asks for another. What is not known is ``None``,
    and of what is not possible nothing is said.
    """

    name: str
    state: State
    conditions: tuple[Condition, ...]
    grouping: int
    bytes_per_block: int | None = None
    padding_share: float | None = None
    placements: tuple[Placement, ...] = ()
    canonical: Canonical | None = None
    transfers: tuple[Transfer, ...] = ()
    default: bool = False


def state_of(conditions: Iterable[Condition]) -> State:
    """Of all conditions together."""
    states = {condition.state for condition in conditions}
    return "not met" if "not met" in states else "requires" if "requires" in states else "met"


def judged(name: str, met: bool, why: str, *, otherwise: str) -> Condition:
    """A condition that the graph decides."""
    return Condition(name, "met" if met else "not met", why if met else otherwise)


def requires(name: str, why: str) -> Condition:
    """A condition that the graph cannot decide."""
    return Condition(name, "requires", why)


def arrangements(grouping: Grouping, tokens: tuple[int, ...]) -> tuple[Arrangement, ...]:
    """What 0.24 can make of the groups, each with its conditions."""
    if not grouping.groups:
        return ()
    unpacked = _unpacked(grouping, tokens)
    packed = _packed(grouping, tokens)
    possible = unpacked.state != "not met"
    return (
        unpacked._replace(default=possible),
        _cross_layers(grouping, tokens),
        _canonical(grouping),
        packed._replace(default=not possible),
    )


def padding_share(groups: Sequence[Group], bytes_per_block: int) -> float:
    """The part that holds nothing, of one block for each group."""
    held = sum(spec.unpadded for group in groups for spec in group.specs)
    return round(1 - held / (bytes_per_block * len(groups)), 6)


def whole_block(groups: tuple[Group, ...], stride: int) -> Canonical:
    """The view of blocks that hold everything: one tensor, which every group refers to."""
    return Canonical((stride,), tuple((Reference(0, stride),) for _ in groups))


def _unpacked(grouping: Grouping, tokens: tuple[int, ...]) -> Arrangement:
    """A tensor for each place in a group; the layers there share it."""
    always = grouping.way == "uniform_groups"
    why = "not every group has pages of several sizes"
    conditions = [
        judged("not packed", not always, why, otherwise="vLLM 0.24 packs windowed MLA always")
    ]
    if len(grouping.groups) > 1 and not always:
        conditions.append(requires("flag", "enable_cross_layers_blocks is not set"))
    if grouping.way == "uniform_spec" and _all_attention(grouping.groups):
        conditions.append(requires("connector", "there is none, or what cross_layers needs fails"))
    placements = tuple(_places(grouping)) if not always else ()
    return _arrangement("unpacked", grouping, conditions, placements, None, tokens)


def _cross_layers(grouping: Grouping, tokens: tuple[int, ...]) -> Arrangement:
    """All layers of the only group in one block; NIXL takes none of MLA's backends."""
    groups = grouping.groups
    one = grouping.way == "uniform_spec"
    attention = _all_attention(groups)
    mla = any(spec.kind in MLA for group in groups for spec in group.specs)
    nixl = (
        "NIXL with enable_cross_layers_blocks, layout HND and FLASH_ATTN, FLASHINFER or TRITON_ATTN"
    )
    asks = "offloading, but not NIXL, which has no MLA here" if mla else f"{nixl}; or offloading"
    conditions = (
        judged(
            "one group",
            one,
            "all layers have one spec",
            otherwise="vLLM 0.24 takes one group with one spec only",
        ),
        judged("attention", attention, "all groups are attention", otherwise="there are states"),
        requires("connector", f"it prefers cross-layer blocks: {asks}"),
        requires("block stride indexing", "the backend's indexes_kv_by_block_stride"),
    )
    stride = sum(group.bytes_per_block for group in groups) if one else None
    placements = _side_by_side(grouping) if one else ()
    moved_for = () if mla else tokens
    return _arrangement("cross_layers", grouping, conditions, placements, stride, moved_for)


def _canonical(grouping: Grouping) -> Arrangement:
    """One block for the places of all groups, as proposed for hybrids of attention."""
    groups, page = grouping.groups, grouping.uniform_page_size
    attention = _all_attention(groups)
    equal = page is not None and not any(group.mixed for group in groups)
    conditions = (
        requires("version", "a vLLM with vllm-project/vllm#37885: 0.24.0 is without"),
        judged(
            "several groups",
            len(groups) > 1,
            f"there are {len(groups)}",
            otherwise="there is one: see cross_layers",
        ),
        judged("attention", attention, "all groups are attention", otherwise="there are states"),
        judged(
            "one page size",
            page is not None,
            f"all pages have {page} bytes",
            otherwise="pages are of several sizes",
        ),
        judged("equal tensors", equal, "all are of one size", otherwise="tensors differ in size"),
        requires("connector", "it supports hybrids and cross-layer blocks"),
        requires("block stride indexing", "the backend's indexes_kv_by_block_stride"),
    )
    found = state_of(conditions) != "not met"
    stride = page * grouping.group_size if found and page is not None else None
    placements = _slots(grouping, stride) if stride is not None else ()
    return _arrangement("canonical", grouping, conditions, placements, stride, ())


def _packed(grouping: Grouping, tokens: tuple[int, ...]) -> Arrangement:
    """One block for the places of all groups, by page size and place."""
    groups = grouping.groups
    always = grouping.way == "uniform_groups"
    gate = (
        Condition("flag", "met", "all groups have pages of several sizes: packed always")
        if always
        else requires("flag", "enable_cross_layers_blocks in kv_connector_extra_config")
    )
    conditions = (
        judged(
            "several groups",
            len(groups) > 1,
            f"there are {len(groups)}",
            otherwise="there is one: see cross_layers",
        ),
        gate,
        judged(
            "attention",
            _all_attention(groups),
            "all groups are attention",
            otherwise="there are states: neither NIXL nor offloading takes them packed",
        ),
        requires("block stride indexing", "the backend reads pages at a stride"),
    )
    found = state_of(conditions) != "not met"
    stride = _packed_stride(groups) if found else None
    placements = _slots(grouping, stride) if stride is not None else ()
    return _arrangement("packed", grouping, conditions, placements, stride, tokens)


def _all_attention(groups: Iterable[Group]) -> bool:
    return all(spec.kind != "mamba" for group in groups for spec in group.specs)


def _arrangement(
    name: str,
    grouping: Grouping,
    conditions: Iterable[Condition],
    placements: tuple[Placement, ...],
    stride: int | None,
    tokens: tuple[int, ...],
) -> Arrangement:
    """An arrangement; ``stride`` is that of blocks that hold everything."""
    conditions = tuple(conditions)
    state = state_of(conditions)
    if state == "not met":
        return Arrangement(name, state, conditions, 0)
    groups = grouping.groups
    size = stride if stride is not None else sum(place.page_size for place in placements)
    view = whole_block(groups, size) if stride is not None else _view(groups, placements)
    pages = tuple(place.page_size for place in placements)
    transfers = tuple(
        moved(count, blocks_of(groups, count), groups, pages, stride) for count in tokens
    )
    return Arrangement(
        name, state, conditions, 0, size, padding_share(groups, size), placements, view, transfers
    )


def _places(grouping: Grouping) -> Iterator[Placement]:
    if grouping.way == "uniform_type":
        for spec in grouping.groups[0].specs:
            yield Placement((Member(0, spec.layer),), spec.page, 0, 0, spec.page)
        return
    page = grouping.groups[0].first.page
    for at in range(grouping.group_size):
        yield Placement(tuple(_at(grouping.groups, at)), page, 0, 0, page)


def _at(groups: Iterable[Group], at: int) -> Iterator[Member]:
    """The layers that stand at one place of their groups."""
    for number, group in enumerate(groups):
        if at < len(group.specs):
            yield Member(number, group.specs[at].layer)


def _side_by_side(grouping: Grouping) -> tuple[Placement, ...]:
    (group,) = grouping.groups
    page = group.first.page
    members = tuple(Member(0, layer) for layer in group.layers)
    return (Placement(members, page, 0, page, group.bytes_per_block),)


def _by_slot(groups: Iterable[Group]) -> dict[int, list[list[Member]]]:
    """The layers that share a place, by page size; each size starts at its own place 0."""
    slots: dict[int, list[list[Member]]] = {}
    for number, group in enumerate(groups):
        taken: dict[int, int] = {}
        for spec in group.specs:
            at = taken.get(spec.page, 0)
            taken[spec.page] = at + 1
            found = slots.setdefault(spec.page, [])
            if at == len(found):
                found.append([])
            found[at].append(Member(number, spec.layer))
    return slots


def _packed_stride(groups: Iterable[Group]) -> int:
    return sum(page * len(slots) for page, slots in _by_slot(groups).items())


def _slots(grouping: Grouping, stride: int) -> tuple[Placement, ...]:
    found = list[Placement]()
    offset = 0
    for page, slots in _by_slot(grouping.groups).items():
        for members in slots:
            found.append(Placement(tuple(members), page, offset, 0, stride))
            offset += page
    return tuple(found)


def _view(groups: tuple[Group, ...], placements: tuple[Placement, ...]) -> Canonical:
    """A tensor for each placement, and of each layer what is not padding."""
    tensors = {member: at for at, place in enumerate(placements) for member in place.members}
    references = tuple(
        tuple(Reference(tensors[Member(at, spec.layer)], spec.unpadded) for spec in group.specs)
        for at, group in enumerate(groups)
    )
    return Canonical(tuple(place.page_size for place in placements), references)
