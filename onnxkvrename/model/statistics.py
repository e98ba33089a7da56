"""Count the nodes and the bytes of weights of a model, by length prefixes alone.

Field numbers are those of onnx.proto (ONNX IR version 13).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from onnxkvrename.model.proto_reader import (
    FUNCTION,
    TRAINING_INFO,
    find_graph,
    list_root_fields,
)
from onnxkvrename.model.protobuf import LENGTH, ByteSource, Record, read_fields

_VALUE_FIELDS = frozenset((4, 5, 6, 7, 9, 10, 11))
"""The fields of a TensorProto that hold its values."""
_EXTERNAL_DATA_FIELD = 13
_MIN_TENSOR_SIZE = 3
"""Bytes that a tensor needs at least to hold a value."""
_LARGE_NODE_SIZE = 1 << 10
"""Bytes of a node in which tensors count as weights; smaller ones are the graph itself."""

WalkFunction = Callable[[Record], object]


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
    collector = _StatsCollector(source)
    node_count = collector.walk_graph(find_graph(source))
    function_names = []
    for record in list_root_fields(source):
        if record.wire_type == LENGTH and record.number == TRAINING_INFO:
            collector.walk_fields(record, {1: collector.walk_graph, 2: collector.walk_graph})
        elif record.wire_type == LENGTH and record.number == FUNCTION:
            function_names.append(collector.walk_function(record))
    return ModelStats(
        node_count,
        tuple(function_names),
        collector.inline_tensor_count,
        collector.inline_bytes,
        collector.external_tensor_count,
    )


class _StatsCollector:
    """Adds up tensors, with a method for each message that may hold some."""

    def __init__(self, source: ByteSource) -> None:
        self.source = source
        self.inline_tensor_count = self.inline_bytes = self.external_tensor_count = 0

    def walk_fields(self, message: Record, walks: Mapping[int, WalkFunction]) -> None:
        """Walk the fields of a message that may hold tensors."""
        for record in read_fields(self.source, message, stems=(), always=frozenset(walks)):
            if record.wire_type == LENGTH and record.number in walks:
                walks[record.number](record)

    def walk_graph(self, graph: Record) -> int:
        """Add up the tensors of a graph, and return the number of its nodes."""
        node_count = 0
        for record in read_fields(self.source, graph):
            if record.wire_type != LENGTH:
                continue
            if record.number == 1:
                node_count += 1
                if record.end - record.start >= _LARGE_NODE_SIZE:
                    self.walk_node(record)
            elif record.number == 5:
                self.walk_tensor(record)
            elif record.number == 15:
                self.walk_sparse_tensor(record)
        return node_count

    def walk_function(self, function: Record) -> str:
        """Add up the tensors of a local function, and return its name."""
        name = None
        for record in read_fields(self.source, function):
            is_large = record.end - record.start >= _LARGE_NODE_SIZE
            if record.wire_type == LENGTH and record.number == 1:
                name = record
            elif record.number == 7 and record.wire_type == LENGTH and is_large:
                self.walk_node(record)
        return "" if name is None else self.source.read_string(name)

    def walk_node(self, node: Record) -> None:
        """Add up the tensors in the attributes of a node."""
        self.walk_fields(node, {5: self.walk_attribute})

    def walk_attribute(self, attribute: Record) -> None:
        """Add up tensors and graphs in an attribute, one or several of each."""
        dense, sparse = self.walk_tensor, self.walk_sparse_tensor
        graphs: Mapping[int, WalkFunction] = {6: self.walk_graph, 11: self.walk_graph}
        self.walk_fields(attribute, {**graphs, 5: dense, 10: dense, 22: sparse, 23: sparse})

    def walk_sparse_tensor(self, sparse: Record) -> None:
        """Add up the values of a sparse tensor, and their indices."""
        self.walk_fields(sparse, {1: self.walk_tensor, 2: self.walk_tensor})

    def walk_tensor(self, tensor: Record) -> None:
        """Count a tensor, and the bytes of its values if they are in the model."""
        if tensor.end - tensor.start < _MIN_TENSOR_SIZE:
            self.inline_tensor_count += 1
            return
        for record in read_fields(self.source, tensor):
            if record.number in _VALUE_FIELDS:
                self.inline_bytes += record.end - record.start
            elif record.number == _EXTERNAL_DATA_FIELD:
                self.external_tensor_count += 1
                return
        self.inline_tensor_count += 1
