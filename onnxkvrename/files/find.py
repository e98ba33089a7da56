"""Find the models below the paths of a command line, and where their results go."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from onnxkvrename.errors import MissingFileError, ModelError, WriteError
from onnxkvrename.files.read import (
    MemoryFile,
    ModelSource,
    is_directory,
    is_link,
    read_status,
    resolve_path,
)
from onnxkvrename.files.temp_file import TEMP_PREFIX
from onnxkvrename.text import find_similar, quote_path, quote_word

_URL = r"(?i)[a-z][a-z0-9+.-]+://|(?:s3|gs|gcs|az|abfss?|wasbs?|hdfs|https?|ftp|file|hf):/"
"""The start of a URL, also as it is left in a `Path`, which makes one slash of two."""


class RenameJob(NamedTuple):
    """A model, and where its result goes; :func:`build_job` makes one.

    Attributes:
        model: The model.
        output: Where the result goes, as the user calls it; the model itself for in place.
        target: The file that the result replaces or makes, as an absolute path.
        in_place: Whether the result replaces the model.
        same_directory: Whether the result lies beside the model, so that external data stays.
        root: The directory that the user gave for results, as an absolute path; no link below
            it may lead a result elsewhere. ``None`` for in place.
    """

    model: Path
    output: Path
    target: Path
    in_place: bool
    same_directory: bool
    root: Path | None = None


def check_is_local(path: str, *, is_output: bool = False) -> None:
    """Refuse a URL, which would be treated as a path below a directory such as ``s3:``.

    The path is as the user gave it. One below such a directory can be given as ``./s3:/…`` or as an
    absolute one.

    Raises:
        ModelError: It is a URL, and to be read.
        WriteError: It is a URL, and to be written.
    """
    if ":/" not in path or re.match(_URL, path) is None:
        return
    if path[:5].lower() == "file:":
        raise ModelError("is a URL, not a path", path=path, hint="pass the path without file://")
    if is_output:
        hint = "write a local file, then upload it"
        raise WriteError("is a URL, but only local files can be written", path=path, hint=hint)
    hint = "download the file first, then pass its local path"
    raise ModelError("is a URL, but only local files can be read", path=path, hint=hint)


def find_jobs(
    models: Sequence[Path],
    output: Path | None = None,
    directory: Path | None = None,
) -> tuple[RenameJob, ...]:
    """Return a job for each model below some paths.

    Queries the disk: lists directories and resolves links, but opens no file. So the
    models may be other ones by the time they are read, and may turn out not to be models.
    Each path is queried once: it cannot be a directory for one model and none for the next.

    Args:
        models: Files, which need not end in ``.onnx``, and directories, searched for
            ``*.onnx`` at any depth. Linked directories are not entered.
        output: The file for the result of a single model.
        directory: The directory for results: each goes to the place below it that its
            model has below the common parent of all paths. Results of an earlier run in it
            are not treated as models. Without either, results replace the models.

    Returns:
        Each model once, whatever links lead to it: paths in the order given, and models in
        natural order within a directory (``layer_2`` before ``layer_10``).

    Raises:
        ModelError: A path does not exist, cannot be queried or listed, or has no model below it.
        WriteError: Several results would go to one file, or a result to its own model.
    """
    results = None if directory is None else read_status(directory)
    found = [_find_models(path, results) for path in models]
    models_by_real_path: dict[str, Path] = {}
    for model in (model for paths in found for model in paths.models):
        real_path = identify_path(model)
        previous_path = models_by_real_path.get(real_path)
        if previous_path is None or is_link(previous_path):
            models_by_real_path[real_path] = model
    if output is not None and len(models_by_real_path) > 1:
        raise WriteError(
            f"is one file, but there are {len(models_by_real_path)} models",
            path=str(output),
            hint="`-d renamed` takes several",
        )
    parent = ""
    if directory is not None and found:
        parent = os.path.commonpath([os.path.abspath(paths.directory) for paths in found])
    jobs = tuple(
        build_job(model, _choose_output(model, parent, output, directory), directory)
        for model in models_by_real_path.values()
    )
    for job in jobs:
        if (output or directory) is not None and job.in_place:
            raise WriteError(
                "is the model itself",
                path=str(job.output),
                hint="to rename in place, omit -o and -d",
            )
    return jobs


def list_models(sources: Sequence[ModelSource]) -> tuple[ModelSource, ...]:
    """Return the models in memory, then those below the paths, as :func:`find_jobs` does."""
    in_memory = [source for source in sources if isinstance(source, MemoryFile)]
    jobs = find_jobs([source for source in sources if isinstance(source, Path)])
    return (*in_memory, *(job.model for job in jobs))


def build_job(model: Path, output: Path | None = None, root: Path | None = None) -> RenameJob:
    """Return the job that renames a model, after looking at where both paths lead.

    Without `output` the result replaces the model. The `root` is the directory that the user gave,
    `output` or one above it; by default the one that `output` is in.

    Raises:
        ModelError: It cannot be determined what is at one of the paths.
    """
    if output is None:
        target = resolve_path(model) if is_link(model) else os.path.abspath(model)
        return RenameJob(model, model, Path(target), in_place=True, same_directory=True)
    real_output = resolve_path(output)
    in_place = real_output == resolve_path(model)
    follow_link = in_place and is_link(output)
    return RenameJob(
        model,
        output,
        target=Path(real_output if follow_link else os.path.abspath(output)),
        in_place=in_place,
        same_directory=resolve_path(output.parent) == resolve_path(model.parent),
        root=None if in_place else Path(os.path.abspath(root or output.parent)),
    )


def identify_path(path: str | Path) -> str:
    """Return a path that all names of one file share: the one without links.

    A Hugging Face cache keeps equal files once, in ``blobs``. There each name is a file of its
    own, whose directory is the one without links.

    Raises:
        ModelError: It cannot be determined where the path leads.
    """
    real_path = resolve_path(path)
    directory, name = os.path.split(os.path.abspath(path))
    is_blob = os.path.basename(os.path.dirname(real_path)) == "blobs"
    return os.path.join(resolve_path(directory), name) if is_blob else real_path


class _FoundModels(NamedTuple):
    """The models at or below a path of the command line, which was queried once.

    The directory is the path itself, or else the one that it is in.
    """

    directory: Path
    models: Sequence[Path]


def _choose_output(
    model: Path, parent: str, output: Path | None, directory: Path | None
) -> Path | None:
    """Return the output that was asked for, if one was; `parent` is what all models lie below."""
    if output is not None or directory is None:
        return output
    return directory / os.path.relpath(os.path.abspath(model), parent)


def _find_models(path: Path, results: os.stat_result | None) -> _FoundModels:
    """Return the models at or below a path, except those in the directory `results`.

    A link that leads nowhere is a model, which cannot be opened.
    """
    status = read_status(path)
    if status is not None and stat.S_ISDIR(status.st_mode):
        return _FoundModels(path, _search_directory(path, results))
    if status is None and not is_link(path):
        hint = (
            "a pattern is not expanded here: pass the directory; in a shell, pass it without quotes"
            if set("*?") & set(path.name)
            else _suggest_path(path)
        )
        raise MissingFileError(str(path), hint)
    return _FoundModels(path.parent, [path])


def _search_directory(directory: Path, results: os.stat_result | None) -> list[Path]:
    """Return the models below a directory, except those in the directory `results` below it."""
    models: list[Path] = []
    pending = [os.fspath(directory)]
    while pending:
        found, folders = list_folder(pending.pop(), results)
        models += found
        pending += folders
    if not models:
        raise ModelError(
            "has no .onnx file, at any depth",
            path=str(directory),
            hint="pass an .onnx file, or a directory that has some",
        )
    return sorted(models, key=_build_sort_key)


def list_folder(
    folder: str | Path, results: os.stat_result | None = None
) -> tuple[list[Path], list[str]]:
    """Return the models in a folder, and the folders in it that may hold more, except `results`.

    Raises:
        ModelError: It cannot be listed, or it cannot be determined what is in it.
    """
    models, folders = list[Path](), list[str]()
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    if _may_hold_models(entry, results):
                        folders.append(entry.path)
                elif entry.name.endswith(".onnx") and not is_directory(entry.path):
                    models.append(Path(entry.path))
    except OSError as error:
        place = str(Path(folder))
        raise ModelError(f"cannot be listed: {error.strerror}", path=place) from None
    return models, folders


def _may_hold_models(directory: os.DirEntry[str], results: os.stat_result | None) -> bool:
    """Return whether a directory is neither `results` nor half of one that a killed run left."""
    if directory.name.startswith(TEMP_PREFIX):
        return False
    return results is None or not os.path.samestat(os.lstat(directory.path), results)


def _build_sort_key(path: Path) -> list[tuple[bool, int, str]]:
    """Return a key that sorts ``layer_2`` before ``layer_10``."""
    return [
        (index % 2 == 1, int(part) if index % 2 else 0, part)
        for index, part in enumerate(re.split(r"([0-9]+)", str(path)))
    ]


def _suggest_path(path: Path) -> str | None:
    try:
        names = os.listdir(path.parent)
    except FileNotFoundError:
        return f"the directory {quote_word(str(path.parent))} does not exist"
    except OSError:
        return None
    stems = {}
    for name in sorted(names):
        stem, suffix = os.path.splitext(name)
        if suffix in ("", ".onnx", ".ONNX"):
            stems[stem] = name
    similar = find_similar(path.stem, stems)
    return f"did you mean {quote_path(str(path.parent / stems[similar]))}?" if similar else None
