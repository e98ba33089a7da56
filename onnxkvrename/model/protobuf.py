"""Protobuf bytes as records, parsing only what is asked for.

A record is a position in the file; the weights between two positions are skipped.
What is refused here is what protobuf's own parsers refuse, and what two of them
could read differently.

The wire format: https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

from onnxkvrename.errors import ModelError
from onnxkvrename.limits import MAX_DEPTH, MAX_ENTRIES, MAX_NAME_BYTES, build_limit_error

VARINT, FIXED64, LENGTH, GROUP, END_GROUP, FIXED32 = range(6)

BLOCK_SIZE = 1 << 16
"""Bytes read at a time; a larger record is walked field by field."""
PREFIX_SIZE = 5
"""The most bytes of a tag, and of a length, that protobuf's parsers accept."""
_NUMBER_SIZE = 10
_MAX_VARINT_BITS = 70
"""Bits in the ten bytes that a number may have."""
FIXED_SIZES = {FIXED64: 8, FIXED32: 4}
"""Bytes of a field of fixed size, by its wire type."""
_SHORT_BLOCK_SIZE = 1 << 12
_HEADER_SIZE = 32
"""Bytes that hold any tag and length."""
_FEW_SMALL_FIELDS = 256
"""Fields that are read one by one in less time than a pattern for them is compiled."""
_SMALL_PAYLOAD_SIZE = 16
"""Bytes of a payload that are skipped by a pattern."""
_SMALL_FIELDS_AT_ONCE = 1000
"""Fields that are skipped at a time; the matcher needs some hundred bytes for each."""
_NO_HIT = 1 << 62
SHORT_SIZE = 1 << 10
"""Bytes of a payload that is not short; short ones can be taken without a record of each."""


class Record(NamedTuple):
    """A field in the file. Of a LENGTH field, the payload has a tag and a length prefix.

    Attributes:
        number: The field's number in its message.
        wire_type: `VARINT`, `LENGTH` and so on.
        tag_start: Offset of the tag, which is `[tag_start, length_start)`.
        length_start: Offset of the length prefix, which is `[length_start, start)`; of
            other wire types where the payload begins.
        start: Offset of the payload, which is `[start, end)`.
        end: Offset of the next field.
        parent: The message that holds the field; `None` for the model itself.
        depth: The number of messages around the field.
    """

    number: int
    wire_type: int
    tag_start: int
    length_start: int
    start: int
    end: int
    parent: Record | None
    depth: int


class Span(NamedTuple):
    """Bytes of the source that are copied unchanged: `size` of them from `offset` on."""

    offset: int
    size: int


Piece = bytes | Span
"""A part of a result: new bytes, or bytes of the source."""
TakePayloads = Callable[[list[bytes]], None]
"""Takes the payloads of fields that follow each other."""


class ByteSource:
    """Bytes to read records from, one block at a time.

    Attributes:
        read: Returns `size` bytes from an offset on, fewer only at the end.
        size: The number of bytes.
        path: The file that the bytes are from, as errors name it; `None` in memory.
        root_fields: The model's own fields, once :mod:`proto_reader` has read them.
        small_field_count: Fields that were read one by one although they were not asked for.
    """

    def __init__(
        self, read: Callable[[int, int], bytes], size: int, path: str | None = None
    ) -> None:
        self.read = read
        self.size = size
        self.path = path
        self.root_fields: list[Record] | None = None
        self.small_field_count = 0
        self._block = b""
        self._base = 0
        self._hits: dict[tuple[bytes, ...], list[int]] = {}

    @classmethod
    def from_bytes(cls, data: bytes) -> ByteSource:
        """Make a source of bytes in memory."""
        return cls(lambda offset, size: data[offset : offset + size], len(data))

    @property
    def root(self) -> Record:
        """The record of the model itself: all bytes."""
        return Record(0, LENGTH, 0, 0, 0, self.size, None, 0)

    def build_error(self, message: str, *, hint: str | None = None) -> ModelError:
        """Return an error about these bytes, with the path of their file."""
        return ModelError(message, path=self.path, hint=hint)

    def build_damage_error(self, problem: str) -> ModelError:
        """Return the error for bytes that no protobuf parser accepts."""
        return self.build_error(
            f"is cut short or damaged: {problem}", hint="export or copy it again"
        )

    def build_limit_error(self, limit: int, what: str, record: Record) -> ModelError:
        """Return the error for a model that is refused since reading it would cost too much."""
        return build_limit_error(limit, f"{what}, at byte {record.start:,}", path=self.path)

    def read_block(self, pos: int) -> tuple[bytes, int]:
        """Return a block with the whole header of the record at `pos`, and the block's offset."""
        base, edge = self._base, self._base + len(self._block)
        if base <= pos and (pos + _HEADER_SIZE <= edge or (edge == self.size and pos <= edge)):
            return self._block, base
        return self.load_block(pos)

    def load_block(self, pos: int, size: int = 0) -> tuple[bytes, int]:
        """Return the block that begins at `pos`, and `pos`.

        By default it has fewer bytes after a jump, as over weights.

        Raises:
            ModelError: The file became shorter while it was read.
        """
        jumped = pos > self._base + len(self._block)
        size = size or (_SHORT_BLOCK_SIZE if jumped else BLOCK_SIZE)
        self._block, self._base, self._hits = self.read(pos, size), pos, {}
        if len(self._block) < min(size, self.size - pos):
            raise self.build_error("became shorter while it was read")
        return self._block, pos

    def read_slice(self, offset: int, size: int) -> bytes:
        """Return up to a block of bytes, mostly from the current block."""
        index = offset - self._base
        if not 0 <= index <= index + size <= len(self._block):
            index = offset - self.load_block(offset, BLOCK_SIZE)[1]
        return self._block[index : index + size]

    def find_stems(self, stems: tuple[bytes, ...]) -> list[int]:
        """Return the sorted positions of `stems` in the current block, and a sentinel."""
        if stems not in self._hits:
            hits = [hit for stem in stems for hit in _find_offsets(self._block, stem)]
            self._hits[stems] = [*sorted(hits), _NO_HIT]
        return self._hits[stems]

    def read_payload(self, record: Record) -> bytes:
        """Return a short payload: a name, a symbol.

        Raises:
            ModelError: It has more than `MAX_NAME_BYTES` bytes.
        """
        size = record.end - record.start
        if size > MAX_NAME_BYTES:
            raise self.build_damage_error(f"a name of {size:,} bytes at byte {record.start:,}")
        return self.read_slice(record.start, size)

    def may_contain(self, record: Record, stem: bytes) -> bool:
        """Return whether a payload contains `stem`; true for one that does not fit a block."""
        block, base = self.read_block(record.start)
        if record.end > base + len(block):
            return True
        return block.find(stem, record.start - base, record.end - base) >= 0

    def read_string(self, record: Record) -> str:
        """Return a name. Bytes that are not UTF-8 become surrogates."""
        return self.read_payload(record).decode("utf-8", "surrogateescape")

    def read_integer(self, record: Record) -> int:
        """Return the value of a VARINT record, as a signed 64-bit number."""
        return next(self.read_integers(record))

    def read_integers(self, record: Record) -> Iterator[int]:
        """Yield the values of a VARINT record, or of a packed one, as signed 64-bit numbers."""
        pos = record.start
        while pos < record.end:
            block, base = self.read_block(pos)
            value, index = _parse_varint(self, block, pos - base, _NUMBER_SIZE)
            pos = base + index
            if pos > record.end:
                raise self.build_damage_error(
                    f"a number at byte {record.start:,} runs past the end of its message"
                )
            value &= (1 << 64) - 1
            yield value - (1 << 64) if value >> 63 else value


def _find_offsets(block: bytes, stem: bytes) -> Iterator[int]:
    offset = block.find(stem)
    while offset >= 0:
        yield offset
        offset = block.find(stem, offset + 1)


def _parse_varint(source: ByteSource, block: bytes, index: int, max_size: int) -> tuple[int, int]:
    """Return a number of up to `max_size` bytes in a block of `source`, and its end."""
    value = shift = 0
    while True:
        try:
            byte = block[index]
        except IndexError:
            raise source.build_damage_error("the file ends in the middle of a field") from None
        value |= (byte & 0x7F) << shift
        index += 1
        if byte < 0x80:
            return value, index
        shift += 7
        if shift == 7 * max_size:
            raise source.build_damage_error(f"a number of more than {max_size} bytes")


def encode_varint(value: int, width: int = 1) -> bytes:
    """Return `value` as a varint of at least `width` bytes."""
    encoded = bytearray()
    while value > 0x7F or len(encoded) + 1 < width:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _read_record(source: ByteSource, pos: int, parent: Record) -> Record:
    """Return the record whose tag is at `pos`."""
    block, base = source.read_block(pos)
    tag, index = _parse_varint(source, block, pos - base, PREFIX_SIZE)
    number, wire_type = tag >> 3, tag & 7
    if not 0 < number < 1 << 29:
        raise source.build_damage_error(f"field number {number} at byte {pos:,}")
    length_start = start = base + index
    if wire_type == VARINT:
        end = base + _parse_varint(source, block, index, _NUMBER_SIZE)[1]
    elif wire_type == FIXED64:
        end = start + 8
    elif wire_type == FIXED32:
        end = start + 4
    elif wire_type == LENGTH:
        size, index = _parse_varint(source, block, index, PREFIX_SIZE)
        start = base + index
        end = start + size
    elif wire_type == GROUP:
        group = Record(number, wire_type, pos, start, start, parent.end, parent, parent.depth)
        end = _find_group_end(source, group)
    else:
        raise source.build_damage_error(f"wire type {wire_type} at byte {pos:,}")
    if end > parent.end:
        raise source.build_damage_error(
            f"a field of {end - start:,} bytes at byte {pos:,} runs past the end of its message"
        )
    return Record(number, wire_type, pos, length_start, start, end, parent, parent.depth + 1)


def _find_group_end(source: ByteSource, group: Record) -> int:
    """Return the end of a group, its end tag included; nested groups are matched."""
    pos, open_groups = group.start, [group.number]
    while open_groups:
        if pos >= group.end or group.depth + len(open_groups) > MAX_DEPTH:
            raise source.build_damage_error(f"a group at byte {group.start:,} without an end")
        block, base = source.read_block(pos)
        tag, index = _parse_varint(source, block, pos - base, PREFIX_SIZE)
        if tag & 7 == END_GROUP:
            if tag >> 3 != open_groups.pop():
                raise source.build_damage_error(
                    f"a group at byte {group.start:,} with another group's end"
                )
            pos = base + index
        elif tag & 7 == GROUP:
            open_groups.append(tag >> 3)
            pos = base + index
        else:
            pos = _read_record(source, pos, group).end
            block, base = source.read_block(pos)
            end = min(len(block), group.end - base)
            pos = base + _skip_small_fields(block, pos - base, end)
    return pos


def read_fields(
    source: ByteSource,
    parent: Record,
    *,
    stems: tuple[bytes, ...] | None = None,
    always: frozenset[int] = frozenset(),
    shorts: Mapping[int, TakePayloads] = MappingProxyType({}),
) -> Iterator[Record]:
    """Yield the fields of a message in the file's order; groups are skipped.

    With `stems` a graph of 100,000 nodes yields only the few that matter, at about
    100 ns for each of the others.

    Args:
        source: The bytes.
        parent: The record of the message.
        stems: Yield only fields whose payload may contain one of these. A field that does
            not fit a block is yielded without a search. If empty, only `always` counts.
        always: Numbers of fields to yield whatever they contain.
        shorts: For each number among `always`, with no stems, what takes the payloads of short
            fields, many at a time and in the file's order. Of these only a few are yielded.

    Raises:
        ModelError: No protobuf parser accepts the bytes that were walked.
    """
    if parent.depth > MAX_DEPTH:
        raise source.build_damage_error(f"messages nested more than {MAX_DEPTH} deep")
    pos, end, depth = parent.start, parent.end, parent.depth + 1
    block, base, edge = b"", 0, -1
    read_singly = always.difference(shorts)
    needs_reading = b"" if stems is None else _build_tag_table(read_singly)
    group_count = 0
    while pos < end:
        in_block = base <= pos < edge - _HEADER_SIZE
        is_read_next = in_block and needs_reading and needs_reading[block[pos - base]]
        if stems is not None and not is_read_next:
            pos = _skip_unrelated_fields(source, pos, end, stems, read_singly, shorts)
            if pos == end:
                return
        if not base <= pos < edge - 1:
            block, base = source.read_block(pos)
            edge = min(base + len(block), end)
        tag, size = block[pos - base], block[pos - base + 1] if pos < edge - 1 else 0xFF
        start, is_short = pos + 2, size < 0x80
        if not is_short and tag & 7 == LENGTH and pos < edge - 2 and block[start - base] < 0x80:
            size, start, is_short = (size & 0x7F) + (block[start - base] << 7), pos + 3, True
        after = start + (size if tag & 7 == LENGTH else 0)
        # Nearly every field is this short, and read some ten times faster here.
        if is_short and 7 < tag < 0x80 and tag & 7 in (VARINT, LENGTH) and after <= end:
            start = pos + 1 if tag & 7 == VARINT else start
            record = Record(tag >> 3, tag & 7, pos, pos + 1, start, after, parent, depth)
        else:
            record = _read_record(source, pos, parent)
        pos = record.end
        if record.wire_type == GROUP:
            group_count += 1
            if group_count > MAX_ENTRIES:
                raise source.build_limit_error(MAX_ENTRIES, "groups in a message", parent)
            continue
        if stems is not None and record.number not in always:
            source.small_field_count += 1
            if source.small_field_count >= _FEW_SMALL_FIELDS:
                needs_reading = _build_needed_table(read_singly)
            if not stems:
                continue
        yield record


class UnusualMessageError(Exception):
    """A message is not as protobuf itself writes it; a parser may still accept it."""


def split_message(
    data: bytes, wire_types: Mapping[int, tuple[int, ...]]
) -> list[tuple[int, int | bytes]]:
    """Return the fields of a message in memory: numbers, and payloads or unsigned values.

    Args:
        data: The message.
        wire_types: The fields that it may have, each with the wire types that protobuf reads.

    Raises:
        UnusualMessageError: It has another field, one with another wire type, or a number in more
            bytes than it needs. What a parser makes of these is for a parser to say.
    """
    fields: list[tuple[int, int | bytes]] = []
    position, size = 0, len(data)
    try:
        while position < size:
            tag, position = data[position], position + 1
            if tag > 0x7F:
                tag, position = read_plain_varint(data, position - 1)
            number, wire_type = tag >> 3, tag & 7
            if wire_type not in wire_types.get(number, ()):
                raise UnusualMessageError
            if wire_type == VARINT:
                value, position = read_plain_varint(data, position)
                fields.append((number, value))
                continue
            if wire_type == LENGTH:
                length, position = data[position], position + 1
                if length > 0x7F:
                    length, position = read_plain_varint(data, position - 1)
            else:
                length = FIXED_SIZES[wire_type]
            end = position + length
            if end > size:
                break
            fields.append((number, data[position:end]))
            position = end
    except IndexError:
        position = -1
    if position != size:
        raise UnusualMessageError
    return fields


def read_varint(data: bytes, position: int) -> tuple[int, int]:
    """Return a number and its end; what is cut short or too long raises IndexError."""
    byte = data[position]
    value, shift = byte & 0x7F, 7
    while byte >= 0x80:
        position += 1
        byte = data[position]
        value |= (byte & 0x7F) << shift
        shift += 7
        if shift > _MAX_VARINT_BITS:
            raise IndexError
    return value, position + 1


def read_plain_varint(data: bytes, position: int) -> tuple[int, int]:
    """Return a number and its end.

    Raises:
        IndexError: It is cut short or too long.
        UnusualMessageError: It has more bytes than it needs.
    """
    value, end = read_varint(data, position)
    if end - position > 1 and not data[end - 1]:
        raise UnusualMessageError
    return value, end


def list_fields(source: ByteSource, parent: Record, numbers: frozenset[int]) -> list[Record]:
    """Return the fields of a message that have one of some numbers, in the file's order.

    Raises:
        ModelError: No protobuf parser accepts the bytes, or there are more than `MAX_ENTRIES`.
    """
    fields: list[Record] = []
    stems = () if parent.parent is None else None  # only the model itself has much to skip
    for record in read_fields(source, parent, stems=stems, always=numbers):
        if record.number in numbers:
            fields.append(record)
            if len(fields) > MAX_ENTRIES:
                raise source.build_limit_error(MAX_ENTRIES, "fields in a message", parent)
    return fields


def _skip_unrelated_fields(
    source: ByteSource,
    pos: int,
    end: int,
    stems: tuple[bytes, ...],
    always: frozenset[int],
    shorts: Mapping[int, TakePayloads],
) -> int:
    """Return where the first field from `pos` on begins that must be read, or `end`.

    Skips numbers, and short LENGTH fields that are in one block and contain no stem. All
    others, the malformed among them, are left to :func:`_read_record`.
    """
    needs_reading = _build_tag_table(always)
    block, base = source.read_block(pos)
    while True:
        index, block_end = pos - base, min(end - base, len(block))
        hits = source.find_stems(stems)
        while index + 3 <= block_end:
            hit = hits[bisect_left(hits, index)]
            if needs_reading[block[index]]:
                start = index
                if source.small_field_count >= _FEW_SMALL_FIELDS:
                    index = _skip_small_fields(block, index, min(block_end, hit), always)
                if index == start:
                    return base + index
                continue
            take = shorts.get(block[index] >> 3)
            if take is not None:
                payloads, index = _collect_short_fields(block, index, block_end)
                if payloads:
                    take(payloads)
                    continue
                if index + SHORT_SIZE + PREFIX_SIZE <= block_end:
                    return base + index
                break
            last, index = _skip_short_fields(block, index, min(block_end - 3, hit))
            if last == index or index > hit:
                return base + last
            if index > block_end:
                index = last
                break
        pos = base + index
        if end <= base + len(block) or (index == 0 and len(block) == BLOCK_SIZE):
            return pos
        block, base = source.load_block(pos, BLOCK_SIZE)


def _skip_short_fields(block: bytes, index: int, stop: int) -> tuple[int, int]:
    """Skip short fields of one tag that begin up to `stop`.

    Returns the start and the end of the last one; its start twice if a longer one follows.
    This loop sees every node of a graph, so it does nothing else.
    """
    tag = block[index]
    last = index
    while index <= stop and block[index] == tag:
        last = index
        size = block[index + 1]
        if size < 0x80:
            index += 2 + size
        elif block[index + 2] < 0x80:
            index += 3 + (size & 0x7F) + (block[index + 2] << 7)
        else:
            return index, index
    return last, index


def _collect_short_fields(block: bytes, index: int, end: int) -> tuple[list[bytes], int]:
    """Return the payloads of short fields of one tag up to `end`, and where the next begins."""
    tag, payloads = block[index], list[bytes]()
    while index + 3 <= end and block[index] == tag:
        size, start = block[index + 1], index + 2
        if size > 0x7F:
            if block[start] >= SHORT_SIZE >> 7:
                break
            size, start = (size & 0x7F) + (block[start] << 7), start + 1
        if start + size > end:
            break
        index = start + size
        payloads.append(block[start:index])
    return payloads, index


@lru_cache
def _build_tag_table(always: frozenset[int]) -> bytes:
    """Return for each first byte of a tag whether its field must be read."""
    return bytes(tag & 0x87 != LENGTH or tag >> 3 in {0, *always} for tag in range(256))


@lru_cache
def _build_needed_table(always: frozenset[int]) -> bytes:
    """Return for each first byte of a tag whether its field was asked for."""
    return bytes(tag < 0x80 and tag >> 3 in {0, *always} for tag in range(256))


def _skip_small_fields(
    block: bytes, index: int, end: int, excluded: frozenset[int] = frozenset()
) -> int:
    """Return where the first field from `index` on begins that is not small, or ends after `end`.

    One by one small fields take a microsecond each, and a hostile file may be full of them, some
    only two bytes long. Small is a field with a tag of one byte and a number, or with a tag of two
    bytes and a number or few bytes of payload, whose length may be written longer than needed.

    Fields with one of the `excluded` numbers are not skipped.
    """
    match = _build_small_pattern(excluded).match(block, index, max(index, end))
    return index if match is None else match.end()


@lru_cache
def _build_small_pattern(excluded: frozenset[int]) -> re.Pattern[bytes]:
    """Return a pattern for many small fields, none with one of some numbers.

    All of them are well-formed, and there is only one way to divide them.
    """
    numbers = [number for number in range(1, 16) if number not in excluded]
    varint = rb"[\x80-\xff]{0,9}[\x00-\x7f]"
    fields = []
    for wire_type, payload in ((VARINT, varint), (FIXED64, b".{8}"), (FIXED32, b".{4}")):
        tags = re.escape(bytes(number << 3 | wire_type for number in numbers))
        fields.append(b"[%b]%b" % (tags, payload))
    reserved = b"|".join(
        re.escape(bytes([number << 3 & 0x78 | 0x80 | wire_type, number >> 4]))
        for number in sorted(excluded)
        for wire_type in (VARINT, FIXED64, LENGTH, FIXED32)
        if number > 15
    )
    no_reserved = b"(?!%b)" % reserved if reserved else b""
    short = b"|".join(
        b"(?:%b|%b\x80{0,%d}\\x00).{%d}"
        % (re.escape(bytes([size])), re.escape(bytes([size | 0x80])), PREFIX_SIZE - 2, size)
        for size in range(_SMALL_PAYLOAD_SIZE + 1)
    )
    for wire_type, payload in (
        (VARINT, varint),
        (FIXED64, b".{8}"),
        (LENGTH, b"(?:%b)" % short),
        (FIXED32, b".{4}"),
    ):
        tags = re.escape(bytes(0x80 | low << 3 | wire_type for low in range(16)))
        fields.append(b"%b[%b][\x01-\x7f]%b" % (no_reserved, tags, payload))
    return re.compile(b"(?:%b){0,%d}" % (b"|".join(fields), _SMALL_FIELDS_AT_ONCE), re.DOTALL)
