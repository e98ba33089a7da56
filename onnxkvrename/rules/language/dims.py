"""Words for the axes of buffers and for the symbols of their sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from onnxkvrename.documents import ObjectReader
from onnxkvrename.model.signature import Dim
from onnxkvrename.rules.profile import DIM_WORDS


def parse_dims(table: ObjectReader) -> dict[str, str]:
    """Return the meaning of symbols in ``[dims]``: a word, or the sum of other symbols.

    Raises:
        UnreadableTextError: A symbol is neither, or a term of its sum has no word.
    """
    dims = {symbol: table.read_string(symbol) for symbol in table.values}
    words = ", ".join(DIM_WORDS)
    for symbol, meaning in dims.items():
        if meaning in DIM_WORDS:
            continue
        terms = split_sum(meaning)
        if len(terms) < 2:
            problem = f"must be one of {words}, or a sum of other symbols, such as 'past + new'"
            raise table.build_error(symbol, problem)
        for term in terms:
            if dims.get(term) not in DIM_WORDS:
                problem = f"is a sum with {term or 'nothing'}, which needs its own line"
                raise table.build_error(symbol, f"{problem} with one of {words}")
    return dims


def name_axes(
    shape: tuple[Dim, ...] | None, declared: Sequence[str], dims: Mapping[str, str]
) -> tuple[str, ...]:
    """Return a word for each axis of a buffer, empty for an unknown axis.

    Args:
        shape: The shape of the buffer.
        declared: The words for the axes in the rules, for a buffer of that rank.
        dims: The meaning of symbols in the rules.

    Returns:
        No words at all if all axes are unknown.
    """
    if shape is None:
        return tuple(declared)
    words = [_find_word(dim, dims) for dim in shape]
    if len(declared) == len(shape):
        words = [
            "window" if (axis, word) == ("sequence", "window") else axis
            for axis, word in zip(declared, words, strict=True)
        ]
    return tuple(words) if any(words) else ()


def split_sum(text: str) -> list[str]:
    """Return the terms of a sum of symbols; a single symbol is its only term."""
    return [term.strip() for term in text.split("+")]


def find_terms(symbol: str, dims: Mapping[str, str]) -> list[str]:
    """Return the terms of a symbol that is a sum, by the rules or by its own text.

    Args:
        symbol: The symbol of a size.
        dims: The meaning of symbols in the rules.

    Returns:
        Nothing for a symbol that is not a sum.
    """
    meaning = dims.get(symbol, symbol)
    terms = split_sum(symbol if meaning in DIM_WORDS else meaning)
    return terms if len(terms) > 1 else []


def _find_word(dim: Dim, dims: Mapping[str, str]) -> str:
    """Return the word for the axis of a size; for a sum, the word of its cached term."""
    if not isinstance(dim, str):
        return ""
    meaning = dims.get(dim, "")
    if meaning in DIM_WORDS:
        return "sequence" if meaning == "new" else meaning
    words = _list_words(find_terms(dim, dims), dims)
    return next((word for word in words if word in ("window", "sequence")), "")


def _list_words(terms: Sequence[str], dims: Mapping[str, str]) -> Iterator[str]:
    yield from (dims.get(term, "") for term in terms)
