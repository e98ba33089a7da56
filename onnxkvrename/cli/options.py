"""What the commands have in common to be asked with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]
FORMATS = ("text", "json", "github")


class NonEmptyPath(click.Path):
    """A path; not an empty one, as from a variable that is not set: it would mean ``.``."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path, or a usage error."""
        if value == "":
            self.fail("an empty path: is a variable not set?", param, ctx)
        return super().convert(value, param, ctx)


def add_models_argument() -> Decorator:
    """The files and directories to work on."""
    return click.argument(
        "models", nargs=-1, metavar="MODEL...", type=NonEmptyPath(path_type=Path), required=False
    )


def add_profile_option() -> Decorator:
    """The built-in rules."""
    return click.option(
        "--profile",
        metavar="NAME",
        default="qeff",
        show_default=True,
        help="Built-in rules for how buffers are called.",
    )


def add_rules_option() -> Decorator:
    """Rules of the user's own."""
    return click.option(
        "--rules",
        metavar="FILE",
        type=NonEmptyPath(path_type=Path),
        help="Rules of your own, in TOML like a profile's.",
    )


def add_format_option(*forms: str, default: str = "text") -> Decorator:
    """How to answer."""
    return click.option(
        "--format",
        "form",
        type=click.Choice(forms or FORMATS),
        default=default,
        show_default=True,
        help="How to answer.",
    )


def add_jobs_option() -> Decorator:
    """How many processes to work in."""
    return click.option(
        "--jobs",
        metavar="N",
        type=click.IntRange(1),
        help="Processes to work in; by default one for each core, if there are models enough.",
    )


def add_no_set_option() -> Decorator:
    """Leave out what windows show together."""
    return click.option(
        "--no-set", is_flag=True, help="Do not hold the windows of one model against each other."
    )


def add_strict_option() -> Decorator:
    """Mind warnings."""
    return click.option("--strict", is_flag=True, help="Treat warnings as errors.")


def add_dim_option(text: str) -> Decorator:
    """Sizes of symbolic dimensions; :func:`sizes` reads them."""
    return click.option("--dim", "dims", metavar="SYMBOL=SIZE", multiple=True, help=text)


def parse_dim_sizes(given: Sequence[str]) -> dict[str, int]:
    """What ``--dim`` says. Raises :class:`click.UsageError` for another form, and for two sizes."""
    found: dict[str, int] = {}
    for text in given:
        symbol, size = _parse_dim_size(text)
        if found.setdefault(symbol, size) != size:
            raise click.UsageError(f"--dim {symbol} is given as {found[symbol]} and as {size}")
    return found


def _parse_dim_size(text: str) -> tuple[str, int]:
    symbol, _, size = text.rpartition("=")
    if not symbol or not size.lstrip("-").isdecimal() or not size.isascii():
        raise click.UsageError(f"--dim {text!r}: say SYMBOL=SIZE, for example ctx_len=32")
    if len(size) > 10 or not 0 < int(size) < 1 << 31:
        raise click.UsageError(f"--dim {text!r}: a size is 1 or more, and less than 2^31")
    return symbol, int(size)


def add_compile_options() -> Decorator:
    """What a compile makes of the models: sizes and precisions."""
    options = (
        add_dim_option("The size of a symbolic dimension, e.g. ctx_len=4096. May be repeated."),
        click.option(
            "--specializations",
            metavar="FILE",
            type=NonEmptyPath(path_type=Path),
            help="Sizes from a compile's specializations.json.",
        ),
        click.option(
            "--custom-io",
            metavar="FILE",
            type=NonEmptyPath(path_type=Path),
            help="Dtypes from a compile's custom_io.yaml, in the place of the graph's.",
        ),
    )

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def add_full_transfer_option(who: str = "The consumer") -> Decorator:
    """What moves of each buffer, as far as a consumer's workers are told."""
    return click.option(
        "--full-transfer",
        is_flag=True,
        help=f"{who} moves all of each buffer, whatever the prompt: "
        "VLLM_QAIC_USE_FULL_KV_TRANSFER=1 is set on both sides.",
    )


def add_quiet_option() -> Decorator:
    """Say less."""
    return click.option("-q", "--quiet", is_flag=True, help="Say only what is, or may be, wrong.")


CONTEXT_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
"""Of every command."""
