"""What a terminal shows of the records that the library returns: their ``str()``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from onnxkvrename.display import describe_briefly
from onnxkvrename.findings import Finding
from onnxkvrename.handoff.compare import Handoff
from onnxkvrename.layout.inspect import ModelSummary
from onnxkvrename.report.compare_text import build_handoff_result, render_handoff
from onnxkvrename.report.formats import Answer, FileResult, Line, load_format
from onnxkvrename.report.formats.text import format_finding
from onnxkvrename.report.inert import escape_line
from onnxkvrename.report.inspection.summary_text import render_model_summary
from onnxkvrename.report.rename_text import build_rename_answer
from onnxkvrename.report.tables import wrap_line
from onnxkvrename.report.verify_text import build_verify_answer
from onnxkvrename.rules.profile import ProfileChoice
from onnxkvrename.rules.request import Request
from onnxkvrename.rules.results import ModelReport, Report
from onnxkvrename.verification.verify import VerifiedModel

_WIDTH = 80


def render_record(record: Any) -> str:
    """Return what a terminal of 80 columns shows of a record, without colour.

    A record that no command shows is one line, its ``repr()``.
    """
    build = _ANSWERS.get(type(record))
    if build is None:
        return describe_briefly(record)
    lines = load_format("text").render(build(record), _WIDTH)
    rows = (row for line in lines for row in (wrap_line(line, _WIDTH) if line.err else (line,)))
    return "\n".join("".join(escape_line(row.text)) for row in rows)


def _build_rename_answer(report: Report) -> Answer:
    is_dry = any(model.status == "would-rename" for model in report.models) and not report.failed
    return build_rename_answer(report, Request(dry_run=is_dry))


def _build_verify_answer(model: VerifiedModel) -> Answer:
    return build_verify_answer([model], ProfileChoice(""), quiet=False, verbose=False)


def _build_inspect_answer(summary: ModelSummary) -> Answer:
    files = (FileResult(summary.path, summary.findings, summary.error),)
    return Answer("inspect", 0, render_text=partial(render_model_summary, summary), files=files)


def _build_compare_answer(handoff: Handoff) -> Answer:
    files = (build_handoff_result(handoff),)
    return Answer("compare", 0, render_text=partial(render_handoff, handoff), files=files)


def _render_finding(finding: Finding, _width: int | None) -> Iterator[Line]:
    yield Line(f"{finding.severity} {finding.code}: {format_finding(finding, None)}")


_ANSWERS: Mapping[type, Callable[[Any], Answer]] = {
    ModelReport: lambda report: _build_rename_answer(Report((report,))),
    Report: _build_rename_answer,
    VerifiedModel: _build_verify_answer,
    ModelSummary: _build_inspect_answer,
    Finding: lambda finding: Answer("", 0, render_text=partial(_render_finding, finding)),
    Handoff: _build_compare_answer,
}
"""The answer of the command that shows a record, by the type of the record."""
