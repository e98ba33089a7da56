"""Temporary files: written beside their targets, and on the disk before they replace them.

A temporary file has no name (`O_TMPFILE`) where the system supports that. When it is
complete, it gets a temporary name that tells its target and that no pattern for models
matches. One rename then moves it to the target.
"""

from __future__ import annotations

import binascii
import errno
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from onnxkvrename.errors import ModelError, WriteError
from onnxkvrename.storage.copy import SourceError, copy_range, count_free_bytes, write_all
from onnxkvrename.storage.read import (
    OpenFile,
    close_quietly,
    is_occupied,
    link_descriptor,
    list_attributes,
    read_at,
)

TEMP_PREFIX = ".onnxkvrename-"
"""Start of every temporary name. None ends in `.onnx`: some exporters take any file in a
window's directory that does."""
LOCK_SUFFIX = "lock"
"""End of the name of a lock."""
RECORD_SUFFIX = "-record"
"""End of the name of a record of a run that changes several files."""
TEMP_NAME = re.compile(r"\.onnxkvrename-[0-9a-f]{8}-(?:[0-9a-f]{24}(?:-record)?|lock)")
"""Every name that this program gives to a temporary file, a copy, a record or a lock."""
_TEMP_PREFIX_LENGTH = len(TEMP_PREFIX) + 9
_NOT_KEPT_ERRNOS = (errno.EPERM, errno.EACCES, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)
"""Errors of an owner or an access control list that the user or the file system cannot set."""
NO_LINK_ERRNOS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)

_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_SPACE_HINTS = ("free some space, or write elsewhere with -o", "free some space")
_DIRECTORY_HINTS = (
    "its directory must be writable; or write to another directory",
    "its directory must be writable",
)
"""How to fix it, and how to where the result can go to no other path."""

ProgressCallback = Callable[[int], None]
"""Called with the number of bytes or models that were done since the last call."""


def build_temp_prefix(target: Path) -> str:
    """Return the start of all temporary names beside `target` that are for it.

    It has a checksum of the target's name. Two targets of one directory may have the same
    one, though hardly ever do: then they share a lock as well.
    """
    return f"{TEMP_PREFIX}{binascii.crc32(os.fsencode(target.name)):08x}-"


def build_temp_path(target: Path) -> Path:
    """Return an unused temporary path beside `target`."""
    return target.parent / f"{build_temp_prefix(target)}{os.urandom(12).hex()}"


def find_stale_temp_files(targets: Iterable[Path]) -> Iterator[Path]:
    """Yield what dead runs have left beside targets.

    That is temporary files, backups, staged directories, records and locks, by the exact form
    of their names. Those of a run that is still alive are among them, so hold the lock of a
    target before you remove any; and see :mod:`clean_up` for what is never removed.
    """
    prefixes_by_directory: dict[Path, set[str]] = {}
    for target in targets:
        prefixes_by_directory.setdefault(target.parent, set()).add(build_temp_prefix(target))
    for directory, prefixes in prefixes_by_directory.items():
        # Entries that cannot be listed are not removed; nothing else depends on this.
        with suppress(OSError), os.scandir(directory) as entries:
            for entry in entries:
                is_own = TEMP_NAME.fullmatch(entry.name) is not None
                if is_own and entry.name[:_TEMP_PREFIX_LENGTH] in prefixes:
                    yield Path(entry.path)


def resolve_moved_path(path: Path, moves: Mapping[Path, Path]) -> Path:
    """Return the path of a file after directories were renamed.

    Args:
        path: The path before.
        moves: For each renamed directory its new path.
    """
    if moves:
        parts = path.parts
        for directory in path.parents:  # not one move after the other: there may be thousands
            if (target := moves.get(directory)) is not None:
                return target.joinpath(*parts[len(directory.parts) :])
    return path


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

    def move_into_place(self) -> None:
        """Move the file to its target, by one rename.

        Raises:
            WriteError: That failed, or a file has appeared there that must not be
                overwritten. The target is then as it was.
        """
        with (
            translate_write_errors(self.display_path),
            open_parent(self.target, self.root) as (target, directory),
        ):
            temp_path = target.with_name(self.temp_path.name)
            if not self.overwrites_target:
                try:
                    os.link(temp_path, target, src_dir_fd=directory, dst_dir_fd=directory)
                except OSError as error:
                    if error.errno not in NO_LINK_ERRNOS or is_occupied(self.target):
                        raise
                    # The file system has no links: a rename is the next best thing.
                else:
                    _remove_temp_file(temp_path, directory)
                    return
            os.replace(temp_path, target, src_dir_fd=directory, dst_dir_fd=directory)

    def discard(self) -> None:
        """Remove the temporary name."""
        with suppress(OSError):
            os.unlink(self.temp_path)


class TempFile:
    """A file that is being written, beside its target.

    A context manager: if the file has not been finished when the context ends, or an
    error ends it, no file is left. Until a mode is set, only its owner can read it.

    Args:
        target: Where the file belongs.
        display_path: The target in messages, by default the same path.
        root: A directory above the target, below which no link may lead to it.

    Raises:
        WriteError: No file can be written in the directory of the target. All methods raise
            it, too, with the reason and a hint.
    """

    def __init__(
        self, target: Path, display_path: Path | None = None, root: Path | None = None
    ) -> None:
        self.target, self.root = target, root
        self.display_path = display_path or target
        self.temp_path = build_temp_path(target)
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

    def read(self, offset: int, size: int) -> bytes:
        """Return up to `size` of the written bytes from `offset` on, fewer only at the end."""
        with translate_write_errors(self.display_path):
            return read_at(self.descriptor, offset, size)

    def copy_from(
        self, source: OpenFile, offset: int, size: int, progress: ProgressCallback | None = None
    ) -> None:
        """Append `size` bytes of `source` from `offset` on, copied by the kernel if it can.

        Args:
            source: The file to copy from.
            offset: Where the bytes begin.
            size: Their number.
            progress: Called with the number of bytes of each step.

        Raises:
            ModelError: The source cannot be read.
        """
        try:
            for copied in copy_range(source.descriptor, self.descriptor, offset, size):
                if progress is not None:
                    progress(copied)
        except SourceError as error:
            raise ModelError(f"cannot be read: {error.strerror}", path=str(source.path)) from None
        except OSError as error:
            raise _build_write_error(self.display_path, error, source.path) from None

    def copy_attributes(
        self, source: OpenFile, *, owner: bool, force: bool, mask: int = 0o777
    ) -> None:
        """Take over permission bits and extended attributes, so that no user gains a right.

        Set-user-ID, set-group-ID and sticky bits are never taken over. With the owner,
        everything else is: access control list, capabilities, labels. Without it, only
        `user.*` attributes are, and permissions that depend on the group or on an access
        control list are cut to those that everyone had.

        Args:
            source: The file to take them from.
            owner: Take over its owner and group as well; this file replaces it.
            force: Continue if owner and access control list cannot be kept.
            mask: The permission bits that may be taken over.

        Raises:
            ModelError: The attributes of the source cannot be read.
            WriteError: The owner or the access control list cannot be kept, and `force` is
                not set.
        """
        if not hasattr(os, "fchown"):
            return
        # In this order: a change of the owner removes capabilities, and until the permissions
        # are final, only the owner may read the file.
        with translate_write_errors(self.display_path):
            if owner:
                owner = self._try_to_keep("its owner", self._copy_owner, source, force=force)
            if not (source.list_attributes() or list_attributes(self.descriptor)):
                same_group = os.fstat(self.descriptor).st_gid == source.status.st_gid
                mode = source.status.st_mode & mask
                os.fchmod(self.descriptor, mode if same_group else cut_permissions(mode))
                return
            from onnxkvrename.storage import attributes  # most files have none

            if owner:
                owner = self._try_to_keep(
                    "its access control list", attributes.copy_access_list, source, force=force
                )
            mode = attributes.find_mode(source, self.descriptor, owner=owner)
            os.fchmod(self.descriptor, mode & mask)
            attributes.copy_attributes(source, self.descriptor, keep_all=owner)

    def _try_to_keep(
        self, what: str, copy: Callable[[OpenFile, int], None], source: OpenFile, *, force: bool
    ) -> bool:
        """Copy something of the source; return whether that is allowed, or raise."""
        try:
            copy(source, self.descriptor)
        except OSError as error:
            if error.errno not in _NOT_KEPT_ERRNOS:
                raise
            if not force:
                raise WriteError(
                    f"{what} could not be kept: {error.strerror}",
                    path=str(self.display_path),
                    hint="write elsewhere with -o or -d, or use --force",
                    in_place_hint="use --force",
                ) from None
            return False
        return True

    @staticmethod
    def _copy_owner(source: OpenFile, target: int) -> None:
        owner = (source.status.st_uid, source.status.st_gid)
        current = os.fstat(target)
        if (current.st_uid, current.st_gid) != owner:
            os.fchown(target, *owner)

    def set_default_mode(self) -> None:
        """Set the mode that any new file in this directory gets.

        It follows from the umask, or from the directory's default ACL where there is one
        (acl(5)). A second temporary file shows it, as the umask can only be read by
        setting it, for all threads.
        """
        if not hasattr(os, "fchmod"):
            return
        path = build_temp_path(self.target)
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
                self._link_temp_path()
        self.is_finished = True
        return ReadyFile(self.temp_path, self.target, replace, self.display_path, self.root)

    def _link_temp_path(self) -> None:
        with open_parent(self.temp_path, self.root) as (path, directory):
            link_descriptor(self.descriptor, path, directory)


@contextmanager
def open_parent(path: Path, root: Path | None) -> Iterator[tuple[Path, int | None]]:
    """Do as :func:`open_beneath.open_parent`; without a root, yield the path and ``None``."""
    if root is None:
        yield path, None
        return
    from onnxkvrename.storage import open_beneath  # a rename in place does not need it

    with open_beneath.open_parent(path, root) as place:
        yield place


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
            hint=_SPACE_HINTS[0],
            in_place_hint=_SPACE_HINTS[1],
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
    hints: dict[int, tuple[str, str]] = {
        errno.ENOSPC: _SPACE_HINTS,
        errno.EDQUOT: _SPACE_HINTS,
        errno.EFBIG: (
            "raise the file size limit (ulimit -f), or write elsewhere",
            "raise the file size limit (ulimit -f)",
        ),
        errno.EROFS: ("write to another directory", ""),
        errno.EACCES: _DIRECTORY_HINTS,
        errno.EPERM: _DIRECTORY_HINTS,
        errno.EEXIST: ("a file appeared there during the run; --force replaces it",) * 2,
        errno.ENOENT: ("create its directory first",) * 2,
        errno.ENOTDIR: ("create its directory first",) * 2,
    }
    reason = error.strerror or str(error)
    if source is not None and error.errno not in (*_FULL_ERRNOS, errno.EROFS):
        reason += f", while {source} was copied"
    hint, in_place_hint = hints.get(error.errno or 0, (None, None))
    return WriteError(
        f"cannot be written: {reason}", path=str(target), hint=hint, in_place_hint=in_place_hint
    )
