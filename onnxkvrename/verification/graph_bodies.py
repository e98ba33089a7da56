"""The bodies of a model: its graph, the subgraphs of nodes, and local functions.

onnx-graphsurgeon reads the nodes of a body and how they hang together, one body
at a time and without attributes: what it does not know of, and what it is slow
at, cannot keep it from the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import Any, NamedTuple

import onnx_graphsurgeon as gs
from onnx import AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto

FunctionKey = tuple[str, str, str]
"""Domain, name and overload."""
Leads = Callable[[FunctionKey, int], Iterable[int]]
"""Asked for an operator or function with so many operands: the positions of those to follow."""


class Body(NamedTuple):
    """A graph or function, with the subgraphs of its nodes by node and attribute."""

    nodes: Sequence[NodeProto]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    constants: frozenset[str]
    inner: Mapping[int, Mapping[str, Body]]


class Operation(NamedTuple):
    """A node by its number in its body, with the names it reads and makes."""

    number: int
    function: FunctionKey
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def domain(self) -> str:
        """The domain, empty for ONNX's own."""
        return self.function[0]

    @property
    def op_type(self) -> str:
        """What the node does, or the function that it calls."""
        return self.function[1]


class Unreadable(Exception):
    """A body whose values cannot be followed, and why."""


def of_graph(graph: GraphProto) -> Body:
    """A graph; subgraphs nest 33 deep at most, since protobuf's parsers take no more."""
    weights = [*graph.initializer, *(sparse.values for sparse in graph.sparse_initializer)]
    return Body(
        graph.node,
        tuple(_text(value.name) for value in graph.input),
        tuple(_text(value.name) for value in graph.output),
        frozenset(_text(weight.name) for weight in weights),
        _inner(graph.node),
    )


def of_functions(model: ModelProto) -> dict[FunctionKey, Body]:
    """The local functions of a model."""
    return {_key(function, function.name): _of_function(function) for function in model.functions}


def captured(body: Body) -> tuple[str, ...]:
    """The outer values that a subgraph reads or hands on, in a settled order."""
    own = {*body.inputs, *body.constants, ""}
    seen: dict[str, None] = {}
    for number, node in enumerate(body.nodes):
        own.update(map(_text, node.output))
        seen.update(dict.fromkeys(map(_text, node.input)))
        seen.update(dict.fromkeys(_captured_by(body.inner.get(number, {}))))
    seen.update(dict.fromkeys(body.outputs))
    return tuple(name for name in seen if name not in own)


def bottom_up(main: Body, functions: Mapping[FunctionKey, Body]) -> Iterator[FunctionKey]:
    """The functions in use, each behind those it calls; for a circle no order is right."""
    seen: set[FunctionKey] = set()
    stack: list[tuple[FunctionKey | None, Iterator[FunctionKey]]] = [(None, _called(main))]
    while stack:
        caller, callees = stack[-1]
        for key in callees:
            if key in functions and key not in seen:
                seen.add(key)
                stack.append((key, _called(functions[key])))
                break
        else:
            stack.pop()
            if caller is not None:
                yield caller


def operations(
    body: Body, names: Sequence[str], leads: Leads, *, imported: bool = True
) -> Iterator[Operation]:
    """The nodes behind some values of a body, each after those whose values it reads.

    Only operands are followed to which ``leads`` says a node leads back; and what
    the subgraphs of a node see. How these nodes hang together is taken from
    onnx-graphsurgeon, or from the file alone if they need not be ``imported``:
    that is faster by half. Raises :class:`Unreadable` where the nodes have no
    order, one value comes from two of them, or onnx-graphsurgeon fails.
    """
    makers = _makers(body)
    known = _behind(body, makers, names, leads)
    if imported:
        known = _imported(body, known)
    reads = {number: _reads(each, body, makers) & known.keys() for number, each in known.items()}
    if all(maker < number for number, needed in reads.items() for maker in needed):
        yield from known.values()
        return
    try:
        for number in TopologicalSorter(reads).static_order():
            yield known[number]
    except CycleError:
        raise Unreadable("its nodes feed each other in a circle") from None


def _makers(body: Body) -> dict[str, int]:
    """By value the node that makes it."""
    makers: dict[str, int] = {}
    for number, node in enumerate(body.nodes):
        for output in node.output:
            name = _text(output)
            if name and makers.setdefault(name, number) != number:
                raise Unreadable(f"two nodes make {name}")
    return makers


def _behind(
    body: Body, makers: Mapping[str, int], names: Iterable[str], leads: Leads
) -> dict[int, Operation]:
    """The nodes that some values may come from, in the file's order."""
    open_nodes = [makers[name] for name in names if name in makers]
    found: dict[int, Operation] = {}
    while open_nodes:
        number = open_nodes.pop()
        if number in found:
            continue
        operation = found[number] = _operation(number, body.nodes[number])
        inner = body.inner.get(number)
        operands = operation.inputs
        if inner:
            operands = (*operands, *_captured_by(inner))
        else:
            operands = tuple(operands[at] for at in leads(operation.function, len(operands)))
        open_nodes += [makers[name] for name in operands if name in makers]
    return dict(sorted(found.items()))


def _operation(number: int, node: NodeProto) -> Operation:
    return Operation(
        number,
        _key(node, node.op_type),
        _text(node.name),
        tuple(map(_text, node.input)),
        tuple(map(_text, node.output)),
    )


def _imported(body: Body, known: Mapping[int, Operation]) -> dict[int, Operation]:
    """The same nodes with their ends as onnx-graphsurgeon reads them."""
    shown = ModelProto()
    for number in known:
        copy = shown.graph.node.add()
        copy.CopyFrom(body.nodes[number])
        copy.ClearField("attribute")
    try:
        with gs.logger.G_LOGGER.suppress():
            nodes: Sequence[gs.Node] = gs.import_onnx(shown).nodes
    except Exception as error:  # its own errors have no common base, and others come through
        raise Unreadable(f"onnx-graphsurgeon cannot read it: {error}") from None
    return {
        number: operation._replace(
            inputs=tuple(_text(tensor.name) for tensor in node.inputs),
            outputs=tuple(_text(tensor.name) for tensor in node.outputs),
        )
        for (number, operation), node in zip(known.items(), nodes, strict=True)
    }


def _reads(operation: Operation, body: Body, makers: Mapping[str, int]) -> set[int]:
    """The nodes whose values a node reads, itself or in its subgraphs."""
    inner = body.inner.get(operation.number, {})
    names = (*operation.inputs, *_captured_by(inner))
    return {makers[name] for name in names if name in makers}


def _captured_by(inner: Mapping[str, Body]) -> Iterator[str]:
    for body in inner.values():
        yield from captured(body)


def _text(name: Any) -> str:
    """A name as it is written elsewhere: protobuf gives what is not UTF-8 as bytes."""
    return name if isinstance(name, str) else bytes(name).decode("utf-8", "surrogateescape")


def _key(item: NodeProto | FunctionProto, name: Any) -> FunctionKey:
    domain = _text(item.domain)
    return "" if domain == "ai.onnx" else domain, _text(name), _text(item.overload)


def _of_function(function: FunctionProto) -> Body:
    return Body(
        function.node,
        tuple(map(_text, function.input)),
        tuple(map(_text, function.output)),
        frozenset(),
        _inner(function.node),
    )


def _inner(nodes: Sequence[NodeProto]) -> dict[int, dict[str, Body]]:
    found: dict[int, dict[str, Body]] = {}
    for number, node in enumerate(nodes):
        for attribute in node.attribute:
            name = _text(attribute.name)
            if attribute.type == AttributeProto.GRAPH:
                found.setdefault(number, {})[name] = of_graph(attribute.g)
            for at, graph in enumerate(attribute.graphs):
                found.setdefault(number, {})[f"{name}[{at}]"] = of_graph(graph)
    return found


def _called(body: Body) -> Iterator[FunctionKey]:
    """The functions that a body may call, those of its subgraphs included."""
    bodies = [body]
    while bodies:
        body = bodies.pop()
        yield from {_key(node, node.op_type): None for node in body.nodes}
        bodies += [inner for several in body.inner.values() for inner in several.values()]
