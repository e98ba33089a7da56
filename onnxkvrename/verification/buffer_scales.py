"""Find the scales of quantized buffers: those that new values are stored with, and read with.

Numbers in a buffer are followed by the operators that move them, from its input to where they
become values again, and from its retained output back to where values became numbers:
QuantizeLinear, DequantizeLinear, or an attention that quantizes its own cache. Whatever else
computes with the numbers leaves the scale unknown, and so does a scale that is not a constant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from hashlib import sha256
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from onnx import AttributeProto, TensorProto, helper, numpy_helper
from onnx.inliner import inline_local_functions

from onnxkvrename.layout.kinds import find_pair_dtype, find_pair_shape
from onnxkvrename.layout.scales import BufferScales, Scale, is_quantized
from onnxkvrename.limits import MAX_CONSTANT_BYTES
from onnxkvrename.model.proto_reader import (
    ExternalReference,
    get_dtype_bits,
    get_dtype_name,
    parse_extent,
)
from onnxkvrename.model.protobuf import ByteSource
from onnxkvrename.model.weights import read_external_data
from onnxkvrename.rules.plan import KvPair
from onnxkvrename.verification.constants import SmallConstants
from onnxkvrename.verification.graph_bodies import (
    Attribute,
    Body,
    Operation,
    read_graph,
)
from onnxkvrename.verification.operators import (
    SizeChange,
    find_operand_flows,
    is_shape_only,
)
from onnxkvrename.verification.strip_weights import read_model_without_weights

SCALE_BYTES = 1 << 14
"""Bytes of a weight that is kept, as it may be scales."""
_VALUE_PRESERVING_OPS = (
    "Identity",
    "Reshape",
    "Flatten",
    "Squeeze",
    "Unsqueeze",
    "Cast",
    "Transpose",
)
_REINTERPRETING_OPS = ("Cast", "CastLike", "BitCast", "QuantizeLinear", "DequantizeLinear")
_QUANTIZATION_DOMAINS = ("", "com.microsoft")
_ATTENTION = ("com.microsoft", "GroupQueryAttention")
_PAST_OPERANDS, _PRESENT_OUTPUTS, _SCALE_OPERANDS = (3, 4), (1, 2), (12, 13)
"""Key and value of an attention: its past, its present, and its scales."""
_QUANT_TYPES = ("k_quant_type", "v_quant_type")

_Axes: TypeAlias = "tuple[int, ...] | None"
"""For each axis of a value the buffer's axis that it is; ``None`` if that is not known."""
_Place = tuple[str, _Axes]
"""A value, and its axes."""
_Step = Callable[[str, _Axes], Iterator["Scale | _Place"]]
"""Takes a value and its axes; yields those that it is moved to or from, and scales."""


class _UnknownScaleError(Exception):
    """A scale is not a constant, or it is not known whose it is."""


class _Use(NamedTuple):
    """An operand or an output of a node, by its position."""

    operation: Operation
    position: int


def find_buffer_scales(
    source: ByteSource, pairs: Iterable[KvPair], directory: Path
) -> dict[str, BufferScales]:
    """Return the scales of quantized buffers, by their inputs, or their outputs without one.

    The directory has the external data. Weights of more than `SCALE_BYTES` are not needed.

    Raises:
        ModelError: The model cannot be read.
    """
    quantized = [pair for pair in pairs if is_quantized(find_pair_dtype(pair))]
    main, functions = read_graph(source, SCALE_BYTES)
    if functions:
        model = read_model_without_weights(source, SCALE_BYTES)
        try:
            inlined = inline_local_functions(model).SerializeToString()
        except Exception:  # onnx raises what it likes about functions that it cannot inline
            return {}
        main = read_graph(ByteSource.from_bytes(inlined), SCALE_BYTES).main
    graph = _ScaleGraph(main, directory)
    return {
        pair.sides[0].old_name: BufferScales(graph.find_written(pair), graph.find_read(pair))
        for pair in quantized
    }


class _ScaleGraph:
    """A graph whose buffers are followed to their scales."""

    def __init__(self, body: Body, directory: Path) -> None:
        self._constants = SmallConstants(body)
        self._directory = directory
        self._producers: dict[str, _Use] = {}
        self._consumers: dict[str, list[_Use]] = {}
        for operation in body.list_operations():
            for position, name in enumerate(operation.outputs):
                self._producers[name] = _Use(operation, position)
            for position, name in enumerate(operation.inputs):
                self._consumers.setdefault(name, []).append(_Use(operation, position))
            for name in body.list_captured_at(operation.number):
                self._consumers.setdefault(name, []).append(_Use(operation, -1))

    def find_read(self, pair: KvPair) -> tuple[Scale, ...] | None:
        """Return the scales by which the numbers of a buffer become values again."""
        if pair.input is None:
            return None
        return self._follow(pair, pair.input.old_name, self._step_forward)

    def find_written(self, pair: KvPair) -> tuple[Scale, ...] | None:
        """Return the scales by which values become the numbers that a buffer retains."""
        if pair.output is None:
            return None
        return self._follow(pair, pair.output.old_name, self._step_back)

    def _follow(self, pair: KvPair, start: str, step: _Step) -> tuple[Scale, ...] | None:
        """Return the scales at the ends of all ways from a value; ``None`` if one is unknown."""
        shape = find_pair_shape(pair)
        axes: _Axes = None if shape is None else tuple(range(len(shape)))
        scales: dict[Scale, None] = {}
        pending, seen = [(start, axes)], {start}
        try:
            while pending:
                for found in step(*pending.pop()):
                    if isinstance(found, Scale):
                        scales[found] = None
                    elif found[0] not in seen:
                        seen.add(found[0])
                        pending.append(found)
        except _UnknownScaleError:
            return None
        return tuple(scales)

    def _step_forward(self, name: str, axes: _Axes) -> Iterator[Scale | _Place]:
        """Yield where a value is moved to, and the scales that make something else of it."""
        for operation, operand in self._consumers.get(name, ()):
            key = operation.function_key[:2]
            if _is_quantization(operation, "DequantizeLinear") and operand == 0:
                yield self._read_linear_scale(operation, axes)
            elif key == _ATTENTION and operand in _PAST_OPERANDS:
                yield self._read_attention_scale(operation, _PAST_OPERANDS.index(operand), axes)
            elif not is_shape_only(*key):
                moved = [
                    (output, self._move_axes(operation, axes))
                    for position, output in enumerate(operation.outputs)
                    if operand in _list_moved_operands(operation, position)
                ]
                if not moved:
                    raise _UnknownScaleError
                yield from moved

    def _step_back(self, name: str, axes: _Axes) -> Iterator[Scale | _Place]:
        """Yield what a value is moved from, and the scales that it was made with."""
        if name not in self._producers:
            return  # an input, or numbers that are constant
        operation, position = self._producers[name]
        if _is_quantization(operation, "QuantizeLinear"):
            yield self._read_linear_scale(operation, axes)
        elif operation.function_key[:2] == _ATTENTION and position in _PRESENT_OUTPUTS:
            yield self._read_attention_scale(operation, _PRESENT_OUTPUTS.index(position), axes)
        elif operation.domain or operation.op_type not in ("Constant", "ConstantOfShape"):
            operands = _list_moved_operands(operation, position)
            if not operands:
                raise _UnknownScaleError
            moved = self._move_axes(operation, axes, is_back=True)
            yield from ((operation.inputs[operand], moved) for operand in operands)

    def _move_axes(self, operation: Operation, axes: _Axes, *, is_back: bool = False) -> _Axes:
        """Return the axes of what is moved; not known where their number may change."""
        count = len(operation.inputs)
        flows = find_operand_flows(operation.domain, operation.op_type, 0, count) or ()
        has_moved = any(flow.size_change & SizeChange.MOVES_AXES for flow in flows)
        if axes is None or operation.op_type in ("Gather", "GatherND"):
            return None
        if not has_moved:
            return axes
        order = self._find_attribute(operation, "perm")
        if operation.op_type != "Transpose" or sorted(order or ()) != [*range(len(axes))]:
            return None
        if is_back:
            return tuple(axes[order.index(axis)] for axis in range(len(axes)))
        return tuple(axes[axis] for axis in order)

    def _find_attribute(self, operation: Operation, name: str) -> Any:
        attribute = operation.find_attribute(name)
        return None if attribute is None else _read_attribute(attribute)

    def _read_linear_scale(self, operation: Operation, axes: _Axes) -> Scale:
        """Return the scale of a QuantizeLinear or DequantizeLinear."""
        scale, zero_point = (self._read_operand(operation, position) for position in (1, 2))
        if scale is None:
            raise _UnknownScaleError
        numbers = _join(scale, zero_point)
        if len(numbers) > 1:
            axis = self._find_attribute(operation, "axis")
            axis = 1 if axis is None else axis
            if axes is None or not -len(axes) <= axis < len(axes):
                return _build_scale(scale, numbers.reshape(-1, 1, 2), None)
            block_size = self._find_attribute(operation, "block_size") or 0
            if block_size:
                if scale.ndim != len(axes) or not 0 < block_size * scale.size <= MAX_CONSTANT_BYTES:
                    raise _UnknownScaleError
                shape = list(scale.shape)
            else:
                shape = [1] * len(axes)
                shape[axis] = len(numbers)
            numbers = numbers.reshape(*shape, 2).repeat(block_size or 1, axis % len(axes))
        return _build_scale(scale, numbers, axes)

    def _read_attention_scale(self, operation: Operation, part: int, axes: _Axes) -> Scale:
        """Return the scale of the key (0) or the value (1) of an attention."""
        scale = self._read_operand(operation, _SCALE_OPERANDS[part])
        quant_type = self._find_attribute(operation, _QUANT_TYPES[part])
        heads = self._find_attribute(operation, "kv_num_heads")
        if scale is None or quant_type not in (b"PER_TENSOR", b"PER_CHANNEL") or not heads:
            raise _UnknownScaleError
        numbers = _join(scale, None)
        if len(numbers) > 1 and len(numbers) % heads == 0:
            numbers = numbers.reshape(1, heads, 1, -1, 2)
        return _build_scale(scale, numbers, axes if axes and len(axes) == 4 else None)

    def _read_operand(self, operation: Operation, position: int) -> np.ndarray | None:
        """Return a constant operand; ``None`` if the node does not have it."""
        name = operation.inputs[position] if position < len(operation.inputs) else ""
        return self._read_constant(name) if name else None

    def _read_constant(self, name: str) -> np.ndarray:
        """Return a constant, also one that only changes its shape or its dtype on the way.

        Raises:
            _UnknownScaleError: The graph computes it, or it cannot be read.
        """
        casts, seen, is_turned = [], set(), False
        while name in self._producers and name not in seen:
            seen.add(name)
            operation, _ = self._producers[name]
            if operation.domain or operation.op_type not in _VALUE_PRESERVING_OPS:
                break
            is_turned |= operation.op_type == "Transpose"
            if operation.op_type == "Cast":
                casts.append(self._find_attribute(operation, "to"))
            name = operation.inputs[0]
        array = self._find_array(name)
        if (
            array is None
            or not array.size
            or (is_turned and array.size > max(array.shape, default=1))
        ):
            raise _UnknownScaleError
        for dtype in reversed(casts):
            array = array.astype(helper.tensor_dtype_to_np_dtype(dtype))
        return array

    def _find_array(self, name: str) -> np.ndarray | None:
        """Return a constant; ``None`` if it is none of this graph, or its data cannot be read."""
        node = self._constants.find_node(name)
        for attribute in () if node is None else node.list_attributes():
            if attribute.name in ("value_int", "value_ints", "value_float", "value_floats"):
                dtype = np.int64 if attribute.name.startswith("value_int") else np.float32
                return np.array(_read_attribute(attribute), dtype)
        data = self._constants.find_tensor(name)
        if data is None:
            return None
        tensor = TensorProto.FromString(data)
        if tensor.data_location == TensorProto.EXTERNAL and not self._read_external(tensor):
            return None
        try:
            return numpy_helper.to_array(tensor)
        except (KeyError, TypeError, ValueError):  # a damaged tensor: onnx's checker says so
            return None

    def _read_external(self, tensor: TensorProto) -> bool:
        """Put the external data of a tensor into it; return whether they can be read."""
        size = prod(tensor.dims) * get_dtype_bits(get_dtype_name(tensor.data_type)) // 8
        entries = {entry.key: entry.value for entry in tensor.external_data}
        end, problem = parse_extent(entries, size)
        if problem or not 0 < size <= MAX_CONSTANT_BYTES:
            return False
        reference = ExternalReference(entries["location"], end, tensor.name)
        start = int(entries.get("offset", 0))
        tensor.raw_data = read_external_data(self._directory, reference, start, size)
        tensor.data_location = TensorProto.DEFAULT
        return True


def _read_attribute(attribute: Attribute) -> Any:
    return helper.get_attribute_value(AttributeProto.FromString(attribute.data))


def _is_quantization(operation: Operation, op_type: str) -> bool:
    return operation.domain in _QUANTIZATION_DOMAINS and operation.op_type == op_type


def _list_moved_operands(operation: Operation, output: int) -> list[int]:
    """Return the operands that are moved into an output; none if it is not all that happens."""
    count = len(operation.inputs)
    flows = find_operand_flows(operation.domain, operation.op_type, output, count)
    if operation.op_type in _REINTERPRETING_OPS or not flows:
        return []
    if any(flow.is_computed for flow in flows):
        return []
    return [flow.operand % count for flow in flows if -count <= flow.operand < count]


def _join(scale: np.ndarray, zero_point: np.ndarray | None) -> np.ndarray:
    """Return pairs of scale and zero point, as they are broadcast to each other."""
    scales = scale.astype(np.float64).ravel()
    zeros = np.zeros(1) if zero_point is None else zero_point.astype(np.float64).ravel()
    if len(zeros) not in (1, len(scales)):
        raise _UnknownScaleError
    return np.stack([scales, np.broadcast_to(zeros, scales.shape)], axis=-1)


def _build_scale(scale: np.ndarray, numbers: np.ndarray, axes: _Axes) -> Scale:
    """Return a scale along the axes of the buffer, which share what is equal along an axis.

    Args:
        scale: The constant, for its dtype.
        numbers: Scale and zero point for each position along the axes of a value.
        axes: The buffer's axes of these; ``None`` if they are not known.
    """
    pairs = numbers.reshape(-1, 2)
    if not np.isfinite(pairs).all():
        raise _UnknownScaleError
    shape: tuple[int, ...] = ()
    if (pairs == pairs[0]).all():
        numbers = pairs[:1]
    elif axes is None:
        raise _UnknownScaleError
    else:
        numbers = numbers.transpose(*np.argsort(axes), len(axes))
        for axis in range(len(axes)):
            position = numbers.take([0], axis)
            numbers = position if (numbers == position).all() else numbers
        shape = numbers.shape[:-1]
    dtype = get_dtype_name(helper.np_dtype_to_tensor_dtype(scale.dtype))
    first, zero_point = map(float, pairs[0])
    digest = sha256(np.ascontiguousarray(numbers).astype("<f8").tobytes()).hexdigest()
    return Scale(dtype, shape, first, zero_point, digest)
