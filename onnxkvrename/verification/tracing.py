"""Origins through a whole model, each body followed once.

A function, a branch of an If, the body of a Loop or Scan has a *summary*: which
of its outputs come from which of its formal inputs, and for a subgraph from the
outer values it sees. Wherever the body is used its summary is applied to what it
is given there, so 94 calls of one function cost one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from onnx import ModelProto, NodeProto

from onnxkvrename.verification.graph_bodies import (
    Body,
    FunctionKey,
    Operation,
    UntraceableError,
    build_function_bodies,
    build_graph_body,
    list_captured_names,
    sort_functions_bottom_up,
    sort_operations,
)
from onnxkvrename.verification.operators import (
    find_carried_operands,
    find_operand_flows,
    is_shape_only,
)
from onnxkvrename.verification.provenance import (
    NO_ORIGIN,
    NodeLocation,
    Origin,
    apply_summary,
    build_source_origin,
    build_uncertain_origin,
    carry_origin,
    combine_alternatives,
    join_origins,
    merge_origins,
    mix_origins,
)

_MAX_ROUNDS = 16
"""Times that the states of a loop are followed round before they are given up."""


class BodySummary(NamedTuple):
    """What a body makes of its formals: first its inputs, then the outer values it sees."""

    inputs: tuple[str, ...]
    captured_names: tuple[str, ...]
    outputs: tuple[Origin, ...]


def trace_origins(
    model: ModelProto, sources: Sequence[str], names: Sequence[str], *, deep: bool = False
) -> tuple[Origin, ...]:
    """The origins of some values of the main graph; its sources are graph inputs by name.

    Unless ``deep``, only operands are followed that may be carried on: a small
    part of a graph, which tells all ways, but not what else a value depends on.
    A deep walk tells that too, and does without onnx-graphsurgeon. Never raises
    for a model that could be parsed: what cannot be followed is in doubt, with
    the reason.
    """
    tracer = _Tracer(build_function_bodies(model), deep=deep)
    main = build_graph_body(model.graph)
    for key in sort_functions_bottom_up(main, tracer.functions):
        tracer.summaries[key] = tracer.summarize_body(tracer.functions[key], ())
    return tracer.trace_body(main, sources, names)


class _Tracer:
    """Follows bodies; those of functions are known once they have been followed."""

    def __init__(self, functions: Mapping[FunctionKey, Body], *, deep: bool) -> None:
        self.functions = functions
        self.deep = deep
        self.summaries: dict[FunctionKey, BodySummary] = {}

    def summarize_body(self, body: Body, captured: tuple[str, ...]) -> BodySummary:
        """The summary of a function, or of a subgraph that sees some outer values."""
        outputs = self.trace_body(body, (*body.inputs, *captured), body.outputs)
        return BodySummary(body.inputs, captured, outputs)

    def select_operands(self, function: FunctionKey, operands: int) -> Iterable[int]:
        """The operands that a node is followed back to."""
        if self.deep or function in self.functions:
            return range(operands)
        return find_carried_operands(function[0], function[1], operands)

    def trace_body(
        self, body: Body, sources: Sequence[str], names: Sequence[str]
    ) -> tuple[Origin, ...]:
        """The origins of some values of a body."""
        values = {name: build_source_origin(number) for number, name in enumerate(sources)}
        given = list(values.values())
        try:
            for operation in sort_operations(
                body, names, self.select_operands, imported=not self.deep
            ):
                made = self.trace_operation(operation, body, values)
                values.update(zip(operation.outputs, made, strict=False))
                values.pop("", None)
        except UntraceableError as error:
            return tuple(build_uncertain_origin(given, str(error)) for _ in names)
        return tuple(values.get(name, NO_ORIGIN) for name in names)

    def trace_operation(
        self, operation: Operation, body: Body, values: Mapping[str, Origin]
    ) -> Sequence[Origin]:
        """The origins of what a node makes."""
        where = NodeLocation(operation.op_type, operation.name)
        operands = [values.get(name, NO_ORIGIN) for name in operation.inputs]
        if operation.function_key in self.functions:
            return self._trace_call(operation, operands, where)
        branches = {
            name: self.summarize_body(inner, list_captured_names(inner))
            for name, inner in body.subgraphs.get(operation.number, {}).items()
        }
        use = _SubgraphNode(body.nodes[operation.number], operands, branches, values, where)
        if operation.domain == "" and operation.op_type in _CONTROL_FLOW_OPS:
            made = _CONTROL_FLOW_OPS[operation.op_type](use)
            if made is not None:
                return made
            return use.build_uncertain_outputs(
                operation, f"the {operation.op_type} does not fit its body"
            )
        if branches:
            operands = [*operands, *use.list_all_captured_origins()]
        return _trace_operator(operation, operands, where)

    def _trace_call(
        self, operation: Operation, operands: Sequence[Origin], where: NodeLocation
    ) -> Sequence[Origin]:
        summary = self.summaries.get(operation.function_key)
        if summary is None:
            why = f"{operation.op_type} calls itself"
            return [build_uncertain_origin(operands, why, where)] * len(operation.outputs)
        given = _pad_arguments(operands, len(summary.inputs))
        return [apply_summary(made, given, where) for made in summary.outputs]


def _pad_arguments(operands: Sequence[Origin], count: int) -> list[Origin]:
    """Arguments for every formal input; those at the end may be left out."""
    return [*operands, *[NO_ORIGIN] * (count - len(operands))]


def _trace_operator(
    operation: Operation, operands: Sequence[Origin], where: NodeLocation
) -> list[Origin]:
    """What a node without a body makes, by what is known of its operator."""
    domain, op_type, _ = operation.function_key
    if is_shape_only(domain, op_type):
        return [NO_ORIGIN] * len(operation.outputs)
    touched = mix_origins(operands).dependency_bits
    if not touched:
        return [NO_ORIGIN] * len(operation.outputs)
    made = []
    for output in range(len(operation.outputs)):
        steps = find_operand_flows(domain, op_type, output, len(operation.inputs))
        if steps is None:
            why = f"{op_type} of {domain} has no body in the model"
            made.append(build_uncertain_origin(operands, why, where))
            continue
        parts = [
            carry_origin(operands[step.operand], step, where)
            for step in steps
            if step.operand < len(operands)
        ]
        made.append(Origin(join_origins(parts).outcomes, touched))
    return made


# Control flow: its operators say how their bodies are used.


class _SubgraphNode(NamedTuple):
    """A node with bodies: what it is given, their summaries, and the values around it."""

    node: NodeProto
    operands: list[Origin]
    summaries: Mapping[str, BodySummary]
    outer_origins: Mapping[str, Origin]
    location: NodeLocation

    def list_captured_origins(self, branch: BodySummary) -> list[Origin]:
        """What a body sees of the values around it."""
        return [self.outer_origins.get(name, NO_ORIGIN) for name in branch.captured_names]

    def list_all_captured_origins(self) -> list[Origin]:
        """What all bodies see."""
        return [
            value
            for branch in self.summaries.values()
            for value in self.list_captured_origins(branch)
        ]

    def build_uncertain_outputs(self, operation: Operation, why: str) -> list[Origin]:
        """Everything the node makes may be anything that it is given."""
        made = build_uncertain_origin(
            [*self.operands, *self.list_all_captured_origins()], why, self.location
        )
        return [made] * len(operation.outputs)


def _trace_if(use: _SubgraphNode) -> list[Origin] | None:
    """Either branch; the condition chooses, but hands nothing on."""
    made = [
        [
            apply_summary(output, use.list_captured_origins(branch), use.location)
            for output in branch.outputs
        ]
        for branch in use.summaries.values()
    ]
    if len(made) != 2 or len(made[0]) != len(made[1]):
        return None
    return [combine_alternatives(pair) for pair in zip(*made, strict=True)]


def _trace_loop(use: _SubgraphNode) -> list[Origin] | None:
    """Trip count and condition, then the states; the body is taken to run once at least."""
    body = use.summaries.get("body")
    states = len(use.operands) - 2
    if body is None or states < 0 or len(body.inputs) != states + 2:
        return None
    return _trace_iterations(
        use, body, states, lead=use.operands[:2], given=use.operands[2:], skipped=1
    )


def _trace_scan(use: _SubgraphNode) -> list[Origin] | None:
    """The states, then what is scanned. Before opset 9 there was one more input."""
    body = use.summaries.get("body")
    scanned = next((item.i for item in use.node.attribute if item.name == "num_scan_inputs"), 0)
    states = len(use.operands) - scanned
    if body is None or not 0 <= states <= len(use.operands) == len(body.inputs):
        return None
    return _trace_iterations(use, body, states, lead=[], given=use.operands, skipped=0)


def _trace_iterations(
    use: _SubgraphNode,
    body: BodySummary,
    states: int,
    *,
    lead: list[Origin],
    given: list[Origin],
    skipped: int,
) -> list[Origin] | None:
    """What a body makes when its states are given back to it, however often.

    What it makes the first time is judged as it is. After that a state may come
    from where it first came from or from what was made of it, by the nearest way:
    a decay that is repeated leaves its state no further away.
    """
    if len(body.outputs) < states + skipped:
        return None
    held, rest = given[:states], [*given[states:], *use.list_captured_origins(body)]

    def once() -> list[Origin]:
        arguments = [*lead, *held, *rest]
        return [apply_summary(each, arguments, use.location) for each in body.outputs[skipped:]]

    made = once()
    found = made
    for _ in range(_MAX_ROUNDS):
        grown = [merge_origins(pair) for pair in zip(held, made, strict=False)]
        if grown == held:
            return found
        held = grown
        made = once()
        found = [combine_alternatives(pair) for pair in zip(found, made, strict=True)]
    why = f"{use.location.op_type} has states that change places too often"
    return [build_uncertain_origin([each], why, use.location) for each in found]


_CONTROL_FLOW_OPS: Mapping[str, Callable[[_SubgraphNode], list[Origin] | None]] = {
    "If": _trace_if,
    "Loop": _trace_loop,
    "Scan": _trace_scan,
}
