"""What compiles of an export were given: the sizes of symbols.

QEfficient writes ``specializations.json`` into a directory ``qpc-HASH`` beside the model. It is a
list, each with its symbols and their sizes as text; older versions list the symbols without the
key ``symbols``:
https://github.com/quic/efficient-transformers/blob/main/QEfficient/base/modeling_qeff.py
(``_compile``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from onnxkvrename.documents import UnreadableTextError, parse_json
from onnxkvrename.errors import ModelError
from onnxkvrename.limits import shorten_text

_NON_SYMBOL_KEYS = {"name", "_graph_name"}
_FORM_HINT = 'expected: {"specializations": [{"symbols": {"ctx_len": "4096"}}]}'


class Specializations(NamedTuple):
    """The sizes of symbols.

    Attributes:
        sizes: Symbols whose size is the same in all specializations.
        conflicting_sizes: The other symbols, each with all its sizes.
    """

    sizes: Mapping[str, int]
    conflicting_sizes: Mapping[str, tuple[int, ...]]


def parse_specializations(text: str, path: str) -> Specializations:
    """Return the sizes in the text of a ``specializations.json``; messages name the path.

    Raises:
        ModelError: The text is not JSON, or does not have the expected form.
    """
    try:
        data = parse_json(text)
    except UnreadableTextError as error:
        raise ModelError(str(error), path=path) from None
    sizes_by_symbol: dict[str, dict[int, None]] = {}
    for symbols in _find_symbol_tables(data, path):
        for symbol, size in symbols.items():
            sizes_by_symbol.setdefault(symbol, {})[_parse_size(symbol, size, path)] = None
    return Specializations(
        {symbol: next(iter(sizes)) for symbol, sizes in sizes_by_symbol.items() if len(sizes) == 1},
        {symbol: tuple(sizes) for symbol, sizes in sizes_by_symbol.items() if len(sizes) > 1},
    )


def _find_symbol_tables(data: Any, path: str) -> Iterator[dict[str, Any]]:
    entries = data.get("specializations") if isinstance(data, dict) else None
    if not isinstance(entries, list) or not entries:
        raise ModelError("has no list of specializations", path=path, hint=_FORM_HINT)
    for entry in entries:
        symbols = entry.get("symbols", entry) if isinstance(entry, dict) else None
        if not isinstance(symbols, dict):
            raise ModelError("has a specialization without symbols", path=path, hint=_FORM_HINT)
        yield {symbol: size for symbol, size in symbols.items() if symbol not in _NON_SYMBOL_KEYS}


def _parse_size(symbol: str, size: Any, path: str) -> int:
    text = str(size)
    if isinstance(size, bool) or not (text.isascii() and text.isdigit()) or len(text) > 18:
        problem = f"has {shorten_text(symbol)} as {shorten_text(text)}, which is not a size"
        raise ModelError(problem, path=path, hint=_FORM_HINT)
    return int(text)
