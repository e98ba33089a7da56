"""Build decoders of random layers, whose buffers are named as some exporter does it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import onnx.helper
import onnx.numpy_helper
from hypothesis import strategies as st
from models import info, node
from onnx import ModelProto, NodeProto, TensorProto

Namer = Callable[[str, int], tuple[str, str]]
NAMERS: dict[str, Namer] = {
    "qefficient": lambda part, layer: (
        f"past_{part}.{layer}",
        f"past_{part}.{layer}_RetainedState",
    ),
    "optimum": lambda part, layer: (f"past_key_values.{layer}.{part}", f"present.{layer}.{part}"),
    "mobius": lambda part, layer: (f"{part}_cache.{layer}", f"updated_{part}_cache.{layer}"),
    "qnn": lambda part, layer: (f"past_{part}_{layer}_in", f"past_{part}_{layer}_out"),
    "dynamo": lambda part, layer: (f"past_{layer}_{len(part)}", f"cat_{layer * 31 + len(part)}"),
    "initials": lambda part, layer: (f"past_{layer}_{part.split('_')[-1].upper()}",) * 2,
    "counted": lambda part, layer: (f"{part}_L{layer}", f"{part}_L{layer}_new"),
}
"""How the buffers of a layer are called: input and output. Where both are one, the output is
``new`` before it."""

# A layer reads `h`, and makes what is added to it, from its buffers. Sizes: n batch, s new
# positions, p old ones, c context.
_GROWS, _STAYS, _STATE = ("n", 2, "p", 4), ("n", 2, "c", 4), ("n", 2, 4, 4)
LAYERS: dict[str, tuple[dict[str, tuple[int | str, ...]], str]] = {
    "growing": ({"key": _GROWS, "value": _GROWS}, "Concat"),
    "static": ({"key": _STAYS, "value": _STAYS}, "ScatterND"),
    "fused": ({"key": _GROWS, "value": _GROWS}, "GroupQueryAttention"),
    "cross": ({"cross_key": _STAYS, "cross_value": _STAYS}, "Identity"),
    "recurrent": ({"conv": ("n", 8, 3), "recurrent": _STATE}, "Mul"),
}


class NamedDecoder(NamedTuple):
    """A decoder, and what its values are.

    Attributes:
        model: The model.
        buffers: The inputs that are caches or states, each with its output.
        others: The inputs that are passed on and are no caches, each with its output.
    """

    model: ModelProto
    buffers: dict[str, str]
    others: dict[str, str]


@st.composite
def named_decoders(draw: st.DrawFn, without: str = "") -> NamedDecoder:
    """A decoder of two to four layers, perhaps with features and other values passed on."""
    namer = NAMERS[draw(st.sampled_from(sorted(NAMERS.keys() - {without})))]
    layers = draw(st.lists(st.sampled_from(sorted(LAYERS)), min_size=1, max_size=3))
    if set(layers) == {"cross"} or len(layers) == 1:  # a decoder has caches of its own
        layers.append("growing")  # and of one layer alone nobody knows which word counts layers
    has_features, has_table = draw(st.booleans()), draw(st.booleans())
    return build_named_decoder(namer, layers, has_features=has_features, has_table=has_table)


def build_named_decoder(
    namer: Namer, layers: list[str], *, has_features: bool = False, has_table: bool = False
) -> NamedDecoder:
    """Build a decoder.

    Args:
        namer: How its buffers are called.
        layers: The kinds of its layers.
        has_features: Whether it keeps the features of a picture.
        has_table: Whether it passes on a table that scales the queries, of other axes.
    """
    inputs = [info("ids", "n", "s", dtype=TensorProto.INT64)]
    outputs = [info("logits", "n", "s", 8)]
    nodes = [node("Gather", ["table", "ids"], ["h_0"])]
    buffers: dict[str, str] = {}
    others: dict[str, str] = {}
    if has_features:
        others["vision_embeds"] = "vision_embeds_RetainedState"
        inputs.append(info("vision_embeds", "n", "s", 8))
        outputs.append(info("vision_embeds_RetainedState", "n", "s", 8))
        nodes = [
            node("Gather", ["table", "ids"], ["words"]),
            node("Add", ["words", "vision_embeds"], ["h_0"]),
            node("Identity", ["vision_embeds"], ["vision_embeds_RetainedState"]),
        ]
    for number, kind in enumerate(layers):
        shapes, op_type = LAYERS[kind]
        names = {part: namer(part, number) for part in shapes}
        pairs = [(a, f"new_{b}" if a == b else b) for a, b in names.values()]
        buffers |= dict(pairs)
        for (name, output), shape in zip(pairs, shapes.values(), strict=True):
            inputs.append(info(name, *shape))
            outputs.append(info(output, *("t" if dim == "p" else dim for dim in shape)))
        nodes += _build_layer(number, op_type, pairs)
        nodes.append(node("Add", [f"h_{number}", f"out_{number}"], [f"h_{number + 1}"]))
    if has_table:
        others["scale"] = "scale_RetainedState"
        inputs.append(info("scale", 8))
        outputs.append(info("scale_RetainedState", 8))
        nodes += [
            node("Identity", ["scale"], ["scale_RetainedState"]),
            node("Mul", [f"h_{len(layers)}", "scale"], ["end"]),
        ]
    nodes.append(node("MatMul", ["end" if has_table else f"h_{len(layers)}", "w"], ["logits"]))
    weights = {"w": np.zeros((8, 8), "f"), "table": np.zeros((9, 8), "f"), "at": np.zeros(3, "q")}
    weights |= {"from": np.array([-3]), "to": np.array([1 << 62]), "axis": np.array([2])}
    graph = onnx.helper.make_graph(
        nodes,
        "main",
        inputs,
        outputs,
        [onnx.numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    opsets = [onnx.helper.make_opsetid("", 18), onnx.helper.make_opsetid("com.microsoft", 1)]
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return NamedDecoder(model, buffers, others)


def _build_layer(number: int, op_type: str, pairs: list[tuple[str, str]]) -> list[NodeProto]:
    """Build the nodes of a layer, which update its two buffers and read them."""
    (a, a_out), (b, b_out) = pairs
    q, k, v, read = (f"{name}_{number}" for name in ("q", "k", "v", "read"))
    nodes = [node("MatMul", [f"h_{number}", "w"], [name]) for name in (q, k, v)]
    if op_type == "GroupQueryAttention":
        fused = node(op_type, [q, k, v, a, b], [read, a_out, b_out])
        fused.domain = "com.microsoft"
        return [*nodes, fused, node("MatMul", [read, "w"], [f"out_{number}"])]
    if op_type == "Mul":
        nodes += [
            node("Sigmoid", [k], [f"gate_{number}"]),
            node("Mul", [b, f"gate_{number}"], [f"old_{number}"]),
            node("MatMul", [k, v], [f"new_{number}"]),
            node("Add", [f"old_{number}", f"new_{number}"], [b_out]),
            node("Concat", [a, k], [f"long_{number}"], axis=2),
            node("Slice", [f"long_{number}", "from", "to", "axis"], [a_out]),
        ]
    else:
        for name, output, new in ((a, a_out, k), (b, b_out, v)):
            if op_type == "Concat":
                nodes.append(node(op_type, [name, new], [output], axis=2))
            else:
                operands = [name, "at", new] if op_type == "ScatterND" else [name]
                nodes.append(node(op_type, operands, [output]))
    return [
        *nodes,
        node("Transpose", [a_out], [f"turned_{number}"]),
        node("MatMul", [q, f"turned_{number}"], [f"scores_{number}"]),
        node("Softmax", [f"scores_{number}"], [f"soft_{number}"]),
        node("MatMul", [f"soft_{number}", b_out], [read]),
        node("MatMul", [read, "w"], [f"out_{number}"]),
    ]
