"""Find the export of QEfficient's cache that a model belongs to, and warn of a rename there."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from onnxkvrename.errors import KvRenameError
from onnxkvrename.findings import Finding
from onnxkvrename.rules.plan import TokenChange
from onnxkvrename.rules.profile import Rules
from onnxkvrename.rules.results import RenameJob
from onnxkvrename.storage.read import read_status

PARAMS_FILE = "hashed_export_params.json"
"""The file in which QEfficient saves the parameters of an export."""
_MAX_LEVELS = 3
"""The number of directories above a model that may be the directory of its export."""


def find_exports(model: Path) -> Iterator[Path]:
    """Yield the directories above a model that hold the parameters of an export.

    Raises:
        ModelError: It cannot be determined if one does.
    """
    for directory in list(Path(os.path.abspath(model)).parents)[:_MAX_LEVELS]:
        status = read_status(directory / PARAMS_FILE)
        if status is not None and stat.S_ISREG(status.st_mode):
            yield directory


def check_cache_reuse(job: RenameJob, rules: Rules, change: TokenChange) -> Iterator[Finding]:
    """Yield KV402 for a model of QEfficient's cache that is about to change in place.

    Args:
        job: The model and where its result goes.
        rules: The rules that recognise KV names.
        change: The tokens to put in and to take out.
    """
    directories = tuple(find_exports(job.model)) if job.in_place else ()
    if not directories:
        return
    from onnxkvrename.qefficient.export_cache import check_export_reuse, split_directory_name
    from onnxkvrename.qefficient.seed_cache import read_export_params

    directory = next((path for path in directories if split_directory_name(path.name)), None)
    if directory is None:
        return
    try:
        params = read_export_params(directory)
    except KvRenameError:
        return  # QEfficient cannot read these parameters either, so it reuses nothing
    warning = check_export_reuse(job.model.name, directory.name, params, rules, change)
    if warning is not None:
        yield warning
