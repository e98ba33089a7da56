"""Sizes of buffers."""

from __future__ import annotations

import numpy as np
import onnx.helper
import pytest
from onnx import TensorProto

from onnxkvrename.layout.layout import (
    Shape,
    compute_tensor_bytes,
    count_elements,
    list_symbols,
    resolve_symbols,
)


def test_symbols_give_way_to_the_sizes_that_are_known() -> None:
    shape = ("batch_size", 2, "ctx_len", None)
    assert resolve_symbols(shape, {"ctx_len": 32, "other": 1}) == ("batch_size", 2, 32, None)


@pytest.mark.parametrize(
    ("shape", "count"),
    [
        ((2, 3, 4), 24),
        ((), 1),
        ((2, 0), 0),
        ((2, "ctx_len"), None),
        ((2, None), None),
        ((2, -1), None),
        ((1 << 62, 1), 1 << 62),
        ((1 << 62, 2), None),
        ((1 << 62,) * 300, None),
        ((1 << 62, 4, 0), 0),
    ],
)
def test_elements_are_counted_where_every_size_is_known(shape: Shape, count: int | None) -> None:
    assert count_elements(shape) == count


NUMPY = {
    name: np.dtype(onnx.helper.tensor_dtype_to_np_dtype(number)).itemsize
    for name, number in TensorProto.DataType.items()
    if name not in ("UNDEFINED", "STRING")
}
PACKED = {name for name in NUMPY if any(bits in name for bits in ("INT4", "INT2", "4E", "6E"))}


@pytest.mark.parametrize("dtype", sorted(NUMPY.keys() - PACKED))
def test_an_element_is_as_large_as_onnx_makes_it(dtype: str) -> None:
    assert compute_tensor_bytes((3, 5), dtype) == 15 * NUMPY[dtype]


@pytest.mark.parametrize(
    ("dtype", "size"), [("INT4", 8), ("UINT4", 8), ("FLOAT4E2M1", 8), ("UINT2", 4), ("INT2", 4)]
)
def test_small_elements_share_bytes_and_the_last_is_filled_up(dtype: str, size: int) -> None:
    assert compute_tensor_bytes((3, 5), dtype) == size


def test_the_compilers_mxint8_is_a_byte_each() -> None:
    assert compute_tensor_bytes((3, 5), "MXINT8") == 15


@pytest.mark.parametrize(
    "dtype", ["STRING", "UNDEFINED", "sequence(FLOAT)", "DataType(99)", "MXINT6", "FP16", ""]
)
def test_what_is_no_known_dtype_has_no_size(dtype: str) -> None:
    assert compute_tensor_bytes((3, 5), dtype) is None


def test_symbols_are_listed_once_in_the_order_of_their_places() -> None:
    shapes = [("batch", 2, "ctx"), None, ("batch", "window", "ctx", None)]
    assert list_symbols(shapes) == ("batch", "ctx", "window")
