"""Write the results of all models under temporary names, then put all in place or none."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from onnxkvrename.errors import FlushError, KvRenameError, UndoError, WriteError
from onnxkvrename.renaming.parallel import SAME_FILES_HINT, map_ordered
from onnxkvrename.renaming.prepare import SplicePlan
from onnxkvrename.renaming.write import WriteTask, write_temp_file
from onnxkvrename.storage.directories import (
    find_existing_directory,
    find_missing_directories,
    make_directories,
)
from onnxkvrename.storage.lock import hold_locks
from onnxkvrename.storage.read import (
    FileIdentity,
    build_changed_error,
    is_occupied,
    read_status,
)
from onnxkvrename.storage.temp_file import ProgressCallback, ReadyFile, remove_temp_files
from onnxkvrename.storage.transaction import Transaction

if TYPE_CHECKING:
    from concurrent.futures import Executor


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

    def track_bytes(self, doing: str, size: int) -> ProgressCallback | None:
        """Announce that ``size`` bytes are written next.

        Args:
            doing: The step, such as ``writing``.
            size: The number of bytes.

        Returns:
            A function to call with the number of bytes written since its last call, or ``None``.
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
        inputs: All files that the command reads: no clean-up removes one.
    """

    def __init__(
        self,
        tasks: Sequence[WriteTask],
        progress: Progress | None = None,
        executor: Executor | None = None,
        inputs: Sequence[Path] = (),
    ) -> None:
        self.tasks = tasks
        self.progress = progress
        self.executor = executor
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
        if not self.tasks:
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
        """Lock the directories of all targets, make those that are missing, and write."""
        wanted = dict.fromkeys(task.target.parent for task in self.tasks)
        there = list(map(find_existing_directory, wanted))
        overwritten = _read_overwritten(self.tasks)
        with hold_locks(there), ExitStack() as locks:
            missing = (find_missing_directories(task.target) for task in self.tasks)
            made = list(dict.fromkeys(path for paths in missing for path in paths))
            self._transaction = Transaction(list(wanted), overwritten, made)
            with self._transaction as transaction:
                self._make_directories(transaction)
                locks.enter_context(hold_locks(made))
                kept = [path.name for path in self.inputs]
                for directory in dict.fromkeys([*there, *wanted]):
                    remove_temp_files(directory, kept=kept)
                self._write_and_place(transaction)

    def _make_directories(self, transaction: Transaction) -> None:
        """Make the directories that are missing, that of a model first: there, the next run looks
        for what a killed one has left."""
        models = [task for task in self.tasks if isinstance(task.source, SplicePlan)]
        for index, task in enumerate((*models, *self.tasks)):
            make_directories(task.target, task.source_directory, task.root)
            if transaction.made and index == 0:
                transaction.announce(task.target.parent)

    def _write_and_place(self, transaction: Transaction) -> None:
        """Write all temporary files, check the sources once more, and place all results.

        Models come last, so that none is ever in place without the files it needs. What
        someone else saves at a target meanwhile stays, and ends the run.
        """
        tasks = [task._replace(run_key=transaction.key) for task in self.tasks]
        files = self._write_temp_files(tasks)
        for task in tasks:
            error = task.find_source_error()
            if error is not None:
                raise PlaceError(task.model_index, error)
        model_files, other_files = list[ReadyFile](), list[ReadyFile]()
        for task, file in zip(tasks, files, strict=True):
            replaces = file.target in transaction.overwritten
            group = model_files if isinstance(task.source, SplicePlan) else other_files
            group.append(file._replace(overwrites_target=replaces))
        transaction.place([*other_files, *model_files])

    def _write_temp_files(self, tasks: Sequence[WriteTask]) -> list[ReadyFile]:
        count_file, write = None, write_temp_file
        if self.progress is not None:
            count_file = self.progress.track_models("writing", len(tasks))
            if self.executor is None:  # a worker cannot count its bytes here
                size = sum(task.source.size for task in tasks)
                count_bytes = self.progress.track_bytes("writing", size)
                write = partial(write_temp_file, count_bytes=count_bytes)
        files = []
        with closing(map_ordered(write, tasks, self.executor, count_file)) as results:
            for task, result in zip(tasks, results, strict=True):
                if isinstance(result, KvRenameError):
                    raise PlaceError(task.model_index, result)
                if self.executor is not None and not is_occupied(result.temp_path):
                    path = str(task.display_path)
                    problem = "a worker wrote it, but it is not visible here"
                    error = WriteError(problem, path=path, hint=SAME_FILES_HINT)
                    raise PlaceError(task.model_index, error)
                files.append(result)
        return files


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
