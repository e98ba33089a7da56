"""The command ``profiles``: the built-in rules, and what rules read in the names of a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

from onnxkvrename.cli.options import declare_command
from onnxkvrename.cli.output import print_lines
from onnxkvrename.documents import parse_toml
from onnxkvrename.findings import decide_exit_code
from onnxkvrename.model.file import open_model
from onnxkvrename.options import Example, Option
from onnxkvrename.report.formats import Line
from onnxkvrename.report.tables import render_table
from onnxkvrename.rules.load import AUTO_PROFILE, list_profiles, load_rules, read_profile
from onnxkvrename.rules.nearest import find_nearest
from onnxkvrename.rules.pick import pick_rules
from onnxkvrename.rules.profile import Rules
from onnxkvrename.text import quote_path

_HEADINGS = ("side", "name", "rule", "kind", "part", "layer")


class ProfilesArguments(NamedTuple):
    """What a user asks for with ``profiles``."""

    name: Annotated[str | None, Option("", metavar="[NAME]")] = None
    match: Annotated[
        Path | None,
        Option(
            "--match",
            "Show what the rules read in the names of a model, and where they fail by one place.",
            "MODEL",
        ),
    ] = None
    rules: Annotated[
        Path | None,
        Option(
            "--rules",
            "With --match: your own rules, in TOML like a profile.",
            "FILE",
            needs=("match",),
            excludes=("name",),
        ),
    ] = None


@declare_command(
    "profiles",
    ProfilesArguments,
    "Exit codes: 0 done; 2 the job could not be done; 130 interrupted.",
    Example("onnxkvrename profiles", "List all."),
    Example("onnxkvrename profiles qeff > rules.toml", "Start rules of your own."),
    Example("onnxkvrename profiles --match model.onnx", "Show which rules take which names."),
)
def command(arguments: ProfilesArguments) -> int:
    """List the rules for --profile, or print some as a start for a file of your own.

    NAME is a profile. Its rules are printed as TOML, which --rules reads.

    With --match each input and output of MODEL is shown with the rule that takes
    it, and with {token} where a token goes. Without NAME or --rules the profile
    that matches the names is used, or all of them.
    """
    name, model = arguments.name, arguments.match
    if model is not None:
        print_lines(_show_matches(model, name, arguments.rules))
    else:
        lines = _list_descriptions() if name is None else read_profile(name).splitlines()
        print_lines(Line(line) for line in lines)
    return decide_exit_code()


def _show_matches(model: Path, profile: str | None, rules_file: Path | None) -> Iterator[Line]:
    with open_model(model) as opened:
        signature = opened.signature
    sides = (("input", signature.inputs), ("output", signature.outputs))
    names = [(side, value.name) for side, values in sides for value in values]
    rules = pick_rules([model], profile or AUTO_PROFILE, rules_file)
    candidates = [rules]
    if not (profile or rules_file or any(rules.match(side, name) for side, name in names)):
        candidates = [load_rules(each) for each in list_profiles()]
    yield Line(f"{model}: {', '.join(each.name for each in candidates)}")
    rows = [_describe_name(candidates, side, name) for side, name in names]
    yield from render_table([_HEADINGS, *rows], None, indent="  ")
    if len(candidates) > 1:
        pairs = f"`onnxkvrename pairs {quote_path(str(model))} --as rules`"
        yield Line(f"no rule takes a name: {pairs} writes rules for the caches in the graph")


def _describe_name(candidates: Sequence[Rules], side: str, name: str) -> tuple[str, ...]:
    """Return a row about a name: what the rules read in it, or why none takes it."""
    for rules in candidates:
        match = rules.match(side, name)
        if match is not None:
            rule = f"kv[{match.rule.number}]"
            place = match.replace(f"{{{match.found['token'] or 'token'}}}", match.suffix)
            return side, place, rule, match.rule.kind, match.part, str(match.layer)
        reason = rules.find_reason_to_keep(name)
        if reason is not None:
            return side, name, f"stays: {reason}", "", "", ""
    near = find_nearest(candidates, side, name)
    if near is None:
        return side, name, "", "", "", ""
    file = f"{near.rule.file} " if len(candidates) > 1 else ""
    where = f"nearly: {file}kv[{near.rule.number}], {near.found!r} in place of {near.piece}"
    return side, name, where, "", "", ""


def _list_descriptions() -> Iterator[str]:
    """Yield each profile with its description, in columns."""
    names = list_profiles()
    width = max(map(len, names))
    for name in names:
        yield f"{name:{width}}  {_describe_profile(name)}".rstrip()


def _describe_profile(name: str) -> str:
    return str(parse_toml(read_profile(name)).get("description", ""))
