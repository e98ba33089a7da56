from __future__ import annotations

from pathlib import Path

import pytest

from onnxkvrename import RulesError
from onnxkvrename.renaming.run import check_token_change
from onnxkvrename.rules.load import load_rules
from onnxkvrename.rules.parse import parse_rules
from onnxkvrename.rules.plan import TokenChange
from onnxkvrename.rules.profile import find_token_error

QEFF = load_rules()
RULES = """
description = "for the tests"
retained = '.*_out'
[[kv]]
kind = "attention"
input = '(?P<part>k|v)(?P<layer>[0-9]+){token}'
output = '{input}_out'
roles = { key = "k", value = "v" }
[[keep]]
reason = "vision"
pattern = "pixels"
"""


@pytest.mark.parametrize("token", ["VLLM", "a", "0", "x" * 64, "Retainedstate"])
def test_a_token_is_letters_and_digits(token: str) -> None:
    assert find_token_error(token) is None


@pytest.mark.parametrize(
    ("token", "fault"),
    [
        ("", "is empty"),
        ("V_LLM", "ASCII letters and digits"),
        ("V.1", "ASCII letters and digits"),
        ("VLLM\n", "ASCII letters and digits"),
        ("é", "ASCII letters and digits"),
        ("\u0661", "ASCII letters and digits"),
        ("aRetainedStateb", "RetainedState"),
        ("x" * 65, "longer than 64"),
    ],
)
def test_any_other_token_is_refused_with_the_reason(token: str, fault: str) -> None:
    assert fault in str(find_token_error(token))
    with pytest.raises(RulesError, match=fault) as caught:
        check_token_change(TokenChange(token))
    assert caught.value.hint == "for example VLLM"


def test_to_ask_for_no_token_and_no_strip_is_refused() -> None:
    with pytest.raises(RulesError, match="no token given") as caught:
        check_token_change(TokenChange(None))
    assert "--target" in (caught.value.hint or "")
    check_token_change(TokenChange(None, strip=True))


@pytest.mark.parametrize(
    ("side", "name", "kind", "scope", "buffer", "layer", "token"),
    [
        ("input", "past_key.0", "attention", "", "past_key", 0, ""),
        ("input", "past_value.11_VLLM", "attention", "", "past_value", 11, "VLLM"),
        ("input", "layer_5/past_key.5", "attention", "layer_5/", "past_key", 5, ""),
        ("input", "a/b/k_pe.1_X", "mla", "a/b/", "k_pe", 1, "X"),
        ("output", "compressed_kv.3_RetainedState", "mla", "", "compressed_kv", 3, ""),
        ("output", "conv_state.1_X_RetainedState", "linear", "", "conv_state", 1, "X"),
        (
            "output",
            "recurrent_state.1_InternalRetainedState",
            "linear",
            "",
            "recurrent_state",
            1,
            "",
        ),
        ("input", "past_value_self.2_X", "decoder", "", "past_value_self", 2, "X"),
        ("input", "past_key_cross.0", "cross", "", "past_key_cross", 0, ""),
        ("output", "é/past_key.0_RetainedState", "attention", "é/", "past_key", 0, ""),
    ],
)
def test_a_buffer_is_known_by_its_whole_name(
    side: str, name: str, kind: str, scope: str, buffer: str, layer: int, token: str
) -> None:
    match = QEFF.match(side, name)
    assert match is not None
    assert match.pair_key == (kind, scope, buffer, layer)
    assert match.token == token


@pytest.mark.parametrize(
    "name",
    [
        "",
        "past_key",
        "past_key.",
        "past_key.x",
        "past_key.01",
        "past_key.1234567",
        "past_key.\u0661",
        "past_key.0_",
        "past_key.0_A_B",
        "past_key.0\n",
        " past_key.0",
        "past_key.0/x",
        "past_keys.0",
        "my_past_key.0",
        "past_key.0_RetainedState",
    ],
)
def test_a_name_that_is_nearly_a_buffer_is_none(name: str) -> None:
    assert QEFF.match("input", name) is None


@pytest.mark.parametrize(
    "raw", [b"\xff/past_key.0", b"\xed\xa0\x80/past_key.0", b"\xf4\x90\x80\x80/past_key.0"]
)
def test_bytes_that_are_no_text_do_not_upset_a_match(raw: bytes) -> None:
    name = raw.decode("utf-8", "surrogateescape")
    match = QEFF.match("input", name)
    assert match is None or QEFF.rename(match, "") == name
    assert QEFF.find_reason_to_keep(name) is None
    assert not QEFF.is_retained_name(name)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("vision_embeds", "vision"),
        ("vision_embeds_RetainedState", "vision"),
        ("image_idx_output", "vision"),
        ("deepstack_features.1_RetainedState", "vision"),
        ("layer_0/pixel_values_InternalRetainedState", "vision"),
        ("past_repetition_penalty_buffer_RetainedState", "sampler"),
        ("past_presence_penalty_buffer", "sampler"),
        ("model.q_proj.lora_A.weight_RetainedState", "LoRA"),
        ("vision_embeds_too", None),
        ("logits", None),
    ],
)
def test_what_is_no_kv_is_kept_for_a_reason(name: str, reason: str | None) -> None:
    assert QEFF.find_reason_to_keep(name) == reason


@pytest.mark.parametrize(
    ("name", "retained"),
    [("x_RetainedState", True), ("x\n_InternalRetainedState", True), ("x_retained", False)],
)
def test_a_retained_state_is_known_by_its_suffix(name: str, retained: bool) -> None:
    assert QEFF.is_retained_name(name) is retained


@pytest.mark.parametrize(
    ("side", "name", "token", "new"),
    [
        ("input", "s/past_key.0", "VLLM", "s/past_key.0_VLLM"),
        ("input", "past_key.0_OLD", "", "past_key.0"),
        ("output", "past_key.0_RetainedState", "VLLM", "past_key.0_VLLM_RetainedState"),
        (
            "output",
            "past_key.0_OLD_InternalRetainedState",
            "X",
            "past_key.0_X_InternalRetainedState",
        ),
    ],
)
def test_the_token_goes_in_between_layer_and_suffix(
    side: str, name: str, token: str, new: str
) -> None:
    match = QEFF.match(side, name)
    assert match is not None
    assert QEFF.rename(match, token) == new


def test_normalize_gives_the_suffix_that_consumers_pair() -> None:
    match = QEFF.match("output", "past_key.0_InternalRetainedState")
    assert match is not None
    assert QEFF.rename(match, "V", normalize=True) == "past_key.0_V_RetainedState"


def test_a_token_that_does_not_lead_back_is_refused() -> None:
    rules = parse_rules(RULES.replace("{token}", "(?P<token>(?:_[A-Z]+)?)"), "mine")
    match = rules.match("output", "v1_out")
    assert match is not None
    with pytest.raises(RulesError) as error:
        rules.rename(match, "t")
    assert str(error.value.hint).startswith("choose another token, for example VLLM, or let ")


def test_rules_that_are_not_there_are_an_error_of_the_rules(tmp_path: Path) -> None:
    with pytest.raises(RulesError, match="no such file"):
        load_rules(path=tmp_path / "none.toml")
    with pytest.raises(RulesError) as caught:
        load_rules("nobody")
    assert "no such profile: nobody" in str(caught.value)


def test_a_layer_too_long_to_be_one_is_no_match() -> None:
    rules = parse_rules(RULES, "mine")
    assert rules.match("input", "k" + "1" * 9) is not None
    assert rules.match("input", "k" + "1" * 10) is None
