"""Every fault at every call of every command that writes, on every system."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from functools import partial
from random import Random

from faults.commands import COMMANDS
from faults.controls import CONTROLS
from faults.injection import ERRNOS, READING_ERRNOS, SYSTEMS, Fault
from faults.judging import Trial, in_memory
from soak.parts import Part


def list_faults(trial: Trial) -> Iterator[Fault]:
    """Yield all faults of a command."""
    for nth in range(1, len(trial.count()) + 1):
        yield Fault(nth, -signal.SIGKILL)
        yield Fault(nth, -signal.SIGINT, after=True)
        for number in ERRNOS:
            yield Fault(nth, number)
            yield Fault(nth, number, lasting=True)
            yield Fault(nth, number, after=True)
    for nth in range(1, len(trial.count(reading=True)) + 1):
        for number in READING_ERRNOS:
            yield Fault(nth, number, reading=True)


def run(part: Part) -> None:
    """Try them in a random order of commands and faults."""
    random = Random(part.seed)
    for control in CONTROLS:
        with in_memory() as root:
            trial = Trial(control.command, root, prepare=control.break_program)
            faults = map(partial(partial, trial.try_fault), list_faults(trial))
            part.check_control(control.name, faults)
    pairs = [(command, system) for command in COMMANDS for system in SYSTEMS]
    random.shuffle(pairs)
    for number, (command, system) in enumerate(part.take(pairs)):
        left = (part.deadline - part.started) / len(pairs) * (number + 1)
        with in_memory() as root:
            trial = Trial(command, root, system)
            faults = list(list_faults(trial))
            random.shuffle(faults)
            for fault in part.take(faults):
                if time_is_up(part, left):
                    break
                kind = "killed" if fault.number == -signal.SIGKILL else "error or interrupt"
                part.try_case(kind, partial(trial.try_fault, fault))


def time_is_up(part: Part, share: float) -> bool:
    """Return whether the commands so far have used their share of the time."""
    return time.monotonic() - part.started > share
