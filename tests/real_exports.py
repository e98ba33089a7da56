"""Real exports of QEfficient, where they are there: they never enter the repository."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx

EXPORTS = Path(__file__).resolve().parents[2] / "shared" / "exports"
ENCODER = "gemma3vlm_dual/Gemma3EncoderWrapper.onnx"
BROKEN = "llama2l_dynamo_subfn/LlamaForCausalLM.onnx"
# Exports with local functions or merged from windows differ from run to run.
VARYING = {BROKEN, "llama2l_subfn/LlamaForCausalLM.onnx", "lw_qwen3moe/merged_0-2.onnx"}


def names(path: Path) -> dict[str, list[Any]]:
    """Every name in the main graph, types of inputs and outputs with it."""
    graph = onnx.load(path, load_external_data=False).graph
    return {
        "ends": [value.SerializeToString() for value in (*graph.input, *graph.output)],
        "values": sorted(value.SerializeToString() for value in graph.value_info),
        "weights": sorted(tensor.name for tensor in graph.initializer),
        "nodes": [(node.name, list(node.input), list(node.output)) for node in graph.node],
    }
