from __future__ import annotations

import io
from pathlib import Path

import models
import pytest
from caches import HYBRID, MIXED, exported
from models import saved
from onnx import ModelProto
from rich.console import Console, RenderableType

from onnxkvrename import KvRenameError, load_rules
from onnxkvrename.layout.inspect import ExternalFile, InspectedBuffer, ModelSummary, inspect_model
from onnxkvrename.layout.kinds import get_kind_traits, list_kinds
from onnxkvrename.report.kv_map import (
    STATE_STYLES,
    render_kv_map,
    render_model_summary,
)

QEFF = load_rules()
HOSTILE = "[red]\x1b[2J\u202e:smiley:[/red]\\é"
SHOWN = "[red]\\x1b[2J\\u202e:smiley:[/red]\\é"
TOKEN = ("VLLM", "VLLM")


def drawn(what: RenderableType, width: int = 80, encoding: str = "utf-8") -> str:
    """What a terminal without colour shows."""
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding, newline="\n")
    Console(file=file, width=width, highlight=False).print(what, crop=False)
    file.flush()
    return "".join(f"{line.rstrip()}\n" for line in raw.getvalue().decode(encoding).splitlines())


@pytest.fixture
def inspected(tmp_path: Path):
    """What is in a model, or in one made of these kinds of layers."""

    def inspect(model: ModelProto | tuple[str, ...], **how: object) -> ModelSummary:
        made = model if isinstance(model, ModelProto) else exported(model, **how)  # type: ignore[arg-type]
        found = inspect_model(saved(made, tmp_path / "m.onnx"), QEFF)
        return found._replace(path="m.onnx", size=1000)

    return inspect


def buffers(*layers: int, **how: object) -> ModelSummary:
    """A model with one buffer in each of these layers."""
    one = InspectedBuffer(0, "past_key", "", "full_attention", "plain", "FLOAT", (1, 2), "a", "b")
    made = [one._replace(**{"layer": layer, **how}) for layer in layers]
    return ModelSummary("m.onnx", buffers=tuple(made))


def test_two_layers_are_two_wide_cells(inspected) -> None:
    assert drawn(render_kv_map(inspected(("full", "window")))) == (
        "layer        0   1\n"
        "past_key     f   w\n"
        "past_value   f   w\n"
        "\n"
        "f full attention   w sliding window   abc without a token\n"
    )


def test_capital_letters_carry_the_token(inspected) -> None:
    lines = drawn(render_kv_map(inspected(("mla", "mla"), tokens=TOKEN))).splitlines()
    assert lines[1:] == [
        "compressed_kv   M   M",
        "k_pe            M   M",
        "",
        "M MLA   ABC with its token",
    ]


def test_no_sign_stands_for_a_kind_and_a_state() -> None:
    letters = {get_kind_traits(kind).symbol for kind in list_kinds()}
    signs = letters | {letter.upper() for letter in letters}
    assert not signs & {look.symbol for look in STATE_STYLES.values()}


def test_a_map_of_all_there_can_be(inspected) -> None:
    found = inspected(
        MIXED,
        tokens=TOKEN,
        without={"k_pe.2_VLLM", "k_pe.2_VLLM_RetainedState", "past_key.6_VLLM"},
    )
    assert drawn(render_kv_map(found)) == (
        "layer             0   1   2   3   4   5   6   7\n"
        "past_key          F   W   .   .   S   ~   !   F\n"
        "past_value        F   W   .   .   S   ~   F   F\n"
        "compressed_kv     .   .   M   .   .   ~   .   .\n"
        "k_pe              .   .   -   .   .   ~   .   .\n"
        "conv_state        .   .   .   S   .   ~   .   .\n"
        "recurrent_state   .   .   .   S   .   ~   .   .\n"
        "\n"
        "F full attention   W sliding window   M MLA   S linear state\n"
        "ABC with its token   - missing   ! broken   . no such buffer there\n"
        "~ layers without buffers\n"
    )


def test_a_token_on_one_side_has_a_sign_of_its_own(inspected) -> None:
    text = drawn(render_kv_map(inspected(("full",), tokens=("", "VLLM"))))
    assert "past_key     /\n" in text
    assert text.endswith("\n/ token on one side only\n")


def test_ninety_four_layers_fit_a_terminal_of_eighty_columns(inspected) -> None:
    ten = "F" * 10
    assert drawn(render_kv_map(inspected(("full",) * 94, tokens=TOKEN))) == (
        "layer       0          10         20         30         40         50\n"
        f"past_key    {' '.join([ten] * 6)}\n"
        f"past_value  {' '.join([ten] * 6)}\n"
        "\n"
        "layer       60         70         80         90\n"
        f"past_key    {ten} {ten} {ten} FFFF\n"
        f"past_value  {ten} {ten} {ten} FFFF\n"
        "\n"
        "F full attention   ABC with its token\n"
    )


def test_cells_are_as_wide_as_there_is_room_for(inspected) -> None:
    found = inspected(HYBRID)
    assert "conv_state       s s . s s . s s . s" in drawn(render_kv_map(found), width=70)
    assert "layer            0         5         10" in drawn(render_kv_map(found), width=70)
    assert "conv_state       sss" not in drawn(render_kv_map(found), width=70)
    assert "conv_state       ss.ss.ss.s s.ss.ss.ss .ss." in drawn(render_kv_map(found), width=60)
    assert "conv_state        s   s   .   s" in drawn(render_kv_map(found), width=120)


@pytest.mark.parametrize("width", [1, 2, 5, 11, 20, 33, 80, 500])
def test_every_layer_is_drawn_whatever_the_width(width: int) -> None:
    lines = drawn(render_kv_map(buffers(*range(94), buffer="key")), width=width).splitlines()
    named = "key"[: width // 3]
    rows = [line.removeprefix(named).strip() for line in lines if line.startswith(named)]
    cells = [row for row in rows if row and not set(row) - {"f", " "}]
    assert sum(row.count("f") for row in cells[:94]) >= 94
    assert max(map(len, lines)) <= width


def test_a_long_row_of_layers_without_buffers_is_one_mark() -> None:
    lines = drawn(render_kv_map(buffers(0, 1, 40, 41, 44))).splitlines()
    assert lines[0] == "layer      0   1      40  41  42  43  44"
    assert lines[1] == "past_key   f   f   ~   f   f   ~   ~   f"
    assert lines[-1].endswith("~ layers without buffers")


def test_layers_far_apart_take_no_room() -> None:
    lines = drawn(render_kv_map(buffers(0, 999_999, 999_999_999))).splitlines()
    assert lines[1] == "past_key   f   ~   f   ~   f"
    assert lines[0].startswith("layer      0      999999")


def test_behind_a_long_gap_the_layer_is_told_in_narrow_maps_too() -> None:
    lines = drawn(render_kv_map(buffers(0, *range(50, 62))), width=30).splitlines()
    assert lines[:2] == ["layer     0 50", "past_key  f~ffffffff"]


def test_layers_that_would_touch_are_left_out() -> None:
    lines = drawn(render_kv_map(buffers(10000, 10001, 10002))).splitlines()
    assert lines[:2] == ["layer     10000   10002", "past_key   f   f   f"]


def test_scopes_share_a_row_unless_they_have_the_same_layer() -> None:
    apart = buffers(0, scope="layer_0/").buffers + buffers(1, scope="layer_1/").buffers
    found = ModelSummary("m.onnx", buffers=apart)
    assert "past_key   f   f\n" in drawn(render_kv_map(found))
    twice = ModelSummary("m.onnx", buffers=apart + buffers(0).buffers)
    text = drawn(render_kv_map(twice))
    assert "layer_0/past_key   f   .\n" in text
    assert "past_key           f   .\n" in text


def test_names_are_cut_before_the_cells_are() -> None:
    text = drawn(render_kv_map(buffers(0, 1, buffer="漢" * 100)), width=30)
    assert "漢漢漢漢漢   f   f\n" in text


def test_a_summary_says_what_is_in_the_file(inspected) -> None:
    model = exported(("full", "linear"), tokens=TOKEN, weights=[models.tensor("w", 1.0)])
    model.graph.output.append(models.info("vision_embeds_RetainedState"))
    model.functions.add(name="Layer", domain="local")
    assert drawn(render_model_summary(inspected(model))).splitlines() == [
        "m.onnx  1.0 kB",
        "  made by         tests 1; IR 10, opset 18",
        "  graph           5 nodes, local functions Layer",
        "  weights         4 bytes inline in 1 tensors",
        "  full attention  past_key, past_value of layer 0",
        "                  FLOAT16 [batch_size, 8, ctx_len, 64]",
        "  linear state    conv_state of layer 1",
        "                  FLOAT16 [batch_size, 512, 4]",
        "                  recurrent_state of layer 1",
        "                  FLOAT16 [batch_size, 16, 128, 128]",
        "  token           VLLM on all 8 names",
        "  outputs         logits",
        "  kept            vision: vision_embeds_RetainedState",
        "",
        "  layer             0   1",
        "  past_key          F   .",
        "  past_value        F   .",
        "  conv_state        .   S",
        "  recurrent_state   .   S",
        "",
        "  F full attention   S linear state   ABC with its token",
        "  . no such buffer there",
    ]


def test_layers_of_a_kind_are_told_in_short(inspected) -> None:
    text = drawn(render_model_summary(inspected(HYBRID)))
    assert "conv_state of 16 layers (0-1, 3-4, 6-7, ... 21-22)\n" in text
    assert "past_key, past_value of 8 layers (2, 5, 8, ... 23)\n" in text
    assert "of layers 0-1\n" in drawn(render_model_summary(inspected(("full", "full"))))


def test_some_names_with_the_token_are_counted(inspected) -> None:
    text = drawn(render_model_summary(inspected(("full",), tokens=("", "VLLM"))))
    assert "token           VLLM on 2 of 4 names\n" in text
    text = drawn(render_model_summary(inspected(("full",))))
    assert "token           none\n" in text


def test_data_files_are_told_and_those_that_are_gone(inspected) -> None:
    found = inspected(("full",))
    files = (ExternalFile("w.bin", 98_000_000_000), ExternalFile("gone.bin", None))
    text = drawn(render_model_summary(found._replace(files=files)), width=100)
    assert "98.0 GB external in 1 file: w.bin; not usable: gone.bin\n" in text
    assert "weights         none\n" in drawn(render_model_summary(found))
    nowhere = found._replace(weight=found.weight._replace(external_tensor_count=1))
    assert "weights         not there\n" in drawn(render_model_summary(nowhere))


def test_a_model_without_buffers_has_no_map(inspected) -> None:
    text = drawn(render_model_summary(inspected(())))
    assert "  buffers  no KV buffer in it\n" in text
    assert "layer" not in text
    assert "token" not in text


def test_a_model_that_cannot_be_read_is_told_with_the_reason() -> None:
    found = ModelSummary("m\n.onnx", error=KvRenameError("is no model", hint="give one"))
    assert drawn(render_model_summary(found)) == "m\\x0a.onnx  is no model (give one)\n"


def test_of_each_code_a_few_findings_are_shown(inspected) -> None:
    names = {f"past_key.{layer}" for layer in range(6)}
    text = drawn(render_model_summary(inspected(("full",) * 6, without=names)), width=200)
    assert text.count("error KV101  past_key.") == 3
    assert text.count("error KV101  and 3 more like this\n") == 1
    clean = drawn(render_model_summary(inspected(("full",) * 6)), width=200)
    assert "KV101" not in clean


def test_a_path_is_never_broken_unless_to_fold() -> None:
    found = buffers(0)._replace(path="x" * 200)
    assert "x" * 200 in drawn(render_model_summary(found))
    assert "x" * 200 not in drawn(render_model_summary(found, fold=True))
    assert drawn(render_model_summary(found, fold=True)).count("x") == 200


@pytest.fixture
def hostile(inspected) -> ModelSummary:
    """A model whose names would move the cursor, turn the text and draw smileys."""
    model = exported(("full",))
    model.producer_name = f"{HOSTILE}\n"
    model.graph.output.append(models.info(f"{HOSTILE}_RetainedState"))
    found: ModelSummary = inspected(model)
    rows = tuple(item._replace(buffer=HOSTILE + item.buffer) for item in found.buffers)
    return found._replace(path=HOSTILE, buffers=rows)


def test_hostile_names_are_shown_and_do_nothing(hostile: ModelSummary) -> None:
    text = drawn(render_model_summary(hostile), width=300)
    assert text.startswith(f"{SHOWN}  1.0 kB\n")
    assert f"made by         {SHOWN}\\x0a 1;" in text
    assert f"{SHOWN}past_key     f\n" in text
    assert text.count(f"{SHOWN}_RetainedState") == 2  # kept, and found
    assert not set(text) & {"\x1b", "\u202e"}


def test_where_the_encoding_ends_names_are_escaped(hostile: ModelSummary) -> None:
    text = drawn(render_model_summary(hostile), width=300, encoding="ascii")
    assert f"{SHOWN[:-1]}\\xe9past_key     f\n" in text
    assert drawn(render_kv_map(buffers(0)), encoding="ascii") == drawn(render_kv_map(buffers(0)))
