"""Read the small constants of a body: axes and bounds, conditions, masks and zeros."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from math import prod

from onnxkvrename.model.proto_reader import get_dtype_name
from onnxkvrename.model.signature import Dim
from onnxkvrename.verification.graph_bodies import (
    KEPT_BYTES,
    Body,
    Operation,
    group_fields,
    read_integers,
)

_INTEGERS = 8
"""The values of a list of axes, or of starts or ends along them, that are read."""
_STEPS = 8
"""Nodes in a row that only pass on a value or repeat it, beyond which none is looked at."""
_REPEATING_OPS = (
    *("Identity", "Cast", "CastLike", "Reshape", "Squeeze", "Unsqueeze", "Expand", "Tile"),
    "ConstantOfShape",
)
_CHANCE_OPS = ("Random", "Bernoulli", "Multinomial", "Dropout")
"""The beginnings of the names of operators that make something else each time."""
_VALUE, _TENSOR = "value", 5
_DIMS, _DTYPE, _RAW_DATA, _DATA_LOCATION = 1, 2, 9, 14
_EXTERNAL = 1
_FLOAT_DATA, _INT32_DATA, _INT64_DATA, _DOUBLE_DATA, _UINT64_DATA = 4, 5, 7, 10, 11
_DATA_FIELDS = (_FLOAT_DATA, _INT32_DATA, _INT64_DATA, _RAW_DATA, _DOUBLE_DATA, _UINT64_DATA)
_ELEMENT_SIZES: Mapping[str, int] = {
    **dict.fromkeys(("BOOL", "INT8", "UINT8"), 1),
    **dict.fromkeys(("FLOAT8E4M3FN", "FLOAT8E4M3FNUZ", "FLOAT8E5M2", "FLOAT8E5M2FNUZ"), 1),
    **dict.fromkeys(("INT16", "UINT16", "FLOAT16", "BFLOAT16"), 2),
    **dict.fromkeys(("INT32", "UINT32", "FLOAT"), 4),
    **dict.fromkeys(("INT64", "UINT64", "DOUBLE"), 8),
}
"""Bytes of an element, of the dtypes that are read."""
_SIGNED_ZEROS = frozenset(("FLOAT", "DOUBLE", "FLOAT16", "BFLOAT16", "FLOAT8E4M3FN", "FLOAT8E5M2"))
"""The dtypes with a 0 of which the first bit is set."""


class SmallConstants:
    """The small constants in a body: initializers with their data, and nodes that are Constant."""

    def __init__(self, body: Body) -> None:
        self._body = body
        # An initializer of an input is only its default.
        self._inputs = frozenset(body.inputs)
        self._shapes = {value.name: value.shape for value in body.types}
        self._truths: dict[str, bool | None] = {}
        self._integers: dict[str, tuple[int, ...] | None] = {}

    def find_integers(self, name: str) -> tuple[int, ...] | None:
        """Return a short list of integers; `None` if it is not such a constant of this body."""
        if name not in self._integers:
            self._integers[name] = self._read_short_list(name)
        return self._integers[name]

    def _read_short_list(self, name: str) -> tuple[int, ...] | None:
        node = self._find_node(name)
        values: tuple[int, ...] | None
        if node is not None and (attribute := node.find_attribute("value_ints")) is not None:
            values = None if attribute.is_of_caller else attribute.integers
        else:
            tensor = self._find_tensor(name)
            values = None if tensor is None else _read_integers(tensor)
        return values if values and len(values) <= _INTEGERS else None

    def are_equal(self, first: str, second: str) -> bool:
        """Return whether two values are surely the same, as equal nodes make them."""
        pending = [(first, second)]
        for _ in range(_STEPS):
            if not pending:
                return True
            roots = [self._find_root(name) for name in pending.pop()]
            if roots[0] == roots[1]:
                continue
            makers = [self.find_producer(root) for root in roots]
            one, other = makers
            if one is None or other is None or not _are_equal_nodes(one, other):
                return False
            if one.outputs.index(roots[0]) != other.outputs.index(roots[1]):
                return False
            pending += zip(one.inputs, other.inputs, strict=True)
        return not pending

    def are_opposite(self, first: str, second: str) -> bool:
        """Return whether one value is surely the negative of the other."""
        roots = self._find_root(first), self._find_root(second)
        return any(
            node is not None and self._find_root("".join(node.inputs[:1])) == other
            for node, other in (
                (self._find_node(root, "Neg"), other) for root, other in (roots, roots[::-1])
            )
        )

    def _find_root(self, name: str) -> str:
        """Return the value that is passed on as this one, by nodes that are Identity."""
        for _ in range(_STEPS):
            node = self._find_node(name, "Identity")
            if node is None or len(node.inputs) != 1:
                break
            name = node.inputs[0]
        return name

    def find_truth(self, name: str) -> bool | None:
        """Return whether all elements of a constant are true, which is not 0; False if all are 0.

        `None` if some are, or if it is not a constant of this body, or one whose data were not
        read. What only repeats a constant, in whatever shape, is one.
        """
        if name not in self._truths:
            self._truths[name] = self._read_truth(name)
        return self._truths[name]

    def _read_truth(self, name: str) -> bool | None:
        is_cast = False
        for _ in range(_STEPS):
            maker = self._find_node(name, *_REPEATING_OPS)
            if maker is None or not maker.inputs:
                break
            if maker.op_type == "ConstantOfShape":
                return _read_fill(maker)
            is_cast = is_cast or maker.op_type in ("Cast", "CastLike")
            name = maker.inputs[0]
        truth = self._read_own_truth(name)
        # A cast of 0.5 may be 0.
        return None if is_cast and truth else truth

    def _read_own_truth(self, name: str) -> bool | None:
        node = self._find_node(name)
        if node is None and name not in self._body.constants:
            return None
        for attribute in () if node is None else node.list_attributes():
            if attribute.is_of_caller:
                return None
            if attribute.name == "value_int":
                return bool(attribute.integer)
            if attribute.name == "value_float":
                return any(struct.unpack("<f", attribute.get_bytes(2) or bytes(4)))
        tensor = self._find_tensor(name)
        return None if tensor is None else _read_tensor_truth(tensor)

    def _find_tensor(self, name: str) -> bytes | None:
        """Return the bytes of a constant's `TensorProto`; ``None`` if it is none of this body."""
        node = self._find_node(name)
        if node is None:
            return None if name in self._inputs else self._body.constants.get(name)
        attribute = node.find_attribute(_VALUE)
        is_value = attribute is not None and not attribute.is_of_caller
        return attribute.get_bytes(_TENSOR) if attribute is not None and is_value else None

    def find_shape(self, name: str) -> tuple[Dim, ...] | None:
        """Return the shape of a constant or of an input of the main graph; ``None`` of others."""
        tensor = self._find_tensor(name)
        if tensor is None:
            return self._shapes.get(name)
        return read_integers(group_fields(tensor, "TensorProto").get(_DIMS, ()))

    def is_weight(self, name: str) -> bool:
        """Return whether a value is an initializer of this body."""
        return name in self._body.constants and name not in self._inputs

    def find_producer(self, name: str) -> Operation | None:
        """Return the node of this body that makes a value, if one does."""
        number = self._body.producers.get(name)
        return None if number is None else self._body.get_operation(number)

    def has_subgraphs(self, node: Operation) -> bool:
        """Return whether a node of this body has subgraphs."""
        return bool(self._body.get_subgraphs(node.number))

    def _find_node(self, name: str, *op_types: str) -> Operation | None:
        """Return the node that makes a value, if it is a Constant, or of one of some types."""
        node = self.find_producer(name)
        if node is None or node.domain or node.op_type not in (op_types or ("Constant",)):
            return None
        return node


def _are_equal_nodes(one: Operation, other: Operation) -> bool:
    """Return whether two nodes make the same of the same inputs."""
    return (
        one.function_key == other.function_key
        and one.attribute_bytes == other.attribute_bytes
        and len(one.inputs) == len(other.inputs)
        and not one.domain
        and not one.op_type.startswith(_CHANCE_OPS)
    )


def _read_fill(node: Operation) -> bool | None:
    """Return whether a ConstantOfShape makes a value of which all elements are true."""
    attribute = node.find_attribute(_VALUE)
    if attribute is None:
        return False
    tensor = None if attribute.is_of_caller else attribute.get_bytes(_TENSOR)
    return None if tensor is None else _read_tensor_truth(tensor)


def _read_integers(tensor: bytes) -> tuple[int, ...] | None:
    """Return the values of a list of integers; `None` if it is something else."""
    fields = group_fields(tensor, "TensorProto")
    dims, dtype = read_integers(fields.get(_DIMS, ())), _read_dtype(fields)
    if dtype not in ("INT64", "INT32") or len(dims) != 1 or _is_external(fields):
        return None
    elements = _read_raw_elements(fields, dtype)
    if elements is None:
        elements = read_integers(fields.get(_INT64_DATA if dtype == "INT64" else _INT32_DATA, ()))
    else:
        bits = 8 * _ELEMENT_SIZES[dtype]
        elements = tuple((each ^ 1 << bits - 1) - (1 << bits - 1) for each in elements)
    return elements if len(elements) == dims[0] else None


def _read_tensor_truth(tensor: bytes) -> bool | None:
    """Return whether all elements are true, or all are not; `None` if that is not known."""
    fields = group_fields(tensor, "TensorProto")
    dtype, count = _read_dtype(fields), prod(read_integers(fields.get(_DIMS, ())))
    data = [value for number in _DATA_FIELDS for value in fields.get(number, ())]
    size = sum(len(value) if isinstance(value, bytes) else 1 for value in data)
    if size > KEPT_BYTES or dtype not in _ELEMENT_SIZES or _is_external(fields):
        return None
    elements = _read_raw_elements(fields, dtype)
    bits = 8 * _ELEMENT_SIZES[dtype]
    if elements is None and dtype in ("FLOAT", "DOUBLE"):
        number = _FLOAT_DATA if dtype == "FLOAT" else _DOUBLE_DATA
        packed = b"".join(each for each in fields.get(number, ()) if isinstance(each, bytes))
        elements = _split_elements(packed, bits // 8)
    elif elements is None:
        wide = {"INT64": _INT64_DATA, "UINT64": _UINT64_DATA, "UINT32": _UINT64_DATA}
        elements = read_integers(fields.get(wide.get(dtype, _INT32_DATA), ()))
    if not count or len(elements) != count:
        return None
    mask = (1 << bits - (dtype in _SIGNED_ZEROS)) - 1
    truths = {bool(element & mask) for element in elements}
    return truths.pop() if len(truths) == 1 else None


def _read_dtype(fields: Mapping[int, list[int | bytes]]) -> str:
    return get_dtype_name((0, *read_integers(fields.get(_DTYPE, ())))[-1])


def _is_external(fields: Mapping[int, list[int | bytes]]) -> bool:
    return (0, *read_integers(fields.get(_DATA_LOCATION, ())))[-1] == _EXTERNAL


def _read_raw_elements(
    fields: Mapping[int, list[int | bytes]], dtype: str
) -> tuple[int, ...] | None:
    """Return the elements of raw data as unsigned integers; ``None`` if there are no raw data."""
    raw = fields.get(_RAW_DATA, [b""])[-1]
    return _split_elements(raw, _ELEMENT_SIZES[dtype]) if isinstance(raw, bytes) and raw else None


def _split_elements(data: bytes, size: int) -> tuple[int, ...]:
    return tuple(
        int.from_bytes(data[start : start + size], "little") for start in range(0, len(data), size)
    )
