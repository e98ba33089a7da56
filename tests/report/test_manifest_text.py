"""Layouts as text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from onnxkvrename import load_rules
from onnxkvrename.findings import format_bytes
from onnxkvrename.layout.layout import Layout
from onnxkvrename.layout.load import CompileInfo, load_layout
from onnxkvrename.report.manifest_text import (
    build_buffer_rows,
    format_layout_title,
    format_model_paths,
    list_layout_facts,
    render_layout,
)

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
RULES = load_rules()


def load(name: str, **sizes: int) -> Layout:
    return load_layout([FIXTURES / "VLLM" / name], RULES, CompileInfo(sizes)).layout


def facts(layout: Layout) -> dict[str, str]:
    return dict(list_layout_facts(layout))


def _render(layout: Layout) -> list[str]:
    return [line.text for line in render_layout(layout, None)]


def test_equal_layers_and_parts_share_a_row() -> None:
    (row,) = build_buffer_rows(load("decoder.onnx"))
    assert row == (
        *("full_attention", "key, value", "0-1", "FLOAT", "[batch_size, 2, ctx_len, 4]"),
        "untraced",
        "32 per token",
    )


def test_parts_that_differ_have_separate_rows() -> None:
    assert [row.parts for row in build_buffer_rows(load("mla.onnx"))] == [
        "compressed_kv",
        "k_pe",
    ]


def test_a_known_size_is_next_to_its_symbol() -> None:
    (row,) = build_buffer_rows(load("decoder.onnx", ctx_len=8))
    assert row.shape == "[batch_size, 2, ctx_len=8, 4]"


def test_buffers_that_do_not_grow_are_counted_by_the_sequence() -> None:
    states = [row for row in build_buffer_rows(load("hybrid.onnx")) if row.kind == "mamba"]
    assert [row.bytes_each for row in states] == ["96 per sequence", "128 per sequence"]


def test_missing_sizes_are_shown_with_the_option_that_gives_them() -> None:
    values = facts(load("hybrid.onnx", ctx_len=64))
    assert values["unknown sizes"] == "sliding_window; pass --dim sliding_window=SIZE"
    assert values["per sequence"] == "unknown"
    assert "unknown sizes" not in facts(load("hybrid.onnx", ctx_len=64, sliding_window=16))


def test_a_batch_is_shown_if_its_size_is_given() -> None:
    values = facts(load("decoder.onnx", ctx_len=64, batch_size=4))
    assert values["per sequence"] == "8 KiB (8,192 bytes)"
    assert values["per batch of 4"] == "32 KiB (32,768 bytes)"
    assert not [label for label in facts(load("decoder.onnx", ctx_len=64)) if "batch" in label]


def test_a_buffer_of_unknown_rank_or_dtype_has_no_size() -> None:
    layout = load("decoder.onnx")
    first = layout.buffers[0]._replace(shape=None, sequence_axis=None)
    second = layout.buffers[1]._replace(dtype="STRING")
    rows = build_buffer_rows(layout._replace(buffers=(first, second)))
    assert [row.shape for row in rows] == ["rank unknown", "[batch_size, 2, ctx_len, 4]"]
    assert [row.bytes_each for row in rows] == ["unknown", "unknown"]


def test_columns_are_aligned() -> None:
    lines = _render(load("hybrid.onnx"))
    column = lines[1].index("SHAPE")
    assert [line[column] for line in lines[2:6]] == ["["] * 4
    assert [line for line in lines if line != line.rstrip()] == []


def test_without_buffers_there_is_only_a_title() -> None:
    assert _render(Layout((), (), (), (), ())) == ["no KV buffer in any of the models"]


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (None, "unknown"),
        (0, "0 bytes"),
        (1, "1 byte"),
        (1023, "1,023 bytes"),
        (1024, "1 KiB (1,024 bytes)"),
        (1536, "1.5 KiB (1,536 bytes)"),
        (438_829_056, "418.5 MiB (438,829,056 bytes)"),
        (1 << 40, "1 TiB (1,099,511,627,776 bytes)"),
        (1 << 70, "1.049e+06 PiB (1,180,591,620,717,411,303,424 bytes)"),
    ],
)
def test_bytes_are_shown_in_a_unit_that_fits_and_exactly(size: int | None, text: str) -> None:
    assert format_bytes(size) == text


def test_the_digest_is_complete() -> None:
    assert re.fullmatch("[0-9a-f]{64}", facts(load("decoder.onnx"))["kv_layout_sha256"])


@pytest.mark.parametrize(
    ("models", "text"),
    [
        (("a/m.onnx",), "a/m.onnx"),
        (("a/b/1/m.onnx", "a/b/2/m.onnx", "a/b/3.onnx"), "a/b (3 models)"),
        (("1.onnx", "2.onnx"), ". (2 models)"),
        (("1/m.onnx", "2/m.onnx"), ". (2 models)"),
        (("/1.onnx", "/b/2.onnx"), "/ (2 models)"),
        (("/w/ab/1.onnx", "/w/ac/2.onnx"), "/w (2 models)"),
        (("/w/1.onnx", "w/2.onnx"), "2 models"),
    ],
)
def test_a_set_is_named_by_its_directory_and_size(models: tuple[str, ...], text: str) -> None:
    assert format_model_paths(models) == text


def test_a_set_has_a_short_title() -> None:
    title = format_layout_title(load("windows"))
    assert re.fullmatch(r".*fixtures/VLLM/windows \(3 models\): \d+ buffers, layers 0-2", title)
