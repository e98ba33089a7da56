"""The command line: finds the command, runs it, and turns what it raises into an answer."""

from __future__ import annotations

import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from importlib import import_module
from itertools import pairwise
from types import FrameType
from typing import Any

import click

from onnxkvrename.cli.output import (
    occupy_closed_streams,
    print_answer,
    print_lines,
    stdout_guard,
)
from onnxkvrename.errors import KvRenameError
from onnxkvrename.findings import decide_exit_code, find_similar
from onnxkvrename.report.formats import Answer, Line, list_formats
from onnxkvrename.storage.read import is_occupied

COMMANDS = (
    "rename",
    "verify",
    "inspect",
    "custom-io",
    "manifest",
    "check-consumer",
    "compare",
    "recover",
)
"""The first is the default; a command's module is loaded when it runs."""
_EAGER_OPTIONS = {"-h", "--help", "-V", "--version"}


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
    is_named = bool(args) and args[0] in COMMANDS
    name = args.pop(0) if is_named else COMMANDS[0]
    prog_name = "onnxkvrename" if name == COMMANDS[0] else f"onnxkvrename {name}"
    try:
        with _interrupt_on_signals(), _print_warnings(), _guard_help_output(args):
            command = _load_command(name).command
            if not is_named:
                _check_command_name(args)
            code = command.main(args, prog_name=prog_name, standalone_mode=False)
        return int(code or 0)
    except click.ClickException as error:
        message = error.format_message().rstrip(".")
        hint = None if message.endswith(")") else "--help lists all options"
        failure = KvRenameError(message, hint=hint)
    except KvRenameError as error:
        failure = error
    except (KeyboardInterrupt, click.Abort):
        failure = KvRenameError("interrupted: no file was left half written")
        return _report_failure(name, args, failure, decide_exit_code(interrupted=True))
    except Exception as error:
        is_verbose = _read_verbose_option(name, args)
        if is_verbose:
            _print_traceback(error)
        place = "" if is_verbose else f"{_locate_bug(name, error)}; "
        failure = KvRenameError(
            f"a bug in onnxkvrename: {type(error).__name__}: {error}",
            hint=f"{place}please report it",
        )
    return _report_failure(name, args, failure, decide_exit_code(not_done=True))


@contextmanager
def _print_warnings() -> Iterator[None]:
    """Print the warnings of libraries, which may quote names, as all else is printed."""

    def show(message: Warning | str, category: type[Warning], *where: object) -> None:
        print_lines([Line(f"{category.__name__}: {message}", err=True)])

    with warnings.catch_warnings():
        warnings.showwarning = show  # type: ignore[assignment]
        yield


def _print_traceback(error: Exception) -> None:
    import traceback  # only for a bug

    text = "".join(traceback.format_exception(error))
    print_lines(Line(line, err=True) for line in text.rstrip("\n").split("\n"))


def _guard_help_output(args: Sequence[str]) -> AbstractContextManager[None]:
    """Guard stdout where click itself prints."""
    return stdout_guard() if _EAGER_OPTIONS & set(args) else nullcontext()


def _check_command_name(args: Sequence[str]) -> None:
    """Raise :class:`KvRenameError` if the first word looks like a misspelt command, not a file."""
    if not args or not args[0].replace("-", "").isalpha() or args[0].startswith("-"):
        return
    if is_occupied(args[0]):
        return
    longer = (name for name in COMMANDS if name.startswith(args[0]) and len(args[0]) > 3)
    similar = next(longer, None) or find_similar(args[0], COMMANDS)
    if similar is not None:
        hint = f"did you mean {similar}?"
        raise KvRenameError(f"{args[0]} is no command, and no file", hint=hint)


def _load_command(name: str) -> Any:
    """Import the module of a command, with its ``command`` and, if any, ``render_failure``."""
    return import_module(_build_module_name(name))


def _build_module_name(name: str) -> str:
    return f"onnxkvrename.cli.{name.replace('-', '_')}"


def _find_loaded_command(name: str) -> Any:
    """Return the module of a command, or ``None`` if loading it has failed or was interrupted.

    What is half loaded then, such as numpy, may not bear a second try.
    """
    return sys.modules.get(_build_module_name(name))


def _read_verbose_option(name: str, args: Sequence[str]) -> bool:
    """Return whether ``-v`` is among the options, alone or as in ``-qv``."""
    with suppress(Exception):  # the bug may be in reading the options
        command: click.Command = _find_loaded_command(name).command
        context = command.make_context(name, list(args), resilient_parsing=True)
        return bool(context.params.get("verbose"))
    return False


def _locate_bug(name: str, error: Exception) -> str:
    """Return a hint to ``-v``, or the place of the bug if the command has no ``-v``."""
    module = _find_loaded_command(name)
    if module and any(option.name == "verbose" for option in module.command.params):
        return "-v shows where"
    import traceback  # only for a bug

    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{os.path.basename(place.filename)}, line {place.lineno}"


def _report_failure(name: str, args: Sequence[str], error: KvRenameError, code: int) -> int:
    """Answer in the requested format that the job could not be done, and say so on stderr."""
    try:
        output_format = _find_requested_format(args)
        render_json = getattr(_find_loaded_command(name), "render_failure", None)
        if output_format is not None and render_json is not None:
            answer = Answer(name, code, partial(render_json, code, error), error=error)
            print_answer(answer, output_format)
    except KvRenameError:
        pass  # what kept the job from being done says more than that this could not be printed
    from onnxkvrename.report.formats.text import build_error_line  # only for a failure

    print_lines([build_error_line(error)])
    return code


def _find_requested_format(args: Sequence[str]) -> str | None:
    """Return the last format asked for, though not all options could be understood."""
    formats = list_formats()
    requested = [
        arg.partition("=")[2] if arg.startswith("--format=") else following
        for arg, following in pairwise([*args, ""])
        if arg == "--format" or arg.startswith("--format=")
    ]
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
