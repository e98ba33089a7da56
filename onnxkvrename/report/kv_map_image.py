"""Model summaries with their KV maps as SVG and HTML pictures; loads rich.

Both stand alone: no fonts or styles from elsewhere, the same bytes for the same
models whatever the terminal at hand.
"""

from __future__ import annotations

import io
from collections.abc import Iterable

from rich.console import Console
from rich.padding import Padding
from rich.terminal_theme import TerminalTheme

from onnxkvrename.layout.inspect import ModelSummary
from onnxkvrename.report.inspect_rich import render_model_summary

MARK = "made by onnxkvrename inspect"
"""What both have near their start; only such files are replaced without being asked."""
_PICTURE_COLUMNS = 92
"""Columns of a picture."""
_INK, _PAPER, _WHITE = (230, 237, 243), (13, 17, 23), (255, 255, 255)
_RED, _PINK, _GREEN, _LIME = (218, 54, 51), (255, 123, 114), (63, 185, 80), (170, 232, 110)
_AMBER, _GOLD, _BLUE, _SKY = (224, 168, 46), (242, 204, 96), (88, 140, 255), (121, 192, 255)
_VIOLET, _ROSE, _CYAN, _ICE = (200, 125, 245), (245, 170, 215), (57, 197, 207), (118, 227, 234)
_SILVER, _GREY = (201, 209, 217), (110, 118, 129)
_THEME = TerminalTheme(
    _PAPER,
    _INK,
    [_PAPER, _RED, _GREEN, _AMBER, _BLUE, _VIOLET, _CYAN, _SILVER],
    [_GREY, _PINK, _LIME, _GOLD, _SKY, _ROSE, _ICE, _WHITE],
)
"""A dark card of its own: as readable on a light page as on a dark one."""
_FONTS = "'DejaVu Sans Mono', Menlo, Consolas, ui-monospace, monospace"
_FONT_ASPECT_RATIO = 0.602
"""Width to height of a letter in most of these fonts."""

# Filled in by rich, which knows these names; its own templates fetch a font.
_SVG_TEMPLATE = f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {{terminal_width}} {{terminal_height}}" \
role="img" aria-label="KV map">
<!-- {MARK} -->
<style>
text {{{{ font-family: {_FONTS}; font-size: {{char_height}}px; white-space: pre }}}}
{{styles}}
</style>
<defs>{{lines}}</defs>
<rect width="100%" height="100%" rx="8" fill="rgb{_PAPER}"/>
{{backgrounds}}
{{matrix}}
</svg>
"""
_HTML_TEMPLATE = f"""\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<!-- {MARK} -->
<title>KV map</title>
<style>
:root {{{{ color-scheme: dark }}}}
body {{{{ color: {{foreground}}; background: {{background}}; margin: 1em }}}}
pre {{{{ font: 14px/1.35 {_FONTS}; margin: 0 }}}}
{{stylesheet}}
</style>
</head>
<body><pre>{{code}}</pre></body>
</html>
"""


def render_svg(summaries: Iterable[ModelSummary]) -> str:
    """Return one SVG picture of models with their KV maps."""
    console = _record_summaries(summaries)
    return console.export_svg(
        title="",
        theme=_THEME,
        code_format=_SVG_TEMPLATE,
        font_aspect_ratio=_FONT_ASPECT_RATIO,
        unique_id="kvmap",
    )


def render_html(summaries: Iterable[ModelSummary]) -> str:
    """Return one HTML page of models with their KV maps."""
    return _record_summaries(summaries).export_html(theme=_THEME, code_format=_HTML_TEMPLATE)


def _record_summaries(summaries: Iterable[ModelSummary]) -> Console:
    """Draw the summaries on a console that does not depend on the environment."""
    console = Console(
        file=io.StringIO(),
        record=True,
        force_terminal=True,
        force_jupyter=False,
        color_system="truecolor",
        no_color=False,
        legacy_windows=False,
        highlight=False,
        width=_PICTURE_COLUMNS,
        height=100,
    )
    for summary in summaries:
        console.print(Padding(render_model_summary(summary, fold=True), (1, 2, 0, 2)))
    console.print()
    return console
