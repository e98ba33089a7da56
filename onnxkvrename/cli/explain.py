"""The command ``explain``: what a finding means and how to fix it."""

from __future__ import annotations

from shutil import get_terminal_size

import click

from onnxkvrename.cli.options import CONTEXT_SETTINGS
from onnxkvrename.cli.output import detect_screen, print_lines
from onnxkvrename.findings import CODES, decide_exit_code
from onnxkvrename.report.finding_pages import describe_examples, describe_finding, list_findings
from onnxkvrename.report.formats import Line


def complete_code(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return the codes that a shell may complete."""
    return [code for code in CODES if code.startswith(incomplete.upper())]


@click.command(
    "explain",
    context_settings=CONTEXT_SETTINGS,
    epilog="Exit codes: 0 done; 2 there is no such code; 130 interrupted.",
)
@click.argument("codes", nargs=-1, metavar="[CODE]...", shell_complete=complete_code)
def command(codes: tuple[str, ...]) -> int:
    """Explain findings: what they mean, why they matter, how to fix them.

    CODE is the code of a finding, such as KV402. Without one, all codes are listed.
    """
    if not codes:
        width = get_terminal_size().columns if detect_screen().is_terminal else None
        lines = list_findings(width)
    else:
        passages = [describe_finding(code) for code in codes]
        lines = [line for passage in passages for line in (*passage, "")]
        lines += describe_examples()
    print_lines(Line(line) for line in lines)
    return decide_exit_code()
