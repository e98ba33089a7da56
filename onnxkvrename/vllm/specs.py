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
from onnxkvrename.layout import dims as sizing
from onnxkvrename.layout.kinds import Kind
from onnxkvrename.layout.layout import Buffer, Layout
from onnxkvrename.model.signature import Dim

State = Literal["met", "not met", "requires"]
Era = Literal["0.24", "0.33"]
ERAS: tuple[Era, ...] = ("0.24", "0.33")
"""The versions of vLLM whose code was read."""
MLA = frozenset[Kind]({"mla_attention", "sliding_window_mla"})
WINDOWED = frozenset[Kind]({"sliding_window", "sliding_window_mla", "chunked_local_attention"})

_FLOATS = {"FLOAT16": 2, "BFLOAT16": 2, "FLOAT": 4}
_ITEMSIZES = {**_FLOATS, "FLOAT8E4M3FN": 1, "FLOAT8E5M2": 1}
_MOST = 1 << 31
_ONE_HEAD_SIZE = ("cross_attention", "chunked_local_attention")


class Asked(NamedTuple):
    """What a projection is asked for.

    ``block_size`` is vLLM's ``--block-size`` in tokens, ``tp`` its tensor
    parallelism, ``tokens`` are lengths of prompts.
    """

    block_size: int
    tp: int = 1
    era: str = ERAS[-1]
    tokens: tuple[int, ...] = ()


class Condition(NamedTuple):
    """Something that must hold; ``requires`` is what a graph cannot decide."""

    name: str
    state: State
    why: str


class Refusal(NamedTuple):
    """Why layers cannot be projected, and what would help; ``code`` is that of the finding."""

    layers: tuple[int, ...]
    code: str
    reason: str
    hint: str


class Refused(Exception):
    """Layers cannot be projected; carries the :class:`Refusal`."""

    def __init__(self, layers: Iterable[int], reason: str, hint: str, code: str = "KV622") -> None:
        super().__init__(reason)
        self.refusal = Refusal(tuple(dict.fromkeys(layers)), code, reason, hint)


class Spec(NamedTuple):
    """One layer's KV cache on one rank, in vLLM's terms.

    ``block_size`` is in tokens; states have none of their own. ``heads`` are KV
    heads. ``head_size`` of MLA is the latent and its rope together, and its
    ``head_size_v`` 0. ``window`` is in tokens, of chunked attention the chunk; a
    symbol where its size is not known. ``states`` are shapes; ``dtypes`` ONNX's
    names, one for attention and one for each state. ``padded`` is the page that
    vLLM pads to, in bytes.
    """

    layer: int
    kind: Kind
    block_size: int | None
    heads: int
    head_size: int
    head_size_v: int
    window: Dim
    states: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    padded: int | None = None

    @property
    def unpadded(self) -> int:
        """Bytes of a page without padding."""
        if self.kind == "mamba":
            pairs = zip(self.states, self.dtypes, strict=True)
            return sum(math.prod(shape) * _ITEMSIZES[dtype] for shape, dtype in pairs)
        return (self.block_size or 0) * self.token_bytes

    @property
    def token_bytes(self) -> int:
        """Bytes that one token adds; 0 for states."""
        if self.kind == "mamba":
            return 0
        return self.heads * (self.head_size + self.head_size_v) * _ITEMSIZES[self.dtypes[0]]

    @property
    def page(self) -> int:
        """Bytes of a page."""
        return self.unpadded if self.padded is None else self.padded

    @property
    def alike(self) -> Spec:
        """The same for every layer with this spec."""
        return self._replace(layer=0)


class Specs(NamedTuple):
    """The specs of all layers that have one, in order, and why others have none."""

    specs: tuple[Spec, ...]
    refusals: tuple[Refusal, ...]
    conditions: tuple[Condition, ...]


def check(asked: Asked) -> None:
    """Raises :class:`KvRenameError` for an era that is not known, and for sizes that are none."""
    if asked.era not in ERAS:
        raise KvRenameError(
            f"vLLM {asked.era} is not known here", hint=f"there are: {', '.join(ERAS)}"
        )
    sizes = {"block size": asked.block_size, "tensor parallelism": asked.tp}
    for name, size in (*sizes.items(), *(("prompt", size) for size in asked.tokens)):
        if size < 1:
            raise KvRenameError(f"a {name} of {size} is too small", hint="give 1 or more")
        if size >= _MOST:
            raise KvRenameError(f"a {name} of {size} is too large", hint=f"give less than {_MOST}")


def specs(layout: Layout, asked: Asked) -> Specs:
    """The spec of each layer; parts of a layer with one kind are one spec.

    A layer may have two, such as self and cross attention. Layers count in the
    order of their numbers.
    """
    found, refused = list[Spec](), list[Refusal]()
    for (layer, kind), buffers in _together(layout.buffers).items():
        try:
            found.append(_spec(layer, kind, buffers, layout, asked))
        except Refused as error:
            refused.append(error.refusal)
    return Specs(tuple(found), tuple(_folded(refused)), tuple(_conditions(layout, found, asked)))


def _together(buffers: Iterable[Buffer]) -> dict[tuple[int, Kind], list[Buffer]]:
    """The buffers of each layer by kind, cross attention after the decoder's own."""
    found: dict[tuple[int, Kind], list[Buffer]] = {}
    for buffer in sorted(buffers, key=lambda b: (b.layer, b.kind == "cross_attention")):
        found.setdefault((buffer.layer, buffer.kind), []).append(buffer)
    return found


def _folded(refusals: Iterable[Refusal]) -> Iterator[Refusal]:
    """Refusals that differ in their layers only as one."""
    layers: dict[Refusal, dict[int, None]] = {}
    for refusal in refusals:
        layers.setdefault(refusal._replace(layers=()), {}).update(dict.fromkeys(refusal.layers))
    for refusal, found in layers.items():
        yield refusal._replace(layers=tuple(found))


def _spec(layer: int, kind: Kind, buffers: Sequence[Buffer], layout: Layout, asked: Asked) -> Spec:
    if kind == "unknown":
        raise Refused(
            [layer],
            "every size is fixed, so a cache and a state look alike",
            "export with a symbol for the context",
        )
    if kind == "mamba":
        return _states(layer, buffers, layout, asked)
    dtypes = {buffer.dtype for buffer in buffers}
    if len(dtypes) > 1:
        said = " and ".join(sorted(dtypes))
        raise Refused([layer], f"its parts are {said}: a page of vLLM has one dtype", "give one")
    dtype = _known(layer, dtypes.pop(), _ITEMSIZES)
    tokens = [_per_token(layer, buffer, layout) for buffer in buffers]
    window = _window(layer, buffers, layout) if kind in WINDOWED else None
    if kind in MLA:
        heads, size, size_v = 1, _latent(layer, tokens), 0
    else:
        heads, size, size_v = _heads(layer, kind, buffers, tokens, asked)
    return Spec(layer, kind, asked.block_size, heads, size, size_v, window, (), (dtype,))


def _states(layer: int, buffers: Sequence[Buffer], layout: Layout, asked: Asked) -> Spec:
    shapes = [_sizes(layer, buffer, layout)[1:] for buffer in buffers]
    for shape in shapes:
        if not shape:
            raise Refused([layer], "a state has no axis behind the batch", "export it with one")
        if shape[0] % asked.tp:
            raise Refused(
                [layer],
                f"a state of {shape[0]} does not divide by {asked.tp} ranks",
                "choose a tensor parallelism that divides it",
                "KV619",
            )
    dtypes = tuple(_known(layer, buffer.dtype, _FLOATS) for buffer in buffers)
    divided = tuple((shape[0] // asked.tp, *shape[1:]) for shape in shapes)
    return Spec(layer, "mamba", None, 0, 0, 0, None, divided, dtypes)


def _known(layer: int, dtype: str, known: Iterable[str]) -> str:
    if dtype not in known:
        raise Refused(
            [layer],
            f"vLLM has no such cache in {dtype}",
            f"it has {', '.join(known)}: compile for one of them, and give its custom_io.yaml",
        )
    return dtype


def _sizes(layer: int, buffer: Buffer, layout: Layout, axis: int = 0) -> tuple[int, ...]:
    """The shape in numbers, with 1 for the batch and for the context on ``axis``."""
    if buffer.shape is None:
        raise Refused([layer], f"the shape of {buffer.part} is not known", "export it with shapes")
    free = {0, axis}
    shape = [1 if at in free else dim for at, dim in enumerate(layout.sized(buffer.shape))]
    sizes = tuple(dim for dim in shape if isinstance(dim, int) and dim > 0)
    if len(sizes) != len(shape):
        dim = next(dim for dim in shape if not isinstance(dim, int) or dim < 1)
        hint = f"--dim {dim}=SIZE says it" if isinstance(dim, str) else "export it with sizes"
        raise Refused([layer], f"a size of {buffer.part} is not known: {dim}", hint)
    if sizing.elements(sizes) is None:
        raise Refused([layer], f"{buffer.part} is larger than any memory", "export it with sizes")
    return sizes


def _per_token(layer: int, buffer: Buffer, layout: Layout) -> tuple[int, ...]:
    """Heads and size of what one token adds, or the size alone.

    Cross attention has a context of fixed length, which stands on axis 2.
    """
    axis = buffer.sequence
    rank = 0 if buffer.shape is None else len(buffer.shape)
    if axis is None and buffer.kind == "cross_attention" and rank == 4:
        axis = 2
    if axis is None or rank not in (3, 4):
        raise Refused([layer], f"{buffer.part} has no known context axis", "export it with shapes")
    sizes = _sizes(layer, buffer, layout, axis)
    return tuple(size for at, size in enumerate(sizes) if at not in (0, axis))


def _window(layer: int, buffers: Sequence[Buffer], layout: Layout) -> Dim:
    windows = {*layout.sized(tuple(buffer.window for buffer in buffers))}
    window = windows.pop()
    if windows or window is None:
        raise Refused([layer], "its window is not known, or not one", "export it with a symbol")
    return window


def _latent(layer: int, tokens: Sequence[tuple[int, ...]]) -> int:
    """Latent and rope of MLA, which no rank divides."""
    if len(tokens) < 2 or any(len(sizes) == 2 and sizes[0] != 1 for sizes in tokens):
        raise Refused(
            [layer], "a page of MLA holds one latent and its rope", "see what is missing: verify"
        )
    return sum(sizes[-1] for sizes in tokens)


def _heads(
    layer: int,
    kind: Kind,
    buffers: Sequence[Buffer],
    tokens: Sequence[tuple[int, ...]],
    asked: Asked,
) -> tuple[int, int, int]:
    """KV heads on one rank, and the sizes of a key's and a value's head."""
    sides = {"value" if "value" in buffer.part else "key": at for at, buffer in enumerate(buffers)}
    if len(buffers) != 2 or len(sides) != 2:
        raise Refused([layer], "a page holds a key and a value", "see what is missing: verify")
    key, value = tokens[sides["key"]], tokens[sides["value"]]
    if key[:-1] != value[:-1]:
        raise Refused([layer], "key and value differ in their heads", "vLLM has one number")
    if kind in _ONE_HEAD_SIZE and key != value:
        raise Refused(
            [layer], f"key and value of {kind} differ in size", "vLLM has one size for both"
        )
    if len(key) == 1 and asked.tp > 1:
        raise Refused(
            [layer], "heads and size share one axis: what a rank has is not known", "give --tp 1"
        )
    heads = key[0] if len(key) == 2 else 1
    return _on_rank(layer, heads, asked.tp), key[-1], value[-1]


def _on_rank(layer: int, heads: int, tp: int) -> int:
    """KV heads on each rank; fewer heads than ranks are held by several."""
    if heads % tp and tp % heads:
        raise Refused(
            [layer],
            f"{heads} KV heads do not divide by {tp} ranks, nor ranks by heads",
            "choose a tensor parallelism that divides them, or a multiple of them",
            "KV619",
        )
    return max(1, heads // tp)


def _conditions(layout: Layout, found: Sequence[Spec], asked: Asked) -> Iterator[Condition]:
    kinds = {spec.kind for spec in found}
    dtypes = sorted({dtype for spec in found if spec.kind != "mamba" for dtype in spec.dtypes})
    if dtypes:
        said = " and ".join(dtypes)
        yield _requires("kv_cache_dtype", f"--kv-cache-dtype, or the model's dtype, is {said}")
        yield _requires("kernel block size", "the attention backend takes blocks undivided")
    yield _requires("layer order", "vLLM's layers register in the order of their numbers")
    yield _requires("parallelism", "one pipeline stage, no context parallelism, no draft model")
    if len(kinds) > 1:
        yield _requires("hybrid KV cache manager", "it is on: the connector supports hybrids")
    if any(buffer.shape is not None and len(buffer.shape) == 3 for buffer in _caches(layout)):
        yield _requires("heads", "heads and size share one axis: taken as one KV head")
    if "cross_attention" in kinds:
        yield _requires("encoder", "cross attention holds the encoder's tokens, not the prompt's")
    if "sliding_window_mla" in kinds:
        why = "the model class has layers of sliding_window_mla, without alignment or compression"
        yield _requires("sliding_window_mla", why)
    if "mamba" in kinds:
        yield from _of_states(asked)


def _caches(layout: Layout) -> Iterator[Buffer]:
    named = MLA | {"mamba", "unknown"}
    return (buffer for buffer in layout.buffers if buffer.kind not in named)


def _of_states(asked: Asked) -> Iterator[Condition]:
    why = "vLLM keeps the kernel's length less 1, and the graph shows the same"
    yield _requires("conv state", why)
    yield _requires(
        "state dtype", "--mamba-cache-dtype and --mamba-ssm-cache-dtype are the graph's"
    )
    yield _requires("mamba_cache_mode", "it is none: one block for a request, without align or all")
    if asked.tp > 1:
        why = "vLLM divides the first axis of each state, and its groups divide by the ranks too"
        yield _requires("state shards", why)


def _requires(name: str, why: str) -> Condition:
    return Condition(name, "requires", why)
