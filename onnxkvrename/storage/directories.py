"""New directories, made in place with no more rights than those that they replace."""

from __future__ import annotations

import os
from itertools import takewhile
from pathlib import Path

from onnxkvrename.storage.confined import open_parent
from onnxkvrename.storage.read import is_directory, is_occupied, read_status, translate_read_errors
from onnxkvrename.storage.temp_file import (
    ACCESS_LIST,
    TEMP_NAME,
    cut_permissions,
    list_attributes,
    translate_write_errors,
)


def find_existing_directory(directory: Path) -> Path:
    """Return a directory, or the nearest one above it that exists.

    Raises:
        ModelError: It cannot be determined what is there.
    """
    # The root always exists, even if the system reports an error for it.
    candidates = (directory, *directory.parents)
    return next(filter(is_occupied, candidates), Path(directory.anchor))


def is_left_empty(directory: Path) -> bool:
    """Return whether there is nothing below a directory but what killed runs have left.

    Raises:
        ModelError: It cannot be searched.
    """
    if not is_directory(directory):
        return False
    with translate_read_errors(directory):
        found = [names for _, _, names in os.walk(directory, onerror=_raise)]
    return all(TEMP_NAME.fullmatch(name) for names in found for name in names)


def _raise(error: OSError) -> None:
    raise error


def find_missing_directories(target: Path) -> list[Path]:
    """Return the directories that are missing above a file, the outer ones first.

    Raises:
        ModelError: It cannot be determined what is there.
    """
    return list(takewhile(lambda path: not is_occupied(path), target.parents))[::-1]


def make_directories(target: Path, source: Path, root: Path | None) -> None:
    """Make the directories that are missing above a file.

    Each has the rights that a new directory gets there, but none that its source does not give.

    Args:
        target: The path of the file.
        source: The directory that the directory of the file replaces; those above it, up to
            the root, replace those above.
        root: The directory that the user gave for results: below it, no link may lead to the
            target.

    Raises:
        WriteError: One cannot be made.
        ModelError: It cannot be determined what is there.
    """
    missing = list[tuple[Path, Path]]()
    for directory in reversed(find_missing_directories(target)):
        missing.append((directory, source))
        if root is not None and root in directory.parents:
            source = source.parent
    for directory, replaced in reversed(missing):
        inner_root = root if root is not None and root in directory.parents else None
        with translate_write_errors(target), open_parent(directory, inner_root) as (name, parent):
            status = read_status(replaced)
            mode = 0o700
            if status is not None and ACCESS_LIST not in list_attributes(replaced):
                mode |= status.st_mode & 0o777
            os.mkdir(name, mode, dir_fd=parent)
            made = os.stat(name, dir_fd=parent)
            is_other_group = status is not None and made.st_gid != status.st_gid
            if is_other_group or ACCESS_LIST in list_attributes(directory):
                special = made.st_mode & 0o7000  # a new directory may get the group of its parent
                os.chmod(name, special | cut_permissions(made.st_mode), dir_fd=parent)
