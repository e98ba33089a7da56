"""What hostile files cost: memory and CPU of each command on many files, at n, 2n and 4n bytes.

    python bench/hostile.py                     # all files, rename --check: about 10 minutes
    python bench/hostile.py -c inspect -k dims  # one command, the files with "dims" in their names
    python bench/hostile.py -c all -o costs.json

A line for each file and command: bytes, megabytes of memory above an idle run of the same
command, seconds of CPU a megabyte, and how both grow from half the size to all of it.
An exclamation mark is before what exceeds the limits below. The exit code is 1 if anything does.

Other work on the machine makes CPU time longer, too: each time is divided by how much longer a
loop takes beside it than it took at best, and what exceeds a limit is measured again.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from faults import hostile_inputs, hostile_texts

BASE_MB = 40.0
"""Megabytes of memory that any file may cost,"""
FACTOR = 4.0
"""plus this many times its size."""
CPU_PER_MB = 1.0
"""Seconds of CPU for a megabyte."""
GROWTH = 2.3
"""Growth of CPU when the size doubles; only where there is enough of it to measure."""
_MEASURABLE_CPU = 0.15
_TIME_LIMIT = 60
_TRIES = 3

Command = Callable[[Path, Path], list[str]]
"""Makes arguments from a small valid model and a hostile file."""

MODEL_COMMANDS: dict[str, Command] = {
    "rename --check": lambda model, file: ["--prefix", "VLLM", "--check", str(file)],
    "rename": lambda model, file: ["--prefix", "VLLM", "-o", f"{file}.out", str(file)],
    "rename --strip": lambda model, file: ["--strip", "-o", f"{file}.out", str(file)],
    "verify": lambda model, file: ["verify", str(file)],
    "verify --target": lambda model, file: ["verify", str(file), "--target", "vllm-qaic"],
    "inspect": lambda model, file: ["inspect", str(file)],
    "inspect --format json": lambda model, file: ["inspect", "--format", "json", str(file)],
    "pairs": lambda model, file: ["pairs", str(file)],
    "rules": lambda model, file: ["pairs", "--as", "rules", str(file)],
    "inspect --vllm": lambda model, file: ["inspect", "--vllm", str(file)],
    "compare": lambda model, file: ["compare", str(file), str(model)],
}
SIDECAR_COMMANDS: dict[str, Command] = {
    "rename --sidecar": lambda model, file: [
        *("--prefix", "VLLM", "-d", f"{file}.out", "--sidecar", str(file), str(model)),
    ],
}
LAYOUT_COMMANDS: dict[str, Command] = {
    "compare": lambda model, file: ["compare", str(file), str(model)],
}


class Kind(NamedTuple):
    """Hostile files of one kind: the name that they get, their builders, and their commands."""

    file_name: str
    builders: dict[str, hostile_inputs.Build]
    commands: dict[str, Command]


KINDS = {
    "model": Kind("m.onnx", hostile_inputs.MODELS, MODEL_COMMANDS),
    "json": Kind("aic_batch_io.json", hostile_texts.JSON_SIDECARS, SIDECAR_COMMANDS),
    "yaml": Kind("custom_io.yaml", hostile_texts.YAML_SIDECARS, SIDECAR_COMMANDS),
    "layout": Kind("layout.json", hostile_texts.LAYOUT_FILES, LAYOUT_COMMANDS),
}


class Pace:
    """How fast this machine is just now, against how fast it was at best."""

    def __init__(self) -> None:
        self.best = min(self.run_loop() for _ in range(20))

    def run_loop(self) -> float:
        """Return the seconds of CPU that a loop of Python takes."""
        start, counts = time.process_time(), {}
        for number in range(60_000):
            counts[number & 1023] = number
        return time.process_time() - start

    def slowness(self) -> float:
        """Return how many times longer than at best the loop takes."""
        now = self.run_loop()
        self.best = min(self.best, now)
        return now / self.best


class Cost(NamedTuple):
    """What one run costs.

    Attributes:
        size: The bytes of the file.
        cpu: Seconds of CPU.
        memory: Megabytes at the peak.
        code: The exit code; negative for a signal.
        output: The last line on stderr.
    """

    size: int
    cpu: float
    memory: float
    code: int
    output: str


def measure(arguments: list[str], size: int, directory: Path, pace: Pace) -> Cost:
    """Run a command in a fork of this process, which has nothing large in memory."""
    before = pace.slowness()
    with (directory / "output").open("w+b") as output:
        pid = os.fork()
        if pid == 0:
            _run_child(arguments, output.fileno())
        _, status, usage = os.wait4(pid, 0)
        output.seek(0)
        lines = output.read(1 << 16).decode("utf-8", "replace").splitlines() or [""]
    bug = next((line for line in lines if "Traceback" in line or "bug" in line), "")
    cpu = (usage.ru_utime + usage.ru_stime) * 2 / (before + pace.slowness())
    code = os.waitstatus_to_exitcode(status)
    return Cost(size, cpu, usage.ru_maxrss / 1024, code, bug or lines[-1][:100])


def _run_child(arguments: list[str], output: int) -> None:
    code = 99
    try:
        resource.setrlimit(resource.RLIMIT_CPU, (_TIME_LIMIT, _TIME_LIMIT))
        resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0), os.dup2(null, 1), os.dup2(output, 2)
        from onnxkvrename.cli.main import main

        code = main(arguments)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 98
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def build_in_child(build: hostile_inputs.Build, size: int, path: Path) -> int:
    """Write a file from another process, so that this one stays small; return its size."""
    pid = os.fork()
    if pid == 0:
        path.write_bytes(build(size))
        os._exit(0)
    os.waitpid(pid, 0)
    return path.stat().st_size


def measure_all(options: argparse.Namespace, directory: Path) -> Iterator[dict[str, Any]]:
    """Measure every command on every file that was asked for."""
    model = directory / "small" / "small.onnx"
    model.parent.mkdir()
    model.write_bytes(hostile_inputs.model())
    idle: dict[tuple[str, str], Cost] = {}
    pace = Pace()
    for kind_name, kind in KINDS.items():
        for name, build in kind.builders.items():
            if options.keyword not in f"{kind_name}: {name}":
                continue
            for command_name, command in kind.commands.items():
                if not _is_selected(command_name, kind, options.command):
                    continue
                key = kind_name, command_name
                if key not in idle:
                    idle[key] = _measure_file(kind, command, build, 0, model, pace)
                costs: list[Cost] = []
                for _ in range(_TRIES):
                    more = [
                        _measure_file(kind, command, build, options.size >> shift, model, pace)
                        for shift in (2, 1, 0)
                    ]
                    costs = list(map(min, costs, more)) if costs else more
                    row = _sum_up(f"{kind_name}: {name}", command_name, costs, idle[key])
                    if not row["problems"]:
                        break
                yield row


def _is_selected(name: str, kind: Kind, wanted: str | None) -> bool:
    if wanted is None:
        return name == next(iter(kind.commands))
    return wanted == "all" or wanted == name


def _measure_file(
    kind: Kind, command: Command, build: hostile_inputs.Build, size: int, model: Path, pace: Pace
) -> Cost:
    with tempfile.TemporaryDirectory(dir=model.parent.parent) as folder:
        file = Path(folder) / kind.file_name
        if size:
            size = build_in_child(build, size, file)
        elif kind.file_name == "m.onnx":
            file.write_bytes(model.read_bytes())
        else:
            file.write_bytes(b"")
        own = Path(folder) / "small.onnx"
        own.write_bytes(model.read_bytes())
        return measure(command(own, file), size, Path(folder), pace)


def _sum_up(name: str, command: str, costs: list[Cost], idle: Cost) -> dict[str, Any]:
    last, half = costs[-1], costs[-2]
    size_mb = last.size / 1e6
    cpus = [max(cost.cpu - idle.cpu, 0.001) for cost in costs]
    memory = last.memory - idle.memory
    growth = max(b / a if b > _MEASURABLE_CPU else 1.0 for a, b in pairwise(cpus))
    problems = [
        *(["memory"] if memory > BASE_MB + FACTOR * size_mb else []),
        *(["CPU"] if cpus[-1] > max(CPU_PER_MB * size_mb, _MEASURABLE_CPU) else []),
        *(["growth"] if growth > GROWTH * last.size / half.size / 2 else []),
        *(["crash"] if last.code not in (0, 1, 2) or "bug" in last.output else []),
        *(["traceback"] if "Traceback" in last.output else []),
    ]
    return {
        "file": name,
        "command": command,
        "bytes": last.size,
        "memory_mb": round(memory, 1),
        "cpu": round(cpus[-1], 2),
        "cpu_per_mb": round(cpus[-1] / size_mb, 2),
        "growth": round(growth, 2),
        "exit_code": last.code,
        "last_line": last.output,
        "problems": problems,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("-c", "--command", help="a command, or `all`; by default the first one")
    parser.add_argument("-k", "--keyword", default="", help="only files with this in their names")
    parser.add_argument("-s", "--size", type=int, default=1 << 20, help="bytes of the largest file")
    parser.add_argument("-o", "--output", type=Path, help="also write all results here, as JSON")
    options = parser.parse_args()
    import_module("onnxkvrename.cli.main")  # for all forked processes
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        for row in measure_all(options, Path(directory)):
            rows.append(row)
            mark = "!" if row["problems"] else " "
            print(
                f"{mark} {row['file']:45} {row['command']:22} {row['bytes']:>9,} B "
                f"{row['memory_mb']:7.1f} MB {row['cpu']:6.2f} s {row['cpu_per_mb']:6.2f} s/MB "
                f"x{row['growth']:.2f} {row['exit_code']:2} {','.join(row['problems'])} "
                f"{row['last_line'] if options.keyword else ''}",
                flush=True,
            )
    if options.output is not None:
        options.output.write_text(json.dumps(rows, indent=1))
    return int(any(row["problems"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
