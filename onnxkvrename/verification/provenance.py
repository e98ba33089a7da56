"""Where a value comes from, and how that adds up from operator to operator.

An *origin* says of a value from which sources its elements are carried, each by
the shortest *way*, and on which sources it depends at all. Sources are numbers:
KV inputs in a main graph, formal inputs in the body of a function or a branch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from onnxkvrename.verification.operators import Step, is_scatter

_NEAREST = 16
"""Sources that are kept of each value; of one with more the nearest, and in doubt."""
_ALTERNATIVES = 4
"""Branches with different results that are kept apart."""


class Where(NamedTuple):
    """The node that makes a new state: its op type, and its name, ``inner in outer`` in a call."""

    op_type: str
    node: str


class Way(NamedTuple):
    """How a source is carried into a value.

    ``cost`` counts first the operators that write it over something else, then
    those that compute with it; ``where`` is the last that makes a new state,
    ``None`` if the source is only handed on. ``doubt`` says why the way is not
    sure; it is empty where it is.
    """

    cost: tuple[int, int]
    where: Where | None = None
    doubt: str = ""


Ways = Mapping[tuple[int, bool], Way]
"""By source, and whether the way is sure: of each the cheapest."""


class Origin(NamedTuple):
    """Where a value comes from.

    ``ways`` holds one mapping for each outcome that branches may have; none
    where nothing is carried. ``touched`` is a set of sources as bits: what the
    value depends on at all.
    """

    ways: tuple[Ways, ...] = ()
    touched: int = 0


NOTHING = Origin()
"""The origin of a constant, and of every input that is no buffer."""


def source(number: int) -> Origin:
    """A source itself."""
    return Origin(({(number, True): Way((0, 0))},), 1 << number)


def nearest(ways: Ways) -> Ways:
    """The cheapest ways alone."""
    least = min(way.cost for way in ways.values())
    return {key: way for key, way in ways.items() if way.cost == least}


def touching(origins: Iterable[Origin]) -> Origin:
    """What is mixed of these: it depends on them, and carries none of them on."""
    touched = 0
    for origin in origins:
        touched |= origin.touched
    return Origin((), touched)


def carried(origin: Origin, step: Step, where: Where) -> Origin:
    """A value behind an operator that carries it on in this way."""
    if not (step.updates or step.written or step.changed):
        return origin
    return Origin(tuple(_behind(ways, step, where) for ways in origin.ways), origin.touched)


def _behind(ways: Ways, step: Step, where: Where) -> Ways:
    written, changed = int(step.written), int(step.changed)
    return {
        key: Way((way.cost[0] + written, way.cost[1] + changed), where, way.doubt)
        if step.updates
        else Way((way.cost[0] + written, way.cost[1] + changed), way.where, way.doubt)
        for key, way in ways.items()
    }


def joined(origins: Sequence[Origin]) -> Origin:
    """A value that holds something of each of these."""
    carrying = [origin.ways for origin in origins if origin.ways]
    found: tuple[Ways, ...] = carrying[0] if carrying else ()
    for ways in carrying[1:]:
        found = _tidy([_cheapest((one, other)) for one in found for other in ways])
    return Origin(found, touching(origins).touched)


def either(origins: Sequence[Origin]) -> Origin:
    """A value that is one of these; one that carries nothing has no say in it."""
    ways = [ways for origin in origins for ways in origin.ways]
    return Origin(_tidy(ways), touching(origins).touched)


def merged(origins: Sequence[Origin]) -> Origin:
    """A value that is one of these, all that it may be as one outcome."""
    ways = _cheapest(ways for origin in origins for ways in origin.ways)
    return Origin((ways,) if ways else (), touching(origins).touched)


def doubted(origins: Sequence[Origin], why: str, where: Where | None = None) -> Origin:
    """A value that may hold something of each of these, or nothing."""
    known = merged(origins)
    unsure = tuple(
        {(key[0], False): Way(way.cost, where or way.where, why) for key, way in ways.items()}
        for ways in known.ways
    )
    return Origin(unsure, known.touched)


def called(summary: Origin, arguments: Sequence[Origin], call: Where) -> Origin:
    """What a function or branch makes of its arguments; its sources are their positions."""
    outcomes = [
        joined([_through(way, sure, arguments[at], call) for (at, sure), way in ways.items()])
        for ways in summary.ways
    ]
    depends = [argument for at, argument in enumerate(arguments) if summary.touched >> at & 1]
    return Origin(either(outcomes).ways, touching(depends).touched)


def _through(inner: Way, sure: bool, argument: Origin, call: Where) -> Origin:
    where = inner.where and _lifted(inner.where, call)
    return Origin(
        tuple(
            {
                (number, sure and known): Way(
                    (way.cost[0] + inner.cost[0], way.cost[1] + inner.cost[1]),
                    where or way.where,
                    inner.doubt or way.doubt,
                )
                for (number, known), way in ways.items()
            }
            for ways in argument.ways
        )
    )


def _lifted(inner: Where, call: Where) -> Where:
    """A place in a body as it is called outside: a scatter is known by its own name."""
    if is_scatter("com.qualcomm.cloud", call.op_type):
        return call
    return Where(inner.op_type, " in ".join(filter(None, (inner.node, call.node))))


def _cheapest(several: Iterable[Ways]) -> Ways:
    """Of each source the cheapest way."""
    found: dict[tuple[int, bool], Way] = {}
    for ways in several:
        for key, way in ways.items():
            if key not in found or way.cost < found[key].cost:
                found[key] = way
    if len(found) <= _NEAREST:
        return found
    kept = sorted(found, key=lambda key: (found[key].cost, key))[:_NEAREST]
    why = f"it is made of more than {_NEAREST} values at once"
    return {(number, False): found[number, sure]._replace(doubt=why) for number, sure in kept}


def _tidy(outcomes: Sequence[Ways]) -> tuple[Ways, ...]:
    """Outcomes with the same nearest sources as one; too many of them leave doubt."""
    if len(outcomes) < 2:
        return tuple(outcomes)
    known: dict[frozenset[tuple[int, bool]], Ways] = {}
    for ways in outcomes:
        key = frozenset(nearest(ways))
        known[key] = _alike(known[key], ways) if key in known else ways
    if len(known) <= _ALTERNATIVES:
        return tuple(known.values())
    return doubted([Origin(tuple(known.values()))], "branches have too many different results").ways


def _alike(one: Ways, other: Ways) -> Ways:
    """Two outcomes with the same nearest sources: if either makes a new state, so do both."""
    found = _cheapest((one, other))
    places = {key: way.where for ways in (other, one) for key, way in ways.items() if way.where}
    return {key: way._replace(where=way.where or places.get(key)) for key, way in found.items()}
