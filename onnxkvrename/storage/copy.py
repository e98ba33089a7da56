"""Copy and compare the bytes of open files, by the fastest method that the system supports."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from onnxkvrename.storage.read import OpenFile, close_quietly, read_at, translate_read_errors

_MAX_STEP_SIZE = 1 << 26
_PAGE_SIZE = 1 << 12
_PIPE_SIZE = 1 << 20
_STAT_BLOCK_SIZE = 512
_MAX_COUNTED_PARTS = 10_000
_COMPARED_SIZE = 1 << 20
_UNSUPPORTED_ERRNOS = (
    *(errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF),
    *(errno.EPERM, errno.ETXTBSY),
)
"""Errors of a method that the system does not support for these files."""


class SourceError(OSError):
    """The file to copy from cannot be read; without this, either file may be at fault."""


def copy_range(source: int, target: int, offset: int, size: int) -> Iterator[int]:
    """Append bytes of one file to another. Holes in the source become holes in the target.

    Args:
        source: Descriptor to read from. Where its file has holes, its position changes.
        target: Descriptor to write to, at its current position, which is its end.
        offset: Where the bytes begin in the source.
        size: Their number.

    Yields:
        The number of bytes of each step.

    Raises:
        SourceError: The source ends early, or cannot be read.
        OSError: A file cannot be read or written. What was copied so far is in the target.
    """
    end = offset + size
    for data_start, data_end in find_data(source, offset, end):
        if data_start > offset:
            os.lseek(target, data_start - offset, os.SEEK_CUR)
            yield data_start - offset
        yield from _copy_data(source, target, data_start, data_end - data_start)
        offset = data_end
    if offset < end:
        os.ftruncate(target, os.lseek(target, end - offset, os.SEEK_CUR))
        yield end - offset


def find_data(source: int, offset: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield start and end of each part of a file that is not a hole.

    A file system that does not tell has no holes.

    Args:
        source: Descriptor of the file.
        offset: Where to begin.
        end: Where to end.

    Raises:
        SourceError: The file ends before `end`.
        OSError: The file system fails.
    """
    if not _has_holes(source):
        yield offset, end
        return
    while offset < end:
        try:
            data_start = os.lseek(source, offset, os.SEEK_DATA)
            data_end = os.lseek(source, data_start, os.SEEK_HOLE)
        except OSError as error:
            if error.errno == errno.ENXIO and os.fstat(source).st_size >= end:
                return  # there is a hole up to the end of the file
            if error.errno == errno.ENXIO:
                raise _build_shorter_error() from None
            if error.errno not in _UNSUPPORTED_ERRNOS:
                raise
            data_start, data_end = offset, end
        if data_start >= end:
            return
        if not offset <= data_start < data_end:  # no answer of a sound file system
            data_start, data_end = offset, end
        yield data_start, min(data_end, end)
        offset = data_end


def _has_holes(descriptor: int) -> bool:
    """Return whether a file may have holes: it has fewer blocks than bytes."""
    if not hasattr(os, "SEEK_DATA"):
        return False
    status = os.fstat(descriptor)
    return status.st_blocks * _STAT_BLOCK_SIZE < status.st_size


def measure_data(descriptor: int, size: int) -> int:
    """Return the bytes of a file that are not in holes, or more: only so many parts are counted.

    Args:
        descriptor: Descriptor of the file.
        size: Bytes of the file.

    Raises:
        OSError: As of :func:`find_data`.
    """
    needed = 0
    for count, (start, end) in enumerate(find_data(descriptor, 0, size)):
        if count == _MAX_COUNTED_PARTS:
            return needed + size - start
        needed += end - start
    return needed


def has_same_bytes(first: OpenFile, second: OpenFile) -> bool:
    """Return whether two files have the same bytes. Where both have holes nothing is read.

    Raises:
        ModelError: One of them cannot be read.
    """
    if first.size != second.size:
        return False
    from heapq import merge  # only where a result is there already

    done = 0
    for start, end in merge(_find_file_data(first), _find_file_data(second)):
        for offset in range(max(start, done), end, _COMPARED_SIZE):
            length = min(_COMPARED_SIZE, end - offset)
            data = first.read(offset, length)
            if len(data) != length or data != second.read(offset, length):
                return False
        done = max(done, end)
    return True


def _find_file_data(file: OpenFile) -> Iterator[tuple[int, int]]:
    with translate_read_errors(file.path):
        yield from find_data(file.descriptor, 0, file.size)


def _copy_data(source: int, target: int, offset: int, size: int) -> Iterator[int]:
    """Append bytes, by the first method that works for these files."""
    shifted = (os.lseek(target, 0, os.SEEK_CUR) - offset) % _PAGE_SIZE != 0
    methods = [_copy_with_splice] if shifted else []
    methods += [_copy_with_copy_file_range, _copy_with_sendfile, _copy_with_read]
    while size > 0:
        try:
            copied = methods[0](source, target, offset, min(size, _MAX_STEP_SIZE))
        except OSError as error:
            if len(methods) == 1 or error.errno not in _UNSUPPORTED_ERRNOS:
                raise
            copied = 0
        if copied == 0:
            # Some file systems copy nothing and report success; the next method shows.
            methods.pop(0)
            if not methods:
                raise _build_shorter_error()
            continue
        yield copied
        offset, size = offset + copied, size - copied


def _build_shorter_error() -> SourceError:
    return SourceError(errno.EIO, "it became shorter while it was copied")


def _copy_with_splice(source: int, target: int, offset: int, size: int) -> int:
    """Copy through a large pipe, by splice(2).

    A fifth faster than the other methods where the two files are shifted against each other
    by less than a page. Where pages fit, `copy_file_range` may share them.
    """
    if not hasattr(os, "splice"):
        return 0
    import fcntl

    reader, writer = os.pipe()
    try:
        with suppress(OSError):  # the system may have a lower limit
            fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, _PIPE_SIZE)
        done = 0
        while done < size:
            piped = os.splice(
                source, writer, min(size - done, _PIPE_SIZE), offset_src=offset + done
            )
            if piped == 0:
                break
            while piped > 0:
                try:
                    moved = os.splice(reader, target, piped)
                except OSError:
                    if done:
                        return done  # what is in the pipe is read again
                    raise
                if moved == 0:
                    return done
                piped, done = piped - moved, done + moved
        return done
    finally:
        close_quietly(reader)
        close_quietly(writer)


def _copy_with_copy_file_range(source: int, target: int, offset: int, size: int) -> int:
    if not hasattr(os, "copy_file_range"):
        return 0
    return os.copy_file_range(source, target, size, offset)


def _copy_with_sendfile(source: int, target: int, offset: int, size: int) -> int:
    if not hasattr(os, "sendfile"):
        return 0
    return os.sendfile(target, source, offset, size)


def _copy_with_read(source: int, target: int, offset: int, size: int) -> int:
    try:
        data = read_at(source, offset, min(size, 1 << 20))
    except OSError as error:
        raise SourceError(error.errno, error.strerror) from None
    write_all(target, data)
    return len(data)


def write_all(descriptor: int, data: bytes | bytearray) -> None:
    """Write all of `data`, in as many steps as the system needs."""
    with memoryview(data) as view:
        done = 0
        while done < len(view):
            written = os.write(descriptor, view[done:])
            if written == 0:
                raise OSError(errno.EIO, "nothing was written")
            done += written


def count_free_bytes(directory: Path) -> int | None:
    """Return the bytes that a disk has left for this user, ``None`` if the system does not tell.

    Args:
        directory: A directory on that disk.

    Raises:
        OSError: The disk cannot be queried.
    """
    if not hasattr(os, "statvfs"):
        return None
    try:
        status = os.statvfs(directory)
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.EOPNOTSUPP):
            return None
        raise
    return status.f_bavail * status.f_frsize
