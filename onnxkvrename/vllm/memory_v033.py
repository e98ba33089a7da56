"""The ways in which vLLM 0.33 allocates groups: one allocation, in the order of a memory layout.

This follows 0.33.0: ``v1/kv_cache_layout.py``, ``v1/kv_cache_interface.py``
(``compute_layout_strides``), ``v1/core/kv_cache_planning.py``
(``get_kv_cache_config_from_groups``, ``validate_kv_cache_layout``),
``v1/attention/backends/utils.py`` (``resolve_kv_cache_layout``,
``get_supported_kv_cache_layouts``), and the offloading and NIXL connectors. It assumes that no
layer requires an alignment of its blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from onnxkvrename.vllm.groups import Grouping
from onnxkvrename.vllm.memory import (
    Allocation,
    CanonicalKvCaches,
    GroupLayer,
    Placement,
    build_canonical_caches,
    build_single_tensor_caches,
    compute_padding_share,
    index_specs,
    is_block_outermost,
)
from onnxkvrename.vllm.nixl_v033 import register_layers
from onnxkvrename.vllm.specs import (
    Condition,
    KvCacheGroup,
    KvCacheSpec,
    build_requirement,
    decide_condition,
)

KV_CACHE_LAYOUTS = ("LBNHC", "LBHNC", "BLNHC", "BLHNC", "BHLNC", "LHBNC")
"""Orders of layer, block, head, token and content, outermost first, in vLLM's order of preference.

vLLM uses the first one unless an attention backend, a connector or the user selects another.
"""

_REMOVED_ALLOCATIONS = ("canonical", "packed")
_REMOVAL_REASON = "vLLM 0.33 has none: in a layout with B outermost one block holds all layers"


def build_allocations_v033(
    specs: Sequence[KvCacheSpec],
    layer_outermost: Grouping,
    block_outermost: Grouping,
    gpu_memory: int | None = None,
) -> tuple[Allocation, ...]:
    """Return the allocation of the groups in each memory layout, impossible ones included.

    Each allocation that only 0.24 has is impossible. There are none if there are no groups. The
    specs are those before grouping changes their blocks; the groupings, for layouts with layers and
    with blocks outermost, have the indexes 0 and 1. The memory is what a GPU has for KV caches, in
    bytes; it decides whether vLLM tells regions apart.
    """
    groupings = (layer_outermost, block_outermost)
    if not any(grouping.groups for grouping in groupings):
        return ()
    removal = (Condition("version", "not met", _REMOVAL_REASON),)
    return (
        *(_build_allocation(name, specs, groupings, gpu_memory) for name in KV_CACHE_LAYOUTS),
        *(Allocation(name, removal) for name in _REMOVED_ALLOCATIONS),
    )


def _is_block_compact(layout: str) -> bool:
    """Return whether a page is one piece of memory (``KVCacheLayout.is_block_compact``)."""
    return set(layout[:2]) == {"L", "B"}


def _build_allocation(
    layout: str,
    specs: Sequence[KvCacheSpec],
    groupings: tuple[Grouping, Grouping],
    gpu_memory: int | None,
) -> Allocation:
    grouping_index = int(is_block_outermost(layout))
    grouping = groupings[grouping_index]
    allocation = Allocation(
        layout,
        tuple(_list_conditions(layout, specs, grouping)),
        grouping_index,
        is_default=layout == KV_CACHE_LAYOUTS[0],
    )
    if not allocation.is_possible:
        return allocation
    groups = grouping.groups
    bytes_per_block = max(group.bytes_per_block for group in groups)
    placements = tuple(_place_groups(layout, groups, bytes_per_block))
    num_blocks = None if gpu_memory is None else gpu_memory // bytes_per_block
    return allocation._replace(
        bytes_per_block=bytes_per_block,
        padding_share=compute_padding_share(groups, bytes_per_block),
        placements=placements,
        canonical=_build_canonical_caches(layout, groups, placements),
        registration=register_layers(layout, groups, placements, bytes_per_block, num_blocks),
    )


def _list_conditions(
    layout: str, specs: Iterable[KvCacheSpec], grouping: Grouping
) -> Iterator[Condition]:
    """Yield the conditions of a layout.

    ``resolve_kv_cache_layout`` decides "pages alike" for the specs before they are grouped,
    ``validate_kv_cache_layout`` decides "one page size" for the groups.
    """
    if grouping.refusal is not None:
        yield Condition("groups", "not met", grouping.refusal.reason)
        return
    is_compact = _is_block_compact(layout)
    page_shapes = {
        (_count_heads(spec), _count_block_tokens(spec), spec.page_size) for spec in specs
    }
    are_alike = len(page_shapes) == 1
    yield decide_condition(
        "pages alike",
        are_alike or is_compact,
        "pages are alike" if are_alike else "a page is one piece of memory",
        why_not="pages differ in heads, tokens or size, and are not one piece of memory",
    )
    takes_several_sizes = is_compact and (is_block_outermost(layout) or len(grouping.groups) == 1)
    yield decide_condition(
        "one page size",
        grouping.uniform_page_size is not None or takes_several_sizes,
        "all groups fit into the same memory",
        why_not="pages are of several sizes, and not side by side in a block",
    )
    if layout == KV_CACHE_LAYOUTS[0]:
        why = "no attention backend, no connector and no VLLM_KV_CACHE_LAYOUT asks for another"
    else:
        why = "all attention backends take it, and they, a connector or the user ask for it"
    yield build_requirement("layout", why)
    yield build_requirement(
        "page content", "the backend stores key and value as they are, unaligned"
    )


def _place_groups(
    layout: str, groups: Iterable[KvCacheGroup], bytes_per_block: int
) -> Iterator[Placement]:
    """Place each group from byte 0 on, layers with equal specs together.

    This follows ``get_kv_cache_config_from_groups`` and ``compute_layout_strides``.
    """
    for group_index, group in enumerate(groups):
        offset = 0
        for specs in _bucket_equal_specs(group):
            page_size = specs[0].page_size
            # Where heads are outside of layers or blocks, a stride covers one head only.
            stride = page_size if _is_block_compact(layout) else page_size // _count_heads(specs[0])
            members = tuple(GroupLayer(group_index, spec.layer) for spec in specs)
            if is_block_outermost(layout):
                yield Placement(members, page_size, offset, stride, bytes_per_block)
            else:
                yield Placement(members, page_size, offset, page_size, stride, per_block=True)
            offset += len(specs) * page_size


def _bucket_equal_specs(group: KvCacheGroup) -> list[list[KvCacheSpec]]:
    if not group.has_per_layer_specs:
        return [list(group.specs)]
    buckets: dict[KvCacheSpec, list[KvCacheSpec]] = {}
    for spec in group.specs:
        buckets.setdefault(spec.without_layer, []).append(spec)
    return list(buckets.values())


def _build_canonical_caches(
    layout: str, groups: Sequence[KvCacheGroup], placements: Sequence[Placement]
) -> CanonicalKvCaches | None:
    """Build the offloading connector's view; ``None`` where it is not known.

    If a block has more than one page, there is one tensor of blocks. Otherwise layers whose pages
    start at the same place share a tensor; tensors are numbered in the order of the groups.
    """
    specs = index_specs(groups)
    if layout == "LHBNC" and any(_count_heads(spec) > 1 for spec in specs.values()):
        return None
    block_stride = placements[0].block_stride
    strided = [spec for spec in specs.values() if spec.page_size != block_stride]
    if is_block_outermost(layout) and strided:
        has_strided_attention = any(not spec.is_state for spec in strided)
        return build_single_tensor_caches(groups, block_stride) if has_strided_attention else None
    starts = dict(chain.from_iterable(each.locate_members() for each in placements))
    indexes: dict[tuple[int, int], int] = {}
    tensors = {
        member: indexes.setdefault((starts[member], spec.page_size), len(indexes))
        for member, spec in specs.items()
    }
    return build_canonical_caches(groups, tensors, (page_size for _, page_size in indexes))


def _count_heads(spec: KvCacheSpec) -> int:
    """Return vLLM's ``num_heads``."""
    return 1 if spec.is_state else spec.kv_heads


def _count_block_tokens(spec: KvCacheSpec) -> int:
    """Return vLLM's ``num_states``."""
    return 1 if spec.is_state else spec.block_size or 1
