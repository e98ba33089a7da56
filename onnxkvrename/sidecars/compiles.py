"""What compiles of an export were given: the sizes of symbols, and the precision of buffers.

QEfficient writes ``specializations.json``, ``custom_io.yaml`` and ``hashed_compile_params.json``
into a directory ``qpc-HASH`` beside the model; a copy may have only the last one, which repeats
the precisions. Specializations are a list, each with its symbols and their sizes as text; older
versions list the symbols without the key ``symbols``:
https://github.com/quic/efficient-transformers/blob/main/QEfficient/base/modeling_qeff.py
(``_compile``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from onnxkvrename.documents import UnreadableTextError, parse_json
from onnxkvrename.errors import ModelError
from onnxkvrename.limits import shorten_text
from onnxkvrename.rules.sidecar_files import find_files_beside
from onnxkvrename.sidecars.custom_io import parse_custom_io_dtypes
from onnxkvrename.storage.read import read_text_file

_NON_SYMBOL_KEYS = {"name", "_graph_name"}
_FORM_HINT = 'expected: {"specializations": [{"symbols": {"ctx_len": "4096"}}]}'
_CUSTOM_IO, _PARAMS, _SIZES = (
    "custom_io.yaml",
    "hashed_compile_params.json",
    "specializations.json",
)
_Setting = TypeVar("_Setting", str, int)


class Compiles(NamedTuple):
    """The compiles beside some models.

    The dtypes of inputs and outputs and the sizes of symbols are those in which all compiles agree.
    """

    directories: tuple[Path, ...] = ()
    dtypes: Mapping[str, str] = {}
    sizes: Mapping[str, int] = {}


def read_compiles(directories: Iterable[Path]) -> Compiles:
    """Return what the compiles below some directories agree on; unreadable files say nothing.

    Raises:
        ModelError: A directory cannot be listed.
    """
    files: dict[Path, set[str]] = {}
    wanted = (_CUSTOM_IO, _PARAMS, _SIZES)
    for path, directory in find_files_beside(directories, wanted.__contains__):
        if path.parent != directory:
            files.setdefault(path.parent, set()).add(path.name)
    dtypes = [_read_dtypes(path, names) for path, names in files.items()]
    sizes = [_read_sizes(path) if _SIZES in names else {} for path, names in files.items()]
    return Compiles(tuple(sorted(files)), _find_common(dtypes), _find_common(sizes))


def _find_common(tables: list[Mapping[str, _Setting]]) -> Mapping[str, _Setting]:
    """Return the entries that all tables have."""
    first, *others = tables or [{}]
    return {k: v for k, v in first.items() if all(other.get(k) == v for other in others)}


def _read_dtypes(directory: Path, names: set[str]) -> Mapping[str, str]:
    try:
        if _CUSTOM_IO in names:
            path = directory / _CUSTOM_IO
            return parse_custom_io_dtypes(read_text_file(path), str(path))
        params = parse_json(read_text_file(directory / _PARAMS)) if _PARAMS in names else {}
    except (ModelError, UnreadableTextError):
        return {}
    entries = params.get("custom_io") if isinstance(params, dict) else None
    items = entries.items() if isinstance(entries, dict) else ()
    return {name: value.upper() for name, value in items if isinstance(value, str)}


def _read_sizes(directory: Path) -> Mapping[str, int]:
    try:
        path = directory / _SIZES
        sizes = parse_specializations(read_text_file(path), str(path)).sizes
    except ModelError:
        return {}
    return {symbol: size for symbol, size in sizes.items() if size > 0}


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
