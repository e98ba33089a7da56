"""JSON as a tree that knows where its strings stand.

What is JSON is for :mod:`json` to say. Like it, this takes ``NaN`` and infinities;
numbers are never converted, however long.
"""

from __future__ import annotations

import json
import re

from onnxkvrename.sidecars.text_edit import (
    MAX_DEPTH,
    Node,
    OpaqueNode,
    ScalarNode,
    TreeBuilder,
    UnreadableTextError,
    build_depth_error,
)

MAX_JSON_CHARS = 1 << 23
"""Characters that are read."""

# A string without an end is one to the end of the text: what is no JSON takes no longer.
_LEXEME = re.compile(r'(?s)"[^"\\]*(?:\\.[^"\\]*)*"?|[\[\]{}]|[^\s\[\]{}",:\ufeff]+')
_NON_TEXT = OpaqueNode("no text")


def parse_json_tree(text: str) -> Node:
    """The value in a text, which may begin with a byte order mark.

    Raises :class:`Unreadable`, in one line, for what is no JSON, is nested too
    deeply, or has a key twice.
    """
    if len(text) > MAX_JSON_CHARS:
        raise UnreadableTextError(f"has {len(text):,} characters, more than {MAX_JSON_CHARS:,}")
    _check_depth(text)
    try:
        json.loads(text.removeprefix("\ufeff"), parse_int=len, parse_float=len)
    except json.JSONDecodeError as error:
        raise UnreadableTextError(f"is no JSON: {error}") from None
    growth = TreeBuilder()
    for piece in _LEXEME.finditer(text):
        first = piece[0][0]
        if first in "[{":
            growth.open_collection(mapping=first == "{")
        elif first in "]}":
            growth.close_collection()
        elif first == '"':
            growth.add_node(_build_scalar(piece[0], piece.start()))
        else:
            growth.add_node(_NON_TEXT)
    return growth.roots[0]


def _check_depth(text: str) -> None:
    """Refuse what would take the interpreter's stack, before it is looked at any closer."""
    depth = 0
    for piece in _LEXEME.finditer(text):
        if piece[0] in ("[", "{"):
            depth += 1
            if depth > MAX_DEPTH:
                raise build_depth_error()
        elif piece[0] in ("]", "}"):
            depth -= 1


def _build_scalar(raw: str, start: int) -> ScalarNode:
    value = json.loads(raw) if "\\" in raw else raw[1:-1]
    return ScalarNode(value, start, start + len(raw), '"')
