"""Project a layout onto vLLM: specs, groups, memory, and what a prompt transfers.

It follows the planning of vLLM 0.24, and three pull requests: the CanonicalKVCaches of
vllm-project/vllm#37853, the canonical allocation of #37885, and the packed one of #46252.
"""

from __future__ import annotations

from typing import NamedTuple

from onnxkvrename.layout.layout import Layout
from onnxkvrename.vllm.groups import Grouping, group_layers
from onnxkvrename.vllm.layer_specs import align_blocks, build_specs, list_alignment_conditions
from onnxkvrename.vllm.memory import Allocation, build_allocations
from onnxkvrename.vllm.specs import (
    Condition,
    KvCacheSpec,
    ProjectionRequest,
    Refusal,
    RefusalError,
)


class Projection(NamedTuple):
    """vLLM's KV cache for a layout, as far as the graph and vLLM's code determine it.

    Attributes:
        request: The settings of vLLM.
        specs: The specs of the layers that have one, before grouping changes their blocks.
        conditions: The conditions under which vLLM has the same specs.
        refusals: The layers that vLLM cannot have; if there are any, there is no grouping.
        grouping: The groups of the layers; ``None`` if there are none.
        allocations: The ways in which vLLM can allocate the groups.
    """

    request: ProjectionRequest
    specs: tuple[KvCacheSpec, ...]
    conditions: tuple[Condition, ...]
    refusals: tuple[Refusal, ...] = ()
    grouping: Grouping | None = None
    allocations: tuple[Allocation, ...] = ()


def project_layout(layout: Layout, request: ProjectionRequest) -> Projection:
    """Return the projection of a layout.

    Layers that vLLM cannot have become refusals in the result, never exceptions.
    """
    model = build_specs(layout, request)
    if model.refusals or not model.specs:
        return Projection(request, model.specs, model.conditions, model.refusals)
    try:
        specs = align_blocks(model.specs, request)
        grouping = group_layers(specs)
    except RefusalError as error:
        return Projection(request, model.specs, model.conditions, (error.refusal,))
    conditions = (*model.conditions, *list_alignment_conditions(specs, request))
    allocations = build_allocations(grouping, request)
    return Projection(request, specs, conditions, (), grouping, allocations)
