"""Locks: one run at a time writes in one directory.

The directory itself is locked, so nothing is left behind, however a run ends. Where a directory
cannot be locked, as on NFS, a file in it is.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

from onnxkvrename.errors import WriteError
from onnxkvrename.storage.read import close_quietly, resolve_path
from onnxkvrename.storage.temp_file import LOCK_NAME, translate_write_errors

_MAX_WAIT = 10.0
"""Seconds to wait for another run. Most need less than one to write their results."""
_WAIT_STEP = 0.05
_NO_LOCK_ERRNOS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
"""Errors of a file system without locks. There, only the check of each source is left, which
is made everywhere: is it still the file that was read?"""
_DIRECTORY_FLAGS = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_CLOEXEC", 0)
_FILE_FLAGS = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)


@contextmanager
def hold_locks(directories: Iterable[Path]) -> Iterator[None]:
    """Lock directories until the context ends; wait for other runs that write in them.

    All runs lock in the same order, so none waits for another that waits for it.

    Args:
        directories: Directories that exist.

    Raises:
        WriteError: A directory cannot be opened, or another run does not end. Nothing is locked
            then.
    """
    with ExitStack() as stack:
        for directory in sorted({resolve_path(path) for path in directories}):
            stack.enter_context(_hold_lock(Path(directory)))
        yield


@contextmanager
def _hold_lock(directory: Path) -> Iterator[None]:
    lock_file = directory / LOCK_NAME
    with translate_write_errors(directory):
        descriptor = _lock_directory(directory)
        if descriptor is None:
            descriptor = _lock_file(lock_file)
    try:
        yield
    finally:
        try:
            if descriptor is not None and fcntl is None:  # Windows removes no open file
                close_quietly(descriptor)
            _remove_lock_file(lock_file)  # where none is needed, that of a killed run
        finally:
            if descriptor is not None and fcntl is not None:
                close_quietly(descriptor)


def _lock_directory(directory: Path) -> int | None:
    """Return the descriptor that holds a directory, ``None`` if it cannot be locked."""
    if fcntl is None:  # Windows opens no directory
        return None
    try:
        descriptor = os.open(directory, _DIRECTORY_FLAGS)
    except PermissionError:  # what may be written to, but not listed
        return None
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        _raise_file_limit()
        descriptor = os.open(directory, _DIRECTORY_FLAGS)
    is_locked = False
    try:
        is_locked = _wait_for_lock(descriptor, directory)
    except OSError as error:
        if error.errno not in (errno.EBADF, errno.EISDIR):
            raise
    finally:
        if not is_locked:
            close_quietly(descriptor)
    return descriptor if is_locked else None


def _lock_file(path: Path) -> int | None:
    """Return the descriptor that holds a lock file, ``None`` where no file can be locked."""
    while True:
        descriptor = os.open(path, _FILE_FLAGS, 0o644)
        is_held = False
        try:
            if not _wait_for_lock(descriptor, path.parent):
                _remove_lock_file(path)
                return None
            # Another run may have removed it while this one waited.
            with suppress(FileNotFoundError):
                is_held = os.path.samestat(os.lstat(path), os.fstat(descriptor))
        except OSError:
            _remove_lock_file(path)
            raise
        finally:
            if not is_held:
                close_quietly(descriptor)
        if is_held:
            return descriptor


def _remove_lock_file(path: Path) -> None:
    """Remove the lock file; another file of its name has a content, or is not regular."""
    with suppress(OSError):
        status = os.lstat(path)
        if stat.S_ISREG(status.st_mode) and status.st_size == 0:
            os.unlink(path)


def _wait_for_lock(descriptor: int, directory: Path) -> bool:
    """Lock a file, and return whether the file system has locks at all."""
    end = time.monotonic() + _MAX_WAIT
    while True:
        try:
            _try_lock(descriptor)
        except OSError as error:
            if error.errno in _NO_LOCK_ERRNOS:
                return False
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):  # the latter on Windows
                raise
        else:
            return True
        if time.monotonic() > end:
            raise WriteError(
                "is being processed by another run",
                path=str(directory),
                hint="wait for it to end, then run this again",
            )
        time.sleep(_WAIT_STEP)


def _try_lock(descriptor: int) -> None:
    if fcntl is None:
        import msvcrt

        msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        return
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _raise_file_limit() -> None:
    """Allow as many open files as the system lets this user have: a set may have many windows."""
    import resource  # not on Windows

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
