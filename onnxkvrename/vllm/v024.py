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
from onnxkvrename.vllm.nixl import NixlTransfer, count_blocks, transfer_v024
from onnxkvrename.vllm.specs import MLA_KINDS, Condition, ConditionState
from onnxkvrename.vllm.uniform_specs import KvCacheGroup


class GroupLayer(NamedTuple):
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

    members: tuple[GroupLayer, ...]
    page_size: int
    offset: int
    layer_stride: int
    block_stride: int
    per_block: bool = False


class CanonicalKvCacheRef(NamedTuple):
    """A layer's data in the canonical view: a tensor, and the bytes that count of its pages."""

    tensor: int
    page_size: int


class CanonicalKvCaches(NamedTuple):
    """The canonical view: unique tensors of ``(blocks, page_size)`` bytes, by their page sizes.

    ``references`` has those of each group.
    """

    tensors: tuple[int, ...]
    references: tuple[tuple[CanonicalKvCacheRef, ...], ...]


class Allocation(NamedTuple):
    """A way of putting the pages of groups into memory.

    ``grouping`` is the number of the grouping that it goes by; ``padding_share``
    the part of a block that holds nothing, over one block of each group. ``default`` says
    that vLLM takes it unless something asks for another. What is not known is ``None``,
    and of what is not possible nothing is said.
    """

    name: str
    state: ConditionState
    conditions: tuple[Condition, ...]
    grouping: int
    bytes_per_block: int | None = None
    padding_share: float | None = None
    placements: tuple[Placement, ...] = ()
    canonical: CanonicalKvCaches | None = None
    transfers: tuple[NixlTransfer, ...] = ()
    default: bool = False


def combine_states(conditions: Iterable[Condition]) -> ConditionState:
    """Of all conditions together."""
    states = {condition.state for condition in conditions}
    return "not met" if "not met" in states else "requires" if "requires" in states else "met"


def decide_condition(name: str, met: bool, why: str, *, otherwise: str) -> Condition:
    """A condition that the graph decides."""
    return Condition(name, "met" if met else "not met", why if met else otherwise)


def build_requirement(name: str, why: str) -> Condition:
    """A condition that the graph cannot decide."""
    return Condition(name, "requires", why)


def build_allocations_v024(grouping: Grouping, tokens: tuple[int, ...]) -> tuple[Allocation, ...]:
    """What 0.24 can make of the groups, each with its conditions."""
    if not grouping.groups:
        return ()
    unpacked = _build_unpacked_allocation(grouping, tokens)
    packed = _build_packed_allocation(grouping, tokens)
    possible = unpacked.state != "not met"
    return (
        unpacked._replace(default=possible),
        _build_cross_layers_allocation(grouping, tokens),
        _build_canonical_allocation(grouping),
        packed._replace(default=not possible),
    )


def compute_padding_share(groups: Sequence[KvCacheGroup], bytes_per_block: int) -> float:
    """The part that holds nothing, of one block for each group."""
    held = sum(spec.unpadded_page_size for group in groups for spec in group.specs)
    return round(1 - held / (bytes_per_block * len(groups)), 6)


def build_single_tensor_caches(groups: tuple[KvCacheGroup, ...], stride: int) -> CanonicalKvCaches:
    """The view of blocks that hold everything: one tensor, which every group refers to."""
    return CanonicalKvCaches((stride,), tuple((CanonicalKvCacheRef(0, stride),) for _ in groups))


def _build_unpacked_allocation(grouping: Grouping, tokens: tuple[int, ...]) -> Allocation:
    """A tensor for each place in a group; the layers there share it."""
    always = grouping.method == "uniform_groups"
    why = "not every group has pages of several sizes"
    conditions = [
        decide_condition(
            "not packed", not always, why, otherwise="vLLM 0.24 packs windowed MLA always"
        )
    ]
    if len(grouping.groups) > 1 and not always:
        conditions.append(build_requirement("flag", "enable_cross_layers_blocks is not set"))
    if grouping.method == "uniform_spec" and _is_all_attention(grouping.groups):
        conditions.append(
            build_requirement("connector", "there is none, or what cross_layers needs fails")
        )
    placements = tuple(_build_unpacked_placements(grouping)) if not always else ()
    return _build_allocation("unpacked", grouping, conditions, placements, None, tokens)


def _build_cross_layers_allocation(grouping: Grouping, tokens: tuple[int, ...]) -> Allocation:
    """All layers of the only group in one block; NIXL takes none of MLA's backends."""
    groups = grouping.groups
    one = grouping.method == "uniform_spec"
    attention = _is_all_attention(groups)
    mla = any(spec.kind in MLA_KINDS for group in groups for spec in group.specs)
    nixl = (
        "NIXL with enable_cross_layers_blocks, layout HND and FLASH_ATTN, FLASHINFER or TRITON_ATTN"
    )
    asks = "offloading, but not NIXL, which has no MLA here" if mla else f"{nixl}; or offloading"
    conditions = (
        decide_condition(
            "one group",
            one,
            "all layers have one spec",
            otherwise="vLLM 0.24 takes one group with one spec only",
        ),
        decide_condition(
            "attention", attention, "all groups are attention", otherwise="there are states"
        ),
        build_requirement("connector", f"it prefers cross-layer blocks: {asks}"),
        build_requirement("block stride indexing", "the backend's indexes_kv_by_block_stride"),
    )
    stride = sum(group.bytes_per_block for group in groups) if one else None
    placements = _build_cross_layers_placements(grouping) if one else ()
    moved_for = () if mla else tokens
    return _build_allocation("cross_layers", grouping, conditions, placements, stride, moved_for)


def _build_canonical_allocation(grouping: Grouping) -> Allocation:
    """One block for the places of all groups, as proposed for hybrids of attention."""
    groups, page = grouping.groups, grouping.uniform_page_size
    attention = _is_all_attention(groups)
    equal = page is not None and not any(group.has_per_layer_specs for group in groups)
    conditions = (
        build_requirement("version", "a vLLM with vllm-project/vllm#37885: 0.24.0 is without"),
        decide_condition(
            "several groups",
            len(groups) > 1,
            f"there are {len(groups)}",
            otherwise="there is one: see cross_layers",
        ),
        decide_condition(
            "attention", attention, "all groups are attention", otherwise="there are states"
        ),
        decide_condition(
            "one page size",
            page is not None,
            f"all pages have {page} bytes",
            otherwise="pages are of several sizes",
        ),
        decide_condition(
            "equal tensors", equal, "all are of one size", otherwise="tensors differ in size"
        ),
        build_requirement("connector", "it supports hybrids and cross-layer blocks"),
        build_requirement("block stride indexing", "the backend's indexes_kv_by_block_stride"),
    )
    found = combine_states(conditions) != "not met"
    stride = page * grouping.group_size if found and page is not None else None
    placements = _build_slot_placements(grouping, stride) if stride is not None else ()
    return _build_allocation("canonical", grouping, conditions, placements, stride, ())


def _build_packed_allocation(grouping: Grouping, tokens: tuple[int, ...]) -> Allocation:
    """One block for the places of all groups, by page size and place."""
    groups = grouping.groups
    always = grouping.method == "uniform_groups"
    gate = (
        Condition("flag", "met", "all groups have pages of several sizes: packed always")
        if always
        else build_requirement("flag", "enable_cross_layers_blocks in kv_connector_extra_config")
    )
    conditions = (
        decide_condition(
            "several groups",
            len(groups) > 1,
            f"there are {len(groups)}",
            otherwise="there is one: see cross_layers",
        ),
        gate,
        decide_condition(
            "attention",
            _is_all_attention(groups),
            "all groups are attention",
            otherwise="there are states: neither NIXL nor offloading takes them packed",
        ),
        build_requirement("block stride indexing", "the backend reads pages at a stride"),
    )
    found = combine_states(conditions) != "not met"
    stride = _compute_packed_stride(groups) if found else None
    placements = _build_slot_placements(grouping, stride) if stride is not None else ()
    return _build_allocation("packed", grouping, conditions, placements, stride, tokens)


def _is_all_attention(groups: Iterable[KvCacheGroup]) -> bool:
    return all(spec.kind != "mamba" for group in groups for spec in group.specs)


def _build_allocation(
    name: str,
    grouping: Grouping,
    conditions: Iterable[Condition],
    placements: tuple[Placement, ...],
    stride: int | None,
    tokens: tuple[int, ...],
) -> Allocation:
    """An arrangement; ``stride`` is that of blocks that hold everything."""
    conditions = tuple(conditions)
    state = combine_states(conditions)
    if state == "not met":
        return Allocation(name, state, conditions, 0)
    groups = grouping.groups
    size = stride if stride is not None else sum(place.page_size for place in placements)
    view = (
        build_single_tensor_caches(groups, size)
        if stride is not None
        else _build_canonical_caches(groups, placements)
    )
    pages = tuple(place.page_size for place in placements)
    transfers = tuple(
        transfer_v024(count, count_blocks(groups, count), groups, pages, stride) for count in tokens
    )
    return Allocation(
        name,
        state,
        conditions,
        0,
        size,
        compute_padding_share(groups, size),
        placements,
        view,
        transfers,
    )


def _build_unpacked_placements(grouping: Grouping) -> Iterator[Placement]:
    if grouping.method == "uniform_type":
        for spec in grouping.groups[0].specs:
            yield Placement((GroupLayer(0, spec.layer),), spec.page_size, 0, 0, spec.page_size)
        return
    page = grouping.groups[0].first_spec.page_size
    for at in range(grouping.group_size):
        yield Placement(tuple(_list_members_at(grouping.groups, at)), page, 0, 0, page)


def _list_members_at(groups: Iterable[KvCacheGroup], at: int) -> Iterator[GroupLayer]:
    """The layers that stand at one place of their groups."""
    for number, group in enumerate(groups):
        if at < len(group.specs):
            yield GroupLayer(number, group.specs[at].layer)


def _build_cross_layers_placements(grouping: Grouping) -> tuple[Placement, ...]:
    (group,) = grouping.groups
    page = group.first_spec.page_size
    members = tuple(GroupLayer(0, layer) for layer in group.layers)
    return (Placement(members, page, 0, page, group.bytes_per_block),)


def _group_by_slot(groups: Iterable[KvCacheGroup]) -> dict[int, list[list[GroupLayer]]]:
    """The layers that share a place, by page size; each size starts at its own place 0."""
    slots: dict[int, list[list[GroupLayer]]] = {}
    for number, group in enumerate(groups):
        taken: dict[int, int] = {}
        for spec in group.specs:
            at = taken.get(spec.page_size, 0)
            taken[spec.page_size] = at + 1
            found = slots.setdefault(spec.page_size, [])
            if at == len(found):
                found.append([])
            found[at].append(GroupLayer(number, spec.layer))
    return slots


def _compute_packed_stride(groups: Iterable[KvCacheGroup]) -> int:
    return sum(page * len(slots) for page, slots in _group_by_slot(groups).items())


def _build_slot_placements(grouping: Grouping, stride: int) -> tuple[Placement, ...]:
    found = list[Placement]()
    offset = 0
    for page, slots in _group_by_slot(grouping.groups).items():
        for members in slots:
            found.append(Placement(tuple(members), page, offset, 0, stride))
            offset += page
    return tuple(found)


def _build_canonical_caches(
    groups: tuple[KvCacheGroup, ...], placements: tuple[Placement, ...]
) -> CanonicalKvCaches:
    """A tensor for each placement, and of each layer what is not padding."""
    tensors = {member: at for at, place in enumerate(placements) for member in place.members}
    references = tuple(
        tuple(
            CanonicalKvCacheRef(tensors[GroupLayer(at, spec.layer)], spec.unpadded_page_size)
            for spec in group.specs
        )
        for at, group in enumerate(groups)
    )
    return CanonicalKvCaches(tuple(place.page_size for place in placements), references)
