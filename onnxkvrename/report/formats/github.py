"""GitHub's workflow commands, which annotate the files of a pull request.

No name from a file may end a command, begin another, or stop later ones:
https://docs.github.com/en/actions/reference/workflows-and-actions/workflow-commands
"""

from __future__ import annotations

from collections.abc import Iterator

from onnxkvrename.errors import KvRenameError
from onnxkvrename.report.formats import Answer, FileResult, Format, Line, Note, Screen
from onnxkvrename.report.formats.text import format_error, format_finding
from onnxkvrename.report.inert import MAX_LINE_LENGTH, escape_text, shorten_text

_MAX_FILE_LENGTH = 240


def _render(answer: Answer, screen: Screen) -> Iterator[Line]:
    yield from (Line(text, is_command=True) for text in _list_commands(answer))


FORMAT = Format(_render)


def _list_commands(answer: Answer) -> Iterator[str]:
    for file in answer.files:
        yield from _list_file_commands(file)
    yield from map(_format_note, answer.notes)
    if answer.error is not None:
        yield _format_failure(answer.error, answer.error.path)


def _list_file_commands(file: FileResult) -> Iterator[str]:
    for finding in file.findings:
        yield format_workflow_command(
            finding.severity, format_finding(finding), title=finding.code, path=file.path
        )
    if file.error is not None:
        yield _format_failure(file.error, file.path)
    yield from map(_format_note, file.notes)


def _format_failure(error: KvRenameError, path: str | None) -> str:
    return format_workflow_command("error", format_error(error), title="failed", path=path)


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
    file = "" if path is None else f"file={_escape_property(path)},"
    if len(file) <= _MAX_FILE_LENGTH:  # a shortened path would be that of another file
        properties = file + properties
    head = f"::{level} {properties}::"
    shown = escape_text(message)
    if "`" not in shown:  # a command would be another one
        shown = shorten_text(shown, MAX_LINE_LENGTH - len(head))
    return head + _escape_data(shown)


def _escape_property(text: str) -> str:
    return _escape_data(text).replace(":", "%3A").replace(",", "%2C")


def _escape_data(text: str) -> str:
    return escape_text(text).replace("%", "%25")
