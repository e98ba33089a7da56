"""The command ``profiles``: the built-in rules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, NamedTuple

from onnxkvrename.cli.options import declare_command
from onnxkvrename.cli.output import print_lines
from onnxkvrename.documents import parse_toml
from onnxkvrename.findings import decide_exit_code
from onnxkvrename.options import Example, Option
from onnxkvrename.report.formats import Line
from onnxkvrename.rules.load import list_profiles, read_profile


class ProfilesArguments(NamedTuple):
    """What a user asks for with ``profiles``."""

    name: Annotated[str | None, Option("", metavar="[NAME]")] = None


@declare_command(
    "profiles",
    ProfilesArguments,
    "Exit codes: 0 done; 2 there is no such profile; 130 interrupted.",
    Example("onnxkvrename profiles", "List all."),
    Example("onnxkvrename profiles qeff > rules.toml", "Start rules of your own."),
)
def command(arguments: ProfilesArguments) -> int:
    """List the rules for --profile, or print some as a start for a file of your own.

    NAME is a profile. Its rules are printed as TOML, which --rules reads.
    """
    name = arguments.name
    lines = _list_descriptions() if name is None else read_profile(name).splitlines()
    print_lines(Line(line) for line in lines)
    return decide_exit_code()


def _list_descriptions() -> Iterator[str]:
    """Yield each profile with its description, in columns."""
    names = list_profiles()
    width = max(map(len, names))
    for name in names:
        yield f"{name:{width}}  {_describe_profile(name)}".rstrip()


def _describe_profile(name: str) -> str:
    return str(parse_toml(read_profile(name)).get("description", ""))
