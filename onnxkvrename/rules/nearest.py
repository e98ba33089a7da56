"""Find the rule that a name fails at one place only."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from onnxkvrename.rules.pattern import match_name
from onnxkvrename.rules.profile import KvRule, Rules

_PIECE = re.compile(r"(\(\?P<\w+>(?:[^()]|\((?:[^()]|\([^()]*\))*\))*\))")
"""What a pattern is split at: named groups, with up to two levels of others in them."""
_GROUP = re.compile(r"\(\?P<(\w+)>")
_ODD = "(?P<odd>.*)"


class NearRule(NamedTuple):
    """A rule that does not match a name, but would if the name were different at one place.

    Attributes:
        rule: The rule.
        piece: What the rule has there: a group, by its shorthand, or a part of the pattern.
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
        pieces = [piece for piece in _PIECE.split(rule.expressions[side]) if piece]
        for index, piece in enumerate(pieces):
            try:
                match = match_name("".join((*pieces[:index], _ODD, *pieces[index + 1 :])), name)
            except ValueError:  # the piece has one of two parentheses
                continue
            if match is not None:
                group = _GROUP.match(piece)
                yield NearRule(rule, f"{{{group[1]}}}" if group else piece, match["odd"])
