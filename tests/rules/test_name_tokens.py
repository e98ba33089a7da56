"""Tokens are told from words that are a part of the names."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnxkvrename.errors import RulesError
from onnxkvrename.rules.name_tokens import (
    NamedModel,
    NamedPair,
    find_tokens,
    select_for_token,
    split_token,
)

CACHE = {"update": ("append", "FLOAT"), "shape": ("n", 2, "p", 4)}


def build_model(*pairs: str, names: str = "") -> NamedModel:
    """A model of caches; a pair is ``input output``."""
    named = [NamedPair(*pair.split(), **CACHE) for pair in pairs]
    return NamedModel(named, {*names.split(), *" ".join(pairs).split()})


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        (["past.0_VLLM out.0_VLLM", "past.1_VLLM out.1_VLLM"], ["VLLM"]),
        (["past.0_VLLM past.0_VLLM_out"], ["VLLM"]),
        (["past.0_VLLM out.0_VLLM", "past.1 out.1"], ["VLLM"]),  # renamed in part
        (["past.0_VLLM out.0_VLLM", "past.1_OLD out.1_OLD"], ["VLLM", "OLD"]),
        (["k.0_VLLM k.0_VLLM_out", "v.0 v.0_out"], ["VLLM"]),
        (["past.0_abc out.0_abc", "past.1_abc out.1_abc"], []),  # may be a word
        (["past.0_VLLM out.0", "past.1_VLLM out.1"], []),  # on one side only
        (["past_0 past_0_out", "past_1 past_1_out"], []),  # the layer
        (["past_0_K out_0_K", "past_0_V out_0_V"], []),  # one name without them
        (["past_0_K_VLLM out_0_K_VLLM", "past_0_V_VLLM out_0_V_VLLM"], ["VLLM"]),
        (["V_K_VLLM V_K_VLLM_K"], ["VLLM"]),  # an output called like an input is another name
        (["k_0 o_0", "k_0_SCALE o_0_SCALE"], []),  # a name that is there
        (["k_0_VLLM o_0_VLLM", "k_0_SCALE_VLLM o_0_SCALE_VLLM"], ["VLLM"]),  # around the part
        (["k_L0 k_L0_out", "k_L1 k_L1_out"], []),
        (["k_L0 k_L0_out", "v_L0 v_L0_out", "c_L1 c_L1_out", "d_L1 d_L1_out"], []),
    ],
)
def test_a_token_is_told_from_a_part_of_a_name(pairs: list[str], expected: list[str]) -> None:
    assert list(find_tokens([build_model(*pairs)])) == expected


def test_the_requested_token_needs_no_capital_letter() -> None:
    model = build_model("past.0_abc out.0_abc", "past.1_abc out.1_abc")
    assert find_tokens([model], "abc") == ("abc",)
    assert find_tokens([model], "VLLM") == ("VLLM",)
    half = build_model("past_0_K_VLLM out_0_K_VLLM", "past_0_V out_0_V")
    assert find_tokens([half], "VLLM") == ("VLLM",)


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        (["past_0_K out_0_K", "past_0_V out_0_V"], "K cannot be"),
        (["past_0_K_in past_0_K_out"], "past_0_K_in already has K"),  # a profile put it there
        (["K.past.0 K.out.0"], "K.past.0 already has K"),
        (["past_vllmKvCache_0 out_0"], "past_vllmKvCache_0 already has vllmKvCache"),
        (["past.0_K past.0_out_K"], "past.0_out_K already has K"),
    ],
)
def test_a_token_that_would_stand_twice_in_a_name_is_refused(
    pairs: list[str], message: str
) -> None:
    with pytest.raises(RulesError, match=message):
        find_tokens([build_model(*pairs)], "K")


def test_words_of_one_model_are_no_tokens_of_another() -> None:
    models = [
        build_model("past.0_V out.0_V", "past.1_V out.1_V"),
        build_model("past_0_K out_0_K", "past_0_V out_0_V"),
    ]
    with pytest.raises(RulesError, match="V cannot be") as raised:
        find_tokens(models, "VLLM")
    assert raised.value.hint is not None
    assert "one by one" in raised.value.hint


def test_a_token_is_for_what_is_like_a_buffer_that_has_it() -> None:
    pairs = [
        NamedPair("key.0_VLLM", "new_key.0_VLLM", **CACHE),
        NamedPair("key.1", "new_key.1", ("append", "FLOAT"), ("n", 1, "p", 8)),  # a name like it
        NamedPair("value.0", "new_value.0", **CACHE),  # a shape like it
        NamedPair("vision", "new_vision", ("once", "FLOAT"), ("n", 2, "p", 4)),
        NamedPair("bias", "new_bias", ("append", "FLOAT"), ("n", 8)),
    ]
    assert select_for_token(pairs, ["VLLM"]) == [True, True, True, False, False]
    assert select_for_token(pairs, ["OTHER"]) == [True] * 5


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
