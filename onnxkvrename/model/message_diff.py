"""Compare two models record by record, as protobuf messages of one schema, without parsing them.

Weights are compared a megabyte at a time and never held. What differs is named by its place in
the schema (`graph.node.input`), with the first values. The schema is that of the installed
onnx; fields that it does not know are compared byte by byte.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Literal, NamedTuple

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from onnxkvrename.model.field_values import (
    BYTES_TYPES,
    MAX_SHOWN_BYTES,
    describe_node,
    is_found_by_name,
    is_node,
    is_repeated,
    quote_key,
    read_all_fields,
    read_key,
    read_numbers,
    show_number,
    show_value,
)
from onnxkvrename.model.protobuf import (
    BLOCK_SIZE,
    LENGTH,
    ByteSource,
    Record,
)

DifferenceKind = Literal["content", "order", "encoding"]

_CHUNK_SIZE = 1 << 20
_UNORDERED_FIELDS = frozenset(
    f"{message}.{field}"
    for message, fields in {
        "ModelProto": ("opset_import", "metadata_props", "functions"),
        "GraphProto": ("initializer", "value_info", "quantization_annotation", "metadata_props"),
        "FunctionProto": ("opset_import", "value_info", "metadata_props"),
        "NodeProto": ("attribute", "metadata_props"),
        "TensorProto": ("external_data", "metadata_props"),
        "ValueInfoProto": ("metadata_props",),
        "TensorAnnotation": ("quant_parameter_tensor_names",),
    }.items()
    for field in fields
)
"""Repeated fields whose order means nothing, as each element is found by its name."""


class Difference(NamedTuple):
    """A difference between two models.

    Attributes:
        kind: `content`; `order` of elements that are found by their names; or `encoding`: the
            same content, written otherwise.
        path: The place in the schema, as `graph.node.input`.
        text: What differs, and in which element.
    """

    kind: DifferenceKind
    path: str
    text: str


def compare_models(expected: ByteSource, actual: ByteSource) -> tuple[Difference, ...]:
    """Return the first difference in content between two models, and no other.

    Without one, return all places with another order or encoding; none if the models are equal
    to the byte.

    Args:
        expected: The bytes of one model.
        actual: The bytes of the other one.

    Raises:
        ModelError: Protobuf could not parse one of them.
    """
    others: dict[tuple[str, str], Difference] = {}
    for difference in walk_differences(expected, actual):
        if difference.kind == "content":
            return (difference,)
        others.setdefault((difference.kind, difference.path), difference)
    return tuple(others.values())


def walk_differences(expected: ByteSource, actual: ByteSource) -> Iterator[Difference]:
    """Yield all differences between two models, as :func:`compare_models`."""
    from onnx import ModelProto

    comparison, place = _Comparison(expected, actual), _Place("", "")
    root = ModelProto.DESCRIPTOR
    yield from comparison.compare_messages(root, expected.root, actual.root, place)


class _Place(NamedTuple):
    """Where a message or a field is: in the schema, and in this model."""

    path: str
    label: str

    def enter(self, name: str, label: str = "") -> _Place:
        """Return the place of a field; `label` tells which element of a repeated one."""
        joint = "." if self.path else ""
        return _Place(f"{self.path}{joint}{name}", f"{self.label}{joint}{name}{label}")

    def report(self, kind: DifferenceKind, text: str) -> Difference:
        """Return a difference at this place."""
        return Difference(
            kind, self.path, text if self.label == self.path else f"{self.label}: {text}"
        )


class _Comparison(NamedTuple):
    """Two models; each method yields where they differ, in the order of the file."""

    expected: ByteSource
    actual: ByteSource

    def compare_messages(
        self, schema: Descriptor, expected: Record, actual: Record, place: _Place
    ) -> Iterator[Difference]:
        """Compare two messages, field by field in the order of the file while that is the same."""
        counts: dict[int, int] = {}
        expected_fields = read_all_fields(self.expected, expected)
        actual_fields = read_all_fields(self.actual, actual)
        for one, other in zip_longest(expected_fields, actual_fields):
            if one and other and self._has_equal_short_bytes(one, other):
                counts[one.number] = counts.get(one.number, 0) + 1
                continue
            if not (one and other and self._is_counterpart(schema, one, other)):
                remaining = ([one] if one else []) + list(expected_fields)
                others = ([other] if other else []) + list(actual_fields)
                yield from self._compare_by_number(schema, remaining, others, place, counts)
                return
            yield from self._compare_field(schema, one, other, place, counts.get(one.number, 0))
            counts[one.number] = counts.get(one.number, 0) + 1

    def _has_equal_short_bytes(self, one: Record, other: Record) -> bool:
        """Return whether two records are equal to the byte; false if they do not fit a block."""
        size = one.end - one.tag_start
        if size != other.end - other.tag_start or size > BLOCK_SIZE:
            return False
        expected = self.expected.read_slice(one.tag_start, size)
        return expected == self.actual.read_slice(other.tag_start, size)

    def _is_counterpart(self, schema: Descriptor, one: Record, other: Record) -> bool:
        """Return whether two records are the same field, and the same element of it."""
        if (one.number, one.wire_type) != (other.number, other.wire_type):
            return False
        field = schema.fields_by_number.get(one.number)
        if field is None:
            return True
        if field.message_type is None and not is_repeated(field):
            return False  # of several the last one counts, and that may come later
        if not (is_found_by_name(field) or is_node(field)):
            return True
        return read_key(self.expected, field, one) == read_key(self.actual, field, other)

    def _compare_by_number(
        self,
        schema: Descriptor,
        expected: Sequence[Record],
        actual: Sequence[Record],
        place: _Place,
        counts: dict[int, int],
    ) -> Iterator[Difference]:
        """Compare fields that are in another order, each with the one of its number or name."""
        numbers = dict.fromkeys(record.number for record in (*expected, *actual))
        orders = [
            [record.number for record in records if record.number] for records in (expected, actual)
        ]
        if sorted(orders[0]) == sorted(orders[1]) != [] and orders[0] != orders[1]:
            yield place.report("encoding", "its fields are in a different order")
        expected_groups, actual_groups = _group_by_number(expected), _group_by_number(actual)
        for number in numbers:
            ours, theirs = expected_groups.get(number, []), actual_groups.get(number, [])
            field = schema.fields_by_number.get(number)
            start = counts.get(number, 0)
            if field is None:
                yield from self._compare_unknown(ours, theirs, place, number)
            elif not is_repeated(field):
                yield from self._compare_singular(schema, field, ours, theirs, place)
            elif is_found_by_name(field):
                yield from self._compare_by_key(schema, field, ours, theirs, place)
            elif field.message_type is None and field.type not in BYTES_TYPES:
                yield from self._compare_numbers(field, ours, theirs, place, start)
            else:
                yield from self._compare_in_order(schema, field, ours, theirs, place, start)

    def _compare_in_order(
        self,
        schema: Descriptor,
        field: FieldDescriptor,
        expected: Sequence[Record],
        actual: Sequence[Record],
        place: _Place,
        start: int,
    ) -> Iterator[Difference]:
        if len(expected) != len(actual):
            totals = start + len(expected), start + len(actual)
            entries = "entry" if totals[1] == 1 else "entries"
            text = (
                f"has {totals[1]:,} {entries}, SOURCE has {totals[0]:,}; "
                f"the first difference is at [{start}]"
            )
            yield place.enter(field.name).report("content", text)
            return
        for index, (one, other) in enumerate(zip(expected, actual, strict=True), start):
            yield from self._compare_field(schema, one, other, place, index)

    def _compare_by_key(
        self,
        schema: Descriptor,
        field: FieldDescriptor,
        expected: Sequence[Record],
        actual: Sequence[Record],
        place: _Place,
    ) -> Iterator[Difference]:
        expected_by_key = _group_by_key(self.expected, field, expected)
        actual_by_key = _group_by_key(self.actual, field, actual)
        for key, records in expected_by_key.items():
            others = actual_by_key.get(key, [])
            for one, other in zip(records, others, strict=False):
                yield from self._compare_field(schema, one, other, place, 0)
            if len(records) > len(others):
                yield place.enter(field.name, quote_key(key)).report("content", "is missing")
        for key, others in actual_by_key.items():
            if len(others) > len(expected_by_key.get(key, [])):
                yield place.enter(field.name, quote_key(key)).report("content", "is new")
        common = [key for key in expected_by_key if key in actual_by_key]
        if common != [key for key in actual_by_key if key in expected_by_key]:
            ordered = f"{field.containing_type.name}.{field.name}" not in _UNORDERED_FIELDS
            kind: DifferenceKind = "content" if ordered else "order"
            yield place.enter(field.name).report(kind, "they are in a different order")

    def _compare_singular(
        self,
        schema: Descriptor,
        field: FieldDescriptor,
        expected: Sequence[Record],
        actual: Sequence[Record],
        place: _Place,
    ) -> Iterator[Difference]:
        """Compare a field that counts once, the last one of several."""
        if expected and actual:
            yield from self._compare_field(schema, expected[-1], actual[-1], place, 0)
            if len(expected) != len(actual) or (field.message_type and len(expected) > 1):
                kind: DifferenceKind = "content" if field.message_type else "encoding"
                yield place.enter(field.name).report(kind, "is written several times")
            return
        source, record = (self.expected, expected[-1]) if expected else (self.actual, actual[-1])
        # That a field is there may mean something although it says what its absence says:
        # a dimension of size 0, a tensor without data.
        text = f"{show_value(source, record, field)} is {'missing' if expected else 'new'}"
        yield place.enter(field.name).report("content", text)

    def _compare_unknown(
        self, expected: Sequence[Record], actual: Sequence[Record], place: _Place, number: int
    ) -> Iterator[Difference]:
        """Compare fields that onnx does not know, or groups, by their bytes."""
        if not self._have_equal_bytes(expected, actual):
            name = f"field {number}" if number else "a group"
            yield place.enter(name).report("content", "differs")

    def _compare_numbers(
        self,
        field: FieldDescriptor,
        expected: Sequence[Record],
        actual: Sequence[Record],
        place: _Place,
        start: int,
    ) -> Iterator[Difference]:
        """Compare repeated numbers, which may be packed or not, from the one at `start` on."""
        expected_numbers = read_numbers(self.expected, expected, field)
        actual_numbers = read_numbers(self.actual, actual, field)
        for index, (one, other) in enumerate(zip_longest(expected_numbers, actual_numbers), start):
            if one != other:
                texts = [
                    "nothing" if n is None else show_number(n, field.type) for n in (one, other)
                ]
                text = f"{texts[1]} instead of {texts[0]}"
                yield place.enter(field.name, f"[{index}]").report("content", text)
                return
        if not self._have_equal_bytes(expected, actual):
            yield place.enter(field.name).report("encoding", "is encoded differently")

    def _compare_field(
        self, schema: Descriptor, one: Record, other: Record, place: _Place, index: int
    ) -> Iterator[Difference]:
        """Compare two records of one number and, unless it is repeated numbers, one wire type."""
        if self._has_equal_short_bytes(one, other):
            return
        field = schema.fields_by_number.get(one.number)
        if field is None or one.wire_type != other.wire_type:
            yield from self._compare_unknown([one], [other], place, one.number)
            return
        inside = place.enter(field.name, self._label(field, one, index))
        if field.message_type is not None and one.wire_type == LENGTH:
            if _measure_spare_bytes(one) != _measure_spare_bytes(other):
                yield inside.report("encoding", "its length is encoded differently")
            yield from self.compare_messages(field.message_type, one, other, inside)
        elif is_repeated(field) and field.type not in BYTES_TYPES:
            yield from self._compare_numbers(field, [one], [other], place, index or 0)
        else:
            yield from self._compare_values(field, one, other, inside)

    def _compare_values(
        self, field: FieldDescriptor, one: Record, other: Record, place: _Place
    ) -> Iterator[Difference]:
        if one.wire_type == LENGTH:
            offset = self._find_first_difference(one, other)
        else:
            numbers = [
                next(read_numbers(source, [record], field))
                for source, record in ((self.expected, one), (self.actual, other))
            ]
            offset = None if numbers[0] == numbers[1] else 0
        if offset is None:
            if not self._has_equal_bytes(one, other):
                yield place.report("encoding", "is encoded differently")
            return
        sizes = one.end - one.start, other.end - other.start
        if field.type == FieldDescriptor.TYPE_BYTES and max(sizes) > MAX_SHOWN_BYTES:
            text = f"byte {offset:,} of {sizes[0]:,} differs"
            if sizes[0] != sizes[1]:
                text = f"byte {offset:,} differs ({sizes[1]:,} bytes instead of {sizes[0]:,})"
        else:
            values = [
                show_value(source, record, field)
                for source, record in ((self.actual, other), (self.expected, one))
            ]
            text = " instead of ".join(values)
        yield place.report("content", text)

    def _have_equal_bytes(self, expected: Sequence[Record], actual: Sequence[Record]) -> bool:
        """Return whether two sequences of records are equal with their tags and lengths."""
        return len(expected) == len(actual) and all(
            self._has_equal_bytes(one, other) for one, other in zip(expected, actual, strict=True)
        )

    def _has_equal_bytes(self, one: Record, other: Record) -> bool:
        """Return whether two records are equal with their tags and lengths."""
        whole = [record._replace(start=record.tag_start) for record in (one, other)]
        return self._find_first_difference(whole[0], whole[1]) is None

    def _find_first_difference(self, one: Record, other: Record) -> int | None:
        """Return the offset in the payloads of the first byte that differs; `None` if none."""
        sizes = one.end - one.start, other.end - other.start
        for offset in range(0, min(sizes), _CHUNK_SIZE):
            size = min(_CHUNK_SIZE, min(sizes) - offset)
            chunks = (
                self.expected.read(one.start + offset, size),
                self.actual.read(other.start + offset, size),
            )
            if chunks[0] != chunks[1]:
                return offset + _find_unequal_byte(*chunks)
        return None if sizes[0] == sizes[1] else min(sizes)

    def _label(self, field: FieldDescriptor, record: Record, index: int) -> str:
        """Return what tells one element of a repeated field from the others."""
        if not is_repeated(field):
            return ""
        if is_found_by_name(field):
            return quote_key(read_key(self.expected, field, record))
        if is_node(field):
            return f"[{index}] ({describe_node(self.expected, field, record)})"
        return f"[{index}]"


def _group_by_number(records: Sequence[Record]) -> dict[int, list[Record]]:
    groups: dict[int, list[Record]] = {}
    for record in records:
        groups.setdefault(record.number, []).append(record)
    return groups


def _group_by_key(
    source: ByteSource, field: FieldDescriptor, records: Sequence[Record]
) -> dict[tuple[bytes, ...], list[Record]]:
    groups: dict[tuple[bytes, ...], list[Record]] = {}
    for record in records:
        groups.setdefault(read_key(source, field, record), []).append(record)
    return groups


def _measure_spare_bytes(record: Record) -> int:
    """Return by how many bytes a length is longer than needed."""
    size = record.end - record.start
    return record.start - record.length_start - max(1, (size.bit_length() + 6) // 7)


def _find_unequal_byte(one: bytes, other: bytes) -> int:
    """Return the first position where two unequal strings of one size differ, by halving."""
    start, end = 0, min(len(one), len(other))
    while end - start > 1:
        middle = (start + end) // 2
        if one[start:middle] == other[start:middle]:
            start = middle
        else:
            end = middle
    return start
