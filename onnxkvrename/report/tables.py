"""Tables: aligned columns for pipes, rich's tables for terminals."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

# rich is imported where it draws: most answers go to pipes.


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


def render_lines(parts: Iterable[RenderableType], *, color: bool) -> Iterator[str]:
    """Yield what rich draws as lines; a text is not folded, so that it can be copied.

    It is captured, not printed: rich would end the process when the reader is gone.

    Args:
        parts: What to draw, one below the other.
        color: Whether to colour it.
    """
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, color_system="auto" if color else None)
    with console.capture() as capture:
        for part in parts:
            console.print(part, soft_wrap=isinstance(part, Text), crop=False)
    yield from (line.rstrip(" ") for line in capture.get().splitlines())
