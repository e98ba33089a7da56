"""Walk through a whole model, each body once, and compute what its values are made of.

A function, a branch of an If, the body of a Loop or Scan has a *summary*: which
of its outputs come from which of its formal inputs, and for a subgraph from the
outer values it captures. Wherever the body is used, its summary is applied to the
arguments there, so 94 calls of one function cost one walk.

What is computed of a value is said by a transfer: its origin, or what it depends on.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, TypeVar

from onnxkvrename.limits import MAX_ALTERNATIVES, MAX_DEPTH, STEPS_PER_NODE
from onnxkvrename.verification.constants import SmallConstants
from onnxkvrename.verification.graph_bodies import (
    Body,
    FunctionKey,
    ModelGraph,
    Operation,
    UntraceableError,
    sort_operations,
)
from onnxkvrename.verification.node_effects import (
    find_flows,
    find_lost_operands,
    find_resizings,
    join_resizings,
)
from onnxkvrename.verification.operators import (
    NO_CHANGE,
    OperandFlow,
    SizeChange,
    find_carried_operands,
    is_followed,
    is_shape_only,
)
from onnxkvrename.verification.provenance import (
    NO_ORIGIN,
    SAME_SIZE,
    NodeLocation,
    Origin,
    Resizing,
    apply_summary,
    build_resizing,
    build_source_origin,
    build_uncertain_origin,
    carry_origin,
    combine_alternatives,
    join_origins,
    merge_origins,
)

_T = TypeVar("_T")


def trace_origins(
    graph: ModelGraph, sources: Sequence[str], names: Sequence[str]
) -> tuple[Origin, ...]:
    """Return from which sources some values of the main graph are carried.

    Only operands that may be carried on are followed. They are a small part of a
    graph and lead to all paths, but not to everything a value depends on: that is
    what `trace_dependencies` returns.

    Args:
        graph: The graph of a model.
        sources: The names of graph inputs; a source's number is its position here.
        names: The values to trace.

    Returns:
        An origin for each name. What cannot be followed is uncertain, with the
        reason; nothing is raised for nodes that can be read.
    """
    return trace(graph, OriginTransfer(), sources, names)


def trace_dependencies(
    graph: ModelGraph, sources: Sequence[str], names: Sequence[str]
) -> tuple[int, ...]:
    """Return on which sources some values of the main graph depend at all.

    Takes the same arguments as `trace_origins`, and visits every node after the
    values.

    Returns:
        For each name a set of source numbers as bits.
    """
    return trace(graph, DependencyTransfer(), sources, names)


def trace(
    graph: ModelGraph, transfer: Transfer[_T], sources: Sequence[str], names: Sequence[str]
) -> tuple[_T, ...]:
    """Return what a transfer computes of some values of the main graph.

    Takes the same arguments as `trace_origins`, beside the transfer.
    """
    return _Walker(graph, transfer).walk(sources, names)


@contextmanager
def _pause_garbage_collection() -> Iterator[None]:
    """Pause the search for reference cycles: a trace makes millions of tuples and no cycle."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Transfer(Generic[_T]):
    """What a walk computes of each value, and what operators make of it.

    Where a transfer does not say otherwise, all operands are followed, and what may hold several
    values is merged of them.
    """

    nothing: _T
    """That of a constant, and of every input that is not a source."""
    has_summaries = True
    """Whether a body is walked once, as a summary that is applied wherever it is used; else it is
    walked with the arguments of each use."""

    def build_source(self, number: int) -> _T:
        """Return that of a source itself."""
        raise NotImplementedError

    def select_operands(self, function: FunctionKey, operand_count: int) -> Container[int]:
        """Return the positions of the operands that an operator has to be followed to."""
        return range(operand_count)

    def apply_operator(
        self, operation: Operation, operands: Sequence[_T], constants: SmallConstants
    ) -> Sequence[_T]:
        """Return that of an operator's outputs; what it captures follows the operands."""
        raise NotImplementedError

    def apply_summary(self, summary: _T, arguments: Sequence[_T], call: NodeLocation) -> _T:
        """Return that of a body's output, whose sources are positions in the arguments."""
        raise NotImplementedError

    def merge(self, values: Sequence[_T], /) -> _T:
        """Return that of a value that is one of these, whatever the branch."""
        raise NotImplementedError

    def choose(self, values: Sequence[_T], /) -> _T:
        """Return that of a value that is one of these, each by another branch."""
        return self.merge(values)

    def doubt(self, values: Sequence[_T], reason: str, location: NodeLocation | None, /) -> _T:
        """Return that of a value that may hold something of each of these, or nothing."""
        return self.merge(values)

    def collect(self, value: _T, location: NodeLocation) -> _T:
        """Return that of what a Loop collects of a value, as often as it runs."""
        return value


class DependencyTransfer(Transfer[int]):
    """The sources that a value depends on at all, as bits."""

    nothing = 0

    def build_source(self, number: int) -> int:
        """Return the bit of a source."""
        return 1 << number

    def apply_operator(
        self, operation: Operation, operands: Sequence[int], constants: SmallConstants
    ) -> Sequence[int]:
        """Return the bits of all operands that are not lost, unless only their shapes count."""
        lost = find_lost_operands(operation, constants)
        if lost:
            operands = [0 if i in lost else bits for i, bits in enumerate(operands)]
        is_shape = is_shape_only(operation.domain, operation.op_type)
        return [0 if is_shape else self.merge(operands)] * len(operation.outputs)

    def apply_summary(self, summary: int, arguments: Sequence[int], call: NodeLocation) -> int:
        """Return the bits of the arguments that the body's output depends on."""
        return self.merge([arguments[at] for at in list_positions(summary) if at < len(arguments)])

    def merge(self, values: Sequence[int]) -> int:
        """Return all bits."""
        merged = 0
        for bits in values:
            merged |= bits
        return merged


def list_positions(bits: int) -> Iterator[int]:
    """Yield the positions of the bits that are set, of many that are not quickly."""
    text = f"{bits:b}"[::-1]
    position = text.find("1")
    while position >= 0:
        yield position
        position = text.find("1", position + 1)


_NOT_JOINED: Mapping[int, frozenset[Resizing]] = MappingProxyType({})


class OriginTransfer(Transfer[Origin]):
    """The origin of a value; only operands that may be carried on are followed.

    Attributes:
        follows_all: Whether all that was met is followed; else an input may be carried on unseen.
    """

    nothing = NO_ORIGIN
    build_source = staticmethod(build_source_origin)
    apply_summary = staticmethod(apply_summary)
    merge = staticmethod(merge_origins)
    choose = staticmethod(combine_alternatives)

    def __init__(self) -> None:
        self.follows_all = True

    def select_operands(self, function: FunctionKey, operand_count: int) -> Container[int]:
        """Return the operands that may be carried on."""
        return find_carried_operands(function[0], function[1], operand_count)

    def apply_operator(
        self, operation: Operation, operands: Sequence[Origin], constants: SmallConstants
    ) -> Sequence[Origin]:
        """Return the origins of a node's outputs by the properties of its operator."""
        if not is_followed(operation.domain, operation.op_type):
            self.follows_all = False
        lost = find_lost_operands(operation, constants)
        if lost:
            operands = [NO_ORIGIN if i in lost else origin for i, origin in enumerate(operands)]
        if not any(operands):
            return [NO_ORIGIN] * len(operation.outputs)
        domain, op_type, _ = operation.function_key
        is_scaled_by_state = op_type in ("Mul", "Div") and sum(map(bool, operands)) > 1
        location = NodeLocation(op_type, operation.name)
        outputs: list[Origin] = []
        resizings: dict[tuple[object, ...], frozenset[Resizing]] = {}
        for position in range(len(operation.outputs)):
            flows = find_flows(operation, position)
            if flows is None:
                reason = f"{op_type} of {domain} has no body in the model"
                outputs.append(build_uncertain_origin(operands, reason, location))
                continue
            carried = []
            for flow in flows:
                if flow.operand >= len(operands) or not operands[flow.operand]:
                    continue
                operand = operands[flow.operand]
                if is_scaled_by_state:
                    flow = flow._replace(is_new=True)
                resizing, joined = SAME_SIZE, _NOT_JOINED
                if flow.size_change is not NO_CHANGE or flow.is_written:
                    change = flow.size_change, flow.axis, flow.fixing_attribute
                    if change not in resizings:
                        resizings[change] = find_resizings(flow, operation, constants)
                    resizing = resizings[change]
                    if op_type == "Concat":
                        joined = join_resizings(
                            operation, operands, flow.operand, resizing, constants
                        )
                carried.append(carry_origin(operand, flow, location, resizing, joined))
            outputs.append(join_origins(carried))
        return outputs

    def doubt(
        self, values: Sequence[Origin], reason: str, location: NodeLocation | None, /
    ) -> Origin:
        """Return the origin of what may hold something of each of these."""
        self.follows_all = False
        return build_uncertain_origin(values, reason, location)

    def collect(self, value: Origin, location: NodeLocation) -> Origin:
        """Return the origin of what is as many as the iterations are."""
        resizing = build_resizing(SizeChange.RESIZES | SizeChange.MOVES_AXES, None)
        return carry_origin(value, OperandFlow(0, makes_new_state=False), location, resizing)


class _Walker(Generic[_T]):
    """Walks through bodies by a transfer, and keeps what it computes of them."""

    def __init__(self, graph: ModelGraph, transfer: Transfer[_T]) -> None:
        self.transfer = transfer
        self._graph = graph
        self._known: dict[Body, dict[object, Sequence[_T]]] = {}
        self._entered: set[Body] = set()

    def walk(self, sources: Sequence[str], names: Sequence[str]) -> tuple[_T, ...]:
        """Return what is computed of some values of the main graph."""
        with _pause_garbage_collection():
            return self._walk_body(self._graph.main, self._build_sources(sources), names)

    def _build_sources(self, names: Iterable[str]) -> dict[str, _T]:
        return {name: self.transfer.build_source(at) for at, name in enumerate(names)}

    def apply_body(
        self,
        body: Body,
        captured_names: tuple[str, ...],
        arguments: Sequence[_T],
        call: NodeLocation,
    ) -> Sequence[_T]:
        """Return what a function, or a subgraph that captures some values, makes of arguments.

        The body is walked once for all of its uses, or once for equal arguments.
        """
        names = (*body.inputs, *captured_names)
        has_summaries = self.transfer.has_summaries
        known = self._known.setdefault(body, {})
        key = None if has_summaries else tuple(arguments)
        if key not in known:
            is_entered = body in self._entered
            if is_entered or len(self._entered) >= MAX_DEPTH or len(known) >= STEPS_PER_NODE:
                reason = f"{call.op_type} {'calls itself' if is_entered else 'is used too often'}"
                return [self.transfer.doubt(arguments, reason, call)] * len(body.outputs)
            arguments_by_name = dict(zip(names, arguments, strict=False))
            values = self._build_sources(names) if has_summaries else arguments_by_name
            self._entered.add(body)
            known[key] = self._walk_body(body, values, body.outputs)
            self._entered.remove(body)
        if not has_summaries:
            return known[key]
        return [self.transfer.apply_summary(each, arguments, call) for each in known[key]]

    def _walk_body(self, body: Body, values: dict[str, _T], names: Sequence[str]) -> tuple[_T, ...]:
        """Return what is computed of some values of a body; those of its sources are known."""
        source_values = list(values.values())
        values.pop("", None)  # an omitted operand
        constants = SmallConstants(body)
        try:
            for operation in sort_operations(body, names, self._select_operands):
                outputs = self._visit(operation, body, values, constants)
                for name, value in zip(operation.outputs, outputs, strict=False):
                    if name:
                        values[name] = value
        except UntraceableError as error:
            return (self.transfer.doubt(source_values, str(error), None),) * len(names)
        return tuple(values.get(name, self.transfer.nothing) for name in names)

    def _select_operands(self, function: FunctionKey, operand_count: int) -> Container[int]:
        if function in self._graph.functions:
            return range(operand_count)
        return self.transfer.select_operands(function, operand_count)

    def _visit(
        self,
        operation: Operation,
        body: Body,
        values: Mapping[str, _T],
        constants: SmallConstants,
    ) -> Sequence[_T]:
        """Return what is computed of a node's outputs."""
        nothing = self.transfer.nothing
        operands = [values.get(name, nothing) for name in operation.inputs]
        if operation.function_key in self._graph.functions:
            return self._call(operation, operands)
        domain, op_type, _ = operation.function_key
        control_flow = None if domain else _CONTROL_FLOW_OPS.get(op_type)
        subgraphs = body.get_subgraphs(operation.number) if operation.attribute_bytes else {}
        if control_flow is None and not subgraphs:
            return self.transfer.apply_operator(operation, operands, constants)
        captured = {
            name: [values.get(each, nothing) for each in subgraph.captured_names]
            for name, subgraph in subgraphs.items()
        }
        everything = [*operands, *(value for each in captured.values() for value in each)]
        if control_flow is None:
            return self.transfer.apply_operator(operation, everything, constants)
        condition = constants.find_truth("".join(operation.inputs[:1]))
        node = _SubgraphNode(operation, operands, subgraphs, captured, condition, self)
        outputs = control_flow(node)
        if outputs is None:
            reason = f"the {operation.op_type} does not fit its body"
            doubtful = self.transfer.doubt(everything, reason, node.location)
            return [doubtful] * len(operation.outputs)
        return outputs

    def _call(self, operation: Operation, operands: Sequence[_T]) -> Sequence[_T]:
        """Return what is computed of what a local function returns."""
        function = self._graph.functions[operation.function_key]
        # Arguments at the end may be omitted.
        omitted = [self.transfer.nothing] * (len(function.inputs) - len(operands))
        location = NodeLocation(operation.op_type, operation.name)
        return self.apply_body(function, (), [*operands, *omitted], location)


# Control flow: the operator decides how its bodies are used.


class _SubgraphNode(NamedTuple):
    """A node with subgraphs: its operands, these, what they capture, and who walks through them.

    The condition is that of an If: its value where it is a constant, else `None`.
    """

    operation: Operation
    operands: list[Any]
    subgraphs: Mapping[str, Body]
    captured: Mapping[str, list[Any]]
    condition: bool | None
    walker: _Walker[Any]

    @property
    def transfer(self) -> Transfer[Any]:
        """The transfer of the walk."""
        return self.walker.transfer

    @property
    def location(self) -> NodeLocation:
        """Where the node is."""
        return NodeLocation(self.operation.op_type, self.operation.name)

    def apply(self, name: str, arguments: Sequence[Any], first_output: int = 0) -> list[Any]:
        """Return what a subgraph makes of arguments and what it captures."""
        body, values = self.subgraphs[name], [*arguments, *self.captured[name]]
        outputs = self.walker.apply_body(body, body.captured_names, values, self.location)
        return [*outputs[first_output:]]


def _trace_if(node: _SubgraphNode) -> list[Any] | None:
    """Return the outputs of either branch; the condition chooses, but carries nothing.

    A branch that a constant condition never takes counts for nothing.
    """
    if any(branch.inputs for branch in node.subgraphs.values()):
        return None  # a branch has none
    branches = {name: node.apply(name, ()) for name in node.subgraphs}
    if len(branches) != 2 or len({*map(len, branches.values())}) != 1:
        return None
    never = {True: "else_branch", False: "then_branch", None: ""}[node.condition]
    taken = [outputs for name, outputs in branches.items() if name != never]
    return [node.transfer.choose(alternatives) for alternatives in zip(*taken, strict=True)]


def _trace_loop(node: _SubgraphNode) -> list[Any] | None:
    """Trace a Loop: trip count and condition, then the states; it is taken to run at least once.

    What it collects after its states is as many as the iterations are.
    """
    body = node.subgraphs.get("body")
    state_count = len(node.operands) - 2
    if body is None or state_count < 0 or len(body.inputs) != state_count + 2:
        return None
    outputs = _trace_iterations(node, first_state=2, state_count=state_count, first_output=1)
    if outputs is None:
        return None
    collected = [node.transfer.collect(each, node.location) for each in outputs[state_count:]]
    return [*outputs[:state_count], *collected]


def _trace_scan(node: _SubgraphNode) -> list[Any] | None:
    """Trace a Scan: the states, then what is scanned. Before opset 9 there was one more input."""
    body = node.subgraphs.get("body")
    attribute = node.operation.find_attribute("num_scan_inputs")
    scanned = 0 if attribute is None else attribute.integer
    operand_count = len(node.operands)
    state_count = operand_count - scanned
    if body is None or not 0 <= state_count <= operand_count == len(body.inputs):
        return None
    return _trace_iterations(node, first_state=0, state_count=state_count, first_output=0)


def _trace_iterations(
    node: _SubgraphNode, *, first_state: int, state_count: int, first_output: int
) -> list[Any] | None:
    """Return what a body makes when its states are fed back to it, however often.

    The outputs of the first iteration are taken as they are. After that a state may
    come from its initial value or from a later one, by the cheapest path: a decay
    that is repeated leaves its state no further away.
    """
    if len(node.subgraphs["body"].outputs) < state_count + first_output:
        return None
    before, after = node.operands[:first_state], node.operands[first_state + state_count :]
    states = node.operands[first_state : first_state + state_count]
    alternatives = outputs = node.apply("body", [*before, *states, *after], first_output)
    for _ in range(MAX_ALTERNATIVES):
        merged = [node.transfer.merge(pair) for pair in zip(states, outputs, strict=False)]
        if merged == states:
            return alternatives
        states = merged
        outputs = node.apply("body", [*before, *states, *after], first_output)
        alternatives = [
            node.transfer.choose(pair) for pair in zip(alternatives, outputs, strict=True)
        ]
    reason = f"{node.operation.op_type} has states that change places too often"
    return [node.transfer.doubt([value], reason, node.location) for value in alternatives]


_CONTROL_FLOW_OPS: Mapping[str, Callable[[_SubgraphNode], list[Any] | None]] = {
    "If": _trace_if,
    "Loop": _trace_loop,
    "Scan": _trace_scan,
}
