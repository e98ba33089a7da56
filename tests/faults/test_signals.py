"""Signals on systems that lack something."""

from __future__ import annotations

import itertools
import signal

import pytest
from conftest import Sample
from faults.commands import COMMANDS, Command
from faults.controls import CONTROLS, Control
from faults.injection import SYSTEMS, Fault, System
from faults.judging import BrokenPromise, Trial, in_memory
from faults.signals import list_signals
from kill_commands import needs_fork
from tiers import thin

pytestmark = needs_fork
BY_NAME = {command.name: command for command in COMMANDS}
ON_LESSER_SYSTEMS = tuple(
    BY_NAME[name]
    for name in (
        *("in place", "in place with a sidecar", "a set in place", "three stripped", "over a file"),
        *("a set over a directory", "a set over earlier results", "seeded", "over a page"),
    )
)


@pytest.mark.parametrize(
    ("command", "system"), thin(itertools.product(ON_LESSER_SYSTEMS, SYSTEMS[1:]), 6), ids=str
)
def test_signal_on_a_lesser_system_leaves_all_old_or_all_new(
    command: Command, system: System, sample: Sample
) -> None:
    with in_memory() as root:
        trial = Trial(command, root, system)
        for fault in sample(list_signals(len(trial.count()), 5), 2):
            trial.try_fault(fault)


@pytest.mark.parametrize(
    "control", [each for each in CONTROLS if each.name in ("no undo", "errors hidden")], ids=str
)
def test_program_that_is_broken_on_purpose_is_caught(control: Control) -> None:
    with in_memory() as root:
        trial = Trial(control.command, root, prepare=control.break_program)
        calls = enumerate(trial.count(), 1)
        moving = [nth for nth, name in calls if name in ("replace", "rename", "link")]
        faults = (Fault(nth, -signal.SIGINT, after=True) for nth in moving)
        assert any(is_broken(trial, fault) for fault in faults)


def is_broken(trial: Trial, fault: Fault) -> bool:
    """Return whether a promise was broken by a signal."""
    try:
        trial.try_fault(fault)
    except BrokenPromise:
        return True
    return False
