"""Put bytes at a path whole, or not at all.

A new file is written beside its place without a name (``O_TMPFILE``) where the
system can, so that even a killed process leaves nothing; elsewhere under a
temporary name that no pattern for models matches. It gets its place by one
rename, after its bytes are on the disk.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from onnxkvrename import files
from onnxkvrename.errors import WriteError
from onnxkvrename.files import OpenFile

TEMPORARY = ".onnxkvrename-"
"""How temporary files begin. They never end in ``.onnx``: some exporters take any file in a
window's directory that does."""
_CHUNK = 1 << 26
_PAGE = 1 << 12
_PIPE = 1 << 20
_REFUSALS = (
    *(errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF),
    *(errno.EPERM, errno.ETXTBSY),
)
"""What a way of copying says if it cannot be taken."""
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)

Progress = Callable[[int], None]
"""Called with the number of bytes just copied."""


class Draft:
    """A file in the making, beside the place it is for.

    A context: what has not been committed when it ends is gone. Raises
    :class:`WriteError` with the reason and what to do about it.
    """

    def __init__(self, target: Path) -> None:
        self.target = target
        self.directory = target.parent
        self.temporary = self.directory / f"{TEMPORARY}{os.urandom(12).hex()}"
        with _writing(target):
            self.descriptor, self.named = self._open()

    def _open(self) -> tuple[int, bool]:
        unnamed = getattr(os, "O_TMPFILE", 0)
        if unnamed and os.path.isdir("/proc/self/fd"):
            # What cannot do this says so with one of several errors; named files it can do.
            with suppress(OSError):
                return os.open(self.directory, unnamed | os.O_RDWR | os.O_CLOEXEC, 0o600), False
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
        try:
            return os.open(self.temporary, flags | getattr(os, "O_CLOEXEC", 0), 0o600), True
        except BaseException:
            self._discard()
            raise

    def __enter__(self) -> Draft:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if os.name == "nt":  # pragma: no cover - an open file cannot be removed there
                files.close(self.descriptor)
            self._discard()
        finally:
            files.close(self.descriptor)

    def _discard(self) -> None:
        """Remove the temporary name. It is ours alone, so it may well be tried in vain."""
        with suppress(OSError):
            os.unlink(self.temporary)

    @property
    def made(self) -> Made:
        """What committing it makes."""
        status = self.status
        return Made(self.target, (status.st_dev, status.st_ino))

    @property
    def status(self) -> os.stat_result:
        """The draft as it is: its size, its inode."""
        with _writing(self.target):
            return os.fstat(self.descriptor)

    def write(self, data: bytes | bytearray) -> None:
        """Append bytes."""
        with _writing(self.target):
            _write(self.descriptor, data)

    def read(self, offset: int, size: int) -> bytes:
        """Read back what was written."""
        with _writing(self.target):
            return files.read_at(self.descriptor, offset, size)

    def copy(
        self, source: OpenFile, offset: int, size: int, progress: Progress | None = None
    ) -> None:
        """Append ``size`` bytes of ``source``, in the kernel where it can."""
        with _writing(self.target):
            for copied in _copied(source.descriptor, self.descriptor, offset, size):
                if progress is not None:
                    progress(copied)

    def keep(self, source: OpenFile, *, owner: bool, force: bool) -> None:
        """Take over mode and extended attributes of a file, and with ``owner`` its owner.

        Raises :class:`WriteError` where the owner cannot be kept, unless forced.
        """
        if not hasattr(os, "fchown"):
            return
        with _writing(self.target):
            if owner:
                self._keep_owner(source.status, force=force)
            os.fchmod(self.descriptor, stat.S_IMODE(source.status.st_mode))
        with suppress(OSError):  # not every file system has them
            for name in os.listxattr(source.descriptor) if hasattr(os, "listxattr") else ():
                with suppress(OSError):  # and not every user may set every one
                    os.setxattr(self.descriptor, name, os.getxattr(source.descriptor, name))

    def _keep_owner(self, status: os.stat_result, *, force: bool) -> None:
        mine = os.fstat(self.descriptor)
        if (mine.st_uid, mine.st_gid) == (status.st_uid, status.st_gid):
            return
        try:
            os.fchown(self.descriptor, status.st_uid, status.st_gid)
        except PermissionError:
            if not force:
                raise WriteError(
                    "its owner could not be kept",
                    path=str(self.target),
                    hint="write elsewhere with -o, or use --force",
                ) from None

    def commit(self, *, replace: bool, source: OpenFile | None = None) -> None:
        """Put the file in its place, once its bytes are on the disk.

        Without ``replace`` a file that has appeared there meanwhile stays, and
        :class:`WriteError` is raised; so it is if ``source`` is no longer what was
        read.
        """
        with _writing(self.target):
            os.fsync(self.descriptor)
            if source is not None and not source.unchanged():
                raise WriteError("was changed by someone else just now", path=str(source.path))
            if not self.named and not replace:
                self._link(self.target)
            else:
                if not self.named:
                    self._link(self.temporary)
                self._move(replace)
        _sync_directory(self.directory)

    def _link(self, name: Path) -> None:
        descriptors = os.open("/proc/self/fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            # Not a path under /proc: with a directory descriptor Python calls linkat(2) with
            # AT_SYMLINK_FOLLOW, without which the link itself would be meant.
            os.link(str(self.descriptor), name, src_dir_fd=descriptors, follow_symlinks=True)
        finally:
            files.close(descriptors)

    def _move(self, replace: bool) -> None:
        if os.name == "nt":  # pragma: no cover - an open file cannot be moved there
            files.close(self.descriptor)
        if not replace:
            try:
                os.link(self.temporary, self.target)
                return
            except OSError as error:
                if error.errno not in _NO_LINKS or os.path.lexists(self.target):
                    raise
                # A file system without links: a rename is the next best thing.
        os.replace(self.temporary, self.target)


class Made(NamedTuple):
    """A file of ours, known by its inode, or a directory that was not there before."""

    path: Path
    inode: tuple[int, int] | None = None


@contextmanager
def all_or_none(result: Path) -> Iterator[list[Made]]:
    """Collects what is about to be made for ``result``, and that itself; if it fails, all goes.

    What counts is whether the result took its place: an interrupt just after
    that does not take away what it needs.
    """
    made: list[Made] = []
    try:
        yield made
    except BaseException:
        if Made(result, _inode(result)) not in made:
            for path, inode in reversed(made):
                with suppress(OSError):
                    if inode is None:
                        path.rmdir()
                    elif _inode(path) == inode:
                        path.unlink()
        raise


def _inode(path: Path) -> tuple[int, int] | None:
    with suppress(OSError):
        status = os.lstat(path)
        return status.st_dev, status.st_ino
    return None


def make_directory(path: Path, made: list[Made]) -> None:
    """Make a directory and those above it, as far as they are not there."""
    if os.path.lexists(path):
        return
    make_directory(path.parent, made)
    made.append(Made(path))
    with _writing(path), suppress(FileExistsError):
        path.mkdir()


def require_space(directory: Path, size: int, target: Path) -> None:
    """Raise :class:`WriteError` if a disk has fewer than ``size`` bytes left."""
    if not hasattr(os, "statvfs"):
        return
    with suppress(OSError):
        status = os.statvfs(directory)
        free = status.f_bavail * status.f_frsize
        if free < size:
            raise WriteError(
                f"needs {size:,} bytes, but the disk has {free:,} left",
                path=str(target),
                hint="free some space, or write elsewhere with -o",
            )


@contextmanager
def _writing(target: Path) -> Iterator[None]:
    """Say what went wrong in words, and what to do about it."""
    try:
        yield
    except OSError as error:
        raise _unwritable(target, error) from None


def _unwritable(target: Path, error: OSError) -> WriteError:
    hints = {
        errno.ENOSPC: "free some space, or write elsewhere with -o",
        errno.EDQUOT: "free some space, or write elsewhere with -o",
        errno.EFBIG: "raise the file size limit (ulimit -f), or write elsewhere",
        errno.EROFS: "write elsewhere with -o or -d",
        errno.EACCES: "its directory must be writable; or write elsewhere with -o or -d",
        errno.EPERM: "its directory must be writable; or write elsewhere with -o or -d",
        errno.EEXIST: "it was not there before; --force replaces it",
        errno.ENOENT: "make its directory first",
        errno.ENOTDIR: "make its directory first",
    }
    reason = error.strerror or str(error)
    hint = hints.get(error.errno or 0)
    return WriteError(f"cannot be written: {reason}", path=str(target), hint=hint)


def _copied(source: int, target: int, offset: int, size: int) -> Iterator[int]:
    """Copy by the first way the system takes; yields the bytes of each step."""
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
    _write(target, data)
    return len(data)


def _write(descriptor: int, data: bytes | bytearray) -> None:
    with memoryview(data) as view:
        done = 0
        while done < len(view):
            done += os.write(descriptor, view[done:])


def _sync_directory(directory: Path) -> None:
    """Make a rename last. The file is in its place by then, so no failure here undoes it."""
    if os.name == "nt":  # pragma: no cover - directories cannot be opened there
        return
    with suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
        try:
            os.fsync(descriptor)
        finally:
            files.close(descriptor)
