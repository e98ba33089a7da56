"""Parse JSON into a tree whose strings know their positions in the text.

The syntax is that of Python's :mod:`json`: NaN and infinities are accepted. Numbers are never
converted, however long they are, since nothing here changes them.
"""

from __future__ import annotations

import json
import re

from onnxkvrename.documents import UnreadableTextError, build_depth_error
from onnxkvrename.limits import MAX_DEPTH
from onnxkvrename.sidecars.tree import Node, OpaqueNode, ScalarNode, TreeBuilder

MAX_JSON_CHARS = 1 << 23
"""The longest text that is parsed, in characters."""

# A string without a closing quote extends to the end of the text, so text that is not JSON
# does not take longer.
_LEXEME = re.compile(r'(?s)"[^"\\]*(?:\\.[^"\\]*)*"?|[\[\]{}]|[^\s\[\]{}",:\ufeff]+')
_MAX_VALUES = 1 << 16
"""Values of a text, counted by its commas, colons and brackets; each takes 300 bytes."""
_NON_TEXT = OpaqueNode("no text")


def parse_json_tree(text: str) -> Node:
    """Return the tree of a JSON text, which may begin with a byte order mark.

    Raises:
        UnreadableTextError: The text is too long, has too many values, is not JSON, is nested too
            deeply, or has a key twice.
    """
    if len(text) > MAX_JSON_CHARS:
        raise UnreadableTextError(f"has {len(text):,} characters, more than {MAX_JSON_CHARS:,}")
    if sum(map(text.count, ",:[{")) > _MAX_VALUES:
        raise UnreadableTextError(f"has more than {_MAX_VALUES:,} values")
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
            builder.add_node(_build_scalar(lexeme[0], lexeme.start()))
        else:
            builder.add_node(_NON_TEXT)
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


def _build_scalar(raw: str, start: int) -> ScalarNode:
    value = json.loads(raw) if "\\" in raw else raw[1:-1]
    return ScalarNode(value, start, start + len(raw), '"')
