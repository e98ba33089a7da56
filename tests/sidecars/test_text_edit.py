"""New values in the place of old ones, and not a letter more."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnxkvrename.sidecars.text_edit import (
    Entries,
    Growth,
    Items,
    Other,
    Scalar,
    Unreadable,
    leaves,
    splice,
)

TOKEN = {"past_key.0": "past_key.0_VLLM"}


def alone(raw: str, value: str = "past_key.0", quote: str = "") -> tuple[str, Scalar]:
    """A text in which one scalar stands between two words."""
    return f"before {raw} after", Scalar(value, 7, 7 + len(raw), quote)


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
    renamed = splice(text, [scalar], TOKEN)
    assert renamed == f"before {expected} after"
    back = Scalar("past_key.0_VLLM", 7, 7 + len(expected), quote)
    assert splice(renamed, [back], {"past_key.0_VLLM": "past_key.0"}) == text


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
    assert splice(text, [scalar], {value: new}) == f"before {expected} after"


def test_a_quote_within_single_quotes_is_doubled() -> None:
    text, scalar = alone("'it''s'", "it's", "'")
    assert splice(text, [scalar], {"it's": "it's 'so'"}) == "before 'it''s ''so''' after"


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
    with pytest.raises(Unreadable, match=r"has past_key\.0 written ") as caught:
        splice(text, [scalar._replace(simple=simple)], TOKEN)
    assert caught.value.hint == "write this name plainly, on one line"


def test_what_does_not_change_may_be_written_in_any_way() -> None:
    text, scalar = alone("|\n  other", "other")
    assert splice(text, [scalar._replace(simple=False)], TOKEN) == text


@given(st.lists(st.sampled_from("abc_."), min_size=1), st.text(), st.text())
def test_any_change_can_be_taken_back(old: list[str], new: str, more: str) -> None:
    name, longer = "".join(old), new + "".join(old) + more
    text, scalar = alone(f'"{name}"', name, '"')
    there = splice(text, [scalar], {name: longer})
    raw = there[7:-6]
    assert json.loads(raw) == longer
    back = Scalar(longer, 7, 7 + len(raw), '"')
    assert splice(there, [back], {longer: name}) == text


def test_a_tree_grows_in_the_order_of_the_text() -> None:
    growth = Growth()
    growth.open(mapping=True)
    growth.add(Scalar("a", 0, 1, ""))
    growth.open(mapping=False)
    growth.add(Other("an alias"))
    growth.close()
    growth.close()
    (root,) = growth.roots
    assert root == Entries(((Scalar("a", 0, 1, ""), Items((Other("an alias"),))),))
    assert isinstance(root, Entries)
    assert root.get("a") == Items((Other("an alias"),))
    assert root.get("b") is None


def test_trees_say_the_same_wherever_their_scalars_stand() -> None:
    one = Items((Scalar("a", 0, 1, ""), Items((Scalar("b", 2, 3, ""),))))
    moved = Items((Scalar("a", 5, 8, "'"), Items((Scalar("b", 9, 10, ""),))))
    flat = Items((Scalar("a", 0, 1, ""), Items(()), Scalar("b", 2, 3, "")))
    assert list(leaves(one, {})) == list(leaves(moved, {}))
    assert list(leaves(one, {})) != list(leaves(flat, {}))
    assert list(leaves(one, {Scalar("b", 2, 3, ""): "c"})) != list(leaves(one, {}))
