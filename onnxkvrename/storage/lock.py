"""One run at a time on one target.

The locks of a run are hard links of one file, beside each target: one
descriptor holds any number of them. The system lets go of it when the process
ends, however it ends, so a lock that lies there unheld is nobody's.
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
"""What a file system says that knows no locks. Each file's own identity is checked there, too."""


def find_lock_path(target: Path) -> Path:
    """Return the path of the lock file of ``target``, whether it exists or not."""
    return target.parent / f"{build_temp_prefix(target)}{LOCK_SUFFIX}"


@contextmanager
def hold_locks(targets: Iterable[Path], moves: Mapping[Path, Path] | None = None) -> Iterator[None]:
    """Hold all targets, whose directories are there, until the context ends.

    By then these may be called as ``moves`` says. Raises :class:`WriteError`,
    saying who holds one of the targets; nothing is held then.
    """
    locks = _Locks(moves or {})
    try:
        for target in targets:
            locks.acquire(target)
        yield
    finally:
        locks.release()


class _Locks:
    def __init__(self, moves: Mapping[Path, Path]) -> None:
        self.moves = moves
        self.paths: dict[Path, None] = {}
        self.descriptors: list[int] = []

    def acquire(self, target: Path) -> None:
        path = find_lock_path(target)
        with translate_write_errors(target):
            try:
                while not (self._acquire_by_link(path) or self._acquire_by_opening(path, target)):
                    pass  # someone let go of it, and took its name away, while it was opened
            except BaseException:
                self._remove_unheld(path)
                raise

    def _acquire_by_link(self, path: Path) -> bool:
        if not self.paths:
            return False
        with suppress(OSError):  # there is one, or there can be no link: a look tells
            os.link(next(reversed(self.paths)), path)
        return self._claim_if_held(path)

    def _claim_if_held(self, path: Path) -> bool:
        """Whether it is held already: a stem that two targets share, or a dead run's other link."""
        if self._is_own_lock(path):
            self.paths[path] = None
            return True
        return False

    def _is_own_lock(self, path: Path) -> bool:
        with suppress(OSError):
            found = os.lstat(path)
            return any(os.path.samestat(found, os.fstat(mine)) for mine in self.descriptors)
        return False

    def _acquire_by_opening(self, path: Path, target: Path) -> bool:
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)
        descriptor = os.open(path, flags, 0o644)
        kept = False
        try:
            if not _try_lock(descriptor):
                raise WriteError(
                    f"is being worked on by {_read_holder(descriptor)}",
                    path=str(target),
                    hint="wait for it to end, then run this again",
                )
            with suppress(FileNotFoundError):
                kept = os.path.samestat(os.lstat(path), os.fstat(descriptor))
            if kept:
                self.descriptors.append(descriptor)
                self.paths[path] = None
                os.ftruncate(descriptor, 0)
                os.write(descriptor, _describe_process())
        finally:
            if not kept:
                close_quietly(descriptor)
        return kept

    def _remove_unheld(self, path: Path) -> None:
        """Leave nothing of a lock that was not had in the end, unless another holds it."""
        if self._claim_if_held(path):
            return  # it goes with the others
        with suppress(OSError):
            descriptor = os.open(path, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0))
            try:
                free = _try_lock(descriptor)
                if free and os.path.samestat(os.lstat(path), os.fstat(descriptor)):
                    os.unlink(path)
            finally:
                close_quietly(descriptor)

    def release(self) -> None:
        """Names first: who finds one afterwards finds it held, and looks again."""
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
    """Whether the lock could be had, without waiting."""
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

    os.lseek(descriptor, 1 << 20, os.SEEK_SET)  # past what is written, which others are to read
    try:
        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
    except OSError:
        return False
    os.lseek(descriptor, 0, os.SEEK_SET)
    return True


def _describe_process() -> bytes:
    since = time.strftime("%Y-%m-%d %H:%M:%S %z")
    host = os.uname().nodename if hasattr(os, "uname") else os.environ.get("COMPUTERNAME", "here")
    return f"process {os.getpid()} on {host} since {since}".encode("utf-8", "replace")


def _read_holder(descriptor: int) -> str:
    with suppress(OSError):
        said = read_at(descriptor, 0, 400).decode("utf-8", "replace")
        if said:
            return said
    return "another process"
