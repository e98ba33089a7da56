"""Trace origins through a whole model, each body once.

A function, a branch of an If, the body of a Loop or Scan has a *summary*: which
of its outputs come from which of its formal inputs, and for a subgraph from the
outer values it captures. Wherever the body is used, its summary is applied to the
arguments there, so 94 calls of one function cost one trace.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from onnxkvrename.limits import MAX_ALTERNATIVES
from onnxkvrename.verification.constants import SmallConstants
from onnxkvrename.verification.graph_bodies import (
    Body,
    FunctionKey,
    ModelGraph,
    Operation,
    UntraceableError,
    sort_functions_bottom_up,
    sort_operations,
)
from onnxkvrename.verification.node_effects import (
    find_lost_operands,
    find_resizings,
)
from onnxkvrename.verification.operators import (
    NO_CHANGE,
    OperandFlow,
    SizeChange,
    find_carried_operands,
    find_operand_flows,
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
    mix_origins,
)


class BodySummary(NamedTuple):
    """The origins of a body's outputs in terms of its formal arguments.

    Attributes:
        inputs: The names of its formal inputs.
        captured_names: The outer values that it captures.
        outputs: The origin of each output; sources are positions in `inputs`
            followed by `captured_names`.
    """

    inputs: tuple[str, ...]
    captured_names: tuple[str, ...]
    outputs: tuple[Origin, ...]


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
    return _trace_model(graph, sources, names, dependencies_only=False)


def trace_dependencies(
    graph: ModelGraph, sources: Sequence[str], names: Sequence[str]
) -> tuple[int, ...]:
    """Return on which sources some values of the main graph depend at all.

    Takes the same arguments as `trace_origins`, and visits every node after the
    values.

    Returns:
        For each name a set of source numbers as bits.
    """
    origins = _trace_model(graph, sources, names, dependencies_only=True)
    return tuple(origin.dependency_bits for origin in origins)


def _trace_model(
    graph: ModelGraph, sources: Sequence[str], names: Sequence[str], *, dependencies_only: bool
) -> tuple[Origin, ...]:
    with _pause_garbage_collection():
        tracer = _Tracer(graph.functions, dependencies_only=dependencies_only)
        for key in sort_functions_bottom_up(graph):
            tracer.summaries[key] = tracer.summarize_body(tracer.functions[key], ())
        return tracer.trace_body(graph.main, sources, names)


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


class _Tracer:
    """Traces bodies, and keeps the summaries of functions.

    With `dependencies_only`, all operands are followed, and sources start without
    paths, so that origins hold nothing but dependencies.
    """

    def __init__(self, functions: Mapping[FunctionKey, Body], *, dependencies_only: bool) -> None:
        self.functions = functions
        self.dependencies_only = dependencies_only
        self.summaries: dict[FunctionKey, BodySummary] = {}

    def summarize_body(self, body: Body, captured_names: tuple[str, ...]) -> BodySummary:
        """Return the summary of a function, or of a subgraph that captures some outer values."""
        outputs = self.trace_body(body, (*body.inputs, *captured_names), body.outputs)
        return BodySummary(body.inputs, captured_names, outputs)

    def trace_body(
        self, body: Body, sources: Sequence[str], names: Sequence[str]
    ) -> tuple[Origin, ...]:
        """Return the origins of some values of a body."""
        origins = {name: self._build_source(number) for number, name in enumerate(sources)}
        source_origins = list(origins.values())
        constants = SmallConstants(body)
        try:
            for operation in sort_operations(body, names, self._select_operands):
                outputs = self._trace_operation(operation, body, origins, constants)
                origins.update(zip(operation.outputs, outputs, strict=False))
                origins.pop("", None)
        except UntraceableError as error:
            return (build_uncertain_origin(source_origins, str(error)),) * len(names)
        return tuple(origins.get(name, NO_ORIGIN) for name in names)

    def _build_source(self, number: int) -> Origin:
        return Origin((), 1 << number) if self.dependencies_only else build_source_origin(number)

    def _select_operands(self, function: FunctionKey, operand_count: int) -> Iterable[int]:
        if self.dependencies_only or function in self.functions:
            return range(operand_count)
        return find_carried_operands(function[0], function[1], operand_count)

    def _trace_operation(
        self,
        operation: Operation,
        body: Body,
        origins: Mapping[str, Origin],
        constants: SmallConstants,
    ) -> Sequence[Origin]:
        """Return the origins of a node's outputs."""
        location = NodeLocation(operation.op_type, operation.name)
        operands = [origins.get(name, NO_ORIGIN) for name in operation.inputs]
        if operation.function_key in self.functions:
            return self._trace_call(operation, operands, location)
        is_control_flow = operation.domain == "" and operation.op_type in _CONTROL_FLOW_OPS
        subgraphs = body.get_subgraphs(operation.number) if operation.attribute_bytes else {}
        if not is_control_flow and not subgraphs:
            return _trace_operator(operation, operands, location, constants)
        summaries = {
            name: self.summarize_body(subgraph, subgraph.captured_names)
            for name, subgraph in subgraphs.items()
        }
        condition = constants.find_truth("".join(operation.inputs[:1]))
        node = _SubgraphNode(operation, operands, summaries, origins, location, condition)
        if not is_control_flow:
            all_operands = [*operands, *node.list_all_captured_origins()]
            return _trace_operator(operation, all_operands, location, constants)
        outputs = _CONTROL_FLOW_OPS[operation.op_type](node)
        if outputs is None:
            reason = f"the {operation.op_type} does not fit its body"
            return node.build_uncertain_outputs(len(operation.outputs), reason)
        return outputs

    def _trace_call(
        self, operation: Operation, operands: Sequence[Origin], location: NodeLocation
    ) -> Sequence[Origin]:
        """Return the origins of what a local function returns."""
        summary = self.summaries.get(operation.function_key)
        if summary is None:
            reason = f"{operation.op_type} calls itself"
            uncertain = build_uncertain_origin(operands, reason, location)
            return [uncertain] * len(operation.outputs)
        # Arguments at the end may be omitted.
        arguments = [*operands, *[NO_ORIGIN] * (len(summary.inputs) - len(operands))]
        return [apply_summary(output, arguments, location) for output in summary.outputs]


def _trace_operator(
    operation: Operation,
    operands: Sequence[Origin],
    location: NodeLocation,
    constants: SmallConstants,
) -> list[Origin]:
    """Return the origins of a node's outputs by the properties of its operator."""
    domain, op_type, _ = operation.function_key
    lost = find_lost_operands(operation, constants)
    if lost:
        operands = [NO_ORIGIN if i in lost else origin for i, origin in enumerate(operands)]
    dependency_bits = mix_origins(operands).dependency_bits
    if not dependency_bits or is_shape_only(domain, op_type):
        return [NO_ORIGIN] * len(operation.outputs)
    outputs = []
    resizings: dict[tuple[object, ...], frozenset[Resizing]] = {}
    for position in range(len(operation.outputs)):
        flows = find_operand_flows(domain, op_type, position, len(operation.inputs))
        if flows is None:
            reason = f"{op_type} of {domain} has no body in the model"
            outputs.append(build_uncertain_origin(operands, reason, location))
            continue
        carried = []
        for flow in flows:
            if flow.operand >= len(operands):
                continue
            if op_type in ("Mul", "Div") and _is_scaled_by_state(operands, flow.operand):
                flow = flow._replace(is_new=True)
            resizing = SAME_SIZE
            if flow.size_change is not NO_CHANGE:
                change = flow.size_change, flow.axis, flow.fixing_attribute
                if change not in resizings:
                    resizings[change] = find_resizings(flow, operation, constants)
                resizing = resizings[change]
            carried.append(carry_origin(operands[flow.operand], flow, location, resizing))
        outputs.append(Origin(join_origins(carried).outcomes, dependency_bits))
    return outputs


def _is_scaled_by_state(operands: Sequence[Origin], position: int) -> bool:
    """Return whether an operand is multiplied or divided by what is made of a source itself."""
    return any(
        operand.dependency_bits for other, operand in enumerate(operands) if other != position
    )


# Control flow: the operator decides how its bodies are used.


class _SubgraphNode(NamedTuple):
    """A node with subgraphs: its operands, their summaries, and the values around it.

    The condition is that of an If: its value where it is a constant, else `None`.
    """

    operation: Operation
    operands: list[Origin]
    summaries: Mapping[str, BodySummary]
    outer_origins: Mapping[str, Origin]
    location: NodeLocation
    condition: bool | None

    def list_captured_origins(self, summary: BodySummary) -> list[Origin]:
        """Return the origins of what one subgraph captures."""
        return [self.outer_origins.get(name, NO_ORIGIN) for name in summary.captured_names]

    def list_all_captured_origins(self) -> list[Origin]:
        """Return the origins of what all subgraphs capture."""
        return [
            origin
            for summary in self.summaries.values()
            for origin in self.list_captured_origins(summary)
        ]

    def build_uncertain_outputs(self, count: int, reason: str) -> list[Origin]:
        """Return outputs that may come from any operand and any captured value."""
        operands = [*self.operands, *self.list_all_captured_origins()]
        return [build_uncertain_origin(operands, reason, self.location)] * count


def _trace_if(node: _SubgraphNode) -> list[Origin] | None:
    """Return the outputs of either branch; the condition chooses, but carries nothing.

    A branch that a constant condition never takes counts for nothing.
    """
    branches = []
    for summary in node.summaries.values():
        captured = node.list_captured_origins(summary)
        branches.append(
            [apply_summary(output, captured, node.location) for output in summary.outputs]
        )
    if len(branches) != 2 or len(branches[0]) != len(branches[1]):
        return None
    never = {True: "else_branch", False: "then_branch", None: ""}[node.condition]
    taken = [
        outputs for name, outputs in zip(node.summaries, branches, strict=True) if name != never
    ]
    return [combine_alternatives(alternatives) for alternatives in zip(*taken, strict=True)]


def _trace_loop(node: _SubgraphNode) -> list[Origin] | None:
    """Trace a Loop: trip count and condition, then the states; it is taken to run at least once.

    What it collects after its states is as many as the iterations are.
    """
    summary = node.summaries.get("body")
    state_count = len(node.operands) - 2
    if summary is None or state_count < 0 or len(summary.inputs) != state_count + 2:
        return None
    outputs = _trace_iterations(
        node, summary, first_state=2, state_count=state_count, first_output=1
    )
    if outputs is None:
        return None
    collected = build_resizing(SizeChange.RESIZES | SizeChange.MOVES_AXES, None)
    flow = OperandFlow(0, makes_new_state=False)
    return outputs[:state_count] + [
        carry_origin(output, flow, node.location, collected) for output in outputs[state_count:]
    ]


def _trace_scan(node: _SubgraphNode) -> list[Origin] | None:
    """Trace a Scan: the states, then what is scanned. Before opset 9 there was one more input."""
    summary = node.summaries.get("body")
    attribute = node.operation.find_attribute("num_scan_inputs")
    scanned = 0 if attribute is None else attribute.integer
    operand_count = len(node.operands)
    state_count = operand_count - scanned
    if summary is None or not 0 <= state_count <= operand_count == len(summary.inputs):
        return None
    return _trace_iterations(node, summary, first_state=0, state_count=state_count, first_output=0)


def _trace_iterations(
    node: _SubgraphNode,
    summary: BodySummary,
    *,
    first_state: int,
    state_count: int,
    first_output: int,
) -> list[Origin] | None:
    """Return what a body makes when its states are fed back to it, however often.

    The outputs of the first iteration are taken as they are. After that a state may
    come from its initial value or from a later one, by the cheapest path: a decay
    that is repeated leaves its state no further away.
    """
    if len(summary.outputs) < state_count + first_output:
        return None
    before_states = node.operands[:first_state]
    states = node.operands[first_state : first_state + state_count]
    after_states = [
        *node.operands[first_state + state_count :],
        *node.list_captured_origins(summary),
    ]

    def run_iteration() -> list[Origin]:
        arguments = [*before_states, *states, *after_states]
        outputs = summary.outputs[first_output:]
        return [apply_summary(output, arguments, node.location) for output in outputs]

    outputs = run_iteration()
    alternatives = outputs
    for _ in range(MAX_ALTERNATIVES):
        merged = [merge_origins(pair) for pair in zip(states, outputs, strict=False)]
        if merged == states:
            return alternatives
        states = merged
        outputs = run_iteration()
        alternatives = [
            combine_alternatives(pair) for pair in zip(alternatives, outputs, strict=True)
        ]
    reason = f"{node.location.op_type} has states that change places too often"
    return [build_uncertain_origin([origin], reason, node.location) for origin in alternatives]


_CONTROL_FLOW_OPS: Mapping[str, Callable[[_SubgraphNode], list[Origin] | None]] = {
    "If": _trace_if,
    "Loop": _trace_loop,
    "Scan": _trace_scan,
}
