"""A model file: read its signature, write it under new names, read it again."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from onnxkvrename.errors import ModelError, WriteError
from onnxkvrename.model.proto_reader import read_signature
from onnxkvrename.model.protobuf import BLOCK_SIZE, ByteSource, Piece, Span
from onnxkvrename.model.signature import Signature
from onnxkvrename.storage.read import MAX_MODEL_SIZE, OpenFile, open_file, read_chunks
from onnxkvrename.storage.temp_file import TempFile

_BUFFER_SIZE = 1 << 20
_FILE_FORMATS = (
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
    """An open model: its bytes, and what it shows."""

    file: OpenFile
    source: ByteSource
    signature: Signature


@contextmanager
def open_model(path: Path) -> Iterator[OpenModel]:
    """Open a model for reading.

    Raises :class:`ModelError`, naming the file, for what is no ONNX model.
    """
    with open_file(path) as file:
        try:
            if not 0 < file.size <= MAX_MODEL_SIZE:
                raise ModelError(_describe_size_error(file.size))
            source = ByteSource(file.read, file.size)
            yield OpenModel(file, source, _read_signature(source))
        except ModelError as error:
            raise _add_path(error, path) from None


def read_pieces(file: OpenFile, pieces: Iterable[Piece]) -> Iterator[bytes]:
    """The bytes that pieces of a model stand for, in parts of up to a megabyte."""
    for piece in pieces:
        if isinstance(piece, Span):
            yield from read_chunks(file, piece.offset, piece.size)
        else:
            yield piece


def build_spliced_source(file: OpenFile, pieces: Sequence[Piece]) -> ByteSource:
    """A result as a source, to be read before it is written anywhere."""
    sizes = [len(piece) if isinstance(piece, bytes) else piece.size for piece in pieces]
    starts = [0, *accumulate(sizes)]

    def read(offset: int, size: int) -> bytes:
        parts = []
        number = bisect_right(starts, offset) - 1
        while size > 0 and number < len(pieces):
            piece, inside = pieces[number], offset - starts[number]
            wanted = min(size, sizes[number] - inside)
            if isinstance(piece, bytes):
                parts.append(piece[inside : inside + wanted])
            else:
                parts.append(file.read(piece.offset + inside, wanted))
            offset, size, number = offset + wanted, size - wanted, number + 1
        return b"".join(parts)

    return ByteSource(read, starts[-1])


def write_pieces(file: OpenFile, pieces: Iterable[Piece], draft: TempFile) -> None:
    """Write a model under its new names: short pieces gathered, long ones copied in the kernel."""
    source, gathered = ByteSource(file.read, file.size), bytearray()
    for piece in pieces:
        if isinstance(piece, bytes):
            gathered += piece
        elif piece.size <= BLOCK_SIZE:
            gathered += source.read_slice(piece.offset, piece.size)
        else:
            draft.write(gathered)
            gathered.clear()
            draft.copy_from(file, piece.offset, piece.size)
        if len(gathered) > _BUFFER_SIZE:
            draft.write(gathered)
            gathered.clear()
    draft.write(gathered)


def check_written_model(draft: TempFile, size: int, expected: Signature) -> None:
    """Read a written model again and hold it against what the plan says.

    Raises :class:`WriteError`; the draft is then thrown away, and nothing has changed.
    """
    written = draft.size
    found = None
    if written == size:
        try:
            found = read_signature(ByteSource(draft.read, written))
        except ModelError as error:
            raise _build_bug_error(draft.display_path, str(error)) from None
    if found != expected:
        raise _build_bug_error(
            draft.display_path, f"{written:,} of {size:,} bytes; names, dtypes or shapes differ"
        )


def _build_bug_error(target: Path, what: str) -> WriteError:
    return WriteError(
        f"the result did not read back as planned ({what}); nothing was changed",
        path=str(target),
        hint="this is a bug in onnxkvrename: please report it",
    )


def _describe_size_error(size: int) -> str:
    if size == 0:
        return "is empty"
    return f"is {size:,} bytes, more than the {MAX_MODEL_SIZE:,} that an ONNX reader takes"


def _read_signature(source: ByteSource) -> Signature:
    try:
        return read_signature(source)
    except ModelError:
        kind = _detect_format(source.read(0, 4096))
        if kind is None:
            raise
        what, hint = kind
        raise ModelError(f"is {what}, not an ONNX model", hint=hint) from None


def _detect_format(head: bytes) -> tuple[str, str] | None:
    """What a file that is no model looks like."""
    stripped = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    if stripped.startswith(b"<") and b"ir_version" in stripped[:80]:
        return "ONNX text", "onnx.parser makes a model of it"
    for start, what, hint in _FILE_FORMATS:
        if stripped.startswith(start):
            return what, hint
    if head[4:8] == b"ORTM":
        return "an ONNX Runtime model (.ort)", "use the .onnx file it was made from"
    if head[8:9] == b"{" and len(head) > 9 and int.from_bytes(head[:8], "little") < 1 << 27:
        return "a safetensors file", "export the model to ONNX first"
    if not head.strip(b"\0"):
        return "nothing but zeros", "the copy or download went wrong"
    if stripped.startswith(b"{") and b"onnxkvrename.manifest/" in head:
        return "a manifest", "onnxkvrename compare takes it in the place of its model"
    if _is_text(head):
        return "a text file", "give the .onnx file itself"
    return None


def _is_text(head: bytes) -> bool:
    try:
        text = head.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.start < len(head) - 4:
            return False
        text = head[: error.start].decode("utf-8")
    return all(char.isprintable() or char in "\t\r\n\f" for char in text)


def _add_path(error: ModelError, path: Path) -> ModelError:
    if error.path is not None:
        return error
    return ModelError(error.message, path=str(path), hint=error.hint)
