"""Signals before and after each call that changes a file.

One that arrives during a call is handled when the call has returned. SIGINT comes at every place;
SIGTERM and SIGHUP, which are handled as it is, at some, and at some a user who does not stop to
press Ctrl-C. SIGKILL is one of the faults of :mod:`faults.test_writing_commands`, as what it leaves
after a call is what it leaves before the next one.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator

from faults.injection import Fault

PLACING = ("link", "rename", "replace")
"""Functions that put results in place: at their calls, a program has most to lose."""


def list_signals(calls: int, step: int = 1) -> Iterator[Fault]:
    """Yield the signals of a command with so many calls, or of every ``step``-th of them."""
    for nth in range(1, calls + 1, step):
        yield Fault(nth, -signal.SIGINT)
        yield Fault(nth, -signal.SIGINT, after=True)
        if nth % 10 == 0:
            number = (signal.SIGTERM, signal.SIGHUP)[nth // 10 % 2]
            yield Fault(nth, -number, after=nth % 20 == 0)
            yield Fault(nth, -signal.SIGINT, lasting=True, after=True)
