from __future__ import annotations

import pytest
from cache_models import HYBRID, MIXED
from draw_terminal import draw_plain

from onnxkvrename.layout.inspect import InspectedBuffer, ModelSummary
from onnxkvrename.report.inspection.grid import MAX_COLUMNS, STATUS_SYMBOLS
from onnxkvrename.report.inspection.map_text import render_kv_map
from onnxkvrename.rules.kinds import get_kind_traits, list_kinds

TOKEN = ("VLLM", "VLLM")


def buffers(*layers: int, **how: object) -> ModelSummary:
    """A model with one buffer in each of these layers."""
    one = InspectedBuffer(0, "past_key", "", "full_attention", "plain", "FLOAT", (1, 2), "a", "b")
    made = [one._replace(**{"layer": layer, **how}) for layer in layers]
    return ModelSummary("m.onnx", buffers=tuple(made))


def test_two_layers_are_two_wide_cells(inspected) -> None:
    assert draw_plain(render_kv_map, inspected(("full", "window"))) == (
        "layer        0   1\n"
        "past_key     f   w\n"
        "past_value   f   w\n"
        "\n"
        "f full attention   w sliding window   lower case: no token\n"
    )


def test_the_last_cell_has_as_much_color_as_the_others_and_its_text_no_space(inspected) -> None:
    _, *rows = render_kv_map(inspected(("mla", "mla"), tokens=TOKEN), 80)
    for row in rows[:2]:
        assert [span.text for span in row.spans if span.text.strip() == "M"] == [" M ", " M "]
        assert row.text.endswith(" M")


def test_capital_letters_carry_the_token(inspected) -> None:
    lines = draw_plain(render_kv_map, inspected(("mla", "mla"), tokens=TOKEN)).splitlines()
    assert lines[1:] == [
        "compressed_kv   M   M",
        "k_pe            M   M",
        "",
        "M MLA   UPPER CASE: has the token",
    ]


def test_no_sign_stands_for_a_kind_and_a_state() -> None:
    letters = {get_kind_traits(kind).symbol for kind in list_kinds()}
    signs = letters | {letter.upper() for letter in letters}
    assert not signs & set(STATUS_SYMBOLS.values())


def test_a_map_of_all_there_can_be(inspected) -> None:
    found = inspected(
        MIXED,
        tokens=TOKEN,
        without={"k_pe.2_VLLM", "k_pe.2_VLLM_RetainedState", "past_key.6_VLLM"},
    )
    assert draw_plain(render_kv_map, found) == (
        "layer             0   1   2   3   4   5   6   7\n"
        "past_key          F   W   .   .   S   ~   !   F\n"
        "past_value        F   W   .   .   S   ~   F   F\n"
        "compressed_kv     .   .   M   .   .   ~   .   .\n"
        "k_pe              .   .   -   .   .   ~   .   .\n"
        "conv_state        .   .   .   S   .   ~   .   .\n"
        "recurrent_state   .   .   .   S   .   ~   .   .\n"
        "\n"
        "F full attention   W sliding window   M MLA   S linear state   - missing\n"
        "! broken   . no such buffer in this layer   ~ layer without buffers\n"
        "UPPER CASE: has the token\n"
    )


def test_a_token_on_one_side_has_a_sign_of_its_own(inspected) -> None:
    text = draw_plain(render_kv_map, inspected(("full",), tokens=("", "VLLM")))
    assert "past_key     /\n" in text
    assert text.endswith("\n/ token on one side only\n")


def test_ninety_four_layers_fit_a_terminal_of_eighty_columns(inspected) -> None:
    ten = "F" * 10
    assert draw_plain(render_kv_map, inspected(("full",) * 94, tokens=TOKEN)) == (
        "layer       0          10         20         30         40       49\n"
        f"past_key    {' '.join([ten] * 5)}\n"
        f"past_value  {' '.join([ten] * 5)}\n"
        "\n"
        "layer       50         60         70         80         90 93\n"
        f"past_key    {' '.join([ten] * 4)} FFFF\n"
        f"past_value  {' '.join([ten] * 4)} FFFF\n"
        "\n"
        "F full attention   UPPER CASE: has the token\n"
    )


def test_cells_are_as_wide_as_there_is_room_for(inspected) -> None:
    found = inspected(HYBRID)
    assert "conv_state       s s . s s . s s . s" in draw_plain(render_kv_map, found, width=70)
    assert "layer            0         5         10" in draw_plain(render_kv_map, found, width=70)
    assert "conv_state       sss" not in draw_plain(render_kv_map, found, width=70)
    assert "conv_state       ss.ss.ss.s s.ss.ss.ss .ss." in draw_plain(
        render_kv_map, found, width=60
    )
    assert "conv_state        s   s   .   s" in draw_plain(render_kv_map, found, width=120)


@pytest.mark.parametrize("width", [1, 2, 5, 11, 20, 33, 80, 500])
def test_every_layer_is_drawn_whatever_the_width(width: int) -> None:
    lines = draw_plain(render_kv_map, buffers(*range(94), buffer="key"), width=width).splitlines()
    named = "key"[: width // 3]
    rows = [line.removeprefix(named).strip() for line in lines if line.startswith(named)]
    cells = [row for row in rows if row and not set(row) - {"f", " "}]
    assert sum(row.count("f") for row in cells[:94]) >= 94
    assert max(map(len, lines[: lines.index("")])) <= width  # the legend wraps by itself


def test_a_long_row_of_layers_without_buffers_is_one_mark() -> None:
    lines = draw_plain(render_kv_map, buffers(0, 1, 40, 41, 44)).splitlines()
    assert lines[0] == "layer      0   1      40  41  42  43  44"
    assert lines[1] == "past_key   f   f   ~   f   f   ~   ~   f"
    assert lines[-1].endswith("~ layer without buffers   lower case: no token")


def test_the_word_above_short_names_is_whole() -> None:
    lines = draw_plain(render_kv_map, buffers(0, 1, buffer="aa")).splitlines()
    assert lines[:2] == ["layer   0   1", "aa      f   f"]


def test_layers_far_apart_take_no_room() -> None:
    lines = draw_plain(render_kv_map, buffers(0, 999_999, 999_999_999)).splitlines()
    assert lines[1] == "past_key   f   ~   f   ~   f"
    assert lines[0].startswith("layer      0      999999")


def test_behind_a_long_gap_the_layer_is_told_in_narrow_maps_too() -> None:
    lines = draw_plain(render_kv_map, buffers(0, *range(50, 62)), width=30).splitlines()
    assert lines[:2] == ["layer     0 50     57", "past_key  f~ffffffff"]


def test_a_map_has_an_end_and_says_what_it_leaves_out() -> None:
    items = [buffers(layer, shape=(layer % 2,)).buffers[0] for layer in range(5_000)]
    text = draw_plain(render_kv_map, ModelSummary("m.onnx", buffers=tuple(items)))
    assert f"not shown: {5_000 - MAX_COLUMNS:,} more layers; --format json lists all\n" in text
    parts = [buffers(0, buffer=f"part_{number}").buffers[0] for number in range(5_000)]
    text = draw_plain(render_kv_map, ModelSummary("m.onnx", buffers=tuple(parts)))
    assert "not shown: 4,960 more rows; --format json lists all\n" in text
    assert len(text.splitlines()) < 60


def test_layers_that_would_touch_are_left_out() -> None:
    lines = draw_plain(render_kv_map, buffers(10000, 10001, 10002)).splitlines()
    assert lines[:2] == ["layer     10000   10002", "past_key   f   f   f"]


def test_scopes_share_a_row_unless_they_have_the_same_layer() -> None:
    apart = buffers(0, scope="layer_0/").buffers + buffers(1, scope="layer_1/").buffers
    found = ModelSummary("m.onnx", buffers=apart)
    assert "past_key   f   f\n" in draw_plain(render_kv_map, found)
    twice = ModelSummary("m.onnx", buffers=apart + buffers(0).buffers)
    text = draw_plain(render_kv_map, twice)
    assert "layer_0/past_key   f   .\n" in text
    assert "past_key           f   .\n" in text


def test_names_are_cut_before_the_cells_are() -> None:
    text = draw_plain(render_kv_map, buffers(0, 1, buffer="漢" * 100), width=30)
    assert "漢漢漢漢漢   f   f\n" in text
