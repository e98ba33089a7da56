"""New values in the place of old ones, and not a letter more."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnxkvrename.documents import UnreadableTextError
from onnxkvrename.sidecars.tree import ScalarNode, splice_values

TOKEN = {"past_key.0": "past_key.0_VLLM"}


def splice(text: str, scalar: ScalarNode, changes: dict[str, str]) -> str:
    """The text with the value of one scalar changed, if it is one of those that change."""
    return splice_values(text, {scalar: changes[scalar.value]} if scalar.value in changes else {})


def alone(raw: str, value: str = "past_key.0", quote: str = "") -> tuple[str, ScalarNode]:
    """A text in which one scalar stands between two words."""
    return f"before {raw} after", ScalarNode(value, 7, 7 + len(raw), quote)


@pytest.mark.parametrize(
    ("raw", "quote", "expected"),
    [
        ("past_key.0", "", "past_key.0_VLLM"),
        ("'past_key.0'", "'", "'past_key.0_VLLM'"),
        ('"past_key.0"', '"', '"past_key.0_VLLM"'),
        (r'"past\x5fkey\u002e0"', '"', r'"past\x5fkey\u002e0_VLLM"'),
        (r'"\U00000070ast_key.0"', '"', r'"\U00000070ast_key.0_VLLM"'),
    ],
)
def test_only_the_token_comes_in_and_goes(raw: str, quote: str, expected: str) -> None:
    text, scalar = alone(raw, quote=quote)
    renamed = splice(text, scalar, TOKEN)
    assert renamed == f"before {expected} after"
    back = ScalarNode("past_key.0_VLLM", 7, 7 + len(expected), quote)
    assert splice(renamed, back, {"past_key.0_VLLM": "past_key.0"}) == text


@pytest.mark.parametrize(
    ("raw", "value", "new", "expected"),
    [
        (r'"layer_5\/k.0"', "layer_5/k.0", "layer_5/k.0_A", r'"layer_5\/k.0_A"'),
        (r'"\ud83d\ude00 \\ \" k"', '😀 \\ " k', '😀 \\ " k_A', r'"\ud83d\ude00 \\ \" k_A"'),
        (r'"k.0_R\x53"', "k.0_RS", "k.0_A_RS", r'"k.0_A_R\x53"'),
        ('"a"', "a", 'a"\\\n', r'"a\"\\\n"'),
    ],
)
def test_escapes_stay_as_they_are_and_new_letters_get_theirs(
    raw: str, value: str, new: str, expected: str
) -> None:
    text, scalar = alone(raw, value, '"')
    assert splice(text, scalar, {value: new}) == f"before {expected} after"


def test_a_quote_within_single_quotes_is_doubled() -> None:
    text, scalar = alone("'it''s'", "it's", "'")
    assert splice(text, scalar, {"it's": "it's 'so'"}) == "before 'it''s ''so''' after"


@pytest.mark.parametrize(
    ("raw", "quote", "simple"),
    [
        ("past_key\n .0", "", True),
        ("'past_key.0", "'", True),
        (r'"past_key.0\N"', '"', True),
        ("|\n  past_key.0", "", False),
    ],
)
def test_what_is_not_written_on_one_line_is_refused(raw: str, quote: str, simple: bool) -> None:
    text, scalar = alone(raw, quote=quote)
    with pytest.raises(UnreadableTextError, match=r"has past_key\.0 written ") as caught:
        splice(text, scalar._replace(is_simple=simple), TOKEN)
    assert "on one line" in caught.value.hint


def test_what_does_not_change_may_be_written_in_any_way() -> None:
    text, scalar = alone("|\n  other", "other")
    assert splice(text, scalar._replace(is_simple=False), TOKEN) == text


@given(st.lists(st.sampled_from("abc_."), min_size=1), st.text(), st.text())
def test_any_change_can_be_taken_back(old: list[str], new: str, more: str) -> None:
    name, longer = "".join(old), new + "".join(old) + more
    text, scalar = alone(f'"{name}"', name, '"')
    there = splice(text, scalar, {name: longer})
    raw = there[7:-6]
    assert json.loads(raw) == longer
    back = ScalarNode(longer, 7, 7 + len(raw), '"')
    assert splice(there, back, {longer: name}) == text
