"""``specializations.json``: what a compile makes of symbols.

After quic/efficient-transformers, ``base/modeling_qeff.py`` (``_compile``): a list of
specializations, each with its symbols, sizes written as text; older ones list
the symbols themselves.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from onnxkvrename.errors import ModelError
from onnxkvrename.sidecars.text_edit import shorten_name

_NON_SYMBOL_KEYS = {"name", "_graph_name"}
_FORM_HINT = 'its form: {"specializations": [{"symbols": {"ctx_len": "4096"}}]}'


class Specializations(NamedTuple):
    """Sizes that all specializations agree on, and the symbols they do not, with all theirs."""

    sizes: Mapping[str, int]
    conflicting_sizes: Mapping[str, tuple[int, ...]]


def parse_specializations(text: str, path: str) -> Specializations:
    """What the text of such a file says; ``path`` is what messages call it.

    Raises :class:`ModelError` for another form.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"is not JSON: {error}", path=path) from None
    found: dict[str, dict[int, None]] = {}
    for symbols in _find_symbol_tables(data, path):
        for symbol, size in symbols.items():
            found.setdefault(symbol, {})[_parse_size(symbol, size, path)] = None
    return Specializations(
        {symbol: next(iter(sizes)) for symbol, sizes in found.items() if len(sizes) == 1},
        {symbol: tuple(sizes) for symbol, sizes in found.items() if len(sizes) > 1},
    )


def _find_symbol_tables(data: Any, path: str) -> Iterator[dict[str, Any]]:
    listed = data.get("specializations") if isinstance(data, dict) else None
    if not isinstance(listed, list) or not listed:
        raise ModelError("has no list of specializations", path=path, hint=_FORM_HINT)
    for entry in listed:
        symbols = entry.get("symbols", entry) if isinstance(entry, dict) else None
        if not isinstance(symbols, dict):
            raise ModelError("has a specialization without symbols", path=path, hint=_FORM_HINT)
        yield {symbol: size for symbol, size in symbols.items() if symbol not in _NON_SYMBOL_KEYS}


def _parse_size(symbol: str, size: Any, path: str) -> int:
    text = str(size)
    if isinstance(size, bool) or not (text.isascii() and text.isdigit()) or len(text) > 18:
        said = f"has {shorten_name(symbol)} as {shorten_name(text)}, which is no size"
        raise ModelError(said, path=path, hint=_FORM_HINT)
    return int(text)
