"""What the commands have in common to be asked with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]
FORMATS = ("text", "json", "github")


class AnyPath(click.Path):
    """A path; not an empty one, as from a variable that is not set: it would mean ``.``."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path, or a usage error."""
        if value == "":
            self.fail("an empty path: is a variable not set?", param, ctx)
        return super().convert(value, param, ctx)


def models() -> Decorator:
    """The files and directories to work on."""
    return click.argument(
        "models", nargs=-1, metavar="MODEL...", type=AnyPath(path_type=Path), required=False
    )


def profile() -> Decorator:
    """The built-in rules."""
    return click.option(
        "--profile",
        metavar="NAME",
        default="qeff",
        show_default=True,
        help="Built-in rules for how buffers are called.",
    )


def rules() -> Decorator:
    """Rules of the user's own."""
    return click.option(
        "--rules",
        metavar="FILE",
        type=AnyPath(path_type=Path),
        help="Rules of your own, in TOML like a profile's.",
    )


def form(*forms: str) -> Decorator:
    """How to answer."""
    return click.option(
        "--format",
        "form",
        type=click.Choice(forms or FORMATS),
        default="text",
        show_default=True,
        help="How to answer.",
    )


def jobs() -> Decorator:
    """How many processes to work in."""
    return click.option(
        "--jobs",
        metavar="N",
        type=click.IntRange(1),
        help="Processes to work in; by default one for each core, if there are models enough.",
    )


def no_set() -> Decorator:
    """Leave out what windows show together."""
    return click.option(
        "--no-set", is_flag=True, help="Do not hold the windows of one model against each other."
    )


def strict() -> Decorator:
    """Mind warnings."""
    return click.option("--strict", is_flag=True, help="Treat warnings as errors.")


def quiet() -> Decorator:
    """Say less."""
    return click.option("-q", "--quiet", is_flag=True, help="Say only what is, or may be, wrong.")


CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
"""Of every command."""
