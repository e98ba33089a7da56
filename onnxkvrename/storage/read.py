"""Files to read: opened without waiting, and judged by what was opened."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from onnxkvrename.errors import ModelError

MAX_MODEL_SIZE = (1 << 31) - 1
"""Bytes that any protobuf consumer can read in one message."""


class FileIdentity(NamedTuple):
    """What tells one state of a file from any other.

    Without the device: of a shared file system, each machine calls it by a number of its own.
    """

    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def from_stat(cls, status: os.stat_result) -> FileIdentity:
        """The identity that a stat result speaks of."""
        return cls(status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


class OpenFile:
    """A regular file, open for reading."""

    def __init__(self, path: Path, descriptor: int, status: os.stat_result) -> None:
        self.path = path
        self.descriptor = descriptor
        self.status = status
        self.identity = FileIdentity.from_stat(status)
        self.size = status.st_size

    def read(self, offset: int, size: int) -> bytes:
        """Up to ``size`` bytes from ``offset`` on, fewer only at the end."""
        with _translate_read_errors(self.path):
            return read_at(self.descriptor, offset, size)


@contextmanager
def open_file(path: Path) -> Iterator[OpenFile]:
    """Open a regular file for reading; never waits, whatever the path leads to.

    Raises :class:`ModelError` for what is not there, not readable, or no file.
    """
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    with _translate_read_errors(path):
        descriptor = os.open(path, flags | getattr(os, "O_CLOEXEC", 0))
    try:
        with _translate_read_errors(path):
            status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            kind = "a directory" if stat.S_ISDIR(status.st_mode) else "no regular file"
            raise ModelError(f"is {kind}", path=str(path))
        yield OpenFile(path, descriptor, status)
    finally:
        close_quietly(descriptor)


def is_file_unchanged(path: Path, identity: FileIdentity) -> bool:
    """Whether a path leads to a file in just this state."""
    try:
        return FileIdentity.from_stat(os.stat(path)) == identity
    except OSError:
        return False


def read_text_file(path: Path, limit: int = 1 << 20) -> str:
    """A small UTF-8 text file, such as rules."""
    with open_file(path) as file:
        if file.size > limit:
            raise ModelError(f"is {file.size:,} bytes, more than {limit:,}", path=str(path))
        try:
            return file.read(0, file.size).decode("utf-8-sig")
        except UnicodeDecodeError:
            raise ModelError("is no UTF-8 text", path=str(path)) from None


@contextmanager
def _translate_read_errors(path: Path) -> Iterator[None]:
    """Say in words why a file cannot be read."""
    try:
        yield
    except FileNotFoundError:
        raise ModelError("no such file", path=str(path)) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ModelError(f"cannot be read: {reason}", path=str(path)) from None


def read_at(descriptor: int, offset: int, size: int) -> bytes:
    """Up to ``size`` bytes from ``offset`` on, fewer only at the end."""
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
    """Whether there is a file at ``path`` with just these bytes."""
    with open_file(path) as file:
        if file.size != size:
            return False
        offset = 0
        for part in parts:
            if file.read(offset, len(part)) != part:
                return False
            offset += len(part)
    return True


def read_chunks(source: OpenFile, offset: int, size: int) -> Iterator[bytes]:
    """The bytes ``[offset, offset + size)`` of a file, a megabyte at a time."""
    for start in range(offset, offset + size, 1 << 20):
        yield source.read(start, min(1 << 20, offset + size - start))


def close_quietly(descriptor: int) -> None:
    """Close what was only read, or is on the disk already: a failure has nothing to say."""
    with suppress(OSError):
        os.close(descriptor)
