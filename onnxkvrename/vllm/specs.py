"""The types of vLLM's KV cache: specs, groups, and the conditions for them.

The types follow ``v1/kv_cache_interface.py`` of vLLM 0.24.0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from onnxkvrename.model.signature import Dim
from onnxkvrename.rules.kinds import KINDS, BufferKind, get_kind_traits

VLLM_VERSION = "0.24"
"""The version of vLLM whose planning is followed."""
VLLM_KINDS = frozenset(row.vllm_kind for row in KINDS.values() if row.vllm_kind)
"""The kinds for which vLLM has a spec, by its ``KVCacheSpecKind``."""
MLA_KINDS = frozenset(kind for kind in VLLM_KINDS if get_kind_traits(kind).is_mla)
STATE_KINDS = frozenset(kind for kind in VLLM_KINDS if get_kind_traits(kind).is_state)
WINDOWED_KINDS = frozenset(kind for kind in VLLM_KINDS if get_kind_traits(kind).is_windowed)
CHUNKED_KINDS = frozenset(kind for kind in VLLM_KINDS if get_kind_traits(kind).is_chunked)
SLIDING_KINDS = WINDOWED_KINDS - CHUNKED_KINDS
ENCODER_KINDS = frozenset(
    kind for kind in VLLM_KINDS if get_kind_traits(kind).grows_with == "encoder"
)
STATE_ITEMSIZES = {"FLOAT16": 2, "BFLOAT16": 2, "FLOAT": 4}
"""Bytes of an element of a state, by ONNX dtype; vLLM keeps states in no other dtype."""
ATTENTION_ITEMSIZES = {**STATE_ITEMSIZES, "FLOAT8E4M3FN": 1, "FLOAT8E5M2": 1}
"""Bytes of an element of attention's cache, by ONNX dtype."""
KV_CACHE_DTYPES = {
    "float16": "FLOAT16",
    "bfloat16": "BFLOAT16",
    "fp8": "FLOAT8E4M3FN",
    "fp8_e4m3": "FLOAT8E4M3FN",
    "fp8_e5m2": "FLOAT8E5M2",
    "fp8_ds_mla": "UINT8",
}
"""The values of vLLM's ``--kv-cache-dtype`` that are known here, with ONNX dtypes.

``fp8_ds_mla`` has rows of its own format.
"""
DS_MLA_ROW_BYTES = 656
"""Bytes of a token in a cache of ``fp8_ds_mla`` that is not DeepSeek-V4's."""
DS_MLA_HEAD_SIZE = 576
"""Elements of the latent and the rope that such a row holds."""

FULL_KINDS = frozenset(kind for kind in VLLM_KINDS if get_kind_traits(kind).grows_with == "context")


class ProjectionRequest(NamedTuple):
    """The settings of vLLM for a projection.

    Attributes:
        block_size: vLLM's ``--block-size``, in tokens.
        tensor_parallel_size: vLLM's ``--tensor-parallel-size``, in ranks.
        kv_cache_dtype: vLLM's ``--kv-cache-dtype``, one of `KV_CACHE_DTYPES`; ``None`` for the
            graph's own dtypes.
        enable_cross_layers_blocks: Whether the connector is started with this flag, which selects
            the packed allocation; otherwise what depends on it says so.
        prompt_lengths: Lengths in tokens of the prompts whose transfer is counted.
    """

    block_size: int
    tensor_parallel_size: int = 1
    kv_cache_dtype: str | None = None
    enable_cross_layers_blocks: bool = False
    prompt_lengths: tuple[int, ...] = ()


ConditionState = Literal["met", "not met", "requires"]


class Condition(NamedTuple):
    """Something that vLLM requires.

    Attributes:
        name: A short name, unique among the conditions of one allocation or one projection.
        state: ``met`` or ``not met`` where the graph decides; ``requires`` where it cannot.
        why: What is required, or the reason why it is met or not.
    """

    name: str
    state: ConditionState
    why: str


def build_requirement(name: str, why: str) -> Condition:
    """Return a condition that the graph cannot decide."""
    return Condition(name, "requires", why)


def decide_condition(name: str, met: bool, why_met: str, *, why_not: str) -> Condition:
    """Return a condition that the graph decides, with the reason that applies."""
    return Condition(name, "met" if met else "not met", why_met if met else why_not)


def find_open_conditions(conditions: Iterable[Condition]) -> tuple[Condition, ...]:
    """Return the conditions that are not met or, if there are none, those that are required."""
    open_conditions = [condition for condition in conditions if condition.state != "met"]
    unmet = [condition for condition in open_conditions if condition.state == "not met"]
    return tuple(unmet or open_conditions)


def combine_states(conditions: Iterable[Condition]) -> ConditionState:
    """Return the state of all conditions together: the worst one."""
    return next((condition.state for condition in find_open_conditions(conditions)), "met")


class Refusal(NamedTuple):
    """A reason why layers cannot be projected.

    Attributes:
        layers: The numbers of the layers.
        reason: Why vLLM, or this program, refuses them.
        hint: What would help.
    """

    layers: tuple[int, ...]
    reason: str
    hint: str


class RefusalError(Exception):
    """Layers cannot be projected; the refusal has each of them once, with the reason."""

    def __init__(self, layers: Iterable[int], reason: str, hint: str) -> None:
        super().__init__(reason)
        self.refusal = Refusal(tuple(dict.fromkeys(layers)), reason, hint)


def check_kind(layer: int, kind: BufferKind) -> None:
    """Check that vLLM has a cache of a kind.

    Raises:
        RefusalError: It has none, or the kind is not known.
    """
    if kind == "unknown":
        raise RefusalError(
            [layer],
            "every size is fixed, so a cache cannot be distinguished from a state",
            "export the model with a symbol for the context",
        )
    if kind not in VLLM_KINDS:
        raise RefusalError(
            [layer],
            f"vLLM has no cache of kind {kind} ({get_kind_traits(kind).label})",
            "its figures cannot be computed",
        )


class KvCacheSpec(NamedTuple):
    """One layer's KV cache on one rank: vLLM's ``KVCacheSpec``.

    Attributes:
        layer: The layer's number.
        kind: vLLM's ``KVCacheSpecKind``.
        block_size: Tokens in a block; ``None`` for states.
        kv_heads: KV heads on this rank; 0 for states.
        head_size: Elements of a key's head; of MLA the latent and its rope together.
        head_size_v: Elements of a value's head; 0 for MLA, which stores no value.
        window: Tokens in the window, or in the chunk of chunked attention; a symbol if the size is
            not known, ``None`` for layers without a window.
        state_shapes: The shape of each state on this rank, without the batch.
        dtypes: ONNX dtypes: one for attention, one for each state.
        page_size_padded: Bytes that vLLM pads a page to; ``None`` without padding.
        row_bytes: Bytes of a token of one head if the dtype does not determine them: vLLM's
            ``state_content_bytes``; ``None`` otherwise.
    """

    layer: int
    kind: BufferKind
    block_size: int | None
    kv_heads: int
    head_size: int
    head_size_v: int
    window: Dim
    state_shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    page_size_padded: int | None = None
    row_bytes: int | None = None

    @property
    def token_bytes(self) -> int:
        """Bytes that one token adds; 0 for states."""
        if self.is_state:
            return 0
        if self.row_bytes is not None:
            return self.kv_heads * self.row_bytes
        itemsize = ATTENTION_ITEMSIZES[self.dtypes[0]]
        return self.kv_heads * (self.head_size + self.head_size_v) * itemsize

    @property
    def is_state(self) -> bool:
        """True if the cache holds states of fixed size."""
        return self.kind in STATE_KINDS

    @property
    def unpadded_page_size(self) -> int:
        """Bytes of a page without padding: vLLM's ``real_page_size_bytes``."""
        if self.is_state:
            states = zip(self.state_shapes, self.dtypes, strict=True)
            return sum(math.prod(shape) * STATE_ITEMSIZES[dtype] for shape, dtype in states)
        return (self.block_size or 0) * self.token_bytes

    @property
    def page_size(self) -> int:
        """Bytes of a page, what one block of the layer takes: vLLM's ``page_size_bytes``."""
        return self.unpadded_page_size if self.page_size_padded is None else self.page_size_padded

    @property
    def without_layer(self) -> KvCacheSpec:
        """The spec with layer 0, to compare the specs of different layers."""
        return self._replace(layer=0)


class KvCacheGroup(NamedTuple):
    """Layers that share one block table: vLLM's ``KVCacheGroupSpec``.

    Attributes:
        specs: The specs of the layers, in vLLM's order.
        has_per_layer_specs: Whether each layer keeps its own spec, so that pages may differ in
            size (vLLM's ``UniformTypeKVCacheSpecs``); otherwise all have the first one's.
    """

    specs: tuple[KvCacheSpec, ...]
    has_per_layer_specs: bool

    @property
    def layers(self) -> tuple[int, ...]:
        """The numbers of the layers, in vLLM's order."""
        return tuple(spec.layer for spec in self.specs)

    @property
    def kind(self) -> BufferKind:
        """The kind of all layers; ``unknown`` if they differ."""
        kinds = {spec.kind for spec in self.specs}
        return kinds.pop() if len(kinds) == 1 else "unknown"

    @property
    def first_spec(self) -> KvCacheSpec:
        """The spec that vLLM's schedulers read for the whole group."""
        return self.specs[0]

    @property
    def bytes_per_block(self) -> int:
        """Bytes of the pages of all layers."""
        return sum(spec.page_size for spec in self.specs)


def build_merged_group(specs: Sequence[KvCacheSpec]) -> KvCacheGroup:
    """Return a group whose layers all have the first one's spec."""
    merged = tuple(specs[0]._replace(layer=spec.layer) for spec in specs)
    return KvCacheGroup(merged, has_per_layer_specs=False)


def can_merge(specs: Sequence[KvCacheSpec]) -> bool:
    """Return whether vLLM merges `specs` into one (``is_kv_cache_spec_uniform``)."""
    return len({build_merge_key(spec) for spec in specs}) == 1


def build_merge_key(spec: KvCacheSpec) -> KvCacheSpec:
    """Return the part of a spec that vLLM compares before it merges specs.

    It is equal for all specs that merge. This follows ``merge`` of each spec class, which does not
    compare every size: it ignores the value's head of full attention and all sizes of MLA.
    """
    if spec.kind in MLA_KINDS:
        return KvCacheSpec(0, spec.kind, None, 0, 0, 0, spec.window, (), ())
    if spec.kind == "full_attention":
        # merge_window_sizes keeps the one window that full attention may have.
        spec = spec._replace(head_size_v=0, window=None)
    return spec.without_layer


def is_uniform_type(specs: Sequence[KvCacheSpec]) -> bool:
    """Return whether each token needs a slot in all of `specs` or in none.

    This follows ``UniformTypeKVCacheSpecs.is_uniform_type`` and the first spec's
    ``is_uniform_with_collection``.
    """
    first, kinds = specs[0], {spec.kind for spec in specs}
    if len({spec.block_size for spec in specs}) > 1:
        return False
    if first.kind in FULL_KINDS:
        return kinds <= FULL_KINDS
    if first.kind in WINDOWED_KINDS:
        allowed = SLIDING_KINDS if first.kind == "sliding_window" else {first.kind}
        return kinds <= allowed and len({spec.window for spec in specs}) == 1
    return len(kinds) == 1
