"""The KV map as rows and columns, however it is drawn: layers across, buffers down."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from onnxkvrename.layout.inspect import InspectedBuffer, NameStatus
from onnxkvrename.rules.kinds import get_kind_traits, list_kinds

MAX_COLUMNS = 256
"""Columns of the largest map."""
MAX_ROWS = 40
"""Rows of the largest map."""
_MAX_GAP = 10
"""Layers in a row without buffers that are shown one by one; more share a column."""

STATUS_SYMBOLS: Mapping[NameStatus, str] = {"half": "/", "missing": "-", "broken": "!"}
"""The signs of buffers whose names are not simply without a token or with one."""
STATUS_CAPTIONS: Mapping[NameStatus, str] = {
    "plain": "no token",
    "token": "has the token",
    "half": "token on one side only",
    "missing": "missing",
    "broken": "broken",
}
NO_BUFFER, NO_BUFFER_CAPTION = ".", "no such buffer in this layer"
NO_LAYER, NO_LAYER_CAPTION = "~", "layer without buffers"

Cell = InspectedBuffer | None
"""A buffer of a layer; ``None`` without one."""


class MapColumn(NamedTuple):
    """A layer of the map, or several in a row without buffers.

    Attributes:
        first: The first layer.
        last: The last layer.
        has_buffers: False for layers without any buffer.
    """

    first: int
    last: int
    has_buffers: bool = True

    @property
    def is_run(self) -> bool:
        """True for more than one layer."""
        return self.last > self.first

    def __str__(self) -> str:
        return f"{self.first}-{self.last}" if self.is_run else str(self.first)


class MapRow(NamedTuple):
    """A part of layers, such as ``past_key``, with one cell for each column."""

    name: str
    cells: tuple[Cell, ...]


class LegendEntry(NamedTuple):
    """What a letter or a sign of a map means.

    Attributes:
        symbol: The letter or sign; empty where a text is about all letters.
        text: What it means.
        cell: A cell that has it; `None` for cells without a buffer.
    """

    symbol: str
    text: str
    cell: Cell = None


class KvGrid(NamedTuple):
    """A map.

    Attributes:
        columns: Its columns, in the order of their layers.
        rows: Its rows.
        hidden_columns: The number of columns that it has no room for.
        hidden_rows: The number of rows that it has no room for.
    """

    columns: tuple[MapColumn, ...]
    rows: tuple[MapRow, ...]
    hidden_columns: int = 0
    hidden_rows: int = 0

    @property
    def cells(self) -> tuple[InspectedBuffer, ...]:
        """All buffers in cells."""
        return tuple(cell for row in self.rows for cell in row.cells if cell is not None)

    def cut(self, columns: slice) -> KvGrid:
        """Return the map of some columns, a band of it."""
        rows = tuple(MapRow(row.name, row.cells[columns]) for row in self.rows)
        return self._replace(columns=self.columns[columns], rows=rows)

    @property
    def hidden_text(self) -> str:
        """What the map has no room for, in words; empty if it shows everything."""
        counts = ((self.hidden_columns, "layers"), (self.hidden_rows, "rows"))
        parts = [f"{count:,} more {what}" for count, what in counts if count]
        return f"not shown: {' and '.join(parts)}; --format json lists all" if parts else ""


def build_grid(buffers: Sequence[InspectedBuffer]) -> KvGrid:
    """Return the map of some buffers. Scopes share a row unless two have the same buffer."""
    counts = Counter((item.buffer, item.layer) for item in buffers)
    is_shared = max(counts.values(), default=1) == 1
    table: dict[str, dict[int, InspectedBuffer]] = {}
    for item in buffers:
        name = item.buffer if is_shared else item.scope + item.buffer
        table.setdefault(name, {})[item.layer] = item
    shown = dict(list(table.items())[:MAX_ROWS])
    layers = sorted({item.layer for item in buffers})
    columns = _list_columns(layers)
    rows = tuple(
        MapRow(name, tuple(row.get(column.first) for column in columns[:MAX_COLUMNS]))
        for name, row in shown.items()
    )
    return KvGrid(
        tuple(columns[:MAX_COLUMNS]),
        rows,
        sum(column.has_buffers for column in columns[MAX_COLUMNS:]),
        len(table) - len(shown),
    )


def get_symbol(cell: Cell, column: MapColumn) -> str:
    """Return the letter or sign of a cell: a capital where the names have the token."""
    if cell is None:
        return NO_BUFFER if column.has_buffers else NO_LAYER
    symbol = STATUS_SYMBOLS.get(cell.state) or get_kind_traits(cell.kind).symbol
    return symbol.upper() if cell.state == "token" else symbol


def list_legend(grid: KvGrid) -> Iterator[LegendEntry]:
    """Yield what the letters, the signs and the case of letters of a map mean."""
    kinds: dict[str, InspectedBuffer] = {}
    states: dict[NameStatus, InspectedBuffer] = {}
    for cell in grid.cells:
        states.setdefault(cell.state, cell)
        if cell.state not in STATUS_SYMBOLS:
            kinds.setdefault(cell.kind, cell)
    for kind in (kind for kind in list_kinds() if kind in kinds):
        symbol = get_symbol(kinds[kind], grid.columns[0])
        yield LegendEntry(symbol, get_kind_traits(kind).label, kinds[kind])
    for state, symbol in STATUS_SYMBOLS.items():
        if state in states:
            yield LegendEntry(symbol, STATUS_CAPTIONS[state], states[state])
    columns = [column.has_buffers for row in grid.rows for column in _list_empty(row, grid)]
    if True in columns:
        yield LegendEntry(NO_BUFFER, NO_BUFFER_CAPTION)
    if False in columns:
        yield LegendEntry(NO_LAYER, NO_LAYER_CAPTION)
    cases = {"plain": "lower case: no token", "token": "UPPER CASE: has the token"}
    if text := "; ".join(text for state, text in cases.items() if state in states):
        yield LegendEntry("", text)


def _list_empty(row: MapRow, grid: KvGrid) -> Iterator[MapColumn]:
    """Yield the columns in which a row has no buffer."""
    cells = zip(grid.columns, row.cells, strict=True)
    return (column for column, cell in cells if cell is None)


def _list_columns(layers: Sequence[int]) -> list[MapColumn]:
    """Return a column for each layer, also for those without buffers; one for many of these."""
    columns = [MapColumn(layer, layer) for layer in layers[:1]]
    for before, after in pairwise(layers):
        if after - before > _MAX_GAP + 1:
            columns.append(MapColumn(before + 1, after - 1, has_buffers=False))
        else:
            gap = range(before + 1, after)
            columns += [MapColumn(layer, layer, has_buffers=False) for layer in gap]
        columns.append(MapColumn(after, after))
    return columns
