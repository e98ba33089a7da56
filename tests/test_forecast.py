"""A projection onto vLLM for a person."""

from __future__ import annotations

from pathlib import Path

from onnxkvrename import forecast, gathering, load_rules, projecting
from onnxkvrename.gathering import Known
from onnxkvrename.pages import Asked

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures"
RULES = load_rules()


def told(name: str, asked: Asked, **sizes: int) -> list[str]:
    found = gathering.gather([FIXTURES / "VLLM" / name], RULES, Known(sizes)).layout
    return list(forecast.lines(projecting.project(found, asked)))


def test_groups_and_ways_of_allocation_are_told() -> None:
    lines = told("hybrid.onnx", Asked(16, 1, "0.24"), sliding_window=128)
    assert lines[0] == "vLLM 0.24, blocks of 16, tensor parallelism 1"
    rows = [line.split() for line in lines]
    assert ["2", "sliding_window", "128", "2", "16", "1", "KiB", "(1,024", "bytes)"] in rows
    assert next(row for row in rows if row[0] == "unpacked")[:2] == ["unpacked", "depends"]


def test_what_cannot_be_says_why_and_not_what_else_it_would_need() -> None:
    lines = told("hybrid.onnx", Asked(16, 1, "0.24"), sliding_window=128)
    packed = [line for line in lines if line.strip().startswith("packed ")]
    assert ["not met" in line for line in packed] == [True]


def test_ways_that_are_alike_share_a_row() -> None:
    lines = told("decoder.onnx", Asked(16, 1, "0.33", (100,)))
    assert len([line for line in lines if line.split()[:1] == ["LBHNC,"] and " 100 " in line]) == 1


def test_a_prompt_that_is_asked_for_is_told_and_no_other() -> None:
    prompts = told("decoder.onnx", Asked(16, 1, "0.24", (100,)))
    assert [line for line in prompts if " 100 " in line]
    assert not [line for line in told("decoder.onnx", Asked(16, 1, "0.24")) if "PROMPT" in line]


def test_layers_that_are_refused_are_told_with_what_helps() -> None:
    lines = told("decoder.onnx", Asked(16, 3))
    refused = [line for line in lines if line.startswith("  refused  layers 0-1: 2 KV heads")]
    assert len(refused) == 1
    assert "PAGE" not in "".join(lines)
