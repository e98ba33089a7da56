"""A projection onto vLLM for a person."""

from __future__ import annotations

from pathlib import Path

import pytest

from onnxkvrename import load_rules
from onnxkvrename.layout.load import CompileInfo, load_layout
from onnxkvrename.report.vllm_text import render_projection
from onnxkvrename.vllm.projection import project_layout
from onnxkvrename.vllm.specs import ProjectionRequest

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
RULES = load_rules()


def told(name: str, asked: ProjectionRequest, **sizes: int) -> list[str]:
    found = load_layout([FIXTURES / "VLLM" / name], RULES, CompileInfo(sizes)).layout
    return list(render_projection(project_layout(found, asked)))


def test_groups_and_ways_of_allocation_are_told() -> None:
    lines = told("hybrid.onnx", ProjectionRequest(16, 1, "0.24"), sliding_window=128)
    assert lines[0] == "vLLM 0.24, blocks of 16, tensor parallelism 1"
    rows = [line.split() for line in lines]
    assert ["2", "sliding_window", "128", "2", "16", "1", "KiB", "(1,024", "bytes)"] in rows
    assert next(row for row in rows if row[0] == "unpacked")[:3] == [
        *("unpacked", "(default)", "depends")
    ]


def test_what_cannot_be_says_why_and_not_what_else_it_would_need() -> None:
    lines = told("hybrid.onnx", ProjectionRequest(16, 1, "0.24"), sliding_window=128)
    packed = [line for line in lines if line.strip().startswith("packed ")]
    assert ["not met" in line for line in packed] == [True]


def test_ways_that_are_alike_share_a_row() -> None:
    lines = told("decoder.onnx", ProjectionRequest(16, 1, "0.33", (100,)))
    alike = [line for line in lines if line.startswith("  LBNHC (default), LBHNC, ")]
    assert len([line for line in alike if " 100 " in line]) == 1
    (gone,) = [line for line in lines if "canonical" in line and "not met" in line]
    assert gone.split()[:2] == ["canonical,", "packed"]


def test_a_prompt_that_is_asked_for_is_told_and_no_other() -> None:
    prompts = told("decoder.onnx", ProjectionRequest(16, 1, "0.24", (100,)))
    assert [line for line in prompts if " 100 " in line]
    assert not [
        line for line in told("decoder.onnx", ProjectionRequest(16, 1, "0.24")) if "PROMPT" in line
    ]


def test_layers_that_are_refused_are_told_with_what_helps() -> None:
    lines = told("decoder.onnx", ProjectionRequest(16, 3))
    refused = [line for line in lines if line.startswith("  refused  layers 0-1: 2 KV heads")]
    assert len(refused) == 1
    assert "PAGE" not in "".join(lines)


def test_a_condition_of_several_layouts_is_one_line() -> None:
    lines = told("decoder.onnx", ProjectionRequest(16))
    said = [line.partition("requires  ")[2] for line in lines if " requires  layout: " in line]
    assert len(said) == 2
    assert said[0].startswith("layout: no attention backend, no connector and no VLLM_KV_CACHE")


@pytest.mark.parametrize(("era", "name"), [("0.24", "unpacked"), ("0.33", "LBNHC")])
def test_what_vllm_takes_by_default_stands_first_and_is_marked(era: str, name: str) -> None:
    lines = told("decoder.onnx", ProjectionRequest(16, 1, era))
    heads = [at for at, line in enumerate(lines) if line.startswith("  ALLOCATION")]
    assert lines[heads[0] + 1].startswith(f"  {name} (default)")


def test_what_is_not_known_says_why() -> None:
    lines = told("hybrid.onnx", ProjectionRequest(16, 1, "0.33", (100,)))
    (why,) = [line for line in lines if "which regions NIXL registers for states" in line]
    assert "  not known  " in why
    lines = told("hybrid.onnx", ProjectionRequest(16, 1, "0.24", (100,)))
    assert any("the size of sliding_window (--dim sliding_window=SIZE)" in line for line in lines)


def test_a_window_without_a_size_is_said_to_be_one() -> None:
    text = "\n".join(told("hybrid.onnx", ProjectionRequest(16)))
    assert "sliding_window of unknown size" in text
    assert "sliding_window sliding_window" not in text
