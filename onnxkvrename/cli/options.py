"""Commands, their parameters and their help, made from the options that a request declares."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_args, get_origin

import click
from click.core import ParameterSource

from onnxkvrename.errors import KvRenameError, ModelError
from onnxkvrename.files.find import check_is_local
from onnxkvrename.files.read import is_directory, read_status
from onnxkvrename.options import (
    SIDES,
    Example,
    Option,
    find_conflict,
    list_options,
    read_hints,
)
from onnxkvrename.report.formats import list_formats
from onnxkvrename.rules.load import AUTO_PROFILE, list_profiles
from onnxkvrename.text import find_similar, quote_path

CONTEXT_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 120}
"""The settings of every command."""
_HYPHEN_IN_WORD = re.compile(r"(?<=\S)-(?=\S)")
_UNBROKEN_HYPHEN = "\N{NON-BREAKING HYPHEN}"
_Request = TypeVar("_Request")


class SideValues(NamedTuple):
    """The values of an option.

    Attributes:
        both: Those without a prefix, for both sides.
        prefill: Those of prefill alone.
        decode: Those of decode alone.
    """

    both: tuple[str, ...] = ()
    prefill: tuple[str, ...] = ()
    decode: tuple[str, ...] = ()


class UnbrokenFormatter(click.HelpFormatter):
    """Writes help in which no line is broken at a hyphen, as within a name."""

    def write_text(self, text: str) -> None:
        """Write paragraphs."""
        super().write_text(_HYPHEN_IN_WORD.sub(_UNBROKEN_HYPHEN, text))

    def write_dl(
        self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2
    ) -> None:
        """Write terms with what they mean."""
        unbroken = [(term, _HYPHEN_IN_WORD.sub(_UNBROKEN_HYPHEN, text)) for term, text in rows]
        super().write_dl(unbroken, col_max, col_spacing)

    def getvalue(self) -> str:
        """Return the text."""
        return super().getvalue().replace(_UNBROKEN_HYPHEN, "-")


class HelpContext(click.Context):
    """A context whose help is written by :class:`UnbrokenFormatter`."""

    formatter_class = UnbrokenFormatter


def write_examples(formatter: click.HelpFormatter, examples: Sequence[Example]) -> None:
    """Write a section of the help with command lines, each above what it does."""
    with formatter.section("Examples"):
        formatter.write_dl(examples, col_max=2)


class RequestCommand(click.Command):
    """A command whose parameters are the options of a request.

    Args:
        options: The options by the names of their fields, in the order of the help.
        examples: What its help shows first.
    """

    context_class = HelpContext

    def __init__(
        self, *args: Any, options: Mapping[str, Option], examples: Sequence[Example], **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.options = options
        self.examples = examples

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the arguments; a usage error if there is no model, or options contradict."""
        rest = super().parse_args(ctx, args)
        if not ctx.resilient_parsing:
            if ctx.params.get("models") == ():
                raise click.UsageError("no MODEL given: pass an .onnx file or a directory")
            self._check_combinations(ctx)
        return rest

    def _check_combinations(self, ctx: click.Context) -> None:
        sources = {name: ctx.get_parameter_source(name) for name in self.options}
        typed = {name for name in sources if sources[name] is ParameterSource.COMMANDLINE}
        variables = {name for name in sources if sources[name] is ParameterSource.ENVIRONMENT}
        for name in [each for each in variables if self._is_overruled(each, typed)]:
            variables.remove(name)
            del ctx.params[name]  # the request has its default
        conflict = find_conflict(self.options, typed | variables)
        if conflict is None:
            return
        spellings = {
            param.name: str(param.envvar) if param.name in variables else max(param.opts, key=len)
            for param in self.params
        }
        name, other = spellings[conflict.name], spellings[conflict.other]
        if not conflict.is_missing:
            raise click.UsageError(f"{name} and {other} cannot be used together{conflict.why}")
        needed = f"{other} {self.options[conflict.other].metavar or ''}".rstrip()
        raise KvRenameError(f"{name} requires {needed}{conflict.why}", hint=f"add `{needed}`")

    def _is_overruled(self, name: str, typed: set[str]) -> bool:
        """Return whether the variable of a field counts for nothing beside what is typed."""
        is_yielding = not typed.isdisjoint(self.options[name].yields_to)
        return is_yielding or find_conflict(self.options, {name, *typed}) is not None

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples, and the options section by section."""
        write_examples(formatter, self.examples)
        title = "Options"
        rows: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            option = self.options.get(param.name or "")
            title = option.section if option and option.section else title
            record = param.get_help_record(ctx)
            if isinstance(param, click.Option) and record is not None:
                rows.setdefault(title, []).append(record)
        for title, records in rows.items():
            with formatter.section(title):
                formatter.write_dl(records)


def declare_command(
    name: str, request: Callable[..., _Request], epilog: str, *examples: Example
) -> Callable[[Callable[[_Request], int]], click.Command]:
    """Return a decorator that makes a command of a function, which gets the request.

    Args:
        name: The name of the command.
        request: A named tuple; fields that are annotated with an option become parameters.
        epilog: The last lines of the help; its first ones are the docstring of the function.
        examples: What the help shows between them.
    """
    defaults: Mapping[str, Any] = getattr(request, "_field_defaults", {})
    options = list_options(request)
    hints = read_hints(request)

    def decorate(run: Callable[[_Request], int]) -> click.Command:
        return RequestCommand(
            name,
            params=[
                _build_parameter(field, get_args(hints[field])[0], option, defaults.get(field))
                for field, option in options.items()
            ],
            callback=lambda **values: run(request(**values)),
            help=run.__doc__,
            epilog=epilog,
            context_settings=CONTEXT_SETTINGS,
            options=options,
            examples=examples,
        )

    return decorate


def _build_parameter(name: str, kind: Any, option: Option, default: Any) -> click.Parameter:
    """Return the parameter of a field whose values are of some kind."""
    origin = get_origin(kind)
    words = [name, *option.flags.split()]
    variable: dict[str, Any] = (
        {"envvar": option.envvar, "show_envvar": True} if option.envvar else {}
    )
    if kind is bool:
        return VariableOption(words, is_flag=True, help=option.help, **variable)
    how: dict[str, Any] = {"metavar": option.metavar, "required": option.is_required}
    value_type = _choose_type(kind, option)
    if not option.flags:
        return click.Argument(words, type=value_type, nargs=-1 if origin is tuple else 1, **how)
    how["help"] = option.help
    if kind is SideValues:
        how["metavar"] = f"[SIDE:]{option.metavar}"
        return SideOption(words, multiple=True, **how)
    how["type"] = value_type
    if origin is tuple:
        return click.Option(words, multiple=True, **how)
    if origin is Mapping:
        return click.Option(words, multiple=True, callback=_parse_sizes, **how)
    how |= variable
    if option.shows_default:
        how |= {"default": default, "show_default": True}
    return SingleOption(words, list_names=NAMES.get(option.names), **how)


def _choose_type(kind: Any, option: Option) -> click.ParamType[Any]:
    """Return the type of each value of an option."""
    if option.names == "formats" or option.choices:
        return click.Choice(option.choices or list_formats())
    kinds = get_args(kind) or (kind,)
    if get_origin(kind) is Mapping:
        return click.STRING
    if int in kinds:
        return CountType(1, option.most)
    if Path not in kinds:
        return click.STRING
    if option.writes == "directory":
        return OutputDirectory()
    if option.writes:
        return OutputFile()
    return NonEmptyPath()


def _parse_sizes(
    ctx: click.Context, param: click.Parameter, value: Sequence[str]
) -> Mapping[str, int]:
    return parse_dim_sizes(value)


def _list_consumers() -> Sequence[str]:
    from onnxkvrename.handoff.find_consumers import list_consumers  # not for a plain rename

    return list_consumers()


NAMES: Mapping[str, Callable[[], Sequence[str]]] = {
    "consumers": _list_consumers,
    "formats": list_formats,
    "profiles": list_profiles,
    "profiles, auto": lambda: (*list_profiles(), AUTO_PROFILE),
}
"""Lists of names that options take, by what options call them."""


def suggest_option(options: Mapping[str, Option], word: str) -> str | None:
    """Return the hint "did you mean --target vllm-qaic?" for a word typed without its option."""
    for option in options.values():
        flags = option.flags.split()
        if f"--{word}" in flags:
            return f"did you mean --{word}?"
        if option.names and word in NAMES[option.names]():
            return f"did you mean {flags[-1]} {word}?"
    return None


class NonEmptyPath(click.Path):
    """A local path. It is not empty, as from a variable that is not set: that would mean ``.``."""

    is_output = False

    def __init__(self) -> None:
        # Whoever opens it has the better message.
        super().__init__(readable=False, path_type=Path)

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


class CountType(click.IntRange):
    """A whole number, in digits alone."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number; a usage error for another text, such as ``1k``."""
        try:
            int(value)
        except ValueError:
            self.fail(f"{value!r} is not a whole number of at least 1", param, ctx)
        return super().convert(value, param, ctx)


class OutputDirectory(NonEmptyPath):
    """A directory to write into, which need not exist."""

    is_output = True


class OutputFile(NonEmptyPath):
    """A file to write; ``directory/`` is not one, and ``-`` is an error, not a file called so."""

    is_output = True

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path; a usage error for one that ends like a directory's, and for stdout."""
        if value == "-":
            self.fail("cannot write to stdout: pass the path of a file", param, ctx)
        if value and isinstance(value, str) and os.path.basename(value) in ("", ".", ".."):
            others = ctx.command.params if ctx is not None else ()
            options = (each.opts[0] for each in others if isinstance(each.type, OutputDirectory))
            hint = "".join(f" ({option} {quote_path(value)} writes into it)" for option in options)
            self.fail(f"{value} names a directory, not a file{hint}", param, ctx)
        return super().convert(value, param, ctx)


class VariableOption(click.Option):
    """An option that an environment variable may set, and whose help may have ``{names}``.

    Args:
        list_names: Lists these names; called for the help only.
    """

    def __init__(
        self, *args: Any, list_names: Callable[[], Sequence[str]] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.list_names = list_names

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Return the option and its help."""
        template = self.help or ""
        if self.list_names is not None:
            self.help = template.replace("{names}", ", ".join(self.list_names()))
        record = super().get_help_record(ctx)
        self.help = template
        return record

    def get_error_hint(self, ctx: click.Context | None) -> str:
        """Return where a wrong value is from: the option, or the variable."""
        is_typed = (
            ctx is None or ctx.get_parameter_source(self.name) is not ParameterSource.ENVIRONMENT
        )
        return click.Parameter.get_error_hint(self, ctx) if is_typed else str(self.envvar)


class SingleOption(VariableOption):
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


class SideOption(click.Option):
    """An option that may be repeated, with ``prefill:`` or ``decode:`` before a value."""

    def process_value(self, ctx: click.Context, value: Any) -> SideValues:
        """Return the values by side; a usage error for another side."""
        values: dict[str, dict[str, None]] = {"": {}, "prefill": {}, "decode": {}}
        for text in super().process_value(ctx, value):
            prefix, separator, rest = text.partition(":")
            side, rest = (prefix, rest) if separator and prefix in SIDES else ("", text)
            meant = find_similar(prefix, SIDES, cutoff=0.8) if separator and not side else None
            if meant is not None:
                raise click.UsageError(
                    f"{max(self.opts, key=len)} {prefix + ':'!r}: no such side "
                    f"(did you mean {meant}:?)"
                )
            values[side][rest] = None
        return SideValues(*map(tuple, values.values()))


def parse_dim_sizes(texts: Sequence[str], prefix: str = "") -> dict[str, int]:
    """Return the sizes that ``--dim`` sets.

    Args:
        texts: Texts of the form ``SYMBOL=SIZE``.
        prefix: What was typed before each text, for messages.

    Raises:
        click.UsageError: A text has another form, or a symbol has two sizes.
    """
    sizes: dict[str, int] = {}
    for text in texts:
        symbol, size = _parse_dim_size(text, prefix)
        if sizes.setdefault(symbol, size) != size:
            raise click.UsageError(
                f"--dim {prefix}{symbol} has two sizes: {sizes[symbol]} and {size}; pass one"
            )
    return sizes


def _parse_dim_size(text: str, prefix: str) -> tuple[str, int]:
    symbol, _, size = text.rpartition("=")
    if not symbol or not re.fullmatch("-?[0-9]+", size):
        raise click.UsageError(f"--dim {prefix + text!r}: pass SYMBOL=SIZE, for example ctx_len=32")
    if len(size) > 10 or not 0 < int(size) < 1 << 31:
        raise click.UsageError(
            f"--dim {prefix + text!r}: a size must be at least 1 and less than 2^31"
        )
    return symbol, int(size)
