"""The command line: finds the command, runs it, and turns what it raises into an answer."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from importlib import import_module
from itertools import pairwise
from types import FrameType
from typing import Any

import click

from onnxkvrename import __version__
from onnxkvrename.cli.options import (
    CONTEXT_SETTINGS,
    HelpContext,
    RequestCommand,
    suggest_option,
    write_examples,
)
from onnxkvrename.cli.output import (
    occupy_closed_streams,
    print_answer,
    print_lines,
    stdout_guard,
)
from onnxkvrename.errors import KvRenameError, MissingFileError
from onnxkvrename.files.read import is_occupied
from onnxkvrename.findings import decide_exit_code
from onnxkvrename.options import FORMAT, Example
from onnxkvrename.report.formats import Answer, Line, list_formats
from onnxkvrename.report.formats.text import build_error_line
from onnxkvrename.text import find_similar, quote_word, suggest_similar

_COMMAND_GROUPS = {
    "Change models": {
        "rename": "Rename KV buffers (the default: the word can be left out).",
    },
    "Check models": {
        "verify": "Check whether each KV buffer is retained, and fits its consumer.",
        "compare": "Check whether prefill and decode fit together.",
    },
    "Show and explain": {
        "inspect": "Show what is in a model.",
        "pairs": "Find caches and states in the graph, under any name.",
        "explain": "Explain a finding, such as KV402.",
        "profiles": "List built-in rules, or print some.",
    },
}
"""The commands, by what people want of them."""
COMMANDS = {name: does for group in _COMMAND_GROUPS.values() for name, does in group.items()}
"""Each command, and what it does. The first is the default; each is a module of this package,
which is loaded when the command runs."""
DEFAULT_COMMAND = next(iter(COMMANDS))
EXAMPLES = (
    Example("onnxkvrename model.onnx --target vllm-qaic -n", "Show what would change."),
    Example("onnxkvrename exports/ --target vllm-qaic -d renamed/", "Rename all models, or none."),
    Example("onnxkvrename verify exports/", "Prove that every KV buffer is retained."),
)
_HELP = "help"
"""The word that asks for the help of what follows it."""
_LIST_COMMANDS = "`onnxkvrename --help` lists all commands"
_WORDS_FOR_STRIP = frozenset(("undo", "revert", "restore"))
"""Words that people type for the option that restores an export."""
_TOKEN_OPTIONS = frozenset(("--prefix", "--token", "--target"))
_EAGER_OPTIONS = frozenset(("-h", "--help", "-V", "--version"))
_VERBOSE = re.compile("--verbose|-[a-z]*v[a-z]*")
"""``-v``, alone or as in ``-nv``."""


class Program(click.Group):
    """All commands; what does not begin with one is for the default command."""

    context_class = HelpContext

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the command's name, or put in that of the default command."""
        if args and args[0] not in COMMANDS and args[0] not in _EAGER_OPTIONS:
            args = [DEFAULT_COMMAND, *args]
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Load a command."""
        return load_command(cmd_name).command if cmd_name in COMMANDS else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write what each command does."""
        for title, group in _COMMAND_GROUPS.items():
            with formatter.section(title):
                formatter.write_dl(
                    [(f"{name:{max(map(len, COMMANDS))}}", group[name]) for name in group]
                )

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples, the commands, the main options of the default one, and the own."""
        write_examples(formatter, EXAMPLES)
        self.format_commands(ctx, formatter)
        default: RequestCommand = load_command(DEFAULT_COMMAND).command
        main = [param for param in default.params if default.options[param.name or ""].is_main]
        with formatter.section(f"Main options of {DEFAULT_COMMAND}"):
            context = click.Context(default, parent=ctx)
            records = (
                *(param.get_help_record(context) for param in main),
                *(param.get_help_record(ctx) for param in self.get_params(ctx)),
            )
            formatter.write_dl([record for record in records if record is not None])


def _list_models() -> list[str]:
    """Return the models and directories in the working directory."""
    with suppress(OSError), os.scandir() as entries:
        return [entry.name for entry in entries if entry.name.endswith(".onnx") or entry.is_dir()]
    return []


@click.group(
    "onnxkvrename",
    cls=Program,
    context_settings=CONTEXT_SETTINGS,
    options_metavar="",
    subcommand_metavar="[COMMAND] MODEL... [OPTIONS]",
    epilog="`onnxkvrename help rename` shows all options of rename, `onnxkvrename help COMMAND` "
    "those of another command.",
)
@click.version_option(__version__, "-V", "--version", message="onnxkvrename %(version)s")
def program() -> None:
    """Rename the KV-cache buffers of exported ONNX models so that vLLM can select them.
    MODEL is an .onnx file, or a directory: every .onnx file below it.
    """


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code.

    Args:
        argv: The arguments; by default those of this process.

    Returns:
        The exit code. Whatever is raised becomes an error message and a code; a bug has its
        traceback before it under ``--verbose``.
    """
    occupy_closed_streams()
    args = list(sys.argv[1:] if argv is None else argv)
    asks_for_help = args[:1] == [_HELP]
    if asks_for_help:
        args = [*(word for word in args if word != _HELP), "--help"]
    is_named = bool(args) and args[0] in COMMANDS
    name = args[0] if is_named else DEFAULT_COMMAND
    try:
        with _interrupt_on_signals(), _print_warnings(), _guard_help_output(args):
            load_command(name)  # here, as click would print a line if this is interrupted
            if asks_for_help and not is_named and _may_be_command(args[0]):
                raise _build_command_error(args[0])
            if not is_named and args:
                _check_command_name(args)
            code = program.main(args, prog_name="onnxkvrename", standalone_mode=False, obj=args)
        return int(code or 0)
    except click.exceptions.NoArgsIsHelpError as error:
        print_lines(Line(line, err=True) for line in error.message.splitlines())
        return decide_exit_code(not_done=True)
    except SystemExit as end:  # what a shell completes is printed, and nothing is run
        return int(end.code or 0)
    except click.ClickException as error:
        failure = _build_usage_failure(name, error, args)
    except KvRenameError as error:
        failure = error
        if isinstance(error, MissingFileError):
            failure.hint = _suggest_word(name, args, error.path or "") or error.hint
            failure.hint = failure.hint or _suggest_token(name, args, error.path or "")
    except (KeyboardInterrupt, click.Abort) as stop:
        cause = stop.__cause__ or stop  # click makes an Abort of an interrupt
        is_told = isinstance(cause, KeyboardInterrupt) and cause.args
        state = str(cause) if is_told else "no model was changed"
        failure = KvRenameError(f"interrupted: {state}; run the same command again")
        return _report_failure(name, args, failure, decide_exit_code(interrupted=True))
    except (ImportError, OSError) as error:  # of a module that only now is needed
        failure = KvRenameError(f"a part of onnxkvrename cannot be loaded: {error}")
    except Exception as error:
        failure = _build_bug_failure(error, is_verbose=any(map(_VERBOSE.fullmatch, args)))
    return _report_failure(name, args, failure, decide_exit_code(not_done=True))


@contextmanager
def _print_warnings() -> Iterator[None]:
    """Print the warnings of libraries, which may quote names, as all else is printed."""

    def show(message: Warning | str, category: type[Warning], *where: object) -> None:
        print_lines([Line(f"{category.__name__}: {message}", err=True)])

    with warnings.catch_warnings():
        warnings.showwarning = show  # type: ignore[assignment]
        yield


def _build_bug_failure(error: Exception, *, is_verbose: bool) -> KvRenameError:
    """Return the error for an exception that nothing expects; print its traceback if asked to."""
    import traceback  # only for a bug

    if is_verbose:
        text = "".join(traceback.format_exception(error))
        print_lines(Line(line, err=True) for line in text.rstrip("\n").split("\n"))
    place = traceback.extract_tb(error.__traceback__)[-1]
    return KvRenameError(
        f"a bug in onnxkvrename: {type(error).__name__}: {error}",
        hint=f"{os.path.basename(place.filename)}, line {place.lineno}; please report it",
    )


def _guard_help_output(args: Sequence[str]) -> AbstractContextManager[None]:
    """Guard stdout where click itself prints."""
    return stdout_guard() if _EAGER_OPTIONS & set(args) else nullcontext()


def _check_command_name(args: Sequence[str]) -> None:
    """Raise :class:`KvRenameError` for a first word that is like a command, and no file."""
    word = args[0]
    if _may_be_command(word):
        hints = (
            suggest_similar(word, COMMANDS),
            _suggest_word(DEFAULT_COMMAND, args, word),
            suggest_similar(word, _list_models()),
            _suggest_token(DEFAULT_COMMAND, args, word),
            _LIST_COMMANDS,
        )
        raise KvRenameError("no such file or command", path=word, hint=next(filter(None, hints)))


def _may_be_command(word: str) -> bool:
    """Return whether a word is like a command, and no file."""
    return bool(re.fullmatch(r"[A-Za-z][\w-]*", word)) and not is_occupied(word)


def _build_command_error(word: str) -> KvRenameError:
    """Return the error for help about a word that is not a command."""
    hint = suggest_similar(word, COMMANDS) or _LIST_COMMANDS
    return KvRenameError("no such command", path=word, hint=hint)


def _suggest_word(name: str, args: Sequence[str], word: str) -> str | None:
    """Return the hint for a word in the place of a model that means a command or an option."""
    option = suggest_option(load_command(name).command.options, word)
    if word in _WORDS_FOR_STRIP and name == DEFAULT_COMMAND:
        option = "did you mean --strip?"
    return _suggest_order(name, args) or option


def _suggest_order(name: str, args: Sequence[str]) -> str | None:
    """Return the hint for a command that is typed after options or models, not first."""
    if args[:1] == [name]:
        return None
    options = (param for param in load_command(name).command.params if param.opts)
    takes_value = {
        flag for each in options if not getattr(each, "is_flag", 1) for flag in each.opts
    }
    for index, word in enumerate(args):
        if word == "--":
            break
        is_value = index > 0 and args[index - 1] in takes_value
        if word in COMMANDS and not is_value and not is_occupied(word):
            words = (word, *args[:index], *args[index + 1 :])
            return f"the command comes first: `onnxkvrename {' '.join(map(quote_word, words))}`"
    return None


def _suggest_token(name: str, args: Sequence[str], word: str) -> str | None:
    """Return the hint for a token that was typed without its option.

    Only a word with a capital is treated as one: others are rather paths.
    """
    typed = {arg.partition("=")[0] for arg in args}
    is_token = word.isascii() and word.isalnum() and word != word.lower()
    if not is_token or name != DEFAULT_COMMAND or not typed.isdisjoint(_TOKEN_OPTIONS):
        return None
    return f"did you mean --prefix {word}?"


def _build_usage_failure(
    name: str, error: click.ClickException, args: Sequence[str]
) -> KvRenameError:
    """Return the error for wrong arguments, with the option that was probably meant."""
    message = error.format_message().rstrip(".")
    similar = None
    order = _suggest_order(name, args)
    if isinstance(error, click.NoSuchOption):
        message = f"no such option: {error.option_name}"
        similar = find_similar(error.option_name, error.possibilities or (), cutoff=0.75)
    hint = order or (f"did you mean {similar}?" if similar else None)
    if isinstance(error, click.BadOptionUsage):
        params = {flag: each for each in load_command(name).command.params for flag in each.opts}
        kind = getattr(params.get(error.option_name), "type", None)  # none: click's own --help
        hint = f"one of: {', '.join(kind.choices)}" if isinstance(kind, click.Choice) else None
    if hint is None and not message.endswith(")"):  # else it says itself what to do
        hint = f"`onnxkvrename {name} --help` lists all options"
    if message[1:2].islower():  # not the name of a variable
        message = message[:1].lower() + message[1:]
    return KvRenameError(message, hint=hint)


def load_command(name: str) -> Any:
    """Import the module of a command, with its ``command``."""
    return import_module(_build_module_name(name))


def _build_module_name(name: str) -> str:
    """Return the name of a command's module."""
    return f"onnxkvrename.cli.{name.replace('-', '_')}"


def _find_loaded_command(name: str) -> Any:
    """Return the module of a command, or ``None`` if loading it has failed or was interrupted.

    What is half loaded then, such as numpy, may fail when it is loaded again.
    """
    return sys.modules.get(_build_module_name(name))


def _report_failure(name: str, args: Sequence[str], error: KvRenameError, code: int) -> int:
    """Answer in the requested format that the job could not be done, and say so on stderr.

    If the system refuses to open even the modules for that, the message alone is printed.
    """
    try:
        variables = " and ".join(_list_variables(name, args, error))
        set_by = f"set by {variables}" if variables else None
        error.hint = "; ".join(filter(None, (error.hint, set_by))) or None
        output_format = _find_requested_format(args)
        if output_format is not None and _find_loaded_command(name) is not None:
            from onnxkvrename.report.documents import MODULES  # only for a failure

            if name in MODULES:
                print_answer(Answer(name, code, error=error), output_format)
    except (KvRenameError, ImportError, OSError):
        pass  # what kept the job from being done says more than that this could not be printed
    try:
        print_lines([build_error_line(error)])
    except (ImportError, OSError):
        text = "".join(char if char.isprintable() else "?" for char in f"error: {error}")
        os.write(2, text.encode("utf-8", "backslashreplace") + b"\n")
    return code


def _list_variables(name: str, args: Sequence[str], error: KvRenameError) -> Iterator[str]:
    """Yield the variables whose values an error is about, where no option was typed instead."""
    command = _find_loaded_command(name)
    typed = {arg.partition("=")[0] for arg in args}
    for option in command.command.options.values() if command is not None else ():
        value = os.environ.get(option.envvar or "")
        if not option.envvar or not value or not typed.isdisjoint(option.flags.split()):
            continue
        text = f"{error.path} {error.message}"
        shown = "|".join(map(re.escape, (value, repr(value)[1:-1])))
        if option.envvar not in text and re.search(rf"(?<![\w-])(?:{shown})(?![\w-])", text):
            yield option.envvar


def _find_requested_format(args: Sequence[str]) -> str | None:
    """Return the last format asked for, though not all options could be understood."""
    formats = list_formats()
    requested = [
        arg.partition("=")[2] if arg.startswith("--format=") else following
        for arg, following in pairwise([*args, ""])
        if arg == "--format" or arg.startswith("--format=")
    ] or [os.environ.get(FORMAT.envvar or "", "")]
    return next((name for name in reversed(requested) if name in formats), None)


@contextmanager
def _interrupt_on_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP clean up as Ctrl-C does."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        for signal_number in numbers:  # one is enough, and nothing may disturb the clean-up
            signal.signal(signal_number, signal.SIG_IGN)
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    names = ("SIGINT", "SIGTERM", "SIGHUP")
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    # A signal that the caller ignores (nohup) stays ignored.
    previous = {
        number: signal.signal(number, interrupt)
        for number in numbers
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler)
    }
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
