"""How large a buffer is: sizes for symbols, bytes for elements."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from onnxkvrename.model.proto_reader import get_dtype_bits
from onnxkvrename.model.signature import Dim

Shape = tuple[Dim, ...]
Sizes = Mapping[str, int]
"""What symbols stand for."""

ELEMENT_COUNT_LIMIT = 1 << 63
"""What ONNX's sizes end below."""
_ONE_BYTE_DTYPES = ("BOOL", "INT8", "MXINT8", "UINT8")


def resolve_symbols(shape: Shape, sizes: Sizes) -> Shape:
    """The shape with numbers in the places of the symbols whose sizes are known."""
    return tuple(sizes.get(dim, dim) if isinstance(dim, str) else dim for dim in shape)


def count_elements(shape: Shape) -> int | None:
    """How many elements there are; ``None`` as long as a size is not known, or for too many.

    No tensor has :data:`MOST` or more.
    """
    known = sorted(dim for dim in shape if isinstance(dim, int) and dim >= 0)
    if len(known) < len(shape):
        return None
    count = 1
    for dim in known:  # a 0 comes first
        count *= dim
        if count >= ELEMENT_COUNT_LIMIT:
            return None
    return count


def compute_tensor_bytes(shape: Shape, dtype: str) -> int | None:
    """Bytes of a dense tensor, the last one filled up.

    ``None`` where :func:`elements` is, or where it is not known how large one of this dtype is.
    An element of ``MXINT8`` counts as one byte, as a consumer counts it; the scales
    that blocks of them share are not in the graph.
    """
    count, bits = count_elements(shape), _find_element_bits(dtype)
    return None if count is None or not bits else -(-count * bits // 8)


def _find_element_bits(dtype: str) -> int:
    """Bits of an element, 0 where they vary or are not known."""
    bits = get_dtype_bits(dtype)
    return bits if bits != 8 or dtype in _ONE_BYTE_DTYPES or dtype.startswith("FLOAT8") else 0


def list_symbols(shapes: Iterable[Shape | None]) -> tuple[str, ...]:
    """The symbols in shapes, in the order of their first places."""
    found = (dim for shape in shapes for dim in shape or () if isinstance(dim, str))
    return tuple(dict.fromkeys(found))
