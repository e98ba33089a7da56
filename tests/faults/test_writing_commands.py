"""Every command that writes is killed, and meets every error, at every call that changes something.

Each case runs the command in a child process and judges what is left (:mod:`faults.judging`).
In the full tier each call is the last one once, and every other call meets an error; that takes
minutes. The default tier tries a few calls of each command. ``python -m tests.soak`` tries all
faults at all calls.
"""

from __future__ import annotations

import errno
import itertools
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from conftest import Sample
from faults.commands import COMMANDS, Command
from faults.controls import CONTROLS
from faults.injection import ERRNOS, READING_ERRNOS, SYSTEMS, Fault, System
from faults.judging import Trial, in_memory
from faults.signals import PLACING, list_signals
from kill_commands import needs_fork
from tiers import thin

pytestmark = needs_fork


def list_children() -> set[str]:
    """Return the processes that this one has started and not waited for."""
    tasks = Path("/proc/self/task")
    files = [task / "children" for task in tasks.iterdir()] if tasks.is_dir() else []
    return {pid for file in files if file.exists() for pid in file.read_text().split()}


@pytest.fixture(scope="module", autouse=True)
def children_before() -> set[str]:
    """The children that other tests have left, such as the tracker of shared memory."""
    return list_children()


def list_faults(calls: Sequence[str], system: System) -> Iterator[Fault]:
    """Yield the faults: killed at each call, and at every other one an error, once or lasting.

    The errors take turns. What puts a file in place meets one each time. A system that lacks
    something meets one fault at every fifth call.
    """
    for nth, name in enumerate(calls, 1):
        number = ERRNOS[nth // 2 % len(ERRNOS)]
        error = Fault(nth, number, lasting=nth % 4 == 0)
        if system == SYSTEMS[0]:
            yield Fault(nth, -signal.SIGKILL)
            if name in PLACING:
                yield Fault(nth, errno.EIO)
            if nth % 2 == 0:
                yield error
        elif nth % 5 == 0:
            yield Fault(nth, -signal.SIGKILL) if nth % 2 else error


@pytest.fixture(scope="module", params=COMMANDS, ids=str)
def trial(request: pytest.FixtureRequest) -> Iterator[Trial]:
    """A command on a system with everything."""
    with in_memory() as root:
        yield Trial(request.param, root)


def test_a_fault_at_any_call_leaves_every_file_whole(trial: Trial, sample: Sample) -> None:
    calls = trial.count()
    assert {"open", "write", "fsync", "close"} <= set(calls)
    assert not [name for name in calls if name.startswith("uncounted")]
    for fault in sample(list_faults(calls, trial.system), 1):
        trial.try_fault(fault)


def test_signal_at_any_call_leaves_all_old_or_all_new(trial: Trial, sample: Sample) -> None:
    faults = list(list_signals(len(trial.count())))
    placing = [fault for fault in faults if trial.name_call(fault) in PLACING and fault.after]
    others = [fault for fault in faults if fault not in placing]
    for fault in (*sample(placing, 2), *sample(others, 1)):
        trial.try_fault(fault)


@pytest.mark.parametrize(
    ("command", "system"), thin(itertools.product(COMMANDS, SYSTEMS[1:]), 6), ids=str
)
def test_a_fault_on_a_lesser_system_leaves_every_file_whole(
    command: Command, system: System, sample: Sample
) -> None:
    with in_memory() as root:
        trial = Trial(command, root, system)
        for fault in sample(list_faults(trial.count(), system), 2):
            trial.try_fault(fault)


@pytest.mark.parametrize("trial", thin(COMMANDS, 7), indirect=True, ids=str)
def test_a_call_that_cannot_look_at_a_file_or_is_interrupted_leaves_every_file_whole(
    trial: Trial, sample: Sample
) -> None:
    for nth in sample(range(1, len(trial.count(reading=True)) + 1, 5), 1):
        trial.try_fault(Fault(nth, READING_ERRNOS[nth % 2], reading=True))
        trial.try_fault(Fault(nth, -signal.SIGINT, after=True, reading=True))


@pytest.mark.parametrize("trial", thin(COMMANDS, 7), indirect=True, ids=str)
def test_an_error_after_the_call_leaves_every_file_whole(trial: Trial, sample: Sample) -> None:
    for nth in sample(range(1, len(trial.count()) + 1, 3), 1):
        trial.try_fault(Fault(nth, errno.EIO, after=True))


@pytest.mark.parametrize("control", thin(CONTROLS, 3), ids=str)
def test_a_program_that_is_broken_on_purpose_is_caught(control) -> None:
    with in_memory() as root:
        trial = Trial(control.command, root, prepare=control.break_program)
        faults = [*list_faults(trial.count(), SYSTEMS[0])][::-1]  # results are placed late
        assert any(not is_kept(trial, fault) for fault in faults)


def is_kept(trial: Trial, fault: Fault) -> bool:
    """Return whether the promise was kept under a fault."""
    try:
        trial.try_fault(fault)
    except AssertionError:
        return False
    return True


def test_the_commands_here_are_all_that_write() -> None:
    """A module of the command line that can write has a case here."""
    from test_house import calls, list_trees  # the calls of each module, as written

    writing = {"write_all", "write_file", "write_page", "TempFile", "run_rename"}
    trees = [(name, tree) for name, tree in list_trees() if name.startswith("cli.")]
    assert {name for name, tree in trees if calls(tree) & writing} == {
        "cli.rename",
        "cli.inspect",
        "cli.compare",  # writes its page as inspect does
        "cli.files",  # that page
    }


def test_no_child_of_these_is_left(children_before: set[str]) -> None:
    assert list_children() <= children_before
