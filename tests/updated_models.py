"""Build models of one layer, whose key is updated by given nodes, and its value in place."""

from __future__ import annotations

from collections.abc import Mapping

import onnx.parser
from onnx import GraphProto, ModelProto

CACHE = "[batch_size,2,ctx_len,4]"
"""The shape of a cache that is retained in place."""
GRAPH_COMMANDS = (
    ("verify", "m.onnx"),
    ("inspect", "m.onnx"),
    ("verify", "m.onnx", "--target", "vllm-qaic"),
    ("compare", "m.onnx", "m.onnx"),
    ("m.onnx", "--target", "vllm-qaic", "-n"),
    ("m.onnx", "--prefix", "vllmKvCache", "--verify", "-n"),
)
"""All commands that follow the graph of a model."""
_NAMES = {
    "k": "past_key.0_vllmKvCache",
    "v": "past_value.0_vllmKvCache",
    "k_out": "past_key.0_vllmKvCache_RetainedState",
    "v_out": "past_value.0_vllmKvCache_RetainedState",
}
"""The names of the buffers, as vllm-qaic selects them, by those in the nodes."""
_TEMPLATE = """
    <ir_version: 10, opset_import: ["": {opset}, "local": 1]>
    main (int64[batch_size,seq_len] position_ids, float[batch_size,seq_len,8] h, float{into} k,
        float{cache} v {inputs}) => (float[batch_size,seq_len,8] logits, float{out} k_out,
        float{cache} v_out)
    <float[8,8] w = {{{weights}}}, int64[4] heads = {{0, -1, 2, 4}}, int64[1] axis1 = {{1}},
        float[1] zero = {{0}}, int64[2] inner = {{1, 3}} {constants}> {{
        m = MatMul(h, w) parted = Reshape(m, heads) new = Transpose<perm = [0, 2, 1, 3]>(parted)
        at = Unsqueeze(position_ids, inner) like = Shape(new) i = Expand(at, like)
        v_out = ScatterElements<axis = 2>(v, i, new)
        {nodes}
        logits = MatMul(h, w)
    }} {functions}
"""


def build_updated_model(
    nodes: str,
    *,
    into: str = CACHE,
    out: str = "",
    inputs: str = "",
    constants: str = "",
    functions: str = "",
    opset: int = 18,
    names: Mapping[str, str] = _NAMES,
) -> ModelProto:
    """Build a model by nodes in ONNX text, which make `k_out` of `k`, and may read others.

    Those are the new keys ``new``, and ``i``, the positions of each of their elements.

    Args:
        nodes: The nodes.
        into: The shape of `k`; that of `v` is `CACHE`.
        out: The shape of `k_out`; that of its input by default.
        inputs: Further inputs of the graph.
        constants: Further initializers.
        functions: Local functions, of the domain `local`.
        opset: The version of ONNX's own operators.
        names: The names of the buffers in the model, by those in the nodes.
    """
    text = _TEMPLATE.format(
        nodes=nodes,
        into=into,
        cache=CACHE,
        out=out or into,
        inputs=f", {inputs}" if inputs else "",
        constants=f", {constants}" if constants else "",
        weights=", ".join(["0.5"] * 64),
        opset=opset,
        functions=functions,
    )
    model = onnx.parser.parse_model(text)
    _rename_values(model.graph, names)
    for value in (*model.graph.input, *model.graph.output):
        value.name = names.get(value.name, value.name)
    return model


def _rename_values(graph: GraphProto, names: Mapping[str, str]) -> None:
    for node in graph.node:
        for values in (node.input, node.output):
            values[:] = [names.get(name, name) for name in values]
        for attribute in node.attribute:
            _rename_values(attribute.g, names)
