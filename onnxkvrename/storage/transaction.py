"""Move files and directories to their targets: all of them, or none."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from onnxkvrename.errors import FlushError, KvRenameError, UndoError, WriteError
from onnxkvrename.findings import quote_path
from onnxkvrename.storage.read import build_changed_error, close_quietly
from onnxkvrename.storage.temp_file import (
    NO_LINK_ERRNOS,
    ReadyFile,
    build_temp_path,
    resolve_moved_path,
    translate_write_errors,
)

if TYPE_CHECKING:
    from onnxkvrename.storage.directories import StagedDirectory

_NO_SYNC_ERRNOS = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)
"""Errors of a file system that cannot flush a directory by itself."""

_STATUS_FIELDS = ("st_dev", "st_ino", "st_size", "st_mtime_ns", "st_mode", "st_uid", "st_gid")
"""What differs after a file was replaced, written to, or its permissions were changed."""


class _Change(NamedTuple):
    """A change that is logged before it is made.

    Attributes:
        path: The path of the new file or directory.
        display_path: That path in messages.
        inode: Device and inode of the new file or directory; the change was made if `path`
            has them.
        ready_file: The file that is moved there; `None` for directories.
        backup: A hard link to the file that is replaced.
        is_new: Whether `path` did not exist before.
        previous_path: The path of a directory before it is moved.
    """

    path: Path
    display_path: Path
    inode: tuple[int, int]
    ready_file: ReadyFile | None = None
    backup: Path | None = None
    is_new: bool = False
    previous_path: Path | None = None

    def is_applied(self) -> bool:
        """Return whether the change was made and its path has not changed since.

        Raises:
            OSError: This cannot be determined.
        """
        try:
            return _read_inode(self.path) == self.inode
        except (FileNotFoundError, NotADirectoryError):
            return False


class Transaction:
    """Context manager for all changes of one command; an error within it undoes them.

    After the last change, an error or interrupt no longer undoes anything. A killed process
    undoes nothing either: each target is then either old or new,
    `temp_file.find_stale_temp_files` finds the leftovers, and running the same command again
    completes the work.

    Args:
        overwritten: For files that are replaced, what :func:`os.lstat` returned when they were
            what may be replaced. One that has changed since is not.

    Attributes:
        is_complete: Whether all changes are made and stay; known once the context ends.

    Raises:
        UndoError: On exit, if an error or interrupt could not be undone.
    """

    def __init__(self, overwritten: Mapping[Path, os.stat_result] | None = None) -> None:
        self.is_complete = False
        self.log: list[_Change] = []
        self.last_change: _Change | None = None
        self.backups: dict[Path, Path] = {}
        self.planned_targets: list[Path] = []
        self.record_paths: tuple[Path, ...] = ()
        self.overwritten = overwritten or {}

    def __enter__(self) -> Transaction:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, *traceback: object
    ) -> None:
        moves = dict[Path, Path]()
        self.is_complete = error is None or self._has_last_change(error)
        if error is not None and not self.is_complete:
            self._undo_all(error)
        else:
            moves = {item.previous_path: item.path for item in self.log if item.previous_path}
        for path in self.record_paths:
            _unlink_stale(resolve_moved_path(path, moves))
        for change in self.log:
            if change.ready_file is not None and kind is not None:
                change.ready_file.discard()
            if change.backup is not None:
                _unlink_stale(resolve_moved_path(change.backup, moves))

    def write_record(
        self,
        files: Sequence[ReadyFile],
        stages: Sequence[StagedDirectory],
        moves: Mapping[Path, Path],
    ) -> None:
        """Record all changes that are about to be made, where one of them replaces a file.

        A single change needs no record: it is made or not.

        Args:
            files: The files that will be placed, except those within staged directories.
            stages: The new directories.
            moves: For each directory that will be renamed its new path.

        Raises:
            WriteError: The record cannot be written. Nothing of it is left.
        """
        self.planned_targets = [
            *(stage.target for stage in stages),
            *(file.display_path for file in files),
            *moves.values(),
        ]
        overwriting = [file for file in files if file.overwrites_target]
        if len(self.planned_targets) < 2 or not overwriting:
            return
        from onnxkvrename.storage import record  # only where several files change

        self.backups = {file.target: build_temp_path(file.target) for file in overwriting}
        changes = list[record.FileChange]()
        for file in files:
            with translate_write_errors(file.display_path):
                changes.append(record.plan_file_change(file, self.backups.get(file.target)))
        if all(change.old is None for change in changes):
            return
        directories = {**{stage.directory: stage.target for stage in stages}, **moves}
        renames = list[record.DirectoryMove]()
        for source, target in directories.items():
            with translate_write_errors(target):
                renames.append(record.DirectoryMove(source, target, _read_inode(source)[1]))
        self.record_paths = record.write_record(changes, renames)
        for directory in dict.fromkeys(path.parent for path in self.record_paths):
            sync_directory(directory)

    def place_files(self, files: Sequence[ReadyFile], *, final: bool) -> None:
        """Move files to their targets, one after the other.

        Args:
            files: The files.
            final: Whether these are the last changes.

        Raises:
            WriteError: A file could not be moved, or its directory not be synced. What was
                moved is moved back when the context ends, unless the last change was made.
            ModelError: A file to replace has changed. It stays, and what was moved before is
                moved back.
        """
        for number, file in enumerate(files, 1):
            self._place_file(file, last=final and number == len(files))
        self._sync_directories(file.target.parent for file in files)

    def _place_file(self, file: ReadyFile, *, last: bool) -> None:
        with translate_write_errors(file.display_path):
            inode = _read_inode(file.temp_path)
        # The last change is never undone.
        backup = None
        if file.overwrites_target and not last:
            backup = self.backups.get(file.target) or build_temp_path(file.target)
        change = _Change(
            file.target, file.display_path, inode, file, backup, is_new=not file.overwrites_target
        )
        self._log_change(change, last=last)
        if backup is not None:
            try:
                os.link(file.target, backup)
            except FileNotFoundError:
                self.log[-1] = change = change._replace(is_new=True)
            except OSError as error:
                # Without links at all there is no backup; the undo says if it needs one.
                if error.errno not in NO_LINK_ERRNOS:
                    with translate_write_errors(file.display_path):
                        raise
        self._check_overwritten(file)
        _move(change, file.move_into_place)

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

    def place_directories(self, stages: Sequence[StagedDirectory], *, final: bool) -> None:
        """Move whole directories to their targets, one after the other.

        Args:
            stages: The directories.
            final: Whether these are the last changes.

        Raises:
            WriteError: A directory could not be moved, or its parent not be synced. What was
                moved is moved back when the context ends, unless the last change was made.
        """
        for number, stage in enumerate(stages, 1):
            last = final and number == len(stages)
            with translate_write_errors(stage.target):
                self._move_directory(
                    stage.directory, stage.target, stage.move_into_place, last=last
                )
        self._sync_directories(stage.target.parent for stage in stages)

    def rename_directories(self, moves: Mapping[Path, Path]) -> None:
        """Rename directories within their parents, as the last changes.

        Args:
            moves: For each directory its new path.

        Raises:
            WriteError: A new path exists, or a directory could not be renamed, or its parent
                not be synced. What was renamed is renamed back when the context ends, unless
                the last change was made.
        """
        if not moves:
            return
        from onnxkvrename.storage.directories import rename_directory  # only for --seed-cache

        for number, (directory, target) in enumerate(moves.items(), 1):
            move = partial(rename_directory, directory, target)
            with translate_write_errors(directory):
                self._move_directory(directory, target, move, last=number == len(moves))
        self._sync_directories(target.parent for target in moves.values())

    def _move_directory(
        self, source: Path, target: Path, move_into_place: Callable[[], None], *, last: bool
    ) -> None:
        change = _Change(target, target, _read_inode(source), previous_path=source)
        self._log_change(change, last=last)
        _move(change, move_into_place)

    def _sync_directories(self, directories: Iterable[Path]) -> None:
        for directory in dict.fromkeys(directories):
            try:
                sync_directory(directory)
            except WriteError as error:
                if self.last_change is None:
                    raise
                raise FlushError(
                    f"all results are in place, but the directory {error.message}",
                    path=error.path,
                    hint="check the disk; after a power cut, run the same command again",
                ) from None

    def _log_change(self, change: _Change, *, last: bool) -> None:
        self.log.append(change)
        if last:
            self.last_change = change

    def _has_last_change(self, error: BaseException) -> bool:
        """Return whether the last change was made."""
        if self.last_change is None:
            return False
        try:
            return self.last_change.is_applied()
        except OSError as failure:
            # To undo the others could be wrong now: the last one cannot be undone.
            last = self.last_change.display_path
            raise self._build_undo_error(
                error,
                f"cannot tell whether {last} is new ({failure.strerror}), so nothing was "
                f"undone; the other {len(self.log) - 1:,} results are new",
                self.log[:-1],
            ) from None

    def _undo_all(self, error: BaseException) -> None:
        """Undo all changes; raise :class:`UndoError` if one could not be undone."""
        stuck, reasons = list[_Change](), list[str]()
        for change in reversed(self.log):
            try:
                if change.is_applied():
                    _undo_change(change)
            except OSError as failure:
                stuck.append(change)
                reasons.append(failure.strerror or str(failure))
        if not stuck:
            return
        stuck.reverse()
        if not self.record_paths:
            for change in self.log:
                if change.ready_file is not None:
                    change.ready_file.discard()
        first_reason = isinstance(error, KvRenameError) and error.message
        why = "" if first_reason and reasons[0] in first_reason else f" ({reasons[0]})"
        raise self._build_undo_error(
            error,
            f"the undo failed as well{why}: {len(stuck):,} of "
            f"{max(len(self.planned_targets), len(self.log)):,} results are new, "
            "the others as they were",
            stuck,
        ) from None

    def _build_undo_error(
        self, error: BaseException, state: str, new: Sequence[_Change]
    ) -> UndoError:
        path, reason = None, "interrupted"
        if isinstance(error, KvRenameError):
            path, reason = error.path, error.message
        message, hint = f"{reason}; {state}", "to finish the work, run the same command again"
        if self.record_paths:
            directory = os.path.commonpath([path.parent for path in self.record_paths])
            command = f"onnxkvrename recover {quote_path(_shorten_path(directory))}"
            message += "; all old and new files are kept"
            hint = f"`{command}` lists them, `{command} --undo` restores the old ones; {hint}"
        return UndoError(message, path=path, hint=hint, new_paths=[change.path for change in new])


def _move(change: _Change, move_into_place: Callable[[], None]) -> None:
    """Make a change; after an error, check on the disk whether it was made.

    A server that repeats a request whose answer was lost (NFS) reports the second try as an
    error, though the first one has succeeded.
    """
    try:
        move_into_place()
    except WriteError:
        with translate_write_errors(change.display_path):
            if not change.is_applied():
                raise
        if change.ready_file is not None:
            change.ready_file.discard()


def _undo_change(change: _Change) -> None:
    """Undo a change that was made.

    Raises:
        OSError: It cannot be undone, for example as the file system has no hard links.
    """
    if change.previous_path is not None:
        os.rename(change.path, change.previous_path)
    elif change.is_new:
        change.path.unlink()
    elif change.backup is not None:
        try:
            os.replace(change.backup, change.path)
        except FileNotFoundError:
            raise OSError(errno.EOPNOTSUPP, "this file system has no hard links") from None


def _shorten_path(path: str) -> str:
    """Return a path as seen from the working directory, if it is below it."""
    with suppress(OSError, ValueError):  # the whole path is as good
        relative = os.path.relpath(path)
        return path if relative.startswith(os.pardir) else relative
    return path


def _read_inode(path: Path) -> tuple[int, int]:
    status = os.lstat(path)
    return status.st_dev, status.st_ino


def _unlink_stale(path: Path) -> None:
    """Remove a file that is no longer needed; if that fails, the next run does."""
    with suppress(OSError):
        os.unlink(path)


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
