"""The KV map as a table of a page: bands as wide as the page, details of each cell.

A browser breaks the one row of each buffer into bands, by rules of style for some widths, so
that a table stays a table for a screen reader. The text of a cell is hidden until the cell has
the pointer or the focus; a screen reader always reads it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from xml.etree.ElementTree import Element

from onnxkvrename.report.inert import escape_text, shorten_text
from onnxkvrename.report.inspection.facts import format_bytes, format_type
from onnxkvrename.report.inspection.grid import (
    NO_BUFFER_CAPTION,
    NO_LAYER_CAPTION,
    STATUS_CAPTIONS,
    STATUS_SYMBOLS,
    Cell,
    KvGrid,
    MapColumn,
    describe_case,
    get_symbol,
    list_empty_cells,
)
from onnxkvrename.report.pages.elements import build, isolate, isolate_words
from onnxkvrename.report.pages.frame import CODE_FONT, Color
from onnxkvrename.rules.kinds import get_kind_traits, list_kinds

_BANDS = ((0, 5), (20, 10), (40, 20), (60, 30), (80, 40), (107.5, 60))
"""The width of a page, in letters of the reader's size, from which a band has so many columns."""
_BESIDE = 40
"""The width from which the labels of rows are beside their cells, not above them."""
_MAX_NAME_LENGTH = 120
_MAX_LABEL_LENGTH = 20
"""Letters of the longest label of a row that is shown in full."""
_CHARACTER_WIDTH = 0.46
"""The width of a letter of a label, in letters of the reader's size."""
_ARROW = "\N{RIGHTWARDS ARROW}"

_STYLE = f"""
.map {{ display: grid; gap: 2px; margin: 16px 0 8px; justify-content: start }}
.map thead, .map tbody, .map tr {{ display: contents }}
.map caption {{ display: none }}
.map th, .map td {{ grid-row: calc(var(--b, 0) * var(--rows) + var(--r)); padding: 0; \
min-width: 0; position: relative }}
.map th {{ font-weight: 400; color: var(--muted); font-size: .6875rem; line-height: 1rem; \
overflow-wrap: normal; white-space: nowrap }}
.map thead th {{ text-align: center; padding-top: 10px; overflow: hidden }}
.map tbody th {{ text-align: left; justify-self: start; max-width: 100%; overflow: hidden; \
text-overflow: ellipsis; font: .75rem/1.125rem {CODE_FONT} }}
.map bdi {{ font-size: inherit }}
.map .corner {{ position: absolute; width: 1px; height: 1px; padding: 0; clip-path: inset(50%) }}
.map td {{ margin-top: 1.125rem; text-align: center }}
.map td::before {{ position: absolute; bottom: 100%; left: 0; \
font: .75rem/1.125rem {CODE_FONT}; color: var(--muted); white-space: nowrap; text-align: left; \
max-width: calc(100vw - 2 * clamp(12px, 3vw, 40px)); overflow: hidden; text-overflow: ellipsis }}
.mark {{ display: block; height: 1.75rem; border: 2px solid currentcolor; \
border-radius: 3px; font: 600 .875rem/1.5rem {CODE_FONT}; print-color-adjust: exact }}
.half .mark {{ border-style: dashed }}
.missing .mark {{ border-style: dotted; color: var(--bad) }}
.broken .mark {{ background: var(--bad); color: var(--paper); border-color: var(--bad) }}
.empty .mark {{ border-color: transparent; color: var(--muted); font-weight: 400 }}
.tip {{ position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); \
white-space: nowrap }}
td:hover > .tip, td:focus > .tip {{ position: fixed; z-index: 1; left: 8px; bottom: 8px; \
width: max-content; height: auto; max-width: min(36rem, calc(100vw - 16px)); clip-path: none; \
overflow: visible; white-space: normal; overflow-wrap: anywhere; text-align: left; \
background: var(--card); color: var(--ink); border: 1px solid var(--muted); border-radius: 6px; \
padding: 8px 12px; font-size: .875rem; line-height: 1.45 }}
.map:has(td:hover) td:focus:not(:hover) > .tip {{ visibility: hidden }}
td.closed > .tip {{ visibility: hidden }}
.tip > span {{ display: block }}
.tip > :first-child {{ font-weight: 600 }}
.legend {{ display: flex; flex-wrap: wrap; gap: 6px 20px; list-style: none; padding: 0; margin: 0; \
font-size: .875rem; color: var(--muted) }}
.legend li {{ display: flex; align-items: center; gap: 8px }}
.legend .mark {{ width: 1.75rem; text-align: center; flex: none }}
@media print {{ .tip {{ display: none !important }} }}
.note {{ font-size: .875rem; color: var(--muted); margin: 6px 0 }}
"""

MAP_SCRIPT = """
"use strict";
for (const map of document.querySelectorAll("[role=grid]")) {
  const rows = [...map.tBodies[0].rows].map((row) => [...row.querySelectorAll("td")]);
  const places = new Map();
  rows.forEach((row, y) => row.forEach((cell, x) => {
    places.set(cell, [x, y]);
    cell.tabIndex = x + y ? -1 : 0;
  }));
  let current = rows[0][0];
  const show = (cell) => {
    const tip = cell.querySelector(".tip");
    const box = cell.getBoundingClientRect();
    const isAbove = places.get(cell)[1] < rows.length / 2 && box.top > tip.offsetHeight;
    const left = Math.min(box.left, document.documentElement.clientWidth - tip.offsetWidth - 8);
    const top = isAbove ? box.top - tip.offsetHeight : box.bottom;
    tip.style.left = `${Math.max(8, left)}px`;
    tip.style.top = `${Math.max(0, Math.min(top, innerHeight - tip.offsetHeight))}px`;
    tip.style.bottom = "auto";
  };
  const find = (event) => event.target.closest("td");
  map.addEventListener("focusin", (event) => {
    current.tabIndex = -1;
    current = find(event);
    current.tabIndex = 0;
    current.classList.remove("closed");
    show(current);
  });
  map.addEventListener("mouseover", (event) => {
    const cell = find(event);
    if (cell && !cell.contains(event.relatedTarget)) {
      cell.classList.remove("closed");
      show(cell);
    }
  });
  map.addEventListener("keydown", (event) => {
    const [x, y] = places.get(current);
    const end = rows[y].length - 1;
    const all = event.ctrlKey;
    const move = {
      ArrowLeft: [x - 1, y], ArrowRight: [x + 1, y], ArrowUp: [x, y - 1], ArrowDown: [x, y + 1],
      Home: [0, all ? 0 : y], End: [end, all ? rows.length - 1 : y],
    }[event.key];
    if (event.key === "Escape") {
      for (const cell of map.querySelectorAll("td:hover, td:focus")) cell.classList.add("closed");
    } else if (move) {
      event.preventDefault();
      const next = rows[move[1]]?.[move[0]];
      if (next) next.focus();
    }
  });
}
"""
"""Moves the focus with the arrow keys, and puts the text of a cell beside it."""


def build_map(grid: KvGrid, title: str) -> Element:
    """Return the table of a map; `title` says of what."""
    head = build(
        "tr",
        build("th", "buffer", class_="corner", role="columnheader", scope="col"),
        (_build_header(column) for column in grid.columns),
        role="row",
    )
    rows = (
        build(
            "tr",
            build("th", isolate(_shorten(row.name)), role="rowheader", scope="row"),
            (
                _build_cell(row.name, cell, column)
                for cell, column in zip(row.cells, grid.columns, strict=True)
            ),
            role="row",
        )
        for row in grid.rows
    )
    return build(
        "table",
        build("caption", f"KV map of {title}"),
        build("thead", head, role="rowgroup"),
        build("tbody", rows, role="rowgroup"),
        class_=f"map rows-{len(grid.rows)}",
        role="grid",
        aria_label=f"KV map of {title}",
        aria_readonly="true",
    )


def build_legend(grid: KvGrid) -> Element:
    """Return what the letters, signs and colors of a map mean."""
    kinds = {cell.kind: cell for cell in grid.cells if cell.state not in STATUS_SYMBOLS}
    states = {cell.state for cell in grid.cells}
    column = grid.columns[0]
    entries = [
        _build_entry(get_symbol(kinds[kind], column), _classify(kinds[kind]), label)
        for kind, label in ((kind, get_kind_traits(kind).label) for kind in list_kinds())
        if kind in kinds
    ]
    entries += [
        _build_entry(symbol, state, STATUS_CAPTIONS[state])
        for state, symbol in STATUS_SYMBOLS.items()
        if state in states
    ]
    entries += [_build_entry(symbol, "empty", text) for symbol, text in list_empty_cells(grid)]
    case = describe_case(states)
    return build("ul", entries, build("li", case) if case else None, class_="legend")


def write_map_style(grids: Sequence[KvGrid]) -> str:
    """Return the style of some maps, with the colors of kinds."""
    row_counts = {len(grid.rows) for grid in grids}
    labels = [len(_shorten(row.name)) for grid in grids for row in grid.rows]
    gutter = min(max(labels, default=0), _MAX_LABEL_LENGTH) + 2
    rules = [f".map {{ --gutter: {gutter * _CHARACTER_WIDTH:.1f}rem }}", ".map thead { --r: 1 }"]
    rules += [f".rows-{count} {{ --rows: {count + 1} }}" for count in sorted(row_counts)]
    rules += [
        f".map tbody tr:nth-child({row}) {{ --r: {row + 1} }}"
        for row in range(1, max(row_counts, default=0) + 1)
    ]
    rules += [rule for kind in list_kinds() for rule in _write_kind_style(kind)]
    count = max((len(grid.columns) for grid in grids), default=0)
    for number, (width, columns) in enumerate(_BANDS):
        end = (
            f" and (max-width: {_BANDS[number + 1][0] - 0.01}em)"
            if number + 1 < len(_BANDS)
            else ""
        )
        rules.append(f"@media (min-width: {width}em){end} {{")
        bands = -(-count // columns)
        step = min(columns, 10)
        even = -(-count // (bands * step)) * step if bands > 1 else columns
        rules += _write_bands(even, count, labels_beside=width >= _BESIDE)
        rules.append("}")
    return "\n".join([_STYLE, *rules]) + "\n"


def list_kind_colors() -> Mapping[str, Color]:
    """Return the colors of all kinds by the names of their variables."""
    return {f"kind-{kind}": Color(*get_kind_traits(kind).page_colors) for kind in list_kinds()}


def _build_header(column: MapColumn) -> Element:
    return build("th", str(column), role="columnheader", scope="col")


def _build_cell(name: str, cell: Cell, column: MapColumn) -> Element:
    text = build("span", _describe_cell(name, cell, column), class_="tip")
    return build(
        "td",
        build("span", get_symbol(cell, column), class_="mark", aria_hidden="true"),
        text,
        class_=_classify(cell),
        role="gridcell",
        tabindex=0,
        data_row=_shorten(name),
    )


def _describe_cell(name: str, cell: Cell, column: MapColumn) -> Iterator[Element]:
    """Yield the lines of text of a cell; each ends like a sentence for a screen reader."""
    layer = f"layers {column}, alike" if column.is_run else f"layer {column}"
    yield build("span", isolate(_shorten(name)), f", {layer}. ")
    if cell is None:
        caption = NO_BUFFER_CAPTION if column.has_buffers else NO_LAYER_CAPTION
        yield build("span", caption)
        return
    guess = " (a guess)" if cell.kind_guessed else ""
    label = get_kind_traits(cell.kind).label
    yield build("span", f"{label}{guess}, {STATUS_CAPTIONS[cell.state]}. ")
    if cell.state == "missing":
        return
    update = f", {cell.update.label}" if cell.update.label else ""
    yield build("span", build("code", isolate_words(_shorten(format_type(cell)))), f"{update}. ")
    if size := format_bytes(cell):
        yield build("span", isolate_words(_shorten(size)), ". ")
    yield build("span", _build_side(cell.input), f" {_ARROW} ", _build_side(cell.output))


def _build_side(name: str | None) -> Element:
    return build("em", "missing") if name is None else isolate(_shorten(name))


def _build_entry(symbol: str, class_: str, text: str) -> Element:
    mark = build("span", symbol, class_="mark", aria_hidden="true")
    return build("li", build("span", mark, class_=class_), text)


def _classify(cell: Cell) -> str:
    """Return the classes of a cell: its state, and its kind if it is drawn in its color."""
    if cell is None:
        return "empty"
    return cell.state if cell.state in ("missing", "broken") else f"{cell.state} {cell.kind}"


def _write_kind_style(kind: str) -> Iterator[str]:
    yield f".{kind} .mark {{ color: var(--kind-{kind}) }}"
    yield (
        f".token.{kind} .mark {{ background: var(--kind-{kind}); color: var(--paper); "
        f"border-color: var(--kind-{kind}) }}"
    )


def _write_bands(columns: int, count: int, *, labels_beside: bool) -> Iterator[str]:
    """Yield the rules that break rows of up to `count` cells into bands of some columns."""
    gutter = "var(--gutter) " if labels_beside else ""
    yield f".map {{ grid-template-columns: {gutter}repeat({columns}, minmax(0, 2.75rem)) }}"
    for band in range(1, -(-count // columns)):
        yield f".map tr > :nth-child(n + {columns * band + 2}) {{ --b: {band} }}"
    for column in range(min(columns, count)):
        place = (
            f":nth-child({columns}n + {column + 2}) {{ grid-column: {column + 1 + labels_beside} }}"
        )
        yield f".map tr > {place}"
    label = "content: attr(data-row); content: attr(data-row) / ''"  # twice: not all know silence
    yield f".map td:nth-child({columns}n + 2)::before {{ {label} }}"
    yield ".map td:nth-child(2)::before { content: none }"
    yield f".map tbody th {{ grid-column: 1 / {2 if labels_beside else -1} }}"
    if labels_beside:
        yield ".map td { margin-top: 0 }"
        yield ".map tbody th { align-self: center }"
        yield (
            ".map td::before { bottom: .3rem; left: auto; right: calc(100% + 2px); "
            "width: var(--gutter) }"
        )


def _shorten(text: str) -> str:
    return shorten_text(escape_text(text), _MAX_NAME_LENGTH)
