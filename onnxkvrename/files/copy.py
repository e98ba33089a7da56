"""Copy and compare the bytes of open files."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import suppress

from onnxkvrename.files.read import OpenFile, close_quietly, read_at, read_chunks

_PIPE_SIZE = 1 << 20
_STEP_SIZE = 1 << 26
"""Bytes between two reports of the progress."""
_NO_SPLICE_ERRNOS = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM)
"""Errors of a file system, or of a sandbox, without splice(2)."""


class SourceError(OSError):
    """The file to copy from cannot be read; without this, either file may be at fault."""


def copy_range(source: int, target: int, offset: int, size: int) -> Iterator[int]:
    """Append bytes of one file to another; holes of a sparse file stay holes.

    Args:
        source: Descriptor to read from.
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
    while offset < end:
        data, stop = _find_data(source, offset, end)
        if data > offset:
            os.ftruncate(target, os.fstat(target).st_size + data - offset)
            os.lseek(target, 0, os.SEEK_END)
            yield data - offset
        yield from _copy_data(source, target, data, stop - data)
        offset = stop


def _find_data(source: int, offset: int, end: int) -> tuple[int, int]:
    """Return where the next data of a file begin and stop, before an end.

    Where the system does not tell, all are data; and where the file is shorter than that end, as
    that is met when it is read.
    """
    if not hasattr(os, "SEEK_DATA"):
        return offset, end
    try:
        data = os.lseek(source, offset, os.SEEK_DATA)
        return min(data, end), min(os.lseek(source, data, os.SEEK_HOLE), end)
    except OSError as error:
        if error.errno == errno.ENXIO and os.fstat(source).st_size >= end:
            return end, end  # nothing but a hole
    return offset, end


def _copy_data(source: int, target: int, offset: int, size: int) -> Iterator[int]:
    can_splice = hasattr(os, "splice")
    while size > 0:
        copied = 0
        if can_splice:
            try:
                copied = _splice(source, target, offset, min(size, _STEP_SIZE))
            except OSError as error:
                if error.errno not in _NO_SPLICE_ERRNOS:
                    raise
        if copied == 0:
            can_splice = False
            copied = _read_and_write(source, target, offset, min(size, _PIPE_SIZE))
        yield copied
        offset, size = offset + copied, size - copied


def _splice(source: int, target: int, offset: int, size: int) -> int:
    """Copy through a large pipe, by splice(2); return the number of bytes.

    As fast as copy_file_range(2) where pages fit, and a fifth faster where the two files are
    shifted against each other by less than a page, as a result of a rename is.
    """
    import fcntl  # not on Windows

    reader, writer = os.pipe()
    try:
        with suppress(OSError):  # the system may have a lower limit
            fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, _PIPE_SIZE)
        done = 0
        try:
            while done < size:
                piped = os.splice(
                    source, writer, min(size - done, _PIPE_SIZE), offset_src=offset + done
                )
                if piped == 0:
                    break
                while piped > 0:
                    moved = os.splice(reader, target, piped)
                    if moved == 0:
                        return done
                    piped, done = piped - moved, done + moved
        except OSError:
            if done == 0:
                raise  # else this is met again; and what is in the pipe is read again
        return done
    finally:
        close_quietly(reader)
        close_quietly(writer)


def _read_and_write(source: int, target: int, offset: int, size: int) -> int:
    try:
        data = read_at(source, offset, size)
    except OSError as error:
        raise SourceError(error.errno, error.strerror) from None
    if not data:
        raise SourceError(errno.EIO, "it became shorter while it was copied")
    write_all_bytes(target, data)
    return len(data)


def write_all_bytes(descriptor: int, data: bytes | bytearray) -> None:
    """Write all of `data`, in as many steps as the system needs."""
    with memoryview(data) as view:
        done = 0
        while done < len(view):
            written = os.write(descriptor, view[done:])
            if written == 0:
                raise OSError(errno.EIO, "nothing was written")
            done += written


def has_same_bytes(first: OpenFile, second: OpenFile) -> bool:
    """Return whether two files have the same bytes.

    Raises:
        ModelError: One of them cannot be read.
    """
    if first.size != second.size:
        return False
    offset = 0
    for chunk in read_chunks(first, 0, first.size):
        if chunk != second.read(offset, len(chunk)):
            return False
        offset += len(chunk)
    return offset == first.size
