"""The picture of ``inspect --svg``: the KV maps of models, for a README or a page.

It is as readable on a light page as on a dark one, and on a phone: letters are large for its
width, and bands of the map are short.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple
from xml.etree.ElementTree import Element

from onnxkvrename.layout.inspect import InspectedBuffer, ModelSummary
from onnxkvrename.layout.kinds import get_kind_traits, list_kinds
from onnxkvrename.report.inert import escape_text, shorten_text
from onnxkvrename.report.inspection.facts import list_buffer_facts, list_finding_lines
from onnxkvrename.report.inspection.grid import (
    STATUS_CAPTIONS,
    STATUS_SYMBOLS,
    Cell,
    KvGrid,
    MapColumn,
    build_grid,
    describe_case,
    get_symbol,
    list_empty_cells,
)
from onnxkvrename.report.pages.elements import Child, build, isolate_words, write_svg
from onnxkvrename.report.pages.frame import (
    CODE_FONT,
    FONT,
    make_mark,
    write_color_variables,
)
from onnxkvrename.report.pages.inspect_page import describe_size, format_name
from onnxkvrename.report.pages.map_table import list_kind_colors

_WIDTH, _MARGIN = 544, 20
_SHOWN_WIDTH = 680
"""Pixels of the picture on a page that has room for them."""
_CELL, _STEP, _BAND_CELLS = 22, 24, 16
_LABEL_WIDTH = 120
"""Units of the labels of rows, with the gap after them."""
_LABEL_LENGTH = 15
"""Letters of the longest label that fits."""
_LINE = 22
_MAX_FACT_LINES, _MAX_FINDINGS = 16, 8
"""Lines and findings of a model that are drawn."""
_TEXT, _TITLE, _NUMBER = 15, 22, 13
"""The sizes of letters in units."""
_NARROW, _WIDE = frozenset("fijlrtI.,:;'|!/()[]{} "), frozenset("mwMWOQ%@&")
_MAX_TEXT = 400
"""Characters of the longest finding that is drawn in full."""
_STYLE = f"""
text {{ font: {_TEXT}px {FONT}; fill: var(--ink) }}
.title {{ font-weight: 600; font-size: {_TITLE}px }}
.word {{ unicode-bidi: isolate }}
.soft {{ fill: var(--muted) }}
.number {{ font-size: {_NUMBER}px; fill: var(--muted); text-anchor: middle }}
.label {{ font: 13px {CODE_FONT} }}
.letter {{ font: 600 14px {CODE_FONT}; text-anchor: middle }}
.paper {{ fill: var(--paper) }}
.token rect, .broken rect {{ stroke: none }}
.cell rect {{ fill: none; stroke-width: 2 }}
.half rect {{ stroke: var(--ink); stroke-dasharray: 4 3 }} .missing rect {{ stroke-dasharray: 2 3 }}
.missing rect {{ stroke: var(--bad) }} .missing text {{ fill: var(--bad) }}
.broken rect {{ fill: var(--bad) }} .broken text, .token text {{ fill: var(--paper) }}
.empty text {{ fill: var(--muted); font-weight: 400 }}
.error {{ fill: var(--bad) }} .warning {{ fill: var(--warning) }}
"""


class _Piece(NamedTuple):
    """A part of the picture, drawn from y = 0 down.

    Attributes:
        elements: What is drawn.
        height: Its height, with the gap below.
    """

    elements: list[Element]
    height: float


START_PATTERN = (
    r'<svg xmlns="http://www\.w3\.org/2000/svg" viewBox="0 0 [0-9.e+]+ [0-9.e+]+" '
    rf'width="[0-9.e+]+" height="[0-9.e+]+" role="img"><desc>{make_mark("inspect")}</desc>'
)
"""The beginning of a picture; only such files are replaced."""


def render_svg(summaries: Sequence[ModelSummary]) -> str:
    """Return one picture of models with their KV maps; windows are folded before."""
    parts, y = [], float(_MARGIN)
    for summary in summaries:
        for piece in _draw_model(summary):
            parts.append(build("g", piece.elements, transform=f"translate({_MARGIN} {y:g})"))
            y += piece.height
        y += _MARGIN
    names = ", ".join(format_name(summary) for summary in summaries[:3])
    more = f" and {len(summaries) - 3:,} more" if len(summaries) > 3 else ""
    style = Element("style")
    style.text = f"{write_color_variables()}{write_color_variables(list_kind_colors())}{_STYLE}"
    style.text += "\n".join(_write_kind_styles()) + "\n"
    root = build(
        "svg",
        build("desc", make_mark("inspect")),
        build("title", f"KV map of {names}{more}"),
        style,
        build("rect", class_="paper", width=_WIDTH, height=y, rx=8),
        parts,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {_WIDTH} {y:g}",
        width=_SHOWN_WIDTH,
        height=y * _SHOWN_WIDTH / _WIDTH,
        role="img",
    )
    return write_svg(root)


def _draw_model(summary: ModelSummary) -> Iterator[_Piece]:
    grid = build_grid(summary.buffers)
    yield _draw_lines(_wrap(format_name(summary), _TITLE), "title", 28, 6)
    yield _draw_lines(_wrap(describe_size(summary)), "soft", _LINE, 14)
    if grid.rows:
        bands = -(-len(grid.columns) // _BAND_CELLS)
        cells = -(-len(grid.columns) // bands)
        for start in range(0, len(grid.columns), cells):
            yield _draw_band(grid, slice(start, start + cells))
        yield _draw_legend(grid)
        if grid.hidden_text:
            yield _draw_lines(_wrap(grid.hidden_text), "soft", _LINE, 8)
    if summary.buffers:
        yield _draw_facts(summary)
    for line in list(list_finding_lines(summary))[:_MAX_FINDINGS]:
        message = shorten_text(escape_text(line.message), _MAX_TEXT)
        text = f"{line.severity} {line.code}: {message}"
        yield _draw_lines(_wrap(text), line.severity, _LINE, 6)


def _draw_lines(lines: Sequence[str], class_: str, height: float, gap: float) -> _Piece:
    elements = [
        build("text", _isolate(line), class_=class_ or None, y=height * (number + 0.75))
        for number, line in enumerate(lines)
    ]
    return _Piece(elements, height * len(lines) + gap)


def _draw_band(grid: KvGrid, band: slice) -> _Piece:
    elements = []
    columns = grid.columns[band]
    end = 0.0
    for index, column in enumerate(columns):
        x = _LABEL_WIDTH + index * _STEP + _CELL / 2
        half = _measure(str(column)) * _NUMBER / 2
        if x - half > end and not (column.is_run and index):  # else it would reach into another
            elements.append(build("text", str(column), class_="number", x=x, y=12))
            end = x + half + 3
    for number, row in enumerate(grid.rows):
        y = 20 + number * _STEP
        label = _cut_label(row.name)
        elements.append(
            build(
                "text",
                build("title", _cut(row.name, 120)),
                _isolate(label),
                class_="label",
                y=y + 16,
            )
        )
        elements += [
            _draw_cell(row.name, cell, column, _LABEL_WIDTH + index * _STEP, y)
            for index, (cell, column) in enumerate(zip(row.cells[band], columns, strict=True))
        ]
    return _Piece(elements, 20 + len(grid.rows) * _STEP + 12)


def _draw_cell(name: str, cell: Cell, column: MapColumn, x: float, y: float) -> Element:
    title = f"{_cut(name, 120)}, layer {column}"
    return build(
        "g",
        build("title", title) if cell is not None else None,
        _draw_mark(get_symbol(cell, column), is_empty=cell is None),
        class_=_classify(cell),
        transform=f"translate({x:g} {y:g})",
    )


def _draw_mark(symbol: str, *, is_empty: bool = False) -> Iterator[Element]:
    if not is_empty:
        yield build("rect", x=1, y=1, width=_CELL - 2, height=_CELL - 2, rx=3)
    yield build("text", symbol, class_="letter", x=_CELL / 2, y=16)


def _draw_legend(grid: KvGrid) -> _Piece:
    """Draw what letters, signs and colors mean, as many beside each other as fit."""
    elements: list[Element] = []
    x = y = 0.0
    for symbol, class_, caption in _list_legend(grid):
        width = (_CELL + 8 if symbol else 0) + _measure(caption) * _TEXT + 18
        if x and x + width > _WIDTH - 2 * _MARGIN:
            x, y = 0.0, y + _CELL + 8
        if symbol:
            mark = _draw_mark(symbol, is_empty=class_ == "empty")
            elements.append(build("g", mark, class_=class_, transform=f"translate({x:g} {y:g})"))
        text_x = x + _CELL + 8 if symbol else x
        elements.append(build("text", caption, class_="soft", x=text_x, y=y + 16))
        x += width
    return _Piece(elements, y + _CELL + 16)


def _list_legend(grid: KvGrid) -> Iterator[tuple[str, str, str]]:
    """Yield the symbol, the classes and the meaning of each entry."""
    kinds: dict[str, InspectedBuffer] = {
        cell.kind: cell for cell in grid.cells if cell.state not in STATUS_SYMBOLS
    }
    for kind in list_kinds():
        if cell := kinds.get(kind):
            symbol = get_symbol(cell, grid.columns[0])
            yield symbol, _classify(cell), get_kind_traits(kind).label
    states = {cell.state for cell in grid.cells}
    for state, symbol in STATUS_SYMBOLS.items():
        if state in states:
            yield symbol, f"cell {state}", STATUS_CAPTIONS[state]
    for symbol, caption in list_empty_cells(grid):
        yield symbol, "empty", caption
    if case := describe_case(states):
        yield "", "", case


def _draw_facts(summary: ModelSummary) -> _Piece:
    """Draw the kinds of buffers with their shapes, as many as there is room for."""
    lines: list[tuple[str, str]] = []
    for fact in list_buffer_facts(summary):
        first, *others = fact.lines
        more = [("", line) for line in _wrap(f"{fact.label}: {first}" if fact.label else first)]
        more += [("soft", line) for text in others for line in _wrap(text)]
        if len(lines) + len(more) > _MAX_FACT_LINES:
            lines.append(("soft", "... (onnxkvrename inspect lists all)"))
            break
        lines += more
    elements = [
        build("text", _isolate(line), class_=class_ or None, y=_LINE * (number + 0.75))
        for number, (class_, line) in enumerate(lines)
    ]
    return _Piece(elements, _LINE * len(lines) + 8)


def _write_kind_styles() -> Iterator[str]:
    for kind in list_kinds():
        color = f"var(--kind-{kind})"
        yield f".{kind} rect {{ stroke: {color} }} .{kind} text {{ fill: {color} }}"
        yield f".token.{kind} rect {{ fill: {color} }} .token.{kind} text {{ fill: var(--paper) }}"


def _classify(cell: Cell) -> str:
    if cell is None:
        return "empty"
    return f"cell {cell.state}" + f" {cell.kind}" * (cell.state not in ("missing", "broken"))


def _isolate(text: str) -> Iterator[Child]:
    """Yield a text of which no word from right to left reorders the others."""
    return isolate_words(text, lambda word: build("tspan", word, class_="word"))


def _measure(text: str) -> float:
    """Return about how wide a text is, in its size; rather too wide than too narrow."""
    return sum(map(_measure_letter, text))


def _measure_letter(letter: str) -> float:
    if letter in _NARROW:
        return 0.42
    if letter in _WIDE:
        return 0.95
    if not letter.isascii():
        return 1.1 if unicodedata.east_asian_width(letter) in ("W", "F") else 0.8
    return 0.72 if letter.isupper() else 0.63


def _wrap(text: str, size: float = _TEXT) -> list[str]:
    """Return the lines of a text, broken between words where there are any.

    Args:
        text: The text.
        size: That of its letters, in units.
    """
    room = (_WIDTH - 2 * _MARGIN) / size
    lines = [""]
    for word in re.split(r"(?<= )", escape_text(text)):
        if lines[-1] and _measure(lines[-1] + word.rstrip(" ")) > room:
            lines.append("")
        for letter in word:
            if lines[-1] and letter != " " and _measure(lines[-1] + letter) > room:
                lines.append("")
            lines[-1] += letter
    return [line.rstrip(" ") for line in lines]


def _cut_label(name: str) -> str:
    """Return the label of a row, whose letters are all one wide, but those of East Asia two."""
    widths = (2 if _measure_letter(letter) > 1 else 1 for letter in escape_text(name))
    return _cut(name, sum(end <= _LABEL_LENGTH for end in accumulate(widths)))


def _cut(text: str, length: int) -> str:
    shown = escape_text(text)
    return shown if len(shown) <= length else f"{shown[: length - 1]}…"
