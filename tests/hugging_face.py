"""Build models, rules and layouts with the names that Hugging Face's exporters give."""

from __future__ import annotations

from pathlib import Path

from models import info, node, saved
from onnx import helper

from onnxkvrename.layout.layout import Layout, build_layout
from onnxkvrename.layout.updates import BufferUpdate
from onnxkvrename.model.signature import Dim, Signature, Value
from onnxkvrename.rules.kv_model import KvModel
from onnxkvrename.rules.load import load_rules
from onnxkvrename.rules.plan import build_minimal_plan

RULES = r"""
retained = 'present\..*'

[[kv]]
input = 'past_key_values\.(?P<layer>[0-9]+)\.(?P<buffer>key|value)(?:_(?P<token>[A-Za-z]+))?'
output = '(?:present|updated)\.(?P<layer>[0-9]+)\.(?P<buffer>key|value)(?:_(?P<token>[A-Za-z]+))?'
input_name = "past_key_values.{layer}.{buffer}[_{token}]"
output_name = "present.{layer}.{buffer}[_{token}]"
kinds.attention.parts = ["key", "value"]
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


def build_decoder(
    folder: Path,
    *,
    token: str = "",
    present: str = "present",
    shape: tuple[Dim, ...] = PAST,
    dtypes: tuple[str, ...] = ("FLOAT",),
) -> Layout:
    """Build the layout of a decoder of two layers.

    Args:
        folder: Where to put the rules, and where the model is said to lie.
        token: The token in all names.
        present: How the names of outputs begin.
        shape: The shape of each buffer.
        dtypes: The dtypes of the buffers; the last one is that of all further ones.
    """
    end = f"_{token}" if token else ""
    inputs, outputs = [], [Value("logits", "FLOAT", ("batch_size", 1, 8))]
    for layer, part in ((layer, part) for layer in (0, 1) for part in ("key", "value")):
        dtype = dtypes[min(len(inputs), len(dtypes) - 1)]
        inputs.append(Value(f"past_key_values.{layer}.{part}{end}", dtype, shape))
        outputs.append(Value(f"{present}.{layer}.{part}{end}", dtype, shape))
    rules = folder / "rules.toml"
    rules.write_text(RULES, "utf-8")
    signature = Signature(tuple(inputs), tuple(outputs))
    plan = build_minimal_plan(signature, load_rules(path=rules))
    layout = build_layout([KvModel(str(folder / "model.onnx"), signature, plan)])
    grown = BufferUpdate("append", 2)
    return layout._replace(buffers=tuple(b._replace(update=grown) for b in layout.buffers))
