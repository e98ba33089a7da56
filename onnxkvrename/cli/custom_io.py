"""The command ``custom-io``: writes a fresh custom_io.yaml for a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import click

from onnxkvrename.cli.options import (
    CONTEXT_SETTINGS,
    NonEmptyPath,
    OutputFile,
    add_profile_option,
    add_rules_option,
    add_single_option,
)
from onnxkvrename.cli.output import print_lines
from onnxkvrename.cli.requested_rules import pick_profile
from onnxkvrename.errors import KvRenameError, ModelError
from onnxkvrename.findings import decide_exit_code, format_list, quote_path
from onnxkvrename.report.formats import Line
from onnxkvrename.rules.find_models import find_jobs
from onnxkvrename.rules.kv_model import KvModel, read_kv_model
from onnxkvrename.rules.profile import Rules
from onnxkvrename.sidecars.formats.custom_io import PRECISIONS, render_custom_io
from onnxkvrename.storage.read import is_directory
from onnxkvrename.storage.run_files import RunFiles
from onnxkvrename.storage.write_file import write_files

DEFAULT_FILE_NAME = "custom_io.yaml"
_VISION = "vision"
"""The reason for which a profile leaves vision buffers alone."""


class _Arguments(NamedTuple):
    """The arguments and options of the command line, one field for each."""

    model: Path
    precision: str
    vision: str | None
    output: Path | None
    force: bool
    profile: str | None
    rules: Path | None


def _complete_precision(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    return [name for name in PRECISIONS if name.startswith(incomplete)]


@click.command(
    "custom-io",
    context_settings=CONTEXT_SETTINGS,
    epilog="Exit codes: 0 done; 2 the job could not be done; 130 interrupted.",
)
@click.argument("model", metavar="MODEL", type=NonEmptyPath(path_type=Path))
@add_single_option(
    "--precision",
    metavar="NAME",
    required=True,
    shell_complete=_complete_precision,
    help=f"What the compiler keeps every KV buffer in: {', '.join(PRECISIONS)}.",
)
@add_single_option(
    "--vision",
    metavar="NAME",
    shell_complete=_complete_precision,
    help="List the vision buffers of a model for images too, with this precision; QEfficient "
    "takes that of the weights, e.g. float16.",
)
@add_single_option(
    "-o",
    "--output",
    metavar="FILE",
    type=OutputFile(takes_stdout=True),
    help=f"Write it here; by default {DEFAULT_FILE_NAME} beside the model. - is stdout.",
)
@click.option("--force", is_flag=True, help="Replace a file that is there.")
@add_profile_option()
@add_rules_option()
def command(**values: Any) -> int:
    """Write a fresh custom_io.yaml: the precision of every KV input and output of MODEL."""
    arguments = _Arguments(**values)
    precision = arguments.precision
    paths = (arguments.model,)
    if is_directory(arguments.model):
        hint = f"pass a model in it, such as {quote_path(str(find_jobs(paths)[0].model))}"
        raise KvRenameError("is a directory, not a model", path=str(arguments.model), hint=hint)
    rules = pick_profile(paths, arguments.profile, arguments.rules, is_quiet=False)
    model = read_kv_model(arguments.model, rules, check_data=False)
    names = _list_kv_names(model)
    vision_names = _list_vision_names(model, rules)
    listed = [(name, arguments.vision) for name in vision_names if arguments.vision is not None]
    text = _render_custom_io(names, precision, listed, arguments.model)
    if vision_names and not listed:
        _warn_of_vision(vision_names)
    output = arguments.output or arguments.model.parent / DEFAULT_FILE_NAME
    if str(output) == "-":
        print_lines(map(Line, text.removesuffix("\n").split("\n")))
        return decide_exit_code()
    files = _check_output(output, model, arguments.rules)
    content = {output: text.encode("utf-8")}
    write_files(content, force=arguments.force, inputs=files.list_inputs())
    others = f"; {len(listed)} names, {arguments.vision}" if listed else ""
    print_lines([Line(f"{output}: {len(names) * 2} names, {precision}{others}", err=True)])
    return decide_exit_code()


def _list_kv_names(model: KvModel) -> list[tuple[str, str]]:
    """Return the names of each KV input and its retained output, as in the model."""
    pairs = model.pairs
    complete = [pair for pair in pairs if pair.input is not None and pair.output is not None]
    if not complete or len(complete) < len(pairs):
        message = "has no KV buffer" if not pairs else "has KV buffers with one side missing"
        hint = f"`onnxkvrename verify {quote_path(model.path)}` says more"
        raise ModelError(message, path=model.path, hint=hint)
    return [(pair.sides[0].old_name, pair.sides[1].old_name) for pair in complete]


def _list_vision_names(model: KvModel, rules: Rules) -> list[str]:
    """Return the names of each retained vision input and its output, as in the model."""
    inputs = {value.name for value in model.signature.inputs}
    names = []
    for output in model.output_names:
        name = output.rpartition("_")[0]
        if (
            name in inputs
            and rules.is_retained_name(output)
            and rules.find_reason_to_keep(output) == _VISION
        ):
            names += [name, output]
    return names


def _warn_of_vision(names: list[str]) -> None:
    text = f"left out: {format_list(names)} (--vision float16 lists them, as QEfficient does)"
    print_lines([Line(text, err=True)])


def _render_custom_io(
    names: list[tuple[str, str]], precision: str, others: list[tuple[str, str]], model: Path
) -> str:
    """Return the text of the file; vision buffers come first, as QEfficient has them."""
    try:
        text = render_custom_io(names, precision)
        return render_custom_io([], precision, others) + text
    except ModelError as error:
        raise ModelError(error.message, path=str(model), hint=error.hint) from None


def _check_output(output: Path, model: KvModel, rules: Path | None) -> RunFiles:
    """Return the files of the run; raise :class:`WriteError` for an output over one it reads."""
    files = RunFiles()
    files.add_input(Path(model.path), "the model itself")
    for path in model.data_paths:
        files.add_input(path, "external data of the model")
    if rules is not None:
        files.add_input(rules, "the file of rules")
    files.check_output(files.add_output(output, "the new file"))
    return files
