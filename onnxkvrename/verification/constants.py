"""Read the small constants of a body: axes and bounds, conditions, masks and zeros."""

from __future__ import annotations

from collections.abc import Collection
from math import prod
from pathlib import Path

import numpy as np
from onnx import AttributeProto, NodeProto, TensorProto, helper, numpy_helper

from onnxkvrename.limits import MAX_CONSTANT_BYTES
from onnxkvrename.model.proto_reader import (
    ExternalReference,
    get_dtype_bits,
    get_dtype_name,
    parse_extent,
)
from onnxkvrename.model.weights import read_external_data
from onnxkvrename.verification.graph_bodies import Body, decode_name
from onnxkvrename.verification.strip_weights import KEPT_BYTES, list_removed_data

_INTEGERS = 8
"""The values of a list of axes, or of starts or ends along them, that are read."""


class SmallConstants:
    """The small constants in a body: initializers with their data, and nodes that are Constant."""

    def __init__(self, body: Body, directory: Path | None = None) -> None:
        self._body = body
        self._directory = directory
        self._nodes: dict[str, NodeProto] | None = None
        # An initializer of an input is only its default.
        self._inputs = frozenset(body.inputs)
        self._truths: dict[str, bool | None] = {}

    def find_integers(self, name: str) -> tuple[int, ...] | None:
        """Return a short list of integers; `None` if it is not such a constant of this body."""
        value = self._find_value(name, ("value_ints",))
        if isinstance(value, AttributeProto):
            return tuple(value.ints) if len(value.ints) <= _INTEGERS else None
        return None if value is None else _read_integers(value)

    def find_truth(self, name: str) -> bool | None:
        """Return whether all elements of a constant are true, which is not 0; False if all are 0.

        `None` if some are, or if it is not a constant of this body, or one whose data were not
        read.
        """
        if name not in self._truths:
            self._truths[name] = self._read_truth(name)
        return self._truths[name]

    def _read_truth(self, name: str) -> bool | None:
        value = self._find_value(name, ("value_int", "value_float"))
        if isinstance(value, AttributeProto):
            return bool(value.i if value.name == "value_int" else value.f)
        return None if value is None else _read_tensor_truth(value)

    def find_array(self, name: str) -> np.ndarray | None:
        """Return a constant; ``None`` if it is none of this body, or its data were not read.

        External data are read, if the directory where they are was passed.
        """
        names = ("value_int", "value_ints", "value_float", "value_floats")
        value = self._find_value(name, names)
        if isinstance(value, AttributeProto):
            dtype = np.int64 if value.name.startswith("value_int") else np.float32
            return np.array(helper.get_attribute_value(value), dtype)
        if value is None or list_removed_data(value):
            return None
        if value.data_location == TensorProto.EXTERNAL:
            value = self._read_external(value)
        try:
            return None if value is None else numpy_helper.to_array(value)
        except (KeyError, TypeError, ValueError):  # a damaged tensor: onnx's checker says so
            return None

    def _read_external(self, tensor: TensorProto) -> TensorProto | None:
        """Return a tensor with its external data in it; ``None`` if they cannot be read."""
        size = prod(tensor.dims) * get_dtype_bits(get_dtype_name(tensor.data_type)) // 8
        entries = {entry.key: entry.value for entry in tensor.external_data}
        end, problem = parse_extent(entries, size)
        if problem or not 0 < size <= MAX_CONSTANT_BYTES or self._directory is None:
            return None
        reference = ExternalReference(entries["location"], end, tensor.name)
        start = int(entries.get("offset", 0))
        inline = TensorProto(dims=tensor.dims, data_type=tensor.data_type)
        inline.raw_data = read_external_data(self._directory, reference, start, size)
        return inline

    def _find_value(
        self, name: str, attributes: Collection[str]
    ) -> TensorProto | AttributeProto | None:
        """Return the tensor of a constant, or one of these attributes that a node has instead."""
        node = self._find_node(name)
        if node is None:
            return self._find_initializer(name)
        attribute: AttributeProto
        for attribute in node.attribute:
            if attribute.ref_attr_name:
                return None
            if attribute.name == "value":
                tensor: TensorProto = attribute.t
                return tensor
            if attribute.name in attributes:
                return attribute
        return None

    def _find_node(self, name: str) -> NodeProto | None:
        if self._nodes is None:
            self._nodes = {
                decode_name(output): node
                for node in self._body.nodes
                if node.op_type == "Constant" and not node.domain
                for output in node.output
            }
        return self._nodes.get(name)

    def _find_initializer(self, name: str) -> TensorProto | None:
        return None if name in self._inputs else self._body.constants.get(name)


def _read_integers(tensor: TensorProto) -> tuple[int, ...] | None:
    """Return the values of a short list of integers; `None` if it is something else."""
    width = 8 if tensor.data_type == TensorProto.INT64 else 4
    if (
        tensor.data_type not in (TensorProto.INT64, TensorProto.INT32)
        or len(tensor.dims) != 1
        or not 0 < tensor.dims[0] <= _INTEGERS
    ):
        return None
    if tensor.data_location == TensorProto.EXTERNAL:
        return None
    count, raw = tensor.dims[0], tensor.raw_data
    if len(raw) == count * width:
        return tuple(
            int.from_bytes(raw[start : start + width], "little", signed=True)
            for start in range(0, len(raw), width)
        )
    values = tensor.int64_data if width == 8 else tensor.int32_data
    return tuple(values) if len(values) == count and not raw else None


def _read_tensor_truth(tensor: TensorProto) -> bool | None:
    """Return whether all elements are true, or all are not; `None` if that is not known."""
    is_elsewhere = tensor.data_location == TensorProto.EXTERNAL or list_removed_data(tensor)
    if is_elsewhere or not 0 < prod(tensor.dims) <= 8 * KEPT_BYTES:
        return None
    try:
        values = numpy_helper.to_array(tensor).astype(bool)
    except (KeyError, TypeError, ValueError):  # a damaged tensor: onnx's checker says so
        return None
    if values.all():
        return True
    return None if values.any() else False
