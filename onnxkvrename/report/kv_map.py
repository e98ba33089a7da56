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

from onnxkvrename.findings import Finding
from onnxkvrename.layout.inspect import Anatomy, Buffer, State, groups
from onnxkvrename.layout.kinds import Kind
from onnxkvrename.model.signature import shape_text
from onnxkvrename.report.rename_text import show
from onnxkvrename.rules.plan import PLAIN
from onnxkvrename.rules.window_diff import run_text, runs


class Look(NamedTuple):
    """How a kind of buffer, or a state, is shown: its sign, its style, what it is called."""

    sign: str
    style: str
    called: str


KINDS: Mapping[Kind, Look] = MappingProxyType(
    {
        "full_attention": Look("f", "cyan", "full attention"),
        "sliding_window": Look("w", "green", "sliding window"),
        "chunked_local_attention": Look("c", "bright_green", "chunked attention"),
        "mla_attention": Look("m", "magenta", "MLA"),
        "sliding_window_mla": Look("n", "bright_magenta", "sliding window MLA"),
        "cross_attention": Look("x", "blue", "cross attention"),
        "mamba": Look("s", "yellow", "linear state"),
        "unknown": Look("u", "white", "unknown kind"),
    }
)
MARKS: Mapping[State, Look] = MappingProxyType(
    {
        "half": Look("/", "black on white", "token on one side only"),
        "missing": Look("-", "bold red", "missing"),
        "broken": Look("!", "bold white on red", "broken"),
    }
)
CASES: Mapping[State, Look] = MappingProxyType(
    {
        "plain": Look("abc", "default", "without a token"),
        "token": Look("ABC", "black on white", "with its token"),
    }
)
_NOTHING = Look(".", "dim", "no such buffer there")
_NO_LAYER = Look("~", "dim", "layers without buffers")
_HOLDS = {
    True: "holds for this graph",
    False: "does not hold: this graph has another layout",
    None: "is of a set: onnxkvrename manifest judges all its windows",
}
_GAP = 10
"""Layers in a row without buffers that are shown one by one; more become one mark."""
_FEW, _SOME = 3, 6
"""Things of a sort that are listed: long ones, and short ones."""


def summary(anatomy: Anatomy, *, fold: bool = False) -> RenderableType:
    """What is in a model, for a person: the facts, the map, and what is wrong.

    A path is not broken into lines, so that it can be copied, unless to ``fold``.
    """
    return _Drawn(lambda options: Group(*_parts(anatomy, options, fold=fold)))


def kv_map(anatomy: Anatomy) -> RenderableType:
    """The map alone, in bands as wide as there is room for, with a legend."""
    return _Drawn(lambda options: _bands(anatomy.buffers, options))


class _Drawn(NamedTuple):
    """Something that is laid out once the width and the encoding are known."""

    draw: Callable[[ConsoleOptions], RenderableType]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.draw(options)


def _parts(anatomy: Anatomy, options: ConsoleOptions, *, fold: bool) -> Iterator[RenderableType]:
    head = Text(_said(anatomy.path, options), style="bold", no_wrap=not fold)
    head.overflow = "fold" if fold else "ignore"
    if anatomy.error is not None:
        hint = "" if anatomy.error.hint is None else f" ({anatomy.error.hint})"
        said = _said(f"{anatomy.error.message}{hint}", options)
        yield head.append(f"  {said}", style="not bold red")
        return
    yield head.append(f"  {decimal(anatomy.size)}", style="not bold dim")
    yield Padding(_facts(anatomy, options), (0, 0, 0, 2))
    if anatomy.buffers:
        yield Padding(kv_map(anatomy), (1, 0, 0, 2))
    if anatomy.findings:
        yield Padding(Group(*_findings(anatomy.findings, options)), (1, 0, 0, 2))


def _facts(anatomy: Anatomy, options: ConsoleOptions) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, *lines in _rows(anatomy):
        grid.add_row(label, Text("\n".join(_said(line, options) for line in lines)))
    return grid


def _rows(anatomy: Anatomy) -> Iterator[tuple[str, ...]]:
    """A label and the lines beside it."""
    if anatomy.export is not None:
        made = anatomy.export
        opsets = ", ".join(f"{domain or 'opset'} {version}" for domain, version in made.opsets)
        producer = f"{made.producer} {made.producer_version}".strip() or "an unnamed producer"
        yield "made by", f"{producer}; IR {made.ir_version}, {opsets or 'no opset'}"
    functions = _listed(anatomy.weight.functions, _FEW)
    nodes = f"{anatomy.weight.nodes:,} nodes"
    yield "graph", nodes + (f", local functions {functions}" if functions else "")
    yield "weights", "; ".join(_weights(anatomy)) or "not there"
    if not anatomy.buffers:
        yield "buffers", "no KV buffer in it"
    label = ""
    for group in groups(anatomy.buffers):
        called = KINDS[group.kind].called
        shape = "of unknown rank" if group.shape is None else shape_text(group.shape)
        where = f"{', '.join(group.buffers)} of {_ranges(group.layers)}"
        yield "" if called == label else called, where, f"{group.dtype} {shape}"
        label = called
    if anatomy.buffers:
        yield "token", ", ".join(_tokens(anatomy)) or "none"
    if anatomy.stamp is not None:
        yield "stamp", f"{anatomy.stamp.digest[:12]}… {_HOLDS[anatomy.stamp.holds]}"
    for reason in dict.fromkeys(item.reason for item in anatomy.kept):
        names = [item.name for item in anatomy.kept if item.reason == reason]
        said = _listed(names, _SOME)
        yield ("outputs", said) if reason == PLAIN else ("kept", f"{reason}: {said}")


def _weights(anatomy: Anatomy) -> Iterator[str]:
    weight = anatomy.weight
    if not weight.inline and not weight.external:
        yield "none"
    if weight.inline:
        yield f"{decimal(weight.size)} inline in {weight.inline:,} tensors"
    there = [file.location for file in anatomy.files if file.size is not None]
    if there:
        files = "1 file" if len(there) == 1 else f"{len(there):,} files"
        yield f"{decimal(anatomy.external)} external in {files}: {_listed(there, _FEW)}"
    gone = [file.location for file in anatomy.files if file.size is None]
    if gone:
        yield f"not usable: {_listed(gone, _FEW)}"


def _tokens(anatomy: Anatomy) -> Iterator[str]:
    for token, count in anatomy.tokens:
        every = "all" if count == anatomy.names else f"{count:,} of"
        yield f"{token} on {every} {anatomy.names:,} names"


def _listed(names: Sequence[str], most: int) -> str:
    rest = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


def _ranges(layers: Sequence[int]) -> str:
    """``layers 0-5``, or how many and the first of them."""
    said = list(map(run_text, runs(sorted(set(layers)))))
    if len(said) == 1:
        return f"layer {said[0]}" if len(set(layers)) == 1 else f"layers {said[0]}"
    if len(said) > _FEW + 1:
        said[_FEW:] = [f"... {said[-1]}"]
    return f"{len(set(layers))} layers ({', '.join(said)})"


def _findings(findings: Iterable[Finding], options: ConsoleOptions) -> Iterator[Text]:
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
            yield text.append(_said(said, options), style="default")


def _said(text: str, options: ConsoleOptions) -> str:
    """Text from a file, as far as the encoding goes."""
    shown = show(text)
    return shown.encode("ascii", "backslashreplace").decode() if options.ascii_only else shown


# The map itself


class _Layout(NamedTuple):
    """How a map is laid out: columns for the label, then cells ``cell`` wide, ``step`` apart.

    After each ten cells there are ``apart`` columns more. ``most`` cells make a
    band, and each ``every``-th of them has its layer above it.
    """

    label: int
    cell: int
    step: int
    apart: int
    most: int
    every: int

    def at(self, index: int) -> int:
        """The column where a cell of a band begins."""
        return self.label + index * self.step + index // 10 * self.apart


def _layout(labels: Iterable[str], count: int, width: int) -> _Layout:
    """The widest cells with which all layers fit into one band, or bands of the narrowest."""
    named = min(max(map(cell_len, labels), default=0), width // 3)
    label = named + 2 if named else 0
    room = max(width - label, 1)
    if count * 4 <= room:
        return _Layout(label, 3, 4, 0, count, 1)
    if count * 2 <= room:
        return _Layout(label, 1, 2, 0, count, 5)
    return _Layout(label, 1, 1, 1, (room + 1) // 11 * 10 or room, 10)


def _bands(buffers: Sequence[Buffer], options: ConsoleOptions) -> RenderableType:
    columns = _columns(sorted({item.layer for item in buffers}))
    rows = [(_said(name, options), cells) for name, cells in _grid(buffers, columns).items()]
    layout = _layout((name for name, _ in rows), len(columns), options.max_width)
    lines: list[RenderableType] = []
    for start in range(0, len(columns), layout.most):
        band = slice(start, start + layout.most)
        lines.append(_ruler(columns[band], layout))
        lines += [_row(name, cells[band], layout) for name, cells in rows]
        lines.append(Text())
    signs = {look.sign for _, cells in rows for look in cells}
    return Group(*lines, *_filled(_legend(buffers, signs), options.max_width))


def _columns(layers: Sequence[int]) -> tuple[int | None, ...]:
    """The layers across, those without buffers among them; a long row of these is ``None``."""
    columns: list[int | None] = [*layers[:1]]
    for before, after in pairwise(layers):
        columns += [*range(before + 1, after)] if after - before <= _GAP + 1 else [None]
        columns.append(after)
    return tuple(columns)


def _grid(buffers: Sequence[Buffer], columns: Sequence[int | None]) -> dict[str, tuple[Look, ...]]:
    """The cells of each row. Scopes share a row unless two have the same buffer."""
    places = Counter((item.buffer, item.layer) for item in buffers)
    shared = max(places.values(), default=1) == 1
    rows: dict[str, dict[int, Buffer]] = {}
    for item in buffers:
        rows.setdefault(item.buffer if shared else item.scope + item.buffer, {})[item.layer] = item
    layers = {item.layer for item in buffers}
    return {
        name: tuple(_cell(layer, row, layers) for layer in columns) for name, row in rows.items()
    }


def _cell(layer: int | None, row: Mapping[int, Buffer], layers: Collection[int]) -> Look:
    if layer is None or layer not in layers:
        return _NO_LAYER
    return _look(row[layer]) if layer in row else _NOTHING


def _look(item: Buffer) -> Look:
    if item.state in MARKS:
        return MARKS[item.state]
    look = KINDS[item.kind]
    if item.state == "token":
        return Look(look.sign.upper(), f"bold black on {look.style}", look.called)
    return look


def _ruler(band: Sequence[int | None], layout: _Layout) -> Text:
    """The layers above a band, as many as fit; always the first, and one behind a gap."""
    ruler = "layer"[: max(layout.label - 2, 0)]
    for index, layer in enumerate(band):
        if layer is None or (index % layout.every and band[index - 1] is not None):
            continue
        number = str(layer)
        at = layout.at(index) + max(layout.cell - len(number), 0) // 2
        if at > len(ruler) or index == 0:
            ruler = ruler.ljust(at) + number
    return Text(ruler, style="dim", no_wrap=True, overflow="crop")


def _row(name: str, cells: Sequence[Look], layout: _Layout) -> Text:
    text = Text(name, no_wrap=True, overflow="crop")
    text.truncate(max(layout.label - 2, 0), overflow="crop")
    for index, look in enumerate(cells):
        text.append(" " * (layout.at(index) - text.cell_len))
        text.append(look.sign.center(layout.cell), style=look.style)
    return text


def _legend(buffers: Iterable[Buffer], signs: Collection[str]) -> Iterator[Text]:
    """What the signs mean, of those that are there."""
    kinds = {item.kind: _look(item) for item in buffers if item.state not in MARKS}
    states = {item.state for item in buffers}
    looks = [kinds[kind] for kind in KINDS if kind in kinds]
    looks += [look for state, look in CASES.items() if state in states]
    looks += [look for look in (*MARKS.values(), _NOTHING, _NO_LAYER) if look.sign in signs]
    for look in looks:
        yield Text.assemble((look.sign, look.style), f" {look.called}")


def _filled(entries: Iterable[Text], width: int) -> Iterator[Text]:
    """Lines of as many entries as fit."""
    line = Text()
    for entry in entries:
        if line and line.cell_len + 3 + entry.cell_len > width:
            yield line
            line = Text()
        line = line + "   " + entry if line else entry
    yield line
