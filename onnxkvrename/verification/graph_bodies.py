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
OperandSelector = Callable[[FunctionKey, int], Iterable[int]]
"""Asked for an operator or function with so many operands: the positions of those to follow."""


class Body(NamedTuple):
    """A graph or function, with the subgraphs of its nodes by node and attribute."""

    nodes: Sequence[NodeProto]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    constants: frozenset[str]
    subgraphs: Mapping[int, Mapping[str, Body]]


class Operation(NamedTuple):
    """A node by its number in its body, with the names it reads and makes."""

    number: int
    function_key: FunctionKey
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def domain(self) -> str:
        """The domain, empty for ONNX's own."""
        return self.function_key[0]

    @property
    def op_type(self) -> str:
        """What the node does, or the function that it calls."""
        return self.function_key[1]


class UntraceableError(Exception):
    """A body whose values cannot be followed, and why."""


def build_graph_body(graph: GraphProto) -> Body:
    """A graph; subgraphs nest 33 deep at most, since protobuf's parsers take no more."""
    weights = [*graph.initializer, *(sparse.values for sparse in graph.sparse_initializer)]
    return Body(
        graph.node,
        tuple(_decode_name(value.name) for value in graph.input),
        tuple(_decode_name(value.name) for value in graph.output),
        frozenset(_decode_name(weight.name) for weight in weights),
        _build_subgraphs(graph.node),
    )


def build_function_bodies(model: ModelProto) -> dict[FunctionKey, Body]:
    """The local functions of a model."""
    return {
        _build_function_key(function, function.name): _build_function_body(function)
        for function in model.functions
    }


def list_captured_names(body: Body) -> tuple[str, ...]:
    """The outer values that a subgraph reads or hands on, in a settled order."""
    own = {*body.inputs, *body.constants, ""}
    seen: dict[str, None] = {}
    for number, node in enumerate(body.nodes):
        own.update(map(_decode_name, node.output))
        seen.update(dict.fromkeys(map(_decode_name, node.input)))
        seen.update(dict.fromkeys(_list_captured_by_subgraphs(body.subgraphs.get(number, {}))))
    seen.update(dict.fromkeys(body.outputs))
    return tuple(name for name in seen if name not in own)


def sort_functions_bottom_up(
    main: Body, functions: Mapping[FunctionKey, Body]
) -> Iterator[FunctionKey]:
    """The functions in use, each behind those it calls; for a circle no order is right."""
    seen: set[FunctionKey] = set()
    stack: list[tuple[FunctionKey | None, Iterator[FunctionKey]]] = [
        (None, _list_called_functions(main))
    ]
    while stack:
        caller, callees = stack[-1]
        for key in callees:
            if key in functions and key not in seen:
                seen.add(key)
                stack.append((key, _list_called_functions(functions[key])))
                break
        else:
            stack.pop()
            if caller is not None:
                yield caller


def sort_operations(
    body: Body, names: Sequence[str], leads: OperandSelector, *, imported: bool = True
) -> Iterator[Operation]:
    """The nodes behind some values of a body, each after those whose values it reads.

    Only operands are followed to which ``leads`` says a node leads back; and what
    the subgraphs of a node see. How these nodes hang together is taken from
    onnx-graphsurgeon, or from the file alone if they need not be ``imported``:
    that is faster by half. Raises :class:`Unreadable` where the nodes have no
    order, one value comes from two of them, or onnx-graphsurgeon fails.
    """
    makers = _map_producers(body)
    known = _find_upstream_operations(body, makers, names, leads)
    if imported:
        known = _import_operations(body, known)
    reads = {
        number: _find_producers(each, body, makers) & known.keys() for number, each in known.items()
    }
    if all(maker < number for number, needed in reads.items() for maker in needed):
        yield from known.values()
        return
    try:
        for number in TopologicalSorter(reads).static_order():
            yield known[number]
    except CycleError:
        raise UntraceableError("its nodes feed each other in a circle") from None


def _map_producers(body: Body) -> dict[str, int]:
    """By value the node that makes it."""
    makers: dict[str, int] = {}
    for number, node in enumerate(body.nodes):
        for output in node.output:
            name = _decode_name(output)
            if name and makers.setdefault(name, number) != number:
                raise UntraceableError(f"two nodes make {name}")
    return makers


def _find_upstream_operations(
    body: Body, makers: Mapping[str, int], names: Iterable[str], leads: OperandSelector
) -> dict[int, Operation]:
    """The nodes that some values may come from, in the file's order."""
    open_nodes = [makers[name] for name in names if name in makers]
    found: dict[int, Operation] = {}
    while open_nodes:
        number = open_nodes.pop()
        if number in found:
            continue
        operation = found[number] = _build_operation(number, body.nodes[number])
        inner = body.subgraphs.get(number)
        operands = operation.inputs
        if inner:
            operands = (*operands, *_list_captured_by_subgraphs(inner))
        else:
            operands = tuple(operands[at] for at in leads(operation.function_key, len(operands)))
        open_nodes += [makers[name] for name in operands if name in makers]
    return dict(sorted(found.items()))


def _build_operation(number: int, node: NodeProto) -> Operation:
    return Operation(
        number,
        _build_function_key(node, node.op_type),
        _decode_name(node.name),
        tuple(map(_decode_name, node.input)),
        tuple(map(_decode_name, node.output)),
    )


def _import_operations(body: Body, known: Mapping[int, Operation]) -> dict[int, Operation]:
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
        raise UntraceableError(f"onnx-graphsurgeon cannot read it: {error}") from None
    return {
        number: operation._replace(
            inputs=tuple(_decode_name(tensor.name) for tensor in node.inputs),
            outputs=tuple(_decode_name(tensor.name) for tensor in node.outputs),
        )
        for (number, operation), node in zip(known.items(), nodes, strict=True)
    }


def _find_producers(operation: Operation, body: Body, makers: Mapping[str, int]) -> set[int]:
    """The nodes whose values a node reads, itself or in its subgraphs."""
    inner = body.subgraphs.get(operation.number, {})
    names = (*operation.inputs, *_list_captured_by_subgraphs(inner))
    return {makers[name] for name in names if name in makers}


def _list_captured_by_subgraphs(inner: Mapping[str, Body]) -> Iterator[str]:
    for body in inner.values():
        yield from list_captured_names(body)


def _decode_name(name: Any) -> str:
    """A name as it is written elsewhere: protobuf gives what is not UTF-8 as bytes."""
    return name if isinstance(name, str) else bytes(name).decode("utf-8", "surrogateescape")


def _build_function_key(item: NodeProto | FunctionProto, name: Any) -> FunctionKey:
    domain = _decode_name(item.domain)
    return "" if domain == "ai.onnx" else domain, _decode_name(name), _decode_name(item.overload)


def _build_function_body(function: FunctionProto) -> Body:
    return Body(
        function.node,
        tuple(map(_decode_name, function.input)),
        tuple(map(_decode_name, function.output)),
        frozenset(),
        _build_subgraphs(function.node),
    )


def _build_subgraphs(nodes: Sequence[NodeProto]) -> dict[int, dict[str, Body]]:
    found: dict[int, dict[str, Body]] = {}
    for number, node in enumerate(nodes):
        for attribute in node.attribute:
            name = _decode_name(attribute.name)
            if attribute.type == AttributeProto.GRAPH:
                found.setdefault(number, {})[name] = build_graph_body(attribute.g)
            for at, graph in enumerate(attribute.graphs):
                found.setdefault(number, {})[f"{name}[{at}]"] = build_graph_body(graph)
    return found


def _list_called_functions(body: Body) -> Iterator[FunctionKey]:
    """The functions that a body may call, those of its subgraphs included."""
    bodies = [body]
    while bodies:
        body = bodies.pop()
        yield from {_build_function_key(node, node.op_type): None for node in body.nodes}
        bodies += [inner for several in body.subgraphs.values() for inner in several.values()]
