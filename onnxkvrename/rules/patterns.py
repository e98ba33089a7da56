"""Patterns for whole names: regular expressions, and lists of names that are asked like one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from onnxkvrename.limits import MAX_MATCHED_CHARS


class NamePattern(NamedTuple):
    """A regular expression that matches whole names."""

    expression: re.Pattern[str]

    @property
    def groups(self) -> tuple[str, ...]:
        """The named groups."""
        return tuple(self.expression.groupindex)

    def matches(self, name: str) -> bool:
        """Return whether the pattern matches the whole name."""
        return self._match(name) is not None

    def match_groups(self, name: str) -> dict[str, str] | None:
        """Return the text of each named group, or `None` if the pattern does not match."""
        match = self._match(name)
        return None if match is None else match.groupdict("")

    def _match(self, name: str) -> re.Match[str] | None:
        if len(name) > MAX_MATCHED_CHARS:
            return None
        return self.expression.fullmatch(name)


class ListedName(NamedTuple):
    """A name in a table: what is before and after a token in it, and what it is the name of."""

    core: str
    suffix: str
    buffer: str
    layer: int


class NameTable(NamedTuple):
    """A table of names that is asked like a pattern.

    A name may carry a token after an underscore, before its suffix.

    Attributes:
        entries: The names, by how they are without a token.
        suffixes: All suffixes of names.
    """

    entries: Mapping[str, ListedName]
    suffixes: tuple[str, ...]

    @property
    def groups(self) -> tuple[str, ...]:
        """The named groups."""
        return "name", "buffer", "layer", "token", "suffix"

    def matches(self, name: str) -> bool:
        """Return whether a name is in the table, with or without a token."""
        return self.match_groups(name) is not None

    def match_groups(self, name: str) -> dict[str, str] | None:
        """Return the text of each group, or `None` if the name is not in the table."""
        entry, token = self.entries.get(name), ""
        for suffix in self.suffixes if entry is None else ():
            if name.endswith(suffix):
                core, _, token = name[: len(name) - len(suffix)].rpartition("_")
                entry = self.entries.get(core + suffix) if token else None
                if entry is not None and entry.core == core:
                    break
                entry = None
        if entry is None:
            return None
        return {
            "name": entry.core,
            "buffer": entry.buffer,
            "layer": str(entry.layer),
            "token": token,
            "suffix": entry.suffix,
        }


Pattern = NamePattern | NameTable
"""A pattern for whole names, which can be pickled.

``groups`` are the names of its groups; ``matches(name)`` and ``match_groups(name)`` ask whether it
fits a name, and what is in its groups.
"""


def compile_pattern(text: str) -> NamePattern:
    """Compile a regular expression of Python's :mod:`re`, with ASCII classes.

    Raises:
        ValueError: It is not a regular expression. The message continues a sentence that
            begins with the pattern's key.
    """
    try:
        return NamePattern(re.compile(text, re.ASCII))
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"is not a regular expression: {error}") from None
