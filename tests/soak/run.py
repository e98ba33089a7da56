"""Try for an hour what the tests try for a minute, and say what was run and what it found.

    python -m tests.soak --minutes 60 --json soak.json

Each part gets a share of the time and a process of its own; as many run at once as there are
processors. A part that the system cannot run (strace, root, a loop device) is skipped and says
why. The exit code is 1 if anything was found, or if a control was not caught: a program that is
broken on purpose, which shows that the part can find something.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from soak.parts import Part

ROOT = Path(__file__).resolve().parents[2]
PARTS = {
    "calls": ("soak.calls", 6.0),
    "system calls": ("soak.system_calls", 4.0),
    "power cuts": ("soak.power", 3.0),
    "races": ("soak.races", 2.0),
    "external data": ("soak.external_data", 2.0),
    "fuzzing": ("soak.fuzz", 5.0),
}
"""The module of each part, and its share of the time."""


def run_part(name: str, minutes: float, seed: int, path: Path) -> None:
    """Run one part, in a process of its own, and write what it did into a file."""
    part = Part(name, time.monotonic() + 60 * minutes, seed)
    try:
        run: Callable[[Part], None] = import_module(PARTS[name][0]).run
        run(part)
    except Exception:
        part.fail(traceback.format_exc())
    path.write_text(json.dumps(part.build_document()), "utf-8")


def run_parts(names: list[str], minutes: float, jobs: int, seed: int) -> list[dict[str, Any]]:
    """Run parts, `jobs` at a time, in `minutes` altogether; return their records."""
    total = sum(PARTS[name][1] for name in names)
    waiting = sorted(names, key=lambda name: -PARTS[name][1])
    records: dict[str, dict[str, Any]] = {}
    running: dict[str, multiprocessing.Process] = {}
    with tempfile.TemporaryDirectory() as directory:
        while waiting or running:
            while waiting and len(running) < jobs:
                name = waiting.pop(0)
                share = min(minutes, minutes * jobs * PARTS[name][1] / total)
                path = Path(directory, name)
                process = multiprocessing.Process(
                    target=run_part, args=(name, share, seed, path), name=name
                )
                process.start()
                running[name] = process
                print(f"{name}: {share:.1f} minutes", flush=True)
            time.sleep(0.2)
            for name in [name for name, process in running.items() if not process.is_alive()]:
                running.pop(name).join()
                path = Path(directory, name)
                text = path.read_text("utf-8") if path.exists() else None
                records[name] = json.loads(text) if text else _build_lost_record(name)
                print(_format_record(records[name]), flush=True)
    return [records[name] for name in names]


def _build_lost_record(name: str) -> dict[str, Any]:
    part = Part(name, 0, 0)
    part.fail("the process of this part ended before it could say anything")
    return part.build_document()


def is_clean(record: dict[str, Any]) -> bool:
    """Return whether a part found nothing, and its controls were caught."""
    return record["failed"] == 0 and all(record["controls"].values())


def describe_machine() -> dict[str, Any]:
    """Return what it ran on."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    return {
        "commit": commit.stdout.strip(),
        "python": platform.python_version(),
        "system": platform.platform(),
        "processors": os.cpu_count(),
        "root": hasattr(os, "geteuid") and os.geteuid() == 0,
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
    }


def _format_record(record: dict[str, Any]) -> str:
    if record["skipped"]:
        return f"{record['part']:14} skipped: {record['skipped']}"
    caught = sum(record["controls"].values())
    return (
        f"{record['part']:14} {record['cases']:>12,} cases {record['seconds']:>6,} s "
        f"{record['failed']:>6,} findings, {caught} of {len(record['controls'])} controls caught"
    )


def main() -> int:
    """Run the soak; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=60, help="how long altogether (60)")
    parser.add_argument("--part", action="append", choices=list(PARTS), help="only this part")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="parts at a time")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="decides on the order")
    parser.add_argument("--json", type=Path, help="also write what was run and found here")
    arguments = parser.parse_args()
    os.environ["PYTHONPATH"] = str(ROOT)
    names = arguments.part or list(PARTS)
    machine = describe_machine()
    print(f"seed {arguments.seed}, {machine}", flush=True)
    records = run_parts(names, arguments.minutes, arguments.jobs, arguments.seed)
    print()
    for record in records:
        print(_format_record(record))
        for kind, number in record["kinds"].items():
            print(f"    {kind}: {number:,}")
        for name, was_caught in record["controls"].items():
            print(f"    control {'caught' if was_caught else 'NOT CAUGHT'}: {name}")
        for failure in record["failures"]:
            print(f"    FOUND {failure}")
    if arguments.json:
        document = {
            "seed": arguments.seed,
            "minutes": arguments.minutes,
            **machine,
            "parts": records,
        }
        arguments.json.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    return 0 if all(map(is_clean, records)) else 1


if __name__ == "__main__":
    sys.exit(main())
