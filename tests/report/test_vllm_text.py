"""Projections onto vLLM as text."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest
from build_layouts import build_attention, build_layers, build_sliding

from onnxkvrename import load_rules
from onnxkvrename.layout.layout import KvBuffer
from onnxkvrename.layout.load import CompileInfo, load_layout
from onnxkvrename.report.documents.projection_json import projection_to_json
from onnxkvrename.report.vllm_text import render_projection
from onnxkvrename.vllm.capacity import measure_token_bytes
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


def test_a_window_of_unknown_size_is_shown_as_such() -> None:
    text = "\n".join(render("hybrid.onnx", ProjectionRequest(16)))
    assert "sliding_window of unknown size" in text
    assert "sliding_window sliding_window" not in text


def test_blocks_that_fit_and_stages_are_shown_when_asked_for() -> None:
    request = ProjectionRequest(16, 1, "0.24", (), None, 2, 10_240)
    lines = render("decoder.onnx", request)
    assert lines[0].endswith(
        "pipeline parallel size 2, 10 KiB (10,240 bytes) of GPU memory for KV caches"
    )
    (heading,) = [line for line in lines if line.startswith("  ALLOCATION  ") and "PADDING" in line]
    assert heading.split()[-1] == "NUM_BLOCKS"
    (stages,) = [index for index, line in enumerate(lines) if " STAGE " in line]
    rows = [line.split() for line in lines[stages + 1 : stages + 3]]
    assert [row[-6:-4] for row in rows] == [["0", "0"], ["1", "1"]]
    plain = render("decoder.onnx", ProjectionRequest(16, 1, "0.24"))
    assert not [line for line in plain if "NUM_BLOCKS" in line or " STAGE " in line]


def test_capacity_and_time_are_shown_where_they_are_asked_for() -> None:
    request = ProjectionRequest(
        16,
        prompt_lengths=(100,),
        gpu_memory=4 << 20,
        max_model_len=1000,
        bandwidth=10**9,
    )
    layout = build_layers(build_attention(0), build_sliding(1, window=128))
    lines = show(project_layout(layout, request))
    assert "1 GB/s for each rank" in lines[0]
    rows = [re.split(" {2,}", line.strip()) for line in lines]
    # Blocks of 32 KiB: 128 of them fit. A window holds 9 blocks, or all 63 and one more.
    (capacity,) = [row for row in rows if row[1:2] == ["1,000 tokens"]]
    assert (capacity[2], capacity[4]) == ("72 to 127", "1 (1.01x to 1.78x)")
    # 7 blocks of both layers, 32 KiB each.
    transfer = next(row for row in rows if row[1:2] == ["100 tokens"])
    assert transfer[-1] == "459 µs"
    shown = "per token  2 KiB (2,048 bytes) on each rank, beside windows"
    assert shown in [line.strip() for line in lines]


def test_figures_say_for_which_releases_they_hold() -> None:
    layout = build_layers(build_attention(0))
    lines = show(project_layout(layout, ProjectionRequest(16, vllm_version="0.30")))
    assert lines[0].startswith("vLLM 0.30, planned as 0.33, ")
    assert lines[-1].endswith("vLLM 0.30 to 0.33: groups and memory")
    alike = show(project_layout(layout, ProjectionRequest(16, vllm_version="0.27")))
    assert alike[-1].endswith("vLLM 0.27: groups and memory, of the allocations above")


@pytest.mark.parametrize(
    ("bandwidth", "dtype", "shown", "token_bytes"),
    [
        (10**9, None, "197 µs", "4 KiB (4,096 bytes) on each rank"),
        (10**12, None, "197 ns", "4 KiB"),
        (10**8, None, "1.97 ms", "4 KiB"),
        (5 * 10**4, "fp8", "1.97 s", "2 KiB (2,048 bytes) on each rank with fp8"),
    ],
)
def test_times_have_a_unit_that_can_be_read(
    bandwidth: int, dtype: str | None, shown: str, token_bytes: str
) -> None:
    request = ProjectionRequest(16, prompt_lengths=(33,), bandwidth=bandwidth, kv_cache_dtype=dtype)
    # 3 blocks of both layers, 32 KiB each; half of it in fp8.
    lines = show(project_layout(build_layers(build_attention(0), build_attention(1)), request))
    assert {line.split("  ")[-1] for line in lines if "33 tokens" in line} == {shown}
    assert any(f"per token  {token_bytes}" in line for line in lines)


def test_of_pipeline_stages_no_time_is_known_and_each_stage_has_its_bytes() -> None:
    request = ProjectionRequest(16, prompt_lengths=(33,), bandwidth=10**9, pipeline_parallel_size=2)
    layers = [build_attention(number) for number in range(3)]
    projection = project_layout(build_layers(*layers), request)
    lines = [line.strip() for line in show(projection)]
    (rows,) = {line.split("33 tokens")[1] for line in lines if "33 tokens" in line}
    assert rows.split() == ["unknown"] * 4
    one, two = (measure_token_bytes(projection.specs[:count]) for count in (1, 2))
    assert projection.token_bytes == (two, one)
    (said,) = [line for line in lines if line.startswith("per token")]
    assert f"{two:,} bytes) on each rank of stage 0, " in said
    assert f"{one:,} bytes) on each rank of stage 1" in said
    assert projection_to_json(projection)["token_bytes"] == two
