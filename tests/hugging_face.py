"""Build a model and rules with the names that Hugging Face's exporters give."""

from __future__ import annotations

from pathlib import Path

from models import info, node, saved
from onnx import helper

RULES = r"""
retained = 'present\..*'

[[kv]]
kind = "attention"
input = 'past_key_values\.{layer}\.{part}{token}'
output = '(?:present|updated)\.{layer}\.{part}{token}'
"""
PAST = ("batch_size", 2, "past_length", 4)
GROWN = ("batch_size", 2, "past_length + length", 4)


def save_decoder(folder: Path, layers: int = 2) -> tuple[Path, Path]:
    """Save a decoder whose cache grows, and rules that know its names; return both paths."""
    inputs, nodes, outputs = [info("x", "batch_size", 2, "length", 4)], [], []
    for layer, part in ((layer, part) for layer in range(layers) for part in ("key", "value")):
        names = [f"{start}.{layer}.{part}" for start in ("past_key_values", "present")]
        inputs.append(info(names[0], *PAST))
        outputs.append(info(names[1], *GROWN))
        nodes.append(node("Concat", [names[0], "x"], [names[1]], axis=-2))
    nodes.append(node("Neg", ["x"], ["logits"]))
    outputs.append(info("logits", "batch_size", 2, "length", 4))
    graph = helper.make_graph(nodes, "decoder", inputs, outputs)
    opsets = [helper.make_opsetid("", 18)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    rules = folder / "rules.toml"
    rules.write_text(RULES, "utf-8")
    return saved(model, folder / "model.onnx"), rules
