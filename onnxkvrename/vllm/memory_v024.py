"""The ways in which vLLM 0.24 allocates groups: a tensor for each slot, or one block for all.

This follows 0.24.0, ``v1/core/kv_cache_utils.py`` (``get_kv_cache_config_from_groups``,
``_use_packed_kv_cache_config``, ``_get_kv_cache_config_packed``),
``v1/worker/kv_connector_model_runner_mixin.py`` (``use_uniform_kv_cache``),
``prefer_cross_layer_blocks`` of the NIXL and the offloading connector,
``distributed/kv_transfer/kv_connector/v1/offloading/worker.py`` (``register_kv_caches``); and
vllm-project/vllm#37885 in its last state, which 0.24.0 does not have. With it, vLLM tries canonical
before ``use_uniform_kv_cache``, also for a single group; each group may have its own kernel blocks.

The l-th layers of all groups are in slot l. They share memory, since a block belongs to one group
at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from onnxkvrename.vllm.groups import Grouping
from onnxkvrename.vllm.memory import (
    Allocation,
    GroupLayer,
    Placement,
    build_canonical_caches,
    build_single_tensor_caches,
    compute_padding_share,
    index_specs,
)
from onnxkvrename.vllm.nixl_v024 import register_block, register_tensors
from onnxkvrename.vllm.specs import (
    MLA_KINDS,
    Condition,
    KvCacheGroup,
    KvCacheSpec,
    build_requirement,
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


def build_allocations_v024(grouping: Grouping) -> tuple[Allocation, ...]:
    """Return the ways in which 0.24 can allocate the groups, each with its conditions.

    These are four, impossible ones included; none if there are no groups.
    """
    if not grouping.groups:
        return ()
    unpacked = _build_unpacked_allocation(grouping)
    packed = _build_packed_allocation(grouping)
    return (
        unpacked._replace(is_default=unpacked.is_possible),
        _build_cross_layers_allocation(grouping),
        _build_canonical_allocation(grouping),
        packed._replace(is_default=not unpacked.is_possible),
    )


def _build_unpacked_allocation(grouping: Grouping) -> Allocation:
    """Build a tensor for each slot (``get_kv_cache_config_from_groups``)."""
    is_packed_always = _is_packed_always(grouping)
    conditions = [
        decide_condition(
            "not packed",
            not is_packed_always,
            "not every group has pages of several sizes",
            why_not="vLLM 0.24 packs windowed MLA always",
        )
    ]
    if len(grouping.groups) > 1 and not is_packed_always:
        conditions.append(build_requirement("flag", "enable_cross_layers_blocks is not set"))
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
        padding_share=compute_padding_share(groups, bytes_per_block),
        placements=placements,
        canonical=build_canonical_caches(groups, tensors, (each.page_size for each in placements)),
        registration=register_tensors(groups, _list_sharing_specs(groups, placements)),
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
            why_not="vLLM 0.24 takes one group with one spec only",
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


def _build_packed_allocation(grouping: Grouping) -> Allocation:
    """Build one block for the slots of all groups (``_get_kv_cache_config_packed``)."""
    groups = grouping.groups
    if _is_packed_always(grouping):
        why = "all groups have pages of several sizes: packed always"
        flag = Condition("flag", "met", why)
    else:
        why = "enable_cross_layers_blocks in kv_connector_extra_config"
        flag = build_requirement("flag", why)
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
        padding_share=compute_padding_share(groups, block_stride),
        placements=placements,
        canonical=build_single_tensor_caches(groups, block_stride),
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
    specs = index_specs(groups)
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
