"""Kill the console script, and let system calls fail, by strace: below Python, in a real process.

Each case is a process of its own, so there are fewer of them than in :mod:`soak.calls`.
"""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import NamedTuple

from faults.commands import COMMANDS, Command
from faults.injection import ERRNOS, Result
from faults.judging import Trial, in_memory
from soak.parts import Part, find_missing

CALLS = (
    *("write", "pwrite64", "ftruncate", "fsync", "fdatasync", "copy_file_range", "sendfile"),
    *("splice", "fchmod", "fchown", "fsetxattr", "link", "linkat", "symlink", "symlinkat"),
    *("rename", "renameat", "renameat2", "unlink", "unlinkat", "rmdir", "mkdir", "mkdirat"),
    *("flock", "openat", "close"),
)
"""System calls that change something, or that others need."""
TIMEOUT = 60
PROGRAM = (
    sys.prefix,
    sys.base_prefix,
    str(Path(__file__).parents[2]),
    '"/etc/',
    '"/usr/',
    '"/lib',
    '"/proc/',
    '"/dev/',
    '"/sys/',
    "pyvenv.cfg",
)
"""Parts of paths that are not those of the command's files."""


class SystemCallFault(NamedTuple):
    """What goes wrong: the ``nth`` call of a name, with the attributes of a ``Fault``."""

    name: str
    nth: int
    number: int
    lasting: bool = False
    after: bool = False
    reading: bool = False

    def __str__(self) -> str:
        what = errno.errorcode.get(self.number, "SIGKILL")
        return f"{what} at {self.name} {self.nth}{'+' if self.lasting else ''}"

    @property
    def injection(self) -> str:
        """The fault as strace expects it."""
        code = errno.errorcode.get(self.number, "").replace("ENOTSUP", "EOPNOTSUPP")
        what = f"error={code}" if self.number > 0 else "signal=KILL"
        return f"inject={self.name}:{what}:when={self.nth}{'+' if self.lasting else ''}"


class TracedTrial(Trial):
    """A trial in which each run with a fault is a process under strace."""

    def run(self, fault: SystemCallFault | None = None) -> Result:  # type: ignore[override]
        if fault is None:
            return super().run()
        return self.trace([f"-e{fault.injection}", f"-etrace={fault.name}"], "/dev/null")

    def trace(self, options: list[str], log: str) -> Result:
        """Run the command under strace."""
        command = ["strace", "-f", "-qq", "-o", log, *options, sys.executable, "-m", "onnxkvrename"]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        try:
            process = subprocess.run(
                [*command, *self.args],
                cwd=self.here,
                env={**environment, "PYTHONDONTWRITEBYTECODE": "1"},
                capture_output=True,
                text=True,
                timeout=TIMEOUT,
            )
        except subprocess.TimeoutExpired:
            return Result(-14, "", "", ())
        code = -9 if process.returncode in (-9, 137) else process.returncode
        return Result(code, process.stdout, process.stderr, ())

    def name_call(self, fault: SystemCallFault) -> str:  # type: ignore[override]
        return {"unlinkat": "unlink"}.get(fault.name, fault.name)

    def count_calls(self) -> dict[str, list[int]]:
        """Return for each system call the numbers of those made for the files of the command.

        The start of the interpreter, modules that are loaded later, and texts that are printed
        are left out.
        """
        with tempfile.NamedTemporaryFile("r") as log:
            self.reset()
            self.trace([f"-etrace={','.join(CALLS)}"], log.name)
            lines = log.read().splitlines()
        numbers: dict[str, list[int]] = {}
        total: Counter[str] = Counter()
        descriptors: set[str] = set()
        for line in lines:
            call = re.match(r"(?:\d+ +)?(\w+)\(((\w+).*)", line)
            if call is None:
                continue
            name, arguments, first = call.groups()
            total[name] += 1
            if name == "openat":
                own = not any(text in arguments for text in PROGRAM)
                if own:
                    descriptors.add(arguments.rpartition("= ")[2])
            elif name == "close":
                own = first in descriptors
                descriptors.discard(first)
            else:
                own = bool(descriptors) and not (name == "write" and first in ("1", "2"))
            if own:
                numbers.setdefault(name, []).append(total[name])
        return numbers


def list_faults(numbers: dict[str, list[int]]) -> Iterator[SystemCallFault]:
    """Yield all faults of a command."""
    for name, nths in numbers.items():
        for nth in nths:
            yield SystemCallFault(name, nth, -signal.SIGKILL)
            for number in ERRNOS:
                # Python makes an interrupted call again, for ever if all are; and with no file
                # to be opened, or no text to be written, it cannot even say so.
                yield SystemCallFault(name, nth, number)
                if number != errno.EINTR and name not in ("close", "write", "openat"):
                    yield SystemCallFault(name, nth, number, lasting=True)


def run(part: Part) -> None:
    """Try faults of random commands in a random order."""
    part.skipped = find_missing("strace")
    if part.skipped is not None:
        return
    random = Random(part.seed)
    commands: list[Command] = list(COMMANDS)
    while not part.is_over:
        for command in part.take(random.sample(commands, len(commands))):
            with in_memory() as root:
                trial = TracedTrial(command, root)
                faults = list(list_faults(trial.count_calls()))
                for fault in part.take(random.sample(faults, min(len(faults), 60))):
                    kind = "killed" if fault.number < 0 else "error"
                    part.try_case(kind, partial(trial.try_fault, fault))
