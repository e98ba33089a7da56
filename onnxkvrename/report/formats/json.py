"""JSON for programs: one document with the command's own schema."""

from __future__ import annotations

from collections.abc import Iterator

from onnxkvrename.report.documents import load_document
from onnxkvrename.report.formats import Answer, Format, Line
from onnxkvrename.report.inert import escape_json


def _render(answer: Answer, width: int | None) -> Iterator[Line]:
    document = load_document(answer.command)
    content = document.empty if answer.build_content is None else answer.build_content()
    text = document.render(content, answer.exit_code, answer.error)
    yield from map(Line, escape_json(text).split("\n"))


FORMAT = Format(_render)
