"""Find the rule that a name fails at one place only."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from onnxkvrename.rules.pattern import match_name, write_expression
from onnxkvrename.rules.profile import KvRule, Rules

_PIECE = re.compile(r"(\{[a-z]+\}|\(\?P<\w+>(?:[^()]|\((?:[^()]|\([^()]*\))*\))*\))")
"""What a pattern is split at: shorthand, and named groups with up to two levels of others."""


class NearRule(NamedTuple):
    """A rule that does not match a name, but would if the name were different at one place.

    Attributes:
        rule: The rule.
        piece: What the rule has there, in its own words.
        found: What the name has there.
    """

    rule: KvRule
    piece: str
    found: str


def find_nearest(all_rules: Iterable[Rules], side: str, name: str) -> NearRule | None:
    """Return the rule that most of a name fits; ``None`` if none fits half of it."""
    near = [each for rules in all_rules for each in _list_near(rules, side, name)]
    nearest = min(near, key=lambda each: len(each.found), default=None)
    return nearest if nearest is not None and 2 * len(nearest.found) < len(name) else None


def _list_near(rules: Rules, side: str, name: str) -> Iterator[NearRule]:
    for rule in rules.kv_rules:
        written = [piece for piece in _PIECE.split(rule.patterns[side]) if piece]
        for index, piece in enumerate(written):
            around = "".join((*written[:index], "(?P<odd>.*)", *written[index + 1 :]))
            try:
                match = match_name(write_expression(around, rule.shorthand), name)
            except ValueError:  # the piece has one of two parentheses
                continue
            if match is not None:
                yield NearRule(rule, piece, match["odd"])
