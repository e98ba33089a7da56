"""The stamp: the digest of a layout in a model's metadata, where two workers can compare it.

A stamp is one entry of `metadata_props`, the last field of the file. Without it, the bytes
are the old ones. It covers names and shapes of buffers, so it goes when a name changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from onnxkvrename.model.proto_reader import METADATA_PROPS, read_metadata_props
from onnxkvrename.model.protobuf import ByteSource, Piece, Span, encode_varint

STAMP_KEY = "onnxkvrename.kv_layout_sha256"
_METADATA_PROPS_TAG = bytes([METADATA_PROPS << 3 | 2])


def read_stamp(source: ByteSource) -> str | None:
    """Return the stamp of a model, the last one if there are several; `None` if there is none."""
    stamp = None
    for _, key, value in read_metadata_props(source):
        stamp = value if key == STAMP_KEY else stamp
    return stamp


def write_stamp(
    source: ByteSource, stamp: str | None, pieces: Iterable[Piece]
) -> tuple[Piece, ...]:
    """Replace the stamps of a model by one, or by none.

    Args:
        source: The bytes of the model.
        stamp: The new stamp; `None` for no stamp.
        pieces: The result so far, as pieces of `source`.

    Returns:
        The pieces without the old stamps, and the new one at their end.

    Raises:
        ModelError: The bytes are not a protobuf message.
    """
    cuts = [span for span, key, _ in read_metadata_props(source) if key == STAMP_KEY]
    remaining = tuple(_cut_spans(pieces, cuts))
    return remaining if stamp is None else (*remaining, _encode_entry(stamp))


def _encode_entry(stamp: str) -> bytes:
    entry = b"".join(_encode_string(number, text) for number, text in ((1, STAMP_KEY), (2, stamp)))
    return _METADATA_PROPS_TAG + encode_varint(len(entry)) + entry


def _encode_string(number: int, text: str) -> bytes:
    data = text.encode("utf-8")
    return bytes([number << 3 | 2]) + encode_varint(len(data)) + data


def _cut_spans(pieces: Iterable[Piece], cuts: list[Span]) -> Iterator[Piece]:
    """Yield the pieces without some spans of the source, in which nothing was edited.

    Both are in the order of the source.
    """
    remaining = iter(cuts)
    cut = next(remaining, None)
    for piece in pieces:
        if isinstance(piece, bytes):
            yield piece
            continue
        start, end = piece.offset, piece.offset + piece.size
        while cut is not None and cut.offset < end:
            if cut.offset > start:
                yield Span(start, cut.offset - start)
            start = cut.offset + cut.size
            cut = next(remaining, None)
        if end > start:
            yield Span(start, end - start)
