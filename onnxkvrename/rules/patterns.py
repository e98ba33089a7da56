"""Patterns for whole names: regular expressions, and lists of names that are asked like one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

MAX_MATCHED_LENGTH = 4096
"""Characters of a name that a pattern is tried on. Exporters write names of a few hundred; the
patterns of the built-in profiles take linear time, but those of a user need not."""


class NamePattern(NamedTuple):
    """A regular expression that matches whole names.

    Attributes:
        expression: The compiled expression.
    """

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
        if len(name) > MAX_MATCHED_LENGTH:
            return None
        return self.expression.fullmatch(name)


class NameTable(NamedTuple):
    """A table of names that is asked like a pattern.

    A name may carry a token after an underscore, before the suffix.

    Attributes:
        entries: The part and the layer of each name; names are without token and suffix.
        suffix: What all names end with, mostly nothing.
    """

    entries: Mapping[str, tuple[str, int]]
    suffix: str = ""

    @property
    def groups(self) -> tuple[str, ...]:
        """The named groups."""
        return "name", "buffer", "layer", "token", "suffix"

    def matches(self, name: str) -> bool:
        """Return whether a name is in the table, with or without a token."""
        return self.match_groups(name) is not None

    def match_groups(self, name: str) -> dict[str, str] | None:
        """Return the text of each group, or `None` if the name is not in the table."""
        if not name.endswith(self.suffix):
            return None
        core, token = name[: len(name) - len(self.suffix)], ""
        if core not in self.entries:
            core, _, token = core.rpartition("_")
        if core not in self.entries or (not token and core + self.suffix != name):
            return None
        buffer, layer = self.entries[core]
        return {
            "name": core,
            "buffer": buffer,
            "layer": str(layer),
            "token": token,
            "suffix": self.suffix,
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
