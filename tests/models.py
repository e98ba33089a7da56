"""Build the models that the tests rename, and the expected results.

Small models; ways to write them that no program takes, and bytes that none can
read; and a patch of a model by other means, to compare results with: the whole
parsed, renamed by reflection, and serialised again.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import onnx.helper
from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet
from onnx import (
    FunctionProto,
    GraphProto,
    ModelProto,
    NodeProto,
    SparseTensorProto,
    TensorProto,
    ValueInfoProto,
)

from onnxkvrename.model.protobuf import ByteSource
from onnxkvrename.verification.graph_bodies import ModelGraph, read_graph

KEY, VALUE = "past_key.0", "past_value.0"
KEY_OUT, VALUE_OUT = f"{KEY}_RetainedState", f"{VALUE}_RetainedState"
SHAPE = (1, 2, 8, 4)

node = onnx.helper.make_node


def info(name: str, *shape: int | str | None, dtype: int = TensorProto.FLOAT) -> ValueInfoProto:
    """A graph input or output; without a shape that of a buffer."""
    return onnx.helper.make_tensor_value_info(name, dtype, shape or SHAPE)


def read_graph_of(model: ModelProto) -> ModelGraph:
    """The graph of a model in memory, as a proof reads it."""
    return read_graph(ByteSource.from_bytes(model.SerializeToString()))


def tensor(name: str, *values: float) -> TensorProto:
    """A weight."""
    return onnx.helper.make_tensor(name, TensorProto.FLOAT, [len(values)], values)


def sparse(name: str) -> SparseTensorProto:
    """A sparse weight: it goes by the name of its values."""
    indices = onnx.helper.make_tensor("", TensorProto.INT64, [1], [3])
    return onnx.helper.make_sparse_tensor(tensor(name, 2.0), indices, (4,))


def graph(*nodes: NodeProto, outputs: tuple[str, ...] = (), name: str = "inner") -> GraphProto:
    """A graph without inputs, as the body of an If is; it hands on what its last node makes."""
    outputs = outputs or tuple(nodes[-1].output)
    return onnx.helper.make_graph(nodes, name, [], [info(name) for name in outputs])


def branch(body: GraphProto, name: str = "chosen") -> NodeProto:
    """An If with this body on one side, and a plain one on the other."""
    other = graph(node("Identity", ["x"], [f"{name}_else"]))
    return node("If", ["flag"], [name], then_branch=body, else_branch=other)


def decoder(*extra: NodeProto, functions: tuple[FunctionProto, ...] = ()) -> ModelProto:
    """One layer: two buffers, written and read again; ``extra`` nodes come last."""
    nodes = [
        node("Add", [KEY, "x"], [KEY_OUT], name="write_key"),
        node("Add", [VALUE, "x"], [VALUE_OUT], name="write_value"),
        node("Mul", [KEY_OUT, VALUE_OUT], ["logits"], name="read"),
        *extra,
    ]
    inputs = [info("x"), info(KEY), info(VALUE), info("flag", 1, dtype=TensorProto.BOOL)]
    outputs = [info("logits"), info(KEY_OUT), info(VALUE_OUT)]
    opsets = [onnx.helper.make_opsetid("", 18), onnx.helper.make_opsetid("local", 1)]
    main = onnx.helper.make_graph(nodes, "main", inputs, outputs)
    return onnx.helper.make_model(
        main, opset_imports=opsets, ir_version=10, functions=list(functions)
    )


def saved(model: Message | bytes, path: Path) -> Path:
    """Write a model, or bytes that may be none."""
    path.write_bytes(model if isinstance(model, bytes) else model.SerializeToString())
    return path


def varint(value: int, width: int = 1) -> bytes:
    """A number as protobuf writes it; ``width`` makes it longer than it need be."""
    digits = [value & 0x7F]
    while value := value >> 7:
        digits.append(value & 0x7F)
    digits += [0] * (width - len(digits))
    return bytes([digit | 0x80 for digit in digits[:-1]] + digits[-1:])


def field(number: int, payload: bytes | str | int, width: int = 1) -> bytes:
    """A field by its number: a number, or bytes behind their length."""
    if isinstance(payload, int):
        return varint(number << 3) + varint(payload, width)
    payload = payload.encode() if isinstance(payload, str) else payload
    return varint(number << 3 | 2) + varint(len(payload), width) + payload


OPEN, CLOSE = varint(100 << 3 | 3), varint(100 << 3 | 4)

BROKEN: dict[str, bytes] = {
    "a tag alone": b"\x0a",
    "a tag cut off": b"\x8a",
    "a length cut off": b"\x0a\x80",
    "a number cut off": b"\x08\x80",
    "fixed64 cut off": b"\x09" + b"8" * 7,
    "fixed32 cut off": b"\x0d" + b"4" * 3,
    "a length past the end": b"\x12\x02a",
    "a length of 2^31": b"\x12" + varint(1 << 31),
    "a length of 2^63": b"\x12" + varint(1 << 63),
    "a length of 2^64-1": b"\x12" + varint((1 << 64) - 1),
    "a number of 11 bytes": field(1, 1, 11),
    "a tag of 6 bytes": varint(1 << 3, 6) + b"\0",
    "a length of 6 bytes": field(2, "a", 6),
    "field 0": field(0, "a"),
    "field 0, a number": field(0, 1),
    "field 2^29": field(1 << 29, 1),
    "wire type 6": b"\x0e\x01",
    "wire type 7": b"\x0f\x01",
    "a group without an end": OPEN + field(1, 1),
    "an end without a group": CLOSE,
    "a group with another's end": OPEN + varint(101 << 3 | 4),
    "groups that cross": OPEN + varint(101 << 3 | 3) + CLOSE + varint(101 << 3 | 4),
    "a field past the end of a group": OPEN + b"\x12\x03" + CLOSE,
    "groups in groups, 101 deep": OPEN * 101 + CLOSE * 101,
}
"""Fields that no parser takes."""


def every(message: Message) -> Iterator[Message]:
    """A message, and all messages in it."""
    yield message
    for descriptor, value in message.ListFields():
        if descriptor.message_type is not None:
            for inner in value if descriptor.is_repeated else [value]:
                yield from every(inner)


# What a model must come to

BUFFER = re.compile(
    r"((?:.*/)?past_(?:key|value)\.(?:0|[1-9]\d{0,5}))((?:_RetainedState)?)", re.DOTALL
)
INSIDE = re.compile(
    r"((?:.*/)?past_(?:key|value)\.(?:0|[1-9]\d{0,5}))((?:_(?:Internal)?RetainedState)?)", re.DOTALL
)

NAMES = {
    *("NodeProto.input", "NodeProto.output", "ValueInfoProto.name", "TensorProto.name"),
    *("TensorAnnotation.tensor_name", "ShardingSpecProto.tensor_name"),
    *("FunctionProto.input", "FunctionProto.output"),
}
ENTRIES = {
    "TensorAnnotation.quant_parameter_tensor_names": ("value",),
    "TrainingInfoProto.initialization_binding": ("key", "value"),
    "TrainingInfoProto.update_binding": ("key", "value"),
}
STRANGERS = {
    *("ModelProto.functions", "SparseTensorProto.indices", "AttributeProto.tp"),
    *("AttributeProto.t", "AttributeProto.tensors", "AttributeProto.type_protos"),
    *("AttributeProto.sparse_tensor", "AttributeProto.sparse_tensors"),
}


def patched(model: ModelProto, symbols: Mapping[str, str] | None = None) -> ModelProto:
    """The model as it should come out."""
    ends = [value.name for value in (*model.graph.input, *model.graph.output)]
    matches = {name: BUFFER.fullmatch(name) for name in ends}
    names = {name: f"{m[1]}_VLLM{m[2]}" for name, m in matches.items() if m}
    result = ModelProto.FromString(model.SerializeToString())
    _patch(result, names, symbols or {})
    for function in result.functions if names else ():
        found = {name: INSIDE.fullmatch(name) for name in list_names(function)}
        _patch(function, {name: f"{m[1]}_VLLM{m[2]}" for name, m in found.items() if m}, {})
    return result


def list_names(message: Message) -> Iterator[str]:
    """The names of values in a message, also in graphs within it."""
    for inner in every(message):
        for descriptor, value in inner.ListFields():
            place = f"{inner.DESCRIPTOR.name}.{descriptor.name}"
            if place in NAMES:
                yield from value if descriptor.is_repeated else [value]
            for part in ENTRIES.get(place, ()):
                yield from (getattr(entry, part) for entry in value)


def _patch(message: Message, names: Mapping[str, str], symbols: Mapping[str, str]) -> None:
    for descriptor, value in message.ListFields():
        place = f"{message.DESCRIPTOR.name}.{descriptor.name}"
        if place in NAMES and descriptor.is_repeated:
            value[:] = [names.get(name, name) for name in value]
        elif place in NAMES:
            setattr(message, descriptor.name, names.get(value, value))
        elif place == "Dimension.dim_param":
            message.dim_param = symbols.get(value, value)
        elif descriptor.message_type is not None and place not in STRANGERS:
            for inner in value if descriptor.is_repeated else [value]:
                for part in ENTRIES.get(place, ()):
                    if getattr(inner, part) in names:
                        setattr(inner, part, names[getattr(inner, part)])
                own = defined(inner) if place != "ModelProto.graph" else ()
                _patch(inner, {old: names[old] for old in names if old not in own}, symbols)


def defined(message: Message) -> set[str]:
    """The names that a graph gives to values of its own."""
    if not isinstance(message, GraphProto):
        return set()
    names = {value.name for value in (*message.input, *message.initializer)}
    names |= {weight.values.name for weight in message.sparse_initializer}
    return names.union(*(made.output for made in message.node))


def written(message: Message, *, width: int = 1, backwards: bool = False) -> bytes:
    """A message as no other program would write it, and all can read it."""
    parts = []
    for descriptor, value in message.ListFields():
        number = descriptor.number
        for item in value if descriptor.is_repeated else [value]:
            if isinstance(item, Message):
                parts.append(field(number, written(item, width=width, backwards=backwards), width))
            elif isinstance(item, float):  # the double_data of tensors are not used here
                parts.append(bytes([number << 3 | 5]) + struct.pack("<f", item))
            else:
                item = item % (1 << 64) if isinstance(item, int) else item
                parts.append(field(number, item, width))
    parts += [field(unknown.field_number, unknown.data) for unknown in UnknownFieldSet(message)]
    return b"".join(reversed(parts) if backwards else parts)


FORMS: dict[str, Callable[[Message], bytes]] = {
    "as protobuf writes it": lambda message: message.SerializeToString(deterministic=True),
    "backwards": lambda message: written(message, backwards=True),
    "with long lengths": lambda message: written(message, width=5),
}
