"""Text files that go with models: read, followed, and written with them or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from onnxkvrename.errors import KvRenameError, ModelError
from onnxkvrename.findings import Finding, promote_to_errors
from onnxkvrename.renaming.batch_checks import set_failed
from onnxkvrename.renaming.output_path import check_in_place_write, find_blocking_file
from onnxkvrename.renaming.prepare import PreparedModel
from onnxkvrename.renaming.write import SidecarPlan
from onnxkvrename.rules.find_models import build_job
from onnxkvrename.rules.results import ModelReport, Options, RenameJob, SidecarReport
from onnxkvrename.storage.read import has_content, open_file

MAX_SIDECAR_SIZE = 1 << 26
"""Bytes that a text may have."""


class RewrittenText(NamedTuple):
    """A text as it must be after a rename, in bytes; ``changed`` counts the names."""

    data: bytes
    changed_count: int
    findings: tuple[Finding, ...] = ()


class Sidecar(NamedTuple):
    """A text beside models, where it goes, and what a rename makes of it.

    ``follow`` gets the text and the reports of all models of the run. It may
    raise :class:`KvRenameError` for a text that it does not take.
    """

    path: Path
    output: Path
    rewrite: Callable[[bytes, Sequence[ModelReport]], RewrittenText]

    @property
    def job(self) -> RenameJob:
        """Its way, as that of a model."""
        return build_job(self.path, self.output)


class PreparedSidecar(NamedTuple):
    """A companion that has been read; ``text`` is ``None`` where nothing is to be written.

    ``owner`` is the number of the model that it lies nearest to.
    """

    sidecar: Sidecar
    model_index: int
    report: SidecarReport
    plan: SidecarPlan | None = None
    findings: tuple[Finding, ...] = ()
    error: KvRenameError | None = None


def prepare_sidecars(
    companions: Sequence[Sidecar], models: Sequence[ModelReport], options: Options
) -> Iterator[PreparedSidecar]:
    """Read texts and let them follow the models; what is wrong becomes part of the result."""
    for companion in companions:
        owner = _find_nearest_model(companion.path, models)
        report = SidecarReport(str(companion.path), str(companion.output), "failed", 0)
        item = PreparedSidecar(companion, owner, report)
        try:
            yield _prepare_sidecar(item, models, options)
        except KvRenameError as error:
            yield item._replace(error=error)


def _prepare_sidecar(
    item: PreparedSidecar, models: Sequence[ModelReport], options: Options
) -> PreparedSidecar:
    path, output, job = item.sidecar.path, item.sidecar.output, item.sidecar.job
    with open_file(path) as file:
        if file.size > MAX_SIDECAR_SIZE:
            raise ModelError(
                f"is {file.size:,} bytes, more than {MAX_SIDECAR_SIZE:,}", path=str(path)
            )
        identity, before, status = file.identity, file.read(0, file.size), file.status
    followed = item.sidecar.rewrite(before, models)
    content = followed.data
    if job.in_place or not os.path.lexists(output):
        there = job.in_place and content == before
    else:
        there = has_content(output, len(content), [content])
    if options.check_destination and job.in_place and not (there or options.force):
        check_in_place_write(path, status)
    findings = followed.findings
    if options.check_destination:
        findings += tuple(find_blocking_file(job, there, options))
    same = there or content == before
    report = item.report._replace(
        status="unchanged" if same else "would-rename", changed=followed.changed_count
    )
    made = None if there else SidecarPlan(path, identity, content)
    return item._replace(report=report, plan=made, findings=findings)


def _find_nearest_model(path: Path, models: Sequence[ModelReport]) -> int:
    """The model beside a text, or else the nearest below it, or the first."""
    place = os.path.realpath(path.parent)
    homes = [os.path.realpath(Path(model.path).parent) for model in models]
    below = [number for number, home in enumerate(homes) if _is_below(home, place)]
    return min(below, key=lambda number: len(homes[number]), default=0)


def _is_below(directory: str, place: str) -> bool:
    return directory == place or directory.startswith(place.rstrip(os.sep) + os.sep)


def add_sidecar_findings(
    models: Sequence[PreparedModel], sidecars: Sequence[PreparedSidecar], options: Options
) -> tuple[PreparedModel, ...]:
    """Return the models, each with what is wrong with the text files that go with it."""
    reports = [model.report for model in models]
    for sidecar in sidecars:
        report = reports[sidecar.model_index]
        findings = promote_to_errors(sidecar.findings) if options.strict else sidecar.findings
        report = report._replace(
            findings=(*report.findings, *findings), error=report.error or sidecar.error
        )
        reports[sidecar.model_index] = set_failed(report)
    return tuple(
        model._replace(report=report) for model, report in zip(models, reports, strict=True)
    )
