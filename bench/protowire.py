"""Protobuf's wire format, as much of it as a benchmark needs: write fields, walk fields."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

VARINT, FIXED64, RECORD, FIXED32 = 0, 1, 2, 5


def varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def integer(field: int, value: int) -> bytes:
    return varint(field << 3 | VARINT) + varint(value)


def header(field: int, length: int) -> bytes:
    """Return the header of a record of that length; a record may be too big to hold."""
    return varint(field << 3 | RECORD) + varint(length)


def record(field: int, payload: bytes) -> bytes:
    return header(field, len(payload)) + payload


def text(field: int, value: str) -> bytes:
    return record(field, value.encode())


@dataclass(frozen=True)
class Field:
    number: int
    wire: int
    start: int  # of the tag
    body: int  # of the payload
    end: int


def walk(file: BinaryIO, start: int, end: int) -> Iterator[Field]:
    """The fields between two offsets, by seeking: payloads are not read."""
    at = start
    while at < end:
        file.seek(at)
        tag, body = _read_varint(file, at)
        wire = tag & 7
        if wire == RECORD:
            length, body = _read_varint(file, body)
            stop = body + length
        elif wire == VARINT:
            _, stop = _read_varint(file, body)
        elif wire in (FIXED64, FIXED32):
            stop = body + (8 if wire == FIXED64 else 4)
        else:
            raise ValueError(f"wire type {wire} at byte {at}")
        if stop > end:
            raise ValueError(f"the field at byte {at} runs past its record")
        yield Field(tag >> 3, wire, at, body, stop)
        at = stop


def _read_varint(file: BinaryIO, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = file.read(1)
        if not byte:
            raise ValueError(f"cut off at byte {at}")
        value |= (byte[0] & 0x7F) << shift
        shift, at = shift + 7, at + 1
        if byte[0] < 0x80:
            return value, at
