"""Tables and facts as lines: a terminal's width decides what is folded, a pipe folds nothing."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import zip_longest
from shutil import get_terminal_size

from onnxkvrename.report.formats import Line, Screen, Span, build_line
from onnxkvrename.report.formats.text import DIM

Cell = str | Span

MAX_WIDTH = 1000
"""The most columns that are drawn, whatever the terminal or `COLUMNS` says: each costs time."""
_UNLIMITED = 1 << 31
_GAP = 2


def find_width(screen: Screen) -> int | None:
    """Return the columns that a line may have; `None` for a pipe."""
    return min(get_terminal_size().columns, MAX_WIDTH) if screen.is_terminal else None


def measure_text(text: str) -> int:
    """Return the columns that a text takes on a terminal."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def format_columns(rows: Sequence[Sequence[str]], *, indent: str = "  ") -> Iterator[str]:
    """Yield rows of cells as texts, each column as wide as its widest cell."""
    return (line.text for line in render_table(rows, None, indent=indent))


def render_table(
    rows: Sequence[Sequence[Cell]],
    width: int | None,
    *,
    indent: str = "",
    right: Collection[int] = (),
) -> Iterator[Line]:
    """Yield rows of cells with aligned columns.

    Where they are too wide, cells are folded between words; where not even the words fit, each row
    is a paragraph of the heads with its cells.

    Args:
        rows: The heads, and the rows of printable cells.
        width: The columns of the terminal; `None` for lines as wide as they are.
        indent: What precedes each line.
        right: The columns that are justified to the right.
    """
    if not rows:
        return
    cells = [[cell if isinstance(cell, Span) else Span(cell) for cell in row] for row in rows]
    room = (_UNLIMITED if width is None else width) - len(indent)
    columns = [[cell.text for cell in column] for column in zip(*cells, strict=True)]
    for gap in (_GAP, 1):
        widths = _fit_widths(columns, room - gap * (len(columns) - 1))
        if widths is not None:
            break
    else:
        heads = [head.text for head in cells[0]]
        for row in cells[1:]:
            yield from render_facts(list(zip(heads, row, strict=True)), width, indent=indent)
        return
    for row in cells:
        folded = [fold_text(cell.text, each) for cell, each in zip(row, widths, strict=True)]
        for texts in zip_longest(*folded, fillvalue=""):
            parts = [
                cell._replace(text=_pad_text(text, each, is_right=number in right))
                for number, (cell, text, each) in enumerate(zip(row, texts, widths, strict=True))
            ]
            yield _join_cells(indent, parts, gap)


def render_facts(
    facts: Sequence[tuple[str, Cell]], width: int | None, *, indent: str = ""
) -> Iterator[Line]:
    """Yield labels with the text beside each, which may have several lines.

    Args:
        facts: The labels and printable texts.
        width: The columns of the terminal; `None` for lines as wide as they are.
        indent: What precedes each line.
    """
    label_width = max((measure_text(label) for label, _ in facts), default=0)
    room = (_UNLIMITED if width is None else width) - len(indent) - label_width - _GAP
    for label, cell in facts:
        value = cell if isinstance(cell, Span) else Span(cell)
        rows = [row for text in value.text.split("\n") for row in fold_text(text, max(room, 1))]
        for number, row in enumerate(rows):
            head = Span(_pad_text("" if number else label, label_width), DIM)
            yield _join_cells(indent, [head, value._replace(text=row)])


def fold_text(text: str, width: int) -> list[str]:
    """Return the rows of a text; a word that does not fit stays whole, so that it can be copied."""
    if measure_text(text) <= width:
        return [text]
    rows = [""]
    for word in re.findall(r"\s*\S+", text):
        if rows[-1] and measure_text(rows[-1] + word) > width:
            rows.append("")
            word = word.lstrip()
        rows[-1] += word
    return rows


def crop_text(text: str, width: int) -> str:
    """Return the beginning of a text that fits."""
    end = len(text) if measure_text(text) <= width else min(width, len(text))
    while end > 0 and measure_text(text[:end]) > width:
        end -= 1
    return text[:end]


def trim_line(parts: Sequence[str | Span]) -> Line:
    """Return a line without the spaces at its end, which only fill a cell."""
    kept = [part if isinstance(part, Span) else Span(part) for part in parts]
    while kept and not kept[-1].text.strip():
        kept.pop()
    if not kept:
        return Line("")
    return build_line(*kept[:-1], kept[-1]._replace(text=kept[-1].text.rstrip(" ")))


def _pad_text(text: str, width: int, *, is_right: bool = False) -> str:
    space = " " * (width - measure_text(text))
    return space + text if is_right else text + space


def _join_cells(indent: str, cells: Sequence[Span], gap: int = _GAP) -> Line:
    parts: list[str | Span] = [indent]
    for number, cell in enumerate(cells):
        parts += [" " * gap, cell] if number else [cell]
    return trim_line(parts)


def _fit_widths(columns: Iterable[Sequence[str]], room: int) -> list[int] | None:
    """Return a width for each column, none less than a word of it; `None` if that is too much."""
    wanted, widths = [], []
    for texts in columns:
        wanted.append(max(map(measure_text, texts)))
        widths.append(
            max((measure_text(word) for text in texts for word in text.split()), default=1)
        )
    if sum(wanted) <= room:
        return wanted
    if sum(widths) > room:
        return None
    for _ in range(room - sum(widths)):
        needs = [full - width for full, width in zip(wanted, widths, strict=True)]
        widths[needs.index(max(needs))] += 1
    return widths
