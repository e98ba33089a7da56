"""Skip many small fields that are not asked for, which a hostile file may be full of.

One by one they take a microsecond each, and some are only two bytes long. Small is a field with
a tag of one byte and a number, or with a tag of two bytes and a number or few bytes of payload,
whose length may be written longer than needed.
"""

from __future__ import annotations

import re
from functools import lru_cache

from onnxkvrename.model.protobuf import FIXED32, FIXED64, LENGTH, MAX_PREFIX_SIZE, VARINT

_MAX_SIZE = 16
"""Bytes of such a payload."""
_MAX_FIELDS = 1000
"""Fields that are skipped at a time; the matcher needs some hundred bytes for each."""


def skip_small_fields(
    block: bytes, index: int, end: int, excluded: frozenset[int] = frozenset()
) -> int:
    """Return where the first field from `index` on begins that is not small, or ends after `end`.

    Args:
        block: Bytes of a message.
        index: Where a field begins in the block.
        end: Where to stop in it.
        excluded: Numbers of fields that are not skipped.
    """
    match = _build_pattern(excluded).match(block, index, max(index, end))
    return index if match is None else match.end()


@lru_cache
def _build_pattern(excluded: frozenset[int]) -> re.Pattern[bytes]:
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
        % (re.escape(bytes([size])), re.escape(bytes([size | 0x80])), MAX_PREFIX_SIZE - 2, size)
        for size in range(_MAX_SIZE + 1)
    )
    for wire_type, payload in (
        (VARINT, varint),
        (FIXED64, b".{8}"),
        (LENGTH, b"(?:%b)" % short),
        (FIXED32, b".{4}"),
    ):
        tags = re.escape(bytes(0x80 | low << 3 | wire_type for low in range(16)))
        fields.append(b"%b[%b][\x01-\x7f]%b" % (no_reserved, tags, payload))
    return re.compile(b"(?:%b){0,%d}" % (b"|".join(fields), _MAX_FIELDS), re.DOTALL)
