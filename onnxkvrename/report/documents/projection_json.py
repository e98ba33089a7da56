"""What vLLM makes of a layout as JSON: an item of the member `vllm` of `inspect`."""

from __future__ import annotations

from typing import NamedTuple

from onnxkvrename.model.signature import Dim
from onnxkvrename.records import fill_record
from onnxkvrename.rules.kinds import BufferKind
from onnxkvrename.vllm.groups import Grouping, GroupingMethod
from onnxkvrename.vllm.memory import Allocation, CanonicalKvCaches, Placement
from onnxkvrename.vllm.nixl import NixlTransfer
from onnxkvrename.vllm.projection import Projection
from onnxkvrename.vllm.specs import (
    VLLM_VERSION,
    Condition,
    ConditionState,
    KvCacheGroup,
    KvCacheSpec,
    Refusal,
)


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
        way: How vLLM forms the groups.
        group_size: The most layers in a group.
        padding_layers: The number of layers to add so that all groups have the same size.
        uniform_page_size: Bytes of a page; `None` for pages of several sizes.
        groups: The groups, in vLLM's order.
        conditions: What it depends on.
    """

    way: GroupingMethod
    group_size: int
    padding_layers: int
    uniform_page_size: int | None
    groups: tuple[Group, ...]
    conditions: tuple[Condition, ...]


class Registration(NamedTuple):
    """The memory that vLLM registers with NIXL.

    Attributes:
        regions: The number of regions, as NIXL's connector counts them; `None` if vLLM refuses.
        refused: Why vLLM refuses to register the memory with NIXL; `None` if it does not.
        incomplete: Why the descriptors do not cover all data in the blocks; `None` if they do.
    """

    regions: int | None
    refused: str | None
    incomplete: str | None


class Arrangement(NamedTuple):
    """A way in which vLLM may put the pages of groups into memory.

    Attributes:
        name: unpacked, cross_layers, canonical (vllm-project/vllm#37885) or packed
            (vllm-project/vllm#46252).
        state: The state of all conditions together.
        conditions: What it depends on.
        bytes_per_block: Bytes that one block takes in all tensors. `None` if the arrangement is not
            possible.
        padding_share: The share of padding in one block of each group, from 0 to 1.
        placements: Where the pages are.
        canonical: vLLM's CanonicalKVCaches of this allocation (vllm-project/vllm#37853); `None` if
            it is not possible.
        nixl: The memory that vLLM registers with NIXL; `None` if NIXL's connector does not use this
            arrangement.
        transfers: One entry for each `--tokens`.
        default: Whether vLLM uses it unless a setting, a backend or a connector selects another.
    """

    name: str
    state: ConditionState
    conditions: tuple[Condition, ...]
    bytes_per_block: int | None
    padding_share: float | None
    placements: tuple[Placement, ...]
    canonical: CanonicalKvCaches | None
    nixl: Registration | None
    transfers: tuple[NixlTransfer, ...]
    default: bool


class ProjectionContent(NamedTuple):
    """What vLLM makes of the KV buffers.

    Attributes:
        vllm: The version of vLLM whose code is followed.
        block_size: Tokens in a block, from `--block-size`.
        tp: Tensor parallelism.
        kv_cache_dtype: vLLM's --kv-cache-dtype; `None` for the graph's own dtypes.
        enable_cross_layers_blocks: Whether the connector is started with this flag.
        layers: The cache of each layer, before vLLM makes the pages equal in size.
        conditions: What the whole projection depends on.
        refusals: Why vLLM refuses the layout. If there is a refusal, there is no grouping.
        grouping: The groups of all layers; `None` if there are none.
        arrangements: The memory layouts that vLLM knows, possible or not.
    """

    vllm: str
    block_size: int
    tp: int
    kv_cache_dtype: str | None
    enable_cross_layers_blocks: bool
    layers: tuple[Layer, ...]
    conditions: tuple[Condition, ...]
    refusals: tuple[Refusal, ...]
    grouping: LayerGroups | None
    arrangements: tuple[Arrangement, ...]


def describe_projection(projection: Projection) -> ProjectionContent:
    """Return a projection as JSON has it."""
    request, grouping = projection.request, projection.grouping
    return ProjectionContent(
        vllm=VLLM_VERSION,
        block_size=request.block_size,
        tp=request.tensor_parallel_size,
        kv_cache_dtype=request.kv_cache_dtype,
        enable_cross_layers_blocks=request.enable_cross_layers_blocks,
        layers=tuple(map(_describe_spec, projection.specs)),
        conditions=projection.conditions,
        refusals=projection.refusals,
        grouping=None if grouping is None else _describe_grouping(grouping),
        arrangements=tuple(map(_describe_allocation, projection.allocations)),
    )


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


def _describe_allocation(allocation: Allocation) -> Arrangement:
    registration = allocation.registration
    return fill_record(
        Arrangement,
        allocation,
        nixl=None if registration is None else fill_record(Registration, registration),
        default=allocation.is_default,
    )
