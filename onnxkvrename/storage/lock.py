"""Locks: one run at a time on one target.

The locks of a run are hard links of one file, one beside each target, so one
descriptor holds any number of them. The system releases it when the process ends, however
it ends. So a lock file that no process holds can be removed.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from onnxkvrename.errors import WriteError
from onnxkvrename.findings import quote_word
from onnxkvrename.storage.read import close_quietly, link_descriptor, read_at
from onnxkvrename.storage.temp_file import (
    LOCK_SUFFIX,
    build_temp_prefix,
    resolve_moved_path,
    translate_write_errors,
)

_MAX_TEXT_BYTES = 400
_MAX_TRIES = 100
"""Far more than other runs that come and go just then can cause."""
_TEXT_PATTERN = re.compile(rb"process [0-9]+ on [^\r\n]+")
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
        try:
            locks.release()
        finally:
            locks.release()  # an interrupt may come before the first call does anything


class _Locks:
    """The locks of one run."""

    def __init__(self, moves: Mapping[Path, Path]) -> None:
        self.moves = moves
        self.paths: dict[Path, None] = {}
        self.being_removed: Path | None = None
        self.descriptors: list[int] = []
        self.answer = "it disappeared each time"

    def acquire(self, target: Path) -> None:
        """Lock one more target, or raise."""
        path = find_lock_path(target)
        with translate_write_errors(target):
            try:
                for _ in range(_MAX_TRIES):
                    if (
                        self._acquire_by_link(path)
                        or self._acquire_by_creating(path)
                        or self._clear_unheld(path, target)
                    ):
                        return
                    # Its holder removed it while it was opened, or no process held it.
                raise WriteError(
                    f"cannot be locked: {path} was tried {_MAX_TRIES} times; {self.answer}",
                    path=str(target),
                    hint="the file system contradicts itself: check it, or write elsewhere",
                    in_place_hint="the file system contradicts itself: check it",
                )
            except BaseException:
                self._remove_half_taken(path)
                raise

    def _acquire_by_link(self, path: Path) -> bool:
        if not self.paths:
            return False
        # By the descriptor: the name of another lock may belong to any file by now.
        # If that is not possible, or the lock exists, a file of its own will do.
        with suppress(OSError):
            link_open_file(self.descriptors[-1], next(reversed(self.paths)), path)
        return self._claim_if_held(path)

    def _claim_if_held(self, path: Path) -> bool:
        """Return whether this run holds `path`, and if so keep it for :meth:`release`.

        It does by the link just made, or by another target with the same prefix.
        """
        if self._is_own_lock(path):
            self.paths[path] = None
            return True
        return False

    def _is_own_lock(self, path: Path) -> bool:
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            return False
        return any(os.path.samestat(status, os.fstat(fd)) for fd in self.descriptors)

    def _acquire_by_creating(self, path: Path) -> bool:
        """Make the lock file and hold it; return false if there is one, or another run took it."""
        if _read_status(path) is not None:
            return False
        self.answer = "the file system said first that it does not exist, then that it exists"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0)
        try:
            descriptor = os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o644)
        except FileExistsError:
            return False
        acquired = False
        try:
            acquired = _try_lock(descriptor) and _is_open_at(path, descriptor)
            if acquired:
                self.descriptors.append(descriptor)
                self.paths[path] = None
                os.write(descriptor, _describe_process())
        finally:
            if not acquired:
                close_quietly(descriptor)
        return acquired

    def _clear_unheld(self, path: Path, target: Path) -> bool:
        """Remove the lock of a dead run, so that a new one can be made; always return false.

        Raises:
            WriteError: Another run holds it, or it is not clearly a lock of this user.
        """
        if (status := _read_status(path)) is None:
            return False
        fault = _find_kind_fault(status)
        if fault is None:
            with _open_lock(path, target) as descriptor:
                if descriptor is None:
                    self.answer = (
                        "the file system said first that it exists, then that it does not exist"
                    )
                    return False
                fault = _find_content_fault(descriptor)
                if fault is None and not _try_lock(descriptor):
                    raise WriteError(
                        f"is being processed by {_read_holder(descriptor)}",
                        path=str(target),
                        hint="wait for it to end, then run this again",
                    )
                fault = fault or _find_owner_fault(os.fstat(descriptor))
                if fault is None:
                    _remove_open_file(path, descriptor)
        if fault is not None:
            raise WriteError(
                f"cannot be locked: {path} {fault}",
                path=str(target),
                hint=f"move {quote_word(str(path))} away, then run this again",
            )
        return False

    def _remove_half_taken(self, path: Path) -> None:
        """Remove a lock file that was made here but is not held, and no other one."""
        # The error that led here is the one to report.
        with suppress(OSError, WriteError):
            if not self._claim_if_held(path):  # else it is removed with the others
                self._clear_unheld(path, path)

    def release(self) -> None:
        """Release all locks.

        Names go first: a run that has opened one by then finds it gone, and tries again.
        """
        if os.name == "nt":  # pragma: no cover - an open file cannot be removed there
            self._close_descriptors()
        try:
            while self.paths:
                path = next(reversed(self.paths))
                moved = resolve_moved_path(path, self.moves)
                is_retry, self.being_removed = path == self.being_removed, path
                # A query that fails is made once more. A lock that stays blocks nothing.
                for name in (path,) if moved == path else (moved, moved, path):
                    with suppress(OSError):
                        # Once it is removed, another run may have its own lock there.
                        if (name == path and not is_retry) or self._is_own_lock(name):
                            os.unlink(name)
                del self.paths[path]
        finally:
            if self.paths:
                self.release()  # an interrupt leaves no lock
            self._close_descriptors()

    def _close_descriptors(self) -> None:
        while self.descriptors:
            close_quietly(self.descriptors.pop())


def link_open_file(descriptor: int, name: Path, path: Path) -> None:
    """Give an open file one more name, and no other file that may have its name by now.

    Args:
        descriptor: The file.
        name: Its name, for systems that cannot link a descriptor.
        path: The new name.

    Raises:
        OSError: That is not possible. Nothing is left.
    """
    if os.path.isdir("/proc/self/fd"):
        link_descriptor(descriptor, path)
        return
    os.link(name, path)
    if not _is_open_at(path, descriptor):
        os.unlink(path)
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))


def _read_status(path: Path) -> os.stat_result | None:
    """Return the status of what has a name, without following it; ``None`` for nothing."""
    try:
        return os.lstat(path)
    except FileNotFoundError:
        return None


def _is_open_at(path: Path, descriptor: int) -> bool:
    status = _read_status(path)
    return status is not None and os.path.samestat(status, os.fstat(descriptor))


@contextmanager
def _open_lock(path: Path, target: Path) -> Iterator[int | None]:
    """Open a lock file of any run, without waiting; ``None`` if it is gone."""
    flags = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)
    flags |= getattr(os, "O_NONBLOCK", 0)
    try:
        try:
            # Some file systems, such as NFS, lock only what is open for writing.
            descriptor = os.open(path, flags | os.O_RDWR)
        except PermissionError:
            descriptor = os.open(path, flags | os.O_RDONLY)
    except FileNotFoundError:
        yield None
        return
    except OSError as error:
        raise WriteError(
            f"cannot be locked: {path} cannot be opened: {error.strerror}", path=str(target)
        ) from None
    try:
        yield descriptor
    finally:
        close_quietly(descriptor)


def _find_kind_fault(status: os.stat_result) -> str | None:
    """Return why a file cannot be a lock, whatever is in it."""
    if stat.S_ISLNK(status.st_mode):  # without O_NOFOLLOW, as on Windows, it would be followed
        return "is a symbolic link"
    if not stat.S_ISREG(status.st_mode):
        return "is not a regular file"
    return None


def _find_content_fault(descriptor: int) -> str | None:
    """Return why an open file cannot be a lock, by what was opened."""
    status = os.fstat(descriptor)
    if fault := _find_kind_fault(status):
        return fault
    if status.st_size <= _MAX_TEXT_BYTES:
        text = read_at(descriptor, 0, _MAX_TEXT_BYTES)
        if not text or _TEXT_PATTERN.fullmatch(text):
            return None
    return "is not a lock file of onnxkvrename"


def _find_owner_fault(status: os.stat_result) -> str | None:
    if hasattr(os, "geteuid") and status.st_uid != os.geteuid():
        return f"was left by a run of another user (user ID {status.st_uid})"
    return None


def _remove_open_file(path: Path, descriptor: int) -> None:
    """Remove a name if it still is that of an open file."""
    if not _is_open_at(path, descriptor):
        return
    if os.name == "nt":  # pragma: no cover - an open file cannot be removed there
        os.close(descriptor)
    with suppress(FileNotFoundError):
        os.unlink(path)


def _try_lock(descriptor: int) -> bool:
    """Lock a file without waiting, and return whether that succeeded."""
    try:
        import fcntl
    except ImportError:  # pragma: no cover - Windows
        return _try_lock_on_windows(descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, *_NO_LOCK_ERRNOS):
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
        description = read_at(descriptor, 0, _MAX_TEXT_BYTES).decode("utf-8", "replace")
        if description:
            return description
    return "another process"
