"""Write the results of all models under temporary names, then put all in place or none."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from onnxkvrename.errors import FlushError, KvRenameError, UndoError, WriteError
from onnxkvrename.model.external_data import DataFile
from onnxkvrename.renaming.output_path import find_outermost_missing_directory
from onnxkvrename.renaming.parallel import SAME_FILES_HINT, map_ordered
from onnxkvrename.renaming.prepare import SidecarPlan, SplicePlan
from onnxkvrename.renaming.write import WriteTask, write_temp_file
from onnxkvrename.storage.lock import find_lock_path, hold_locks
from onnxkvrename.storage.read import (
    FileIdentity,
    build_changed_error,
    is_occupied,
    read_status,
)
from onnxkvrename.storage.temp_file import (
    LOCK_SUFFIX,
    ProgressCallback,
    ReadyFile,
    build_temp_prefix,
    find_stale_temp_files,
    resolve_moved_path,
)
from onnxkvrename.storage.transaction import Transaction

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from onnxkvrename.storage.directories import StagedDirectory


class Progress(Protocol):
    """A display of how far the work is. Each method may return ``None`` to show nothing."""

    def track_models(self, doing: str, count: int) -> ProgressCallback | None:
        """Announce that ``count`` models are read or written next.

        Args:
            doing: The step, such as ``reading``.
            count: The number of models.

        Returns:
            A function to call with the number of models done since its last call, or ``None``.
        """

    def track_data_file(self, name: str, size: int) -> ProgressCallback | None:
        """Announce the copy of a data file.

        Args:
            name: The name of the file.
            size: Its size in bytes.

        Returns:
            A function to call with the number of bytes copied since its last call, or ``None``.
        """


class PlaceError(Exception):
    """The result of one model could not be written or put in place.

    Attributes:
        model_index: The position of the model in the command.
        error: The error of that model.
        kept_targets: Results that are in place and could not be undone.
    """

    def __init__(
        self, model_index: int, error: KvRenameError, kept_targets: Sequence[Path] = ()
    ) -> None:
        super().__init__(model_index, error, kept_targets)
        self.model_index = model_index
        self.error = error
        self.kept_targets = tuple(kept_targets)


class BatchWriter:
    """Writes all files of one command, or none.

    Args:
        tasks: The files to write, those of one model after the other.
        progress: Where to show how far the work is.
        executor: What writes the temporary files; by default this process does.
        directory_map: Directories that get another name in the end, by absolute paths.
        inputs: All files that the command reads: no clean-up removes one.
    """

    def __init__(
        self,
        tasks: Sequence[WriteTask],
        progress: Progress | None = None,
        executor: Executor | None = None,
        directory_map: Mapping[Path, Path] | None = None,
        inputs: Sequence[Path] = (),
    ) -> None:
        self.tasks = tasks
        self.progress = progress
        self.executor = executor
        self.directory_map = directory_map or {}
        self.inputs = inputs
        self._transaction: Transaction | None = None

    @property
    def is_done(self) -> bool:
        """Whether all files are in place and stay, also if the clean-up was interrupted."""
        return self._transaction is not None and self._transaction.is_complete

    def write(self) -> None:
        """Write all files under temporary names, and put them in place together.

        Raises:
            PlaceError: One could not be written. All files are as they were, except for
                its ``kept_targets``.
            FlushError: All files are in place, but perhaps not on the disk.
            KvRenameError: As PlaceError, for an error that does not belong to one model.
        """
        if not self.tasks and not self.directory_map:
            return
        try:
            self._lock_and_write()
        except FlushError:
            raise
        except KvRenameError as error:
            model_index = self._find_model_index(error)
            if model_index is None:
                raise
            kept_targets = error.new_paths if isinstance(error, UndoError) else ()
            raise PlaceError(model_index, error, kept_targets) from None

    def _find_model_index(self, error: KvRenameError) -> int | None:
        """Return the model whose file an error names, or the directory of this file alone."""
        if error.path is None:
            return None
        path = Path(error.path)
        for task in self.tasks:
            if error.path in (str(task.target), str(task.display_path)):
                return task.model_index
        indexes = {task.model_index for task in self.tasks if path in task.target.parents}
        return indexes.pop() if len(indexes) == 1 else None

    def _lock_and_write(self) -> None:
        new_directories = [find_outermost_missing_directory(task.target) for task in self.tasks]
        targets = [
            directory or task.target
            for directory, task in zip(new_directories, self.tasks, strict=True)
        ]
        locked = dict.fromkeys([*self.directory_map, *self.directory_map.values(), *targets])
        with ExitStack() as stack:
            if self.directory_map:
                from onnxkvrename.storage.intent import write_intent  # only for --seed-cache

                stack.enter_context(write_intent(self.directory_map))
            stack.enter_context(self._lock(tuple(locked)))
            if not any(new_directories):
                self._write_and_place(self.tasks)
                return
            from onnxkvrename.storage.directories import StagedDirectory  # not in place

            roots = dict(zip(new_directories, (task.root for task in self.tasks), strict=True))
            staged = {
                directory: stack.enter_context(StagedDirectory(directory, root))
                for directory, root in roots.items()
                if directory is not None
            }
            tasks = [
                task if directory is None else _redirect_task(task, staged[directory])
                for task, directory in zip(self.tasks, new_directories, strict=True)
            ]
            self._write_and_place(tasks, tuple(staged.values()))

    @contextmanager
    def _lock(self, targets: Sequence[Path]) -> Iterator[None]:
        """Lock the targets, and remove what killed runs left beside them.

        What this run leaves is removed when it fails. When it ends well, an executor may have
        left something (a worker that died, and whose work another one did), and what a half
        done run left is not needed any more.
        """
        with hold_locks(targets, self.directory_map):
            kept = _remove_stale_temp_files(targets, self.inputs)
            moved = [resolve_moved_path(path, self.directory_map) for path in targets]
            try:
                yield
            except BaseException:
                # An interrupt may come after the directories have their new names.
                paths = dict.fromkeys([*targets, *moved])
                _remove_stale_temp_files(paths, self.inputs)
                raise
            if self.executor is not None or kept:
                _remove_stale_temp_files(moved, self.inputs)

    def _write_and_place(
        self, tasks: Sequence[WriteTask], staged: Sequence[StagedDirectory] = ()
    ) -> None:
        """Write all temporary files, check the sources once more, and place all results.

        Models come last, so that none is ever in place without the files it needs. What
        someone else saves at a target meanwhile stays, and ends the run.
        """
        overwritten = _read_overwritten(tasks)
        self._transaction = Transaction(overwritten)
        with self._transaction as transaction:
            files = self._write_temp_files(tasks)
            for task in tasks:
                error = task.find_source_error()
                if error is not None:
                    raise PlaceError(task.model_index, error)
            model_files, other_files = list[ReadyFile](), list[ReadyFile]()
            files_in_staged = list[ReadyFile]()
            staged_paths = {directory.directory for directory in staged}
            for task, file in zip(tasks, files, strict=True):
                if not staged_paths.isdisjoint(file.target.parents):
                    files_in_staged.append(file)
                    continue
                if file.target not in overwritten:
                    file = file._replace(overwrites_target=False)
                if isinstance(task.source, SplicePlan):
                    model_files.append(file)
                else:
                    other_files.append(file)
            renames_nothing = not self.directory_map
            placed_files = [*other_files, *model_files]
            transaction.write_record(placed_files, staged, self.directory_map)
            if staged:
                is_last = renames_nothing and not other_files and not model_files
                for file in files_in_staged:
                    file.move_into_place()  # they come and go with their directories
                transaction.place_directories(staged, final=is_last)
            transaction.place_files(other_files, final=renames_nothing and not model_files)
            transaction.place_files(model_files, final=renames_nothing)
            transaction.rename_directories(self.directory_map)

    def _write_temp_files(self, tasks: Sequence[WriteTask]) -> list[ReadyFile]:
        count_file = None
        if self.progress is not None:
            count_file = self.progress.track_models("writing", len(tasks))
        # A worker cannot show its progress here.
        write = write_temp_file if self.executor is not None else self._write_temp_file
        files = []
        with closing(map_ordered(write, tasks, self.executor, count_file)) as results:
            for task, result in zip(tasks, results, strict=True):
                if isinstance(result, KvRenameError):
                    raise PlaceError(task.model_index, result)
                if self.executor is not None and not is_occupied(result.temp_path):
                    path = str(task.display_path)
                    problem = "a worker wrote it, but it is not to be seen here"
                    error = WriteError(problem, path=path, hint=SAME_FILES_HINT)
                    raise PlaceError(task.model_index, error)
                files.append(result)
        return files

    def _write_temp_file(self, task: WriteTask) -> ReadyFile | KvRenameError:
        count_bytes = None
        if self.progress is not None and isinstance(task.source, DataFile):
            count_bytes = self.progress.track_data_file(task.source.location, task.source.size)
        return write_temp_file(task, count_bytes)


def _read_overwritten(tasks: Iterable[WriteTask]) -> dict[Path, os.stat_result]:
    """Return the status of each file that may be replaced, as it is before anything is written.

    Raises:
        KvRenameError: One cannot be read, or is not the source that it should be.
    """
    overwritten = {}
    for task in (task for task in tasks if task.in_place or task.force):
        status = read_status(task.target, follow_links=False)
        if task.in_place and not (
            status and FileIdentity.from_stat(status).matches(task.source.identity)
        ):
            raise PlaceError(task.model_index, build_changed_error(task.source_path))
        if status is not None:
            overwritten[task.target] = status
    return overwritten


def _redirect_task(task: WriteTask, stage: StagedDirectory) -> WriteTask:
    """Return a task that writes into a staged directory."""
    source, top = task.source_directory, task.root
    if isinstance(task.source, SidecarPlan):  # it may come from another place than its model
        top = task.target.parent
    target = stage.prepare_path(task.target, source, top)
    return task._replace(target=target, root=stage.root)


def find_targets_with_leftovers(targets: Collection[Path]) -> list[Path]:
    """Return the targets with temporary files beside them, of a dead run or a living one."""
    prefixes = {
        (path.parent, path.name[: len(build_temp_prefix(path))])
        for path in find_stale_temp_files(targets)
    }
    return [target for target in targets if (target.parent, build_temp_prefix(target)) in prefixes]


def _remove_stale_temp_files(
    targets: Collection[Path], inputs: Iterable[Path], *, links_only: bool = False
) -> bool:
    """Remove what is left beside locked targets, and return whether a half done run keeps some."""
    stale = [
        path for path in find_stale_temp_files(targets) if not path.name.endswith(f"-{LOCK_SUFFIX}")
    ]
    if not stale:
        return False
    from onnxkvrename.storage.clean_up import remove_stale_temp_files  # after a kill or failure

    links_of = targets if links_only else None
    return remove_stale_temp_files(stale, inputs=inputs, links_of=links_of)


def remove_stale_files(
    targets: Sequence[Path], inputs: Iterable[Path], *, links_only: bool = False
) -> bool:
    """Remove what killed runs left beside these paths; a run that is still alive keeps its own.

    A backup is a second link of a model, and removing it changes the status of the model's
    file, so such links must be removed before the model is opened. All else must wait until it
    is known what the run reads.

    Args:
        targets: The paths; what is left is in their directories, which are listed.
        inputs: The files that the run reads, as far as they are known.
        links_only: Remove nothing but second links of the targets.

    Returns:
        Whether files are kept because a run was killed half way: they are needed until this
        one has finished its work.
    """
    stale = find_targets_with_leftovers(targets)
    if stale:
        with suppress(WriteError), hold_locks(stale):
            return _remove_stale_temp_files(stale, inputs, links_only=links_only)
    return False


def find_targets_to_clean(target: Path, root: Path | None) -> Iterator[Path]:
    """Yield the paths beside which an earlier run with this target may have left something.

    That is the target itself, or the directory that had to be made for it: one that is still
    missing, or one that is there by now with a lock beside it.

    Args:
        target: The path of the result.
        root: The directory that was given for results, ``None`` for in place. Nothing is
            cleaned where a link leads out of it.
    """
    if root is None:
        yield target
        return
    if target.parent != root:
        from onnxkvrename.storage.open_beneath import check_no_link  # most results need none

        try:
            check_no_link(target, root)
        except WriteError:
            return  # an error of this result, once it is prepared
    missing = find_outermost_missing_directory(target)
    yield missing or target
    for directory in target.parents:
        if is_occupied(directory) and is_occupied(find_lock_path(directory)):
            yield directory
