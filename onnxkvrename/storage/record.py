"""Records of runs that change several files: what is old, what is new, and where both are kept.

A record is written before the first change of a transaction that replaces files, and removed
after the last one. So it is there after a crash, and after an undo that the disk refused. It is
a JSON file under a temporary name, linked into each directory that has a file of the run.
While some files are old and some are new, no clean-up removes what it names.

A record may come from any user who can write to the directory, or out of an archive, so nothing
it says is believed without a look: its owner comes first, then its size; each path must have the
form that this program gives it, and each file must be the very one that the record describes.
What is not such a record is not a reason to refuse or to remove anything.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

from onnxkvrename.documents import ObjectReader, UnreadableTextError, parse_json
from onnxkvrename.errors import WriteError
from onnxkvrename.storage.copy import write_all
from onnxkvrename.storage.lock import link_open_file
from onnxkvrename.storage.read import close_quietly, open_file
from onnxkvrename.storage.temp_file import (
    RECORD_SUFFIX,
    TEMP_PREFIX,
    ReadyFile,
    build_temp_prefix,
    resolve_moved_path,
    translate_write_errors,
)

_MAX_RECORD_BYTES = 1 << 23
"""Enough for 10,000 files with paths of some 400 bytes."""
_MAX_PATH_BYTES = 4096
_MAX_NAME_BYTES = 255
_MAX_PATH_PARTS = 128
_TEMP_NAME_END = re.compile(r"[0-9a-f]{24}")
_RECORD_NAME = re.compile(
    rf"{re.escape(TEMP_PREFIX)}[0-9a-f]{{8}}-[0-9a-f]{{24}}{re.escape(RECORD_SUFFIX)}"
)

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
        try:
            status = os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return cls(status.st_ino, status.st_size, status.st_mtime_ns)


class FileChange(NamedTuple):
    """A file that is to be replaced or made.

    Attributes:
        target: Its path.
        old: The file that was there, ``None`` for nothing.
        new: The file that comes there.
        backup: The second name of the old file, ``None`` where there is none.
        ready: The name of the new file until it has its place.
    """

    target: Path
    old: Identity | None
    new: Identity
    backup: Path | None
    ready: Path

    def find_state(self, moves: Mapping[Path, Path]) -> State:
        """Return the state of the target after directories were renamed.

        Raises:
            OSError: This cannot be determined.
        """
        found = Identity.read(resolve_moved_path(self.target, moves))
        if found == self.new:
            return "new"
        return "old" if found == self.old else "changed"


class DirectoryMove(NamedTuple):
    """A directory that is to be renamed.

    Attributes:
        source: Its path before; a temporary one if the directory is new.
        target: Its path after.
        inode: Its number.
    """

    source: Path
    target: Path
    inode: int

    @property
    def is_new(self) -> bool:
        """Whether the directory was made by the run."""
        return self.source.name.startswith(TEMP_PREFIX)

    def find_state(self) -> State:
        """Return whether the directory has its new name.

        Raises:
            OSError: This cannot be determined.
        """
        found = Identity.read(self.target)
        if found is None:
            source = Identity.read(self.source)
            return "old" if source is not None and source.inode == self.inode else "changed"
        return "new" if found.inode == self.inode else "changed"


class Record(NamedTuple):
    """The record of one run.

    Attributes:
        files: The files, in the order in which they get their places.
        directories: The directories: new ones get their names before the files, others after.
        paths: The names of the record itself.
    """

    files: tuple[FileChange, ...]
    directories: tuple[DirectoryMove, ...]
    paths: tuple[Path, ...]

    def find_moves(self) -> dict[Path, Path]:
        """Return the old directories that have their new names.

        Raises:
            OSError: This cannot be determined.
        """
        return {
            move.source: move.target
            for move in self.directories
            if not move.is_new and move.find_state() == "new"
        }

    def find_states(self) -> dict[Path, State]:
        """Return the state of each target.

        Raises:
            OSError: The state of one cannot be determined.
        """
        moves = self.find_moves()
        states: dict[Path, State] = {move.target: move.find_state() for move in self.directories}
        return states | {
            resolve_moved_path(file.target, moves): file.find_state(moves) for file in self.files
        }

    def is_half_done(self) -> bool:
        """Return whether some targets are new while others are as they were; if unknown, yes."""
        try:
            return {"new", "old"} <= set(self.find_states().values())
        except OSError:
            return True

    def find_kept_identities(self) -> dict[Path, Identity | int]:
        """Return the files kept beside targets: the identity of a file, the inode of a directory.

        Raises:
            OSError: The present path of one cannot be determined.
        """
        moves = self.find_moves()
        kept: dict[Path, Identity | int] = {}
        for file in self.files:
            kept[resolve_moved_path(file.ready, moves)] = file.new
            if file.backup is not None and file.old is not None:
                kept[resolve_moved_path(file.backup, moves)] = file.old
        for move in self.directories:
            if move.is_new:
                kept[resolve_moved_path(move.source, moves)] = move.inode
        return kept

    def list_directories(self) -> set[Path]:
        """Return the directories that have a target, by the names that they have now.

        Raises:
            OSError: The present name of one cannot be determined.
        """
        moves = self.find_moves()
        targets = [file.target for file in self.files]
        targets += [move.target for move in self.directories]
        return {resolve_moved_path(target, moves).parent for target in targets}


def plan_file_change(file: ReadyFile, backup: Path | None) -> FileChange:
    """Return the change that moving a file into place will make.

    Raises:
        OSError: The status of the file, or of what it replaces, cannot be read.
    """
    new = Identity.read(file.temp_path)
    if new is None:
        raise FileNotFoundError(file.temp_path)
    return FileChange(file.target, Identity.read(file.target), new, backup, file.temp_path)


def write_record(
    files: Sequence[FileChange], directories: Sequence[DirectoryMove]
) -> tuple[Path, ...]:
    """Write the record of changes that are about to be made, and flush it to the disk.

    Args:
        files: The files, at least one.
        directories: The directories.

    Returns:
        The paths of the record: one in each directory where a file gets its place, and one
        beside each directory that is renamed. The names in the directories are not synced.

    Raises:
        WriteError: It cannot be written. Nothing of it is left.
    """
    key = os.urandom(12).hex()
    by_directory: dict[Path, Path] = {}
    for target in (*(file.target for file in files), *(move.source for move in directories)):
        name = f"{build_temp_prefix(target)}{key}{RECORD_SUFFIX}"
        by_directory.setdefault(target.parent, target.parent / name)
    record = Record(tuple(files), tuple(directories), tuple(by_directory.values()))
    content = _serialize_record(record)
    if len(content) > _MAX_RECORD_BYTES or not _is_well_formed(record):
        raise WriteError(
            "too many files, or too long paths, for one run",
            path=str(files[0].target),
            hint="rename fewer models at a time",
        )
    first, *others = record.paths
    try:
        with translate_write_errors(first):
            descriptor = _write_new_file(first, content)
        try:
            for path in others:
                with translate_write_errors(path):
                    try:
                        link_open_file(descriptor, first, path)
                    except OSError:  # links are not possible there: a copy serves as well
                        if Identity.read(path) is None:
                            close_quietly(_write_new_file(path, content))
        finally:
            close_quietly(descriptor)
    except BaseException:
        remove_record(record.paths)
        raise
    return record.paths


def remove_record(paths: Iterable[Path]) -> None:
    """Remove a record; the rest of one that is no longer needed is stale."""
    for path in paths:
        with suppress(OSError):  # the next run removes it
            os.unlink(path)


def read_record(path: Path, status: os.stat_result) -> Record | None:
    """Return the record in a file, ``None`` if it holds none.

    Every path in it has the form that :func:`write_record` gives it. If the record was moved
    together with directories above it, so are its paths.

    Args:
        path: The file.
        status: Its status without following links; the caller has judged the owner by it.

    Raises:
        KvRenameError: The file cannot be read.
    """
    if find_record_fault(status) is not None:
        return None
    with open_file(path) as file:
        if not os.path.samestat(file.status, status) or file.size > _MAX_RECORD_BYTES:
            return None
        content = file.read(0, file.size)
    try:
        document = ObjectReader(parse_json(content.decode("utf-8")))
        record = Record(
            tuple(map(_parse_file, document.read_objects("files"))),
            tuple(map(_parse_move, document.read_objects("directories"))),
            tuple(map(Path, document.read_strings("records"))),
        )
    except (UnreadableTextError, AttributeError, TypeError, ValueError, RecursionError):
        return None
    if not _is_well_formed(record):
        return None
    record = _relocate(record, path)
    return record if path in record.paths and _is_well_formed(record) else None


def find_record_fault(status: os.stat_result) -> str | None:
    """Return why a file cannot be a record of ours, whatever is in it."""
    if not stat.S_ISREG(status.st_mode):
        return "is not a regular file"
    if status.st_size > _MAX_RECORD_BYTES:
        return f"is not a record of a run: it has {status.st_size:,} bytes"
    return None


def _write_new_file(path: Path, content: bytes) -> int:
    """Write a file, bring it to the disk, and return its descriptor."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    descriptor = os.open(path, flags | getattr(os, "O_CLOEXEC", 0), 0o644)
    try:
        write_all(descriptor, content)
        os.fsync(descriptor)
    except BaseException:
        close_quietly(descriptor)
        raise
    return descriptor


def _serialize_record(record: Record) -> bytes:
    import json  # only for runs that replace several files

    files = [
        {
            "target": str(file.target),
            "old": file.old,
            "new": file.new,
            "backup": file.backup and file.backup.name,
            "ready": file.ready.name,
        }
        for file in record.files
    ]
    moves = [
        {"source": str(move.source), "target": str(move.target), "inode": move.inode}
        for move in record.directories
    ]
    document = {"files": files, "directories": moves, "records": [str(p) for p in record.paths]}
    return (json.dumps(document, separators=(",", ":")) + "\n").encode("ascii")


def _parse_file(values: ObjectReader) -> FileChange:
    target = Path(values.read_string("target"))
    old = None if values.is_null("old") else Identity(*values.read_list("old", "numbers", int))
    new = Identity(*values.read_list("new", "numbers", int))
    backup = values.read_string_or_null("backup")
    ready = target.parent / values.read_string("ready")
    return FileChange(target, old, new, target.parent / backup if backup else None, ready)


def _parse_move(values: ObjectReader) -> DirectoryMove:
    source, target = Path(values.read_string("source")), Path(values.read_string("target"))
    return DirectoryMove(source, target, values.read_integer("inode"))


def _is_well_formed(record: Record) -> bool:
    """Return whether no path of a record leads anywhere but beside the targets it names."""
    targets = [file.target for file in record.files]
    targets += [path for move in record.directories for path in (move.source, move.target)]
    directories = {target.parent for target in targets}
    return (
        all(_is_plain(path) for path in (*targets, *record.paths))
        and all(
            _is_temp_path_of(path, file.target)
            for file in record.files
            for path in (file.ready, file.backup)
            if path is not None
        )
        and all(
            move.source.parent == move.target.parent
            and (not move.is_new or _is_temp_path_of(move.source, move.target))
            for move in record.directories
        )
        and all(
            path.parent in directories and _RECORD_NAME.fullmatch(path.name)
            for path in record.paths
        )
    )


def _relocate(record: Record, path: Path) -> Record:
    """Return the record with the paths that follow from where it was found."""
    root, moved_root = max(
        (_split_common_end(listed, path) for listed in record.paths),
        key=lambda roots: -len(roots[0].parts),
        default=(path, path),
    )
    if root == moved_root:
        return record
    moves = {root: moved_root}
    files = []
    for file in record.files:
        backup = file.backup and resolve_moved_path(file.backup, moves)
        target, ready = (resolve_moved_path(name, moves) for name in (file.target, file.ready))
        files.append(file._replace(target=target, backup=backup, ready=ready))
    directories = [
        move._replace(
            source=resolve_moved_path(move.source, moves),
            target=resolve_moved_path(move.target, moves),
        )
        for move in record.directories
    ]
    paths = tuple(resolve_moved_path(listed, moves) for listed in record.paths)
    return Record(tuple(files), tuple(directories), paths)


def _split_common_end(first: Path, second: Path) -> tuple[Path, Path]:
    """Return two paths without the last parts that they have in common."""
    while first.name == second.name and first != first.parent and second != second.parent:
        first, second = first.parent, second.parent
    return first, second


def _is_plain(path: Path) -> bool:
    """Return whether a path can be that of a file: absolute, encodable, and not too long."""
    try:
        text = os.fsencode(path)
    except UnicodeEncodeError:
        return False
    return (
        path.is_absolute()
        and bool(path.name)
        and b"\0" not in text
        and len(text) < _MAX_PATH_BYTES
        and len(path.parts) <= _MAX_PATH_PARTS
        and ".." not in path.parts
        and all(len(os.fsencode(part)) <= _MAX_NAME_BYTES for part in path.parts)
    )


def _is_temp_path_of(path: Path, target: Path) -> bool:
    prefix = build_temp_prefix(target)
    return (
        path.parent == target.parent
        and path.name.startswith(prefix)
        and _TEMP_NAME_END.fullmatch(path.name, len(prefix)) is not None
    )
