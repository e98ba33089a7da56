"""Replace values in a text, and nothing else in it.

Only the characters that change are replaced. Quotes, comments, indentation, line endings
and the notation of all other characters stay, so the change back restores the text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from onnxkvrename.documents import UnreadableTextError
from onnxkvrename.limits import shorten_text
from onnxkvrename.sidecars.tree import ScalarNode

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
