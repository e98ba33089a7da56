"""The tree of a text file, whose scalars know their positions in the text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from onnxkvrename.documents import UnreadableTextError
from onnxkvrename.limits import shorten_text


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
    """A list.

    Attributes:
        items: Its items, in the order of the file.
    """

    items: tuple[Node, ...]


class MappingNode(NamedTuple):
    """A mapping.

    Attributes:
        entries: Keys and values, in the order of the file; no key is there twice.
    """

    entries: tuple[tuple[Node, Node], ...]

    def get(self, key: str) -> Node | None:
        """Return the value of a key, ``None`` if it is absent."""
        for name, value in self.entries:
            if isinstance(name, ScalarNode) and name.value == key:
                return value
        return None


class OpaqueNode(NamedTuple):
    """A value that holds no text: an alias in YAML, a number or the like in JSON.

    Attributes:
        description: Its kind, for messages.
    """

    description: str


Node = ScalarNode | SequenceNode | MappingNode | OpaqueNode


def describe_node(node: Node | None) -> str:
    """Return the kind of a node, for messages."""
    if isinstance(node, OpaqueNode):
        return node.description
    kinds = {ScalarNode: "a string", SequenceNode: "a list", MappingNode: "a mapping"}
    return kinds[type(node)] if node is not None else "nothing"


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

    Attributes:
        roots: The complete trees so far, one for each document.
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
