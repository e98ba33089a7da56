"""Check for which Python versions and systems a plain `pip install` needs no compiler.

Resolves the dependencies in pyproject.toml for each target with wheels only, by uv's
resolver (`pip install uv`): pip itself reads environment markers for the Python that
it runs on, not for the target. Uses the package index that uv is set up with, and
installs nothing.

    python bench/resolve.py                # the base install
    python bench/resolve.py --extra dask   # together with an extra

Prints a Markdown table. A cell says ok, or which distribution has no wheel. Exits
with 1 if a target that the classifiers promise does not resolve, or if a version
resolves everywhere without a classifier.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import tomllib

PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14", "3.15")
PLATFORMS = {
    "Linux x86_64 (glibc 2.28)": "x86_64-manylinux_2_28",
    "Linux aarch64 (glibc 2.28)": "aarch64-manylinux_2_28",
    "macOS arm64": "aarch64-apple-darwin",
    "Windows amd64": "x86_64-pc-windows-msvc",
}
CLASSIFIER = "Programming Language :: Python :: "
NO_WHEEL = re.compile(r"([A-Za-z0-9._-]+?)(?:[<>=!~][^\s]*)? has no (?:usable )?wheels")


def main() -> int:
    """Print the table, and compare it with the classifiers."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--extra", action="append", default=[], help="also resolve this extra")
    extras = parser.parse_args().extra
    pyproject = Path(__file__).resolve().parents[1] / "pyproject.toml"
    project = tomllib.loads(pyproject.read_text("utf-8"))["project"]
    requirements = list_requirements(project, extras)
    print(f"| Python | {' | '.join(PLATFORMS)} |")
    print("|---" * (len(PLATFORMS) + 1) + "|")
    resolved = []
    for python in PYTHONS:
        problems = [find_problem(requirements, python, target) for target in PLATFORMS.values()]
        print(f"| {python} | {' | '.join(problem or 'ok' for problem in problems)} |", flush=True)
        if not any(problems):
            resolved.append(python)
    promised = [
        text.removeprefix(CLASSIFIER)
        for text in project["classifiers"]
        if text.startswith(CLASSIFIER) and "." in text.removeprefix(CLASSIFIER)
    ]
    if extras or promised == resolved:
        return 0
    print(f"the classifiers promise {promised}, but {resolved} resolve", file=sys.stderr)
    return 1


def list_requirements(project: dict[str, Any], extras: list[str]) -> str:
    """Return the requirements of a project and some of its extras, one a line."""
    groups = [project["dependencies"], *(project["optional-dependencies"][e] for e in extras)]
    return "\n".join(line for group in groups for line in group)


def find_problem(requirements: str, python: str, platform: str) -> str | None:
    """Return what keeps requirements from being resolved with wheels, or `None`."""
    command = ["uv", "pip", "compile", "--quiet", "--only-binary", ":all:", "--no-header"]
    options = ["--python-version", python, "--python-platform", platform, "-"]
    process = subprocess.run(command + options, input=requirements, capture_output=True, text=True)
    if process.returncode == 0:
        return None
    message = " ".join(process.stderr.split())
    names = sorted(set(NO_WHEEL.findall(message)))
    return f"no wheel: {', '.join(names)}" if names else message[:200]


if __name__ == "__main__":
    sys.exit(main())
