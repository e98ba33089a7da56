"""Mark buffers of which a model has only one side, as its rules expect."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from onnxkvrename.rules.plan import KvPair
from onnxkvrename.rules.profile import Rules


def mark_lone_sides(pairs: Sequence[KvPair], rules: Rules) -> Iterator[KvPair]:
    """Yield the pairs, with a mark on those of which the rules expect only one side.

    This holds only for a whole kind: if some of its pairs have both sides, the others lost one.

    Args:
        pairs: All pairs of a model.
        rules: The rules that paired them.
    """
    sides_by_kind: dict[tuple[int, str], set[tuple[bool, bool]]] = {}
    for pair in pairs:
        sides = pair.input is not None, pair.output is not None
        sides_by_kind.setdefault((pair.rule, pair.kind), set()).add(sides)
    lone = {
        (rule, kind)
        for (rule, kind), sides in sides_by_kind.items()
        for side in rules.kv_rules[rule].get_kind_rule(kind).alone
        if sides == {(side == "input", side == "output")}
    }
    for pair in pairs:
        yield pair._replace(may_be_alone=True) if (pair.rule, pair.kind) in lone else pair
