"""A model summary as text: facts, the KV map and findings."""

from __future__ import annotations

from collections.abc import Iterator

from onnxkvrename.findings import format_bytes
from onnxkvrename.layout.inspect import ModelSummary
from onnxkvrename.report.formats import Line, Span, build_line
from onnxkvrename.report.formats.text import BOLD, DIM, RED, YELLOW
from onnxkvrename.report.inert import escape_text
from onnxkvrename.report.inspection.facts import (
    FindingLine,
    format_title,
    list_facts,
    list_finding_lines,
)
from onnxkvrename.report.inspection.map_text import render_kv_map
from onnxkvrename.report.tables import render_facts
from onnxkvrename.report.wrapping import wrap_line

_INDENT = "  "


def render_model_summary(summary: ModelSummary, width: int) -> Iterator[Line]:
    """Yield the facts, the KV map and the findings of a model, or of windows folded into one.

    A long path stays whole, so that it can be copied.

    Args:
        summary: The model.
        width: The columns of the terminal, or those that a pipe gets.
    """
    title = Span(escape_text(format_title(summary)), BOLD)
    if summary.error is not None:
        hint = "" if summary.error.hint is None else f" ({summary.error.hint})"
        yield build_line(title, Span(f"  {escape_text(summary.error.message + hint)}", RED))
        return
    yield build_line(title, Span(f"  {format_bytes(summary.size, is_exact=False)}", DIM))
    facts = [(fact.label, "\n".join(map(escape_text, fact.lines))) for fact in list_facts(summary)]
    yield from render_facts(facts, width, indent=_INDENT)
    room = width - len(_INDENT)
    if summary.buffers:
        yield Line("")
        yield from map(_indent, render_kv_map(summary, room))
    if summary.findings:
        yield Line("")
        for line in list_finding_lines(summary):
            yield from map(_indent, wrap_line(_build_finding_line(line), room))


def _build_finding_line(line: FindingLine) -> Line:
    style = RED if line.severity == "error" else YELLOW
    message = f"{line.message} ({line.hint})" if line.hint else line.message
    return build_line(Span(f"{line.severity} {line.code}", style), f"  {escape_text(message)}")


def _indent(line: Line) -> Line:
    return build_line(_INDENT, *(line.spans or (line.text,))) if line.text else line
