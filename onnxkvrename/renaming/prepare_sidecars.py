"""Sidecars, the text files that repeat a model's names: read them and plan their new content."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from onnxkvrename.errors import KvRenameError, ModelError
from onnxkvrename.findings import Finding
from onnxkvrename.limits import MAX_TEXT_BYTES
from onnxkvrename.renaming.output_path import (
    check_in_place_write,
    check_output_place,
    find_blocking_file,
)
from onnxkvrename.renaming.prepare import PreparedModel, SidecarPlan
from onnxkvrename.renaming.request import Request
from onnxkvrename.rules.find_models import build_job
from onnxkvrename.rules.results import ModelReport, RenameJob, SidecarReport
from onnxkvrename.sidecars.rewrite import RewrittenSidecar
from onnxkvrename.sidecars.search import LEAVE_HINT
from onnxkvrename.storage.confined import Folder
from onnxkvrename.storage.read import (
    OpenFile,
    OutsideError,
    has_content,
    is_occupied,
    open_file,
    resolve_path,
)


class Sidecar(NamedTuple):
    """A text file that is rewritten together with models, or not at all.

    Attributes:
        path: The file.
        output: Where the result goes; the file itself for in place.
        rewrite: Returns the new content, from the old content and the reports of all models
            of the run. It may raise `KvRenameError` for content that it cannot rewrite.
        directory: The directory whose models it goes with; ``None`` for its own.
        is_found: True if the user did not name it, and may want it left as it is.
        root: The directory that the user gave for results, if the output is below it.
        is_package: True if all files of its directory go where the output goes.
        is_left: True if the user wants it left as it is.
    """

    path: Path
    output: Path
    rewrite: Callable[[bytes, Sequence[ModelReport]], RewrittenSidecar]
    directory: Path | None = None
    is_found: bool = False
    root: Path | None = None
    is_package: bool = False
    is_left: bool = False

    @property
    def job(self) -> RenameJob:
        """The path and the output, in the same form as a model's."""
        return build_job(self.path, self.output, self.root)


class PreparedSidecar(NamedTuple):
    """A sidecar that has been read and rewritten in memory.

    Attributes:
        sidecar: The sidecar.
        model_index: The index of the model nearest to it; its findings and
            errors count as that model's.
        report: What is reported about it.
        plan: The plan of its new bytes; ``None`` if there is nothing to write.
        findings: Problems with it.
        error: Why it cannot be read, rewritten or written.
    """

    sidecar: Sidecar
    model_index: int
    report: SidecarReport
    plan: SidecarPlan | None = None
    findings: tuple[Finding, ...] = ()
    error: KvRenameError | None = None

    @property
    def takes_folder(self) -> bool:
        """True if the other files of its directory are to be copied as well."""
        return self.sidecar.is_package and not self.sidecar.job.in_place and self.error is None


def prepare_sidecars(
    sidecars: Sequence[Sidecar], models: Sequence[ModelReport], request: Request
) -> Iterator[PreparedSidecar]:
    """Read sidecars and rewrite them in memory; nothing is written.

    Yields:
        Each sidecar, with its error if it has one.
    """
    for sidecar in sidecars:
        model_index = _find_nearest_model(sidecar.directory or sidecar.path.parent, models)
        report = SidecarReport(str(sidecar.path), str(sidecar.output), "failed", 0)
        item = PreparedSidecar(sidecar, model_index, report)
        try:
            yield _prepare_sidecar(item, models, request)
        except KvRenameError as error:
            if sidecar.is_found and not sidecar.is_package:  # its folder goes along in any case
                error.hint = f"{error.hint}; {LEAVE_HINT}" if error.hint else LEAVE_HINT
            yield item._replace(error=error)


def add_sidecar_findings(
    models: Sequence[PreparedModel], sidecars: Sequence[PreparedSidecar]
) -> tuple[PreparedModel, ...]:
    """Return the models, each with the findings and errors of the sidecars nearest to it."""
    reports = [model.report for model in models]
    for sidecar in sidecars:
        report = reports[sidecar.model_index]
        reports[sidecar.model_index] = report._replace(
            findings=(*report.findings, *sidecar.findings), error=report.error or sidecar.error
        )
    return tuple(
        model._replace(report=report) for model, report in zip(models, reports, strict=True)
    )


def _prepare_sidecar(
    item: PreparedSidecar, models: Sequence[ModelReport], request: Request
) -> PreparedSidecar:
    path, output, job = item.sidecar.path, item.sidecar.output, item.sidecar.job
    with _open_sidecar(item.sidecar) as file:
        if file.size > MAX_TEXT_BYTES:
            raise ModelError(
                f"is {file.size:,} bytes, more than {MAX_TEXT_BYTES:,}", path=str(path)
            )
        identity, old_content, status = file.identity, file.read(0, file.size), file.status
    rewritten = item.sidecar.rewrite(old_content, models)
    if rewritten.stays:
        report = item.report._replace(output=str(path), status="unchanged")
        sidecar = item.sidecar._replace(output=path)
        return item._replace(sidecar=sidecar, report=report, findings=rewritten.findings)
    content = rewritten.data
    check_output_place(job)
    if job.in_place or not is_occupied(output):
        is_up_to_date = job.in_place and content == old_content
    else:
        is_up_to_date = has_content(output, len(content), [content])
    if not request.only_checks and job.in_place and not is_up_to_date:
        check_in_place_write(path, status, force=request.force)
    findings = rewritten.findings
    if not request.only_checks:
        blocking = find_blocking_file(job, is_up_to_date, force=request.force)
        hint = f"; {LEAVE_HINT}" if item.sidecar.is_found else ""
        findings += tuple(finding._replace(hint=finding.hint + hint) for finding in blocking)
    is_unchanged = is_up_to_date or content == old_content
    report = item.report._replace(
        status="unchanged" if is_unchanged else "would-rename", changed=len(rewritten.renamed)
    )
    plan = None if is_up_to_date else SidecarPlan(path, identity, content)
    return item._replace(report=report, plan=plan, findings=findings)


@contextmanager
def _open_sidecar(sidecar: Sidecar) -> Iterator[OpenFile]:
    """Open a sidecar; one of a folder that is copied whole only from within that folder."""
    if not sidecar.is_package or sidecar.job.in_place:
        with open_file(sidecar.path) as file:
            yield file
        return
    try:
        with Folder(sidecar.path.parent).open_file(sidecar.path.name) as file:
            yield file
    except OutsideError as error:
        raise ModelError(
            error.message, path=str(sidecar.path), hint="replace it with a copy"
        ) from None


def _find_nearest_model(directory: Path, models: Sequence[ModelReport]) -> int:
    """Return the index of the model in a directory or nearest below it, 0 if there is none."""
    sidecar_directory = resolve_path(directory)
    directories = [resolve_path(Path(model.path).parent) for model in models]
    below = [
        index
        for index, directory in enumerate(directories)
        if _is_below(directory, sidecar_directory)
    ]
    return min(below, key=lambda index: len(directories[index]), default=0)


def _is_below(directory: str, ancestor: str) -> bool:
    return directory == ancestor or directory.startswith(ancestor.rstrip(os.sep) + os.sep)
