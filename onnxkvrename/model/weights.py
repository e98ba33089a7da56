"""Weights that a model names as its framework did, to tell whether two models are one.

Exporters make up names for what they fold or transpose, so a weight may be missing in one export
and be there in another; what both name so is the same parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import NamedTuple

from onnxkvrename.errors import ModelError
from onnxkvrename.model.proto_reader import (
    TENSOR_FIELDS,
    ExternalReference,
    find_graph,
    find_string,
    get_dtype_bits,
    read_external_reference,
    read_optional_string,
    read_tensor_type,
)
from onnxkvrename.model.protobuf import LENGTH, ByteSource, Record, list_fields, read_fields
from onnxkvrename.storage.confined import Folder

WEIGHT_COUNT = 32
"""The weights that are described of one model: enough to tell it from others."""
WEIGHT_SUFFIXES = (".weight", ".bias")
"""What frameworks call parameters; tables that depend on a length have different names."""
_INITIALIZER, _RAW_DATA = 5, 9
_SAMPLE_SIZE = 1 << 16
"""The first bytes of a weight that are compared."""


class Weight(NamedTuple):
    """A weight of a model.

    Attributes:
        name: Its name, without the directory-like prefix that a merged window has.
        dtype: ONNX's name of its dtype.
        shape: Its dimensions.
        sha256: The digest of its first 64 KiB in hexadecimal, ``None`` if they cannot be read.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    sha256: str | None

    @property
    def is_read_whole(self) -> bool:
        """True if the digest is that of all its values."""
        return prod(self.shape) * get_dtype_bits(self.dtype) <= 8 * _SAMPLE_SIZE


def describe_weights(source: ByteSource, directory: Path) -> tuple[Weight, ...]:
    """Return up to `WEIGHT_COUNT` weights, those with the fewest parts in their names first.

    So two exports of one model choose alike. A name that two weights share is left out.

    Of external data that are not there or lead out of `directory` nothing is read, and their
    weights have no digest.

    Raises:
        ModelError: The bytes are not a model.
    """
    tensors: dict[str, list[Record]] = {}
    initializers = frozenset({_INITIALIZER})
    for tensor in read_fields(source, find_graph(source), stems=(), always=initializers):
        if tensor.number == _INITIALIZER and tensor.wire_type == LENGTH:
            name = _read_name(source, tensor)
            if name.endswith(WEIGHT_SUFFIXES):
                tensors.setdefault(name.rpartition("/")[2], []).append(tensor)
    names = sorted((name.count("."), name) for name, same in tensors.items() if len(same) == 1)
    return tuple(
        _describe_weight(source, name, tensors[name][0], directory)
        for _, name in names[:WEIGHT_COUNT]
    )


def merge_weights(parts: Iterable[Iterable[Weight]]) -> tuple[Weight, ...]:
    """Return the weights of all windows of a model, without names that windows disagree on."""
    by_name: dict[str, set[Weight]] = {}
    for weight in (weight for part in parts for weight in part):
        by_name.setdefault(weight.name, set()).add(weight)
    return tuple(weight for same in by_name.values() if len(same) == 1 for weight in same)


def _read_name(source: ByteSource, tensor: Record) -> str:
    return read_optional_string(source, find_string(list_fields(source, tensor, frozenset({8})), 8))


def _describe_weight(source: ByteSource, name: str, tensor: Record, directory: Path) -> Weight:
    fields = list_fields(source, tensor, TENSOR_FIELDS | {_RAW_DATA})
    dtype, shape = read_tensor_type(source, fields)
    data = b"".join(_read_sample(source, fields, dtype, shape, directory))
    return Weight(name, dtype, shape, sha256(data).hexdigest() if data else None)


def _read_sample(
    source: ByteSource, fields: list[Record], dtype: str, shape: tuple[int, ...], directory: Path
) -> Iterator[bytes]:
    """Yield the first bytes of a weight; nothing if they are not there as plain bytes."""
    reference = read_external_reference(source, fields)
    if reference is None:
        raw = [field for field in fields if field.number == _RAW_DATA][-1:]
        yield from (source.read(r.start, min(r.end - r.start, _SAMPLE_SIZE)) for r in raw)
        return
    size = prod(shape) * get_dtype_bits(dtype) // 8
    start = reference.end_offset - size
    if reference.problem or start < 0 or min(shape, default=1) < 1:
        return
    yield read_external_data(directory, reference, start, min(size, _SAMPLE_SIZE))


def read_external_data(
    directory: Path, reference: ExternalReference, start: int, size: int
) -> bytes:
    """Return `size` bytes of external data; empty if they are not there or cannot be read.

    Nothing outside of `directory` is read.
    """
    try:
        with Folder(directory).open_file(reference.location) as file:
            return file.read(start, size) if file.size >= reference.end_offset else b""
    except ModelError:
        return b""
