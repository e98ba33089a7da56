"""Project a layout onto vLLM: specs, groups, memory, and what a prompt transfers.

Two versions are known, 0.24 and 0.33; a release before or between them is projected as one of them,
as far as that holds. A projection for 0.33 also lists two allocations that it does not have, as
impossible.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from onnxkvrename.errors import KvRenameError
from onnxkvrename.findings import Finding, build_finding, format_layers
from onnxkvrename.layout.layout import Layout
from onnxkvrename.vllm.backends import choose_block_size, find_backend
from onnxkvrename.vllm.capacity import estimate_seconds, measure_capacity, measure_token_bytes
from onnxkvrename.vllm.groups import Grouping, group_layers
from onnxkvrename.vllm.layer_specs import align_blocks, build_specs, list_alignment_conditions
from onnxkvrename.vllm.memory import Allocation
from onnxkvrename.vllm.memory_v024 import build_allocations_v024
from onnxkvrename.vllm.memory_v033 import build_allocations_v033
from onnxkvrename.vllm.nixl import build_transfers, split_states
from onnxkvrename.vllm.serve import DEFAULT_CONNECTOR, ServeSettings
from onnxkvrename.vllm.settle import settle_conditions
from onnxkvrename.vllm.specs import (
    KV_CACHE_DTYPES,
    MLA_KINDS,
    QAIC_CACHE_DTYPE,
    VERSION_TRAITS,
    VLLM_RELEASES,
    VLLM_VERSIONS,
    Condition,
    KvCacheGroup,
    KvCacheSpec,
    ProjectionRequest,
    Refusal,
    RefusalError,
    build_requirement,
    find_open_conditions,
    list_releases,
    plan_request,
)
from onnxkvrename.vllm.stages import (
    PipelineStage,
    apply_stages,
    build_stages,
    count_gpu_blocks,
)


class Projection(NamedTuple):
    """vLLM's KV cache for a layout, as far as the graph and vLLM's code determine it.

    Attributes:
        request: The settings of vLLM.
        specs: The specs of the layers that have one, before grouping changes their blocks.
        conditions: The conditions under which vLLM has the same specs.
        refusals: The layers that vLLM cannot have; if there are any, there are no groupings.
        groupings: One; for 0.33 a second one for block-outermost layouts.
        allocations: The ways in which vLLM can allocate the groups.
        stages: The stages of the pipeline, one without pipeline parallelism; none if there are
            no allocations.
    """

    request: ProjectionRequest
    specs: tuple[KvCacheSpec, ...]
    conditions: tuple[Condition, ...]
    refusals: tuple[Refusal, ...] = ()
    groupings: tuple[Grouping, ...] = ()
    allocations: tuple[Allocation, ...] = ()
    stages: tuple[PipelineStage, ...] = ()

    @property
    def token_bytes(self) -> tuple[int, ...]:
        """The bytes that a token adds on one rank of each stage, beside windows and states."""
        if not self.stages:
            return (measure_token_bytes(self.specs),)
        return tuple(
            measure_token_bytes([spec for spec in self.specs if spec.layer in stage.layers])
            for stage in self.stages
        )


def project_layout(
    layout: Layout, request: ProjectionRequest, draft: Layout | None = None
) -> Projection:
    """Return the projection of a layout.

    Layers that vLLM cannot have become refusals in the result, never exceptions.

    vLLM numbers the layers of a draft model after the model's own, and groups all together.

    Raises:
        KvRenameError: It has pipeline stages beside a draft model, which is not supported.
    """
    request = plan_request(request)
    if request.kv_cache_dtype == QAIC_CACHE_DTYPE:
        why = f"not known for {QAIC_CACHE_DTYPE}, which vllm-qaic alone takes"
        return Projection(request, (), (build_requirement("pages", why),))
    if draft is not None:
        if request.pipeline_parallel_size > 1:
            raise KvRenameError(
                "a draft model in pipeline stages is not supported",
                hint="--pipeline-parallel-size 1 has no stages",
            )
        request = request._replace(draft_start=max(layout.layers, default=-1) + 1)
        layout = _append_draft(layout, draft)
    model = build_specs(layout, request)
    if model.refusals or not model.specs:
        return Projection(request, model.specs, model.conditions, model.refusals)
    try:
        specs = align_blocks(model.specs, request)
    except RefusalError as error:
        return Projection(request, model.specs, model.conditions, (error.refusal,))
    conditions = (*model.conditions, *list_alignment_conditions(specs, request))
    unknown_groups = _explain_other_groups(layout, request)
    if unknown_groups is not None:
        return Projection(request, (), (*conditions, unknown_groups))
    version = request.vllm_version
    grouping = group_layers(specs, version)
    if version == "0.24":
        groupings: tuple[Grouping, ...] = (grouping,)
        allocations = build_allocations_v024(grouping)
    else:
        block_outermost = group_layers(specs, version, block_outermost=True)
        groupings = (grouping, block_outermost)
        allocations = build_allocations_v033(specs, grouping, block_outermost, request.gpu_memory)
    other_memory = VLLM_RELEASES[request.release].other_memory
    allocations = tuple(each for each in allocations if each.name not in other_memory)
    try:
        stages = build_stages(groupings, allocations, request) if allocations else ()
    except RefusalError as error:
        return Projection(request, specs, conditions, (error.refusal,))
    allocations = tuple(_count_transfers(each, groupings, request) for each in allocations)
    allocations = tuple(apply_stages(groupings, allocations, stages, request))
    allocations = tuple(
        _limit_transfers(each, groupings[each.grouping_index].groups, request)
        for each in allocations
    )
    allocations = tuple(_add_capacity(each, groupings, request) for each in allocations)
    allocations = tuple(_settle_allocation(each, groupings, request) for each in allocations)
    grouped = next((each.groups for each in groupings if each.groups), ())
    final_specs = [spec for group in grouped for spec in group.specs] or specs
    conditions = settle_conditions(conditions, request, final_specs)
    return Projection(request, specs, conditions, (), groupings, allocations, stages)


def build_request(
    serve: ServeSettings, vllm_version: str, prompt_lengths: tuple[int, ...] = ()
) -> ProjectionRequest:
    """Return the settings that a ``vllm serve`` line gives, with vLLM's defaults.

    Args:
        serve: The line.
        vllm_version: One of `VLLM_RELEASES`.
        prompt_lengths: Lengths in tokens of the prompts whose transfer is counted.

    Raises:
        KvRenameError: The pages of its ``--kv-cache-dtype`` are not known here.
    """
    dtype = serve.kv_cache_dtype
    if dtype is not None and dtype not in KV_CACHE_DTYPES:
        raise KvRenameError(
            f"the pages of --kv-cache-dtype {dtype} are not known here",
            hint=f"known are {', '.join(KV_CACHE_DTYPES)}",
        )
    planned_as = VLLM_RELEASES[vllm_version].planned_as
    return ProjectionRequest(
        choose_block_size(serve, vllm_version),
        serve.tensor_parallel_size,
        vllm_version,
        prompt_lengths,
        dtype,
        serve.pipeline_parallel_size,
        serve.kv_cache_memory_bytes,
        max_model_len=serve.max_model_len,
        # 0.33 schedules several batches at once, as many as depend on more than the line.
        in_flight_tokens=serve.max_num_batched_tokens if planned_as == "0.24" else None,
        layer_partition=serve.layer_partition or (),
        serve=serve,
    )


def list_serve_notes(serve: ServeSettings, vllm_version: str) -> Iterator[str]:
    """Yield what is assumed where a line says nothing, and what of it is not understood."""
    if serve.connector is None:
        yield f"{DEFAULT_CONNECTOR} is assumed: --kv-transfer-config is missing"
    if serve.block_size is None:
        size = choose_block_size(serve, vllm_version)
        if find_backend(serve, vllm_version) is None:
            why = "the default, unless the attention backend prefers another size"
        else:
            why = f"{serve.attention_backend} prefers them"
        yield f"blocks of {size} tokens are assumed: --block-size is missing ({why})"
    yield from serve.notes


def _settle_allocation(
    allocation: Allocation, groupings: Sequence[Grouping], request: ProjectionRequest
) -> Allocation:
    """Return the allocation with the conditions that a line decides."""
    groups = groupings[allocation.grouping_index].groups
    specs = [spec for group in groups for spec in group.specs]
    settled = settle_conditions(allocation.conditions, request, specs, allocation.name)
    return allocation._replace(conditions=settled)


def _count_transfers(
    allocation: Allocation, groupings: Sequence[Grouping], request: ProjectionRequest
) -> Allocation:
    """Fill in what NIXL moves for each prompt."""
    groups = groupings[allocation.grouping_index].groups
    if allocation.registration is None:
        return allocation
    transfers = build_transfers(groups, allocation.registration, request.prompt_lengths)
    timed = tuple(
        each._replace(seconds=estimate_seconds(each.bytes, request.bandwidth)) for each in transfers
    )
    return allocation._replace(transfers=timed)


def _add_capacity(
    allocation: Allocation, groupings: Sequence[Grouping], request: ProjectionRequest
) -> Allocation:
    if allocation.bytes_per_block is None:
        return allocation
    num_blocks = count_gpu_blocks(allocation.bytes_per_block, request.gpu_memory)
    groups = groupings[allocation.grouping_index].groups
    return allocation._replace(capacity=measure_capacity(groups, request, num_blocks))


def _explain_other_groups(layout: Layout, request: ProjectionRequest) -> Condition | None:
    """Return why the groups of a release are not known; ``None`` if they are.

    Where all of `VLLM_VERSIONS` form the same groups, so do the releases before and between them.
    """
    if VLLM_RELEASES[request.release].has_same_groups:
        return None
    candidates = set[tuple[KvCacheGroup, ...]]()
    for version in VLLM_VERSIONS:
        asked = request._replace(vllm_version=version)
        try:
            specs: Sequence[KvCacheSpec] = align_blocks(build_specs(layout, asked).specs, asked)
        except RefusalError:
            specs = ()
        for block_outermost in (False, True):
            candidates.add(group_layers(specs, version, block_outermost=block_outermost).groups)
    if len(candidates) == 1:
        return None
    versions = " and ".join(VLLM_VERSIONS)
    return build_requirement(
        "groups", f"not known for vLLM {request.release}, as {versions} form different ones"
    )


def _limit_transfers(
    allocation: Allocation, groups: Sequence[KvCacheGroup], request: ProjectionRequest
) -> Allocation:
    """Leave out the registration and transfers that are not known of a release."""
    release = VLLM_RELEASES[request.release]
    if allocation.registration is None or (
        allocation.name not in release.other_transfers
        and (release.has_same_states or not _has_refused_states(groups, release.planned_as))
    ):
        return allocation
    unknown = f"NIXL in vLLM {request.release}: it may register other regions than "
    transfers = tuple(
        each._replace(
            regions=None,
            descriptors=None,
            bytes=None,
            seconds=None,
            unknown=unknown + release.planned_as,
        )
        for each in allocation.transfers
    )
    return allocation._replace(registration=None, transfers=transfers)


def _has_refused_states(groups: Sequence[KvCacheGroup], version: str) -> bool:
    try:
        split_states(groups, version)
    except RefusalError:
        return True
    return False


def _append_draft(layout: Layout, draft: Layout) -> Layout:
    """Return the layout with the layers of a draft model after its own."""
    start = max(layout.layers, default=-1) + 1
    buffers = tuple(
        buffer._replace(
            layer=start + buffer.layer - min(draft.layers),
            shape=None if buffer.shape is None else draft.resolve_shape(buffer.shape),
            window=draft.resolve_shape((buffer.window,))[0],
        )
        for buffer in draft.buffers
    )
    return layout._replace(buffers=(*layout.buffers, *buffers))


_USE_CONDITIONS = frozenset(
    {"version", "one group", "several groups", "flag", "connector", "layout", "model runner"}
)
"""The conditions that decide whether vLLM uses an allocation, whether it works or not."""


def list_transfer_releases(allocation: Allocation, version: str) -> tuple[str, ...]:
    """Return the releases for which the registration holds that a version has, oldest first."""
    if allocation.registration is None:
        return ()
    if allocation.registration.refused is not None:
        return (version,)
    return list_releases(version, allocation.name)


def find_nixl_allocation(projection: Projection) -> Allocation | None:
    """Return the allocation that a model has with NIXL's connector.

    It is the one that a line selects. Without a line, it is the one that the connector selects,
    else vLLM's default. ``None`` without groups.
    """
    used = [
        each
        for each in projection.allocations
        if not any(c.state == "not met" and c.name in _USE_CONDITIONS for c in each.conditions)
    ]
    for allocation in used:
        if any(
            c.by_line and c.name in ("flag", "connector", "layout") for c in allocation.conditions
        ):
            return allocation
    is_mla = any(spec.kind in MLA_KINDS for spec in projection.specs)
    layout = "" if is_mla else VERSION_TRAITS[projection.request.vllm_version].nixl_layout
    allocations = projection.allocations
    chosen = (each for each in allocations if (each.name == layout if layout else each.is_default))
    return next(chosen, None)


def check_projection(projection: Projection) -> Iterator[Finding]:
    """Yield a finding for each refusal by vLLM's planning.

    Groups that only some memory layouts refuse give no finding: another layout is possible.

    Yields:
        KV619 for layers that do not divide by tensor parallelism, KV622 for all others.
    """
    groupings = projection.groupings
    group_refusals = [g.refusal for g in groupings if g.refusal is not None]
    if len(group_refusals) < len(groupings):
        group_refusals = []
    for refusal in (*projection.refusals, *dict.fromkeys(group_refusals)):
        message = f"{format_layers(refusal.layers)}: {refusal.reason}"
        yield build_finding(refusal.code, "", message, refusal.hint)


def check_nixl(projection: Projection) -> Iterator[Finding]:
    """Yield KV622 if workers that are alike do not hand over all data by NIXL's connector.

    Only the allocation that the connector selects counts. What is not computed, such as the regions
    of pipeline stages, gives no finding; nor does a line with another connector.
    """
    serve, version = projection.request.serve, projection.request.vllm_version
    if serve is not None and not serve.uses_nixl:
        return
    for condition in projection.conditions:
        is_named = serve is not None and serve.connector is not None
        if is_named and condition.name == "state kind" and condition.state == "not met":
            message = f"vLLM {version}'s NIXL connector stops at states in another layout than DS"
            yield build_finding("KV622", "", message, "set VLLM_SSM_CONV_STATE_LAYOUT=DS")
    allocation = find_nixl_allocation(projection)
    fault = None if allocation is None else _explain_fault(allocation)
    if allocation is None or fault is None:
        return
    version = projection.request.vllm_version
    others = [
        each.name
        for each in projection.allocations
        if each.registration is not None
        and each.registration.fault is None
        and all(c.state != "not met" or c.name == "layout" for c in each.conditions)
    ]
    # What selects another allocation in 0.24 depends on the backend, too.
    hint = "choose another connector than NIXL"
    if others and version != "0.24":
        hint = f"set VLLM_KV_CACHE_LAYOUT={others[0]} on both sides"
    if any(c.name == "memory" and c.state == "not met" for c in allocation.conditions):
        hint = "raise --kv-cache-memory-bytes or lower --max-model-len"
    name = f"{allocation.name}, the allocation that vLLM {version} has with NIXL's connector"
    yield build_finding("KV622", "", f"{name}, is {fault}", hint)


def _explain_fault(allocation: Allocation) -> str | None:
    """Return why an allocation does not hand over all data; ``None`` if it does, or not known."""
    if not allocation.is_possible:
        unmet = find_open_conditions(allocation.conditions)[0]
        return f"not possible: {unmet.name}: {unmet.why}"
    return None if allocation.registration is None else allocation.registration.fault
