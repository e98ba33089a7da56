"""What a model shows the world: its graph inputs and outputs, and how it uses them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

Dim = int | str | None
"""A static size, a symbol, or ``None`` where the file says nothing."""


class Value(NamedTuple):
    """A graph input or output.

    ``dtype`` is ONNX's own name (``FLOAT16``), or a wrapped one for what is no
    tensor (``sequence(FLOAT)``). ``shape`` is ``None`` where the rank is unknown.
    """

    name: str
    dtype: str
    shape: tuple[Dim, ...] | None

    def apply_name_map(self, names: Mapping[str, str], symbols: Mapping[str, str]) -> Value:
        """The same value under the new name, its symbols following."""
        shape = self.shape
        if shape is not None:
            shape = tuple(symbols.get(d, d) if isinstance(d, str) else d for d in shape)
        return Value(names.get(self.name, self.name), self.dtype, shape)


class Signature(NamedTuple):
    """Graph inputs and outputs in the file's order, doubles included."""

    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]

    def apply_name_map(self, names: Mapping[str, str], symbols: Mapping[str, str]) -> Signature:
        """What a right renaming must read back as; values and symbols change once, all together."""
        return Signature(
            tuple(value.apply_name_map(names, symbols) for value in self.inputs),
            tuple(value.apply_name_map(names, symbols) for value in self.outputs),
        )


class ExportInfo(NamedTuple):
    """Who wrote a model, and for what: two exports of one kind have these in common.

    ``opsets`` are the imports as pairs of domain and version, in the file's order.
    """

    ir_version: int
    producer_name: str
    producer_version: str
    opsets: tuple[tuple[str, int], ...]


class NameUses(NamedTuple):
    """What the graph does with the names that were asked about.

    ``producers`` maps a value of the main graph to the op type of its node.
    ``read`` holds the values that some node reads, captures by subgraphs
    included. ``symbols`` are those in sight. ``taken`` maps a new name to where
    it already stands.
    """

    producer_op_types: Mapping[str, str] = MappingProxyType({})
    read_names: frozenset[str] = frozenset()
    symbols: frozenset[str] = frozenset()
    taken_names: Mapping[str, str] = MappingProxyType({})


def is_shape_compatible(one: tuple[Dim, ...], other: tuple[Dim, ...]) -> bool:
    """Whether two shapes agree as far as they are known; symbols may differ."""
    return len(one) == len(other) and all(
        a == b for a, b in zip(one, other, strict=True) if isinstance(a, int) and isinstance(b, int)
    )


def format_shape(shape: tuple[Dim, ...]) -> str:
    """A shape as it is shown: ``[batch, 2, ?]``."""
    return "[" + ", ".join("?" if dim is None else str(dim) for dim in shape) + "]"


def is_type_compatible(one: Value, other: Value) -> bool:
    """Whether dtype, rank and static sizes agree as far as they are known."""
    if one.dtype != other.dtype:
        return False
    if one.shape is None or other.shape in (None, one.shape):
        return True
    return is_shape_compatible(one.shape, other.shape)


def format_value_type(value: Value) -> str:
    """Dtype and shape as they are shown: ``FLOAT [batch, 2]``."""
    return value.dtype if value.shape is None else f"{value.dtype} {format_shape(value.shape)}"
