"""Build models of many layers, of every kind of cache, with shapes but without weights."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import onnx.helper
from models import info, node
from onnx import ModelProto, TensorProto

from onnxkvrename.layout.layout import Layout

_ATTENTION = ("batch_size", 8, "ctx_len", 64)
_WINDOW = ("batch_size", 8, "sliding_window", 64)
_WHISPER_BUFFERS = ("past_key_self", "past_value_self", "past_key_cross", "past_value_cross")
_CONV, _RECURRENT = ("batch_size", 512, 4), ("batch_size", 16, 128, 128)
LAYERS: dict[str, dict[str, tuple[int | str, ...]]] = {
    "full": {"past_key": _ATTENTION, "past_value": _ATTENTION},
    "window": {"past_key": _WINDOW, "past_value": _WINDOW},
    "mla": {
        "compressed_kv": ("batch_size", 1, "ctx_len", 512),
        "k_pe": ("batch_size", 1, "ctx_len", 64),
    },
    "linear": {"conv_state": _CONV, "recurrent_state": _RECURRENT},
    "qwen": {"past_key": _CONV, "past_value": _RECURRENT},  # a linear layer of Qwen3.5
    "none": {},
}


def build_cache_model(
    layers: Iterable[str],
    *,
    tokens: tuple[str, str] = ("", ""),
    without: Collection[str] = (),
    weights: Iterable[TensorProto] = (),
) -> ModelProto:
    """Build a model with these layers, one kind of :data:`LAYERS` each.

    Args:
        layers: The kind of each layer.
        tokens: The tokens in the names of the inputs and of the outputs.
        without: Names that nodes have, but that are not inputs or outputs of the graph.
        weights: Initializers to add.
    """
    inputs, outputs, nodes = [info("x")], [info("logits")], [node("Neg", ["x"], ["logits"])]
    for number, kind in enumerate(layers):
        for part, shape in LAYERS[kind].items():
            input_suffix, output_suffix = (f"_{token}" if token else "" for token in tokens)
            name, output_name = (
                f"{part}.{number}{input_suffix}",
                f"{part}.{number}{output_suffix}_RetainedState",
            )
            nodes.append(node("Add", [name, "x"], [output_name]))
            inputs.append(info(name, *shape, dtype=TensorProto.FLOAT16))
            outputs.append(info(output_name, *shape, dtype=TensorProto.FLOAT16))
    main = onnx.helper.make_graph(
        nodes,
        "main",
        [value for value in inputs if value.name not in without],
        [value for value in outputs if value.name not in without],
        initializer=list(weights),
    )
    return onnx.helper.make_model(
        main,
        opset_imports=[onnx.helper.make_opsetid("", 18)],
        ir_version=10,
        producer_name="tests",
        producer_version="1",
    )


HYBRID = ("linear", "linear", "full") * 8
MIXED = ("full", "window", "mla", "linear", "qwen", "none", "full", "full")


def build_layout_model(layout: Layout) -> ModelProto:
    """Build a model with the buffers of a layout, and little else."""
    inputs, outputs, nodes = [info("x", 1)], [info("logits", 1)], [node("Neg", ["x"], ["logits"])]
    for buffer in layout.buffers:
        names = buffer.names if buffer.is_state else [f"past_{name}" for name in buffer.names]
        nodes.append(node("Neg", [names[0]], [names[1]]))
        for values, name in zip((inputs, outputs), names, strict=True):
            values.append(info(name, *(buffer.shape or ()), dtype=TensorProto.FLOAT16))
    return onnx.helper.make_model(onnx.helper.make_graph(nodes, "main", inputs, outputs))


def build_whisper(layers: int) -> ModelProto:
    """Build a decoder that writes what it heard into one cache, and keeps the other."""
    frames = info("feature_len", 1, dtype=TensorProto.BOOL)
    inputs, outputs, nodes = [info("x", 1, 2, 1, 4), frames], [info("logits", 1, 2, 1, 4)], []
    for layer in range(layers):
        for name in _WHISPER_BUFFERS:
            axis = "encoder_ctx_len" if name.endswith("cross") else "decoder_ctx_len"
            given, kept = f"{name}.{layer}", f"{name}.{layer}_RetainedState"
            inputs.append(info(given, "batch_size", 2, axis, 4))
            outputs.append(info(kept, "batch_size", 2, axis, 4))
            written = f"written_{name}_{layer}"
            nodes.append(node("Add", [given, "x"], [written]))
            nodes.append(node("Where", ["feature_len", given, written], [kept]))
    nodes.append(node("Neg", ["x"], ["logits"]))
    graph = onnx.helper.make_graph(nodes, "whisper", inputs, outputs)
    opset = [onnx.helper.make_opsetid("", 17)]
    return onnx.helper.make_model(graph, opset_imports=opset, ir_version=8)
