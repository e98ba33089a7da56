"""Projections onto vLLM as text."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
from build_layouts import build_attention, build_layers, build_sliding

from onnxkvrename import load_rules
from onnxkvrename.layout.layout import KvBuffer
from onnxkvrename.layout.load import CompileInfo, load_layout
from onnxkvrename.report.vllm_text import render_projection
from onnxkvrename.vllm.projection import Projection, project_layout
from onnxkvrename.vllm.specs import ProjectionRequest

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
RULES = load_rules()


def show(projection: Projection | None) -> list[str]:
    return [line.text for line in render_projection(projection, None)]


def render(name: str, request: ProjectionRequest, **sizes: int) -> list[str]:
    layout = load_layout([FIXTURES / "VLLM" / name], RULES, CompileInfo(sizes)).layout
    return show(project_layout(layout, request))


def test_groups_and_allocations_are_rows() -> None:
    lines = render("hybrid.onnx", ProjectionRequest(16, 1, "0.24"), sliding_window=128)
    assert lines[0] == "vLLM 0.24, blocks of 16 tokens, tensor parallel size 1"
    rows = [line.split() for line in lines]
    row = "2 sliding_window 128 tokens 2 16 tokens 1 KiB (1,024 bytes)"
    assert row.split() in rows
    assert next(row for row in rows if row[0] == "unpacked")[:3] == [
        *("unpacked", "(default)", "depends")
    ]


def test_an_impossible_allocation_shows_only_the_conditions_that_fail() -> None:
    lines = render("hybrid.onnx", ProjectionRequest(16, 1, "0.24"), sliding_window=128)
    packed = [line for line in lines if line.strip().startswith("packed ")]
    assert ["not met" in line for line in packed] == [True]


def test_allocations_with_equal_figures_share_a_row() -> None:
    lines = render("decoder.onnx", ProjectionRequest(16, 1, "0.33", (100,)))
    shared = [line for line in lines if line.startswith("  LBNHC (default), LBHNC, ")]
    assert len([line for line in shared if " 100 " in line]) == 1
    (removed,) = [line for line in lines if "canonical" in line and "not met" in line]
    assert removed.split()[:2] == ["canonical,", "packed"]


def list_view_rows(lines: list[str]) -> list[str]:
    """The rows of the table of CanonicalKVCaches, without their columns' spaces."""
    start = next(i for i, line in enumerate(lines) if line.startswith("  CanonicalKVCaches"))
    names = ("unpacked", "cross_layers", "canonical", "L", "B")
    rows = (" ".join(line.split()) for line in lines[start + 1 :])
    return [row for row in rows if row.startswith(names) and "requires" not in row]


def test_the_canonical_view_is_shown_beside_the_canonical_allocation() -> None:
    lines = render("hybrid.onnx", ProjectionRequest(16, 1, "0.24"), sliding_window=128)
    # Attention and its window share tensor 0 with the states, whose pages are padded.
    assert list_view_rows(lines)[:2] == [
        "unpacked (default) 1 of (num_blocks, 1,024) 0, 2 tensor 0: 1,024 bytes",
        "unpacked (default) 1 of (num_blocks, 1,024) 1 tensor 0: 224 bytes",
    ]
    # The allocation of that name is another thing, and not for states.
    assert any("canonical" in line and "attention: there are states" in line for line in lines)
    assert not [row for row in list_view_rows(lines) if row.startswith("canonical")]


def test_a_canonical_view_that_is_not_known_is_said_to_be() -> None:
    rows = list_view_rows(render("decoder.onnx", ProjectionRequest(16, 1, "0.33")))
    assert "LHBNC unknown - -" in rows


def test_only_requested_prompts_have_transfers() -> None:
    prompts = render("decoder.onnx", ProjectionRequest(16, 1, "0.24", (100,)))
    assert [line for line in prompts if " 100 " in line]
    assert not [
        line
        for line in render("decoder.onnx", ProjectionRequest(16, 1, "0.24"))
        if "PROMPT" in line
    ]


def test_refused_layers_are_shown_with_a_hint() -> None:
    lines = render("decoder.onnx", ProjectionRequest(16, 3))
    refused = [line for line in lines if line.startswith("  refused  layers 0-1: 2 KV heads")]
    assert len(refused) == 1
    assert "PAGE" not in "".join(lines)


def test_a_condition_of_several_layouts_is_one_line() -> None:
    lines = render("decoder.onnx", ProjectionRequest(16))
    rows = [line.partition(" requires ")[2].lstrip() for line in lines]
    conditions = [row for row in rows if row.startswith("layout: ")]
    assert len(conditions) == 2
    assert conditions[0].startswith(
        "layout: no attention backend, no connector and no VLLM_KV_CACHE"
    )


@pytest.mark.parametrize(("version", "name"), [("0.24", "unpacked"), ("0.33", "LBNHC")])
def test_the_default_allocation_is_first_and_marked(version: str, name: str) -> None:
    lines = render("decoder.onnx", ProjectionRequest(16, 1, version))
    headings = [i for i, line in enumerate(lines) if line.startswith("  ALLOCATION")]
    assert lines[headings[0] + 1].startswith(f"  {name} (default)")


def test_unknown_figures_have_a_reason() -> None:
    lines = render("hybrid.onnx", ProjectionRequest(16, 1, "0.24", (100,)))
    assert any("the size of sliding_window (--dim sliding_window=SIZE)" in line for line in lines)


def render_layers(*layers: Iterable[KvBuffer], version: str, lengths: tuple[int, ...]) -> list[str]:
    request = ProjectionRequest(16, 1, version, lengths)
    return show(project_layout(build_layers(*layers), request))


def find_line(lines: list[str], *words: str) -> str:
    (line,) = [line for line in lines if all(word in line for word in words)]
    return line


@pytest.mark.parametrize("lengths", [(), (128,)])
def test_what_vllm_refuses_to_register_is_said_with_its_reason(lengths: tuple[int, ...]) -> None:
    padded = [
        build_sliding(layer, 2, 96, 128) if layer % 2 else build_attention(layer, 2, 64)
        for layer in range(4)
    ]
    lines = render_layers(*padded, version="0.33", lengths=lengths)
    assert "LBNHC (default), LBHNC  " in find_line(
        lines, "  refused  ", "NIXL: KV cache view cannot be partitioned into NIXL regions: layer 0"
    )
    rows = [line for line in lines if "refused  refused" in line]
    assert len(rows) == len(lengths)


def test_what_does_not_cover_the_blocks_is_said_with_its_reason() -> None:
    layers = [build_attention(0, 1, 64), build_sliding(1, 1, 128, 128)]
    lines = render_layers(*layers, version="0.33", lengths=(128,))
    assert find_line(lines, "  incomplete  ", "NIXL: too little is moved").startswith("  BLNHC")
    assert "64 KiB (65,536 bytes)" in find_line(lines, "BLNHC", "  128 ", "  16 ")


def test_what_decode_does_not_read_is_not_posted() -> None:
    layers = [build_sliding(0, window=40), build_attention(1)]
    lines = render_layers(*layers, version="0.33", lengths=(49, 55))
    assert " 8 " in find_line(lines, "LBNHC (default)", "49 tokens")
    assert " 7 " in find_line(lines, "LBNHC (default)", "55 tokens")
