"""Find the records of runs that stopped half way, and end these runs."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from onnxkvrename.errors import MissingFileError, ModelError, ReadError
from onnxkvrename.storage.lock import hold_locks
from onnxkvrename.storage.read import is_directory, resolve_path, translate_read_errors
from onnxkvrename.storage.record import (
    LoneRecordError,
    Record,
    play_back,
    read_record,
    remove_made_directories,
    remove_record,
)
from onnxkvrename.storage.temp_file import (
    RECORD_SUFFIX,
    TEMP_NAME,
    find_trusted_owners,
    list_temp_paths,
    remove_file_of_run,
    remove_temp_files,
)

_MAX_RECORDS = 8
"""Records in one directory that a run looks at by itself: a killed run leaves one."""


class HalfDoneRun(NamedTuple):
    """A run that stopped half way.

    Attributes:
        path: Its record.
        record: What the record says.
    """

    path: Path
    record: Record


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
    for path in _find_temp_paths(roots, report_skipped, is_recursive):
        if not path.name.endswith(RECORD_SUFFIX) or path.name in runs:
            continue
        try:
            with translate_read_errors(path):
                record = read_record(path)
                if record.is_half_done():
                    _check_inside(path, record, roots)
                    runs[path.name] = os.lstat(path).st_mtime_ns, HalfDoneRun(path, record)
        except LoneRecordError as error:
            with translate_read_errors(path):
                if _has_only_copy(path.parent, path.name.split("-")[-2]):
                    report_skipped(error)
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
    leftovers = []
    for path in _find_temp_paths([_find_root(path) for path in paths], lambda _: None, True):
        with translate_read_errors(path):
            owners = find_trusted_owners(path.parent)
            if owners is None or os.lstat(path).st_uid in owners:
                leftovers.append(path)
    return leftovers


def end_run(run: HalfDoneRun, *, undo: bool) -> None:
    """Restore the old files of a run, or put its new ones in place, and remove what it left.

    What is done stays: if one step fails, the record stays as well, and the same call continues
    there. Targets that were changed since are left as they are.

    Args:
        run: The run.
        undo: Whether to restore the old files.

    Raises:
        KvRenameError: A file cannot be restored or put in place, or another run is at work.
    """
    with translate_read_errors(run.path), hold_locks(run.record.directories):
        if run.record.is_half_done():  # else it was at work when it was found
            play_back(run.record, undo=undo)
        remove_record(run.record)
        if undo:
            remove_made_directories(run.record.made)


def remove_ended_runs(paths: Iterable[Path]) -> None:
    """Remove what is left of runs that have changed nothing, or all, with what they had made.

    Args:
        paths: As for :func:`find_half_done_runs`, which has found no such run any more.

    Raises:
        KvRenameError: There is nothing at a path, or another run is at work.
    """
    roots = [_find_root(path) for path in paths]
    for path in _find_temp_paths(roots, lambda _: None, True):
        if not path.name.endswith(RECORD_SUFFIX):
            continue
        with suppress(ModelError), translate_read_errors(path):
            record = read_record(path)
            _check_inside(path, record, roots)
            with hold_locks(record.directories):
                if not record.is_half_done():
                    _settle(record, ())


def settle_stopped_runs(
    directories: Iterable[Path],
    inputs: Iterable[Path] = (),
    report_undone: Callable[[Sequence[Path]], None] = lambda _: None,
    *,
    knows_inputs: bool = True,
) -> bool:
    """Undo what runs of this user that stopped half way have done in directories.

    What was complete or undone loses its record. A run of which a file was changed since, or that
    cannot be undone, keeps it: after the run that follows has done its work, and finished that of
    the other, the same call removes it. So does what is named like a record and is none.

    Args:
        directories: The directories of all targets of a run.
        inputs: The files that the run reads: none of them is removed.
        report_undone: Called for each run that was undone, with the files that have their old
            content again.
        knows_inputs: Whether these are all. If not, a record that does not fit the files beside
            it, as one that came with them, has nothing removed but further names of files.

    Returns:
        Whether there is a run that is still half done.

    Raises:
        KvRenameError: A run cannot be undone, or another one is at work.
    """
    kept = {path.name for path in inputs}
    is_half_done = False
    for directory in {resolve_path(path) for path in directories if is_directory(path)}:
        paths = _list_temp_paths(Path(directory))
        records = [path for path in paths if path.name.endswith(RECORD_SUFFIX)]
        for path in records[:_MAX_RECORDS]:
            try:
                record = read_record(path)
                with translate_read_errors(path), hold_locks(record.directories):
                    is_half_done |= not _settle(record, kept, knows_inputs, report_undone)
            except ReadError:
                continue  # it is not known what it is, so all that it may keep stays
            except ModelError:  # not to be trusted, or ended meanwhile: no reason to stop
                with hold_locks([path.parent]):
                    _remove_useless_record(path, kept, knows_inputs)
        if not records and any(map(_is_second_name, paths)):
            with hold_locks([Path(directory)]):
                remove_temp_files(Path(directory), kept=kept, links_only=True)
    return is_half_done


def _settle(
    record: Record,
    kept: Collection[str],
    knows_inputs: bool = True,
    report_undone: Callable[[Sequence[Path]], None] = lambda _: None,
) -> bool:
    """Undo a run if it is half done, and return whether that was possible."""
    targets = record.list_targets()
    states = {target.state for target in targets}
    if {"new", "old"} <= states:
        if "changed" in states or record.find_fault(undo=True) is not None:
            return False
        play_back(record, undo=True)
        report_undone([target.path for target in targets if target.state == "new"])
        states = {"old"}
    places = record.directories
    is_unknown = "changed" in states and not record.knows_a_file()
    if is_unknown and any(_has_only_copy(place, record.key) for place in places):
        return True  # a tree that was copied: it is not known which of its files are old
    fits = states == {"old"} or record.knows_a_file()  # no archive can tell which inodes it gets
    remove_record(record, kept, links_only=not (fits or knows_inputs))
    if "new" not in states:
        remove_made_directories(record.made)
    return True


def _remove_useless_record(path: Path, kept: Collection[str], knows_inputs: bool) -> None:
    """Remove what is named like a record and is none, or not any more, with what has its key.

    A run that has changed anything has a whole record in each directory until all is done. So
    nothing is lost but results, unless there is a copy of an old file that has no other name, or
    data that the next run reads.
    """
    match = TEMP_NAME.fullmatch(path.name)
    with suppress(OSError):
        if match is not None and not _has_only_copy(path.parent, match["key"]):
            remove_temp_files(path.parent, match["key"], kept, links_only=not knows_inputs)
            if path.name not in kept:
                remove_file_of_run(path)


def _has_only_copy(directory: Path, key: str) -> bool:
    """Return whether a run has left an old file that has no other name.

    Raises:
        OSError: This cannot be determined.
    """
    old = (path for path in list_temp_paths(directory, key) if path.name.endswith("-old"))
    return any(os.lstat(path).st_nlink == 1 for path in old)


def _is_second_name(path: Path) -> bool:
    with suppress(OSError):  # a run that is alive may remove its own meanwhile
        return os.lstat(path).st_nlink > 1
    return False


def _list_temp_paths(directory: Path) -> list[Path]:
    with suppress(OSError):  # what cannot be listed is not removed
        return list_temp_paths(directory)
    return []


def _find_root(path: Path) -> Path:
    """Return the directory to search for a path, without links.

    Raises:
        KvRenameError: There is nothing at the path, or it cannot be read.
    """
    try:
        with translate_read_errors(path):
            is_directory = stat.S_ISDIR(os.stat(path).st_mode)
    except MissingFileError:
        raise ModelError("no such file or directory", path=str(path)) from None
    return Path(resolve_path(path if is_directory else path.absolute().parent))


def _find_temp_paths(
    roots: Iterable[Path], report_skipped: Callable[[ModelError], None], is_recursive: bool
) -> list[Path]:
    """Return what has a temporary name in directories, and in all below them, each once."""
    found = set[Path]()
    pending = list(dict.fromkeys(roots))
    while pending:
        directory = pending.pop()
        try:
            with translate_read_errors(directory):
                found.update(list_temp_paths(directory))
                if is_recursive:
                    with os.scandir(directory) as entries:
                        inner = [entry for entry in entries if entry.is_dir(follow_symlinks=False)]
                    pending += [Path(entry.path) for entry in inner]
        except ModelError as error:
            report_skipped(error)
    return sorted(found)


def _check_inside(path: Path, record: Record, roots: Iterable[Path]) -> None:
    """Raise for a record that leads out of the directories."""
    for directory in record.directories:
        if resolve_path(directory) != str(directory):
            raise ModelError(f"skipped: leads through a link to {directory}", path=str(path))
        if not any(root in (directory, *directory.parents) for root in roots):
            raise ModelError(
                f"skipped: also names a file in {directory}",
                path=str(path),
                hint="also pass this directory",
            )
