"""The KV buffers of a model, or of its windows together, as a consumer meets them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from onnxkvrename.errors import ModelError
from onnxkvrename.findings import Finding, build_finding
from onnxkvrename.layout.dims import (
    Shape,
    Sizes,
    compute_tensor_bytes,
    list_symbols,
    resolve_symbols,
)
from onnxkvrename.layout.kinds import (
    BufferKind,
    find_context_axis,
    find_pair_dtype,
    find_pair_shape,
    infer_buffer_kind,
    is_window_symbol,
)
from onnxkvrename.model.signature import Dim, Value
from onnxkvrename.rules.kv_model import KvModel
from onnxkvrename.rules.plan import KvPair, UnchangedName

NamedValue = TypeVar("NamedValue", Value, UnchangedName)

_STAMP_HINT = (
    "the graph changed, or it was stamped with another set: put the stamped file back, or, if "
    "that is meant, stamp it again: onnxkvrename manifest MODEL... --stamp"
)
_STATE_PARTS_BY_RANK = {3: "conv_state", 4: "recurrent_state"}


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
    kind: BufferKind
    buffer: str
    scope: str
    input: str | None
    output: str | None
    dtype: str
    shape: Shape | None
    sequence_axis: int | None
    window: Dim
    model: str
    token: str | None = ""

    @property
    def names(self) -> tuple[str, ...]:
        """The names that are there, input first."""
        return tuple(name for name in (self.input, self.output) if name is not None)

    @property
    def sequence_shape(self) -> Shape | None:
        """The shape of what belongs to one sequence: all but the batch, which comes first."""
        return None if self.shape is None else self.shape[1:]

    @property
    def token_shape(self) -> Shape | None:
        """The shape of what one token adds, ``None`` for a state that does not grow."""
        if self.shape is None or self.sequence_axis is None:
            return None
        return tuple(
            dim for axis, dim in enumerate(self.shape) if axis not in (0, self.sequence_axis)
        )


class Layout(NamedTuple):
    """All buffers, sorted by layer and part, and everything else that the graphs show.

    Of windows, ``inputs`` and ``outputs`` are those of all of them, each name
    once. ``sizes`` are what is known of symbols.
    """

    models: tuple[str, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    buffers: tuple[Buffer, ...]
    kept: tuple[UnchangedName, ...]
    sizes: Sizes = MappingProxyType({})

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that have buffers, in order."""
        return tuple(sorted({buffer.layer for buffer in self.buffers}))

    @property
    def symbols(self) -> tuple[str, ...]:
        """The symbols in the shapes of buffers, the batch's among them."""
        return list_symbols(buffer.shape for buffer in self.buffers)

    @property
    def unresolved_symbols(self) -> tuple[str, ...]:
        """The symbols whose sizes are not known, the batch's aside."""
        found = list_symbols(buffer.sequence_shape for buffer in self.buffers)
        return tuple(symbol for symbol in found if symbol not in self.sizes)

    def resolve_shape(self, shape: Shape) -> Shape:
        """A shape with the sizes that are known."""
        return resolve_symbols(shape, self.sizes)

    def compute_token_bytes(self, buffer: Buffer) -> int | None:
        """Bytes that a token adds to a buffer; ``None`` for a state, or where it is not known."""
        return self._compute_bytes(buffer.token_shape, buffer.dtype)

    def compute_state_bytes(self, buffer: Buffer) -> int | None:
        """Bytes of a state of one sequence; ``None`` for what grows, or where it is not known."""
        return self.compute_sequence_bytes(buffer) if buffer.kind == "mamba" else None

    def compute_sequence_bytes(self, buffer: Buffer) -> int | None:
        """Bytes of one sequence in a buffer, at its full length; ``None`` where not known."""
        return self._compute_bytes(buffer.sequence_shape, buffer.dtype)

    def compute_batch_bytes(self, buffer: Buffer) -> int | None:
        """Bytes of a buffer with all its sequences; ``None`` where not known."""
        return self._compute_bytes(buffer.shape, buffer.dtype)

    def _compute_bytes(self, shape: Shape | None, dtype: str) -> int | None:
        return None if shape is None else compute_tensor_bytes(self.resolve_shape(shape), dtype)


def build_layout(sources: Sequence[KvModel]) -> Layout:
    """The layout of a model, or of the windows of one in the order of their layers.

    Raises :class:`ModelError` where two of them have the same buffer.
    """
    buffers: dict[tuple[int, str], Buffer] = {}
    order: dict[str, int] = {}
    for source in sources:
        for name in (name for names in source.plan.buffers_by_kind.values() for name in names):
            order.setdefault(name, len(order))
        for buffer in _build_buffers(source):
            other = buffers.setdefault((buffer.layer, buffer.part), buffer)
            if other is not buffer:
                raise _build_duplicate_error(other, buffer)
    return Layout(
        models=tuple(source.path for source in sources),
        inputs=_deduplicate_by_name(
            value for source in sources for value in source.signature.inputs
        ),
        outputs=_deduplicate_by_name(
            value for source in sources for value in source.signature.outputs
        ),
        buffers=tuple(sorted(buffers.values(), key=lambda b: (b.layer, order[b.buffer], b.scope))),
        kept=_deduplicate_by_name(
            kept for source in sources for kept in source.plan.unchanged_names
        ),
    )


def find_axis_and_window(kind: BufferKind, shape: Shape | None) -> tuple[int | None, Dim]:
    """The axis of a buffer that grows with the context, and what its window is called."""
    axis = None if kind == "mamba" else find_context_axis(shape)
    along = None if shape is None or axis is None else shape[axis]
    return axis, along if is_window_symbol(along) else None


def apply_sizes(found: Layout, sizes: Sizes) -> Layout:
    """The same buffers, with more symbols known; new sizes come before old ones."""
    return found._replace(sizes=MappingProxyType({**found.sizes, **sizes}))


def apply_dtypes(found: Layout, dtypes: Mapping[str, str]) -> Layout:
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
        inputs=_replace_dtypes(found.inputs, dtypes),
        outputs=_replace_dtypes(found.outputs, dtypes),
        buffers=tuple(_replace_buffer_dtype(buffer, dtypes) for buffer in found.buffers),
    )


def compute_layout_digest(found: Layout) -> str:
    """The layout in one string: equal for workers whose buffers are alike.

    SHA-256, in hexadecimal, over the JSON list of ``[layer, part, kind, dtype,
    shape, name]`` of each buffer in order, without blanks and in ASCII; ``name``
    is the input's. The batch stands as ``null``, since one sequence is handed
    over at a time, and a symbol whose size is known as that size.
    """
    rows = [
        [b.layer, b.part, b.kind, b.dtype, _normalize_shape(found, b), b.input or b.output]
        for b in found.buffers
    ]
    return sha256(json.dumps(rows, separators=(",", ":")).encode("ascii")).hexdigest()


def find_stamp_mismatches(found: Layout, stamps: Mapping[str, str | None]) -> dict[str, Finding]:
    """KV621, by the models' paths; ``stamps`` are what they carry, ``None`` for nothing.

    Where no model carries anything, none is missed.
    """
    if set(stamps.values()) <= {None}:
        return {}
    own = compute_layout_digest(found)
    return {
        path: _build_stamp_finding(stamp, own) for path, stamp in stamps.items() if stamp != own
    }


def check_stamp(source: KvModel, stamp: str | None) -> Finding | None:
    """KV621 of a model that is whole by itself, if it carries a stamp that is not its own."""
    if stamp is None:
        return None
    try:
        found = build_layout([source])
    except ModelError as error:
        return build_finding(
            "KV621", "", f"is stamped, and has no layout: it {error.message}", _STAMP_HINT
        )
    return find_stamp_mismatches(found, {source.path: stamp}).get(source.path)


def _build_stamp_finding(stamp: str | None, own: str) -> Finding:
    if stamp is None:
        hint = "stamp all of them together: onnxkvrename manifest MODEL... --stamp"
        return build_finding("KV621", "", "has no stamp, unlike other windows of it", hint)
    return build_finding(
        "KV621", "", f"is stamped {stamp[:12]}…, but its layout is {own[:12]}…", _STAMP_HINT
    )


def _normalize_shape(found: Layout, buffer: Buffer) -> list[Dim] | None:
    return (
        None
        if buffer.sequence_shape is None
        else [None, *found.resolve_shape(buffer.sequence_shape)]
    )


def _deduplicate_by_name(values: Iterable[NamedValue]) -> tuple[NamedValue, ...]:
    """Each name once, as it stands first."""
    found: dict[str, NamedValue] = {}
    for value in values:
        found.setdefault(value.name, value)
    return tuple(found.values())


def _replace_dtypes(values: tuple[Value, ...], dtypes: Mapping[str, str]) -> tuple[Value, ...]:
    return tuple(value._replace(dtype=dtypes.get(value.name, value.dtype)) for value in values)


def _replace_buffer_dtype(buffer: Buffer, dtypes: Mapping[str, str]) -> Buffer:
    told = {dtypes[name]: name for name in buffer.names if name in dtypes}
    if len(told) > 1:
        (one, name), (other, second) = told.items()
        raise ModelError(
            f"{name} is {one} and {second} is {other}",
            hint="both sides of a buffer share one piece of memory",
        )
    return buffer._replace(dtype=next(iter(told), buffer.dtype))


def _build_buffers(source: KvModel) -> Iterator[Buffer]:
    layers: dict[tuple[int, str], list[KvPair]] = {}
    for pair in source.plan.pairs:
        layers.setdefault((pair.layer, pair.kind), []).append(pair)
    for pair in source.plan.pairs:
        yield _build_buffer(pair, layers[pair.layer, pair.kind], source.path)


def _build_buffer(pair: KvPair, layer: Sequence[KvPair], model: str) -> Buffer:
    kind, shape = infer_buffer_kind(pair, layer), find_pair_shape(pair)
    axis, window = find_axis_and_window(kind, shape)
    tokens = {end.token for end in pair.sides}
    return Buffer(
        layer=pair.layer,
        part=_name_part(pair, kind, layer),
        kind=kind,
        buffer=pair.buffer,
        scope=pair.scope,
        input=None if pair.input is None else pair.input.old_name,
        output=None if pair.output is None else pair.output.old_name,
        dtype=find_pair_dtype(pair),
        shape=shape,
        sequence_axis=axis,
        window=window,
        model=model,
        token=tokens.pop() if len(tokens) == 1 else None,
    )


def _name_part(pair: KvPair, kind: BufferKind, layer: Sequence[KvPair]) -> str:
    """What a buffer holds; a linear layer's states may be called like attention's.

    They are told apart by their ranks; where these do not differ, their names stand.
    """
    part = pair.buffer.removeprefix("past_")
    ranks = [len(find_pair_shape(other) or ()) for other in layer if other.scope == pair.scope]
    if kind == "mamba" and part in ("key", "value") and len(set(ranks)) == len(ranks):
        return _STATE_PARTS_BY_RANK.get(len(find_pair_shape(pair) or ()), part)
    return part


def _build_duplicate_error(one: Buffer, other: Buffer) -> ModelError:
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
