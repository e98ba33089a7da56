"""The command ``custom-io``: writes a fresh custom_io.yaml for a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NamedTuple

from onnxkvrename.api.arguments import find_rules
from onnxkvrename.cli.files import collect_inputs
from onnxkvrename.cli.options import declare_command
from onnxkvrename.cli.output import print_choice, print_lines
from onnxkvrename.errors import KvRenameError, ModelError
from onnxkvrename.findings import decide_exit_code, format_list, quote_path
from onnxkvrename.options import (
    Example,
    Option,
    Profile,
    RulesFile,
)
from onnxkvrename.report.formats import Line
from onnxkvrename.rules.find_models import find_jobs
from onnxkvrename.rules.kv_model import KvModel, read_kv_model
from onnxkvrename.rules.profile import Rules
from onnxkvrename.sidecars.custom_io import PRECISIONS, render_custom_io
from onnxkvrename.storage.read import is_directory
from onnxkvrename.storage.write_file import write_files

DEFAULT_FILE_NAME = "custom_io.yaml"
_VISION = "vision"
"""The reason for which a profile leaves vision buffers alone."""


class CustomIoArguments(NamedTuple):
    """What a user asks for with ``custom-io``."""

    precision: Annotated[
        str,
        Option(
            "--precision",
            f"What the compiler keeps every KV buffer in: {', '.join(PRECISIONS)}.",
            "NAME",
            names=tuple(PRECISIONS),
            is_required=True,
        ),
    ]
    model: Annotated[Path, Option("", metavar="MODEL", is_required=True)]
    vision: Annotated[
        str | None,
        Option(
            "--vision",
            "List the vision buffers of a model for images too, with this precision; QEfficient "
            "takes that of the weights, e.g. float16.",
            "NAME",
            names=tuple(PRECISIONS),
        ),
    ] = None
    output: Annotated[
        Path | None,
        Option(
            "-o --output",
            f"Write it here; by default {DEFAULT_FILE_NAME} beside the model. - is stdout.",
            "FILE",
            writes="file or stdout",
        ),
    ] = None
    force: Annotated[bool, Option("--force", "Replace a file that is there.")] = False
    profile: Profile = None
    rules: RulesFile = None


@declare_command(
    "custom-io",
    CustomIoArguments,
    "Exit codes: 0 done; 2 the job could not be done; 130 interrupted.",
    Example("onnxkvrename custom-io renamed.onnx --precision mxint8", "Write it beside the model."),
    Example("onnxkvrename custom-io renamed.onnx --precision float16 -o -", "Print it."),
)
def command(arguments: CustomIoArguments) -> int:
    """Write a fresh custom_io.yaml: the precision of every KV input and output of MODEL."""
    precision = arguments.precision
    path = arguments.model
    if is_directory(path):
        hint = f"pass one model, such as {quote_path(str(find_jobs([path])[0].model))}"
        raise KvRenameError("is a directory, not a model", path=str(path), hint=hint)
    rules = find_rules(arguments.profile, arguments.rules, (path,))
    print_choice(rules.choice)
    model = read_kv_model(path, rules, check_data=False)
    names = _list_kv_names(model)
    vision_names = _list_vision_names(model, rules)
    listed = [(name, arguments.vision) for name in vision_names if arguments.vision is not None]
    text = _render_custom_io(names, precision, listed, path)
    if vision_names and not listed:
        _warn_of_vision(vision_names)
    output = arguments.output or path.parent / DEFAULT_FILE_NAME
    if str(output) == "-":
        print_lines(map(Line, text.removesuffix("\n").split("\n")))
        return decide_exit_code()
    inputs = _check_output(output, model, arguments.rules)
    content = {output: text.encode("utf-8")}
    write_files(content, force=arguments.force, inputs=inputs)
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


def _check_output(output: Path, model: KvModel, rules: Path | None) -> list[Path]:
    """Return what the run reads; raise :class:`WriteError` for an output over one of it."""
    data = ((path, "external data of the model") for path in model.data_paths)
    given = ((Path(model.path), "the model itself"), *data, (rules, "the file of rules"))
    files = collect_inputs(given)
    files.check_output(files.add_output(output, "the new file"))
    return files.list_inputs()
