"""Find outputs that belong to an input by how both are used, though nothing is carried on.

Some exports return only the new positions of a cache, which the graph joins to the old ones
for its own attention. And in a decoder of two branches the one with a cache has nothing to
return for the encoder's keys and values, which do not change: it returns a dummy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from onnxkvrename.limits import STEPS_PER_NODE
from onnxkvrename.verification.graph_bodies import (
    Body,
    ModelGraph,
    Operation,
    UntraceableError,
)
from onnxkvrename.verification.operators import OperandFlow, SizeChange, find_operand_flows

_DISTANCE = 8
"""Operators between a value and the weights that tell where it is used."""
_DUMMY_OPS = ("Constant", "ConstantOfShape")
_GATE_OPS = ("Sigmoid", "HardSigmoid")
_SUM_OPS = ("Add", "Sub", "Sum")


def find_joined_outputs(
    graph: ModelGraph, inputs: Sequence[str], outputs: Sequence[str]
) -> dict[str, str]:
    """Return the outputs that the graph itself joins to an input, each with that input.

    The inputs are those that no output carries on, and the outputs those that carry on no input. A
    pair is returned only where each has no other choice. What is joined to the input must not be in
    the output as well.
    """
    try:
        uses = _ValueUses(graph.main)
    except UntraceableError:
        return {}
    outputs_by_root: dict[str, set[str]] = {}
    passed: dict[str, set[str]] = {output: set() for output in outputs}
    for output in outputs:
        for root in uses.find_roots(output, through_joins=True, passed=passed[output]):
            outputs_by_root.setdefault(root, set()).add(output)
    if not outputs_by_root:
        return {}
    joined = {
        name: {
            output
            for partner, whole in uses.find_partners(name)
            for root in uses.find_roots(partner)
            for output in outputs_by_root.get(root, ())
            if whole not in passed[output]
        }
        for name in inputs
    }
    return _select_one_to_one(joined)


def find_gated_inputs(
    graph: ModelGraph, inputs: Collection[str], outputs: Iterable[str]
) -> dict[str, frozenset[str]]:
    """Return from which inputs some outputs are made by gates alone, as a recurrent cell does.

    Each step scales the old state and what is new by gates, and adds them up: `f * c + i * g`; or
    it goes from one to the other as far as a gate says: `n + z * (h - n)`. A gate is a value
    between 0 and 1 that the model computes. Neither a residual block nor the step of an optimizer,
    of a filter or of a scheduler is such a sum.

    Args:
        graph: The graph of a model.
        inputs: Inputs that may be states.
        outputs: Outputs that may be later states of them.

    Returns:
        The inputs of each output that has any; several where values of a sum are inputs.
    """
    if not inputs:
        return {}
    try:
        uses = _ValueUses(graph.main)
    except UntraceableError:
        return {}
    found = {output: uses.find_gated_roots(output).intersection(inputs) for output in outputs}
    return {output: names for output, names in found.items() if names}


def find_branch_states(
    graph: ModelGraph, inputs: Sequence[str], outputs: Sequence[str]
) -> dict[str, str]:
    """Return the outputs that one branch of an If makes where the other reads an input.

    In the branch that reads the input the output is a constant. Both branches use the same
    weights after it: the place is given by which of them a value meets, at which distance
    and as which operand.

    Args:
        graph: The graph of a model.
        inputs: Inputs that no output carries on.
        outputs: Outputs that carry on no input.

    Returns:
        Input by output; only where each has no other choice.
    """
    body = graph.main
    wanted, sources, weights = set(outputs), set(inputs), frozenset(body.constants)
    matches: dict[str, set[str]] = {name: set() for name in inputs}
    for operation in body.list_operations():
        if operation.op_type != "If" or operation.domain or not wanted & {*operation.outputs}:
            continue
        branches = [*body.get_subgraphs(operation.number).values()]
        if len(branches) != 2:
            continue
        for with_cache, without_cache in (branches, branches[::-1]):
            made = dict(_list_made_values(operation, with_cache, without_cache, wanted))
            read = sources.intersection(with_cache.captured_names)
            if read and made:
                for name, output in _match_places(with_cache, read, without_cache, made, weights):
                    matches[name].add(output)
    return _select_one_to_one(matches)


def _list_made_values(
    operation: Operation, with_cache: Body, without_cache: Body, wanted: set[str]
) -> Iterator[tuple[str, str]]:
    """Yield outputs that are constants in one branch, with their values in the other one."""
    computed = {
        name
        for inner in with_cache.list_operations()
        if inner.domain or inner.op_type not in _DUMMY_OPS
        for name in inner.outputs
    }
    captured = frozenset(with_cache.captured_names)
    ends = zip(with_cache.outputs, without_cache.outputs, strict=False)
    for output, (dummy, value) in zip(operation.outputs, ends, strict=False):
        if output in wanted and dummy not in computed and dummy not in captured:
            yield output, value


def _match_places(
    with_cache: Body,
    inputs: Iterable[str],
    without_cache: Body,
    made: Mapping[str, str],
    weights: frozenset[str],
) -> Iterator[tuple[str, str]]:
    """Yield inputs with the outputs whose values the other branch reads in the same place."""
    try:
        reading, making = _ValueUses(with_cache), _ValueUses(without_cache)
    except UntraceableError:
        return
    shared = weights.intersection(with_cache.captured_names) & {*without_cache.captured_names}
    outputs_by_place: dict[frozenset[_Place], list[str]] = {}
    for output, value in made.items():
        place = making.find_places(making.find_roots(value), shared)
        outputs_by_place.setdefault(place, []).append(output)
    for name in inputs:
        place = reading.find_places([name], shared)
        for output in outputs_by_place.get(place, ()) if place else ():
            yield name, output


def _select_one_to_one(outputs_by_input: Mapping[str, set[str]]) -> dict[str, str]:
    """Return the input of each output, where neither has a second choice."""
    counts: dict[str, int] = {}
    for outputs in outputs_by_input.values():
        for output in outputs:
            counts[output] = counts.get(output, 0) + 1
    return {
        output: name
        for name, outputs in outputs_by_input.items()
        if len(outputs) == 1
        for output in outputs
        if counts[output] == 1
    }


class _Place(NamedTuple):
    """A meeting of a value with a weight: how far away, by which operator, as which operand."""

    weight: str
    op_type: str
    position: int
    own_position: int
    distance: int


class _ValueUses:
    """The producers and consumers of the values of one body.

    Raises:
        UntraceableError: Two nodes make the same value.
    """

    def __init__(self, body: Body) -> None:
        self._operations = tuple(body.list_operations())
        self._weights = body.constants
        self._producers: dict[str, tuple[Operation, int]] = {}
        self._consumers: dict[str, list[tuple[Operation, int]]] = {}
        for operation in self._operations:
            for position, name in enumerate(operation.outputs):
                if name and self._producers.setdefault(name, (operation, position))[0].number != (
                    operation.number
                ):
                    raise UntraceableError(f"two nodes make {name}")
            for position, name in enumerate(operation.inputs):
                if name:
                    self._consumers.setdefault(name, []).append((operation, position))
        self._steps_left = STEPS_PER_NODE * (len(self._operations) + 64)

    def _take_step(self) -> bool:
        """Count a step; false if too many were taken."""
        self._steps_left -= 1
        return self._steps_left > 0

    def find_roots(
        self,
        name: str,
        *,
        through_joins: bool = False,
        through_cuts: bool = False,
        passed: set[str] | None = None,
    ) -> tuple[str, ...]:
        """Return the values that one is moved from, all of each, and all that are joined to it.

        What a Concat joins counts, too, if `through_joins`, and a part if `through_cuts`. All
        values on the way are added to `passed`.
        """
        roots: dict[str, None] = {}
        pending = [name]
        seen = {name}
        while pending:
            value = pending.pop()
            if not self._take_step():
                return ()
            operation, position = self._producers.get(value, (None, 0))
            flows = () if operation is None else _list_flows(operation, position)
            is_moved = len(flows) == 1 and _is_whole_move(flows[0], with_cuts=through_cuts)
            is_joined = through_joins and operation is not None and operation.op_type == "Concat"
            if operation is None or not (is_moved or (is_joined and flows)):
                roots[value] = None
                continue
            sources = [_get_operand(operation, flow) for flow in flows]
            pending += [source for source in sources if source and source not in seen]
            seen.update(sources)
        if passed is not None:
            passed |= seen
        return tuple(roots)

    def find_gated_roots(self, name: str) -> frozenset[str]:
        """Return what a value is a sum of, each scaled by gates, and joined or moved otherwise.

        Nothing if that takes too many steps: what is found until then may not be all.
        """
        found: set[str] = set()
        pending = [name]
        seen = {name}
        while pending:
            terms: list[str] = []
            for root in self.find_roots(pending.pop(), through_joins=True):
                terms += self._list_gated_terms(root)
            for term in terms:
                roots = self.find_roots(term, through_cuts=True)
                found.update(roots)
                pending += [root for root in roots if root not in seen]
                seen.update(roots)
        return frozenset(found) if self._steps_left > 0 else frozenset()

    def _list_gated_terms(self, name: str) -> Sequence[str]:
        """Return what is scaled by gates and added up to a value; nothing if it is not made so."""
        operands = self._get_operands(name, *_SUM_OPS)
        scaled = [self._find_scaled_value(operand) for operand in operands]
        if operands and all(scaled):
            return scaled
        # n + z * (h - n), and n - z * (n - h): else it goes beyond both ends.
        kept_end = 1 if self._get_operands(name, "Add") else 0
        for term, other in zip(scaled, operands[::-1], strict=True):
            ends = self._get_operands(term, "Sub")
            if ends and self.find_roots(other) == self.find_roots(ends[kept_end]):
                return ends
        return ()

    def _find_scaled_value(self, name: str) -> str:
        """Return what a gate is multiplied with to make a value; empty if none is."""
        for root in self.find_roots(name):
            operands = self._get_operands(root, "Mul")
            for gate, value in zip(operands, operands[::-1], strict=True):
                if self._is_gate(gate):
                    return value
        return ""

    def _is_gate(self, name: str) -> bool:
        """Return whether a value, or what it leaves of a constant, is computed as a gate."""
        roots = self.find_roots(name, through_cuts=True)
        for root in roots:
            operands = self._get_operands(root, "Sub")
            if operands and self._is_constant(operands[0]):
                roots = self.find_roots(operands[1], through_cuts=True)
        makers = [self._producers.get(root, (None, 0))[0] for root in roots]
        return bool(makers) and all(
            maker is not None and maker.op_type in _GATE_OPS and not maker.domain
            for maker in makers
        )

    def _is_constant(self, name: str) -> bool:
        operation, _ = self._producers.get(name, (None, 0))
        return name in self._weights if operation is None else operation.op_type == "Constant"

    def _get_operands(self, name: str, *op_types: str) -> Sequence[str]:
        """Return both operands of the operator that makes a value; none if it is not of a type."""
        operation, _ = self._producers.get(name, (None, 0))
        if operation is None or operation.domain or operation.op_type not in op_types:
            return ()
        return operation.inputs if len(operation.inputs) == 2 else ()

    def find_partners(self, name: str) -> Iterator[tuple[str, str]]:
        """Yield what is joined to a value, or written into it, wherever it was moved to before.

        Each comes with what both are joined to.
        """
        pending, seen = [name], {name}
        while pending:
            value = pending.pop()
            for operation, operand in self._consumers.get(value, ()):
                if not self._take_step():
                    return
                for position, output in enumerate(operation.outputs):
                    flows = _list_flows(operation, position)
                    own = [flow for flow in flows if _is_operand(flow, operand, operation)]
                    if not own or own[0].overwrites or own[0].is_computed:
                        continue
                    if len(flows) > 1:
                        yield from (
                            (_get_operand(operation, f), output) for f in flows if f not in own
                        )
                    elif not own[0].makes_new_state and output not in seen:
                        seen.add(output)
                        pending.append(output)

    def find_places(self, names: Iterable[str], weights: frozenset[str]) -> frozenset[_Place]:
        """Return where values meet weights; empty if it takes too many steps to tell.

        Operators that move a value, which exporters fuse and reorder, do not count as distance.
        """
        places: set[_Place] = set()
        distances = dict.fromkeys(names, 0)
        pending = deque(distances)
        while pending:
            value = pending.popleft()
            distance = distances[value]
            for operation, operand in self._consumers.get(value, ()):
                if not self._take_step():
                    return frozenset()
                is_moved = _is_move_only(operation, operand)
                next_distance = distance if is_moved else distance + 1
                if next_distance > _DISTANCE or operation.op_type in ("Shape", "Size"):
                    continue
                for position, other in enumerate(() if is_moved else operation.inputs):
                    if position != operand:
                        places.update(
                            _Place(root, operation.op_type, position, operand, next_distance)
                            for root in self.find_roots(other)
                            if root in weights
                        )
                for output in operation.outputs:
                    if output and next_distance < distances.get(output, _DISTANCE + 1):
                        distances[output] = next_distance
                        (pending.appendleft if is_moved else pending.append)(output)
        return frozenset(places)


def _list_flows(operation: Operation, output: int) -> tuple[OperandFlow, ...]:
    """Return which operands an operator carries into an output; none if that is not known."""
    count = len(operation.inputs)
    return find_operand_flows(operation.domain, operation.op_type, output, count) or ()


def _is_whole_move(flow: OperandFlow, *, with_cuts: bool = False) -> bool:
    """Return whether an operator only moves all of an operand, or also a part `with_cuts`."""
    cuts = SizeChange.CUTS | SizeChange.KEEPS_FIRST | SizeChange.DROPS_AXIS
    resized = flow.size_change & ~SizeChange.MOVES_AXES & ~(cuts if with_cuts else 0)
    return not (flow.makes_new_state or flow.overwrites or flow.is_computed or resized)


def _is_move_only(operation: Operation, operand: int) -> bool:
    flows = _list_flows(operation, 0)
    return len(flows) == 1 and flows[0].operand == operand and _is_whole_move(flows[0])


def _is_operand(flow: OperandFlow, operand: int, operation: Operation) -> bool:
    return flow.operand % max(len(operation.inputs), 1) == operand


def _get_operand(operation: Operation, flow: OperandFlow) -> str:
    """Return the name of the operand of a flow; empty if the node does not have it."""
    count = len(operation.inputs)
    return operation.inputs[flow.operand] if -count <= flow.operand < count else ""
