"""End a run that stopped half way, by the record that it left."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from onnxkvrename.errors import ModelError, WriteError
from onnxkvrename.storage.clean_up import RECORD_SUFFIX, remove_stale_temp_files
from onnxkvrename.storage.directories import (
    remove_directory,
    rename_directory,
)
from onnxkvrename.storage.intent import clear_intent
from onnxkvrename.storage.lock import hold_locks
from onnxkvrename.storage.read import is_directory, resolve_path
from onnxkvrename.storage.record import FileChange, Identity, Record, read_record
from onnxkvrename.storage.temp_file import (
    TEMP_PREFIX,
    find_stale_temp_files,
    resolve_moved_path,
    translate_write_errors,
)
from onnxkvrename.storage.transaction import sync_directory

_FINISH_HINT = "the command that was stopped finishes the work, too"


class HalfDoneRun(NamedTuple):
    """A run that stopped half way.

    Attributes:
        path: Its record.
        record: What the record says.
    """

    path: Path
    record: Record


def find_half_done_runs(paths: Iterable[Path]) -> list[HalfDoneRun]:
    """Return the runs that stopped half way, the last one first.

    Args:
        paths: Directories, which are searched with all below them but for what links lead to;
            of a file, the directory it is in.

    Raises:
        KvRenameError: A path cannot be read; or a record belongs to another user, or names
            a file outside the directories.
    """
    roots = [_find_root(path) for path in paths]
    runs: dict[str, tuple[int, HalfDoneRun]] = {}
    for path in sorted({path for root in roots for path in _find_record_paths(root)}):
        with _translate_read_errors(path):
            status = os.lstat(path)
        key = path.name.rpartition(RECORD_SUFFIX)[0].rpartition("-")[2]  # that of all its names
        record = read_record(path) if stat.S_ISREG(status.st_mode) else None
        if record is None or key in runs or not record.is_half_done():
            continue
        _check_trusted(path, status, record, roots)
        runs[key] = status.st_mtime_ns, HalfDoneRun(path, record)
    return [run for _, run in sorted(runs.values(), reverse=True)]


def remove_ended_runs(directories: Iterable[Path]) -> None:
    """Remove what runs of this user had kept in directories, after another one finished the work.

    A run that is still half done, or alive, keeps its files.

    Args:
        directories: Directories that may have records.

    Raises:
        KvRenameError: A directory or record cannot be read, or a file cannot be removed.
    """
    for path in [path for directory in directories for path in _list_record_paths(directory)]:
        with _translate_read_errors(path):
            status = os.lstat(path)
            if not stat.S_ISREG(status.st_mode) or _find_owner_fault(status) is not None:
                continue
            record = read_record(path)
            if record is None or record.is_half_done():
                continue
            kept = record.list_kept_paths()
        with suppress(WriteError), hold_locks(_list_locked_paths(record)):
            _remove_kept_paths(kept)


def end_run(run: HalfDoneRun, *, undo: bool) -> None:
    """Restore the old files of a run, or put its new ones in place, and remove what it left.

    Every step is one rename, and what is done stays: if one fails, the record stays as well,
    and the same call goes on there. Targets that were changed since are left as they are.

    Args:
        run: The run.
        undo: Whether to restore the old files.

    Raises:
        WriteError: A file cannot be restored or put in place, or another run is at work.
    """
    record = run.record
    moves = {move.source: move.target for move in record.directories if not move.is_new}
    with _translate_read_errors(run.path):
        present = record.find_moves()
    locked = _list_locked_paths(record)
    remaining = {old: new for old, new in moves.items() if (old in present) is undo}
    turned = {new: old for old, new in remaining.items()} if undo else remaining
    with hold_locks(locked, turned):
        with _translate_read_errors(run.path):
            _check_possible(record, undo=undo)
            kept = record.list_kept_paths()
            if undo:
                _undo_run(record)
            else:
                _finish_run(record)
        kept = [resolve_moved_path(path, turned) for path in kept]
        for directory in dict.fromkeys(path.parent for path in kept):
            sync_directory(directory)
        _remove_kept_paths(kept)
        clear_intent(moves)
        left = (resolve_moved_path(path, turned) for path in locked)
        remove_stale_temp_files(find_stale_temp_files(left))


def _list_locked_paths(record: Record) -> list[Path]:
    """Return the paths that a run locks, by the names that directories have now."""
    with _translate_read_errors(record.paths[0]):
        moves = record.find_moves()
    targets = [file.target for file in record.files]
    for move in record.directories:
        targets += [move.target] if move.is_new else [move.source, move.target]
    paths = dict.fromkeys(resolve_moved_path(target, moves) for target in targets)
    return [path for path in paths if is_directory(path.parent)]


def _undo_run(record: Record) -> None:
    for move in reversed(record.directories):
        if move.find_state() == "new":
            rename_directory(move.target, move.source)
    for file in reversed(record.files):
        with translate_write_errors(file.target):
            if file.find_state({}) != "new":
                continue
            if file.old is None:
                os.unlink(file.target)
            elif file.backup is not None:
                os.replace(file.backup, file.target)


def _finish_run(record: Record) -> None:
    for move in record.directories:
        if move.is_new and move.find_state() == "old":
            rename_directory(move.source, move.target)
    moves = record.find_moves()
    for file in record.files:
        target = resolve_moved_path(file.target, moves)
        with translate_write_errors(target):
            if file.find_state(moves) == "old":
                os.replace(resolve_moved_path(file.ready, moves), target)
    for move in record.directories:
        if not move.is_new and move.find_state() == "old":
            rename_directory(move.source, move.target)


def _remove_kept_paths(paths: Iterable[Path]) -> None:
    """Remove what a run has kept; its record comes last, so that a kill leaves no riddle."""
    for path in sorted(paths, key=lambda path: path.name.endswith(RECORD_SUFFIX)):
        with translate_write_errors(path):
            status = Identity.read(path)
            if status is None:
                continue
            if stat.S_ISDIR(os.lstat(path).st_mode):
                remove_directory(path)
            else:
                os.unlink(path)


def _check_possible(record: Record, *, undo: bool) -> None:
    """Raise for a file that is needed and is not the one that the record describes."""
    moves = record.find_moves()
    for file in record.files:
        state = file.find_state(moves)
        if undo and state == "new" and file.old is not None:
            _check_kept_file(file, file.backup, file.old, moves, "has no copy of its old content")
        elif not undo and state == "old":
            _check_kept_file(file, file.ready, file.new, moves, "has lost its new content")


def _check_kept_file(
    file: FileChange,
    path: Path | None,
    identity: Identity,
    moves: Mapping[Path, Path],
    fault: str,
) -> None:
    path = path and resolve_moved_path(path, moves)
    if path is not None and Identity.read(path) == identity:
        if stat.S_ISREG(os.lstat(path).st_mode):
            return
        fault = "was no regular file"
    raise WriteError(fault, path=str(file.target), hint=_FINISH_HINT)


def _find_root(path: Path) -> Path:
    """Return the directory to search, without links.

    Raises:
        KvRenameError: There is nothing at the path, or it cannot be read.
    """
    with _translate_read_errors(path):
        is_directory = stat.S_ISDIR(os.stat(path).st_mode)
    return Path(resolve_path(path if is_directory else path.absolute().parent))


def _find_record_paths(directory: Path) -> Iterator[Path]:
    pending = [directory]
    while pending:
        current = pending.pop()
        with _translate_read_errors(current), os.scandir(current) as entries:
            pending += [Path(entry.path) for entry in entries if _is_own_directory(entry)]
        yield from _list_record_paths(current)


def _is_own_directory(entry: os.DirEntry[str]) -> bool:
    return entry.is_dir(follow_symlinks=False)


def _list_record_paths(directory: Path) -> list[Path]:
    with _translate_read_errors(directory):
        names = os.listdir(directory)
    return [
        directory / name
        for name in sorted(names)
        if name.startswith(TEMP_PREFIX) and name.endswith(RECORD_SUFFIX)
    ]


def _find_owner_fault(status: os.stat_result) -> str | None:
    if hasattr(os, "geteuid") and status.st_uid != os.geteuid():
        return f"is a record of another user (user ID {status.st_uid})"
    return None


def _check_trusted(
    path: Path, status: os.stat_result, record: Record, roots: Iterable[Path]
) -> None:
    """Raise for a record of another user, or one that leads out of the directories."""
    if (fault := _find_owner_fault(status)) is not None:
        raise ModelError(fault, path=str(path), hint="recover as this user")
    with _translate_read_errors(path):
        moves = record.find_moves()
    targets = [file.target for file in record.files]
    targets += [move.target for move in record.directories]
    for target in targets:
        directory = resolve_moved_path(target, moves).parent
        if resolve_path(directory) != str(directory):
            raise ModelError(f"leads through a link to {directory}", path=str(path))
        if not any(root == directory or root in directory.parents for root in roots):
            raise ModelError(
                f"names a file in {directory}, too",
                path=str(path),
                hint="give this directory as well",
            )


@contextmanager
def _translate_read_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ModelError(f"cannot be read: {error.strerror}", path=str(path)) from None
