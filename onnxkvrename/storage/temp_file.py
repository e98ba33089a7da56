"""Files in the making, beside their places: whole and on the disk before they get there.

A draft is written without a name (``O_TMPFILE``) where the system can. When it
is whole it gets a temporary name that tells what it is for, and that no pattern
for models matches; its place it gets by one rename.
"""

from __future__ import annotations

import binascii
import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from onnxkvrename.errors import WriteError
from onnxkvrename.storage.copy import copy_range, write_all
from onnxkvrename.storage.read import OpenFile, close_quietly, read_at

TEMP_PREFIX = ".onnxkvrename-"
"""How everything begins that is not meant to stay. It never ends in ``.onnx``: some exporters
take any file in a window's directory that does."""
LOCK_SUFFIX = "lock"
"""How the name of a lock ends."""
_TEMP_PREFIX_LENGTH = len(TEMP_PREFIX) + 9
_NO_LINK_ERRNOS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)

ProgressCallback = Callable[[int], None]
"""Told how much more is done: bytes copied, or models."""


def build_temp_prefix(target: Path) -> str:
    """How the names begin of what is made beside ``target`` on its way there.

    Two targets of one directory may share a stem, though hardly ever do: then
    they share a lock as well.
    """
    return f"{TEMP_PREFIX}{binascii.crc32(os.fsencode(target.name)):08x}-"


def build_temp_path(target: Path) -> Path:
    """A name for something on its way to ``target``, which nobody has."""
    return target.parent / f"{build_temp_prefix(target)}{os.urandom(12).hex()}"


def find_stale_temp_files(targets: Iterable[Path]) -> Iterator[Path]:
    """What dead runs have left beside these targets: drafts, backups, stages and locks.

    If a run is alive its own things are among them, so hold the lock before
    taking any away.
    """
    stems: dict[Path, set[str]] = {}
    for target in targets:
        stems.setdefault(target.parent, set()).add(build_temp_prefix(target))
    for directory, wanted in stems.items():
        with suppress(OSError), os.scandir(directory) as entries:
            for entry in entries:
                if (
                    entry.name.startswith(TEMP_PREFIX)
                    and entry.name[:_TEMP_PREFIX_LENGTH] in wanted
                ):
                    yield Path(entry.path)


def find_targets_with_temp_files(targets: Sequence[Path]) -> list[Path]:
    """The targets beside which a dead run has left something, or a living one works."""
    left = {
        (path.parent, path.name[:_TEMP_PREFIX_LENGTH]) for path in find_stale_temp_files(targets)
    }
    return [target for target in targets if (target.parent, build_temp_prefix(target)) in left]


def resolve_moved_path(path: Path, moves: Mapping[Path, Path]) -> Path:
    """What a path is called once directories have the names that ``moves`` gives them."""
    for directory, target in moves.items():
        if directory in path.parents:
            return target / path.relative_to(directory)
    return path


class ReadyFile(NamedTuple):
    """A whole file under a temporary name, its bytes on the disk: ready for its place.

    Any process that sees the same files may place it. ``called`` is the name of
    the target in messages.
    """

    temp_path: Path
    target: Path
    overwrites_target: bool
    display_path: Path

    def move_into_place(self) -> None:
        """Give the file its place, by one rename.

        Unless it is to ``replace``, a file that has appeared there meanwhile
        stays, and :class:`WriteError` is raised.
        """
        with translate_write_errors(self.display_path):
            if not self.overwrites_target:
                try:
                    os.link(self.temp_path, self.target)
                except OSError as error:
                    if error.errno not in _NO_LINK_ERRNOS or os.path.lexists(self.target):
                        raise
                    # A file system without links: a rename is the next best thing.
                else:
                    self.discard()
                    return
            os.replace(self.temp_path, self.target)

    def discard(self) -> None:
        """Remove the temporary name."""
        with suppress(OSError):
            os.unlink(self.temp_path)


class TempFile:
    """A file in the making, beside the place it is for.

    A context: what has not been finished when it ends is gone. Raises
    :class:`WriteError` with the reason and what to do about it, ``called`` by
    the name that the target has for the user.
    """

    def __init__(self, target: Path, called: Path | None = None) -> None:
        self.target = target
        self.display_path = called or target
        self.temp_path = build_temp_path(target)
        self.is_finished = False
        with translate_write_errors(self.display_path):
            self.descriptor, self.named = self._open()

    def _open(self) -> tuple[int, bool]:
        unnamed = getattr(os, "O_TMPFILE", 0)
        if unnamed and os.path.isdir("/proc/self/fd"):
            flags = unnamed | os.O_RDWR | os.O_CLOEXEC
            # What cannot do this says so with one of several errors; named files it can do.
            with suppress(OSError):
                return os.open(self.target.parent, flags, 0o600), False
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
        try:
            return os.open(self.temp_path, flags | getattr(os, "O_CLOEXEC", 0), 0o600), True
        except BaseException:
            self._discard()
            raise

    def __enter__(self) -> TempFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        try:
            if os.name == "nt":  # pragma: no cover - an open file cannot be removed there
                close_quietly(self.descriptor)
            if kind is not None or not self.is_finished:
                self._discard()
        finally:
            close_quietly(self.descriptor)

    def _discard(self) -> None:
        """Remove the temporary name. It is ours alone, so it may well be tried in vain."""
        with suppress(OSError):
            os.unlink(self.temp_path)

    @property
    def size(self) -> int:
        """Bytes written so far."""
        with translate_write_errors(self.display_path):
            return os.fstat(self.descriptor).st_size

    def write(self, data: bytes | bytearray) -> None:
        """Append bytes."""
        with translate_write_errors(self.display_path):
            write_all(self.descriptor, data)

    def read(self, offset: int, size: int) -> bytes:
        """Read back what was written."""
        with translate_write_errors(self.display_path):
            return read_at(self.descriptor, offset, size)

    def copy_from(
        self, source: OpenFile, offset: int, size: int, heard: ProgressCallback | None = None
    ) -> None:
        """Append ``size`` bytes of ``source``, in the kernel where it can."""
        with translate_write_errors(self.display_path):
            for copied in copy_range(source.descriptor, self.descriptor, offset, size):
                if heard is not None:
                    heard(copied)

    def copy_attributes(self, source: OpenFile, *, owner: bool, force: bool) -> None:
        """Take over mode and extended attributes of a file, and with ``owner`` its owner.

        Raises :class:`WriteError` where the owner cannot be kept, unless forced.
        """
        if not hasattr(os, "fchown"):
            return
        with translate_write_errors(self.display_path):
            if owner:
                self._copy_owner(source.status, force=force)
            os.fchmod(self.descriptor, stat.S_IMODE(source.status.st_mode))
        with suppress(OSError):  # not every file system has them
            for name in os.listxattr(source.descriptor) if hasattr(os, "listxattr") else ():
                with suppress(OSError):  # and not every user may set every one
                    os.setxattr(self.descriptor, name, os.getxattr(source.descriptor, name))

    def _copy_owner(self, status: os.stat_result, *, force: bool) -> None:
        mine = os.fstat(self.descriptor)
        if (mine.st_uid, mine.st_gid) == (status.st_uid, status.st_gid):
            return
        try:
            os.fchown(self.descriptor, status.st_uid, status.st_gid)
        except PermissionError:
            if not force:
                raise WriteError(
                    "its owner could not be kept",
                    path=str(self.display_path),
                    hint="write elsewhere with -o or -d, or use --force",
                ) from None

    def set_default_mode(self) -> None:
        """Take the mode that any new file gets."""
        if hasattr(os, "fchmod"):
            mask = os.umask(0o077)
            os.umask(mask)
            with translate_write_errors(self.display_path):
                os.fchmod(self.descriptor, 0o666 & ~mask)

    def finish(self, *, replace: bool) -> ReadyFile:
        """Bring the bytes to the disk, and keep the file under its temporary name."""
        with translate_write_errors(self.display_path):
            os.fsync(self.descriptor)
            if not self.named:
                self._link_temp_path()
        self.is_finished = True
        return ReadyFile(self.temp_path, self.target, replace, self.display_path)

    def _link_temp_path(self) -> None:
        descriptors = os.open("/proc/self/fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            # Not a path under /proc: with a directory descriptor Python calls linkat(2) with
            # AT_SYMLINK_FOLLOW, without which the link itself would be meant.
            source = str(self.descriptor)
            os.link(source, self.temp_path, src_dir_fd=descriptors, follow_symlinks=True)
        finally:
            close_quietly(descriptors)


def check_free_space(directory: Path, size: int, target: Path) -> None:
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
def translate_write_errors(target: Path) -> Iterator[None]:
    """Say what went wrong in words, and what to do about it: OSError to :class:`WriteError`."""
    try:
        yield
    except OSError as error:
        raise _build_write_error(target, error) from None


def _build_write_error(target: Path, error: OSError) -> WriteError:
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
