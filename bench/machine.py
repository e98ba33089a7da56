"""The machine that the benchmark ran on."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any


def describe(work: Path) -> dict[str, Any]:
    cores = os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": _field("/proc/cpuinfo", "model name"),
        "cores": cores,
        "memory_gib": round(memory / 2**30),
        "kernel": f"{platform.system()} {platform.release()}",
        "filesystem": _filesystem(work),
        "free_gb": round(shutil.disk_usage(work).free / 1e9),
        "python": platform.python_version(),
        "cp": _first_line("/bin/cp", "--version"),
        "load": [round(load, 2) for load in os.getloadavg()],
    }


def _field(path: str, name: str) -> str:
    for line in Path(path).read_text().splitlines():
        if line.startswith(name):
            return line.partition(":")[2].strip()
    return platform.machine()


def _filesystem(path: Path) -> str:
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    holding = [(at, kind) for at, kind in mounts if path.resolve().is_relative_to(at)]
    return max(holding, key=lambda mount: len(mount[0]))[1]


def _first_line(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.partition("\n")[0]
