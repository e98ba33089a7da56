"""Tell what parsing a model would cost, before it is parsed.

A message of two bytes becomes objects of some hundred bytes in each of the parsers that
a model passes through: a file of a megabyte could take half a gigabyte. Counting on the
wire costs next to nothing, and stops at the limit.
"""

from __future__ import annotations

from functools import lru_cache

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from onnx import ModelProto

from onnxkvrename.limits import MAX_ENTRIES
from onnxkvrename.model.protobuf import LENGTH

BYTES_PER_PART = 16
"""A model may have one part (a node, an attribute, a tensor) more than `MAX_ENTRIES` for so many
bytes. Exporters write one in 30 to 150 bytes, and a model whose values
have numbers for names, and its nodes none, one in 16. Other messages take less memory, and count
as half of one; repeated texts count as a quarter. A model of a megabyte that is just below the
limit takes up to 35 megabytes."""

_PART_WEIGHT, _MESSAGE_WEIGHT, _TEXT_WEIGHT = 4, 2, 1
_PARTS = {"NodeProto", "AttributeProto", "TensorProto", "SparseTensorProto", "GraphProto"} | {
    *("FunctionProto", "TrainingInfoProto"),
}
_FIXED_SIZES = {1: 8, 5: 4}


class _Fields:
    """The fields of a kind of message that count: texts, and messages with their own fields."""

    def __init__(self, weight: int) -> None:
        self.weight = weight
        self.by_number: dict[int, _Fields | None] = {}


def has_too_many_parts(data: bytes) -> bool:
    """Return whether a serialized model consists of more small parts than any exporter writes.

    Args:
        data: The model without its weights. Where it is damaged, what comes after does not
            count; the parser refuses it.
    """
    limit = _PART_WEIGHT * (MAX_ENTRIES + len(data) // BYTES_PER_PART)
    try:
        return _exceeds(data, limit)
    except IndexError:  # cut short
        return False


def _exceeds(data: bytes, limit: int) -> bool:
    total = 0
    pending = [(0, len(data), _list_fields().by_number)]
    while pending:
        position, end, fields = pending.pop()
        while position < end:
            tag, position = data[position], position + 1
            if tag > 0x7F:
                tag, position = _read_varint(data, position - 1)
            wire_type = tag & 7
            if wire_type == LENGTH:
                size, position = data[position], position + 1
                if size > 0x7F:
                    size, position = _read_varint(data, position - 1)
                if tag >> 3 in fields:
                    kind = fields[tag >> 3]
                    total += _TEXT_WEIGHT if kind is None else kind.weight
                    if total > limit:
                        return True
                    if kind is not None and size:
                        pending.append((position, min(position + size, end), kind.by_number))
                position += size
            elif wire_type == 0:
                _, position = _read_varint(data, position)
            else:
                # What is in a group of an unknown field counts as if it were not in one.
                position += _FIXED_SIZES.get(wire_type, 0)
    return False


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    byte = data[position]
    value, shift = byte & 0x7F, 7
    while byte >= 0x80:
        position += 1
        byte = data[position]
        value |= (byte & 0x7F) << shift
        shift += 7
    return value, position + 1


def is_repeated(field: FieldDescriptor) -> bool:
    """Return whether a field may occur several times."""
    # protobuf has `is_repeated` from 6.31 on, and warns of `label` since then.
    if hasattr(field, "is_repeated"):
        return bool(field.is_repeated)
    return bool(field.label == FieldDescriptor.LABEL_REPEATED)


@lru_cache(1)
def _list_fields() -> _Fields:
    """Return the fields of a model that count, read off onnx's own description."""
    kinds: dict[str, _Fields] = {}

    def visit(descriptor: Descriptor) -> _Fields:
        if descriptor.full_name not in kinds:
            weight = _PART_WEIGHT if descriptor.name in _PARTS else _MESSAGE_WEIGHT
            kind = kinds[descriptor.full_name] = _Fields(weight)
            for field in descriptor.fields:
                if field.message_type is not None:
                    kind.by_number[field.number] = visit(field.message_type)
                elif is_repeated(field) and field.cpp_type == field.CPPTYPE_STRING:
                    kind.by_number[field.number] = None
        return kinds[descriptor.full_name]

    return visit(ModelProto.DESCRIPTOR)
