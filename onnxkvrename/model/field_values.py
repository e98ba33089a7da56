"""The fields of ONNX's messages by their schema: which are found by a name, and their values.

The schema is that of the installed onnx.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

from onnxkvrename.model.protobuf import (
    FIXED32,
    FIXED64,
    GROUP,
    LENGTH,
    VARINT,
    ByteSource,
    Record,
    read_fields,
)

MAX_SHOWN_BYTES = 60
"""Bytes of a value, or characters of a text, that a message shows."""
_KEY_FIELDS = {
    "FunctionProto": (10, 1, 13),
    "TensorProto": (8,),
    "ValueInfoProto": (1,),
    "StringStringEntryProto": (1,),
    "OperatorSetIdProto": (1,),
    "TensorAnnotation": (1,),
    "AttributeProto": (1,),
    "NodeProto": (4, 3),
}
"""For each message that is known by a name the fields that make up this name.

Of a function these are domain, name and overload; of a node op type and name, which tell
whether two nodes are the same one, though several may share them."""

BYTES_TYPES = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
_SINGLE_FLOAT, _DOUBLE_FLOAT = FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE


def is_repeated(field: FieldDescriptor) -> bool:
    """Return whether a field may occur several times."""
    # protobuf has `is_repeated` from 6.31 on, and warns of `label` since then.
    if hasattr(field, "is_repeated"):
        return bool(field.is_repeated)
    return bool(field.label == FieldDescriptor.LABEL_REPEATED)


def is_found_by_name(field: FieldDescriptor) -> bool:
    """Return whether a repeated field's elements are found by a name of their own."""
    message = field.message_type
    return (
        is_repeated(field)
        and message is not None
        and message.name in _KEY_FIELDS
        and not is_node(field)
    )


def is_node(field: FieldDescriptor) -> bool:
    """Return whether a field holds nodes."""
    return field.message_type is not None and field.message_type.name == "NodeProto"


def read_all_fields(source: ByteSource, message: Record) -> Iterator[Record]:
    """Yield the fields of a message, and each run of groups as one record of the number 0."""
    pos = message.start
    for record in read_fields(source, message):
        if record.tag_start > pos:
            yield _build_group_record(message, pos, record.tag_start)
        yield record
        pos = record.end
    if message.end > pos:
        yield _build_group_record(message, pos, message.end)


def _build_group_record(message: Record, start: int, end: int) -> Record:
    return Record(0, GROUP, start, start, start, end, message, message.depth + 1)


def read_key(source: ByteSource, field: FieldDescriptor, record: Record) -> tuple[bytes, ...]:
    """Return the name of an element, as it is in the file."""
    numbers = _KEY_FIELDS[field.message_type.name]
    values = dict.fromkeys(numbers, b"")
    if record.wire_type == LENGTH:
        for inner in read_fields(source, record, stems=(), always=frozenset(numbers)):
            if inner.number in values and inner.wire_type == LENGTH:
                values[inner.number] = source.read_payload(inner)
    return tuple(values.values())


def quote_key(key: tuple[bytes, ...]) -> str:
    """Format the name of an element, as in ``['w']``."""
    return f"[{_shorten(_decode(b'.'.join(filter(None, key))))!r}]"


def _decode(name: bytes) -> str:
    return name.decode("utf-8", "backslashreplace")


def read_numbers(
    source: ByteSource, records: Sequence[Record], field: FieldDescriptor
) -> Iterator[Any]:
    """Yield numbers, packed or not; those with a fraction as their bytes, as NaN equals nothing."""
    for record in records:
        width = {FIXED32: 4, FIXED64: 8}.get(record.wire_type)
        if record.wire_type == LENGTH and field.type in _FIXED_WIDTHS:
            width = _FIXED_WIDTHS[field.type]
        if width is None:
            yield from source.read_integers(record)
            continue
        for offset in range(record.start, record.end, width * 8192):
            chunk = source.read(offset, min(width * 8192, record.end - offset))
            yield from (chunk[start : start + width] for start in range(0, len(chunk), width))


_FIXED_WIDTHS = {_SINGLE_FLOAT: 4, _DOUBLE_FLOAT: 8}


def show_number(number: Any, type_: int) -> str:
    """Format a number that :func:`read_numbers` yields, by the type of its field."""
    if isinstance(number, bytes) and len(number) == _FIXED_WIDTHS.get(type_):
        return repr(struct.unpack("<f" if type_ == _SINGLE_FLOAT else "<d", number)[0])
    return str(number)


def show_value(source: ByteSource, record: Record, field: FieldDescriptor) -> str:
    """Format the value of a field, a long one shortened."""
    if record.wire_type == LENGTH and field.message_type is not None:
        return f"a message of {record.end - record.start:,} bytes"
    if record.wire_type == LENGTH and field.type in BYTES_TYPES:
        data = source.read(record.start, min(record.end - record.start, 4 * MAX_SHOWN_BYTES))
        return repr(_shorten(_decode(data)))
    if record.wire_type in (VARINT, FIXED32, FIXED64):
        return show_number(next(read_numbers(source, [record], field)), field.type)
    return f"{record.end - record.start:,} bytes"


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_SHOWN_BYTES else f"{text[: MAX_SHOWN_BYTES - 1]}…"


def describe_node(source: ByteSource, field: FieldDescriptor, record: Record) -> str:
    """Return op type and name of a node."""
    return _shorten(_decode(b" ".join(filter(None, read_key(source, field, record)))))
