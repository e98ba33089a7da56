"""Find the models below the paths of a command line, and choose where their results go."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from onnxkvrename.errors import ModelError, WriteError
from onnxkvrename.findings import find_similar
from onnxkvrename.rules.results import RenameJob
from onnxkvrename.storage.temp_file import TEMP_PREFIX


def find_jobs(
    models: Sequence[Path], output: Path | None = None, directory: Path | None = None
) -> tuple[RenameJob, ...]:
    """Return a job for each model below some paths.

    Queries the disk: lists directories and resolves links, but opens no file. So the
    models may be other ones by the time they are read, and may turn out not to be models.

    Args:
        models: Files, which need not end in ``.onnx``, and directories, searched for
            ``*.onnx`` at any depth. Linked directories are not entered.
        output: The file for the result of a single model.
        directory: The directory for results: each goes to the place below it that its
            model has below the common parent of all paths. Results of an earlier run in it
            are not taken for models. Without either, results replace the models.

    Returns:
        Each model once, whatever links lead to it: paths in the order given, and models in
        natural order within a directory (``layer_2`` before ``layer_10``).

    Raises:
        ModelError: A path does not exist, cannot be listed, or has no model below it.
        WriteError: Several results would go to one file, or a result to its own model.
    """
    models_by_real_path: dict[str, Path] = {}
    for path in models:
        for model in _find_models(path, directory):
            real_path = os.path.realpath(model)
            previous_path = models_by_real_path.get(real_path)
            if previous_path is None or previous_path.is_symlink():
                models_by_real_path[real_path] = model
    if output is not None and len(models_by_real_path) > 1:
        raise WriteError(
            f"cannot hold {len(models_by_real_path)} models",
            path=str(output),
            hint="-d DIR takes several",
        )
    jobs = tuple(
        build_job(model, _choose_output(model, models, output, directory))
        for model in models_by_real_path.values()
    )
    for job in jobs:
        if (output or directory) is not None and job.in_place:
            raise WriteError(
                "is the model itself", path=str(job.output), hint="to rename in place, drop -o/-d"
            )
    return jobs


def build_job(model: Path, output: Path | None = None) -> RenameJob:
    """Return the job that renames a model, after looking at where both paths lead.

    Args:
        model: The model.
        output: Where the result goes; by default it replaces the model.
    """
    if output is None:
        target = os.path.realpath(model) if os.path.islink(model) else os.path.abspath(model)
        return RenameJob(model, model, Path(target), in_place=True, same_directory=True)
    real_output = os.path.realpath(output)
    in_place = real_output == os.path.realpath(model)
    follow_link = in_place and os.path.islink(output)
    return RenameJob(
        model,
        output,
        target=Path(real_output if follow_link else os.path.abspath(output)),
        in_place=in_place,
        same_directory=os.path.realpath(output.parent) == os.path.realpath(model.parent),
    )


def _choose_output(
    model: Path, roots: Sequence[Path], output: Path | None, directory: Path | None
) -> Path | None:
    if output is not None or directory is None:
        return output
    folders = [path if os.path.isdir(path) else path.parent for path in roots]
    parent = os.path.commonpath([os.path.abspath(folder) for folder in folders])
    return directory / os.path.relpath(os.path.abspath(model), parent)


def _find_models(path: Path, results: Path | None) -> Iterator[Path]:
    """Yield the models at or below a path, except those in the directory `results`."""
    if os.path.isdir(path):
        yield from _search_directory(path, None if results is None else os.path.realpath(results))
        return
    try:
        os.lstat(path)
    except FileNotFoundError:
        raise ModelError("no such file", path=str(path), hint=_suggest_path(path)) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ModelError(f"cannot be read: {reason}", path=str(path)) from None
    yield path


def _search_directory(directory: Path, results: str | None) -> list[Path]:
    """Return the models below a directory, except those in the real path `results` below it."""
    models = []
    for folder, subfolders, names in os.walk(directory, onerror=_raise_model_error):
        models += [Path(folder, name) for name in names if name.endswith(".onnx")]
        # A run that was killed may have left half of a new directory.
        subfolders[:] = [name for name in subfolders if not name.startswith(TEMP_PREFIX)]
        if results is not None and os.path.realpath(folder) != results:
            subfolders[:] = [
                name
                for name in subfolders
                if os.path.realpath(os.path.join(folder, name)) != results
            ]
    if not models:
        raise ModelError("no .onnx file in it or below", path=str(directory))
    return sorted(models, key=_build_sort_key)


def _raise_model_error(error: OSError) -> None:
    raise ModelError(f"cannot be listed: {error.strerror}", path=str(error.filename))


def _build_sort_key(path: Path) -> list[tuple[bool, int, str]]:
    """Return a key that sorts ``layer_2`` before ``layer_10``."""
    return [
        (index % 2 == 1, int(part) if index % 2 else 0, part)
        for index, part in enumerate(re.split(r"([0-9]+)", str(path)))
    ]


def _suggest_path(path: Path) -> str | None:
    try:
        names = [name for name in os.listdir(path.parent) if name.endswith(".onnx")]
    except FileNotFoundError:
        return f"there is no directory {path.parent}"
    except OSError:
        return None
    similar = find_similar(path.name, names, cutoff=0.5)
    return f"did you mean {path.parent / similar}?" if similar else None
