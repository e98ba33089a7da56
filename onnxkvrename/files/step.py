"""One step of a run: a file or a new directory gets its name by one call, or is put back."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import NamedTuple

from onnxkvrename.files.inside import open_inside
from onnxkvrename.files.read import build_changed_error, is_occupied, open_file
from onnxkvrename.files.temp_file import TempFile
from onnxkvrename.files.write_errors import translate_write_errors

_STATUS_FIELDS = ("st_dev", "st_ino", "st_size", "st_mtime_ns", "st_mode", "st_uid", "st_gid")
"""What differs after a file was replaced, written to, or its permissions were changed. The time of
the inode's last change does not count: a backup is a link, and changes it."""
_NO_LINK_ERRNOS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
"""Errors of a file system without hard links."""
_NOTHING_ERRNOS = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG)
"""Errors of a path at which there is nothing."""


class Step(NamedTuple):
    """A file, or a new directory with all files in it, that gets its name.

    Attributes:
        temp_path: Its temporary name.
        target: The name that it gets, in the same directory.
        display_path: The target in messages.
        root: As in :class:`Output`.
        inode: The device and inode of what comes there, by which it is recognized.
        planned: The status of what is replaced; ``None`` if nothing may be there.
        backup: The name under which that is kept meanwhile.
        is_private: Whether it lies in a new directory, which has a temporary name itself.
        is_directory: Whether it is such a directory.
    """

    temp_path: Path
    target: Path
    display_path: Path
    root: Path | None
    inode: tuple[int, int]
    planned: os.stat_result | None = None
    backup: Path | None = None
    is_private: bool = False
    is_directory: bool = False

    def is_made(self) -> bool:
        """Return whether the target is what comes there.

        Raises:
            OSError: This cannot be determined.
        """
        return _read_inode(self.target) == self.inode


def keep_backup(step: Step) -> None:
    """Give what is replaced a second name; a copy of it, where there are no hard links.

    Raises:
        WriteError: It cannot be kept.
    """
    if step.backup is None:
        return
    with translate_write_errors(step.display_path):
        try:
            os.link(step.target, step.backup, follow_symlinks=False)
        except OSError as error:
            if error.errno not in _NO_LINK_ERRNOS:
                raise
            if step.planned is not None and stat.S_ISLNK(step.planned.st_mode):
                os.symlink(os.readlink(step.target), step.backup)
            else:
                _copy_file(step.target, step.backup)


def _copy_file(source_path: Path, path: Path) -> None:
    with open_file(source_path) as source, TempFile(path, source_path) as file:
        file.copy_from(source, 0, source.size)
        file.copy_attributes(source, owner=True, force=True)
        if os.utime in os.supports_fd:
            os.utime(file.descriptor, ns=(source.status.st_atime_ns, source.status.st_mtime_ns))
        file.finish()


def check_planned(step: Step) -> None:
    """Raise if the file at a target has changed, or another one is there."""
    if step.planned is None:
        return
    with translate_write_errors(step.display_path):
        try:
            status = os.lstat(step.target)
        except (FileNotFoundError, NotADirectoryError):
            raise build_changed_error(step.display_path) from None
    if any(getattr(status, name) != getattr(step.planned, name) for name in _STATUS_FIELDS):
        raise build_changed_error(step.display_path)


def place(step: Step) -> None:
    """Give a file or a directory its name, by one call.

    A server that repeats a request whose answer was lost (NFS) reports the second try as an
    error, though the first one has succeeded: so what is there decides.

    Raises:
        WriteError: That failed, or something has appeared there. The target is as it was.
    """
    with translate_write_errors(step.display_path):
        try:
            _move(step)
        except OSError:
            if not step.is_made():
                raise


def _move(step: Step) -> None:
    with open_inside(step.root, step.target) as (path, directory):
        source = path.with_name(step.temp_path.name)
        if not (step.planned or step.is_private or step.is_directory):
            try:
                # Unlike a rename, this fails if something is there by now.
                os.link(
                    *(source, path),
                    src_dir_fd=directory,
                    dst_dir_fd=directory,
                    follow_symlinks=False,
                )
            except OSError as error:
                if error.errno not in _NO_LINK_ERRNOS or is_occupied(step.target):
                    raise
            else:
                return
        os.replace(source, path, src_dir_fd=directory, dst_dir_fd=directory)


def undo(step: Step) -> None:
    """Put back what was at a target, if the step was made.

    Raises:
        OSError: That failed, or it cannot be determined what is there.
    """
    if not step.is_made():
        return
    try:
        if step.is_directory:
            os.replace(step.target, step.temp_path)
        elif step.planned is None:
            os.unlink(step.target)
        elif step.backup is not None:
            os.replace(step.backup, step.target)
    except OSError:
        if step.is_made():
            raise


def _read_inode(path: Path) -> tuple[int, int] | None:
    """Return the device and inode of what is at a path, ``None`` for nothing.

    Raises:
        OSError: This cannot be determined.
    """
    try:
        return require_inode(path)
    except OSError as error:
        if error.errno in _NOTHING_ERRNOS:
            return None
        raise


def require_inode(path: Path) -> tuple[int, int]:
    """Return the device and inode of what is at a path.

    Raises:
        OSError: There is nothing, or it cannot be determined.
    """
    status = os.lstat(path)
    return status.st_dev, status.st_ino
