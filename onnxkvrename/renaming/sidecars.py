"""Sidecars of models: which there are, where they go, and how they follow a rename."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from onnxkvrename.errors import KvRenameError, ModelError, WriteError
from onnxkvrename.renaming.extra_files import RewrittenText, Sidecar
from onnxkvrename.rules.plan import TokenChange
from onnxkvrename.rules.profile import Rules
from onnxkvrename.rules.results import ModelReport, RenameJob
from onnxkvrename.sidecars.rewrite import (
    MAX_SIDECAR_BYTES,
    SIDECAR_KINDS,
    ModelNames,
    detect_sidecar_kind,
    rewrite_sidecar,
    select_sidecar_candidates,
)
from onnxkvrename.storage.read import open_file


def load_sidecars(
    given: Iterable[Path], jobs: Sequence[RenameJob], wish: TokenChange, rules: Rules
) -> tuple[Sidecar, ...]:
    """The files that were named, and how each follows the models that it is for.

    Raises :class:`ModelError` for what is no sidecar of a known kind, and
    :class:`WriteError` where two would go to one place.
    """
    paths = {os.path.realpath(path): path for path in reversed(tuple(given))}
    found = tuple(_load_sidecar(path, jobs, wish, rules) for path in reversed(paths.values()))
    places: dict[str, Sidecar] = {}
    for one in found:
        first = places.setdefault(os.path.realpath(one.output), one)
        if first is not one:
            raise WriteError(
                f"is the place of both {first.path} and {one.path}",
                path=str(one.output),
                hint="take one of them at a time",
            )
    return found


def find_sidecars(jobs: Sequence[RenameJob]) -> Iterator[Path]:
    """The sidecars in the directories of models."""
    for directory in dict.fromkeys(job.model.parent for job in jobs):
        try:
            names = os.listdir(directory)
        except OSError as error:
            reason = error.strerror
            raise ModelError(f"cannot be listed: {reason}", path=str(directory)) from None
        for name in select_sidecar_candidates(names):
            kind = detect_sidecar_kind(name, _read_head(directory / name))
            if kind is not None and kind.find_names is not None:
                yield directory / name


def _read_head(path: Path) -> bytes:
    """As much of a file as a sidecar may have; nothing of one that cannot be read."""
    try:
        with open_file(path) as file:
            return file.read(0, min(file.size, MAX_SIDECAR_BYTES))
    except KvRenameError:
        return b""


def _load_sidecar(
    path: Path, jobs: Sequence[RenameJob], wish: TokenChange, rules: Rules
) -> Sidecar:
    with open_file(path) as file:
        kind = detect_sidecar_kind(path.name, file.read(0, min(file.size, MAX_SIDECAR_BYTES)))
    if kind is None:
        forms = "; ".join(
            f"{one.caption}: {one.expected_form}" for one in SIDECAR_KINDS if one.find_names
        )
        raise ModelError("is no sidecar of a known kind", path=str(path), hint=forms)
    own = [job for job in jobs if job.model.parent.resolve() == path.parent.resolve()]
    homes = {str(job.model) for job in own or jobs}

    def follow(data: bytes, models: Sequence[ModelReport]) -> RewrittenText:
        mine = [(model.pairs, model.value_names) for model in models if model.path in homes]
        followed = rewrite_sidecar(data, str(path), kind, ModelNames.from_models(mine, wish, rules))
        return RewrittenText(followed.data, len(followed.renamed), followed.findings)

    return Sidecar(path, _resolve_output(path, own, jobs), follow)


def _resolve_output(path: Path, own: Sequence[RenameJob], jobs: Sequence[RenameJob]) -> Path:
    """Back to where it was, or beside the result of the model that it lies beside."""
    job = (own or jobs)[0]
    if job.in_place:
        return path
    if job.same_directory and own:
        raise ModelError(
            f"lies beside both {job.model} and {job.output}, and can follow one of them only",
            path=str(path),
            hint="write the model into another directory",
        )
    return job.output.parent / path.name
