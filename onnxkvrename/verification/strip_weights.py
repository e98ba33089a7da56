"""Read a model into memory without its weights.

The data of large tensors are cut out on the wire, before anything is parsed, and
their bytes are never read: a few megabytes do for a model of two gigabytes. Field
numbers are those of onnx.proto (ONNX IR version 13,
https://github.com/onnx/onnx/blob/main/onnx/onnx.proto).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from hashlib import sha256
from typing import NamedTuple

from google.protobuf.message import DecodeError
from onnx import ModelProto, TensorProto

from onnxkvrename.errors import ModelError
from onnxkvrename.limits import MAX_ENTRIES
from onnxkvrename.model.file import splice_payloads
from onnxkvrename.model.protobuf import (
    LENGTH,
    ByteSource,
    Record,
    Span,
    encode_varint,
    read_fields,
)
from onnxkvrename.model.statistics import NESTED_FIELDS
from onnxkvrename.verification.parse_cost import BYTES_PER_PART, has_too_many_parts

KEPT_BYTES = 1 << 10
"""Tensors and attributes up to this size keep their data: shapes, axes, small constants."""
_CHUNK_SIZE = 1 << 20
_REMOVED_DATA_KEY = b"onnxkvrename.taken"
_DATA_FIELDS = {
    4: "float_data",
    5: "int32_data",
    6: "string_data",
    7: "int64_data",
    9: "raw_data",
    10: "double_data",
    11: "uint64_data",
}
"""The fields of a tensor that hold data."""
_DATA_PLACEHOLDERS = {
    4: bytes(8),
    5: bytes(2),
    6: b"",
    7: bytes(1),
    9: bytes(16),
    10: bytes(16),
    11: b"\0",
}
"""For each of these fields zeros for one element, or for both parts of a complex number."""
_STRING_DATA, _RAW_DATA, _METADATA_PROPS = 6, 9, 16
_BYTES_VALUE = 4
_TEXT_FIELDS = (_STRING_DATA, _RAW_DATA)
"""Fields whose ends count, also `strings` of an attribute."""

_ATTRIBUTE_PLACEHOLDERS = {4: b"", 7: bytes(4), 8: bytes(1), 9: b""}
"""The fields of an attribute that hold values of its own, with one value for many."""


class RemovedData(NamedTuple):
    """Data that were cut out of a tensor.

    Attributes:
        field: The name of the field that held them.
        size: Their size in bytes; for `string_data` the number of strings.
        sha256: Their digest, if one was asked for.
    """

    field: str
    size: int
    sha256: str = ""


def read_model_without_weights(
    source: ByteSource, max_kept_bytes: int = KEPT_BYTES, *, digests: bool = False
) -> ModelProto:
    """Read everything of a model but the data of large tensors.

    A tensor without its data keeps name, dtype and dims; its field holds zeros for
    one element, and `list_removed_data` returns what was there. Large values of
    attributes are shortened in the same way.

    Args:
        source: The bytes of the model.
        max_kept_bytes: The largest data of a tensor that stay.
        digests: Whether to read what is left out, for digests of it in its place.

    Returns:
        The parsed model.

    Raises:
        ModelError: onnx cannot parse it, or it has more parts than `parse_cost` allows.
    """
    chunks = []
    for piece in splice_payloads(source, _find_edits(source, max_kept_bytes, digests=digests)):
        if isinstance(piece, Span):
            end = piece.offset + piece.size
            for offset in range(piece.offset, end, _CHUNK_SIZE):
                chunks.append(source.read(offset, min(_CHUNK_SIZE, end - offset)))
        else:
            chunks.append(piece)
    data = b"".join(chunks)
    chunks.clear()
    if has_too_many_parts(data):
        raise _build_parts_error(source)
    model = ModelProto()
    try:
        model.ParseFromString(data)
    except DecodeError as error:
        raise source.build_error(f"cannot be parsed by onnx: {error}") from None
    return model


def list_removed_data(tensor: TensorProto) -> tuple[RemovedData, ...]:
    """Return what `read_model_without_weights` cut out of a tensor; empty if nothing."""
    marks = [
        entry.value for entry in tensor.metadata_props if entry.key == _REMOVED_DATA_KEY.decode()
    ]
    fields = re.findall("([a-z0-9_]+_data):([0-9]+)", marks[-1]) if marks else ()
    digest = marks[-1].partition("sha256:")[2] if marks else ""
    return tuple(RemovedData(field, int(size), digest) for field, size in fields)


def _find_edits(source: ByteSource, limit: int, *, digests: bool) -> Iterator[tuple[Record, bytes]]:
    """Yield the messages to replace; only messages that are large themselves are visited."""
    pending = [(source.root, "model")]
    while pending:
        message, kind = pending.pop()
        large_fields, part_count, part_bytes = [], 0, 0
        numbers = frozenset(NESTED_FIELDS[kind])
        for record in read_fields(source, message, stems=(), always=numbers):
            part_count, part_bytes = part_count + 1, part_bytes + record.end - record.start
            if part_count > MAX_ENTRIES + part_bytes // BYTES_PER_PART:
                raise _build_parts_error(source)
            if _is_large(record, limit):
                large_fields.append((record, NESTED_FIELDS[kind][record.number]))
        if kind == "attribute" and not large_fields:
            payload = _strip_values(source, message, limit, digests=digests)
            if payload is not None:
                yield message, payload
        for record, field_kind in large_fields:
            if field_kind != "tensor":
                pending.append((record, field_kind))
            elif (payload := _strip_data(source, record, limit, digests=digests)) is not None:
                yield record, payload


def _build_parts_error(source: ByteSource) -> ModelError:
    return source.build_error(
        f"has more than {MAX_ENTRIES:,} parts and one for each {BYTES_PER_PART} bytes: "
        "parsing it could take all memory",
        hint="no exporter writes so many; if one does, please report it",
    )


def _is_large(record: Record, limit: int) -> bool:
    return record.wire_type == LENGTH and record.end - record.start > limit


def _strip_values(
    source: ByteSource, attribute: Record, limit: int, *, digests: bool
) -> bytes | None:
    """Return an attribute's message with one value for many; `None` if it has few."""
    kept, values = _split_fields(source, attribute, frozenset(_ATTRIBUTE_PLACEHOLDERS))
    if sum(record.end - record.start for record in values) <= limit:
        return None
    placeholders = [
        _encode_field(number, _ATTRIBUTE_PLACEHOLDERS[number])
        for number in sorted({record.number for record in values})
    ]
    if digests:
        placeholders.append(_encode_field(_BYTES_VALUE, _hash_fields(source, values).encode()))
    return b"".join([*(source.read(*span) for span in kept), *placeholders])


def _strip_data(source: ByteSource, tensor: Record, limit: int, *, digests: bool) -> bytes | None:
    """Return a tensor's message without its data, and marked; `None` if it holds little data."""
    kept, data = _split_fields(source, tensor, frozenset(_DATA_FIELDS))
    if sum(record.end - record.start for record in data) <= limit:
        return None
    sizes = dict.fromkeys(_DATA_FIELDS, 0)
    for record in data:
        number, size = record.number, record.end - record.start
        if number == _RAW_DATA:
            # The last one counts, as for every singular field.
            sizes[number] = size
        else:
            sizes[number] += 1 if number == _STRING_DATA else size
    removed = {number: size for number, size in sizes.items() if size}
    mark = " ".join(f"{_DATA_FIELDS[number]}:{size}" for number, size in removed.items())
    mark += f" sha256:{_hash_fields(source, data)}" if digests else ""
    entry = _encode_field(1, _REMOVED_DATA_KEY) + _encode_field(2, mark.encode())
    placeholders = [_encode_field(number, _DATA_PLACEHOLDERS[number]) for number in removed]
    added = [*placeholders, _encode_field(_METADATA_PROPS, entry)]
    return b"".join([*(source.read(*span) for span in kept), *added])


def _split_fields(
    source: ByteSource, message: Record, numbers: frozenset[int]
) -> tuple[list[Span], list[Record]]:
    """Return what is between the fields with some numbers, and these fields."""
    kept, fields, position = list[Span](), list[Record](), message.start
    for record in read_fields(source, message, stems=(), always=numbers):
        if record.tag_start > position:
            kept.append(Span(position, record.tag_start - position))
        fields.append(record)
        position = record.end
    kept.append(Span(position, message.end - position))
    return kept, fields


def _hash_fields(source: ByteSource, fields: Iterable[Record]) -> str:
    """Return a digest of what fields hold; it is the same for numbers that are packed or not."""
    digest = sha256()
    for record in fields:
        if record.number in _TEXT_FIELDS:
            digest.update(b"%d:%d:" % (record.number, record.end - record.start))
        for offset in range(record.start, record.end, _CHUNK_SIZE):
            digest.update(source.read(offset, min(_CHUNK_SIZE, record.end - offset)))
    return digest.hexdigest()


def _encode_field(number: int, payload: bytes) -> bytes:
    return encode_varint(number << 3 | LENGTH) + encode_varint(len(payload)) + payload
