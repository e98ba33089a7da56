"""Find the sidecars of models, detect their formats, and decide where their results go."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from onnxkvrename.errors import ModelError, WriteError
from onnxkvrename.renaming.prepare_sidecars import Sidecar
from onnxkvrename.rules.plan import TokenChange
from onnxkvrename.rules.profile import Rules
from onnxkvrename.rules.results import ModelReport, RenameJob
from onnxkvrename.sidecars.format import SidecarFormats
from onnxkvrename.sidecars.registry import load_sidecar_formats
from onnxkvrename.sidecars.rewrite import (
    MAX_SIDECAR_BYTES,
    ModelNames,
    RewrittenSidecar,
    rewrite_sidecar,
)
from onnxkvrename.storage.read import open_file, read_status, resolve_path


def load_sidecars(
    paths: Iterable[Path],
    jobs: Sequence[RenameJob],
    change: TokenChange,
    rules: Rules,
    *,
    search_directories: bool = False,
) -> tuple[Sidecar, ...]:
    """Return sidecars, each ready to be rewritten with the models that it belongs to.

    A sidecar belongs to the models in its directory; one that lies elsewhere belongs to all.

    Args:
        paths: The files that the user named.
        jobs: The models of the run.
        change: The tokens to put in and to take out.
        rules: The rules that recognise KV names.
        search_directories: True to add all sidecars in the directories of the models.

    Raises:
        ModelError: A named file cannot be read or has no known format, or a directory
            cannot be listed.
        WriteError: Two sidecars would be written to the same place.
        KvRenameError: A plug-in cannot be used.
    """
    formats = load_sidecar_formats()
    found_beside_models = _find_sidecars(jobs, formats) if search_directories else ()
    all_paths = (*paths, *found_beside_models)
    distinct = {resolve_path(path): path for path in reversed(all_paths)}
    sidecars = tuple(
        _load_sidecar(path, jobs, change, rules, formats) for path in reversed(distinct.values())
    )
    by_output: dict[str, Sidecar] = {}
    for sidecar in sidecars:
        first = by_output.setdefault(resolve_path(sidecar.output), sidecar)
        if first is not sidecar:
            raise WriteError(
                f"is the place of both {first.path} and {sidecar.path}",
                path=str(sidecar.output),
                hint="take one of them at a time",
            )
    return sidecars


def _find_sidecars(jobs: Sequence[RenameJob], formats: SidecarFormats) -> Iterator[Path]:
    """Yield the sidecars in the directories of models."""
    for directory in dict.fromkeys(job.model.parent for job in jobs):
        try:
            file_names = os.listdir(directory)
        except OSError as error:
            reason = error.strerror
            raise ModelError(f"cannot be listed: {reason}", path=str(directory)) from None
        for name in formats.select_candidates(file_names):
            status = read_status(directory / name)
            is_regular = status is not None and stat.S_ISREG(status.st_mode)
            detected = formats.detect(name, _read_head(directory / name) if is_regular else b"")
            if detected is not None and detected.find_names is not None:
                yield directory / name


def _read_head(path: Path) -> bytes:
    with open_file(path) as file:
        return file.read(0, min(file.size, MAX_SIDECAR_BYTES))


def _load_sidecar(
    path: Path,
    jobs: Sequence[RenameJob],
    change: TokenChange,
    rules: Rules,
    formats: SidecarFormats,
) -> Sidecar:
    detected = formats.detect(path.name, _read_head(path))
    if detected is None:
        forms = formats.describe_forms()
        raise ModelError("is no sidecar of a known kind", path=str(path), hint=forms)
    sidecar_format = detected
    directory = resolve_path(path.parent)
    jobs_beside = [job for job in jobs if resolve_path(job.model.parent) == directory]
    model_paths = {str(job.model) for job in jobs_beside or jobs}

    def rewrite(data: bytes, models: Sequence[ModelReport]) -> RewrittenSidecar:
        own_models = [(m.pairs, m.value_names) for m in models if m.path in model_paths]
        names = ModelNames.from_models(own_models, change, rules)
        return rewrite_sidecar(data, str(path), sidecar_format, names)

    return Sidecar(path, _resolve_output(path, jobs_beside, jobs), rewrite)


def _resolve_output(
    path: Path, jobs_beside: Sequence[RenameJob], jobs: Sequence[RenameJob]
) -> Path:
    """Return the file itself, or a file beside the result of the model beside it."""
    job = (jobs_beside or jobs)[0]
    if job.in_place:
        return path
    if job.same_directory and jobs_beside:
        raise ModelError(
            f"lies beside both {job.model} and {job.output}, and can follow one of them only",
            path=str(path),
            hint="write the model into another directory",
        )
    return job.output.parent / path.name
