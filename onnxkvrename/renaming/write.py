"""The files that a run writes: each under a temporary name, and read back before it is placed."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from onnxkvrename.errors import KvRenameError
from onnxkvrename.model.external_data import DataFile, open_data_file
from onnxkvrename.model.file import check_written_model, write_pieces
from onnxkvrename.renaming.parallel import name_worker
from onnxkvrename.renaming.prepare import PreparedModel, SidecarPlan, SplicePlan
from onnxkvrename.rules.results import RenameJob
from onnxkvrename.storage.read import (
    OpenFile,
    build_changed_error,
    is_file_unchanged,
    open_file,
)
from onnxkvrename.storage.temp_file import ProgressCallback, ReadyFile, TempFile

if TYPE_CHECKING:
    from onnxkvrename.renaming.prepare_sidecars import PreparedSidecar


class WriteTask(NamedTuple):
    """A file to write; it may travel between processes.

    Attributes:
        model_index: The model of the command that the file belongs to.
        source: How a model or a text file is made, or the data file to copy.
        target: The absolute path that the file is for.
        display_path: That path as the user calls it, for messages.
        in_place: Whether it replaces its source.
        force: Whether to overwrite an existing file, and to give up on keeping the owner.
        root: The directory below which no link may lead to the target; ``None`` for in place.
        run_key: The key of the temporary names of the run.
    """

    model_index: int
    source: SplicePlan | DataFile | SidecarPlan
    target: Path
    display_path: Path
    in_place: bool
    force: bool
    root: Path | None = None
    run_key: str | None = None

    def find_source_error(self) -> KvRenameError | None:
        """Return the error of a source that is no longer in the state that was read."""
        try:
            if is_file_unchanged(self.source_path, self.source.identity):
                return None
        except KvRenameError as error:
            return error
        return build_changed_error(self.source_path)

    @property
    def source_path(self) -> Path:
        """The file that the result is made from."""
        return self.source.model_path if isinstance(self.source, SplicePlan) else self.source.path

    @property
    def source_directory(self) -> Path:
        """The directory of the source, in the same place relative to the directory of the model."""
        if isinstance(self.source, DataFile):
            return (self.source.directory / self.source.location).parent
        return Path(os.path.abspath(self.source_path)).parent


def list_tasks(
    models: Sequence[PreparedModel], sidecars: Sequence[PreparedSidecar], *, force: bool
) -> tuple[WriteTask, ...]:
    """Return the data files, models and text files to write; data that models share comes once."""
    return (*_list_model_tasks(models, force), *_list_sidecar_tasks(sidecars, force))


def _list_model_tasks(models: Sequence[PreparedModel], force: bool) -> Iterator[WriteTask]:
    seen: set[Path] = set()
    for index, model in enumerate(models):
        for file, output in model.data_copies:
            target = Path(os.path.abspath(output))
            if target not in seen:
                seen.add(target)
                root = model.job.root
                yield WriteTask(index, file, target, output, False, force, root)
        if model.needs_write and model.splice_plan is not None:
            yield _build_task(index, model.splice_plan, model.job, force)


def _list_sidecar_tasks(sidecars: Sequence[PreparedSidecar], force: bool) -> Iterator[WriteTask]:
    for sidecar in sidecars:
        if sidecar.plan is not None:
            yield _build_task(sidecar.model_index, sidecar.plan, sidecar.sidecar.job, force)


def _build_task(
    model_index: int, plan: SplicePlan | SidecarPlan, job: RenameJob, force: bool
) -> WriteTask:
    return WriteTask(model_index, plan, job.target, job.output, job.in_place, force, job.root)


def write_temp_file(
    task: WriteTask, count_bytes: ProgressCallback | None = None
) -> ReadyFile | KvRenameError:
    """Write a file completely, under a temporary name beside its target.

    A model is read back and compared with its plan. Bytes are counted as they are written. Either
    the file is ready to be put in place; or there is an error, and no file is left.
    """
    try:
        with (
            _open_source(task) as source,
            TempFile(task.target, task.display_path, task.root, task.run_key, count_bytes) as file,
        ):
            if isinstance(task.source, SplicePlan):
                write_pieces(source, task.source.pieces, file)
                check_written_model(file, task.source.size, task.source.expected_signature)
            elif isinstance(task.source, SidecarPlan):
                file.write(task.source.content)
            else:
                file.copy_from(source, 0, source.size)
            # The model chose the name of its data: what comes with it is never a program.
            mask = 0o666 if isinstance(task.source, DataFile) else 0o777
            file.copy_attributes(source, owner=task.in_place, force=task.force, mask=mask)
            if not source.is_unchanged():
                raise build_changed_error(task.source_path)
            return file.finish(replace=task.in_place or task.force)
    except KvRenameError as error:
        return name_worker(error)


@contextmanager
def _open_source(task: WriteTask) -> Iterator[OpenFile]:
    """Open the source of a result, which must still be in the state that was read."""
    if isinstance(task.source, DataFile):
        with open_data_file(task.source) as source:
            yield source
        return
    with open_file(task.source_path) as source:
        if not source.identity.matches(task.source.identity):
            raise build_changed_error(task.source_path)
        yield source
