"""The known messages of a log as an answer: what each means, and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from onnxkvrename.findings import CODES, Finding, Severity, decide_exit_code, format_count
from onnxkvrename.report.finding_pages import read_fix
from onnxkvrename.report.formats import Answer, FileResult, Line, Note, Span, build_line
from onnxkvrename.report.formats.text import RED, YELLOW
from onnxkvrename.report.tables import render_facts
from onnxkvrename.vllm.messages import LoggedMessage, LogReading

_STYLES: dict[Severity, str] = {"error": RED, "warning": YELLOW}


def build_log_answer(reading: LogReading, name: str) -> Answer:
    """Return what is known about a log.

    The exit code is 1 if a message means a finding of severity error, else 0.

    Args:
        reading: What was read.
        name: The name of the log, as it is shown.
    """
    severities = {logged.message.severity for logged in reading.messages}
    findings = tuple(map(_build_finding, reading.messages))
    return Answer(
        "explain",
        decide_exit_code(failed="error" in severities),
        build_content=partial(_describe, reading, name),
        render_text=partial(_render_text, reading, name),
        files=(FileResult(name, findings),),
        notes=(Note("explain", _format_outcome(reading)),),
        tells_findings=True,
    )


def find_fix(logged: LoggedMessage) -> str:
    """Return what to do about a message."""
    return logged.message.fix or read_fix(logged.message.code)


def _describe(reading: LogReading, name: str) -> tuple[Any, ...]:
    from onnxkvrename.report.documents.explain_json import describe_log  # not for text

    return describe_log(reading, name)


def _build_finding(logged: LoggedMessage) -> Finding:
    """Return a message as a finding, for formats that annotate files."""
    code = logged.message.code
    cause = logged.message.describe_cause(logged.values)
    message = f"line {logged.first_line}: {logged.text}: {cause}"
    return Finding(code, logged.message.severity, "", message, find_fix(logged))


def _render_text(reading: LogReading, name: str, width: int | None) -> Iterator[Line]:
    for logged in reading.messages:
        code = logged.message.code
        severity, (_, meaning) = logged.message.severity, CODES[code]
        head = Span(f"{severity} {code}", _STYLES[severity])
        count = f" ({logged.line_count:,} lines)" if logged.line_count > 1 else ""
        yield build_line(f"{name}:{logged.first_line}: ", head, f": {logged.text}{count}")
        facts = [
            ("finding", meaning),
            ("cause", logged.message.describe_cause(logged.values)),
            ("fix", find_fix(logged)),
        ]
        if logged.message.command is not None:
            check = f"`{logged.message.command}` checks for this before anything runs"
            facts.append(("before", check))
        yield from render_facts(facts, width, indent="  ")
    yield Line(f"{name}: {_format_outcome(reading)}", err=True)


def _format_outcome(reading: LogReading) -> str:
    if not reading.line_count:
        return "the log is empty"
    lines = format_count(reading.line_count, "line")
    if not reading.messages:
        return f"nothing known in {lines}"
    return f"{format_count(len(reading.messages), 'known message')} in {lines}"
