"""The kinds of KV buffers: one row for each, with everything that differs between them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Literal, NamedTuple

Growth = Literal["context", "window", "encoder", "nothing", "blocks"]
_CACHE_AXES = ("batch", "heads", "sequence", "head")


class KindTraits(NamedTuple):
    """The traits of one kind of buffer.

    Attributes:
        label: Its name for readers.
        symbol: Its letter in the map of ``onnxkvrename inspect``.
        color: Its color in that map, as rich names colors.
        page_colors: Its colors on a page, for light and for dark paper. Text can have each on the
            paper, and the paper's color on each (WCAG AA).
        grows_with: What makes a buffer longer: the context, up to all of it or to a window
            of it, the encoder's tokens, or nothing; ``blocks`` for a pool of blocks that all
            sequences share, and of which a block table says whose they are.
        family: The word of rules for this kind and those that differ from it only in how much of
            the context they hold; the window decides between these.
        vllm_kind: The kind of vLLM's spec for it, its ``KVCacheSpecKind``; empty if it has none.
        window_symbol: The symbol of the axis along which an exporter puts the window.
        axes: The words for the axes of a buffer whose profile does not name them.
        is_mla: True for the latent and the rope of multi-head latent attention, which
            tensor parallelism copies to every rank.
        is_chunked: True where the window is a chunk, which starts empty when the last one is full.
    """

    label: str
    symbol: str
    color: str
    page_colors: tuple[str, str]
    grows_with: Growth
    family: str
    vllm_kind: str = ""
    window_symbol: str | None = None
    axes: tuple[str, ...] = ()
    is_mla: bool = False
    is_chunked: bool = False

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


Kinds = Mapping[str, KindTraits]

KINDS: Kinds = MappingProxyType(
    {
        "full_attention": KindTraits(
            "full attention",
            "f",
            "cyan",
            ("#0b6375", "#56c8db"),
            "context",
            family="attention",
            vllm_kind="full_attention",
            axes=_CACHE_AXES,
        ),
        "sliding_window": KindTraits(
            "sliding window",
            "w",
            "green",
            ("#1a6b2d", "#5bc46f"),
            "window",
            family="attention",
            vllm_kind="sliding_window",
            window_symbol="sliding_window",
            axes=_CACHE_AXES,
        ),
        "chunked_local_attention": KindTraits(
            "chunked attention",
            "c",
            "bright_green",
            ("#4d6300", "#a8cc3a"),
            "window",
            family="attention",
            vllm_kind="chunked_local_attention",
            window_symbol="chunk_ctx_len",
            axes=_CACHE_AXES,
            is_chunked=True,
        ),
        "mla_attention": KindTraits(
            "MLA",
            "m",
            "magenta",
            ("#7a3aa8", "#c99bf0"),
            "context",
            family="mla",
            vllm_kind="mla_attention",
            is_mla=True,
        ),
        "sliding_window_mla": KindTraits(
            "sliding window MLA",
            "n",
            "bright_magenta",
            ("#a3256f", "#f29ac4"),
            "window",
            family="mla",
            vllm_kind="sliding_window_mla",
            window_symbol="sliding_window",
            is_mla=True,
        ),
        "cross_attention": KindTraits(
            "cross attention",
            "x",
            "blue",
            ("#1d4fb8", "#82aaff"),
            "encoder",
            family="cross",
            vllm_kind="cross_attention",
        ),
        "mamba": KindTraits(
            "linear state",
            "s",
            "yellow",
            ("#7d4e00", "#e0b050"),
            "nothing",
            family="linear",
            vllm_kind="mamba",
        ),
        "paged_attention": KindTraits(
            "paged cache",
            "p",
            "bright_blue",
            ("#4a3fb0", "#a9a0ff"),
            "blocks",
            family="paged_attention",
        ),
        "unknown": KindTraits(
            "unknown kind",
            "u",
            "white",
            ("#505a64", "#aab4be"),
            "context",
            family="unknown",
        ),
    }
)
"""All kinds, by vLLM's own names; vLLM has no ``paged_attention``, as it pages all caches itself.

The first state is what a buffer without a context axis is that only its shape shows to be one.

The symbols are those of ``get_onnx_dynamic_axes`` of QEfficient's gemma3, gpt_oss and llama4
(https://github.com/quic/efficient-transformers). vLLM has no MLA with chunks.
"""


def list_kinds() -> tuple[str, ...]:
    """Return the names of all kinds, in the order of their rows."""
    return tuple(KINDS)


BufferKind = Annotated[str, list_kinds]
"""The name of a row of `KINDS`; a schema of JSON lists the names that the function returns."""


def get_kind_traits(kind: BufferKind) -> KindTraits:
    """Return the row of a kind."""
    return KINDS[kind]


def get_vllm_kind(kind: BufferKind) -> BufferKind:
    """Return the kind of vLLM's spec for buffers of a kind; the kind itself if vLLM has none."""
    return KINDS[kind].vllm_kind or kind


def list_kind_words() -> tuple[str, ...]:
    """Return the words by which rules say what kind a buffer is: families, and names of kinds."""
    families = [row.family for row in KINDS.values()]
    words = dict.fromkeys((*families, *KINDS))
    del words["unknown"]
    return tuple(words)


def find_kinds(word: str) -> Kinds:
    """Return the rows that a word of rules means: a kind, or all of a family."""
    return {name: row for name, row in KINDS.items() if word in (name, row.family)}


def find_traits(word: str) -> KindTraits | None:
    """Return the first row that a word of rules means; ``None`` if no kind has it."""
    for name, row in KINDS.items():
        if word in (name, row.family):
            return row
    return None


def is_state(word: str) -> bool:
    """Return whether a word of rules means states: of any rank, and often only one part."""
    row = find_traits(word)
    return row is not None and row.is_state
