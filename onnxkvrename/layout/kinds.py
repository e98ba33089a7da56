"""The kinds of KV buffers: one row of traits for each, and the kind of a buffer by its shape."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple

from onnxkvrename.model.signature import Dim, Value
from onnxkvrename.rules.plan import KvPair

BufferKind = Literal[
    "full_attention",
    "sliding_window",
    "chunked_local_attention",
    "mla_attention",
    "sliding_window_mla",
    "cross_attention",
    "mamba",
    "paged_attention",
    "unknown",
]
"""The names of `KINDS`, for type checkers; at run time only the rows count."""

Growth = Literal["context", "window", "encoder", "nothing", "blocks"]


class KindTraits(NamedTuple):
    """The traits of one kind of buffer.

    Attributes:
        label: Its name for readers.
        symbol: Its letter in the map of ``onnxkvrename inspect``.
        color: Its color in that map, as rich names colors.
        grows_with: What makes a buffer longer: the context, up to all of it or to a window
            of it, the encoder's tokens, or nothing; ``blocks`` for a pool of blocks that all
            sequences share, and of which a block table says whose they are.
        is_mla: True for the latent and the rope of multi-head latent attention, which
            tensor parallelism copies to every rank.
        profile_kind: The kind in a profile (``[kv.kinds]``) whose names settle the matter.
            An MLA buffer, for example, looks like attention with one head.
        window_symbol: The symbol of the axis along which an exporter puts the window.
        is_chunked: True where the window is a chunk, which starts empty when the last one is full.
        vllm_kind: The kind of vLLM's spec for it; ``None`` where that has the row's own name, or
            where vLLM has none.
    """

    label: str
    symbol: str
    color: str
    grows_with: Growth
    is_mla: bool = False
    profile_kind: str | None = None
    window_symbol: str | None = None
    is_chunked: bool = False
    vllm_kind: BufferKind | None = None

    @property
    def is_windowed(self) -> bool:
        """True if a buffer holds only a window of the context."""
        return self.grows_with == "window"

    @property
    def is_state(self) -> bool:
        """True if a buffer is a state of fixed size, without a context axis."""
        return self.grows_with == "nothing"

    @property
    def is_paged(self) -> bool:
        """True if a buffer is a pool of blocks, without an axis of sequences."""
        return self.grows_with == "blocks"


Kinds = Mapping[BufferKind, KindTraits]

KINDS: Kinds = MappingProxyType(
    {
        "full_attention": KindTraits("full attention", "f", "cyan", "context"),
        "sliding_window": KindTraits(
            "sliding window", "w", "green", "window", window_symbol="sliding_window"
        ),
        "chunked_local_attention": KindTraits(
            "chunked attention",
            "c",
            "bright_green",
            "window",
            window_symbol="chunk_ctx_len",
            is_chunked=True,
        ),
        "mla_attention": KindTraits(
            "MLA", "m", "magenta", "context", is_mla=True, profile_kind="mla"
        ),
        "sliding_window_mla": KindTraits(
            "sliding window MLA",
            "n",
            "bright_magenta",
            "window",
            is_mla=True,
            profile_kind="mla",
            window_symbol="sliding_window",
        ),
        "cross_attention": KindTraits(
            "cross attention", "x", "blue", "encoder", profile_kind="cross"
        ),
        "mamba": KindTraits("linear state", "s", "yellow", "nothing", profile_kind="linear"),
        "paged_attention": KindTraits("paged cache", "p", "bright_blue", "blocks"),
        "unknown": KindTraits("unknown kind", "u", "white", "context"),
    }
)
"""All kinds, by vLLM's own names; vLLM has no ``paged_attention``, as it pages all caches itself.

The first state is what a buffer without a context axis is that only its shape shows to be one.

The symbols are those of ``get_onnx_dynamic_axes`` of QEfficient's gemma3, gpt_oss and llama4
(https://github.com/quic/efficient-transformers). vLLM has no MLA with chunks.
"""

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
_DERIVED_MARKER = "_dim_"
"""The part of a symbol that torch.onnx makes up for a size it cannot determine."""


def get_kind_traits(kind: BufferKind) -> KindTraits:
    """Return the row of a kind."""
    return KINDS[kind]


def get_vllm_kind(kind: BufferKind) -> BufferKind:
    """Return the kind of vLLM's spec for buffers of a kind."""
    return get_kind_traits(kind).vllm_kind or kind


def list_kinds() -> tuple[BufferKind, ...]:
    """Return all kinds, in the order of their rows."""
    return tuple(KINDS)


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
    pair: KvPair,
    layer: Iterable[KvPair],
    kinds: Kinds | None = None,
    *,
    has_block_table: bool = False,
) -> InferredKind:
    """Return the kind of a buffer: what its profile says, else what its shape suggests.

    The profile's own kind settles it, or the one that the profile says it is: a name of `KINDS`,
    ``linear``, ``mla`` or ``cross``. With ``attention``, and two kinds of MLA, the symbol of its
    axis says whether it is a window, by its name or by the profile's word for it.

    Where the profile leaves it to the shape, a context axis is any symbol after the batch:
    axis 2 of ``[batch, heads, context, size]``, axis 1 where heads and size share one axis. A
    layer without one is a linear state if a part of it has rank 3 (a convolution state; the
    other part is the recurrent one), or if its batch is a symbol, so that the exporter would
    have named a context too. Where every size is fixed, a cache and a state look alike:
    ``unknown``.

    A cache is paged if its axes count blocks, by a symbol or by the profile's words, or if the
    graph has a block table.

    The rows to choose from are `KINDS` by default.
    """
    rows = KINDS if kinds is None else kinds
    inferred = _infer_unpaged_kind(pair, layer, rows)
    paged = next((name for name, row in rows.items() if row.is_paged), None)
    grows = rows[inferred.kind].grows_with in ("context", "window")
    if paged is not None and grows and (has_block_table or _counts_blocks(pair)):
        return InferredKind(paged)
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


def _infer_unpaged_kind(pair: KvPair, layer: Iterable[KvPair], rows: Kinds) -> InferredKind:
    context = _list_context_symbols(find_pair_shape(pair), pair.axes)
    window, is_similar = _find_window(context, rows)
    if "window" in pair.axes:
        window, is_similar = _WINDOW_SYMBOL, False
    family = _find_settled_kinds(pair, rows)
    if family:
        is_guess = is_similar and any(row.window_symbol for row in family.values())
        return InferredKind(_choose_by_window(family, window), is_guess)
    state = _find_state_kind(rows)
    if not pair.has_open_kind and _is_state_name(pair):
        return InferredKind(state, is_guess=True)
    if context:
        kind = _choose_by_window(_select_attention_rows(rows), window)
        return InferredKind(kind, is_similar or not pair.has_open_kind)
    parts = [find_pair_shape(sibling) for sibling in layer if _is_same_layer(pair, sibling)]
    if not _has_only_states([find_pair_shape(pair), *parts]):
        return InferredKind("unknown")
    return InferredKind(state, is_guess=True)


def _find_state_kind(rows: Kinds) -> BufferKind:
    """Return the first kind of state."""
    return next((name for name, row in rows.items() if row.is_state), "unknown")


def _find_window(context: Iterable[str], rows: Kinds) -> tuple[str | None, bool]:
    """Return the symbol of a window, and whether it is only similar to one that is known."""
    for symbol in context:
        if is_window_symbol(symbol, rows):
            return symbol, False
    is_similar = any(_WINDOW_HINT in symbol for symbol in context)
    return (_WINDOW_SYMBOL if is_similar else None), is_similar


def _find_settled_kinds(pair: KvPair, rows: Kinds) -> Kinds:
    """Return the kinds of which the profile's kind is one; none if the profile leaves it open."""
    kind = pair.cache or pair.kind
    family = {name: row for name, row in rows.items() if kind in (name, row.profile_kind)}
    if family or kind != "attention" or pair.has_open_kind:
        return family
    return _select_attention_rows(rows)


def _select_attention_rows(rows: Kinds) -> Kinds:
    """Return the kinds of attention whose names say no more than that."""
    return {
        name: row for name, row in rows.items() if row.profile_kind is None and name != "unknown"
    }


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


def is_window_symbol(dim: Dim, kinds: Kinds | None = None) -> bool:
    """Return whether an axis of this symbol holds a window of the context only."""
    rows = KINDS if kinds is None else kinds
    return dim is not None and any(row.window_symbol == dim for row in rows.values())


def find_pair_shape(pair: KvPair) -> tuple[Dim, ...] | None:
    """Return the shape of a buffer: its input's, which the exporter was given, or its output's."""
    shapes = [side.value.shape for side in pair.sides]
    return next((shape for shape in shapes if shape is not None), None)


def find_pair_dtype(pair: KvPair) -> str:
    """Return the dtype of a buffer: its input's, or its output's."""
    return next((side.value.dtype for side in pair.sides), "UNDEFINED")


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
