"""Write files all or none: stage every result beside its target, then replace all, or undo.

:func:`write_all` is the only way to the disk. Renaming is its own journal: it is idempotent and can
be undone, so there is no record of a run. Each file is old or new and whole at any time; an error
or a signal puts all back; what a kill leaves is completed by the same command, and its temporary
files go with the next run in that directory.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from onnxkvrename.errors import FlushError, KvRenameError, ModelError, UndoError, WriteError
from onnxkvrename.files.lock import Locks, open_locks
from onnxkvrename.files.new_directories import make_directory
from onnxkvrename.files.read import (
    FileIdentity,
    build_changed_error,
    close_quietly,
    find_existing_directory,
    has_content,
    is_file_unchanged,
    is_occupied,
    open_file,
    read_status,
    resolve_path,
)
from onnxkvrename.files.signals import defer_signals
from onnxkvrename.files.step import Step, check_planned, keep_backup, place, require_inode, undo
from onnxkvrename.files.temp_file import (
    TEMP_PREFIX,
    TempFile,
    build_key,
    build_temp_name,
    has_leftovers,
    remove_leftovers,
)
from onnxkvrename.files.write_errors import translate_write_errors
from onnxkvrename.text import format_list

SAME_FILES_HINT = "all workers must see the same files, under the same paths"
_NO_SYNC_ERRNOS = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)
"""Errors of a file system that cannot flush a directory by itself."""


class WrittenInterrupt(KeyboardInterrupt):
    """An interrupt after all files were put in place, where they stay."""

    def __init__(self) -> None:
        super().__init__("all results are in place")


class Output(NamedTuple):
    """A file to write; it may travel between processes.

    Attributes:
        target: Where it belongs, an absolute path; a link there is replaced, not followed.
        display_path: That path as the user calls it, for messages.
        content: What the function that writes it makes its bytes from.
        source: The file that it is made from; ``None`` for none.
        identity: The state in which the source must be until the file is in place.
        in_place: Whether it replaces its source.
        may_replace: Whether another file at the target may be replaced.
        root: The directory that the user named, below which no link may lead to the target;
            ``None`` where links may.
        like_directory: The directory whose rights a new one for this file does not exceed.
        is_model: Whether it is put in place after all other files.
    """

    target: Path
    display_path: Path
    content: object
    source: Path | None = None
    identity: FileIdentity | None = None
    in_place: bool = False
    may_replace: bool = False
    root: Path | None = None
    like_directory: Path | None = None
    is_model: bool = False


WriteContent = Callable[[Output, TempFile], None]
"""Writes the bytes of a file, and sets its permissions; errors are :class:`KvRenameError`."""
Written = Path | KvRenameError
"""The temporary name of a file that is complete, or the error of one that could not be written."""
MapStages = Callable[
    [Callable[["Stage"], Written], Sequence["Stage"]], Generator[Written, None, None]
]
"""Yields the result of a function for each stage, in their order, wherever it runs. A stage may be
written again, as when a worker was lost: each time has a temporary name of its own."""


class Stage(NamedTuple):
    """A file to write under a temporary name; it may travel between processes.

    Attributes:
        output: The file.
        place: Its target, or the path below the temporary name of a new directory.
        root: As in :class:`Output`, if that directory is there.
        key: The key of the temporary names of the run.
    """

    output: Output
    place: Path
    root: Path | None
    key: str


def _map_here(
    work: Callable[[Stage], Written], stages: Sequence[Stage]
) -> Generator[Written, None, None]:
    for stage in stages:
        yield work(stage)


def write_all(
    outputs: Sequence[Output],
    write: WriteContent,
    *,
    locks: Locks,
    map_stages: MapStages = _map_here,
) -> None:
    """Write all files, or leave all as they were.

    Directories that are missing are made under temporary names, and get their names once they are
    complete.

    Args:
        outputs: The files; no two have the same target.
        write: Writes the content of each under a temporary name.
        locks: The directories that the run has locked: those of all targets are added.
        map_stages: Where the files are written: by default here, one after the other.

    Raises:
        WriteError: A file cannot be written or put in place, or a target is used by another run.
            All files are as they were.
        ModelError: A source or a target has changed since it was read.
        UndoError: That happened, and putting all back failed as well.
        FlushError: All are in place, but perhaps not on the disk.
        WrittenInterrupt: An interrupt came when all were in place.
    """
    if not outputs:
        return
    locks.hold(find_existing_directory(output.target.parent) for output in outputs)
    run = _Run(outputs, _read_planned(outputs))
    try:
        try:
            run.make_directories()
            run.stage(write, map_stages)
            with defer_signals() as deliver_signals:
                run.place(deliver_signals)
        finally:
            with defer_signals():
                run.clean_up()
                if run.is_complete:
                    run.flush()
    except KeyboardInterrupt:
        if run.is_complete:
            raise WrittenInterrupt from None
        raise


def write_file(path: Path, content: bytes, inputs: Iterable[Path]) -> None:
    """Write a file as a whole, unless it has that content already.

    A new file has the permissions, the owner and the attributes of the one that it replaces. What
    killed runs have left beside it is removed.

    Args:
        path: The file; a link there is replaced. Its directory exists.
        content: Its content.
        inputs: The files that the run reads: none is removed.

    Raises:
        KvRenameError: As :func:`write_all`; an existing file is as it was.
    """
    target = Path(os.path.abspath(path))
    with translate_write_errors(path):
        os.stat(os.path.join(target.parent, ""))  # a directory
    with open_locks([target.parent]) as locks:
        clear_leftovers(locks, inputs)
        if is_occupied(path):
            with suppress(ModelError):  # one that cannot be read is replaced
                if has_content(path, len(content), [content]):
                    return
        write_all([Output(target, path, content, may_replace=True)], _write_bytes, locks=locks)


def _write_bytes(output: Output, file: TempFile) -> None:
    assert isinstance(output.content, bytes)
    file.write(output.content)
    status = read_status(output.target, follow_links=False)
    if status is None or not stat.S_ISREG(status.st_mode):
        file.set_default_mode()
    elif os.access(output.target, os.R_OK):  # else only the owner may read it
        with open_file(output.target) as replaced:
            file.copy_attributes(replaced, owner=True, force=True)


def clear_leftovers(locks: Locks, inputs: Iterable[Path], *, links_only: bool = False) -> None:
    """Remove what killed runs have left in directories.

    Where a directory cannot be locked, nothing is removed: it may belong to a run that is at work.

    Args:
        locks: The directories.
        inputs: The files that the run reads: none is removed, whatever its name.
        links_only: Remove nothing but further names of files, so that no content is lost: for a
            run that does not know yet what it reads.
    """
    directories = [each for each in locks.directories if has_leftovers(each)]
    kept = set[str]()
    for path in inputs if directories else ():
        kept.update(part for part in path.parts if part.startswith(TEMP_PREFIX))
        with suppress(ModelError):  # one that leads nowhere is not read either
            real_parts = Path(resolve_path(path)).parts
            kept.update(part for part in real_parts if part.startswith(TEMP_PREFIX))
    for directory in directories:
        remove_leftovers(directory, kept=kept, links_only=links_only)


class _NewDirectory(NamedTuple):
    """A directory that is missing, with all that is below it.

    Attributes:
        temp_path: Its temporary name.
        output: The first file below it.
    """

    temp_path: Path
    output: Output


class _Run:
    """All files of one call, from their temporary names to their targets.

    Attributes:
        is_complete: Whether all are in place and stay.
    """

    def __init__(self, outputs: Sequence[Output], planned: Mapping[Path, os.stat_result]) -> None:
        self.outputs, self.planned = outputs, planned
        self.is_complete = False
        self.key = build_key()
        self.new_directories: dict[Path, _NewDirectory] = {}
        self.stages: list[Stage] = []
        self.temp_paths: list[Path] = []  # of the stages, when they are complete
        self.steps: list[Step] = []

    def make_directories(self) -> None:
        """Make the directories that are missing, the outermost one under a temporary name.

        Each has the rights that a new directory gets there, but none that the directory of its
        source lacks.
        """
        for output in self.outputs:
            missing = _list_missing_directories(output)
            if not missing:
                continue
            top = missing[0]
            if top not in self.new_directories:
                temp_path = top.with_name(build_temp_name(self.key, "dir"))
                self.new_directories[top] = _NewDirectory(temp_path, output)
            for directory, like in zip(missing, _list_likes(output, missing), strict=True):
                place = self._find_place(directory)
                if like is not None and not is_occupied(place):
                    root = _find_root(output, place.parent)
                    with translate_write_errors(output.display_path):
                        make_directory(place, like, root)

    def _find_place(self, path: Path) -> Path:
        """Return where a path is for now: below the temporary name of a new directory, or there."""
        for top in (path, *path.parents) if self.new_directories else ():
            if top in self.new_directories:
                return self.new_directories[top].temp_path / path.relative_to(top)
        return path

    def stage(self, write: WriteContent, map_stages: MapStages) -> None:
        """Write all files under temporary names, and check that all sources are as they were."""
        for output in self.outputs:
            place = self._find_place(output.target)
            self.stages.append(Stage(output, place, _find_root(output, place.parent), self.key))
        with closing(map_stages(partial(_write_stage, write=write), self.stages)) as results:
            for stage, written in zip(self.stages, results, strict=True):
                if not isinstance(written, Path):
                    raise written
                self.temp_paths.append(written)
                if not is_occupied(written):
                    raise WriteError(
                        "a worker wrote it, but it is not visible here",
                        path=str(stage.output.display_path),
                        hint=SAME_FILES_HINT,
                    )
        for output in self.outputs:
            _check_source(output)

    def place(self, deliver_signals: Callable[[], None]) -> None:
        """Give all files their names, or none.

        Signals are delivered between two steps: then all is put back.
        """
        self.steps = self._plan_steps()
        try:
            if len(self.steps) > 1:
                for step in self.steps:
                    deliver_signals()
                    check_planned(step)
                    keep_backup(step)
            for step in self.steps:
                deliver_signals()
                if step.is_directory:
                    self._flush_new_directory(step.temp_path)
                check_planned(step)
                place(step)
        except BaseException as error:
            self._undo(error)
            raise
        self.is_complete = True

    def _plan_steps(self) -> list[Step]:
        """Return what gets its name, in this order: other files, new directories, models."""
        first, models = list[Step](), list[Step]()
        for stage, temp_path in zip(self.stages, self.temp_paths, strict=True):
            output, target = stage.output, stage.place
            is_private = target != output.target
            with translate_write_errors(output.display_path):
                inode = require_inode(temp_path)
            planned = self.planned.get(output.target)
            backup = target.with_name(build_temp_name(self.key, "old")) if planned else None
            step = Step(
                *(temp_path, target, output.display_path, stage.root, inode),
                *(planned, backup, is_private),
            )
            (models if output.is_model and not is_private else first).append(step)
        directories = list[Step]()
        for top, (temp_path, output) in self.new_directories.items():
            with translate_write_errors(output.display_path):
                inode = require_inode(temp_path)
            root = _find_root(output, top.parent)
            step = Step(temp_path, top, output.display_path, root, inode, is_directory=True)
            directories.append(step)
        return [*first, *directories, *models]

    def _flush_new_directory(self, directory: Path) -> None:
        """Remove what workers have left in a new directory, and bring its names to the disk."""
        with translate_write_errors(directory):
            for folder, _, _ in os.walk(directory):
                remove_leftovers(Path(folder), self.key)
                _flush_directory(Path(folder))

    def _undo(self, error: BaseException) -> None:
        """Put all back that was there, unless the last step was made before the error.

        What was made is told by its inode, so this can be repeated.

        Raises:
            UndoError: Something cannot be put back.
        """
        failure: OSError | None = None
        kept = list[Step]()
        with suppress(OSError):
            self.is_complete = all(step.is_made() for step in self.steps)
        named = [step for step in self.steps if not step.is_private]  # others go with a directory
        for step in () if self.is_complete else reversed(named):
            try:
                undo(step)
            except OSError as reason:
                failure = failure or reason
                kept.append(step)
        if failure is not None:
            raise self._build_undo_error(error, failure, kept) from None

    def _build_undo_error(
        self, error: BaseException, failure: OSError, kept: Sequence[Step]
    ) -> UndoError:
        path, message = None, "interrupted"
        if isinstance(error, KvRenameError):
            path, message = error.path, error.message
        reason = failure.strerror or str(failure)
        message += "; the undo failed as well" + ("" if reason in message else f" ({reason})")
        new = [step.target for step in reversed(kept)]
        shown = format_list([str(step.display_path) for step in reversed(kept)])
        count = sum(not step.is_private for step in self.steps)
        message += f": {len(new):,} of {count:,} results are new ({shown}), "
        message += "the others as they were"
        hint = "to finish the work, run the same command again"
        return UndoError(message, path=path, hint=hint, new_paths=new)

    def clean_up(self) -> None:
        """Remove all temporary names of the run; what the system refuses to remove stays."""
        # By their names first: a directory that takes files cannot always be listed.
        for step in self.steps:
            for path in (step.backup, step.temp_path):
                if path is not None:
                    with suppress(OSError):
                        os.unlink(path)
        places = {stage.place.parent for stage in self.stages}
        places |= {top.parent for top in self.new_directories}
        for directory in places:
            remove_leftovers(directory, self.key)

    def flush(self) -> None:
        """Bring the names of all results to the disk, and that those of temporary files are gone.

        Raises:
            FlushError: That failed.
        """
        named = (step for step in self.steps if not step.is_private)
        for directory in dict.fromkeys(step.target.parent for step in named):
            try:
                _flush_directory(directory)
            except OSError as error:
                raise FlushError(
                    "all results are in place, but the directory could not be flushed to the "
                    f"disk: {error.strerror}",
                    path=str(directory),
                    hint="check the disk; after a power cut, run the same command again",
                ) from None


def _read_planned(outputs: Sequence[Output]) -> dict[Path, os.stat_result]:
    """Return the status of each file that may be replaced, as it is before anything is written.

    Raises:
        ModelError: One cannot be read, or is not the source that it should be.
    """
    planned = {}
    for output in outputs:
        if not (output.in_place or output.may_replace):
            continue
        status = read_status(output.target, follow_links=False)
        if output.in_place and not _is_source(status, output):
            raise build_changed_error(output.source or output.target)
        if status is not None and stat.S_ISDIR(status.st_mode):
            raise WriteError("is a directory", path=str(output.display_path))
        if status is not None:
            planned[output.target] = status
    return planned


def _is_source(status: os.stat_result | None, output: Output) -> bool:
    return (
        status is not None
        and output.identity is not None
        and FileIdentity.from_stat(status).matches(output.identity)
    )


def _check_source(output: Output) -> None:
    """Raise :class:`ModelError` if the file that another one is made from has changed."""
    if output.source is None or output.identity is None:
        return
    if not is_file_unchanged(output.source, output.identity):
        raise build_changed_error(output.source)


def _write_stage(stage: Stage, write: WriteContent) -> Written:
    """Write a file under a new temporary name, or return the error and leave nothing."""
    temp_path = stage.place.with_name(build_temp_name(stage.key, "new"))
    try:
        with TempFile(temp_path, stage.output.display_path, stage.root) as file:
            write(stage.output, file)
            file.finish()
    except KvRenameError as error:
        return error
    return temp_path


def _list_missing_directories(output: Output) -> list[Path]:
    """Return the directories to be made for a file, the outermost one first.

    Raises:
        ModelError: It cannot be determined what is there.
    """
    missing = list[Path]()
    for directory in output.target.parents if output.like_directory is not None else ():
        if is_occupied(directory):
            break
        missing.insert(0, directory)
    return missing


def _list_likes(output: Output, missing: Sequence[Path]) -> list[Path | None]:
    """Return for each missing directory the one whose rights it does not exceed.

    That is the directory of the source; for those above, up to the root, the ones above that.
    """
    like, likes = output.like_directory, list[Path | None]()
    for directory in reversed(missing):
        likes.insert(0, like)
        if like is not None and output.root in directory.parents:
            like = like.parent
    return likes


def _find_root(output: Output, directory: Path) -> Path | None:
    """Return the root of a file, if it is that directory or one above: else it is still missing."""
    root = output.root
    return root if root is not None and root in (directory, *directory.parents) else None


def _flush_directory(directory: Path) -> None:
    """Flush the names in a directory to the disk.

    Raises:
        OSError: That failed: the names are in effect, but may be lost with the power.
    """
    if os.name == "nt":  # pragma: no cover - directories cannot be opened there
        return
    descriptor = os.open(directory, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_SYNC_ERRNOS:
            raise
    finally:
        close_quietly(descriptor)
