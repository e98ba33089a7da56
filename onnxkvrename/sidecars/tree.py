"""The tree of a text file, whose scalars know their positions, and new values in their places.

Only the characters that change are replaced. Quotes, comments, indentation, line endings
and the notation of all other characters stay, so the change back restores the text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from onnxkvrename.documents import UnreadableTextError, build_depth_error
from onnxkvrename.limits import (
    MAX_DEPTH,
    MAX_ENTRIES,
    MAX_MATCHED_CHARS,
    MAX_REASON_CHARS,
    MAX_YAML_CHARS,
    describe_excess,
    shorten_text,
)

# A string without a closing quote extends to the end of the text, so text that is not JSON
# does not take longer.
_LEXEME = re.compile(r'(?s)"[^"\\]*(?:\\.[^"\\]*)*"?|[\[\]{}]|[^\s\[\]{}",:\ufeff]+')
_CHAR_PATTERNS = {
    "": re.compile(r"(?s)."),
    "'": re.compile(r"(?s)''|."),
    '"': re.compile(
        r"(?s)\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
        r"|\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\U[0-9a-fA-F]{8}|\\.|."
    ),
}
"""The notations of one character, by the quote around it."""
_SHORT_ESCAPES = {"\\b": "\b", "\\f": "\f", "\\n": "\n", "\\r": "\r", "\\t": "\t"}
_CODE_POINT_ESCAPE = re.compile(r"\\[xuU]([0-9a-fA-F]{2,8})")


class ScalarNode(NamedTuple):
    """A text value and its position.

    Attributes:
        value: The value that a parser reads.
        start: Index of its first character in the text, the opening quote included.
        end: Index after its last character, the closing quote included.
        quote: The quote around it, empty for a plain scalar.
        is_simple: False for a block, and for a scalar with an anchor or a tag; such a scalar
            can be read, but not rewritten.
        anchors: The anchors of the lists and mappings around it.
    """

    value: str
    start: int
    end: int
    quote: str
    is_simple: bool = True
    anchors: frozenset[str] = frozenset()


class SequenceNode(NamedTuple):
    """A list, with its items in the order of the file."""

    items: tuple[Node, ...]


class MappingNode(NamedTuple):
    """A mapping: keys and values in the order of the file; no key is there twice."""

    entries: tuple[tuple[Node, Node], ...]

    def get(self, key: str) -> Node | None:
        """Return the value of a key, ``None`` if it is absent."""
        for name, value in self.entries:
            if isinstance(name, ScalarNode) and name.value == key:
                return value
        return None


class OpaqueNode(NamedTuple):
    """A value that holds no text: an alias in YAML, a number or the like in JSON.

    The description says its kind, for messages; an alias has the anchor that it repeats.
    """

    description: str
    anchor: str = ""


Node = ScalarNode | SequenceNode | MappingNode | OpaqueNode
_Kind = TypeVar("_Kind", ScalarNode, SequenceNode, MappingNode)
_KINDS = {ScalarNode: "a string", SequenceNode: "a list", MappingNode: "a mapping"}


def expect(kind: type[_Kind], node: Node | None, role: str) -> _Kind:
    """Return a node, or raise `UnreadableTextError` if it is of another kind than its role says."""
    if isinstance(node, kind):
        return node
    problem = f"has {describe_node(node)} as {role}, which must be {_KINDS[kind]}"
    raise UnreadableTextError(problem)


def describe_node(node: Node | None) -> str:
    """Return the kind of a node, for messages."""
    if isinstance(node, OpaqueNode):
        return node.description
    return "nothing" if node is None else _KINDS[type(node)]


def list_children(node: Node) -> Iterator[Node]:
    """Yield the items of a list, or the keys and values of a mapping."""
    if isinstance(node, SequenceNode):
        yield from node.items
    elif isinstance(node, MappingNode):
        for key, value in node.entries:
            yield key
            yield value


def read_content(node: Node | None, changes: Mapping[ScalarNode, str]) -> object:
    """Return what a tree says in any notation, with the new values of some scalars."""
    if isinstance(node, ScalarNode):
        return changes.get(node, node.value)
    if isinstance(node, SequenceNode):
        return [read_content(item, changes) for item in node.items]
    if isinstance(node, MappingNode):
        return tuple(
            (read_content(key, changes), read_content(value, changes))
            for key, value in node.entries
        )
    return node


class TreeBuilder:
    """Builds a tree from its pieces, which come in the order of the text.

    The roots are the complete trees so far, one for each document.
    """

    def __init__(self) -> None:
        self.roots: list[Node] = []
        self._open: list[tuple[bool, list[Node], str]] = []

    @property
    def anchors(self) -> frozenset[str]:
        """The anchors of the open lists and mappings."""
        return frozenset(anchor for _, _, anchor in self._open if anchor)

    def add_node(self, node: Node) -> None:
        """Add a node to the innermost open list or mapping."""
        (self._open[-1][1] if self._open else self.roots).append(node)

    def open_collection(self, *, mapping: bool, anchor: str | None = None) -> None:
        """Begin a list or a mapping, or raise `UnreadableTextError` if it is too deep."""
        if len(self._open) == MAX_DEPTH:
            raise build_depth_error()
        self._open.append((mapping, [], anchor or ""))

    def close_collection(self) -> None:
        """End the innermost open list or mapping.

        Raises:
            UnreadableTextError: A mapping has a key twice.
        """
        is_mapping, nodes, _ = self._open.pop()
        if not is_mapping:
            self.add_node(SequenceNode(tuple(nodes)))
            return
        keys: set[str] = set()
        for key in nodes[::2]:
            if isinstance(key, ScalarNode):
                if key.value in keys:
                    raise UnreadableTextError(f"has the key {shorten_text(key.value)} twice")
                keys.add(key.value)
        self.add_node(MappingNode(tuple(zip(nodes[::2], nodes[1::2], strict=True))))


def parse_json_tree(text: str) -> Node:
    """Return the tree of a JSON text, which may begin with a byte order mark.

    The syntax is that of Python's :mod:`json`. Numbers are never converted, however long they
    are, since nothing here changes them.

    Raises:
        UnreadableTextError: The text has too many values, is not JSON, is nested too
            deeply, or has a key twice.
    """
    if sum(map(text.count, ",:[{")) > MAX_ENTRIES:
        raise UnreadableTextError(describe_excess(MAX_ENTRIES, "values"))
    try:
        json.loads(text.removeprefix("\ufeff"), parse_int=len, parse_float=len)
    except json.JSONDecodeError as error:
        raise UnreadableTextError(f"is not JSON: {error}") from None
    except RecursionError:
        raise build_depth_error() from None
    builder = TreeBuilder()
    for lexeme in _LEXEME.finditer(text):
        first_char = lexeme[0][0]
        if first_char in "[{":
            builder.open_collection(mapping=first_char == "{")
        elif first_char in "]}":
            builder.close_collection()
        elif first_char == '"':
            builder.add_node(_build_json_scalar(lexeme[0], lexeme.start()))
        else:
            builder.add_node(OpaqueNode("no text"))
    return builder.roots[0]


def _build_json_scalar(raw: str, start: int) -> ScalarNode:
    value = json.loads(raw) if "\\" in raw else raw[1:-1]
    return ScalarNode(value, start, start + len(raw), '"')


def parse_yaml_tree(text: str) -> Node | None:
    """Return the tree of the only document in a YAML text, ``None`` if there is none.

    Only ruamel.yaml's scanner and parser are used: tags are ignored, and aliases are not expanded,
    so a small text cannot become a large tree.

    Raises:
        UnreadableTextError: The text is too long, is not YAML, holds several documents, is
            nested too deeply, or has a key twice. The message has one line.
    """
    _check_parse_cost(text)
    builder = TreeBuilder()
    for event in _parse_events(text):
        _add_event(builder, event)
    if len(builder.roots) > 1:
        raise UnreadableTextError("contains more than one document")
    return builder.roots[0] if builder.roots else None


def _check_parse_cost(text: str) -> None:
    """Raise for text that would take too long: the scanner is quadratic in tags."""
    if len(text) > MAX_YAML_CHARS:
        raise UnreadableTextError(describe_excess(MAX_YAML_CHARS, "characters"))
    if any(len(word) > MAX_MATCHED_CHARS and "!" in word for word in text.split()):
        raise UnreadableTextError(describe_excess(MAX_MATCHED_CHARS, "characters in a tag"))


def _parse_events(text: str) -> Iterator[Any]:
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError

    try:
        yield from YAML(typ="safe", pure=True).parse(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark
        where = f", line {mark.line + 1}" if mark is not None else ""
        raise UnreadableTextError(f"is not YAML: {_format_problem(error.problem)}{where}") from None
    except Exception as error:  # its reader and its conversions have no common base class
        raise UnreadableTextError(f"is not YAML: {_format_problem(error)}") from None


def _add_event(builder: TreeBuilder, event: Any) -> None:
    from ruamel.yaml import events

    if isinstance(event, events.CollectionStartEvent):
        is_mapping = isinstance(event, events.MappingStartEvent)
        builder.open_collection(mapping=is_mapping, anchor=event.anchor)
    elif isinstance(event, events.CollectionEndEvent):
        builder.close_collection()
    elif isinstance(event, events.AliasEvent):
        builder.add_node(OpaqueNode("an alias", event.anchor))
    elif isinstance(event, events.ScalarEvent):
        quote = event.style or ""
        is_simple = event.anchor is None and event.tag is None and quote in ("", "'", '"')
        start, end = event.start_mark.index, event.end_mark.index
        quote = quote if is_simple else ""
        node = ScalarNode(event.value, start, end, quote, is_simple, builder.anchors)
        builder.add_node(node)


def _format_problem(problem: object) -> str:
    return shorten_text(" ".join(str(problem).split()), MAX_REASON_CHARS)


def splice_values(text: str, changes: Mapping[ScalarNode, str]) -> str:
    """Return the text with changed values, each in its old notation.

    Raises:
        UnreadableTextError: A value that changes is a block, has an anchor or a tag, or is
            written over several lines or with unusual escapes.
    """
    parts, copied_to = [], 0
    for scalar in sorted(changes, key=lambda scalar: scalar.start):
        new = changes[scalar]
        inner = _replace_changed_chars(_extract_inner_text(text, scalar), scalar, new)
        parts += [text[copied_to : scalar.start], scalar.quote, inner, scalar.quote]
        copied_to = scalar.end
    return "".join([*parts, text[copied_to:]])


def _extract_inner_text(text: str, scalar: ScalarNode) -> str:
    """Return the text between the quotes."""
    if not scalar.is_simple:
        raise _build_rewrite_error(scalar, "as a block, or with an anchor or a tag")
    return text[scalar.start + len(scalar.quote) : scalar.end - len(scalar.quote)]


def _replace_changed_chars(inner: str, scalar: ScalarNode, new: str) -> str:
    """Return the notation of `new`; characters that old and new share keep theirs."""
    old, quote = scalar.value, scalar.quote
    units = _CHAR_PATTERNS[quote].findall(inner)
    if "".join(map(_decode_char, units)) != old:
        raise _build_rewrite_error(scalar, "over several lines, or with unusual escapes")
    head = _count_shared_prefix(old, new)
    tail = _count_shared_prefix(old[head:][::-1], new[head:][::-1])
    middle = _escape_text(new[head : len(new) - tail], quote)
    return "".join([*units[:head], middle, *units[len(old) - tail :]])


def _build_rewrite_error(scalar: ScalarNode, notation: str) -> UnreadableTextError:
    return UnreadableTextError(
        f"has {shorten_text(scalar.value)} written {notation}",
        "write this name plainly, on one line",
    )


def _decode_char(unit: str) -> str:
    """Return the character of a notation; a wrong one for an escape that only YAML has."""
    codes = [int(digits, 16) for digits in _CODE_POINT_ESCAPE.findall(unit)]
    if len(codes) == 2:
        return chr(0x10000 + ((codes[0] - 0xD800) << 10) + codes[1] - 0xDC00)
    return chr(codes[0]) if codes else _SHORT_ESCAPES.get(unit, unit[-1])


def _count_shared_prefix(first: str, second: str) -> int:
    """Return how many characters both texts have in common at the beginning."""
    count = 0
    for a, b in zip(first, second, strict=False):
        if a != b:
            break
        count += 1
    return count


def _escape_text(text: str, quote: str) -> str:
    if quote == "'":
        return text.replace("'", "''")
    return json.dumps(text, ensure_ascii=False)[1:-1] if quote else text
