"""Output formats, with one file for each, and the answer of a command that they render.

A format is a module of this package with a :class:`Format` called ``FORMAT``; its name for
``--format`` is the name of its file. No other module must be changed. Control characters in a line
are escaped when it is printed, tabs too.

Most commands have one :class:`FileResult` for each model. ``compare`` has one for the whole
hand-off: it is about both sides, has decode's path, and the name in a finding may be prefill's.
Models with an error of their own come before it, each with its own result.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any, Literal, NamedTuple

from onnxkvrename.errors import KvRenameError
from onnxkvrename.findings import Finding
from onnxkvrename.rules.results import ModelReport


class Span(NamedTuple):
    """A part of a line in a style of its own.

    Attributes:
        text: The part.
        style: Parameters of the terminal's SGR sequence, such as ``31;1``; empty for none.
    """

    text: str
    style: str = ""


class Line(NamedTuple):
    """A line of output: text and styles apart, so that no text can pass for a style.

    The text may contain anything; what prints it escapes what a terminal or a CI runner
    acts on.

    Attributes:
        text: The line, without its end.
        err: Whether it is for stderr.
        spans: The parts of the text for a stream with colour, where a coloured one may end with
            spaces that the text lacks; empty for a plain line.
        is_command: Whether the line begins with a command for a CI runner on purpose.
    """

    text: str
    err: bool = False
    spans: tuple[Span, ...] = ()
    is_command: bool = False


def build_line(*parts: str | Span, err: bool = False) -> Line:
    """Return a line of plain and styled parts."""
    spans = tuple(part if isinstance(part, Span) else Span(part) for part in parts)
    return Line("".join(span.text for span in spans), err, spans)


class Note(NamedTuple):
    """A sentence on the outcome for a file, for formats that annotate files.

    Attributes:
        title: A short heading, e.g. the status of a model.
        message: The sentence.
        path: The file to show it beside; ``None`` for the whole command.
        level: ``error`` for a change that ``--check`` found, else ``notice``.
    """

    title: str
    message: str
    path: str | None = None
    level: Literal["error", "notice"] = "notice"


class FileResult(NamedTuple):
    """The results of a command for one file.

    Attributes:
        path: The file.
        findings: Its problems.
        error: The reason why it could not be read or written.
        notes: Its outcome.
        output: Where its result is, or would be; findings may name it.
        label: What text calls it; empty for its path.
    """

    path: str
    findings: tuple[Finding, ...] = ()
    error: KvRenameError | None = None
    notes: tuple[Note, ...] = ()
    output: str = ""
    label: str = ""


def _render_nothing(width: int | None) -> Iterable[Line]:
    return ()


class Answer(NamedTuple):
    """The answer of a command, independent of the format that renders it.

    Attributes:
        command: The name of the command, by which its JSON document is known.
        exit_code: The exit code of the process.
        build_content: Returns the content of the command's JSON document; ``None`` for a job that
            could not be done.
        render_text: Renders what text says beside the findings of files, for a terminal of some
            columns, or, for `None`, for a pipe or a file.
        files: The results for each file, in the order of the arguments.
        notes: The outcome of the job as a whole.
        error: The reason why the whole job failed; then ``files`` is empty.
        is_verbose: Whether text shows every finding.
        tells_findings: Whether the command's own text says what the findings of files say.
    """

    command: str
    exit_code: int
    build_content: Callable[[], tuple[Any, ...]] | None = None
    render_text: Callable[[int | None], Iterable[Line]] = _render_nothing
    files: tuple[FileResult, ...] = ()
    notes: tuple[Note, ...] = ()
    error: KvRenameError | None = None
    is_verbose: bool = False
    tells_findings: bool = False


class Format(NamedTuple):
    """A way to render answers.

    Attributes:
        render: Returns the lines of an answer for a terminal of some columns, or, for `None`,
            for a pipe or a file.
    """

    render: Callable[[Answer, int | None], Iterable[Line]]


def build_file_result(report: ModelReport, *notes: Note) -> FileResult:
    """Return the result of a file with the findings and the error of a model.

    Args:
        report: The report on the model.
        notes: The outcome, for formats that annotate files.
    """
    return FileResult(report.path, report.findings, report.error, notes, report.output)


def list_formats() -> tuple[str, ...]:
    """Return the names of all formats; none is imported for it."""
    files = (file for folder in __path__ for file in os.listdir(folder))
    return tuple(
        sorted(file[:-3] for file in files if file.endswith(".py") and not file.startswith("_"))
    )


def load_format(name: str) -> Format:
    """Import one of the formats that :func:`list_formats` names."""
    output_format: Format = import_module(f"{__name__}.{name}").FORMAT
    return output_format
