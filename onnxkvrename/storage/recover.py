"""End a run that stopped half way, by the record that it left."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from onnxkvrename.errors import KvRenameError, ModelError, WriteError
from onnxkvrename.storage.clean_up import remove_stale_temp_files
from onnxkvrename.storage.directories import (
    remove_directory,
    rename_directory,
)
from onnxkvrename.storage.intent import clear_intent
from onnxkvrename.storage.lock import hold_locks
from onnxkvrename.storage.read import is_directory, resolve_path
from onnxkvrename.storage.record import (
    FileChange,
    Identity,
    Record,
    State,
    find_record_fault,
    read_record,
)
from onnxkvrename.storage.temp_file import (
    RECORD_SUFFIX,
    TEMP_NAME,
    TEMP_PREFIX,
    find_stale_temp_files,
    resolve_moved_path,
    translate_write_errors,
)
from onnxkvrename.storage.transaction import sync_directory

_FINISH_HINT = "to finish the work, run the stopped command again"


class HalfDoneRun(NamedTuple):
    """A run that stopped half way.

    Attributes:
        path: Its record.
        record: What the record says.
    """

    path: Path
    record: Record


class TargetState(NamedTuple):
    """The state of a target of a half done run.

    Attributes:
        path: The file or directory, by its present name.
        state: Whether it is new, old, or was changed since.
        kept: The other file: the old one of a new target, the new one of an old target;
            ``None`` for a directory, for what was changed, and where there was no old file.
    """

    path: Path
    state: State
    kept: Path | None


def list_target_states(run: HalfDoneRun) -> list[TargetState]:
    """Return the targets of a run as they are now.

    Raises:
        OSError: The state of one cannot be determined.
    """
    moves = run.record.find_moves()
    targets = [TargetState(move.target, move.find_state(), None) for move in run.record.directories]
    for file in run.record.files:
        state = file.find_state(moves)
        kept = {"new": file.backup, "old": file.ready, "changed": None}[state]
        path = resolve_moved_path(file.target, moves)
        targets.append(TargetState(path, state, kept and resolve_moved_path(kept, moves)))
    return targets


def find_half_done_runs(
    paths: Iterable[Path],
    report_skipped: Callable[[ModelError], None] = lambda _: None,
    *,
    is_recursive: bool = True,
) -> list[HalfDoneRun]:
    """Return the runs that stopped half way, the last one first.

    Args:
        paths: Directories, which are searched with all below them except what links lead to;
            of a file, the directory it is in.
        report_skipped: Called for each directory that cannot be searched, and for each record
            that is not to be trusted: it belongs to another user, is not one of ours, or names a
            file outside the directories.
        is_recursive: Whether to search what is below the directories as well.

    Raises:
        KvRenameError: There is nothing at a path, or it cannot be looked at.
    """
    roots = [_find_root(path) for path in paths]
    runs: dict[str, tuple[int, HalfDoneRun]] = {}
    for path in _find_paths(roots, _list_record_paths, report_skipped, is_recursive):
        key = path.name.rpartition(RECORD_SUFFIX)[0].rpartition("-")[2]  # that of all its names
        if key in runs:
            continue
        try:
            with _translate_read_errors(path):
                status = os.lstat(path)
                record = _read_own_record(path, status)
                if record.is_half_done():
                    _check_inside(path, record, roots)
                    runs[key] = status.st_mtime_ns, HalfDoneRun(path, record)
        except ModelError as error:
            report_skipped(error)
    return [run for _, run in sorted(runs.values(), reverse=True)]


def find_leftovers(paths: Iterable[Path]) -> list[Path]:
    """Return what runs of this user have beside their files: temporary files, copies and locks.

    A run that ends, or that fails, removes its own. So these are of runs that are still running
    or were killed; what a half done run needs is among them.

    Args:
        paths: As for :func:`find_half_done_runs`.

    Raises:
        KvRenameError: There is nothing at a path, or it cannot be looked at.
    """
    roots = [_find_root(path) for path in paths]
    return _find_paths(roots, _list_own_paths, lambda _: None)


def remove_ended_runs(directories: Iterable[Path]) -> None:
    """Remove what runs of this user had kept in directories, after another one finished the work.

    A run that is still half done, or alive, or that has a file in any other directory, keeps
    its files; so does one whose record is not to be trusted.

    Args:
        directories: The directories of the run that finished the work.

    Raises:
        KvRenameError: A directory cannot be read.
    """
    roots = {Path(resolve_path(directory)) for directory in directories}
    for path in [path for root in sorted(roots) for path in _list_record_paths(root)]:
        # If one is wrong, the work is still done, and the others are still ended.
        with suppress(KvRenameError), _translate_read_errors(path):
            status = os.lstat(path)
            record = _read_own_record(path, status)
            if not record.list_directories() <= roots or record.is_half_done():
                continue
            moves = record.find_moves()
            with hold_locks(_list_locked_paths(record)):
                _remove_kept_files(record.find_kept_identities())
                paths = [resolve_moved_path(path, moves) for path in record.paths]
                _remove_record(paths, record, status)


def end_run(run: HalfDoneRun, *, undo: bool) -> None:
    """Restore the old files of a run, or put its new ones in place, and remove what it left.

    Every step is one rename, and what is done stays: if one fails, the record stays as well,
    and the same call continues there. Targets that were changed since are left as they are.

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
            status = os.lstat(run.path)
            kept = record.find_kept_identities()
            if undo:
                _undo_run(record)
            else:
                _finish_run(record)
        kept = {resolve_moved_path(path, turned): identity for path, identity in kept.items()}
        paths = [resolve_moved_path(path, present) for path in record.paths]
        paths = [resolve_moved_path(path, turned) for path in paths]
        for directory in dict.fromkeys(path.parent for path in (*kept, *paths)):
            sync_directory(directory)
        _remove_kept_files(kept)
        _remove_record(paths, record, status)
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


def _remove_kept_files(kept: Mapping[Path, Identity | int]) -> None:
    """Remove what a run has kept, each only if it is what the record says."""
    for path, identity in kept.items():
        with translate_write_errors(path):
            found = Identity.read(path)
            if found is not None and isinstance(identity, int):
                if found.inode == identity and stat.S_ISDIR(os.lstat(path).st_mode):
                    remove_directory(path)
            elif found is not None and found == identity:
                os.unlink(path)


def _remove_record(paths: Iterable[Path], record: Record, status: os.stat_result) -> None:
    """Remove a record, after all that it names, so that a kill leaves no file without its record.

    Args:
        paths: Where it is now.
        record: The record, as it was read.
        status: The status of the file that it was read from.
    """
    for path in paths:
        with translate_write_errors(path), suppress(FileNotFoundError, NotADirectoryError):
            found_status = os.lstat(path)
            if os.path.samestat(found_status, status) or _is_copy(path, found_status, record):
                os.unlink(path)


def _is_copy(path: Path, status: os.stat_result, record: Record) -> bool:
    """Return whether a file is a copy of a record, where links were not possible."""
    if _find_owner_fault(status) is not None:
        return False
    copy = read_record(path, status)
    return copy is not None and [file.new for file in copy.files] == [
        file.new for file in record.files
    ]


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
        fault = "was not a regular file"
    raise WriteError(fault, path=str(file.target), hint=_FINISH_HINT)


def _find_root(path: Path) -> Path:
    """Return the directory to search for a path, without links.

    Raises:
        KvRenameError: There is nothing at the path, or it cannot be read.
    """
    with _translate_read_errors(path):
        try:
            is_directory = stat.S_ISDIR(os.stat(path).st_mode)
        except FileNotFoundError:
            raise ModelError("no such file or directory", path=str(path)) from None
    return Path(resolve_path(path if is_directory else path.absolute().parent))


def _find_paths(
    roots: Iterable[Path],
    list_paths: Callable[[Path], list[Path]],
    report_skipped: Callable[[ModelError], None],
    is_recursive: bool = True,
) -> list[Path]:
    """Return what `list_paths` lists in directories, and in all below them, each once."""
    found: set[Path] = set()
    pending = list(dict.fromkeys(roots))
    while pending:
        current = pending.pop()
        try:
            with _translate_read_errors(current), os.scandir(current) as entries:
                if is_recursive:
                    pending += [Path(entry.path) for entry in entries if _is_real_directory(entry)]
            found.update(list_paths(current))
        except ModelError as error:
            report_skipped(error)
    return sorted(found)


def _is_real_directory(entry: os.DirEntry[str]) -> bool:
    return entry.is_dir(follow_symlinks=False)


def _list_own_paths(directory: Path) -> list[Path]:
    with _translate_read_errors(directory):
        paths = [directory / name for name in os.listdir(directory) if TEMP_NAME.fullmatch(name)]
        return [path for path in paths if _find_owner_fault(os.lstat(path)) is None]


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


def _read_own_record(path: Path, status: os.stat_result) -> Record:
    """Return the record in a file of this user.

    Raises:
        ModelError: It belongs to another user, cannot be read, or is not a record.
    """
    if (fault := _find_owner_fault(status)) is not None:
        raise ModelError(f"skipped: {fault}", path=str(path), hint="run recover as this user")
    fault = find_record_fault(status)
    record = read_record(path, status)
    if record is None:
        raise ModelError(f"skipped: {fault or 'is not a record of a run'}", path=str(path))
    return record


def _check_inside(path: Path, record: Record, roots: Iterable[Path]) -> None:
    """Raise for a record that leads out of the directories."""
    for directory in sorted(record.list_directories()):
        if resolve_path(directory) != str(directory):
            raise ModelError(f"skipped: leads through a link to {directory}", path=str(path))
        if not any(root == directory or root in directory.parents for root in roots):
            raise ModelError(
                f"skipped: also names a file in {directory}",
                path=str(path),
                hint="also pass this directory",
            )


@contextmanager
def _translate_read_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ModelError(f"cannot be read: {error.strerror}", path=str(path)) from None
