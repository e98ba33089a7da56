"""The KV map as text.

Every cell is a letter for its kind, small or capital for its token, so that
color only repeats what the letters say.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from onnxkvrename.layout.inspect import ModelSummary, NameStatus
from onnxkvrename.report.formats import Line, Span, build_line
from onnxkvrename.report.formats.text import DIM
from onnxkvrename.report.inert import escape_text
from onnxkvrename.report.inspection.grid import (
    Cell,
    KvGrid,
    MapColumn,
    build_grid,
    get_symbol,
    list_legend,
)
from onnxkvrename.report.tables import crop_text, measure_text
from onnxkvrename.rules.kinds import get_kind_traits

_STATUS_STYLES: Mapping[NameStatus, str] = {
    "half": "30;47",
    "missing": "1;31",
    "broken": "1;37;41",
}
_RULER_LABEL = "layer"
_COLORS = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")
"""The colors of terminals, in the order of their numbers."""


def render_kv_map(summary: ModelSummary, width: int) -> Iterator[Line]:
    """Yield the map in bands as wide as there is room for, with a legend.

    Args:
        summary: The model.
        width: The columns of the terminal.
    """
    grid = build_grid(summary.buffers)
    names = [escape_text(row.name) for row in grid.rows]
    geometry = _choose_geometry(names, len(grid.columns), width)
    for start in range(0, len(grid.columns), geometry.cells_per_band):
        band = grid.cut(slice(start, start + geometry.cells_per_band))
        yield build_line(Span(crop_text(_format_ruler(band.columns, geometry), width), DIM))
        for name, row in zip(names, band.rows, strict=True):
            yield _render_row(name, row.cells, band.columns, geometry)
        yield Line("")
    if grid.hidden_text:
        yield build_line(Span(grid.hidden_text, DIM))
    yield from _wrap_entries(_render_legend(grid), width)


class _MapGeometry(NamedTuple):
    """The dimensions of a map, in columns of the console.

    Attributes:
        label_width: Width of the labels, with the gap after them.
        cell_width: Width of a cell.
        cell_step: Distance from one cell to the next.
        group_gap: Extra gap after each ten cells.
        cells_per_band: Cells in a band; further ones begin another band below.
        layer_label_interval: Of how many cells one has its layer above it.
    """

    label_width: int
    cell_width: int
    cell_step: int
    group_gap: int
    cells_per_band: int
    layer_label_interval: int

    def find_column(self, index: int) -> int:
        """Return the column where a cell of a band begins."""
        return self.label_width + index * self.cell_step + index // 10 * self.group_gap


def _choose_geometry(labels: Iterable[str], count: int, width: int) -> _MapGeometry:
    """Choose the widest cells with which all layers fit in one band, or bands of the narrowest."""
    longest = max(map(measure_text, labels), default=0)
    if longest:
        longest = min(max(longest, len(_RULER_LABEL)), width // 3)
    label_width = longest + 2 if longest else 0
    room = max(width - label_width, 1)
    if count * 4 <= room:
        return _MapGeometry(label_width, 3, 4, 0, count, 1)
    if count * 2 <= room:
        return _MapGeometry(label_width, 1, 2, 0, count, 5)
    most = (room + 1) // 11 * 10
    if not most:
        return _MapGeometry(label_width, 1, 1, 1, room, 10)
    bands = -(-count // most)
    return _MapGeometry(label_width, 1, 1, 1, -(-count // (10 * bands)) * 10, 10)


def _choose_style(cell: Cell) -> str:
    if cell is None:
        return DIM
    if cell.state in _STATUS_STYLES:
        return _STATUS_STYLES[cell.state]
    name = get_kind_traits(cell.kind).color
    color = _COLORS.index(name.removeprefix("bright_")) + (90 if name.startswith("bright_") else 30)
    return f"1;30;{color + 10}" if cell.state == "token" else str(color)


def _format_ruler(columns: Sequence[MapColumn], geometry: _MapGeometry) -> str:
    """Return the layers above a band, as many as fit; always the first, and one after a run."""
    ruler = _RULER_LABEL[: max(geometry.label_width - 2, 0)]
    interval = geometry.layer_label_interval
    for index, layer in enumerate(columns):
        is_last = index == len(columns) - 1
        if layer.is_run or not (index % interval == 0 or columns[index - 1].is_run or is_last):
            continue
        number = str(layer)
        column = geometry.find_column(index) + max(geometry.cell_width - len(number), 0) // 2
        if column > len(ruler) or index == 0:
            ruler = ruler.ljust(column) + number
    return ruler


def _render_row(
    name: str, cells: Sequence[Cell], columns: Sequence[MapColumn], geometry: _MapGeometry
) -> Line:
    label = crop_text(name, max(geometry.label_width - 2, 0))
    parts: list[str | Span] = [label]
    end = measure_text(label)
    for index, (cell, column) in enumerate(zip(cells, columns, strict=True)):
        start = geometry.find_column(index)
        symbol = get_symbol(cell, column).center(geometry.cell_width)
        parts += [" " * (start - end), Span(symbol, _choose_style(cell))]
        end = start + geometry.cell_width
    line = build_line(*parts)
    return line._replace(text=line.text.rstrip(" "))  # a color fills the last cell, too


def _render_legend(grid: KvGrid) -> Iterator[tuple[Span, str]]:
    for symbol, text, cell in list_legend(grid):
        yield Span(symbol, _choose_style(cell) if symbol else ""), f" {text}" if symbol else text


def _wrap_entries(entries: Iterable[tuple[Span, str]], width: int) -> Iterator[Line]:
    """Yield lines of as many entries as fit."""
    parts: list[str | Span] = []
    end = 0
    for symbol, text in entries:
        length = len(symbol.text) + len(text)
        if parts and end + 3 + length > width:
            yield build_line(*parts)
            parts, end = [], 0
        parts += ["   "] * bool(parts) + [symbol, text]
        end += length + (3 if end else 0)
    yield build_line(*parts)
