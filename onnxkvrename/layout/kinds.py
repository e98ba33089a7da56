"""What kind of cache a buffer is, by its shape."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Literal, NamedTuple

from onnxkvrename.model.signature import Dim
from onnxkvrename.rules.plan import KvPair

BufferKind = Literal[
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


class ExporterNaming(NamedTuple):
    """What exporters call things, where a shape alone does not tell.

    ``windows`` are symbols of an axis that holds a window of the context only,
    with the kind each makes of attention and of MLA. ``derived`` marks a symbol
    that was made of a value's name: it says no more than that the exporter could
    not tell the size. ``named`` are a profile's kinds whose names settle the
    matter: an MLA buffer looks like attention with one head.
    """

    window_symbols: Mapping[str, tuple[BufferKind, BufferKind]]
    kinds_by_profile_kind: Mapping[str, BufferKind]
    derived_marker: str


QEFFICIENT_NAMING = ExporterNaming(
    window_symbols=MappingProxyType(
        {
            "sliding_window": ("sliding_window", "sliding_window_mla"),
            "chunk_ctx_len": ("chunked_local_attention", "unknown"),
        }
    ),
    kinds_by_profile_kind=MappingProxyType(
        {"mla": "mla_attention", "linear": "mamba", "cross": "cross_attention"}
    ),
    derived_marker="_dim_",
)
"""QEfficient's words, as ``get_onnx_dynamic_axes`` of its gemma3, gpt_oss and llama4 has them.

What is derived is torch.onnx's. vLLM has no MLA with chunks.
"""


def infer_buffer_kind(
    pair: KvPair, layer: Iterable[KvPair], words: ExporterNaming = QEFFICIENT_NAMING
) -> BufferKind:
    """The kind of a buffer, told with the others of its ``layer``.

    A context axis is any symbol behind the batch: axis 2 of ``[batch, heads,
    context, size]``, axis 1 where the heads share one axis with the size. A
    layer without one is a linear state if a part of it has rank 3 (a
    convolution state; the other part is the recurrent one), or if its batch is
    a symbol, so that the exporter would have named a context too. Where every
    size is fixed, a cache and a state look alike: ``unknown``.
    """
    named = words.kinds_by_profile_kind.get(pair.kind)
    context = _list_context_symbols(find_pair_shape(pair), words)
    window = next(
        (words.window_symbols[symbol] for symbol in context if symbol in words.window_symbols), None
    )
    if named is not None:
        return window[1] if window is not None and named == "mla_attention" else named
    if context:
        return window[0] if window is not None else "full_attention"
    parts = [find_pair_shape(other) for other in layer if _is_same_layer(pair, other)]
    return "mamba" if _has_only_states([find_pair_shape(pair), *parts], words) else "unknown"


def find_context_axis(
    shape: tuple[Dim, ...] | None, words: ExporterNaming = QEFFICIENT_NAMING
) -> int | None:
    """The axis behind the batch along which a buffer grows with the context, if it says so."""
    named = _list_context_symbols(shape, words)[:1]
    return 1 + (shape or ())[1:].index(named[0]) if named else None


def is_window_symbol(dim: Dim, words: ExporterNaming = QEFFICIENT_NAMING) -> bool:
    """Whether an axis of this symbol holds a window of the context only."""
    return dim in words.window_symbols


def find_pair_shape(pair: KvPair) -> tuple[Dim, ...] | None:
    """The shape of a buffer: its input's, which an exporter was told, or its output's."""
    shapes = [end.value.shape for end in pair.sides]
    return next((shape for shape in shapes if shape is not None), None)


def find_pair_dtype(pair: KvPair) -> str:
    """The dtype of a buffer: its input's, or its output's."""
    return next((end.value.dtype for end in pair.sides), "UNDEFINED")


def _list_context_symbols(shape: tuple[Dim, ...] | None, words: ExporterNaming) -> tuple[str, ...]:
    dims = (shape or ())[1:]
    return tuple(dim for dim in dims if isinstance(dim, str) and words.derived_marker not in dim)


def _is_same_layer(pair: KvPair, other: KvPair) -> bool:
    return (pair.scope, pair.layer, pair.kind) == (other.scope, other.layer, other.kind)


def _has_only_states(shapes: list[tuple[Dim, ...] | None], words: ExporterNaming) -> bool:
    """Whether the parts of a layer, of which the first has no context axis, are its states."""
    if any(_list_context_symbols(shape, words) for shape in shapes):
        return False
    if any(shape is not None and len(shape) == 3 and _has_fixed_sizes(shape) for shape in shapes):
        return True
    first = shapes[0]
    return (
        first is not None
        and _has_fixed_sizes(first)
        and len(first) > 1
        and isinstance(first[0], str)
    )


def _has_fixed_sizes(shape: tuple[Dim, ...]) -> bool:
    """Whether every size behind the batch is a number."""
    return all(isinstance(dim, int) for dim in shape[1:])
