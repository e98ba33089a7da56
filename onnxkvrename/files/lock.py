"""Locks: one run at a time writes in one directory.

The directory itself is locked, so nothing is left behind, however a run ends. Where there are no
such locks (NFS without a lock server, Windows), a run works without one: what is left then is
the check of each source and each target just before it is replaced, which is made everywhere.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

from onnxkvrename.errors import WriteError
from onnxkvrename.files.read import close_quietly, resolve_path
from onnxkvrename.files.write_errors import translate_write_errors

_MAX_WAIT = 10.0
"""Seconds to wait for another run. Most need less than one to write their results."""
_WAIT_STEP = 0.05
_NO_LOCK_ERRNOS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EBADF)
"""Errors of a file system without locks, or without any of directories."""
_DIRECTORY_FLAGS = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_CLOEXEC", 0)


class Locks:
    """The directories that a run has locked.

    Attributes:
        directories: Their paths, links resolved; those that cannot be locked are not among them.
    """

    def __init__(self, stack: ExitStack) -> None:
        self.directories: tuple[Path, ...] = ()
        self._known: set[str] = set()
        self._stack = stack

    def hold(self, directories: Iterable[Path]) -> None:
        """Lock directories until the context ends; wait for other runs that write in them.

        All runs lock in the same order, so none waits for another that waits for it.

        Args:
            directories: Directories that exist; those that are locked already stay so.

        Raises:
            WriteError: A directory cannot be opened, or another run does not end.
        """
        for real_path in sorted({resolve_path(each) for each in directories} - self._known):
            self._known.add(real_path)
            directory = Path(real_path)
            with translate_write_errors(directory):
                descriptor = _open_directory(directory)
                if descriptor is None:
                    continue
                self._stack.callback(close_quietly, descriptor)
                if _lock(descriptor, directory):
                    self.directories += (directory,)


@contextmanager
def open_locks(directories: Iterable[Path] = ()) -> Iterator[Locks]:
    """Lock directories until the context ends, and further ones with :meth:`Locks.hold`.

    Raises:
        WriteError: A directory cannot be opened, or another run does not end.
    """
    with ExitStack() as stack:
        locks = Locks(stack)
        locks.hold(directories)
        yield locks


def _open_directory(directory: Path) -> int | None:
    """Return a descriptor of a directory, ``None`` where none can be had."""
    if fcntl is None:
        return None
    try:
        return os.open(directory, _DIRECTORY_FLAGS)
    except (PermissionError, FileNotFoundError, NotADirectoryError):
        return None  # it cannot be listed; or what is written there says what is wrong
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
    _raise_file_limit()
    return os.open(directory, _DIRECTORY_FLAGS)


def _lock(descriptor: int, directory: Path) -> bool:
    """Lock a directory, and return whether its file system has such locks."""
    end = time.monotonic() + _MAX_WAIT
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _NO_LOCK_ERRNOS:
                return False
            if error.errno != errno.EWOULDBLOCK:
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


def _raise_file_limit() -> None:
    """Allow as many open files as the system lets this user have: a set may have many windows."""
    import resource  # not on Windows

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
