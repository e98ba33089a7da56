"""A model in memory without its weights.

What holds the data of a large tensor is cut out on the wire, before anything is
parsed, and its bytes are never read: a few megabytes do for a model of two
gigabytes. Field numbers are those of onnx.proto (ONNX IR version 13).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from google.protobuf.message import DecodeError
from onnx import ModelProto, TensorProto

from onnxkvrename.model.file import splice_payloads
from onnxkvrename.model.protobuf import (
    LENGTH,
    ByteSource,
    Record,
    Span,
    encode_varint,
    read_fields,
)

MAX_KEPT_BYTES = 1 << 10
"""Bytes up to which a tensor or an attribute keeps its data: shapes, axes, small constants."""
_CHUNK_SIZE = 1 << 20
_REMOVED_DATA_KEY = b"onnxkvrename.taken"
_DATA_FIELDS = {
    4: "float_data",
    5: "int32_data",
    6: "string_data",
    7: "int64_data",
    9: "raw_data",
} | {
    10: "double_data",
    11: "uint64_data",
}
_PLACEHOLDERS = {
    4: bytes(8),
    5: bytes(2),
    6: b"",
    7: bytes(1),
    9: bytes(16),
    10: bytes(16),
    11: b"\0",
}
"""For each field one element's worth of zeros, two where a complex number takes two."""
_STRINGS, _RAW, _METADATA = 6, 9, 16

_LARGE_FIELDS = {
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
"""For each message the fields that may hold much, and what each of them is."""
_ATTRIBUTE_PLACEHOLDERS = {4: b"", 7: bytes(4), 8: bytes(1), 9: b""}
"""The fields of an attribute with values of its own, and what stands for many of them."""


class RemovedData(NamedTuple):
    """What was cut out of a tensor: from which field, and how much of it.

    ``size`` is in bytes, of ``string_data`` the number of strings.
    """

    field: str
    size: int


def read_model_without_weights(source: ByteSource) -> ModelProto:
    """The model with everything in it but the data of large tensors.

    A tensor whose data are gone keeps name, dtype and dims; in its field stand
    zeros for one element, and :func:`taken` tells what was there. Large values
    of attributes are shortened likewise. Raises :class:`ModelError` for what
    onnx cannot parse.
    """
    parts = []
    for piece in splice_payloads(source, _find_edits(source)):
        if isinstance(piece, Span):
            ends = piece.offset + piece.size
            for offset in range(piece.offset, ends, _CHUNK_SIZE):
                parts.append(source.read(offset, min(_CHUNK_SIZE, ends - offset)))
        else:
            parts.append(piece)
    model = ModelProto()
    try:
        model.ParseFromString(b"".join(parts))
    except DecodeError as error:
        raise source.build_error(f"cannot be parsed by onnx: {error}") from None
    return model


def list_removed_data(tensor: TensorProto) -> tuple[RemovedData, ...]:
    """What :func:`read` cut out of a tensor; nothing where the data are still there."""
    marks = [
        entry.value for entry in tensor.metadata_props if entry.key == _REMOVED_DATA_KEY.decode()
    ]
    found = re.findall("([a-z0-9_]+_data):([0-9]+)", marks[-1]) if marks else ()
    return tuple(RemovedData(field, int(size)) for field, size in found)


def _find_edits(source: ByteSource) -> Iterator[tuple[Record, bytes]]:
    """What to cut out; only messages that are large themselves are looked into."""
    open_messages = [(source.root, "model")]
    while open_messages:
        message, kind = open_messages.pop()
        inside = [
            (record, _LARGE_FIELDS[kind][record.number])
            for record in read_fields(source, message)
            if record.number in _LARGE_FIELDS[kind] and _is_large(record)
        ]
        if kind == "attribute" and not inside:
            inside = [(message, "values")]
        for record, held in inside:
            if held in _STRIP_FUNCTIONS:
                payload = _STRIP_FUNCTIONS[held](source, record)
                if payload is not None:
                    yield record, payload
            else:
                open_messages.append((record, held))


def _is_large(record: Record) -> bool:
    return record.wire_type == LENGTH and record.end - record.start > MAX_KEPT_BYTES


def _strip_values(source: ByteSource, attribute: Record) -> bytes | None:
    """An attribute's message with one value for many; ``None`` if it has few."""
    kept, found, weight = [], set(), 0
    for record in read_fields(source, attribute):
        if record.number in _ATTRIBUTE_PLACEHOLDERS:
            found.add(record.number)
            weight += record.end - record.start
        else:
            kept.append(_read_field(source, record))
    standins = [_encode_field(number, _ATTRIBUTE_PLACEHOLDERS[number]) for number in sorted(found)]
    return b"".join([*kept, *standins]) if weight > MAX_KEPT_BYTES else None


def _strip_data(source: ByteSource, tensor: Record) -> bytes | None:
    """A tensor's message without its data, marked; ``None`` if it holds little of them."""
    kept, sizes, weight = [], dict.fromkeys(_DATA_FIELDS, 0), 0
    for record in read_fields(source, tensor):
        number, size = record.number, record.end - record.start
        if number not in _DATA_FIELDS:
            kept.append(_read_field(source, record))
        else:
            weight += size
            # Of raw_data the last one counts, as of every singular field.
            before = 0 if number == _RAW else sizes[number]
            sizes[number] = before + (1 if number == _STRINGS else size)
    if weight <= MAX_KEPT_BYTES:
        return None
    gone = {number: size for number, size in sizes.items() if size}
    mark = " ".join(f"{_DATA_FIELDS[number]}:{size}" for number, size in gone.items()).encode()
    entry = _encode_field(1, _REMOVED_DATA_KEY) + _encode_field(2, mark)
    standins = [_encode_field(number, _PLACEHOLDERS[number]) for number in gone]
    return b"".join([*kept, *standins, _encode_field(_METADATA, entry)])


_STRIP_FUNCTIONS = {"tensor": _strip_data, "values": _strip_values}


def _read_field(source: ByteSource, record: Record) -> bytes:
    """A field as it stands, behind its tag."""
    tag = encode_varint(record.number << 3 | record.wire_type)
    return tag + source.read(record.length_start, record.end - record.length_start)


def _encode_field(number: int, payload: bytes) -> bytes:
    return encode_varint(number << 3 | LENGTH) + encode_varint(len(payload)) + payload
