"""The one model that a command works on: which there are, if it is given several."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from onnxkvrename.errors import KvRenameError
from onnxkvrename.findings import format_list, quote_path
from onnxkvrename.rules.find_models import find_jobs
from onnxkvrename.storage.read import is_directory


def require_one_model(paths: Sequence[Path], command: str) -> Path:
    """Return the one model that a command works on.

    Args:
        paths: What the user passed.
        command: The command.

    Raises:
        KvRenameError: There are several, or it is a directory.
        ModelError: A path does not exist or cannot be listed.
    """
    if len(paths) == 1 and not is_directory(paths[0]):
        return paths[0]
    models = [str(job.model) for job in find_jobs(paths)]
    typed = f"onnxkvrename {command}"
    check_one_model(f"{command} requires one model", models, typed)
    if not is_directory(paths[0]):
        return paths[0]  # the same model twice
    hint = f"`{typed} {quote_path(models[0])}`"
    raise KvRenameError("is a directory, not a model", path=str(paths[0]), hint=hint)


def check_one_model(requirement: str, models: Sequence[str], command: str = "") -> None:
    """Raise :class:`KvRenameError` for several models, with the first of them to choose from.

    Args:
        requirement: What requires one model.
        models: The models that there are.
        command: The command with which a model can be chosen.
    """
    if len(models) < 2:
        return
    hint = f"`{command} {quote_path(models[0])}`" if command else "pass one of them"
    raise KvRenameError(
        f"{requirement}, not {len(models):,}: {format_list(models, limit=3)}", hint=hint
    )
