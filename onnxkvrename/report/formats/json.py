"""JSON for programs: one document with the command's own schema."""

from __future__ import annotations

from collections.abc import Iterator

from onnxkvrename.report.formats import Answer, Format, Line, Screen
from onnxkvrename.report.inert import escape_json


def _render(answer: Answer, screen: Screen) -> Iterator[Line]:
    yield from map(Line, escape_json(answer.render_json()).split("\n"))


FORMAT = Format(_render)
