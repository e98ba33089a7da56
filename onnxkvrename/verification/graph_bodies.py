"""Read the bodies of a model: its graph, the subgraphs of nodes, and local functions.

A body holds the bytes of its nodes, without weights, and knows which node makes which value.
Only the nodes that a walk visits are read: to import a graph of 100,000 nodes as objects would
take longer than the whole proof. Field numbers are those of onnx.proto (ONNX IR version 13).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from graphlib import CycleError, TopologicalSorter
from typing import NamedTuple

from onnxkvrename.errors import ModelError
from onnxkvrename.limits import MAX_DEPTH, MAX_ENTRIES
from onnxkvrename.model.proto_reader import (
    FUNCTION,
    find_graph,
    find_string,
    list_root_fields,
    read_optional_string,
    read_value,
)
from onnxkvrename.model.protobuf import (
    FIXED32,
    FIXED64,
    FIXED_SIZES,
    LENGTH,
    VARINT,
    ByteSource,
    Record,
    UnusualMessageError,
    encode_varint,
    list_fields,
    read_fields,
    read_plain_varint,
    split_message,
)
from onnxkvrename.model.signature import Value

NESTED_FIELDS = {
    "model": {7: "graph", 20: "training", 25: "function"},
    "training": {1: "graph", 2: "graph"},
    "function": {7: "node", 11: "attribute"},
    "graph": {1: "node", 5: "tensor", 15: "sparse"},
    "sparse": {1: "tensor", 2: "tensor"},
    "node": {5: "attribute"},
    "attribute": {
        5: "tensor",
        10: "tensor",
        22: "sparse",
        23: "sparse",
        6: "graph",
        11: "graph",
    },
}
"""For each kind of message the fields that may hold tensors, and the kind of each."""
_VALUE_FIELDS = frozenset((4, 5, 6, 7, 9, 10, 11))
"""The fields of a TensorProto that hold its values."""
FunctionKey = tuple[str, str, str]
"""Domain, name and overload of an operator or a local function."""
OperandSelector = Callable[[FunctionKey, int], Container[int]]
"""Takes an operator and its number of operands; returns the positions of those to follow."""

KEPT_BYTES = 1 << 10
"""Bytes of a tensor or an attribute that are kept: shapes, axes, small constants."""
BYTES_PER_PART = 16
"""A graph may have one part (a node, a value) more than `MAX_ENTRIES` for so many bytes.
Exporters write one in 30 to 150 bytes, and a model whose values have numbers for names, and its
nodes none, one in 16."""
_TENSOR_HEAD_BYTES = 1 << 9
"""Bytes of a tensor beside its data: its name, type and dimensions."""
_NODE, _INITIALIZER, _SPARSE_INITIALIZER, _INPUT, _OUTPUT = 1, 5, 15, 11, 12
_GRAPH_FIELDS = frozenset({_NODE, _INITIALIZER, _SPARSE_INITIALIZER, _INPUT, _OUTPUT})
_FUNCTION_INPUT, _FUNCTION_OUTPUT, _FUNCTION_NODE = 4, 5, 7
_FUNCTION_NAME, _FUNCTION_DOMAIN, _FUNCTION_OVERLOAD = 1, 10, 13
_FUNCTION_FIELDS = frozenset(
    {
        *(_FUNCTION_INPUT, _FUNCTION_OUTPUT, _FUNCTION_NODE),
        *(_FUNCTION_NAME, _FUNCTION_DOMAIN, _FUNCTION_OVERLOAD),
    }
)
_TEXT, _NUMBER = (LENGTH,), (VARINT,)
_WIRE_TYPES: Mapping[str, Mapping[int, tuple[int, ...]]] = {
    "AttributeProto": {
        **dict.fromkeys((1, 4, 5, 6, 9, 10, 11, 13, 14, 15, 21, 22, 23), _TEXT),
        2: (FIXED32,),
        3: _NUMBER,
        7: (FIXED32, LENGTH),
        8: (VARINT, LENGTH),
        20: _NUMBER,
    },
    "TensorProto": {
        **dict.fromkeys((3, 6, 8, 9, 12, 13, 16), _TEXT),
        1: (VARINT, LENGTH),
        2: _NUMBER,
        4: (FIXED32, LENGTH),
        5: (VARINT, LENGTH),
        7: (VARINT, LENGTH),
        10: (FIXED64, LENGTH),
        11: (VARINT, LENGTH),
        14: _NUMBER,
    },
}
"""The fields of messages that are read here, with the wire types that protobuf reads of each."""
_MERGED_FIELDS = frozenset({5, 6, 14, 22})
"""The fields of an attribute that are one message: protobuf merges several of them."""
_FIELDS_BY_TYPE = {1: 2, 2: 3, 3: 4, 4: 5, 5: 6, 6: 7, 7: 8, 8: 9, 9: 10, 10: 11, 11: 22, 12: 23}
_FIELDS_BY_TYPE |= {13: 14, 14: 15}
"""The field with the value of an attribute, by its type; others do not count."""
_ATTRIBUTE_HEAD = frozenset({1, 13, 20, 21})
_DROPPED_FIELDS: Mapping[str, frozenset[int]] = {
    "node": frozenset({6}),
    "attribute": frozenset({4, 7, 8, 9, 13}),
    "tensor": _VALUE_FIELDS | {12},
    "graph": frozenset({10}),
}
"""The fields that are left out where they are large, by the kind of message: data and docs."""
_NODE_TAGS = frozenset(number << 3 | LENGTH for number in range(1, 11))
_INPUT_TAG, _OUTPUT_TAG, _NAME_TAG, _OP_TYPE_TAG, _ATTRIBUTE_TAG, _DOMAIN_TAG, _OVERLOAD_TAG = (
    number << 3 | LENGTH for number in (1, 2, 3, 4, 5, 7, 8)
)
_GRAPH_TAGS = (6 << 3 | LENGTH, 11 << 3 | LENGTH)
"""The first bytes of a graph, and of one in a list of graphs, in an attribute."""


class UntraceableError(Exception):
    """The values of a body cannot be followed; the message says why."""


class Attribute(NamedTuple):
    """An attribute of a node.

    Attributes:
        data: Its bytes.
        fields: Its fields, by their numbers in `AttributeProto`.
    """

    data: bytes
    fields: Mapping[int, list[int | bytes]]

    @property
    def name(self) -> str:
        """Its name."""
        return _get_text(self.fields, 1)

    @property
    def is_of_caller(self) -> bool:
        """Whether it has the value of an attribute of the function's caller."""
        return bool(_get_text(self.fields, 21))

    @property
    def integer(self) -> int:
        """Its value as an integer, 0 if it has none."""
        numbers = [value for value in self.fields.get(3, ()) if isinstance(value, int)]
        return _make_signed(numbers[-1]) if numbers else 0

    @property
    def integers(self) -> tuple[int, ...]:
        """Its list of integers."""
        return read_integers(self.fields.get(8, ()))

    def get_bytes(self, number: int) -> bytes | None:
        """Return the last payload of a field, such as 5, its tensor; ``None`` if it has none."""
        found = [value for value in self.fields.get(number, ()) if isinstance(value, bytes)]
        return found[-1] if found else None


class Operation(NamedTuple):
    """A node.

    Attributes:
        number: The position of the node in its body.
        function_key: The operator, or the local function that the node calls.
        name: The name of the node, possibly empty.
        inputs: The names of the values it reads; empty for an omitted input.
        outputs: The names of the values it produces; empty for an omitted output.
        attribute_bytes: Its attributes, as they are in the file.
    """

    number: int
    function_key: FunctionKey
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attribute_bytes: tuple[bytes, ...] = ()

    @property
    def domain(self) -> str:
        """The domain of the operator, empty for ONNX's own."""
        return self.function_key[0]

    @property
    def op_type(self) -> str:
        """The operator type, or the name of the local function."""
        return self.function_key[1]

    def list_attributes(self) -> Iterator[Attribute]:
        """Yield the attributes, in the order of the file."""
        for data in self.attribute_bytes:
            yield Attribute(data, _select_value(group_fields(data, "AttributeProto")))

    def find_attribute(self, name: str) -> Attribute | None:
        """Return the first attribute with a name."""
        return next((each for each in self.list_attributes() if each.name == name), None)


class Body:
    """A graph, a subgraph or a local function.

    Attributes:
        inputs: The names of the formal inputs.
        outputs: The names of the outputs.
        constants: The initializers by name, dense and sparse: each as the bytes of a tensor, or
            ``None`` if it is large.
        size: The number of nodes.
        types: The inputs with their types, of the main graph.
        producers: For each value the number of the node that produces it.
    """

    def __init__(
        self,
        nodes: list[bytes],
        inputs: tuple[str, ...],
        outputs: tuple[str, ...],
        constants: Mapping[str, bytes | None],
        depth: int = 0,
        types: Sequence[Value] = (),
    ) -> None:
        self.types = types
        self.inputs = inputs
        self.outputs = outputs
        self.constants = constants
        self.size = len(nodes)
        self.producers: dict[str, int] = {}
        self._ambiguous = ""
        self._nodes = nodes
        self._depth = depth
        self._operations: dict[int, Operation] = {}
        self._subgraphs: dict[int, Mapping[str, Body]] = {}
        for number, node in enumerate(nodes):
            try:
                made = _list_outputs(node)
            except UnusualMessageError:
                nodes[number] = _write_again(node, "NodeProto")
                made = _list_outputs(nodes[number])
            for output in made:
                if self.producers.setdefault(output, number) != number:
                    self._ambiguous = self._ambiguous or output

    def get_operation(self, number: int) -> Operation:
        """Return a node."""
        operation = self._operations.get(number)
        if operation is None:
            operation = self._operations[number] = _read_operation(number, self._nodes[number])
        return operation

    def list_operations(self) -> Iterator[Operation]:
        """Yield all nodes, in the order of the file."""
        return map(self.get_operation, range(self.size))

    def get_subgraphs(self, number: int) -> Mapping[str, Body]:
        """Return the subgraphs of a node by the name of their attribute (`name[0]` in a list)."""
        if number not in self._subgraphs:
            operation = self.get_operation(number)
            if not any(tag in data for data in operation.attribute_bytes for tag in _GRAPH_TAGS):
                return {}
            self._subgraphs[number] = dict(_read_subgraphs(operation, self._depth + 1))
        return self._subgraphs[number]

    def list_captured_at(self, number: int) -> tuple[str, ...]:
        """Return what the subgraphs of a node read of the values around it."""
        subgraphs = self.get_subgraphs(number).values()
        return tuple(name for subgraph in subgraphs for name in subgraph.captured_names)

    @cached_property
    def captured_names(self) -> tuple[str, ...]:
        """The outer values that it reads or returns, in the order of their first use."""
        own_names = {*self.inputs, *self.constants, *self.producers, ""}
        used_names: dict[str, None] = {}
        for operation in self.list_operations():
            used_names.update(dict.fromkeys(operation.inputs))
            used_names.update(dict.fromkeys(self.list_captured_at(operation.number)))
        used_names.update(dict.fromkeys(self.outputs))
        return tuple(name for name in used_names if name not in own_names)

    def check_producers(self) -> None:
        """Raise UntraceableError if two nodes produce one value."""
        if self._ambiguous:
            raise UntraceableError(f"two nodes make {self._ambiguous}")


class ModelGraph(NamedTuple):
    """The main graph of a model, and its local functions."""

    main: Body
    functions: Mapping[FunctionKey, Body]


def read_graph(source: ByteSource) -> ModelGraph:
    """Read the graph of a model, without its weights: data of more than some bytes are skipped.

    Raises:
        ModelError: The bytes are not a model, or it has too many parts.
    """
    functions = {}
    for record in list_root_fields(source):
        if record.number == FUNCTION and record.wire_type == LENGTH:
            key, body = _read_function(source, record)
            functions[key] = body
    return ModelGraph(_read_graph_body(source, find_graph(source), 0), functions)


def _read_graph_body(source: ByteSource, graph: Record, depth: int) -> Body:
    types = list[Value]()
    nodes, inputs, outputs = list[bytes](), list[str](), list[str]()
    constants: dict[str, bytes | None] = {}
    for record in _read_parts(source, graph, _GRAPH_FIELDS, _NODE, nodes):
        if record.number == _NODE:
            nodes.append(_read_small(source, record, "node"))
        elif record.number in (_INITIALIZER, _SPARSE_INITIALIZER):
            constants.update([_read_constant(source, record)])
        elif record.number == _INPUT and not depth:
            types.append(read_value(source, record))
            inputs.append(types[-1].name)
        else:
            value = list_fields(source, record, frozenset({1}))
            name = read_optional_string(source, find_string(value, 1))
            (inputs if record.number == _INPUT else outputs).append(name)
    return Body(nodes, tuple(inputs), tuple(outputs), constants, depth, types)


def _read_function(source: ByteSource, function: Record) -> tuple[FunctionKey, Body]:
    nodes, inputs, outputs = list[bytes](), list[str](), list[str]()
    names = {_FUNCTION_NAME: "", _FUNCTION_DOMAIN: "", _FUNCTION_OVERLOAD: ""}
    for record in _read_parts(source, function, _FUNCTION_FIELDS, _FUNCTION_NODE, nodes):
        if record.number == _FUNCTION_NODE:
            nodes.append(_read_small(source, record, "node"))
        elif record.number in names:
            names[record.number] = source.read_string(record)
        else:
            (inputs if record.number == _FUNCTION_INPUT else outputs).append(
                source.read_string(record)
            )
    key = _build_function_key(
        names[_FUNCTION_DOMAIN], names[_FUNCTION_NAME], names[_FUNCTION_OVERLOAD]
    )
    return key, Body(nodes, tuple(inputs), tuple(outputs), {})


def _read_parts(
    source: ByteSource,
    parent: Record,
    numbers: frozenset[int],
    node_number: int,
    nodes: list[bytes],
) -> Iterator[Record]:
    """Yield the messages and names of a body, not too many of them.

    Short nodes are appended to `nodes` instead.
    """
    most_parts = _limit_parts(parent)

    def take_nodes(payloads: list[bytes]) -> None:
        nodes.extend(payloads)
        if len(nodes) > most_parts:
            raise source.build_limit_error(most_parts, "parts of a graph", parent)

    shorts = {node_number: take_nodes}
    records = read_fields(source, parent, stems=(), always=numbers, shorts=shorts)
    for count, record in enumerate(records):
        if count + len(nodes) > most_parts:
            raise source.build_limit_error(most_parts, "parts of a graph", record)
        if record.number in numbers and record.wire_type == LENGTH:
            yield record


def _limit_parts(message: Record) -> int:
    return MAX_ENTRIES + (message.end - message.start) // BYTES_PER_PART


def _read_small(source: ByteSource, message: Record, kind: str) -> bytes:
    """Return a message without its large data: weights and texts, but no name."""
    if message.end - message.start <= KEPT_BYTES:
        return source.read_slice(message.start, message.end - message.start)
    nested, dropped = NESTED_FIELDS.get(kind, {}), _DROPPED_FIELDS.get(kind, frozenset())
    parts, sizes = list[tuple[int, bytes]](), dict[int, int]()
    most_parts = _limit_parts(message)
    for record in read_fields(source, message):
        number, size = record.number, record.end - record.start
        if number in dropped:
            sizes[number] = sizes.get(number, 0) + size
            if sizes[number] > KEPT_BYTES:
                continue
        if len(parts) > most_parts:
            raise source.build_limit_error(most_parts, "parts of a node", record)
        if size > KEPT_BYTES and record.wire_type == LENGTH and number in nested:
            payload = _read_small(source, record, nested[number])
            head = encode_varint(number << 3 | LENGTH) + encode_varint(len(payload))
            parts.append((number, head + payload))
        else:
            data = source.read_slice(record.tag_start, record.end - record.tag_start)
            parts.append((number, data))
    return b"".join(data for number, data in parts if sizes.get(number, 0) <= KEPT_BYTES)


def _read_constant(source: ByteSource, record: Record) -> tuple[str, bytes | None]:
    """Return the name of an initializer, and its bytes if they are few."""
    tensor: Record | None = record
    if record.number == _SPARSE_INITIALIZER:
        tensor = find_string(list_fields(source, record, frozenset({1})), 1)
    if tensor is None:
        return "", None
    name = find_string(list_fields(source, tensor, frozenset({8})), 8)
    size = tensor.end - tensor.start
    is_small = size <= KEPT_BYTES + _TENSOR_HEAD_BYTES
    data = source.read_slice(tensor.start, size) if is_small else None
    return read_optional_string(source, name), data


def _list_outputs(node: bytes) -> list[str]:
    """Return the names of a node's outputs; of all nodes, so by itself rather than as fields."""
    outputs: list[str] = []
    position, size = 0, len(node)
    try:
        while position < size:
            tag, length, start = node[position], node[position + 1], position + 2
            if tag not in _NODE_TAGS:
                raise UnusualMessageError
            if length > 0x7F:
                length, start = read_plain_varint(node, position + 1)
            position = start + length
            if tag == _OUTPUT_TAG and length:
                outputs.append(node[start:position].decode("utf-8", "surrogateescape"))
    except IndexError:
        position = -1
    if position != size:
        raise UnusualMessageError
    return outputs


def _read_operation(number: int, node: bytes) -> Operation:
    """Read a node that `_list_outputs` accepts: it has plain fields, all of them with a length."""
    # `list[str]()` takes ten times as long as `[]`.
    inputs: list[str] = []
    outputs: list[str] = []
    attributes: list[bytes] = []
    name = op_type = domain = overload = ""
    position, size = 0, len(node)
    while position < size:
        tag, length, start = node[position], node[position + 1], position + 2
        if length > 0x7F:
            length, start = read_plain_varint(node, position + 1)
        position = start + length
        value = node[start:position]
        if tag == _ATTRIBUTE_TAG:
            attributes.append(value)
            continue
        text = value.decode("utf-8", "surrogateescape")
        if tag == _INPUT_TAG:
            inputs.append(text)
        elif tag == _OUTPUT_TAG:
            outputs.append(text)
        elif tag == _NAME_TAG:
            name = text
        elif tag == _OP_TYPE_TAG:
            op_type = text
        elif tag == _DOMAIN_TAG:
            domain = text
        elif tag == _OVERLOAD_TAG:
            overload = text
    key = _build_function_key(domain, op_type, overload)
    return Operation(number, key, name, tuple(inputs), tuple(outputs), tuple(attributes))


def _read_subgraphs(operation: Operation, depth: int) -> Iterator[tuple[str, Body]]:
    if 3 * depth > MAX_DEPTH:
        raise ModelError(f"has graphs in each other, messages nested more than {MAX_DEPTH} deep")
    for attribute in operation.list_attributes():
        graphs = [value for value in attribute.fields.get(11, ()) if isinstance(value, bytes)]
        named = [(f"{attribute.name}[{index}]", data) for index, data in enumerate(graphs)]
        single = attribute.get_bytes(6)
        for name, data in (*([(attribute.name, single)] if single is not None else ()), *named):
            source = ByteSource.from_bytes(data)
            yield name, _read_graph_body(source, source.root, depth)


def group_fields(data: bytes, kind: str) -> dict[int, list[int | bytes]]:
    """Return the values of a message's fields, by number, as protobuf understands them.

    Args:
        data: The message.
        kind: ``AttributeProto`` or ``TensorProto``.

    Raises:
        ModelError: No protobuf parser accepts the bytes.
    """
    try:
        fields = _group_fields(data, kind)
    except UnusualMessageError:
        return _group_fields(_write_again(data, kind), kind)
    is_merged = kind == "AttributeProto" and any(
        len(fields.get(number, ())) > 1 for number in _MERGED_FIELDS
    )
    return _group_fields(_write_again(data, kind), kind) if is_merged else fields


def _group_fields(data: bytes, kind: str) -> dict[int, list[int | bytes]]:
    fields: dict[int, list[int | bytes]] = {}
    for number, value in split_message(data, _WIRE_TYPES[kind]):
        if isinstance(value, bytes):
            _check_packed(value, _WIRE_TYPES[kind][number])
        fields.setdefault(number, []).append(value)
    return fields


def _check_packed(payload: bytes, wire_types: tuple[int, ...]) -> None:
    """Raise UnusualMessageError if a list of numbers in one payload is not whole."""
    if VARINT in wire_types:
        try:
            _unpack(payload)
        except IndexError:
            raise UnusualMessageError from None
    elif len(wire_types) > 1 and len(payload) % FIXED_SIZES[wire_types[0]]:
        raise UnusualMessageError


def _write_again(data: bytes, kind: str) -> bytes:
    """Return a message as protobuf writes it, which says what a parser makes of its bytes."""
    import onnx
    from google.protobuf.message import DecodeError

    message = getattr(onnx, kind)()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise ModelError(
            f"cannot be parsed by onnx: {error}", hint="export or copy it again"
        ) from None
    message.DiscardUnknownFields()
    return bytes(message.SerializeToString())


def _select_value(fields: Mapping[int, list[int | bytes]]) -> Mapping[int, list[int | bytes]]:
    """Return the fields of an attribute without values of other types than its own."""
    kinds = [value for value in fields.get(20, ()) if isinstance(value, int)]
    own = _FIELDS_BY_TYPE.get(kinds[-1]) if kinds else None
    return {
        number: values
        for number, values in fields.items()
        if number in _ATTRIBUTE_HEAD or number == own
    }


def read_integers(values: Iterable[int | bytes]) -> tuple[int, ...]:
    """Return the values of a list of integers, packed or not."""
    integers = []
    for value in values:
        if isinstance(value, int):
            integers.append(_make_signed(value))
        else:
            integers += map(_make_signed, _unpack(value))
    return tuple(integers)


def _unpack(payload: bytes) -> list[int]:
    """Return the numbers of a packed list; one that is cut short raises IndexError."""
    numbers, position = list[int](), 0
    while position < len(payload):
        number, position = read_plain_varint(payload, position)
        numbers.append(number)
    return numbers


def _make_signed(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


def _decode(name: int | bytes) -> str:
    """Return a name as text; bytes that are not UTF-8 become surrogates."""
    return name.decode("utf-8", "surrogateescape") if isinstance(name, bytes) else ""


def _get_text(fields: Mapping[int, list[int | bytes]], number: int) -> str:
    return _decode(fields[number][-1]) if number in fields else ""


@lru_cache(maxsize=1024)
def _build_function_key(domain: str, name: str, overload: str) -> FunctionKey:
    return "" if domain == "ai.onnx" else domain, name, overload


def sort_operations(
    body: Body, names: Iterable[str], select_operands: OperandSelector
) -> Iterator[Operation]:
    """Yield the nodes that some values may come from, each after those whose values it reads.

    Which operands of a node are followed is decided by `select_operands`. Of a node with subgraphs
    all are, and so is what its subgraphs capture.

    Raises:
        UntraceableError: The nodes have no order, or two of them produce one value.
    """
    body.check_producers()
    producers = body.producers
    pending = [producers[name] for name in names if name in producers]
    found: dict[int, Operation] = {}
    is_sorted = True
    while pending:
        number = pending.pop()
        if number in found:
            continue
        operation = found[number] = body.get_operation(number)
        read_names = operation.inputs
        if operation.attribute_bytes and body.get_subgraphs(number):
            read_names = (*read_names, *body.list_captured_at(number))
            positions: Container[int] = range(len(read_names))
        else:
            positions = select_operands(operation.function_key, len(read_names))
        for position, name in enumerate(read_names):
            maker = producers.get(name)
            if maker is not None:
                is_sorted = is_sorted and maker < number
                if position in positions:
                    pending.append(maker)
    if is_sorted:
        yield from (found[number] for number in sorted(found))
        return
    dependencies = {
        number: {producers[name] for name in _list_read_names(body, number) if name in producers}
        & found.keys()
        for number in found
    }
    try:
        for number in TopologicalSorter(dict(sorted(dependencies.items()))).static_order():
            yield found[number]
    except CycleError:
        raise UntraceableError("its nodes feed each other in a circle") from None


def _list_read_names(body: Body, number: int) -> tuple[str, ...]:
    return (*body.get_operation(number).inputs, *body.list_captured_at(number))
