"""Read the bodies of a model: its graph, the subgraphs of nodes, and local functions.

A body is a light view of the parsed protobuf: nodes stay what they are, and only
those that a trace visits are turned into an `Operation`. Importing a graph of
100,000 nodes as objects would take longer than the whole proof.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import Any, NamedTuple

from onnx import AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto

FunctionKey = tuple[str, str, str]
"""Domain, name and overload of an operator or a local function."""
OperandSelector = Callable[[FunctionKey, int], Iterable[int]]
"""Takes an operator and its number of operands; returns the positions of those to follow."""


class Body(NamedTuple):
    """A graph, a subgraph or a local function.

    Attributes:
        nodes: The nodes in the order of the file.
        inputs: The names of the formal inputs.
        outputs: The names of the outputs.
        constants: The initializers by name, dense and sparse.
        subgraphs: For each node that has any, by its position in `nodes`: its
            subgraphs by the name of their attribute (`name[0]` in a list).
    """

    nodes: Sequence[NodeProto]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    constants: Mapping[str, TensorProto]
    subgraphs: Mapping[int, Mapping[str, Body]]


class Operation(NamedTuple):
    """A node with decoded names.

    Attributes:
        number: The position of the node in its body.
        function_key: The operator, or the local function that the node calls.
        name: The name of the node, possibly empty.
        inputs: The names of the values it reads; empty for an omitted input.
        outputs: The names of the values it produces; empty for an omitted output.
    """

    number: int
    function_key: FunctionKey
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def domain(self) -> str:
        """The domain of the operator, empty for ONNX's own."""
        return self.function_key[0]

    @property
    def op_type(self) -> str:
        """The operator type, or the name of the local function."""
        return self.function_key[1]


class UntraceableError(Exception):
    """The values of a body cannot be followed; the message says why."""


def build_graph_body(graph: GraphProto) -> Body:
    """Return the body of a graph, with its subgraphs to any depth.

    Subgraphs nest 33 deep at most: protobuf's parsers refuse more.
    """
    weights = [*graph.initializer, *(sparse.values for sparse in graph.sparse_initializer)]
    return Body(
        graph.node,
        tuple(decode_name(value.name) for value in graph.input),
        tuple(decode_name(value.name) for value in graph.output),
        {decode_name(weight.name): weight for weight in weights},
        _build_subgraphs(graph.node),
    )


def build_function_bodies(model: ModelProto) -> dict[FunctionKey, Body]:
    """Return the bodies of a model's local functions."""
    return {
        _build_function_key(function, function.name): Body(
            function.node,
            tuple(map(decode_name, function.input)),
            tuple(map(decode_name, function.output)),
            {},
            _build_subgraphs(function.node),
        )
        for function in model.functions
    }


def list_captured_names(subgraph: Body) -> tuple[str, ...]:
    """Return the outer values that a subgraph reads or returns, in the order of their first use."""
    own_names = {*subgraph.inputs, *subgraph.constants, ""}
    used_names: dict[str, None] = {}
    for number, node in enumerate(subgraph.nodes):
        own_names.update(map(decode_name, node.output))
        used_names.update(dict.fromkeys(map(decode_name, node.input)))
        used_names.update(dict.fromkeys(list_names_captured_at(subgraph, number)))
    used_names.update(dict.fromkeys(subgraph.outputs))
    return tuple(name for name in used_names if name not in own_names)


def sort_functions_bottom_up(
    main: Body, functions: Mapping[FunctionKey, Body]
) -> Iterator[FunctionKey]:
    """Yield the functions that `main` uses, each after those it calls.

    Functions that call each other in a circle come in any order.
    """
    if not functions:
        return
    visited: set[FunctionKey] = set()
    stack: list[tuple[FunctionKey | None, Iterator[FunctionKey]]] = [
        (None, _list_called_functions(main))
    ]
    while stack:
        caller, callees = stack[-1]
        for key in callees:
            if key in functions and key not in visited:
                visited.add(key)
                stack.append((key, _list_called_functions(functions[key])))
                break
        else:
            stack.pop()
            if caller is not None:
                yield caller


def sort_operations(
    body: Body, names: Iterable[str], select_operands: OperandSelector
) -> Iterator[Operation]:
    """Yield the nodes that some values may come from, each after those whose values it reads.

    Which operands of a node are followed is decided by `select_operands`. Of a node with subgraphs
    all are, and so is what its subgraphs capture.

    Raises:
        UntraceableError: The nodes have no order, or two of them produce one value.
    """
    producers = _map_producers(body)
    operations = _find_upstream_operations(body, producers, names, select_operands)

    def find_dependencies(operation: Operation) -> set[int]:
        read_names = (*operation.inputs, *list_names_captured_at(body, operation.number))
        return {
            producers[name]
            for name in read_names
            if name in producers and producers[name] in operations
        }

    if all(
        max(find_dependencies(operation), default=-1) < number
        for number, operation in operations.items()
    ):
        yield from operations.values()
        return
    dependencies = {
        number: find_dependencies(operation) for number, operation in operations.items()
    }
    try:
        for number in TopologicalSorter(dependencies).static_order():
            yield operations[number]
    except CycleError:
        raise UntraceableError("its nodes feed each other in a circle") from None


def read_operations(body: Body) -> Iterator[Operation]:
    """Yield all nodes of a body, in the order of the file."""
    for number, node in enumerate(body.nodes):
        yield _build_operation(number, node)


def _map_producers(body: Body) -> dict[str, int]:
    """Return for each value the number of the node that produces it."""
    producers: dict[str, int] = {}
    for number, node in enumerate(body.nodes):
        for output in node.output:
            name = decode_name(output)
            if name and producers.setdefault(name, number) != number:
                raise UntraceableError(f"two nodes make {name}")
    return producers


def _find_upstream_operations(
    body: Body,
    producers: Mapping[str, int],
    names: Iterable[str],
    select_operands: OperandSelector,
) -> dict[int, Operation]:
    """Return the nodes that some values may come from, by number, in the order of the file."""
    pending = [producers[name] for name in names if name in producers]
    operations: dict[int, Operation] = {}
    while pending:
        number = pending.pop()
        if number in operations:
            continue
        operation = operations[number] = _build_operation(number, body.nodes[number])
        operands = operation.inputs
        if number in body.subgraphs:
            followed: Iterable[str] = (*operands, *list_names_captured_at(body, number))
        else:
            positions = select_operands(operation.function_key, len(operands))
            followed = [operands[position] for position in positions]
        pending += [producers[name] for name in followed if name in producers]
    return dict(sorted(operations.items()))


def _build_operation(number: int, node: NodeProto) -> Operation:
    return Operation(
        number,
        _build_function_key(node, node.op_type),
        decode_name(node.name),
        tuple(map(decode_name, node.input)),
        tuple(map(decode_name, node.output)),
    )


def list_names_captured_at(body: Body, number: int) -> tuple[str, ...]:
    """Return what the subgraphs of a node read of the values around it."""
    subgraphs = body.subgraphs.get(number)
    if subgraphs is None:
        return ()
    return tuple(name for subgraph in subgraphs.values() for name in list_captured_names(subgraph))


def decode_name(name: Any) -> str:
    """Return a name as text: protobuf returns bytes for a name that is not UTF-8."""
    return name if isinstance(name, str) else bytes(name).decode("utf-8", "surrogateescape")


def _build_function_key(proto: NodeProto | FunctionProto, name: Any) -> FunctionKey:
    domain = decode_name(proto.domain)
    return "" if domain == "ai.onnx" else domain, decode_name(name), decode_name(proto.overload)


def _build_subgraphs(nodes: Sequence[NodeProto]) -> dict[int, dict[str, Body]]:
    subgraphs: dict[int, dict[str, Body]] = {}
    for number, node in enumerate(nodes):
        for attribute in node.attribute:
            name = decode_name(attribute.name)
            if attribute.type == AttributeProto.GRAPH:
                subgraphs.setdefault(number, {})[name] = build_graph_body(attribute.g)
            for position, graph in enumerate(attribute.graphs):
                subgraph = build_graph_body(graph)
                subgraphs.setdefault(number, {})[f"{name}[{position}]"] = subgraph
    return subgraphs


def _list_called_functions(body: Body) -> Iterator[FunctionKey]:
    """Yield the operators and functions that a body uses, including those of its subgraphs."""
    bodies = [body]
    while bodies:
        body = bodies.pop()
        yield from {_build_function_key(node, node.op_type): None for node in body.nodes}
        bodies += [inner for subgraphs in body.subgraphs.values() for inner in subgraphs.values()]
