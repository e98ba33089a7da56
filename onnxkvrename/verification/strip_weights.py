"""Read a model into memory without its weights.

The data of large tensors are cut out on the wire, before anything is parsed, and
their bytes are not held: a few megabytes do for a model of two gigabytes. Field
numbers are those of onnx.proto (ONNX IR version 13,
https://github.com/onnx/onnx/blob/main/onnx/onnx.proto).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError
from onnx import ModelProto, TensorProto

from onnxkvrename.errors import ModelError
from onnxkvrename.limits import MAX_ENTRIES, build_limit_error
from onnxkvrename.model.file import join_pieces, splice_payloads
from onnxkvrename.model.protobuf import (
    FIXED_SIZES,
    LENGTH,
    ByteSource,
    Record,
    Span,
    encode_varint,
    read_fields,
    read_varint,
)
from onnxkvrename.verification.graph_bodies import BYTES_PER_PART, KEPT_BYTES, NESTED_FIELDS

_CHUNK_SIZE = 1 << 20
_MIN_HEADER_SIZE = 2
"""Bytes of a tag and a length."""
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
_STRING_DATA, _RAW_DATA, _METADATA_PROPS = 6, 9, 16
_TEXT_FIELDS = (_STRING_DATA, _RAW_DATA)
"""Fields whose ends count, also `strings` of an attribute."""
_PLACEHOLDERS = {
    "tensor": {
        4: bytes(8),
        5: bytes(2),
        6: b"",
        7: bytes(1),
        9: bytes(16),
        10: bytes(16),
        11: b"\0",
    },
    "attribute": {4: b"", 7: bytes(4), 8: bytes(1), 9: b""},
}
"""The fields that hold a message's own values, with zeros for one of them.

For a tensor these are both parts of a complex number.
"""

# Other messages than nodes, attributes and tensors take less memory, and count as a quarter of one:
# a value's type has four and one for each dimension. Texts take at most eight times their bytes.
_PART_WEIGHT = 4
_PARTS = {"NodeProto", "AttributeProto", "TensorProto", "SparseTensorProto", "GraphProto"} | {
    *("FunctionProto", "TrainingInfoProto"),
}


class RemovedData(NamedTuple):
    """Data that were cut out of a tensor.

    Attributes:
        field: The name of the field that held them.
        size: Their size in bytes; for `string_data` the number of strings.
    """

    field: str
    size: int


def read_model_without_weights(source: ByteSource) -> ModelProto:
    """Read everything of a model but the data of large tensors.

    A tensor without its data keeps name, dtype and dims; its field holds zeros for
    one element, and `list_removed_data` returns what was there. Large values of
    attributes are shortened in the same way.

    Args:
        source: The bytes of the model.

    Returns:
        The parsed model.

    Raises:
        ModelError: onnx cannot parse it, or it has too many parts.
    """
    data = join_pieces(source, splice_payloads(source, _find_edits(source)))
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
    return tuple(RemovedData(field, int(size)) for field, size in fields)


def _find_edits(source: ByteSource) -> Iterator[tuple[Record, bytes]]:
    """Yield the messages to replace; only messages that are large themselves are visited."""
    short_count = short_bytes = 0

    def count_shorts(payloads: list[bytes]) -> None:
        nonlocal short_count, short_bytes
        short_count += len(payloads)
        short_bytes += sum(map(len, payloads)) + _MIN_HEADER_SIZE * len(payloads)
        if short_count > MAX_ENTRIES + short_bytes // BYTES_PER_PART:
            raise _build_parts_error(source)  # early: the rest need not be read

    pending = [(source.root, "model")]
    while pending:
        message, kind = pending.pop()
        nested = NESTED_FIELDS.get(kind, {})
        large_fields = list[tuple[Record, str]]()
        shorts = dict.fromkeys(nested, count_shorts)
        records = read_fields(source, message, stems=(), always=frozenset(nested), shorts=shorts)
        for count, record in enumerate(records):
            if count > MAX_ENTRIES + (record.end - message.start) // BYTES_PER_PART:
                raise _build_parts_error(source)  # early: to visit each would take minutes
            if record.wire_type == LENGTH and record.end - record.start > KEPT_BYTES:
                large_fields.append((record, nested[record.number]))
        pending += large_fields
        if kind in _PLACEHOLDERS and not large_fields:
            payload = _strip(source, message, kind)
            if payload is not None:
                yield message, payload


def _build_parts_error(source: ByteSource) -> ModelError:
    what = f"parts and one for each {BYTES_PER_PART} bytes: parsing it could take all memory"
    return build_limit_error(MAX_ENTRIES, what, path=source.path)


def _strip(source: ByteSource, message: Record, kind: str) -> bytes | None:
    """Return a tensor or an attribute with one value for many; `None` for few."""
    placeholders = _PLACEHOLDERS[kind]
    kept, values = _split_fields(source, message, frozenset(placeholders))
    size = sum(record.end - record.start for record in values)
    if size <= KEPT_BYTES:
        return None
    if kind == "attribute":
        numbers = sorted({record.number for record in values})
        added = [_encode_field(number, placeholders[number]) for number in numbers]
    else:
        sizes = _sum_sizes(values)
        mark = " ".join(f"{_DATA_FIELDS[number]}:{sizes[number]}" for number in sizes)
        entry = _encode_field(1, _REMOVED_DATA_KEY) + _encode_field(2, mark.encode())
        added = [_encode_field(number, placeholders[number]) for number in sizes]
        added.append(_encode_field(_METADATA_PROPS, entry))
    return b"".join([*(source.read(*span) for span in kept), *added])


def _sum_sizes(data: Iterable[Record]) -> dict[int, int]:
    """Return the size of each field of a tensor that holds data."""
    sizes: dict[int, int] = {}
    for record in data:
        number, size = record.number, record.end - record.start
        before = sizes.get(number, 0)
        # The last raw data count, as for every singular field.
        sizes[number] = {_RAW_DATA: size, _STRING_DATA: before + 1}.get(number, before + size)
    return {number: size for number, size in sizes.items() if size}


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


def hash_fields(source: ByteSource, fields: Sequence[Record]) -> str:
    """Return a digest of what fields hold; it is the same for numbers that are packed or not."""
    digest = blake2b(bytes(sorted({record.number for record in fields})), digest_size=32)
    for record in fields:
        if record.number in _TEXT_FIELDS:
            digest.update(b"%d:%d:" % (record.number, record.end - record.start))
        for offset in range(record.start, record.end, _CHUNK_SIZE):
            digest.update(source.read(offset, min(_CHUNK_SIZE, record.end - offset)))
    return digest.hexdigest()


def _encode_field(number: int, payload: bytes) -> bytes:
    return encode_varint(number << 3 | LENGTH) + encode_varint(len(payload)) + payload


class _Fields:
    """The fields of a kind of message that are messages, and what such a message counts."""

    def __init__(self, weight: int) -> None:
        self.weight = weight
        self.by_number: dict[int, _Fields] = {}


def has_too_many_parts(data: bytes) -> bool:
    """Return whether a model without its weights has more small parts than any exporter writes.

    Where the bytes are damaged, what comes after does not count; the parser refuses it.
    """
    limit = _PART_WEIGHT * (MAX_ENTRIES + len(data) // BYTES_PER_PART)
    # There are no more parts than bytes that a tag may begin with, which are counted far faster.
    most = sum(
        weight * (len(data) - len(data.translate(None, tags)))
        for weight, tags in _list_first_bytes().items()
    )
    try:
        return most > limit and _exceeds(data, limit)
    except IndexError:  # cut short
        return False


def _exceeds(data: bytes, limit: int) -> bool:
    total = 0
    pending = [(0, len(data), _list_kinds()[ModelProto.DESCRIPTOR.full_name].by_number)]
    while pending:
        position, end, fields = pending.pop()
        while position < end:
            tag, position = data[position], position + 1
            if tag > 0x7F:
                tag, position = read_varint(data, position - 1)
            wire_type = tag & 7
            if wire_type == LENGTH:
                size, position = data[position], position + 1
                if size > 0x7F:
                    size, position = read_varint(data, position - 1)
                if tag >> 3 in fields:
                    kind = fields[tag >> 3]
                    total += kind.weight
                    if total > limit:
                        return True
                    if size:
                        pending.append((position, min(position + size, end), kind.by_number))
                position += size
            elif wire_type == 0:
                _, position = read_varint(data, position)
            else:
                # What is in a group of an unknown field counts as if it were not in one.
                position += FIXED_SIZES.get(wire_type, 0)
    return False


@lru_cache(1)
def _list_kinds() -> dict[str, _Fields]:
    """Return the fields that count of each kind of message, read off onnx's own description."""
    kinds: dict[str, _Fields] = {}

    def visit(descriptor: Descriptor) -> _Fields:
        if descriptor.full_name not in kinds:
            weight = _PART_WEIGHT if descriptor.name in _PARTS else 1
            kind = kinds[descriptor.full_name] = _Fields(weight)
            for field in descriptor.fields:
                if field.message_type is not None:
                    kind.by_number[field.number] = visit(field.message_type)
        return kinds[descriptor.full_name]

    visit(ModelProto.DESCRIPTOR)
    return kinds


@lru_cache(1)
def _list_first_bytes() -> dict[int, bytes]:
    """Return the bytes that the tag of a part may begin with, by the most that such a part counts.

    A tag with a first byte above 0x7F has more bytes, and may be that of any field.
    """
    weights = dict.fromkeys(range(0x80, 0x100), _PART_WEIGHT)
    for kind in _list_kinds().values():
        for number, part in kind.by_number.items():
            tag = number << 3 | LENGTH
            weights[tag] = max(weights.get(tag, 0), part.weight)
    return {
        weight: bytes(byte for byte in range(0x100) if weights.get(byte) == weight)
        for weight in (1, _PART_WEIGHT)
    }
