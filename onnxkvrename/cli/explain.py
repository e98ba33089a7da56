"""The command ``explain``: what a finding means and how to fix it."""

from __future__ import annotations

from shutil import get_terminal_size
from typing import Annotated, NamedTuple

from onnxkvrename.cli.options import declare_command
from onnxkvrename.cli.output import detect_screen, print_lines
from onnxkvrename.findings import CODES, decide_exit_code
from onnxkvrename.options import Option
from onnxkvrename.report.finding_pages import describe_finding, list_findings
from onnxkvrename.report.formats import Line


class ExplainArguments(NamedTuple):
    """What a user asks for with ``explain``."""

    codes: Annotated[tuple[str, ...], Option("", metavar="[CODE]...", names=tuple(CODES))] = ()


@declare_command(
    "explain",
    ExplainArguments,
    "Exit codes: 0 done; 2 there is no such code; 130 interrupted.",
)
def command(arguments: ExplainArguments) -> int:
    """Explain findings: what they mean, why they matter, how to fix them.

    CODE is the code of a finding, such as KV402. Without one, all codes are listed.
    """
    if not arguments.codes:
        width = get_terminal_size().columns if detect_screen().is_terminal else None
        lines = list_findings(width)
    else:
        passages = [describe_finding(code) for code in arguments.codes]
        lines = [line for passage in passages for line in (*passage, "")][:-1]
    print_lines(Line(line) for line in lines)
    return decide_exit_code()
