"""Two runs at the same time on the same files: as if one had run after the other.

The first run stops at one of its calls; then the second runs until it ends, or waits for a lock.
A run may refuse to work, with exit code 1 or 2; then it has changed nothing.
"""

from __future__ import annotations

import errno
import os
import select
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from conftest import Sample
from faults import commands
from faults.commands import Command
from faults.controls import write_in_place
from faults.injection import Child, Fault, Result
from faults.judging import (
    ALL_OR_NONE,
    ANSWERED,
    COMPLETED,
    Tree,
    Trial,
    check_text,
    in_memory,
    require,
    walk_tree,
)
from kill_commands import needs_fork

fcntl = pytest.importorskip("fcntl")
pytestmark = needs_fork
MANY_CALLS = 60
MAX_PAUSE = 1.0
"""Seconds that the first run stands still if the second neither ends nor waits for a lock."""


class TwoRuns(NamedTuple):
    """Two command lines on the same files.

    Attributes:
        name: What they do.
        first: The arguments of the run that stops at a call.
        second: The arguments of the run that works meanwhile.
        prepare: Writes the files they work on.
    """

    name: str
    first: str
    second: str
    prepare: Callable[[Path], None]

    def __str__(self) -> str:
        return self.name


RENAME, STRIP = "in --prefix VLLM", "in --strip"
TO_FILE, TO_DIRECTORY = "in/m.onnx --prefix VLLM -o out/m.onnx", f"{RENAME} -d out"
SEED, PAGE = "cache --prefix VLLM --seed-cache", "inspect m.onnx --html a.html"
BOTH = (
    TwoRuns("a model twice", "m.onnx --prefix VLLM", "m.onnx --prefix VLLM", commands.one),
    TwoRuns("a sidecar twice", RENAME, RENAME, commands.with_sidecars),
    TwoRuns("a set twice", RENAME, RENAME, commands.windows),
    TwoRuns("a set stripped and renamed", STRIP, RENAME, commands.windows_renamed),
    TwoRuns("a set renamed and stripped", RENAME, STRIP, commands.windows),
    TwoRuns("a set replaced and stripped", f"{RENAME} --replace", STRIP, commands.windows_renamed),
    TwoRuns("a set with two tokens", RENAME, "in --prefix OTHER", commands.windows),
    TwoRuns("to a file twice", TO_FILE, TO_FILE, commands.with_place),
    TwoRuns("over a file twice", f"{TO_FILE} --force", f"{TO_FILE} --force", commands.over_place),
    TwoRuns("to a directory twice", TO_DIRECTORY, TO_DIRECTORY, commands.three),
    TwoRuns(
        "over results with two tokens",
        f"{TO_DIRECTORY} --force",
        "in --prefix OTHER -d out --force",
        commands.windows_over_results,
    ),
    TwoRuns("seeded twice", SEED, SEED, commands.export),
    TwoRuns("a page twice", PAGE, PAGE, commands.one),
)


class Race:
    """Two runs on the same files, of which the first stops at one call after the other.

    Args:
        both: The two runs.
        root: An empty directory for them.
        prepare: Called in both before they run, to break the program for a control.
    """

    def __init__(
        self, both: TwoRuns, root: Path, prepare: Callable[[], None] | None = None
    ) -> None:
        self.both, self.prepare = both, prepare
        self.args = both.first.split(), both.second.split()
        self.trial = Trial(Command(both.name, both.first, both.prepare), root)
        self.alone = self.trial.new
        self._serial_ends: dict[tuple[bool, bool], list[Tree]] = {}
        self._judged: list[tuple[Tree, bool]] = []  # what the first command is known to work on

    def list_serial_ends(self, did_first: bool, did_second: bool) -> list[Tree]:
        """Return what the runs that succeeded leave, one after the other."""
        did = did_first, did_second
        done = [args for args, is_done in zip(self.args, did, strict=True) if is_done]
        if did not in self._serial_ends:
            self._serial_ends[did] = []
            for order in (done, done[::-1]):
                self.trial.reset()
                codes = {Child(args, self.trial.here).wait().code for args in order}
                if codes <= {0}:
                    self._serial_ends[did].append(walk_tree(self.trial.root))
        return self._serial_ends[did]

    def run(self, nth: int) -> tuple[Result, Result]:
        """Run both; the first stops before its nth call, or runs before the second."""
        self.trial.reset()
        go, may_go = os.pipe()
        told, tell = os.pipe()

        def wait_for_start() -> None:
            os.close(told)
            os.close(may_go)
            os.read(go, 1)  # or the other has ended
            tell_when_waiting(lambda: os.write(tell, b"w"))
            if self.prepare is not None:
                self.prepare()

        def start_other() -> None:
            os.write(may_go, b"g")
            select.select([told], [], [], MAX_PAUSE)

        second = Child(self.args[1], self.trial.here, prepare=wait_for_start)
        os.close(tell)
        os.close(go)
        fault = Fault(nth, 0)
        first = Child(self.args[0], self.trial.here, fault, prepare=self.prepare, meet=start_other)
        os.close(may_go)
        os.close(told)
        return first.wait(), second.wait()

    def judge(self, nth: int) -> None:
        """Run both, and check what they said and left, and that the first command then works."""
        results = self.run(nth)
        left = walk_tree(self.trial.root)
        where = f"{self.both}: stopped at call {nth}: {results}"
        for result in results:
            check_text(result, where)
            require(result.code in (0, 1, 2), ANSWERED, where)
        did_second = results[1].code == 0
        if (left, did_second) not in self._judged:
            self._judge_again(left, where, did_second=did_second)
            self._judged.append((left, did_second))
        expected = self.list_serial_ends(results[0].code == 0, did_second)
        require(left in expected, ALL_OR_NONE, f"{where}: left {sorted(left)}")
        is_disturbed = any(os.strerror(errno.ENOENT) in result.err for result in results)
        require(not is_disturbed, ANSWERED, f"a run lost its files to the other: {where}")

    def _judge_again(self, left: Tree, where: str, *, did_second: bool) -> None:
        """Check that the first command works now, unless the second has given another token."""
        again = Child(self.args[0], self.trial.here).wait()
        after = walk_tree(self.trial.root)
        check_text(again, f"{where}: then {again}")
        is_other_token = again.code == 1 and did_second and after == left
        is_completed = is_other_token or (again.code, after) == (0, self.alone)
        require(is_completed, COMPLETED, f"{where}: then {again}")


def tell_when_waiting(tell: Callable[[], object]) -> None:
    """Call a function from now on when this process is about to wait for a lock."""
    real = fcntl.flock

    def flock(descriptor: Any, operation: int) -> None:
        try:
            real(descriptor, operation | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno != errno.EWOULDBLOCK:
                raise
            tell()
            if operation & fcntl.LOCK_NB:
                raise
            real(descriptor, operation)

    fcntl.flock = flock


def list_places(race: Race) -> range:
    """Return the calls at which the first run stops: of many, every other one.

    Past the last one, the second run runs after it.
    """
    calls = len(race.trial.count())
    return range(1, calls + 2, 2 if calls > MANY_CALLS else 1)


@pytest.mark.parametrize("both", BOTH, ids=str)
def test_two_runs_at_once_end_as_one_after_the_other(both: TwoRuns, sample: Sample) -> None:
    with in_memory() as root:
        race = Race(both, root)
        for nth in sample(list_places(race), 1):
            race.judge(nth)


def test_two_runs_that_write_in_place_are_caught() -> None:
    """The control: of a set that is written in place without locks, the second run reads a half."""
    with in_memory() as root:
        race = Race(BOTH[4], root, ignore_locks)
        last = len(race.trial.count())
        assert any(is_broken(race, nth) for nth in range(last - 10, last))


def ignore_locks() -> None:
    """Write into the targets themselves, and take no lock."""
    write_in_place()
    fcntl.flock = lambda *args: None


def is_broken(race: Race, nth: int) -> bool:
    """Return whether two runs ended otherwise than one after the other."""
    try:
        race.judge(nth)
    except AssertionError:
        return True
    return False
