"""Each trap that has cost someone a day, and the near miss beside it."""

from __future__ import annotations

import pytest
from handoff_sides import (
    CONSUMER,
    QEFF,
    build_side,
    build_side_layout,
    describe_attention,
    list_codes,
    predict_handoff,
    transfer_bytes,
)

from onnxkvrename.findings import build_finding
from onnxkvrename.handoff.compare import Handoff, compare_sides
from onnxkvrename.handoff.consumer_checks import check_consumer
from onnxkvrename.layout.layout import Layout, apply_sizes, build_layout
from onnxkvrename.model.signature import Signature, Value
from onnxkvrename.report.compare_text import (
    build_table_rows,
    format_handoff_verdict,
    format_prompt_outcome,
    resolve_outcome,
)
from onnxkvrename.rules.kv_model import KvModel
from onnxkvrename.rules.plan import build_minimal_plan

WINDOW = "2,sliding_window,4"
SIZES = {"ctx_len": 32, "sliding_window": 8}


def laid_out(inputs: tuple[Value, ...], outputs: tuple[Value, ...]) -> Layout:
    signature = Signature(inputs, outputs)
    plan = build_minimal_plan(signature, QEFF)
    return build_layout([KvModel("model.onnx", signature, plan)])


def message(found: Handoff, code: str) -> str:
    texts = (f"{one.subject} {one.message}" for one in found.findings if one.code == code)
    return next(texts).lstrip()


def list_outcomes(found: Handoff) -> dict[int, str]:
    """What becomes of each simulated prompt, by its length."""
    return {each.tokens: format_prompt_outcome(found, each) for each in found.simulated_prompts}


def test_two_sides_alike_work() -> None:
    side = build_side_layout(*describe_attention(0, 1), ctx_len=32)
    found = predict_handoff(side, side)
    assert (list_codes(found), found.verdict.outcome) == ([], "works")
    assert format_handoff_verdict(found) == (
        "hand-off works: 4 buffers of layers 0-1, prompts of up to 32 tokens, if both sides have "
        "the same weights and are compiled with the same precision; based on vllm-qaic's rules"
    )


def test_scales_of_a_quantized_cache_are_a_condition() -> None:
    for dtype, is_scaled in (("INT8", True), ("FLOAT16", False), ("MXINT8", False)):
        side = build_side_layout(*describe_attention(0, dtype=dtype), ctx_len=32)
        found = predict_handoff(side, side)
        assert ("use the same scales" in format_handoff_verdict(found)) == is_scaled


def test_sizes_that_are_missing_do_not_matter_between_sides_that_are_alike() -> None:
    side = build_side_layout(*describe_attention(0), *describe_attention(1, shape=WINDOW))
    found = predict_handoff(side, side)
    assert list_codes(found) == []
    text = format_handoff_verdict(found)
    assert "works" in text
    assert "ctx_len" in text
    assert "sliding_window" in text
    assert "ctx_len, sliding_window" in format_handoff_verdict(
        predict_handoff(side, side, full_transfer=True)
    )


def test_a_known_context_does_not_hide_that_windows_must_agree() -> None:
    side = build_side_layout(
        *describe_attention(0), *describe_attention(1, shape=WINDOW), ctx_len=32
    )
    found = predict_handoff(side, side)
    assert "sliding_window" in format_handoff_verdict(found)
    assert list_outcomes(found)[32] == "ok, if both sides have the same sliding_window"


def test_states_must_agree_and_all_that_is_moved_in_full() -> None:
    state = build_side_layout("recurrent_state.0:2,width,4", *describe_attention(1))
    assert predict_handoff(state, state, full_transfer=True).shared_symbols == ("ctx_len", "width")
    assert predict_handoff(state, state).shared_symbols == ("width",)
    full = build_side_layout(*describe_attention(0))
    assert predict_handoff(full, full).shared_symbols == ()


def test_a_longer_context_on_one_side_is_fine_up_to_the_shorter() -> None:
    side = build_side_layout(*describe_attention(0))
    found = predict_handoff(apply_sizes(side, {"ctx_len": 32}), apply_sizes(side, {"ctx_len": 64}))
    assert (list_codes(found), found.verdict.longest_prompt) == ([], 32)


def test_but_not_where_all_of_each_buffer_is_moved() -> None:
    side = build_side_layout(*describe_attention(0))
    sides = apply_sizes(side, {"ctx_len": 64}), apply_sizes(side, {"ctx_len": 32})
    found = predict_handoff(*sides, full_transfer=True)
    assert (list_codes(found), found.verdict.corrupt_ranges) == (["KV618"], ((1, 32),))
    assert predict_handoff(*sides[::-1], full_transfer=True).verdict.refused_ranges == ((1, 32),)


def test_the_batch_does_not_matter() -> None:
    side = build_side_layout(*describe_attention(0), ctx_len=32)
    other = tuple(
        one._replace(shape=("full_batch_size", *(one.shape or ())[1:])) for one in side.buffers
    )
    assert list_codes(predict_handoff(side, side._replace(buffers=other))) == []


# KV611: ROCm/ATOM#2154, vllm#49230


def test_69_of_93_layers_are_not_taken_for_all() -> None:
    """The 24 in between stay behind, and all that comes after the first of them is shifted."""
    prefill = build_side_layout(*describe_attention(*range(93)), ctx_len=32)
    some = [layer for layer in range(93) if layer % 4 != 3 or layer == 91]
    decode = build_side_layout(*describe_attention(*some[:69], 92), ctx_len=32)
    found = predict_handoff(prefill, decode)
    assert list_codes(found) == ["KV611", "KV618"]
    text = message(found, "KV611")
    assert "46" in text
    assert "past_key.3_vllmKvCache" in text
    assert "18 more" in text
    assert "past_key.4" in message(found, "KV618")
    assert found.verdict.corrupt_ranges == ((1, 32),)


def test_a_layer_that_only_decode_has_makes_decode_refuse() -> None:
    found = predict_handoff(
        build_side_layout(*describe_attention(0, 2)),
        build_side_layout(*describe_attention(0, 1, 2)),
    )
    assert list_codes(found) == ["KV611", "KV618"]
    assert (found.verdict.outcome, found.verdict.corrupt_ranges) == ("fails", ())


def test_layers_on_prefill_only_are_left_behind() -> None:
    found = predict_handoff(
        build_side_layout(*describe_attention(0, 1, 2)),
        build_side_layout(*describe_attention(0, 1)),
    )
    assert (list_codes(found), found.verdict.outcome) == (["KV611"], "loses")


def test_as_many_layers_again_are_another_model() -> None:
    found = predict_handoff(
        build_side_layout(*describe_attention(0, 1)),
        build_side_layout(*describe_attention(0, 1, 2, 3)),
    )
    assert list_codes(found) == ["KV611"]
    text = format_handoff_verdict(found)
    assert "layers 2-3" in text
    assert "KV611" in text


def test_a_layer_more_and_another_dtype_are_two_findings() -> None:
    more = describe_attention(0, 1, 2)
    found = predict_handoff(
        build_side_layout(*more[:-2]),
        build_side_layout(*more[:2], *describe_attention(1, dtype="INT8"), *more[4:]),
    )
    assert list_codes(found) == ["KV611", "KV612"]


def test_a_part_that_is_missing_in_the_last_layer_is_named() -> None:
    found = predict_handoff(
        build_side_layout(*describe_attention(0, 1)),
        build_side_layout(*describe_attention(0, 1)[:3]),
    )
    assert (list_codes(found), found.verdict.outcome) == (["KV611"], "loses")
    text = message(found, "KV611")
    assert "past_value.1_vllmKvCache" in text
    assert "value of layer 1" in text


# KV612: sglang#19398


def test_bf16_against_fp8_is_a_difference_and_stops_this_consumer() -> None:
    found = predict_handoff(
        build_side_layout(*describe_attention(0, dtype="BFLOAT16")),
        build_side_layout(*describe_attention(0, dtype="FLOAT8E4M3FN")),
    )
    assert list_codes(found) == ["KV610", "KV610", "KV612"]
    assert found.verdict.outcome == "fails"
    assert "would fail at start-up" in format_handoff_verdict(found)


def test_a_dtype_of_another_width_is_silent_in_one_direction_only() -> None:
    wide, narrow = (
        build_side_layout(*describe_attention(0, dtype=dtype), ctx_len=32)
        for dtype in ("FLOAT16", "MXINT8")
    )
    assert list_codes(predict_handoff(wide, narrow)) == ["KV612"]
    assert predict_handoff(wide, narrow).verdict.corrupt_ranges == ((1, 32),)
    assert predict_handoff(narrow, wide).verdict.refused_ranges == ((1, 32),)


def test_one_layer_in_another_dtype_shifts_those_behind_it() -> None:
    prefill = build_side_layout(*describe_attention(0, 1, 2))
    decode = build_side_layout(
        *describe_attention(0), *describe_attention(1, dtype="MXINT8"), *describe_attention(2)
    )
    found = predict_handoff(prefill, decode)
    assert list_codes(found) == ["KV612", "KV618"]
    text = message(found, "KV618")
    assert "past_key.2_vllmKvCache" in text
    assert "byte 48" in text
    assert "at 64" in text
    assert "1 later" in text
    assert "dtype" in found.findings[1].hint


def test_a_dtype_of_the_same_width_is_another_dtype_all_the_same() -> None:
    found = predict_handoff(
        build_side_layout(*describe_attention(0, dtype="INT8")),
        build_side_layout(*describe_attention(0, dtype="MXINT8")),
    )
    assert (list_codes(found), found.verdict.outcome) == (["KV612"], "corrupts")


# KV613, KV615


def test_other_heads_are_a_difference_of_shape() -> None:
    found = predict_handoff(
        build_side_layout(*describe_attention(0, shape="4,ctx_len,4")),
        build_side_layout(*describe_attention(0)),
    )
    assert list_codes(found) == ["KV613"]
    assert "FLOAT16 [4, ctx_len, 4] on prefill and FLOAT16 [2, ctx_len, 4]" in (
        message(found, "KV613")
    )


def test_another_rank_is_one_too() -> None:
    assert list_codes(
        predict_handoff(
            build_side_layout(*describe_attention(0, shape="ctx_len,8")),
            build_side_layout(*describe_attention(0)),
        )
    )[0] == ("KV613")


def test_another_state_is_one_too() -> None:
    one, other = (
        build_side_layout("conv_state.0:8,3", f"recurrent_state.0:2,{n},4") for n in (4, 8)
    )
    assert list_codes(predict_handoff(one, other, full_transfer=True)) == ["KV613"]
    assert list_codes(predict_handoff(one, one, full_transfer=True)) == []


def test_the_same_sizes_in_another_order_are_told_from_other_sizes() -> None:
    """TensorRT-LLM#6507: as many bytes, and no token where it is looked for."""
    prefill, decode = (
        build_side_layout(*describe_attention(0)),
        build_side_layout(*describe_attention(0, shape="ctx_len,2,4")),
    )
    assert list_codes(predict_handoff(prefill, decode, full_transfer=True)) == ["KV615"]
    turned = build_side_layout(*describe_attention(0, shape="4,ctx_len,2"))
    found = predict_handoff(prefill, turned)
    assert (list_codes(found), found.verdict.outcome) == (["KV615"], "corrupts")
    assert list_codes(
        predict_handoff(prefill, build_side_layout(*describe_attention(0, shape="4,ctx_len,4")))
    ) == ["KV613"]


def test_a_batch_on_another_axis_is_another_order_though_one_sequence_has_as_many_bytes() -> None:
    """All prompts of one sequence would do: [b, 2, ctx_len, 4] and [ctx_len, 2, b, 4]."""

    plain = build_side_layout(*describe_attention(0))
    one, other = (
        plain._replace(buffers=tuple(each._replace(shape=shape) for each in plain.buffers))
        for shape in (("b", 2, "ctx_len", 4), ("ctx_len", 2, "b", 4))
    )
    for prefill, decode in ((one, other), (other, one)):
        found = predict_handoff(prefill, decode)
        assert (list_codes(found), found.verdict.outcome) == (["KV615"], "corrupts")
    text = message(found, "KV615")
    assert "FLOAT16 [ctx_len, 2, b, 4] on prefill" in text
    assert "[b, 2, ctx_len, 4] on decode" in text
    assert list_codes(predict_handoff(one, one)) == list_codes(predict_handoff(plain, one)) == []


def test_a_larger_last_buffer_is_refused_though_its_bytes_would_be_right() -> None:
    """One head: tokens stand as before, and decode wants room behind them."""
    prefill = build_side_layout(*describe_attention(0, shape="1,ctx_len,4"), ctx_len=12)
    decode = build_side_layout("past_key.0:1,ctx_len,4", "past_value.0:ctx_len,1,4", ctx_len=12)
    found = predict_handoff(prefill, decode)
    assert (list_codes(found), found.verdict.outcome) == (["KV615"], "fails")
    assert transfer_bytes(prefill, decode, 5).refused
    assert list_codes(predict_handoff(prefill, prefill)) == []


# KV614: the chunking trap


def sides() -> tuple[object, ...]:
    return build_side_layout(
        *describe_attention(0, 2), *describe_attention(1, shape=WINDOW), **SIZES
    ), build_side_layout(*describe_attention(0, 1, 2), ctx_len=32)


def test_a_window_on_decode_only_corrupts_prompts_longer_than_it() -> None:
    window, full = sides()
    found = predict_handoff(full, window)
    assert list_codes(found) == ["KV614", "KV618"]
    assert (found.verdict.corrupt_ranges, found.verdict.refused_ranges) == (((9, 32),), ())
    assert {row.pair.present_buffer.layer: row.wrong_ranges for row in found.pair_results} == {
        0: (),
        1: ((9, 32),),
        2: ((9, 32),),
    }
    assert not transfer_bytes(full, window, 8).wrong
    assert len(transfer_bytes(full, window, 9).wrong) == 4


def test_a_window_on_prefill_only_makes_decode_refuse_them() -> None:
    window, full = sides()
    found = predict_handoff(window, full)
    assert (found.verdict.outcome, found.verdict.refused_ranges) == ("fails", ((9, 32),))
    assert "too small" in format_handoff_verdict(found)
    assert "cannot detect" not in message(found, "KV618")


def test_without_sizes_the_window_is_named_and_asked_for() -> None:
    window, full = (side._replace(sizes={}) for side in sides())
    found = predict_handoff(full, window)
    assert list_codes(found) == ["KV614", "KV618"]
    text = format_handoff_verdict(found)
    assert "would corrupt" in text
    assert "sliding_window" in text
    assert "--dim sliding_window=SIZE" in found.findings[0].hint
    assert predict_handoff(window, full).verdict.outcome == "fails"


def test_windows_of_two_sizes_differ_from_the_smaller_on() -> None:
    side = build_side_layout(*describe_attention(0), *describe_attention(1, shape=WINDOW))
    one, other = (apply_sizes(side, {"ctx_len": 32, "sliding_window": n}) for n in (8, 16))
    found = predict_handoff(other, one)
    assert found.verdict.corrupt_ranges == ((9, 32),)
    text = message(found, "KV614")
    assert "layer 1" in text
    assert "16 and 8" in text
    assert "longer than 8" in text
    text = format_handoff_verdict(found)
    assert "would corrupt" in text
    assert "8 tokens" in text
    assert "KV614" in text
    text = format_handoff_verdict(predict_handoff(other, one, full_transfer=True))
    assert "every prompt" in text
    assert "KV614" in text
    assert list_codes(predict_handoff(one, one)) == []


def test_a_window_as_long_as_the_context_is_harmless() -> None:
    window, full = sides()
    assert list_codes(predict_handoff(full, apply_sizes(window, {"sliding_window": 32}))) == []


def test_a_size_that_is_known_on_one_side_only_is_asked_for_where_it_matters() -> None:
    side = build_side_layout(*describe_attention(0), *describe_attention(1, shape=WINDOW))
    found = predict_handoff(apply_sizes(side, {"sliding_window": 8}), side)
    assert (list_codes(found), found.verdict.outcome) == (["KV614"], "unknown")
    text = format_handoff_verdict(found)
    assert "cannot decide" in text
    assert "KV614" in text
    assert "--dim decode:sliding_window=SIZE" in text
    assert format_handoff_verdict(
        predict_handoff(side, apply_sizes(side, {"sliding_window": 8}))
    ).endswith("pass --dim prefill:sliding_window=SIZE")
    assert list_codes(predict_handoff(apply_sizes(side, {"ctx_len": 8}), side)) == []


def test_a_context_that_is_known_on_one_side_is_not_to_blame_for_a_window() -> None:
    side = build_side_layout(
        *describe_attention(0), *describe_attention(1, shape=WINDOW), *describe_attention(2)
    )
    found = predict_handoff(apply_sizes(side, SIZES), side)
    assert list_codes(found) == ["KV614"]
    assert "past_key.1_" in message(found, "KV614")
    assert [row[-1] for row in build_table_rows(found)] == [
        "ok",
        "depends on sizes (KV614)",
        "depends on sizes",
    ]


def test_a_context_that_is_moved_in_full_is_asked_for_as_the_window_is() -> None:
    side = build_side_layout(*describe_attention(0), *describe_attention(1, shape=WINDOW))
    found = predict_handoff(apply_sizes(side, SIZES), side, full_transfer=True)
    assert list_codes(found) == ["KV618", "KV614"]
    assert format_handoff_verdict(found).endswith(
        "pass --dim decode:ctx_len=SIZE --dim decode:sliding_window=SIZE"
    )


def test_a_context_that_is_shorter_than_the_rest_is_found_beside_an_open_window() -> None:
    side = build_side_layout(
        *describe_attention(0),
        *describe_attention(1, shape=WINDOW),
        *describe_attention(2),
        ctx_len=32,
    )
    short = build_side_layout(
        *describe_attention(0),
        *describe_attention(1, shape=WINDOW),
        *describe_attention(2, shape="2,some,4"),
    )
    decode = apply_sizes(short, {"ctx_len": 32, "some": 16, "sliding_window": 8})
    found = predict_handoff(side, decode)
    assert list_codes(found) == ["KV614", "KV614"]
    assert {row.pair.present_buffer.layer: row.is_undecided for row in found.pair_results} == {
        0: False,
        1: True,
        2: False,
    }


# KV616: the token


def test_a_plain_side_is_compared_as_if_it_were_renamed() -> None:
    plain, named = (
        build_side_layout(*describe_attention(0), token=""),
        build_side_layout(*describe_attention(0)),
    )
    found = predict_handoff(named, plain)
    assert list_codes(found) == ["KV616"]
    text = format_handoff_verdict(found)
    assert "would corrupt" in text
    assert "KV616" in text
    assert "after a rename" in text
    assert resolve_outcome(predict_handoff(plain, named)) == "fails"


def test_two_sides_with_another_token_are_told_once() -> None:
    side = build_side_layout(*describe_attention(0), token="VLLM")
    found = predict_handoff(side, side)
    assert list_codes(found) == ["KV616"]
    assert "VLLM;" in found.findings[0].message
    assert "vllmKvCache" in found.findings[0].message


def test_a_half_renamed_side_is_told_with_what_is_missing() -> None:
    named, plain = (
        build_side_layout(*describe_attention(0, 1), token=token) for token in ("vllmKvCache", "")
    )
    half = named._replace(
        inputs=(*named.inputs[:2], *plain.inputs[2:]),
        outputs=(*named.outputs[:3], *plain.outputs[3:]),
        buffers=(*named.buffers[:2], *plain.buffers[2:]),
    )
    found = predict_handoff(half, half)
    assert list_codes(found) == ["KV616"]
    assert "2 buffers of prefill and decode" in found.findings[0].message
    assert "past_key.1)" in found.findings[0].message
    assert [(row.code, bool(row.wrong_ranges)) for row in found.pair_results] == [
        (None, False),
        (None, False),
        ("KV616", True),
        ("KV616", True),
    ]
    assert list_codes(predict_handoff(named, named)) == []


# KV617: the order


def graph_order(name: str) -> tuple[int, str]:
    """A consumer that takes buffers as the graph lists them."""
    return 0, ""


def lexical(name: str) -> tuple[int, str]:
    """A consumer that sorts names as text: 10 before 2."""
    return 0, name


def test_graphs_in_other_orders_are_sorted_by_this_consumer() -> None:
    prefill = build_side_layout(*describe_attention(2, 10))
    decode = build_side_layout(*describe_attention(10, 2))
    found = predict_handoff(prefill, decode)
    assert list_codes(found) == []
    assert found.prefill.order == "numeric"
    assert found.decode.order == "graph"
    assert "sorts them itself" in found.notes[0]


def test_a_consumer_that_goes_by_the_graph_puts_layer_10_in_the_place_of_layer_2() -> None:
    """nntrainer#4233: one graph lists its buffers by layer, the other by name."""
    names = sorted(text for text in describe_attention(2, 10))
    target = CONSUMER._replace(sort_key=graph_order)
    found = predict_handoff(
        build_side_layout(*names), build_side_layout(*describe_attention(2, 10)), consumer=target
    )
    assert "KV617" in list_codes(found)
    assert found.prefill.order == "lexical"
    told = message(found, "KV617")
    assert "4 outputs" in told
    assert "past_key.10_vllmKvCache_RetainedState" in told
    assert "past_key.2_vllmKvCache" in told
    assert found.verdict.outcome == "corrupts"


def test_names_sorted_as_text_on_both_sides_are_in_one_order() -> None:
    target = CONSUMER._replace(sort_key=lexical)
    side = build_side_layout(*describe_attention(*range(12)))
    assert list_codes(predict_handoff(side, side, consumer=target)) == []


def test_pairing_by_position_puts_a_value_in_the_place_of_a_key() -> None:
    """vllm-ascend#15900: outputs in another order than inputs."""
    side = build_side_layout(*describe_attention(0, 1))
    target = CONSUMER._replace(sort_key=graph_order)
    turned = side._replace(outputs=side.outputs[::-1])
    found = predict_handoff(turned, side, consumer=target)
    assert list_codes(found) == ["KV617"]
    assert "4 outputs (first: " in message(found, "KV617")
    assert all(row.wrong_ranges for row in found.pair_results)


def test_a_scope_sorts_before_a_name_and_changes_nothing_within_a_layer() -> None:
    side = build_side_layout(*describe_attention(0, 1))

    def scoped(values: tuple[Value, ...]) -> tuple[Value, ...]:
        return tuple(one._replace(name=f"layer/{one.name}") for one in values)

    buffers = tuple(
        b._replace(input=f"layer/{b.input}", output=f"layer/{b.output}") for b in side.buffers
    )
    other = side._replace(inputs=scoped(side.inputs), outputs=scoped(side.outputs), buffers=buffers)
    assert list_codes(predict_handoff(side, other)) == []


# KV605: states


def test_a_state_that_is_cut_like_a_context_loses_its_end_for_short_prompts() -> None:
    side = build_side_layout(
        "conv_state.0:8,3", "recurrent_state.0:2,4,4", *describe_attention(1), ctx_len=32
    )
    found = predict_handoff(side, side)
    assert (list_codes(found), found.verdict.corrupt_ranges) == (["KV605"], ((1, 3),))
    assert list_codes(predict_handoff(side, side, full_transfer=True)) == []
    assert "up to 3 tokens" in format_handoff_verdict(found)


def test_a_state_that_only_prefill_cuts_does_not_arrive_in_full_either() -> None:
    cut, uncut = (
        build_side_layout(f"recurrent_state.0:{shape}", *describe_attention(1))
        for shape in ("1,8,2", "8,2")
    )
    found = predict_handoff(cut, uncut)
    assert found.pair_results[0].wrong_ranges == ((1, 7),)
    assert predict_handoff(uncut, uncut).verdict.outcome == "works"


def test_the_beginning_of_a_state_is_not_that_of_a_context() -> None:
    state, context = (
        build_side_layout(f"past_key.0:2,{axis},4", ctx_len=8) for axis in ("8", "ctx_len")
    )
    state = state._replace(buffers=tuple(one._replace(kind="mamba") for one in state.buffers))
    assert predict_handoff(state, context).verdict.corrupt_ranges == ((1, 8),)
    assert predict_handoff(context, context).verdict.corrupt_ranges == ()


def test_the_beginnings_of_states_that_differ_are_not_alike() -> None:
    long, short = (build_side_layout(f"recurrent_state.0:1,{size},2") for size in (8, 6))
    assert predict_handoff(long, short).pair_results[0].wrong_ranges[0][0] == 1
    assert (6, 6) not in predict_handoff(long, long).pair_results[0].wrong_ranges


def test_a_context_of_a_fixed_size_is_a_context_where_the_other_side_says_so() -> None:
    told_by_name = build_side_layout(*describe_attention(0), ctx_len=8)
    fixed = tuple(one._replace(shape=(1, 2, 8, 4)) for one in told_by_name.inputs)
    outputs = tuple(
        one._replace(shape=(1, 2, 8, 4)) if "RetainedState" in one.name else one
        for one in told_by_name.outputs
    )
    by_size = laid_out(fixed, outputs)
    assert {buffer.kind for buffer in by_size.buffers} == {"unknown"}
    assert predict_handoff(by_size, told_by_name).verdict.outcome == "works"
    assert predict_handoff(told_by_name, by_size).verdict.outcome == "works"
    shorter = build_side_layout(*describe_attention(0), ctx_len=6)
    assert predict_handoff(by_size, shorter).verdict.longest_prompt == 6


def test_a_fixed_size_is_full_where_it_ends_even_if_nothing_of_it_is_cut() -> None:
    context = build_side_layout("past_key.0:ctx_len,4", ctx_len=8)
    inputs = tuple(one._replace(shape=(1, 3, 4)) for one in context.inputs)
    fixed = context._replace(
        inputs=inputs,
        buffers=tuple(
            one._replace(shape=(1, 3, 4), kind="unknown", sequence_axis=None)
            for one in context.buffers
        ),
    )
    assert predict_handoff(context, fixed).verdict.corrupt_ranges == ((4, 8),)
    assert predict_handoff(fixed, fixed).verdict.corrupt_ranges == ()


# KV608: what is no buffer, but has a place


def with_stranger(side: Layout, inputs: bool = True, outputs: bool = True) -> Layout:
    stranger = Value("embeds.0_vllmKvCache", "FLOAT16", ("batch_size", 3, 2))
    output = stranger._replace(name=f"{stranger.name}_RetainedState")
    return side._replace(
        inputs=(*side.inputs, stranger) if inputs else side.inputs,
        outputs=(*side.outputs, output) if outputs else side.outputs,
    )


def test_a_stranger_on_both_sides_is_handed_over_like_a_buffer() -> None:
    side = with_stranger(build_side_layout(*describe_attention(0, 1)))
    found = predict_handoff(side, side)
    assert (list_codes(found), found.verdict.outcome) == ([], "works")


def test_a_stranger_on_one_side_is_told() -> None:
    plain = build_side_layout(*describe_attention(0, 1))
    found = predict_handoff(plain, with_stranger(plain))
    assert list_codes(found)[0] == "KV608"
    assert "decode only" in message(found, "KV608")
    assert found.verdict.outcome == "fails"
    assert list_codes(predict_handoff(with_stranger(plain), plain))[0] == "KV608"


def test_a_stranger_that_no_input_has_a_place_for_is_left_out() -> None:
    plain = build_side_layout(*describe_attention(0))
    last = Value("zz.9_vllmKvCache_RetainedState", "FLOAT16", ("batch_size", 3, 2))
    assert list_codes(predict_handoff(plain._replace(outputs=(*plain.outputs, last)), plain)) == []


# KV602, KV609, KV610: what a side gets wrong by itself


def test_an_output_that_is_never_paired_leaves_it_open() -> None:
    side = build_side_layout(*describe_attention(0), *describe_attention(1, shape="4,ctx_len,4"))
    ends = {f"{b.output}": f"{b.output}".replace("_Ret", "_InternalRet") for b in side.buffers}
    other = side._replace(
        outputs=tuple(one._replace(name=ends.get(one.name, one.name)) for one in side.outputs),
        buffers=tuple(one._replace(output=ends[f"{one.output}"]) for one in side.buffers),
    )
    found = predict_handoff(side, other)
    assert (list_codes(found), found.verdict.outcome) == (["KV602"], "unknown")
    assert format_handoff_verdict(found).endswith("does not match with an input (KV602)")


def test_shapes_that_are_sliced_wrongly_stop_a_side_that_agrees_with_the_other() -> None:
    side = build_side_layout(*describe_attention(0, shape="ctx_len,8"))
    found = predict_handoff(side, side)
    assert (list_codes(found), found.verdict.outcome) == (["KV610", "KV610"], "fails")
    mixed = build_side_layout(*describe_attention(0, shape="ctx_len,8"), *describe_attention(1))
    assert list_codes(predict_handoff(mixed, mixed)) == []


def test_decode_that_turns_its_own_buffers_corrupts_every_prompt() -> None:
    side = build_side_layout(*describe_attention(0, 1))
    target = CONSUMER._replace(sort_key=graph_order)
    turned = side._replace(outputs=side.outputs[::-1])
    found = predict_handoff(side, turned, consumer=target)
    assert (list_codes(found), found.verdict.outcome) == (["KV609"], "corrupts")
    text = format_handoff_verdict(found)
    assert "would corrupt" in text
    assert "KV609" in text


def test_one_name_on_both_sides_is_no_matter_of_order() -> None:
    """QEfficient, exporting with the token: KV106 says it, and no template mends it."""
    names = [
        f"past_{part}.{layer}_vllmKvCache_RetainedState"
        for layer in (0, 1)
        for part in ("key", "value")
    ]
    both = tuple(Value(name, "FLOAT16", ("batch_size", 2, "ctx_len", 4)) for name in names)
    broken = laid_out(both, (Value("logits", "FLOAT", ("batch_size", 1, 8)), *both))
    assert "KV609" not in {one.code for one in check_consumer(broken, CONSUMER)}
    turned = build_side_layout(*describe_attention(0, 1))
    target = CONSUMER._replace(sort_key=graph_order)
    turned = turned._replace(outputs=turned.outputs[::-1])
    assert "KV609" in {one.code for one in check_consumer(turned, target)}


def test_a_stranger_behind_all_that_decode_reads_has_no_place_among_the_buffers() -> None:
    """Decode's memory is then smaller than prefill's, and each buffer where it was."""
    plain = build_side_layout(*describe_attention(0, 1), ctx_len=32)
    stranger = Value("z.9_vllmKvCache", "FLOAT16", ("batch_size", 4))
    retained = stranger._replace(name=f"{stranger.name}_RetainedState")
    behind = plain._replace(inputs=(*plain.inputs, stranger), outputs=(*plain.outputs, retained))
    assert list_codes(predict_handoff(behind, plain)) == []
    assert transfer_bytes(behind, plain, 9).wrong == frozenset()
    assert list_codes(predict_handoff(plain, behind))[0] == "KV608"


# KV605: keys and values of an encoder


def cross_layout(length: int | str, **sizes: int) -> Layout:
    """A decoder's layer with a cache of its own, and one of what the encoder wrote."""
    layout = build_side_layout(
        *describe_attention(0), *describe_attention(1, shape=f"2,{length},4"), **sizes
    )
    buffers = (
        one._replace(kind="cross_attention", kind_guessed=False) if one.layer == 1 else one
        for one in layout.buffers
    )
    return layout._replace(buffers=tuple(buffers))


@pytest.mark.parametrize("length", ["encoder_ctx_len", 1500])
def test_what_an_encoder_wrote_is_cut_to_the_prompt_and_lost(length: int | str) -> None:
    """The decoder's context limits prompts, and no prompt is as long as what the encoder heard."""
    sizes = {} if isinstance(length, int) else {length: 1500}
    side = cross_layout(length, ctx_len=448, **sizes)
    found = predict_handoff(side, side)
    assert list_codes(found) == ["KV605"]
    assert "encoder's" in message(found, "KV605")
    assert (found.verdict.outcome, found.verdict.longest_prompt) == ("corrupts", 448)
    assert found.verdict.corrupt_ranges == ((1, 448),)
    assert transfer_bytes(side, side, 4).wrong
    whole = predict_handoff(side, side, full_transfer=True)
    assert (list_codes(whole), whole.verdict.outcome) == ([], "works")


def test_an_encoder_of_another_length_is_another_buffer() -> None:
    sides = (
        cross_layout("encoder_ctx_len", ctx_len=448, encoder_ctx_len=size) for size in (1500, 750)
    )
    found = predict_handoff(*sides, full_transfer=True)
    assert "KV613" in list_codes(found)
    unsized = cross_layout("encoder_ctx_len", ctx_len=448)
    shared = predict_handoff(unsized, unsized, full_transfer=True).shared_symbols
    assert shared == ("encoder_ctx_len",)


# KV604: what stands behind the buffers


@pytest.mark.parametrize(
    ("names", "when", "state"),
    [
        ([], "at the first prompt", "fails at the first prompt (KV604)"),
        # With logits, vllm-qaic tries the model when it starts.
        (["logits", "logprobs", "log_odds"], "at start-up", "not started (KV604)"),
    ],
)
def test_prefill_counts_one_output_behind_its_buffers(
    names: list[str], when: str, state: str
) -> None:
    side = build_side_layout(*describe_attention(0))
    behind = tuple(Value(name, "FLOAT", ("batch_size", 1, 8)) for name in names)
    other = side._replace(outputs=(*behind, *side.outputs[1:]))
    found = predict_handoff(other, side)
    assert (list_codes(found), found.verdict.outcome) == (["KV604"], "fails")
    assert found.findings[0].message.endswith(f"fails {when}")
    assert format_handoff_verdict(found).startswith(f"hand-off would fail {when}:")
    assert set(list_states(found)) == {state}
    assert list_codes(predict_handoff(side, other)) == []


def test_two_outputs_behind_the_buffers_pass() -> None:
    side = build_side_layout(*describe_attention(0))
    more = Value("logprobs", "FLOAT", ("batch_size", 1, 8))
    assert list_codes(predict_handoff(side._replace(outputs=(*side.outputs, more)), side)) == []


# Of it all


def test_each_range_of_lengths_has_its_own_cause() -> None:
    state = (
        "recurrent_state.0:2,4,4",
        *describe_attention(1),
        *describe_attention(2, shape=WINDOW),
    )
    wide, narrow = (build_side_layout(*state, ctx_len=32, sliding_window=size) for size in (32, 8))
    found = predict_handoff(wide, narrow)
    text = format_handoff_verdict(found)
    assert "up to 3 tokens" in text
    assert "KV605" in text
    assert "longer than 8" in text
    assert "KV614" in text
    text = format_handoff_verdict(predict_handoff(narrow, wide))
    assert "KV605" in text
    assert "decode would stop" in text
    assert "longer than 8" in text
    assert "KV614" in text


def test_a_row_names_its_finding_only_for_the_prompts_that_it_is_about() -> None:
    window = describe_attention(2, shape=WINDOW)
    prefill = build_side_layout(*describe_attention(0), "conv_state.1:1,1", *window, **SIZES)
    found = predict_handoff(prefill, build_side_layout(*describe_attention(0, 2), ctx_len=32))
    assert list_codes(found)[:2] == ["KV611", "KV614"]
    assert "prompts longer than 8 tokens differ" in message(found, "KV614")
    assert (found.verdict.corrupt_ranges, found.verdict.refused_ranges) == (((1, 8),), ((9, 32),))
    assert list_states(found)[-1] == "shifted for prompts of up to 8 tokens"


def test_what_is_only_left_behind_is_not_blamed_for_what_goes_wrong() -> None:
    prefill = build_side_layout(*describe_attention(0, 1, 2), ctx_len=32)
    decode = build_side_layout(
        *describe_attention(0), *describe_attention(1, shape=WINDOW), **SIZES
    )
    found = predict_handoff(prefill, decode)
    assert list_codes(found) == ["KV611", "KV614"]
    assert "KV614" in format_handoff_verdict(found)
    shifting = predict_handoff(
        prefill, build_side_layout(*describe_attention(0), *describe_attention(2), ctx_len=32)
    )
    text = format_handoff_verdict(shifting)
    assert "layer 1" in text
    assert "KV611" in text


def test_contexts_that_differ_are_the_cause_where_all_of_each_buffer_is_moved() -> None:
    side = build_side_layout("compressed_kv.0:1,ctx_len,6", "k_pe.0:1,ctx_len,2")
    found = predict_handoff(
        *(apply_sizes(side, {"ctx_len": size}) for size in (12, 9)), full_transfer=True
    )
    assert list_codes(found) == ["KV618"]
    assert "same context" in found.findings[0].hint
    assert "KV618" in format_handoff_verdict(found)


def test_one_cause_of_all_lengths_is_named_once() -> None:
    wide, narrow = (
        build_side_layout(*describe_attention(0, dtype=dtype)) for dtype in ("FLOAT16", "INT8")
    )
    both = build_side_layout(*describe_attention(0, dtype="INT8", shape="4,ctx_len,4"))
    assert format_handoff_verdict(predict_handoff(wide, narrow)).count("KV6") == 1
    assert format_handoff_verdict(predict_handoff(wide, both)).count("KV6") == 1


def test_the_outcome_of_each_length_is_told() -> None:
    window, full = sides()
    outcomes = list_outcomes(predict_handoff(full, window))
    assert (outcomes[8], outcomes[9]) == ("ok", "4 of 6 buffers wrong (KV614)")
    refused = list_outcomes(predict_handoff(window, full))[9]
    assert "refused" in refused
    assert "KV614" in refused


def test_sizes_that_are_missing_and_free_are_named_with_each_length() -> None:
    _, full = (side._replace(sizes={}) for side in sides())
    outcomes = list_outcomes(predict_handoff(full, full))
    assert outcomes[4096] == "ok, for any ctx_len"


def test_only_sizes_are_asked_back_where_a_dtype_differs_as_well() -> None:
    prefill = build_side_layout(*describe_attention(0))
    decode = build_side_layout(
        *describe_attention(0, dtype="INT8", shape="2,8,4"), sliding_window=8
    )
    decode = decode._replace(buffers=tuple(one._replace(kind="mamba") for one in decode.buffers))
    found = predict_handoff(prefill, decode)
    assert list_codes(found) == ["KV612", "KV618"]
    assert "--dim prefill:ctx_len=SIZE" in found.findings[1].hint
    assert list_outcomes(found) == {}


def test_a_buffer_that_is_not_read_or_a_side_that_does_not_start_is_not_ok() -> None:
    few, more = (
        build_side_layout(*describe_attention(0, 1), ctx_len=8),
        build_side_layout(*describe_attention(0, 1, 2), ctx_len=8),
    )
    assert list_outcomes(predict_handoff(more, few))[8] == "2 of 6 buffers not read by decode"
    silent = few._replace(outputs=few.outputs[1:])
    assert list_outcomes(predict_handoff(silent, few))[8] == "fails at the first prompt (KV604)"


def test_the_lengths_that_are_simulated_are_those_where_something_changes() -> None:
    window, full = sides()
    simulated = predict_handoff(full, window).simulated_prompts
    assert [one.tokens for one in simulated] == [1, 8, 9, 32]
    at_nine = next(
        one for one in predict_handoff(full, window).simulated_prompts if one.tokens == 9
    )
    assert [slot.offset for slot in at_nine.prefill_slots][:5] == [0, 144, 288, 432, 576]
    assert [slot.offset for slot in at_nine.decode_slots][:5] == [0, 144, 288, 416, 544]


def test_a_state_of_a_size_that_is_not_known_names_no_length() -> None:
    state = build_side_layout("recurrent_state.0:2,width,4")
    found = predict_handoff(state, state)
    assert list_codes(found) == ["KV605"]
    assert "short prompt" in message(found, "KV605")
    assert f"{1 << 31:,}" not in message(found, "KV605") + format_handoff_verdict(found)


def test_a_side_without_buffers_is_no_side() -> None:
    side = build_side_layout(*describe_attention(0))
    nothing = side._replace(buffers=(), inputs=(), outputs=())
    assert list_codes(predict_handoff(nothing, side)) == ["KV001"]
    found = predict_handoff(side, nothing)
    assert found.verdict.outcome == resolve_outcome(found) == "fails"


def list_states(handoff: Handoff) -> list[str]:
    return [row[-1] for row in build_table_rows(handoff)]


def test_no_row_is_ok_where_the_verdict_says_that_nothing_is_handed_over() -> None:
    """A buffer that is right by itself is lost with the others."""
    few, many = (build_side_layout(*describe_attention(*range(n)), ctx_len=32) for n in (1, 9))
    refused = predict_handoff(few, many)
    alone, lost = list_states(refused)
    assert alone.startswith("refused")
    assert "KV6" not in alone
    assert lost == f"{alone} (KV611)"
    sampler = few._replace(outputs=few.outputs[1:])
    not_started = predict_handoff(sampler, few)
    assert list_codes(not_started) == ["KV604"]
    assert list_states(not_started) == ["fails at the first prompt (KV604)"]


def test_no_row_is_ok_where_an_error_of_a_model_leaves_the_verdict_open() -> None:
    side = build_side_layout(*describe_attention(0), ctx_len=32)
    prefill, decode = (build_side(label, side) for label in ("prefill", "decode"))
    finding = build_finding("KV110", "past_key.0", "is not computed from its input", "export it")
    found = compare_sides(prefill._replace(model_finding=finding), decode, CONSUMER)
    assert format_handoff_verdict(found).startswith("cannot decide")
    assert list_states(found) == ["cannot decide (KV110)"]


def test_one_cause_is_told_once_however_many_layers_it_is_in() -> None:
    layers = range(0, 40, 2)
    window = build_side_layout(
        *describe_attention(*layers, shape=WINDOW), *describe_attention(*range(1, 40, 2)), **SIZES
    )
    full = build_side_layout(*describe_attention(*range(40)), ctx_len=32)
    found = predict_handoff(full, window)
    assert list_codes(found) == ["KV614", "KV618"]
    assert found.findings[0].message.startswith("40 buffers (first: past_key.0_vllmKvCache) are ")
    assert "39 later" in found.findings[1].message
    assert len(build_table_rows(found)) == 2


def test_what_takes_a_place_explains_what_it_shifts() -> None:
    decode = build_side_layout(*describe_attention(0), ctx_len=8)
    value = Value("a.0_vllmKvCache", "FLOAT16", ("batch_size", 4, 4))
    output = value._replace(name=f"{value.name}_RetainedState")
    prefill = decode._replace(
        inputs=(value, *decode.inputs), outputs=(*decode.outputs[:1], output, *decode.outputs[1:])
    )
    handoff = predict_handoff(prefill, decode)
    (affected,) = handoff.verdict.affected_ranges
    assert list_codes(handoff) == ["KV608", "KV618"]
    assert [cause.finding.code for cause in affected.causes] == ["KV608"]


@pytest.mark.parametrize(
    ("prefill", "decode", "outcome"),
    [
        pytest.param("aaa", "bbb", "works", id="one symbol each, named differently"),
        pytest.param("aba", "cdc", "works", id="two symbols each, in the same layers"),
        pytest.param("aba", "aba", "works", id="the same two symbols"),
        pytest.param("aaa", "bcb", "unknown", id="two symbols where the other side has one"),
        pytest.param("aba", "ccc", "unknown", id="one symbol where the other side has two"),
        pytest.param("aba", "cdd", "unknown", id="two symbols each, in different layers"),
    ],
)
def test_symbols_without_a_size_are_equal_only_as_another_name(
    prefill: str, decode: str, outcome: str
) -> None:
    sides = [
        build_side_layout(
            *(
                text
                for layer, symbol in enumerate(symbols)
                for text in describe_attention(layer, shape=f"2,size_{symbol},4")
            )
        )
        for symbols in (prefill, decode)
    ]
    found = predict_handoff(*sides)
    assert found.verdict.outcome == outcome
    assert set(list_codes(found)) == ({"KV614"} if outcome == "unknown" else set())
    if outcome == "unknown":
        verdict = format_handoff_verdict(found)
        assert verdict.startswith("cannot decide: the result depends on size_")
        arguments = verdict.partition("; pass ")[2].split(" --dim ")
        assert len(arguments) == len(set(arguments))


def test_a_window_under_another_symbol_is_found_once_the_sizes_are_known() -> None:
    prefill = build_side_layout(*describe_attention(0, 1, 2, shape="2,a,4"), a=4096)
    texts = [describe_attention(layer, shape=f"2,{'bcb'[layer]},4") for layer in range(3)]
    decode = build_side_layout(*(text for each in texts for text in each), b=4096, c=128)
    found = predict_handoff(prefill, decode)
    assert format_handoff_verdict(found).startswith(
        "hand-off would corrupt prompts longer than 128 tokens"
    )
