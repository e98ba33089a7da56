"""The command that shows."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from onnxkvrename.cli.options import (
    CONTEXT_SETTINGS,
    NonEmptyPath,
    add_format_option,
    add_models_argument,
    add_profile_option,
    add_rules_option,
)
from onnxkvrename.cli.output import is_color_enabled, print_lines, stdout_guard
from onnxkvrename.errors import KvRenameError, WriteError
from onnxkvrename.layout.inspect import (
    ModelSummary,
    compute_exit_code,
    inspect_model,
    summaries_to_json,
)
from onnxkvrename.report.rename_text import format_error
from onnxkvrename.rules.find_models import find_jobs
from onnxkvrename.rules.load import load_rules
from onnxkvrename.storage.read import open_file
from onnxkvrename.storage.temp_file import ReadyFile, TempFile
from onnxkvrename.storage.transaction import Transaction


@click.command(
    "onnxkvrename inspect",
    context_settings=CONTEXT_SETTINGS,
    epilog="Exit codes: 0 nothing wrong; 1 a finding of severity error; 2 the job could not be "
    "done; 130 interrupted.",
)
@add_models_argument()
@click.option(
    "--svg", metavar="FILE", type=NonEmptyPath(path_type=Path), help="Also write it as a picture."
)
@click.option(
    "--html", metavar="FILE", type=NonEmptyPath(path_type=Path), help="Also write it as a page."
)
@add_profile_option()
@add_rules_option()
@add_format_option("text", "json")
def command(**given: Any) -> int:
    """Show what is in a model: its KV buffers by layer, their kinds, token, weights, findings.

    The kind of a buffer is told from its shape, not only from its name. Weights
    are not read.
    """
    if not given["models"]:
        raise click.UsageError("no MODEL given: onnxkvrename inspect MODEL...")
    rules = load_rules(given["profile"], given["rules"])
    found = tuple(inspect_model(job.model, rules) for job in find_jobs(given["models"]))
    _write_pictures(found, given)
    code = compute_exit_code(found)
    with stdout_guard():
        if given["form"] == "json":
            print_lines([summaries_to_json(found, code)])
        else:
            _print_summaries(found)
    return code


def render_failure(code: int, fault: KvRenameError) -> str:
    """The JSON document of a job that could not be done."""
    return summaries_to_json((), code, fault)


def _print_summaries(found: tuple[ModelSummary, ...]) -> None:
    from onnxkvrename.report.kv_map import render_model_summary
    from onnxkvrename.report.rename_rich import render_lines

    for item in found:
        if item.error is None:
            drawn = render_lines([render_model_summary(item)], color=is_color_enabled(sys.stdout))
            print_lines(drawn)
    color = is_color_enabled(sys.stderr)
    errors = [item.error for item in found if item.error is not None]
    print_lines((format_error(error, color=color) for error in errors), err=True)


def _write_pictures(found: tuple[ModelSummary, ...], given: dict[str, Any]) -> None:
    if given["svg"] is None and given["html"] is None:
        return
    from onnxkvrename.report.kv_map_image import render_html, render_svg

    _check_picture_paths(found, given)
    wanted = ((given["svg"], render_svg), (given["html"], render_html))
    drawn = [(path, draw(found)) for path, draw in wanted if path is not None]
    try:
        with ExitStack() as temporary, Transaction() as changes:
            staged = []
            for path, text in drawn:
                staged.append(_write_temp_picture(path, text))
                temporary.callback(staged[-1].discard)
            changes.place_files(staged, final=True)
    except WriteError as error:
        hint = "no picture was written; choose another place for it"
        raise WriteError(error.message, path=error.path, hint=hint) from None


def _check_picture_paths(found: tuple[ModelSummary, ...], given: dict[str, Any]) -> None:
    """Raise :class:`WriteError` for a picture in the place of what is read, or of the other."""
    wanted = [path for path in (given["svg"], given["html"]) if path is not None]
    read = {os.path.realpath(path) for path in _list_read_files(found, given["rules"])}
    for path in wanted:
        if os.path.realpath(path) in read:
            raise WriteError(
                "is a file of the model, or its rules",
                path=str(path),
                hint="choose another place for the picture",
            )
        if os.path.lexists(path) and not (os.path.isdir(path) or _is_picture(path)):
            raise WriteError(
                "is there already, and no picture",
                path=str(path),
                hint="choose another place for the picture",
            )
    if len({os.path.realpath(path) for path in wanted}) < len(wanted):
        raise WriteError("cannot be both pictures", path=str(wanted[0]), hint="choose two names")


def _is_picture(path: Path) -> bool:
    """Whether a plain file, and no link to one, begins as an earlier picture does."""
    try:
        with open_file(path) as file:
            head = file.read(0, 512).lstrip().lower()
    except KvRenameError:
        return False
    return not path.is_symlink() and head.startswith((b"<svg", b"<?xml", b"<!doctype", b"<html"))


def _list_read_files(found: tuple[ModelSummary, ...], rules: Path | None) -> Iterator[Path]:
    """The files that have been looked at, and those beside them with weights."""
    for item in found:
        yield Path(item.path)
        locations = (file.location for file in item.files if "\0" not in file.location)
        yield from (Path(item.path).parent / location for location in locations)
    if rules is not None:
        yield rules


def _write_temp_picture(path: Path, text: str) -> ReadyFile:
    with TempFile(Path(path).absolute(), path) as draft:
        draft.write(text.encode("utf-8"))
        draft.set_default_mode()
        return draft.finish(replace=True)
