"""The KV map: layers across, buffers down, one cell each; loads rich.

Every cell is a letter for its kind, small or capital for its token, so that
colour only repeats what the letters say.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from onnxkvrename.layout.inspect import InspectedBuffer, ModelSummary, NameStatus
from onnxkvrename.layout.kinds import BufferKind, get_kind_traits, list_kinds
from onnxkvrename.report.inert import escape_text


class CellStyle(NamedTuple):
    """The appearance of a kind of buffer, or of a state, in the map.

    Attributes:
        symbol: The letter or sign in its cells.
        style: Their style.
        caption: Its name in the legend.
    """

    symbol: str
    style: str
    caption: str


NAME_STATUS_STYLES: Mapping[NameStatus, CellStyle] = MappingProxyType(
    {
        "half": CellStyle("/", "black on white", "token on one side only"),
        "missing": CellStyle("-", "bold red", "missing"),
        "broken": CellStyle("!", "bold white on red", "broken"),
    }
)
TOKEN_STYLES: Mapping[NameStatus, CellStyle] = MappingProxyType(
    {
        "plain": CellStyle("abc", "default", "without a token"),
        "token": CellStyle("ABC", "black on white", "with its token"),
    }
)
_NO_BUFFER = CellStyle(".", "dim", "no such buffer there")
_NO_LAYER = CellStyle("~", "dim", "layers without buffers")
_MAX_GAP = 10
"""Layers in a row without buffers that are shown one by one; more become one mark."""


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
    return _MapGeometry(label_width, 1, 1, 1, (room + 1) // 11 * 10 or room, 10)


def _render_bands(buffers: Sequence[InspectedBuffer], options: ConsoleOptions) -> RenderableType:
    columns = _list_columns(sorted({item.layer for item in buffers}))
    rows = [
        (escape_for_console(name, options), cells)
        for name, cells in _build_grid(buffers, columns).items()
    ]
    geometry = _choose_geometry((name for name, _ in rows), len(columns), options.max_width)
    lines: list[RenderableType] = []
    for start in range(0, len(columns), geometry.cells_per_band):
        band = slice(start, start + geometry.cells_per_band)
        lines.append(_render_ruler(columns[band], geometry))
        lines += [_render_row(name, cells[band], geometry) for name, cells in rows]
        lines.append(Text())
    symbols = {cell.symbol for _, cells in rows for cell in cells}
    return Group(*lines, *_wrap_entries(_render_legend(buffers, symbols), options.max_width))


def _list_columns(layers: Sequence[int]) -> tuple[int | None, ...]:
    """Return the layers across, also those without buffers; ``None`` for a long run of these."""
    columns: list[int | None] = [*layers[:1]]
    for before, after in pairwise(layers):
        columns += [*range(before + 1, after)] if after - before <= _MAX_GAP + 1 else [None]
        columns.append(after)
    return tuple(columns)


def _build_grid(
    buffers: Sequence[InspectedBuffer], columns: Sequence[int | None]
) -> dict[str, tuple[CellStyle, ...]]:
    """Return the cells of each row. Scopes share a row unless two have the same buffer."""
    counts = Counter((item.buffer, item.layer) for item in buffers)
    shared = max(counts.values(), default=1) == 1
    rows: dict[str, dict[int, InspectedBuffer]] = {}
    for item in buffers:
        rows.setdefault(item.buffer if shared else item.scope + item.buffer, {})[item.layer] = item
    layers = {item.layer for item in buffers}
    return {
        name: tuple(_style_cell(layer, row, layers) for layer in columns)
        for name, row in rows.items()
    }


def _style_cell(
    layer: int | None, row: Mapping[int, InspectedBuffer], layers: Collection[int]
) -> CellStyle:
    if layer is None or layer not in layers:
        return _NO_LAYER
    return _style_buffer(row[layer]) if layer in row else _NO_BUFFER


def _style_kind(kind: BufferKind) -> CellStyle:
    traits = get_kind_traits(kind)
    return CellStyle(traits.symbol, traits.color, traits.label)


def _style_buffer(item: InspectedBuffer) -> CellStyle:
    if item.state in NAME_STATUS_STYLES:
        return NAME_STATUS_STYLES[item.state]
    cell = _style_kind(item.kind)
    if item.state == "token":
        return CellStyle(cell.symbol.upper(), f"bold black on {cell.style}", cell.caption)
    return cell


def _render_ruler(band: Sequence[int | None], geometry: _MapGeometry) -> Text:
    """Return the layers above a band, as many as fit; always the first, and one after a gap."""
    ruler = "layer"[: max(geometry.label_width - 2, 0)]
    interval = geometry.layer_label_interval
    for index, layer in enumerate(band):
        if layer is None or (index % interval and band[index - 1] is not None):
            continue
        number = str(layer)
        column = geometry.find_column(index) + max(geometry.cell_width - len(number), 0) // 2
        if column > len(ruler) or index == 0:
            ruler = ruler.ljust(column) + number
    return Text(ruler, style="dim", no_wrap=True, overflow="crop")


def _render_row(name: str, cells: Sequence[CellStyle], geometry: _MapGeometry) -> Text:
    text = Text(name, no_wrap=True, overflow="crop")
    text.truncate(max(geometry.label_width - 2, 0), overflow="crop")
    for index, cell in enumerate(cells):
        text.append(" " * (geometry.find_column(index) - text.cell_len))
        text.append(cell.symbol.center(geometry.cell_width), style=cell.style)
    return text


def _render_legend(buffers: Iterable[InspectedBuffer], symbols: Collection[str]) -> Iterator[Text]:
    """Yield the symbols of a map with their meaning."""
    kinds = {
        item.kind: _style_buffer(item) for item in buffers if item.state not in NAME_STATUS_STYLES
    }
    states = {item.state for item in buffers}
    cells = [kinds[kind] for kind in list_kinds() if kind in kinds]
    cells += [cell for state, cell in TOKEN_STYLES.items() if state in states]
    cells += [
        cell
        for cell in (*NAME_STATUS_STYLES.values(), _NO_BUFFER, _NO_LAYER)
        if cell.symbol in symbols
    ]
    for cell in cells:
        yield Text.assemble((cell.symbol, cell.style), f" {cell.caption}")


def _wrap_entries(entries: Iterable[Text], width: int) -> Iterator[Text]:
    """Yield lines of as many entries as fit."""
    line = Text()
    for entry in entries:
        if line and line.cell_len + 3 + entry.cell_len > width:
            yield line
            line = Text()
        line = line + "   " + entry if line else entry
    yield line
