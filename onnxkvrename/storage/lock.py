"""Locks: one run at a time on one target.

The locks of a run are hard links of one file, one beside each target, so one
descriptor holds any number of them. The system releases it when the process ends, however
it ends. So a lock file that nobody holds belongs to nobody.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from onnxkvrename.errors import WriteError
from onnxkvrename.storage.read import close_quietly, read_at
from onnxkvrename.storage.temp_file import (
    LOCK_SUFFIX,
    build_temp_prefix,
    resolve_moved_path,
    translate_write_errors,
)

_LOCKED_ERRNOS = (errno.EWOULDBLOCK, errno.EACCES)
_NO_LOCK_ERRNOS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
"""Errors of a file system without locks. There, only the check of each source is left, which
is made everywhere: is it still the file that was read?"""


def find_lock_path(target: Path) -> Path:
    """Return the path of the lock file of `target`, whether it exists or not."""
    return target.parent / f"{build_temp_prefix(target)}{LOCK_SUFFIX}"


@contextmanager
def hold_locks(targets: Iterable[Path], moves: Mapping[Path, Path] | None = None) -> Iterator[None]:
    """Lock all targets until the context ends.

    Args:
        targets: Files that are about to be written. Their directories exist.
        moves: Directories that are renamed before the context ends, with their new paths.

    Raises:
        WriteError: Another run holds one of the targets; the message names it. Nothing
            is locked then, and no lock file is left.
    """
    locks = _Locks(moves or {})
    try:
        for target in targets:
            locks.acquire(target)
        yield
    finally:
        locks.release()


class _Locks:
    """The locks of one run."""

    def __init__(self, moves: Mapping[Path, Path]) -> None:
        self.moves = moves
        self.paths: dict[Path, None] = {}
        self.descriptors: list[int] = []

    def acquire(self, target: Path) -> None:
        """Lock one more target, or raise."""
        path = find_lock_path(target)
        with translate_write_errors(target):
            try:
                while not (self._acquire_by_link(path) or self._acquire_by_opening(path, target)):
                    pass  # its holder removed it while it was opened
            except BaseException:
                self._remove_unheld(path)
                raise

    def _acquire_by_link(self, path: Path) -> bool:
        if not self.paths:
            return False
        with suppress(OSError):  # it exists, or links are not possible
            os.link(next(reversed(self.paths)), path)
        return self._claim_if_held(path)

    def _claim_if_held(self, path: Path) -> bool:
        """Return whether this run holds `path`, and if so keep it for :meth:`release`.

        It does by the link just made, by another target with the same prefix, or by a link
        to the same file that a dead run has left.
        """
        if self._is_own_lock(path):
            self.paths[path] = None
            return True
        return False

    def _is_own_lock(self, path: Path) -> bool:
        with suppress(OSError):
            status = os.lstat(path)
            return any(os.path.samestat(status, os.fstat(fd)) for fd in self.descriptors)
        return False

    def _acquire_by_opening(self, path: Path, target: Path) -> bool:
        if os.path.islink(path):  # without O_NOFOLLOW, as on Windows, it would be followed
            raise WriteError(
                f"cannot be locked: {path} is a symbolic link",
                path=str(target),
                hint=f"remove {path}, then run this again",
            )
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)
        descriptor = os.open(path, flags, 0o644)
        acquired = False
        try:
            if not _try_lock(descriptor):
                raise WriteError(
                    f"is being worked on by {_read_holder(descriptor)}",
                    path=str(target),
                    hint="wait for it to end, then run this again",
                )
            with suppress(FileNotFoundError):
                acquired = os.path.samestat(os.lstat(path), os.fstat(descriptor))
            if acquired:
                self.descriptors.append(descriptor)
                self.paths[path] = None
                os.ftruncate(descriptor, 0)
                os.write(descriptor, _describe_process())
        finally:
            if not acquired:
                close_quietly(descriptor)
        return acquired

    def _remove_unheld(self, path: Path) -> None:
        """Remove a lock file that could not be locked in the end, unless another run holds it."""
        if self._claim_if_held(path):
            return  # it is removed with the others
        if os.path.islink(path):
            return  # it was not made here, and opening it may follow it
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0))
            try:
                free = _try_lock(descriptor)
                if free and os.path.samestat(os.lstat(path), os.fstat(descriptor)):
                    os.unlink(path)
            finally:
                close_quietly(descriptor)

    def release(self) -> None:
        """Release all locks.

        Names go first: a run that has opened one by then finds it gone, and tries again.
        """
        if os.name == "nt":  # pragma: no cover - an open file cannot be removed there
            self._close_descriptors()
        try:
            while self.paths:
                path = self.paths.popitem()[0]
                moved = resolve_moved_path(path, self.moves)
                with suppress(OSError):
                    os.unlink(moved if moved != path and self._is_own_lock(moved) else path)
        finally:
            if self.paths:
                self.release()  # an interrupt leaves no lock behind
            self._close_descriptors()

    def _close_descriptors(self) -> None:
        while self.descriptors:
            close_quietly(self.descriptors.pop())


def _try_lock(descriptor: int) -> bool:
    """Lock a file without waiting, and return whether that succeeded."""
    try:
        import fcntl
    except ImportError:  # pragma: no cover - Windows
        return _try_lock_on_windows(descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (*_LOCKED_ERRNOS, *_NO_LOCK_ERRNOS):
            raise
        return error.errno in _NO_LOCK_ERRNOS
    return True


def _try_lock_on_windows(descriptor: int) -> bool:  # pragma: no cover
    import msvcrt

    os.lseek(descriptor, 1 << 20, os.SEEK_SET)  # past the text, which others must be able to read
    try:
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
    except OSError:
        return False
    os.lseek(descriptor, 0, os.SEEK_SET)
    return True


def _describe_process() -> bytes:
    """Return the text of a lock file, which the message for another run repeats."""
    since = time.strftime("%Y-%m-%d %H:%M:%S %z")
    host = os.uname().nodename if hasattr(os, "uname") else os.environ.get("COMPUTERNAME", "here")
    return f"process {os.getpid()} on {host} since {since}".encode("utf-8", "replace")


def _read_holder(descriptor: int) -> str:
    with suppress(OSError):
        description = read_at(descriptor, 0, 400).decode("utf-8", "replace")
        if description:
            return description
    return "another process"
