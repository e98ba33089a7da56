"""The command ``explain``: what a finding means and how to fix it."""

from __future__ import annotations

import sys
from typing import Annotated, NamedTuple

from onnxkvrename.cli.options import declare_command
from onnxkvrename.cli.output import find_width, print_lines
from onnxkvrename.findings import decide_exit_code
from onnxkvrename.options import Example, Option
from onnxkvrename.report.explain_text import describe_finding, render_finding_list
from onnxkvrename.report.formats import Line


class ExplainArguments(NamedTuple):
    """What a user asks for with ``explain``."""

    codes: Annotated[tuple[str, ...], Option("", metavar="[CODE]...")] = ()


@declare_command(
    "explain",
    ExplainArguments,
    "Exit codes: 0 done; 2 there is no such finding; 130 interrupted.",
    Example("onnxkvrename explain KV402", "Explain a finding."),
    Example("onnxkvrename explain", "List all findings."),
)
def command(arguments: ExplainArguments) -> int:
    """Explain findings: what they mean, why they matter, how to fix them.

    CODE is the code of a finding, such as KV402, or its name, such as renamed-in-cache. Without
    one, all findings are listed.
    """
    if not arguments.codes:
        print_lines(render_finding_list(find_width(sys.stdout)))
    else:
        passages = [describe_finding(code) for code in arguments.codes]
        lines = [line for passage in passages for line in (*passage, "")][:-1]
        print_lines(map(Line, lines))
    return decide_exit_code()
