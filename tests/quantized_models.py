"""Build models with quantized caches, and hand real bytes from one to the other.

A cache is written and read by QuantizeLinear and DequantizeLinear, or by GroupQueryAttention,
which quantizes by itself. Their constants are where exporters put them.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import onnx
from models import node
from onnx import ModelProto, NodeProto, TensorProto, numpy_helper

HEADS, CONTEXT, HEAD_SIZE, PROMPT = 2, 12, 8, 5
NAMES = ("past_key.0_vllmKvCache", "past_value.0_vllmKvCache")
_SHAPE = (1, HEADS, CONTEXT, HEAD_SIZE)

Form = Literal["scatter", "whole", "turned", "attention"]
FORMS: tuple[Form, ...] = ("scatter", "whole", "turned", "attention")
"""New numbers are written into the cache; or it is dequantized, updated and quantized again; or
quantized with heads and positions exchanged; or an attention does it all."""
PLACES = ("initializer", "node", "external", "identity", "reshape", "cast", "computed")
"""Where the constants are. A computed scale follows from an input."""


class Quantization(NamedTuple):
    """How a cache is quantized: a scale for all, for each head, or for each position of a head."""

    scale: np.ndarray
    zero_point: int | None = None
    axis: int | None = None
    dtype: str = "int8"


class Builder:
    """Collects the nodes and constants of a model."""

    def __init__(self, place: str) -> None:
        self.place = place
        self.nodes: list[NodeProto] = []
        self.weights: list[TensorProto] = []

    def add(self, op: str, inputs: list[str], outputs: list[str], **attributes: Any) -> str:
        self.nodes.append(node(op, inputs, outputs, **attributes))
        return outputs[0]

    def add_scale(self, name: str, array: np.ndarray) -> str:
        """Add a constant at the builder's place."""
        if self.place == "node":
            return self.add("Constant", [], [name], value=numpy_helper.from_array(array))
        stored = array.reshape(1, -1) if self.place == "reshape" else array
        is_cast = self.place == "cast" and array.dtype == np.float32
        self.weights.append(
            numpy_helper.from_array(stored.astype(np.float64) if is_cast else stored, f"{name}_c")
        )
        match self.place:
            case "identity":
                return self.add("Identity", [f"{name}_c"], [name])
            case "reshape":
                shape = numpy_helper.from_array(np.array(array.shape, np.int64), f"{name}_shape")
                self.weights.append(shape)
                return self.add("Reshape", [f"{name}_c", f"{name}_shape"], [name])
            case "cast" if is_cast:
                return self.add("Cast", [f"{name}_c"], [name], to=TensorProto.FLOAT)
            case "computed" if array.dtype == np.float32:
                return self.add("Mul", [f"{name}_c", "one"], [name])
        return f"{name}_c"


def build_quantized_model(
    form: Form, key: Quantization, value: Quantization, place: str = "initializer"
) -> ModelProto:
    """Build a model of one layer whose cache is quantized; ``logits`` are what it reads."""
    builder = Builder(place)
    types = [
        getattr(TensorProto, "INT8" if form == "attention" else q.dtype.upper())
        for q in (key, value)
    ]
    tensor = onnx.helper.make_tensor_value_info
    caches = [tensor(*each, _SHAPE) for each in zip(NAMES, types, strict=True)]
    results = [
        tensor(f"{name}_RetainedState", dtype, _SHAPE)
        for name, dtype in zip(NAMES, types, strict=True)
    ]
    inputs = [tensor("one", TensorProto.FLOAT, [])] if place == "computed" else []
    if form == "attention":
        inputs += _add_attention(builder, key, value)
        logits = tensor("logits", TensorProto.FLOAT, [1, "s", HEADS * HEAD_SIZE])
    else:
        inputs += [
            tensor("new", TensorProto.FLOAT, [1, HEADS, "s", HEAD_SIZE]),
            tensor("at", TensorProto.INT64, [1, HEADS, "s", HEAD_SIZE]),
        ]
        read = [
            _add_linear(builder, name, part, form)
            for name, part in zip(NAMES, (key, value), strict=True)
        ]
        builder.add("Concat", read, ["logits"], axis=0)
        logits = tensor("logits", TensorProto.FLOAT, [2, HEADS, CONTEXT, HEAD_SIZE])
    graph = onnx.helper.make_graph(
        builder.nodes, "g", [*inputs, *caches], [logits, *results], builder.weights
    )
    opsets = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid("com.microsoft", 1)]
    return onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)


def shorten_text(name: str) -> str:
    return name.removeprefix("past_").partition(".")[0]


def _add_linear(builder: Builder, name: str, part: Quantization, form: Form) -> str:
    result, short = f"{name}_RetainedState", shorten_text(name)
    turned = {1: 2, 2: 1}
    constants = [builder.add_scale(f"{short}_scale", part.scale)]
    if part.zero_point is not None:
        zeros = np.full(part.scale.shape, part.zero_point, part.dtype)
        constants.append(builder.add_scale(f"{short}_zero", zeros))
    options = {} if part.axis is None else {"axis": part.axis}
    dtype = getattr(TensorProto, part.dtype.upper())
    made = dict(options) if part.zero_point is not None else {**options, "output_dtype": dtype}
    if form == "whole":
        past = builder.add("DequantizeLinear", [name, *constants], [f"{name}_f"], **options)
        longer = builder.add("ScatterElements", [past, "at", "new"], [f"{name}_u"], axis=2)
        builder.add("QuantizeLinear", [longer, *constants], [result], **made)
        return longer
    if form == "turned":
        if part.axis in turned:
            made["axis"] = turned[part.axis]
        new = builder.add("Transpose", ["new"], [f"{name}_t"], perm=[0, 2, 1, 3])
        new = builder.add("QuantizeLinear", [new, *constants], [f"{name}_q"], **made)
        new = builder.add("Transpose", [new], [f"{name}_n"], perm=[0, 2, 1, 3])
    else:
        new = builder.add("QuantizeLinear", ["new", *constants], [f"{name}_q"], **made)
    builder.add("ScatterElements", [name, "at", new], [result], axis=2)
    return builder.add("DequantizeLinear", [result, *constants], [f"{name}_read"], **options)


def _add_attention(
    builder: Builder, key: Quantization, value: Quantization
) -> list[onnx.ValueInfoProto]:
    scales = [
        builder.add_scale(f"{shorten_text(name)}_scale", part.scale.reshape(-1))
        for name, part in zip(NAMES, (key, value), strict=True)
    ]
    key_type, value_type = (
        "PER_TENSOR" if part.axis is None else "PER_CHANNEL" for part in (key, value)
    )
    builder.add(
        "GroupQueryAttention",
        ["query", "new", "new", *NAMES, "lengths", "total", *[""] * 5, *scales],
        ["logits", *(f"{name}_RetainedState" for name in NAMES)],
        domain="com.microsoft",
        num_heads=HEADS,
        kv_num_heads=HEADS,
        k_quant_type=key_type,
        v_quant_type=value_type,
        kv_cache_bit_width=8,
    )
    tensor, width = onnx.helper.make_tensor_value_info, HEADS * HEAD_SIZE
    return [
        tensor("query", TensorProto.FLOAT, [1, "s", width]),
        tensor("new", TensorProto.FLOAT, [1, "s", width]),
        tensor("lengths", TensorProto.INT32, [1]),
        tensor("total", TensorProto.INT32, [1]),
    ]


def save_quantized_model(model: ModelProto, path: Path | str, place: str = "") -> Path:
    path = Path(path)
    external = {"save_as_external_data": True, "location": f"{path.stem}.data", "size_threshold": 0}
    onnx.save(model, path, **(external if place == "external" else {}))
    return path


class DrawnPair(NamedTuple):
    """Two models, and whether a scale is computed by one of their graphs."""

    prefill: Path
    decode: Path
    form: Form
    is_computed: bool


def draw_quantized_pair(seed: int, directory: Path) -> DrawnPair:
    """Draw two models that are quantized alike, or nearly, with constants in different places."""
    draw = random.Random(seed)
    form = draw.choice(FORMS)
    parts = [_draw_quantization(draw, form) for _ in NAMES]
    while form == "attention" and parts[0].axis != parts[1].axis:  # onnxruntime requires it
        parts[1] = _draw_quantization(draw, form)
    others = list(parts)
    change = draw.choice(("none", "scale", "one scale", "zero point", "shape"))
    index = draw.randrange(2)
    others[index] = _change_quantization(draw, parts[index], form, change)
    sides = []
    for name, made in (("prefill", parts), ("decode", others)):
        place = draw.choice(PLACES[:-1]) if draw.random() < 0.95 else "computed"
        other_form = form
        if form != "attention" and name == "decode":
            other_form = draw.choice(FORMS[:3])
        model = build_quantized_model(other_form, *made, place)
        sides.append((save_quantized_model(model, directory / f"{name}.onnx", place), place))
    (prefill, first), (decode, second) = sides
    return DrawnPair(prefill, decode, form, "computed" in (first, second))


def _draw_quantization(draw: random.Random, form: Form) -> Quantization:
    shape: tuple[int, ...] = draw.choice(((), (1,)))
    axis = draw.choice((None, None, 1, 3))
    if form == "attention":
        shape, axis = draw.choice((((1,), None), ((HEADS * HEAD_SIZE,), 3)))
    elif axis is not None:
        shape = (_SHAPE[axis],)
    scale = np.array(draw.choice((0.02, 0.03, 0.05)) * np.ones(shape), np.float32)
    if axis is not None and draw.random() < 0.8:
        scale *= np.array([draw.uniform(0.7, 1.4) for _ in range(scale.size)], np.float32)
    dtype = "int8" if form == "attention" else draw.choice(("int8", "uint8"))
    zero_point = draw.choice((0, 12, 100)) if dtype == "uint8" else draw.choice((None, 0, 7))
    return Quantization(scale, None if form == "attention" else zero_point, axis, dtype)


def _change_quantization(
    draw: random.Random, part: Quantization, form: Form, change: str
) -> Quantization:
    scale = part.scale.copy()
    match change:
        case "scale":
            return part._replace(scale=scale * np.float32(draw.choice((0.5, 2, 3))))
        case "one scale":
            flat = scale.reshape(-1)
            flat[draw.randrange(flat.size)] *= 2
            return part._replace(scale=scale)
        case "zero point" if part.zero_point is not None:
            return part._replace(zero_point=part.zero_point + 9)
        case "shape" if form != "attention" and (scale == scale.flat[0]).all():
            return part._replace(scale=scale.reshape(-1)[:1], axis=None)  # the same for all
    return part


def hand_over(pair: DrawnPair) -> bool:
    """Return whether decode reads the values that prefill meant, in onnxruntime."""
    caches = _run(pair.prefill, pair.form, 0, PROMPT)[1:]
    own, other = (
        _run(path, pair.form, PROMPT, 1, caches)[0] for path in (pair.prefill, pair.decode)
    )
    if pair.form != "attention":
        own, other = (each[:, :, :PROMPT] for each in (own, other))
    return bool(np.allclose(own, other, rtol=1e-4, atol=1e-5))


def _run(
    path: Path, form: Form, past: int, count: int, caches: list[np.ndarray] | None = None
) -> list[np.ndarray]:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    types = {each.name: each.type for each in session.get_inputs()}
    generator = np.random.default_rng(past + 1)
    feeds: dict[str, np.ndarray] = {"one": np.ones((), np.float32)}
    if form == "attention":
        for name in ("query", "new"):
            feeds[name] = generator.normal(size=(1, count, HEADS * HEAD_SIZE)).astype(np.float32)
        feeds["lengths"] = np.array([past + count - 1], np.int32)
        feeds["total"] = np.array([past + count], np.int32)
    else:
        shape = (1, HEADS, count, HEAD_SIZE)
        feeds["new"] = generator.normal(size=shape).astype(np.float32)
        feeds["at"] = np.broadcast_to(np.arange(past, past + count).reshape(1, 1, -1, 1), shape)
    for index, name in enumerate(NAMES):
        dtype = np.uint8 if types[name] == "tensor(uint8)" else np.int8
        feeds[name] = np.zeros(_SHAPE, dtype) if caches is None else caches[index]
    result: list[np.ndarray] = session.run(None, {n: a for n, a in feeds.items() if n in types})
    return result
