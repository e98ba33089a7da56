"""What a window costs in a set: `python bench/sets.py`.

Renames and strips sets of 1, 2, 12, 94 and 500 windows of 2 MB in place, by turns, and prints the
median time, CPU and memory, beside `cp` of the same files. A window's share is taken from the set
of 12, without the start of the program.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import window_sets  # noqa: E402

COUNTS = (1, 2, 12, 94, 500)
SIZE = 2_000_000


def timed(command: list[str]) -> tuple[float, float, int]:
    """Seconds, CPU seconds, and peak memory in kB of a command with all its processes."""
    os.sync()
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    taken = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, command
    return taken, used.ru_utime + used.ru_stime, used.ru_maxrss


def rows(work: Path, rounds: int, jobs: list[str]) -> Iterator[tuple[int, list[float]]]:
    tool = [sys.executable, "-m", "onnxkvrename"]
    sets = {n: window_sets.write_windows(work / str(n), n, weights=SIZE) for n in COUNTS}
    found: dict[int, list[tuple[float, float, float, float]]] = {n: [] for n in COUNTS}
    for _ in range(rounds):
        for count, root in sets.items():
            ours = timed([*tool, str(root), "--prefix", "VLLM", "-q", *jobs])
            copy = timed(["cp", "-r", str(root), str(work / "copy")])
            shutil.rmtree(work / "copy")
            timed([*tool, str(root), "--strip", "-q"])
            found[count].append((*ours, copy[0]))
    for count, runs in found.items():
        yield count, [statistics.median(column) for column in zip(*runs, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--jobs", help="as the tool's own; by default its own choice")
    parser.add_argument("--work", type=Path, default=None, help="where to write 3 GB")
    chosen = parser.parse_args()
    jobs = ["--jobs", chosen.jobs] if chosen.jobs else []
    print(f"{platform.platform()}, Python {platform.python_version()}, {os.cpu_count()} cores")
    print("windows  seconds  CPU s  peak MB  cp s  ms a window")
    with tempfile.TemporaryDirectory(dir=chosen.work) as work:
        table = dict(rows(Path(work), chosen.rounds, jobs))
    for count, (taken, cpu, peak, copied) in table.items():
        each = (taken - table[1][0]) / (count - 1) * 1000 if count > 1 else float("nan")
        numbers = f"{taken:8.2f} {cpu:6.2f} {peak / 1000:8.1f} {copied:5.2f} {each:8.1f}"
        print(f"{count:7} {numbers}")
    start, share = table[1][0], (table[12][0] - table[1][0]) / 11
    print(f"500 windows: {table[500][0] / (start + 499 * share):.2f} of start + 499 shares")


if __name__ == "__main__":
    main()
