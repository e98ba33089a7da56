"""The KV buffers of a model, or of its windows together, as a consumer meets them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from onnxkvrename.errors import ModelError
from onnxkvrename.findings import Finding, finding
from onnxkvrename.layout import dims as sizing
from onnxkvrename.layout import kinds
from onnxkvrename.layout.dims import Shape, Sizes
from onnxkvrename.layout.kinds import Kind
from onnxkvrename.model.signature import Dim, Signature, Value
from onnxkvrename.rules.plan import Kept, Pair, Plan

NamedValue = TypeVar("NamedValue", Value, Kept)

_AGAIN = (
    "the graph changed, or it was stamped with another set: put the stamped file back, or, if "
    "that is meant, stamp it again: onnxkvrename manifest MODEL... --stamp"
)
_STATES = {3: "conv_state", 4: "recurrent_state"}


class Buffer(NamedTuple):
    """A KV buffer.

    ``part`` says what it holds (``key``, ``compressed_kv``), ``buffer`` how it is
    called. ``shape`` is as exported, symbols and all. ``dtype`` is ONNX's name, or
    ``MXINT8``, of what moves: the graph's own, or that of a custom_io.yaml.
    ``sequence`` is the axis that grows with the context, ``None`` for a state;
    ``window`` is what a sliding window is called or how long it is. A side
    that is missing has no name. ``token`` is what the names carry, empty for
    none, ``None`` where they do not agree.
    """

    layer: int
    part: str
    kind: Kind
    buffer: str
    scope: str
    input: str | None
    output: str | None
    dtype: str
    shape: Shape | None
    sequence: int | None
    window: Dim
    model: str
    token: str | None = ""

    @property
    def names(self) -> tuple[str, ...]:
        """The names that are there, input first."""
        return tuple(name for name in (self.input, self.output) if name is not None)

    @property
    def state(self) -> Shape | None:
        """The shape of what belongs to one sequence: all but the batch, which comes first."""
        return None if self.shape is None else self.shape[1:]

    @property
    def token_shape(self) -> Shape | None:
        """The shape of what one token adds, ``None`` for a state that does not grow."""
        if self.shape is None or self.sequence is None:
            return None
        return tuple(dim for axis, dim in enumerate(self.shape) if axis not in (0, self.sequence))


class Layout(NamedTuple):
    """All buffers, sorted by layer and part, and everything else that the graphs show.

    Of windows, ``inputs`` and ``outputs`` are those of all of them, each name
    once. ``sizes`` are what is known of symbols.
    """

    models: tuple[str, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    buffers: tuple[Buffer, ...]
    kept: tuple[Kept, ...]
    sizes: Sizes = MappingProxyType({})

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that have buffers, in order."""
        return tuple(sorted({buffer.layer for buffer in self.buffers}))

    @property
    def symbols(self) -> tuple[str, ...]:
        """The symbols in the shapes of buffers, the batch's among them."""
        return sizing.symbols(buffer.shape for buffer in self.buffers)

    @property
    def missing(self) -> tuple[str, ...]:
        """The symbols whose sizes are not known, the batch's aside."""
        found = sizing.symbols(buffer.state for buffer in self.buffers)
        return tuple(symbol for symbol in found if symbol not in self.sizes)

    def sized(self, shape: Shape) -> Shape:
        """A shape with the sizes that are known."""
        return sizing.sized(shape, self.sizes)

    def token_bytes(self, buffer: Buffer) -> int | None:
        """Bytes that a token adds to a buffer; ``None`` for a state, or where it is not known."""
        return self._bytes(buffer.token_shape, buffer.dtype)

    def state_bytes(self, buffer: Buffer) -> int | None:
        """Bytes of a state of one sequence; ``None`` for what grows, or where it is not known."""
        return self.sequence_bytes(buffer) if buffer.kind == "mamba" else None

    def sequence_bytes(self, buffer: Buffer) -> int | None:
        """Bytes of one sequence in a buffer, at its full length; ``None`` where not known."""
        return self._bytes(buffer.state, buffer.dtype)

    def batch_bytes(self, buffer: Buffer) -> int | None:
        """Bytes of a buffer with all its sequences; ``None`` where not known."""
        return self._bytes(buffer.shape, buffer.dtype)

    def _bytes(self, shape: Shape | None, dtype: str) -> int | None:
        return None if shape is None else sizing.bytes_of(self.sized(shape), dtype)


class Source(NamedTuple):
    """A model: what it shows, and what the rules make of it."""

    path: str
    signature: Signature
    plan: Plan


def layout(sources: Sequence[Source]) -> Layout:
    """The layout of a model, or of the windows of one in the order of their layers.

    Raises :class:`ModelError` where two of them have the same buffer.
    """
    buffers: dict[tuple[int, str], Buffer] = {}
    order: dict[str, int] = {}
    for source in sources:
        for name in (name for names in source.plan.parts.values() for name in names):
            order.setdefault(name, len(order))
        for buffer in _buffers(source):
            other = buffers.setdefault((buffer.layer, buffer.part), buffer)
            if other is not buffer:
                raise _doubled(other, buffer)
    return Layout(
        models=tuple(source.path for source in sources),
        inputs=_once(value for source in sources for value in source.signature.inputs),
        outputs=_once(value for source in sources for value in source.signature.outputs),
        buffers=tuple(sorted(buffers.values(), key=lambda b: (b.layer, order[b.buffer], b.scope))),
        kept=_once(kept for source in sources for kept in source.plan.kept),
    )


def context(kind: Kind, shape: Shape | None) -> tuple[int | None, Dim]:
    """The axis of a buffer that grows with the context, and what its window is called."""
    axis = None if kind == "mamba" else kinds.context_axis(shape)
    along = None if shape is None or axis is None else shape[axis]
    return axis, along if kinds.is_window(along) else None


def with_sizes(found: Layout, sizes: Sizes) -> Layout:
    """The same buffers, with more symbols known; new sizes come before old ones."""
    return found._replace(sizes=MappingProxyType({**found.sizes, **sizes}))


def with_dtypes(found: Layout, dtypes: Mapping[str, str]) -> Layout:
    """The same buffers and values with other dtypes, by the names of inputs and outputs.

    Raises :class:`ModelError` where the two sides of a buffer would differ, or
    nothing has one of the names.
    """
    known = {value.name for value in (*found.inputs, *found.outputs)}
    strange = [name for name in dtypes if name not in known]
    if strange:
        raise ModelError(
            f"nothing is called {strange[0]}",
            hint="give the file that belongs to this model; one of before its rename follows with "
            "onnxkvrename MODEL --prefix TOKEN --sidecar FILE",
        )
    return found._replace(
        inputs=_retyped(found.inputs, dtypes),
        outputs=_retyped(found.outputs, dtypes),
        buffers=tuple(_of_dtype(buffer, dtypes) for buffer in found.buffers),
    )


def digest(found: Layout) -> str:
    """The layout in one string: equal for workers whose buffers are alike.

    SHA-256, in hexadecimal, over the JSON list of ``[layer, part, kind, dtype,
    shape, name]`` of each buffer in order, without blanks and in ASCII; ``name``
    is the input's. The batch stands as ``null``, since one sequence is handed
    over at a time, and a symbol whose size is known as that size.
    """
    rows = [
        [b.layer, b.part, b.kind, b.dtype, _told(found, b), b.input or b.output]
        for b in found.buffers
    ]
    return sha256(json.dumps(rows, separators=(",", ":")).encode("ascii")).hexdigest()


def wrongly_stamped(found: Layout, stamps: Mapping[str, str | None]) -> dict[str, Finding]:
    """KV621, by the models' paths; ``stamps`` are what they carry, ``None`` for nothing.

    Where no model carries anything, none is missed.
    """
    if set(stamps.values()) <= {None}:
        return {}
    own = digest(found)
    return {path: _void(stamp, own) for path, stamp in stamps.items() if stamp != own}


def void_stamp(source: Source, stamp: str | None) -> Finding | None:
    """KV621 of a model that is whole by itself, if it carries a stamp that is not its own."""
    if stamp is None:
        return None
    try:
        found = layout([source])
    except ModelError as error:
        return finding("KV621", "", f"is stamped, and has no layout: it {error.message}", _AGAIN)
    return wrongly_stamped(found, {source.path: stamp}).get(source.path)


def _void(stamp: str | None, own: str) -> Finding:
    if stamp is None:
        hint = "stamp all of them together: onnxkvrename manifest MODEL... --stamp"
        return finding("KV621", "", "has no stamp, unlike other windows of it", hint)
    return finding("KV621", "", f"is stamped {stamp[:12]}…, but its layout is {own[:12]}…", _AGAIN)


def _told(found: Layout, buffer: Buffer) -> list[Dim] | None:
    return None if buffer.state is None else [None, *found.sized(buffer.state)]


def _once(values: Iterable[NamedValue]) -> tuple[NamedValue, ...]:
    """Each name once, as it stands first."""
    found: dict[str, NamedValue] = {}
    for value in values:
        found.setdefault(value.name, value)
    return tuple(found.values())


def _retyped(values: tuple[Value, ...], dtypes: Mapping[str, str]) -> tuple[Value, ...]:
    return tuple(value._replace(dtype=dtypes.get(value.name, value.dtype)) for value in values)


def _of_dtype(buffer: Buffer, dtypes: Mapping[str, str]) -> Buffer:
    told = {dtypes[name]: name for name in buffer.names if name in dtypes}
    if len(told) > 1:
        (one, name), (other, second) = told.items()
        raise ModelError(
            f"{name} is {one} and {second} is {other}",
            hint="both sides of a buffer share one piece of memory",
        )
    return buffer._replace(dtype=next(iter(told), buffer.dtype))


def _buffers(source: Source) -> Iterator[Buffer]:
    layers: dict[tuple[int, str], list[Pair]] = {}
    for pair in source.plan.pairs:
        layers.setdefault((pair.layer, pair.kind), []).append(pair)
    for pair in source.plan.pairs:
        yield _buffer(pair, layers[pair.layer, pair.kind], source.path)


def _buffer(pair: Pair, layer: Sequence[Pair], model: str) -> Buffer:
    kind, shape = kinds.kind_of(pair, layer), kinds.shape_of(pair)
    axis, window = context(kind, shape)
    tokens = {end.token for end in pair.ends}
    return Buffer(
        layer=pair.layer,
        part=_part(pair, kind, layer),
        kind=kind,
        buffer=pair.buffer,
        scope=pair.scope,
        input=None if pair.input is None else pair.input.old,
        output=None if pair.output is None else pair.output.old,
        dtype=kinds.dtype_of(pair),
        shape=shape,
        sequence=axis,
        window=window,
        model=model,
        token=tokens.pop() if len(tokens) == 1 else None,
    )


def _part(pair: Pair, kind: Kind, layer: Sequence[Pair]) -> str:
    """What a buffer holds; a linear layer's states may be called like attention's.

    They are told apart by their ranks; where these do not differ, their names stand.
    """
    part = pair.buffer.removeprefix("past_")
    ranks = [len(kinds.shape_of(other) or ()) for other in layer if other.scope == pair.scope]
    if kind == "mamba" and part in ("key", "value") and len(set(ranks)) == len(ranks):
        return _STATES.get(len(kinds.shape_of(pair) or ()), part)
    return part


def _doubled(one: Buffer, other: Buffer) -> ModelError:
    if one.model == other.model:
        called = " and ".join(buffer.names[0] for buffer in (one, other))
        return ModelError(
            f"has two buffers for {one.part} of layer {one.layer}: {called}", path=one.model
        )
    return ModelError(
        f"has {one.part} of layer {one.layer}, as {one.model} has",
        path=other.model,
        hint="give one model, or the windows of one",
    )
