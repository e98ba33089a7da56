"""The memory of a hand-off as a page gets it: for every prompt length what the comparison says."""

from __future__ import annotations

import pytest
from handoff_sides import (
    CONSUMER,
    build_side,
    build_side_layout,
    describe_attention,
    draw_sides,
    predict_handoff,
    transfer_bytes,
)
from tiers import thin

from onnxkvrename.findings import build_finding
from onnxkvrename.handoff.compare import Handoff, compare_sides
from onnxkvrename.handoff.find_consumers import load_consumer
from onnxkvrename.handoff.simulate import is_in_ranges
from onnxkvrename.handoff.verdict import REFUSALS
from onnxkvrename.layout.layout import Shape
from onnxkvrename.report.pages import fold_rows
from onnxkvrename.report.pages.buffer_states import BufferState
from onnxkvrename.report.pages.memory_map import (
    MapRow,
    MemoryMap,
    build_memory_map,
    compute_bytes,
)

LONG = 4096
WINDOW_CAUSE = "a window on one side, the whole context on the other (KV614)"


def find_state(row: MapRow, tokens: int) -> BufferState:
    return [state for state in row.states if state.first <= tokens][-1]


def list_lengths(memory_map: MemoryMap) -> range:
    """All lengths, or those up to some that are longer than every drawn size."""
    return range(1, min(memory_map.last, 14) + 1)


def list_wrong(memory_map: MemoryMap, tokens: int) -> set[str]:
    return {row.name for row in memory_map.rows if find_state(row, tokens).kind == "wrong"}


def build_window_map(prefill_window: bool = False) -> MemoryMap:
    """Map three layers, of which one side keeps a window of 128 tokens in the middle one."""
    window = (
        *describe_attention(0),
        *describe_attention(1, shape="2,sliding_window,4"),
        *describe_attention(2),
    )
    sides = [
        build_side_layout(*describe_attention(0, 1, 2), ctx_len=LONG),
        build_side_layout(*window, ctx_len=LONG, sliding_window=128),
    ]
    return build_memory_map(predict_handoff(*(reversed(sides) if prefill_window else sides)))


@pytest.mark.parametrize("full_transfer", thin([False, True], 40))
@pytest.mark.parametrize("seed", range(80))
def test_every_length_has_the_bytes_of_the_slots_and_the_states_of_the_simulation(
    seed: int, full_transfer: bool
) -> None:
    handoff = predict_handoff(*draw_sides(seed), full_transfer=full_transfer)
    memory_map = build_memory_map(handoff)
    setup = handoff.comparison.setup
    assert memory_map.is_drawn
    assert memory_map.last in (setup.longest_prompt, LONG)
    for tokens in list_lengths(memory_map):
        for slots, expected in (
            (memory_map.prefill, setup.build_prefill_slots(tokens)),
            (memory_map.decode, setup.build_decode_slots(tokens)),
        ):
            sizes = [compute_bytes(slot.pieces, tokens) for slot in slots]
            assert sizes == [slot.nbytes for slot in expected]


@pytest.mark.parametrize("seed", thin(range(80), 20))
def test_the_wrong_rows_are_those_that_get_wrong_bytes(seed: int) -> None:
    prefill, decode = draw_sides(seed)
    memory_map = build_memory_map(predict_handoff(prefill, decode))
    if "never begins" in memory_map.outcomes[0].text:
        assert all(row.states[0].kind == "none" for row in memory_map.rows)
        return
    for tokens in list_lengths(memory_map):
        truth = transfer_bytes(prefill, decode, tokens)
        kinds = {find_state(row, tokens).kind for row in memory_map.rows}
        if truth.refused:
            assert kinds == {"none"}
        else:
            assert list_wrong(memory_map, tokens) == truth.wrong


def test_each_slot_knows_the_row_of_the_buffer_that_is_in_it() -> None:
    memory_map = build_window_map()
    for slots, index in ((memory_map.prefill, 5), (memory_map.decode, 6)):
        assert [slot.row for slot in slots] == list(range(6))
        assert [row[index] for row in memory_map.rows] == list(range(6))


def test_a_state_names_its_own_cause_or_the_one_that_moves_it() -> None:
    rows = build_window_map().rows
    assert [find_state(row, 128).kind for row in rows] == ["correct"] * 6
    assert [find_state(row, 129).kind for row in rows] == ["correct"] * 2 + ["wrong"] * 4
    assert find_state(rows[2], 129).cause == WINDOW_CAUSE
    assert find_state(rows[4], 129).cause == f"prefill wrote it to other bytes: {WINDOW_CAUSE}"
    assert rows[4].summary == "shifted for prompts longer than 128 tokens"


def test_of_a_refused_prompt_nothing_is_transferred() -> None:
    memory_map = build_window_map(prefill_window=True)
    assert {find_state(row, 128).kind for row in memory_map.rows} == {"correct"}
    states = {find_state(row, 129)[1:] for row in memory_map.rows}
    assert states == {("none", f"{REFUSALS['shared']}: {WINDOW_CAUSE}")}
    assert [outcome[:2] for outcome in memory_map.outcomes] == [(1, "correct"), (129, "none")]


def test_before_a_side_starts_nothing_is_transferred() -> None:
    layout = build_side_layout(*describe_attention(0, 1), ctx_len=64)
    silent = layout._replace(outputs=layout.outputs[1:])  # without logits
    memory_map = build_memory_map(predict_handoff(silent, layout))
    assert {find_state(row, 1).kind for row in memory_map.rows} == {"none"}
    assert {outcome.kind for outcome in memory_map.outcomes} == {"none"}
    assert all("never begins" in row.states[0].cause for row in memory_map.rows)
    assert all("(KV604)" in row.states[0].cause for row in memory_map.rows)


def test_a_buffer_that_only_prefill_has_is_not_transferred() -> None:
    prefill = build_side_layout(*describe_attention(0, 1, 2), ctx_len=64)
    decode = build_side_layout(*describe_attention(0, 1), ctx_len=64)
    memory_map = build_memory_map(predict_handoff(prefill, decode))
    kinds = [find_state(row, 9).kind for row in memory_map.rows]
    assert kinds == ["correct"] * 4 + ["none"] * 2
    assert [(row.written, row.read) for row in memory_map.rows[4:]] == [(4, None), (5, None)]


def test_a_buffer_that_nothing_is_written_for_is_wrong() -> None:
    prefill = build_side_layout("past_key.0:2,ctx_len,4", "conv_state.1:8,4", ctx_len=64)
    decode = build_side_layout("past_key.0:2,ctx_len,4", "conv_state.2:8,4", ctx_len=64)
    memory_map = build_memory_map(predict_handoff(prefill, decode))
    names = [(row.name.partition("_v")[0], find_state(row, 9).kind) for row in memory_map.rows]
    assert ("conv_state.2", "wrong") in names
    assert ("conv_state.1", "none") in names


def test_two_models_are_wrong_wherever_their_bytes_are() -> None:
    from onnxkvrename.model.weights import Weight

    layout = build_side_layout(*describe_attention(0), ctx_len=64)
    sides = [
        layout._replace(weights=(Weight("model.norm.weight", "FLOAT16", (8,), digest),))
        for digest in ("a" * 64, "b" * 64)
    ]
    handoff = predict_handoff(*sides)
    assert handoff.verdict.outcome == "corrupts"
    memory_map = build_memory_map(handoff)
    assert {find_state(row, 5).kind for row in memory_map.rows} == {"wrong"}
    assert all("(KV623)" in find_state(row, 5).cause for row in memory_map.rows)


def test_without_a_size_that_decides_no_memory_is_drawn_and_nothing_behind_is_fine() -> None:
    first, last = describe_attention(0), describe_attention(2)
    middle = describe_attention(1, shape="2,sliding_window,4")
    known = build_side_layout(*first, *middle, *last, sliding_window=128)
    memory_map = build_memory_map(predict_handoff(known, build_side_layout(*first, *middle, *last)))
    assert not memory_map.is_drawn
    assert "not known" in memory_map.gap
    kinds = [find_state(row, 1).kind for row in memory_map.rows]
    assert kinds == ["correct"] * 2 + ["unknown"] * 4
    assert memory_map.outcomes[0].kind == "unknown"


def test_of_a_broken_model_nothing_is_known_to_be_fine() -> None:
    layout = build_side_layout(*describe_attention(0, 1), ctx_len=64)
    finding = build_finding("KV110", "past_key.0", "is not computed from its input", "export it")
    prefill, decode = (build_side(label, layout) for label in ("prefill", "decode"))
    handoff = compare_sides(prefill._replace(model_finding=finding), decode, CONSUMER)
    memory_map = build_memory_map(handoff)
    assert {find_state(row, 9).kind for row in memory_map.rows} == {"unknown"}
    assert {row.summary for row in memory_map.rows} == {"cannot decide (KV110)"}
    assert {outcome.kind for outcome in memory_map.outcomes} == {"unknown"}


def test_with_an_open_window_only_one_token_is_shown() -> None:
    whole = build_side_layout(*describe_attention(0, 1))
    window = build_side_layout(
        *describe_attention(0), *describe_attention(1, shape="2,sliding_window,4")
    )
    memory_map = build_memory_map(predict_handoff(whole, window))
    assert (memory_map.last, memory_map.is_drawn) == (1, True)
    assert "--dim sliding_window=SIZE" in memory_map.gap


def test_bytes_of_a_size_that_is_not_known_are_not_drawn() -> None:
    layout = build_side_layout(*describe_attention(0))
    memory_map = build_memory_map(predict_handoff(layout, layout, full_transfer=True))
    assert not memory_map.is_drawn
    assert "not known" in memory_map.gap


def test_a_context_without_a_limit_is_shown_as_far_as_was_asked_for() -> None:
    layout = build_side_layout(*describe_attention(0))
    assert build_memory_map(predict_handoff(layout, layout)).last == LONG
    asked = build_memory_map(predict_handoff(layout, layout, tokens=(100_000,)))
    assert asked.last == 200_000
    assert "up to 200,000 tokens" in asked.gap


def test_a_consumer_that_rounds_is_shown_for_one_token() -> None:
    def round_up(shape: Shape, tokens: int | None) -> Shape:
        cut = CONSUMER.transferred_shape(shape, tokens)
        rounded = [-(-int(str(cut[2])) // 16) * 16]
        return (*cut[:2], *rounded, *cut[3:])

    consumer = CONSUMER._replace(transferred_shape=round_up)
    layout = build_side_layout(*describe_attention(0), ctx_len=64)
    memory_map = build_memory_map(predict_handoff(layout, layout, consumer=consumer))
    assert (memory_map.last, memory_map.is_drawn) == (1, True)
    assert "do not grow evenly" in memory_map.gap


def test_arrays_of_their_own_do_not_move_each_other() -> None:
    whole = build_side_layout(*describe_attention(0, 1, 2), ctx_len=64)
    other = build_side_layout(
        *describe_attention(0),
        *describe_attention(1, dtype="INT8"),
        *describe_attention(2),
        ctx_len=64,
    )
    memory_map = build_memory_map(
        predict_handoff(whole, other, consumer=load_consumer("qefficient"))
    )
    wrong = [find_state(row, 5).kind == "wrong" for row in memory_map.rows]
    assert wrong == [False, False, True, True, False, False]


def build_large(windows: int, count: int) -> Handoff:
    """Compare sides of many layers, of which decode keeps a window in one of `windows`."""
    shapes = [
        "2,sliding_window,4" if layer % windows == 1 else "2,ctx_len,4" for layer in range(count)
    ]
    prefill = build_side_layout(*describe_attention(*range(count)), ctx_len=LONG)
    parts = (describe_attention(layer, shape=shape) for layer, shape in enumerate(shapes))
    buffers = (text for part in parts for text in part)
    return predict_handoff(prefill, build_side_layout(*buffers, ctx_len=LONG, sliding_window=128))


def test_many_buffers_are_folded_with_all_their_bytes_and_states(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fold_rows, "MAX_SINGLE_ROWS", 100)
    monkeypatch.setattr(fold_rows, "_FOLDED_ROWS", 50)
    handoff = build_large(6, 100)
    whole = build_memory_map(handoff)
    folded = fold_rows.fold_rows(whole)
    assert len(whole.rows) == 200
    assert len(folded.rows) < 100
    assert sum(row.buffer_count for row in folded.rows) == 200
    for tokens in (1, 128, 129, LONG):
        for before, after in ((whole.prefill, folded.prefill), (whole.decode, folded.decode)):
            assert sum(compute_bytes(slot.pieces, tokens) for slot in before) == sum(
                compute_bytes(slot.pieces, tokens) for slot in after
            )
        wrong = sum(
            row.buffer_count for row in folded.rows if find_state(row, tokens).kind == "wrong"
        )
        assert wrong == len(list_wrong(whole, tokens))
    for slots, side in ((folded.prefill, "written"), (folded.decode, "read")):
        for index, slot in enumerate(slots):
            assert slot.row is not None
            assert getattr(folded.rows[slot.row], side) == index


def test_too_many_buffers_that_differ_are_listed_with_the_wrong_ones_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fold_rows, "MAX_SINGLE_ROWS", 100)
    monkeypatch.setattr(fold_rows, "MAX_ROWS", 100)
    folded = fold_rows.fold_rows(build_memory_map(build_large(2, 100)))
    assert not folded.is_drawn
    assert len(folded.rows) == 100
    assert sum(row.buffer_count for row in folded.rows) + folded.hidden_rows == 200
    assert all(find_state(row, LONG).kind == "wrong" for row in folded.rows)
    assert "too many to draw" in folded.gap


@pytest.mark.parametrize("seeds", thin([range(12), range(12, 80)], 1))
@pytest.mark.parametrize("consumer", ["vllm-qaic", "qefficient"])
def test_the_states_of_rows_agree_with_the_outcome_and_the_verdict(
    consumer: str, seeds: range
) -> None:
    expected = {
        "correct": [{"correct"}],
        "wrong": [{"wrong"}, {"wrong", "correct"}, {"wrong", "none"}, {"wrong", "correct", "none"}],
        "none": [{"none"}, {"none", "correct"}],
    }
    for seed in seeds:
        handoff = predict_handoff(*draw_sides(seed), consumer=load_consumer(consumer))
        memory_map = build_memory_map(handoff)
        for tokens in list_lengths(memory_map):
            outcome = [each for each in memory_map.outcomes if each.first <= tokens][-1]
            kinds = {find_state(row, tokens).kind for row in memory_map.rows}
            assert kinds in expected[outcome.kind], (seed, tokens)
            if outcome.kind == "wrong":
                assert is_in_ranges(tokens, handoff.verdict.corrupt_ranges)


def test_a_buffer_that_only_makes_decode_refuse_is_correct_where_it_does_not() -> None:
    prefill = build_side_layout(*describe_attention(0, shape="1,ctx_len,4"), ctx_len=12)
    decode = build_side_layout("past_key.0:1,ctx_len,4", "past_value.0:ctx_len,1,4", ctx_len=12)
    memory_map = build_memory_map(predict_handoff(prefill, decode))
    for tokens, kind in ((11, "none"), (12, "correct")):
        assert {find_state(row, tokens).kind for row in memory_map.rows} == {kind}
