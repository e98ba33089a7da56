"""What kind of cache a buffer is, by its shape."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

from onnxkvrename.model.signature import Dim
from onnxkvrename.rules.plan import Pair

Kind = Literal[
    "full_attention",
    "sliding_window",
    "chunked_local_attention",
    "mla_attention",
    "sliding_window_mla",
    "cross_attention",
    "mamba",
    "unknown",
]
"""vLLM's own strings; ``mamba`` stands for every state without a context axis."""


class Words(NamedTuple):
    """What exporters call things, where a shape alone does not tell.

    ``windows`` are symbols of an axis that holds a window of the context only,
    with the kind each makes of attention and of MLA. ``derived`` marks a symbol
    that was made of a value's name: it says no more than that the exporter could
    not tell the size. ``named`` are a profile's kinds whose names settle the
    matter: an MLA buffer looks like attention with one head.
    """

    windows: Mapping[str, tuple[Kind, Kind]]
    named: Mapping[str, Kind]
    derived: str


WORDS = Words(
    windows=MappingProxyType(
        {
            "sliding_window": ("sliding_window", "sliding_window_mla"),
            "chunk_ctx_len": ("chunked_local_attention", "unknown"),
        }
    ),
    named=MappingProxyType({"mla": "mla_attention", "linear": "mamba", "cross": "cross_attention"}),
    derived="_dim_",
)
"""QEfficient's words, as ``get_onnx_dynamic_axes`` of its gemma3, gpt_oss and llama4 has them.

What is derived is torch.onnx's. vLLM has no MLA with chunks.
"""


def kind_of(pair: Pair, layer: Iterable[Pair], words: Words = WORDS) -> Kind:
    """The kind of a buffer, told with the others of its ``layer``.

    A context axis is any symbol behind the batch: axis 2 of ``[batch, heads,
    context, size]``, axis 1 where the heads share one axis with the size. A
    layer without one is a linear state if a part of it has rank 3 (a
    convolution state; the other part is the recurrent one), or if its batch is
    a symbol, so that the exporter would have named a context too. Where every
    size is fixed, a cache and a state look alike: ``unknown``.
    """
    named = words.named.get(pair.kind)
    context = _context(shape_of(pair), words)
    window = next((words.windows[symbol] for symbol in context if symbol in words.windows), None)
    if named is not None:
        return window[1] if window is not None and named == "mla_attention" else named
    if context:
        return window[0] if window is not None else "full_attention"
    parts = [shape_of(other) for other in layer if _together(pair, other)]
    return "mamba" if _are_states([shape_of(pair), *parts], words) else "unknown"


def context_axis(shape: tuple[Dim, ...] | None, words: Words = WORDS) -> int | None:
    """The axis behind the batch along which a buffer grows with the context, if it says so."""
    named = _context(shape, words)[:1]
    return 1 + (shape or ())[1:].index(named[0]) if named else None


def is_window(dim: Dim, words: Words = WORDS) -> bool:
    """Whether an axis of this symbol holds a window of the context only."""
    return dim in words.windows


def shape_of(pair: Pair) -> tuple[Dim, ...] | None:
    """The shape of a buffer: its input's, which an exporter was told, or its output's."""
    shapes = [end.value.shape for end in pair.ends]
    return next((shape for shape in shapes if shape is not None), None)


def dtype_of(pair: Pair) -> str:
    """The dtype of a buffer: its input's, or its output's."""
    return next((end.value.dtype for end in pair.ends), "UNDEFINED")


def _context(shape: tuple[Dim, ...] | None, words: Words) -> tuple[str, ...]:
    dims = (shape or ())[1:]
    return tuple(dim for dim in dims if isinstance(dim, str) and words.derived not in dim)


def _together(pair: Pair, other: Pair) -> bool:
    return (pair.scope, pair.layer, pair.kind) == (other.scope, other.layer, other.kind)


def _are_states(shapes: list[tuple[Dim, ...] | None], words: Words) -> bool:
    """Whether the parts of a layer, of which the first has no context axis, are its states."""
    if any(_context(shape, words) for shape in shapes):
        return False
    if any(shape is not None and len(shape) == 3 and _fixed(shape) for shape in shapes):
        return True
    first = shapes[0]
    return first is not None and _fixed(first) and len(first) > 1 and isinstance(first[0], str)


def _fixed(shape: tuple[Dim, ...]) -> bool:
    """Whether every size behind the batch is a number."""
    return all(isinstance(dim, int) for dim in shape[1:])
