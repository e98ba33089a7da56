"""What vLLM makes of a layout as JSON: the member `vllm` of a manifest."""

from __future__ import annotations

from typing import Any, NamedTuple

from onnxkvrename.model.signature import Dim
from onnxkvrename.records import fill_record, serialize
from onnxkvrename.rules.kinds import BufferKind
from onnxkvrename.vllm.capacity import Capacity
from onnxkvrename.vllm.groups import Grouping, GroupingMethod
from onnxkvrename.vllm.memory import Allocation, CanonicalKvCaches, Placement
from onnxkvrename.vllm.nixl import NixlTransfer
from onnxkvrename.vllm.projection import Projection, list_transfer_releases
from onnxkvrename.vllm.specs import (
    Condition,
    ConditionState,
    KvCacheGroup,
    KvCacheSpec,
    ProjectionRequest,
    Refusal,
    list_releases,
)
from onnxkvrename.vllm.stages import PipelineStage, count_gpu_blocks

SCHEMA = "onnxkvrename.projection/1"


class Layer(NamedTuple):
    """The cache of one layer on one rank; a layer with attention of two kinds is listed twice.

    Attributes:
        layer: The number of the layer.
        kind: vLLM's own strings.
        block_size: Tokens in a block; `None` for states.
        kv_heads: KV heads on one rank; `None` for states.
        head_size: Elements of a key's head; for MLA the latent and its rope together; `None` for
            states.
        head_size_v: Elements of a value's head; 0 for MLA; `None` for states.
        window: Tokens in the window, or in the chunk of chunked attention; a symbol if the size is
            not known; `None` without a window.
        states: Shapes of states on one rank; empty for attention.
        dtypes: ONNX dtypes: one for attention, one for each state.
        page_size: Bytes of a block.
        unpadded_page_size: Bytes of a block without padding.
    """

    layer: int
    kind: BufferKind
    block_size: int | None
    kv_heads: int | None
    head_size: int | None
    head_size_v: int | None
    window: Dim
    states: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    page_size: int
    unpadded_page_size: int


class Group(NamedTuple):
    """Layers with one block table.

    Attributes:
        kind: The kind of its layers, in vLLM's words; unknown means several.
        block_size: Tokens in a block; `None` for states.
        window: Tokens in the window, or in the chunk of chunked attention; a symbol if the size is
            not known; `None` without a window, or with several.
        layers: The numbers of the layers, in vLLM's order.
        page_sizes: The bytes of a page of each layer.
        unpadded_page_sizes: The bytes of a page of each layer, without padding.
    """

    kind: BufferKind
    block_size: int | None
    window: Dim
    layers: tuple[int, ...]
    page_sizes: tuple[int, ...]
    unpadded_page_sizes: tuple[int, ...]


class LayerGroups(NamedTuple):
    """The groups of all layers.

    Attributes:
        way: How vLLM forms the groups; `none` if there are no groups.
        group_size: The most layers in a group.
        padding_layers: The number of layers to add so that all groups have the same size.
        uniform_page_size: Bytes of a page; `None` for pages of several sizes.
        groups: The groups; none if vLLM refuses.
        conditions: What it depends on.
        refusal: Why vLLM refuses this grouping; `None` if it does not.
    """

    way: GroupingMethod
    group_size: int
    padding_layers: int
    uniform_page_size: int | None
    groups: tuple[Group, ...]
    conditions: tuple[Condition, ...]
    refusal: Refusal | None


class Registration(NamedTuple):
    """The memory that vLLM registers with NIXL.

    Attributes:
        regions: The number of regions, as NIXL's connector counts them; `None` if vLLM refuses.
        refused: Why vLLM refuses to register the memory with NIXL; `None` if it does not.
        incomplete: Why the descriptors do not cover all data in the blocks; `None` if they do.
        fewest_blocks: From how many blocks on all this holds; 1 for any number.
    """

    regions: int | None
    refused: str | None
    incomplete: str | None
    fewest_blocks: int


class Arrangement(NamedTuple):
    """A way in which vLLM may put the pages of groups into memory.

    Attributes:
        name: For 0.24 unpacked, cross_layers, canonical or packed; for 0.33 a layout (L is layer,
            B block, H head, N token, C content), or canonical or packed, which 0.33 no longer has.
        state: The state of all conditions together.
        conditions: What it depends on.
        grouping: The index in `groupings` of the grouping that it places.
        bytes_per_block: Bytes that one block takes in all tensors; with several stages, on the
            stage with the most. `None` if the arrangement is not possible.
        num_blocks: The number of blocks that fit into gpu_memory, on the stage with the fewest;
            `None` without gpu_memory.
        padding_share: The share of padding in one block of each group, from 0 to 1.
        placements: Where the pages are; empty with several stages, because no worker has all pages.
        canonical: vLLM's CanonicalKVCaches of this allocation (vllm-project/vllm#37853); `None` if
            it is not possible or not known.
        nixl: The memory that vLLM registers with NIXL; `None` if NIXL's connector does not use this
            arrangement, or if that is not known for the release.
        nixl_releases: The releases for which `nixl` and `transfers` are known to be the same.
        transfers: One entry for each `--tokens`.
        default: Whether vLLM uses it unless a setting, a backend or a connector selects another.
        capacity: The blocks of a request of max_model_len tokens, and how many such requests fit;
            `None` without max_model_len, or if not known.
    """

    name: str
    state: ConditionState
    conditions: tuple[Condition, ...]
    grouping: int
    bytes_per_block: int | None
    num_blocks: int | None
    padding_share: float | None
    placements: tuple[Placement, ...]
    canonical: CanonicalKvCaches | None
    nixl: Registration | None
    nixl_releases: tuple[str, ...]
    transfers: tuple[NixlTransfer, ...]
    default: bool
    capacity: Capacity | None


class ProjectionContent(NamedTuple):
    """What vLLM makes of the KV buffers.

    Attributes:
        vllm: The version of vLLM whose code is followed.
        release: The release of vLLM that was asked for.
        releases: The releases for which groups and memory are known to be the same.
        block_size: Tokens in a block, from `--block-size`.
        tp: Tensor parallelism.
        pp: Pipeline parallelism.
        kv_cache_dtype: vLLM's --kv-cache-dtype; `None` for the graph's own dtypes.
        gpu_memory: The bytes that each GPU has for KV caches (`--kv-cache-memory-bytes`); `None`
            without it.
        draft_start: The number of a draft model's first layer; `None` without one.
        max_model_len: Tokens of a prompt and its answer, vLLM's --max-model-len; `None` without it.
        bandwidth: Bytes in a second that one rank transfers (`--bandwidth`); `None` without it.
        token_bytes: Bytes that a token adds on one rank, in the layers that keep all tokens and in
            the cache dtype; of several stages, on that with the most.
        layers: The cache of each layer, before vLLM makes the pages equal in size.
        conditions: What the whole projection depends on.
        refusals: Why vLLM refuses the layout. If there is a refusal, there are no groupings.
        groupings: One grouping; in 0.33 a second one for layouts with B outermost.
        arrangements: The memory layouts that vLLM knows, possible or not.
        stages: The stages of the pipeline; one without pipeline parallelism, none without
            arrangements.
    """

    vllm: str
    release: str
    releases: tuple[str, ...]
    block_size: int
    tp: int
    pp: int
    kv_cache_dtype: str | None
    gpu_memory: int | None
    draft_start: int | None
    max_model_len: int | None
    bandwidth: int | None
    token_bytes: int
    layers: tuple[Layer, ...]
    conditions: tuple[Condition, ...]
    refusals: tuple[Refusal, ...]
    groupings: tuple[LayerGroups, ...]
    arrangements: tuple[Arrangement, ...]
    stages: tuple[PipelineStage, ...]


def projection_to_json(projection: Projection) -> dict[str, Any]:
    """Return a projection as JSON values."""
    request = projection.request
    arrangements = (_describe_allocation(each, request) for each in projection.allocations)
    content = ProjectionContent(
        vllm=request.vllm_version,
        release=request.release,
        releases=list_releases(request.vllm_version),
        block_size=request.block_size,
        tp=request.tensor_parallel_size,
        pp=request.pipeline_parallel_size,
        kv_cache_dtype=request.kv_cache_dtype,
        gpu_memory=request.gpu_memory,
        draft_start=request.draft_start,
        max_model_len=request.max_model_len,
        bandwidth=request.bandwidth,
        token_bytes=max(projection.token_bytes),
        layers=tuple(map(_describe_spec, projection.specs)),
        conditions=projection.conditions,
        refusals=projection.refusals,
        groupings=tuple(map(_describe_grouping, projection.groupings)),
        arrangements=tuple(arrangements),
        stages=projection.stages,
    )
    values: dict[str, Any] = serialize(content)
    return values


def _describe_spec(spec: KvCacheSpec) -> Layer:
    no_heads = dict.fromkeys(("kv_heads", "head_size", "head_size_v")) if spec.is_state else {}
    return fill_record(Layer, spec, states=spec.state_shapes, **no_heads)


def _describe_grouping(grouping: Grouping) -> LayerGroups:
    groups = tuple(map(_describe_group, grouping.groups))
    return fill_record(LayerGroups, grouping, way=grouping.method, groups=groups)


def _describe_group(group: KvCacheGroup) -> Group:
    windows = {spec.window for spec in group.specs}
    return fill_record(
        Group,
        group,
        block_size=group.first_spec.block_size,
        window=group.first_spec.window if len(windows) == 1 else None,
        page_sizes=tuple(spec.page_size for spec in group.specs),
        unpadded_page_sizes=tuple(spec.unpadded_page_size for spec in group.specs),
    )


def _describe_allocation(allocation: Allocation, request: ProjectionRequest) -> Arrangement:
    registration = allocation.registration
    return fill_record(
        Arrangement,
        allocation,
        grouping=allocation.grouping_index,
        num_blocks=count_gpu_blocks(allocation.bytes_per_block, request.gpu_memory),
        nixl=None if registration is None else fill_record(Registration, registration),
        nixl_releases=list_transfer_releases(allocation, request.vllm_version),
        default=allocation.is_default,
    )
