"""What compiles of an export were given: precisions and sizes, in ``qpc-HASH`` beside the model.

QEfficient writes ``custom_io.yaml``, ``specializations.json`` and ``hashed_compile_params.json``
there. A copy may have only the last one, which repeats the precisions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

from onnxkvrename.documents import UnreadableTextError, parse_json
from onnxkvrename.errors import ModelError
from onnxkvrename.rules.find_models import list_compile_files
from onnxkvrename.sidecars.formats.custom_io import parse_custom_io_dtypes
from onnxkvrename.sidecars.specializations import parse_specializations
from onnxkvrename.storage.read import read_text_file

_CUSTOM_IO, _PARAMS, _SIZES = (
    "custom_io.yaml",
    "hashed_compile_params.json",
    "specializations.json",
)
_Setting = TypeVar("_Setting", str, int)


class Compiles(NamedTuple):
    """The compiles beside some models.

    Attributes:
        directories: Their directories.
        dtypes: Names of inputs and outputs to dtypes, where all compiles agree.
        sizes: Symbols to sizes, where all compiles agree.
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
    for directory in dict.fromkeys(directories):
        for name in list_compile_files(directory, (_CUSTOM_IO, _PARAMS, _SIZES)):
            path = directory / name
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
