"""The layer and the part are found in names of any exporter."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnxkvrename.rules.suggestion.frames import StateNames, frame_states, split_token


def describe(*pairs: str) -> list[str]:
    """Return where the layer and the part of each pair are: ``in -> out`` for each frame."""
    states = []
    for pair in pairs:
        core, output, suffix = split_token(*pair.split(), ())
        states.append(StateNames(core, output, suffix, "attention", "append"))
    framed, listed = frame_states(states)
    texts = {}
    for state in framed:
        frame = state.frame
        middle = f"P{frame.between}L" if frame.is_part_first else f"L{frame.between}P"
        middle = middle.replace("P", "") if frame.own_part else middle
        sides = [f"{frame.before[side]}{middle}{frame.after[side]}" for side in (0, 1)]
        key = f"{sides[0]} -> {sides[1]}{frame.suffix}"
        texts.setdefault(key, []).append(f"{state.part}{state.layer}")
    found = [f"{key}: {' '.join(parts)}" for key, parts in texts.items()]
    return found + [f"listed: {item.part}{item.layer}" for item in listed]


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        (
            ["past_key_values.0.key present.0.key", "past_key_values.11.key present.11.key"],
            ["past_key_values.L.P -> present.L.P: key0 key11"],
        ),
        (
            ["past_key.3 past_key.3_RetainedState", "past_value.3 past_value.3_RetainedState"],
            ["P.L -> P.L_RetainedState: past_key3 past_value3"],
        ),
        (["past_key_0_in past_key_0_out"], ["P_L_in -> P_L_out: past_key0"]),
        (["past_key_self_0 present_key_self_0"], ["past_P_L -> present_P_L: key_self0"]),
        (["key_cache.0 updated_key_cache.0"], ["P.L -> updated_P.L: key_cache0"]),
        (["a/0/k_in a/0/k_out"], ["a/L/P_in -> a/L/P_out: k0"]),
        (["past_7 present_7"], ["past_L -> present_L: past7"]),
        # a model with two numbers: the one that counts further is the layer
        (
            [f"past_{n}_{m} present_{n}_{m}" for n in range(3) for m in range(2)],
            ["past_L_P -> present_L_P: 00 01 02 10 11 12"],
        ),
        # nothing counts along
        (["past_0_0 cat_7", "past_1_0 cat_11"], ["listed: past_00", "listed: past_01"]),
        (["h new_h"], ["listed: h0"]),
        # what one of them lacks, all of them lack: no pattern by accident
        (["k_1 index_put_1", "k_2 index_put"], ["listed: k1", "listed: k2"]),
        # two parts that would have one name
        (
            ["a.0.key x.0.key", "b.0.key y.0.key"],
            ["a.L.P -> x.L.P: key0", "b.L.key -> y.L.key: b_key0"],
        ),
        (["p[0].key q[0].key"], ["listed: p_key0"]),
        (["007 x007"], ["listed: 0070"]),
    ],
)
def test_names_are_taken_apart(pairs: list[str], expected: list[str]) -> None:
    assert describe(*pairs) == expected


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("past_VLLM", "present_VLLM"), ("past", "present", "")),
        (("past", "present"), ("past", "present", "")),
        (("past_VLLM", "past_VLLM_out"), ("past", "past", "_out")),
        (("past", "past_out"), ("past", "past", "_out")),
        (("past.1", "past.10"), ("past.1", "past.10", "")),
        (("past_VLLM", "past_out"), ("past", "past", "_out")),  # half renamed
        (("past", "past_VLLMs"), ("past", "past", "_VLLMs")),
    ],
)
def test_a_token_is_at_the_end_of_what_both_names_begin_with(
    names: tuple[str, str], expected: tuple[str, str, str]
) -> None:
    assert split_token(*names, ("VLLM",)) == expected


WORDS = st.text("ab0._/", min_size=1, max_size=6)


@given(WORDS, WORDS)
def test_a_token_that_is_put_in_is_found_again(name: str, output: str) -> None:
    core, rest, suffix = split_token(name, output, ("T",))
    assert split_token(f"{core}_T", f"{rest}_T{suffix}", ("T",)) == (core, rest, suffix)
