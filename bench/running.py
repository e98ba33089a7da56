"""One run after the other: prove a result first, then time it round by round."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from contenders import Contender
from environments import BENCH, Environments
from workloads import Workload

LIMIT = 900.0  # seconds, then a run is stopped and has failed
SLOW = 60.0  # seconds, beyond which one run has to do
BRIEF = 3.0  # seconds, below which a round has several turns, for noise weighs more
TURNS = 4
CHUNK = 1 << 20
VARIABLES = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LC_ALL": "C.UTF-8", "HOME": "/nonexistent"}


@dataclass(frozen=True)
class Run:
    round: int  # 0 is the proving run
    code: int
    wall: float
    cpu: float
    rss: float  # MB


@dataclass
class Entry:
    """One contender on one workload."""

    workload: Workload
    contender: Contender
    verdict: str = ""
    words: list[str] = field(default_factory=list)
    digest: str = ""
    runs: list[Run] = field(default_factory=list)

    @property
    def once(self) -> bool:
        """Failed, or so slow that the proving run has to do."""
        return self.verdict == "failed" or self.runs[0].wall > SLOW

    def counted(self) -> list[Run]:
        return self.runs if self.once else [run for run in self.runs if run.round]

    def summary(self) -> dict[str, Any]:
        runs = self.counted()
        medians = {
            what: statistics.median(getattr(run, what) for run in runs)
            for what in ("wall", "cpu", "rss")
        }
        walls = [run.wall for run in runs]
        return {
            "name": self.contender.name,
            "kind": self.contender.kind,
            "verdict": self.verdict,
            "words": self.words,
            "once": self.once,
            "median": medians,
            "spread": (max(walls) - min(walls)) / medians["wall"],
            "runs": [vars(run) for run in self.runs],
        }


@dataclass(frozen=True)
class Bench:
    environments: Environments
    work: Path

    @property
    def log(self) -> Path:
        return self.work / "run.log"

    def measure(self, entries: Sequence[Entry], rounds: int) -> None:
        """Side by side: a proving run of each, then rounds that each start one further on."""
        for entry in entries:
            self.prove(entry)
        repeated = [entry for entry in entries if not entry.once]
        brief = [entry for entry in repeated if entry.runs[0].wall < BRIEF]
        for number in range(1, rounds + 1):
            self.time_all(repeated, number)
            for _ in range(TURNS - 1):
                self.time_all(brief, number)

    def time_all(self, entries: Sequence[Entry], number: int) -> None:
        first = number % max(1, len(entries))
        for entry in (*entries[first:], *entries[:first]):
            self.time(entry, number)

    def prove(self, entry: Entry) -> None:
        """Run once and have the result judged."""
        run = self.run(entry, 0)
        entry.runs.append(run)
        entry.verdict, entry.words = self.verdict(entry, run)
        entry.digest = digest(entry.workload)
        entry.workload.clear()
        _say(f"{_label(entry)}: {run.wall:.2f} s, {entry.verdict} {'; '.join(entry.words)[:200]}")

    def time(self, entry: Entry, number: int) -> None:
        """Run once more; a result that differs from the proved one is judged again."""
        run = self.run(entry, number)
        entry.runs.append(run)
        if run.code or digest(entry.workload) != entry.digest:
            verdict, words = self.verdict(entry, run)
            if verdict != entry.verdict:
                entry.verdict = verdict
                entry.words = [*entry.words, f"in round {number}: {verdict}", *words]
        entry.workload.clear()

    def run(self, entry: Entry, number: int) -> Run:
        """A fresh process, its inputs in the page cache, no older result, nothing left to sync."""
        workload = entry.workload
        workload.clear()
        before = [_state(path) for path in workload.inputs()]
        for path in workload.inputs():
            _read(path)
        os.sync()
        code, wall, cpu, rss = self.process(
            entry.contender.command(self.environments, workload), self.log
        )
        if before != [_state(path) for path in workload.inputs()]:
            raise SystemExit(f"{_label(entry)} changed its source or left files beside it")
        return Run(number, code, round(wall, 4), round(cpu, 4), round(rss, 1))

    def process(self, command: list[str], log: Path) -> tuple[int, float, float, float]:
        """Exit code, wall seconds, CPU seconds, peak MB."""
        measure = [sys.executable, "-I", "-S", str(BENCH / "measure.py"), str(log), *command]
        with subprocess.Popen(
            measure, stdout=subprocess.PIPE, text=True, env=VARIABLES, start_new_session=True
        ) as helper:
            try:
                answer, _ = helper.communicate(timeout=LIMIT)
            except subprocess.TimeoutExpired:
                os.killpg(helper.pid, signal.SIGKILL)
                return (-signal.SIGKILL, LIMIT, LIMIT, 0.0)
        if helper.returncode:
            raise SystemExit(f"could not run {command[0]}")
        code, wall, cpu, rss = answer.split()
        return int(code), float(wall), float(cpu), int(rss) * 1024 / 1e6

    def verdict(self, entry: Entry, run: Run) -> tuple[str, list[str]]:
        if run.code:
            return "failed", [f"exit {run.code}: {self.last_line()}"]
        if entry.contender.kind == "limit" or not entry.workload.sources:
            return "", []
        found = entry.workload.found()
        missing = [source.name for source, target in found if target is None]
        if missing:
            return "wrong", [f"exit 0 and no result for {', '.join(missing)}"]
        return self.judge((source, target) for source, target in found if target)

    def judge(self, pairs: Iterable[tuple[Path, Path]]) -> tuple[str, list[str]]:
        paths = [str(path) for pair in pairs for path in pair]
        command = [self.environments.python("onnx"), str(BENCH / "oracle.py"), *paths]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return "wrong", [f"cannot be read: {_last_line(done.stderr)}"]
        answer = json.loads(done.stdout)
        return answer["verdict"], answer["words"]

    def last_line(self) -> str:
        return _last_line(self.log.read_text(errors="replace"))


def digest(workload: Workload) -> str:
    """A hash over all results."""
    total = hashlib.blake2b()
    for _, target in workload.found():
        if target:
            with target.open("rb") as file:
                while block := file.read(CHUNK):
                    total.update(block)
    return total.hexdigest()


def _read(path: Path) -> None:
    buffer = bytearray(CHUNK)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def _state(path: Path) -> tuple[str, int, int]:
    about = path.stat()
    return (path.name, about.st_size, about.st_mtime_ns)


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "no message"


def _label(entry: Entry) -> str:
    return f"({entry.workload.key}) {entry.contender.name}"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
