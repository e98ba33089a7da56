"""Parts of an ONNX model, read from protobuf records: signature, origin, external data.

Field numbers are those of onnx.proto (ONNX IR version 13).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from onnxkvrename.limits import MAX_ENTRIES, MAX_INT64, MAX_RANK
from onnxkvrename.model.protobuf import (
    LENGTH,
    VARINT,
    ByteSource,
    Record,
    list_fields,
    read_fields,
)
from onnxkvrename.model.signature import UNDECLARED, Dim, ExportInfo, Opset, Signature, Value

GRAPH_INPUT, GRAPH_OUTPUT = 11, 12
_IR_VERSION, _PRODUCER, _PRODUCER_VERSION, _OPSET = 1, 2, 3, 8
_DTYPE_NAMES = (
    *(UNDECLARED, "FLOAT", "UINT8", "INT8", "UINT16", "INT16", "INT32", "INT64", "STRING"),
    *("BOOL", "FLOAT16", "DOUBLE", "UINT32", "UINT64", "COMPLEX64", "COMPLEX128", "BFLOAT16"),
    *("FLOAT8E4M3FN", "FLOAT8E4M3FNUZ", "FLOAT8E5M2", "FLOAT8E5M2FNUZ", "UINT4", "INT4"),
    *("FLOAT4E2M1", "FLOAT8E8M0", "UINT2", "INT2", "FLOAT6E2M3", "FLOAT6E3M2"),
)
_INLINE, _EXTERNAL = 0, 1
GRAPH, TRAINING_INFO, FUNCTION = 7, 20, 25
_NODE = 1
_NODES = frozenset({_NODE})
_ROOT = frozenset(
    {
        *(_IR_VERSION, _PRODUCER, _PRODUCER_VERSION, _OPSET),
        *(GRAPH, TRAINING_INFO, FUNCTION),
    }
)
_VALUE = _STRING_ENTRY = _TENSOR_TYPE = frozenset({1, 2})
"""A name and a type; a key and a value; an element type and a shape."""
TENSOR_FIELDS = frozenset({1, 2, 8, 13, 14})
"""Dims, dtype, name, and where the data of a tensor are."""
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
    types: _Types = {}
    for record in read_fields(source, find_graph(source), stems=(), always=frozenset(values)):
        if record.number in values and record.wire_type == LENGTH:
            values[record.number].append(_read_value(source, record, types))
            if len(values[record.number]) > MAX_ENTRIES:
                raise source.build_limit_error(MAX_ENTRIES, "graph inputs or outputs", record)
    return Signature(tuple(values[GRAPH_INPUT]), tuple(values[GRAPH_OUTPUT]))


def read_export_info(source: ByteSource) -> ExportInfo:
    """Return the producer and the versions of a model; the graph is skipped.

    What the file does not say is 0 or empty.

    Raises:
        ModelError: The bytes are not a protobuf message.
    """
    fields = list_root_fields(source)
    opsets = [
        list_fields(source, record, _STRING_ENTRY)
        for record in fields
        if (record.number, record.wire_type) == (_OPSET, LENGTH)
    ]
    return ExportInfo(
        _read_int64(source, fields, _IR_VERSION),
        read_optional_string(source, find_string(fields, _PRODUCER)),
        read_optional_string(source, find_string(fields, _PRODUCER_VERSION)),
        tuple(
            Opset(
                read_optional_string(source, find_string(opset, 1)), _read_int64(source, opset, 2)
            )
            for opset in opsets
        ),
    )


def count_nodes(source: ByteSource) -> int:
    """Return the number of nodes in the main graph.

    Raises:
        ModelError: The bytes are not a model.
    """
    count = 0

    def count_shorts(nodes: list[bytes]) -> None:
        nonlocal count
        count += len(nodes)

    fields = read_fields(
        source, find_graph(source), stems=(), always=_NODES, shorts={_NODE: count_shorts}
    )
    longs = sum(record.number == _NODE and record.wire_type == LENGTH for record in fields)
    return count + longs


def read_function_names(source: ByteSource) -> tuple[str, ...]:
    """Return the names of the local functions.

    Raises:
        ModelError: The bytes are not a protobuf message.
    """
    return tuple(
        read_optional_string(
            source, find_string(read_fields(source, record, stems=(), always=frozenset({1})), 1)
        )
        for record in list_root_fields(source)
        if (record.number, record.wire_type) == (FUNCTION, LENGTH)
    )


def list_root_fields(source: ByteSource) -> list[Record]:
    """Return the known fields of the model itself; they are read once for each source.

    Raises:
        ModelError: The bytes are not a protobuf message, or hold too many of these fields.
    """
    if source.root_fields is None:
        source.root_fields = list_fields(source, source.root, _ROOT)
    return source.root_fields


def find_graph(source: ByteSource) -> Record:
    """Return the one graph of a model.

    A file that ends directly after its graph is a valid message, but has no operator
    sets, which ONNX requires since IR version 3.

    Raises:
        ModelError: The graph or the operator set is missing, or there is a second graph.
    """
    fields = list_root_fields(source)
    graph = find_message(source, fields, 7, "graph")
    if graph is None:
        raise source.build_error("has no graph: this is not an ONNX model")
    if _read_int32(source, fields, 1) >= 3 and not any(record.number == 8 for record in fields):
        raise source.build_error("is cut short: there is no opset_import after the graph")
    return graph


def find_message(
    source: ByteSource, fields: Iterable[Record], number: int, caption: str
) -> Record | None:
    """Return a singular message among the fields of another, if it is there.

    The `caption` says in the error what the message is.

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
                f"a second {caption} at byte {record.start:,}, where only one is allowed"
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


_Types = dict[bytes, tuple[str, tuple[Dim, ...] | None]]
"""Types that were read, by their bytes: most values of a model have one of a few."""


def split_usual_form(source: ByteSource, record: Record) -> tuple[bytes, bytes] | None:
    """Return the payloads of a message that is short fields 1 and 2 and nothing else, if it is."""
    size = record.end - record.start
    if 4 <= size < 0x100:
        data = source.read_slice(record.start, size)
        second = 2 + data[1]
        if data[0] == 0x0A and data[1] < 0x80 and second + 1 < size and data[second] == 0x12:
            start = second + 2
            if data[second + 1] == size - start < 0x80:
                return data[2:second], data[start:]
    return None


def read_value(source: ByteSource, record: Record) -> Value:
    """Return a graph input or output.

    Raises:
        ModelError: The bytes are damaged, or its type is not one that ONNX has.
    """
    return _read_value(source, record, {})


def _read_value(source: ByteSource, record: Record, types: _Types) -> Value:
    usual = split_usual_form(source, record)
    if usual is not None and usual[1] in types:
        return Value(_decode_string(usual[0]), *types[usual[1]])
    fields = list_fields(source, record, _VALUE)
    type_ = find_message(source, fields, 2, "type")
    dtype, shape = (UNDECLARED, None) if type_ is None else _read_type(source, type_)
    if usual is not None:
        types[usual[1]] = dtype, shape
    return Value(read_optional_string(source, find_string(fields, 1)), dtype, shape)


_TENSOR_KINDS = {1: "", 8: "sparse_tensor"}
_CONTAINER_KINDS = {4: "sequence", 9: "optional", 5: "map", 7: "opaque"}
_ELEMENT_FIELDS = {4: 1, 9: 1, 5: 2}
_TYPE_KINDS = frozenset({*_TENSOR_KINDS, *_CONTAINER_KINDS})


def _read_type(source: ByteSource, type_: Record) -> tuple[str, tuple[Dim, ...] | None]:
    """Return dtype and shape of a type; the shape is `None` if unknown."""
    kind = _find_type_kind(source, type_)
    if kind is None:
        return UNDECLARED, None
    fields = list_fields(source, kind, _TENSOR_TYPE)
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
    fields = read_fields(source, type_)
    kinds = (r for r in fields if r.number in _TYPE_KINDS and r.wire_type == LENGTH)
    return find_single_record(source, kinds, "kind of type")


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
    """Yield the values of an int32 or enum, the last first; parsers use its lower 32 bits."""
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
    rank = 0
    for dim in read_fields(source, shape):
        if dim.number == 1 and dim.wire_type == LENGTH:
            rank += 1
            if rank > MAX_RANK:
                raise source.build_limit_error(MAX_RANK, "dimensions in a shape", shape)
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
    fields = list_fields(source, kind, _TENSOR_TYPE)
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
    """Return where the data of a `TensorProto` are, from its fields; `None` if in the model."""
    locations = _read_int32s(source, fields, 14)
    known_locations = (number for number in locations if number in (_INLINE, _EXTERNAL))
    if next(known_locations, _INLINE) != _EXTERNAL:
        return None
    entries = dict(
        _read_string_entry(source, r) for r in fields if r.number == 13 and r.wire_type == LENGTH
    )
    bits = get_dtype_bits(get_dtype_name(_read_int32(source, fields, 2)))
    size = _compute_data_size(_read_tensor_dims(source, fields), bits)
    end_offset, problem = _parse_extent(entries, size)
    tensor_name = read_optional_string(source, find_string(fields, 8))
    return ExternalReference(entries.get("location", ""), end_offset, tensor_name, problem)


def _read_tensor_dims(source: ByteSource, fields: Iterable[Record]) -> list[int]:
    dims: list[int] = []
    for record in fields:
        if record.number == 1 and record.wire_type in (VARINT, LENGTH):
            dims += islice(source.read_integers(record), MAX_RANK + 1 - len(dims))
            if len(dims) > MAX_RANK:
                raise source.build_limit_error(MAX_RANK, "dimensions in a tensor", record)
    return dims


def _compute_data_size(dims: Sequence[int], bits: int) -> int:
    """Return the bytes of a tensor, at most `MAX_INT64 + 1`; -1 if a dimension is negative."""
    if min(dims, default=0) < 0:
        return -1
    count = 1
    for dim in sorted(dims):  # a 0 comes first
        count = min(count * dim, 8 * MAX_INT64 + 8)
    return min(-(-count * bits // 8), MAX_INT64 + 1)


def _read_string_entry(source: ByteSource, entry: Record) -> tuple[str, str]:
    """Return key and value of an entry; one in the usual form is read at once."""
    usual = split_usual_form(source, entry)
    if usual is not None:
        return _decode_string(usual[0]), _decode_string(usual[1])
    fields = list_fields(source, entry, _STRING_ENTRY)
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
        size: Bytes that its dtype and dims need, at most one more than `MAX_INT64`; negative if a
            dimension is.
    """
    if not entries.get("location"):
        return 0, "has no location"
    if size < 0:
        return 0, "has a negative dimension"
    if size > MAX_INT64:
        return 0, f"needs more than {MAX_INT64:,} bytes, by its dimensions"
    for key in ("offset", "length"):
        if not re.fullmatch("[0-9]{1,19}", entries.get(key, "0"), re.ASCII):
            return 0, f"has the {key} {entries[key]!r}, which is not a plain number"
    length = int(entries.get("length", size))
    if length < size:
        return 0, f"has the length {length:,} but needs {size:,} bytes"
    return int(entries.get("offset", 0)) + length, ""
