"""Projections are what vLLM's own code plans, allocates and registers, from its wheel."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from build_layouts import build_attention, build_layers, build_mla
from judge_vllm import judge_seeds, render_figures
from tiers import full
from vllmwheel import HAS_TORCH, DType, find_wheel
from witness import Witness

from onnxkvrename.vllm.projection import project_layout
from onnxkvrename.vllm.specs import ProjectionRequest

ROOT = Path(__file__).resolve().parent.parent
PYTHON = ROOT / "build" / "witness" / "venv" / "bin" / "python"
"""The interpreter that ``make witness`` gives torch."""
FIGURES = re.search(
    r"<!-- witness -->\n```\n(.*?)```", (ROOT / "docs" / "inspect.md").read_text("utf-8"), re.DOTALL
)


def read_documented_figures() -> dict[str, int]:
    """What docs/inspect.md says of each subject: how often both agree, which is always.

    A cell such as "1 of 2" is not a number.
    """
    assert FIGURES is not None
    _, *rows = (re.split(r" {2,}", line) for line in FIGURES[1].splitlines())
    return {subject: int(count.replace(",", "")) for subject, count in rows}


def test_the_documented_figures_leave_nothing_in_which_both_differ() -> None:
    figures = read_documented_figures()
    assert {"regions", "descriptors", "bytes", "canonical view"} <= figures.keys()
    assert min(figures.values()) > 100


def test_figures_are_documented_as_the_judge_prints_them() -> None:
    assert FIGURES is not None
    documented = read_documented_figures()
    figures = {subject: [count, count] for subject, count in documented.items()}
    assert render_figures(figures, 3200) == FIGURES[1]
    regions = documented["regions"]
    figures["regions"][0] -= 1
    assert f"{regions - 1:,} of {regions:,}" in render_figures(figures, 3200)


def test_as_many_architectures_are_documented_as_make_draws() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    count = re.search(r"^COUNT = (\d+)$", makefile, re.MULTILINE)
    assert count is not None
    assert FIGURES is not None
    drawn = f"{int(count[1]):,} architectures"
    assert FIGURES[1].startswith(drawn)
    assert f"draws {drawn}" in FIGURES.string


@full
def test_groups_pages_and_places_are_what_vllm_plans() -> None:
    counts, disagreements = judge_seeds(Witness(), range(600))
    assert disagreements == []
    assert counts["refusals of groups", True] > 400
    assert counts["groups and pages", True] > 400
    assert counts["places, strides and sizes", True] > 400


@full
def test_regions_descriptors_and_views_are_what_vllm_registers() -> None:
    wheel = find_wheel()
    if isinstance(wheel, str):
        pytest.skip(wheel)
    python = sys.executable if HAS_TORCH else str(PYTHON)
    if not HAS_TORCH and not PYTHON.exists():
        pytest.skip("no torch to allocate KV caches with: make witness")
    command = [python, ROOT / "tests/judge_vllm.py", "-n", "80", "-j", "1", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    figures = json.loads(done.stdout)
    assert figures.keys() <= read_documented_figures().keys()
    for subject in ("refusals of NIXL", "regions", "descriptors", "bytes", "canonical view"):
        agreed, compared = figures[subject]
        assert agreed == compared > 50, subject


@full
def test_pages_of_fp8_are_vllms() -> None:
    interface = Witness().interface
    request = ProjectionRequest(64, kv_cache_dtype="fp8")
    (ours,) = project_layout(build_layers(build_attention(0)), request).specs
    quantized = {"dtype": DType("uint8", 1), "kv_quant_mode": interface.KVQuantMode.FP8_PER_TENSOR}
    spec = interface.FullAttentionSpec(block_size=64, num_kv_heads=8, head_size=64, **quantized)
    assert spec.page_size_bytes == ours.page_size == 65_536
    latent = interface.MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=576, **quantized)
    (ours,) = project_layout(build_layers(build_mla(0)), request).specs
    assert latent.page_size_bytes == ours.page_size == 36_864


@full
def test_rows_of_fp8_ds_mla_are_vllms() -> None:
    request = ProjectionRequest(64, kv_cache_dtype="fp8_ds_mla")
    (ours,) = project_layout(build_layers(build_mla(0)), request).specs
    spec = Witness().interface.MLAAttentionSpec(
        block_size=64,
        num_kv_heads=1,
        head_size=576,
        dtype=DType("uint8", 1),
        cache_dtype_str="fp8_ds_mla",
    )
    assert spec.page_size_bytes == ours.page_size == 64 * 656
