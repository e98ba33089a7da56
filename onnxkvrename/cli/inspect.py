"""The command that shows."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from onnxkvrename.cli import options as arguments
from onnxkvrename.cli import output as console
from onnxkvrename.cli.options import AnyPath
from onnxkvrename.errors import KvRenameError, WriteError
from onnxkvrename.layout import inspect as anatomy
from onnxkvrename.layout.inspect import Anatomy
from onnxkvrename.report import rename_text as reporting
from onnxkvrename.rules import find_models as discovery
from onnxkvrename.rules import load as rulesfile
from onnxkvrename.storage import read as files
from onnxkvrename.storage import temp_file as drafts
from onnxkvrename.storage.temp_file import Draft
from onnxkvrename.storage.transaction import Changeset


@click.command(
    "onnxkvrename inspect",
    context_settings=arguments.CONTEXT,
    epilog="Exit codes: 0 nothing wrong; 1 a finding of severity error; 2 the job could not be "
    "done; 130 interrupted.",
)
@arguments.models()
@click.option(
    "--svg", metavar="FILE", type=AnyPath(path_type=Path), help="Also write it as a picture."
)
@click.option(
    "--html", metavar="FILE", type=AnyPath(path_type=Path), help="Also write it as a page."
)
@arguments.profile()
@arguments.rules()
@arguments.form("text", "json")
def command(**given: Any) -> int:
    """Show what is in a model: its KV buffers by layer, their kinds, token, weights, findings.

    The kind of a buffer is told from its shape, not only from its name. Weights
    are not read.
    """
    if not given["models"]:
        raise click.UsageError("no MODEL given: onnxkvrename inspect MODEL...")
    rules = rulesfile.load(given["profile"], given["rules"])
    found = tuple(anatomy.inspect(job.model, rules) for job in discovery.find(given["models"]))
    _pictures(found, given)
    code = anatomy.exit_code(found)
    with console.answering():
        if given["form"] == "json":
            console.say([anatomy.as_json(found, code)])
        else:
            _answer(found)
    return code


def failed(code: int, fault: KvRenameError) -> str:
    """The JSON document of a job that could not be done."""
    return anatomy.as_json((), code, fault)


def _answer(found: tuple[Anatomy, ...]) -> None:
    from onnxkvrename.report import kv_map as kvmap
    from onnxkvrename.report import rename_rich as terminal

    for item in found:
        if item.error is None:
            drawn = terminal.printed([kvmap.summary(item)], color=console.color(sys.stdout))
            console.say(drawn)
    color = console.color(sys.stderr)
    errors = [item.error for item in found if item.error is not None]
    console.say((reporting.error(error, color=color) for error in errors), err=True)


def _pictures(found: tuple[Anatomy, ...], given: dict[str, Any]) -> None:
    if given["svg"] is None and given["html"] is None:
        return
    from onnxkvrename.report import kv_map_image as pictures

    _check_places(found, given)
    wanted = ((given["svg"], pictures.svg), (given["html"], pictures.html))
    drawn = [(path, draw(found)) for path, draw in wanted if path is not None]
    try:
        with ExitStack() as temporary, Changeset() as changes:
            staged = []
            for path, text in drawn:
                staged.append(_drawn(path, text))
                temporary.callback(staged[-1].discard)
            changes.place(staged, final=True)
    except WriteError as error:
        hint = "no picture was written; choose another place for it"
        raise WriteError(error.message, path=error.path, hint=hint) from None


def _check_places(found: tuple[Anatomy, ...], given: dict[str, Any]) -> None:
    """Raise :class:`WriteError` for a picture in the place of what is read, or of the other."""
    wanted = [path for path in (given["svg"], given["html"]) if path is not None]
    read = {os.path.realpath(path) for path in _read(found, given["rules"])}
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
        with files.opened(path) as file:
            head = file.read(0, 512).lstrip().lower()
    except KvRenameError:
        return False
    return not path.is_symlink() and head.startswith((b"<svg", b"<?xml", b"<!doctype", b"<html"))


def _read(found: tuple[Anatomy, ...], rules: Path | None) -> Iterator[Path]:
    """The files that have been looked at, and those beside them with weights."""
    for item in found:
        yield Path(item.path)
        locations = (file.location for file in item.files if "\0" not in file.location)
        yield from (Path(item.path).parent / location for location in locations)
    if rules is not None:
        yield rules


def _drawn(path: Path, text: str) -> drafts.Staged:
    with Draft(Path(path).absolute(), path) as draft:
        draft.write(text.encode("utf-8"))
        draft.share()
        return draft.finish(replace=True)
