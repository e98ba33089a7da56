"""Pipeline stages, the bytes of a block on each, and the blocks that fit into a GPU's memory.

This follows ``get_pp_indices`` in ``distributed/utils.py`` and ``get_kv_cache_configs``: of vLLM
0.24.0 in ``v1/core/kv_cache_utils.py``, of 0.33.0 in ``v1/core/kv_cache_planning.py``. Groups are
formed of all layers; a stage then has its own layers of each group. Every GPU gets as many blocks
as the one with the fewest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from onnxkvrename.findings import format_count
from onnxkvrename.vllm.capacity import measure_capacity
from onnxkvrename.vllm.groups import Grouping
from onnxkvrename.vllm.memory import Allocation
from onnxkvrename.vllm.specs import (
    SLIDING_KINDS,
    VERSION_TRAITS,
    Condition,
    KvCacheGroup,
    KvCacheSpec,
    ProjectionRequest,
    RefusalError,
    build_requirement,
    decide_condition,
)


class PipelineStage(NamedTuple):
    """The part of a model that one rank of a pipeline has.

    Attributes:
        layers: The numbers of its layers that have a KV cache, each once.
        bytes_per_block: Bytes of one block on a GPU of this stage, for each allocation of the
            projection; ``None`` if that is not possible.
    """

    layers: tuple[int, ...]
    bytes_per_block: tuple[int | None, ...]


def build_stages(
    groupings: Sequence[Grouping], allocations: Sequence[Allocation], request: ProjectionRequest
) -> tuple[PipelineStage, ...]:
    """Return the stages of a model, from the groupings and allocations of the whole model.

    Raises:
        RefusalError: A stage has no layer with a KV cache.
    """
    specs = [spec for group in groupings[-1].groups or groupings[0].groups for spec in group.specs]
    return tuple(
        PipelineStage(
            tuple(sorted({spec.layer for spec in specs if spec.layer in layers})),
            tuple(
                None
                if allocation.bytes_per_block is None
                else _measure_block(
                    groupings[allocation.grouping_index].groups, layers, request.vllm_version
                )
                for allocation in allocations
            ),
        )
        for layers in _split_layers(specs, request)
    )


def apply_stages(
    groupings: Sequence[Grouping],
    allocations: Iterable[Allocation],
    stages: Sequence[PipelineStage],
    request: ProjectionRequest,
) -> Iterator[Allocation]:
    """Yield the allocations with the largest stage's bytes, and a condition for the GPU's memory.

    With several stages, no worker has all layers. The padding, the places, the canonical view, the
    registration and the amounts of transfers are then left out.

    The groupings and allocations are those of the whole model.
    """
    why = VERSION_TRAITS[request.vllm_version].unknown_stage_transfers
    unknown = f"NIXL transfers of pipeline stages: {why}"
    for index, allocation in enumerate(allocations):
        block_bytes = [stage.bytes_per_block[index] for stage in stages]
        most = max((size for size in block_bytes if size is not None), default=None)
        if most is None:
            yield allocation
            continue
        if len(stages) > 1:
            allocation = allocation._replace(
                bytes_per_block=most,
                padding_share=None,
                placements=(),
                canonical=None,
                registration=None,
                transfers=tuple(
                    each._replace(
                        regions=None, descriptors=None, bytes=None, seconds=None, unknown=unknown
                    )
                    for each in allocation.transfers
                ),
            )
        groups = groupings[allocation.grouping_index].groups
        yield _add_memory_condition(allocation, groups, request)


def count_gpu_blocks(bytes_per_block: int | None, gpu_memory: int | None) -> int | None:
    """Return vLLM's ``num_blocks``; ``None`` if the block's size or the memory is not known.

    The block is the one on the GPU with the largest ones; the memory, in bytes, is what each GPU
    has left for KV caches.
    """
    if bytes_per_block is None or gpu_memory is None:
        return None
    return gpu_memory // bytes_per_block


def _add_memory_condition(
    allocation: Allocation, groups: Sequence[KvCacheGroup], request: ProjectionRequest
) -> Allocation:
    """Add the condition that one request fits (``_check_enough_kv_cache_memory``).

    It has ``--max-model-len`` tokens; where that is not known, one token. A window may start within
    a block, so vLLM reserves two blocks for it.
    """
    block_count = count_gpu_blocks(allocation.bytes_per_block, request.gpu_memory)
    if block_count is None:
        return allocation
    condition = _decide_longest_request(groups, request, block_count)
    if condition is not None:
        return allocation._replace(conditions=(*allocation.conditions, condition))
    fewest = sum(2 if group.first_spec.kind in SLIDING_KINDS else 1 for group in groups)
    condition = decide_condition(
        "memory",
        block_count > fewest,
        f"{block_count:,} blocks fit",
        why_not=(
            f"{block_count:,} blocks fit; a request takes {fewest:,} or more, and one is vLLM's "
            "null block"
        ),
    )
    return allocation._replace(conditions=(*allocation.conditions, condition))


def _decide_longest_request(
    groups: Sequence[KvCacheGroup], request: ProjectionRequest, block_count: int
) -> Condition | None:
    """Return that a request of ``--max-model-len`` does not fit, or may not.

    ``None`` if it fits, or if its blocks are not known.
    """
    capacity = measure_capacity(groups, request, block_count)
    if capacity is None:
        return None
    fewest, most = capacity.blocks
    if block_count >= most:
        return None
    why = f"{block_count:,} blocks fit; one request of {request.max_model_len:,} tokens takes "
    if block_count < fewest:
        return decide_condition("memory", False, "", why_not=f"{why}{fewest:,}")
    return build_requirement("memory", f"{why}{fewest:,} to {most:,}")


def _split_layers(specs: Iterable[KvCacheSpec], request: ProjectionRequest) -> list[range]:
    """Return the layers of each stage (``get_pp_indices``).

    Without a partition, the remaining layers go to the stages before the last one, one to each,
    beginning at the end.

    Raises:
        RefusalError: A stage has no layer with a KV cache, or the partition does not fit.
    """
    layers = sorted({spec.layer for spec in specs})
    layer_count = max(request.layer_count or 0, layers[-1] + 1)
    stage_count = request.pipeline_parallel_size
    if stage_count > len(layers):
        raise _refuse_empty_stage(layers, stage_count)
    fewest, remaining = divmod(layer_count, stage_count)
    longer = range(stage_count - 1 - remaining, stage_count - 1)
    sizes = request.layer_partition if stage_count > 1 else ()
    sizes = sizes or tuple(fewest + (index in longer) for index in range(stage_count))
    expected = request.layer_count or sum(sizes)
    if len(sizes) != stage_count or sum(sizes) != expected or expected < layer_count:
        raise RefusalError(
            layers,
            f"VLLM_PP_LAYER_PARTITION has {sum(sizes):,} layers in {len(sizes):,} stages, the "
            f"model {layer_count:,} in {stage_count:,}",
            "choose a partition of all layers, with one number for each stage",
        )
    ranges = list[range]()
    for size in sizes:
        start = ranges[-1].stop if ranges else 0
        ranges.append(range(start, start + size))
        if not any(layer in ranges[-1] for layer in layers):
            raise _refuse_empty_stage(layers, stage_count)
    return ranges


def _refuse_empty_stage(layers: Sequence[int], stage_count: int) -> RefusalError:
    return RefusalError(
        layers,
        f"{stage_count} pipeline stages: one has no layer with a KV cache",
        f"choose at most {format_count(len(layers), 'stage')}",
    )


def _measure_block(
    groups: Iterable[KvCacheGroup], layers: Collection[int], vllm_version: str
) -> int:
    """Return the bytes of one block on a stage with these layers.

    In 0.24, groups share the places of each page size; in 0.33, they share the block as a whole.
    """
    counts = [Counter(s.page_size for s in group.specs if s.layer in layers) for group in groups]
    if vllm_version == "0.33":
        return max(sum(size * count for size, count in sizes.items()) for sizes in counts)
    most = Counter[int]()
    for sizes in counts:
        most |= sizes
    return sum(size * count for size, count in most.items())
