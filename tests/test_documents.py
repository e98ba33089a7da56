"""Strict JSON, TOML, and values read by their type."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from onnxkvrename.documents import (
    MAX_DEPTH,
    ObjectReader,
    UnreadableTextError,
    parse_json,
    parse_toml,
)

DOCUMENT = ObjectReader(
    {"text": "a", "number": 3, "truth": True, "null": None, "items": ["a", 1], "object": {"a": []}}
)


def nested(levels: int) -> str:
    return "[" * levels + "]" * levels


def test_json_is_read_in_the_order_of_its_keys() -> None:
    value = parse_json('{"b": [1, 2.5, null], "a": {"": true}}')
    assert value == {"b": [1, 2.5, None], "a": {"": True}}
    assert list(value) == ["b", "a"]
    assert parse_json(nested(MAX_DEPTH)) is not None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not JSON: Expecting value"),
        ("{", "is not JSON: "),
        ("[]]", "is not JSON: Extra data"),
        ("\ufeff[]", "is not JSON: Unexpected UTF-8 BOM"),
        ('{"a": 1, "\\u0061": 1}', "has the key 'a' twice"),
        ("NaN", "has NaN, which is not JSON"),
        ("[-Infinity]", "has -Infinity, which is not JSON"),
        ("1e999", "has the number 1e999, which is too large"),
        ("9" * 5000, "has a number of too many digits"),
        (nested(MAX_DEPTH + 1), "is nested more than 100 levels deep"),
        (nested(100_000), "is nested more than 100 levels deep"),
    ],
)
def test_json_that_two_readers_may_understand_differently_is_refused(
    text: str, message: str
) -> None:
    with pytest.raises(UnreadableTextError) as refused:
        parse_json(text)
    assert str(refused.value).startswith(message)
    assert "\n" not in str(refused.value)


def test_toml_is_read_in_the_order_of_its_keys() -> None:
    table = parse_toml("[b]\n[a]\n'' = true")
    assert table == {"b": {}, "a": {"": True}}
    assert list(table) == ["b", "a"]


@pytest.mark.parametrize(
    "text", ["a", "a = 1\na = 1", f"a = {nested(100_000)}", "a = " + "9" * 5000]
)
def test_text_that_is_not_toml_is_refused(text: str) -> None:
    with pytest.raises(UnreadableTextError, match=r"^not TOML: "):
        parse_toml(text)


def test_a_number_that_no_other_reader_could_hold_is_refused() -> None:
    """Python reads it, but could not print it."""
    reader = ObjectReader(parse_toml(f"hexadecimal = 0x{'f' * 5000}\nlast = {2**63 - 1}"))
    with pytest.raises(UnreadableTextError, match=r"^hexadecimal has a number that does not fit"):
        reader.read_integer("hexadecimal", 0)
    assert reader.read_integer("last", 0) == 2**63 - 1


def test_values_are_read_by_their_type() -> None:
    assert DOCUMENT.read_string("text") == "a"
    assert DOCUMENT.read_integer("number", 3) == 3
    assert DOCUMENT.read_object("object").read_strings("a") == []
    assert DOCUMENT.is_null("null")
    assert DOCUMENT.is_null("absent")
    assert not DOCUMENT.is_null("truth")


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (lambda document: document.read_string("absent"), "absent is missing"),
        (lambda document: document.read_string("number"), "number must be text"),
        (lambda document: document.read_string("null"), "null must be text"),
        (lambda document: document.read_integer("truth", 0), "truth must be an integer"),
        (lambda document: document.read_integer("number", 4), "number is less than 4"),
        (lambda document: document.read_strings("text"), "text must be a list of text"),
        (lambda document: document.read_strings("items"), "items must be a list of text"),
        (lambda document: document.read_objects("items"), "items must be a list of objects"),
        (lambda document: document.read_object("items"), "items must be an object"),
        (lambda document: document.read_object("object").read_string("b"), "object.b is missing"),
        (lambda document: document.read_string("a" * 100), f"{'a' * 80}… is missing"),
    ],
)
def test_another_type_is_refused_with_the_path_of_the_key(
    read: Callable[[ObjectReader], object], message: str
) -> None:
    with pytest.raises(UnreadableTextError) as refused:
        read(DOCUMENT)
    assert str(refused.value) == message


def test_an_object_in_a_list_is_named_by_its_index() -> None:
    document = ObjectReader({"buffers": [{"layer": 0}, {"layer": "1"}]})
    first, second = document.read_objects("buffers")
    assert first.read_integer("layer", 0) == 0
    with pytest.raises(UnreadableTextError, match=r"^buffers\[1\]\.layer must be an integer$"):
        second.read_integer("layer", 0)


def test_a_default_stands_for_a_missing_key_only() -> None:
    assert DOCUMENT.read_string("absent", default="") == ""
    assert DOCUMENT.read_strings("absent", default=[]) == []
    assert DOCUMENT.read_object("absent", default={}).values == {}
    assert DOCUMENT.read_objects("absent", default=[]) == []
    with pytest.raises(UnreadableTextError, match=r"^null must be text$"):
        DOCUMENT.read_string("null", default="")


def test_a_caller_chooses_how_a_message_names_key_and_type() -> None:
    document = ObjectReader({"a": {"b": [{"c": 1}]}}, separator=": ")
    with pytest.raises(UnreadableTextError, match=r"^a\.b\[0\]\.c: must be text$"):
        document.read_object("a").read_objects("b")[0].read_string("c")
    with pytest.raises(UnreadableTextError, match=r"^a: must be tables$"):
        document.read_objects("a", "tables")
