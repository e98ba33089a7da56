"""Sidecars of models: which there are, where they go, and how they follow a rename."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from onnxkvrename.errors import KvRenameError, ModelError, WriteError
from onnxkvrename.renaming.extra_files import Companion, Followed
from onnxkvrename.rules.plan import Wish
from onnxkvrename.rules.profile import Rules
from onnxkvrename.rules.results import Job, ModelReport
from onnxkvrename.sidecars import rewrite as sidecars
from onnxkvrename.sidecars.rewrite import Names
from onnxkvrename.storage import read as files


def companions(
    given: Iterable[Path], jobs: Sequence[Job], wish: Wish, rules: Rules
) -> tuple[Companion, ...]:
    """The files that were named, and how each follows the models that it is for.

    Raises :class:`ModelError` for what is no sidecar of a known kind, and
    :class:`WriteError` where two would go to one place.
    """
    paths = {os.path.realpath(path): path for path in reversed(tuple(given))}
    found = tuple(_companion(path, jobs, wish, rules) for path in reversed(paths.values()))
    places: dict[str, Companion] = {}
    for one in found:
        first = places.setdefault(os.path.realpath(one.output), one)
        if first is not one:
            raise WriteError(
                f"is the place of both {first.path} and {one.path}",
                path=str(one.output),
                hint="take one of them at a time",
            )
    return found


def beside(jobs: Sequence[Job]) -> Iterator[Path]:
    """The sidecars in the directories of models."""
    for directory in dict.fromkeys(job.model.parent for job in jobs):
        try:
            names = os.listdir(directory)
        except OSError as error:
            reason = error.strerror
            raise ModelError(f"cannot be listed: {reason}", path=str(directory)) from None
        for name in sidecars.candidates(names):
            kind = sidecars.kind_of(name, _head(directory / name))
            if kind is not None and kind.names is not None:
                yield directory / name


def _head(path: Path) -> bytes:
    """As much of a file as a sidecar may have; nothing of one that cannot be read."""
    try:
        with files.opened(path) as file:
            return file.read(0, min(file.size, sidecars.LIMIT))
    except KvRenameError:
        return b""


def _companion(path: Path, jobs: Sequence[Job], wish: Wish, rules: Rules) -> Companion:
    with files.opened(path) as file:
        kind = sidecars.kind_of(path.name, file.read(0, min(file.size, sidecars.LIMIT)))
    if kind is None:
        forms = "; ".join(f"{one.caption}: {one.form}" for one in sidecars.KINDS if one.names)
        raise ModelError("is no sidecar of a known kind", path=str(path), hint=forms)
    own = [job for job in jobs if job.model.parent.resolve() == path.parent.resolve()]
    homes = {str(job.model) for job in own or jobs}

    def follow(data: bytes, models: Sequence[ModelReport]) -> Followed:
        mine = [(model.pairs, model.values) for model in models if model.path in homes]
        followed = sidecars.follow(data, str(path), kind, Names.of(mine, wish, rules))
        return Followed(followed.data, len(followed.changes), followed.findings)

    return Companion(path, _output(path, own, jobs), follow)


def _output(path: Path, own: Sequence[Job], jobs: Sequence[Job]) -> Path:
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
