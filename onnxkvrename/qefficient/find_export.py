"""Find the export of QEfficient's cache that a model belongs to, and warn of a rename there."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from onnxkvrename.errors import KvRenameError
from onnxkvrename.findings import Finding
from onnxkvrename.rules.plan import RenamePlan
from onnxkvrename.rules.profile import Rules
from onnxkvrename.rules.results import ModelReport, RenameJob
from onnxkvrename.storage.read import read_status

if TYPE_CHECKING:
    from onnxkvrename.qefficient.export_cache import ExportParams

PARAMS_FILE = "hashed_export_params.json"
"""The file in which QEfficient saves the parameters of an export."""
_LEVELS = 3
"""The number of directories above a model that may be the directory of its export."""


def find_exports(model: Path) -> Iterator[Path]:
    """Yield the directories above a model that hold the parameters of an export.

    Raises:
        ModelError: It cannot be determined if one does.
    """
    for directory in list(Path(os.path.abspath(model)).parents)[:_LEVELS]:
        status = read_status(directory / PARAMS_FILE)
        if status is not None and stat.S_ISREG(status.st_mode):
            yield directory


def check_cache_reuse(job: RenameJob, rules: Rules, plan: RenamePlan) -> Iterator[Finding]:
    """Yield KV402 for a model of QEfficient's cache that changes in place, or has changed there.

    Args:
        job: The model and where its result goes.
        rules: The rules that recognise KV names.
        plan: What changes in the model.
    """
    if job.in_place and not plan.name_map:
        yield from check_cache_state(job, rules, plan)
    found = _read_export(job.model) if job.in_place and plan.name_map else None
    if found is None:
        return
    from onnxkvrename.qefficient.export_cache import check_export_reuse

    warning = check_export_reuse(job.model.name, *found, rules, plan.token_change)
    if warning is not None:
        yield warning


def restate_cache_reuse(report: ModelReport, rules: Rules) -> tuple[Finding, ...]:
    """Return the findings about a model that was renamed: KV402 says what its names are now.

    Args:
        report: The report on the model.
        rules: The rules that recognise KV names.
    """
    is_warned = any(finding.code == "KV402" for finding in report.findings)
    found = _read_export(Path(report.path)) if is_warned else None
    if found is None:
        return report.findings
    from onnxkvrename.qefficient.export_cache import check_export_tokens

    outputs = (pair.output for pair in report.pairs if pair.output is not None)
    matches = (rules.match("output", output.new_name) for output in outputs)
    tokens = {match.token for match in matches if match is not None}
    for now in check_export_tokens(Path(report.path).name, *found, rules, tokens):
        return tuple(now if each.code == now.code else each for each in report.findings)
    return report.findings


def check_cache_state(job: RenameJob, rules: Rules, plan: RenamePlan) -> Iterator[Finding]:
    """Yield KV402 for a model that keeps other tokens than its export in QEfficient's cache.

    Args:
        job: The model and where its result goes.
        rules: The rules that recognise KV names.
        plan: The KV buffers of the model, and what changes in them.
    """
    changes_here = job.in_place and bool(plan.name_map)
    try:
        found = _read_export(job.model) if plan.pairs and not changes_here else None
    except KvRenameError:
        return  # the model itself is read, whatever is above it
    if found is None:
        return
    from onnxkvrename.qefficient.export_cache import check_export_tokens

    tokens = {pair.output.token for pair in plan.pairs if pair.output is not None}
    yield from check_export_tokens(job.model.name, *found, rules, tokens)


def _read_export(model: Path) -> tuple[Path, ExportParams] | None:
    """Return the directory and the parameters of a model's export, if it is in the cache.

    Raises:
        ModelError: It cannot be determined if it is.
    """
    directories = tuple(find_exports(model))
    if not directories:
        return None
    from onnxkvrename.qefficient.export_cache import split_directory_name
    from onnxkvrename.qefficient.seed_cache import read_export_params

    for directory in directories:
        if split_directory_name(directory.name):
            try:
                return _shorten_path(directory, model), read_export_params(directory)
            except KvRenameError:
                return None  # QEfficient cannot read these parameters either: it reuses nothing
    return None


def _shorten_path(directory: Path, model: Path) -> Path:
    """Return a directory above a model as the start of the model's path, if it is one."""
    for parent in model.parents:
        if Path(os.path.abspath(parent)) == directory:
            return parent
    return directory
