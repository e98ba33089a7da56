"""The tree of a text file, whose scalars know their positions in the text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

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


class ScalarNode(NamedTuple):
    """A text value and its position.

    Attributes:
        value: The value that a parser reads.
        start: Index of its first character in the text, the opening quote included.
        end: Index after its last character, the closing quote included.
        quote: The quote around it, empty for a plain scalar.
        is_simple: False for a block, and for a scalar with an anchor or a tag; such a scalar
            can be read, but not rewritten.
        is_shared: True below a list or mapping that an alias repeats elsewhere.
    """

    value: str
    start: int
    end: int
    quote: str
    is_simple: bool = True
    is_shared: bool = False


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

    The description says its kind, for messages.
    """

    description: str


Node = ScalarNode | SequenceNode | MappingNode | OpaqueNode


def describe_node(node: Node | None) -> str:
    """Return the kind of a node, for messages."""
    if isinstance(node, OpaqueNode):
        return node.description
    kinds = {ScalarNode: "a string", SequenceNode: "a list", MappingNode: "a mapping"}
    return kinds[type(node)] if node is not None else "nothing"


def list_children(node: Node) -> Iterator[Node]:
    """Yield the items of a list, or the keys and values of a mapping."""
    if isinstance(node, SequenceNode):
        yield from node.items
    elif isinstance(node, MappingNode):
        for key, value in node.entries:
            yield key
            yield value


def find_texts(tree: Node) -> Iterator[ScalarNode]:
    """Yield every text of a tree, keys included: any may be a name."""
    if isinstance(tree, ScalarNode):
        yield tree
    for child in list_children(tree):
        yield from find_texts(child)


def flatten_tree(node: Node | None, changes: Mapping[ScalarNode, str]) -> Iterator[str | None]:
    """Yield the content of a tree in any notation, with some values changed.

    Two trees with the same content yield the same.

    Args:
        node: The root of the tree, ``None`` for an empty document.
        changes: The new values of some scalars.

    Yields:
        The value of each scalar; ``None`` and then a bracket with a count for each list and
        mapping; ``None`` and then the description for each opaque value.
    """
    pending = [node]
    while pending:
        node = pending.pop()
        if isinstance(node, ScalarNode):
            yield changes.get(node, node.value)
            continue
        yield None
        if isinstance(node, SequenceNode):
            yield f"[{len(node.items)}"
            pending += reversed(node.items)
        elif isinstance(node, MappingNode):
            yield f"{{{len(node.entries)}"
            pending += [part for entry in reversed(node.entries) for part in reversed(entry)]
        else:
            yield node.description if node is not None else ""


class TreeBuilder:
    """Builds a tree from its pieces, which come in the order of the text.

    The roots are the complete trees so far, one for each document.
    """

    def __init__(self) -> None:
        self.roots: list[Node] = []
        self._open: list[tuple[bool, list[Node]]] = []

    def add_node(self, node: Node) -> None:
        """Add a node to the innermost open list or mapping."""
        (self._open[-1][1] if self._open else self.roots).append(node)

    def open_collection(self, *, mapping: bool) -> None:
        """Begin a list or a mapping."""
        self._open.append((mapping, []))

    def close_collection(self) -> None:
        """End the innermost open list or mapping.

        Raises:
            UnreadableTextError: A mapping has a key twice.
        """
        is_mapping, nodes = self._open.pop()
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
    _check_depth(text)
    try:
        json.loads(text.removeprefix("\ufeff"), parse_int=len, parse_float=len)
    except json.JSONDecodeError as error:
        raise UnreadableTextError(f"is not JSON: {error}") from None
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


def _check_depth(text: str) -> None:
    """Raise for text on which the parser would exceed the interpreter's stack."""
    depth = 0
    for lexeme in _LEXEME.finditer(text):
        if lexeme[0] in ("[", "{"):
            depth += 1
            if depth > MAX_DEPTH:
                raise build_depth_error()
        elif lexeme[0] in ("]", "}"):
            depth -= 1


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
    from ruamel.yaml import events  # slow to import, and JSON sidecars do not need it

    _check_parse_cost(text)
    builder = TreeBuilder()
    found = list(_limit_depth(_parse_events(text)))
    aliases = {event.anchor for event in found if isinstance(event, events.AliasEvent)}
    depth = shared_from = 0  # levels of open lists and mappings; the first one with an alias
    for event in found:
        if isinstance(event, events.CollectionStartEvent):
            depth += 1
            if not shared_from and event.anchor in aliases:
                shared_from = depth
        elif isinstance(event, events.CollectionEndEvent):
            depth -= 1
            shared_from = shared_from if depth >= shared_from else 0
        _add_event(builder, event, is_shared=shared_from > 0)
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


def _limit_depth(found: Iterable[Any]) -> Iterator[Any]:
    """Pass events on up to the first that is too deep: a short text can have very many."""
    from ruamel.yaml import events

    depth = 0
    for event in found:
        depth += isinstance(event, events.CollectionStartEvent)
        depth -= isinstance(event, events.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise build_depth_error()
        yield event


def _add_event(builder: TreeBuilder, event: Any, *, is_shared: bool) -> None:
    from ruamel.yaml import events

    if isinstance(event, (events.SequenceStartEvent, events.MappingStartEvent)):
        builder.open_collection(mapping=isinstance(event, events.MappingStartEvent))
    elif isinstance(event, (events.SequenceEndEvent, events.MappingEndEvent)):
        builder.close_collection()
    elif isinstance(event, events.AliasEvent):
        builder.add_node(OpaqueNode("an alias"))
    elif isinstance(event, events.ScalarEvent):
        builder.add_node(_build_yaml_scalar(event, is_shared=is_shared))


def _build_yaml_scalar(event: Any, *, is_shared: bool) -> ScalarNode:
    quote = event.style or ""
    is_simple = event.anchor is None and event.tag is None and quote in ("", "'", '"')
    start, end = event.start_mark.index, event.end_mark.index
    return ScalarNode(event.value, start, end, quote if is_simple else "", is_simple, is_shared)


def _format_problem(problem: object) -> str:
    return shorten_text(" ".join(str(problem).split()), MAX_REASON_CHARS)
