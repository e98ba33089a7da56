"""A text file as a tree that knows where its scalars stand, and new values spliced into it.

Only the letters that change are replaced. Quotes, comments, indentation, line
endings and the way other letters are written stay as they are, and the change
back gives the same text again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

MAX_DEPTH = 100
"""How deep lists and mappings may lie within each other."""

_MAX_SHOWN_CHARS = 80
_CHAR_PATTERNS = {
    "": re.compile(r"(?s)."),
    "'": re.compile(r"(?s)''|."),
    '"': re.compile(
        r"(?s)\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
        r"|\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\U[0-9a-fA-F]{8}|\\.|."
    ),
}
"""How one character is written, by the quote around it."""
_SHORT_ESCAPES = {"\\b": "\b", "\\f": "\f", "\\n": "\n", "\\r": "\r", "\\t": "\t"}
_CODE_POINT_ESCAPE = re.compile(r"\\[xuU]([0-9a-fA-F]{2,8})")


class UnreadableTextError(ValueError):
    """Text that is not taken: ``str()`` says why, ``hint`` how to mend it, if that is special."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = hint


class ScalarNode(NamedTuple):
    """A text value, and where it stands, its quotes included: ``[start, end)``, in characters.

    ``quote`` is empty for a plain one. One that is not ``simple`` (a block, or with
    an anchor or a tag) can be read, but not rewritten.
    """

    value: str
    start: int
    end: int
    quote: str
    is_simple: bool = True


class SequenceNode(NamedTuple):
    """A list."""

    items: tuple[Node, ...]


class MappingNode(NamedTuple):
    """A mapping, in the order of the file; no key stands twice."""

    entries: tuple[tuple[Node, Node], ...]

    def get(self, key: str) -> Node | None:
        """The value of a key, if it is there."""
        for name, value in self.entries:
            if isinstance(name, ScalarNode) and name.value == key:
                return value
        return None


class OpaqueNode(NamedTuple):
    """What holds no text of its own: ``an alias``, or ``a number`` and the like in JSON."""

    description: str


Node = ScalarNode | SequenceNode | MappingNode | OpaqueNode


def describe_node(node: Node | None) -> str:
    """What kind of node this is, for a message."""
    if isinstance(node, OpaqueNode):
        return node.description
    kinds = {ScalarNode: "a text", SequenceNode: "a list", MappingNode: "a mapping"}
    return kinds[type(node)] if node is not None else "nothing"


class TreeBuilder:
    """A tree in the making, out of its pieces in the order of the text."""

    def __init__(self) -> None:
        self.roots: list[Node] = []
        self._open: list[tuple[bool, list[Node]]] = []

    def add_node(self, node: Node) -> None:
        """Put a node where the text is."""
        (self._open[-1][1] if self._open else self.roots).append(node)

    def open_collection(self, *, mapping: bool) -> None:
        """Begin a list or a mapping. Raises :class:`Unreadable` if it lies too deep."""
        if len(self._open) >= MAX_DEPTH:
            raise build_depth_error()
        self._open.append((mapping, []))

    def close_collection(self) -> None:
        """End what was begun last. Raises :class:`Unreadable` for a key that stands twice."""
        mapping, nodes = self._open.pop()
        if not mapping:
            self.add_node(SequenceNode(tuple(nodes)))
            return
        keys: set[str] = set()
        for key in nodes[::2]:
            if isinstance(key, ScalarNode):
                if key.value in keys:
                    raise UnreadableTextError(f"has the key {shorten_name(key.value)} twice")
                keys.add(key.value)
        self.add_node(MappingNode(tuple(zip(nodes[::2], nodes[1::2], strict=True))))


def build_depth_error() -> UnreadableTextError:
    """What is said of text that is nested too deeply."""
    return UnreadableTextError(f"is nested more than {MAX_DEPTH} levels deep")


def shorten_name(name: str) -> str:
    """A name from a file, fit for a message."""
    return name if len(name) <= _MAX_SHOWN_CHARS else f"{name[:_MAX_SHOWN_CHARS]}…"


def splice_values(text: str, scalars: Iterable[ScalarNode], changes: Mapping[str, str]) -> str:
    """The text with the values of these scalars changed, each in the way it is written.

    Raises :class:`Unreadable` where a value cannot be changed in its place.
    """
    parts, at = [], 0
    for scalar in sorted(scalars, key=lambda scalar: scalar.start):
        new = changes.get(scalar.value, scalar.value)
        if new != scalar.value:
            inner = _respell_value(_extract_inner_text(text, scalar), scalar, new)
            parts += [text[at : scalar.start], scalar.quote, inner, scalar.quote]
            at = scalar.end
    return "".join([*parts, text[at:]])


def flatten_tree(node: Node | None, changes: Mapping[ScalarNode, str]) -> Iterator[str | None]:
    """What a tree says, with some values changed, whatever it looks like.

    Two trees that give the same say the same: ``None`` and a count stand for
    brackets, and what is no scalar gives its kind.
    """
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ScalarNode):
            yield changes.get(node, node.value)
            continue
        yield None
        if isinstance(node, SequenceNode):
            yield f"[{len(node.items)}"
            waiting += reversed(node.items)
        elif isinstance(node, MappingNode):
            yield f"{{{len(node.entries)}"
            waiting += [part for pair in reversed(node.entries) for part in reversed(pair)]
        else:
            yield node.description if node is not None else ""


def _extract_inner_text(text: str, scalar: ScalarNode) -> str:
    """What stands between the quotes."""
    if not scalar.is_simple:
        raise _build_rewrite_error(scalar, "as a block, or with an anchor or a tag")
    return text[scalar.start + len(scalar.quote) : scalar.end - len(scalar.quote)]


def _respell_value(inner: str, scalar: ScalarNode, new: str) -> str:
    """How ``new`` is written where the old value is: what both share stays as it is."""
    old, quote = scalar.value, scalar.quote
    units = _CHAR_PATTERNS[quote].findall(inner)
    if "".join(map(_decode_char, units)) != old:
        raise _build_rewrite_error(scalar, "over several lines, or with unusual escapes")
    head = _count_shared_prefix(old, new)
    tail = _count_shared_prefix(old[head:][::-1], new[head:][::-1])
    middle = _escape_text(new[head : len(new) - tail], quote)
    return "".join([*units[:head], middle, *units[len(old) - tail :]])


def _build_rewrite_error(scalar: ScalarNode, how: str) -> UnreadableTextError:
    return UnreadableTextError(
        f"has {shorten_name(scalar.value)} written {how}", "write this name plainly, on one line"
    )


def _decode_char(unit: str) -> str:
    """The character that is written so; for an escape of YAML's own, another one."""
    codes = [int(digits, 16) for digits in _CODE_POINT_ESCAPE.findall(unit)]
    if len(codes) == 2:
        return chr(0x10000 + ((codes[0] - 0xD800) << 10) + codes[1] - 0xDC00)
    return chr(codes[0]) if codes else _SHORT_ESCAPES.get(unit, unit[-1])


def _count_shared_prefix(one: str, other: str) -> int:
    """With how many characters both begin."""
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return count


def _escape_text(text: str, quote: str) -> str:
    if quote == "'":
        return text.replace("'", "''")
    return json.dumps(text, ensure_ascii=False)[1:-1] if quote else text
