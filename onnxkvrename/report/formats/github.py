"""GitHub's workflow commands, which annotate the files of a pull request.

No name from a file may end a command, begin another, or stop later ones:
https://docs.github.com/en/actions/reference/workflows-and-actions/workflow-commands
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from onnxkvrename.errors import KvRenameError
from onnxkvrename.findings import Finding
from onnxkvrename.report.formats import Answer, FileResult, Format, Line, Note
from onnxkvrename.report.formats.text import (
    fold_findings,
    format_error,
    format_finding,
)
from onnxkvrename.report.inert import MAX_WHOLE_SENTENCE, escape_text, shorten_text
from onnxkvrename.text import format_count

_MAX_FILE_LENGTH = 240
_MAX_MESSAGE_LENGTH = 2 * MAX_WHOLE_SENTENCE + 200
"""Characters of the longest annotation that stays whole: a name, a message and a hint."""
_MAX_ANNOTATIONS = 10
"""The annotations of one level that GitHub shows for a step; it drops all later ones."""
_LEVELS: tuple[Literal["error", "warning", "notice"], ...] = ("error", "warning", "notice")


class _Annotation(NamedTuple):
    """An annotation of a file, or of the whole job."""

    level: Literal["error", "warning", "notice"]
    title: str
    message: str
    path: str | None = None


def _render(answer: Answer, width: int | None) -> Iterator[Line]:
    annotations = list(_list_annotations(answer))
    counts = Counter(annotation.level for annotation in annotations)
    if max(counts.values(), default=0) > _MAX_ANNOTATIONS:
        levels = ([item for item in annotations if item.level == level] for level in _LEVELS)
        annotations = [item for items in levels for item in _fit(items)]
    for level, title, message, path in annotations:
        yield Line(format_workflow_command(level, message, title=title, path=path), is_command=True)


FORMAT = Format(_render)


def _list_annotations(answer: Answer) -> Iterator[_Annotation]:
    for file in answer.files:
        yield from _list_file_annotations(file)
    yield from map(_annotate_note, answer.notes)
    if answer.error is not None:
        yield _annotate_error(answer.error, answer.error.path)


def _list_file_annotations(file: FileResult) -> Iterator[_Annotation]:
    for finding in file.findings:
        yield _Annotation(finding.severity, finding.code, format_finding(finding), file.path)
    if file.error is not None:
        yield _annotate_error(file.error, file.path)
    yield from map(_annotate_note, file.notes)


def _annotate_error(error: KvRenameError, path: str | None) -> _Annotation:
    return _Annotation("error", "failed", format_error(error), path)


def _annotate_note(note: Note) -> _Annotation:
    return _Annotation(note.level, note.title, note.message, note.path)


def _fit(items: Sequence[_Annotation]) -> Sequence[_Annotation]:
    """Return annotations of one level that GitHub shows all: folded, the last counts the rest."""
    if len(items) <= _MAX_ANNOTATIONS:
        return items
    whole_job = [item for item in items if item.path is None]
    folded = [*_fold(items), *whole_job]
    if len(folded) <= _MAX_ANNOTATIONS:
        return folded
    room = _MAX_ANNOTATIONS - 1 - len(whole_job)
    shown, rest = folded[:room], folded[room : len(folded) - len(whole_job)]
    counts = Counter(item.title for item in rest)
    listed = ", ".join(f"{title} ({count:,})" for title, count in counts.most_common())
    message = f"and {format_count(len(rest), 'more annotation')}: {listed}; --format json lists all"
    return [*shown, _Annotation(items[0].level, "more", message), *whole_job]


def _fold(items: Sequence[_Annotation]) -> Iterator[_Annotation]:
    """Yield annotations of files; one that several files share comes once, on the first file."""
    findings = [
        (item.path, Finding(item.title, "error", "", item.message, ""))
        for item in items
        if item.path is not None
    ]
    for item in fold_findings(findings, (path for path, _ in findings)):
        message = item.finding.message
        if len(item.paths) > 1:
            message = f"{item.format_where()}: {message}"
        if item.total > 1:
            message = f"{message}; --format json lists each"
        yield _Annotation(items[0].level, item.finding.code, message, item.paths[0])


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
        shown = shorten_text(shown, _MAX_MESSAGE_LENGTH)
    return head + _escape_data(shown)


def _escape_property(text: str) -> str:
    return _escape_data(text).replace(":", "%3A").replace(",", "%2C")


def _escape_data(text: str) -> str:
    return escape_text(text).replace("%", "%25")
