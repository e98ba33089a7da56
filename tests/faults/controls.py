"""Programs that are broken on purpose, each in one way: the suite must catch every one.

What is broken is what the program asks of the system, so a control does not depend on how the
program is written.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from faults.commands import COMMANDS, Command

_RENAMING = ("replace", "rename")


def write_in_place() -> None:
    """Write into the target itself from now on, wherever a file would replace it."""
    for name in _RENAMING:
        setattr(os, name, copy_into)


def copy_into(source: Any, target: Any, **kwargs: Any) -> None:
    """Do what replacing a file does, but not at once."""
    with open(source, "rb") as file:
        content = file.read()
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.write(descriptor, content)
    os.close(descriptor)
    os.unlink(source)


def _skip_undo() -> None:
    """Move no file back after an error or an interrupt."""
    for name in _RENAMING:
        setattr(os, name, _stop_after_interrupt(getattr(os, name)))


def _stop_after_interrupt(real: Callable[..., None]) -> Callable[..., None]:
    def move(*args: Any, **kwargs: Any) -> None:
        if sys.exc_info()[0] is None:  # nothing is being handled
            real(*args, **kwargs)

    return move


def _leave_leftovers() -> None:
    """Remove no temporary file."""
    real = os.unlink

    def keep(path: Any, **kwargs: Any) -> None:
        if not os.path.basename(os.fsdecode(path)).startswith(".onnxkvrename-"):
            real(path, **kwargs)

    os.unlink = keep


def _hide_errors() -> None:
    """Report success whatever happened."""

    def end(code: int = 0) -> NoReturn:
        raise SystemExit(0)

    sys.exit = end  # type: ignore[assignment]


def _write_outside() -> None:
    """Leave something beside the directory that was given."""
    real = os.fsync

    def sync(descriptor: int) -> None:
        real(descriptor)
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            Path("../trace").touch()

    os.fsync = sync


class Control(NamedTuple):
    """A broken program.

    Attributes:
        name: How it is broken.
        break_program: Breaks it, in a child process.
        command: The command that shows it.
    """

    name: str
    break_program: Callable[[], None]
    command: Command

    def __str__(self) -> str:
        return self.name


_BY_NAME = {command.name: command for command in COMMANDS}
CONTROLS = (
    Control("a writer in place", write_in_place, _BY_NAME["in place"]),
    Control("no undo", _skip_undo, _BY_NAME["a set in place"]),
    Control("temporary files left", _leave_leftovers, _BY_NAME["three in place"]),
    Control("errors hidden", _hide_errors, _BY_NAME["in place"]),
    Control("a trace elsewhere", _write_outside, _BY_NAME["in place"]),
)
