"""Temporary files: written beside their targets, and on the disk before they replace them.

A temporary file has no name (`O_TMPFILE`) where the system supports that. When it is complete,
it gets a temporary name that no pattern for models matches.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Literal

from onnxkvrename.errors import ModelError, WriteError
from onnxkvrename.files.copy import SourceError, copy_range, write_all_bytes
from onnxkvrename.files.inside import open_inside
from onnxkvrename.files.read import OpenFile, close_quietly, read_at
from onnxkvrename.files.write_errors import build_write_error, translate_write_errors

TEMP_PREFIX = ".onnxkvrename-"
"""Start of every temporary name. None ends in `.onnx`: some exporters take any file in a
window's directory that does."""
TEMP_NAME = re.compile(
    rf"{re.escape(TEMP_PREFIX)}(?P<key>[0-9a-f]{{24}})-[0-9a-f]{{12}}-(?:new|old|dir)"
)
"""Every name that this program gives to a temporary file, a backup or a directory in the making."""

_NOT_KEPT_ERRNOS = (errno.EPERM, errno.EACCES, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)
"""Errors of an owner or an access control list that the user or the file system cannot set."""
_SKIPPED_ERRNOS = (*(*_NOT_KEPT_ERRNOS, errno.ENODATA, errno.E2BIG, errno.ERANGE, errno.ENOSPC),)
"""Errors of one attribute: it may not be read or set, or the file system cannot store it."""
ACCESS_LIST = "system.posix_acl_access"
"""The attribute that is an access control list (acl(5))."""

ProgressCallback = Callable[[int], None]
"""Called with the number of bytes or models that were done since the last call."""


def build_key() -> str:
    """Return a new key for all temporary names of a run, which nobody can guess."""
    return os.urandom(12).hex()


def build_temp_name(key: str, kind: Literal["new", "old", "dir"]) -> str:
    """Return a new temporary name.

    Args:
        key: The key of the run.
        kind: ``new`` for a file that the run writes, ``old`` for one that it replaces, ``dir`` for
            a directory that it makes.
    """
    return f"{TEMP_PREFIX}{key}-{os.urandom(6).hex()}-{kind}"


def list_temp_paths(directory: Path, key: str | None = None) -> list[Path]:
    """Return what has a temporary name in a directory, sorted.

    Args:
        directory: The directory.
        key: The key of one run; by default, of any.

    Raises:
        OSError: The directory cannot be listed.
    """
    with os.scandir(directory) as entries:
        names = [entry.name for entry in entries if entry.name.startswith(TEMP_PREFIX)]
    found = (TEMP_NAME.fullmatch(name) for name in sorted(names))
    return [directory / match[0] for match in found if match and key in (None, match["key"])]


def has_leftovers(directory: Path) -> bool:
    """Return whether something has a temporary name in a directory that can be listed."""
    with suppress(OSError):
        return bool(list_temp_paths(directory))
    return False


def remove_leftovers(
    directory: Path,
    key: str | None = None,
    *,
    kept: Collection[str] = (),
    links_only: bool = False,
) -> None:
    """Remove what has a temporary name in a directory; what cannot be removed stays.

    Without a key, only what is surely of a run that was killed goes: the caller has locked the
    directory, and it is of the user who runs this; for root, also of the owner of the directory.

    Args:
        directory: The directory.
        key: The key of a run of this process; by default, that of any.
        kept: Names that are never removed.
        links_only: Remove nothing but further names of files.
    """
    with suppress(OSError):
        owners = _find_trusted_owners(directory) if key is None else None
        for path in list_temp_paths(directory, key):
            status = os.lstat(path)
            is_ours = owners is None or status.st_uid in owners
            is_meant = not links_only or status.st_nlink > 1
            if path.name in kept or not (is_ours and is_meant):
                continue
            if not stat.S_ISDIR(status.st_mode):
                with suppress(OSError):
                    os.unlink(path)
            elif path.name.endswith("-dir") and not links_only:
                shutil.rmtree(path, ignore_errors=True)


def _find_trusted_owners(directory: Path) -> set[int] | None:
    """Return the users whose files in a directory may be ours; ``None`` where there are no users.

    Raises:
        OSError: The directory cannot be looked at.
    """
    if not hasattr(os, "geteuid"):
        return None
    user = os.geteuid()
    return {user} if user else {user, os.stat(directory).st_uid}


class TempFile:
    """A file that is being written, beside its target.

    A context manager: if the file has not been finished when the context ends, or an
    error ends it, no file is left. Until a mode is set, only its owner can read it.

    Args:
        temp_path: The temporary name that it gets.
        display_path: Its target in messages.
        root: A directory above both, below which no link may lead to them.

    Attributes:
        progress: Called with the number of bytes of each step, if it is set.

    Raises:
        WriteError: No file can be written in that directory. All methods raise it, too, with the
            reason and a hint.
    """

    def __init__(self, temp_path: Path, display_path: Path, root: Path | None = None) -> None:
        self.progress: ProgressCallback | None = None
        self.temp_path, self.display_path, self.root = temp_path, display_path, root
        self.is_finished = False
        with translate_write_errors(self.display_path), open_inside(root, self.temp_path) as place:
            self.descriptor, self.has_name = _create_temp_file(*place, 0o600)

    def __enter__(self) -> TempFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        is_closed = False
        try:
            close_quietly(self.descriptor)  # first: Windows removes no open file
            is_closed = True
        finally:
            if kind is not None or not (is_closed and self.is_finished):
                _remove_temp_file(self.temp_path)

    @property
    def size(self) -> int:
        """Bytes written so far."""
        with translate_write_errors(self.display_path):
            return os.fstat(self.descriptor).st_size

    def write(self, data: bytes | bytearray) -> None:
        """Append bytes."""
        with translate_write_errors(self.display_path):
            write_all_bytes(self.descriptor, data)
        if self.progress is not None:
            self.progress(len(data))

    def read(self, offset: int, size: int) -> bytes:
        """Return up to `size` of the written bytes from `offset` on, fewer only at the end."""
        with translate_write_errors(self.display_path):
            return read_at(self.descriptor, offset, size)

    def copy_from(self, source: OpenFile, offset: int, size: int) -> None:
        """Append `size` bytes of `source` from `offset` on, copied by the kernel if it can.

        Args:
            source: The file to copy from.
            offset: Where the bytes begin.
            size: Their number.

        Raises:
            ModelError: The source cannot be read.
        """
        try:
            for copied in copy_range(source.descriptor, self.descriptor, offset, size):
                if self.progress is not None:
                    self.progress(copied)
        except SourceError as error:
            raise ModelError(f"cannot be read: {error.strerror}", path=str(source.path)) from None
        except OSError as error:
            raise build_write_error(self.display_path, error, source.path) from None

    def copy_attributes(
        self, source: OpenFile, *, owner: bool, force: bool, mask: int = 0o777
    ) -> None:
        """Take over permission bits and extended attributes, so that no user gains a right.

        Set-user-ID, set-group-ID and sticky bits are never taken over. With the owner, all
        attributes are, among them an access control list. Without it, only `user.*` attributes
        are; the group and others get what both of them had if the group is another one, and
        nothing where either file has an access control list.

        Args:
            source: The file to take them from.
            owner: Take over its owner and group as well; this file replaces it.
            force: Continue if owner and access control list cannot be kept.
            mask: The permission bits that may be taken over.

        Raises:
            WriteError: The owner or the access control list cannot be kept, and `force` is
                not set; or the attributes cannot be read.
        """
        if not hasattr(os, "fchown"):
            return
        # In this order: a change of the owner removes capabilities, and until the permissions
        # are final, only the owner may read the file.
        with translate_write_errors(self.display_path):
            names = list_attributes(source.descriptor)
            own_names = list_attributes(self.descriptor)
            if owner:
                owner = self._keep("its owner", self._copy_owner, source, force=force)
            if owner and ACCESS_LIST in (*names, *own_names):
                copy = self._copy_access_list
                owner = self._keep("its access control list", copy, source, force=force)
            mode = source.status.st_mode & mask & 0o777
            if not owner and ACCESS_LIST in (*names, *own_names):
                mode &= 0o700
            elif os.fstat(self.descriptor).st_gid != source.status.st_gid:
                mode = cut_permissions(mode)
            os.fchmod(self.descriptor, mode)
            for name in names:
                if name.startswith("user.") or (owner and name != ACCESS_LIST):
                    self._copy_attribute(source, name)

    def _keep(
        self, what: str, copy: Callable[[OpenFile], None], source: OpenFile, *, force: bool
    ) -> bool:
        """Copy something of the source; return whether that is allowed, or raise."""
        try:
            copy(source)
        except OSError as error:
            if error.errno not in _NOT_KEPT_ERRNOS:
                raise
            if not force:
                raise WriteError(
                    f"{what} could not be kept: {error.strerror}",
                    path=str(self.display_path),
                    hint="write to another directory, or use --force",
                ) from None
            return False
        return True

    def _copy_owner(self, source: OpenFile) -> None:
        owner = (source.status.st_uid, source.status.st_gid)
        current = os.fstat(self.descriptor)
        if (current.st_uid, current.st_gid) != owner:
            os.fchown(self.descriptor, *owner)

    def _copy_access_list(self, source: OpenFile) -> None:
        """Give the file the list of its source, and none of its directory where that has none."""
        if ACCESS_LIST in list_attributes(source.descriptor):
            value = os.getxattr(source.descriptor, ACCESS_LIST)
            os.setxattr(self.descriptor, ACCESS_LIST, value)
        else:
            os.removexattr(self.descriptor, ACCESS_LIST)

    def _copy_attribute(self, source: OpenFile, name: str) -> None:
        try:
            os.setxattr(self.descriptor, name, os.getxattr(source.descriptor, name))
        except OSError as error:
            if error.errno not in _SKIPPED_ERRNOS:
                raise

    def set_default_mode(self) -> None:
        """Set the mode that any new file in this directory gets.

        It follows from the umask, or from the directory's default ACL where there is one
        (acl(5)). A second temporary file shows it, as the umask can only be read by
        setting it, for all threads.
        """
        if not hasattr(os, "fchmod"):
            return
        path = self.temp_path.with_name(_build_probe_name(self.temp_path.name))
        with translate_write_errors(self.display_path):
            descriptor, has_name = _create_temp_file(path, None, 0o666)
            try:
                mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
            finally:
                if has_name:
                    _remove_temp_file(path)  # first: an interrupt may come between the two
                close_quietly(descriptor)
            os.fchmod(self.descriptor, mode)

    def finish(self) -> None:
        """Flush the bytes to the disk, and give the file its temporary name.

        Raises:
            WriteError: That failed. No file is left once the context ends.
        """
        with translate_write_errors(self.display_path):
            os.fsync(self.descriptor)
            if not self.has_name:
                with open_inside(self.root, self.temp_path) as (path, directory):
                    _link_descriptor(self.descriptor, path, directory)
        self.is_finished = True


def _build_probe_name(name: str) -> str:
    """Return a further temporary name with the key of another one."""
    match = TEMP_NAME.fullmatch(name)
    return build_temp_name(match["key"] if match else build_key(), "new")


def list_attributes(file: int | Path) -> list[str]:
    """Return the names of the extended attributes of a file; none where there cannot be any.

    Raises:
        OSError: They cannot be read.
    """
    if not hasattr(os, "listxattr"):
        return []
    try:
        return os.listxattr(file)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.ENOSYS):
            return []
        raise


def _create_temp_file(path: Path, directory: int | None, mode: int) -> tuple[int, bool]:
    """Create a file in the directory of `path`, without a name if possible.

    Returns its descriptor, and whether it is named `path`, which may be relative to a directory.
    """
    unnamed = getattr(os, "O_TMPFILE", 0)
    if unnamed and os.path.isdir("/proc/self/fd"):
        flags = unnamed | os.O_RDWR | os.O_CLOEXEC
        # Systems refuse this with one of several errors; a named file is always possible.
        with suppress(OSError):
            return os.open(path.parent, flags, mode, dir_fd=directory), False
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    try:
        return os.open(path, flags | getattr(os, "O_CLOEXEC", 0), mode, dir_fd=directory), True
    except BaseException:
        _remove_temp_file(path, directory)
        raise


def _link_descriptor(descriptor: int, path: Path, directory: int | None) -> None:
    """Give an open file without a name its name; Linux only."""
    descriptors = os.open("/proc/self/fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # Not a path under /proc: with a directory descriptor Python calls linkat(2) with
        # AT_SYMLINK_FOLLOW, without which the link itself would be meant.
        os.link(
            str(descriptor),
            path,
            src_dir_fd=descriptors,
            dst_dir_fd=directory,
            follow_symlinks=True,
        )
    finally:
        close_quietly(descriptors)


def _remove_temp_file(path: Path, directory: int | None = None) -> None:
    """Remove a temporary name if it is there. It is random, so it can only be our own."""
    with suppress(OSError):
        os.unlink(path, dir_fd=directory)


def cut_permissions(mode: int) -> int:
    """Return permission bits that allow group and others only what both of them may do."""
    common = (mode >> 3) & mode & 0o7
    return (mode & 0o700) | common << 3 | common
