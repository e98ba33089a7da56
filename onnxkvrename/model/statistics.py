"""How much is in a model: nodes and bytes of weights, by their length prefixes alone.

Field numbers are those of onnx.proto (ONNX IR version 13).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from onnxkvrename.model import proto_reader as messages
from onnxkvrename.model.protobuf import LENGTH, Record, Source, fields

_DATA = frozenset((4, 5, 6, 7, 9, 10, 11))
"""The fields of a TensorProto that hold its values."""
_EXTERNAL_DATA = 13
_LARGE = 1 << 10
"""Bytes of a node in which tensors count as weights; smaller ones are the graph itself."""

Walk = Callable[[Record], object]


class Weight(NamedTuple):
    """What a model has in it.

    ``nodes`` are those of the main graph; ``inline`` is the number of tensors
    with their values in the model, ``size`` the bytes of these, and
    ``external`` the number of the other tensors. All graphs, attributes of
    large nodes and local functions count.
    """

    nodes: int = 0
    functions: tuple[str, ...] = ()
    inline: int = 0
    size: int = 0
    external: int = 0


def weigh(source: Source) -> Weight:
    """Count the nodes of a model and add up its tensors; no values are read.

    Raises :class:`ModelError` for bytes that are no model.
    """
    scale = _Scale(source)
    nodes = scale.graph(messages.graph(source))
    functions = []
    for record in fields(source, source.root):
        if record.wire == LENGTH and record.number == 20:
            scale.inside(record, {1: scale.graph, 2: scale.graph})
        elif record.wire == LENGTH and record.number == 25:
            functions.append(messages.text(source, scale.function(record)))
    return Weight(nodes, tuple(functions), scale.inline, scale.size, scale.external)


class _Scale:
    """Adds up tensors; a method for each message that holds some."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.inline = self.size = self.external = 0

    def inside(self, message: Record, walks: Mapping[int, Walk]) -> None:
        """Walk those fields of a message that hold something to weigh."""
        for record in fields(self.source, message, stems=(), always=frozenset(walks)):
            if record.wire == LENGTH and record.number in walks:
                walks[record.number](record)

    def graph(self, graph: Record) -> int:
        """Weigh what is in a graph, and return the number of its nodes."""
        nodes = 0
        for record in fields(self.source, graph):
            if record.wire != LENGTH:
                continue
            if record.number == 1:
                nodes += 1
                if record.end - record.body >= _LARGE:
                    self.node(record)
            elif record.number == 5:
                self.tensor(record)
            elif record.number == 15:
                self.sparse_tensor(record)
        return nodes

    def function(self, function: Record) -> Record | None:
        """Weigh what is in a local function, and return where its name stands."""
        parts = list(fields(self.source, function))
        for record in parts:
            large = record.end - record.body >= _LARGE
            if record.number == 7 and record.wire == LENGTH and large:
                self.node(record)
        return messages.string(parts, 1)

    def node(self, node: Record) -> None:
        """Weigh what the attributes of a node hold."""
        self.inside(node, {5: self.attribute})

    def attribute(self, attribute: Record) -> None:
        """Weigh tensors and graphs, one or several of each."""
        dense, sparse = self.tensor, self.sparse_tensor
        graphs: Mapping[int, Walk] = {6: self.graph, 11: self.graph}
        self.inside(attribute, {**graphs, 5: dense, 10: dense, 22: sparse, 23: sparse})

    def sparse_tensor(self, sparse: Record) -> None:
        """Weigh the values of a sparse tensor, and their indices."""
        self.inside(sparse, {1: self.tensor, 2: self.tensor})

    def tensor(self, tensor: Record) -> None:
        """Add a tensor up: its values are stepped over, or lie elsewhere."""
        for record in fields(self.source, tensor):
            if record.number in _DATA:
                self.size += record.end - record.body
            elif record.number == _EXTERNAL_DATA:
                self.external += 1
                return
        self.inline += 1
