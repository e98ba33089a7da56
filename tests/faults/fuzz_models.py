"""Random models as bytes, built by their descriptors: every field of ONNX occurs, in any form.

`fuzz_model` makes one from a seed. Most of the results are renamed, and `onnx.ModelProto` reads
all of them that have no damage; with damage, a reader must refuse them or agree with protobuf.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from random import Random
from typing import Any

import models
import onnx.helper
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from models import field, info, node, varint
from onnx import AttributeProto, GraphProto, ModelProto, TensorProto, TypeProto

HOSTILE_NAMES = (
    *("", "\0", "::error::x", "##[error]x", "a\nb", "\x1b[2J", "[/red]", ":smiley:", "\u202eabc"),
    *("past_key.\u0661", "past_key.007", "past_key." + "9" * 30, "past_key.0_RetainedState_"),
    *("--help", "../../x", "%s{0}$(id)", "e\u0301", "\u00e9", "n" * 130, "n" * 16_400),
)
"""Names and texts that are not those of a buffer, and break what handles names carelessly."""

_MAX_MESSAGES = 120
_LEAVE_OUT = {
    *("ModelProto.graph", "ModelProto.opset_import", "ModelProto.ir_version"),
    *("TensorProto.data_location", "TensorProto.external_data", "AttributeProto.ref_attr_name"),
}
"""Fields that are not filled at random: a model that lacks or doubles them is refused."""


def fuzz_model(
    seed: int, *, layers: int | None = None, odd_form: bool = True, damage: int = 0
) -> bytes:
    """Return a random model with KV buffers; equal arguments give equal bytes.

    The model has the pairs ``past_key.N`` and ``past_key.N_RetainedState`` (and those of
    values), each read and produced by a node. Around them stand messages of all kinds, with
    names of buffers wherever a text can be: subgraphs that capture or hide them, training
    graphs, functions, annotations, sharding, types in types, unknown fields. Nothing has
    external data.

    Args:
        seed: Any integer.
        layers: The number of layers; by default 1 to 3.
        odd_form: Whether messages are written in forms that no program uses and all can read:
            fields in another order, lengths with spare bytes, packed numbers apart, strings
            twice.
        damage: How many records are damaged afterwards: cut off, doubled, moved, with another
            length, wire type or number, or with a flipped bit. The result may be no model.
    """
    random = Random(seed)
    model = build_random_model(random, layers or random.randint(1, 3))
    raw = write_message(model, random if odd_form else None)
    for _ in range(damage):
        raw = damage_record(raw, random)
    return raw


def build_random_model(random: Random, layers: int) -> ModelProto:
    """Return a decoder with `layers` layers, and random messages around its buffers."""
    scope = random.choice(["", "", "", "model/", "7" * random.choice([90, 99, 110, 16_350]) + "/"])
    buffers = [f"{scope}past_{part}.{n}" for n in range(layers) for part in ("key", "value")]
    outputs = [f"{name}_RetainedState" for name in buffers]
    main = GraphProto(name="main", input=map(info, ["x", *buffers]), output=map(info, outputs))
    for name, output in zip(buffers, outputs, strict=True):
        main.node.append(node("Add", [name, "x"], [output]))
    model = onnx.helper.make_model(main, ir_version=10)
    for value in main.output:
        if random.random() < 0.3:
            model.graph.value_info.append(info(value.name, f"Add{value.name}_dim_0", 2))
    filler = _Filler(random, [*buffers, *outputs, "x", "y", f"{buffers[0]}0"])
    filler.fill(model, 0)
    filler.fill_graph(model.graph, 0)
    return model


class _Filler:
    """Fills messages field by field, until there are enough of them."""

    def __init__(self, random: Random, names: list[str]) -> None:
        self.random = random
        self.names = names
        self.left = random.randint(1, _MAX_MESSAGES)

    def fill_graph(self, graph: GraphProto, depth: int) -> None:
        """Add to the main graph all but inputs and outputs, which would be buffers twice."""
        for descriptor in graph.DESCRIPTOR.fields:
            if descriptor.name not in ("input", "output", "name"):
                for _ in range(self.random.choice([0, 0, 1, 2, 5])):
                    self.add_value(graph, descriptor, depth)

    def fill(self, message: Message, depth: int) -> None:
        """Set some of a message's fields."""
        chance = 0.5 if depth < 4 else 0.15
        for descriptor in message.DESCRIPTOR.fields:
            place = f"{message.DESCRIPTOR.name}.{descriptor.name}"
            if place not in _LEAVE_OUT and self.random.random() < chance:
                count = self.random.choice([1, 1, 2, 3]) if descriptor.is_repeated else 1
                for _ in range(count):
                    self.add_value(message, descriptor, depth)

    def add_value(self, message: Message, descriptor: FieldDescriptor, depth: int) -> None:
        """Set a field, or add a value to a repeated one."""
        if descriptor.message_type is not None:
            self.left -= 1
            if self.left < 0 or depth > 24:
                return
            inner = getattr(message, descriptor.name)
            inner = inner.add() if descriptor.is_repeated else inner
            inner.SetInParent()
            self.fill(inner, depth + 1)
            self.repair(inner)
        elif descriptor.is_repeated:
            getattr(message, descriptor.name).append(self.choose_value(descriptor))
        else:
            setattr(message, descriptor.name, self.choose_value(descriptor))

    def repair(self, message: Message) -> None:
        """Make a message what readers expect of it, mostly."""
        if isinstance(message, AttributeProto) and not message.type:
            message.type = AttributeProto.GRAPH if message.HasField("g") else AttributeProto.INT
        if isinstance(message, TensorProto) and self.random.random() < 0.9:
            message.data_type = TensorProto.FLOAT
        if isinstance(message, TypeProto) and not message.WhichOneof("value"):
            message.tensor_type.elem_type = TensorProto.FLOAT

    def choose_value(self, descriptor: FieldDescriptor) -> Any:
        """Return a random number, text or bytes for a field."""
        random, kind = self.random, descriptor.cpp_type
        if kind == FieldDescriptor.CPPTYPE_STRING:
            text = self.choose_text()
            is_bytes = descriptor.type == FieldDescriptor.TYPE_BYTES
            return text.encode() + random.choice([b"", b"\xff"]) if is_bytes else text
        if kind == FieldDescriptor.CPPTYPE_ENUM:
            return random.choice([value.number for value in descriptor.enum_type.values])
        if kind in (FieldDescriptor.CPPTYPE_FLOAT, FieldDescriptor.CPPTYPE_DOUBLE):
            return random.choice([0.0, -1.5, 2.0**100])
        wide = kind in (FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64)
        numbers = [0, 1, 2, 127, 128, 300, (1 << (63 if wide else 31)) - 1]
        signed = kind in (FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_INT32)
        return random.choice([*numbers, -1] if signed else numbers)

    def choose_text(self) -> str:
        """Return the name of a buffer mostly; else one that is derived, or hostile."""
        random = self.random
        name = random.choice(self.names)
        kind = random.random()
        if kind < 0.75:
            return name
        if kind < 0.85:
            return f"{random.choice(['', 'Add', 'Mul'])}{name}_dim_{random.choice(['0', '1', 'x'])}"
        return random.choice(HOSTILE_NAMES)


def write_message(message: Message, random: Random | None = None) -> bytes:
    """Return the bytes of a message: in the usual form, or in an odd one that reads the same."""
    parts = []
    for descriptor, value in message.ListFields():
        items = list(value) if descriptor.is_repeated else [value]
        width = 1 if random is None else random.choice([1, 1, 1, 2, 5])
        payloads = [_write_value(descriptor, item, random) for item in items]
        is_packed = descriptor.is_packed != (random is not None and random.random() < 0.3)
        if is_packed and descriptor.is_repeated and isinstance(payloads[0], tuple):
            payloads = [b"".join(written for _, written in payloads)]
        is_text = descriptor.cpp_type == FieldDescriptor.CPPTYPE_STRING
        if is_text and not descriptor.is_repeated and random is not None and random.random() < 0.1:
            payloads.insert(0, b"replaced by the next one")
        parts.append(b"".join(_join_field(descriptor.number, item, width) for item in payloads))
    if random is not None:
        random.shuffle(parts)
        if random.random() < 0.1:
            parts.append(field(500, random.choice([b"", b"unknown", bytes(200)])))
    return b"".join(parts)


def _write_value(
    descriptor: FieldDescriptor, value: Any, random: Random | None
) -> bytes | tuple[int, bytes]:
    """Return the payload of a LENGTH field, or the wire type and bytes of a number."""
    if isinstance(value, Message):
        return write_message(value, random)
    if descriptor.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return value.encode() if isinstance(value, str) else bytes(value)
    if descriptor.cpp_type == FieldDescriptor.CPPTYPE_FLOAT:
        return 5, struct.pack("<f", value)
    if descriptor.cpp_type == FieldDescriptor.CPPTYPE_DOUBLE:
        return 1, struct.pack("<d", value)
    return 0, varint(int(value) % (1 << 64))


def _join_field(number: int, payload: bytes | tuple[int, bytes], width: int) -> bytes:
    if isinstance(payload, bytes):
        return field(number, payload, width)
    wire_type, written = payload
    return varint(number << 3 | wire_type) + written


def damage_record(raw: bytes, random: Random) -> bytes:
    """Return a model with one record damaged, at any depth; lengths around it stay as they are."""
    start, end = _choose_record(raw, random)
    record, other = raw[start:end], _choose_record(raw, random)
    place = random.randrange(start, end) if end > start else start
    damages: tuple[Callable[[], bytes], ...] = (
        lambda: raw[:place],
        lambda: raw[:start] + raw[end:],
        lambda: raw[:end] + record + raw[end:],
        lambda: raw[:start] + raw[slice(*other)] + raw[end:],
        lambda: raw[:start] + bytes([random.randrange(256)]) + raw[start + 1 :],
        lambda: raw[: start + 1] + varint(random.choice(_LENGTHS)) + raw[start + 2 :],
        lambda: raw[:place] + bytes([raw[place] ^ 1 << random.randrange(8)]) + raw[place + 1 :],
        lambda: raw[:place] + random.choice(list(models.BROKEN.values())) + raw[place:],
    )
    return random.choice(damages)() if raw else raw


_LENGTHS = (0, 1, 127, 128, 1 << 31, 1 << 32, (1 << 63) - 1, (1 << 64) - 1)


def _choose_record(raw: bytes, random: Random) -> tuple[int, int]:
    """Return where a random record begins and ends, tag included."""
    start, end = 0, len(raw)
    while records := _list_records(raw, start, end):
        tag_start, payload_start, record_end = random.choice(records)
        if payload_start == record_end or random.random() < 0.25:
            return tag_start, record_end
        chosen = tag_start, record_end
        start, end = payload_start, record_end
    return (0, len(raw)) if (start, end) == (0, len(raw)) else chosen


def _list_records(raw: bytes, start: int, end: int) -> list[tuple[int, int, int]]:
    """Return starts of tags and payloads, and ends, of the records in a range; none if not so."""
    records, pos = [], start
    while pos < end:
        tag, after = _read_varint(raw, pos, end)
        size = {1: 8, 5: 4}.get(tag & 7)
        payload = after
        if tag & 7 == 0:
            size = _read_varint(raw, after, end)[1] - after
        elif tag & 7 == 2:
            size, payload = _read_varint(raw, after, end)
        if size is None or tag < 8 or payload + size > end:
            return []
        records.append((pos, payload if tag & 7 == 2 else payload + size, payload + size))
        pos = payload + size
    return records


def _read_varint(raw: bytes, pos: int, end: int) -> tuple[int, int]:
    value = shift = 0
    while pos < end:
        value |= (raw[pos] & 0x7F) << shift
        shift, pos = shift + 7, pos + 1
        if raw[pos - 1] < 0x80:
            break
    return value, pos
