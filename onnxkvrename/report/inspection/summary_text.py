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
from onnxkvrename.report.tables import render_facts, wrap_line

_INDENT = "  "
_PIPED_MAP = 80
"""The columns of a map through a pipe: it is a drawing, and there folded as well."""


def render_model_summary(summary: ModelSummary, width: int | None) -> Iterator[Line]:
    """Yield the facts, the KV map and the findings of a model, or of windows folded into one.

    A long path stays whole, so that it can be copied.

    Args:
        summary: The model.
        width: The columns of the terminal; `None` for a pipe.
    """
    title = Span(escape_text(format_title(summary)), BOLD)
    if summary.error is not None:
        hint = "" if summary.error.hint is None else f" ({summary.error.hint})"
        yield build_line(title, Span(f"  {escape_text(summary.error.message + hint)}", RED))
        return
    yield build_line(title, Span(f"  {format_bytes(summary.size, is_exact=False)}", DIM))
    facts = [
        (fact.label if number == 0 else "", line)
        for fact in list_facts(summary)
        for number, line in enumerate(fact.lines)
    ]
    yield from render_facts(facts, width, indent=_INDENT)
    room = None if width is None else width - len(_INDENT)
    if summary.buffers:
        yield Line("")
        yield from map(_indent, render_kv_map(summary, room or _PIPED_MAP))
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
