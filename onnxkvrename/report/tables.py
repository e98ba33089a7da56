"""Tables: aligned columns for pipes, rich's tables for terminals."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from onnxkvrename.report.formats import Line, Span, build_line

if TYPE_CHECKING:
    from rich.color import ColorSystem
    from rich.console import RenderableType
    from rich.style import Style
    from rich.table import Table

# rich is imported where it draws: most answers go to pipes.

_MAX_WIDTH = 1000
"""The most columns that are drawn, whatever the terminal or `COLUMNS` says: each costs time."""


def format_columns(rows: Sequence[Sequence[str]], *, indent: str = "  ") -> Iterator[str]:
    """Yield rows of cells as lines, each column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (text.ljust(width) for text, width in zip(row, widths, strict=True))
        yield indent + "  ".join(cells).rstrip()


def build_table(heads: Iterable[str], rows: Iterable[Iterable[object]]) -> Table:
    """Return a table that shows its texts without markup and folds cells that do not fit."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="dim")
    for head in heads:
        table.add_column(head.lower(), overflow="fold")
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else Text(str(cell)) for cell in row))
    return table


def render_lines(parts: Iterable[RenderableType], *, color: bool) -> Iterator[Line]:
    """Yield what rich draws as lines; a text is not folded, so that it can be copied.

    Rich only lays it out: it would pass controls on, and end the process when the reader is
    gone.

    Args:
        parts: What to draw, one below the other.
        color: Whether to colour it.
    """
    from rich.console import COLOR_SYSTEMS, Console
    from rich.segment import Segment
    from rich.text import Text

    console = Console(highlight=False, color_system="auto" if color else None)
    console.width = min(console.width, _MAX_WIDTH)
    color_system = COLOR_SYSTEMS.get(console.color_system or "")
    for part in parts:
        options = console.options
        if isinstance(part, Text):
            options = options.update(no_wrap=True, overflow="ignore")
        for segments in Segment.split_lines(console.render(part, options)):
            spans = [Span(text, _render_style(style, color_system)) for text, style, _ in segments]
            yield build_line(*_strip_line(spans))


def _render_style(style: Style | None, color_system: ColorSystem | None) -> str:
    """Return a style of rich as the parameters of a terminal's SGR sequence."""
    if style is None or color_system is None:
        return ""
    codes, is_styled, _ = style.render("-", color_system=color_system).partition("m-")
    return codes.removeprefix("\x1b[") if is_styled else ""


def _strip_line(spans: list[Span]) -> list[Span]:
    """Return a line without the spaces at its end, which only fill a cell."""
    while spans and not (text := spans[-1].text.rstrip(" ")):
        spans.pop()
    return [*spans[:-1], spans[-1]._replace(text=text)] if spans else []
