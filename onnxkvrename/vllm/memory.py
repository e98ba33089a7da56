"""Where vLLM puts the pages of groups: a tensor for each slot, or one block for all.

This follows vLLM 0.24.0, ``v1/core/kv_cache_utils.py`` (``get_kv_cache_config_from_groups``,
``_use_packed_kv_cache_config``, ``_get_kv_cache_config_packed``, of vllm-project/vllm#46252),
``v1/worker/kv_connector_model_runner_mixin.py`` (``use_uniform_kv_cache``),
``prefer_cross_layer_blocks`` of the NIXL and the offloading connector,
``distributed/kv_transfer/kv_connector/v1/offloading/worker.py`` (``register_kv_caches``); and
vllm-project/vllm#37885 in its last state, which 0.24.0 does not have. With it, vLLM tries canonical
before ``use_uniform_kv_cache``, also for a single group; each group may have its own kernel blocks.

The l-th layers of all groups are in slot l. They share memory, since a block belongs to one group
at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from onnxkvrename.vllm.groups import Grouping
from onnxkvrename.vllm.nixl import (
    NixlRegistration,
    NixlTransfer,
    build_transfers,
    register_block,
    register_tensors,
)
from onnxkvrename.vllm.specs import (
    MLA_KINDS,
    Condition,
    ConditionState,
    KvCacheGroup,
    KvCacheSpec,
    ProjectionRequest,
    build_requirement,
    combine_states,
    decide_condition,
)

_V1_RUNNER_REASON = (
    "V1, as V2 has no such path; VLLM_USE_V2_MODEL_RUNNER=0 for Llama, Qwen3, Mistral, Qwen2-MoE, "
    "GraniteMoE and DeepSeek-V2, whose default is V2"
)
"""The architectures are ``DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES`` in ``config/vllm.py``."""
_CANONICAL_VERSION_REASON = (
    "a vLLM with vllm-project/vllm#37885, which takes it before cross_layers: 0.24.0 is without"
)


class GroupLayer(NamedTuple):
    """A layer of a group.

    Attributes:
        group: The number of the group, from 0.
        layer: The number of the layer.
    """

    group: int
    layer: int


class Placement(NamedTuple):
    """The place of some layers' pages in memory: vLLM's ``KVCacheTensor``.

    The page of block ``b`` of the l-th member starts at byte
    ``offset + l * layer_stride + b * block_stride``.

    Attributes:
        members: The layers. Without a `layer_stride` they share the place, which is sound
            because a block belongs to one group at a time.
        page_size: Bytes of a page.
        offset: Where the first member's block 0 starts, in bytes.
        layer_stride: Bytes from a member to the next one.
        block_stride: Bytes from a block to the next one.
    """

    members: tuple[GroupLayer, ...]
    page_size: int
    offset: int
    layer_stride: int
    block_stride: int


class CanonicalKvCacheRef(NamedTuple):
    """A layer's data in the canonical view: vLLM's ``CanonicalKVCacheRef``.

    Attributes:
        tensor: The index of the tensor.
        page_size: Bytes of the tensor's page that hold data, without padding.
    """

    tensor: int
    page_size: int


class CanonicalKvCaches(NamedTuple):
    """The canonical view of a KV cache: unique tensors of bytes.

    vLLM's ``CanonicalKVCaches`` (``v1/kv_offload/base.py``, vllm-project/vllm#37853).

    Attributes:
        tensors: The second size of each tensor of shape ``(blocks, page_size)``, in bytes.
        references: The layers' data in these tensors, for each group.
    """

    tensors: tuple[int, ...]
    references: tuple[tuple[CanonicalKvCacheRef, ...], ...]


class Allocation(NamedTuple):
    """A way in which vLLM may put the pages of groups into memory.

    An allocation that is not possible has no sizes, places or transfers.

    Attributes:
        name: vLLM's name of it.
        conditions: The conditions under which vLLM uses it.
        bytes_per_block: Bytes that one block takes in all tensors; ``None`` if not possible.
        padding_share: The part of one block of each group that holds no data, from 0 to 1.
        placements: The places of all pages.
        canonical: The canonical view; ``None`` if not possible.
        registration: What vLLM registers with NIXL; ``None`` if NIXL's connector does not use this
            allocation.
        transfers: What NIXL moves, for each prompt length.
        is_default: Whether vLLM uses it unless a setting, a backend or a connector selects another.
    """

    name: str
    conditions: tuple[Condition, ...]
    bytes_per_block: int | None = None
    padding_share: float | None = None
    placements: tuple[Placement, ...] = ()
    canonical: CanonicalKvCaches | None = None
    registration: NixlRegistration | None = None
    transfers: tuple[NixlTransfer, ...] = ()
    is_default: bool = False

    @property
    def state(self) -> ConditionState:
        """The state of all conditions together."""
        return combine_states(self.conditions)

    @property
    def is_possible(self) -> bool:
        """True if no condition fails."""
        return self.state != "not met"


def build_allocations(grouping: Grouping, request: ProjectionRequest) -> tuple[Allocation, ...]:
    """Return the ways in which vLLM can allocate the groups, each with its conditions.

    These are four, impossible ones included.
    """
    unpacked = _build_unpacked_allocation(grouping, request)
    packed = _build_packed_allocation(grouping, request)
    allocations = (
        unpacked._replace(is_default=unpacked.is_possible),
        _build_cross_layers_allocation(grouping),
        _build_canonical_allocation(grouping),
        packed._replace(is_default=not unpacked.is_possible),
    )
    return tuple(
        each._replace(
            transfers=build_transfers(grouping.groups, each.registration, request.prompt_lengths)
        )
        for each in allocations
    )


def _build_unpacked_allocation(grouping: Grouping, request: ProjectionRequest) -> Allocation:
    """Build a tensor for each slot (``get_kv_cache_config_from_groups``)."""
    is_packed_always = _is_packed_always(grouping)
    conditions = [
        decide_condition(
            "not packed",
            not is_packed_always,
            "not every group has pages of several sizes",
            why_not="vLLM packs windowed MLA always",
        )
    ]
    if len(grouping.groups) > 1 and not is_packed_always:
        conditions.append(_decide_flag(request, is_wanted=False))
    if grouping.method == "uniform_spec" and _is_all_attention(grouping.groups):
        why = "there is none, or what cross_layers needs fails"
        conditions.append(build_requirement("connector", why))
    allocation = Allocation("unpacked", tuple(conditions))
    if not allocation.is_possible:
        return allocation
    placements = _place_in_tensors(grouping)
    groups = grouping.groups
    tensors = {
        member: index for index, placement in enumerate(placements) for member in placement.members
    }
    bytes_per_block = sum(placement.page_size for placement in placements)
    return allocation._replace(
        bytes_per_block=bytes_per_block,
        padding_share=_compute_padding_share(groups, bytes_per_block),
        placements=placements,
        canonical=_build_canonical_caches(groups, tensors, (each.page_size for each in placements)),
        registration=register_tensors(groups, _list_sharing_specs(groups, placements)),
    )


def _decide_flag(request: ProjectionRequest, *, is_wanted: bool) -> Condition:
    """Return the condition that packs groups, or that does not (``_use_packed_kv_cache_config``).

    Where the request does not set the flag, it is a requirement: an allocation is shown either way.
    """
    name = "enable_cross_layers_blocks"
    if request.enable_cross_layers_blocks:
        return decide_condition("flag", is_wanted, f"{name} is set", why_not=f"{name} is set")
    return build_requirement(
        "flag", f"{name} in kv_connector_extra_config" if is_wanted else f"{name} is not set"
    )


def _build_cross_layers_allocation(grouping: Grouping) -> Allocation:
    """Build one block for all layers of the only group (``use_uniform_kv_cache``)."""
    groups = grouping.groups
    has_mla = any(spec.kind in MLA_KINDS for group in groups for spec in group.specs)
    if has_mla:
        connectors = "offloading, but not NIXL, which has no MLA here"
    else:
        connectors = (
            "NIXL with enable_cross_layers_blocks, layout HND and FLASH_ATTN, FLASHINFER or "
            "TRITON_ATTN; or offloading"
        )
    conditions = (
        decide_condition(
            "one group",
            grouping.method == "uniform_spec",
            "all layers have one spec",
            why_not="vLLM takes one group with one spec only",
        ),
        _check_attention(groups, why_not="there are states"),
        build_requirement("model runner", _V1_RUNNER_REASON),
        build_requirement("connector", f"it prefers cross-layer blocks: {connectors}"),
        build_requirement("block stride indexing", "the backend's indexes_kv_by_block_stride"),
    )
    allocation = Allocation("cross_layers", conditions)
    if not allocation.is_possible:
        return allocation
    (group,) = groups
    page_size = group.first_spec.page_size
    members = tuple(GroupLayer(0, layer) for layer in group.layers)
    placement = Placement(members, page_size, 0, page_size, group.bytes_per_block)
    filled = _fill_block_allocation(allocation, groups, (placement,))
    return filled if has_mla else _register(filled, groups)


def _build_canonical_allocation(grouping: Grouping) -> Allocation:
    """Build one block for the slots of all groups, as vllm-project/vllm#37885 proposes."""
    groups, page_size = grouping.groups, grouping.uniform_page_size
    has_equal_tensors = page_size is not None and not any(
        group.has_per_layer_specs for group in groups
    )
    conditions = (
        build_requirement("version", _CANONICAL_VERSION_REASON),
        _check_attention(groups, why_not="there are states"),
        decide_condition(
            "one page size",
            page_size is not None,
            f"all pages have {page_size} bytes",
            why_not="pages are of several sizes",
        ),
        decide_condition(
            "equal tensors",
            has_equal_tensors,
            "all are of one size",
            why_not="tensors differ in size",
        ),
        build_requirement("connector", "it supports hybrids and cross-layer blocks"),
        build_requirement("block stride indexing", "the backend's indexes_kv_by_block_stride"),
    )
    allocation = Allocation("canonical", conditions)
    if not allocation.is_possible:
        return allocation
    return _fill_block_allocation(allocation, groups, _place_in_block(groups))


def _build_packed_allocation(grouping: Grouping, request: ProjectionRequest) -> Allocation:
    """Build one block for the slots of all groups (``_get_kv_cache_config_packed``)."""
    groups = grouping.groups
    if _is_packed_always(grouping):
        why = "all groups have pages of several sizes: packed always"
        flag = Condition("flag", "met", why)
    else:
        flag = _decide_flag(request, is_wanted=True)
    conditions = (
        _check_several_groups(groups),
        flag,
        _check_attention(
            groups,
            why_not="there are states: their views ignore where the block has them, so layers "
            "overwrite each other; NIXL registers them anyway, offloading only a few",
        ),
        build_requirement("block stride indexing", "the backend reads pages at a stride"),
    )
    allocation = Allocation("packed", conditions)
    if not allocation.is_possible:
        return allocation
    return _register(_fill_block_allocation(allocation, groups, _place_in_block(groups)), groups)


def _is_packed_always(grouping: Grouping) -> bool:
    """Return whether vLLM packs without a flag, as for windowed MLA.

    This follows ``_use_packed_kv_cache_config``.
    """
    return grouping.method == "uniform_groups"


def _is_all_attention(groups: Iterable[KvCacheGroup]) -> bool:
    return all(not spec.is_state for group in groups for spec in group.specs)


def _check_attention(groups: Iterable[KvCacheGroup], *, why_not: str) -> Condition:
    return decide_condition(
        "attention", _is_all_attention(groups), "all groups are attention", why_not=why_not
    )


def _check_several_groups(groups: Sequence[KvCacheGroup]) -> Condition:
    return decide_condition(
        "several groups",
        len(groups) > 1,
        f"there are {len(groups)}",
        why_not="there is one: see cross_layers",
    )


def _fill_block_allocation(
    allocation: Allocation, groups: Sequence[KvCacheGroup], placements: tuple[Placement, ...]
) -> Allocation:
    """Fill in the memory of an allocation with one block for all layers."""
    block_stride = placements[0].block_stride
    return allocation._replace(
        bytes_per_block=block_stride,
        padding_share=_compute_padding_share(groups, block_stride),
        placements=placements,
        canonical=_build_single_tensor_caches(groups, block_stride),
    )


def _register(allocation: Allocation, groups: Sequence[KvCacheGroup]) -> Allocation:
    """Fill in what vLLM registers of an allocation with one block for all layers.

    vLLM recognizes a packed block by layers with different places. If all groups share a single
    place, vLLM registers it like an unpacked tensor.
    """
    placements = allocation.placements
    if len(groups) > 1 and len(placements) == 1:
        registration = register_tensors(groups, _list_sharing_specs(groups, placements))
    else:
        registration = register_block(
            groups, placements[0].block_stride, is_packed=allocation.name == "packed"
        )
    return allocation._replace(registration=registration)


def _list_sharing_specs(
    groups: Sequence[KvCacheGroup], placements: Iterable[Placement]
) -> list[list[KvCacheSpec]]:
    """Return the specs of the layers at each place."""
    specs = _index_specs(groups)
    return [[specs[member] for member in placement.members] for placement in placements]


def _place_in_tensors(grouping: Grouping) -> tuple[Placement, ...]:
    """Place pages in a tensor for each slot, or for each layer where pages differ in size."""
    groups = grouping.groups
    if grouping.method == "uniform_type":
        return tuple(
            Placement((GroupLayer(0, spec.layer),), spec.page_size, 0, 0, spec.page_size)
            for spec in groups[0].specs
        )
    page_size = groups[0].first_spec.page_size
    (slots,) = _list_slots_by_page_size(groups).values()
    return tuple(Placement(tuple(members), page_size, 0, 0, page_size) for members in slots)


def _place_in_block(groups: Iterable[KvCacheGroup]) -> tuple[Placement, ...]:
    """Place the slots of all page sizes side by side in a block."""
    slots = [
        (page_size, members)
        for page_size, page_slots in _list_slots_by_page_size(groups).items()
        for members in page_slots
    ]
    block_stride = sum(page_size for page_size, _ in slots)
    placements = list[Placement]()
    offset = 0
    for page_size, members in slots:
        placements.append(Placement(tuple(members), page_size, offset, 0, block_stride))
        offset += page_size
    return tuple(placements)


def _list_slots_by_page_size(groups: Iterable[KvCacheGroup]) -> dict[int, list[list[GroupLayer]]]:
    """Return the layers in each slot, by page size (``_bucket_layers_by_page_size``).

    For each page size, the layers of a group are numbered from slot 0.
    """
    slots: dict[int, list[list[GroupLayer]]] = {}
    for group_index, group in enumerate(groups):
        slot_counts: dict[int, int] = {}
        for spec in group.specs:
            slot_index = slot_counts.get(spec.page_size, 0)
            slot_counts[spec.page_size] = slot_index + 1
            page_slots = slots.setdefault(spec.page_size, [])
            if slot_index == len(page_slots):
                page_slots.append([])
            page_slots[slot_index].append(GroupLayer(group_index, spec.layer))
    return slots


def _compute_padding_share(groups: Sequence[KvCacheGroup], bytes_per_block: int) -> float:
    """Return the share of padding in one block for each group, from 0 to 1 with 6 decimals.

    One block takes `bytes_per_block` in all tensors together.
    """
    data_bytes = sum(spec.unpadded_page_size for group in groups for spec in group.specs)
    return round(1 - data_bytes / (bytes_per_block * len(groups)), 6)


def _index_specs(groups: Iterable[KvCacheGroup]) -> dict[GroupLayer, KvCacheSpec]:
    """Return the specs of all layers, in the order of the groups."""
    return {
        GroupLayer(group_index, spec.layer): spec
        for group_index, group in enumerate(groups)
        for spec in group.specs
    }


def _build_canonical_caches(
    groups: Iterable[KvCacheGroup], tensors: Mapping[GroupLayer, int], page_sizes: Iterable[int]
) -> CanonicalKvCaches:
    """Return the canonical view of tensors, from the index of each layer's tensor."""
    references = tuple(
        tuple(
            CanonicalKvCacheRef(
                tensors[GroupLayer(group_index, spec.layer)], spec.unpadded_page_size
            )
            for spec in group.specs
        )
        for group_index, group in enumerate(groups)
    )
    return CanonicalKvCaches(tuple(page_sizes), references)


def _build_single_tensor_caches(
    groups: Sequence[KvCacheGroup], block_stride: int
) -> CanonicalKvCaches:
    """Return the canonical view of blocks with all layers: one tensor for all groups.

    The block stride is in bytes.
    """
    reference = CanonicalKvCacheRef(0, block_stride)
    return CanonicalKvCaches((block_stride,), tuple((reference,) for _ in groups))
