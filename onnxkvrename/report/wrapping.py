"""Wrap lines by words for a terminal, so that names, paths and commands can still be copied."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from shutil import get_terminal_size

from onnxkvrename.report.formats import Line, Screen, Span

_INDENT = "  "
_MIN_WIDTH = 20
# A command is copied as a whole: a terminal joins the rows that it breaks itself. What a shell
# takes as quoted, such as a path, can contain what else ends a command.
_QUOTED = r"\$'(?:\\.|[^'\\])*'|'[^']*'|\"[^\"]*\""
_WORD = re.compile(
    rf"(?:`(?:{_QUOTED}|[^`'\"])*`|`[^`]*`|\bonnxkvrename (?:{_QUOTED}|[^;`'\"])*|[^ ])+", re.DOTALL
)


def wrap_sentences(lines: Iterable[Line], screen: Screen) -> Iterator[Line]:
    """Yield the rows of sentences on stdout: wrapped for a terminal, as they are for a pipe."""
    if not screen.is_terminal:
        yield from lines
        return
    width = get_terminal_size().columns
    for line in lines:
        yield from wrap_line(line, width)


def wrap_line(line: Line, width: int) -> Iterator[Line]:
    """Yield the rows of a line, which break between words, but not within a command.

    Args:
        line: The line, of printable text.
        width: The columns of the terminal; a word that has more stays whole.
    """
    if len(line.text) <= width or width < _MIN_WIDTH or line.is_command:
        yield line
        return
    start, end = 0, 0
    for word in _WORD.finditer(line.text):
        indent = _INDENT if start else ""
        if end > start and len(indent) + word.end() - start > width:
            yield _cut_line(line, start, end)
            start = word.start()
        end = word.end()
    yield _cut_line(line, start, len(line.text))


def _cut_line(line: Line, start: int, end: int) -> Line:
    """Return a part of a line, with its styles; all but the first are indented."""
    indent = _INDENT if start else ""
    spans, offset = [Span(indent)] if indent else [], 0
    for span in line.spans:
        text = span.text[max(start - offset, 0) : max(end - offset, 0)]
        if text:
            spans.append(span._replace(text=text))
        offset += len(span.text)
    return Line(indent + line.text[start:end], line.err, tuple(spans) if line.spans else ())
