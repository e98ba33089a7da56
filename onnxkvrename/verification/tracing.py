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

from onnxkvrename.verification import graph_bodies as bodies
from onnxkvrename.verification import operators
from onnxkvrename.verification import provenance as origins
from onnxkvrename.verification.graph_bodies import Body, FunctionKey, Operation, Unreadable
from onnxkvrename.verification.provenance import NOTHING, Origin, Where

_ROUNDS = 16
"""Times that the states of a loop are followed round before they are given up."""


class Summary(NamedTuple):
    """What a body makes of its formals: first its inputs, then the outer values it sees."""

    inputs: tuple[str, ...]
    captured: tuple[str, ...]
    outputs: tuple[Origin, ...]


def trace(
    model: ModelProto, sources: Sequence[str], names: Sequence[str], *, deep: bool = False
) -> tuple[Origin, ...]:
    """The origins of some values of the main graph; its sources are graph inputs by name.

    Unless ``deep``, only operands are followed that may be carried on: a small
    part of a graph, which tells all ways, but not what else a value depends on.
    A deep walk tells that too, and does without onnx-graphsurgeon. Never raises
    for a model that could be parsed: what cannot be followed is in doubt, with
    the reason.
    """
    tracer = _Tracer(bodies.of_functions(model), deep=deep)
    main = bodies.of_graph(model.graph)
    for key in bodies.bottom_up(main, tracer.functions):
        tracer.summaries[key] = tracer.summary(tracer.functions[key], ())
    return tracer.follow(main, sources, names)


class _Tracer:
    """Follows bodies; those of functions are known once they have been followed."""

    def __init__(self, functions: Mapping[FunctionKey, Body], *, deep: bool) -> None:
        self.functions = functions
        self.deep = deep
        self.summaries: dict[FunctionKey, Summary] = {}

    def summary(self, body: Body, captured: tuple[str, ...]) -> Summary:
        """The summary of a function, or of a subgraph that sees some outer values."""
        outputs = self.follow(body, (*body.inputs, *captured), body.outputs)
        return Summary(body.inputs, captured, outputs)

    def leads(self, function: FunctionKey, operands: int) -> Iterable[int]:
        """The operands that a node is followed back to."""
        if self.deep or function in self.functions:
            return range(operands)
        return operators.leads(function[0], function[1], operands)

    def follow(
        self, body: Body, sources: Sequence[str], names: Sequence[str]
    ) -> tuple[Origin, ...]:
        """The origins of some values of a body."""
        values = {name: origins.source(number) for number, name in enumerate(sources)}
        given = list(values.values())
        try:
            for operation in bodies.operations(body, names, self.leads, imported=not self.deep):
                made = self.made(operation, body, values)
                values.update(zip(operation.outputs, made, strict=False))
                values.pop("", None)
        except Unreadable as error:
            return tuple(origins.doubted(given, str(error)) for _ in names)
        return tuple(values.get(name, NOTHING) for name in names)

    def made(
        self, operation: Operation, body: Body, values: Mapping[str, Origin]
    ) -> Sequence[Origin]:
        """The origins of what a node makes."""
        where = Where(operation.op_type, operation.name)
        operands = [values.get(name, NOTHING) for name in operation.inputs]
        if operation.function in self.functions:
            return self._call(operation, operands, where)
        branches = {
            name: self.summary(inner, bodies.captured(inner))
            for name, inner in body.inner.get(operation.number, {}).items()
        }
        use = _Use(body.nodes[operation.number], operands, branches, values, where)
        if operation.domain == "" and operation.op_type in _CONTROL:
            made = _CONTROL[operation.op_type](use)
            if made is not None:
                return made
            return use.doubted(operation, f"the {operation.op_type} does not fit its body")
        if branches:
            operands = [*operands, *use.seen()]
        return _plain(operation, operands, where)

    def _call(
        self, operation: Operation, operands: Sequence[Origin], where: Where
    ) -> Sequence[Origin]:
        summary = self.summaries.get(operation.function)
        if summary is None:
            why = f"{operation.op_type} calls itself"
            return [origins.doubted(operands, why, where)] * len(operation.outputs)
        given = _padded(operands, len(summary.inputs))
        return [origins.called(made, given, where) for made in summary.outputs]


def _padded(operands: Sequence[Origin], count: int) -> list[Origin]:
    """Arguments for every formal input; those at the end may be left out."""
    return [*operands, *[NOTHING] * (count - len(operands))]


def _plain(operation: Operation, operands: Sequence[Origin], where: Where) -> list[Origin]:
    """What a node without a body makes, by what is known of its operator."""
    domain, op_type, _ = operation.function
    if operators.looks_at_shape(domain, op_type):
        return [NOTHING] * len(operation.outputs)
    touched = origins.touching(operands).touched
    if not touched:
        return [NOTHING] * len(operation.outputs)
    made = []
    for output in range(len(operation.outputs)):
        steps = operators.carried(domain, op_type, output, len(operation.inputs))
        if steps is None:
            why = f"{op_type} of {domain} has no body in the model"
            made.append(origins.doubted(operands, why, where))
            continue
        parts = [
            origins.carried(operands[step.operand], step, where)
            for step in steps
            if step.operand < len(operands)
        ]
        made.append(Origin(origins.joined(parts).ways, touched))
    return made


# Control flow: its operators say how their bodies are used.


class _Use(NamedTuple):
    """A node with bodies: what it is given, their summaries, and the values around it."""

    node: NodeProto
    operands: list[Origin]
    branches: Mapping[str, Summary]
    values: Mapping[str, Origin]
    where: Where

    def captured(self, branch: Summary) -> list[Origin]:
        """What a body sees of the values around it."""
        return [self.values.get(name, NOTHING) for name in branch.captured]

    def seen(self) -> list[Origin]:
        """What all bodies see."""
        return [value for branch in self.branches.values() for value in self.captured(branch)]

    def doubted(self, operation: Operation, why: str) -> list[Origin]:
        """Everything the node makes may be anything that it is given."""
        made = origins.doubted([*self.operands, *self.seen()], why, self.where)
        return [made] * len(operation.outputs)


def _if(use: _Use) -> list[Origin] | None:
    """Either branch; the condition chooses, but hands nothing on."""
    made = [
        [origins.called(output, use.captured(branch), use.where) for output in branch.outputs]
        for branch in use.branches.values()
    ]
    if len(made) != 2 or len(made[0]) != len(made[1]):
        return None
    return [origins.either(pair) for pair in zip(*made, strict=True)]


def _loop(use: _Use) -> list[Origin] | None:
    """Trip count and condition, then the states; the body is taken to run once at least."""
    body = use.branches.get("body")
    states = len(use.operands) - 2
    if body is None or states < 0 or len(body.inputs) != states + 2:
        return None
    return _iterated(use, body, states, lead=use.operands[:2], given=use.operands[2:], skipped=1)


def _scan(use: _Use) -> list[Origin] | None:
    """The states, then what is scanned. Before opset 9 there was one more input."""
    body = use.branches.get("body")
    scanned = next((item.i for item in use.node.attribute if item.name == "num_scan_inputs"), 0)
    states = len(use.operands) - scanned
    if body is None or not 0 <= states <= len(use.operands) == len(body.inputs):
        return None
    return _iterated(use, body, states, lead=[], given=use.operands, skipped=0)


def _iterated(
    use: _Use, body: Summary, states: int, *, lead: list[Origin], given: list[Origin], skipped: int
) -> list[Origin] | None:
    """What a body makes when its states are given back to it, however often.

    What it makes the first time is judged as it is. After that a state may come
    from where it first came from or from what was made of it, by the nearest way:
    a decay that is repeated leaves its state no further away.
    """
    if len(body.outputs) < states + skipped:
        return None
    held, rest = given[:states], [*given[states:], *use.captured(body)]

    def once() -> list[Origin]:
        arguments = [*lead, *held, *rest]
        return [origins.called(each, arguments, use.where) for each in body.outputs[skipped:]]

    made = once()
    found = made
    for _ in range(_ROUNDS):
        grown = [origins.merged(pair) for pair in zip(held, made, strict=False)]
        if grown == held:
            return found
        held = grown
        made = once()
        found = [origins.either(pair) for pair in zip(found, made, strict=True)]
    why = f"{use.where.op_type} has states that change places too often"
    return [origins.doubted([each], why, use.where) for each in found]


_CONTROL: Mapping[str, Callable[[_Use], list[Origin] | None]] = {
    "If": _if,
    "Loop": _loop,
    "Scan": _scan,
}
