from __future__ import annotations

from pathlib import Path

import models
import pytest
from cache_models import HYBRID, build_cache_model
from draw_terminal import draw_plain
from window_sets import write_windows

from onnxkvrename import load_rules
from onnxkvrename.layout.inspect import ExternalFile, ModelSummary, fold_windows, inspect_model
from onnxkvrename.report.inspection.facts import format_buffer_bytes
from onnxkvrename.report.inspection.summary_text import render_model_summary

HOSTILE = "[red]\x1b[2J\u202e:smiley:[/red]\\é"
SHOWN = "[red]\\x1b[2J\\u202e:smiley:[/red]\\é"
TOKEN = ("VLLM", "VLLM")


def test_a_summary_says_what_is_in_the_file(inspected) -> None:
    model = build_cache_model(("full", "linear"), tokens=TOKEN)
    model.graph.output.append(models.info("vision_embeds_RetainedState"))
    model.functions.add(name="Layer", domain="local")
    assert draw_plain(render_model_summary, inspected(model)).splitlines() == [
        "m.onnx  1,000 bytes",
        "  made by         tests 1; IR 10, opset 18",
        "  graph           5 nodes, local functions Layer",
        "  full attention  past_key, past_value of layer 0",
        "                  FLOAT16 [batch_size, 8, ctx_len, 64]",
        "  linear state    conv_state of layer 1",
        "                  FLOAT16 [batch_size, 512, 4]",
        "                  recurrent_state of layer 1",
        "                  FLOAT16 [batch_size, 16, 128, 128]",
        "  token           VLLM on all 8 names",
        "  outputs         logits",
        "  kept            vision: vision_embeds_RetainedState",
        "  KV bytes        2 KiB (2,048 bytes) for each token",
        "                  516 KiB (528,384 bytes) for the states of a sequence",
        "",
        "  layer             0   1",
        "  past_key          F   .",
        "  past_value        F   .",
        "  conv_state        .   S",
        "  recurrent_state   .   S",
        "",
        "  F full attention   S linear state   . no such buffer in this layer",
        "  UPPER CASE: has the token",
    ]


def test_layers_of_a_kind_are_told_in_short(inspected) -> None:
    text = draw_plain(render_model_summary, inspected(HYBRID))
    assert "conv_state of layers 0-1, 3-4, 6-7, 9-10, 12-13 and 3 more\n" in text
    assert "past_key, past_value of layers 2, 5, 8, 11, 14 and 3 more\n" in text
    assert "of layers 0-1\n" in draw_plain(render_model_summary, inspected(("full", "full")))


def test_some_names_with_the_token_are_counted(inspected) -> None:
    text = draw_plain(render_model_summary, inspected(("full",), tokens=("", "VLLM")))
    assert "token           VLLM on 2 of 4 names\n" in text
    text = draw_plain(render_model_summary, inspected(("full",)))
    assert "token           none\n" in text


def test_data_files_are_told_and_those_that_are_gone(inspected) -> None:
    found = inspected(("full",))
    files = (ExternalFile("w.bin", 98_000_000_000), ExternalFile("gone.bin", None))
    text = draw_plain(render_model_summary, found._replace(files=files), width=100)
    assert "external data   91.3 GiB in 1 file: w.bin; not usable: gone.bin\n" in text
    assert "external data" not in draw_plain(render_model_summary, found)


def test_a_model_without_buffers_has_no_map(inspected) -> None:
    text = draw_plain(render_model_summary, inspected(()))
    assert "  buffers  no KV buffer\n" in text
    assert "layer" not in text
    assert "token" not in text


def test_a_path_is_never_broken() -> None:
    assert "x" * 200 in draw_plain(render_model_summary, ModelSummary("x" * 200))


@pytest.fixture
def hostile(inspected) -> ModelSummary:
    """A model whose names would move the cursor, turn the text and draw smileys."""
    model = build_cache_model(("full",))
    model.producer_name = f"{HOSTILE}\n"
    model.graph.output.append(models.info(f"{HOSTILE}_RetainedState"))
    found: ModelSummary = inspected(model)
    rows = tuple(item._replace(buffer=HOSTILE + item.buffer) for item in found.buffers)
    return found._replace(path=HOSTILE, buffers=rows)


def test_hostile_names_are_shown_and_do_nothing(hostile: ModelSummary) -> None:
    text = draw_plain(render_model_summary, hostile, width=300)
    assert text.startswith(f"{HOSTILE}  1,000 bytes\n")  # escaped where lines are printed
    text = text.partition("\n")[2]
    assert f"made by         {SHOWN}\\x0a 1;" in text
    assert f"{SHOWN}past_key     f\n" in text
    assert text.count(f"{SHOWN}_RetainedState") == 1  # kept
    assert not set(text) & {"\x1b", "\u202e"}


def test_windows_of_a_set_are_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    paths = sorted(write_windows(Path("set"), 94).rglob("*.onnx"))
    (folded,) = fold_windows(inspect_model(path, load_rules()) for path in paths)
    lines = draw_plain(render_model_summary, folded).splitlines()
    assert lines[0].startswith("94 windows of Tiny in set  ")
    assert "  full attention  past_key, past_value of layers 0-93" in lines
    assert [line for line in lines if line.startswith("  layer ")] == [
        "  layer       0          10         20         30         40       49",
        "  layer       50         60         70         80         90 93",
    ]
    assert len(lines) == 18


def test_the_bytes_of_a_buffer_are_a_product_with_its_symbols(inspected) -> None:
    buffer = inspected(("full",)).buffers[0]
    expected = {
        ("FLOAT16", ("batch", 8, "ctx", 64)): "1,024 bytes \N{MULTIPLICATION SIGN} batch "
        "\N{MULTIPLICATION SIGN} ctx",
        ("FLOAT", (1, 2, 4)): "32 bytes",
        ("INT8", (1,)): "1 byte",
        ("INT4", (3,)): "2 bytes",  # the last one padded
        ("INT4", ("ctx", 3)): "",  # how much is padded depends on ctx
        ("STRING", (3,)): "",
        ("FLOAT", (1, None)): "",
        ("FLOAT", None): "",
    }
    for (dtype, shape), text in expected.items():
        assert format_buffer_bytes(buffer._replace(dtype=dtype, shape=shape)) == text
