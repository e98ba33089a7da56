"""Find the records of runs that stopped half way, and undo these runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from onnxkvrename.errors import ModelError, ReadError
from onnxkvrename.storage.lock import hold_locks
from onnxkvrename.storage.read import is_directory, resolve_path, translate_read_errors
from onnxkvrename.storage.record import (
    Record,
    play_back,
    read_record,
    remove_made_directories,
    remove_record,
)
from onnxkvrename.storage.temp_file import (
    RECORD_SUFFIX,
    TEMP_NAME,
    list_temp_paths,
    remove_file_of_run,
    remove_temp_files,
)

_MAX_RECORDS = 8
"""Records in one directory that a run looks at by itself: a killed run leaves one."""


def find_half_done_runs(directories: Iterable[Path]) -> list[Record]:
    """Return the records of runs that stopped half way in some directories; nothing is changed.

    A record that is not to be trusted is left out, and so is a directory that cannot be listed.

    Raises:
        OSError: The state of a file cannot be determined.
    """
    found: dict[str, Record] = {}
    for directory in {resolve_path(path) for path in directories}:
        for path in _list_temp_paths(Path(directory)):
            if path.name.endswith(RECORD_SUFFIX) and path.name not in found:
                with suppress(ModelError):
                    found[path.name] = read_record(path)
    return [record for record in found.values() if record.is_half_done()]


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
        if "changed" in states or record.find_fault() is not None:
            return False
        try:
            play_back(record)
        except KeyboardInterrupt:
            raise KeyboardInterrupt("a rename that had stopped halfway is undone in part") from None
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
