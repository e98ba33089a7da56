"""ONNX's messages read off the wire: the signature of a model, and what it has outside.

Field numbers are those of onnx.proto (ONNX IR version 13).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from onnxkvrename.errors import ModelError
from onnxkvrename.signature import Dim, Signature, Value
from onnxkvrename.wire import LENGTH, VARINT, Record, Source, fields

GRAPH_INPUT, GRAPH_OUTPUT = 11, 12
_DTYPES = (
    *("UNDEFINED", "FLOAT", "UINT8", "INT8", "UINT16", "INT16", "INT32", "INT64", "STRING"),
    *("BOOL", "FLOAT16", "DOUBLE", "UINT32", "UINT64", "COMPLEX64", "COMPLEX128", "BFLOAT16"),
    *("FLOAT8E4M3FN", "FLOAT8E4M3FNUZ", "FLOAT8E5M2", "FLOAT8E5M2FNUZ", "UINT4", "INT4"),
    *("FLOAT4E2M1", "FLOAT8E8M0", "UINT2", "INT2"),
)
_EXTERNAL = 1
_BITS = {
    **dict.fromkeys(("UINT16", "INT16", "FLOAT16", "BFLOAT16"), 16),
    **dict.fromkeys(("FLOAT", "INT32", "UINT32"), 32),
    **dict.fromkeys(("INT64", "DOUBLE", "UINT64", "COMPLEX64"), 64),
    **dict.fromkeys(("UINT4", "INT4", "FLOAT4E2M1"), 4),
    **dict.fromkeys(("UINT2", "INT2"), 2),
    **dict.fromkeys(("UNDEFINED", "STRING"), 0),
    "COMPLEX128": 128,
}


@dataclass(frozen=True, slots=True)
class Reference:
    """External data as the model asks for it: the file ``location`` up to byte ``end``.

    ``tensor`` is the name of a tensor that lies there; ``fault`` says what is
    wrong with the entry itself.
    """

    location: str
    end: int
    tensor: str
    fault: str = ""


def signature(source: Source) -> Signature:
    """The graph inputs and outputs of a model.

    Raises :class:`ModelError` where the bytes are no model, or one that two
    readers could understand differently.
    """
    ends: dict[int, list[Value]] = {GRAPH_INPUT: [], GRAPH_OUTPUT: []}
    for record in fields(source, graph(source), stems=(), always=frozenset(ends)):
        if record.number in ends and record.wire == LENGTH:
            ends[record.number].append(_value(source, record))
    return Signature(tuple(ends[GRAPH_INPUT]), tuple(ends[GRAPH_OUTPUT]))


def graph(source: Source) -> Record:
    """The one graph of a model."""
    found = only(
        (r for r in fields(source, source.root) if r.number == 7 and r.wire == LENGTH), "graph"
    )
    if found is None:
        raise ModelError("no graph in it: this is not an ONNX model")
    return found


def only(records: Iterable[Record], what: str) -> Record | None:
    """The one record of a singular message; parsers merge two, editors pick one."""
    found: Record | None = None
    for record in records:
        if found is not None:
            raise ModelError(f"a second {what} at byte {record.body:,}, where there may be one")
        found = record
    return found


def message(source: Source, parent: Record, number: int, what: str) -> Record | None:
    """A singular message, if it is there."""
    return only(
        (r for r in fields(source, parent) if r.number == number and r.wire == LENGTH), what
    )


def string(source: Source, parent: Record, number: int) -> Record | None:
    """A singular string; the last one counts."""
    found = None
    for record in fields(source, parent):
        if record.number == number and record.wire == LENGTH:
            found = record
    return found


def text(source: Source, record: Record | None) -> str:
    """A string that may be absent."""
    return "" if record is None else source.text(record)


def _value(source: Source, record: Record) -> Value:
    name = text(source, string(source, record, 1))
    type_ = message(source, record, 2, "type")
    return Value(name, *(("UNDEFINED", None) if type_ is None else _type(source, type_)))


_TENSORS = {1: "", 8: "sparse_tensor"}
_WRAPPERS = {4: "sequence", 9: "optional", 5: "map", 7: "opaque"}


def _type(source: Source, record: Record) -> tuple[str, tuple[Dim, ...] | None]:
    kind = only(
        (
            r
            for r in fields(source, record)
            if r.wire == LENGTH and (r.number in _TENSORS or r.number in _WRAPPERS)
        ),
        "kind of type",
    )
    if kind is None:
        return "UNDEFINED", None
    if kind.number in _WRAPPERS:
        element = message(source, kind, 1 if kind.number != 5 else 2, "element type")
        inner = _type(source, element)[0] if element is not None else ""
        return f"{_WRAPPERS[kind.number]}({inner})", None
    dtype = dtype_name(next(integers(source, kind, 1), 0))
    wrapped = f"{_TENSORS[kind.number]}({dtype})" if _TENSORS[kind.number] else dtype
    shape = message(source, kind, 2, "shape")
    return wrapped, None if shape is None else tuple(_dims(source, shape))


def dtype_name(number: int) -> str:
    """ONNX's own name of a ``TensorProto.DataType``."""
    return _DTYPES[number] if 0 <= number < len(_DTYPES) else f"DataType({number})"


def integers(source: Source, parent: Record, number: int) -> Iterator[int]:
    """The values of an integer field, the last first."""
    records = [r for r in fields(source, parent) if r.number == number and r.wire == VARINT]
    return (source.integer(record) for record in reversed(records))


def _dims(source: Source, shape: Record) -> Iterator[Dim]:
    for dim in fields(source, shape):
        if dim.number == 1 and dim.wire == LENGTH:
            said = _counting(source, dim)
            if said is None:
                yield None
            elif said.number == 1:
                yield source.integer(said)
            else:
                yield source.text(said)


def _counting(source: Source, dim: Record) -> Record | None:
    """The record that counts in a dimension: of size (1) and symbol (2), the last."""
    said = None
    for record in fields(source, dim):
        if (record.number, record.wire) in ((1, VARINT), (2, LENGTH)):
            said = record
    return said


def symbols(source: Source, value: Record) -> Iterator[Record]:
    """The records of the symbols in the type of a value."""
    type_ = message(source, value, 2, "type")
    for shape in _shapes(source, type_) if type_ is not None else ():
        for dim in fields(source, shape):
            if dim.number == 1 and dim.wire == LENGTH:
                said = _counting(source, dim)
                if said is not None and said.number == 2:
                    yield said


def _shapes(source: Source, type_: Record) -> Iterator[Record]:
    """The shapes in a type, of sequences and the like those of their elements."""
    for kind in fields(source, type_):
        if kind.wire == LENGTH and kind.number in _TENSORS:
            shape = message(source, kind, 2, "shape")
            if shape is not None:
                yield shape
        elif kind.wire == LENGTH and kind.number in _WRAPPERS:
            element = message(source, kind, 1 if kind.number != 5 else 2, "element type")
            if element is not None:
                yield from _shapes(source, element)


def reference(source: Source, tensor: Record) -> Reference | None:
    """What a tensor asks of a file beside the model; ``None`` if its data are in the model."""
    external, entries, count, negative = False, [], 1, False
    for record in fields(source, tensor):
        if record.number == 1:
            for dim in source.integers(record):
                count, negative = count * abs(dim), negative or dim < 0
        elif record.number == 13 and record.wire == LENGTH:
            entries.append(record)
        elif record.number == 14 and record.wire == VARINT:
            external = source.integer(record) == _EXTERNAL
    if not external:
        return None
    said = {
        text(source, string(source, entry, 1)): text(source, string(source, entry, 2))
        for entry in entries
    }
    bits = _BITS.get(dtype_name(next(integers(source, tensor, 2), 0)), 8)
    end, fault = _extent(said, -1 if negative else -(-count * bits // 8))
    name = text(source, string(source, tensor, 8))
    return Reference(said.get("location", ""), end, name, fault)


def _extent(said: Mapping[str, str], size: int) -> tuple[int, str]:
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
