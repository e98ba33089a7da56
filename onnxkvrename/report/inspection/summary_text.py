"""A model summary as text: facts and the KV map."""

from __future__ import annotations

from collections.abc import Iterator

from onnxkvrename.layout.inspect import ModelSummary
from onnxkvrename.report.formats import Line, Span, build_line
from onnxkvrename.report.formats.text import BOLD, DIM
from onnxkvrename.report.inspection.facts import (
    format_title,
    list_byte_facts,
    list_facts,
)
from onnxkvrename.report.inspection.map_text import render_kv_map
from onnxkvrename.report.tables import render_facts
from onnxkvrename.text import format_bytes

_INDENT = "  "
_PIPED_MAP = 80
"""The columns of a map through a pipe: it is a drawing, and there folded as well."""


def render_model_summary(summary: ModelSummary, width: int | None) -> Iterator[Line]:
    """Yield the facts and the KV map of a model, or of windows folded into one.

    A long path stays whole, so that it can be copied.

    Args:
        summary: The model, which could be read.
        width: The columns of the terminal; `None` for a pipe.
    """
    title = Span(format_title(summary), BOLD)
    yield build_line(title, Span(f"  {format_bytes(summary.size, is_exact=False)}", DIM))
    facts = [
        (fact.label if number == 0 else "", line)
        for fact in (*list_facts(summary), *list_byte_facts(summary.totals))
        for number, line in enumerate(fact.lines)
    ]
    yield from render_facts(facts, width, indent=_INDENT)
    room = None if width is None else width - len(_INDENT)
    if summary.buffers:
        yield Line("")
        yield from map(_indent, render_kv_map(summary, room or _PIPED_MAP))


def _indent(line: Line) -> Line:
    spans = (Span(_INDENT), *line.spans) if line.spans else ()
    return line._replace(text=_INDENT + line.text, spans=spans) if line.text else line
