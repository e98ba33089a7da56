"""Take along the other files of a folder that a runtime loads as a whole.

A result of ``-d`` would not run without them: tokenizers, further configurations, models without
KV buffers. They are copied as external data are, byte for byte and only from within the folder.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from onnxkvrename.errors import KvRenameError
from onnxkvrename.findings import Finding, build_finding
from onnxkvrename.limits import MAX_FILES, build_limit_error
from onnxkvrename.model.external_data import DataFile, plan_data_copies
from onnxkvrename.renaming.output_path import check_output_place
from onnxkvrename.renaming.prepare import PreparedModel
from onnxkvrename.renaming.prepare_sidecars import PreparedSidecar
from onnxkvrename.rules.find_models import identify_path
from onnxkvrename.storage.confined import Folder
from onnxkvrename.storage.read import (
    OutsideError,
    read_status,
    translate_read_errors,
)


def add_package_files(
    models: Sequence[PreparedModel], sidecars: Sequence[PreparedSidecar], *, force: bool
) -> tuple[tuple[PreparedModel, ...], tuple[PreparedSidecar, ...]]:
    """Plan the copies of what is in the folders of configurations that go elsewhere.

    Models and sidecars of the run and their data are left out, and so are hidden files, and
    directories that are links.

    Returns:
        The models, each with the copies of the folders of its sidecars, and with an error if one
        is not possible; and the sidecars with the number of files that are copied.
    """
    planned, counted = list(models), list(sidecars)
    known = {identify_path(item.sidecar.path) for item in sidecars}
    known |= {identify_path(model.job.model) for model in models}
    data_files = [data for model in models for data in model.data_files]
    known |= {identify_path(data.directory / data.location) for data in data_files}
    for index, item in enumerate(sidecars):
        model = planned[item.model_index]
        if not item.sidecar.is_package or model.report.failed:
            continue
        try:
            planned[item.model_index], count = _add_files(model, item, known, force)
        except KvRenameError as error:
            planned[item.model_index] = model._replace(report=model.report._replace(error=error))
        else:
            counted[index] = item._replace(report=item.report._replace(copied=count))
    return tuple(planned), tuple(counted)


def _add_files(
    model: PreparedModel, item: PreparedSidecar, known: Collection[str], force: bool
) -> tuple[PreparedModel, int]:
    """Return a model with the copies of a folder, and their number."""
    job = item.sidecar.job
    folder, target = job.model.parent, job.output.parent
    files, findings = _find_files(folder, known, model.job.root)
    places = [target / file.location for file in files]
    check_output_place(job, *places)
    copies = []
    for file, place, finding in plan_data_copies(files, target, force=force):
        copies.append((file, place))
        findings += [] if finding is None else [finding]
    model = model._replace(
        report=model.report._replace(findings=(*model.report.findings, *findings)),
        data_files=(*model.data_files, *files),
        data_copies=(*model.data_copies, *copies),
        data_paths=(*model.data_paths, *places),
    )
    return model, len(copies)


def _find_files(
    folder: Path, known: Collection[str], results: Path | None
) -> tuple[list[DataFile], list[Finding]]:
    """Return the files of a folder that are not known, and findings on those left out."""
    files: list[DataFile] = []
    findings: list[Finding] = []
    source = Folder(folder)
    for location in _list_files(folder, results):
        try:
            with source.open_file(location) as file:
                if identify_path(folder / location) not in known:
                    files.append(DataFile(location, file.path, file.identity, source.path))
        except OutsideError as error:
            path = os.path.join(folder, location)
            finding = build_finding(
                "KV501", path, f"{error.message}, so it is not copied", "replace it with a copy"
            )
            findings.append(finding._replace(severity="warning"))
    return files, findings


def _list_files(directory: Path, left_out: Path | None = None) -> Iterator[str]:
    """Yield the files of a directory and of those below it, sorted, links to files included.

    Names that begin with a dot are left out; directories that are links are not entered.

    Nor is `left_out` entered, a directory below it that need not be there.

    Yields:
        Paths relative to the directory.

    Raises:
        ModelError: A directory cannot be listed, or there are more than `MAX_FILES`.
    """
    skipped = read_status(left_out) if left_out is not None else None
    pending, count = [""], 0
    while pending:
        folder = pending.pop()
        with translate_read_errors(directory / folder):
            with os.scandir(directory / folder) as found:
                entries = sorted(found, key=lambda entry: entry.name)
            for entry in entries:
                location = os.path.join(folder, entry.name)
                if entry.name.startswith("."):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    status = os.lstat(entry.path)
                    if skipped is None or not os.path.samestat(status, skipped):
                        pending.append(location)
                elif not _leads_to_directory(entry):
                    count += 1
                    if count > MAX_FILES:
                        raise build_limit_error(
                            MAX_FILES,
                            "files, and all would be copied",
                            path=str(directory),
                            hint="`--sidecars off` copies none of them",
                        )
                    yield location


def _leads_to_directory(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a link to a directory, or raise OSError."""
    try:
        return entry.is_symlink() and entry.is_dir()
    except FileNotFoundError:
        return False
