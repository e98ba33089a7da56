"""The command ``profiles``: the built-in rules, and those of plug-ins."""

from __future__ import annotations

import click

from onnxkvrename.cli.options import CONTEXT_SETTINGS, add_version_option, complete_profile
from onnxkvrename.cli.output import print_lines
from onnxkvrename.findings import decide_exit_code
from onnxkvrename.report.formats import Line
from onnxkvrename.rules.load import list_profiles, read_profile


@click.command(
    "profiles",
    context_settings=CONTEXT_SETTINGS,
    epilog="Exit codes: 0 done; 2 there is no such profile; 130 interrupted.",
)
@click.argument("name", required=False, metavar="[NAME]", shell_complete=complete_profile)
@add_version_option()
def command(name: str | None) -> int:
    """List the rules for --profile, or print some as a start for a file of your own.

    NAME is a profile. Its rules are printed as TOML, which --rules reads.
    """
    lines = list_profiles() if name is None else read_profile(name).splitlines()
    print_lines(Line(line) for line in lines)
    return decide_exit_code()
