"""Find occurrences: every position in a model where a name denotes a value, and its role there.

Field numbers are those of onnx.proto (ONNX IR version 13). A local function has names of its
own: they are found by texts that they contain, or not at all.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import NamedTuple

from onnxkvrename.limits import MAX_ENTRIES, MAX_MATCHED_CHARS
from onnxkvrename.model.proto_reader import (
    FUNCTION,
    GRAPH_INPUT,
    GRAPH_OUTPUT,
    TENSOR_FIELDS,
    TRAINING_INFO,
    ExternalReference,
    find_graph,
    find_message,
    find_shape_symbols,
    find_single_record,
    find_string,
    list_root_fields,
    read_external_reference,
    split_usual_form,
)
from onnxkvrename.model.protobuf import (
    BLOCK_SIZE,
    LENGTH,
    ByteSource,
    Record,
    list_fields,
    read_fields,
)
from onnxkvrename.model.signature import NameUses

DIM_SYMBOL_MARKER = b"_dim_"
"""Text between name and axis in a symbol that an exporter derived from a value's name.

As `torch.onnx` does: `Concatpast_key.0_RetainedState_dim_2`."""
_LOCATION_KEY = b"location"
_TEXT_TAGS = frozenset(number << 3 | LENGTH for number in (1, 2, 3, 4, 6, 7, 8))
"""The tags of the fields of a node that are texts: names of values and operators, and docs."""
_NAMED = frozenset({1, 2})
"""The fields of a message whose first is a name: the name, and what it is for."""
_NO_NAMES: Mapping[str, str] = MappingProxyType({})
_LONGEST_IN_FUNCTION = 4 * MAX_MATCHED_CHARS
"""Bytes of the longest name in a local function that counts: no rule is tried on longer ones."""
_STEM_COUNT = 64
_STEM_SIZE = 5
"""Bytes that few other names begin with. Longer stems are more searches, and each costs as much
as a walk over all fields."""


class Occurrence(NamedTuple):
    """One occurrence of a name.

    Attributes:
        name: The name.
        role: `input` or `output` of a graph, `value_info`, `reads` or `produces` (of a
            node), `initializer`, `annotation` (of quantization), `sharding` or `binding`
            (of training).
        scope: Number of the graph; 0 is the main graph.
        record: The record whose payload is the name.
        op_type: The op type of the node that reads or produces the value.
    """

    name: str
    role: str
    scope: int
    record: Record
    op_type: str = ""

    @property
    def is_definition(self) -> bool:
        """True if the value is defined here, so that it hides an outer one of the same name."""
        return self.role in ("input", "produces", "initializer")


class Occurrences(NamedTuple):
    """All occurrences of some names in a model.

    Attributes:
        occurrences: The occurrences, in all graphs.
        in_main_graph: Those that refer to a value of the main graph: the ones in it, and the
            ones in a subgraph, unless that or a graph around it defines the name itself.
        symbols: Symbols that may be derived from a name, with their records: those of graph
            inputs and outputs, and of each value_info that contains one of the names.
        references: The external data of all tensors, one for each file and problem.
        parent_scopes: For each scope the scope around it; -1 for the main graph.
        functions: The same of each local function, which is its own main graph.
    """

    occurrences: tuple[Occurrence, ...]
    in_main_graph: tuple[Occurrence, ...]
    symbols: tuple[tuple[str, Record], ...]
    references: tuple[ExternalReference, ...]
    parent_scopes: tuple[int, ...]
    functions: tuple[Occurrences, ...] = ()

    @property
    def names_in_functions(self) -> frozenset[str]:
        """The names of values of local functions."""
        return frozenset(item.name for each in self.functions for item in each.in_main_graph)

    def build_name_uses(
        self, names: Mapping[str, str], function_names: Mapping[str, str] = _NO_NAMES
    ) -> NameUses:
        """Return how the graph uses old names, and which new names graph and functions have.

        The names that change in functions are `function_names`.
        """
        main = self.in_main_graph
        taken = {item.name: _describe_occurrence(item) for item in self._find_clashes(names)}
        hidden = {item.name: _describe_occurrence(item) for item in self._find_hiding(names)}
        for function in self.functions if function_names else ():
            inner = function._build_inner_uses(function_names)
            taken |= inner.taken_names
            hidden |= inner.hidden_names
        return NameUses(
            producer_op_types={
                item.name: item.op_type
                for item in main
                if item.role == "produces" and item.scope == 0
            },
            read_names=frozenset(
                item.name
                for item in main
                if item.role == "reads" or (item.role == "output" and item.scope > 0)
            ),
            symbols=frozenset(symbol for symbol, _ in self.symbols),
            taken_names=taken,
            hidden_names=hidden,
        )

    def _build_inner_uses(self, names: Mapping[str, str]) -> NameUses:
        """Return the new names that this function has already; it may have a part of the names."""
        new_names = {i.name: names[i.name] for i in self.in_main_graph if i.name in names}
        uses = self.build_name_uses(new_names)
        counts = Counter(new_names.values())
        taken = {new: "the new name of two values" for new, count in counts.items() if count > 1}
        return uses._replace(
            taken_names={
                name: f"{use.replace('a graph', 'an')} of a local function"
                for name, use in {**taken, **uses.taken_names}.items()
            }
        )

    def _find_clashes(self, names: Mapping[str, str]) -> Iterator[Occurrence]:
        """Yield what would come to denote another value than now, or capture one.

        That is each occurrence of a new name that belongs to the main graph and keeps its
        name, and each definition in a subgraph that is between a renamed occurrence and
        the main graph.
        """
        new_names = set(names.values())
        definitions = {
            (item.scope, item.name): item
            for item in self.occurrences
            if item.scope > 0 and item.is_definition and item.name in new_names
        }
        for item in self.in_main_graph:
            new_name = names.get(item.name)
            if new_name is None:
                if item.name in new_names:
                    yield item
                continue
            scope = item.scope
            while scope > 0 and definitions:
                if (scope, new_name) in definitions:
                    yield definitions[scope, new_name]
                scope = self.parent_scopes[scope]

    def _find_hiding(self, names: Mapping[str, str]) -> Iterator[Occurrence]:
        """Yield definitions of new names in subgraphs that see the renamed value.

        Readers sort nodes in ways of their own, so a subgraph may see what any other node
        produces. But a branch may call its output as its own node calls it.
        """
        old_names = {new: old for old, new in names.items()}
        definitions: dict[str, list[Occurrence]] = {}
        for item in self.in_main_graph:
            if item.is_definition and item.scope == 0 and item.name in names:
                definitions.setdefault(item.name, []).append(item)
        for item in self.occurrences:
            if item.scope > 0 and item.is_definition and item.name in old_names:
                outer = definitions.get(old_names[item.name], ())
                if any(_is_visible(definition, item) for definition in outer):
                    yield item

    def build_edits(
        self,
        names: Mapping[str, str],
        symbols: Mapping[str, str],
        function_names: Mapping[str, str] = _NO_NAMES,
    ) -> list[tuple[Record, bytes]]:
        """Return each record that must change, with its new payload; all maps are old to new."""
        inside = (function.build_edits(function_names, {}) for function in self.functions)
        values = ((names.get(item.name), item.record) for item in self.in_main_graph)
        dims = ((symbols.get(symbol), record) for symbol, record in self.symbols)
        return [
            (record, new_name.encode("utf-8", "surrogateescape"))
            for new_name, record in chain(values, dims)
            if new_name is not None
        ] + list(chain.from_iterable(inside))


def _is_visible(definition: Occurrence, inner: Occurrence) -> bool:
    """Return whether a value of the main graph may exist where a subgraph defines one."""
    node = definition.record.parent
    if definition.role != "produces" or node is None:
        return True
    return not node.start <= inner.record.start < node.end


def _describe_occurrence(occurrence: Occurrence) -> str:
    description = {
        "input": "a graph input",
        "output": "a graph output",
        "produces": f"an output of a {occurrence.op_type} node",
        "reads": f"an input of a {occurrence.op_type} node",
        "initializer": "an initializer",
    }.get(occurrence.role, f"a name in {occurrence.role}")
    return description if occurrence.scope == 0 else f"{description} in a subgraph"


def find_occurrences(
    source: ByteSource, names: Iterable[str], texts_in_functions: Iterable[str] = ()
) -> Occurrences:
    """Find every occurrence of some names, in the main graph and all graphs below it.

    In local functions every name is found that contains one of some texts.

    Raises:
        ModelError: The bytes are not a model, or one that two readers could understand
            differently. Nodes without any of the names are not checked.
    """
    names_by_bytes = {name.encode("utf-8", "surrogateescape"): name for name in names}
    names_by_bytes.pop(b"", None)
    longest = max(map(len, names_by_bytes), default=0)
    walker = _GraphWalker(source, names_by_bytes, _choose_stems(names_by_bytes), longest)
    inside = _NamesWithText(tuple(text.encode("utf-8") for text in texts_in_functions))
    functions = []
    main = walker.walk_graph(find_graph(source), -1)
    for record in list_root_fields(source):
        if record.wire_type == LENGTH and record.number == TRAINING_INFO:
            walker.walk_training_info(record, main)
        elif record.wire_type == LENGTH and record.number == FUNCTION:
            function = _GraphWalker(source, inside, inside.texts, _LONGEST_IN_FUNCTION)
            function.references = walker.references
            function.walk_function(record)
            functions.append(function)
    return walker.get_result()._replace(functions=tuple(each.get_result() for each in functions))


def _select_main_graph(
    occurrences: Sequence[Occurrence], parent_scopes: Sequence[int]
) -> tuple[Occurrence, ...]:
    defined = {(item.scope, item.name) for item in occurrences if item.is_definition}
    selected = []
    for item in occurrences:
        scope = item.scope
        while scope > 0 and (scope, item.name) not in defined:
            scope = parent_scopes[scope]
        if scope <= 0:
            selected.append(item)
    return tuple(selected)


def _choose_stems(names: Iterable[bytes]) -> tuple[bytes, ...] | None:
    """Choose a few byte strings of which every name contains one; `None` if that needs many.

    Names of buffers differ in their numbers, so a part between numbers will do; and what
    several of these parts begin with does for all of them.
    """
    stems: list[bytes] = []
    for name in sorted(names, key=len):
        if name and not any(stem in name for stem in stems):
            stems.append(max(re.split(rb"[0-9]+", name), key=len) or name)
            if len(stems) > _STEM_COUNT:
                return None
    return tuple(sorted({stem[:_STEM_SIZE] for stem in stems}))


class _NamesWithText:
    """All names that contain one of some texts, like a mapping of bytes to names."""

    def __init__(self, texts: tuple[bytes, ...]) -> None:
        self.texts = texts

    def __contains__(self, name: object) -> bool:
        return isinstance(name, bytes) and any(text in name for text in self.texts)

    def get(self, name: bytes) -> str | None:
        """Return a name as text if it is one of these."""
        return name.decode("utf-8", "surrogateescape") if name in self else None


class _GraphWalker:
    """Collects occurrences and references, with a method for each message that may hold some.

    A scope of `None` means that names do not count.
    """

    def __init__(
        self,
        source: ByteSource,
        names_by_bytes: Mapping[bytes, str] | _NamesWithText,
        stems: tuple[bytes, ...] | None,
        longest_name: int,
    ) -> None:
        self.source = source
        self.names_by_bytes = names_by_bytes
        self.stems = None if stems is None else (*stems, _LOCATION_KEY)
        self.longest_name = longest_name
        self.occurrences: list[Occurrence] = []
        self.parent_scopes: list[int] = []
        self.symbols: list[tuple[str, Record]] = []
        self.references: dict[tuple[str, str], ExternalReference] = {}

    def get_result(self) -> Occurrences:
        """Return what was found."""
        return Occurrences(
            tuple(self.occurrences),
            _select_main_graph(self.occurrences, self.parent_scopes),
            tuple(self.symbols),
            tuple(self.references.values()),
            tuple(self.parent_scopes),
        )

    def walk_graph(self, graph: Record, parent_scope: int | None) -> int | None:
        """Walk a graph as a scope of its own, and return that scope."""
        scope = None
        if parent_scope is not None:
            scope = len(self.parent_scopes)
            self.parent_scopes.append(parent_scope)
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
        """Add an occurrence if its name was asked for."""
        name = None if record is None or scope is None else self.find_name(record)
        if name is None or record is None or scope is None:
            return
        self.occurrences.append(Occurrence(name, role, scope, record, op_type))
        if len(self.occurrences) > MAX_ENTRIES:
            what = "occurrences of KV buffers' names"
            raise self.source.build_limit_error(MAX_ENTRIES, what, record)

    def find_name(self, record: Record) -> str | None:
        """Return the name in a record if it was asked for."""
        if not 0 < record.end - record.start <= self.longest_name:
            return None
        return self.names_by_bytes.get(self.source.read_payload(record))

    def walk_node(self, node: Record, scope: int | None) -> None:
        if self.has_plain_other_names(node):
            return
        values: list[Record] = []
        op_type = ""
        for record in read_fields(self.source, node):
            if record.wire_type != LENGTH:
                continue
            match record.number:
                case 1 | 2:
                    if scope is not None and self.find_name(record) is not None:
                        values.append(record)
                case 4:
                    op_type = self.source.read_string(record)
                case 5:
                    self.walk_attribute(record, scope)
                case 10:
                    for spec in read_fields(self.source, record):
                        if spec.number == 2 and spec.wire_type == LENGTH:
                            name = find_string(read_fields(self.source, spec), 1)
                            self.add_occurrence(name, "sharding", scope)
        for record in values:
            role = "reads" if record.number == 1 else "produces"
            self.add_occurrence(record, role, scope, op_type)

    def has_plain_other_names(self, node: Record) -> bool:
        """Return whether a node is short texts only, and none of them a name that was asked for.

        Many nodes may have names with a stem in them.
        """
        size = node.end - node.start
        if size > BLOCK_SIZE:
            return False
        data, names, position = self.source.read_slice(node.start, size), self.names_by_bytes, 0
        while position + 1 < size:
            start = position + 2
            if data[position] not in _TEXT_TAGS or data[position + 1] > 0x7F:
                return False
            position = start + data[position + 1]
            if data[start:position] in names:
                return False
        return position == size

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
        usual = split_usual_form(self.source, value)
        if (
            usual is not None
            and usual[0] not in self.names_by_bytes
            and DIM_SYMBOL_MARKER not in usual[1]
        ):
            return
        fields = list_fields(self.source, value, _NAMED)
        self.add_occurrence(find_string(fields, 1), role, scope)
        type_ = find_message(self.source, fields, 2, "type")
        if (
            type_ is not None
            and scope is not None
            and self.source.may_contain(type_, DIM_SYMBOL_MARKER)
        ):
            for symbol in find_shape_symbols(self.source, type_):
                self.symbols.append((self.source.read_string(symbol), symbol))
            if len(self.symbols) > MAX_ENTRIES:
                what = "symbols derived from names"
                raise self.source.build_limit_error(MAX_ENTRIES, what, value)

    def walk_annotation(self, annotation: Record, scope: int | None) -> None:
        fields = list_fields(self.source, annotation, _NAMED)
        self.add_occurrence(find_string(fields, 1), "annotation", scope)
        for entry in fields:
            if entry.number == 2 and entry.wire_type == LENGTH:
                name = find_string(read_fields(self.source, entry), 2)
                self.add_occurrence(name, "annotation", scope)

    def walk_sparse_tensor(self, sparse: Record, scope: int | None) -> None:
        """Walk a sparse tensor, whose name is that of its values (1), not of its indices (2)."""
        for number, tensor_scope in ((1, scope), (2, None)):
            fields = read_fields(self.source, sparse)
            tensor = find_message(self.source, fields, number, "tensor in a sparse tensor")
            if tensor is not None:
                self.walk_tensor(tensor, tensor_scope)

    def walk_tensor(self, tensor: Record, scope: int | None) -> None:
        """Walk an initializer, or with no scope a tensor whose name nothing refers to."""
        fields = list_fields(self.source, tensor, TENSOR_FIELDS)
        if scope is not None:
            self.add_occurrence(find_string(fields, 8), "initializer", scope)
        reference = read_external_reference(self.source, fields)
        if reference is not None:
            key = reference.location, reference.problem
            previous = self.references.get(key, reference)
            self.references[key] = max(previous, reference, key=lambda item: item.end_offset)

    def walk_training_info(self, training: Record, main: int | None) -> None:
        """Walk the two graphs of a training, which see the main graph, and their bindings."""
        scopes: dict[int, int | None] = {}
        for number in (1, 2):
            graphs = read_fields(self.source, training, stems=(), always=frozenset({number}))
            graph = find_message(self.source, graphs, number, "training graph")
            scopes[number] = main if graph is None else self.walk_graph(graph, main)
        for binding in read_fields(self.source, training):
            if binding.number in (3, 4) and binding.wire_type == LENGTH:
                fields = list_fields(self.source, binding, _NAMED)
                producer_scope = scopes[1 if binding.number == 3 else 2]
                self.add_occurrence(find_string(fields, 1), "binding", scopes[2])
                self.add_occurrence(find_string(fields, 2), "binding", producer_scope)

    def walk_function(self, function: Record) -> None:
        """Walk a function as the main graph of its own names."""
        self.parent_scopes.append(-1)
        for record in read_fields(self.source, function, stems=self.stems):
            if record.wire_type != LENGTH:
                continue
            match record.number:
                case 4:
                    self.add_occurrence(record, "input", 0)
                case 5:
                    self.add_occurrence(record, "output", 0)
                case 7:
                    self.walk_node(record, 0)
                case 11:
                    self.walk_attribute(record, 0)
                case 12:
                    self.walk_value(record, "value_info", 0)
