"""Patterns for whole names that match in linear time, for any pattern and name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from onnxkvrename.patterns.matcher import LinearMatcher
from onnxkvrename.patterns.syntax import PatternSyntaxError

MAX_PATTERNS = 100
"""Patterns of a profile."""
MAX_TOTAL_COST = 50_000
"""Positions of all patterns of a profile together, and steps between them; about 20 MB."""
RE2_COST = 5_000
"""The cost of a pattern that google-re2 matches; that library limits its own memory."""
RE2_INSTALL_COMMAND = "pip install 'onnxkvrename[re2]'"


class Re2Matcher(NamedTuple):
    """A pattern that google-re2 matches with.

    Attributes:
        compiled: The compiled pattern.
        group_numbers: The number of each named group.
    """

    compiled: Any
    group_numbers: tuple[tuple[str, int], ...]

    @property
    def cost(self) -> int:
        """The cost to build the pattern, on the scale of :class:`LinearMatcher`."""
        return RE2_COST

    @property
    def groups(self) -> tuple[str, ...]:
        """The named groups."""
        return tuple(group for group, _ in self.group_numbers)

    def matches(self, name: str) -> bool:
        """Return whether the pattern matches the whole name."""
        return self.compiled.fullmatch(_encode_name(name)) is not None

    def match_groups(self, name: str) -> dict[str, str] | None:
        """Return the text of each named group, or `None` if the pattern does not match."""
        text = _encode_name(name)
        match = self.compiled.fullmatch(text)
        if match is None:
            return None
        spans = {group: match.span(number) for group, number in self.group_numbers}
        return {
            group: text[start:end].decode("utf-8", "surrogateescape") if start >= 0 else ""
            for group, (start, end) in spans.items()
        }


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
    def cost(self) -> int:
        """The cost to build the table, on the scale of patterns."""
        return len(self.entries)

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


Pattern = LinearMatcher | Re2Matcher | NameTable
"""A pattern for whole names, which can be pickled.

``groups`` are the names of its groups, ``cost`` is what it takes to build, and
``matches(name)`` and ``match_groups(name)`` ask whether it fits a name, and what is in its
groups.
"""


def compile_pattern(text: str) -> Pattern:
    """Compile a pattern in RE2's syntax.

    Nearly all patterns are matched by this package itself, in linear time
    (:mod:`onnxkvrename.patterns.syntax` lists the syntax); for all others
    google-re2 is loaded.

    Raises:
        ValueError: RE2 does not accept the pattern, or it needs google-re2, which is
            not installed. The message continues a sentence that begins with the
            pattern's key.
    """
    try:
        return LinearMatcher(text)
    except PatternSyntaxError as error:
        return _compile_with_re2(text, error)


def check_total_cost(patterns: Sequence[Pattern]) -> None:
    """Check that patterns which are affordable one by one are so together.

    Raises:
        ValueError: They are too many, or have too many positions. The message continues a
            sentence that begins with the profile.
    """
    cost = sum(pattern.cost for pattern in patterns)
    if len(patterns) > MAX_PATTERNS:
        raise ValueError(f"has {len(patterns)} patterns, more than {MAX_PATTERNS}")
    if cost > MAX_TOTAL_COST:
        raise ValueError(
            f"has patterns with {cost:,} characters and ways between them, repetitions "
            f"unfolded, more than {MAX_TOTAL_COST:,}"
        )


def _compile_with_re2(text: str, reason: PatternSyntaxError) -> Re2Matcher:
    try:
        import re2  # only for patterns that need it: it takes 9 ms to load
    except ImportError:
        if reason.is_malformed:
            raise ValueError(f"is not an RE2 pattern: {reason}") from None
        raise ValueError(
            f"requires google-re2, because it contains {reason}: {RE2_INSTALL_COMMAND}, "
            "or write it without"
        ) from None
    options = re2.Options()
    options.log_errors = False  # re2 would write them to stderr
    try:
        compiled = re2.compile(text, options)
    except re2.error as error:
        message = error.args[0] if error.args else ""
        message = message.decode("utf-8", "replace") if isinstance(message, bytes) else str(message)
        raise ValueError(f"is not an RE2 pattern: {message}") from None
    return Re2Matcher(compiled, tuple(dict(compiled.groupindex).items()))


def _encode_name(name: str) -> bytes:
    return name.encode("utf-8", "surrogateescape")
