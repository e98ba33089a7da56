"""Projections onto vLLM as text."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
from build_layouts import build_attention, build_gpt_oss, build_layers, build_sliding

from onnxkvrename import load_rules
from onnxkvrename.layout.layout import KvBuffer
from onnxkvrename.layout.load import load_layout
from onnxkvrename.report.vllm_text import render_projection
from onnxkvrename.vllm.projection import Projection, project_layout
from onnxkvrename.vllm.specs import ProjectionRequest

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
RULES = load_rules()


def show(projection: Projection) -> list[str]:
    return [line.text for line in render_projection(projection, None)]


def render(name: str, request: ProjectionRequest, **sizes: int) -> list[str]:
    layout = load_layout([FIXTURES / "VLLM" / name], RULES, sizes).layout
    return show(project_layout(layout, request))


def test_groups_and_allocations_are_rows() -> None:
    lines = render("hybrid.onnx", ProjectionRequest(16), sliding_window=128)
    assert lines[0] == "vLLM 0.24, blocks of 16 tokens, tensor parallel size 1"
    rows = [line.split() for line in lines]
    row = "2 sliding_window 128 tokens 2 2 KV heads of 4, FLOAT 16 tokens 1 KiB (1,024 bytes)"
    assert row.split() in rows
    assert next(row for row in rows if row[0] == "unpacked")[:3] == [
        *("unpacked", "(default)", "depends")
    ]


def test_settings_are_in_the_first_line() -> None:
    request = ProjectionRequest(16, 2, "fp8", enable_cross_layers_blocks=True)
    assert render("decoder.onnx", request)[0] == (
        "vLLM 0.24, blocks of 16 tokens, tensor parallel size 2, KV cache dtype fp8, "
        "enable_cross_layers_blocks"
    )


def test_an_impossible_allocation_shows_only_the_conditions_that_fail() -> None:
    lines = render("hybrid.onnx", ProjectionRequest(16), sliding_window=128)
    packed = [line for line in lines if line.strip().startswith("packed ")]
    assert ["not met" in line for line in packed] == [True]


def test_allocations_with_equal_figures_share_a_row() -> None:
    lines = show(project_layout(build_gpt_oss(), ProjectionRequest(64)))
    (shared,) = [line for line in lines if "(1,572,864 bytes)" in line]
    assert shared.startswith(
        "  unpacked (default), canonical (vllm#37885), packed (vllm#46252)  depends "
    )


def list_view_rows(lines: list[str]) -> list[str]:
    """The rows of the table of CanonicalKVCaches, without their columns' spaces."""
    start = next(i for i, line in enumerate(lines) if line.startswith("  CanonicalKVCaches"))
    names = ("unpacked", "cross_layers", "canonical", "packed")
    rows = (" ".join(line.split()) for line in lines[start + 1 :])
    return [row for row in rows if row.startswith(names) and "num_blocks" in row]


def test_the_canonical_view_is_shown_beside_the_canonical_allocation() -> None:
    lines = render("hybrid.onnx", ProjectionRequest(16), sliding_window=128)
    # Attention and its window share tensor 0 with the states, whose pages are padded.
    assert list_view_rows(lines) == [
        "unpacked (default) 1 of (num_blocks, 1,024) 0, 2 tensor 0: 1,024 bytes",
        "unpacked (default) 1 of (num_blocks, 1,024) 1 tensor 0: 224 bytes",
    ]
    # The allocation of that name is another thing, and not for states.
    assert any("canonical" in line and "attention: there are states" in line for line in lines)


def test_tables_name_the_pull_requests_that_they_follow() -> None:
    text = "\n".join(show(project_layout(build_gpt_oss(), ProjectionRequest(64))))
    for name in ("CanonicalKVCaches (vllm#37853)", "canonical (vllm#37885)", "packed (vllm#46252)"):
        assert name in text


def test_only_requested_prompts_have_transfers() -> None:
    prompts = render("decoder.onnx", ProjectionRequest(16, prompt_lengths=(100,)))
    assert [line for line in prompts if " 100 " in line]
    assert not [line for line in render("decoder.onnx", ProjectionRequest(16)) if "PROMPT" in line]


def test_refused_layers_are_shown_with_a_hint() -> None:
    lines = render("decoder.onnx", ProjectionRequest(16, 3))
    refused = [line for line in lines if line.startswith("  refused  layers 0-1: 2 KV heads")]
    assert len(refused) == 1
    assert "PAGE" not in "".join(lines)


def test_the_default_allocation_is_first_and_marked() -> None:
    lines = render("decoder.onnx", ProjectionRequest(16))
    headings = [i for i, line in enumerate(lines) if line.startswith("  ALLOCATION")]
    assert lines[headings[0] + 1].startswith("  unpacked (default)")


def test_unknown_figures_have_a_reason() -> None:
    lines = render("hybrid.onnx", ProjectionRequest(16, prompt_lengths=(100,)))
    assert any("the size of sliding_window (--dim sliding_window=SIZE)" in line for line in lines)


def render_layers(*layers: Iterable[KvBuffer], lengths: tuple[int, ...]) -> list[str]:
    request = ProjectionRequest(16, prompt_lengths=lengths)
    return show(project_layout(build_layers(*layers), request))


def find_line(lines: list[str], *words: str) -> str:
    (line,) = [line for line in lines if all(word in line for word in words)]
    return line


@pytest.mark.parametrize("lengths", [(), (128,)])
def test_what_vllm_refuses_to_register_is_said_with_its_reason(lengths: tuple[int, ...]) -> None:
    lines = render_layers(build_attention(0), build_attention(1, heads=2), lengths=lengths)
    assert "unpacked (default)  " in find_line(
        lines, "  refused  ", "NIXL: All non-MLA kv cache tensors must have the same size"
    )
    rows = [line for line in lines if "refused  refused" in line]
    assert len(rows) == len(lengths)


def test_what_does_not_cover_the_blocks_is_said_with_its_reason() -> None:
    lines = show(project_layout(build_gpt_oss(), ProjectionRequest(64)))
    line = find_line(lines, "  incomplete  ", "NIXL: decode posts half of these bytes")
    assert line.startswith("  packed (vllm#46252)")


def test_what_decode_does_not_read_is_not_posted() -> None:
    layers = [build_sliding(0, window=40), build_attention(1)]
    lines = render_layers(*layers, lengths=(49, 55))
    assert " 16 " in find_line(lines, "unpacked (default)", "49 tokens")
    assert " 14 " in find_line(lines, "unpacked (default)", "55 tokens")


def test_a_window_of_unknown_size_is_shown_as_such() -> None:
    text = "\n".join(render("hybrid.onnx", ProjectionRequest(16)))
    assert "sliding_window of unknown size" in text
    assert "sliding_window sliding_window" not in text
