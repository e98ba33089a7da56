"""The KV buffers of a model, or of its windows together, as a consumer sees them."""

from __future__ import annotations

import copyreg
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from onnxkvrename.display import show_briefly
from onnxkvrename.errors import ModelError
from onnxkvrename.layout.kinds import (
    find_context_axis,
    find_pair_dtype,
    find_pair_shape,
    group_by_layer,
    has_block_table,
    infer_buffer_kind,
    is_window_symbol,
)
from onnxkvrename.layout.updates import UNKNOWN_UPDATE, UNTRACED_UPDATE, ShownUpdate, Updates
from onnxkvrename.limits import MAX_INT64
from onnxkvrename.model.proto_reader import get_dtype_bits
from onnxkvrename.model.signature import Dim, Value
from onnxkvrename.rules.kinds import BufferKind, KindTraits, get_kind_traits
from onnxkvrename.rules.kv_model import KvModel
from onnxkvrename.rules.plan import KvPair, UnchangedName
from onnxkvrename.text import quote_word

NamedValue = TypeVar("NamedValue", Value, UnchangedName)

_STATE_PARTS_BY_RANK = {3: "conv_state", 4: "recurrent_state"}
Shape = tuple[Dim, ...]
"""Sizes, symbols, and ``None`` for a dimension that the graph does not describe."""
Sizes = Mapping[str, int]
"""The sizes of symbols."""
_ONE_BYTE_DTYPES = ("BOOL", "INT8", "MXINT8", "UINT8")
_UNSCALED_DTYPES = ("BOOL", "FLOAT16", "BFLOAT16", "MXINT8")
"""Of the dtypes of few bits those without a scale in the graph; MXINT8 keeps its own."""
_MAX_SCALED_BITS = 16
TraitsT = TypeVar("TraitsT", bound=Hashable)


def _freeze(mapping: dict[Any, Any]) -> MappingProxyType[Any, Any]:
    return MappingProxyType(mapping)


# A user may copy a layout, or send it to another process: Python does neither with this type.
copyreg.pickle(MappingProxyType, lambda mapping: (_freeze, (dict(mapping),)))


@show_briefly
class KvBuffer(NamedTuple):
    """A KV buffer.

    Attributes:
        layer: The number of the layer.
        part: What is in the buffer: key, value, compressed_kv, k_pe, conv_state, recurrent_state.
        kind: The kind of the buffer, in vLLM's words.
        buffer: The part of the name that says what is in the buffer, such as past_key.
        scope: The part of the name before the last slash, as in layerwise exports; usually empty.
        input: The graph input of the pair; `None` if it is missing.
        output: The retained output of the pair; `None` if it is missing.
        dtype: The element type, in ONNX's words.
        shape: Sizes, symbols, and `None` for what the file does not say; `None` for an unknown
            rank.
        sequence_axis: The axis that grows with the context; `None` for a state.
        window: The symbol or the length of a sliding window; `None` without one.
        model: The path of the model that has the buffer.
        token: The token in the names, empty for none; `None` if the names do not agree.
        kind_guessed: Whether only its shape or its name suggests the kind.
        update: How its output is made from its input.
        axes: The profile's word for each axis, empty for one that it does not know; none at all if
            it knows none.
        beside: The part of its layer that it moves with, such as the key of a scale; empty for a
            cache by itself.
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
    kind_guessed: bool = False
    update: ShownUpdate = UNTRACED_UPDATE
    axes: tuple[str, ...] = ()
    beside: str = ""

    @property
    def traits(self) -> KindTraits:
        """The traits of its kind."""
        return get_kind_traits(self.kind)

    @property
    def is_state(self) -> bool:
        """True if it is a state of fixed size."""
        return self.traits.is_state

    @property
    def prompt_axis(self) -> int | None:
        """The axis of the prompt's tokens; ``None`` for states, encoders' tokens, fixed sizes."""
        return None if self.traits.grows_with == "encoder" else self.sequence_axis

    @property
    def has_no_prompt_axis(self) -> bool:
        """True if no axis has the prompt's tokens, false if one may, as where all sizes are fixed.

        A buffer of fixed size that is written once, such as keys and values of an image, does
        not follow the prompt.
        """
        if self.is_state or self.traits.grows_with == "encoder":
            return True
        return self.sequence_axis is None and self.update.kind == "once"

    @property
    def names(self) -> tuple[str, ...]:
        """The names that it has, input first."""
        return tuple(name for name in (self.input, self.output) if name is not None)

    @property
    def sequence_shape(self) -> Shape | None:
        """The shape of one sequence: all axes but the batch, which mostly comes first."""
        return self._drop_axes(self.batch_axis)

    @property
    def batch_axis(self) -> int:
        """The axis of the sequences: the first, unless the profile says another one."""
        return self.axes.index("batch") if "batch" in self.axes else 0

    @property
    def token_shape(self) -> Shape | None:
        """The shape that one token adds, ``None`` for a state."""
        if self.sequence_axis is None:
            return None
        return self._drop_axes(self.batch_axis, self.sequence_axis)

    def _drop_axes(self, *axes: int) -> Shape | None:
        if self.shape is None:
            return None
        return tuple(dim for axis, dim in enumerate(self.shape) if axis not in axes)


@show_briefly
class Layout(NamedTuple):
    """All KV buffers of a model or a set of windows, and everything else its graphs show.

    Attributes:
        models: The paths of the models, in the order of their layers.
        inputs: The inputs of all graphs, each name once.
        outputs: The outputs of all graphs, each name once, as the last graph has it.
        buffers: The buffers, sorted by layer and part.
        kept: The names that a rename leaves unchanged, with the reasons.
        sizes: The known sizes of symbols.
        other_stages: The paths of the other files of its set, as of the windows that a merged
            model was made from.
    """

    models: tuple[str, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    buffers: tuple[KvBuffer, ...]
    kept: tuple[UnchangedName, ...]
    sizes: Sizes = MappingProxyType({})
    other_stages: tuple[str, ...] = ()

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that have buffers, in order."""
        return tuple(sorted({buffer.layer for buffer in self.buffers}))

    @property
    def symbols(self) -> tuple[str, ...]:
        """The symbols in the shapes of buffers, including the batch's."""
        return list_symbols(buffer.shape for buffer in self.buffers)

    @property
    def unresolved_symbols(self) -> tuple[str, ...]:
        """The symbols whose sizes are not known, without the batch's."""
        symbols = list_symbols(buffer.sequence_shape for buffer in self.buffers)
        return tuple(symbol for symbol in symbols if symbol not in self.sizes)

    def resolve_shape(self, shape: Shape) -> Shape:
        """Return a shape with the known sizes."""
        return resolve_symbols(shape, self.sizes)

    def compute_token_bytes(self, buffer: KvBuffer) -> int | None:
        """Return the bytes that a token adds; ``None`` for a state, or if not known."""
        return self._compute_bytes(buffer.token_shape, buffer.dtype)

    def compute_state_bytes(self, buffer: KvBuffer) -> int | None:
        """Return the bytes of one sequence's state; ``None`` if it grows, or if not known."""
        return self.compute_sequence_bytes(buffer) if buffer.is_state else None

    def compute_sequence_bytes(self, buffer: KvBuffer) -> int | None:
        """Return the bytes of one sequence at its full length; ``None`` if not known.

        How many blocks of a paged cache a sequence has is not known.
        """
        if buffer.traits.is_paged:
            return None
        return self._compute_bytes(buffer.sequence_shape, buffer.dtype)

    def compute_batch_bytes(self, buffer: KvBuffer) -> int | None:
        """Return the bytes of a buffer with all its sequences; ``None`` if not known."""
        return self._compute_bytes(buffer.shape, buffer.dtype)

    def _compute_bytes(self, shape: Shape | None, dtype: str) -> int | None:
        return None if shape is None else compute_tensor_bytes(self.resolve_shape(shape), dtype)


class TokenBytes(NamedTuple):
    """Bytes that a token adds to all buffers that grow; `None` where a size is not known.

    Attributes:
        context: Of buffers that grow with the context.
        window: Of buffers with a window.
        encoder: Of buffers that an encoder fills.
    """

    context: int | None
    window: int | None
    encoder: int | None


class ByteTotals(NamedTuple):
    """Bytes of all buffers together; `None` where a size or a dtype is not known.

    Attributes:
        bytes_per_token: What a token adds to all buffers that grow: with the context, up to a
            window, with the encoder's input.
        state_bytes: Bytes of all states of one sequence.
        sequence_bytes: Bytes of all buffers of one sequence, at its full length.
        batch_bytes: Bytes of all buffers of all sequences.
    """

    bytes_per_token: TokenBytes
    state_bytes: int | None
    sequence_bytes: int | None
    batch_bytes: int | None


_UNTRACED: Updates = MappingProxyType({})


def build_layout(
    sources: Sequence[KvModel], updates: Mapping[str, Updates] = MappingProxyType({})
) -> Layout:
    """Return the layout of a model, or of its windows, which come in the order of their layers.

    The updates are by the paths of models; of a model without any it stays unknown how its buffers
    are updated.

    Raises:
        ModelError: Two models, or two pairs of one, are the same buffer.
    """
    buffers: dict[tuple[int, str], KvBuffer] = {}
    part_order: dict[str, int] = {}
    for source in sources:
        for name in source.plan.part_order:
            part_order.setdefault(name, len(part_order))
        for buffer in build_buffers(source, updates.get(source.path, _UNTRACED)):
            first = buffers.setdefault((buffer.layer, buffer.part), buffer)
            if first is not buffer:
                raise _build_duplicate_error(first, buffer)
    ordered = sorted(buffers.values(), key=lambda b: (b.layer, part_order[b.buffer], b.scope))
    return Layout(
        models=tuple(source.path for source in sources),
        inputs=_deduplicate_by_name(v for source in sources for v in source.signature.inputs),
        outputs=_deduplicate_by_name(
            [v for source in sources for v in source.signature.outputs], keeps_last=True
        ),
        buffers=tuple(ordered),
        kept=_deduplicate_by_name(k for source in sources for k in source.plan.unchanged_names),
    )


def find_axis_and_window(
    kind: BufferKind, shape: Shape | None, axes: Sequence[str] = ()
) -> tuple[int | None, Dim]:
    """Return the axis that grows with the context, and the symbol of its window.

    ``None`` for the axis of a state or of a paged cache, and for the window of a buffer without
    one. The profile's words for the axes are `axes`.
    """
    traits = get_kind_traits(kind)
    axis = None if traits.is_state or traits.is_paged else find_context_axis(shape, axes)
    dim = None if shape is None or axis is None else shape[axis]
    has_window = is_window_symbol(dim) or traits.is_windowed
    return axis, dim if has_window else None


def apply_sizes(layout: Layout, sizes: Sizes) -> Layout:
    """Return the layout with more known sizes; new sizes take precedence over old ones."""
    return layout._replace(sizes=MappingProxyType({**layout.sizes, **sizes}))


def _deduplicate_by_name(
    values: Iterable[NamedValue], *, keeps_last: bool = False
) -> tuple[NamedValue, ...]:
    """Return the first value of each name, or the last one, in the order of the first ones."""
    by_name: dict[str, NamedValue] = {}
    for value in values:
        if keeps_last or value.name not in by_name:
            by_name[value.name] = value
    return tuple(by_name.values())


def build_buffers(source: KvModel, updates: Updates = _UNTRACED) -> Iterator[KvBuffer]:
    """Yield the buffer of each pair of a model, in their order."""
    layers = group_by_layer(source.plan.pairs)
    is_paged = has_block_table(source.signature.inputs)
    for pair in source.plan.pairs:
        layer = layers[pair.scope, pair.layer, pair.kind]
        kind, is_guess = infer_buffer_kind(pair, layer, has_block_table=is_paged)
        shape, tokens = find_pair_shape(pair), {side.token for side in pair.sides}
        axis, window = find_axis_and_window(kind, shape, pair.axes)
        input_name, output_name = (side and side.old_name for side in (pair.input, pair.output))
        yield KvBuffer(
            layer=pair.layer,
            part=_name_part(pair, kind, layer),
            kind=kind,
            buffer=pair.buffer,
            scope=pair.scope,
            input=input_name,
            output=output_name,
            dtype=find_pair_dtype(pair),
            shape=shape,
            sequence_axis=axis,
            window=window,
            model=source.path,
            token=tokens.pop() if len(tokens) == 1 else None,
            kind_guessed=is_guess,
            update=updates.get(output_name or "", UNKNOWN_UPDATE) if updates else UNTRACED_UPDATE,
            axes=pair.axes,
            beside=_name_part_beside(pair, layer),
        )


def _name_part_beside(pair: KvPair, layer: Sequence[KvPair]) -> str:
    """Return the part that a buffer moves with, as its layout calls it; empty for none."""
    main = next((each for each in layer if pair.beside and each.buffer == pair.beside), None)
    return pair.beside if main is None else main.role or pair.beside


def _name_part(pair: KvPair, kind: BufferKind, layer: Sequence[KvPair]) -> str:
    """Return the content of a buffer.

    The states of a linear layer may have the names of attention. Their ranks tell which is
    which; where the ranks are equal, the names stay.
    """
    part, traits = pair.role or pair.buffer.removeprefix("past_"), get_kind_traits(kind)
    if pair.role and traits.grows_with == "encoder":  # beside a cache of the decoder's own
        return f"{part}_cross"
    if not traits.is_state or part not in ("key", "value"):
        return part
    ranks = [len(find_pair_shape(sibling) or ()) for sibling in layer]
    if len(set(ranks)) < len(ranks):
        return part
    return _STATE_PARTS_BY_RANK.get(len(find_pair_shape(pair) or ()), part)


def _build_duplicate_error(first: KvBuffer, second: KvBuffer) -> ModelError:
    if first.model == second.model:
        names = f"{first.names[0]} and {second.names[0]}"
        return ModelError(
            f"has two buffers for {first.part} of layer {first.layer}: {names}",
            path=first.model,
            hint="pass your own rules, which match one of them: --rules FILE",
        )
    return ModelError(
        f"has {first.part} of layer {first.layer}, which {first.model} has, too",
        path=second.model,
        hint="pass one model, or the windows of one",
    )


def compute_byte_totals(layout: Layout) -> ByteTotals:
    """Return the bytes of all buffers together."""
    growing: dict[str, list[int | None]] = {"context": [], "window": [], "encoder": []}
    for buffer in layout.buffers:
        if buffer.sequence_axis is not None:
            growing[classify_growth(buffer)].append(layout.compute_token_bytes(buffer))
    states = [layout.compute_state_bytes(buffer) for buffer in layout.buffers if buffer.is_state]
    return ByteTotals(
        TokenBytes(**{name: _sum_if_known(sizes) for name, sizes in growing.items()}),
        _sum_if_known(states),
        _sum_if_known(map(layout.compute_sequence_bytes, layout.buffers)),
        _sum_if_known(map(layout.compute_batch_bytes, layout.buffers)),
    )


def add_byte_totals(totals: Sequence[ByteTotals | None]) -> ByteTotals | None:
    """Return the bytes of the windows of one model together; `None` if one is not known."""
    known = [each for each in totals if each is not None]
    if not known or len(known) < len(totals):
        return None
    per_token, *others = zip(*known, strict=True)
    return ByteTotals(
        TokenBytes(*map(_sum_if_known, zip(*per_token, strict=True))), *map(_sum_if_known, others)
    )


def classify_growth(buffer: KvBuffer) -> str:
    """Return what makes a buffer longer: ``context``, ``window``, ``encoder``, or empty."""
    if buffer.sequence_axis is None:
        return ""
    growth = buffer.traits.grows_with
    return "window" if growth == "context" and buffer.window is not None else growth


def _sum_if_known(sizes: Iterable[int | None]) -> int | None:
    total = 0
    for size in sizes:
        if size is None:
            return None
        total += size
    return total


def format_size_option(symbol: str, prefix: str = "") -> str:
    """Return the option that gives a symbol a size, as it is typed: ``--dim ctx_len=SIZE``.

    The prefix is the side: ``prefill:``, ``decode:``, or empty for both.
    """
    return f"--dim {prefix}{quote_word(symbol)}=SIZE"


def resolve_symbols(shape: Shape, sizes: Sizes) -> Shape:
    """Return the shape with numbers for the symbols whose sizes are known."""
    return tuple(sizes.get(dim, dim) if isinstance(dim, str) else dim for dim in shape)


def count_elements(shape: Shape) -> int | None:
    """Return the number of elements; ``None`` if it is not known, or more than `MAX_INT64`."""
    numbers = sorted(dim for dim in shape if isinstance(dim, int) and dim >= 0)
    if len(numbers) < len(shape):
        return None
    count = 1
    for number in numbers:  # a 0 comes first
        count *= number
        if count > MAX_INT64:
            return None
    return count


def compute_tensor_bytes(shape: Shape, dtype: str) -> int | None:
    """Return the bytes of a dense tensor, the last one padded.

    An element of ``MXINT8`` counts as one byte, as a consumer counts it; the scales that
    blocks of elements share are not in the graph.

    ``None`` if the number of elements or the size of one is not known.
    """
    count, bits = count_elements(shape), _find_element_bits(dtype)
    return None if count is None or not bits else -(-count * bits // 8)


def list_symbols(shapes: Iterable[Shape | None]) -> tuple[str, ...]:
    """Return the symbols in shapes, each once, in the order of their first occurrences."""
    symbols = (dim for shape in shapes for dim in shape or () if isinstance(dim, str))
    return tuple(dict.fromkeys(symbols))


def is_quantized(dtype: str) -> bool:
    """Return whether numbers of a dtype need a scale to be values."""
    return 0 < get_dtype_bits(dtype) <= _MAX_SCALED_BITS and dtype not in _UNSCALED_DTYPES


def _find_element_bits(dtype: str) -> int:
    """Return the bits of an element, 0 where they vary or are not known."""
    bits = get_dtype_bits(dtype)
    return bits if bits != 8 or dtype in _ONE_BYTE_DTYPES or dtype.startswith("FLOAT8") else 0


def fold_alike(
    buffers: Iterable[tuple[str, int, TraitsT]],
) -> list[tuple[tuple[str, ...], tuple[int, ...], TraitsT]]:
    """Fold buffers with the same traits into rows, their layers first, then their parts.

    Each buffer is a part, a layer and its traits; each row has parts, layers and traits, all in the
    order of their first buffer.
    """
    layers_of: dict[tuple[str, TraitsT], list[int]] = {}
    for part, layer, traits in buffers:
        layers_of.setdefault((part, traits), []).append(layer)
    parts_of: dict[tuple[tuple[int, ...], TraitsT], list[str]] = {}
    for (part, traits), layers in layers_of.items():
        parts_of.setdefault((tuple(layers), traits), []).append(part)
    return [(tuple(parts), layers, traits) for (layers, traits), parts in parts_of.items()]
