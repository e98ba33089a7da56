"""A model summary on a terminal: facts, the KV map and findings; loads rich."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import ConsoleOptions, Group, RenderableType
from rich.filesize import decimal
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from onnxkvrename.layout.inspect import ModelSummary
from onnxkvrename.report.formats import Span, build_line
from onnxkvrename.report.inspection.facts import (
    FindingLine,
    format_title,
    list_facts,
    list_finding_lines,
)
from onnxkvrename.report.inspection.map_text import (
    DeferredRenderable,
    escape_for_console,
    render_kv_map,
)
from onnxkvrename.report.wrapping import wrap_line

_INDENT = "  "


def render_model_summary(summary: ModelSummary) -> RenderableType:
    """Return the facts, the KV map and the findings of a model, or of windows folded into one.

    A long path stays whole, so that it can be copied.
    """
    return DeferredRenderable(lambda options: Group(*_render_parts(summary, options)))


def _render_parts(summary: ModelSummary, options: ConsoleOptions) -> Iterator[RenderableType]:
    head = Text(escape_for_console(format_title(summary), options), style="bold", no_wrap=True)
    head.overflow = "ignore"
    if summary.error is not None:
        hint = "" if summary.error.hint is None else f" ({summary.error.hint})"
        message = escape_for_console(f"{summary.error.message}{hint}", options)
        yield head.append(f"  {message}", style="not bold red")
        return
    yield head.append(f"  {decimal(summary.size)}", style="not bold dim")
    yield Padding(_render_facts(summary, options), (0, 0, 0, 2))
    if summary.buffers:
        yield Padding(render_kv_map(summary), (1, 0, 0, 2))
    if summary.findings:
        yield Text()
        for line in list_finding_lines(summary):
            yield from _render_finding(line, options)


def _render_facts(summary: ModelSummary, options: ConsoleOptions) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, lines in list_facts(summary):
        grid.add_row(
            Text(label), Text("\n".join(escape_for_console(line, options) for line in lines))
        )
    return grid


def _render_finding(line: FindingLine, options: ConsoleOptions) -> Iterator[Text]:
    """Yield the rows of a finding, which break between words, but not within a command."""
    severity = Span(f"{line.severity} {line.code}", "red" if line.severity == "error" else "yellow")
    message = f"{line.message} ({line.hint})" if line.hint else line.message
    whole = build_line(severity, f"  {escape_for_console(message, options)}")
    for row in wrap_line(whole, options.max_width - len(_INDENT)):
        text = Text(_INDENT, no_wrap=True, overflow="ignore")
        for span in row.spans:
            text.append(span.text, style=span.style)
        yield text
