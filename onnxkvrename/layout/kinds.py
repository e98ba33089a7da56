"""The kind of a KV buffer, as its profile says it or its shape suggests."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from onnxkvrename.model.signature import UNDECLARED, Dim, Value
from onnxkvrename.rules.kinds import (
    KINDS,
    BufferKind,
    Kinds,
    find_kinds,
    get_kind_traits,
    is_state,
)
from onnxkvrename.rules.plan import KvPair

_WINDOW_SYMBOL = "sliding_window"
_WINDOW_HINT = "sliding"
"""What other exporters' symbols of a sliding window contain."""
_STATE_HINTS = ("recurrent", "conv", "ssm", "state", "linear", "mamba")
"""Words in names of states."""
_BLOCK_HINTS = ("block", "page")
"""What symbols of the axes of a paged cache contain."""
_BLOCK_TABLES = ("block_table", "page_table")
"""What the names of inputs contain that say which blocks of a paged cache a sequence has."""
_CONTEXT_WORDS = ("sequence", "window", "encoder", "")
"""A profile's words for axes that hold tokens; the empty one is for an axis without a word."""
_POSITION_HINTS = (
    *("ctx", "context", "seq", "past", "total", "window", "chunk", "len", "pos", "time"),
    *("token", "step"),
)
"""What symbols of the axis of positions contain."""
_NO_POSITIONS = re.compile("b|n|bs|bsz|.*batch.*|[0-9]+")
"""Symbols of the batch, in lower case, and sizes that an exporter writes as symbols."""
_DERIVED_MARKER = "_dim_"
"""The part of a symbol that torch.onnx makes up for a size it cannot determine."""


class InferredKind(NamedTuple):
    """The kind of a buffer; a guess if only its shape or its name suggests it."""

    kind: BufferKind
    is_guess: bool = False


def group_by_layer(pairs: Iterable[KvPair]) -> dict[tuple[str, int, str], list[KvPair]]:
    """Return the buffers of each layer, by scope, layer and kind in the profile."""
    layers: dict[tuple[str, int, str], list[KvPair]] = {}
    for pair in pairs:
        layers.setdefault((pair.scope, pair.layer, pair.kind), []).append(pair)
    return layers


def has_block_table(inputs: Iterable[Value]) -> bool:
    """Return whether a graph with these inputs has paged caches."""
    return any(table in value.name.lower() for value in inputs for table in _BLOCK_TABLES)


def infer_buffer_kind(
    pair: KvPair, layer: Iterable[KvPair], *, has_block_table: bool = False
) -> InferredKind:
    """Return the kind of a buffer: what its profile says, else what its shape suggests.

    The profile's own kind settles it, or the one that the profile says it is: a name of
    `rules.kinds`, or a family. Within a family the symbol of its axis says whether it is a window,
    by its name or by the profile's word for it.

    Where the profile leaves it to the shape, a context axis is any symbol after the batch:
    axis 2 of ``[batch, heads, context, size]``, axis 1 where heads and size share one axis. A
    layer without one is a linear state if a part of it has rank 3 (a convolution state; the
    other part is the recurrent one), or if its batch is a symbol, so that the exporter would
    have named a context too. Where every size is fixed, a cache and a state look alike:
    ``unknown``.

    A cache is paged if its axes count blocks, by a symbol or by the profile's words, or if the
    graph has a block table.
    """
    inferred = _infer_unpaged_kind(pair, layer)
    grows = get_kind_traits(inferred.kind).grows_with in ("context", "window")
    if grows and (has_block_table or _counts_blocks(pair)):
        return InferredKind("paged_attention")
    return inferred


def _counts_blocks(pair: KvPair) -> bool:
    """Return whether an axis of a buffer counts blocks, or the tokens of one."""
    symbols = [dim for dim in find_pair_shape(pair) or () if isinstance(dim, str)]
    return "blocks" in pair.axes or any(
        hint in symbol.lower()
        for symbol in symbols
        if _DERIVED_MARKER not in symbol
        for hint in _BLOCK_HINTS
    )


def _infer_unpaged_kind(pair: KvPair, layer: Iterable[KvPair]) -> InferredKind:
    context = _list_context_symbols(find_pair_shape(pair), pair.axes)
    window, is_similar = _find_window(context)
    if "window" in pair.axes:
        window, is_similar = _WINDOW_SYMBOL, False
    settled = {} if pair.has_open_kind else find_kinds(pair.cache or pair.kind)
    if settled:
        is_guess = is_similar and any(row.window_symbol for row in settled.values())
        return InferredKind(_choose_by_window(settled, window), is_guess)
    state = next(name for name, row in KINDS.items() if row.is_state)
    if not pair.has_open_kind and _is_state_name(pair):
        return InferredKind(state, is_guess=True)
    if context:
        kind = _choose_by_window(find_kinds("attention"), window)
        return InferredKind(kind, is_similar or not pair.has_open_kind)
    parts = [find_pair_shape(sibling) for sibling in layer if _is_same_layer(pair, sibling)]
    if not _has_only_states([find_pair_shape(pair), *parts]):
        return InferredKind("unknown")
    return InferredKind(state, is_guess=True)


def _find_window(context: Iterable[str]) -> tuple[str | None, bool]:
    """Return the symbol of a window, and whether it is only similar to one that is known."""
    for symbol in context:
        if is_window_symbol(symbol):
            return symbol, False
    is_similar = any(_WINDOW_HINT in symbol for symbol in context)
    return (_WINDOW_SYMBOL if is_similar else None), is_similar


def _is_state_name(pair: KvPair) -> bool:
    """Return whether the profile's words for a buffer suggest a state."""
    return any(hint in f"{pair.kind} {pair.buffer}".lower() for hint in _STATE_HINTS)


def find_context_axis(shape: tuple[Dim, ...] | None, axes: Sequence[str] = ()) -> int | None:
    """Return the axis that grows with the context, ``None`` without one.

    The profile's words for the axes are `axes`. Without one for the context it is the first axis
    after the batch that has a symbol, and no word of another meaning.
    """
    if shape is not None and len(axes) == len(shape):
        for word in ("sequence", "window", "encoder"):
            if word in axes:
                return axes.index(word)
    symbols = _list_context_symbols(shape, axes)[:1]
    return 1 + (shape or ())[1:].index(symbols[0]) if symbols else None


def find_position_axis(pair: KvPair) -> int | None:
    """Return the axis along which the positions of a buffer are, ``None`` if nothing tells it.

    Its profile's words for the axes tell it. So does a symbol: the only one after the batch, or the
    only one with a word for positions. Else it is the axis whose declared size changes.
    """
    shape = find_pair_shape(pair)
    word = pair.cache or pair.kind
    if shape is None or (word and is_state(word)) or _is_state_name(pair) or _counts_blocks(pair):
        return None
    words = pair.axes if len(pair.axes) == len(shape) else ("",) * len(shape)
    for each in ("sequence", "window", "encoder"):
        if each in words:
            return words.index(each)
    unnamed = [axis for axis, each in enumerate(words) if axis and not each]
    symbols = {
        axis: dim.lower()
        for axis in unnamed
        if isinstance(dim := shape[axis], str) and not _NO_POSITIONS.fullmatch(dim.lower())
    }
    named = [axis for axis, dim in symbols.items() if any(hint in dim for hint in _POSITION_HINTS)]
    if named or len(symbols) > 1:
        return named[0] if len(named) == 1 else None
    if symbols:
        return next(iter(symbols)) if isinstance(shape[0], str) or shape[0] == 1 else None
    shapes = [side.value.shape or () for side in pair.sides]
    if any(len(each) != len(shape) for each in shapes):
        return None
    changed = [axis for axis in unnamed if len({each[axis] for each in shapes}) > 1]
    return changed[0] if len(changed) == 1 else None


def is_axis_of_heads(pair: KvPair, axis: int) -> bool:
    """Return whether an axis of a buffer is surely that of heads, or of the size of a head."""
    shape = find_pair_shape(pair) or ()
    if len(pair.axes) == len(shape) and pair.axes[axis]:
        return pair.axes[axis] in ("heads", "head")
    dim = str(shape[axis]).lower()
    return axis > 0 and (dim.isdecimal() or "head" in dim)


def is_window_symbol(dim: Dim) -> bool:
    """Return whether an axis of this symbol holds a window of the context only."""
    return dim is not None and any(row.window_symbol == dim for row in KINDS.values())


def find_pair_shape(pair: KvPair) -> tuple[Dim, ...] | None:
    """Return the shape of a buffer: its input's, which the exporter was given, or its output's."""
    shapes = [side.value.shape for side in pair.sides]
    return next((shape for shape in shapes if shape is not None), None)


def find_pair_dtype(pair: KvPair) -> str:
    """Return the dtype of a buffer: its input's, or its output's."""
    dtypes = (side.value.dtype for side in pair.sides)
    return next((dtype for dtype in dtypes if dtype != UNDECLARED), UNDECLARED)


def _choose_by_window(family: Kinds, window: str | None) -> BufferKind:
    """Return the kind for a window among kinds that differ in nothing else."""
    if len(family) == 1 or all(row.window_symbol is None for row in family.values()):
        return next(iter(family))
    return next((name for name, row in family.items() if row.window_symbol == window), "unknown")


def _list_context_symbols(
    shape: tuple[Dim, ...] | None, axes: Sequence[str] = ()
) -> tuple[str, ...]:
    """Return the symbols that may be the context's, as far as the words for axes say."""
    dims = (shape or ())[1:]
    words = axes[1:] if shape is not None and len(axes) == len(shape) else [""] * len(dims)
    return tuple(
        dim
        for dim, word in zip(dims, words, strict=True)
        if isinstance(dim, str) and _DERIVED_MARKER not in dim and word in _CONTEXT_WORDS
    )


def _is_same_layer(first: KvPair, second: KvPair) -> bool:
    return (first.scope, first.layer, first.kind) == (second.scope, second.layer, second.kind)


def _has_only_states(shapes: list[tuple[Dim, ...] | None]) -> bool:
    """Return whether the parts of a layer are states; the first has no context axis."""
    if any(_list_context_symbols(shape) for shape in shapes):
        return False
    return any(
        shape is not None and len(shape) == 3 and _has_fixed_sizes(shape) for shape in shapes
    )


def _has_fixed_sizes(shape: tuple[Dim, ...]) -> bool:
    """Return whether every size after the batch is a number."""
    return all(isinstance(dim, int) for dim in shape[1:])
