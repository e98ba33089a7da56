"""Move files to their targets: all of them, or none."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from onnxkvrename.errors import FlushError, KvRenameError, UndoError, WriteError
from onnxkvrename.storage.read import build_changed_error, resolve_path
from onnxkvrename.storage.record import (
    FileChange,
    Record,
    build_record,
    play_back,
    remove_made_directories,
    remove_record,
    sync_directory,
    write_record,
)
from onnxkvrename.storage.temp_file import (
    ReadyFile,
    build_key,
    remove_temp_files,
    translate_write_errors,
)

_STATUS_FIELDS = ("st_dev", "st_ino", "st_size", "st_mtime_ns", "st_mode", "st_uid", "st_gid")
"""What differs after a file was replaced, written to, or its permissions were changed."""


class Transaction:
    """Context manager for all files of one command; an error within it leaves all as they were.

    The directories of all targets are locked. A killed process undoes nothing: then the next run
    does, by the record that it has left.

    Args:
        directories: The directories of all targets, for what an error leaves there.
        overwritten: For files that are replaced, what :func:`os.lstat` returned when they were
            what may be replaced. One that has changed since is not.
        made: Directories that are made for the run, the outer ones first.

    Attributes:
        key: The key of all temporary names of the run.
        is_complete: Whether all changes are made and stay.

    Raises:
        UndoError: On exit, if an error or interrupt could not be undone.
    """

    def __init__(
        self,
        directories: Collection[Path],
        overwritten: Mapping[Path, os.stat_result],
        made: Sequence[Path] = (),
    ) -> None:
        self.key = build_key()
        self.directories = directories
        self.overwritten = overwritten
        self.made = made
        self.is_complete = False
        self._record: Record | None = None
        self._announced: Path | None = None
        self._only_change: FileChange | None = None
        self._files: Sequence[ReadyFile] = ()

    def __enter__(self) -> Transaction:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, *traceback: object
    ) -> None:
        if error is not None and not self.is_complete:
            self._undo(error)
        try:
            self._clean_up()
        except BaseException:  # an interrupt leaves nothing either
            self._clean_up()
            raise

    def announce(self, directory: Path) -> None:
        """Record that directories are made, so that a killed run leaves none of them.

        Args:
            directory: The directory of a target, which exists.

        Raises:
            WriteError: The record cannot be written.
        """
        self._announced = Path(resolve_path(directory))
        made = tuple(Path(resolve_path(path)) for path in self.made)
        self._record = Record(self.key, (self._announced,), (), made)
        write_record(self._record)

    def place(self, files: Sequence[ReadyFile]) -> None:
        """Move files to their targets, one after the other.

        Args:
            files: The files, with temporary names that have the key.

        Raises:
            WriteError: A file could not be moved.
            ModelError: A file to replace has changed.
            FlushError: All is in place, but a directory could not be flushed to the disk.
        """
        record = build_record(self.key, files, self.made)
        # The record that is there already is replaced last: until then, it is whole.
        record = record._replace(
            directories=tuple(sorted(record.directories, key=lambda path: path == self._announced))
        )
        if len(files) > 1:
            self._record, self._files = record, files
            write_record(record)
        elif files:  # it is made or not
            self._only_change = record.files[0]
        for file, change in zip(files, record.files, strict=True):
            self._place_file(file, change)
        self.is_complete = True
        places = [file.target.parent for file in files]
        places += [path.parent for path in self.made]
        for directory in dict.fromkeys(places):
            try:
                sync_directory(directory)
            except WriteError as error:
                raise FlushError(
                    f"all results are in place, but the directory {error.message}",
                    path=error.path,
                    hint="check the disk; after a power cut, run the same command again",
                ) from None

    def _place_file(self, file: ReadyFile, change: FileChange) -> None:
        """Move a file; after an error, check on the disk whether it was moved.

        A server that repeats a request whose answer was lost (NFS) reports the second try as an
        error, though the first one has succeeded.
        """
        self._check_overwritten(file)
        try:
            file.move_into_place(keeps_name=self._record is not None)
        except WriteError:
            with translate_write_errors(file.display_path):
                if not change.is_made():
                    raise

    def _check_overwritten(self, file: ReadyFile) -> None:
        """Raise if the file at a target has changed, or another one is there.

        The time of the inode's last change does not count: a backup is a link, and changes it.
        """
        expected = self.overwritten.get(file.target)
        if expected is None:
            return
        with translate_write_errors(file.display_path):
            try:
                status = os.lstat(file.target)
            except (FileNotFoundError, NotADirectoryError):
                raise build_changed_error(file.display_path) from None
        if any(getattr(status, name) != getattr(expected, name) for name in _STATUS_FIELDS):
            raise build_changed_error(file.display_path)

    def _undo(self, error: BaseException) -> None:
        """Restore what was there, unless the last change was made before the error."""
        try:
            if self._only_change is not None:
                self.is_complete = self._only_change.is_made()
            elif self._record is not None:
                states = self._record.find_states()
                self.is_complete = states == {"new"}
                if "new" in states and not self.is_complete:
                    play_back(self._record)
                if not self.is_complete and any(each.is_made() for each in self._record.files):
                    raise WriteError("a result has no copy of what it replaced")
        except (OSError, WriteError) as failure:
            raise self._build_undo_error(error, failure) from None

    def _build_undo_error(self, error: BaseException, failure: OSError | WriteError) -> UndoError:
        path, message = None, "interrupted"
        if isinstance(error, KvRenameError):
            path, message = error.path, error.message
        reason = failure.message if isinstance(failure, WriteError) else str(failure.strerror)
        message += "; the undo failed as well" + ("" if reason in message else f" ({reason})")
        hint = "to finish the work, run the same command again"
        new_paths = list[Path]()
        try:
            record = self._record
            targets = record.list_targets() if record is not None else []
            changes = record.files if record is not None else ()
            for file, change in zip(self._files, changes, strict=True):
                new_paths += [file.target] if change.is_made() else []
            message += f": {len(new_paths):,} of {len(targets):,} results are new, the others "
            message += "as they were"
            if record is not None and record.find_fault() is None:
                message += "; all old and new files are kept"
        except OSError:
            message += ", and the results cannot be looked at"
        return UndoError(message, path=path, hint=hint, new_paths=new_paths)

    def _clean_up(self) -> None:
        if self._record is not None and not remove_record(self._record):
            remove_record(self._record)  # a query that failed is made once more
        for directory in self.directories:
            remove_temp_files(directory, self.key, any_owner=True)
        if not self.is_complete:
            remove_made_directories(self.made)
