"""Sizes of buffers: numbers for symbols, bytes for shapes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from onnxkvrename.findings import quote_word
from onnxkvrename.model.proto_reader import get_dtype_bits
from onnxkvrename.model.signature import Dim

Shape = tuple[Dim, ...]
"""Sizes, symbols, and ``None`` for a dimension that the graph does not describe."""
Sizes = Mapping[str, int]
"""The sizes of symbols."""

ELEMENT_COUNT_LIMIT = 1 << 63
"""The first number of elements that ONNX's int64 cannot hold."""
_ONE_BYTE_DTYPES = ("BOOL", "INT8", "MXINT8", "UINT8")


def format_size_option(symbol: str, prefix: str = "") -> str:
    """Return the option that gives a symbol a size, as it is typed: ``--dim ctx_len=SIZE``.

    Args:
        symbol: The symbol.
        prefix: The side that it is for: ``prefill:``, ``decode:``, or empty for both.
    """
    return f"--dim {prefix}{quote_word(symbol)}=SIZE"


def resolve_symbols(shape: Shape, sizes: Sizes) -> Shape:
    """Return the shape with numbers for the symbols whose sizes are known."""
    return tuple(sizes.get(dim, dim) if isinstance(dim, str) else dim for dim in shape)


def count_elements(shape: Shape) -> int | None:
    """Return the number of elements.

    Returns:
        ``None`` if a size is not known, or if there are `ELEMENT_COUNT_LIMIT` or more.
    """
    numbers = sorted(dim for dim in shape if isinstance(dim, int) and dim >= 0)
    if len(numbers) < len(shape):
        return None
    count = 1
    for number in numbers:  # a 0 comes first
        count *= number
        if count >= ELEMENT_COUNT_LIMIT:
            return None
    return count


def compute_tensor_bytes(shape: Shape, dtype: str) -> int | None:
    """Return the bytes of a dense tensor, the last one padded.

    An element of ``MXINT8`` counts as one byte, as a consumer counts it; the scales that
    blocks of elements share are not in the graph.

    Args:
        shape: The shape of the tensor.
        dtype: ONNX's name of the dtype, or ``MXINT8``.

    Returns:
        ``None`` if the number of elements or the size of one is not known.
    """
    count, bits = count_elements(shape), _find_element_bits(dtype)
    return None if count is None or not bits else -(-count * bits // 8)


def list_symbols(shapes: Iterable[Shape | None]) -> tuple[str, ...]:
    """Return the symbols in shapes, each once, in the order of their first occurrences."""
    symbols = (dim for shape in shapes for dim in shape or () if isinstance(dim, str))
    return tuple(dict.fromkeys(symbols))


def _find_element_bits(dtype: str) -> int:
    """Return the bits of an element, 0 where they vary or are not known."""
    bits = get_dtype_bits(dtype)
    return bits if bits != 8 or dtype in _ONE_BYTE_DTYPES or dtype.startswith("FLOAT8") else 0
