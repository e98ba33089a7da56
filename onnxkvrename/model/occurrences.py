"""Every place in a model where a name is seen, and what it means there.

Field numbers are those of onnx.proto (ONNX IR version 13). Local functions
have names of their own, so nothing in them is a place; they are walked only
for the external data of tensors in them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import NamedTuple

from onnxkvrename.model.proto_reader import (
    GRAPH_INPUT,
    GRAPH_OUTPUT,
    ExternalReference,
    find_graph,
    find_message,
    find_shape_symbols,
    find_single_record,
    find_string,
    read_external_reference,
)
from onnxkvrename.model.protobuf import LENGTH, ByteSource, Record, read_fields
from onnxkvrename.model.signature import NameUses

DIM_SYMBOL_MARKER = b"_dim_"
"""What a symbol that an exporter derived from a name has between the name and the axis."""
_LOCATION_KEY = b"location"
_MAX_STEMS = 64
_STEM_SIZE = 5
"""Bytes of a stem that few other names begin with; every search more costs as much as a walk."""


class Occurrence(NamedTuple):
    """One place where a name stands.

    ``role`` is what it means there: ``input`` and ``output`` of a graph,
    ``value_info``, ``reads`` and ``produces`` (a node's, with its ``op_type``),
    ``initializer``, ``annotation`` (of quantization), ``sharding``, ``binding``
    (of training). ``scope`` numbers the graph it is in; 0 is the main graph.
    """

    name: str
    role: str
    scope: int
    record: Record
    op_type: str = ""

    @property
    def is_definition(self) -> bool:
        """Whether the name comes into being here, so that it hides an outer one."""
        return self.role in ("input", "produces", "initializer")


class Occurrences(NamedTuple):
    """The places of the names asked for, symbols near them, and all external data.

    ``symbols`` are those that may be derived from a name, on graph inputs and
    outputs and on each value_info that has to do with one of the names. ``parents[scope]`` is the
    scope around a scope; around the main graph there is -1.
    """

    occurrences: tuple[Occurrence, ...]
    symbols: tuple[tuple[str, Record], ...]
    references: tuple[ExternalReference, ...]
    parent_scopes: tuple[int, ...]

    def find_in_main_graph(self) -> Iterator[Occurrence]:
        """The places that mean a value of the main graph: no nearer scope defines the name."""
        defined = {(place.scope, place.name) for place in self.occurrences if place.is_definition}
        for place in self.occurrences:
            scope = place.scope
            while scope > 0 and (scope, place.name) not in defined:
                scope = self.parent_scopes[scope]
            if scope <= 0:
                yield place

    def build_name_uses(self, names: Mapping[str, str]) -> NameUses:
        """What the graph does with the old names, and where the new ones already stand."""
        main = list(self.find_in_main_graph())
        moving = {place.record.start for place in main if place.name in names}
        new = set(names.values())
        return NameUses(
            producer_op_types={
                place.name: place.op_type
                for place in main
                if place.role == "produces" and place.scope == 0
            },
            read_names=frozenset(
                place.name
                for place in main
                if place.role == "reads" or (place.role == "output" and place.scope > 0)
            ),
            symbols=frozenset(name for name, _ in self.symbols),
            taken_names={
                place.name: _describe_occurrence(place)
                for place in self.occurrences
                if place.name in new and place.record.start not in moving
            },
        )

    def build_edits(
        self, names: Mapping[str, str], symbols: Mapping[str, str]
    ) -> Iterator[tuple[Record, bytes]]:
        """What to write where, so that values and symbols go by their new names."""
        values = ((names.get(place.name), place.record) for place in self.find_in_main_graph())
        dims = ((symbols.get(name), record) for name, record in self.symbols)
        for new, record in chain(values, dims):
            if new is not None:
                yield record, new.encode("utf-8", "surrogateescape")


def _describe_occurrence(place: Occurrence) -> str:
    what = {
        "input": "a graph input",
        "output": "a graph output",
        "produces": f"what a {place.op_type} node produces",
        "reads": f"what a {place.op_type} node reads",
        "initializer": "an initializer",
    }.get(place.role, f"a name in {place.role}")
    return what if place.scope == 0 else f"{what} in a subgraph"


def find_occurrences(source: ByteSource, names: Iterable[str]) -> Occurrences:
    """Find every place of ``names``, in the main graph and in all graphs below it."""
    walker = _GraphWalker(source, names)
    main = walker.walk_graph(find_graph(source), -1)
    for record in read_fields(source, source.root):
        if record.wire_type == LENGTH and record.number == 20:
            walker.walk_training_info(record, main)
        elif record.wire_type == LENGTH and record.number == 25:
            walker.walk_function(record)
    return Occurrences(
        tuple(walker.places),
        tuple(walker.symbols),
        tuple(walker.references.values()),
        tuple(walker.parents),
    )


def _choose_stems(names: Iterable[bytes]) -> tuple[bytes, ...] | None:
    """A few byte strings of which every name holds one; ``None`` if it takes many.

    Buffers differ in their numbers, so what stands between the numbers will do;
    and what several of these begin with does for all of them.
    """
    stems: list[bytes] = []
    for name in sorted(names, key=len):
        if name and not any(stem in name for stem in stems):
            stems.append(max(re.split(rb"[0-9]+", name), key=len) or name)
            if len(stems) > _MAX_STEMS:
                return None
    return tuple(sorted({stem[:_STEM_SIZE] for stem in stems}))


class _GraphWalker:
    """Collects places and references; a method for each message that holds some."""

    def __init__(self, source: ByteSource, names: Iterable[str]) -> None:
        self.source = source
        self.wanted = {name.encode("utf-8", "surrogateescape"): name for name in names}
        self.wanted.pop(b"", None)
        stems = _choose_stems(self.wanted)
        self.stems = None if stems is None else (*stems, _LOCATION_KEY)
        self.longest = max(map(len, self.wanted), default=0)
        self.places: list[Occurrence] = []
        self.parents: list[int] = []
        self.symbols: list[tuple[str, Record]] = []
        self.references: dict[tuple[str, str], ExternalReference] = {}

    def walk_graph(self, graph: Record, around: int | None) -> int | None:
        """Walk a graph as a scope of its own; in a function (``None``) no name counts."""
        scope = None
        if around is not None:
            scope = len(self.parents)
            self.parents.append(around)
        always = frozenset((GRAPH_INPUT, GRAPH_OUTPUT))
        for record in read_fields(self.source, graph, stems=self.stems, always=always):
            if record.wire_type != LENGTH:
                continue
            match record.number:
                case 1:
                    self.walk_node(record, scope)
                case 5:
                    self.walk_tensor(record, scope)
                case 15:
                    self.walk_sparse_tensor(record, scope)
                case 11:
                    self.walk_value(record, "input", scope)
                case 12:
                    self.walk_value(record, "output", scope)
                case 13:
                    self.walk_value(record, "value_info", scope)
                case 14:
                    self.walk_annotation(record, scope)
        return scope

    def add_occurrence(
        self, record: Record | None, role: str, scope: int | None, op_type: str = ""
    ) -> None:
        """Keep the place if its name was asked for."""
        if record is None or scope is None or record.end - record.start > self.longest:
            return
        name = self.wanted.get(self.source.read_payload(record))
        if name is not None:
            self.places.append(Occurrence(name, role, scope, record, op_type))

    def walk_node(self, node: Record, scope: int | None) -> None:
        ends, op_type = [], ""
        for record in read_fields(self.source, node):
            if record.wire_type != LENGTH:
                continue
            match record.number:
                case 1 | 2:
                    ends.append(record)
                case 4:
                    op_type = self.source.read_string(record)
                case 5:
                    self.walk_attribute(record, scope)
                case 10:
                    for spec in read_fields(self.source, record):
                        if spec.number == 2 and spec.wire_type == LENGTH:
                            name = find_string(read_fields(self.source, spec), 1)
                            self.add_occurrence(name, "sharding", scope)
        for record in ends:
            self.add_occurrence(
                record, "reads" if record.number == 1 else "produces", scope, op_type
            )

    def walk_attribute(self, attribute: Record, scope: int | None) -> None:
        graphs = []
        for record in read_fields(self.source, attribute, stems=self.stems, always=frozenset((6,))):
            if record.wire_type != LENGTH:
                continue
            match record.number:
                case 5 | 10:
                    self.walk_tensor(record, None)
                case 22 | 23:
                    self.walk_sparse_tensor(record, None)
                case 6:
                    graphs.append(record)
                case 11:
                    self.walk_graph(record, scope)
        if graph := find_single_record(self.source, graphs, "graph in an attribute"):
            self.walk_graph(graph, scope)

    def walk_value(self, value: Record, role: str, scope: int | None) -> None:
        parts = list(read_fields(self.source, value))
        self.add_occurrence(find_string(parts, 1), role, scope)
        type_ = find_message(self.source, parts, 2, "type")
        if (
            type_ is not None
            and scope is not None
            and self.source.may_contain(type_, DIM_SYMBOL_MARKER)
        ):
            for symbol in find_shape_symbols(self.source, type_):
                self.symbols.append((self.source.read_string(symbol), symbol))

    def walk_annotation(self, annotation: Record, scope: int | None) -> None:
        parts = list(read_fields(self.source, annotation))
        self.add_occurrence(find_string(parts, 1), "annotation", scope)
        for entry in parts:
            if entry.number == 2 and entry.wire_type == LENGTH:
                name = find_string(read_fields(self.source, entry), 2)
                self.add_occurrence(name, "annotation", scope)

    def walk_sparse_tensor(self, sparse: Record, scope: int | None) -> None:
        """A sparse tensor goes by the name of its values."""
        for number, where in ((1, scope), (2, None)):
            parts = read_fields(self.source, sparse)
            tensor = find_message(self.source, parts, number, "tensor in a sparse tensor")
            if tensor is not None:
                self.walk_tensor(tensor, where)

    def walk_tensor(self, tensor: Record, scope: int | None) -> None:
        """An initializer, or with no scope a tensor that nobody calls by its name."""
        parts = list(read_fields(self.source, tensor))
        if scope is not None:
            self.add_occurrence(find_string(parts, 8), "initializer", scope)
        wanted = read_external_reference(self.source, parts)
        if wanted is not None:
            key = wanted.location, wanted.problem
            known = self.references.get(key, wanted)
            self.references[key] = max(known, wanted, key=lambda reference: reference.end_offset)

    def walk_training_info(self, training: Record, main: int | None) -> None:
        """The graphs of training see the main graph; bindings name what they define."""
        scopes: dict[int, int | None] = {}
        for number in (1, 2):
            graph = find_message(
                self.source, read_fields(self.source, training), number, "training graph"
            )
            scopes[number] = main if graph is None else self.walk_graph(graph, main)
        for binding in read_fields(self.source, training):
            if binding.number in (3, 4) and binding.wire_type == LENGTH:
                parts = list(read_fields(self.source, binding))
                produced_in = scopes[1 if binding.number == 3 else 2]
                self.add_occurrence(find_string(parts, 1), "binding", scopes[2])
                self.add_occurrence(find_string(parts, 2), "binding", produced_in)

    def walk_function(self, function: Record) -> None:
        stems = (_LOCATION_KEY,)
        for node in read_fields(self.source, function, stems=stems):
            if node.number == 7 and node.wire_type == LENGTH:
                self.walk_node(node, None)
