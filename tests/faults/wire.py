"""Protobuf's wire format, as much of it as a hostile file needs."""

from __future__ import annotations


def varint(value: int, width: int = 1) -> bytes:
    """A number as protobuf writes it, in at least `width` bytes."""
    written = bytearray()
    while value > 0x7F or len(written) + 1 < width:
        written.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes(written) + bytes([value])


def number(tag: int, value: int) -> bytes:
    """A field that holds a number."""
    return varint(tag << 3) + varint(value)


def field(tag: int, payload: bytes | str, width: int = 1) -> bytes:
    """A field that holds a text or a message."""
    data = payload.encode() if isinstance(payload, str) else payload
    return varint(tag << 3 | 2) + varint(len(data), width) + data
