"""Options and arguments that commands share."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from onnxkvrename.report.formats import list_formats

_MAX_JOBS = 10_000
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

CONTEXT_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
"""The settings of every command."""


class NonEmptyPath(click.Path):
    """A path that is not empty, as from a variable that is not set: that would mean ``.``."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path; a usage error for an empty one."""
        if value == "":
            self.fail("an empty path: is a variable not set?", param, ctx)
        return super().convert(value, param, ctx)


class OutputFile(NonEmptyPath):
    """A file to write; ``directory/`` is not one."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path; a usage error for one that ends like a directory's."""
        if isinstance(value, str) and value.endswith(("/", os.sep)):
            self.fail(f"{value} is a directory: name a file", param, ctx)
        return super().convert(value, param, ctx)


class ConsumerOption(click.Option):
    """An option whose help lists all consumers.

    Plug-ins are looked for when the help is shown: no other run should spend the time.
    """

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Return the option and its help."""
        from onnxkvrename.handoff.find_consumers import list_consumers  # for the help only

        self.help = f"The consumer, one of: {', '.join(list_consumers())}."
        return super().get_help_record(ctx)


def add_models_argument() -> Decorator:
    """Add the files and directories to work on."""
    return click.argument(
        "models", nargs=-1, metavar="MODEL...", type=NonEmptyPath(path_type=Path), required=False
    )


def add_profile_option() -> Decorator:
    """Add ``--profile``, built-in rules."""
    return click.option(
        "--profile",
        metavar="NAME",
        default="qeff",
        show_default=True,
        help="Built-in rules for how buffers are called.",
    )


def add_rules_option() -> Decorator:
    """Add ``--rules``, a file with rules of the user's own."""
    return click.option(
        "--rules",
        metavar="FILE",
        type=NonEmptyPath(path_type=Path),
        help="Rules of your own, in TOML like a profile's.",
    )


def add_format_option(default: str = "text") -> Decorator:
    """Add ``--format``, with a choice of all formats there are."""
    formats = list_formats()
    return click.option(
        "--format",
        "output_format",
        metavar="FORMAT",
        type=click.Choice(formats),
        default=default,
        show_default=True,
        help=f"How to answer: {', '.join(formats)}.",
    )


def add_jobs_option() -> Decorator:
    """Add ``--jobs``, the number of processes."""
    return click.option(
        "--jobs",
        metavar="N",
        type=click.IntRange(1, _MAX_JOBS),
        help="Processes to work in; by default one for each core, if there are models enough.",
    )


def add_no_set_option() -> Decorator:
    """Add ``--no-set``, which skips the checks across windows."""
    return click.option(
        "--no-set", is_flag=True, help="Do not hold the windows of one model against each other."
    )


def add_consumer_option() -> Decorator:
    """Add ``--target`` for a command that needs a consumer."""
    from onnxkvrename.handoff.find_consumers import DEFAULT_CONSUMER  # not for a plain rename

    return click.option(
        "--target", cls=ConsumerOption, metavar="NAME", default=DEFAULT_CONSUMER, show_default=True
    )


def add_strict_option() -> Decorator:
    """Add ``--strict``, which turns warnings into errors."""
    return click.option("--strict", is_flag=True, help="Treat warnings as errors.")


def add_quiet_option() -> Decorator:
    """Add ``--quiet``, which leaves findings and errors only."""
    return click.option("-q", "--quiet", is_flag=True, help="Say only what is, or may be, wrong.")


def add_verbose_option(text: str) -> Decorator:
    """Add ``--verbose`` with its help; it also shows where a bug was raised."""
    return click.option("-v", "--verbose", is_flag=True, help=text)


def add_dim_option(text: str) -> Decorator:
    """Add ``--dim``, sizes of symbolic dimensions for :func:`parse_dim_sizes`."""
    return click.option("--dim", "dims", metavar="SYMBOL=SIZE", multiple=True, help=text)


def parse_dim_sizes(texts: Sequence[str]) -> dict[str, int]:
    """Return the sizes that ``--dim`` gives to symbols.

    Args:
        texts: Texts of the form ``SYMBOL=SIZE``.

    Raises:
        click.UsageError: A text has another form, or a symbol has two sizes.
    """
    sizes: dict[str, int] = {}
    for text in texts:
        symbol, size = _parse_dim_size(text)
        if sizes.setdefault(symbol, size) != size:
            raise click.UsageError(f"--dim {symbol} is given as {sizes[symbol]} and as {size}")
    return sizes


def _parse_dim_size(text: str) -> tuple[str, int]:
    symbol, _, size = text.rpartition("=")
    if not symbol or not re.fullmatch("-?[0-9]+", size):
        raise click.UsageError(f"--dim {text!r}: say SYMBOL=SIZE, for example ctx_len=32")
    if len(size) > 10 or not 0 < int(size) < 1 << 31:
        raise click.UsageError(f"--dim {text!r}: a size is 1 or more, and less than 2^31")
    return symbol, int(size)


def add_compile_options() -> Decorator:
    """Add ``--dim``, ``--specializations`` and ``--custom-io``: what is known of a compile."""
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


def add_full_transfer_option(subject: str = "The consumer") -> Decorator:
    """Add ``--full-transfer``: workers hand over the whole of each buffer."""
    return click.option(
        "--full-transfer",
        is_flag=True,
        help=f"{subject} moves all of each buffer, whatever the prompt: "
        "VLLM_QAIC_USE_FULL_KV_TRANSFER=1 is set on both sides.",
    )
