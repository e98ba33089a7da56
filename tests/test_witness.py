"""Projections are what vLLM's own code plans, allocates and registers, from its wheels."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from judge_vllm import judge_seeds, render_figures
from tiers import full
from vllmwheel import HAS_TORCH, find_wheel
from witness import Witness

ROOT = Path(__file__).resolve().parent.parent
PYTHON = ROOT / "build" / "witness" / "venv" / "bin" / "python"
"""The interpreter that ``make witness`` gives torch."""
VERSIONS = ["0.24.0", "0.33.0"]
FIGURES = re.search(
    r"<!-- witness -->\n```\n(.*?)```", (ROOT / "docs" / "vllm.md").read_text("utf-8"), re.DOTALL
)


def read_documented_figures() -> dict[str, dict[str, int]]:
    """What docs/vllm.md says of each subject, by version: how often both agree, which is always.

    A cell such as "1 of 2" is not a number.
    """
    assert FIGURES is not None
    (_, *versions), *rows = (re.split(r" {2,}", line) for line in FIGURES[1].splitlines())
    return {
        version: {row[0]: int(row[number].replace(",", "")) for row in rows if row[number] != "0"}
        for number, version in enumerate(versions, 1)
    }


def test_the_documented_figures_leave_nothing_in_which_both_differ() -> None:
    figures = read_documented_figures()
    assert [*figures] == VERSIONS
    for subjects in figures.values():
        assert {"regions", "descriptors", "bytes", "canonical view"} <= subjects.keys()
        for pairs in ("pairs of workers", "workers with lines"):
            decided = [subjects[f"{pairs} that vLLM {does}"] for does in ("accepts", "refuses")]
            assert sum(decided) >= 2000


def test_figures_are_documented_as_the_judge_prints_them() -> None:
    assert FIGURES is not None
    figures = {
        version: {subject: [count, count] for subject, count in subjects.items()}
        for version, subjects in read_documented_figures().items()
    }
    assert render_figures(figures, 3200) == FIGURES[1]
    figures["0.24.0"]["regions"][0] -= 1
    assert "3,231 of 3,232" in render_figures(figures, 3200)


def test_as_many_architectures_are_documented_as_make_draws() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    count = re.search(r"^COUNT = (\d+)$", makefile, re.MULTILINE)
    assert count is not None
    assert FIGURES is not None
    drawn = f"{int(count[1]):,} architectures"
    assert FIGURES[1].startswith(drawn)
    assert f"draws {drawn}" in FIGURES.string


@pytest.mark.parametrize("version", VERSIONS)
@full
def test_groups_pages_and_places_are_what_vllm_plans(version: str) -> None:
    counts, disagreements = judge_seeds(Witness(version), range(600))
    assert disagreements == []
    assert counts["refusals of groups", True] > 400
    assert counts["groups and pages", True] > 400
    assert counts["places, strides and sizes", True] > 400


@pytest.mark.parametrize("version", VERSIONS)
@full
def test_regions_descriptors_and_views_are_what_vllm_registers(version: str) -> None:
    wheel = find_wheel(version)
    if isinstance(wheel, str):
        pytest.skip(wheel)
    python = sys.executable if HAS_TORCH else str(PYTHON)
    if not HAS_TORCH and not PYTHON.exists():
        pytest.skip("no torch to allocate KV caches with: make witness")
    command = [python, ROOT / "tests/judge_vllm.py", "-n", "80", "-j", "1", "-v", version, "--json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    figures = json.loads(done.stdout)[version]
    assert figures.keys() <= read_documented_figures()[version].keys()
    pairs = [figures[f"pairs of workers that vLLM {does}"] for does in ("accepts", "refuses")]
    assert all(agreed == compared > 15 for agreed, compared in pairs)
    subjects = ("refusals of NIXL", "regions", "descriptors", "bytes", "canonical view")
    for subject in (*subjects, "transfers, descriptors, bytes of reads"):
        agreed, compared = figures[subject]
        assert agreed == compared > 50, subject
