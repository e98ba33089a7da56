"""How much is in a model: nodes and bytes of weights, by their length prefixes alone.

Field numbers are those of onnx.proto (ONNX IR version 13).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from onnxkvrename.model.proto_reader import find_graph, find_string, read_optional_string
from onnxkvrename.model.protobuf import LENGTH, ByteSource, Record, read_fields

_VALUE_FIELDS = frozenset((4, 5, 6, 7, 9, 10, 11))
"""The fields of a TensorProto that hold its values."""
_EXTERNAL_DATA_FIELD = 13
_LARGE_NODE_SIZE = 1 << 10
"""Bytes of a node in which tensors count as weights; smaller ones are the graph itself."""

WalkFunction = Callable[[Record], object]


class ModelStats(NamedTuple):
    """What a model has in it.

    ``nodes`` are those of the main graph; ``inline`` is the number of tensors
    with their values in the model, ``size`` the bytes of these, and
    ``external`` the number of the other tensors. All graphs, attributes of
    large nodes and local functions count.
    """

    node_count: int = 0
    function_names: tuple[str, ...] = ()
    inline_tensor_count: int = 0
    inline_bytes: int = 0
    external_tensor_count: int = 0


def collect_model_stats(source: ByteSource) -> ModelStats:
    """Count the nodes of a model and add up its tensors; no values are read.

    Raises :class:`ModelError` for bytes that are no model.
    """
    scale = _StatsCollector(source)
    nodes = scale.walk_graph(find_graph(source))
    functions = []
    for record in read_fields(source, source.root):
        if record.wire_type == LENGTH and record.number == 20:
            scale.walk_fields(record, {1: scale.walk_graph, 2: scale.walk_graph})
        elif record.wire_type == LENGTH and record.number == 25:
            functions.append(read_optional_string(source, scale.walk_function(record)))
    return ModelStats(nodes, tuple(functions), scale.inline, scale.size, scale.external)


class _StatsCollector:
    """Adds up tensors; a method for each message that holds some."""

    def __init__(self, source: ByteSource) -> None:
        self.source = source
        self.inline = self.size = self.external = 0

    def walk_fields(self, message: Record, walks: Mapping[int, WalkFunction]) -> None:
        """Walk those fields of a message that hold something to weigh."""
        for record in read_fields(self.source, message, stems=(), always=frozenset(walks)):
            if record.wire_type == LENGTH and record.number in walks:
                walks[record.number](record)

    def walk_graph(self, graph: Record) -> int:
        """Weigh what is in a graph, and return the number of its nodes."""
        nodes = 0
        for record in read_fields(self.source, graph):
            if record.wire_type != LENGTH:
                continue
            if record.number == 1:
                nodes += 1
                if record.end - record.start >= _LARGE_NODE_SIZE:
                    self.walk_node(record)
            elif record.number == 5:
                self.walk_tensor(record)
            elif record.number == 15:
                self.walk_sparse_tensor(record)
        return nodes

    def walk_function(self, function: Record) -> Record | None:
        """Weigh what is in a local function, and return where its name stands."""
        parts = list(read_fields(self.source, function))
        for record in parts:
            large = record.end - record.start >= _LARGE_NODE_SIZE
            if record.number == 7 and record.wire_type == LENGTH and large:
                self.walk_node(record)
        return find_string(parts, 1)

    def walk_node(self, node: Record) -> None:
        """Weigh what the attributes of a node hold."""
        self.walk_fields(node, {5: self.walk_attribute})

    def walk_attribute(self, attribute: Record) -> None:
        """Weigh tensors and graphs, one or several of each."""
        dense, sparse = self.walk_tensor, self.walk_sparse_tensor
        graphs: Mapping[int, WalkFunction] = {6: self.walk_graph, 11: self.walk_graph}
        self.walk_fields(attribute, {**graphs, 5: dense, 10: dense, 22: sparse, 23: sparse})

    def walk_sparse_tensor(self, sparse: Record) -> None:
        """Weigh the values of a sparse tensor, and their indices."""
        self.walk_fields(sparse, {1: self.walk_tensor, 2: self.walk_tensor})

    def walk_tensor(self, tensor: Record) -> None:
        """Add a tensor up: its values are stepped over, or lie elsewhere."""
        for record in read_fields(self.source, tensor):
            if record.number in _VALUE_FIELDS:
                self.size += record.end - record.start
            elif record.number == _EXTERNAL_DATA_FIELD:
                self.external += 1
                return
        self.inline += 1
