"""The scales of quantized buffers: which values the numbers in a buffer mean."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from onnxkvrename.model.proto_reader import get_dtype_bits

_UNSCALED_DTYPES = ("BOOL", "FLOAT16", "BFLOAT16", "MXINT8")
"""Of those of few bits the dtypes without a scale in the graph; MXINT8 keeps its own."""
_MAX_SCALED_BITS = 16
_PRECISIONS = {"FLOAT": 2.0**-23, "FLOAT16": 2.0**-10, "BFLOAT16": 2.0**-7}
"""The relative distance of neighboring numbers, by ONNX's names of the dtypes of scales."""


class Scale(NamedTuple):
    """A scale and its zero point, as one node of a graph uses them.

    Attributes:
        dtype: ONNX's name of the dtype of the scale.
        shape: How many scales there are along each axis of the buffer: 1 where all positions
            share one. Empty if the whole buffer has one.
        first: The first scale.
        zero_point: The first zero point.
        sha256: The digest of all scales and zero points, in hexadecimal.
    """

    dtype: str
    shape: tuple[int, ...]
    first: float
    zero_point: float
    sha256: str

    def __str__(self) -> str:
        kinds = " for each position of an axis" if self.shape else ""
        zero_point = f", zero point {self.zero_point:g}" if self.zero_point else ""
        return f"{self.first:.6g}{zero_point}{kinds}"


class BufferScales(NamedTuple):
    """The scales of a buffer.

    Attributes:
        written: Those of new values that are stored; ``None`` if the graph computes them, or
            they are not all known.
        read: Those by which stored numbers become values again; likewise.
    """

    written: tuple[Scale, ...] | None
    read: tuple[Scale, ...] | None


def is_quantized(dtype: str) -> bool:
    """Return whether numbers of a dtype need a scale to be values."""
    return 0 < get_dtype_bits(dtype) <= _MAX_SCALED_BITS and dtype not in _UNSCALED_DTYPES


def compare_scales(written: BufferScales | None, read: BufferScales | None) -> bool | None:
    """Return whether decode reads the values that prefill stored; ``None`` if that is not known.

    The scales `written` are prefill's and those `read` are decode's, ``None`` if they are not
    known.
    """
    if written is None or read is None or not written.written or not read.read:
        return None
    if find_different_scales(written, read) is not None:
        return False
    return None if None in {_is_same(*each) for each in _pair_scales(written, read)} else True


def find_different_scales(
    written: BufferScales | None, read: BufferScales | None
) -> tuple[Scale, Scale] | None:
    """Return a scale of prefill and one of decode that differ, if any are known to."""
    return next((each for each in _pair_scales(written, read) if _is_same(*each) is False), None)


def _pair_scales(
    written: BufferScales | None, read: BufferScales | None
) -> Iterator[tuple[Scale, Scale]]:
    return product((written and written.written) or (), (read and read.read) or ())


def _is_same(first: Scale, second: Scale) -> bool | None:
    """Return whether two scales are equal; those of different dtypes as far as these go."""
    if (first.shape, first.sha256) == (second.shape, second.sha256):
        return True
    if len(first.shape) == len(second.shape) and any(
        1 not in sizes and sizes[0] != sizes[1]
        for sizes in zip(first.shape, second.shape, strict=True)
    ):
        return None  # the last blocks of one side, or of both, are not full
    if first.dtype == second.dtype:
        return False
    if first.shape or second.shape:
        return None
    precision = max(_PRECISIONS.get(scale.dtype, 0) for scale in (first, second))
    return first.zero_point == second.zero_point and abs(
        first.first - second.first
    ) <= precision * max(abs(first.first), abs(second.first))
