"""The signature of a model: its graph inputs and outputs, and how it uses their names."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

Dim = int | str | None
"""A static size, a symbol, or `None` if unknown."""
UNDECLARED = "UNDEFINED"
"""The dtype of a value that is declared without one: onnxruntime finds it out by itself."""


class Value(NamedTuple):
    """A graph input or output.

    Attributes:
        name: Its name.
        dtype: ONNX's own name of the dtype (`FLOAT16`), wrapped unless the value is a dense
            tensor (`sequence(FLOAT)`); `UNDECLARED` if it has none.
        shape: The dimensions; `None` if the rank is unknown.
    """

    name: str
    dtype: str
    shape: tuple[Dim, ...] | None

    def apply_name_map(self, names: Mapping[str, str], symbols: Mapping[str, str]) -> Value:
        """Return the same value with its new name and symbols.

        Args:
            names: New names of values by their old ones.
            symbols: New symbols of dimensions by their old ones.
        """
        shape = self.shape
        if shape is not None:
            shape = tuple(symbols.get(d, d) if isinstance(d, str) else d for d in shape)
        return Value(names.get(self.name, self.name), self.dtype, shape)


class Signature(NamedTuple):
    """Graph inputs and outputs, in the file's order.

    Attributes:
        inputs: The inputs; two may have the same name.
        outputs: The outputs; two may have the same name.
    """

    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]

    def apply_name_map(self, names: Mapping[str, str], symbols: Mapping[str, str]) -> Signature:
        """Return the signature that the renamed model must have.

        Args:
            names: New names of values by their old ones; all change at once.
            symbols: New symbols of dimensions by their old ones.
        """
        return Signature(
            tuple(value.apply_name_map(names, symbols) for value in self.inputs),
            tuple(value.apply_name_map(names, symbols) for value in self.outputs),
        )


class Opset(NamedTuple):
    """A set of operators.

    Attributes:
        domain: Its domain; empty for ONNX's own operators.
        version: Its version.
    """

    domain: str
    version: int


class ExportInfo(NamedTuple):
    """The program that wrote a model, and the versions it used; equal in all windows of one export.

    Attributes:
        ir_version: Version of ONNX's intermediate representation.
        producer: The program that wrote the model.
        producer_version: Its version.
        opsets: The operator sets that the model imports, in the file's order.
    """

    ir_version: int
    producer: str
    producer_version: str
    opsets: tuple[Opset, ...]


class NameUses(NamedTuple):
    """The uses of selected names in a graph.

    Attributes:
        producer_op_types: The op type of the node that produces each value of the main graph.
        read_names: The values that some node reads, also those that subgraphs capture.
        symbols: Symbols of dimensions that may be derived from a name.
        taken_names: New names that cannot be given, with a description of the value that has
            the name already: two values would become one, or a subgraph would read another
            value than before.
        hidden_names: New names that a subgraph defines as well, with a description of where.
            Every node reads what it read before, but onnx and onnxruntime refuse a graph that
            hides an outer name.
    """

    producer_op_types: Mapping[str, str] = MappingProxyType({})
    read_names: frozenset[str] = frozenset()
    symbols: frozenset[str] = frozenset()
    taken_names: Mapping[str, str] = MappingProxyType({})
    hidden_names: Mapping[str, str] = MappingProxyType({})


def is_shape_compatible(first: tuple[Dim, ...], second: tuple[Dim, ...]) -> bool:
    """Return whether two shapes agree in rank and static sizes; symbols may differ."""
    return len(first) == len(second) and all(
        a == b
        for a, b in zip(first, second, strict=True)
        if isinstance(a, int) and isinstance(b, int)
    )


def format_shape(shape: tuple[Dim, ...]) -> str:
    """Format a shape, as in `[batch, 2, ?]`."""
    return "[" + ", ".join("?" if dim is None else str(dim) for dim in shape) + "]"


def is_dtype_compatible(first: Value, second: Value) -> bool:
    """Return whether two dtypes agree, as far as they are declared."""
    return first.dtype == second.dtype or UNDECLARED in (first.dtype, second.dtype)


def is_type_compatible(first: Value, second: Value) -> bool:
    """Return whether dtype, rank and static sizes agree, as far as they are known."""
    if not is_dtype_compatible(first, second):
        return False
    if first.shape is None or second.shape in (None, first.shape):
        return True
    return is_shape_compatible(first.shape, second.shape)


def format_dtype(dtype: str) -> str:
    """Format a dtype: `FLOAT`, or `no declared type`."""
    return "no declared type" if dtype == UNDECLARED else dtype


def format_value_type(value: Value) -> str:
    """Format dtype and shape, as in `FLOAT [batch, 2]`."""
    dtype = format_dtype(value.dtype)
    return dtype if value.shape is None else f"{dtype} {format_shape(value.shape)}"
