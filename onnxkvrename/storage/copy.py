"""Bytes from one open file to another, by the first way the system takes."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import suppress

from onnxkvrename.storage import read as files

_CHUNK = 1 << 26
_PAGE = 1 << 12
_PIPE = 1 << 20
_REFUSALS = (
    *(errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF),
    *(errno.EPERM, errno.ETXTBSY),
)
"""What a way of copying says if it cannot be taken."""


def copied(source: int, target: int, offset: int, size: int) -> Iterator[int]:
    """Append ``size`` bytes of ``source``, from ``offset`` on, to ``target``; both are descriptors.

    Yields the number of bytes of each step. Raises OSError, a source that ends early included.
    """
    shifted = (os.lseek(target, 0, os.SEEK_CUR) - offset) % _PAGE != 0
    ways = [_through_pipe] if shifted else []
    ways += [_in_kernel, _by_sendfile, _by_hand]
    while size > 0:
        try:
            copied = ways[0](source, target, offset, min(size, _CHUNK))
        except OSError as error:
            if len(ways) == 1 or error.errno not in _REFUSALS:
                raise
            copied = 0
        if copied == 0:
            # Some file systems copy nothing and call it a success; the next way tells.
            ways.pop(0)
            if not ways:
                raise OSError(errno.EIO, "the source became shorter while it was copied")
            continue
        yield copied
        offset, size = offset + copied, size - copied


def _through_pipe(source: int, target: int, offset: int, size: int) -> int:
    """Splice through a large pipe: where no page fits a page, a fifth faster than what follows.

    Pages that fit are better left to ``copy_file_range``, which may share them.
    """
    if not hasattr(os, "splice"):
        return 0
    import fcntl

    reader, writer = os.pipe()
    try:
        with suppress(OSError):  # the system may have a lower limit
            fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, _PIPE)
        done = 0
        while done < size:
            inside = os.splice(source, writer, min(size - done, _PIPE), offset_src=offset + done)
            if inside == 0:
                break
            while inside > 0:
                try:
                    moved = os.splice(reader, target, inside)
                except OSError:
                    if done:
                        return done  # what is in the pipe is read again
                    raise
                inside, done = inside - moved, done + moved
        return done
    finally:
        files.close(reader)
        files.close(writer)


def _in_kernel(source: int, target: int, offset: int, size: int) -> int:
    if not hasattr(os, "copy_file_range"):
        return 0
    return os.copy_file_range(source, target, size, offset)


def _by_sendfile(source: int, target: int, offset: int, size: int) -> int:
    if not hasattr(os, "sendfile"):
        return 0
    return os.sendfile(target, source, offset, size)


def _by_hand(source: int, target: int, offset: int, size: int) -> int:
    data = files.read_at(source, offset, min(size, 1 << 20))
    write(target, data)
    return len(data)


def write(descriptor: int, data: bytes | bytearray) -> None:
    """Write all of it, in as many steps as the system takes."""
    with memoryview(data) as view:
        done = 0
        while done < len(view):
            done += os.write(descriptor, view[done:])
