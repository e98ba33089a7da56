"""Temporary files: written beside their targets, and on the disk before they replace them.

A temporary file has no name (`O_TMPFILE`) where the system supports that. When it is complete,
it gets a temporary name that no pattern for models matches. One rename then moves it to the
target.

All temporary names of one run have the same key, 24 random hexadecimal digits: those of the
files that it writes, of the old files that it keeps, and of the record of both.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal, NamedTuple

from onnxkvrename.errors import ModelError, WriteError
from onnxkvrename.storage.confined import open_parent
from onnxkvrename.storage.copy import SourceError, copy_range, count_free_bytes, write_all
from onnxkvrename.storage.read import OpenFile, close_quietly, is_occupied, read_at

TEMP_PREFIX = ".onnxkvrename-"
"""Start of every temporary name. None ends in `.onnx`: some exporters take any file in a
window's directory that does."""
LOCK_NAME = f"{TEMP_PREFIX}lock"
"""The lock file of a directory that cannot be locked itself."""
RECORD_SUFFIX = "-record"
"""End of the name of a record."""
TEMP_NAME = re.compile(
    rf"{re.escape(TEMP_PREFIX)}(?:(?P<key>[0-9a-f]{{24}})(?:-[0-9a-f]{{12}}-[a-z]{{3,5}}|{RECORD_SUFFIX})|lock)"
)
"""Every name that this program gives to a temporary file, a copy, a record or a lock."""
NO_LINK_ERRNOS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
"""Errors of a file system without hard links."""

_NOT_KEPT_ERRNOS = (errno.EPERM, errno.EACCES, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)
"""Errors of an owner or an access control list that the user or the file system cannot set."""
_SKIPPED_ERRNOS = (*(*_NOT_KEPT_ERRNOS, errno.ENODATA, errno.E2BIG, errno.ERANGE, errno.ENOSPC),)
"""Errors of one attribute: it may not be read or set, or the file system cannot store it."""
ACCESS_LIST = "system.posix_acl_access"
"""The attribute that is an access control list (acl(5))."""

_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_SPACE_HINT = "free some space, or write to another disk"
_DIRECTORY_HINT = "its directory must be writable"
_ERROR_HINTS = {
    errno.ENOSPC: _SPACE_HINT,
    errno.EDQUOT: _SPACE_HINT,
    errno.EFBIG: "raise the file size limit (ulimit -f)",
    errno.EROFS: "write to another directory",
    errno.EACCES: _DIRECTORY_HINT,
    errno.EPERM: _DIRECTORY_HINT,
    errno.EEXIST: "a file appeared there during the run; run the same command again",
    errno.ENOENT: "create its directory first",
    errno.ENOTDIR: "create its directory first",
}
"""How to fix an error of the system."""

ProgressCallback = Callable[[int], None]
"""Called with the number of bytes or models that were done since the last call."""


def build_key() -> str:
    """Return a new key, which nobody can guess."""
    return os.urandom(12).hex()


def build_file_key() -> str:
    """Return a new key of a file, by which it differs from others of its run."""
    return os.urandom(6).hex()


def build_temp_name(key: str, file_key: str, kind: Literal["new", "old", "move", "probe"]) -> str:
    """Return a temporary name.

    Args:
        key: The key of the run.
        file_key: The key of the file.
        kind: ``new`` for what the run writes, ``old`` for what it replaces, ``move`` for a
            second name of either that is about to become the target, ``probe`` for an empty file.
    """
    return f"{TEMP_PREFIX}{key}-{file_key}-{kind}"


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


def remove_temp_files(
    directory: Path,
    key: str | None = None,
    kept: Iterable[str] = (),
    *,
    links_only: bool = False,
    any_owner: bool = False,
) -> None:
    """Remove the temporary files in a directory; what cannot be removed stays.

    The caller holds the lock of the directory, perhaps by its lock file, which stays.

    Args:
        directory: The directory.
        key: The key of one run, whose record stays; by default, all are removed but records and
            what they name.
        kept: Names that are never removed.
        links_only: Remove nothing but further names of files, so that no content is lost: for a
            run that does not yet know what it reads.
        any_owner: Remove those of other users as well. The key is of a run of this user, who
            may have replaced files of others, by force.
    """
    with suppress(OSError):
        paths = list_temp_paths(directory, key)
        recorded = [path.name for path in paths if path.name.endswith(RECORD_SUFFIX)]
        runs = [name.removesuffix(RECORD_SUFFIX) for name in recorded]
        protected = (*runs, *kept) if key is None else tuple(kept)
        for path in paths:
            if path.name.endswith((RECORD_SUFFIX, LOCK_NAME)) or path.name.startswith(protected):
                continue
            if not links_only or os.lstat(path).st_nlink > 1:
                remove_file_of_run(path, any_owner=any_owner)


def remove_file_of_run(path: Path, *, any_owner: bool = False) -> None:
    """Remove a file with a temporary name, if it is surely one of ours.

    That is a regular file of the user who runs this; for root, also of the owner of the directory.
    What a run has replaced may be a link, and of anyone if the key is known to be of this user.
    """
    with suppress(OSError):
        status, owners = os.lstat(path), find_trusted_owners(path.parent)
        is_ours = stat.S_ISREG(status.st_mode)
        if path.name.endswith(("-old", "-move")):
            is_ours |= stat.S_ISLNK(status.st_mode)
        if is_ours and (any_owner or owners is None or status.st_uid in owners):
            os.unlink(path)


def find_trusted_owners(directory: Path) -> set[int] | None:
    """Return the users whose files in a directory may be ours; ``None`` where there are no users.

    Raises:
        OSError: The directory cannot be looked at.
    """
    if not hasattr(os, "geteuid"):
        return None
    user = os.geteuid()
    return {user} if user else {user, os.stat(directory).st_uid}


class ReadyFile(NamedTuple):
    """A complete file under a temporary name, its bytes on the disk.

    Any process that sees the same files may move it.

    Attributes:
        temp_path: The temporary name.
        target: Where the file belongs.
        overwrites_target: Whether it may replace a file there.
        display_path: The target in messages.
        root: A directory above both, below which no link may lead to them.
    """

    temp_path: Path
    target: Path
    overwrites_target: bool
    display_path: Path
    root: Path | None = None

    def move_into_place(self, *, keeps_name: bool) -> None:
        """Give the file the name of its target, by one call.

        Args:
            keeps_name: Whether the temporary name stays as well, where there are hard links.

        Raises:
            WriteError: That failed, or a file has appeared there that must not be
                overwritten. The target is then as it was.
        """
        with translate_write_errors(self.display_path):
            put_in_place(
                self.temp_path,
                self.target,
                replaces=self.overwrites_target,
                keeps_name=keeps_name,
                root=self.root,
            )


def put_in_place(
    temp_path: Path,
    target: Path,
    *,
    replaces: bool,
    keeps_name: bool = True,
    root: Path | None = None,
) -> None:
    """Give a file the name of its target, by one call.

    Args:
        temp_path: The temporary name, in the directory of the target.
        target: The target.
        replaces: Whether the target may be there.
        keeps_name: Whether the temporary name stays as well, where there are hard links.
        root: A directory above both, below which no link may lead to them.

    Raises:
        WriteError: A link would lead out of the root.
        OSError: That failed, or the target is there and must not be. It is as it was.
    """
    with open_parent(target, root) as (path, directory):
        source = name = path.with_name(temp_path.name)
        if keeps_name or not replaces:
            name = path.with_name(f"{source.name.rpartition('-')[0]}-move") if replaces else path
            try:
                os.link(
                    source,
                    name,
                    src_dir_fd=directory,
                    dst_dir_fd=directory,
                    follow_symlinks=False,
                )
            except OSError as error:
                if error.errno not in NO_LINK_ERRNOS or (not replaces and is_occupied(target)):
                    raise
                name = source  # the file system has no links: a rename is the next best thing
        if name != path:
            os.replace(name, path, src_dir_fd=directory, dst_dir_fd=directory)
        elif not keeps_name:
            _remove_temp_file(source, directory)


class TempFile:
    """A file that is being written, beside its target.

    A context manager: if the file has not been finished when the context ends, or an
    error ends it, no file is left. Until a mode is set, only its owner can read it.

    Args:
        target: Where the file belongs.
        display_path: The target in messages, by default the same path.
        root: A directory above the target, below which no link may lead to it.
        key: The key of the run, which its temporary name has; by default a new one.
        progress: Called with the number of bytes of each step.

    Raises:
        WriteError: No file can be written in the directory of the target. All methods raise
            it, too, with the reason and a hint.
    """

    def __init__(
        self,
        target: Path,
        display_path: Path | None = None,
        root: Path | None = None,
        key: str | None = None,
        progress: ProgressCallback | None = None,
    ) -> None:
        self.progress = progress
        self.target, self.root = target, root
        self.display_path = display_path or target
        self.temp_path = target.parent / build_temp_name(
            key or build_key(), build_file_key(), "new"
        )
        self.is_finished = False
        with translate_write_errors(self.display_path), open_parent(self.temp_path, root) as place:
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
            write_all(self.descriptor, data)
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
            raise _build_write_error(self.display_path, error, source.path) from None

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
        path = self.temp_path.with_name(build_temp_name(build_key(), build_file_key(), "probe"))
        with translate_write_errors(self.display_path):
            descriptor, has_name = _create_temp_file(path, None, 0o666)
            try:
                mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
            finally:
                if has_name:
                    _remove_temp_file(path)  # first: an interrupt may come between the two
                close_quietly(descriptor)
            os.fchmod(self.descriptor, mode)

    def finish(self, *, replace: bool) -> ReadyFile:
        """Flush the bytes to the disk, and give the file its temporary name.

        Args:
            replace: Whether the file may replace another one at the target.

        Raises:
            WriteError: That failed. No file is left once the context ends.
        """
        with translate_write_errors(self.display_path):
            os.fsync(self.descriptor)
            if not self.has_name:
                with open_parent(self.temp_path, self.root) as (path, directory):
                    _link_descriptor(self.descriptor, path, directory)
        self.is_finished = True
        return ReadyFile(self.temp_path, self.target, replace, self.display_path, self.root)


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


def check_free_space(directory: Path, size: int, target: Path) -> None:
    """Check that a disk has `size` bytes left; it passes where the system does not tell.

    Args:
        directory: A directory on that disk.
        size: The bytes that are needed.
        target: The file that needs them, for the error.

    Raises:
        WriteError: The disk has fewer.
    """
    with translate_write_errors(target):
        free = count_free_bytes(directory)
    if free is not None and free < size:
        raise WriteError(
            f"needs {size:,} bytes, but the disk has {free:,} left",
            path=str(target),
            hint=_SPACE_HINT,
        )


def cut_permissions(mode: int) -> int:
    """Return permission bits that allow group and others only what both of them may do."""
    common = (mode >> 3) & mode & 0o7
    return (mode & 0o700) | common << 3 | common


@contextmanager
def translate_write_errors(target: Path) -> Iterator[None]:
    """Turn an OSError of the context into a :class:`WriteError` for `target`, with a hint."""
    try:
        yield
    except OSError as error:
        raise _build_write_error(target, error) from None


def _build_write_error(target: Path, error: OSError, source: Path | None = None) -> WriteError:
    """Return the error of a target. With a source, either file may be at fault."""
    reason = error.strerror or str(error)
    if source is not None and error.errno not in (*_FULL_ERRNOS, errno.EROFS):
        reason += f", while {source} was copied"
    hint = _ERROR_HINTS.get(error.errno or 0)
    if hint == _DIRECTORY_HINT and not os.access(target.parent, os.W_OK | os.X_OK):
        reason, hint = f"{target.parent} is not writable", "write to another directory"
    return WriteError(f"cannot be written: {reason}", path=str(target), hint=hint)
