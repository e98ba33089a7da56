"""The rules that the user chose, or that know the names of the models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import click

from onnxkvrename.cli.options import Decorator, add_single_option, check_exclusive
from onnxkvrename.cli.output import print_lines
from onnxkvrename.report.formats import Line
from onnxkvrename.rules.find_models import find_jobs
from onnxkvrename.rules.pick import pick_rules
from onnxkvrename.rules.profile import Rules


def find_rules_by_dataflow(
    paths: Sequence[Path],
    profile: str | None,
    rules: Path | None,
    token: str,
) -> Rules:
    """Return rules for exactly the pairs that the graphs of some models show.

    Args:
        paths: The models; manifests among them do not count.
        profile: What ``--profile`` says, which must be nothing.
        rules: What ``--rules`` says, which must be nothing.
        token: The token that names may carry already, with those that can be told from a name.

    Raises:
        RulesError: No model has states, no rules fit all of them, or the token cannot be
            distinguished from a part of the names.
        ModelError: A model cannot be read.
    """
    for option, value in (("--profile", profile), ("--rules", rules)):
        check_exclusive("--pairs", True, option, value is not None)
    from onnxkvrename.verification.pairs.infer_rules import (  # loads onnx
        find_carried_tokens,
        infer_rules,
        trace_model,
    )

    models = [job.model for job in find_jobs(paths) if job.model.suffix != ".json"]
    traced = [trace_model(model) for model in models]
    return infer_rules(traced, find_carried_tokens(traced, token)).rules


def add_pairs_token_option() -> Decorator:
    """Add ``--prefix``, where only ``--pairs`` needs the token."""
    return add_single_option(
        "--prefix",
        "--token",
        metavar="TOKEN",
        help="With --pairs: the token in the names; by default each one with a capital letter.",
    )


def check_pairs_token(prefix: str | None, pairs: str | None) -> None:
    """Raise :class:`click.UsageError` for a token that only ``--pairs`` needs, without it."""
    if prefix is not None and pairs is None:
        raise click.UsageError("--prefix is for --pairs: rules recognise tokens by themselves")


class RulesArguments(Protocol):
    """The arguments of a command with options that choose rules."""

    @property
    def profile(self) -> str | None:
        """What ``--profile`` says."""

    @property
    def rules(self) -> Path | None:
        """What ``--rules`` says."""

    @property
    def pairs(self) -> str | None:
        """What ``--pairs`` says."""

    @property
    def output_format(self) -> str:
        """What ``--format`` says."""

    @property
    def quiet(self) -> bool:
        """Whether ``--quiet`` is given."""


def pick_requested_rules(
    paths: Sequence[Path],
    arguments: RulesArguments,
    token: str | None = None,
) -> Rules:
    """Return the rules that the user chose, or that know the names of the models.

    A profile that was picked is named on stderr, except for programs and under ``--quiet``.

    Args:
        paths: The models.
        arguments: The arguments of the command.
        token: With ``--pairs``: the token that names may carry already.

    Raises:
        RulesError: They cannot be used, or several profiles know the names.
        ModelError: A path does not exist or cannot be listed.
    """
    profile, rules = arguments.profile, arguments.rules
    if arguments.pairs is not None:
        return find_rules_by_dataflow(paths, profile, rules, token or "")
    return pick_profile(
        paths, profile, rules, is_quiet=arguments.quiet or arguments.output_format != "text"
    )


def pick_profile(
    paths: Sequence[Path],
    profile: str | None,
    rules: Path | None,
    *,
    is_quiet: bool,
) -> Rules:
    """Return the rules for some models, and name a profile that was picked on stderr.

    Args:
        paths: The models.
        profile: What ``--profile`` says.
        rules: What ``--rules`` says.
        is_quiet: Whether to name nothing.

    Raises:
        RulesError: They cannot be used, or several profiles know the names.
        ModelError: A path does not exist or cannot be listed.
    """
    picked = pick_rules(paths, profile, rules)
    if picked.choice is not None and not is_quiet:
        print_lines([Line(picked.choice.describe(), err=True)])
    return picked
