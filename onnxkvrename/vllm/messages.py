"""Recognize what vLLM and vllm-qaic log about KV caches that do not fit.

``messages.toml`` has a row for each meaning, with the messages that mean it. A log is not trusted:
it is read in pieces of bounded size, and each line in linear time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from onnxkvrename.documents import UnreadableTextError, parse_toml
from onnxkvrename.findings import CODES, Severity
from onnxkvrename.limits import MAX_LINE_BYTES, MAX_REASON_CHARS, shorten_text
from onnxkvrename.storage.read import read_text_file

_TABLE = Path(__file__).with_name("messages.toml")
_VALUE = re.compile(r"\{(\w+)\}")
_STYLES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_OTHER_FORMATS: Mapping[bytes, tuple[str, str]] = {
    b"\xff\xfe": ("UTF-16", "iconv -f UTF-16 -t UTF-8"),
    b"\xfe\xff": ("UTF-16", "iconv -f UTF-16 -t UTF-8"),
    b"\x1f\x8b": ("compressed by gzip", "zcat"),
    b"\x28\xb5\x2f\xfd": ("compressed by zstd", "zstdcat"),
    b"PK\x03\x04": ("a ZIP archive", "unzip -p"),
}
"""How a file starts that may be a log in a form that is not read, in which nothing is found.

Each with its name, and the program that prints it as text.
"""
_END_OF_VALUE = re.compile(r"[\"\\\r\n]|$")
"""Where a value ends that ends its message: logs of containers are JSON strings."""


class VllmMessage(NamedTuple):
    """A message, and what it means.

    Attributes:
        text: A part of the message that no other has, with a name in braces for each value.
        versions: The known versions of vLLM that have it; ``vllm-qaic`` for that plug-in.
        code: The finding that it is, one of `onnxkvrename.findings.CODES`.
        severity: That of the finding; ``error`` for a message that ends a worker.
        cause: What is wrong; names in braces are values of the message.
        fix: What to do; `None` where the fix of the finding says it.
        command: The command that checks for it before anything runs; `None` if none does.
    """

    text: str
    versions: tuple[str, ...]
    code: str
    severity: Severity
    cause: str
    fix: str | None
    command: str | None

    @property
    def literals(self) -> list[str]:
        """The text without its values: what is before, between and after them."""
        return _VALUE.split(self.text)[::2]

    def describe_cause(self, values: Mapping[str, str]) -> str:
        """Return what is wrong, with the values of a message."""
        return _VALUE.sub(lambda match: values[match[1]], self.cause)


class LoggedMessage(NamedTuple):
    """A known message in a log.

    Attributes:
        message: The row of the table.
        text: The message as it is in its first line.
        values: The values in this line, by their names; long ones are cut.
        first_line: The number of the first line with it, from 1.
        line_count: The number of lines with it.
    """

    message: VllmMessage
    text: str
    values: Mapping[str, str]
    first_line: int
    line_count: int


class LogReading(NamedTuple):
    """What is known in a log.

    Attributes:
        line_count: The number of its lines.
        messages: The known messages, each once, in the order of their first lines.
        has_nul: True if it has NUL bytes, as a log that was cut while vLLM wrote it, and as a file
            that is not a log.
    """

    line_count: int
    messages: tuple[LoggedMessage, ...]
    has_nul: bool = False


def load_messages() -> tuple[VllmMessage, ...]:
    """Return all rows of the table."""
    table = parse_toml(read_text_file(_TABLE))
    fixes, commands = table["fixes"], table["commands"]
    return tuple(
        VllmMessage(
            text,
            tuple(versions.split()),
            meaning["code"],
            meaning.get("severity", CODES[meaning["code"]][0]),
            meaning["cause"],
            fixes.get(meaning.get("fix"), meaning.get("fix")),
            commands[meaning["command"]] if "command" in meaning else None,
        )
        for meaning in table["meaning"]
        for text, versions in meaning["messages"].items()
    )


def read_log(chunks: Iterable[bytes]) -> LogReading:
    """Return the known messages of a log.

    Of each line, the first `MAX_LINE_BYTES` are read; colours do not matter.

    Args:
        chunks: The bytes of the log, cut anywhere.

    Raises:
        UnreadableTextError: It is not UTF-8 but UTF-16, or compressed. Its hint is the program
            that prints it as text.
    """
    marks = {message: max(message.literals, key=len).encode() for message in load_messages()}
    found: dict[VllmMessage, LoggedMessage] = {}
    line_count = 0
    has_nul = False
    for lines in _iterate_lines(chunks):
        has_nul = has_nul or b"\0" in lines
        possible = [message for message, mark in marks.items() if mark in lines]
        if possible:
            for number, line in enumerate(lines.split(b"\n"), line_count + 1):
                start = line[:MAX_LINE_BYTES]
                for message in possible:
                    if marks[message] in start:
                        _add_line(found, message, start, number)
        line_count += lines.count(b"\n") + (not lines.endswith(b"\n"))
    messages = tuple(sorted(found.values(), key=lambda each: each.first_line))
    return LogReading(line_count, messages, has_nul)


def _iterate_lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield whole lines, many at once; what is far behind the start of a line may be missing."""
    rest = b""
    chunks = iter(chunks)
    first = next(chunks, b"")
    for start, (name, reader) in _OTHER_FORMATS.items():
        if first.startswith(start):
            raise UnreadableTextError(f"is {name}, not plain text", reader)
    for chunk in chain((first,), chunks):
        lines, end, rest = (rest + chunk).rpartition(b"\n")
        if end:
            yield lines + end
        else:
            rest = rest[:MAX_LINE_BYTES]
    if rest:
        yield rest


def _add_line(
    found: dict[VllmMessage, LoggedMessage], message: VllmMessage, line: bytes, number: int
) -> None:
    """Count a line for a message, if it has all of the message."""
    match = match_message(message, _STYLES.sub("", line.decode("utf-8", "backslashreplace")))
    if match is None:
        return
    if message in found:
        found[message] = found[message]._replace(line_count=found[message].line_count + 1)
    else:
        found[message] = LoggedMessage(message, *match, number, 1)


def match_message(message: VllmMessage, line: str) -> tuple[str, Mapping[str, str]] | None:
    """Return a message as it is in a line, and its values; `None` if a part of it is missing.

    Each part is looked for behind the one before it: a pattern could take more than linear time.
    """
    first, *others = message.literals
    start = line.find(first)
    if start < 0:
        return None
    at = start + len(first)
    values = {}
    for name, literal in zip(_VALUE.findall(message.text), others, strict=True):
        end = line.find(literal, at) if literal else _find_end(line, at)
        if end < 0:
            return None
        values[name] = shorten_text(line[at:end], MAX_REASON_CHARS)
        at = end + len(literal)
    return shorten_text(line[start:at], 2 * MAX_REASON_CHARS), values


def _find_end(line: str, start: int) -> int:
    """Return where a value ends that nothing follows."""
    match = _END_OF_VALUE.search(line, start)
    return len(line[: match.start() if match else None].rstrip(". "))
