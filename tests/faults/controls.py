"""Programs that are broken on purpose, each in one way: the suite must catch every one."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from faults.commands import COMMANDS, Command

from onnxkvrename.renaming import write as writing
from onnxkvrename.storage.temp_file import ReadyFile, TempFile
from onnxkvrename.storage.transaction import Transaction


class WriterInPlace(TempFile):
    """Writes to the target itself."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        os.close(self.descriptor)
        self.descriptor = os.open(self.target, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        self.has_name = True

    def finish(self, *, replace: bool) -> ReadyFile:
        os.link(self.target, self.temp_path)
        return super().finish(replace=True)


def write_in_place() -> None:
    """Write to the target itself from now on."""
    writing.TempFile = WriterInPlace  # type: ignore[misc]


def _leave_half_placed() -> None:
    Transaction._undo = lambda self, error: None  # type: ignore[method-assign]


def _leave_leftovers() -> None:
    ReadyFile.discard = lambda self: None  # type: ignore[method-assign]
    real = os.unlink

    def keep(path: Any, **kwargs: Any) -> None:
        if "lock" not in os.fsdecode(path):
            return
        real(path, **kwargs)

    os.unlink = keep


def _hide_errors() -> None:
    """Report success whatever happened."""
    from onnxkvrename.cli import rename as command

    command.print_answer = lambda *args, **kwargs: 0  # type: ignore[assignment]


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
    Control("a set left half placed", _leave_half_placed, _BY_NAME["a set in place"]),
    Control("temporary files left", _leave_leftovers, _BY_NAME["three in place"]),
    Control("errors hidden", _hide_errors, _BY_NAME["in place"]),
    Control("a trace elsewhere", _write_outside, _BY_NAME["in place"]),
)
