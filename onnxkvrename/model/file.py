"""A model file: open it, splice new names into it, write the result and check it.

A result is a sequence of pieces: new bytes, and spans of the source. So weights are
neither parsed nor held in memory. All but :func:`open_model`, :func:`read_pieces` and
:func:`write_pieces` work on bytes in memory just as well.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from onnxkvrename.errors import ModelError, ReadError, WriteError
from onnxkvrename.files.read import MemoryFile, ModelSource, OpenFile, open_file, read_chunks
from onnxkvrename.files.temp_file import TempFile
from onnxkvrename.limits import MAX_MODEL_BYTES
from onnxkvrename.model.other_files import describe_other_file
from onnxkvrename.model.proto_reader import read_signature
from onnxkvrename.model.protobuf import (
    BLOCK_SIZE,
    PREFIX_SIZE,
    ByteSource,
    Piece,
    Record,
    Span,
    encode_varint,
)
from onnxkvrename.model.signature import Signature

_BUFFER_SIZE = 1 << 20
_FORMATS_BY_MAGIC = (
    (b"version https://git-lfs", "a Git LFS pointer", "fetch the file itself: git lfs pull"),
    (b"<", "an HTML or XML page", "the download went wrong"),
    (b"PK\x03\x04", "a zip archive", "unpack it first"),
    (b"\x1f\x8b", "a gzip file", "unpack it first"),
    (b"GGUF", "a GGUF file", "export the model to ONNX first"),
    (b"\x80\x02", "a pickle", "export the model to ONNX first"),
    (b"\x80\x03", "a pickle", "export the model to ONNX first"),
    (b"\x80\x04", "a pickle", "export the model to ONNX first"),
)


class OpenModel(NamedTuple):
    """An open model. Errors of reading records from its bytes name the file."""

    file: OpenFile
    source: ByteSource
    signature: Signature

    @property
    def data_beside(self) -> OpenFile | None:
        """The file beside which external data and sidecars lie; ``None`` for one in memory."""
        return None if isinstance(self.file, MemoryFile) else self.file


@contextmanager
def open_model(model: ModelSource) -> Iterator[OpenModel]:
    """Open a model, in a file or in memory, for reading, until the context ends.

    Errors that are raised in the context pass unchanged.

    Raises:
        ModelError: The file cannot be read, or is not an ONNX model. The error names the file.
    """
    with open_file(model) as file:
        source = ByteSource(file.read, file.size, str(model))
        yield OpenModel(file, source, _read_file_signature(model, source))


def _read_file_signature(model: ModelSource, source: ByteSource) -> Signature:
    """Return the signature of a model; the error names another kind of file that it is."""
    try:
        return read_model_signature(source)
    except ReadError:
        raise
    except ModelError:
        other = None if isinstance(model, MemoryFile) else describe_other_file(model)
        if other is None:
            raise
        kind, hint = other
        raise source.build_error(f"is {kind}, not an ONNX model", hint=hint) from None


def read_model_signature(source: ByteSource) -> Signature:
    """Return the signature of a model, on disk or in memory (:meth:`ByteSource.from_bytes`).

    Raises:
        ModelError: The bytes are empty, more than an ONNX reader accepts, or not an ONNX
            model. Where another format is recognized, the error names it.
    """
    if source.size == 0:
        raise source.build_error("is empty", hint="export or copy it again")
    if source.size > MAX_MODEL_BYTES:
        raise source.build_error(
            f"is {source.size:,} bytes, more than the {MAX_MODEL_BYTES:,} that ONNX readers accept"
        )
    try:
        return read_signature(source)
    except ModelError:
        other_format = _detect_other_format(source.read(0, 4096))
        if other_format is None:
            raise
        name, hint = other_format
        raise source.build_error(f"is {name}, not an ONNX model", hint=hint) from None


def _detect_other_format(head: bytes) -> tuple[str, str] | None:
    """Return the name with its article of a format other than ONNX, and how to get an ONNX model.

    The `head` is the first 4 KiB of the file. `None` if the format is not known.
    """
    stripped = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    if stripped.startswith(b"<") and b"ir_version" in stripped[:80]:
        return "ONNX text", "onnx.parser converts it to a model"
    for magic, name, hint in _FORMATS_BY_MAGIC:
        if stripped.startswith(magic):
            return name, hint
    if head[4:8] == b"ORTM":
        return "an ONNX Runtime model (.ort)", "use the .onnx file it was made from"
    if head[8:9] == b"{" and len(head) > 9 and int.from_bytes(head[:8], "little") < 1 << 27:
        return "a safetensors file", "export the model to ONNX first"
    if not head.strip(b"\0"):
        return "nothing but zeros", "the copy or download went wrong"
    if stripped.startswith(b"{") and b"onnxkvrename.inspect/" in head:
        return "a layout file", "compare accepts it instead of its model"
    if _is_text(head):
        return "a text file", "pass a binary .onnx file"
    return None


def _is_text(head: bytes) -> bool:
    try:
        text = head.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.start < len(head) - 4:
            return False
        text = head[: error.start].decode("utf-8")
    return all(char.isprintable() or char in "\t\r\n\f" for char in text)


def splice_payloads(source: ByteSource, edits: Iterable[tuple[Record, bytes]]) -> tuple[Piece, ...]:
    """Exchange the payloads of some records, and adapt every length prefix around them.

    From the inside out, as a prefix may itself grow by a byte. The same edits the other
    way round give the bytes of `source` again, however their prefixes were written.

    The edits are LENGTH records and their new payloads, each record once, in any order.

    Raises:
        ModelError: The way back would be ambiguous, as a length has too many spare bytes.
    """
    replaced: dict[int, tuple[int, bytes]] = {}  # start: (end of the old bytes, the new bytes)
    enclosing: dict[int, Record] = {}
    growth: defaultdict[int, int] = defaultdict(int)

    def replace(record: Record, size: int, payload: bytes | None) -> None:
        start, end = record.length_start, record.start if payload is None else record.end
        new = _encode_length(source, record, size) + (payload or b"")
        replaced[start] = (end, new)
        if record.parent is not None:
            inside = growth[record.length_start] if payload is None else 0
            growth[record.parent.length_start] += len(new) - (end - start) + inside

    for record, payload in edits:
        replace(record, len(payload), payload)
        holder = record.parent
        while holder is not None and holder.parent is not None:
            if holder.length_start in enclosing:
                break
            enclosing[holder.length_start] = holder
            holder = holder.parent
    for record in sorted(enclosing.values(), key=lambda record: -record.depth):
        replace(record, record.end - record.start + growth[record.length_start], None)
    return tuple(_build_pieces(source.size, replaced))


def _encode_length(source: ByteSource, record: Record, size: int) -> bytes:
    """Return the length prefix of a record for a payload of `size` bytes.

    A length may have spare bytes, being written longer than needed. Whatever its width is
    now, only one width of the result may lead back to it: minimal lengths and those with one
    spare byte keep their spare bytes, longer ones keep their width. With exactly two spare
    bytes, a length that needs one more would come to the same as another one.
    """
    width = record.start - record.length_start
    needed, target = _measure_varint(record.end - record.start), _measure_varint(size)
    while needed != target:
        spare, step = width - needed, 1 if needed < target else -1
        if spare <= 1:
            width += step
        if (step == 1 and spare == 2) or width > PREFIX_SIZE:
            raise source.build_error(
                f"the length at byte {record.length_start:,} is {spare} bytes longer than needed: "
                "a new name there could not be removed again",
                hint="load the model with onnx and save it again",
            )
        needed += step
    return encode_varint(size, width)


def _measure_varint(value: int) -> int:
    """Return the least number of bytes for a varint."""
    return max(1, (value.bit_length() + 6) // 7)


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
    """Return the size in bytes of a file made of these pieces."""
    return sum(piece.size if isinstance(piece, Span) else len(piece) for piece in pieces)


def read_pieces(file: OpenFile, pieces: Iterable[Piece]) -> Iterator[bytes]:
    """Yield the bytes of a result, in parts of up to a megabyte."""
    for piece in pieces:
        if isinstance(piece, Span):
            yield from read_chunks(file, piece.offset, piece.size)
        else:
            yield piece


def join_pieces(source: ByteSource, pieces: Sequence[Piece]) -> bytes:
    """Return the whole result in memory."""
    result = build_spliced_source(source, pieces)
    return result.read(0, result.size)


def build_spliced_source(source: ByteSource, pieces: Sequence[Piece]) -> ByteSource:
    """Return a result as a source, which can be read before it is written anywhere."""
    sizes = [len(piece) if isinstance(piece, bytes) else piece.size for piece in pieces]
    starts = [0, *accumulate(sizes)]

    def read(offset: int, size: int) -> bytes:
        parts = []
        index = bisect_right(starts, offset) - 1
        while size > 0 and index < len(pieces):
            piece, skipped = pieces[index], offset - starts[index]
            part_size = min(size, sizes[index] - skipped)
            if isinstance(piece, bytes):
                parts.append(piece[skipped : skipped + part_size])
            else:
                parts.append(source.read(piece.offset + skipped, part_size))
            offset, size, index = offset + part_size, size - part_size, index + 1
        return b"".join(parts)

    return ByteSource(read, starts[-1], source.path)


def write_pieces(file: OpenFile, pieces: Iterable[Piece], temp_file: TempFile) -> None:
    """Write a result: short pieces are gathered, long ones copied by the kernel.

    Raises:
        ModelError: The file cannot be read.
        WriteError: The temporary file cannot be written.
    """
    source, gathered = ByteSource(file.read, file.size, str(file.path)), bytearray()
    for piece in pieces:
        if isinstance(piece, bytes):
            gathered += piece
        elif piece.size <= BLOCK_SIZE:
            gathered += source.read_slice(piece.offset, piece.size)
        else:
            temp_file.write(gathered)
            gathered.clear()
            temp_file.copy_from(file, piece.offset, piece.size)
        if len(gathered) > _BUFFER_SIZE:
            temp_file.write(gathered)
            gathered.clear()
    temp_file.write(gathered)


def check_written_model(temp_file: TempFile, size: int, expected: Signature) -> None:
    """Read a written model again and compare it with the plan.

    Raises:
        WriteError: It differs. The temporary file is then not moved to its target, so nothing
            has changed.
    """
    written = temp_file.size
    signature = None
    if written == size:
        try:
            signature = read_signature(ByteSource(temp_file.read, written))
        except ModelError as error:
            raise _build_bug_error(temp_file.display_path, str(error)) from None
    if signature != expected:
        raise _build_bug_error(
            temp_file.display_path, f"{written:,} of {size:,} bytes; names, dtypes or shapes differ"
        )


def _build_bug_error(target: Path, difference: str) -> WriteError:
    return WriteError(
        f"the result did not read back as planned ({difference}); nothing was changed",
        path=str(target),
        hint="this is a bug in onnxkvrename: please report it",
    )
