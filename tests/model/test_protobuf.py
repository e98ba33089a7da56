"""Records found as protobuf finds them."""

from __future__ import annotations

import onnx
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from models import BROKEN, CLOSE, OPEN, field, varint
from tiers import thin

from onnxkvrename.errors import ModelError
from onnxkvrename.limits import MAX_NAME_BYTES
from onnxkvrename.model import protobuf as wire
from onnxkvrename.model.protobuf import (
    BLOCK_SIZE,
    FIXED32,
    FIXED64,
    LENGTH,
    VARINT,
    ByteSource,
    Record,
    read_fields,
)

GRAPH = 7


def read(data: bytes) -> list[tuple[int, int, bytes]]:
    return [
        (r.number, r.wire_type, data[r.start : r.end])
        for r in read_fields(ByteSource.from_bytes(data), root(data))
    ]


def root(data: bytes) -> Record:
    return ByteSource.from_bytes(data).root


def only_field(source: ByteSource, parent: Record) -> Record:
    (record,) = read_fields(source, parent)
    return record


def test_every_kind_of_field_is_found_in_order():
    data = field(1, 300) + b"\x11" + b"8" * 8 + field(3, "name") + b"\x25" + b"4" * 4
    assert read(data) == [
        (1, VARINT, varint(300)),
        (2, FIXED64, b"8" * 8),
        (3, LENGTH, b"name"),
        (4, FIXED32, b"4" * 4),
    ]


@pytest.mark.parametrize("number", [1, 15, 16, 2047, 2048, (1 << 29) - 1])
@pytest.mark.parametrize("width", [1, 2, 5])
def test_numbers_and_lengths_may_be_longer_than_needed(number: int, width: int):
    tag = varint(number << 3 | 2, min(5, width))
    data = tag + varint(4, width) + b"name" + field(1, 7, width)
    assert [(n, payload) for n, _, payload in read(data)] == [
        (number, b"name"),
        (1, varint(7, width)),
    ]


@pytest.mark.parametrize("value", [0, 127, 128, 1 << 32, (1 << 63) - 1, -1, -(1 << 63)])
def test_integers_are_signed_64_bit_numbers(value: int):
    source = ByteSource.from_bytes(field(1, value % (1 << 64)))
    assert source.read_integer(only_field(source, source.root)) == value


def test_packed_integers_are_read_one_by_one():
    source = ByteSource.from_bytes(field(1, varint(1) + varint(300) + varint((1 << 64) - 2)))
    assert list(source.read_integers(only_field(source, source.root))) == [1, 300, -2]


def test_groups_are_stepped_over_with_all_that_is_in_them():
    inner = varint(101 << 3 | 3) + field(5, "y") + varint(101 << 3 | 4)
    group = OPEN + field(1, "x") + inner + b"\x11" + CLOSE[:1] * 8 + CLOSE
    assert read(field(1, "a") + group + field(2, "b")) == [
        (1, LENGTH, b"a"),
        (2, LENGTH, b"b"),
    ]


@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN.keys())
@pytest.mark.parametrize("before", [b"", field(1, 8)], ids=["first", "second"])
def test_what_protobuf_refuses_is_refused(data: bytes, before: bytes):
    with pytest.raises(DecodeError):
        onnx.ModelProto.FromString(before + data)
    with pytest.raises(ModelError):
        read(before + data)


@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN.keys())
@pytest.mark.parametrize("before", [b"", field(1, "a")], ids=["first", "second"])
@pytest.mark.parametrize("after", [b"", field(2, "b" * 50)], ids=["last", "not last"])
def test_what_protobuf_refuses_in_a_graph_is_refused_there(
    data: bytes, before: bytes, after: bytes
):
    raw = field(GRAPH, before + data) + after
    with pytest.raises(DecodeError):
        onnx.ModelProto.FromString(raw)
    source = ByteSource.from_bytes(raw)
    graph = next(read_fields(source, source.root))
    for stems in (None, (), (b"past_",)):
        with pytest.raises(ModelError):
            list(read_fields(source, graph, stems=stems))
    with pytest.raises(ModelError):
        list(read_fields(source, graph, stems=(), always=frozenset({1}), shorts={1: len}))


def test_groups_count_as_messages():
    fits, too_deep = (field(GRAPH, OPEN * count + CLOSE * count) for count in (99, 100))
    onnx.ModelProto.FromString(fits)
    assert (
        list(
            read_fields(
                ByteSource.from_bytes(fits), only_field(ByteSource.from_bytes(fits), root(fits))
            )
        )
        == []
    )
    with pytest.raises(DecodeError):
        onnx.ModelProto.FromString(too_deep)
    with pytest.raises(ModelError):
        list(
            read_fields(
                ByteSource.from_bytes(too_deep),
                only_field(ByteSource.from_bytes(too_deep), root(too_deep)),
            )
        )


@pytest.mark.parametrize("depth", [100, 101])
def test_messages_nest_as_deep_as_protobuf_takes_them(depth: int):
    data = b""
    for _ in range(depth):
        data = field(1, data)
    source, record = ByteSource.from_bytes(data), root(data)
    for _ in range(100):
        record = only_field(source, record)
    if depth == 100:
        assert list(read_fields(source, record)) == []
    else:
        record = only_field(source, record)
        with pytest.raises(ModelError, match="nested more than 100 deep"):
            list(read_fields(source, record))


def test_a_file_that_shrinks_while_it_is_read_is_noticed():
    data = field(1, "a" * 200_000) + field(2, "b")
    source = ByteSource(lambda offset, size: data[offset : offset + size][:100], len(data))
    with pytest.raises(ModelError, match="shorter"):
        list(read_fields(source, source.root))


def test_a_name_of_more_than_64_kib_is_refused():
    source = ByteSource.from_bytes(
        field(1, "a" * MAX_NAME_BYTES) + field(2, "a" * (MAX_NAME_BYTES + 1))
    )
    fits, too_long = read_fields(source, source.root)
    assert source.read_string(fits) == "a" * MAX_NAME_BYTES
    with pytest.raises(ModelError, match="65,537 bytes"):
        source.read_string(too_long)


def test_bytes_that_are_no_utf8_survive_as_text():
    source = ByteSource.from_bytes(field(1, b"past_\xff\x00"))
    text = source.read_string(only_field(source, source.root))
    assert text.encode("utf-8", "surrogateescape") == b"past_\xff\x00"


# Looking for stems


@st.composite
def messages(draw: st.DrawFn) -> bytes:
    """Fields of one message, some with a stem in them, some near a block's size."""
    data = b""
    for _ in range(draw(st.integers(1, 25))):
        number = draw(st.sampled_from([1, 2, 5, 11, 15, 16, 200]))
        kind = draw(st.integers(0, 9))
        if kind == 0:
            data += field(number, draw(st.sampled_from([0, 127, 128, 1 << 60])))
        elif kind == 1:
            data += varint(number << 3 | 1) + b"past_key"
        elif kind == 2:
            data += OPEN + field(1, "past_") + CLOSE
        else:
            filling = "x" * draw(st.integers(0, 90))
            name = draw(st.sampled_from(["", "", "past_", "kv"]))
            cut = draw(st.integers(0, len(filling)))
            payload = filling[:cut] + name + filling[cut:]
            data += field(number, payload, draw(st.sampled_from([1, 1, 2, 3])))
    return data


@given(
    before=st.integers(0, 70),
    message=messages(),
    stems=st.sampled_from([(b"past_",), (b"past_", b"kv"), ()]),
    always=st.sampled_from([frozenset(), frozenset((11,)), frozenset((1, 200))]),
    few=st.sampled_from([0, 3, 256]),
)
def test_a_search_finds_what_a_plain_walk_finds(
    before: int, message: bytes, stems: tuple[bytes, ...], always: frozenset[int], few: int
):
    data = field(3, "b" * before) + field(7, message) + field(4, "past_")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "BLOCK_SIZE", 64)
        patch.setattr(wire, "_FEW_SMALL_FIELDS", few)
        source = ByteSource.from_bytes(data)
        holder = list(read_fields(source, source.root))[1]
        plain = list(read_fields(source, holder))
        found = list(read_fields(source, holder, stems=stems, always=always))
    asked = [
        r
        for r in plain
        if r.number in always or any(stem in data[r.start : r.end] for stem in stems)
    ]
    if not stems:
        assert found == asked
        return
    assert [r for r in plain if r in found] == found
    assert [r for r in asked if r.wire_type == LENGTH and r not in found] == []
    for record in found:  # the others are those that take a longer look
        prefix, size = record.start - record.length_start, record.end - record.length_start
        if record.wire_type == LENGTH and record.number < 16 and prefix < 3 < size < 63:
            assert record in asked


@given(before=st.integers(0, 70), message=messages(), size=st.sampled_from([16, 1 << 10]))
def test_short_fields_and_records_are_all_there_is_in_its_order(
    before: int, message: bytes, size: int
):
    data = field(3, "b" * before) + field(7, message) + field(4, "past_")
    payloads: list[bytes] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "BLOCK_SIZE", 64)
        patch.setattr(wire, "SHORT_SIZE", size)
        source = ByteSource.from_bytes(data)
        holder = list(read_fields(source, source.root))[1]
        asked = [r for r in read_fields(source, holder) if r.number in (1, 200)]
        always, shorts = frozenset((1, 200)), {1: payloads.extend}
        others = []
        for record in read_fields(source, holder, stems=(), always=always, shorts=shorts):
            if (record.number, record.wire_type) == (1, LENGTH):
                payloads.append(data[record.start : record.end])
            else:
                others.append(record)
    texts = [r for r in asked if (r.number, r.wire_type) == (1, LENGTH)]
    assert payloads == [data[r.start : r.end] for r in texts]
    assert others == [r for r in asked if r not in texts]


@pytest.mark.parametrize("around", thin([1 << 16, 2 << 16], 1))
def test_a_name_is_found_wherever_a_block_ends(around: int):
    names = field(1, "past_key.0") + field(1, "x" * 100) + field(1, "past_key.1")
    for before in range(around - 180, around + 20):
        filler = b"".join(field(2, "f" * 96) for _ in range(before // 98))
        source = ByteSource.from_bytes(filler + field(3, "f" * (before % 98)) + names)
        found = [source.read_string(r) for r in read_fields(source, source.root, stems=(b"past_",))]
        assert found == ["past_key.0", "past_key.1"]


def test_a_field_larger_than_a_block_is_given_unless_nothing_is_looked_for():
    data = field(5, "w" * 70_000) + field(1, "a") + field(1, "past_")
    source = ByteSource.from_bytes(data)
    numbers = [r.number for r in read_fields(source, source.root, stems=(b"past_",))]
    assert numbers == [5, 1]
    assert list(read_fields(source, source.root, stems=())) == []


def test_weights_are_stepped_over_and_not_read():
    data = field(5, "w" * 5_000_000) + field(1, "past_")
    sizes: list[int] = []

    def reading(offset: int, size: int) -> bytes:
        sizes.append(size)
        return data[offset : offset + size]

    source = ByteSource(reading, len(data))
    assert len(list(read_fields(source, source.root, stems=(b"past_",)))) == 2
    assert sum(sizes) <= 2 * BLOCK_SIZE


@pytest.mark.parametrize("stems", [(), (b"past_",)])
def test_a_block_is_read_once_however_many_fields_are_given(stems: tuple[bytes, ...]):
    data = field(7, field(11, "past_key.0" + "x" * 90) * 2_000)
    blocks: list[int] = []

    def reading(offset: int, size: int) -> bytes:
        blocks.append(offset)
        return data[offset : offset + size]

    source = ByteSource(reading, len(data))
    graph = only_field(source, source.root)
    found = list(read_fields(source, graph, stems=stems, always=frozenset((11,))))
    assert len(found) == 2_000
    assert len(blocks) <= len(data) // BLOCK_SIZE + 2
