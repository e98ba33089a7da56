"""Files that take their places together, or not at all."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from onnxkvrename.errors import WriteError
from onnxkvrename.storage import read as files
from onnxkvrename.storage import temp_file as drafts
from onnxkvrename.storage.temp_file import Draft, Staged


class _Change(NamedTuple):
    """What is about to change at ``path``, known by the inode that it will have.

    ``backup`` is a second name of the file that was there before; ``new`` says
    that there was none. What was a directory of another name goes back to ``stage``.
    """

    path: Path
    inode: tuple[int, int]
    staged: Staged | None = None
    backup: Path | None = None
    new: bool = False
    stage: Path | None = None


class Changeset:
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

    def __enter__(self) -> Changeset:
        return self

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        if kind is not None and not (self.last is not None and _stands(self.last)):
            self._undo()
        moves = self._moves()
        for change in self.log:
            if change.staged is not None and kind is not None:
                change.staged.discard()
            if change.backup is not None:
                with suppress(OSError):
                    os.unlink(drafts.moved(change.backup, moves))

    def place(self, staged: Sequence[Staged], *, final: bool) -> None:
        """Put files in their places, one after the other; if ``final``, no more will follow.

        Raises :class:`WriteError` for the first that cannot be placed.
        """
        for number, item in enumerate(staged, 1):
            self._place(item, last=final and number == len(staged))
        for directory in dict.fromkeys(item.target.parent for item in staged):
            sync(directory)

    def _place(self, item: Staged, *, last: bool) -> None:
        with drafts.writing(item.called):
            inode = _inode(item.temporary)
        # What comes last needs no way back.
        backup = drafts.temporary(item.target) if item.replace and not last else None
        self._record(_Change(item.target, inode, item, backup, new=not item.replace), last=last)
        if backup is not None:
            try:
                os.link(item.target, backup)
            except FileNotFoundError:
                self.log[-1] = self.log[-1]._replace(new=True)
            except OSError:
                pass  # a file system without links
        item.place()

    def place_stages(self, stages: Sequence[Stage], *, final: bool) -> None:
        """Put whole directories in their places, as :meth:`place` does files."""
        for number, stage in enumerate(stages, 1):
            with drafts.writing(stage.target):
                inode = _inode(stage.directory)
            change = _Change(stage.target, inode, stage=stage.directory)
            self._record(change, last=final and number == len(stages))
            stage.place()

    def move(self, moves: Mapping[Path, Path]) -> None:
        """Give directories other names beside them, each with all that was placed in it.

        Nothing is placed after that. Raises :class:`WriteError` if a name is taken.
        """
        for number, (directory, target) in enumerate(moves.items(), 1):
            with drafts.writing(directory):
                inode = _inode(directory)
            change = _Change(target, inode, stage=directory)
            self._record(change, last=number == len(moves))
            _move(directory, target)

    def _moves(self) -> dict[Path, Path]:
        """The directories that have another name by now."""
        return {
            change.stage: change.path
            for change in self.log
            if change.stage is not None and _stands(change)
        }

    def _record(self, change: _Change, *, last: bool) -> None:
        self.log.append(change)
        if last:
            self.last = change

    def _undo(self) -> None:
        for change in reversed(self.log):
            try:
                self._take_back(change)
            except OSError:
                self.stuck.append(change.path)

    def _take_back(self, change: _Change) -> None:
        if not _stands(change):
            return
        if change.stage is not None:
            os.rename(change.path, change.stage)
        elif change.new:
            change.path.unlink()
        elif change.backup is not None:
            os.replace(change.backup, change.path)


def _stands(change: _Change) -> bool:
    with suppress(OSError):
        return _inode(change.path) == change.inode
    return False


def _inode(path: Path) -> tuple[int, int]:
    status = os.lstat(path)
    return status.st_dev, status.st_ino


class Stage:
    """A directory in the making, beside its place: all of it appears there by one rename.

    A context: what has not been placed when it ends is gone.
    """

    def __init__(self, target: Path) -> None:
        self.target = target
        self.directory = drafts.temporary(target)

    def __enter__(self) -> Stage:
        with drafts.writing(self.target):
            self.directory.mkdir()
        return self

    def __exit__(self, *raised: object) -> None:
        _remove(self.directory)

    def within(self, path: Path) -> Path:
        """Where a path below the target is made; the directory for it is there then."""
        inside = self.directory / path.relative_to(self.target)
        with drafts.writing(path):
            inside.parent.mkdir(parents=True, exist_ok=True)
        return inside

    def place(self) -> None:
        """Give the directory its place.

        Raises :class:`WriteError` if something has appeared there meanwhile.
        """
        for folder, _, _ in os.walk(self.directory):
            sync(Path(folder))
        _move(self.directory, self.target)


@contextmanager
def announced(moves: Mapping[Path, Path]) -> Iterator[None]:
    """Leave word of which directories are to get which names, for whoever finds it half done.

    A symbolic link to ``OLD/NEW`` beside them, which is gone when the context ends.
    Where there can be none, there is none.
    """
    marks = [drafts.temporary(directory) for directory in moves]
    try:
        for mark, (directory, target) in zip(marks, moves.items(), strict=True):
            with suppress(OSError):
                os.symlink(f"{directory.name}/{target.name}", mark)
                sync(mark.parent)
        yield
    except BaseException:
        for mark in marks:
            with suppress(OSError):
                os.unlink(mark)
        raise
    take_back(moves)


def take_back(moves: Mapping[Path, Path]) -> None:
    """Remove what was announced of these moves, by this run or a dead one."""
    for directory, target in moves.items():
        for mark in announcements(directory.parent):
            if mark.move == (directory.name, target.name):
                with suppress(OSError):
                    os.unlink(mark.path)


class Announcement(NamedTuple):
    """What a dead run was about to call a directory, or one that is alive is: old, new."""

    path: Path
    move: tuple[str, str]


def announcements(directory: Path) -> Iterator[Announcement]:
    """What was announced in a directory, and not taken back."""
    with suppress(OSError), os.scandir(directory) as entries:
        for entry in entries:
            move = _announced(entry.path) if entry.name.startswith(drafts.TEMPORARY) else None
            if move is not None:
                yield Announcement(Path(entry.path), move)


def _announced(path: str | Path) -> tuple[str, str] | None:
    with suppress(OSError):
        names = os.readlink(path).split("/")
        if len(names) == 2:
            return names[0], names[1]
    return None


def _move(directory: Path, target: Path) -> None:
    with drafts.writing(target):
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        os.rename(directory, target)
    sync(target.parent)


def sync(directory: Path) -> None:
    """Make what has its place there last. It has it by then, so no failure here undoes it."""
    if os.name == "nt":  # pragma: no cover - directories cannot be opened there
        return
    with suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
        try:
            os.fsync(descriptor)
        finally:
            files.close(descriptor)


def clear(leftovers: Iterable[Path]) -> None:
    """Take away what dead runs have left; locks are their holder's, and so is what is announced."""
    for path in leftovers:
        if path.name.endswith(f"-{drafts.LOCK}") or _announced(path):
            continue
        with suppress(OSError):
            if path.is_dir() and not path.is_symlink():
                _remove(path)
            else:
                path.unlink()


def _remove(directory: Path) -> None:
    """Remove a directory with all that is in it, as far as that can be."""
    import shutil  # five milliseconds, for which no rename in place should wait

    with suppress(OSError):  # to ignore errors there is not to ignore all
        shutil.rmtree(directory, ignore_errors=True)


def write_file(output: Path, data: bytes, *, force: bool) -> None:
    """Write one file, whole or not at all.

    Raises :class:`WriteError` as :func:`check_place` does.
    """
    check_place(output, force=force)
    with Changeset() as changes:
        with Draft(Path(os.path.abspath(output)), output) as draft:
            draft.write(data)
            draft.share()
            staged = draft.finish(replace=force)
        changes.place([staged], final=True)


def check_place(output: Path, *, force: bool) -> None:
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
    with Draft(Path(os.path.abspath(output)), output):
        pass  # it could be begun
