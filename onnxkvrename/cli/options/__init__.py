"""Options and arguments that commands share."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

from onnxkvrename.cli.options.sides import add_side_option
from onnxkvrename.errors import KvRenameError, ModelError
from onnxkvrename.findings import format_list, quote_path
from onnxkvrename.report.formats import list_formats
from onnxkvrename.rules.find_models import check_is_local
from onnxkvrename.rules.profile import Rules
from onnxkvrename.storage.read import is_directory, read_status

_MAX_JOBS = 10_000
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

CONTEXT_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
"""The settings of every command."""


class NonEmptyPath(click.Path):
    """A local path. It is not empty, as from a variable that is not set: that would mean ``.``."""

    is_output = False

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(readable=False, **kwargs)  # whoever opens it has the better message

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path; an error for an empty one, for a URL, and for ``file/``."""
        if value == "":
            self.fail("an empty path: is a variable not set?", param, ctx)
        if isinstance(value, str):
            check_is_local(value, is_output=self.is_output)
            ends_like_directory = os.path.basename(value) in ("", ".")
            if ends_like_directory and read_status(Path(value)) and not is_directory(Path(value)):
                hint = f"pass {quote_path(str(Path(value)))}"
                raise ModelError("not a directory", path=value, hint=hint)
        return super().convert(value, param, ctx)


class OutputDirectory(NonEmptyPath):
    """A directory to write into, which need not exist."""

    is_output = True


class OutputFile(NonEmptyPath):
    """A file to write; ``directory/`` is not one.

    Args:
        directory_option: The option that writes into a directory, if the command has one.
        takes_stdout: Whether ``-`` is stdout. Otherwise it is an error, not a file called ``-``.
    """

    is_output = True

    def __init__(self, directory_option: str | None = None, *, takes_stdout: bool = False) -> None:
        super().__init__(path_type=Path)
        self.directory_option = directory_option
        self.takes_stdout = takes_stdout

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path; a usage error for one that ends like a directory's, and for stdout."""
        if value == "-" and not self.takes_stdout:
            self.fail("cannot write to stdout: pass the path of a file", param, ctx)
        if value and isinstance(value, str) and os.path.basename(value) in ("", ".", ".."):
            hint = f" ({self.directory_option} {quote_path(value)} writes into it)"
            hint = hint if self.directory_option else ""
            self.fail(f"{value} names a directory, not a file{hint}", param, ctx)
        return super().convert(value, param, ctx)


class SingleOption(click.Option):
    """An option with one value: two different ones are an error, so that none is dropped."""

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        """Let the parser keep every value that is typed."""
        parser.add_option(self, self.opts, self.name, action="append", nargs=self.nargs)

    def consume_value(self, ctx: click.Context, opts: Mapping[str, Any]) -> Any:
        """Return the value and where it is from; a usage error for two, or for an option."""
        values = opts.get(self.name or "")
        if not isinstance(values, list):
            return super().consume_value(ctx, opts)
        if not ctx.resilient_parsing and self._is_option(values[-1], ctx):
            option = max(self.opts, key=len)
            raise click.BadOptionUsage(option, f"option '{option}' requires an argument", ctx)
        different = list(dict.fromkeys(values))
        if len(different) > 1 and not ctx.resilient_parsing:
            option, (first, second) = max(self.opts, key=len), different[:2]
            raise click.UsageError(f"{option} has two values: {first} and {second}; pass one")
        return super().consume_value(ctx, {**opts, self.name: values[-1]})

    @staticmethod
    def _is_option(value: Any, ctx: click.Context) -> bool:
        """Return whether the value is one of the other options, before which a value is missing."""
        if not isinstance(value, str) or not value.startswith("-"):
            return False
        is_word = value in (ctx.obj or ())  # not a part of one, as in --rules=-n
        return is_word and any(value in param.opts for param in ctx.command.params)


add_single_option = partial(click.option, cls=SingleOption)


class NamesOption(SingleOption):
    """An option whose help has ``{names}``: what a shell completes, plug-ins too, for help only."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Return the option and its help."""
        names = ", ".join(item.value for item in self.shell_complete(ctx, ""))
        template = self.help
        self.help = (template or "").replace("{names}", names)
        try:
            return super().get_help_record(ctx)
        finally:
            self.help = template


add_names_option = partial(click.option, cls=NamesOption, metavar="NAME")


class SectionedCommand(click.Command):
    """A command whose help shows its options in sections.

    Args:
        sections: For each section the names of its parameters. Other options belong to the last.
    """

    def __init__(self, *args: Any, sections: Mapping[str, Sequence[str]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.sections = sections

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, section by section."""
        places = {name: title for title, names in self.sections.items() for name in names}
        last = list(self.sections)[-1]
        rows: dict[str, list[tuple[str, str]]] = {title: [] for title in self.sections}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if isinstance(param, click.Option) and record is not None:
                rows[places.get(param.name or "", last)].append(record)
        for title, records in rows.items():
            with formatter.section(title):
                formatter.write_dl(records)


def complete_consumer(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return the consumers that a shell may complete."""
    from onnxkvrename.handoff.find_consumers import list_consumers  # for a shell only

    return [name for name in list_consumers() if name.startswith(incomplete)]


def complete_profile(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return the profiles that a shell may complete."""
    from onnxkvrename.rules.load import list_profiles  # for a shell only

    return [name for name in list_profiles() if name.startswith(incomplete)]


def _complete_profile_or_auto(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[str]:
    from onnxkvrename.rules.load import AUTO_PROFILE  # for a shell only

    auto = [AUTO_PROFILE] if AUTO_PROFILE.startswith(incomplete) else []
    return [*complete_profile(ctx, param, incomplete), *auto]


def check_exclusive(option: str, is_given: object, other: str, other_is_given: object) -> None:
    """Raise :class:`click.UsageError` if both options are given."""
    if is_given and other_is_given:
        raise click.UsageError(f"{option} and {other} cannot be used together")


def check_one_model(requirement: str, models: Sequence[str]) -> None:
    """Raise :class:`KvRenameError` for several models, where something requires one."""
    if len(models) > 1:
        raise KvRenameError(
            f"{requirement}, not {len(models):,}: {format_list(models, limit=3)}",
            hint=f"pass one of them, such as {quote_path(models[0])}",
        )


def _refuse_with(option: str, other: str) -> Callable[[click.Context, click.Parameter, Any], Any]:
    """Return a callback that refuses an option together with another one, typed before it."""

    def check(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
        check_exclusive(option, value, other, ctx.params.get(other.removeprefix("--")))
        return value

    return check


def add_models_argument() -> Decorator:
    """Add the files and directories to work on, at least one."""

    def require(ctx: click.Context, param: click.Parameter, paths: tuple[Path, ...]) -> Any:
        if not paths and not ctx.resilient_parsing:
            raise click.UsageError("no MODEL given: pass an .onnx file or a directory")
        return paths

    return click.argument(
        "models",
        nargs=-1,
        metavar="MODEL...",
        type=NonEmptyPath(path_type=Path),
        required=False,
        callback=require,
    )


def add_profile_option() -> Decorator:
    """Add ``--profile``, built-in rules."""
    return add_names_option(
        "--profile",
        shell_complete=_complete_profile_or_auto,
        callback=_refuse_with("--profile", "--rules"),
        help="Rules for the names of buffers: {names} (those that know the names). By default "
        "qeff, or those that know the names if qeff does not.",
    )


def add_conversion_option() -> Decorator:
    """Add ``--to``, the profile whose names the buffers get."""
    return add_names_option(
        "--to",
        shell_complete=complete_profile,
        help="Give the buffers the names of this profile, if they are made and laid out as it "
        "says: {names}. They keep their token, unless --prefix or --strip is given.",
    )


def add_pairs_option() -> Decorator:
    """Add ``--pairs``, which finds the buffers by the graph itself."""
    return add_single_option(
        "--pairs",
        type=click.Choice(["dataflow"]),
        help="Find the buffers by the graph itself instead of by their names: each input that an "
        "output is a later state of.",
    )


def add_target(rules: Rules, profile: str | None) -> Rules:
    """Return rules that give buffers the names of another profile, if one is named.

    Raises:
        RulesError: There is no such profile, or it cannot be used.
    """
    if profile is None:
        return rules
    from onnxkvrename.rules.load import load_rules

    return rules._replace(target=load_rules(profile))


def add_rules_option() -> Decorator:
    """Add ``--rules``, a file with rules of the user's own."""
    return add_single_option(
        "--rules",
        metavar="FILE",
        type=NonEmptyPath(path_type=Path),
        callback=_refuse_with("--rules", "--profile"),
        help="Your own rules, in TOML like a profile.",
    )


def add_format_option(default: str = "text") -> Decorator:
    """Add ``--format``, with a choice of all formats there are."""
    formats = list_formats()
    return add_single_option(
        "--format",
        "output_format",
        metavar="FORMAT",
        type=click.Choice(formats),
        default=default,
        show_default=True,
        help=f"Output format: {', '.join(formats)}.",
    )


def add_jobs_option() -> Decorator:
    """Add ``--jobs``, the number of processes."""
    return add_single_option(
        "--jobs",
        metavar="N",
        type=click.IntRange(1, _MAX_JOBS),
        help="Number of processes; by default one for each core, if there are enough models.",
    )


def add_no_set_option() -> Decorator:
    """Add ``--no-set``, which skips the checks across windows."""
    return click.option(
        "--no-set", is_flag=True, help="Skip the checks across the windows of one model."
    )


def add_consumer_option() -> Decorator:
    """Add ``--target`` for a command that needs a consumer."""
    from onnxkvrename.handoff.find_consumers import DEFAULT_CONSUMER  # not for a plain rename

    return add_names_option(
        "--target",
        default=DEFAULT_CONSUMER,
        show_default=True,
        shell_complete=complete_consumer,
        help="The consumer, one of: {names}.",
    )


def add_strict_option() -> Decorator:
    """Add ``--strict``, which turns warnings into errors."""
    return click.option("--strict", is_flag=True, help="Treat warnings as errors.")


def add_quiet_option() -> Decorator:
    """Add ``--quiet``, which leaves findings and errors only."""
    check = _refuse_with("--quiet", "--verbose")
    text = "Print findings and errors only."
    return click.option("-q", "--quiet", is_flag=True, callback=check, help=text)


def add_verbose_option(text: str) -> Decorator:
    """Add ``--verbose`` with its help; it also shows where a bug was raised."""
    check = _refuse_with("--verbose", "--quiet")
    return click.option("-v", "--verbose", is_flag=True, callback=check, help=text)


def add_dim_option(text: str) -> Decorator:
    """Add ``--dim``, sizes of symbolic dimensions for :func:`.sizes.parse_dim_sizes`."""
    return click.option("--dim", "dims", metavar="SYMBOL=SIZE", multiple=True, help=text)


def combine_options(*options: Decorator) -> Decorator:
    """Add several options; the help lists them in this order."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


_DIM_HELP = "The size of a symbolic dimension, e.g. ctx_len=4096. May be repeated."
_COMPILE_FILES = {
    "--specializations": "Sizes from a compile's specializations.json.",
    "--custom-io": "Dtypes from a compile's custom_io.yaml, instead of the graph's.",
}


def add_compile_options() -> Decorator:
    """Add ``--dim``, ``--specializations`` and ``--custom-io``: what is known of a compile."""
    path_type = NonEmptyPath(path_type=Path)
    files = (
        add_single_option(option, metavar="FILE", type=path_type, help=text)
        for option, text in _COMPILE_FILES.items()
    )
    return combine_options(add_dim_option(_DIM_HELP), *files)


def add_side_compile_options() -> Decorator:
    """Add the same options for both sides of a hand-off, or for one of them."""
    path_type = NonEmptyPath(path_type=Path)
    files = (
        add_side_option(option, metavar="FILE", value_type=path_type, is_single=True, help=text)
        for option, text in _COMPILE_FILES.items()
    )
    sizes = add_side_option("--dim", "dims", metavar="SYMBOL=SIZE", help=_DIM_HELP)
    return combine_options(sizes, *files)


def add_full_transfer_option(subject: str = "The consumer") -> Decorator:
    """Add ``--full-transfer``: workers hand over the whole of each buffer."""
    return click.option(
        "--full-transfer",
        is_flag=True,
        help=f"{subject} transfers all of each buffer, whatever the prompt: "
        "VLLM_QAIC_USE_FULL_KV_TRANSFER=1 is set on both sides.",
    )
