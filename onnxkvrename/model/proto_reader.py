"""ONNX's messages read off the wire: the signature of a model, its origin, what it has outside.

Field numbers are those of onnx.proto (ONNX IR version 13).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from onnxkvrename.errors import ModelError
from onnxkvrename.model.protobuf import LENGTH, VARINT, ByteSource, Record, Span, read_fields
from onnxkvrename.model.signature import Dim, ExportInfo, Signature, Value

GRAPH_INPUT, GRAPH_OUTPUT = 11, 12
METADATA_PROPS = 14
_IR_VERSION, _PRODUCER, _PRODUCER_VERSION, _OPSET = 1, 2, 3, 8
_DTYPE_NAMES = (
    *("UNDEFINED", "FLOAT", "UINT8", "INT8", "UINT16", "INT16", "INT32", "INT64", "STRING"),
    *("BOOL", "FLOAT16", "DOUBLE", "UINT32", "UINT64", "COMPLEX64", "COMPLEX128", "BFLOAT16"),
    *("FLOAT8E4M3FN", "FLOAT8E4M3FNUZ", "FLOAT8E5M2", "FLOAT8E5M2FNUZ", "UINT4", "INT4"),
    *("FLOAT4E2M1", "FLOAT8E8M0", "UINT2", "INT2", "FLOAT6E2M3", "FLOAT6E3M2"),
)
_INLINE, _EXTERNAL = 0, 1
_DTYPE_BITS = {
    **dict.fromkeys(("UINT16", "INT16", "FLOAT16", "BFLOAT16"), 16),
    **dict.fromkeys(("FLOAT", "INT32", "UINT32"), 32),
    **dict.fromkeys(("INT64", "DOUBLE", "UINT64", "COMPLEX64"), 64),
    **dict.fromkeys(("FLOAT6E2M3", "FLOAT6E3M2"), 6),
    **dict.fromkeys(("UINT4", "INT4", "FLOAT4E2M1"), 4),
    **dict.fromkeys(("UINT2", "INT2"), 2),
    **dict.fromkeys(("UNDEFINED", "STRING"), 0),
    "COMPLEX128": 128,
}


class ExternalReference(NamedTuple):
    """External data as the model asks for it: the file ``location`` up to byte ``end``.

    ``tensor`` is the name of a tensor that lies there; ``fault`` says what is
    wrong with the entry itself.
    """

    location: str
    end_offset: int
    tensor_name: str
    problem: str = ""


def read_signature(source: ByteSource) -> Signature:
    """The graph inputs and outputs of a model.

    Raises :class:`ModelError` where the bytes are no model, or one that two
    readers could understand differently.
    """
    ends: dict[int, list[Value]] = {GRAPH_INPUT: [], GRAPH_OUTPUT: []}
    for record in read_fields(source, find_graph(source), stems=(), always=frozenset(ends)):
        if record.number in ends and record.wire_type == LENGTH:
            ends[record.number].append(_read_value(source, record))
    return Signature(tuple(ends[GRAPH_INPUT]), tuple(ends[GRAPH_OUTPUT]))


def read_export_info(source: ByteSource) -> ExportInfo:
    """Who wrote a model, and for what; the graph is stepped over.

    What the file does not say is 0 or empty. Raises :class:`ModelError` where the
    bytes are no message.
    """
    numbers = frozenset({_IR_VERSION, _PRODUCER, _PRODUCER_VERSION, _OPSET})
    parts = list(read_fields(source, source.root, stems=(), always=numbers))
    opsets = [
        list(read_fields(source, r)) for r in parts if (r.number, r.wire_type) == (_OPSET, LENGTH)
    ]
    return ExportInfo(
        _read_int64(source, parts, _IR_VERSION),
        read_optional_string(source, find_string(parts, _PRODUCER)),
        read_optional_string(source, find_string(parts, _PRODUCER_VERSION)),
        tuple(
            (read_optional_string(source, find_string(opset, 1)), _read_int64(source, opset, 2))
            for opset in opsets
        ),
    )


def read_metadata_props(source: ByteSource) -> Iterator[tuple[Span, str, str]]:
    """The metadata of a model: where each entry stands, its tag included, its key and value.

    Raises :class:`ModelError` where the bytes are no message.
    """
    for record in read_fields(source, source.root, stems=(), always=frozenset({METADATA_PROPS})):
        if record.number == METADATA_PROPS and record.wire_type == LENGTH:
            parts = list(read_fields(source, record))
            start = record.length_start - 1
            while source.read_slice(start, 1)[0] & 0x7F == 0:  # a tag that was written too long
                start -= 1
            span = Span(start, record.end - start)
            yield (
                span,
                read_optional_string(source, find_string(parts, 1)),
                read_optional_string(source, find_string(parts, 2)),
            )


def find_graph(source: ByteSource) -> Record:
    """The one graph of a model.

    A file that ends just behind it is still a valid message, but says nothing of
    its operator sets, as every model since IR version 3 has to.
    """
    parts = list(read_fields(source, source.root))
    found = find_message(parts, 7, "graph")
    if found is None:
        raise ModelError("has no graph in it: this is not an ONNX model")
    if _read_int32(source, parts, 1) >= 3 and not any(part.number == 8 for part in parts):
        raise ModelError("is cut short: there is no opset_import behind the graph")
    return found


def find_message(records: Iterable[Record], number: int, what: str) -> Record | None:
    """A singular message among the fields of another, if it is there."""
    return find_single_record(
        (r for r in records if r.number == number and r.wire_type == LENGTH), what
    )


def find_single_record(records: Iterable[Record], what: str) -> Record | None:
    """The one record of a singular message; parsers merge two, editors pick one."""
    found: Record | None = None
    for record in records:
        if found is not None:
            raise ModelError(f"a second {what} at byte {record.start:,}, where there may be one")
        found = record
    return found


def find_string(records: Iterable[Record], number: int) -> Record | None:
    """A singular string among the fields of a message; the last one counts."""
    found = None
    for record in records:
        if record.number == number and record.wire_type == LENGTH:
            found = record
    return found


def read_optional_string(source: ByteSource, record: Record | None) -> str:
    """A string that may be absent."""
    return "" if record is None else source.read_string(record)


def _read_value(source: ByteSource, record: Record) -> Value:
    parts = list(read_fields(source, record))
    type_ = find_message(parts, 2, "type")
    dtype, shape = ("UNDEFINED", None) if type_ is None else _read_type(source, type_)
    return Value(read_optional_string(source, find_string(parts, 1)), dtype, shape)


_TENSOR_KINDS = {1: "", 8: "sparse_tensor"}
_CONTAINER_KINDS = {4: "sequence", 9: "optional", 5: "map", 7: "opaque"}
_ELEMENT_FIELDS = {4: 1, 9: 1, 5: 2}


def _read_type(source: ByteSource, type_: Record) -> tuple[str, tuple[Dim, ...] | None]:
    kind = _find_type_kind(source, type_)
    if kind is None:
        return "UNDEFINED", None
    parts = list(read_fields(source, kind))
    if kind.number in _CONTAINER_KINDS:
        element = _find_element_type(kind, parts)
        inner = _read_type(source, element)[0] if element is not None else ""
        return f"{_CONTAINER_KINDS[kind.number]}({inner})", None
    dtype = get_dtype_name(_read_int32(source, parts, 1))
    wrapped = f"{_TENSOR_KINDS[kind.number]}({dtype})" if _TENSOR_KINDS[kind.number] else dtype
    shape = find_message(parts, 2, "shape")
    return wrapped, None if shape is None else tuple(_read_dims(source, shape))


def _find_type_kind(source: ByteSource, type_: Record) -> Record | None:
    """The one member of the ``value`` of a type: tensor, sequence and so on."""
    known = [
        r
        for r in read_fields(source, type_)
        if r.number in _TENSOR_KINDS or r.number in _CONTAINER_KINDS
    ]
    return find_single_record((r for r in known if r.wire_type == LENGTH), "kind of type")


def _find_element_type(kind: Record, parts: Iterable[Record]) -> Record | None:
    """The type of what a sequence, optional or map holds."""
    number = _ELEMENT_FIELDS.get(kind.number)
    return None if number is None else find_message(parts, number, "element type")


def get_dtype_name(number: int) -> str:
    """ONNX's own name of a ``TensorProto.DataType``."""
    return _DTYPE_NAMES[number] if 0 <= number < len(_DTYPE_NAMES) else f"DataType({number})"


def get_dtype_bits(dtype: str) -> int:
    """Bits of one element, by ONNX's name of its dtype; 0 where they vary."""
    return _DTYPE_BITS.get(dtype, 8)


def _read_int32(source: ByteSource, records: Iterable[Record], number: int) -> int:
    """A singular int32; the last one counts, and 0 if there is none."""
    return next(_read_int32s(source, records, number), 0)


def _read_int64(source: ByteSource, records: Iterable[Record], number: int) -> int:
    """A singular int64; the last one counts, and 0 if there is none."""
    found = [r for r in records if (r.number, r.wire_type) == (number, VARINT)]
    return source.read_integer(found[-1]) if found else 0


def _read_int32s(source: ByteSource, records: Iterable[Record], number: int) -> Iterator[int]:
    """The values of an int32 or enum, the last first; parsers take its lower 32 bits."""
    for record in reversed(list(records)):
        if record.number == number and record.wire_type == VARINT:
            yield (source.read_integer(record) + (1 << 31)) % (1 << 32) - (1 << 31)


def _read_dims(source: ByteSource, shape: Record) -> Iterator[Dim]:
    for said in _find_dim_records(source, shape):
        if said is None:
            yield None
        else:
            yield source.read_integer(said) if said.number == 1 else source.read_string(said)


def _find_dim_records(source: ByteSource, shape: Record) -> Iterator[Record | None]:
    """For each dimension the record that counts: of size (1) and symbol (2) the last."""
    for dim in read_fields(source, shape):
        if dim.number == 1 and dim.wire_type == LENGTH:
            said = None
            for record in read_fields(source, dim):
                if (record.number, record.wire_type) in ((1, VARINT), (2, LENGTH)):
                    said = record
            yield said


def find_shape_symbols(source: ByteSource, type_: Record) -> Iterator[Record]:
    """The records of the symbols in a type, of sequences and the like those of their elements."""
    kind = _find_type_kind(source, type_)
    if kind is None:
        return
    parts = list(read_fields(source, kind))
    inner = (
        find_message(parts, 2, "shape")
        if kind.number in _TENSOR_KINDS
        else _find_element_type(kind, parts)
    )
    if inner is None:
        return
    if kind.number in _CONTAINER_KINDS:
        yield from find_shape_symbols(source, inner)
        return
    for said in _find_dim_records(source, inner):
        if said is not None and said.number == 2:
            yield said


def read_external_reference(
    source: ByteSource, parts: Sequence[Record]
) -> ExternalReference | None:
    """What a tensor of these fields asks of a file; ``None`` if its data are in the model."""
    locations = _read_int32s(source, parts, 14)
    if next((place for place in locations if place in (_INLINE, _EXTERNAL)), 0) != _EXTERNAL:
        return None
    shape = [r for r in parts if r.number == 1 and r.wire_type in (VARINT, LENGTH)]
    dims = [dim for record in shape for dim in source.read_integers(record)]
    said = dict(
        _read_string_entry(source, r) for r in parts if r.number == 13 and r.wire_type == LENGTH
    )
    bits = get_dtype_bits(get_dtype_name(_read_int32(source, parts, 2)))
    size = -1 if min(dims, default=0) < 0 else -(-math.prod(dims) * bits // 8)
    end, fault = _parse_extent(said, size)
    return ExternalReference(
        said.get("location", ""), end, read_optional_string(source, find_string(parts, 8)), fault
    )


def _read_string_entry(source: ByteSource, entry: Record) -> tuple[str, str]:
    """Key and value of an entry; one that is written as all are is read at once."""
    size = entry.end - entry.start
    if 4 <= size < 0x100:
        data = source.read_slice(entry.start, size)
        at = 2 + data[1]
        if data[0] == 0x0A and data[1] < 0x80 and at + 1 < size and data[at] == 0x12:
            key, value = data[2:at], data[at + 2 :]
            if data[at + 1] == len(value) < 0x80:
                return _decode_string(key), _decode_string(value)
    parts = list(read_fields(source, entry))
    return read_optional_string(source, find_string(parts, 1)), read_optional_string(
        source, find_string(parts, 2)
    )


def _decode_string(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def _parse_extent(said: Mapping[str, str], size: int) -> tuple[int, str]:
    """Where external data ends in its file, and what is wrong with the entry.

    ONNX readers pass offset and length to an integer parser that also takes
    signs, blanks and foreign digits; here they are plain decimal numbers.
    """
    if not said.get("location"):
        return 0, "has no location"
    if size < 0:
        return 0, "has a negative dimension"
    for key in ("offset", "length"):
        if not re.fullmatch("[0-9]{1,19}", said.get(key, "0"), re.ASCII):
            return 0, f"has the {key} {said[key]!r}, which is no plain number"
    length = int(said.get("length", size))
    if length < size:
        return 0, f"has the length {length:,} but needs {size:,} bytes"
    return int(said.get("offset", 0)) + length, ""
