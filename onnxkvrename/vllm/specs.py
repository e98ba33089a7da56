"""The pages of vLLM's KV cache: what one block of each layer takes.

After vLLM 0.24.0 and 0.33.0: ``v1/kv_cache_interface.py`` (what a page holds) and the
``get_kv_cache_spec`` of the layers in ``model_executor/layers`` (what tensor
parallelism divides).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

from onnxkvrename.errors import KvRenameError
from onnxkvrename.layout.dims import count_elements
from onnxkvrename.layout.kinds import BufferKind
from onnxkvrename.layout.layout import Buffer, Layout
from onnxkvrename.model.signature import Dim

ConditionState = Literal["met", "not met", "requires"]
VllmVersion = Literal["0.24", "0.33"]
VLLM_VERSIONS: tuple[VllmVersion, ...] = ("0.24", "0.33")
"""The versions of vLLM whose code was read."""
MLA_KINDS = frozenset[BufferKind]({"mla_attention", "sliding_window_mla"})
WINDOWED_KINDS = frozenset[BufferKind](
    {"sliding_window", "sliding_window_mla", "chunked_local_attention"}
)

_FLOAT_ITEMSIZES = {"FLOAT16": 2, "BFLOAT16": 2, "FLOAT": 4}
_ITEMSIZES = {**_FLOAT_ITEMSIZES, "FLOAT8E4M3FN": 1, "FLOAT8E5M2": 1}
_SIZE_LIMIT = 1 << 31
_SINGLE_HEAD_SIZE_KINDS = ("cross_attention", "chunked_local_attention")


class ProjectionRequest(NamedTuple):
    """What a projection is asked for.

    ``block_size`` is vLLM's ``--block-size`` in tokens, ``tp`` its tensor
    parallelism, ``tokens`` are lengths of prompts.
    """

    block_size: int
    tensor_parallel_size: int = 1
    vllm_version: str = VLLM_VERSIONS[-1]
    prompt_lengths: tuple[int, ...] = ()


class Condition(NamedTuple):
    """Something that must hold; ``requires`` is what a graph cannot decide."""

    name: str
    state: ConditionState
    why: str


class Refusal(NamedTuple):
    """Why layers cannot be projected, and what would help; ``code`` is that of the finding."""

    layers: tuple[int, ...]
    code: str
    reason: str
    hint: str


class RefusalError(Exception):
    """Layers cannot be projected; carries the :class:`Refusal`."""

    def __init__(self, layers: Iterable[int], reason: str, hint: str, code: str = "KV622") -> None:
        super().__init__(reason)
        self.refusal = Refusal(tuple(dict.fromkeys(layers)), code, reason, hint)


class KvCacheSpec(NamedTuple):
    """One layer's KV cache on one rank, in vLLM's terms.

    ``block_size`` is in tokens; states have none of their own. ``heads`` are KV
    heads. ``head_size`` of MLA is the latent and its rope together, and its
    ``head_size_v`` 0. ``window`` is in tokens, of chunked attention the chunk; a
    symbol where its size is not known. ``states`` are shapes; ``dtypes`` ONNX's
    names, one for attention and one for each state. ``padded`` is the page that
    vLLM pads to, in bytes.
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

    @property
    def unpadded_page_size(self) -> int:
        """Bytes of a page without padding."""
        if self.kind == "mamba":
            pairs = zip(self.state_shapes, self.dtypes, strict=True)
            return sum(math.prod(shape) * _ITEMSIZES[dtype] for shape, dtype in pairs)
        return (self.block_size or 0) * self.token_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes that one token adds; 0 for states."""
        if self.kind == "mamba":
            return 0
        return self.kv_heads * (self.head_size + self.head_size_v) * _ITEMSIZES[self.dtypes[0]]

    @property
    def page_size(self) -> int:
        """Bytes of a page."""
        return self.unpadded_page_size if self.page_size_padded is None else self.page_size_padded

    @property
    def without_layer(self) -> KvCacheSpec:
        """The same for every layer with this spec."""
        return self._replace(layer=0)


class ModelSpecs(NamedTuple):
    """The specs of all layers that have one, in order, and why others have none."""

    specs: tuple[KvCacheSpec, ...]
    refusals: tuple[Refusal, ...]
    conditions: tuple[Condition, ...]


def check_request(asked: ProjectionRequest) -> None:
    """Raises :class:`KvRenameError` for an era that is not known, and for sizes that are none."""
    if asked.vllm_version not in VLLM_VERSIONS:
        raise KvRenameError(
            f"vLLM {asked.vllm_version} is not known here",
            hint=f"there are: {', '.join(VLLM_VERSIONS)}",
        )
    sizes = {"block size": asked.block_size, "tensor parallelism": asked.tensor_parallel_size}
    for name, size in (*sizes.items(), *(("prompt", size) for size in asked.prompt_lengths)):
        if size < 1:
            raise KvRenameError(f"a {name} of {size} is too small", hint="give 1 or more")
        if size >= _SIZE_LIMIT:
            raise KvRenameError(
                f"a {name} of {size} is too large", hint=f"give less than {_SIZE_LIMIT}"
            )


def build_specs(layout: Layout, asked: ProjectionRequest) -> ModelSpecs:
    """The spec of each layer; parts of a layer with one kind are one spec.

    A layer may have two, such as self and cross attention. Layers count in the
    order of their numbers.
    """
    found, refused = list[KvCacheSpec](), list[Refusal]()
    for (layer, kind), buffers in _group_buffers(layout.buffers).items():
        try:
            found.append(_build_spec(layer, kind, buffers, layout, asked))
        except RefusalError as error:
            refused.append(error.refusal)
    return ModelSpecs(
        tuple(found), tuple(_merge_refusals(refused)), tuple(_list_conditions(layout, found, asked))
    )


def _group_buffers(buffers: Iterable[Buffer]) -> dict[tuple[int, BufferKind], list[Buffer]]:
    """The buffers of each layer by kind, cross attention after the decoder's own."""
    found: dict[tuple[int, BufferKind], list[Buffer]] = {}
    for buffer in sorted(buffers, key=lambda b: (b.layer, b.kind == "cross_attention")):
        found.setdefault((buffer.layer, buffer.kind), []).append(buffer)
    return found


def _merge_refusals(refusals: Iterable[Refusal]) -> Iterator[Refusal]:
    """Refusals that differ in their layers only as one."""
    layers: dict[Refusal, dict[int, None]] = {}
    for refusal in refusals:
        layers.setdefault(refusal._replace(layers=()), {}).update(dict.fromkeys(refusal.layers))
    for refusal, found in layers.items():
        yield refusal._replace(layers=tuple(found))


def _build_spec(
    layer: int,
    kind: BufferKind,
    buffers: Sequence[Buffer],
    layout: Layout,
    asked: ProjectionRequest,
) -> KvCacheSpec:
    if kind == "unknown":
        raise RefusalError(
            [layer],
            "every size is fixed, so a cache and a state look alike",
            "export with a symbol for the context",
        )
    if kind == "mamba":
        return _build_state_spec(layer, buffers, layout, asked)
    dtypes = {buffer.dtype for buffer in buffers}
    if len(dtypes) > 1:
        said = " and ".join(sorted(dtypes))
        raise RefusalError(
            [layer], f"its parts are {said}: a page of vLLM has one dtype", "give one"
        )
    dtype = _check_dtype(layer, dtypes.pop(), _ITEMSIZES)
    tokens = [_resolve_token_shape(layer, buffer, layout) for buffer in buffers]
    window = _resolve_window(layer, buffers, layout) if kind in WINDOWED_KINDS else None
    if kind in MLA_KINDS:
        heads, size, size_v = 1, _sum_latent_sizes(layer, tokens), 0
    else:
        heads, size, size_v = _resolve_heads(layer, kind, buffers, tokens, asked)
    return KvCacheSpec(layer, kind, asked.block_size, heads, size, size_v, window, (), (dtype,))


def _build_state_spec(
    layer: int, buffers: Sequence[Buffer], layout: Layout, asked: ProjectionRequest
) -> KvCacheSpec:
    shapes = [_resolve_sizes(layer, buffer, layout)[1:] for buffer in buffers]
    for shape in shapes:
        if not shape:
            raise RefusalError(
                [layer], "a state has no axis behind the batch", "export it with one"
            )
        if shape[0] % asked.tensor_parallel_size:
            raise RefusalError(
                [layer],
                f"a state of {shape[0]} does not divide by {asked.tensor_parallel_size} ranks",
                "choose a tensor parallelism that divides it",
                "KV619",
            )
    dtypes = tuple(_check_dtype(layer, buffer.dtype, _FLOAT_ITEMSIZES) for buffer in buffers)
    divided = tuple((shape[0] // asked.tensor_parallel_size, *shape[1:]) for shape in shapes)
    return KvCacheSpec(layer, "mamba", None, 0, 0, 0, None, divided, dtypes)


def _check_dtype(layer: int, dtype: str, known: Iterable[str]) -> str:
    if dtype not in known:
        raise RefusalError(
            [layer],
            f"vLLM has no such cache in {dtype}",
            f"it has {', '.join(known)}: compile for one of them, and give its custom_io.yaml",
        )
    return dtype


def _resolve_sizes(layer: int, buffer: Buffer, layout: Layout, axis: int = 0) -> tuple[int, ...]:
    """The shape in numbers, with 1 for the batch and for the context on ``axis``."""
    if buffer.shape is None:
        raise RefusalError(
            [layer], f"the shape of {buffer.part} is not known", "export it with shapes"
        )
    free = {0, axis}
    shape = [1 if at in free else dim for at, dim in enumerate(layout.resolve_shape(buffer.shape))]
    sizes = tuple(dim for dim in shape if isinstance(dim, int) and dim > 0)
    if len(sizes) != len(shape):
        dim = next(dim for dim in shape if not isinstance(dim, int) or dim < 1)
        hint = f"--dim {dim}=SIZE says it" if isinstance(dim, str) else "export it with sizes"
        raise RefusalError([layer], f"a size of {buffer.part} is not known: {dim}", hint)
    if count_elements(sizes) is None:
        raise RefusalError(
            [layer], f"{buffer.part} is larger than any memory", "export it with sizes"
        )
    return sizes


def _resolve_token_shape(layer: int, buffer: Buffer, layout: Layout) -> tuple[int, ...]:
    """Heads and size of what one token adds, or the size alone.

    Cross attention has a context of fixed length, which stands on axis 2.
    """
    axis = buffer.sequence_axis
    rank = 0 if buffer.shape is None else len(buffer.shape)
    if axis is None and buffer.kind == "cross_attention" and rank == 4:
        axis = 2
    if axis is None or rank not in (3, 4):
        raise RefusalError(
            [layer], f"{buffer.part} has no known context axis", "export it with shapes"
        )
    sizes = _resolve_sizes(layer, buffer, layout, axis)
    return tuple(size for at, size in enumerate(sizes) if at not in (0, axis))


def _resolve_window(layer: int, buffers: Sequence[Buffer], layout: Layout) -> Dim:
    windows = {*layout.resolve_shape(tuple(buffer.window for buffer in buffers))}
    window = windows.pop()
    if windows or window is None:
        raise RefusalError(
            [layer], "its window is not known, or not one", "export it with a symbol"
        )
    return window


def _sum_latent_sizes(layer: int, tokens: Sequence[tuple[int, ...]]) -> int:
    """Latent and rope of MLA, which no rank divides."""
    if len(tokens) < 2 or any(len(sizes) == 2 and sizes[0] != 1 for sizes in tokens):
        raise RefusalError(
            [layer], "a page of MLA holds one latent and its rope", "see what is missing: verify"
        )
    return sum(sizes[-1] for sizes in tokens)


def _resolve_heads(
    layer: int,
    kind: BufferKind,
    buffers: Sequence[Buffer],
    tokens: Sequence[tuple[int, ...]],
    asked: ProjectionRequest,
) -> tuple[int, int, int]:
    """KV heads on one rank, and the sizes of a key's and a value's head."""
    sides = {"value" if "value" in buffer.part else "key": at for at, buffer in enumerate(buffers)}
    if len(buffers) != 2 or len(sides) != 2:
        raise RefusalError([layer], "a page holds a key and a value", "see what is missing: verify")
    key, value = tokens[sides["key"]], tokens[sides["value"]]
    if key[:-1] != value[:-1]:
        raise RefusalError([layer], "key and value differ in their heads", "vLLM has one number")
    if kind in _SINGLE_HEAD_SIZE_KINDS and key != value:
        raise RefusalError(
            [layer], f"key and value of {kind} differ in size", "vLLM has one size for both"
        )
    if len(key) == 1 and asked.tensor_parallel_size > 1:
        raise RefusalError(
            [layer], "heads and size share one axis: what a rank has is not known", "give --tp 1"
        )
    heads = key[0] if len(key) == 2 else 1
    return _count_heads_per_rank(layer, heads, asked.tensor_parallel_size), key[-1], value[-1]


def _count_heads_per_rank(layer: int, heads: int, tp: int) -> int:
    """KV heads on each rank; fewer heads than ranks are held by several."""
    if heads % tp and tp % heads:
        raise RefusalError(
            [layer],
            f"{heads} KV heads do not divide by {tp} ranks, nor ranks by heads",
            "choose a tensor parallelism that divides them, or a multiple of them",
            "KV619",
        )
    return max(1, heads // tp)


def _list_conditions(
    layout: Layout, found: Sequence[KvCacheSpec], asked: ProjectionRequest
) -> Iterator[Condition]:
    kinds = {spec.kind for spec in found}
    dtypes = sorted({dtype for spec in found if spec.kind != "mamba" for dtype in spec.dtypes})
    if dtypes:
        said = " and ".join(dtypes)
        yield _build_requirement(
            "kv_cache_dtype", f"--kv-cache-dtype, or the model's dtype, is {said}"
        )
        yield _build_requirement(
            "kernel block size", "the attention backend takes blocks undivided"
        )
    yield _build_requirement("layer order", "vLLM's layers register in the order of their numbers")
    yield _build_requirement(
        "parallelism", "one pipeline stage, no context parallelism, no draft model"
    )
    if len(kinds) > 1:
        yield _build_requirement(
            "hybrid KV cache manager", "it is on: the connector supports hybrids"
        )
    if any(
        buffer.shape is not None and len(buffer.shape) == 3
        for buffer in _select_key_value_buffers(layout)
    ):
        yield _build_requirement("heads", "heads and size share one axis: taken as one KV head")
    if "cross_attention" in kinds:
        yield _build_requirement(
            "encoder", "cross attention holds the encoder's tokens, not the prompt's"
        )
    if "sliding_window_mla" in kinds:
        why = "the model class has layers of sliding_window_mla, without alignment or compression"
        yield _build_requirement("sliding_window_mla", why)
    if "mamba" in kinds:
        yield from _list_state_conditions(asked)


def _select_key_value_buffers(layout: Layout) -> Iterator[Buffer]:
    named = MLA_KINDS | {"mamba", "unknown"}
    return (buffer for buffer in layout.buffers if buffer.kind not in named)


def _list_state_conditions(asked: ProjectionRequest) -> Iterator[Condition]:
    why = "vLLM keeps the kernel's length less 1, and the graph shows the same"
    yield _build_requirement("conv state", why)
    yield _build_requirement(
        "state dtype", "--mamba-cache-dtype and --mamba-ssm-cache-dtype are the graph's"
    )
    yield _build_requirement(
        "mamba_cache_mode", "it is none: one block for a request, without align or all"
    )
    if asked.tensor_parallel_size > 1:
        why = "vLLM divides the first axis of each state, and its groups divide by the ranks too"
        yield _build_requirement("state shards", why)


def _build_requirement(name: str, why: str) -> Condition:
    return Condition(name, "requires", why)
