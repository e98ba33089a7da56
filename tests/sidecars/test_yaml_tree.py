"""YAML, and where its scalars stand."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ruamel.yaml import YAML

from onnxkvrename.documents import UnreadableTextError
from onnxkvrename.sidecars.tree import (
    MAX_YAML_CHARS,
    MappingNode,
    Node,
    OpaqueNode,
    ScalarNode,
    SequenceNode,
    parse_yaml_tree,
)


def scalars(node: Node | None) -> list[ScalarNode]:
    """All scalars of a tree, keys before their values."""
    if isinstance(node, ScalarNode):
        return [node]
    parts: tuple[Node, ...] = ()
    if isinstance(node, SequenceNode):
        parts = node.items
    elif isinstance(node, MappingNode):
        parts = tuple(part for pair in node.entries for part in pair)
    return [scalar for part in parts for scalar in scalars(part)]


def test_each_scalar_stands_where_it_is_said_to() -> None:
    text = "\ufeff# é\r\n - IOName: past_key.0  # x\r\n   P: 'f''16'\r\n - {IOName: \"a\\x62\"}\r\n"
    found = [(s.value, text[s.start : s.end], s.quote) for s in scalars(parse_yaml_tree(text))]
    assert found == [
        ("IOName", "IOName", ""),
        ("past_key.0", "past_key.0", ""),
        ("P", "P", ""),
        ("f'16", "'f''16'", "'"),
        ("IOName", "IOName", ""),
        ("ab", '"a\\x62"', '"'),
    ]


@pytest.mark.parametrize("text", ["&a x", "!!str x", "|\n  x\n", ">-\n  x\n"])
def test_what_is_more_than_a_word_can_only_be_read(text: str) -> None:
    found = parse_yaml_tree(text)
    assert isinstance(found, ScalarNode)
    assert (found.value.strip(), found.is_simple) == ("x", False)


def test_an_alias_is_not_put_in_place() -> None:
    shared = ScalarNode("x", 5, 6, "", anchors=frozenset("a"))
    assert parse_yaml_tree("[&a [x], *a]") == SequenceNode(
        (SequenceNode((shared,)), OpaqueNode("an alias", "a"))
    )


def test_a_scalar_has_the_anchors_around_it() -> None:
    found = scalars(parse_yaml_tree("[&a [x, [y]], &b [z], {k: &c {l: m}}, n, *a, *c]"))
    assert ["".join(scalar.anchors) for scalar in found] == ["a", "a", "b", "", "c", "c", ""]


@pytest.mark.parametrize("text", ["", "# nothing\n", "\n\n", "\ufeff"])
def test_a_file_may_say_nothing(text: str) -> None:
    assert parse_yaml_tree(text) is None


@pytest.mark.parametrize("text", ["---\na: b\n", "a: b\n...\n", "%YAML 1.1\n---\na: b\n"])
def test_markers_of_a_document_are_no_part_of_it(text: str) -> None:
    assert [scalar.value for scalar in scalars(parse_yaml_tree(text))] == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: b: c", "mapping values"),
        ("a: 'b\n", "unexpected end"),
        ("a: \x00", "unacceptable character"),
        ("a: \udcff", "unacceptable character"),
        ('a: "\\UFFFFFFFF"', "is not YAML: "),
        ("a: 1\na: 2\n", "has the key a twice"),
        ("- a\n---\n- b\n", "contains more than one document"),
        ("[" * 101 + "]" * 101, "is nested more than 100 levels deep"),
        ("[" * 500, "is nested more than 100 levels deep"),
        ("{a: " * 9_000, "is nested more than 100 levels deep"),
        ("- " * 100_000, "is nested more than 100 levels deep"),
        ("? " * 100_000, "is nested more than 100 levels deep"),
        ("!" * 100_000, "has more than 4,096 characters in a tag"),
        ("a" * (MAX_YAML_CHARS + 1), "has more than 262,144 characters"),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(UnreadableTextError) as caught:
        parse_yaml_tree(text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_text_that_is_nested_too_deeply_is_read_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[object] = []
    parse = YAML.parse

    def parse_and_count(yaml: YAML, text: str) -> Iterator[object]:
        for event in parse(yaml, text):
            taken.append(event)
            yield event

    monkeypatch.setattr(YAML, "parse", parse_and_count)
    with pytest.raises(UnreadableTextError, match="levels deep"):
        parse_yaml_tree("- " * 1000)
    assert 100 < len(taken) < 110


@pytest.mark.parametrize(
    "text", ["[" * 100 + "]" * 100, "'" + "[" * 1000 + "'", "[[]]\n# " + "[" * 1000]
)
def test_a_hundred_levels_are_read_and_brackets_in_strings_are_none(text: str) -> None:
    assert parse_yaml_tree(text) is not None
