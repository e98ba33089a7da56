"""JSON as a tree that knows where its strings stand.

What is JSON is for :mod:`json` to say. Like it, this takes ``NaN`` and infinities;
numbers are never converted, however long.
"""

from __future__ import annotations

import json
import re

from onnxkvrename.sidecars.text_edit import (
    MAX_DEPTH,
    Growth,
    Node,
    Other,
    Scalar,
    Unreadable,
    too_deep,
)

LIMIT = 1 << 23
"""Characters that are read."""

# A string without an end is one to the end of the text: what is no JSON takes no longer.
_PIECE = re.compile(r'(?s)"[^"\\]*(?:\\.[^"\\]*)*"?|[\[\]{}]|[^\s\[\]{}",:\ufeff]+')
_NUMBER = Other("no text")


def parse(text: str) -> Node:
    """The value in a text, which may begin with a byte order mark.

    Raises :class:`Unreadable`, in one line, for what is no JSON, is nested too
    deeply, or has a key twice.
    """
    if len(text) > LIMIT:
        raise Unreadable(f"has {len(text):,} characters, more than {LIMIT:,}")
    _judge_depth(text)
    try:
        json.loads(text.removeprefix("\ufeff"), parse_int=len, parse_float=len)
    except json.JSONDecodeError as error:
        raise Unreadable(f"is no JSON: {error}") from None
    growth = Growth()
    for piece in _PIECE.finditer(text):
        first = piece[0][0]
        if first in "[{":
            growth.open(mapping=first == "{")
        elif first in "]}":
            growth.close()
        elif first == '"':
            growth.add(_string(piece[0], piece.start()))
        else:
            growth.add(_NUMBER)
    return growth.roots[0]


def _judge_depth(text: str) -> None:
    """Refuse what would take the interpreter's stack, before it is looked at any closer."""
    depth = 0
    for piece in _PIECE.finditer(text):
        if piece[0] in ("[", "{"):
            depth += 1
            if depth > MAX_DEPTH:
                raise too_deep()
        elif piece[0] in ("]", "}"):
            depth -= 1


def _string(raw: str, start: int) -> Scalar:
    value = json.loads(raw) if "\\" in raw else raw[1:-1]
    return Scalar(value, start, start + len(raw), '"')
