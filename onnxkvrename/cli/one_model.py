"""The one model that a command works on: which there are, if it is given several."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from onnxkvrename.cli.options import Decorator, NonEmptyPath
from onnxkvrename.errors import KvRenameError
from onnxkvrename.findings import format_list, quote_path
from onnxkvrename.rules.find_models import find_jobs
from onnxkvrename.storage.read import is_directory


def add_one_model_argument() -> Decorator:
    """Add the one model that a command works on; several and directories are refused."""
    return click.argument(
        "model",
        nargs=-1,
        metavar="MODEL",
        type=NonEmptyPath(path_type=Path),
        required=True,
        callback=_require_one_model,
    )


def _require_one_model(
    ctx: click.Context, param: click.Parameter, paths: tuple[Path, ...]
) -> Path | None:
    if ctx.resilient_parsing:
        return None
    if len(paths) == 1 and not is_directory(paths[0]):
        return paths[0]
    models = [str(job.model) for job in find_jobs(paths)]
    check_one_model(f"{ctx.info_name} requires one model", models)
    if not is_directory(paths[0]):
        return paths[0]  # the same model twice
    hint = f"pass the model in it: {quote_path(models[0])}"
    raise KvRenameError("is a directory, not a model", path=str(paths[0]), hint=hint)


def check_one_model(requirement: str, models: Sequence[str]) -> None:
    """Raise :class:`KvRenameError` for several models.

    Args:
        requirement: What requires one model.
        models: The models that there are.
    """
    if len(models) < 2:
        return
    raise KvRenameError(
        f"{requirement}, not {len(models):,}: {format_list(models, limit=3)}",
        hint=f"pass one of them, such as {quote_path(models[0])}",
    )
