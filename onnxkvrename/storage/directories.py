"""New directories, written under temporary names, and operations on directories."""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path

from onnxkvrename.errors import UndoError
from onnxkvrename.storage.read import (
    close_quietly,
    is_occupied,
    list_attributes,
    read_status,
)
from onnxkvrename.storage.temp_file import (
    build_temp_path,
    cut_permissions,
    open_parent,
    translate_write_errors,
)
from onnxkvrename.storage.transaction import sync_directory

_ACL = "system.posix_acl_access"
_DIRECTORY_FLAGS = (
    os.O_RDONLY
    | getattr(os, "O_DIRECTORY", 0)
    | getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_CLOEXEC", 0)
)


class StagedDirectory:
    """A temporary directory beside its target that one rename moves into place.

    A context manager: on exit, the directory is removed unless it has been moved, or is kept
    because a change could not be undone. Until it is moved, only its owner can enter it. Then
    it and those in it have no more rights than the directories that they replace.

    Args:
        target: The final path of the directory.
        root: The directory that the user gave, if it is above the target: below it, no link may
            lead to the target.

    Raises:
        WriteError: On entering, if the temporary directory cannot be created.
    """

    def __init__(self, target: Path, root: Path | None = None) -> None:
        self.target = target
        self.directory = build_temp_path(target)
        self.root = root if root is not None and root in target.parents else target.parent
        self._default_mode = 0o777
        self._sources: dict[Path, dict[Path, None]] = {}
        """The directories that each staged one replaces."""

    def __enter__(self) -> StagedDirectory:
        with translate_write_errors(self.target):
            self._make_directory(self.directory)
            try:
                self._default_mode = self._find_default_mode()
            except BaseException:
                remove_directory(self.directory)
                raise
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if not isinstance(error, UndoError):
            remove_directory(self.directory)

    def _make_directory(self, path: Path, mode: int = 0o700) -> None:
        with open_parent(path, self.root) as (name, parent):
            os.mkdir(name, mode, dir_fd=parent)

    def _find_default_mode(self) -> int:
        """Return the mode that a new directory gets, by the umask or a default ACL (acl(5))."""
        probe = self.directory / "probe"
        self._make_directory(probe, 0o777)
        with open_parent(probe, self.root) as (name, parent):
            mode = os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode & 0o777
            os.rmdir(name, dir_fd=parent)
        return mode

    def prepare_path(self, path: Path, source: Path | None = None, top: Path | None = None) -> Path:
        """Return the staged path for a path below the target, and create its parent directory.

        Args:
            path: The final path, below `target`.
            source: The directory that the parent directory of the path replaces, as those
                above it replace those above; by default it is a directory like any new one.
            top: The uppermost directory that replaces another one.

        Raises:
            WriteError: The parent directory could not be created.
        """
        inside = self.directory / path.relative_to(self.target)
        with translate_write_errors(path):
            for directory in reversed(inside.parents):
                if self.directory in directory.parents and not is_occupied(directory):
                    self._make_directory(directory)
        final = path.parent
        while source is not None and self.target in (final, *final.parents):
            staged = self.directory / final.relative_to(self.target)
            self._sources.setdefault(staged, {})[source] = None
            if top not in final.parents:
                break
            source, final = source.parent, final.parent
        return inside

    def move_into_place(self) -> None:
        """Move the directory to its target.

        Raises:
            WriteError: The rename failed, or the target exists by now; it is then unchanged.
            ModelError: The rights of a directory that it replaces cannot be read.
        """
        with translate_write_errors(self.target):
            for folder, _, _ in os.walk(self.directory, onerror=_raise):
                self._set_mode(Path(folder))
                sync_directory(Path(folder))
        rename_directory(self.directory, self.target, self.root)

    def _set_mode(self, directory: Path) -> None:
        """Give a directory the rights that all replaced directories give."""
        if not hasattr(os, "O_NOFOLLOW") or not hasattr(os, "fchmod"):
            return
        with open_parent(directory, self.root) as (name, parent):
            descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
        try:
            status = os.fstat(descriptor)
            has_list = _ACL in list_attributes(descriptor)
            mode = self._default_mode
            for source in self._sources.get(directory, ()):
                mode &= _find_allowed_mode(source, status.st_gid, has_list=has_list)
            os.fchmod(descriptor, mode | 0o700 | status.st_mode & stat.S_ISGID)
        finally:
            os.close(descriptor)


def _find_allowed_mode(source: Path, group: int, *, has_list: bool) -> int:
    """Return the permission bits that a directory may have in another one's stead.

    Args:
        source: The directory that it replaces.
        group: The group of the new one.
        has_list: Whether the new one has an access control list.
    """
    status = read_status(source)
    if status is None or _ACL in list_attributes(source):
        return 0o700
    if status.st_gid == group and not has_list:
        return status.st_mode & 0o777
    return cut_permissions(status.st_mode)


def _raise(error: OSError) -> None:
    raise error


def rename_directory(directory: Path, target: Path, root: Path | None = None) -> None:
    """Rename a directory within its parent, which is not synced.

    Args:
        directory: The directory.
        target: Its new path.
        root: A directory above both, below which no link may lead to them.

    Raises:
        WriteError: The target exists, or the rename failed.
    """
    with translate_write_errors(target), open_parent(target, root) as (path, parent):
        if is_occupied(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        source = directory if root is None else path.with_name(directory.name)
        os.rename(source, path, src_dir_fd=parent, dst_dir_fd=parent)


def remove_directory(directory: Path) -> None:
    """Remove a directory and its content, however deep, as far as possible; follow no links."""
    with suppress(OSError, RecursionError):
        if {os.open, os.rename, os.rmdir, os.unlink} <= os.supports_dir_fd:
            _remove_level_by_level(directory)
        else:  # pragma: no cover - Windows
            import shutil

            shutil.rmtree(directory, ignore_errors=True)


def _remove_level_by_level(directory: Path) -> None:
    """Remove a directory, with two open descriptors at most and no path but of one name.

    What is in a directory of the first level comes up to it, so that this one can go.
    """
    top = os.open(directory, _DIRECTORY_FLAGS)
    try:
        while names := _remove_files(top):
            removed = False
            for name in names:
                with suppress(OSError):
                    _lift_directories(name, top)
                    os.rmdir(name, dir_fd=top)
                    removed = True
            if not removed:
                return
    finally:
        close_quietly(top)
    os.rmdir(directory)


def _lift_directories(name: str, top: int) -> None:
    inner = os.open(name, _DIRECTORY_FLAGS, dir_fd=top)
    try:
        for below in _remove_files(inner):
            os.rename(below, os.urandom(12).hex(), src_dir_fd=inner, dst_dir_fd=top)
    finally:
        close_quietly(inner)


def _remove_files(descriptor: int) -> list[str]:
    """Remove all in an open directory but directories, and return the names of these."""
    names = []
    with os.scandir(descriptor) as entries:
        found = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
    for name, is_directory in found:
        if is_directory:
            names.append(name)
        else:
            with suppress(OSError):
                os.unlink(name, dir_fd=descriptor)
    return names
