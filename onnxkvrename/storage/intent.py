"""Planned renames of directories, recorded in case this process is killed."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from onnxkvrename.errors import KvRenameError, ModelError, UndoError
from onnxkvrename.storage.temp_file import TEMP_PREFIX, build_temp_path
from onnxkvrename.storage.transaction import sync_directory


@contextmanager
def write_intent(moves: Mapping[Path, Path]) -> Iterator[None]:
    """Record planned renames of directories, in case this process is killed.

    Each record is a symbolic link to `OLD/NEW` beside the directory; it is removed when the
    context ends. Without support for symbolic links, nothing is recorded.

    Args:
        moves: For each directory its new path.
    """
    links = [build_temp_path(directory) for directory in moves]
    try:
        for link, (directory, target) in zip(links, moves.items(), strict=True):
            with suppress(OSError):
                os.symlink(f"{directory.name}/{target.name}", link)
                sync_directory(link.parent)
        yield
    except UndoError:
        raise  # it says where the directory goes when the work is finished
    except BaseException:
        _remove_links(links)
        raise
    _remove_links(links)  # they are known, whether or not their directory can be listed
    clear_intent(moves)


def _remove_links(links: list[Path]) -> None:
    for link in links:
        with suppress(OSError):
            os.unlink(link)


def clear_intent(moves: Mapping[Path, Path]) -> None:
    """Remove the records of these moves, whether this run or a killed one wrote them."""
    for directory, target in moves.items():
        with suppress(OSError, KvRenameError):  # the next run removes it
            for intent in find_intents(directory.parent):
                if intent.move == (directory.name, target.name):
                    os.unlink(intent.path)


class Intent(NamedTuple):
    """The record of a directory that a run, killed or alive, was about to rename.

    Attributes:
        path: The symbolic link that records it.
        move: The old and the new name of the directory.
    """

    path: Path
    move: tuple[str, str]


def find_intents(directory: Path) -> Iterator[Intent]:
    """Yield the recorded renames of directories in `directory`; none if that does not exist.

    Raises:
        ModelError: The directory, or a record in it, cannot be read.
    """
    try:
        with os.scandir(directory) as entries:
            paths = [Path(entry.path) for entry in entries if entry.name.startswith(TEMP_PREFIX)]
        for path in paths:
            if (move := read_intent(path)) is not None:
                yield Intent(path, move)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise ModelError(f"cannot be listed: {error.strerror}", path=str(directory)) from None


def read_intent(path: Path) -> tuple[str, str] | None:
    """Return the old and the new name that a file records, ``None`` if it is not such a record.

    Raises:
        OSError: This cannot be determined.
    """
    try:
        names = os.readlink(path).split("/")
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOENT):  # no symbolic link
            return None
        raise
    return (names[0], names[1]) if len(names) == 2 else None
