"""Tables: aligned columns for pipes, rich's tables for terminals."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal

from onnxkvrename.report.formats import Line, Span, build_line

if TYPE_CHECKING:
    from rich.color import ColorSystem
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
    from rich.style import Style
    from rich.table import Table
    from rich.text import Text

# rich is imported where it draws: most answers go to pipes.

_MAX_WIDTH = 1000
"""The most columns that are drawn, whatever the terminal or `COLUMNS` says: each costs time."""


def format_columns(rows: Sequence[Sequence[str]], *, indent: str = "  ") -> Iterator[str]:
    """Yield rows of cells as lines, each column as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (text.ljust(width) for text, width in zip(row, widths, strict=True))
        yield indent + "  ".join(cells).rstrip()


def build_table(
    heads: Iterable[str], rows: Iterable[Iterable[object]], *, right: Collection[str] = ()
) -> FittingTable:
    """Return a table that shows its texts without markup, and breaks no word.

    Args:
        heads: The names of the columns.
        rows: The cells, texts of rich or anything that has a text.
        right: The columns that are justified to the right.
    """
    from rich.text import Text

    return FittingTable(
        [head.lower() for head in heads],
        [[cell if isinstance(cell, Text) else Text(str(cell)) for cell in row] for row in rows],
        right,
    )


class FittingTable:
    """A table as wide as its place; where not even its words fit, a paragraph for each row.

    Args:
        heads: The names of the columns.
        rows: The cells.
        right: The columns that are justified to the right.
    """

    def __init__(
        self, heads: Sequence[str], rows: Sequence[Sequence[Text]], right: Collection[str]
    ) -> None:
        self.heads = heads
        self.rows = rows
        self.right = right

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield what rich draws."""
        columns = [
            [head, *(cell.plain for cell in cells)]
            for head, cells in zip(self.heads, zip(*self.rows, strict=True), strict=True)
        ] or [[head] for head in self.heads]
        for gap in (2, 1):
            room = options.max_width - gap * (len(columns) - 1)
            widths = _fit_widths(columns, room)
            if widths is not None:
                yield self._build_table(widths, gap)
                return
        yield from self._list_paragraphs()

    def _build_table(self, widths: Iterable[int], gap: int) -> Table:
        from rich.table import Table

        table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, gap, 0, 0))
        for head, width in zip(self.heads, widths, strict=True):
            justify: Literal["left", "right"] = "right" if head in self.right else "left"
            table.add_column(head, width=width, overflow="fold", justify=justify)
        for row in self.rows:
            table.add_row(*row)
        return table

    def _list_paragraphs(self) -> Iterator[Table]:
        from rich.table import Table

        for row in self.rows:
            grid = Table.grid(padding=(0, 2))
            grid.add_column(style="dim", no_wrap=True)
            grid.add_column(overflow="fold")
            for head, cell in zip(self.heads, row, strict=True):
                grid.add_row(head, cell)
            yield grid


def _fit_widths(columns: Iterable[Sequence[str]], room: int) -> list[int] | None:
    """Return a width for each column, none less than a word of it; ``None`` if that is too much."""
    from rich.cells import cell_len

    wanted, widths = [], []
    for texts in columns:
        wanted.append(max(map(cell_len, texts)))
        widths.append(max((cell_len(word) for text in texts for word in text.split()), default=1))
    if sum(widths) > room:
        return None
    for _ in range(min(room, sum(wanted)) - sum(widths)):
        needs = [full - width for full, width in zip(wanted, widths, strict=True)]
        widths[needs.index(max(needs))] += 1
    return widths


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
