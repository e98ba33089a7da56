"""The KV map: layers across, buffers down, one cell each; with what else there is to know.

Every cell is a letter for its kind, small or capital for its token, so that
colour only repeats what the letters say. Imported only where it is drawn (rich).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import NamedTuple

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.filesize import decimal
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from onnxkvrename.findings import Finding, format_list
from onnxkvrename.layout.inspect import BufferState, InspectedBuffer, ModelSummary, group_buffers
from onnxkvrename.layout.kinds import BufferKind, get_kind_traits, list_kinds
from onnxkvrename.model.signature import format_shape
from onnxkvrename.report.rename_text import escape_unprintable
from onnxkvrename.rules.plan import REASON_NOT_RETAINED
from onnxkvrename.rules.window_diff import format_layer_run, group_layer_runs


class CellStyle(NamedTuple):
    """How a kind of buffer, or a state, is shown: its sign, its style, what it is called."""

    symbol: str
    style: str
    caption: str


STATE_STYLES: Mapping[BufferState, CellStyle] = MappingProxyType(
    {
        "half": CellStyle("/", "black on white", "token on one side only"),
        "missing": CellStyle("-", "bold red", "missing"),
        "broken": CellStyle("!", "bold white on red", "broken"),
    }
)
TOKEN_STYLES: Mapping[BufferState, CellStyle] = MappingProxyType(
    {
        "plain": CellStyle("abc", "default", "without a token"),
        "token": CellStyle("ABC", "black on white", "with its token"),
    }
)
_NO_BUFFER = CellStyle(".", "dim", "no such buffer there")
_NO_LAYER = CellStyle("~", "dim", "layers without buffers")
_STAMP_TEXTS = {
    True: "holds for this graph",
    False: "does not hold: this graph has another layout",
    None: "is of a set: onnxkvrename manifest judges all its windows",
}
_MAX_GAP = 10
"""Layers in a row without buffers that are shown one by one; more become one mark."""
_FEW, _SOME = 3, 6
"""Things of a sort that are listed: long ones, and short ones."""


def render_model_summary(anatomy: ModelSummary, *, fold: bool = False) -> RenderableType:
    """What is in a model, for a person: the facts, the map, and what is wrong.

    A path is not broken into lines, so that it can be copied, unless to ``fold``.
    """
    return _DeferredRenderable(lambda options: Group(*_render_parts(anatomy, options, fold=fold)))


def render_kv_map(anatomy: ModelSummary) -> RenderableType:
    """The map alone, in bands as wide as there is room for, with a legend."""
    return _DeferredRenderable(lambda options: _render_bands(anatomy.buffers, options))


class _DeferredRenderable(NamedTuple):
    """Something that is laid out once the width and the encoding are known."""

    renderer: Callable[[ConsoleOptions], RenderableType]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.renderer(options)


def _render_parts(
    anatomy: ModelSummary, options: ConsoleOptions, *, fold: bool
) -> Iterator[RenderableType]:
    head = Text(_escape_for_console(anatomy.path, options), style="bold", no_wrap=not fold)
    head.overflow = "fold" if fold else "ignore"
    if anatomy.error is not None:
        hint = "" if anatomy.error.hint is None else f" ({anatomy.error.hint})"
        said = _escape_for_console(f"{anatomy.error.message}{hint}", options)
        yield head.append(f"  {said}", style="not bold red")
        return
    yield head.append(f"  {decimal(anatomy.size)}", style="not bold dim")
    yield Padding(_render_facts(anatomy, options), (0, 0, 0, 2))
    if anatomy.buffers:
        yield Padding(render_kv_map(anatomy), (1, 0, 0, 2))
    if anatomy.findings:
        yield Padding(Group(*_render_findings(anatomy.findings, options)), (1, 0, 0, 2))


def _render_facts(anatomy: ModelSummary, options: ConsoleOptions) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, *lines in _list_facts(anatomy):
        grid.add_row(label, Text("\n".join(_escape_for_console(line, options) for line in lines)))
    return grid


def _list_facts(anatomy: ModelSummary) -> Iterator[tuple[str, ...]]:
    """A label and the lines beside it."""
    if anatomy.export is not None:
        made = anatomy.export
        opsets = ", ".join(f"{domain or 'opset'} {version}" for domain, version in made.opsets)
        producer = f"{made.producer_name} {made.producer_version}".strip() or "an unnamed producer"
        yield "made by", f"{producer}; IR {made.ir_version}, {opsets or 'no opset'}"
    functions = format_list(anatomy.weight.function_names, limit=_FEW)
    nodes = f"{anatomy.weight.node_count:,} nodes"
    yield "graph", nodes + (f", local functions {functions}" if functions else "")
    yield "weights", "; ".join(_describe_weights(anatomy)) or "not there"
    if not anatomy.buffers:
        yield "buffers", "no KV buffer in it"
    label = ""
    for group in group_buffers(anatomy.buffers):
        called = get_kind_traits(group.kind).label
        shape = "of unknown rank" if group.shape is None else format_shape(group.shape)
        where = f"{', '.join(group.buffers)} of {_format_layers(group.layers)}"
        yield "" if called == label else called, where, f"{group.dtype} {shape}"
        label = called
    if anatomy.buffers:
        yield "token", ", ".join(_describe_tokens(anatomy)) or "none"
    if anatomy.stamp is not None:
        yield "stamp", f"{anatomy.stamp.digest[:12]}… {_STAMP_TEXTS[anatomy.stamp.matches_graph]}"
    for reason in dict.fromkeys(item.reason for item in anatomy.kept):
        names = [item.name for item in anatomy.kept if item.reason == reason]
        said = format_list(names, limit=_SOME)
        yield ("outputs", said) if reason == REASON_NOT_RETAINED else ("kept", f"{reason}: {said}")


def _describe_weights(anatomy: ModelSummary) -> Iterator[str]:
    weight = anatomy.weight
    if not weight.inline_tensor_count and not weight.external_tensor_count:
        yield "none"
    if weight.inline_tensor_count:
        yield f"{decimal(weight.inline_bytes)} inline in {weight.inline_tensor_count:,} tensors"
    there = [file.location for file in anatomy.files if file.size is not None]
    if there:
        files = "1 file" if len(there) == 1 else f"{len(there):,} files"
        names = format_list(there, limit=_FEW)
        yield f"{decimal(anatomy.external_bytes)} external in {files}: {names}"
    gone = [file.location for file in anatomy.files if file.size is None]
    if gone:
        yield f"not usable: {format_list(gone, limit=_FEW)}"


def _describe_tokens(anatomy: ModelSummary) -> Iterator[str]:
    for token, count in anatomy.token_counts:
        every = "all" if count == anatomy.name_count else f"{count:,} of"
        yield f"{token} on {every} {anatomy.name_count:,} names"


def _format_layers(layers: Sequence[int]) -> str:
    """``layers 0-5``, or how many and the first of them."""
    said = list(map(format_layer_run, group_layer_runs(sorted(set(layers)))))
    if len(said) == 1:
        return f"layer {said[0]}" if len(set(layers)) == 1 else f"layers {said[0]}"
    if len(said) > _FEW + 1:
        said[_FEW:] = [f"... {said[-1]}"]
    return f"{len(set(layers))} layers ({', '.join(said)})"


def _render_findings(findings: Iterable[Finding], options: ConsoleOptions) -> Iterator[Text]:
    """A line for each finding, of each code only the first few."""
    found = tuple(findings)
    counts = Counter(item.code for item in found)
    seen: Counter[str] = Counter()
    for item in found:
        seen[item.code] += 1
        if seen[item.code] > _FEW + 1:
            continue
        text = Text(f"{item.severity} {item.code}  ", overflow="fold")
        text.stylize("red" if item.severity == "error" else "yellow")
        if seen[item.code] > _FEW:
            yield text.append(f"and {counts[item.code] - _FEW:,} more like this", style="default")
        else:
            said = f"{item.name} {item.message} ({item.hint})".lstrip()
            yield text.append(_escape_for_console(said, options), style="default")


def _escape_for_console(text: str, options: ConsoleOptions) -> str:
    """Text from a file, as far as the encoding goes."""
    shown = escape_unprintable(text)
    return shown.encode("ascii", "backslashreplace").decode() if options.ascii_only else shown


# The map itself


class _MapGeometry(NamedTuple):
    """How a map is laid out: columns for the label, then cells ``cell`` wide, ``step`` apart.

    After each ten cells there are ``apart`` columns more. ``most`` cells make a
    band, and each ``every``-th of them has its layer above it.
    """

    label_width: int
    cell_width: int
    cell_step: int
    group_gap: int
    cells_per_band: int
    layer_label_interval: int

    def find_column(self, index: int) -> int:
        """The column where a cell of a band begins."""
        return self.label_width + index * self.cell_step + index // 10 * self.group_gap


def _choose_geometry(labels: Iterable[str], count: int, width: int) -> _MapGeometry:
    """The widest cells with which all layers fit into one band, or bands of the narrowest."""
    named = min(max(map(cell_len, labels), default=0), width // 3)
    label = named + 2 if named else 0
    room = max(width - label, 1)
    if count * 4 <= room:
        return _MapGeometry(label, 3, 4, 0, count, 1)
    if count * 2 <= room:
        return _MapGeometry(label, 1, 2, 0, count, 5)
    return _MapGeometry(label, 1, 1, 1, (room + 1) // 11 * 10 or room, 10)


def _render_bands(buffers: Sequence[InspectedBuffer], options: ConsoleOptions) -> RenderableType:
    columns = _list_columns(sorted({item.layer for item in buffers}))
    rows = [
        (_escape_for_console(name, options), cells)
        for name, cells in _build_grid(buffers, columns).items()
    ]
    layout = _choose_geometry((name for name, _ in rows), len(columns), options.max_width)
    lines: list[RenderableType] = []
    for start in range(0, len(columns), layout.cells_per_band):
        band = slice(start, start + layout.cells_per_band)
        lines.append(_render_ruler(columns[band], layout))
        lines += [_render_row(name, cells[band], layout) for name, cells in rows]
        lines.append(Text())
    signs = {look.symbol for _, cells in rows for look in cells}
    return Group(*lines, *_wrap_entries(_render_legend(buffers, signs), options.max_width))


def _list_columns(layers: Sequence[int]) -> tuple[int | None, ...]:
    """The layers across, those without buffers among them; a long row of these is ``None``."""
    columns: list[int | None] = [*layers[:1]]
    for before, after in pairwise(layers):
        columns += [*range(before + 1, after)] if after - before <= _MAX_GAP + 1 else [None]
        columns.append(after)
    return tuple(columns)


def _build_grid(
    buffers: Sequence[InspectedBuffer], columns: Sequence[int | None]
) -> dict[str, tuple[CellStyle, ...]]:
    """The cells of each row. Scopes share a row unless two have the same buffer."""
    places = Counter((item.buffer, item.layer) for item in buffers)
    shared = max(places.values(), default=1) == 1
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
    if item.state in STATE_STYLES:
        return STATE_STYLES[item.state]
    look = _style_kind(item.kind)
    if item.state == "token":
        return CellStyle(look.symbol.upper(), f"bold black on {look.style}", look.caption)
    return look


def _render_ruler(band: Sequence[int | None], layout: _MapGeometry) -> Text:
    """The layers above a band, as many as fit; always the first, and one behind a gap."""
    ruler = "layer"[: max(layout.label_width - 2, 0)]
    for index, layer in enumerate(band):
        if layer is None or (index % layout.layer_label_interval and band[index - 1] is not None):
            continue
        number = str(layer)
        at = layout.find_column(index) + max(layout.cell_width - len(number), 0) // 2
        if at > len(ruler) or index == 0:
            ruler = ruler.ljust(at) + number
    return Text(ruler, style="dim", no_wrap=True, overflow="crop")


def _render_row(name: str, cells: Sequence[CellStyle], layout: _MapGeometry) -> Text:
    text = Text(name, no_wrap=True, overflow="crop")
    text.truncate(max(layout.label_width - 2, 0), overflow="crop")
    for index, look in enumerate(cells):
        text.append(" " * (layout.find_column(index) - text.cell_len))
        text.append(look.symbol.center(layout.cell_width), style=look.style)
    return text


def _render_legend(buffers: Iterable[InspectedBuffer], signs: Collection[str]) -> Iterator[Text]:
    """What the signs mean, of those that are there."""
    kinds = {item.kind: _style_buffer(item) for item in buffers if item.state not in STATE_STYLES}
    states = {item.state for item in buffers}
    looks = [kinds[kind] for kind in list_kinds() if kind in kinds]
    looks += [look for state, look in TOKEN_STYLES.items() if state in states]
    looks += [
        look for look in (*STATE_STYLES.values(), _NO_BUFFER, _NO_LAYER) if look.symbol in signs
    ]
    for look in looks:
        yield Text.assemble((look.symbol, look.style), f" {look.caption}")


def _wrap_entries(entries: Iterable[Text], width: int) -> Iterator[Text]:
    """Lines of as many entries as fit."""
    line = Text()
    for entry in entries:
        if line and line.cell_len + 3 + entry.cell_len > width:
            yield line
            line = Text()
        line = line + "   " + entry if line else entry
    yield line
