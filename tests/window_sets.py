"""Write sets of windows: a model exported layer by layer, in QEfficient's directories."""

from __future__ import annotations

from pathlib import Path

import onnx.helper
from models import info, node
from onnx import ModelProto, TensorProto


def build_window(first: int, end: int, token: str = "") -> ModelProto:
    """Build the window of layers ``first`` to ``end - 1``, with two buffers for each."""
    start = info("inputs_embeds", "batch_size", "seq_len", 32)
    hidden = start.name
    if first == 0:
        start = info("input_ids", "batch_size", "seq_len", dtype=TensorProto.INT64)
        hidden = "embeds"
    position = info("position_ids", "batch_size", "seq_len", dtype=TensorProto.INT64)
    nodes = [node("Cast", ["input_ids"], ["embeds"], to=TensorProto.FLOAT)] if first == 0 else []
    inputs, outputs = [start, position], [info("logits", "batch_size", "seq_len", 32)]
    for layer in range(first, end):
        for part in ("key", "value"):
            name = f"past_{part}.{layer}" + (f"_{token}" if token else "")
            shape = ("batch_size", 2, "ctx_len", 8)
            inputs.append(info(name, *shape))
            outputs.append(info(f"{name}_RetainedState", *shape))
            nodes.append(node("Add", [name, hidden], [f"{name}_RetainedState"]))
    last = outputs[-1].name
    nodes.append(node("Mul", [hidden, last], ["logits"]))
    graph = onnx.helper.make_graph(nodes, "main_graph", inputs, outputs)
    opset = [onnx.helper.make_opsetid("", 17)]
    return onnx.helper.make_model(graph, opset_imports=opset, ir_version=8)


def write_windows(
    root: Path, count: int, *, step: int = 1, token: str = "", weights: int = 0
) -> Path:
    """Write ``count`` windows of ``step`` layers below ``root``, and return ``root``.

    Each has ``weights`` bytes of weights.
    """
    for first in range(0, count * step, step):
        end = first + step
        model = build_window(first, end, token)
        if weights:
            data = bytes(range(256)) * (weights // 256)
            model.graph.initializer.add(
                name=f"w{first}", dims=[len(data)], data_type=TensorProto.UINT8, raw_data=data
            )
        path = root / f"layer_{first}_{end}" / f"Tiny_layer_tmp_{first}_{end}.onnx"
        path.parent.mkdir(parents=True)
        path.write_bytes(model.SerializeToString())
    return root
