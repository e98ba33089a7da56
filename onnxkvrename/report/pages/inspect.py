"""The page of ``inspect --html``: for each model its sizes, its KV map, findings and facts."""

from __future__ import annotations

import posixpath
from collections.abc import Sequence

from onnxkvrename.layout.inspect import ModelSummary
from onnxkvrename.report.formats import FileResult
from onnxkvrename.report.formats.text import FoldedFinding, choose_findings
from onnxkvrename.report.inspection.facts import (
    describe_tokens,
    format_buffer_bytes,
    format_title,
    format_type,
    list_facts,
)
from onnxkvrename.report.inspection.grid import (
    NO_BUFFER_CAPTION,
    NO_LAYER_CAPTION,
    STATUS_CAPTIONS,
    build_grid,
    get_symbol,
    list_legend,
)
from onnxkvrename.report.pages.page import render_page, shorten_path
from onnxkvrename.rules.kinds import BufferKind, get_kind_traits, list_kinds
from onnxkvrename.text import format_bytes

_MAX_TITLE = 80
_BAND = 10
"""Layers side by side; a wide window shows several bands beside each other."""


def render_inspect_page(summaries: Sequence[ModelSummary]) -> str:
    """Return one page of models with their KV maps; windows are folded before."""
    models = [
        {
            "summary": summary,
            "name": format_name(summary),
            "title": format_title(summary),
            "count": sum(buffer.state != "missing" for buffer in summary.buffers),
            "tokens": describe_tokens(summary),
            "size": format_bytes(summary.size, is_exact=False),
            "grid": (grid := build_grid(summary.buffers)),
            "bands": [
                grid.cut(slice(start, start + _BAND))
                for start in range(0, len(grid.columns), _BAND)
            ],
            "legend": list(list_legend(grid)),
            "findings": _choose_findings(summary),
            "facts": list(list_facts(summary)),
        }
        for summary in summaries
    ]
    return render_page(
        "inspect",
        with_script=any(model["bands"] for model in models),
        more_style="".join(map(_style_kind, list_kinds())),
        models=models,
        kind=get_kind_traits,
        captions=STATUS_CAPTIONS,
        empty_captions=(NO_LAYER_CAPTION, NO_BUFFER_CAPTION),
        get_symbol=get_symbol,
        format_type=format_type,
        format_size=format_buffer_bytes,
    )


def _choose_findings(summary: ModelSummary) -> list[FoldedFinding]:
    files = [FileResult(each.path, each.findings) for each in summary.windows or (summary,)]
    return list(choose_findings(files, rest="--format json lists"))


def _style_kind(kind: BufferKind) -> str:
    colors = ", ".join(get_kind_traits(kind).page_colors)
    return f".kind-{kind} {{ --kind: light-dark({colors}) }}\n"


def format_name(summary: ModelSummary) -> str:
    """Return a short name of a model: its file with the folder around it, both ends if long."""
    if summary.windows:
        return shorten_path(format_title(summary), _MAX_TITLE)
    parts = [part for part in summary.path.replace("\\", "/").split("/") if part not in ("", ".")]
    return shorten_path(posixpath.join(*parts[-2:]) if parts else summary.path, _MAX_TITLE)
