"""Compute where a value comes from, operator by operator.

An *origin* says from which sources the elements of a value are carried, each by the
cheapest *path*. Sources are numbers: KV inputs in a main graph, formal inputs in the body
of a function or a branch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache, reduce
from itertools import product
from operator import or_
from types import MappingProxyType
from typing import NamedTuple

from onnxkvrename.limits import MAX_ALTERNATIVES
from onnxkvrename.verification.operators import OperandFlow, SizeChange, is_ctx_scatter

_KEPT_APART = 4
"""Outcomes of branches, and ways to a size of each path, that are kept apart."""


class Resizing(NamedTuple):
    """What the operators on a path do to the size of a value.

    Attributes:
        changes: All their changes, as flags.
        axis: The axis along which it grows, negative from the end; ``None`` if it does not,
            or the axis is not known.
        grown_axes: All axes along which it surely grows, as far as they are known.
        cut_axes: All axes along which it may be cut; ``None`` among them is an axis that is
            not known.
        sliced_axes: Those of them of which it surely is a part between two constant positions.
        axes: Its axes in their order now, empty if that is the order from before;
            `REVERSED_AXES` if they are reversed, ``None`` if they are not known.
        written_axes: The axes, as they were before, along which other values were joined to it or
            written into it; ``None`` among them is an axis that is not known.
        reshaped: The sizes that a Reshape gives it, as it says them, after which no axes move; with
            the order that axes had before, ``None`` if that is not known.
    """

    changes: SizeChange = SizeChange.NONE
    axis: int | None = None
    grown_axes: frozenset[int] = frozenset()
    cut_axes: frozenset[int | None] = frozenset()
    sliced_axes: frozenset[int] = frozenset()
    axes: tuple[int, ...] | None = ()
    written_axes: frozenset[int | None] = frozenset()
    reshaped: tuple[tuple[int, ...] | None, tuple[int, ...]] | None = None

    def move_axes(self) -> Resizing:
        """Return the same when axes may have changed places since: they are not known."""
        cut_axes = frozenset({None}) if self.cut_axes else self.cut_axes
        no_axes = frozenset[int]()
        return self._replace(axis=None, grown_axes=no_axes, cut_axes=cut_axes, sliced_axes=no_axes)


REVERSED_AXES = (-1,)
"""All axes in reversed order, however many there are."""
SAME_SIZE = frozenset({Resizing()})
"""The size stays as it is, whatever the path."""


@lru_cache(maxsize=4096)
def build_resizing(changes: SizeChange, axis: int | None) -> frozenset[Resizing]:
    """Return the resizing of one operator."""
    if not changes:
        return SAME_SIZE
    grows, cuts = changes & SizeChange.APPENDS, changes & SizeChange.CUTS
    grown_axes = frozenset({axis} if grows and axis is not None else ())
    cut_axes = frozenset({axis} if cuts else ())
    axes = None if changes & SizeChange.MOVES_AXES else ()
    resized = Resizing(changes, None if cuts else axis, grown_axes, cut_axes, axes=axes)
    return frozenset({resized})


@lru_cache(maxsize=4096)
def _chain_resizings(
    first: frozenset[Resizing], second: frozenset[Resizing]
) -> frozenset[Resizing]:
    """Return what two parts of a path do to the size one after the other."""
    chained = set()
    for before, after in product(first, second):
        if after.changes & SizeChange.MOVES_AXES:
            before = before.move_axes()
        axis = after.axis
        if axis is None and not after.changes & SizeChange.APPENDS:
            axis = before.axis
        grown_axes = before.grown_axes | after.grown_axes
        cut_axes = before.cut_axes | after.cut_axes
        sliced_axes = before.sliced_axes | after.sliced_axes
        written_axes = before.written_axes | {
            find_original_axis(axis, before.axes) for axis in after.written_axes
        }
        chained.add(
            Resizing(
                _chain_changes(before, after),
                axis,
                grown_axes,
                cut_axes,
                sliced_axes,
                _chain_axes(before.axes, after.axes),
                written_axes,
                _chain_reshapes(before, after),
            )
        )
    return _limit_resizings(chained)


def _chain_reshapes(
    before: Resizing, after: Resizing
) -> tuple[tuple[int, ...] | None, tuple[int, ...]] | None:
    """Return the last Reshape, unless axes move after it, and the order of axes before it."""
    if after.reshaped is None:
        return None if after.changes & SizeChange.MOVES_AXES else before.reshaped
    order, sizes = after.reshaped
    return _chain_axes(before.axes, order), sizes


def find_original_axis(axis: int | None, axes: tuple[int, ...] | None) -> int | None:
    """Return what an axis was before reorderings led to an order of axes; `None` if not known."""
    if axis is None or axes is None:
        return None
    if not axes:
        return axis
    if axes == REVERSED_AXES:
        return -1 - axis
    return axes[axis] if -len(axes) <= axis < len(axes) else None


def _chain_changes(before: Resizing, after: Resizing) -> SizeChange:
    """Return all changes; a cut of what was appended before is a change of its own."""
    changes = before.changes
    if changes & SizeChange.IS_FIRST and after.changes & SizeChange.KEEPS_FIRST:
        are_known = None not in after.cut_axes and before.grown_axes
        signs = {axis is not None and axis < 0 for axis in (*after.cut_axes, *before.grown_axes)}
        if not are_known or len(signs) > 1 or before.grown_axes & after.cut_axes:
            changes |= SizeChange.DROPS_NEW
    elif after.changes & SizeChange.CUTS:
        changes &= ~SizeChange.IS_FIRST
    return changes | after.changes


def _chain_axes(
    first: tuple[int, ...] | None, second: tuple[int, ...] | None
) -> tuple[int, ...] | None:
    """Return the order of axes after two reorderings."""
    if first is None or second is None:
        return None
    if not first or not second:
        return first or second
    if first == second == REVERSED_AXES:
        return ()
    count = len(second) if first == REVERSED_AXES else len(first)
    in_order = tuple(range(count))
    first, second = (in_order[::-1] if axes == REVERSED_AXES else axes for axes in (first, second))
    if sorted(first) != [*in_order] or sorted(second) != [*in_order]:
        return None
    chained = tuple(first[axis] for axis in second)
    return () if chained == in_order else chained


def _limit_resizings(resizings: Iterable[Resizing]) -> frozenset[Resizing]:
    """Return a few different resizings; of too many one that is all of them, for good.

    That they are written along different axes makes none too many.
    """
    distinct = frozenset(resizings)
    if len(distinct) > _KEPT_APART:
        distinct = _merge_written_axes(distinct)
    changes = reduce(or_, (resizing.changes for resizing in distinct))
    if len(distinct) <= _KEPT_APART and not (changes & SizeChange.SEVERAL and len(distinct) > 1):
        return distinct
    axes = {resizing.axis for resizing in distinct if resizing.changes & SizeChange.APPENDS}
    axis = axes.pop() if len(axes) == 1 else None
    cut_axes: frozenset[int | None] = frozenset({None} if changes & SizeChange.CUTS else ())
    return frozenset({Resizing(changes | SizeChange.SEVERAL, axis, cut_axes=cut_axes, axes=None)})


def _merge_written_axes(resizings: Iterable[Resizing]) -> frozenset[Resizing]:
    """Return the resizings that differ in something else than the axes that are written."""
    written: dict[Resizing, frozenset[int | None]] = {}
    for resizing in resizings:
        key = resizing._replace(written_axes=frozenset())
        written[key] = written.get(key, frozenset()) | resizing.written_axes
    return frozenset(key._replace(written_axes=axes) for key, axes in written.items())


class NodeLocation(NamedTuple):
    """The node that makes a new state.

    Attributes:
        op_type: The operator type.
        node: The name of the node; `inner in outer` if it is in the body of
            a function or subgraph.
    """

    op_type: str
    node: str


class FlowPath(NamedTuple):
    """The way by which a source is carried into a value.

    Attributes:
        cost: How often the source is written over another value, then how many
            operators compute with it.
        updated_by: The last node that makes a new state; `None` if the source is
            only moved.
        uncertainty: Why the path may not exist; empty if it does.
        resizings: What becomes of its size; several where paths cost the same.
        is_copy: Whether on some path, also on one that costs more, the values themselves arrive,
            or multiples or sums of them.
        is_written_again: Whether several nodes on some path make a new state.
    """

    cost: tuple[int, int]
    updated_by: NodeLocation | None = None
    uncertainty: str = ""
    resizings: frozenset[Resizing] = SAME_SIZE
    is_copy: bool = True
    is_written_again: bool = False


FlowPaths = Mapping[tuple[int, bool], FlowPath]
"""The cheapest path for each source, certain (`True`) and uncertain ones apart."""


Origin = tuple[FlowPaths, ...]
"""The paths on which sources reach a value, for each outcome that branches may have.

Without an outcome the value carries no source.
"""
NO_ORIGIN: Origin = ()
"""The origin of a constant, and of every input that is not a source."""


def build_source_origin(number: int) -> Origin:
    """Return the origin of a source itself."""
    return ({(number, True): FlowPath((0, 0))},)


def select_cheapest_paths(paths: FlowPaths) -> FlowPaths:
    """Return only the paths with the lowest cost."""
    lowest_cost = min(path.cost for path in paths.values())
    return {key: path for key, path in paths.items() if path.cost == lowest_cost}


def find_copies(paths: FlowPaths) -> tuple[int, ...]:
    """Return the sources that surely reach a value as a copy, by whatever path, in their order."""
    return tuple(
        sorted(
            number for (number, is_certain), path in paths.items() if is_certain and path.is_copy
        )
    )


def carry_origin(
    origin: Origin,
    flow: OperandFlow,
    location: NodeLocation,
    resizing: frozenset[Resizing] = SAME_SIZE,
    joined: Mapping[int, frozenset[Resizing]] = MappingProxyType({}),
) -> Origin:
    """Return the origin of a value after an operator, at a node, carries an operand on.

    The resizing is what the operator does to the operand's size; for some sources, it is another
    one that is `joined`.
    """
    if resizing is SAME_SIZE and not (flow.makes_new_state or flow.overwrites or flow.is_computed):
        return origin
    updated_by = location if flow.makes_new_state else None
    return tuple(
        {
            key: FlowPath(
                (path.cost[0] + flow.overwrites, path.cost[1] + flow.is_computed),
                updated_by or path.updated_by,
                path.uncertainty,
                path.resizings
                if resizing is SAME_SIZE
                else _chain_resizings(path.resizings, joined.get(key[0], resizing)),
                path.is_copy and not flow.is_new,
                path.is_written_again or (flow.makes_new_state and path.updated_by is not None),
            )
            for key, path in paths.items()
        }
        for paths in origin
    )


def join_origins(origins: Sequence[Origin]) -> Origin:
    """Return the origin of a value that holds something of each of these."""
    joined, *others = [*filter(None, origins)] or [NO_ORIGIN]
    for origin in others:
        joined = _limit_outcomes([*map(_merge_cheapest_paths, product(joined, origin))])
    return joined


def combine_alternatives(origins: Sequence[Origin]) -> Origin:
    """Return the origin of a value that is one of these, each an outcome of its own.

    An alternative that carries nothing adds no outcome.
    """
    return _limit_outcomes([paths for origin in origins for paths in origin])


def merge_origins(origins: Sequence[Origin]) -> Origin:
    """Return the origin of a value that is one of these, with all alternatives in one outcome."""
    merged = _merge_cheapest_paths(paths for origin in origins for paths in origin)
    return (merged,) if merged else NO_ORIGIN


def build_uncertain_origin(
    origins: Sequence[Origin], reason: str, location: NodeLocation | None = None
) -> Origin:
    """Return the origin of a value that may hold something of each of these, or nothing.

    The location is the node that makes the value, if there is one.
    """
    return tuple(
        {
            (number, False): FlowPath(
                path.cost, location or path.updated_by, reason, path.resizings
            )
            for (number, _), path in paths.items()
        }
        for paths in merge_origins(origins)
    )


def apply_summary(summary: Origin, arguments: Sequence[Origin], call: NodeLocation) -> Origin:
    """Return the origin of what a function or branch makes of its arguments.

    The summary is the origin of one output; its sources are positions in `arguments`, the origins
    of the formal inputs and of what is captured.
    """
    outcomes = [
        join_origins(
            [
                _compose_origin(path, is_certain, arguments[position], call)
                for (position, is_certain), path in paths.items()
            ]
        )
        for paths in summary
    ]
    return combine_alternatives(outcomes)


def _compose_origin(
    inner: FlowPath, inner_is_certain: bool, argument: Origin, call: NodeLocation
) -> Origin:
    """Return the origin of an argument that a body carries on by an inner path."""
    updated_by = inner.updated_by and _qualify_location(inner.updated_by, call)
    return tuple(
        {
            (number, inner_is_certain and is_certain): FlowPath(
                (path.cost[0] + inner.cost[0], path.cost[1] + inner.cost[1]),
                updated_by or path.updated_by,
                inner.uncertainty or path.uncertainty,
                _chain_resizings(path.resizings, inner.resizings),
                path.is_copy and inner.is_copy,
                path.is_written_again
                or inner.is_written_again
                or (path.updated_by is not None and inner.updated_by is not None),
            )
            for (number, is_certain), path in paths.items()
        }
        for paths in argument
    )


def _qualify_location(inner: NodeLocation, call: NodeLocation) -> NodeLocation:
    """Return a location in a body as seen from the call; a scatter is known by its own name."""
    if is_ctx_scatter("com.qualcomm.cloud", call.op_type):
        return call
    return NodeLocation(inner.op_type, " in ".join(filter(None, (inner.node, call.node))))


def _merge_cheapest_paths(several_paths: Iterable[FlowPaths]) -> FlowPaths:
    """Return the cheapest path for each source; of equal ones the first, with both resizings.

    It is a copy, or written again, if any path to the source is.
    """
    cheapest: dict[tuple[int, bool], FlowPath] = {}
    for paths in several_paths:
        for key, path in paths.items():
            known = cheapest.get(key)
            if known is None:
                cheapest[key] = path
                continue
            if path.cost == known.cost and path.resizings is not known.resizings:
                cheapest[key] = _add_resizings(known, path.resizings)
            elif path.cost < known.cost:
                cheapest[key] = path
            is_copy = known.is_copy or path.is_copy
            is_again = known.is_written_again or path.is_written_again
            kept = cheapest[key]
            if (is_copy, is_again) != (kept.is_copy, kept.is_written_again):
                cheapest[key] = kept._replace(is_copy=is_copy, is_written_again=is_again)
    if len(cheapest) <= MAX_ALTERNATIVES:
        return cheapest
    nearest = sorted(cheapest, key=lambda key: (cheapest[key].cost, key))[:MAX_ALTERNATIVES]
    reason = f"it is computed from more than {MAX_ALTERNATIVES} values at once"
    return {(key[0], False): cheapest[key]._replace(uncertainty=reason) for key in nearest}


def _limit_outcomes(outcomes: Sequence[FlowPaths]) -> Origin:
    """Merge outcomes with the same nearest sources; if too many are left, make them uncertain."""
    if len(outcomes) < 2:
        return tuple(outcomes)
    distinct: dict[frozenset[tuple[int, bool]], FlowPaths] = {}
    for paths in outcomes:
        key = frozenset(select_cheapest_paths(paths))
        distinct[key] = _merge_similar_outcomes(distinct[key], paths) if key in distinct else paths
    if len(distinct) <= _KEPT_APART:
        return tuple(distinct.values())
    return build_uncertain_origin(
        [tuple(distinct.values())], "branches have too many different results"
    )


def _merge_similar_outcomes(first: FlowPaths, second: FlowPaths) -> FlowPaths:
    """Merge two outcomes with the same nearest sources: if one makes a new state, so do both."""
    cheapest = _merge_cheapest_paths((first, second))
    locations = {
        key: path.updated_by
        for paths in (second, first)
        for key, path in paths.items()
        if path.updated_by
    }
    merged = {}
    for key, path in cheapest.items():
        path = path._replace(updated_by=path.updated_by or locations.get(key))
        for paths in (first, second):
            path = _add_resizings(path, paths[key].resizings) if key in paths else path
        merged[key] = path
    return merged


def _add_resizings(path: FlowPath, resizings: frozenset[Resizing]) -> FlowPath:
    """Return a path that may also do this to the size."""
    if resizings <= path.resizings:
        return path
    return path._replace(resizings=_limit_resizings(path.resizings | resizings))
