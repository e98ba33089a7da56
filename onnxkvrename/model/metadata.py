"""The digest of a layout in a model's metadata, where two workers can compare it.

A stamp is one entry of ``metadata_props``, the last field of the file. To take it out
gives the bytes from before. It says what the names and shapes of buffers are, so
it goes when a name changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from onnxkvrename.model import proto_reader as messages
from onnxkvrename.model.protobuf import Piece, Source, Span, encode_varint

KEY = "onnxkvrename.kv_layout_sha256"
_TAG = bytes([messages.METADATA << 3 | 2])


def read(source: Source) -> str | None:
    """The stamp of a model, the last one if there are several."""
    found = None
    for _, key, value in messages.metadata(source):
        found = value if key == KEY else found
    return found


def written(source: Source, stamp: str | None, pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """Pieces of the source, with this stamp and no other one, or with none."""
    cuts = [span for span, key, _ in messages.metadata(source) if key == KEY]
    kept = tuple(_cut(pieces, cuts))
    return kept if stamp is None else (*kept, _entry(stamp))


def _entry(stamp: str) -> bytes:
    entry = b"".join(_string(at, text) for at, text in ((1, KEY), (2, stamp)))
    return _TAG + encode_varint(len(entry)) + entry


def _string(number: int, text: str) -> bytes:
    data = text.encode("utf-8")
    return bytes([number << 3 | 2]) + encode_varint(len(data)) + data


def _cut(pieces: Iterable[Piece], cuts: list[Span]) -> Iterator[Piece]:
    """The pieces without some spans of the source, which no edit lies in."""
    for piece in pieces:
        if isinstance(piece, bytes):
            yield piece
            continue
        start, end = piece.offset, piece.offset + piece.size
        for cut in cuts:
            if start <= cut.offset < end:
                if cut.offset > start:
                    yield Span(start, cut.offset - start)
                start = cut.offset + cut.size
        if end > start:
            yield Span(start, end - start)
