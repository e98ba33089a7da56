"""Check that no result of a rename destroys another file that the run reads or writes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from onnxkvrename.errors import KvRenameError, WriteError
from onnxkvrename.files.run_files import RunFile, RunFiles
from onnxkvrename.model.external_data import DataFile, has_same_data
from onnxkvrename.renaming.prepare import PreparedModel
from onnxkvrename.renaming.prepare_sidecars import PreparedSidecar


class _Output(NamedTuple):
    """A result, and the index of the model whose error it is if it cannot be written."""

    model_index: int
    file: RunFile


def check_files_together(
    models: Sequence[PreparedModel],
    sidecars: Sequence[PreparedSidecar],
    read_files: Sequence[Path],
) -> tuple[PreparedModel, ...]:
    """Return the models, with an error for each whose results would destroy a file of the run.

    Such files are the models, their external data, sidecars, rules, and all other results.

    `read_files` are further files that the command reads.

    Raises:
        ModelError: It cannot be determined what is at a path.
    """
    files = RunFiles()
    for path in read_files:
        files.add_input(path, "a file that this run reads")
    outputs = [
        *_add_models(models, files),
        *_add_sidecars(sidecars, files),
        *_add_data_results(models, files),
    ]
    errors = dict(_find_different_data(models))
    for output in outputs:
        try:
            files.check_output(output.file)
        except WriteError as error:
            errors.setdefault(output.model_index, error)
    return tuple(
        model._replace(report=model.report._replace(error=model.report.error or errors.get(index)))
        for index, model in enumerate(models)
    )


def _add_models(models: Sequence[PreparedModel], files: RunFiles) -> list[_Output]:
    """Add the models and their data as inputs, the new models as outputs."""
    outputs = []
    for index, model in enumerate(models):
        job = model.job
        source = files.add_input(job.model, f"the model {job.model}")
        for data in model.data_files:
            files.add_input(data.path, f"external data of {job.model}")
        role = f"the result of {job.model}"
        if not job.in_place:
            outputs.append(_Output(index, files.add_output(job.output, role)))
        elif model.needs_write and model.report.has_changes:
            file = files.add_output(job.output, role, replaces=source)
            outputs.append(_Output(index, file))
    return outputs


def _add_sidecars(sidecars: Sequence[PreparedSidecar], files: RunFiles) -> list[_Output]:
    outputs = []
    for item in sidecars:
        job = item.sidecar.job
        source = files.add_input(job.model, f"the sidecar {job.model}")
        if item.plan is not None or not job.in_place:
            replaced = source if job.in_place else None
            role = f"the result of {job.model}"
            file = files.add_output(job.output, role, replaces=replaced)
            outputs.append(_Output(item.model_index, file))
    return outputs


def _add_data_results(models: Sequence[PreparedModel], files: RunFiles) -> list[_Output]:
    """Add the external data of results, once where models share it.

    Data that are in place already count: a result that goes there would destroy them.
    """
    outputs: dict[Path, _Output] = {}
    for index, model in enumerate(models):
        for path in model.data_paths:
            if path not in outputs:
                role = f"external data of {model.job.output}"
                outputs[path] = _Output(index, files.add_output(path, role))
    return list(outputs.values())


def _find_different_data(models: Sequence[PreparedModel]) -> Iterator[tuple[int, KvRenameError]]:
    """Yield the error of each model whose data go where another model has different data."""
    first_files: dict[Path, DataFile] = {}
    for index, model in enumerate(models):
        for file, path in zip(model.data_files, model.data_paths, strict=False):
            first = first_files.setdefault(path, file)
            if first.path != file.path and not has_same_data(file, first.path):
                message = "would hold two different data files"
                yield index, WriteError(message, path=str(path), hint="use one -d for each model")
