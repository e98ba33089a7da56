"""Parts of an ONNX model, read from protobuf records: signature, origin, external data.

Field numbers are those of onnx.proto (ONNX IR version 13).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

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
    """External data as the model refers to it.

    Attributes:
        location: The file, relative to the model's directory.
        end_offset: Where the data end in that file, in bytes.
        tensor_name: A tensor whose data are there.
        problem: What is wrong with the entry itself; empty if nothing is.
    """

    location: str
    end_offset: int
    tensor_name: str
    problem: str = ""


def read_signature(source: ByteSource) -> Signature:
    """Return the graph inputs and outputs of a model.

    Raises:
        ModelError: The bytes are not a model, or one that two readers could understand
            differently.
    """
    values: dict[int, list[Value]] = {GRAPH_INPUT: [], GRAPH_OUTPUT: []}
    for record in read_fields(source, find_graph(source), stems=(), always=frozenset(values)):
        if record.number in values and record.wire_type == LENGTH:
            values[record.number].append(_read_value(source, record))
    return Signature(tuple(values[GRAPH_INPUT]), tuple(values[GRAPH_OUTPUT]))


def read_export_info(source: ByteSource) -> ExportInfo:
    """Return the producer and the versions of a model; the graph is skipped.

    What the file does not say is 0 or empty.

    Raises:
        ModelError: The bytes are not a protobuf message.
    """
    numbers = frozenset({_IR_VERSION, _PRODUCER, _PRODUCER_VERSION, _OPSET})
    fields = list(read_fields(source, source.root, stems=(), always=numbers))
    opsets = [
        list(read_fields(source, record))
        for record in fields
        if (record.number, record.wire_type) == (_OPSET, LENGTH)
    ]
    return ExportInfo(
        _read_int64(source, fields, _IR_VERSION),
        read_optional_string(source, find_string(fields, _PRODUCER)),
        read_optional_string(source, find_string(fields, _PRODUCER_VERSION)),
        tuple(
            (read_optional_string(source, find_string(opset, 1)), _read_int64(source, opset, 2))
            for opset in opsets
        ),
    )


def read_metadata_props(source: ByteSource) -> Iterator[tuple[Span, str, str]]:
    """Yield the metadata of a model: the span of each entry with its tag, its key and value.

    Raises:
        ModelError: The bytes are not a protobuf message.
    """
    for record in read_fields(source, source.root, stems=(), always=frozenset({METADATA_PROPS})):
        if record.number == METADATA_PROPS and record.wire_type == LENGTH:
            fields = list(read_fields(source, record))
            yield (
                Span(record.tag_start, record.end - record.tag_start),
                read_optional_string(source, find_string(fields, 1)),
                read_optional_string(source, find_string(fields, 2)),
            )


def find_graph(source: ByteSource) -> Record:
    """Return the one graph of a model.

    A file that ends directly after its graph is a valid message, but has no operator
    sets, which ONNX requires since IR version 3.

    Raises:
        ModelError: There is no graph, a second one, or no operator set.
    """
    fields = list(read_fields(source, source.root))
    graph = find_message(source, fields, 7, "graph")
    if graph is None:
        raise source.build_error("has no graph in it: this is not an ONNX model")
    if _read_int32(source, fields, 1) >= 3 and not any(record.number == 8 for record in fields):
        raise source.build_error("is cut short: there is no opset_import behind the graph")
    return graph


def find_message(
    source: ByteSource, fields: Iterable[Record], number: int, caption: str
) -> Record | None:
    """Return a singular message among the fields of another, if it is there.

    Args:
        source: The bytes that the fields are from.
        fields: The fields of the outer message.
        number: The field's number.
        caption: What the message is, for the error.

    Raises:
        ModelError: There are two.
    """
    return find_single_record(
        source, (r for r in fields if r.number == number and r.wire_type == LENGTH), caption
    )


def find_single_record(
    source: ByteSource, records: Iterable[Record], caption: str
) -> Record | None:
    """Return the one record of a singular message, if there is one.

    Raises:
        ModelError: There are two. Parsers merge them, while an editor would pick one.
    """
    single: Record | None = None
    for record in records:
        if single is not None:
            raise source.build_error(
                f"a second {caption} at byte {record.start:,}, where there may be one"
            )
        single = record
    return single


def find_string(fields: Iterable[Record], number: int) -> Record | None:
    """Return a singular string among the fields of a message; the last one counts."""
    string = None
    for record in fields:
        if record.number == number and record.wire_type == LENGTH:
            string = record
    return string


def read_optional_string(source: ByteSource, record: Record | None) -> str:
    """Return the text of a string that may be absent."""
    return "" if record is None else source.read_string(record)


def _read_value(source: ByteSource, record: Record) -> Value:
    fields = list(read_fields(source, record))
    type_ = find_message(source, fields, 2, "type")
    dtype, shape = ("UNDEFINED", None) if type_ is None else _read_type(source, type_)
    return Value(read_optional_string(source, find_string(fields, 1)), dtype, shape)


_TENSOR_KINDS = {1: "", 8: "sparse_tensor"}
_CONTAINER_KINDS = {4: "sequence", 9: "optional", 5: "map", 7: "opaque"}
_ELEMENT_FIELDS = {4: 1, 9: 1, 5: 2}


def _read_type(source: ByteSource, type_: Record) -> tuple[str, tuple[Dim, ...] | None]:
    """Return dtype and shape of a type; the shape is `None` if unknown."""
    kind = _find_type_kind(source, type_)
    if kind is None:
        return "UNDEFINED", None
    fields = list(read_fields(source, kind))
    if kind.number in _CONTAINER_KINDS:
        element = _find_element_type(source, kind, fields)
        inner = _read_type(source, element)[0] if element is not None else ""
        return f"{_CONTAINER_KINDS[kind.number]}({inner})", None
    dtype = get_dtype_name(_read_int32(source, fields, 1))
    wrapped = f"{_TENSOR_KINDS[kind.number]}({dtype})" if _TENSOR_KINDS[kind.number] else dtype
    shape = find_message(source, fields, 2, "shape")
    return wrapped, None if shape is None else tuple(_read_dims(source, shape))


def _find_type_kind(source: ByteSource, type_: Record) -> Record | None:
    """Return the one member of the `value` of a type: tensor, sequence and so on."""
    kinds = [
        r
        for r in read_fields(source, type_)
        if r.number in _TENSOR_KINDS or r.number in _CONTAINER_KINDS
    ]
    return find_single_record(source, (r for r in kinds if r.wire_type == LENGTH), "kind of type")


def _find_element_type(source: ByteSource, kind: Record, fields: Iterable[Record]) -> Record | None:
    """Return the type of the elements of a sequence, optional or map."""
    number = _ELEMENT_FIELDS.get(kind.number)
    return None if number is None else find_message(source, fields, number, "element type")


def get_dtype_name(number: int) -> str:
    """Return ONNX's own name of a `TensorProto.DataType`."""
    return _DTYPE_NAMES[number] if 0 <= number < len(_DTYPE_NAMES) else f"DataType({number})"


def get_dtype_bits(dtype: str) -> int:
    """Return the bits of one element, by ONNX's name of its dtype; 0 where they vary."""
    return _DTYPE_BITS.get(dtype, 8)


def _read_int32(source: ByteSource, fields: Iterable[Record], number: int) -> int:
    """Return a singular int32; the last one counts, and 0 if there is none."""
    return next(_read_int32s(source, fields, number), 0)


def _read_int64(source: ByteSource, fields: Iterable[Record], number: int) -> int:
    """Return a singular int64; the last one counts, and 0 if there is none."""
    integers = [r for r in fields if (r.number, r.wire_type) == (number, VARINT)]
    return source.read_integer(integers[-1]) if integers else 0


def _read_int32s(source: ByteSource, fields: Iterable[Record], number: int) -> Iterator[int]:
    """Yield the values of an int32 or enum, the last first; parsers take its lower 32 bits."""
    for record in reversed(list(fields)):
        if record.number == number and record.wire_type == VARINT:
            yield (source.read_integer(record) + (1 << 31)) % (1 << 32) - (1 << 31)


def _read_dims(source: ByteSource, shape: Record) -> Iterator[Dim]:
    for dim in _find_dim_records(source, shape):
        if dim is None:
            yield None
        else:
            yield source.read_integer(dim) if dim.number == 1 else source.read_string(dim)


def _find_dim_records(source: ByteSource, shape: Record) -> Iterator[Record | None]:
    """Yield the record that counts of each dimension: of size (1) and symbol (2) the last."""
    for dim in read_fields(source, shape):
        if dim.number == 1 and dim.wire_type == LENGTH:
            last = None
            for record in read_fields(source, dim):
                if (record.number, record.wire_type) in ((1, VARINT), (2, LENGTH)):
                    last = record
            yield last


def find_shape_symbols(source: ByteSource, type_: Record) -> Iterator[Record]:
    """Yield the records of the symbols in a type, or in the type of its elements."""
    kind = _find_type_kind(source, type_)
    if kind is None:
        return
    fields = list(read_fields(source, kind))
    inner = (
        find_message(source, fields, 2, "shape")
        if kind.number in _TENSOR_KINDS
        else _find_element_type(source, kind, fields)
    )
    if inner is None:
        return
    if kind.number in _CONTAINER_KINDS:
        yield from find_shape_symbols(source, inner)
        return
    for dim in _find_dim_records(source, inner):
        if dim is not None and dim.number == 2:
            yield dim


def read_external_reference(
    source: ByteSource, fields: Sequence[Record]
) -> ExternalReference | None:
    """Return where the data of a tensor are; `None` if they are in the model.

    Args:
        source: The bytes of the model.
        fields: The fields of a `TensorProto`.
    """
    locations = _read_int32s(source, fields, 14)
    known_locations = (number for number in locations if number in (_INLINE, _EXTERNAL))
    if next(known_locations, _INLINE) != _EXTERNAL:
        return None
    shape = [r for r in fields if r.number == 1 and r.wire_type in (VARINT, LENGTH)]
    dims = [dim for record in shape for dim in source.read_integers(record)]
    entries = dict(
        _read_string_entry(source, r) for r in fields if r.number == 13 and r.wire_type == LENGTH
    )
    bits = get_dtype_bits(get_dtype_name(_read_int32(source, fields, 2)))
    size = -1 if min(dims, default=0) < 0 else -(-math.prod(dims) * bits // 8)
    end_offset, problem = _parse_extent(entries, size)
    tensor_name = read_optional_string(source, find_string(fields, 8))
    return ExternalReference(entries.get("location", ""), end_offset, tensor_name, problem)


def _read_string_entry(source: ByteSource, entry: Record) -> tuple[str, str]:
    """Return key and value of an entry; one in the usual form is read at once."""
    size = entry.end - entry.start
    if 4 <= size < 0x100:
        data = source.read_slice(entry.start, size)
        key_end = 2 + data[1]
        usual_key = data[0] == 0x0A and data[1] < 0x80 and key_end + 1 < size
        if usual_key and data[key_end] == 0x12:
            key, value = data[2:key_end], data[key_end + 2 :]
            if data[key_end + 1] == len(value) < 0x80:
                return _decode_string(key), _decode_string(value)
    fields = list(read_fields(source, entry))
    return (
        read_optional_string(source, find_string(fields, 1)),
        read_optional_string(source, find_string(fields, 2)),
    )


def _decode_string(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def _parse_extent(entries: Mapping[str, str], size: int) -> tuple[int, str]:
    """Return the end of external data in their file, and the problem with the entries.

    ONNX readers pass offset and length to an integer parser that also takes signs,
    blanks and foreign digits; here they are plain decimal numbers.

    Args:
        entries: The `external_data` of a tensor.
        size: Bytes that its dtype and dims need; negative if a dimension is.
    """
    if not entries.get("location"):
        return 0, "has no location"
    if size < 0:
        return 0, "has a negative dimension"
    for key in ("offset", "length"):
        if not re.fullmatch("[0-9]{1,19}", entries.get(key, "0"), re.ASCII):
            return 0, f"has the {key} {entries[key]!r}, which is no plain number"
    length = int(entries.get("length", size))
    if length < size:
        return 0, f"has the length {length:,} but needs {size:,} bytes"
    return int(entries.get("offset", 0)) + length, ""
