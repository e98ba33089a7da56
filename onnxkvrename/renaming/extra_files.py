"""Text files that go with models: read, followed, and written with them or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from onnxkvrename.errors import KvRenameError, ModelError
from onnxkvrename.findings import Finding
from onnxkvrename.renaming import output_path as destination
from onnxkvrename.rules.results import Job, ModelReport, Options, TextReport
from onnxkvrename.storage import read as files
from onnxkvrename.storage.read import Identity

MAX_TEXT = 1 << 26
"""Bytes that a text may have."""


class Followed(NamedTuple):
    """A text as it must be after a rename, in bytes; ``changed`` counts the names."""

    data: bytes
    changed: int
    findings: tuple[Finding, ...] = ()


class Companion(NamedTuple):
    """A text beside models, where it goes, and what a rename makes of it.

    ``follow`` gets the text and the reports of all models of the run. It may
    raise :class:`KvRenameError` for a text that it does not take.
    """

    path: Path
    output: Path
    follow: Callable[[bytes, Sequence[ModelReport]], Followed]

    @property
    def job(self) -> Job:
        """Its way, as that of a model."""
        return Job(self.path, self.output)


class Text(NamedTuple):
    """What is to be written in the place of a text, or beside it."""

    path: Path
    identity: Identity
    content: bytes


class Read(NamedTuple):
    """A companion that has been read; ``text`` is ``None`` where nothing is to be written.

    ``owner`` is the number of the model that it lies nearest to.
    """

    companion: Companion
    owner: int
    report: TextReport
    text: Text | None = None
    findings: tuple[Finding, ...] = ()
    error: KvRenameError | None = None


def read(
    companions: Sequence[Companion], models: Sequence[ModelReport], options: Options
) -> Iterator[Read]:
    """Read texts and let them follow the models; what is wrong becomes part of the result."""
    for companion in companions:
        owner = _owner(companion.path, models)
        report = TextReport(str(companion.path), str(companion.output), "failed", 0)
        item = Read(companion, owner, report)
        try:
            yield _followed(item, models, options)
        except KvRenameError as error:
            yield item._replace(error=error)


def _followed(item: Read, models: Sequence[ModelReport], options: Options) -> Read:
    path, output, job = item.companion.path, item.companion.output, item.companion.job
    with files.opened(path) as file:
        if file.size > MAX_TEXT:
            raise ModelError(f"is {file.size:,} bytes, more than {MAX_TEXT:,}", path=str(path))
        identity, before, status = file.identity, file.read(0, file.size), file.status
    followed = item.companion.follow(before, models)
    content = followed.data
    if job.in_place or not os.path.lexists(output):
        there = job.in_place and content == before
    else:
        there = files.same_content(output, len(content), [content])
    if options.place and job.in_place and not (there or options.force):
        destination.check_in_place(path, status)
    findings = followed.findings
    if options.place:
        findings += tuple(destination.in_the_way(job, there, options))
    same = there or content == before
    report = item.report._replace(
        status="unchanged" if same else "would-rename", changed=followed.changed
    )
    made = None if there else Text(path, identity, content)
    return item._replace(report=report, text=made, findings=findings)


def _owner(path: Path, models: Sequence[ModelReport]) -> int:
    """The model beside a text, or else the nearest below it, or the first."""
    place = os.path.realpath(path.parent)
    homes = [os.path.realpath(Path(model.path).parent) for model in models]
    below = [number for number, home in enumerate(homes) if _is_below(home, place)]
    return min(below, key=lambda number: len(homes[number]), default=0)


def _is_below(directory: str, place: str) -> bool:
    return directory == place or directory.startswith(place.rstrip(os.sep) + os.sep)
