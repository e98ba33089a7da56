"""The command that writes custom_io.yaml for a model that has none."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from onnxkvrename.cli import options as arguments
from onnxkvrename.cli import output as console
from onnxkvrename.cli.options import AnyPath
from onnxkvrename.errors import KvRenameError, ModelError, WriteError
from onnxkvrename.model import file as onnxfile
from onnxkvrename.rules import load as rulesfile
from onnxkvrename.rules import plan as planning
from onnxkvrename.rules.plan import Wish
from onnxkvrename.sidecars.formats import custom_io as customio
from onnxkvrename.storage import transaction as changeset

NAME = "custom_io.yaml"


@click.command(
    "onnxkvrename custom-io",
    context_settings=arguments.CONTEXT,
    epilog="Exit codes: 0 done; 2 the job could not be done; 130 interrupted.",
)
@click.argument("model", metavar="MODEL", type=AnyPath(path_type=Path))
@click.option(
    "--precision",
    metavar="NAME",
    required=True,
    help=f"What the compiler keeps every KV buffer in: {', '.join(customio.PRECISIONS)}.",
)
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=AnyPath(path_type=Path),
    help=f"Write it here; by default {NAME} beside the model. - is stdout.",
)
@click.option("--force", is_flag=True, help="Replace a file that is there.")
@arguments.profile()
@arguments.rules()
def command(**given: Any) -> int:
    """Write a fresh custom_io.yaml: the precision of every KV input and output of MODEL."""
    model: Path = given["model"]
    rules = rulesfile.load(given["profile"], given["rules"])
    with onnxfile.opened(model) as found:
        pairs = planning.plan(found.signature, rules, Wish(None)).pairs
    both = [pair for pair in pairs if pair.input is not None and pair.output is not None]
    if not both or len(both) < len(pairs):
        what = "has no KV buffer" if not pairs else "has KV buffers with one side missing"
        raise ModelError(what, path=str(model), hint="onnxkvrename verify MODEL says more")
    names = [(pair.ends[0].old, pair.ends[1].old) for pair in both]
    text = _text(names, given["precision"], model)
    output: Path = given["output"] or model.parent / NAME
    if str(output) == "-":
        with console.answering():
            console.say([text.removesuffix("\n")])
        return 0
    _write(output, text, model, force=given["force"])
    with console.answering():
        console.say([f"{output}: {len(names) * 2} names, {given['precision']}"], err=True)
    return 0


def _text(names: list[tuple[str, str]], precision: str, model: Path) -> str:
    try:
        return customio.write(names, precision)
    except ModelError as error:
        raise ModelError(error.message, path=str(model), hint=error.hint) from None


def _write(output: Path, text: str, model: Path, *, force: bool) -> None:
    if os.path.realpath(output) == os.path.realpath(model):
        raise WriteError("is the model itself", path=str(output))
    changeset.write_file(output, text.encode("utf-8"), force=force)


def failed(code: int, fault: KvRenameError) -> str:
    """There is no JSON form of this command."""
    return ""
