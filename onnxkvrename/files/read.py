"""Read files: opened without waiting, and checked by what was opened."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from onnxkvrename.errors import MissingFileError, ModelError, ReadError

OPEN_FLAGS = (
    os.O_RDONLY
    | getattr(os, "O_NONBLOCK", 0)
    | getattr(os, "O_NOCTTY", 0)
    | getattr(os, "O_BINARY", 0)
    | getattr(os, "O_CLOEXEC", 0)
)
"""Flags to open a file for reading without waiting, and without effects on what is not a file."""

MEMORY = Path("<memory>")
"""The directory that the paths of models in memory name; nothing is in it."""
MAX_PATH_LENGTH = 1 << (15 if os.name == "nt" else 12)
"""Characters of a path, above which no system opens it and its parts are not looked at."""


class OutsideError(ModelError):
    """A path leads out of the directory that it must stay in."""


class FileIdentity(NamedTuple):
    """The state of a file; another content has another identity.

    Attributes:
        inode: Number of the file in its file system.
        size: Bytes.
        mtime_ns: Time of the last change of the content, in nanoseconds.
        ctime_ns: Time of the last change of the inode, in nanoseconds.
        device: Number of the file system. It stays in its process, and is 0 elsewhere, as
            each machine numbers a shared file system differently.
    """

    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int
    device: int = 0

    @classmethod
    def from_stat(cls, status: os.stat_result) -> FileIdentity:
        """Return the identity of the file of a stat result."""
        return cls(
            status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_dev
        )

    def matches(self, other: FileIdentity) -> bool:
        """Return whether both are the same file in the same state, as far as the system says."""
        return self[:-1] == other[:-1] and (0 in (self[-1], other[-1]) or self == other)

    def __reduce__(self) -> tuple[type[FileIdentity], tuple[int, ...]]:
        return FileIdentity, self[:-1]


class OpenFile:
    """A regular file, open for reading.

    Attributes:
        path: The path it was opened by.
        descriptor: Its descriptor.
        status: Its stat result from when it was opened.
        identity: Its state at that time.
        size: Its bytes at that time.
    """

    def __init__(self, path: Path, descriptor: int, status: os.stat_result) -> None:
        self.path = path
        self.descriptor = descriptor
        self.status = status
        self.identity = FileIdentity.from_stat(status)
        self.size = status.st_size

    def read(self, offset: int, size: int) -> bytes:
        """Return up to `size` bytes from `offset` on, fewer only at the end.

        Raises:
            ModelError: The file cannot be read.
        """
        with translate_read_errors(self.path):
            return read_at(self.descriptor, offset, size)

    def is_unchanged(self) -> bool:
        """Return whether the file is still in the state that it was opened in.

        Raises:
            ModelError: This cannot be determined.
        """
        with translate_read_errors(self.path):
            return FileIdentity.from_stat(os.fstat(self.descriptor)).matches(self.identity)


class MemoryFile(OpenFile):
    """A model in memory, which is read as an open file is; nothing lies beside it."""

    def __init__(self, name: str, data: bytes) -> None:
        self.path = MEMORY / name
        self.size = len(data)
        self._data = data

    def __str__(self) -> str:
        return str(self.path)

    def read(self, offset: int, size: int) -> bytes:
        """Return up to `size` bytes from `offset` on, fewer only at the end."""
        return self._data[offset : offset + size]


ModelSource = Path | MemoryFile
"""Where a model is read from."""


def is_in_memory(path: str | Path) -> bool:
    """Return whether a path is that of a model in memory, so that no file is beside it."""
    return Path(path).parts[:1] == MEMORY.parts


def build_changed_error(path: Path) -> ModelError:
    """Return the error of a file that has changed since it was opened to be checked."""
    return ModelError(
        "was changed by another program during the run",
        path=str(path),
        hint="run the same command again when that program is done",
    )


@contextmanager
def open_file(path: ModelSource) -> Iterator[OpenFile]:
    """Open a regular file for reading, until the context ends. Never waits, as for a pipe.

    Raises:
        ModelError: The file does not exist, is not regular, or cannot be read.
    """
    if isinstance(path, MemoryFile):
        yield path
        return
    with translate_read_errors(path):
        descriptor = os.open(path, OPEN_FLAGS)
    with open_descriptor(path, descriptor) as file:
        yield file


@contextmanager
def open_descriptor(path: Path, descriptor: int) -> Iterator[OpenFile]:
    """Use a descriptor as an open file, and close it when the context ends.

    Args:
        path: The path it was opened by.
        descriptor: The descriptor, opened with :data:`OPEN_FLAGS`.

    Raises:
        ModelError: It is not of a regular file.
    """
    try:
        with translate_read_errors(path):
            status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            kind = "a directory" if stat.S_ISDIR(status.st_mode) else "not a regular file"
            raise ModelError(f"is {kind}", path=str(path))
        yield OpenFile(path, descriptor, status)
    finally:
        close_quietly(descriptor)


def is_file_unchanged(path: Path, identity: FileIdentity) -> bool:
    """Return whether there is a file at `path`, in exactly this state.

    Raises:
        ModelError: This cannot be determined.
    """
    with translate_read_errors(path):
        try:
            status = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
    return FileIdentity.from_stat(status).matches(identity)


def read_text_file(path: Path, limit: int = 1 << 20) -> str:
    """Return the content of a small UTF-8 text file, such as rules.

    Args:
        path: The file.
        limit: The bytes it may have.

    Raises:
        ModelError: It cannot be read, is larger, or is not UTF-8.
    """
    with open_file(path) as file:
        if file.size > limit:
            raise ModelError(f"is {file.size:,} bytes, more than {limit:,}", path=str(path))
        try:
            return file.read(0, file.size).decode("utf-8-sig")
        except UnicodeDecodeError:
            raise ModelError("is not UTF-8 text", path=str(path)) from None


@contextmanager
def translate_read_errors(path: Path) -> Iterator[None]:
    """Turn an OSError of the context into a :class:`ModelError` about `path`.

    It is a :class:`ReadError` unless there is just no such file.
    """
    try:
        yield
    except FileNotFoundError:
        raise MissingFileError(str(path)) from None
    except (OSError, ValueError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise ReadError(f"cannot be read: {reason}", path=str(path)) from None


def read_at(descriptor: int, offset: int, size: int) -> bytes:
    """Return up to `size` bytes of a descriptor from `offset` on, fewer only at the end."""
    parts = []
    while size > 0:
        if hasattr(os, "pread"):
            part = os.pread(descriptor, size, offset)
        else:
            os.lseek(descriptor, offset, os.SEEK_SET)
            part = os.read(descriptor, size)
        if not part:
            break
        parts.append(part)
        offset, size = offset + len(part), size - len(part)
    return b"".join(parts) if len(parts) != 1 else parts[0]


def has_content(path: Path, size: int, parts: Iterable[bytes]) -> bool:
    """Return whether a file has exactly this content.

    Args:
        path: The file.
        size: The number of bytes.
        parts: The bytes, in any parts.

    Raises:
        ModelError: The file does not exist or cannot be read.
    """
    with open_file(path) as file:
        return is_content_of(file, size, parts)


def is_content_of(file: OpenFile, size: int, parts: Iterable[bytes]) -> bool:
    """Return whether an open file has exactly this content; see :func:`has_content`."""
    if file.size != size:
        return False
    offset = 0
    for part in parts:
        if file.read(offset, len(part)) != part:
            return False
        offset += len(part)
    return True


def read_chunks(source: OpenFile, offset: int, size: int) -> Iterator[bytes]:
    """Yield the bytes `[offset, offset + size)` of a file, a megabyte at a time."""
    for start in range(offset, offset + size, 1 << 20):
        yield source.read(start, min(1 << 20, offset + size - start))


def close_quietly(descriptor: int) -> None:
    """Close a descriptor. Its bytes were only read, or are on the disk, so errors do not matter."""
    with suppress(OSError):
        os.close(descriptor)


def read_status(path: str | Path, *, follow_links: bool = True) -> os.stat_result | None:
    """Return the status of what is at a path, ``None`` if there is nothing.

    Nothing is there if a part of the path is missing, or is a file that it would go through.
    Any other error does not mean that: a disk that fails, a server that is away, a
    directory that may not be searched, links in a circle, a name that is too long.

    Args:
        path: The path.
        follow_links: Whether a symbolic link is followed; ``None`` is then
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
        ModelError: This cannot be determined.
    """
    status = read_status(path)
    return status is not None and stat.S_ISDIR(status.st_mode)


def is_link(path: str | Path) -> bool:
    """Return whether a symbolic link is at a path.

    Raises:
        ModelError: This cannot be determined.
    """
    status = read_status(path, follow_links=False)
    return status is not None and stat.S_ISLNK(status.st_mode)


def is_occupied(path: str | Path) -> bool:
    """Return whether anything is at a path, be it a link that leads nowhere.

    Raises:
        ModelError: This cannot be determined.
    """
    return read_status(path, follow_links=False) is not None


def find_existing_directory(directory: Path) -> Path:
    """Return a directory, or the nearest one above it that exists.

    Raises:
        ModelError: It cannot be determined what is there.
    """
    # The root always exists, even if the system reports an error for it.
    candidates = (directory, *directory.parents)
    return next(filter(is_occupied, candidates), Path(directory.anchor))


def resolve_path(path: str | Path) -> str:
    """Return the absolute path without links and ``..``; parts that are missing stay.

    Raises:
        ModelError: A part of the path cannot be read, or links lead in a circle.
    """
    reason: object = os.strerror(errno.ENAMETOOLONG)
    if len(os.fspath(path)) < MAX_PATH_LENGTH:
        try:
            return _resolve_path(os.fspath(path))
        except FileNotFoundError:
            reason = "the working directory no longer exists"
        except RecursionError:  # more links than any system follows
            reason = os.strerror(errno.ELOOP)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
    raise ModelError(f"cannot be read: {reason}", path=str(path))


def _resolve_path(path: str) -> str:
    """Do as :func:`resolve_path`; all errors of the system but those of missing parts are raised.

    ``os.path.realpath`` takes any error for a missing part, unless it is strict.
    """
    try:
        return os.path.realpath(path, strict=True)
    except (FileNotFoundError, NotADirectoryError):
        head, name = os.path.split(path)
        if path in ("", os.curdir) or head == path:
            raise
    directory = _resolve_path(head or os.curdir)
    if name == os.pardir:
        return os.path.dirname(directory)
    resolved = directory if name in ("", os.curdir) else os.path.join(directory, name)
    if is_link(resolved):
        return _resolve_path(os.path.join(directory, os.readlink(resolved)))
    return resolved
