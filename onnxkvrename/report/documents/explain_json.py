"""A log as JSON: each known message with what it means."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from onnxkvrename.findings import Severity
from onnxkvrename.records import Document
from onnxkvrename.report.log_text import find_fix
from onnxkvrename.vllm.messages import LogReading


class Message(NamedTuple):
    """A known message.

    Attributes:
        code: The finding that it is.
        severity: That of the finding; error for a message that ends a worker.
        text: The message as it is in its first line; a long one is cut.
        values: The values in this line; long ones are cut.
        first_line: The number of the first line with it, from 1.
        lines: The number of lines with it.
        versions: The known versions of vLLM that have it; vllm-qaic for that plug-in.
        cause: What is wrong. "This side" is the worker that logs it.
        fix: What to do.
        command: The command that checks for it before anything runs; `None` if none does.
    """

    code: str
    severity: Severity
    text: str
    values: Mapping[str, str]
    first_line: int
    lines: int
    versions: tuple[str, ...]
    cause: str
    fix: str
    command: str | None


class LogContent(NamedTuple):
    """What the messages of a log mean.

    Attributes:
        log: The file; - for stdin; `None` if the job could not be done.
        lines: The number of its lines.
        messages: The known messages, each once, in the order of their first lines.
    """

    log: str | None
    lines: int
    messages: tuple[Message, ...]


DOCUMENT = Document("onnxkvrename.explain/1", "explain", LogContent(None, 0, ()))


def describe_log(reading: LogReading, name: str) -> LogContent:
    """Return what the messages of a log mean."""
    messages = (
        Message(
            logged.message.code,
            logged.message.severity,
            logged.text,
            logged.values,
            logged.first_line,
            logged.line_count,
            logged.message.versions,
            logged.message.describe_cause(logged.values),
            find_fix(logged),
            logged.message.command,
        )
        for logged in reading.messages
    )
    return LogContent(name, reading.line_count, tuple(messages))
