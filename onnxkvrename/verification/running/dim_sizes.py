"""Sizes for the symbolic dimensions of a model that is run.

What is asked for counts first, then what a compile of the export was given
(``specializations.json``), then guesses. A run that fails may say what a size should
have been: graphs have constants of one size, such as the 1,500 positions of an encoder.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from onnxkvrename.errors import ModelError
from onnxkvrename.limits import MAX_MATCHED_CHARS
from onnxkvrename.rules.profile import find_terms
from onnxkvrename.sidecars.compiles import parse_specializations
from onnxkvrename.storage.read import read_text_file

DEFAULT_DIM_SIZE = 4
"""The size that is assumed for an unknown dimension."""

_FILE_NAME = "specializations.json"
_COMPILE_PREFIX = "qpc-"
"""How the names of QEfficient's compiles begin, which are folders of the export."""

_CONTEXT_PART = "comp_ctx_lengths"
"""The symbol of an export with lists of context lengths (CCL): how much of the context is read."""
_NO_MEANINGS: Mapping[str, str] = {}
_TIED_WORDS = {"batch": 1, "new": 2, "sequence": 4, "window": 8, "encoder": 6}
"""Words for symbols that have one size in a model, whatever they are called, and that size."""

_PAIR_PATTERNS = (
    r"\b(\d{1,9}) by (\d{1,9})\b",
    r"Got: (\d{1,9}) Expected: (\d{1,9})",
    r"\bgot (\d{1,9}) expected (\d{1,9})",
    r"\((\d{1,9})\) must be at least \w+ \((\d{1,9})\)",
    r"dimensions of (\d{1,9}) and (\d{1,9})",
)
"""How onnxruntime writes two sizes that should be one."""
_RANGE_PATTERN = r"idx=-?\d+ must be within the inclusive range \[-\d+,(\d{1,9})\]"


def read_specialized_sizes(model: Path) -> dict[str, int]:
    """Return the sizes that a compile gave to symbols; of several specializations the first's.

    The file lies beside the model or in a compile's folder there. Nothing if there is none that can
    be read.
    """
    try:
        names = sorted(os.listdir(model.parent))
    except OSError:
        return {}
    folders = [model.parent / name for name in names if name.startswith(_COMPILE_PREFIX)]
    for path in (folder / _FILE_NAME for folder in (model.parent, *folders)):
        try:
            specialized = parse_specializations(read_text_file(path), str(path))
        except ModelError:
            continue
        first_sizes = {name: sizes[0] for name, sizes in specialized.conflicting_sizes.items()}
        return {**specialized.sizes, **first_sizes}
    return {}


def limit_context_parts(likely: Mapping[str, int], dims: Mapping[str, int]) -> dict[str, int]:
    """Return likely sizes in which the part of the context that is read is not longer than it.

    The context may be one of `dims`, which are kept, or was corrected to run at all.
    """
    context = {**likely, **dims}.get("ctx_len")
    if context is None or _CONTEXT_PART not in likely:
        return dict(likely)
    return {**likely, _CONTEXT_PART: min(likely[_CONTEXT_PART], context)}


def read_dims(dims: Iterable[int | str | None]) -> tuple[int | str | None, ...]:
    """Return the dimensions of a shape; torch writes some sizes as names, such as ``"8"``."""
    return tuple(
        int(dim) if isinstance(dim, str) and re.fullmatch("[1-9][0-9]{0,8}", dim) else dim
        for dim in dims
    )


def resolve_dim_sizes(
    shapes: Iterable[Sequence[Any]],
    dims: Mapping[str, int],
    meanings: Mapping[str, str] = _NO_MEANINGS,
) -> dict[str, int]:
    """Return a size for every symbol: from `dims`, or a guess that is small enough for any machine.

    A sliding window gets the size of the context, so that it holds every position; one token
    has logits, which no chunk of a prompt is too short for. A sum of symbols is their sum.

    The `meanings` are what rules say of symbols; those with one word have one size.
    """
    symbols = sorted({dim for shape in shapes for dim in shape if isinstance(dim, str)})
    guesser = _SizeGuesser(dims, meanings)
    return {symbol: guesser.choose_size(symbol) for symbol in symbols}


def advance_sizes(
    sizes: Mapping[str, int], measured: Mapping[str, int], meanings: Mapping[str, str]
) -> dict[str, int]:
    """Return the sizes of the next step: those that outputs turned out to have, and their sums.

    What is fed back has the `measured` sizes. The `meanings` are what rules say of symbols.
    """
    by_word = {meanings[symbol]: size for symbol, size in measured.items() if symbol in meanings}
    advanced = dict(sizes)
    for symbol in sizes:
        word = meanings.get(symbol, "")
        if symbol in measured:
            advanced[symbol] = measured[symbol]
        elif word in _TIED_WORDS and word in by_word:
            advanced[symbol] = by_word[word]
    before, after = _SizeGuesser(sizes, meanings), _SizeGuesser({**advanced, **measured}, meanings)
    for symbol in sizes.keys() - measured.keys():
        for term in find_terms(symbol, meanings):
            advanced[symbol] += after.choose_size(term) - before.choose_size(term)
    return advanced


class _SizeGuesser:
    """Sizes of symbols, those of one word alike.

    The `dims` are known sizes, the `meanings` what rules say of symbols.
    """

    def __init__(self, dims: Mapping[str, int], meanings: Mapping[str, str]) -> None:
        self._dims = dims
        self._meanings = meanings
        by_word = {meanings[symbol]: dims[symbol] for symbol in dims if symbol in meanings}
        self._by_word = {word: by_word.get(word, size) for word, size in _TIED_WORDS.items()}
        if "sequence" not in by_word:  # what a window has room for but no position is undefined
            window = by_word.get("window", 0)
            self._by_word["sequence"] = max(self._by_word["sequence"], window)

    def choose_size(self, symbol: str) -> int:
        """Return the size of a symbol or of a sum."""
        if symbol in self._dims:
            return self._dims[symbol]
        terms = find_terms(symbol, self._meanings)
        if terms:
            return sum(map(self._choose_symbol_size, terms))
        return self._choose_symbol_size(symbol)

    def _choose_symbol_size(self, symbol: str) -> int:
        word = self._meanings.get(symbol, "")
        if symbol not in self._dims and word in self._by_word:
            return self._by_word[word]
        return self._dims.get(symbol, _guess_size(symbol, self._dims))


def _guess_size(symbol: str, dims: Mapping[str, int]) -> int:
    batch, context = dims.get("batch_size", 1), dims.get("ctx_len", 32)
    guesses = (
        *(("num_logits", 1), ("batch", batch), ("seq", 2), ("ctx", context)),
        ("window", context),
    )
    return next((size for part, size in guesses if part in symbol), DEFAULT_DIM_SIZE)


def list_corrections(
    message: str, sizes: Mapping[str, int], fixed: Iterable[str]
) -> Iterator[tuple[str, int]]:
    """Yield symbols that onnxruntime's message calls wrong, each with the size that it may need.

    The sizes are those of all symbols; `fixed` ones are not to be changed.
    """
    free = {symbol: size for symbol, size in sizes.items() if symbol not in set(fixed)}
    for one, other in _list_size_pairs(message[:MAX_MATCHED_CHARS]):
        for symbol, size in free.items():
            if one != other and size in (one, other):
                yield symbol, other if size == one else one
    for match in re.finditer(_RANGE_PATTERN, message[:MAX_MATCHED_CHARS]):
        limit = int(match[1]) + 1
        yield from ((symbol, limit) for symbol, size in free.items() if size > limit)


def _list_size_pairs(message: str) -> Iterator[tuple[int, int]]:
    for pattern in _PAIR_PATTERNS:
        for match in re.finditer(pattern, message):
            yield int(match[1]), int(match[2])
    shapes = [
        [int(size) for size in match[1].split(",")]
        for match in re.finditer(r"\{(\d{1,9}(?:,\d{1,9})*)\}", message)
    ]
    for index, shape in enumerate(shapes):
        for other in shapes[index + 1 :]:
            pairs = zip(reversed(shape), reversed(other), strict=False)
            yield from ((one, two) for one, two in pairs if 1 not in (one, two))
