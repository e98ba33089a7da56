"""From the paths of a command line to models, and to places for their results."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from onnxkvrename.errors import ModelError, WriteError
from onnxkvrename.rules.results import RenameJob
from onnxkvrename.storage.temp_file import TEMP_PREFIX


def find_jobs(
    models: Sequence[Path], output: Path | None = None, directory: Path | None = None
) -> tuple[RenameJob, ...]:
    """Each model once, in natural order within a directory, with the place for its result.

    With ``output`` that is a file, with ``directory`` the place below it that the
    model has below the common parent of all paths given; else the model's own.

    Raises :class:`ModelError` for a path that leads to no model, and
    :class:`WriteError` where results would stand upon each other or their source.
    """
    found: dict[str, Path] = {}
    for path in models:
        for model in _find_models(path, directory):
            real = os.path.realpath(model)
            if real not in found or found[real].is_symlink():
                found[real] = model
    if output is not None and len(found) > 1:
        raise WriteError(
            f"cannot hold {len(found)} models", path=str(output), hint="-d DIR takes several"
        )
    jobs = tuple(
        build_job(model, _choose_output(model, models, output, directory))
        for model in found.values()
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
    model: Path, given: Sequence[Path], output: Path | None, directory: Path | None
) -> Path | None:
    if output is not None or directory is None:
        return output
    bases = [path if os.path.isdir(path) else path.parent for path in given]
    base = os.path.commonpath([os.path.abspath(base) for base in bases])
    return directory / os.path.relpath(os.path.abspath(model), base)


def _find_models(path: Path, results: Path | None) -> Iterator[Path]:
    """The models a path leads to, but for results of an earlier run below it."""
    if not os.path.isdir(path):
        try:
            os.lstat(path)
        except FileNotFoundError:
            raise ModelError("no such file", path=str(path), hint=_suggest_path(path)) from None
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ModelError(f"cannot be read: {reason}", path=str(path)) from None
        yield path
        return
    inside = []
    for folder, folders, names in os.walk(path, onerror=_raise_model_error):
        inside += [Path(folder, name) for name in names if name.endswith(".onnx")]
        # Of a directory in the making a dead run may have left the half.
        folders[:] = [name for name in folders if not name.startswith(TEMP_PREFIX)]
        if results is not None and os.path.realpath(folder) != os.path.realpath(results):
            kept = os.path.realpath(results)
            folders[:] = [f for f in folders if os.path.realpath(os.path.join(folder, f)) != kept]
    if not inside:
        raise ModelError("no .onnx file in it or below", path=str(path))
    yield from sorted(inside, key=_build_sort_key)


def _raise_model_error(error: OSError) -> None:
    raise ModelError(f"cannot be listed: {error.strerror}", path=str(error.filename))


def _build_sort_key(path: Path) -> list[tuple[bool, int, str]]:
    """Sorts ``layer_2`` before ``layer_10``."""
    return [
        (part.isdigit(), int(part) if part.isdigit() else 0, part)
        for part in re.split(r"([0-9]+)", str(path))
    ]


def _suggest_path(path: Path) -> str | None:
    import difflib

    try:
        names = [name for name in os.listdir(path.parent) if name.endswith(".onnx")]
    except FileNotFoundError:
        return f"there is no directory {path.parent}"
    except OSError:
        return None
    close = difflib.get_close_matches(path.name, names, n=1, cutoff=0.5)
    return f"did you mean {path.parent / close[0]}?" if close else None
