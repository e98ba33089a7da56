"""Command lines for one of several models, or for a directory of some."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from onnxkvrename.cli.hints.typed_command import TypedCommand, TypedOption, build_option
from onnxkvrename.rules.results import ModelReport


def give_one_model(typed: TypedCommand, path: str, output: str | None = None) -> TypedCommand:
    """Return a command line with one of its models: its result goes where it went before.

    ``-d`` puts the result of a model that is alone directly into the directory. Nothing that is
    there is overwritten: ``--force`` was typed for other files.

    Args:
        typed: The command line.
        path: The model, or a directory of some.
        output: Where the result of the model goes, if it has one.
    """
    if typed.paths == (path,):
        return typed
    options = []
    for option in typed.options:
        if option.name == "--directory" and output is not None:
            option = build_option(option.name, "-d", os.path.dirname(output) or os.curdir)
        if option.name != "--force":
            options.append(option)
    return typed._replace(paths=(path,), options=tuple(options))


def leave_to_others(
    typed: TypedCommand, report: ModelReport, reports: Sequence[ModelReport], is_written: bool
) -> TypedCommand | None:
    """Return a command line for a model that these rules leave as it is, as others know it (KV001).

    With ``-d`` it is for all models of its directory, which belong together, if these rules know
    none of them; it replaces the copies that were just written. Else it changes the copy of the
    model.

    Args:
        typed: The command line.
        report: The report on the model.
        reports: The reports on all models.
        is_written: Whether the copies are written.

    Returns:
        The command line; ``None`` for a model that the rules know, or without ``-d``.
    """
    has_directory = any(option.name == "--directory" for option in typed.options)
    if not has_directory or (report.path in typed.paths and len(typed.paths) == 1):
        return None
    if report.pairs or report.output == report.path:
        return None
    folder = os.path.dirname(report.path) or os.curdir
    if _is_left_whole(folder, typed, reports):
        alone = give_one_model(typed, folder, report.output)
        force = (TypedOption("--force", ("--force",)),) if is_written else ()
        return alone._replace(options=(*alone.options, *force))
    if not is_written:
        return None
    left = (option for option in typed.options if option.name not in ("--directory", "--force"))
    return typed._replace(paths=(report.output,), options=tuple(left))


def _is_left_whole(folder: str, typed: TypedCommand, reports: Sequence[ModelReport]) -> bool:
    """Return whether all models below a directory were left as they are for the same reason."""
    if folder in typed.paths or not any(Path(folder).is_relative_to(path) for path in typed.paths):
        return False
    inside = [report for report in reports if Path(report.path).is_relative_to(folder)]
    reasons = {f.hint for report in inside for f in report.findings if f.code == "KV001"}
    return len(reasons) == 1 and not any(report.pairs for report in inside)
