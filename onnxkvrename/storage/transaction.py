"""Files that take their places together, or not at all."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from onnxkvrename.errors import WriteError
from onnxkvrename.storage.read import close_quietly
from onnxkvrename.storage.temp_file import (
    LOCK_SUFFIX,
    TEMP_PREFIX,
    ReadyFile,
    TempFile,
    build_temp_path,
    resolve_moved_path,
    translate_write_errors,
)


class _Change(NamedTuple):
    """What is about to change at ``path``, known by the inode that it will have.

    ``backup`` is a second name of the file that was there before; ``new`` says
    that there was none. What was a directory of another name goes back to ``stage``.
    """

    path: Path
    inode: tuple[int, int]
    ready_file: ReadyFile | None = None
    backup: Path | None = None
    is_new: bool = False
    previous_path: Path | None = None


class Transaction:
    """What one command makes and replaces; a context that undoes all of it if it fails.

    What counts is whether the last one took its place: an interrupt just after
    that undoes nothing. A killed process undoes nothing either; what it leaves
    is found by :func:`drafts.leftovers`, and the same command again ends the work.

    Nothing can be undone where a file system has no hard links to keep what was
    replaced: then ``stuck`` gets the targets that are new already.
    """

    def __init__(self, stuck: list[Path] | None = None) -> None:
        self.log: list[_Change] = []
        self.last: _Change | None = None
        self.stuck = [] if stuck is None else stuck

    def __enter__(self) -> Transaction:
        return self

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        if kind is not None and not (self.last is not None and _is_applied(self.last)):
            self._undo_all()
        moves = self._find_renamed_directories()
        for change in self.log:
            if change.ready_file is not None and kind is not None:
                change.ready_file.discard()
            if change.backup is not None:
                with suppress(OSError):
                    os.unlink(resolve_moved_path(change.backup, moves))

    def place_files(self, staged: Sequence[ReadyFile], *, final: bool) -> None:
        """Put files in their places, one after the other; if ``final``, no more will follow.

        Raises :class:`WriteError` for the first that cannot be placed.
        """
        for number, item in enumerate(staged, 1):
            self._place_file(item, last=final and number == len(staged))
        for directory in dict.fromkeys(item.target.parent for item in staged):
            sync_directory(directory)

    def _place_file(self, item: ReadyFile, *, last: bool) -> None:
        with translate_write_errors(item.display_path):
            inode = _read_inode(item.temp_path)
        # What comes last needs no way back.
        backup = build_temp_path(item.target) if item.overwrites_target and not last else None
        self._record_change(
            _Change(item.target, inode, item, backup, is_new=not item.overwrites_target), last=last
        )
        if backup is not None:
            try:
                os.link(item.target, backup)
            except FileNotFoundError:
                self.log[-1] = self.log[-1]._replace(is_new=True)
            except OSError:
                pass  # a file system without links
        item.move_into_place()

    def place_directories(self, stages: Sequence[StagedDirectory], *, final: bool) -> None:
        """Put whole directories in their places, as :meth:`place` does files."""
        for number, stage in enumerate(stages, 1):
            with translate_write_errors(stage.target):
                inode = _read_inode(stage.directory)
            change = _Change(stage.target, inode, previous_path=stage.directory)
            self._record_change(change, last=final and number == len(stages))
            stage.move_into_place()

    def rename_directories(self, moves: Mapping[Path, Path]) -> None:
        """Give directories other names beside them, each with all that was placed in it.

        Nothing is placed after that. Raises :class:`WriteError` if a name is taken.
        """
        for number, (directory, target) in enumerate(moves.items(), 1):
            with translate_write_errors(directory):
                inode = _read_inode(directory)
            change = _Change(target, inode, previous_path=directory)
            self._record_change(change, last=number == len(moves))
            _rename_directory(directory, target)

    def _find_renamed_directories(self) -> dict[Path, Path]:
        """The directories that have another name by now."""
        return {
            change.previous_path: change.path
            for change in self.log
            if change.previous_path is not None and _is_applied(change)
        }

    def _record_change(self, change: _Change, *, last: bool) -> None:
        self.log.append(change)
        if last:
            self.last = change

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
    with suppress(OSError):
        return _read_inode(change.path) == change.inode
    return False


def _read_inode(path: Path) -> tuple[int, int]:
    status = os.lstat(path)
    return status.st_dev, status.st_ino


class StagedDirectory:
    """A directory in the making, beside its place: all of it appears there by one rename.

    A context: what has not been placed when it ends is gone.
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
        """Where a path below the target is made; the directory for it is there then."""
        inside = self.directory / path.relative_to(self.target)
        with translate_write_errors(path):
            inside.parent.mkdir(parents=True, exist_ok=True)
        return inside

    def move_into_place(self) -> None:
        """Give the directory its place.

        Raises :class:`WriteError` if something has appeared there meanwhile.
        """
        for folder, _, _ in os.walk(self.directory):
            sync_directory(Path(folder))
        _rename_directory(self.directory, self.target)


@contextmanager
def write_intent(moves: Mapping[Path, Path]) -> Iterator[None]:
    """Leave word of which directories are to get which names, for whoever finds it half done.

    A symbolic link to ``OLD/NEW`` beside them, which is gone when the context ends.
    Where there can be none, there is none.
    """
    marks = [build_temp_path(directory) for directory in moves]
    try:
        for mark, (directory, target) in zip(marks, moves.items(), strict=True):
            with suppress(OSError):
                os.symlink(f"{directory.name}/{target.name}", mark)
                sync_directory(mark.parent)
        yield
    except BaseException:
        for mark in marks:
            with suppress(OSError):
                os.unlink(mark)
        raise
    clear_intent(moves)


def clear_intent(moves: Mapping[Path, Path]) -> None:
    """Remove what was announced of these moves, by this run or a dead one."""
    for directory, target in moves.items():
        for mark in find_intents(directory.parent):
            if mark.move == (directory.name, target.name):
                with suppress(OSError):
                    os.unlink(mark.path)


class Intent(NamedTuple):
    """What a dead run was about to call a directory, or one that is alive is: old, new."""

    path: Path
    move: tuple[str, str]


def find_intents(directory: Path) -> Iterator[Intent]:
    """What was announced in a directory, and not taken back."""
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
    """Make what has its place there last. It has it by then, so no failure here undoes it."""
    if os.name == "nt":  # pragma: no cover - directories cannot be opened there
        return
    with suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
        try:
            os.fsync(descriptor)
        finally:
            close_quietly(descriptor)


def remove_stale_temp_files(leftovers: Iterable[Path]) -> None:
    """Take away what dead runs have left; locks are their holder's, and so is what is announced."""
    for path in leftovers:
        if path.name.endswith(f"-{LOCK_SUFFIX}") or _read_intent(path):
            continue
        with suppress(OSError):
            if path.is_dir() and not path.is_symlink():
                _remove_directory(path)
            else:
                path.unlink()


def _remove_directory(directory: Path) -> None:
    """Remove a directory with all that is in it, as far as that can be."""
    import shutil  # five milliseconds, for which no rename in place should wait

    with suppress(OSError):  # to ignore errors there is not to ignore all
        shutil.rmtree(directory, ignore_errors=True)


def write_file(output: Path, data: bytes, *, force: bool) -> None:
    """Write one file, whole or not at all.

    Raises :class:`WriteError` as :func:`check_place` does.
    """
    check_output_path(output, force=force)
    with Transaction() as changes:
        with TempFile(Path(os.path.abspath(output)), output) as draft:
            draft.write(data)
            draft.set_default_mode()
            staged = draft.finish(replace=force)
        changes.place_files([staged], final=True)


def check_output_path(output: Path, *, force: bool) -> None:
    """Raise :class:`WriteError` where a file cannot be written.

    That is in the place of a directory, in a directory that takes none, and for what is there
    already; ``force`` replaces that, if it is a plain file or a link to one.
    """
    if os.path.isdir(output):
        raise WriteError("is a directory", path=str(output))
    if os.path.lexists(output) and not force:
        raise WriteError("is there already", path=str(output), hint="--force replaces it")
    if os.path.exists(output) and not os.path.isfile(output):
        raise WriteError("is there already, and no plain file", path=str(output))
    with TempFile(Path(os.path.abspath(output)), output):
        pass  # it could be begun
