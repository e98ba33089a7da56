"""Find the files beside models that may be sidecars, by their names.

A rename looks for them before it loads anything else about sidecars: most models have none.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from onnxkvrename.errors import ModelError
from onnxkvrename.files.read import is_directory, is_occupied, read_status
from onnxkvrename.rules.pattern import match_name
from onnxkvrename.rules.profile import Rules

_COMPILE_DIRECTORY = "qpc-[0-9A-Za-z]+"
"""The names of directories below an export in which QEfficient keeps a compile of it."""
_SIDECAR_NAMES = ("genai_config.json", "metadata.json")
"""The names that files of the built-in formats of sidecars can have, beside families of them."""
_UPPER_NAMES = ("genai_config.json", "inference_metadata.yaml")
"""The files of those formats that may be in the directory above that of a model."""


def may_be_sidecar(file_name: str) -> bool:
    """Return whether a file of this name may be a sidecar of a built-in format."""
    if file_name.endswith((".yaml", ".yml")):
        return not file_name.startswith(".")
    is_batch = file_name.startswith("aic_batch_io") and file_name.endswith(".json")
    return is_batch or file_name in _SIDECAR_NAMES


def find_files_beside(
    directories: Iterable[Path], is_wanted: Callable[[str], bool]
) -> Iterator[tuple[Path, Path]]:
    """Yield the files with some names in the directories of models, and in those of compiles there.

    Each directory is listed once, and no file is opened.

    Yields:
        Sorted paths, each with the one of `directories` that it belongs to.

    Raises:
        ModelError: A directory cannot be listed.
    """
    for directory in dict.fromkeys(directories):
        for name in sorted(_list_names(directory, is_wanted)):
            yield directory / name, directory


def find_compiles(directory: Path) -> Iterator[tuple[Path, int]]:
    """Yield the directories of compiles beside the models in a directory that hold a binary.

    Yields:
        Each, sorted, with the time at which its newest binary was written, in nanoseconds.

    Raises:
        ModelError: The directory cannot be listed, or it cannot be determined what is there.
    """
    for entry in sorted(filter(_is_compile, _scan(directory)), key=lambda entry: entry.name):
        path = directory / entry.name
        inner = [path, *filter(is_directory, (path / each.name for each in _scan(path)))]
        names = (
            each / name for each in inner for name in _list_names(each, _is_binary, in_compile=True)
        )
        times = [status.st_mtime_ns for status in map(read_status, names) if status is not None]
        if times:
            yield path, max(times)


def find_candidates(directories: Iterable[Path], rules: Rules) -> tuple[tuple[Path, Path], ...]:
    """Return the files that may be sidecars of the models in some directories.

    Args:
        directories: The directories of models.
        rules: Rules that may name further files.

    Returns:
        As :func:`find_files_beside`; also configurations one directory up, each with that
        directory.

    Raises:
        ModelError: A directory cannot be listed, or it cannot be determined what is there.
    """

    def is_candidate(name: str) -> bool:
        return may_be_sidecar(name) or any(match_name(pattern, name) for pattern in rules.sidecars)

    directories = dict.fromkeys(directories)
    above = dict.fromkeys(
        directory.parent if directory.name not in ("", os.pardir) else directory / os.pardir
        for directory in directories
    )
    upper = (
        (directory / name, directory)
        for directory in above
        for name in _UPPER_NAMES
        if directory not in directories and is_occupied(directory / name)
    )
    return (*find_files_beside(directories, is_candidate), *upper)


def _list_names(
    directory: Path, is_wanted: Callable[[str], bool], *, in_compile: bool = False
) -> list[str]:
    """Return the names that are wanted in a directory and in those of its compiles."""
    names: list[str] = []
    for entry in _scan(directory):
        if is_wanted(entry.name):
            names.append(entry.name)
        elif not in_compile and _is_compile(entry):
            below = _list_names(Path(entry.path), is_wanted, in_compile=True)
            names += (os.path.join(entry.name, name) for name in below)
    return names


def _scan(directory: Path) -> list[os.DirEntry[str]]:
    """Return what is in a directory; nothing if it is missing."""
    try:
        with os.scandir(directory) as entries:
            return [*entries]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise ModelError(f"cannot be listed: {error.strerror}", path=str(directory)) from None


def _is_binary(name: str) -> bool:
    return name.endswith(".bin")


def _is_compile(entry: os.DirEntry[str]) -> bool:
    is_named = entry.name.startswith("qpc-") and re.fullmatch(_COMPILE_DIRECTORY, entry.name)
    return bool(is_named) and entry.is_dir(follow_symlinks=False)
