"""The files that a run writes: models, their data, and text files that repeat their names."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from onnxkvrename.errors import FlushError, KvRenameError, UndoError
from onnxkvrename.files.find import RenameJob
from onnxkvrename.files.lock import Locks
from onnxkvrename.files.read import OpenFile, build_changed_error, open_file
from onnxkvrename.files.staged import Output, Stage, Written, write_all
from onnxkvrename.files.temp_file import ProgressCallback, TempFile
from onnxkvrename.model.external_data import DataFile, open_data_file
from onnxkvrename.model.file import check_written_model, write_pieces
from onnxkvrename.renaming.parallel import map_ordered, name_worker
from onnxkvrename.renaming.prepare import PreparedModel, SidecarPlan, SplicePlan

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from onnxkvrename.renaming.prepare_sidecars import PreparedSidecar


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
    """A result of one model could not be written or put in place.

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


class Result(NamedTuple):
    """A file to write, and the position of the model in the command that it belongs to."""

    model_index: int
    output: Output


def list_results(
    models: Sequence[PreparedModel], sidecars: Sequence[PreparedSidecar], *, force: bool
) -> tuple[Result, ...]:
    """Return the data files, models and text files to write; data that models share comes once."""
    return (*_list_model_results(models, force), *_list_sidecar_results(sidecars, force))


def _list_model_results(models: Sequence[PreparedModel], force: bool) -> Iterator[Result]:
    seen: set[Path] = set()
    for index, model in enumerate(models):
        for file, path in model.data_copies:
            target = Path(os.path.abspath(path))
            if target not in seen:
                seen.add(target)
                output = Output(
                    target,
                    path,
                    content=file,
                    source=file.path,
                    identity=file.identity,
                    may_replace=force,
                    root=model.job.root,
                    like_directory=(file.directory / file.location).parent,
                )
                yield Result(index, output)
        if model.needs_write and model.splice_plan is not None:
            output = _build_output(model.splice_plan, model.job, force=force)
            yield Result(index, output._replace(is_model=True))


def _list_sidecar_results(sidecars: Sequence[PreparedSidecar], force: bool) -> Iterator[Result]:
    for sidecar in sidecars:
        if sidecar.plan is not None:
            output = _build_output(sidecar.plan, sidecar.sidecar.job, force=force)
            yield Result(sidecar.model_index, output)


def _build_output(plan: SplicePlan | SidecarPlan, job: RenameJob, *, force: bool) -> Output:
    source = plan.model_path if isinstance(plan, SplicePlan) else plan.path
    return Output(
        job.target,
        job.output,
        content=plan,
        source=source,
        identity=plan.identity,
        in_place=job.in_place,
        may_replace=force,
        root=job.root,
        like_directory=Path(os.path.abspath(source)).parent,
    )


def write_results(
    results: Sequence[Result],
    progress: Progress | None = None,
    executor: Executor | None = None,
    *,
    locks: Locks,
    force: bool,
) -> None:
    """Write all files of a command, or none.

    Args:
        results: The files.
        progress: Where to show how far the work is.
        executor: What writes the temporary files; by default this process does.
        locks: The directories that the run has locked.
        force: Whether to continue where owner and access control list cannot be kept.

    Raises:
        PlaceError: One could not be written. All files are as they were, except for its
            ``kept_targets``.
        FlushError: All files are in place, but perhaps not on the disk.
        KvRenameError: As PlaceError, for an error that does not belong to one model.
        WrittenInterrupt: An interrupt came when all files were in place.
    """
    count_file, count_bytes = None, None
    if progress is not None and results:
        count_file = progress.track_models("writing", len(results))
        if executor is None:  # a worker cannot count its bytes here
            size = sum(_measure(result.output) for result in results)
            count_bytes = progress.track_bytes("writing", size)

    def map_stages(
        work: Callable[[Stage], Written], stages: Sequence[Stage]
    ) -> Generator[Written, None, None]:
        return map_ordered(partial(_work_as_worker, work), stages, executor, count_file)

    try:
        write_all(
            [result.output for result in results],
            partial(write_result, force=force, count_bytes=count_bytes),
            locks=locks,
            map_stages=map_stages,
        )
    except FlushError:
        raise
    except KvRenameError as error:
        model_index = _find_model_index(error, results)
        if model_index is None:
            raise
        kept_targets = error.new_paths if isinstance(error, UndoError) else ()
        raise PlaceError(model_index, error, kept_targets) from None


def _measure(output: Output) -> int:
    """Return the bytes of a result."""
    assert isinstance(output.content, SplicePlan | SidecarPlan | DataFile)
    return output.content.size


def _work_as_worker(work: Callable[[Stage], Written], stage: Stage) -> Written:
    """Do some work, and name this worker in its error."""
    written = work(stage)
    return written if isinstance(written, Path) else name_worker(written)


def _find_model_index(error: KvRenameError, results: Sequence[Result]) -> int | None:
    """Return the model whose file an error names, or the directory of this file alone."""
    if error.path is None:
        return None
    path = Path(error.path)
    for index, output in results:
        if error.path in (str(output.target), str(output.display_path), str(output.source)):
            return index
    indexes = {index for index, output in results if path in output.target.parents}
    return indexes.pop() if len(indexes) == 1 else None


def write_result(
    output: Output,
    file: TempFile,
    *,
    force: bool = False,
    count_bytes: ProgressCallback | None = None,
) -> None:
    """Write the content of a result, with the attributes of its source.

    A model is read back and compared with its plan. Bytes are counted as they are written.

    Raises:
        KvRenameError: The source has changed or cannot be read, or the result cannot be written.
    """
    file.progress = count_bytes
    content = output.content
    with _open_source(output) as source:
        if isinstance(content, SplicePlan):
            write_pieces(source, content.pieces, file)
            check_written_model(file, content.size, content.expected_signature)
        elif isinstance(content, SidecarPlan):
            file.write(content.content)
        else:
            file.copy_from(source, 0, source.size)
        # The model chose the name of its data: what comes with it is never a program.
        mask = 0o666 if isinstance(content, DataFile) else 0o777
        file.copy_attributes(source, owner=output.in_place, force=force, mask=mask)
        if not source.is_unchanged():
            raise build_changed_error(source.path)


@contextmanager
def _open_source(output: Output) -> Iterator[OpenFile]:
    """Open the source of a result, which must still be in the state that was read."""
    if isinstance(output.content, DataFile):
        with open_data_file(output.content) as source:
            yield source
        return
    assert output.source is not None
    assert output.identity is not None
    with open_file(output.source) as source:
        if not source.identity.matches(output.identity):
            raise build_changed_error(output.source)
        yield source
