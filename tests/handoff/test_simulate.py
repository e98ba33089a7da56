from __future__ import annotations

import pytest
from handoff_sides import (
    CONSUMER,
    build_side_layout,
    describe_attention,
    draw_sides,
    transfer_bytes,
)
from tiers import thin

from onnxkvrename.handoff.selection import build_view
from onnxkvrename.handoff.simulate import (
    build_transfer_setup,
    is_in_ranges,
    merge_ranges,
    simulate_transfer,
    subtract_ranges,
)


@pytest.mark.parametrize("full_transfer", [False, True])
@pytest.mark.parametrize("seed", thin(range(150), 40))
def test_the_simulation_agrees_with_a_transfer_of_real_bytes(
    seed: int, full_transfer: bool
) -> None:
    prefill, decode = draw_sides(seed)
    longest = 9
    views = (build_view(side, CONSUMER, full_transfer) for side in (prefill, decode))
    scene = build_transfer_setup(*views, longest_prompt=longest)
    shown = simulate_transfer(scene)
    names = {one.buffer_id: one.value.name for one in scene.decode_inputs}
    for tokens in range(1, longest + 1):
        truth = transfer_bytes(prefill, decode, tokens, full_transfer=full_transfer)
        assert is_in_ranges(tokens, shown.refused_ranges) == truth.refused
        if not truth.refused:
            wrong = {i for i, ranges in shown.wrong_ranges.items() if is_in_ranges(tokens, ranges)}
            assert {names[ident] for ident in wrong} == truth.wrong


def test_the_witness_sees_both_ways_to_go_wrong() -> None:
    transfers = [transfer_bytes(*draw_sides(seed), 5) for seed in range(40)]
    outcomes = {each.refused for each in transfers}
    wrong = [each for each in transfers if each.wrong]
    right = [
        seed for seed in range(40) if transfer_bytes(*draw_sides(seed), 5) == (False, frozenset())
    ]
    assert outcomes == {True, False}
    assert len(wrong) > 5 < len(right)


@pytest.mark.parametrize(("state", "meeting"), [("6,5", 9), ("7,4", 10)])
def test_offsets_that_meet_at_one_length_are_right_at_that_one(state: str, meeting: int) -> None:
    """A state that is larger on one side, and a buffer that grows faster on the other."""
    behind = describe_attention(2, shape="1,ctx_len,4")
    prefill = build_side_layout("conv_state.0:6,8", "past_key.1:1,ctx_len,2", *behind, ctx_len=40)
    decode = build_side_layout(
        f"conv_state.0:{state}", "past_key.1:1,ctx_len,4", *behind, ctx_len=40
    )
    views = (build_view(side, CONSUMER) for side in (prefill, decode))
    scene = build_transfer_setup(*views, longest_prompt=40)
    shown = simulate_transfer(scene)
    assert shown.wrong_ranges[2, "key"] == ((1, meeting - 1), (meeting + 1, 40))
    truth = {n: transfer_bytes(prefill, decode, n) for n in range(1, 41)}
    assert shown.refused_ranges == ((meeting + 1, 40),)
    assert [n for n, one in truth.items() if one.refused] == list(range(meeting + 1, 41))
    name = "past_key.2_vllmKvCache"
    assert [n for n, one in truth.items() if not one.refused | (name in one.wrong)] == [meeting]


def test_a_long_context_needs_no_more_than_a_few_lengths() -> None:
    """Check lengths for which a loop over all of them would take minutes."""
    long = 1 << 30
    full, window = describe_attention(0, 1), describe_attention(2, shape="2,sliding_window,4")
    prefill = build_side_layout(*full, *window, ctx_len=long, sliding_window=1 << 20)
    decode = build_side_layout(*full, *describe_attention(2), ctx_len=long)
    views = (build_view(side, CONSUMER) for side in (prefill, decode))
    shown = simulate_transfer(build_transfer_setup(*views, longest_prompt=long))
    assert shown.refused_ranges == (((1 << 20) + 1, long),)
    assert shown.wrong_ranges[0, "key"] == ()


def test_ranges_are_put_together_and_taken_apart() -> None:
    assert merge_ranges([(1, 3), (7, 9)], [(4, 5)]) == ((1, 5), (7, 9))
    assert subtract_ranges(((1, 9),), ((3, 4), (9, 12))) == ((1, 2), (5, 8))
    assert subtract_ranges(((1, 9),), ()) == ((1, 9),)
