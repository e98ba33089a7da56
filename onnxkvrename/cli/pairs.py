"""The command ``pairs``: the states of models, by dataflow alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

from onnxkvrename.api.unnamed_caches import suggest_first_rename, warn_of_stops
from onnxkvrename.cli.options import declare_command
from onnxkvrename.cli.output import print_answer
from onnxkvrename.errors import ModelError
from onnxkvrename.files.find import find_jobs
from onnxkvrename.findings import decide_exit_code
from onnxkvrename.model.signature import format_shape
from onnxkvrename.options import Example, Format, Models, Option
from onnxkvrename.report.documents.pairs_json import describe_pairs
from onnxkvrename.report.formats import Answer, FileResult, Line, Note
from onnxkvrename.report.tables import render_table
from onnxkvrename.text import format_count
from onnxkvrename.verification.pairs.hidden_states import StatePair
from onnxkvrename.verification.pairs.infer_rules import (
    TracedModel,
    draft_rules,
    find_last_word,
    trace_model,
)

_HEADINGS = ("input", "output", "update", "dtype", "shape")


class PairsArguments(NamedTuple):
    """What a user asks for with ``pairs``."""

    models: Models = ()
    form: Annotated[
        str | None,
        Option(
            "--as",
            "Print a rules file for the names of the models.",
            choices=("rules",),
            excludes=("output_format",),
        ),
    ] = None
    output_format: Format = "text"


@declare_command(
    "pairs",
    PairsArguments,
    "Exit codes: 0 done; 2 the job could not be done; 130 interrupted.",
    Example("onnxkvrename pairs model.onnx", "Show caches and states as a table."),
    Example("onnxkvrename pairs model.onnx --as rules > rules.toml", "Write rules for its names."),
)
def command(arguments: PairsArguments) -> int:
    """Show each input that an output is a later state of: the caches and states of MODEL.

    The graph alone decides, whatever the names are; no rules are needed. What
    cannot be proved is not shown. Weights are not read. Where no profile matches the
    names, `onnxkvrename MODEL --prefix TOKEN --rules FILE` renames with the rules that
    `--as rules` prints.
    """
    paths = [job.model for job in find_jobs(arguments.models)]
    results = [_trace(path) for path in paths]
    answer = _build_answer(results)
    if arguments.form is not None:
        failed = tuple(file for file in answer.files if file.error is not None)
        answer = answer._replace(render_text=partial(_render_rules, results), files=failed)
    return print_answer(answer, arguments.output_format)


def _trace(path: Path) -> TracedModel | ModelError:
    """Return a model with its pairs, or why it has none."""
    try:
        return trace_model(path)
    except ModelError as error:
        return error


def _build_answer(results: Sequence[TracedModel | ModelError]) -> Answer:
    code = decide_exit_code(not_done=any(isinstance(each, ModelError) for each in results))
    return Answer(
        "pairs",
        code,
        build_content=partial(describe_pairs, results),
        render_text=partial(_render_tables, results),
        files=tuple(map(_build_file, results)),
    )


def _render_tables(
    results: Sequence[TracedModel | ModelError], width: int | None
) -> Iterator[Line]:
    for result in results:
        if isinstance(result, ModelError):
            continue
        yield Line(f"{result.path}: {_count_pairs(result)}")
        rows = [_HEADINGS, *(_build_row(pair) for pair in result.pairs)]
        yield from render_table(rows if result.pairs else (), width, indent="  ")
    commands = suggest_first_rename(each for each in results if isinstance(each, TracedModel))
    if commands:
        yield Line(f"to rename: {commands}")


def _count_pairs(model: TracedModel) -> str:
    if not model.pairs:
        return "no output is proved to be a later state of an input"
    return format_count(len(model.pairs), "pair")


def _build_file(result: TracedModel | ModelError) -> FileResult:
    """Return the result of one model, with a warning where nothing proves what may be pairs."""
    if isinstance(result, ModelError):
        return FileResult(result.path or "", error=result)
    note = Note("pairs", _count_pairs(result), str(result.path))
    return FileResult(str(result.path), warn_of_stops(result), notes=(note,))


def _build_row(pair: StatePair) -> tuple[str, ...]:
    shape = pair.input.shape
    return (
        pair.input.name,
        pair.output.name,
        pair.update.label or "unknown",
        pair.input.dtype,
        "" if shape is None else format_shape(shape),
    )


def _render_rules(results: Sequence[TracedModel | ModelError], width: int | None) -> Iterator[Line]:
    """Yield rules for the names of models, as TOML; nothing if one cannot be read."""
    models = [result for result in results if isinstance(result, TracedModel)]
    if len(models) < len(results):
        return
    yield from map(Line, draft_rules(*models).rstrip("\n").split("\n"))
    if not any(model.buffers for model in models):
        yield Line(
            "no pair is proved: the rules are comments until you remove the # where they are right",
            err=True,
        )
    word = next(filter(None, map(find_last_word, models)), "")
    if word:
        yield Line(
            f"all names carry {word}: if that is a token, make the rules from the model "
            "before its rename",
            err=True,
        )
