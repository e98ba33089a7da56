"""The command that writes custom_io.yaml for a model that has none."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from onnxkvrename.cli.options import (
    CONTEXT_SETTINGS,
    NonEmptyPath,
    add_profile_option,
    add_rules_option,
)
from onnxkvrename.cli.output import print_lines, stdout_guard
from onnxkvrename.errors import KvRenameError, ModelError, WriteError
from onnxkvrename.model.file import open_model
from onnxkvrename.rules.load import load_rules
from onnxkvrename.rules.plan import TokenChange, build_rename_plan
from onnxkvrename.sidecars.formats.custom_io import PRECISIONS, render_custom_io
from onnxkvrename.storage.transaction import write_file

DEFAULT_FILE_NAME = "custom_io.yaml"


@click.command(
    "onnxkvrename custom-io",
    context_settings=CONTEXT_SETTINGS,
    epilog="Exit codes: 0 done; 2 the job could not be done; 130 interrupted.",
)
@click.argument("model", metavar="MODEL", type=NonEmptyPath(path_type=Path))
@click.option(
    "--precision",
    metavar="NAME",
    required=True,
    help=f"What the compiler keeps every KV buffer in: {', '.join(PRECISIONS)}.",
)
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=NonEmptyPath(path_type=Path),
    help=f"Write it here; by default {DEFAULT_FILE_NAME} beside the model. - is stdout.",
)
@click.option("--force", is_flag=True, help="Replace a file that is there.")
@add_profile_option()
@add_rules_option()
def command(**given: Any) -> int:
    """Write a fresh custom_io.yaml: the precision of every KV input and output of MODEL."""
    model: Path = given["model"]
    rules = load_rules(given["profile"], given["rules"])
    with open_model(model) as found:
        pairs = build_rename_plan(found.signature, rules, TokenChange(None)).pairs
    both = [pair for pair in pairs if pair.input is not None and pair.output is not None]
    if not both or len(both) < len(pairs):
        what = "has no KV buffer" if not pairs else "has KV buffers with one side missing"
        raise ModelError(what, path=str(model), hint="onnxkvrename verify MODEL says more")
    names = [(pair.sides[0].old_name, pair.sides[1].old_name) for pair in both]
    text = _render_custom_io(names, given["precision"], model)
    output: Path = given["output"] or model.parent / DEFAULT_FILE_NAME
    if str(output) == "-":
        with stdout_guard():
            print_lines([text.removesuffix("\n")])
        return 0
    _write_output(output, text, model, force=given["force"])
    with stdout_guard():
        print_lines([f"{output}: {len(names) * 2} names, {given['precision']}"], err=True)
    return 0


def _render_custom_io(names: list[tuple[str, str]], precision: str, model: Path) -> str:
    try:
        return render_custom_io(names, precision)
    except ModelError as error:
        raise ModelError(error.message, path=str(model), hint=error.hint) from None


def _write_output(output: Path, text: str, model: Path, *, force: bool) -> None:
    if os.path.realpath(output) == os.path.realpath(model):
        raise WriteError("is the model itself", path=str(output))
    write_file(output, text.encode("utf-8"), force=force)


def render_failure(code: int, fault: KvRenameError) -> str:
    """There is no JSON form of this command."""
    return ""
