"""Each trap that has cost someone a day, and the near miss beside it."""

from __future__ import annotations

import pytest
from sideways import TARGET, attention, codes, handed, side_of, told

from onnxkvrename import outlook
from onnxkvrename.handoff import HandOff
from onnxkvrename.layouts import with_sizes
from onnxkvrename.signature import Value

WINDOW = "2,sliding_window,4"
SIZES = {"ctx_len": 32, "sliding_window": 8}


def message(found: HandOff, code: str) -> str:
    return next(f"{one.name} {one.message}" for one in found.findings if one.code == code)


def test_two_sides_alike_work() -> None:
    side = side_of(*attention(0, 1), ctx_len=32)
    found = told(side, side)
    assert (codes(found), found.verdict.outcome) == ([], "works")
    assert outlook.sentence(found) == (
        "hand-off works: 4 buffers of layers 0-1, prompts of up to 32 tokens"
    )


def test_sizes_that_are_missing_do_not_matter_between_sides_that_are_alike() -> None:
    side = side_of(*attention(0), *attention(1, shape=WINDOW))
    found = told(side, side)
    assert codes(found) == []
    assert outlook.sentence(found).endswith("whatever ctx_len, sliding_window may be")


def test_a_longer_context_on_one_side_is_fine_up_to_the_shorter() -> None:
    side = side_of(*attention(0))
    found = told(with_sizes(side, {"ctx_len": 32}), with_sizes(side, {"ctx_len": 64}))
    assert (codes(found), found.verdict.longest) == ([], 32)


def test_but_not_where_all_of_each_buffer_is_moved() -> None:
    side = side_of(*attention(0))
    sides = with_sizes(side, {"ctx_len": 64}), with_sizes(side, {"ctx_len": 32})
    found = told(*sides, whole=True)
    assert (codes(found), found.verdict.corrupt) == (["KV618"], ((1, 32),))
    assert told(*sides[::-1], whole=True).verdict.refused == ((1, 32),)


def test_the_batch_does_not_matter() -> None:
    side = side_of(*attention(0), ctx_len=32)
    other = tuple(
        one._replace(shape=("full_batch_size", *(one.shape or ())[1:])) for one in side.buffers
    )
    assert codes(told(side, side._replace(buffers=other))) == []


# KV611, KV620: ROCm/ATOM#2154, vllm#49230


def test_69_of_93_layers_are_not_taken_for_all() -> None:
    """The 24 in between stay behind, and all that comes after the first of them is shifted."""
    prefill = side_of(*attention(*range(93)), ctx_len=32)
    some = [layer for layer in range(93) if layer % 4 != 3 or layer == 91]
    decode = side_of(*attention(*some[:69], 92), ctx_len=32)
    found = told(prefill, decode)
    assert codes(found) == ["KV611", "KV618"]
    assert "46 buffers (key, value of layers" in message(found, "KV611")
    assert "past_key.4" in message(found, "KV618")
    assert found.verdict.corrupt == ((1, 32),)


def test_a_layer_that_only_decode_has_makes_decode_refuse() -> None:
    found = told(side_of(*attention(0, 2)), side_of(*attention(0, 1, 2)))
    assert codes(found) == ["KV611", "KV618"]
    assert (found.verdict.outcome, found.verdict.corrupt) == ("fails", ())


def test_draft_layers_on_decode_only_do_not_fit_into_the_memory() -> None:
    found = told(side_of(*attention(0, 1)), side_of(*attention(0, 1, 2)))
    assert codes(found) == ["KV620"]
    assert found.verdict.outcome == "fails"


def test_draft_layers_on_prefill_only_are_left_behind() -> None:
    found = told(side_of(*attention(0, 1, 2)), side_of(*attention(0, 1)))
    assert (codes(found), found.verdict.outcome) == (["KV620"], "loses")


def test_a_part_that_is_missing_in_the_last_layer_is_no_draft() -> None:
    found = told(side_of(*attention(0, 1)), side_of(*attention(0, 1)[:3]))
    assert (codes(found), found.verdict.outcome) == (["KV611"], "loses")


def test_a_first_layer_alone_is_no_draft() -> None:
    assert "KV620" not in codes(told(side_of(*attention(0, 1)), side_of(*attention(1))))
    side = side_of(*attention(0, 1, 2))
    assert codes(told(side, side)) == []


# KV612: sglang#19398


def test_bf16_against_fp8_is_a_difference_and_stops_this_consumer() -> None:
    found = told(
        side_of(*attention(0, dtype="BFLOAT16")), side_of(*attention(0, dtype="FLOAT8E4M3FN"))
    )
    assert codes(found) == ["KV610", "KV610", "KV612"]
    assert found.verdict.outcome == "fails"
    assert outlook.sentence(found).startswith("hand-off would fail at start-up")


def test_a_dtype_of_another_width_is_silent_in_one_direction_only() -> None:
    wide, narrow = (
        side_of(*attention(0, dtype=dtype), ctx_len=32) for dtype in ("FLOAT16", "MXINT8")
    )
    assert codes(told(wide, narrow)) == ["KV612"]
    assert told(wide, narrow).verdict.corrupt == ((1, 32),)
    assert told(narrow, wide).verdict.refused == ((1, 32),)


def test_one_layer_in_another_dtype_shifts_those_behind_it() -> None:
    prefill = side_of(*attention(0, 1, 2))
    decode = side_of(*attention(0), *attention(1, dtype="MXINT8"), *attention(2))
    found = told(prefill, decode)
    assert codes(found) == ["KV612", "KV618"]
    assert "past_key.2_vllmKvCache is looked for at byte 48, but was written to byte 64" in (
        message(found, "KV618")
    )


def test_a_dtype_of_the_same_width_is_another_dtype_all_the_same() -> None:
    found = told(side_of(*attention(0, dtype="INT8")), side_of(*attention(0, dtype="MXINT8")))
    assert (codes(found), found.verdict.outcome) == (["KV612"], "corrupts")


# KV613, KV615


def test_other_heads_are_a_difference_of_shape() -> None:
    found = told(side_of(*attention(0, shape="4,ctx_len,4")), side_of(*attention(0)))
    assert codes(found) == ["KV613"]
    assert "FLOAT16 [4, ctx_len, 4] on prefill and FLOAT16 [2, ctx_len, 4]" in (
        message(found, "KV613")
    )


def test_another_rank_is_one_too() -> None:
    assert codes(told(side_of(*attention(0, shape="ctx_len,8")), side_of(*attention(0))))[0] == (
        "KV613"
    )


def test_another_state_is_one_too() -> None:
    one, other = (side_of("conv_state.0:8,3", f"recurrent_state.0:2,{n},4") for n in (4, 8))
    assert codes(told(one, other, whole=True)) == ["KV613"]
    assert codes(told(one, one, whole=True)) == []


def test_the_same_sizes_in_another_order_are_told_from_other_sizes() -> None:
    """TensorRT-LLM#6507: as many bytes, and no token where it is looked for."""
    prefill, decode = side_of(*attention(0)), side_of(*attention(0, shape="ctx_len,2,4"))
    assert codes(told(prefill, decode, whole=True)) == ["KV615"]
    turned = side_of(*attention(0, shape="4,ctx_len,2"))
    found = told(prefill, turned)
    assert (codes(found), found.verdict.outcome) == (["KV615"], "corrupts")
    assert codes(told(prefill, side_of(*attention(0, shape="4,ctx_len,4")))) == ["KV613"]


def test_a_larger_last_buffer_is_refused_though_its_bytes_would_be_right() -> None:
    """One head: tokens stand as before, and decode wants room behind them."""
    prefill = side_of(*attention(0, shape="1,ctx_len,4"), ctx_len=12)
    decode = side_of("past_key.0:1,ctx_len,4", "past_value.0:ctx_len,1,4", ctx_len=12)
    found = told(prefill, decode)
    assert (codes(found), found.verdict.outcome) == (["KV615"], "fails")
    assert handed(prefill, decode, 5).refused
    assert codes(told(prefill, prefill)) == []


# KV614: the chunking trap


def sides() -> tuple[object, ...]:
    return side_of(*attention(0, 2), *attention(1, shape=WINDOW), **SIZES), side_of(
        *attention(0, 1, 2), ctx_len=32
    )


def test_a_window_on_decode_only_corrupts_prompts_longer_than_it() -> None:
    window, full = sides()
    found = told(full, window)
    assert codes(found) == ["KV614", "KV618"]
    assert (found.verdict.corrupt, found.verdict.refused) == (((9, 32),), ())
    assert {row.twin.any.layer: row.wrong for row in found.rows} == {
        0: (),
        1: ((9, 32),),
        2: ((9, 32),),
    }
    assert not handed(full, window, 8).wrong
    assert len(handed(full, window, 9).wrong) == 4


def test_a_window_on_prefill_only_makes_decode_refuse_them() -> None:
    window, full = sides()
    found = told(window, full)
    assert (found.verdict.outcome, found.verdict.refused) == ("fails", ((9, 32),))
    assert "decode would find its memory too small" in outlook.sentence(found)
    assert "does not notice" not in message(found, "KV618")


def test_without_sizes_the_window_is_named_and_asked_for() -> None:
    window, full = (side._replace(sizes={}) for side in sides())
    found = told(full, window)
    assert codes(found) == ["KV614", "KV618"]
    assert outlook.sentence(found).startswith(
        "hand-off would corrupt prompts longer than sliding_window:"
    )
    assert "--dim sliding_window=SIZE" in found.findings[0].hint
    assert told(window, full).verdict.outcome == "fails"


def test_windows_of_two_sizes_differ_from_the_smaller_on() -> None:
    side = side_of(*attention(0), *attention(1, shape=WINDOW))
    one, other = (with_sizes(side, {"ctx_len": 32, "sliding_window": n}) for n in (8, 16))
    assert told(other, one).verdict.corrupt == ((9, 32),)
    assert codes(told(one, one)) == []


def test_a_window_as_long_as_the_context_is_harmless() -> None:
    window, full = sides()
    assert codes(told(full, with_sizes(window, {"sliding_window": 32}))) == []


def test_a_size_that_is_known_on_one_side_only_is_asked_for_where_it_matters() -> None:
    side = side_of(*attention(0), *attention(1, shape=WINDOW))
    found = told(with_sizes(side, {"sliding_window": 8}), side)
    assert (codes(found), found.verdict.outcome) == (["KV614"], "unknown")
    assert outlook.sentence(found).endswith("give --dim sliding_window=SIZE")
    assert codes(told(with_sizes(side, {"ctx_len": 8}), side)) == []


# KV616: the token


def test_a_plain_side_is_compared_as_if_it_were_renamed() -> None:
    plain, named = side_of(*attention(0), token=""), side_of(*attention(0))
    found = told(named, plain)
    assert codes(found) == ["KV616"]
    assert outlook.sentence(found) == (
        "hand-off would corrupt every prompt: vllm-qaic selects nothing on decode (KV616); "
        "renamed, it works: 2 buffers of layer 0, whatever ctx_len may be"
    )
    assert outlook.outcome(told(plain, named)) == "fails"


def test_two_sides_with_another_token_are_told_once() -> None:
    side = side_of(*attention(0), token="VLLM")
    found = told(side, side)
    assert codes(found) == ["KV616"]
    assert "prefill and decode: the names carry VLLM, not vllmKvCache" in found.findings[0].message


def test_a_half_renamed_side_is_told_with_what_is_missing() -> None:
    named, plain = (side_of(*attention(0, 1), token=token) for token in ("vllmKvCache", ""))
    half = named._replace(
        inputs=(*named.inputs[:2], *plain.inputs[2:]),
        outputs=(*named.outputs[:2], *plain.outputs[2:]),
        buffers=(*named.buffers[:2], *plain.buffers[2:]),
    )
    found = told(half, half)
    assert codes(found) == ["KV616", "KV616"]
    assert "is one of 2 buffers of prefill" in found.findings[0].message
    assert [(row.code, bool(row.wrong)) for row in found.rows] == [
        (None, False),
        (None, False),
        ("KV616", True),
        ("KV616", True),
    ]
    assert codes(told(named, named)) == []


# KV617: the order


def graph_order(name: str) -> tuple[int, str]:
    """A consumer that takes buffers as the graph lists them."""
    return 0, ""


def lexical(name: str) -> tuple[int, str]:
    """A consumer that sorts names as text: 10 before 2."""
    return 0, name


def test_graphs_in_other_orders_are_sorted_by_this_consumer() -> None:
    prefill = side_of(*attention(2, 10))
    decode = side_of(*attention(10, 2))
    found = told(prefill, decode)
    assert codes(found) == []
    assert found.prefill.order == "numeric"
    assert found.decode.order == "graph"
    assert "sorts them by itself" in found.notes[0]


def test_a_consumer_that_goes_by_the_graph_puts_layer_10_in_the_place_of_layer_2() -> None:
    """nntrainer#4233: one graph lists its buffers by layer, the other by name."""
    names = sorted(text for text in attention(2, 10))
    target = TARGET._replace(key=graph_order)
    found = told(side_of(*names), side_of(*attention(2, 10)), target=target)
    assert "KV617" in codes(found)
    assert found.prefill.order == "lexical"
    assert "past_key.10_vllmKvCache_RetainedState would land in the place of past_key.2_" in (
        message(found, "KV617")
    )
    assert found.verdict.outcome == "corrupts"


def test_names_sorted_as_text_on_both_sides_are_in_one_order() -> None:
    target = TARGET._replace(key=lexical)
    side = side_of(*attention(*range(12)))
    assert codes(told(side, side, target=target)) == []


def test_pairing_by_position_puts_a_value_in_the_place_of_a_key() -> None:
    """vllm-ascend#15900: outputs in another order than inputs."""
    side = side_of(*attention(0, 1))
    target = TARGET._replace(key=graph_order)
    turned = side._replace(outputs=side.outputs[::-1])
    found = told(turned, side, target=target)
    assert codes(found) == ["KV617"]
    assert "one of 4 in the wrong place" in message(found, "KV617")
    assert all(row.wrong for row in found.rows)


def test_a_scope_sorts_before_a_name_and_changes_nothing_within_a_layer() -> None:
    side = side_of(*attention(0, 1))

    def scoped(values: tuple[Value, ...]) -> tuple[Value, ...]:
        return tuple(one._replace(name=f"layer/{one.name}") for one in values)

    buffers = tuple(
        b._replace(input=f"layer/{b.input}", output=f"layer/{b.output}") for b in side.buffers
    )
    other = side._replace(inputs=scoped(side.inputs), outputs=scoped(side.outputs), buffers=buffers)
    assert codes(told(side, other)) == []


# KV605: states


def test_a_state_that_is_cut_like_a_context_loses_its_end_for_short_prompts() -> None:
    side = side_of("conv_state.0:8,3", "recurrent_state.0:2,4,4", *attention(1), ctx_len=32)
    found = told(side, side)
    assert (codes(found), found.verdict.corrupt) == (["KV605"], ((1, 3),))
    assert codes(told(side, side, whole=True)) == []
    assert "prompts of up to 3 tokens" in outlook.sentence(found)


# Of it all


def test_the_lengths_that_are_simulated_are_those_where_something_changes() -> None:
    window, full = sides()
    assert [one.tokens for one in told(full, window, tokens=(5,)).transfers] == [1, 5, 8, 9, 32]
    at_nine = next(one for one in told(full, window).transfers if one.tokens == 9)
    assert [slot.offset for slot in at_nine.sent][:5] == [0, 144, 288, 432, 576]
    assert [slot.offset for slot in at_nine.read][:5] == [0, 144, 288, 416, 544]


def test_a_prompt_that_no_side_has_room_for_is_not_simulated() -> None:
    side = side_of(*attention(0), ctx_len=32)
    with pytest.raises(ValueError, match="longer than the context of 32"):
        told(side, side, tokens=(33,))


def test_a_side_without_buffers_is_no_side() -> None:
    side = side_of(*attention(0))
    nothing = side._replace(buffers=(), inputs=(), outputs=())
    assert "KV001" in codes(told(nothing, side))
    assert told(side, nothing).verdict.outcome == "fails"


def test_one_cause_is_told_once_however_many_layers_it_is_in() -> None:
    layers = range(0, 40, 2)
    window = side_of(*attention(*layers, shape=WINDOW), *attention(*range(1, 40, 2)), **SIZES)
    full = side_of(*attention(*range(40)), ctx_len=32)
    found = told(full, window)
    assert codes(found) == ["KV614", "KV618"]
    assert "so are 39 more" in found.findings[0].message
    assert "so are 39 behind it" in found.findings[1].message
    assert len(outlook.rows(found)) == 2
