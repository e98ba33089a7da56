"""Tables, facts and sentences as lines: a terminal's width decides what is folded.

A pipe folds nothing. All that is printed breaks between words only, so that names, paths and
commands can still be copied.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest

from onnxkvrename.report.formats import Line, Span, build_line
from onnxkvrename.report.formats.text import DIM
from onnxkvrename.report.inert import escape_text

Cell = str | Span

_UNLIMITED = 1 << 31
_GAP = 2
_INDENT = "  "
_MIN_WIDTH = 20
_BULLET = re.compile(r" +(?:-> )?")
_WORD = re.compile(r"\S+")
# A command is copied as a whole: a terminal joins the rows that it breaks itself. What a shell
# takes as quoted, such as a path, can contain what else ends a command.
_QUOTED = r"\$'(?:\\.|[^'\\])*'|'[^']*'|\"[^\"]*\""
_WORD_OR_COMMAND = re.compile(
    rf"(?:`(?:{_QUOTED}|[^`'\"])*`|`[^`]*`|\bonnxkvrename (?:{_QUOTED}|[^;`'\"])*|[^ ])+", re.DOTALL
)


def measure_text(text: str) -> int:
    """Return the columns that a text takes on a terminal."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def wrap_line(line: Line, width: int | None) -> Iterator[Line]:
    """Yield the rows of a sentence, which break between words, but not within a command.

    Args:
        line: The sentence.
        width: The columns of the terminal, or `None` for a pipe; a word that has more stays whole.
    """
    if width is None or width < _MIN_WIDTH or line.is_command:
        yield line
        return
    line = _escape_line(line)
    bullet = _BULLET.match(line.text)
    head = len(bullet[0]) if bullet else 0
    indent = " " * head or _INDENT
    rows = _find_rows(line.text, width, _WORD_OR_COMMAND, len(indent), head)
    yield from (_cut_line(line, start, end, indent) for start, end in rows)


def _escape_line(line: Line) -> Line:
    """Return a line as it is printed, so that its width is known."""
    if not line.spans:
        return line._replace(text=escape_text(line.text))
    return build_line(*map(_build_cell, line.spans), err=line.err)


def _find_rows(
    text: str, width: int, words: re.Pattern[str], indent: int = 0, head: int = 0
) -> list[tuple[int, int]]:
    """Return where the rows of a text begin and end; all but the first are indented.

    No row ends within its first `head` characters, a bullet with its indentation.
    """
    if measure_text(text) <= width:
        return [(0, len(text))]
    rows, start, end, room = [], 0, 0, width
    for word in words.finditer(text):
        if end > max(start, head) and measure_text(text[start : word.end()]) > room:
            rows.append((start, end))
            start, room = word.start(), width - indent
        end = word.end()
    return [*rows, (start, len(text))]


def _cut_line(line: Line, start: int, end: int, indent: str) -> Line:
    """Return a part of a line, with its styles; all but the first are indented."""
    indent = indent if start else ""
    spans, offset = [Span(indent)] if indent else [], 0
    for span in line.spans:
        text = span.text[max(start - offset, 0) : max(end - offset, 0)]
        if text:
            spans.append(span._replace(text=text))
        offset += len(span.text)
    return Line(indent + line.text[start:end], line.err, tuple(spans) if line.spans else ())


def render_table(
    rows: Sequence[Sequence[Cell]], width: int | None, *, indent: str = ""
) -> Iterator[Line]:
    """Yield rows of cells with aligned columns.

    Where they are too wide, cells are folded between words; where not even the words fit, each row
    is a paragraph of the heads with its cells.

    Args:
        rows: The heads, and the rows of cells, of any text.
        width: The columns of the terminal; `None` for lines as wide as they are.
        indent: What precedes each line.
    """
    if not rows:
        return
    cells = [list(map(_build_cell, row)) for row in rows]
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
                cell._replace(text=_pad_text(text, each))
                for cell, text, each in zip(row, texts, widths, strict=True)
            ]
            yield _join_cells(indent, parts, gap)


def render_facts(
    facts: Sequence[tuple[str, Cell]], width: int | None, *, indent: str = ""
) -> Iterator[Line]:
    """Yield labels with the text beside each.

    Args:
        facts: The labels and texts; one without a label continues the one above it.
        width: The columns of the terminal; `None` for lines as wide as they are.
        indent: What precedes each line.
    """
    cells = [(_build_cell(Span(label, DIM)), _build_cell(cell)) for label, cell in facts]
    label_width = max((measure_text(label.text) for label, _ in cells), default=0)
    room = (_UNLIMITED if width is None else width) - len(indent) - label_width - _GAP
    for label, value in cells:
        for number, row in enumerate(fold_text(value.text, max(room, 1))):
            text = _pad_text("" if number else label.text, label_width)
            yield _join_cells(indent, [label._replace(text=text), value._replace(text=row)])


def _build_cell(cell: Cell) -> Span:
    """Return a cell as it is printed, so that its width is known."""
    span = cell if isinstance(cell, Span) else Span(cell)
    return span._replace(text=escape_text(span.text))


def fold_text(text: str, width: int) -> list[str]:
    """Return the rows of a text; a word that does not fit stays whole, so that it can be copied."""
    return [text[start:end] for start, end in _find_rows(text, width, _WORD)]


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


def _pad_text(text: str, width: int) -> str:
    return text + " " * (width - measure_text(text))


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
