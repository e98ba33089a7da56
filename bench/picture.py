"""The benchmark as one SVG: linear bars, each with its ratio; for light and dark pages, and phones.

Letters are large for the width of the picture, so that they can be read where a phone shrinks it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import Any, NamedTuple

import growing
from contenders import EACH
from targets import NO_SYNC

WIDTH, SHOWN_WIDTH, MARGIN = 544, 680, 16
LABEL, VALUE, ROW = 214, 88, 21
CUT_RATIO = 3.0
"""A bar is cut where it is longer than that many times the next one."""
LEAST_LENGTH = 1.5
TIMES = "\N{MULTIPLICATION SIGN}"
FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, Helvetica, Arial, sans-serif'
PAINT = {  # what is painted: on a light page, on a dark one
    "text": ("fill", "#1f2328", "#e6edf3"),
    ".soft": ("fill", "#59636e", "#9ba3ad"),
    ".page": ("fill", "#ffffff", "#0d1117"),
    ".ours": ("fill", "#0969da", "#4493f8"),
    ".peer": ("fill", "#818b98", "#7d8692"),
    ".limit": ("fill", "#bf8700", "#bb8009"),
    ".cut, .value": ("stroke", "#ffffff", "#0d1117"),
    ".unit": ("stroke", "#59636e", "#9ba3ad"),
}
SHAPES = f"""
text {{ font: 14px {FONT} }}
.head {{ font-weight: 600; font-size: 20px }} .title {{ font-weight: 600; font-size: 16px }}
.strong {{ font-weight: 600 }} .end {{ text-anchor: end }}
.value {{ paint-order: stroke; stroke-width: 4 }}
.cut {{ fill: none; stroke-width: 3 }} .unit {{ stroke-width: 1; stroke-dasharray: 3 3 }}
"""
AXES = {"size": "file size", "nodes": "nodes", "layers": "layers", "files": "files"}
LEGEND = (("ours", "onnxkvrename"), ("peer", "other tools"), ("limit", "for comparison"))


class Bar(NamedTuple):
    """A bar; its length is linear in its value, which stands beside it."""

    name: str
    kind: str  # one of LEGEND
    value: float | None  # None: it failed
    text: str


class Panel(NamedTuple):
    """A bar chart; `unit` is the value that a line marks."""

    title: str
    note: str
    bars: Sequence[Bar]
    unit: float | None = 1.0
    may_cut: bool = True


def draw(results: dict[str, Any]) -> str:
    """The bar charts, one below the other."""
    body = [_text(0, 22, "Renaming the KV buffers of an ONNX model", "head")]
    top = 30.0
    for line in (
        "Wall time as a multiple of onnxkvrename with fsync off, since no",
        "other tool syncs. Medians, bars from zero; shorter is better.",
    ):
        top += 20
        body.append(_text(0, top, line, "soft"))
    top += 14
    left = 0.0
    for kind, text in LEGEND:
        body.append(f'<rect class="{kind}" x="{left}" y="{top}" width="14" height="14" rx="2"/>')
        body.append(_text(left + 20, top + 12, text, "soft"))
        left += 160
    top += 40
    for panel in (*_panels(results), *_growth(results)):
        body.append(f'<g transform="translate(0 {top:.0f})">')
        top += _draw_panel(body, panel)
        body.append("</g>")
    shown_height = top * SHOWN_WIDTH / WIDTH
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{-MARGIN} 0 {WIDTH} {top:.0f}" '
        f'width="{SHOWN_WIDTH}" height="{shown_height:.0f}" role="img">'
        f"<title>{escape(describe(results))}</title><style>{_style()}</style>"
        f'<rect class="page" x="{-MARGIN}" width="{WIDTH}" height="{top:.0f}" rx="8"/>'
    )
    return "\n".join([head, *body, "</svg>\n"])


def describe(results: dict[str, Any]) -> str:
    """What the picture shows, in words."""
    fastest = []
    memory = ""
    for work in results["workloads"]:
        base = _find_base(work)
        peers = [
            entry["median"]
            for entry in work["contenders"]
            if entry["kind"] == "peer" and entry["verdict"] in ("clean", "changed")
        ]
        if base is None or not peers:
            continue
        ratio = min(median["wall"] for median in peers) / base["wall"]
        fastest.append(f"({work['key']}) {_figure(ratio)}")
        if work["key"] == "a":
            least = min(median["rss"] for median in peers)
            memory = f" Peak memory in (a): {base['rss']:,.0f} MB, of the others {least:,.0f} MB"
            memory += " and more."
    return (
        "Bar charts of wall time. The fastest other tool with a right result takes so many times "
        f"as long as onnxkvrename without fsync: {', '.join(fastest)}.{memory}"
    )


def _style() -> str:
    light, dark = (
        " ".join(f"{where} {{ {paint[0]}: {paint[shade]} }}" for where, paint in PAINT.items())
        for shade in (1, 2)
    )
    return f"{SHAPES}{light}\n@media (prefers-color-scheme: dark) {{ {dark} }}\n"


def _find_base(work: dict[str, Any]) -> dict[str, float] | None:
    """The medians that count as 1."""
    medians = [entry["median"] for entry in work["contenders"] if entry["name"] == NO_SYNC]
    return medians[0] if medians else None


def _panels(results: dict[str, Any]) -> Iterator[Panel]:
    for work in results["workloads"]:
        base = _find_base(work)
        if base is None:
            continue
        title, entries = f"({work['key']}) {work['title']}", work["contenders"]
        note = f"1{TIMES} is {base['wall']:.3f} s"
        if any(EACH in entry["name"] for entry in entries):
            note += "; per file: a process for each file"
        yield Panel(title, note, [_make_bar(entry, "wall", base["wall"]) for entry in entries])
        if work["key"] == "a":
            bars = [_make_bar(entry, "rss", 1.0) for entry in entries]
            yield Panel("(a) peak memory in MB", "of the whole process", bars, unit=None)


def _make_bar(entry: dict[str, Any], what: str, unit: float) -> Bar:
    name = entry["name"].replace(f", {EACH}", ", per file")
    name = (
        name.replace("onnxruntime OnnxModel", "onnxruntime")
        .replace("python -c ", "python: ")
        .replace('"', "")
    )
    value = entry["median"][what] / unit
    if entry["verdict"] == "failed":
        return Bar(name, entry["kind"], None, "fails")
    shown = f"{value:,.0f}" if what == "rss" else f"{_figure(value)}{TIMES}"
    if entry["verdict"] == "wrong":
        shown += " wrong"
    return Bar(name, entry["kind"], value, shown)


def _growth(results: dict[str, Any]) -> Iterator[Panel]:
    """How time and memory grow with the input, each as a multiple of the smallest."""
    for series in growing.read(results):
        scale, unit = (1e9, " GB") if series.name == "size" else (1.0, "")
        first, last = (f"{series.amounts[at] / scale:,g}{unit}" for at in (0, -1))
        rows = (
            (AXES[series.name], "limit", series.amounts),
            ("CPU time", "ours", series.cpu),
            ("peak memory", "ours", series.rss),
        )
        bars = [
            Bar(name, kind, values[-1] / values[0], f"{_figure(values[-1] / values[0])}{TIMES}")
            for name, kind, values in rows
        ]
        title = f"onnxkvrename from {first} to {last} {'' if unit else AXES[series.name]}".rstrip()
        yield Panel(title, "the last as a multiple of the first", bars, may_cut=False)


def _draw_panel(body: list[str], panel: Panel) -> float:
    """Draw a chart from y = 0 down; return its height."""
    body.append(_text(0, 0, panel.title, "title"))
    body.append(_text(0, 20, panel.note, "soft"))
    top = 32.0
    values = [bar.value for bar in panel.bars if bar.value is not None]
    end = find_axis_end(values) if panel.may_cut else max(values)
    room = WIDTH - 2 * MARGIN - LABEL - VALUE
    scale = room / end
    height = len(panel.bars) * ROW
    if panel.unit is not None:
        x = LABEL + panel.unit * scale
        body.append(f'<path class="unit" d="M{x:.1f} {top - 4:.0f}v{height + 4}"/>')
    for number, bar in enumerate(panel.bars):
        y = top + number * ROW
        kind = "strong end" if bar.kind == "ours" else "end"
        body.append(_text(LABEL - 8, y + 14, bar.name, kind))
        length = 0.0 if bar.value is None else max(min(bar.value, end) * scale, LEAST_LENGTH)
        is_cut = bar.value is not None and bar.value > end
        if length:
            size = f'width="{length:.1f}" height="{ROW - 5}" rx="2"'
            body.append(f'<rect class="{bar.kind}" x="{LABEL}" y="{y + 1:.1f}" {size}/>')
        if is_cut:  # a gap through the bar, and a word
            for x in (LABEL + length - 24, LABEL + length - 16):
                body.append(f'<path class="cut" d="M{x:.1f} {y + ROW - 2}l6 -{ROW - 1}"/>')
        text = f"{bar.text} (cut)" if is_cut else bar.text
        body.append(_text(LABEL + length + 5, y + 14, text, "value strong" if is_cut else "value"))
    return top + height + 34


def find_axis_end(values: Sequence[float]) -> float:
    """The longest bar that is drawn in full, and a little more for those that are cut."""
    ordered = sorted(values)
    while len(ordered) > 2 and ordered[-1] > CUT_RATIO * ordered[-2]:
        ordered.pop()
    return ordered[-1] if len(ordered) == len(values) else ordered[-1] * 1.15


def _figure(value: float) -> str:
    """A ratio with the digits of the tables of the page."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


def _text(x: float, y: float, text: str, kind: str) -> str:
    class_ = f' class="{kind}"' if kind else ""
    return f'<text{class_} x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'
