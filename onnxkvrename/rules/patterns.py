"""RE2 patterns for whole names: linear in time, whatever the pattern and the name."""

from __future__ import annotations

from typing import Any, NamedTuple

import re2


class Pattern(NamedTuple):
    """An RE2 pattern for whole names; ``groups`` are its named groups and their numbers."""

    compiled: Any
    groups: tuple[tuple[str, int], ...]

    def matches(self, name: str) -> bool:
        """Whether the whole name is one of those meant."""
        return self.compiled.fullmatch(name.encode("utf-8", "surrogateescape")) is not None

    def match_groups(self, name: str) -> dict[str, str] | None:
        """The named groups of a name that fits, empty where one took no part."""
        text = name.encode("utf-8", "surrogateescape")
        found = self.compiled.fullmatch(text)
        if found is None:
            return None
        spans = {group: found.span(number) for group, number in self.groups}
        return {
            group: text[start:end].decode("utf-8", "surrogateescape") if start >= 0 else ""
            for group, (start, end) in spans.items()
        }


def compile_pattern(text: str) -> Pattern:
    """A pattern from its text. Raises ValueError, saying why, for what RE2 does not take."""
    try:
        compiled = re2.compile(text, _build_options())
    except re2.error as error:
        said = error.args[0] if error.args else ""
        said = said.decode("utf-8", "replace") if isinstance(said, bytes) else str(said)
        raise ValueError(f"is no RE2 pattern: {said}") from None
    return Pattern(compiled, tuple(dict(compiled.groupindex).items()))


def _build_options() -> Any:
    options = re2.Options()
    options.log_errors = False  # they would go to stderr, past everything
    return options
