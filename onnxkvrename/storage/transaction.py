"""Move files and directories to their targets: all of them, or none."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from onnxkvrename.storage.read import close_quietly
from onnxkvrename.storage.temp_file import (
    LOCK_SUFFIX,
    TEMP_PREFIX,
    ReadyFile,
    build_temp_path,
    resolve_moved_path,
    translate_write_errors,
)


class _Change(NamedTuple):
    """A change that is logged before it is made.

    Attributes:
        path: The path of the new file or directory.
        inode: Device and inode of the new file or directory; the change was made if `path`
            has them.
        ready_file: The file that is moved there; `None` for directories.
        backup: A hard link to the file that is replaced.
        is_new: Whether `path` did not exist before.
        previous_path: The path of a directory before it is moved.
    """

    path: Path
    inode: tuple[int, int]
    ready_file: ReadyFile | None = None
    backup: Path | None = None
    is_new: bool = False
    previous_path: Path | None = None


class Transaction:
    """Context manager for all changes of one command; an error within it undoes them.

    After the last change, an error or interrupt no longer undoes anything. A killed process
    undoes nothing either: each target is then either old or new,
    `temp_file.find_stale_temp_files` finds the leftovers, and running the same command again
    completes the work.

    Args:
        stuck: Receives the targets that were replaced and could not be restored, for example
            on a file system without hard links.
    """

    def __init__(self, stuck: list[Path] | None = None) -> None:
        self.log: list[_Change] = []
        self.last_change: _Change | None = None
        self.stuck = [] if stuck is None else stuck

    def __enter__(self) -> Transaction:
        return self

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        if kind is not None and not (self.last_change and _is_applied(self.last_change)):
            self._undo_all()
        moves = self._find_renamed_directories()
        for change in self.log:
            if change.ready_file is not None and kind is not None:
                change.ready_file.discard()
            if change.backup is not None:
                with suppress(OSError):
                    os.unlink(resolve_moved_path(change.backup, moves))

    def place_files(self, files: Sequence[ReadyFile], *, final: bool) -> None:
        """Move files to their targets, one after the other.

        Args:
            files: The files.
            final: Whether these are the last changes.

        Raises:
            WriteError: A file could not be moved. The files before it are moved back when
                the context ends.
        """
        for number, file in enumerate(files, 1):
            self._place_file(file, last=final and number == len(files))
        for directory in dict.fromkeys(file.target.parent for file in files):
            sync_directory(directory)

    def _place_file(self, file: ReadyFile, *, last: bool) -> None:
        with translate_write_errors(file.display_path):
            inode = _read_inode(file.temp_path)
        # The last change is never undone.
        backup = build_temp_path(file.target) if file.overwrites_target and not last else None
        self._record_change(
            _Change(file.target, inode, file, backup, is_new=not file.overwrites_target), last=last
        )
        if backup is not None:
            try:
                os.link(file.target, backup)
            except FileNotFoundError:
                self.log[-1] = self.log[-1]._replace(is_new=True)
            except OSError:
                pass  # a file system without links
        file.move_into_place()

    def place_directories(self, stages: Sequence[StagedDirectory], *, final: bool) -> None:
        """Move whole directories to their targets, one after the other.

        Args:
            stages: The directories.
            final: Whether these are the last changes.

        Raises:
            WriteError: A directory could not be moved. The ones before it are moved back when
                the context ends.
        """
        for number, stage in enumerate(stages, 1):
            with translate_write_errors(stage.target):
                inode = _read_inode(stage.directory)
            change = _Change(stage.target, inode, previous_path=stage.directory)
            self._record_change(change, last=final and number == len(stages))
            stage.move_into_place()

    def rename_directories(self, moves: Mapping[Path, Path]) -> None:
        """Rename directories within their parents, as the last changes.

        Args:
            moves: For each directory its new path.

        Raises:
            WriteError: A new path exists, or a directory could not be renamed. The ones before
                it are renamed back when the context ends.
        """
        for number, (directory, target) in enumerate(moves.items(), 1):
            with translate_write_errors(directory):
                inode = _read_inode(directory)
            change = _Change(target, inode, previous_path=directory)
            self._record_change(change, last=number == len(moves))
            _rename_directory(directory, target)

    def _find_renamed_directories(self) -> dict[Path, Path]:
        """Return the directories that have been renamed, with their new paths."""
        return {
            change.previous_path: change.path
            for change in self.log
            if change.previous_path is not None and _is_applied(change)
        }

    def _record_change(self, change: _Change, *, last: bool) -> None:
        self.log.append(change)
        if last:
            self.last_change = change

    def _undo_all(self) -> None:
        for change in reversed(self.log):
            try:
                self._undo_change(change)
            except OSError:
                self.stuck.append(change.path)

    def _undo_change(self, change: _Change) -> None:
        if not _is_applied(change):
            return
        if change.previous_path is not None:
            os.rename(change.path, change.previous_path)
        elif change.is_new:
            change.path.unlink()
        elif change.backup is not None:
            os.replace(change.backup, change.path)


def _is_applied(change: _Change) -> bool:
    """Return whether a change was made and its path has not changed since."""
    with suppress(OSError):
        return _read_inode(change.path) == change.inode
    return False


def _read_inode(path: Path) -> tuple[int, int]:
    status = os.lstat(path)
    return status.st_dev, status.st_ino


class StagedDirectory:
    """A temporary directory beside its target that one rename moves into place.

    A context manager: on exit, the directory is removed unless it has been moved.

    Args:
        target: The final path of the directory.

    Raises:
        WriteError: On entering, if the temporary directory cannot be created.
    """

    def __init__(self, target: Path) -> None:
        self.target = target
        self.directory = build_temp_path(target)

    def __enter__(self) -> StagedDirectory:
        with translate_write_errors(self.target):
            self.directory.mkdir()
        return self

    def __exit__(self, *raised: object) -> None:
        _remove_directory(self.directory)

    def prepare_path(self, path: Path) -> Path:
        """Return the staged path for a path below the target, and create its parent directory.

        Args:
            path: The final path, below `target`.

        Raises:
            WriteError: The parent directory could not be created.
        """
        inside = self.directory / path.relative_to(self.target)
        with translate_write_errors(path):
            inside.parent.mkdir(parents=True, exist_ok=True)
        return inside

    def move_into_place(self) -> None:
        """Move the directory to its target.

        Raises:
            WriteError: The rename failed, or the target exists by now; it is then unchanged.
        """
        for folder, _, _ in os.walk(self.directory):
            sync_directory(Path(folder))
        _rename_directory(self.directory, self.target)


@contextmanager
def write_intent(moves: Mapping[Path, Path]) -> Iterator[None]:
    """Record planned renames of directories, in case this process is killed.

    Each record is a symbolic link to `OLD/NEW` beside the directory; it is removed when the
    context ends. Without support for symbolic links, nothing is recorded.

    Args:
        moves: For each directory its new path.
    """
    links = [build_temp_path(directory) for directory in moves]
    try:
        for link, (directory, target) in zip(links, moves.items(), strict=True):
            with suppress(OSError):
                os.symlink(f"{directory.name}/{target.name}", link)
                sync_directory(link.parent)
        yield
    except BaseException:
        for link in links:
            with suppress(OSError):
                os.unlink(link)
        raise
    clear_intent(moves)


def clear_intent(moves: Mapping[Path, Path]) -> None:
    """Remove the records of these moves, whether this run or a killed one wrote them."""
    for directory, target in moves.items():
        for intent in find_intents(directory.parent):
            if intent.move == (directory.name, target.name):
                with suppress(OSError):
                    os.unlink(intent.path)


class Intent(NamedTuple):
    """The record of a directory that a run, killed or alive, was about to rename.

    Attributes:
        path: The symbolic link that records it.
        move: The old and the new name of the directory.
    """

    path: Path
    move: tuple[str, str]


def find_intents(directory: Path) -> Iterator[Intent]:
    """Yield the recorded renames of directories in `directory`."""
    with suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            move = _read_intent(entry.path) if entry.name.startswith(TEMP_PREFIX) else None
            if move is not None:
                yield Intent(Path(entry.path), move)


def _read_intent(path: str | Path) -> tuple[str, str] | None:
    with suppress(OSError):
        names = os.readlink(path).split("/")
        if len(names) == 2:
            return names[0], names[1]
    return None


def _rename_directory(directory: Path, target: Path) -> None:
    with translate_write_errors(target):
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        os.rename(directory, target)
    sync_directory(target.parent)


def sync_directory(directory: Path) -> None:
    """Flush the names in a directory to the disk.

    Errors are ignored: the names are already in effect.
    """
    if os.name == "nt":  # pragma: no cover - directories cannot be opened there
        return
    with suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
        try:
            os.fsync(descriptor)
        finally:
            close_quietly(descriptor)


def remove_stale_temp_files(paths: Iterable[Path]) -> None:
    """Remove temporary files of killed runs, except locks and recorded renames of directories.

    Args:
        paths: The result of :func:`find_stale_temp_files`; the caller holds the locks.
    """
    for path in paths:
        if path.name.endswith(f"-{LOCK_SUFFIX}") or _read_intent(path):
            continue
        with suppress(OSError):
            if path.is_dir() and not path.is_symlink():
                _remove_directory(path)
            else:
                path.unlink()


def _remove_directory(directory: Path) -> None:
    """Remove a directory and its content, as far as possible."""
    import shutil  # takes 5 ms to import, and a rename in place does not need it

    with suppress(OSError):  # `ignore_errors` does not cover all of them
        shutil.rmtree(directory, ignore_errors=True)
