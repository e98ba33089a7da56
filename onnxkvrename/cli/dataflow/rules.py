"""The command ``rules``: writes rules for a model, from its dataflow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click

from onnxkvrename.cli.dataflow.one_model import choose_one_model
from onnxkvrename.cli.options import (
    CONTEXT_SETTINGS,
    NonEmptyPath,
    add_single_option,
    add_version_option,
)
from onnxkvrename.cli.output import print_lines
from onnxkvrename.findings import decide_exit_code
from onnxkvrename.renaming.run import check_token_change
from onnxkvrename.report.formats import Line
from onnxkvrename.rules.plan import TokenChange
from onnxkvrename.rules.suggestion.rules_text import SuggestedRules
from onnxkvrename.verification.pairs.infer_rules import infer_rules, trace_model


@click.command(
    "rules",
    context_settings=CONTEXT_SETTINGS,
    epilog="Exit codes: 0 done; 2 the job could not be done; 130 interrupted.",
)
@add_single_option(
    "--suggest",
    "model",
    metavar="MODEL",
    type=NonEmptyPath(path_type=Path),
    required=True,
    help="Write rules for the buffers of this model.",
)
@add_single_option(
    "--prefix", metavar="TOKEN", help="The token that names of the model carry already."
)
@add_version_option()
def command(model: Path, prefix: str | None) -> int:
    """Write a rules file for a model whose names no profile knows.

    The graph decides which outputs are later states of which inputs. Numbers that
    count layers become patterns, so that the file fits other models of that kind.
    It renames exactly those pairs of MODEL: that is checked before it is printed.
    """
    if prefix is not None:
        check_token_change(TokenChange(prefix))
    model = choose_one_model((model,), "rules --suggest", "onnxkvrename rules --suggest")
    suggestion = infer_rules([trace_model(model)], [prefix] if prefix else []).suggestion
    print_lines(_render(suggestion))
    return decide_exit_code()


def _render(suggestion: SuggestedRules) -> Iterator[Line]:
    yield from map(Line, suggestion.text.rstrip("\n").split("\n"))
    if suggestion.listed:
        first = suggestion.listed[0]
        count = len(suggestion.listed)
        yield Line(
            f"{count} {'pair is' if count == 1 else 'pairs are'} only listed "
            f"(first: {first.input} -> {first.output}{first.suffix}): no pattern leads from one "
            "name to the other, so the file is for this export; --pairs dataflow needs no file",
            err=True,
        )
