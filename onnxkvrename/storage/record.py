"""Records of runs that change several files, and the one function that plays them back.

A record is written before the first change: which files change, and what they
are before and after. Until all changes are on the disk, the old and the new file of each target
have temporary names beside it, with the key of the record. So whatever stops a run, an error, an
interrupt, SIGKILL or the power, the same function undoes it: :func:`play_back`.

A record may come out of an archive, so nothing is done by it without a look. The very same
record must lie in every directory that it names. What replaces a target or is removed must have a
temporary name with the key of the record, and be the file that the record describes; and so must
what is replaced, as a hard link.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

from onnxkvrename.errors import ModelError, ReadError, WriteError
from onnxkvrename.storage.copy import write_all
from onnxkvrename.storage.read import MAX_PATH_LENGTH, close_quietly, open_file, resolve_path
from onnxkvrename.storage.temp_file import (
    NO_LINK_ERRNOS,
    RECORD_SUFFIX,
    TEMP_NAME,
    TEMP_PREFIX,
    ReadyFile,
    build_file_key,
    build_temp_name,
    list_temp_paths,
    put_in_place,
    remove_temp_files,
    translate_write_errors,
)

MAX_RECORD_BYTES = 1 << 22
"""Enough for 20,000 files with names of some 100 bytes."""
_NO_SYNC_ERRNOS = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)
"""Errors of a file system that cannot flush a directory by itself."""

_NOTHING_ERRNOS = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG)
"""Errors of a path at which there is nothing."""

State = Literal["new", "old", "changed"]
"""Of a target: has its new file, has what it had before, or something else since then."""


class Identity(NamedTuple):
    """The identity of a file, which stays when the file is renamed or linked."""

    inode: int
    size: int
    mtime_ns: int

    @classmethod
    def read(cls, path: Path) -> Identity | None:
        """Return the identity of what is at a path, ``None`` for nothing; links are not followed.

        Raises:
            OSError: This cannot be determined.
        """
        status = _read_status(path)
        if status is None:
            return None
        return cls(status.st_ino, status.st_size, status.st_mtime_ns)


class FileChange(NamedTuple):
    """A file that is replaced or made.

    Attributes:
        target: Its path.
        key: The key of its temporary names.
        old: The file that was there, ``None`` for nothing.
        new: The file that comes there.
    """

    target: Path
    key: str
    old: Identity | None
    new: Identity

    def is_made(self) -> bool:
        """Return whether the target has its new file; for the run that has written it.

        Raises:
            OSError: This cannot be determined.
        """
        return Identity.read(self.target) == self.new


class TargetState(NamedTuple):
    """The state of a target.

    Attributes:
        path: The file.
        state: Whether it is new, old, or was changed since.
    """

    path: Path
    state: State


class Record(NamedTuple):
    """The record of one run.

    Attributes:
        key: The key of its temporary names.
        directories: Where the record lies: each directory that has a target.
        files: The files, in the order in which they get their places.
        made: The directories that the run makes, the outer ones first.
    """

    key: str
    directories: tuple[Path, ...]
    files: tuple[FileChange, ...]
    made: tuple[Path, ...] = ()

    def list_targets(self) -> list[TargetState]:
        """Return the targets as they are now.

        Raises:
            OSError: The state of one cannot be determined.
        """
        return [TargetState(change.target, self._find_state(change)) for change in self.files]

    def find_states(self) -> set[State]:
        """Return the states of all targets.

        Raises:
            OSError: The state of one cannot be determined.
        """
        return {target.state for target in self.list_targets()}

    def is_half_done(self) -> bool:
        """Return whether the run has changed some targets, and others not.

        Raises:
            OSError: The state of one cannot be determined.
        """
        return {"new", "old"} <= self.find_states()

    def knows_a_file(self) -> bool:
        """Return whether a target has its old or its new file, with or without the link to it.

        Raises:
            OSError: This cannot be determined.
        """
        found = ((Identity.read(change.target), change) for change in self.files)
        return any(file is not None and file in (own.old, own.new) for file, own in found)

    def find_fault(self) -> WriteError | None:
        """Return why the run cannot be undone.

        Raises:
            OSError: This cannot be determined.
        """
        for change in self.files:
            if change.old is None or self._find_state(change) != "new":
                continue
            kept = self.build_old_path(change)
            status = _read_status(kept)
            kinds = {stat.S_IFREG, stat.S_IFLNK}
            is_ours = status is not None and stat.S_IFMT(status.st_mode) in kinds
            if not is_ours or Identity.read(kept) != change.old:
                return WriteError(
                    "has no copy of its old content",
                    path=str(change.target),
                    hint="to finish the work, run the stopped command again",
                )
        return None

    def _find_state(self, change: FileChange) -> State:
        found = Identity.read(change.target)
        if found is None:
            return "old" if change.old is None else "changed"
        for state, identity in (("new", change.new), ("old", change.old)):
            if found == identity and self._is_kept(change, state):
                return "new" if state == "new" else "old"
        return "changed"

    def _is_kept(self, change: FileChange, kind: Any) -> bool:
        """Return whether what is at a target is a file of the run, by the link that it keeps."""
        kept = self._build_kept_path(change, kind)
        status, kept_status = os.lstat(change.target), _read_status(kept)
        if kept_status is None:
            return not self._can_link(change.target)
        return os.path.samestat(status, kept_status)

    def _can_link(self, target: Path) -> bool:
        probe = target.parent / build_temp_name(self.key, build_file_key(), "probe")
        try:
            os.link(target, probe, follow_symlinks=False)
        except OSError as error:
            return error.errno not in NO_LINK_ERRNOS
        os.unlink(probe)
        return True

    def build_old_path(self, change: FileChange) -> Path:
        """Return the path at which the old file of a change is kept."""
        return self._build_kept_path(change, "old")

    def _build_kept_path(self, change: FileChange, kind: Literal["new", "old"]) -> Path:
        return change.target.parent / build_temp_name(self.key, change.key, kind)


def build_record_path(directory: Path, key: str) -> Path:
    """Return the path of a record in a directory."""
    return directory / f"{TEMP_PREFIX}{key}{RECORD_SUFFIX}"


def build_record(key: str, files: Sequence[ReadyFile], made: Iterable[Path]) -> Record:
    """Return the record of changes that are about to be made.

    Args:
        key: The key of the run.
        files: The files, with temporary names of this key.
        made: The directories that the run has made, the outer ones first.

    Raises:
        KvRenameError: A file cannot be looked at.
    """
    parents = dict.fromkeys(file.target.parent for file in files)
    places = {parent: Path(resolve_path(parent)) for parent in parents}
    changes = []
    for file in files:
        with translate_write_errors(file.display_path):
            new = Identity.read(file.temp_path)
            if new is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            target = places[file.target.parent] / file.target.name
            old = Identity.read(target) if file.overwrites_target else None
            key_of_file = file.temp_path.name.split("-")[-2]
            changes.append(FileChange(target, key_of_file, old, new))
    return Record(
        key,
        tuple(dict.fromkeys(places.values())),
        tuple(changes),
        tuple(Path(resolve_path(directory)) for directory in made),
    )


def write_record(record: Record) -> None:
    """Write a record, and keep the old files by hard links; both are then on the disk.

    Raises:
        WriteError: That failed. What there is of it is removed by :func:`remove_record`.
    """
    content = _serialize_record(record)
    if len(content) > MAX_RECORD_BYTES:
        raise WriteError(
            "has too many files for one run",
            path=str(record.directories[0]),
            hint="rename fewer models at a time",
        )
    for directory in record.directories:
        path = build_record_path(directory, record.key)
        part = directory / build_temp_name(record.key, build_file_key(), "probe")
        with translate_write_errors(path):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
            descriptor = os.open(part, flags | getattr(os, "O_CLOEXEC", 0), 0o600)
            try:
                write_all(descriptor, content)
                os.fsync(descriptor)
            finally:
                close_quietly(descriptor)
            if _read_status(path) is None:
                os.rename(part, path)
            else:  # until now, it was about new directories
                os.replace(part, path)
    for change in record.files:
        if change.old is None:
            continue
        kept = change.target.parent / build_temp_name(record.key, change.key, "old")
        with translate_write_errors(change.target):
            try:
                os.link(change.target, kept, follow_symlinks=False)
            except OSError as error:
                if error.errno not in NO_LINK_ERRNOS:
                    raise
    above_new = (path.parent for path in record.made if record.files)
    for directory in dict.fromkeys([*record.directories, *above_new]):
        sync_directory(directory)


def remove_record(record: Record, kept: Iterable[str] = (), *, links_only: bool = False) -> bool:
    """Remove a record after all that it keeps; what the system refuses to remove stays.

    Args:
        record: The record of a run that is complete, or undone.
        kept: Names that are never removed, as the run reads them.
        links_only: Of what it keeps, remove nothing but further names of files.

    Returns:
        Whether all that the record keeps was looked at and removed, and so the record too.
    """
    try:
        directories = [*record.directories, *record.made]
        directories = [path for path in directories if _read_status(path) is not None]
        for directory in directories:
            remove_temp_files(directory, record.key, kept, links_only=links_only, any_owner=True)
        if not links_only and any(len(list_temp_paths(d, record.key)) > 1 for d in directories):
            return False  # only with the record, the next run knows that it may remove the rest
    except OSError:
        return False
    for directory in directories:
        with suppress(OSError):
            os.unlink(build_record_path(directory, record.key))
    return True


def play_back(record: Record) -> None:
    """Restore the old files of a run, and bring that to the disk.

    Targets that were changed since are left as they are. Every step is one call, and what is
    done stays: if one fails, the same call continues there. The record stays.

    Args:
        record: The record of the run; its directories are locked.

    Raises:
        WriteError: A file cannot be restored.
        OSError: The state of a file cannot be determined.
    """
    fault = record.find_fault()
    if fault is not None:
        raise fault
    for directory in record.directories:
        for path in list_temp_paths(directory, record.key):
            if path.name.endswith("-move"):
                path.unlink(missing_ok=True)
    states = [target.state for target in record.list_targets()]
    for change, state in reversed(list(zip(record.files, states, strict=True))):
        if state != "new":
            continue
        with translate_write_errors(change.target):
            if change.old is None:
                os.unlink(change.target)
            else:
                put_in_place(record.build_old_path(change), change.target, replaces=True)
    for directory in record.directories:
        sync_directory(directory)


def remove_made_directories(made: Iterable[Path]) -> None:
    """Remove directories that a run has made, as far as they are empty."""
    for directory in reversed(list(made)):
        with suppress(OSError):
            os.rmdir(directory)


def sync_directory(directory: Path) -> None:
    """Flush the names in a directory to the disk.

    Raises:
        WriteError: That failed: the names are in effect, but may be lost with the power.
    """
    if os.name == "nt":  # pragma: no cover - directories cannot be opened there
        return
    try:
        descriptor = os.open(directory, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
        try:
            os.fsync(descriptor)
        finally:
            close_quietly(descriptor)
    except OSError as error:
        if error.errno not in _NO_SYNC_ERRNOS:
            raise WriteError(
                f"could not be flushed to the disk: {error.strerror}", path=str(directory)
            ) from None


def read_record(path: Path) -> Record:
    """Return the record in a file, if the same one lies in every directory that it names.

    Paths in it are relative to the directory that contains all, so a tree may be moved with it.

    Args:
        path: The file, in a directory without links above it.

    Raises:
        ReadError: It belongs to another user, or cannot be read.
        ModelError: It is not a record, or there is no such record in a directory that it names.
    """
    match = TEMP_NAME.fullmatch(path.name)
    content = _read_content(path)
    try:
        if match is None or content is None:
            raise ValueError
        for record in _parse_record(match["key"], content, path.parent):
            paths = (build_record_path(place, record.key) for place in record.directories)
            if all(
                _is_same_file(path, other) or _read_content(other) == content for other in paths
            ):
                return record
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError):
        raise ModelError("skipped: is not a record of a run", path=str(path)) from None
    except OSError as error:
        raise ReadError(f"cannot be read: {error.strerror}", path=str(path)) from None
    raise ModelError("skipped: a directory that it names has no such record", path=str(path))


def _is_same_file(path: Path, other: Path) -> bool:
    """Return whether two paths lead to one file, which need not be read for each of its names."""
    status = _read_status(other)
    return status is not None and os.path.samestat(status, os.lstat(path))


def _read_content(path: Path) -> bytes | None:
    """Return what is in a record, ``None`` for what cannot be one.

    Raises:
        ReadError: It belongs to another user, or cannot be read.
    """
    status = _read_status(path)
    if status is None or not stat.S_ISREG(status.st_mode) or status.st_size > MAX_RECORD_BYTES:
        return None
    if hasattr(os, "geteuid") and status.st_uid != os.geteuid():
        raise ReadError(
            f"skipped: is a record of another user (user ID {status.st_uid})",
            path=str(path),
        )
    with open_file(path) as file:
        return file.read(0, MAX_RECORD_BYTES)


def _serialize_record(record: Record) -> bytes:
    import json  # only for runs that change several files

    common = os.path.commonpath([*record.directories, *record.made])
    places = {directory: place for place, directory in enumerate(record.directories)}
    document = {
        "directories": [os.path.relpath(path, common) for path in record.directories],
        "files": [
            [places[file.target.parent], file.target.name, file.key, file.old, file.new]
            for file in record.files
        ],
        "made": [os.path.relpath(path, common) for path in record.made],
    }
    return (json.dumps(document, separators=(",", ":")) + "\n").encode("ascii")


def _parse_record(key: str, content: bytes, found: Path) -> Iterator[Record]:
    """Yield the record for each place of the tree that fits the directory it was found in.

    Raises:
        ValueError, TypeError, LookupError, AttributeError, ArithmeticError: It is not a record.
    """
    import json

    document = json.loads(content)
    names: list[tuple[str, ...]] = [_split(path) for path in document["directories"]]
    made = [_split(path) for path in document["made"]]
    ordered = sorted(names)
    if len(set(names)) < len(names):
        raise ValueError
    # Before there are files, nothing but what is empty or has the key is removed.
    for parts in (
        made if document["files"] else ()
    ):  # above a record; the names that begin with these parts follow them
        if ordered[bisect_left(ordered, parts)][: len(parts)] != parts:
            raise ValueError
    roots = set[Path]()
    for parts in names:
        depth = len(found.parts) - len(parts)
        if depth > 0 and found.parts[depth:] == parts:
            roots.add(Path(*found.parts[:depth]))
    for root in roots:
        yield Record(
            key,
            tuple(root.joinpath(*parts) for parts in names),
            tuple(
                FileChange(
                    root.joinpath(*names[place], _check_name(name)),
                    _check_key(file_key),
                    None if old is None else Identity(*map(int, old)),
                    Identity(*map(int, new)),
                )
                for place, name, file_key, old, new in document["files"]
            ),
            tuple(root.joinpath(*parts) for parts in made),
        )


def _split(path: str) -> tuple[str, ...]:
    """Return the parts of a relative path that leads down, or raise :class:`ValueError`."""
    if len(path) > MAX_PATH_LENGTH:
        raise ValueError(path[:100])
    return () if path == os.curdir else tuple(_check_name(part) for part in path.split(os.sep))


def _check_name(name: str) -> str:
    """Return a name that can be one of a file in a directory, or raise :class:`ValueError`."""
    separators = (os.sep, os.altsep or os.sep, "\0")
    if name in ("", os.curdir, os.pardir) or any(text in name for text in separators):
        raise ValueError(name)
    os.fsencode(name)
    return name


def _check_key(key: str) -> str:
    """Return a key of a file, or raise :class:`ValueError`."""
    if not re.fullmatch("[0-9a-f]{12}", key):
        raise ValueError(key)
    return key


def _read_status(path: Path) -> os.stat_result | None:
    """Return the status of what is at a path, ``None`` for nothing; links are not followed."""
    try:
        return os.lstat(path)
    except OSError as error:
        if error.errno in _NOTHING_ERRNOS:
            return None
        raise
