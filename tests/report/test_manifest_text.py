"""A layout for a person."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from onnxkvrename import load_rules
from onnxkvrename.layout.layout import Layout
from onnxkvrename.layout.load import CompileInfo, load_layout
from onnxkvrename.report.manifest_text import (
    build_buffer_rows,
    format_bytes,
    format_layout_title,
    format_model_paths,
    list_layout_facts,
    render_layout,
)

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
RULES = load_rules()


def layout(name: str, **sizes: int) -> Layout:
    return load_layout([FIXTURES / "VLLM" / name], RULES, CompileInfo(sizes)).layout


def facts(found: Layout) -> dict[str, str]:
    return dict(list_layout_facts(found))


def test_layers_and_parts_that_are_alike_share_a_row() -> None:
    (row,) = build_buffer_rows(layout("decoder.onnx"))
    assert row == (
        *("full_attention", "key, value", "0-1", "FLOAT", "[batch_size, 2, ctx_len, 4]"),
        "32 a token",
    )


def test_parts_that_differ_have_rows_of_their_own() -> None:
    assert [row.parts for row in build_buffer_rows(layout("mla.onnx"))] == [
        "compressed_kv",
        "k_pe",
    ]


def test_a_known_size_stands_beside_its_symbol() -> None:
    (row,) = build_buffer_rows(layout("decoder.onnx", ctx_len=8))
    assert row.shape == "[batch_size, 2, ctx_len=8, 4]"


def test_what_does_not_grow_is_counted_by_the_sequence() -> None:
    states = [row for row in build_buffer_rows(layout("hybrid.onnx")) if row.kind == "mamba"]
    assert [row.bytes_each for row in states] == ["96 a sequence", "128 a sequence"]


def test_what_is_missing_is_said_with_the_option_that_gives_it() -> None:
    found = facts(layout("hybrid.onnx", ctx_len=64))
    assert found["missing"] == "sliding_window: --dim sliding_window=SIZE"
    assert found["a sequence"] == "not known"
    assert "missing" not in facts(layout("hybrid.onnx", ctx_len=64, sliding_window=16))


def test_a_batch_is_told_where_its_size_is_given() -> None:
    found = facts(layout("decoder.onnx", ctx_len=64, batch_size=4))
    assert found["a sequence"] == "8 KiB (8,192 bytes)"
    assert found["a batch of 4"] == "32 KiB (32,768 bytes)"
    assert not [label for label in facts(layout("decoder.onnx", ctx_len=64)) if "batch" in label]


def test_a_buffer_of_unknown_rank_or_dtype_is_told_as_that() -> None:
    found = layout("decoder.onnx")
    first = found.buffers[0]._replace(shape=None, sequence_axis=None)
    second = found.buffers[1]._replace(dtype="STRING")
    rows = build_buffer_rows(found._replace(buffers=(first, second)))
    assert [row.shape for row in rows] == ["rank unknown", "[batch_size, 2, ctx_len, 4]"]
    assert [row.bytes_each for row in rows] == ["not known", "not known"]


def test_names_from_a_model_cannot_draw() -> None:
    found = layout("decoder.onnx", ctx_len=8)
    odd = found.buffers[0]._replace(part="\x1b[2J", shape=("\n", 2, "\u202e", 4), model="\r")
    odd_layout = found._replace(buffers=(odd,), models=("a\nb",))
    assert all(line.isprintable() for line in render_layout(odd_layout))


def test_columns_stand_below_each_other() -> None:
    lines = list(render_layout(layout("hybrid.onnx")))
    at = lines[1].index("SHAPE")
    assert [line[at] for line in lines[2:6]] == ["["] * 4
    assert [line for line in lines if line != line.rstrip()] == []


def test_without_buffers_there_is_only_a_title() -> None:
    assert list(render_layout(Layout((), (), (), (), ()))) == ["no KV buffer in any model given"]


@pytest.mark.parametrize(
    ("size", "said"),
    [
        (None, "not known"),
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
def test_bytes_are_told_in_a_unit_that_fits_and_exactly(size: int | None, said: str) -> None:
    assert format_bytes(size) == said


def test_the_digest_is_told_whole() -> None:
    assert re.fullmatch("[0-9a-f]{64}", facts(layout("decoder.onnx"))["kv_layout_sha256"])


@pytest.mark.parametrize(
    ("models", "said"),
    [
        (("a/m.onnx",), "a/m.onnx"),
        (("a/b/1/m.onnx", "a/b/2/m.onnx", "a/b/3.onnx"), "a/b (3 models)"),
        (("1.onnx", "2.onnx"), ". (2 models)"),
        (("1/m.onnx", "2/m.onnx"), ". (2 models)"),
        (("/1.onnx", "/b/2.onnx"), "/ (2 models)"),
        (("/w/ab/1.onnx", "/w/ac/2.onnx"), "/w (2 models)"),
        (("/w/1.onnx", "w/2.onnx"), "2 models"),
        (("a\n/1.onnx", "a\n/2.onnx"), "a\\x0a (2 models)"),
    ],
)
def test_a_set_goes_by_its_directory_and_how_many_it_has(
    models: tuple[str, ...], said: str
) -> None:
    assert format_model_paths(models) == said


def test_a_set_is_told_in_one_short_heading() -> None:
    head = format_layout_title(layout("windows"))
    assert re.fullmatch(r"\S*fixtures/VLLM/windows \(3 models\): \d+ buffers, layers 0-2", head)
