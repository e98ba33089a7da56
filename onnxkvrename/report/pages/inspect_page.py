"""The page of ``inspect --html``: for each model its facts, its KV map and its findings."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator, Sequence
from xml.etree.ElementTree import Element

from rich.filesize import decimal

from onnxkvrename.findings import format_count
from onnxkvrename.layout.inspect import ModelSummary
from onnxkvrename.report.inert import escape_text, shorten_text
from onnxkvrename.report.inspection.facts import (
    describe_tokens,
    format_title,
    list_facts,
    list_finding_lines,
)
from onnxkvrename.report.inspection.grid import KvGrid, build_grid
from onnxkvrename.report.pages.elements import Child, build, cut_middle, isolate, isolate_words
from onnxkvrename.report.pages.frame import write_color_variables, write_page
from onnxkvrename.report.pages.map_table import (
    MAP_SCRIPT,
    build_legend,
    build_map,
    list_kind_colors,
    write_map_style,
)

_MAX_TITLE = 80
_MAX_TEXT = 1500

_STYLE = """
dl { display: grid; grid-template-columns: minmax(7rem, max-content) minmax(0, 1fr); gap: 4px 20px }
dt { color: var(--muted) }
dd { grid-column: 2; margin: 0; font-variant-numeric: tabular-nums }
dd span { display: block }
.path { max-width: none }
.findings { padding: 0; list-style: none }
.findings li { margin: 8px 0; padding-left: 12px; border-left: 3px solid currentcolor }
.findings strong, .findings span { display: block }
.findings span { color: var(--ink) }
.findings .hint { color: var(--muted) }
.error { color: var(--bad) } .warning { color: var(--warning) }
@media print { .keys { display: none } .findings li, dd { break-inside: avoid } }
@media (max-width: 39.99em) { dl { display: block } dd { margin-bottom: 8px } }
"""


def render_html(summaries: Sequence[ModelSummary]) -> str:
    """Return one page of models with their KV maps; windows are folded before."""
    grids = [build_grid(summary.buffers) for summary in summaries]
    is_one = len(summaries) == 1
    title = f"KV cache of {format_name(summaries[0])}" if is_one else _count_models(summaries)
    sections = (
        _build_section(number, summary, grid, is_one)
        for number, (summary, grid) in enumerate(zip(summaries, grids, strict=True), 1)
    )
    colors = write_color_variables(list_kind_colors())
    maps = write_map_style(grids)
    return write_page(
        title,
        command="inspect",
        introduction=_introduce(summaries),
        body=sections,
        style=f"{colors}{_STYLE}{maps}",
        script=MAP_SCRIPT if any(grid.rows for grid in grids) else "",
    )


def format_name(summary: ModelSummary) -> str:
    """Return a short name of a model: its file with the folder around it, both ends if long."""
    if summary.windows:
        return cut_middle(format_title(summary), _MAX_TITLE)
    parts = [part for part in summary.path.replace("\\", "/").split("/") if part not in ("", ".")]
    return cut_middle(posixpath.join(*parts[-2:]) if parts else summary.path, _MAX_TITLE)


def describe_size(summary: ModelSummary) -> str:
    """Return how large a model is, its KV cache in layers and names."""
    count = sum(item.state != "missing" for item in summary.buffers)
    if not count:
        return f"no KV buffer; {decimal(summary.size)}"
    buffers, layers = (
        format_count(count, "KV buffer"),
        format_count(len(summary.layers), "layer"),
    )
    return f"{buffers} in {layers}; token: {describe_tokens(summary)}; {decimal(summary.size)}"


def _count_models(summaries: Sequence[ModelSummary]) -> str:
    return f"KV caches of {len(summaries):,} models"


def _introduce(summaries: Sequence[ModelSummary]) -> Iterator[Child]:
    """Yield what is below the heading: the model's path, or links to the models."""
    if len(summaries) == 1:
        if format_title(summaries[0]) != format_name(summaries[0]):
            yield build("p", isolate(summaries[0].path), class_="path")
        yield build("p", describe_size(summaries[0]))
    elif summaries:
        links = (
            build("li", build("a", isolate(format_title(summary)), href=f"#model-{number}"))
            for number, summary in enumerate(summaries, 1)
        )
        yield build("nav", build("ul", links), aria_label="Models")


def _build_section(number: int, summary: ModelSummary, grid: KvGrid, is_one: bool) -> Element:
    """Return what is shown of a model; with others it has a heading of its own."""
    level = "h2" if is_one else "h3"
    parts: list[Element] = []
    if not is_one:
        parts.append(build("h2", isolate(format_title(summary))))
        parts.append(build("p", describe_size(summary)))
    if grid.rows:
        parts.append(build(level, "Map"))
        parts.append(build_map(grid, format_name(summary)))
        if grid.hidden_text:
            parts.append(build("p", grid.hidden_text, class_="note"))
        parts.append(build_legend(grid))
        keys = "Point at a cell, or move to one with Tab and the arrow keys. Escape hides its text."
        parts.append(build("p", keys, class_="note keys"))
    if summary.findings:
        parts.append(build(level, "Findings"))
        parts.append(build("ul", _list_findings(summary), class_="findings"))
    parts.append(build(level, "Facts"))
    parts.append(build("dl", _list_facts(summary)))
    return build("section", parts, id=f"model-{number}")


def _list_facts(summary: ModelSummary) -> Iterator[Element]:
    for fact in list_facts(summary):
        if fact.label:
            yield build("dt", fact.label)
        yield build("dd", (build("span", _show(line)) for line in fact.lines))


def _list_findings(summary: ModelSummary) -> Iterator[Element]:
    for line in list_finding_lines(summary):
        yield build(
            "li",
            build("strong", f"{line.severity} {line.code}"),
            build("span", _show(line.message)),
            build("span", _show(line.hint), class_="hint") if line.hint else None,
            class_=line.severity,
        )


def _show(text: str) -> Iterator[Child]:
    """Yield a text, without its middle if it is far longer than any of ours."""
    return isolate_words(shorten_text(escape_text(text), _MAX_TEXT))
