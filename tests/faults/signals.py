"""Signals before and after each call that changes a file, and what the program does not survive.

One that arrives during a call is handled when the call has returned. SIGINT comes at every place;
SIGTERM and SIGHUP, which are handled as it is, at some, and at some a user who does not stop to
press Ctrl-C. SIGKILL is one of the faults of :mod:`faults.test_writing_commands`, as what it leaves
after a call is what it leaves before the next one.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import NamedTuple

from faults.injection import SYSTEMS, Fault, System
from faults.judging import ALL_OR_NONE, ANSWERED, CLEAN, BrokenPromise, Trial

PLACING = ("link", "rename", "replace")
"""Functions that put results in place: at their calls, a program has most to lose."""
WITHOUT_UNNAMED, WITHOUT_LINKS, WITHOUT_LOCKS = SYSTEMS[1:]


class Loss(NamedTuple):
    """What the program does not survive yet.

    Attributes:
        promise: The promise that is broken.
        system: The system on which it is.
        command: The name of a command that shows it; others may, too.
        shown: What the run prints then, or what is left.
        why: What happens, and how it will be mended.
    """

    promise: str
    system: System
    command: str
    shown: str
    why: str

    def __str__(self) -> str:
        return f"{self.command} {self.system}"

    def explains(self, trial: Trial, broken: BrokenPromise) -> bool:
        """Return whether this is what a fault has shown."""
        is_same = (broken.promise, trial.system) == (self.promise, self.system)
        return is_same and self.shown in str(broken)


KNOWN_LOSSES = (
    Loss(
        ANSWERED,
        SYSTEMS[0],
        "a page",
        "Exception ignored in: <generator object _read_signatures",
        "Python drops an interrupt that comes while it ends a generator that is not read to its "
        "end, so the command goes on and prints a traceback. A reader must keep no file open in "
        "such a generator.",
    ),
    Loss(
        ALL_OR_NONE,
        WITHOUT_LINKS,
        "in place with a sidecar",
        "the undo failed as well (has no copy of its old content)",
        "Without hard links, what is replaced is not kept, so after an interrupt between two files "
        "some are new, and the message has their number, not their names. The writer must keep "
        "a copy where it cannot keep a link.",
    ),
    Loss(
        CLEAN,
        WITHOUT_LOCKS,
        "in place",
        ".onnxkvrename-lock'",
        "Where directories cannot be locked, a signal just after the lock file was made leaves it "
        "until the next run. The writer must make no lock file, or note it first.",
    ),
    *(
        Loss(
            CLEAN,
            system,
            "over a page",
            "-new'",
            "Where a temporary file has a name, an interrupt as that name is removed leaves it "
            "until the next run. The writer must note a name before it is made, and remove it "
            "after an interrupt as well.",
        )
        for system in (WITHOUT_UNNAMED, WITHOUT_LINKS)
    ),
)
"""Each is found again by a test that fails when it is mended: then the row goes."""


def list_signals(calls: int, step: int = 1) -> Iterator[Fault]:
    """Yield the signals of a command with so many calls, or of every ``step``-th of them."""
    for nth in range(1, calls + 1, step):
        yield Fault(nth, -signal.SIGINT)
        yield Fault(nth, -signal.SIGINT, after=True)
        if nth % 10 == 0:
            number = (signal.SIGTERM, signal.SIGHUP)[nth // 10 % 2]
            yield Fault(nth, -number, after=nth % 20 == 0)
            yield Fault(nth, -signal.SIGINT, lasting=True, after=True)


def try_signal(trial: Trial, fault: Fault) -> None:
    """Send a signal, and judge what it leaves, but for the losses that are known."""
    try:
        trial.try_fault(fault)
    except BrokenPromise as broken:
        if not any(loss.explains(trial, broken) for loss in KNOWN_LOSSES):
            raise
