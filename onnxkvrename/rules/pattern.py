"""Patterns of names: regular expressions with shorthand such as ``{token}`` for groups."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache

from onnxkvrename.limits import MAX_MATCHED_CHARS

GROUPS = ("scope", "part", "layer", "token", "suffix")
"""The groups that rules read; each takes part wherever its pattern matches."""
SHORTHAND: Mapping[str, str] = {
    "scope": "(?P<scope>(?:.*/)?)",
    "layer": "(?P<layer>0|[1-9][0-9]{0,5})",
    "token": "(?P<token>(?:_[A-Za-z0-9]+)?)",
}
_SHORT = re.compile(r"\\.|\{([a-z]+)\}", re.DOTALL)
_LITERAL = r"(?:[^\\^$.|?*+()\[\]{}]|\\\W)*"


def write_expression(text: str, shorthand: Mapping[str, str]) -> str:
    """Return the regular expression that a pattern is.

    Raises:
        ValueError: It has other shorthand. The message continues a sentence that begins with
            the pattern's key.
    """

    def expand(match: re.Match[str]) -> str:
        if match[1] is not None and match[1] not in shorthand:
            known = ", ".join(f"{{{group}}}" for group in shorthand)
            raise ValueError(f"has {match[0]}, which is not one of {known}; a brace is \\{{")
        return match[0] if match[1] is None else shorthand[match[1]]

    return _SHORT.sub(expand, text)


def write_alternatives(group: str, texts: Iterable[str]) -> str:
    """Return a group for one of some texts, of which the longest that fits counts."""
    longest_first = sorted(texts, key=len, reverse=True)
    return f"(?P<{group}>{'|'.join(map(re.escape, longest_first))})"


def forbid_token(expression: str) -> str:
    """Return the regular expression for the names that one matches without a token.

    The group may also be left out of a match, which counts for nothing.
    """
    return expression.replace("(?P<token>", "(?:(?P<token>)|(?!)")


def read_literal(text: str) -> str | None:
    """Return the text that a pattern matches, ``None`` if it has operators."""
    is_literal = compile_pattern(_LITERAL).fullmatch(text) is not None
    return re.sub(r"\\(\W)", r"\1", text) if is_literal else None


def match_name(expression: str, name: str) -> re.Match[str] | None:
    """Match a whole name, which no pattern is tried on if it is very long."""
    if len(name) > MAX_MATCHED_CHARS:
        return None
    return compile_pattern(expression).fullmatch(name)


@cache
def compile_pattern(expression: str) -> re.Pattern[str]:
    """Compile a regular expression of Python's :mod:`re`, with ASCII classes.

    Raises:
        ValueError: It is not a regular expression. The message continues a sentence that
            begins with the pattern's key.
    """
    try:
        return re.compile(expression, re.ASCII)
    except (re.error, OverflowError, RecursionError) as error:
        if str(error).startswith("redefinition"):
            problem = "has a group twice: write a [[kv]] for each form of the names"
            raise ValueError(problem) from None
        raise ValueError(f"is not a regular expression: {error}") from None
