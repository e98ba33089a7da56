"""Where a value comes from, and how that adds up from operator to operator.

An *origin* says of a value from which sources its elements are carried, each by
the shortest *way*, and on which sources it depends at all. Sources are numbers:
KV inputs in a main graph, formal inputs in the body of a function or a branch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from onnxkvrename.verification.operators import OperandFlow, is_ctx_scatter

_MAX_SOURCES = 16
"""Sources that are kept of each value; of one with more the nearest, and in doubt."""
_MAX_OUTCOMES = 4
"""Branches with different results that are kept apart."""


class NodeLocation(NamedTuple):
    """The node that makes a new state: its op type, and its name, ``inner in outer`` in a call."""

    op_type: str
    node_name: str


class FlowPath(NamedTuple):
    """How a source is carried into a value.

    ``cost`` counts first the operators that write it over something else, then
    those that compute with it; ``where`` is the last that makes a new state,
    ``None`` if the source is only handed on. ``doubt`` says why the way is not
    sure; it is empty where it is.
    """

    cost: tuple[int, int]
    updated_by: NodeLocation | None = None
    uncertainty: str = ""


FlowPaths = Mapping[tuple[int, bool], FlowPath]
"""By source, and whether the way is sure: of each the cheapest."""


class Origin(NamedTuple):
    """Where a value comes from.

    ``ways`` holds one mapping for each outcome that branches may have; none
    where nothing is carried. ``touched`` is a set of sources as bits: what the
    value depends on at all.
    """

    outcomes: tuple[FlowPaths, ...] = ()
    dependency_bits: int = 0


NO_ORIGIN = Origin()
"""The origin of a constant, and of every input that is no buffer."""


def build_source_origin(number: int) -> Origin:
    """A source itself."""
    return Origin(({(number, True): FlowPath((0, 0))},), 1 << number)


def select_cheapest_paths(ways: FlowPaths) -> FlowPaths:
    """The cheapest ways alone."""
    least = min(way.cost for way in ways.values())
    return {key: way for key, way in ways.items() if way.cost == least}


def mix_origins(origins: Iterable[Origin]) -> Origin:
    """What is mixed of these: it depends on them, and carries none of them on."""
    touched = 0
    for origin in origins:
        touched |= origin.dependency_bits
    return Origin((), touched)


def carry_origin(origin: Origin, step: OperandFlow, where: NodeLocation) -> Origin:
    """A value behind an operator that carries it on in this way."""
    if not (step.makes_new_state or step.overwrites or step.is_computed):
        return origin
    return Origin(
        tuple(_extend_paths(ways, step, where) for ways in origin.outcomes), origin.dependency_bits
    )


def _extend_paths(ways: FlowPaths, step: OperandFlow, where: NodeLocation) -> FlowPaths:
    written, changed = int(step.overwrites), int(step.is_computed)
    return {
        key: FlowPath((way.cost[0] + written, way.cost[1] + changed), where, way.uncertainty)
        if step.makes_new_state
        else FlowPath(
            (way.cost[0] + written, way.cost[1] + changed), way.updated_by, way.uncertainty
        )
        for key, way in ways.items()
    }


def join_origins(origins: Sequence[Origin]) -> Origin:
    """A value that holds something of each of these."""
    carrying = [origin.outcomes for origin in origins if origin.outcomes]
    found: tuple[FlowPaths, ...] = carrying[0] if carrying else ()
    for ways in carrying[1:]:
        found = _limit_outcomes(
            [_merge_cheapest_paths((one, other)) for one in found for other in ways]
        )
    return Origin(found, mix_origins(origins).dependency_bits)


def combine_alternatives(origins: Sequence[Origin]) -> Origin:
    """A value that is one of these; one that carries nothing has no say in it."""
    ways = [ways for origin in origins for ways in origin.outcomes]
    return Origin(_limit_outcomes(ways), mix_origins(origins).dependency_bits)


def merge_origins(origins: Sequence[Origin]) -> Origin:
    """A value that is one of these, all that it may be as one outcome."""
    ways = _merge_cheapest_paths(ways for origin in origins for ways in origin.outcomes)
    return Origin((ways,) if ways else (), mix_origins(origins).dependency_bits)


def build_uncertain_origin(
    origins: Sequence[Origin], why: str, where: NodeLocation | None = None
) -> Origin:
    """A value that may hold something of each of these, or nothing."""
    known = merge_origins(origins)
    unsure = tuple(
        {
            (key[0], False): FlowPath(way.cost, where or way.updated_by, why)
            for key, way in ways.items()
        }
        for ways in known.outcomes
    )
    return Origin(unsure, known.dependency_bits)


def apply_summary(summary: Origin, arguments: Sequence[Origin], call: NodeLocation) -> Origin:
    """What a function or branch makes of its arguments; its sources are their positions."""
    outcomes = [
        join_origins(
            [_compose_origin(way, sure, arguments[at], call) for (at, sure), way in ways.items()]
        )
        for ways in summary.outcomes
    ]
    depends = [
        argument for at, argument in enumerate(arguments) if summary.dependency_bits >> at & 1
    ]
    return Origin(combine_alternatives(outcomes).outcomes, mix_origins(depends).dependency_bits)


def _compose_origin(inner: FlowPath, sure: bool, argument: Origin, call: NodeLocation) -> Origin:
    where = inner.updated_by and _qualify_location(inner.updated_by, call)
    return Origin(
        tuple(
            {
                (number, sure and known): FlowPath(
                    (way.cost[0] + inner.cost[0], way.cost[1] + inner.cost[1]),
                    where or way.updated_by,
                    inner.uncertainty or way.uncertainty,
                )
                for (number, known), way in ways.items()
            }
            for ways in argument.outcomes
        )
    )


def _qualify_location(inner: NodeLocation, call: NodeLocation) -> NodeLocation:
    """A place in a body as it is called outside: a scatter is known by its own name."""
    if is_ctx_scatter("com.qualcomm.cloud", call.op_type):
        return call
    return NodeLocation(inner.op_type, " in ".join(filter(None, (inner.node_name, call.node_name))))


def _merge_cheapest_paths(several: Iterable[FlowPaths]) -> FlowPaths:
    """Of each source the cheapest way."""
    found: dict[tuple[int, bool], FlowPath] = {}
    for ways in several:
        for key, way in ways.items():
            if key not in found or way.cost < found[key].cost:
                found[key] = way
    if len(found) <= _MAX_SOURCES:
        return found
    kept = sorted(found, key=lambda key: (found[key].cost, key))[:_MAX_SOURCES]
    why = f"it is made of more than {_MAX_SOURCES} values at once"
    return {(number, False): found[number, sure]._replace(uncertainty=why) for number, sure in kept}


def _limit_outcomes(outcomes: Sequence[FlowPaths]) -> tuple[FlowPaths, ...]:
    """Outcomes with the same nearest sources as one; too many of them leave doubt."""
    if len(outcomes) < 2:
        return tuple(outcomes)
    known: dict[frozenset[tuple[int, bool]], FlowPaths] = {}
    for ways in outcomes:
        key = frozenset(select_cheapest_paths(ways))
        known[key] = _merge_similar_outcomes(known[key], ways) if key in known else ways
    if len(known) <= _MAX_OUTCOMES:
        return tuple(known.values())
    return build_uncertain_origin(
        [Origin(tuple(known.values()))], "branches have too many different results"
    ).outcomes


def _merge_similar_outcomes(one: FlowPaths, other: FlowPaths) -> FlowPaths:
    """Two outcomes with the same nearest sources: if either makes a new state, so do both."""
    found = _merge_cheapest_paths((one, other))
    places = {
        key: way.updated_by for ways in (other, one) for key, way in ways.items() if way.updated_by
    }
    return {
        key: way._replace(updated_by=way.updated_by or places.get(key))
        for key, way in found.items()
    }
