"""What is at a path, and where its links lead: an error is never taken for an answer."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from onnxkvrename.errors import ModelError

_MAX_LINKS = 40
"""The symbolic links that Linux follows in one path."""


def read_status(path: str | Path, *, follow_links: bool = True) -> os.stat_result | None:
    """Return the status of what is at a path, ``None`` if there is nothing.

    Nothing is there if a part of the path is missing, or is a file that it would go through.
    Any other error says nothing about the path: a disk that fails, a server that is away, a
    directory that may not be searched, links in a circle, a name that is too long.

    Args:
        path: The path.
        follow_links: Whether a symbolic link stands for what it leads to; ``None`` is then
            also returned for one that leads nowhere.

    Raises:
        ModelError: The status cannot be read; the message has the reason of the system.
    """
    try:
        return os.stat(path) if follow_links else os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ModelError(f"cannot be read: {reason}", path=str(path)) from None


def is_directory(path: str | Path) -> bool:
    """Return whether a path leads to a directory, through links or not.

    Raises:
        ModelError: That cannot be told.
    """
    status = read_status(path)
    return status is not None and stat.S_ISDIR(status.st_mode)


def is_link(path: str | Path) -> bool:
    """Return whether a symbolic link is at a path.

    Raises:
        ModelError: That cannot be told.
    """
    status = read_status(path, follow_links=False)
    return status is not None and stat.S_ISLNK(status.st_mode)


def is_occupied(path: str | Path) -> bool:
    """Return whether anything is at a path, be it a link that leads nowhere.

    Raises:
        ModelError: That cannot be told.
    """
    return read_status(path, follow_links=False) is not None


def resolve_path(path: str | Path) -> str:
    """Return the absolute path without links and ``..``; parts that are missing stay.

    Like :func:`os.path.realpath`, which takes a part whose status cannot be read for no link.

    Raises:
        ModelError: The status of a part cannot be read, or links lead in a circle.
    """
    if os.name == "nt":  # pragma: no cover - drives and junctions
        return os.path.realpath(path)
    text = os.fspath(path)
    resolved = os.sep if text.startswith(os.sep) else _find_working_directory(text)
    pending = text.split(os.sep)[::-1]
    link_count = 0
    while pending:
        name = pending.pop()
        if name == "..":
            resolved = os.path.dirname(resolved)
        if name in ("", ".", ".."):
            continue
        entry = os.path.join(resolved, name)
        if not is_link(entry):
            resolved = entry
            continue
        link_count += 1
        target = _read_link(entry)
        if link_count > _MAX_LINKS:
            raise ModelError(f"cannot be read: {os.strerror(errno.ELOOP)}", path=text)
        resolved = os.sep if target.startswith(os.sep) else resolved
        pending += target.split(os.sep)[::-1]
    return resolved


def _find_working_directory(path: str) -> str:
    try:
        return os.getcwd()
    except OSError as error:
        reason = f"cannot be found: the working directory: {error.strerror}"
        raise ModelError(reason, path=path, hint="change to a directory that exists") from None


def _read_link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError as error:
        raise ModelError(f"cannot be read: {error.strerror}", path=path) from None
