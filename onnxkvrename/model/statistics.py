"""Count the nodes and the bytes of weights of a model, by length prefixes alone.

Field numbers are those of onnx.proto (ONNX IR version 13).
"""

from __future__ import annotations

from typing import NamedTuple

from onnxkvrename.model.proto_reader import (
    FUNCTION,
    find_graph,
    find_string,
    list_root_fields,
    read_optional_string,
)
from onnxkvrename.model.protobuf import LENGTH, SHORT_SIZE, ByteSource, Record, read_fields

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
VALUE_FIELDS = frozenset((4, 5, 6, 7, 9, 10, 11))
"""The fields of a TensorProto that hold its values."""
_NODE, _EXTERNAL_DATA_FIELD = 1, 13
_MIN_TENSOR_SIZE = 3
"""Bytes that a tensor needs at least to hold a value."""
_LARGE_NODE_SIZE = SHORT_SIZE
"""Bytes of a node in which tensors count as weights; smaller ones are the graph itself."""


class ModelStats(NamedTuple):
    """The size of a model. Tensors count in all graphs, large nodes and local functions.

    Attributes:
        node_count: Nodes of the main graph.
        function_names: Names of the local functions.
        inline_tensor_count: Tensors with their values in the model.
        inline_bytes: Bytes of these values.
        external_tensor_count: Tensors with their values in another file.
    """

    node_count: int = 0
    function_names: tuple[str, ...] = ()
    inline_tensor_count: int = 0
    inline_bytes: int = 0
    external_tensor_count: int = 0


def collect_model_stats(source: ByteSource) -> ModelStats:
    """Count the nodes of a model and add up its tensors, without reading their values.

    Raises:
        ModelError: The bytes are not a model.
    """
    main = find_graph(source)
    node_count = inline_count = inline_bytes = external_count = 0

    def count_nodes(nodes: list[bytes]) -> None:
        nonlocal node_count
        node_count += len(nodes)

    pending = [(source.root, "model")]
    while pending:
        message, kind = pending.pop()
        nested = NESTED_FIELDS[kind]
        shorts = {_NODE: count_nodes} if message.start == main.start else {}
        for record in read_fields(
            source, message, stems=(), always=frozenset(nested), shorts=shorts
        ):
            inner = nested.get(record.number)
            if inner is None or record.wire_type != LENGTH:
                continue
            node_count += inner == "node" and message.start == main.start
            if inner == "tensor":
                size = _measure_values(source, record)
                inline_count += size is not None
                inline_bytes += size or 0
                external_count += size is None
            elif inner != "node" or record.end - record.start >= _LARGE_NODE_SIZE:
                pending.append((record, inner))
    names = tuple(
        _read_function_name(source, record)
        for record in list_root_fields(source)
        if record.wire_type == LENGTH and record.number == FUNCTION
    )
    return ModelStats(node_count, names, inline_count, inline_bytes, external_count)


def _measure_values(source: ByteSource, tensor: Record) -> int | None:
    """Return the bytes of a tensor's values in the model; `None` if they are in another file."""
    if tensor.end - tensor.start < _MIN_TENSOR_SIZE:
        return 0
    size = 0
    for record in read_fields(source, tensor):
        if record.number in VALUE_FIELDS:
            size += record.end - record.start
        elif record.number == _EXTERNAL_DATA_FIELD:
            return None
    return size


def _read_function_name(source: ByteSource, function: Record) -> str:
    fields = read_fields(source, function, stems=(), always=frozenset({1}))
    return read_optional_string(source, find_string(fields, 1))
