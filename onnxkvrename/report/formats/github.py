"""GitHub's workflow commands, which annotate the files of a pull request.

No name from a file may end a command, begin another, or stop later ones:
https://docs.github.com/en/actions/reference/workflows-and-actions/workflow-commands
"""

from __future__ import annotations

from collections.abc import Iterator

from onnxkvrename.errors import KvRenameError
from onnxkvrename.report.formats import Answer, FileResult, Format, Line, Note, Screen
from onnxkvrename.report.formats.text import escape_unprintable, format_finding


def _render(answer: Answer, screen: Screen) -> Iterator[Line]:
    for file in answer.files:
        yield from map(Line, _render_file(file))
    yield from (Line(_format_note(note)) for note in answer.notes)
    if answer.error is not None:
        yield Line(_format_failure(answer.error, answer.error.path))


FORMAT = Format(_render)


def _render_file(file: FileResult) -> Iterator[str]:
    for finding in file.findings:
        yield format_workflow_command(
            finding.severity, format_finding(finding), title=finding.code, path=file.path
        )
    if file.error is not None:
        yield _format_failure(file.error, file.path)
    yield from map(_format_note, file.notes)


def _format_failure(error: KvRenameError, path: str | None) -> str:
    return format_workflow_command(
        "error", escape_unprintable(str(error)), title="failed", path=path
    )


def _format_note(note: Note) -> str:
    return format_workflow_command(note.level, note.message, title=note.title, path=note.path)


def format_workflow_command(
    level: str, message: str, *, title: str, path: str | None = None
) -> str:
    """Return one workflow command with its parts escaped.

    Args:
        level: ``error``, ``warning`` or ``notice``.
        message: The annotation.
        title: Its heading.
        path: The file to annotate, if any.
    """
    properties = f"title={_escape_property(title)}"
    if path is not None:
        properties = f"file={_escape_property(path)},{properties}"
    return f"::{level} {properties}::{_escape_data(message)}"


def _escape_property(text: str) -> str:
    return _escape_data(escape_unprintable(text)).replace(":", "%3A").replace(",", "%2C")


def _escape_data(text: str) -> str:
    escaped = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return escaped.replace("##[", "## [")
