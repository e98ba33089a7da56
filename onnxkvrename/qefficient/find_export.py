"""Which export of QEfficient's cache a model belongs to, and KV402 for a rename in place there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from onnxkvrename.errors import KvRenameError
from onnxkvrename.findings import Finding
from onnxkvrename.rules.plan import Wish
from onnxkvrename.rules.profile import Rules
from onnxkvrename.rules.results import Job

PARAMS_FILE = "hashed_export_params.json"
"""The file in which QEfficient keeps the parameters of an export."""
_LEVELS = 3
"""How many directories above a model may be those of its export."""


def find_exports(model: Path) -> Iterator[Path]:
    """Yield the directories around a model that hold the parameters of an export."""
    for directory in list(Path(os.path.abspath(model)).parents)[:_LEVELS]:
        if os.path.isfile(directory / PARAMS_FILE):
            yield directory


def check_cache_reuse(job: Job, rules: Rules, wish: Wish) -> Iterator[Finding]:
    """Yield KV402 for a model of QEfficient's cache that is about to change in place.

    Args:
        job: The model and where its result goes.
        rules: The rules that tell KV names.
        wish: The token to put in or take out.
    """
    directories = tuple(find_exports(job.model)) if job.in_place else ()
    if not directories:
        return
    from onnxkvrename.qefficient import export_cache, seed_cache

    directory = next((path for path in directories if export_cache.named(path.name)), None)
    if directory is None:
        return
    try:
        params = seed_cache.read(directory)
    except KvRenameError:
        return  # QEfficient cannot read these parameters either, so it reuses nothing
    warning = export_cache.reused(job.model.name, directory.name, params, rules, wish)
    if warning is not None:
        yield warning
