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

from onnxkvrename.errors import ModelError
from onnxkvrename.model.protobuf import LENGTH, Record, Source, Span, encode_varint, fields, splice

KEPT = 1 << 10
"""Bytes up to which a tensor or an attribute keeps its data: shapes, axes, small constants."""
_CHUNK = 1 << 20
_MARK = b"onnxkvrename.taken"
_DATA = {4: "float_data", 5: "int32_data", 6: "string_data", 7: "int64_data", 9: "raw_data"} | {
    10: "double_data",
    11: "uint64_data",
}
_STANDINS = {4: bytes(8), 5: bytes(2), 6: b"", 7: bytes(1), 9: bytes(16), 10: bytes(16), 11: b"\0"}
"""For each field one element's worth of zeros, two where a complex number takes two."""
_STRINGS, _RAW, _METADATA = 6, 9, 16

_HOLDERS = {
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
_VALUES = {4: b"", 7: bytes(4), 8: bytes(1), 9: b""}
"""The fields of an attribute with values of its own, and what stands for many of them."""


class Taken(NamedTuple):
    """What was cut out of a tensor: from which field, and how much of it.

    ``size`` is in bytes, of ``string_data`` the number of strings.
    """

    field: str
    size: int


def read(source: Source) -> ModelProto:
    """The model with everything in it but the data of large tensors.

    A tensor whose data are gone keeps name, dtype and dims; in its field stand
    zeros for one element, and :func:`taken` tells what was there. Large values
    of attributes are shortened likewise. Raises :class:`ModelError` for what
    onnx cannot parse.
    """
    parts = []
    for piece in splice(source, _edits(source)):
        if isinstance(piece, Span):
            ends = piece.offset + piece.size
            for offset in range(piece.offset, ends, _CHUNK):
                parts.append(source.read(offset, min(_CHUNK, ends - offset)))
        else:
            parts.append(piece)
    model = ModelProto()
    try:
        model.ParseFromString(b"".join(parts))
    except DecodeError as error:
        raise ModelError(f"cannot be parsed by onnx: {error}") from None
    return model


def taken(tensor: TensorProto) -> tuple[Taken, ...]:
    """What :func:`read` cut out of a tensor; nothing where the data are still there."""
    marks = [entry.value for entry in tensor.metadata_props if entry.key == _MARK.decode()]
    found = re.findall("([a-z0-9_]+_data):([0-9]+)", marks[-1]) if marks else ()
    return tuple(Taken(field, int(size)) for field, size in found)


def _edits(source: Source) -> Iterator[tuple[Record, bytes]]:
    """What to cut out; only messages that are large themselves are looked into."""
    open_messages = [(source.root, "model")]
    while open_messages:
        message, kind = open_messages.pop()
        inside = [
            (record, _HOLDERS[kind][record.number])
            for record in fields(source, message)
            if record.number in _HOLDERS[kind] and _large(record)
        ]
        if kind == "attribute" and not inside:
            inside = [(message, "values")]
        for record, held in inside:
            if held in _SHORTENED:
                payload = _SHORTENED[held](source, record)
                if payload is not None:
                    yield record, payload
            else:
                open_messages.append((record, held))


def _large(record: Record) -> bool:
    return record.wire == LENGTH and record.end - record.body > KEPT


def _without_values(source: Source, attribute: Record) -> bytes | None:
    """An attribute's message with one value for many; ``None`` if it has few."""
    kept, found, weight = [], set(), 0
    for record in fields(source, attribute):
        if record.number in _VALUES:
            found.add(record.number)
            weight += record.end - record.body
        else:
            kept.append(_again(source, record))
    standins = [_field(number, _VALUES[number]) for number in sorted(found)]
    return b"".join([*kept, *standins]) if weight > KEPT else None


def _without_data(source: Source, tensor: Record) -> bytes | None:
    """A tensor's message without its data, marked; ``None`` if it holds little of them."""
    kept, sizes, weight = [], dict.fromkeys(_DATA, 0), 0
    for record in fields(source, tensor):
        number, size = record.number, record.end - record.body
        if number not in _DATA:
            kept.append(_again(source, record))
        else:
            weight += size
            # Of raw_data the last one counts, as of every singular field.
            before = 0 if number == _RAW else sizes[number]
            sizes[number] = before + (1 if number == _STRINGS else size)
    if weight <= KEPT:
        return None
    gone = {number: size for number, size in sizes.items() if size}
    mark = " ".join(f"{_DATA[number]}:{size}" for number, size in gone.items()).encode()
    entry = _field(1, _MARK) + _field(2, mark)
    standins = [_field(number, _STANDINS[number]) for number in gone]
    return b"".join([*kept, *standins, _field(_METADATA, entry)])


_SHORTENED = {"tensor": _without_data, "values": _without_values}


def _again(source: Source, record: Record) -> bytes:
    """A field as it stands, behind its tag."""
    tag = encode_varint(record.number << 3 | record.wire)
    return tag + source.read(record.size_at, record.end - record.size_at)


def _field(number: int, payload: bytes) -> bytes:
    return encode_varint(number << 3 | LENGTH) + encode_varint(len(payload)) + payload
