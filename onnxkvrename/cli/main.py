"""Which command is meant, and what becomes of it: exit codes, errors, signals."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from importlib import import_module
from itertools import pairwise
from types import FrameType
from typing import Any

import click

from onnxkvrename.cli.output import drop_stdout, is_color_enabled, print_lines, stdout_guard
from onnxkvrename.errors import KvRenameError
from onnxkvrename.findings import find_similar
from onnxkvrename.report.rename_text import (
    escape_unprintable,
    format_error,
    format_workflow_command,
)

EXIT_INTERRUPTED = 130
FORMAT_PRIORITY = ("json", "github", "text")
COMMANDS = ("rename", "verify", "inspect", "custom-io", "manifest", "check-consumer", "compare")
"""The first is what is meant when none is named; others are loaded when they are."""
_EAGER_OPTIONS = {"-h", "--help", "-V", "--version"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line (by default the process's own) and return its exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    name = args.pop(0) if args[:1] and args[0] in COMMANDS else COMMANDS[0]
    called = "onnxkvrename" if name == COMMANDS[0] else f"onnxkvrename {name}"
    try:
        _check_command(args)
        with _interrupt_on_signals(), _guard_help_output(args):
            code = _load_command_module(name).command.main(
                args, prog_name=called, standalone_mode=False
            )
        return int(code or 0)
    except click.ClickException as error:
        message = error.format_message().rstrip(".")
        hint = None if message.endswith(")") else "--help lists all options"
        fault = KvRenameError(message, hint=hint)
    except KvRenameError as error:
        fault = error
    except (KeyboardInterrupt, click.Abort):
        fault = KvRenameError("interrupted: no file was left half written")
        return _report_failure(name, args, fault, EXIT_INTERRUPTED)
    except Exception as error:
        if {"-v", "--verbose"} & set(args):
            raise
        fault = KvRenameError(
            f"a bug in onnxkvrename: {type(error).__name__}: {error}",
            hint="-v shows where; please report it",
        )
    return _report_failure(name, args, fault)


def _guard_help_output(args: Sequence[str]) -> AbstractContextManager[None]:
    """What click itself answers can fail as any answer can."""
    return stdout_guard() if _EAGER_OPTIONS & set(args) else nullcontext()


def _check_command(args: Sequence[str]) -> None:
    """Raise :class:`KvRenameError` for a first word that is a command misspelt, and no file."""
    if not args or not args[0].replace("-", "").isalpha() or args[0].startswith("-"):
        return
    if os.path.lexists(args[0]):
        return
    longer = (name for name in COMMANDS if name.startswith(args[0]) and len(args[0]) > 3)
    similar = next(longer, None) or find_similar(args[0], COMMANDS)
    if similar is not None:
        hint = f"did you mean {similar}?"
        raise KvRenameError(f"{args[0]} is no command, and no file", hint=hint)


def _load_command_module(name: str) -> Any:
    """The module of a command; only a rename has its own loaded from the start."""
    return import_module(f"onnxkvrename.cli.{name.replace('-', '_')}")


def _report_failure(name: str, args: Sequence[str], fault: KvRenameError, code: int = 2) -> int:
    try:
        form = _find_requested_format(args)
        if form == "json":
            print_lines([_load_command_module(name).render_failure(code, fault)])
        elif form == "github":
            where = {"file": fault.path} if fault.path is not None else {}
            said = escape_unprintable(str(fault))
            print_lines([format_workflow_command("error", {**where, "title": "failed"}, said)])
    except OSError:
        drop_stdout()
    with suppress(OSError):
        print_lines([format_error(fault, color=is_color_enabled(sys.stderr))], err=True)
    return code


def _find_requested_format(args: Sequence[str]) -> str:
    """The form that is asked for in so many words, though not all options could be understood."""
    asked = [text.partition("=")[2] for text in args if text.startswith("--format=")]
    asked += [text for option, text in pairwise(args) if option == "--format"]
    return next((form for form in FORMAT_PRIORITY if form in asked), "")


@contextmanager
def _interrupt_on_signals() -> Iterator[None]:
    """Let a polite signal clean up as Ctrl-C does."""

    def stop(number: int, frame: FrameType | None) -> None:
        for other in numbers:  # one is enough, and what it starts is not to be disturbed
            signal.signal(other, signal.SIG_IGN)
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    names = ("SIGINT", "SIGTERM", "SIGHUP")
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    # A signal that whoever started us ignores (nohup) stays ignored.
    before = {
        number: signal.signal(number, stop)
        for number in numbers
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
