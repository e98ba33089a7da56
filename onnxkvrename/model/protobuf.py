"""Protobuf bytes as records, and the edits that change them.

Nothing is parsed that is not asked for: a record is a place in the file, and
the weights between two places are stepped over. What is refused here is what
protobuf's own parsers refuse, and what two of them could read differently.

The wire format: https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

from onnxkvrename.errors import ModelError

VARINT, FIXED64, LENGTH, GROUP, END_GROUP, FIXED32 = range(6)

BLOCK_SIZE = 1 << 16
"""Bytes read at a time; a record that is larger is looked into field by field."""
MAX_DEPTH = 100
"""Nested messages that protobuf's parsers take."""
MAX_NAME_SIZE = 1 << 16
"""Bytes of a name. Nobody's buffer is called like that; somebody's attack is."""
_SHORT_BLOCK_SIZE = 1 << 12
_MAX_HEADER_SIZE = 32
"""Bytes that hold any tag and length."""
_NO_HIT = 1 << 62


class Record(NamedTuple):
    """A field in the file: its payload is ``[body, end)``, its length prefix ``[size_at, body)``.

    ``depth`` counts the messages around it; the model itself has none.
    """

    number: int
    wire_type: int
    length_start: int
    start: int
    end: int
    parent: Record | None
    depth: int


class Span(NamedTuple):
    """Bytes of the source that are taken over as they are."""

    offset: int
    size: int


Piece = bytes | Span


class ByteSource:
    """Bytes to read records from, a block at a time.

    ``read(offset, size)`` returns ``size`` bytes, fewer only at the end.
    """

    def __init__(self, read: Callable[[int, int], bytes], size: int) -> None:
        self.read = read
        self.size = size
        self._block = b""
        self._base = 0
        self._hits: dict[tuple[bytes, ...], list[int]] = {}

    @classmethod
    def from_bytes(cls, data: bytes) -> ByteSource:
        """Bytes that are already in memory."""
        return cls(lambda offset, size: data[offset : offset + size], len(data))

    @property
    def root(self) -> Record:
        """The whole as one record."""
        return Record(0, LENGTH, 0, 0, self.size, None, 0)

    def read_block(self, pos: int) -> tuple[bytes, int]:
        """A block with the whole header of the record at ``pos``, and where the block begins."""
        base, edge = self._base, self._base + len(self._block)
        if base <= pos and (pos + _MAX_HEADER_SIZE <= edge or (edge == self.size and pos <= edge)):
            return self._block, base
        return self.load_block(pos)

    def load_block(self, pos: int, size: int = 0) -> tuple[bytes, int]:
        """The block that begins at ``pos``: a short one after a jump, as over weights."""
        jumped = pos > self._base + len(self._block)
        size = size or (_SHORT_BLOCK_SIZE if jumped else BLOCK_SIZE)
        self._block, self._base, self._hits = self.read(pos, size), pos, {}
        if len(self._block) < min(size, self.size - pos):
            raise ModelError("became shorter while it was read")
        return self._block, pos

    def read_slice(self, offset: int, size: int) -> bytes:
        """Up to a block of bytes, mostly from the one at hand."""
        at = offset - self._base
        if not 0 <= at <= at + size <= len(self._block):
            at = offset - self.load_block(offset, BLOCK_SIZE)[1]
        return self._block[at : at + size]

    def find_stems(self, stems: tuple[bytes, ...]) -> list[int]:
        """Where in the block at hand one of ``stems`` stands, in order, and a sentinel."""
        if stems not in self._hits:
            found = [hit for stem in stems for hit in _find_offsets(self._block, stem)]
            self._hits[stems] = [*sorted(found), _NO_HIT]
        return self._hits[stems]

    def read_payload(self, record: Record) -> bytes:
        """A short payload: a name, a symbol."""
        if record.end - record.start > MAX_NAME_SIZE:
            size = record.end - record.start
            raise _build_damage_error(f"a name of {size:,} bytes at byte {record.start:,}")
        return self.read_slice(record.start, record.end - record.start)

    def may_contain(self, record: Record, stem: bytes) -> bool:
        """Whether a short payload holds some bytes; of a long one it may be so."""
        block, base = self.read_block(record.start)
        if record.end > base + len(block):
            return True
        return block.find(stem, record.start - base, record.end - base) >= 0

    def read_string(self, record: Record) -> str:
        """A name. Bytes that are not UTF-8 survive as surrogates."""
        return self.read_payload(record).decode("utf-8", "surrogateescape")

    def read_integer(self, record: Record) -> int:
        """The value of a VARINT record, as a signed 64-bit number."""
        return next(self.read_integers(record))

    def read_integers(self, record: Record) -> Iterator[int]:
        """The values of a VARINT record, or of a packed one."""
        pos = record.start
        while pos < record.end:
            block, base = self.read_block(pos)
            value, at = _parse_varint(block, pos - base)
            pos = base + at
            if pos > record.end:
                raise _build_damage_error(
                    f"a number at byte {record.start:,} ends past what holds it"
                )
            value &= (1 << 64) - 1
            yield value - (1 << 64) if value >> 63 else value


def _build_damage_error(what: str) -> ModelError:
    return ModelError(f"is cut short or damaged: {what}")


def _find_offsets(block: bytes, stem: bytes) -> Iterator[int]:
    at = block.find(stem)
    while at >= 0:
        yield at
        at = block.find(stem, at + 1)


def _parse_varint(block: bytes, at: int, most: int = 10) -> tuple[int, int]:
    """A number of up to ``most`` bytes, and where it ends; tags and lengths have five."""
    value = shift = 0
    while True:
        try:
            byte = block[at]
        except IndexError:
            raise _build_damage_error("the file ends in the middle of a field") from None
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
        shift += 7
        if shift == 7 * most:
            raise _build_damage_error(f"a number of more than {most} bytes")


def encode_varint(value: int, width: int = 1) -> bytes:
    """``value`` in at least ``width`` bytes."""
    out = bytearray()
    while value > 0x7F or len(out) + 1 < width:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_record(source: ByteSource, pos: int, parent: Record) -> Record:
    """The record whose tag is at ``pos``."""
    block, base = source.read_block(pos)
    tag, at = _parse_varint(block, pos - base, 5)
    number, wire = tag >> 3, tag & 7
    if not 0 < number < 1 << 29:
        raise _build_damage_error(f"field number {number} at byte {pos:,}")
    size_at = body = base + at
    if wire == VARINT:
        end = base + _parse_varint(block, at)[1]
    elif wire == FIXED64:
        end = body + 8
    elif wire == FIXED32:
        end = body + 4
    elif wire == LENGTH:
        size, at = _parse_varint(block, at, 5)
        body = base + at
        end = body + size
    elif wire == GROUP:
        group = Record(number, wire, body, body, parent.end, parent, parent.depth)
        end = _find_group_end(source, group)
    else:
        raise _build_damage_error(f"wire type {wire} at byte {pos:,}")
    if end > parent.end:
        raise _build_damage_error(
            f"a field of {end - body:,} bytes at byte {pos:,} ends past what holds it"
        )
    return Record(number, wire, size_at, body, end, parent, parent.depth + 1)


def _find_group_end(source: ByteSource, group: Record) -> int:
    """Where a group ends, its end tag included; groups in groups are followed."""
    pos, open_groups = group.start, [group.number]
    while open_groups:
        if pos >= group.end or group.depth + len(open_groups) > MAX_DEPTH:
            raise _build_damage_error(f"a group at byte {group.start:,} without an end")
        block, base = source.read_block(pos)
        tag, at = _parse_varint(block, pos - base, 5)
        if tag & 7 == END_GROUP:
            if tag >> 3 != open_groups.pop():
                raise _build_damage_error(
                    f"a group at byte {group.start:,} with another group's end"
                )
            pos = base + at
        elif tag & 7 == GROUP:
            open_groups.append(tag >> 3)
            pos = base + at
        else:
            pos = _read_record(source, pos, group).end
    return pos


def read_fields(
    source: ByteSource,
    parent: Record,
    *,
    stems: tuple[bytes, ...] | None = None,
    always: frozenset[int] = frozenset(),
) -> Iterator[Record]:
    """The fields of a message, in the file's order; groups are stepped over.

    With ``stems``, only those that may hold one of these bytes, or whose number
    is in ``always``: of a graph with 100,000 nodes this leaves the few that
    matter, at about 100 ns for each of the others. A field too large for a
    block is not searched but given, unless ``stems`` is empty.

    Raises :class:`ModelError` for what no protobuf parser takes.
    """
    if parent.depth > MAX_DEPTH:
        raise _build_damage_error(f"messages nested more than {MAX_DEPTH} deep")
    pos, end, depth = parent.start, parent.end, parent.depth + 1
    block, base, edge = b"", 0, -1
    while pos < end:
        if stems is not None:
            pos = _skip_unrelated_fields(source, pos, end, stems, always)
            if pos == end:
                return
        if not base <= pos < edge - 1:
            block, base = source.read_block(pos)
            edge = min(base + len(block), end)
        tag, size = block[pos - base], block[pos - base + 1] if pos < edge - 1 else 0xFF
        after = pos + 2 + (size if tag & 7 == LENGTH else 0)
        # Nearly every field is this short, and read some ten times faster here.
        if 7 < tag < 0x80 and size < 0x80 and tag & 7 in (VARINT, LENGTH) and after <= end:
            body = pos + 1 if tag & 7 == VARINT else pos + 2
            record = Record(tag >> 3, tag & 7, pos + 1, body, after, parent, depth)
        else:
            record = _read_record(source, pos, parent)
        pos = record.end
        if record.wire_type == GROUP or (stems == () and record.number not in always):
            continue
        yield record


def _skip_unrelated_fields(
    source: ByteSource, pos: int, end: int, stems: tuple[bytes, ...], always: frozenset[int]
) -> int:
    """The first field from ``pos`` on that asks for a look, or ``end``.

    Steps over short LENGTH fields that lie in one block and hold no stem, and
    leaves every other, the malformed among them, to :func:`_record`.
    """
    look = _build_tag_table(always)
    block, base = source.read_block(pos)
    while True:
        at, known = pos - base, min(end - base, len(block))
        hits = source.find_stems(stems)
        while at + 3 <= known:
            if look[block[at]]:
                return base + at
            hit = hits[bisect_left(hits, at)]
            before, at = _skip_short_fields(block, at, min(known - 3, hit))
            if before == at or at > hit:
                return base + before
            if at > known:
                at = before
                break
        pos = base + at
        if end <= base + len(block) or (at == 0 and len(block) == BLOCK_SIZE):
            return pos
        block, base = source.load_block(pos, BLOCK_SIZE)


def _skip_short_fields(block: bytes, at: int, stop: int) -> tuple[int, int]:
    """Step over short fields of one tag that begin up to ``stop``.

    Returns where the last one begins and ends; twice where a longer one begins.
    This loop sees every node of a graph, so it does nothing else.
    """
    tag = block[at]
    before = at
    while at <= stop and block[at] == tag:
        before = at
        size = block[at + 1]
        if size < 0x80:
            at += 2 + size
        elif block[at + 2] < 0x80:
            at += 3 + (size & 0x7F) + (block[at + 2] << 7)
        else:
            return at, at
    return before, at


@lru_cache
def _build_tag_table(always: frozenset[int]) -> bytes:
    """For each first byte of a tag: may the field not simply be stepped over?"""
    return bytes(tag & 0x87 != LENGTH or tag >> 3 in {0, *always} for tag in range(256))


def splice_payloads(source: ByteSource, edits: Iterable[tuple[Record, bytes]]) -> tuple[Piece, ...]:
    """The source with the payloads of some records exchanged, as pieces in order.

    Every length prefix around an edit follows, from the inside out, since a
    prefix may itself grow by a byte. A prefix that was written longer than
    needed keeps its width. Each record may be edited once.
    """
    replaced: dict[int, tuple[int, bytes]] = {}  # where: (end of what goes, what comes)
    around: dict[int, Record] = {}
    grown: defaultdict[int, int] = defaultdict(int)

    def replace(record: Record, size: int, payload: bytes | None) -> None:
        end = record.start if payload is None else record.end
        new = _encode_length(record, size) + (payload or b"")
        replaced[record.length_start] = (end, new)
        if record.parent is not None:
            inside = 0 if payload is not None else grown[record.length_start]
            grown[record.parent.length_start] += len(new) - (end - record.length_start) + inside

    for record, payload in edits:
        replace(record, len(payload), payload)
        holder = record.parent
        while (
            holder is not None and holder.parent is not None and holder.length_start not in around
        ):
            around[holder.length_start] = holder
            holder = holder.parent
    for record in sorted(around.values(), key=lambda record: -record.depth):
        replace(record, record.end - record.start + grown[record.length_start], None)
    return tuple(_build_pieces(source.size, replaced))


def _encode_length(record: Record, size: int) -> bytes:
    width = record.start - record.length_start
    padded = width > len(encode_varint(record.end - record.start))
    return encode_varint(size, width if padded else 1)


def _build_pieces(size: int, replaced: dict[int, tuple[int, bytes]]) -> Iterator[Piece]:
    pos = 0
    for start in sorted(replaced):
        if start > pos:
            yield Span(pos, start - pos)
        pos, new = replaced[start]
        yield new
    if size > pos:
        yield Span(pos, size - pos)


def sum_piece_sizes(pieces: Iterable[Piece]) -> int:
    """The size in bytes of a file made of these pieces."""
    return sum(piece.size if isinstance(piece, Span) else len(piece) for piece in pieces)
