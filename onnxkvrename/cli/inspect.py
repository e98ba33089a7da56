"""The command ``inspect``: shows what is in a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import click

from onnxkvrename.cli.options import (
    CONTEXT_SETTINGS,
    OutputFile,
    add_format_option,
    add_models_argument,
    add_pairs_option,
    add_profile_option,
    add_rules_option,
    add_single_option,
)
from onnxkvrename.cli.output import print_answer
from onnxkvrename.cli.requested_rules import (
    add_pairs_token_option,
    check_pairs_token,
    pick_requested_rules,
)
from onnxkvrename.errors import KvRenameError, UndoError, WriteError
from onnxkvrename.findings import decide_exit_code
from onnxkvrename.layout.inspect import ModelSummary, inspect_models
from onnxkvrename.layout.window_sets import fold_windows
from onnxkvrename.report.documents.inspect_json import summaries_to_json
from onnxkvrename.report.formats import Answer, FileResult, Line, Screen
from onnxkvrename.report.formats.text import build_error_line
from onnxkvrename.report.tables import render_lines
from onnxkvrename.rules.find_models import find_jobs
from onnxkvrename.rules.kv_model import locate_data
from onnxkvrename.rules.profile import ProfileChoice
from onnxkvrename.storage.run_files import RunFiles
from onnxkvrename.storage.write_file import check_not_cached, check_replaceable, write_files
from onnxkvrename.verification import trace_buffer_updates


class _Arguments(NamedTuple):
    """The arguments and options of the command line, one field for each."""

    models: tuple[Path, ...]
    html: Path | None
    force: bool
    profile: str | None
    rules: Path | None
    pairs: str | None
    prefix: str | None
    output_format: str
    quiet: bool = False  # no option of this command


@click.command(
    "inspect",
    context_settings=CONTEXT_SETTINGS,
    epilog="Exit codes: 0 nothing wrong; 1 a finding of severity error; 2 the job could not be "
    "done; 130 interrupted.",
)
@add_models_argument()
@add_single_option("--html", metavar="FILE", type=OutputFile(), help="Also write an HTML page.")
@click.option("--force", is_flag=True, help="With --html: replace any file, not only a page.")
@add_profile_option()
@add_rules_option()
@add_pairs_option()
@add_pairs_token_option()
@add_format_option()
def command(**values: Any) -> int:
    """Show what is in a model: its KV buffers by layer, their kinds, token, weights, findings.

    Windows of one model that are alike are shown as one. The kind of a buffer is what the
    profile says, else what its shape suggests. How it is updated is traced through the graph.
    Weights are not read.
    """
    arguments = _Arguments(**values)
    jobs = find_jobs(arguments.models)
    check_pairs_token(arguments.prefix, arguments.pairs)
    rules = pick_requested_rules(arguments.models, arguments, arguments.prefix)
    summaries = inspect_models((job.model for job in jobs), rules, trace_buffer_updates)
    written = _write_page(summaries, arguments)
    answer = _build_answer(summaries, rules.profile_choice, written)
    return print_answer(answer, arguments.output_format)


def render_failure(code: int, error: KvRenameError) -> str:
    """Return the JSON document of a job that could not be done."""
    return summaries_to_json((), code, error)


def _build_answer(
    summaries: Sequence[ModelSummary], profile: ProfileChoice, written: Sequence[str]
) -> Answer:
    code = decide_exit_code(
        failed=any(summary.failed for summary in summaries),
        not_done=any(summary.error is not None for summary in summaries),
    )
    return Answer(
        code,
        render_json=partial(summaries_to_json, summaries, code, profile=profile),
        render_text=partial(_render_text, summaries, written),
        files=tuple(
            FileResult(summary.path, summary.findings, summary.error) for summary in summaries
        ),
    )


def _render_text(
    summaries: Sequence[ModelSummary], written: Sequence[str], screen: Screen
) -> Iterator[Line]:
    from onnxkvrename.report.inspection.summary_text import (
        render_model_summary,
    )  # rich, only for text

    for summary in fold_windows(summaries):
        if summary.error is None:
            yield from render_lines([render_model_summary(summary)], color=screen.color)
    for summary in summaries:
        if summary.error is not None:
            yield build_error_line(summary.error)
    yield from (Line(line, err=True) for line in written)


def _write_page(summaries: Sequence[ModelSummary], arguments: _Arguments) -> list[str]:
    """Write the page that was asked for; none where a model cannot be read.

    Returns:
        A line about it.
    """
    if arguments.html is None:
        return []
    from onnxkvrename.report.pages.inspect_page import render_html  # only for a page

    inputs = _check_page_path(arguments.html, summaries, arguments)
    if any(summary.error is not None for summary in summaries):
        return []
    page = render_html(fold_windows(summaries)).encode("utf-8")
    try:
        write_files({arguments.html: page}, force=True, inputs=inputs)
    except UndoError:
        raise  # it says itself what was written
    except WriteError as error:
        hint = "no page was written; choose a different path"
        raise WriteError(error.message, path=error.path, hint=hint) from None
    return [f"{arguments.html}: page written"]


def _check_page_path(
    path: Path, summaries: Sequence[ModelSummary], arguments: _Arguments
) -> list[Path]:
    """Return what the run reads; raise for a page over it, or over no earlier page."""
    from onnxkvrename.report.pages.frame import build_start_pattern  # only for a page

    files = RunFiles()
    for summary in summaries:
        files.add_input(Path(summary.path), f"the model {summary.path}")
        locations = (file.location for file in summary.files)
        for data_path in locate_data(Path(summary.path), locations):
            files.add_input(data_path, f"external data of {summary.path}")
    if arguments.rules is not None:
        files.add_input(arguments.rules, "the file of rules")
    output = files.add_output(path, "the page of --html")
    check_not_cached(output.path)
    files.check_output(output)
    if not arguments.force:
        check_replaceable(
            output.path, "a page made by onnxkvrename inspect", build_start_pattern("inspect")
        )
    return files.list_inputs()
