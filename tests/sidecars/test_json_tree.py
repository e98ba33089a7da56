"""JSON, and where its strings stand."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnxkvrename.documents import UnreadableTextError
from onnxkvrename.sidecars.tree import (
    MappingNode,
    OpaqueNode,
    ScalarNode,
    SequenceNode,
    parse_json_tree,
)

NO_TEXT = OpaqueNode("no text")


def test_each_string_stands_where_it_is_said_to() -> None:
    text = '\ufeff{"a" : ["b\\u0063", 1e5, null],\r\n\t"d]":{}}\n'
    tree = parse_json_tree(text)
    a, bc, d = (
        ScalarNode("a", 2, 5, '"'),
        ScalarNode("bc", 9, 18, '"'),
        ScalarNode("d]", 34, 38, '"'),
    )
    assert tree == MappingNode(((a, SequenceNode((bc, NO_TEXT, NO_TEXT))), (d, MappingNode(()))))
    assert [text[s.start : s.end] for s in (a, bc, d)] == ['"a"', '"b\\u0063"', '"d]"']


@pytest.mark.parametrize("text", ["NaN", "-Infinity", "9" * 5000, "-1." + "9" * 5000, "true"])
def test_numbers_are_taken_as_they_are(text: str) -> None:
    assert parse_json_tree(f"[{text}]") == SequenceNode((NO_TEXT,))


@given(st.text())
def test_any_string_is_found_and_read(value: str) -> None:
    for ascii_only in (True, False):
        raw = json.dumps(value, ensure_ascii=ascii_only)
        assert parse_json_tree(f"[ {raw}]") == SequenceNode(
            (ScalarNode(value, 2, 2 + len(raw), '"'),)
        )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Expecting value"),
        ("{", "Expecting property"),
        ("[]]", "Extra data"),
        ("\ufeff\ufeff[]", "is not JSON: "),
        ("['a']", "Expecting value"),
        ('["a\nb"]', "Invalid control"),
        ('"' + '\\"' * 1_000_000, "Unterminated"),
        ('{"a": 1, "a": 2}', "key a twice"),
        ('{"a": 1, "\\u0061": 2}', "key a twice"),
        ("[" * 101 + "]" * 101, "100 levels"),
        ("[" * 60_000, "100 levels"),
        ('{"a":' * 30_000, "100 levels"),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(UnreadableTextError) as caught:
        parse_json_tree(text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_hundred_levels_are_read_and_brackets_in_strings_are_none() -> None:
    assert parse_json_tree("[" * 100 + "]" * 100) is not None
    assert parse_json_tree(f'["{"[" * 1000}"]') is not None
