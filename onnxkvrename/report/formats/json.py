"""JSON for programs: one document with the command's own schema."""

from __future__ import annotations

from collections.abc import Iterator

from onnxkvrename.report.formats import Answer, Format, Line, Screen


def _render(answer: Answer, screen: Screen) -> Iterator[Line]:
    yield Line(answer.render_json())


FORMAT = Format(_render)
