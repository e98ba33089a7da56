"""The types of vLLM's KV cache: specs, groups, and the conditions for them.

The types follow ``v1/kv_cache_interface.py`` of vLLM 0.24.0 and 0.33.0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple

from onnxkvrename.model.signature import Dim
from onnxkvrename.rules.kinds import KINDS, BufferKind, get_kind_traits
from onnxkvrename.vllm.serve import ServeSettings

VllmVersion = Literal["0.24", "0.33"]
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
    "mxint8": "MXINT8",
}
"""The values of vLLM's ``--kv-cache-dtype`` that are known here, with ONNX dtypes.

``fp8_ds_mla`` has rows of its own format.
"""
QAIC_CACHE_DTYPE = "mxint8"
"""The one that vllm-qaic alone takes; its compile follows, and vLLM's pages are not known."""
DS_MLA_ROW_BYTES = 656
"""Bytes of a token in a cache of ``fp8_ds_mla`` that is not DeepSeek-V4's."""
DS_MLA_HEAD_SIZE = 576
"""Elements of the latent and the rope that such a row holds."""

FULL_KINDS = frozenset(kind for kind in VLLM_KINDS if get_kind_traits(kind).grows_with == "context")


class VersionTraits(NamedTuple):
    """What differs between versions of vLLM, where it is no more than data.

    Attributes:
        unpaddable_kinds: The kinds whose pages it refuses to pad to the size of others.
        padding_refusal: Why it refuses, and what would help.
        merges_mla_sizes: Whether it merges specs of MLA whatever their sizes.
        merges_value_sizes: Whether it merges specs of full attention whatever a value's head size.
        splits_states_by_size: Whether states with pages of several sizes are several types.
        min_mla_block_size: The smallest block of MLA beside states, in tokens.
        takes_mamba_1: Whether NIXL's connector takes states of Mamba 1.
        max_block_split: The most pieces into which NIXL's connector splits a block, for MLA beside
            states.
        head_layouts: The layouts that store the heads of a block apart, so that ranks can share it.
        nixl_layout: The layout that NIXL's connector selects, unless the model is MLA; empty for
            the default.
        unknown_stage_transfers: Why transfers of pipeline stages are not known
            (``nixl/base_worker.py``).
    """

    unpaddable_kinds: frozenset[BufferKind]
    padding_refusal: tuple[str, str]
    merges_mla_sizes: bool
    merges_value_sizes: bool
    splits_states_by_size: bool
    min_mla_block_size: int
    takes_mamba_1: bool
    max_block_split: int
    head_layouts: tuple[str, ...]
    nixl_layout: str
    unknown_stage_transfers: str


VERSION_TRAITS: Mapping[str, VersionTraits] = MappingProxyType(
    {
        "0.24": VersionTraits(
            unpaddable_kinds=STATE_KINDS,
            padding_refusal=("states cannot be padded", "vLLM 0.33 pads them"),
            merges_mla_sizes=True,
            merges_value_sizes=True,
            splits_states_by_size=False,
            min_mla_block_size=1,
            takes_mamba_1=False,
            max_block_split=1,
            head_layouts=("HND",),
            nixl_layout="",
            unknown_stage_transfers="vLLM 0.24 pairs tensor parallel ranks only",
        ),
        "0.33": VersionTraits(
            unpaddable_kinds=MLA_KINDS - WINDOWED_KINDS,
            padding_refusal=(
                "pages of MLA cannot be padded",
                "choose a block size that makes pages divide, or a block-outermost layout",
            ),
            merges_mla_sizes=False,
            merges_value_sizes=False,
            splits_states_by_size=True,
            min_mla_block_size=128,
            takes_mamba_1=True,
            max_block_split=128,
            head_layouts=("LBHNC", "BLHNC"),
            nixl_layout="LBHNC",
            unknown_stage_transfers=(
                "vLLM 0.33 supports them for prefill only, without states, and several groups "
                "only by NixlPushConnector"
            ),
        ),
    }
)
"""The versions of vLLM whose planning is known here. Where code differs, it names the version."""
VLLM_VERSIONS: tuple[VllmVersion, ...] = ("0.24", "0.33")
BLOCK_OUTERMOST_LAYOUTS = frozenset({"BLNHC", "BLHNC", "BHLNC"})
"""The layouts of 0.33 in which one block holds all layers."""
_ALLOCATIONS = BLOCK_OUTERMOST_LAYOUTS | {
    *("LBNHC", "LBHNC", "LHBNC"),
    *("unpacked", "cross_layers", "canonical", "packed"),
}


class Release(NamedTuple):
    """How far the planning of one of `VLLM_VERSIONS` holds for a release of vLLM.

    Attributes:
        planned_as: The version whose planning is followed.
        has_same_groups: Whether it forms the same groups; otherwise that is known only where all of
            `VLLM_VERSIONS` form the same.
        other_memory: The allocations that it lays out otherwise.
        other_transfers: The allocations that it registers with NIXL otherwise.
        has_same_handshake: Whether it accepts and refuses the same pairs of workers.
        has_same_states: Whether NIXL's connector takes the same states.
    """

    planned_as: VllmVersion
    has_same_groups: bool = True
    other_memory: frozenset[str] = frozenset()
    other_transfers: frozenset[str] = frozenset()
    has_same_handshake: bool = True
    has_same_states: bool = True


_BETWEEN = Release("0.24", False, other_transfers=_ALLOCATIONS, has_same_handshake=False)
VLLM_RELEASES: Mapping[str, Release] = MappingProxyType(
    {
        "0.23": _BETWEEN._replace(other_memory=frozenset({"cross_layers", "packed"})),
        "0.24": Release("0.24"),
        "0.25": Release("0.24", has_same_states=False),
        "0.26": _BETWEEN,
        "0.27": _BETWEEN,
        "0.28": _BETWEEN,
        "0.29": Release(
            "0.33",
            other_memory=BLOCK_OUTERMOST_LAYOUTS,
            other_transfers=_ALLOCATIONS,
            has_same_handshake=False,
        ),
        "0.30": Release("0.33", other_transfers=BLOCK_OUTERMOST_LAYOUTS),
        "0.31": Release("0.33", other_transfers=BLOCK_OUTERMOST_LAYOUTS),
        "0.32": Release("0.33", other_transfers=BLOCK_OUTERMOST_LAYOUTS),
        "0.33": Release("0.33"),
    }
)
"""The releases that ``tests/judge_vllm.py`` compares with the projection; the newest is last."""


def list_releases(version: str, allocation: str | None = None) -> tuple[str, ...]:
    """Return the releases for which all that a version plans holds, oldest first.

    With the name of an allocation, those that also register it with NIXL alike.
    """
    return tuple(
        name
        for name, release in VLLM_RELEASES.items()
        if release.planned_as == version
        and release.has_same_groups
        and not release.other_memory
        and allocation not in release.other_transfers
    )


class ProjectionRequest(NamedTuple):
    """The settings of vLLM for a projection.

    Attributes:
        block_size: vLLM's ``--block-size``, in tokens.
        tensor_parallel_size: vLLM's ``--tensor-parallel-size``, in ranks.
        vllm_version: One of `VLLM_RELEASES`; in a projection, the version that it is planned as.
        prompt_lengths: Lengths in tokens of the prompts whose transfer is counted.
        kv_cache_dtype: vLLM's ``--kv-cache-dtype``, one of `KV_CACHE_DTYPES`; ``None`` for the
            graph's own dtypes.
        pipeline_parallel_size: vLLM's ``--pipeline-parallel-size``, in stages.
        gpu_memory: Bytes that each GPU has left for KV caches, vLLM's
            ``--kv-cache-memory-bytes``; ``None`` if that is not known.
        draft_start: The number of a draft model's first layer, after those of the model itself;
            ``None`` without a draft model.
        release: In a projection, the release that was asked for; empty otherwise.
        max_model_len: vLLM's ``--max-model-len``, in tokens; ``None`` if it is not known.
        in_flight_tokens: Tokens that are scheduled at once: vLLM's ``--max-num-batched-tokens``, in
            0.33 times the batches that run at once; ``None`` if that is not known.
        bandwidth: Bytes in a second that one rank transfers; ``None`` if that is not known.
        layer_count: The number of the model's layers, those without a KV cache included; ``None``
            for that of the graph's caches.
        layer_partition: ``VLLM_PP_LAYER_PARTITION``, the layers of each stage; empty without it.
        serve: The line that these settings are from; ``None`` if no line is known, which then
            decides no condition.
    """

    block_size: int
    tensor_parallel_size: int = 1
    vllm_version: str = VLLM_VERSIONS[-1]
    prompt_lengths: tuple[int, ...] = ()
    kv_cache_dtype: str | None = None
    pipeline_parallel_size: int = 1
    gpu_memory: int | None = None
    draft_start: int | None = None
    release: str = ""
    max_model_len: int | None = None
    in_flight_tokens: int | None = None
    bandwidth: int | None = None
    layer_count: int | None = None
    layer_partition: tuple[int, ...] = ()
    serve: ServeSettings | None = None


def plan_request(request: ProjectionRequest) -> ProjectionRequest:
    """Return a request with the version that its release is planned as, and with the release."""
    if request.release:
        return request
    planned_as = VLLM_RELEASES[request.vllm_version].planned_as
    return request._replace(vllm_version=planned_as, release=request.vllm_version)


ConditionState = Literal["met", "not met", "requires"]


class Condition(NamedTuple):
    """Something that vLLM requires.

    Attributes:
        name: A short name, unique among the conditions of one allocation or one projection.
        state: ``met`` or ``not met`` where the graph decides; ``requires`` where it cannot.
        why: What is required, or the reason why it is met or not.
        by_line: Whether a ``vllm serve`` line decides it, and not the graph.
    """

    name: str
    state: ConditionState
    why: str
    by_line: bool = False


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


def list_shown_conditions(conditions: Sequence[Condition]) -> tuple[Condition, ...]:
    """Return what a line decides, and the other conditions that are open."""
    others = find_open_conditions(each for each in conditions if not each.by_line)
    return tuple(each for each in conditions if each.by_line or each in others)


def combine_states(conditions: Iterable[Condition]) -> ConditionState:
    """Return the state of all conditions together: the worst one."""
    return next((condition.state for condition in find_open_conditions(conditions)), "met")


class Refusal(NamedTuple):
    """A reason why layers cannot be projected.

    Attributes:
        layers: The numbers of the layers.
        code: The code of the finding that reports it, ``KV619`` or ``KV622``.
        reason: Why vLLM, or this program, refuses them.
        hint: What would help.
    """

    layers: tuple[int, ...]
    code: str
    reason: str
    hint: str


class RefusalError(Exception):
    """Layers cannot be projected; the refusal has each of them once, with the reason."""

    def __init__(self, layers: Iterable[int], reason: str, hint: str, code: str = "KV622") -> None:
        super().__init__(reason)
        self.refusal = Refusal(tuple(dict.fromkeys(layers)), code, reason, hint)


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


def can_merge(specs: Sequence[KvCacheSpec], vllm_version: str) -> bool:
    """Return whether vLLM merges `specs` into one (``is_kv_cache_spec_uniform``)."""
    return len({build_merge_key(spec, vllm_version) for spec in specs}) == 1


def build_merge_key(spec: KvCacheSpec, vllm_version: str) -> KvCacheSpec:
    """Return the part of a spec that vLLM compares before it merges specs.

    It is equal for all specs that merge. This follows ``merge`` of each spec class. It does not
    compare every size: 0.24 ignores the value's head of full attention and all sizes of MLA; both
    versions ignore all sizes of windowed MLA.
    """
    traits = VERSION_TRAITS[vllm_version]
    if spec.kind == "sliding_window_mla" or (
        spec.kind == "mla_attention" and traits.merges_mla_sizes
    ):
        return KvCacheSpec(0, spec.kind, None, 0, 0, 0, spec.window, (), ())
    if spec.kind == "full_attention":
        # merge_window_sizes keeps the one window that full attention may have.
        compared_size_v = 0 if traits.merges_value_sizes else spec.head_size_v
        spec = spec._replace(head_size_v=compared_size_v, window=None)
    return spec.without_layer


def is_uniform_type(specs: Sequence[KvCacheSpec], vllm_version: str) -> bool:
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
    if first.is_state and VERSION_TRAITS[vllm_version].splits_states_by_size:
        return len(kinds) == 1 and len({spec.page_size for spec in specs}) == 1
    return len(kinds) == 1
