"""The benchmark as one SVG, drawn by hand: readable on light and dark pages."""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape
from itertools import zip_longest
from typing import Any

import growing
from contenders import EACH
from environments import OURS
from targets import NO_SYNC

WIDTH, MARGIN, GAP = 1000, 28, 36
COLUMN = (WIDTH - 2 * MARGIN - GAP) / 2
LABEL, VALUE, ROW = 178, 70, 19
CHART = 150
FONT = 'system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif'
PAINT = {  # what is painted: on a light page, on a dark one
    "text": ("fill", "#1f2328", "#e6edf3"),
    ".soft": ("fill", "#59636e", "#9198a1"),
    ".halo": ("stroke", "#ffffff", "#0d1117"),
    ".page": ("fill", "#ffffff", "#0d1117"),
    ".ours": ("fill", "#0969da", "#4493f8"),
    ".peer": ("fill", "#9aa4b0", "#6b7682"),
    ".limit": ("fill", "#d9b75c", "#9e7b22"),
    ".time": ("stroke", "#0969da", "#4493f8"),
    ".memory": ("stroke", "#a04bd8", "#c297ff"),
    ".grid": ("stroke", "#d8dee4", "#30363d"),
    ".linear": ("stroke", "#59636e", "#9198a1"),
}
SHAPES = f"""
text {{ font: 12px {FONT} }}
.head {{ font-weight: 600; font-size: 19px }} .title {{ font-weight: 600; font-size: 14px }}
.halo {{ paint-order: stroke; stroke-width: 4 }} .strong {{ font-weight: 600 }}
.end {{ text-anchor: end }} .mid {{ text-anchor: middle }}
.line {{ fill: none; stroke-width: 2.2; stroke-linejoin: round }}
.linear {{ fill: none; stroke-width: 1.2; stroke-dasharray: 4 4 }} .grid {{ fill: none }}
"""
AXES = {"size": "file size, GB", "nodes": "nodes", "layers": "layers", "files": "files"}


def draw(results: dict[str, Any]) -> str:
    """Two columns of bar charts, then the growth series."""
    body: list[str] = []
    top = 96.0
    panels = list(_panels(results))
    for left, right in zip_longest(panels[::2], panels[1::2]):
        heights = [_bars(body, panel, at, top) for panel, at in ((left, 0), (right, 1)) if panel]
        top += max(heights) + 30
    top = _growth(body, results, top)
    title = _text(MARGIN, 40, "Renaming the KV buffers of an ONNX model", "head")
    note = "Wall time as a multiple of onnxkvrename with fsync off, since nobody else syncs."
    note += " Logarithmic; medians; shorter is better."
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top:.0f}" '
        f'role="img" aria-label="Benchmark of onnxkvrename and its peers"><style>{_style()}</style>'
        f'<rect class="page" width="{WIDTH}" height="{top:.0f}" rx="8"/>'
    )
    return "\n".join([head, title, _text(MARGIN, 62, note, "soft"), *body, "</svg>\n"])


def _style() -> str:
    light, dark = (
        " ".join(f"{where} {{ {paint[0]}: {paint[shade]} }}" for where, paint in PAINT.items())
        for shade in (1, 2)
    )
    return f"{SHAPES}{light}\n@media (prefers-color-scheme: dark) {{ {dark} }}\n"


Panel = tuple[str, list[dict[str, Any]], str, float]


def _panels(results: dict[str, Any]) -> Iterator[Panel]:
    """Title, entries, what is shown, and what counts as 1."""
    for work in results["workloads"]:
        entries = work["contenders"]
        base = [entry for entry in entries if entry["name"] == NO_SYNC]
        if base:
            title = f"({work['key']}) {work['title']}"
            yield title, entries, "wall", base[0]["median"]["wall"]
        if work["key"] == "a":
            yield "(a) peak memory, MB", entries, "rss", 1.0


def _bars(body: list[str], panel: Panel, column: int, top: float) -> float:
    """One bar chart; what it takes in height."""
    title, entries, what, unit = panel
    left = MARGIN + column * (COLUMN + GAP)
    body.append(_text(left, top, title, "title"))
    values = [entry["median"][what] / unit for entry in entries]
    drawn = [v for v, e in zip(values, entries, strict=True) if e["verdict"] != "failed"]
    low, high = math.log10(min(drawn) / 2), math.log10(max(drawn))
    scale = (COLUMN - LABEL - VALUE) / (high - low)
    height = 12 + len(entries) * ROW
    if what == "wall":
        x = left + LABEL - scale * low
        body.append(f'<path class="linear" d="M{x:.1f} {top + 10:.1f}v{height - 8}"/>')
    for number, (entry, value) in enumerate(zip(entries, values, strict=True)):
        width = scale * (math.log10(value) - low)
        _bar(body, entry, value, left + LABEL, top + 12 + number * ROW, width)
    return height


def _bar(
    body: list[str], entry: dict[str, Any], value: float, left: float, y: float, width: float
) -> None:
    kind = "strong end" if entry["kind"] == "ours" else "soft end"
    body.append(_text(left - 8, y + 12, _short(entry["name"]), kind))
    if entry["verdict"] == "failed":
        body.append(_text(left + 4, y + 12, "fails", "soft halo"))
        return
    size = f'width="{width:.1f}" height="{ROW - 6}" rx="2"'
    body.append(f'<rect class="{entry["kind"]}" x="{left:.1f}" y="{y + 2:.1f}" {size}/>')
    shown = f"{value:,.0f}" if value >= 20 else f"{value:.1f}" if value >= 2 else f"{value:.2f}"
    wrong = " wrong" if entry["verdict"] == "wrong" else ""
    body.append(_text(left + width + 6, y + 12, shown + wrong, "soft halo"))


def _short(name: str) -> str:
    name = name.replace(f", {EACH}", ", per file").replace("onnxruntime OnnxModel", "onnxruntime")
    return (
        name.replace("python -c ", "").strip('"').replace(f"{OURS}, fsync off", "ours, fsync off")
    )


def _growth(body: list[str], results: dict[str, Any], top: float) -> float:
    """Four log-log charts, relative to their first point."""
    series = growing.read(results)
    if not series:
        return top
    body.append(_text(MARGIN, top, "How onnxkvrename grows", "title"))
    legend = "Blue: CPU time; violet: peak memory; both relative to the smallest. Dashed: linear."
    body.append(_text(MARGIN, top + 20, legend, "soft"))
    width = (WIDTH - 2 * MARGIN - 3 * GAP) / 4
    for number, one in enumerate(series):
        _chart(body, one, MARGIN + number * (width + GAP), top + 42, width)
    return top + 42 + CHART + 56


def _chart(body: list[str], series: growing.Series, left: float, top: float, width: float) -> None:
    first, last = series.amounts[0], series.amounts[-1]
    span = math.log10(last / first)

    def path(values: list[float], kind: str) -> str:
        points = []
        for amount, value in zip(series.amounts, values, strict=True):
            x = left + width * math.log10(amount / first) / span
            y = top + CHART * (1 - min(max(math.log10(value / values[0]) / span, -0.05), 1.0))
            points.append(f"{x:.1f},{y:.1f}")
        return f'<polyline class="line {kind}" points="{" ".join(points)}"/>'

    for decade in range(math.floor(span) + 1):
        y = top + CHART * (1 - decade / span)
        body.append(f'<path class="grid" d="M{left:.1f} {y:.1f}h{width:.1f}"/>')
        body.append(_text(left - 4, y + 4, f"{10**decade:,}", "soft end"))
    body.append(
        f'<path class="linear" d="M{left:.1f} {top + CHART}L{left + width:.1f} {top:.1f}"/>'
    )
    body.append(path(series.rss, "memory"))
    body.append(path(series.cpu, "time"))
    scale = 1e9 if series.name == "size" else 1.0
    body.append(_text(left, top + CHART + 17, f"{first / scale:,g}", "soft"))
    body.append(_text(left + width, top + CHART + 17, f"{last / scale:,g}", "soft end"))
    body.append(_text(left + width / 2, top + CHART + 33, AXES[series.name], "mid"))


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'
