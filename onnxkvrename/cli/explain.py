"""The command ``explain``: what a finding or a log of vLLM means and how to fix it."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, NamedTuple

from onnxkvrename.cli.options import declare_command
from onnxkvrename.cli.output import find_width, print_answer, print_lines
from onnxkvrename.documents import UnreadableTextError
from onnxkvrename.errors import KvRenameError, ModelError
from onnxkvrename.findings import CODES, decide_exit_code, quote_path
from onnxkvrename.options import FORMAT, Example, Option
from onnxkvrename.report.finding_pages import describe_finding, render_finding_list
from onnxkvrename.report.formats import Line
from onnxkvrename.report.log_text import build_log_answer
from onnxkvrename.storage.read import is_occupied, open_file, read_chunks, translate_read_errors
from onnxkvrename.vllm.messages import LogReading, read_log

_STDIN = Path("-")
_CHUNK_BYTES = 1 << 20


class ExplainArguments(NamedTuple):
    """What a user asks for with ``explain``."""

    codes: Annotated[
        tuple[str, ...],
        Option("", metavar="[CODE]...", names=tuple(CODES), excludes=("log",)),
    ] = ()
    log: Annotated[
        Path | None,
        Option("--log", "Explain the messages in a log of vLLM or vllm-qaic. - is stdin.", "FILE"),
    ] = None
    output_format: Annotated[str, FORMAT._replace(needs=("log",))] = "text"


@declare_command(
    "explain",
    ExplainArguments,
    "Exit codes: 0 done; 1 a message in the log means a finding of severity error; 2 there is no "
    "such code, or the log cannot be read; 130 interrupted.",
    Example("onnxkvrename explain KV402", "Explain a finding."),
    Example("onnxkvrename explain --log serve.log", "Explain the messages in a log."),
)
def command(arguments: ExplainArguments) -> int:
    """Explain findings: what they mean, why they matter, how to fix them.

    CODE is the code of a finding, such as KV402. Without one, all codes are listed. With
    --log, the messages about KV caches that do not fit are explained, each once.
    """
    if arguments.log is not None:
        reading = _read_log(arguments.log)
        if reading.has_nul and not reading.messages:
            raise KvRenameError(
                "is not a text log: it has NUL bytes and no known message",
                path=str(arguments.log),
                hint="--log takes what vLLM printed, in UTF-8",
            )
        answer = build_log_answer(reading, str(arguments.log))
        return print_answer(answer, arguments.output_format)
    if not arguments.codes:
        print_lines(render_finding_list(find_width(sys.stdout)))
    else:
        _check_codes(arguments.codes)
        passages = [describe_finding(code) for code in arguments.codes]
        lines = [line for passage in passages for line in (*passage, "")][:-1]
        print_lines(map(Line, lines))
    return decide_exit_code()


def _check_codes(codes: Iterable[str]) -> None:
    """Check that no code is a log.

    Raises:
        KvRenameError: One is the path of a file, or named like a log.
    """
    for code in codes:
        if code.upper() not in CODES and (".log" in code or is_occupied(code)):
            hint = f"`onnxkvrename explain --log {quote_path(code)}` explains a log"
            raise KvRenameError(f"no finding has the code {code}", hint=hint)


def _read_log(path: Path) -> LogReading:
    """Return the known messages of a log.

    Raises:
        KvRenameError: It cannot be read.
    """
    if path == _STDIN:
        if sys.stdin is None:
            raise KvRenameError("stdin is closed", hint="pass the path of a log to --log")
        with translate_read_errors(path):
            return _read_chunks(path, iter(lambda: sys.stdin.buffer.read(_CHUNK_BYTES), b""))
    try:
        with open_file(path) as file:
            return _read_chunks(path, read_chunks(file, 0, file.size))
    except ModelError as error:
        raise KvRenameError(error.message, path=error.path, hint="--log - reads stdin") from None


def _read_chunks(path: Path, chunks: Iterable[bytes]) -> LogReading:
    try:
        return read_log(chunks)
    except UnreadableTextError as error:
        hint = f"`{error.hint}` prints it as text, and --log - reads stdin"
        if path != _STDIN:
            source = quote_path(str(path))
            hint = f"pass it as `{error.hint} {source} | onnxkvrename explain --log -`"
        raise KvRenameError(str(error), path=str(path), hint=hint) from None
