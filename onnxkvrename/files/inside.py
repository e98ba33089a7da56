"""Read and write below a directory, wherever links that lie there lead.

What is read is judged by what was opened: its real path must be below the directory. One kind
of link may lead out: a file in a snapshot of a Hugging Face cache,
``models--NAME/snapshots/REVISION/...``, to a blob of the same cache, ``models--NAME/blobs/HASH``.
What is written goes through no link at all.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from onnxkvrename.errors import WriteError
from onnxkvrename.files.read import (
    OpenFile,
    OutsideError,
    build_changed_error,
    close_quietly,
    is_link,
    open_file,
    resolve_path,
    translate_read_errors,
)

_REPOSITORY_PREFIX = "models--"
_BLOB = re.compile("[0-9a-f]{40}|[0-9a-f]{64}")
"""The name of a blob: the SHA-1 of git, or the SHA-256 of a large file."""
_CAN_WALK = {os.open, os.stat} <= os.supports_dir_fd and hasattr(os, "O_NOFOLLOW")
_LINK_ERRNOS = (errno.ELOOP, errno.EMLINK, errno.ENOTDIR)
"""Errors of opening a symbolic link without following it, on Linux, BSD and macOS."""
_DIRECTORY_FLAGS = (
    os.O_RDONLY
    | getattr(os, "O_PATH", 0)  # needs no right to list the directory
    | getattr(os, "O_DIRECTORY", 0)
    | getattr(os, "O_CLOEXEC", 0)
)


class Folder:
    """A directory from which files are read, and from nowhere else.

    Args:
        path: The directory; it may be a link, or be reached through some.

    Attributes:
        path: Its path, links resolved.

    Raises:
        ModelError: It cannot be determined where the path leads.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(resolve_path(path))
        self._repository = find_repository(self.path)

    def has_file(self, file: OpenFile) -> bool:
        """Return whether an open file is found in the directory by the last part of its path.

        Raises:
            ModelError: This cannot be determined.
        """
        with translate_read_errors(file.path):
            return os.path.samestat(os.stat(self.path / file.path.name), file.status)

    @contextmanager
    def open_file(self, location: str) -> Iterator[OpenFile]:
        """Open a regular file for reading, until the context ends. Never waits, as for a pipe.

        Args:
            location: Its path, relative to the directory.

        Yields:
            The file; its path is the one without links.

        Raises:
            OutsideError: The path leads out of the directory.
            ModelError: The file does not exist, is not regular, or cannot be read.
        """
        real_path = Path(resolve_path(self.path / location))
        if not self._contains(real_path):
            raise OutsideError(
                f"leads out of the model's directory, to {real_path}", path=str(self.path)
            )
        with open_file(real_path) as file:
            if not _is_open_at(file, real_path):
                raise build_changed_error(self.path / location)
            yield file

    def _contains(self, real_path: Path) -> bool:
        if self.path in (real_path, *real_path.parents):
            return True
        return (
            self._repository is not None
            and real_path.parent == self._repository / "blobs"
            and _BLOB.fullmatch(real_path.name) is not None
        )


def _is_open_at(file: OpenFile, real_path: Path) -> bool:
    """Return whether a file that was opened by a path without links is still reached by none."""
    with translate_read_errors(real_path):
        try:
            return os.readlink(f"/proc/self/fd/{file.descriptor}") == str(real_path)
        except FileNotFoundError:  # no such directory on this system
            status = os.stat(real_path)
    return os.path.samestat(status, file.status) and resolve_path(real_path) == str(real_path)


def check_inside(root: Path, path: Path) -> None:
    """Check that no directory between another one and a path is a symbolic link.

    Args:
        root: The directory that the user gave. It may be a link, or be reached through some.
        path: The path of a result; what is there itself does not count.

    Raises:
        WriteError: One is.
        ModelError: This cannot be determined.
    """
    for directory in reversed(path.parents):
        if root in directory.parents and is_link(directory):
            raise _build_link_error(directory, root)


@contextmanager
def open_inside(root: Path | None, path: Path) -> Iterator[tuple[Path, int | None]]:
    """Open the directory of a path to write in it, reached without symbolic links.

    Args:
        root: The directory above the path that the user gave, which exists; ``None`` where links
            may lead anywhere, as in place.
        path: The path of a result.

    Yields:
        A path, and the descriptor of the directory that it is relative to. Without a root, and
        where the system cannot open relative to a directory, as on Windows, that is `path` and
        ``None``.

    Raises:
        WriteError: A directory between `root` and `path` is a link.
        OSError: One is missing or cannot be opened.
    """
    if root is None or not _CAN_WALK:
        if root is not None:
            check_inside(root, path)
        yield path, None
        return
    *names, name = path.relative_to(root).parts
    directory, descriptor = root, os.open(root, _DIRECTORY_FLAGS)
    try:
        for part in names:
            directory /= part
            outer = descriptor
            try:
                descriptor = os.open(part, _DIRECTORY_FLAGS | os.O_NOFOLLOW, dir_fd=outer)
            except OSError as error:
                if error.errno in _LINK_ERRNOS and _is_link_at(part, outer):
                    raise _build_link_error(directory, root) from None
                raise
            close_quietly(outer)
        yield Path(name), descriptor
    finally:
        close_quietly(descriptor)


def _is_link_at(name: str, descriptor: int) -> bool:
    return stat.S_ISLNK(os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_mode)


def _build_link_error(directory: Path, root: Path) -> WriteError:
    return WriteError(
        f"is a symbolic link, through which the result would leave {root}",
        path=str(directory),
        hint="remove the link, or write elsewhere with -o or -d",
    )


def find_repository(path: Path, parts: Collection[str] = ("snapshots",)) -> Path | None:
    """Return the directory ``models--NAME`` of a Hugging Face cache that a path is in.

    Args:
        path: A path without links, in a snapshot or a blob; nothing need be there.
        parts: The directories of the repository that it may be in, ``snapshots`` or ``blobs``.
    """
    for directory in path.parents:
        if directory.name.startswith(_REPOSITORY_PREFIX):
            below = path.relative_to(directory).parts
            if len(below) >= 2 and below[0] in parts:
                return directory
    return None


CACHE_FAULT = "is in a Hugging Face cache, where no file may change"


def find_cache(path: Path) -> Path | None:
    """Return the repository of a Hugging Face cache that a file is in, or would be.

    Args:
        path: The file. Links above it are followed; the file itself is not if it is a link.

    Raises:
        ModelError: It cannot be determined where the path leads.
    """
    place = Path(resolve_path(path.parent), path.name)
    return find_repository(place, ("blobs", "snapshots"))
