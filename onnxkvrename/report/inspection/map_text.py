"""The KV map on a terminal; loads rich.

Every cell is a letter for its kind, small or capital for its token, so that
colour only repeats what the letters say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from onnxkvrename.layout.inspect import InspectedBuffer, ModelSummary, NameStatus
from onnxkvrename.report.inert import escape_text
from onnxkvrename.report.inspection.grid import (
    Cell,
    KvGrid,
    MapColumn,
    build_grid,
    get_symbol,
    list_legend,
)
from onnxkvrename.rules.kinds import get_kind_traits

_STATUS_STYLES: Mapping[NameStatus, str] = {
    "half": "black on white",
    "missing": "bold red",
    "broken": "bold white on red",
}
_EMPTY_STYLE = "dim"


def render_kv_map(summary: ModelSummary) -> RenderableType:
    """Return the map in bands as wide as there is room for, with a legend."""
    return DeferredRenderable(lambda options: _render_bands(summary.buffers, options))


class DeferredRenderable(NamedTuple):
    """Something that is laid out once the width and the encoding are known.

    Attributes:
        renderer: Lays it out for a console.
    """

    renderer: Callable[[ConsoleOptions], RenderableType]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.renderer(options)


def escape_for_console(text: str, options: ConsoleOptions) -> str:
    """Return text from a file, safe to show and in the encoding of the console."""
    shown = escape_text(text)
    return shown.encode("ascii", "backslashreplace").decode() if options.ascii_only else shown


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
    longest = min(max(map(cell_len, labels), default=0), width // 3)
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


def _render_bands(buffers: Sequence[InspectedBuffer], options: ConsoleOptions) -> RenderableType:
    grid = build_grid(buffers)
    names = [escape_for_console(row.name, options) for row in grid.rows]
    geometry = _choose_geometry(names, len(grid.columns), options.max_width)
    lines: list[RenderableType] = []
    for start in range(0, len(grid.columns), geometry.cells_per_band):
        band = grid.cut(slice(start, start + geometry.cells_per_band))
        lines.append(_render_ruler(band.columns, geometry))
        lines += [
            _render_row(name, row.cells, band.columns, geometry)
            for name, row in zip(names, band.rows, strict=True)
        ]
        lines.append(Text())
    if grid.hidden_text:
        lines.append(Text(grid.hidden_text, style="dim"))
    return Group(*lines, *_wrap_entries(_render_legend(grid), options.max_width))


def _choose_style(cell: Cell) -> str:
    if cell is None:
        return _EMPTY_STYLE
    if cell.state in _STATUS_STYLES:
        return _STATUS_STYLES[cell.state]
    color = get_kind_traits(cell.kind).color
    return f"bold black on {color}" if cell.state == "token" else color


def _render_ruler(columns: Sequence[MapColumn], geometry: _MapGeometry) -> Text:
    """Return the layers above a band, as many as fit; always the first, and one after a run."""
    ruler = "layer"[: max(geometry.label_width - 2, 0)]
    interval = geometry.layer_label_interval
    for index, layer in enumerate(columns):
        is_gap = layer.is_run and not layer.has_buffers
        is_last = index == len(columns) - 1
        if is_gap or not (index % interval == 0 or columns[index - 1].is_run or is_last):
            continue
        number = str(layer)
        column = geometry.find_column(index) + max(geometry.cell_width - len(number), 0) // 2
        if column > len(ruler) or index == 0:
            ruler = ruler.ljust(column) + number
    return Text(ruler, style="dim", no_wrap=True, overflow="crop")


def _render_row(
    name: str, cells: Sequence[Cell], columns: Sequence[MapColumn], geometry: _MapGeometry
) -> Text:
    text = Text(name, no_wrap=True, overflow="crop")
    text.truncate(max(geometry.label_width - 2, 0), overflow="crop")
    for index, (cell, column) in enumerate(zip(cells, columns, strict=True)):
        text.append(" " * (geometry.find_column(index) - text.cell_len))
        symbol = get_symbol(cell, column).center(geometry.cell_width)
        text.append(symbol, style=_choose_style(cell))
    return text


def _render_legend(grid: KvGrid) -> Iterator[Text]:
    for symbol, text, cell in list_legend(grid):
        if symbol:
            yield Text.assemble((symbol, _choose_style(cell)), f" {text}")
        else:
            yield Text(text)


def _wrap_entries(entries: Iterable[Text], width: int) -> Iterator[Text]:
    """Yield lines of as many entries as fit."""
    line = Text()
    for entry in entries:
        if line and line.cell_len + 3 + entry.cell_len > width:
            yield line
            line = Text()
        line = line + "   " + entry if line else entry
    yield line
