"""Small models with one feature each: does a renamer leave it as it was?

`features.py DIR` writes them, and `features.json`, which says what each is.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import onnx
from onnx import FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto
from onnx.helper import (
    make_attribute,
    make_function,
    make_graph,
    make_model,
    make_node,
    make_opsetid,
    make_tensor,
    make_tensor_value_info,
    make_value_info,
)
from protowire import record

KEY, VALUE = "past_key.0", "past_value.0"
KEY_OUT, VALUE_OUT = f"{KEY}_RetainedState", f"{VALUE}_RetainedState"
SHAPE = (1, 2, 8, 4)


def tensor_info(name: str) -> ValueInfoProto:
    return make_tensor_value_info(name, TensorProto.FLOAT, SHAPE)


def plain(
    extra: tuple[NodeProto, ...] = (), functions: tuple[FunctionProto, ...] = ()
) -> ModelProto:
    """Two buffers, written and read again; `extra` nodes come last."""
    nodes = [
        make_node("Add", [KEY, "x"], [KEY_OUT], name="write_key"),
        make_node("Add", [VALUE, "x"], [VALUE_OUT], name="write_value"),
        make_node("Mul", [KEY_OUT, VALUE_OUT], ["logits"], name="read"),
        *extra,
    ]
    inputs = [tensor_info(name) for name in ("x", KEY, VALUE)]
    outputs = [tensor_info(name) for name in ("logits", KEY_OUT, VALUE_OUT)]
    outputs += [tensor_info(node.output[0]) for node in extra]
    opsets = [make_opsetid("", 18), make_opsetid("local", 1)]
    graph = make_graph(nodes, "main", inputs, outputs)
    return make_model(graph, opset_imports=opsets, ir_version=10, functions=functions)


def value_info() -> ModelProto:
    model = plain()
    model.graph.value_info.extend([tensor_info(KEY), tensor_info(KEY_OUT)])
    return model


def subgraph() -> ModelProto:
    def branch(name: str, source: str) -> GraphProto:
        return make_graph([make_node("Identity", [source], [name])], name, [], [tensor_info(name)])

    choice = make_node(
        "If",
        ["flag"],
        ["chosen"],
        then_branch=branch("then", KEY),
        else_branch=branch("else", KEY_OUT),
    )
    model = plain((choice,))
    model.graph.input.append(make_tensor_value_info("flag", TensorProto.BOOL, ()))
    return model


def formals() -> ModelProto:
    """A local function whose own parameters are called like buffers."""
    body = [make_node("Add", [KEY, "x"], [f"{KEY}_InternalRetainedState"])]
    layer = make_function(
        "local", "Layer", [KEY, "x"], [f"{KEY}_InternalRetainedState"], body, [make_opsetid("", 18)]
    )
    return plain((make_node("Layer", ["x", "x"], ["y"], domain="local"),), (layer,))


def overloads() -> ModelProto:
    functions = []
    for overload, kind in (("add", "Add"), ("mul", "Mul")):
        body = [make_node(kind, ["a", "a"], ["b"])]
        functions.append(
            make_function(
                "local", "F", ["a"], ["b"], body, [make_opsetid("", 18)], overload=overload
            )
        )
    calls = tuple(
        make_node("F", ["x"], [f"y_{name}"], domain="local", overload=name)
        for name in ("add", "mul")
    )
    return plain(calls, tuple(functions))


def quantization() -> ModelProto:
    model = plain()
    model.graph.initializer.append(make_tensor("scale", TensorProto.FLOAT, (), (0.5,)))
    annotation = model.graph.quantization_annotation.add(tensor_name=KEY_OUT)
    annotation.quant_parameter_tensor_names.add(key="SCALE_TENSOR", value="scale")
    return model


def metadata() -> ModelProto:
    model = plain()
    for place in (model, model.graph, model.graph.node[0], model.graph.input[1]):
        place.metadata_props.add(key="name", value=KEY)
    return model


def doc_strings() -> ModelProto:
    model = plain()
    for place in (model, model.graph, model.graph.node[0], model.graph.input[1]):
        place.doc_string = f"writes {KEY}"
    return model


def unknown_field() -> ModelProto:
    """As a newer ONNX would write it."""
    model = plain()
    for place in (model, model.graph, model.graph.node[0]):
        place.MergeFromString(record(500, b"from a newer version"))
    return model


def sparse_initializer() -> ModelProto:
    model = plain((make_node("Add", ["x", "sparse"], ["y"]),))
    values = make_tensor("sparse", TensorProto.FLOAT, (1,), (2.0,))
    indices = make_tensor("", TensorProto.INT64, (1,), (3,))
    model.graph.sparse_initializer.append(onnx.helper.make_sparse_tensor(values, indices, (4,)))
    return model


def denotation() -> ModelProto:
    model = plain()
    for info in (model.graph.input[1], model.graph.output[1]):
        info.type.denotation = "TENSOR"
        info.type.tensor_type.shape.dim[0].denotation = "DATA_BATCH"
    return model


def default_value() -> ModelProto:
    """The cache starts from an initializer under the input's name."""
    model = plain()
    model.graph.initializer.append(make_tensor(KEY, TensorProto.FLOAT, SHAPE, [0.5] * 64))
    return model


def optional_input() -> ModelProto:
    model = plain((make_node("OptionalHasElement", ["maybe"], ["given"]),))
    kind = onnx.helper.make_optional_type_proto(tensor_info("x").type)
    model.graph.input.append(make_value_info("maybe", kind))
    model.graph.output[-1].CopyFrom(make_tensor_value_info("given", TensorProto.BOOL, ()))
    return model


def odd_attributes() -> ModelProto:
    """A byte string that is not UTF-8 and an empty list, on a node of another domain."""
    node = make_node("Opaque", ["x"], ["y"], domain="local")
    node.attribute.append(make_attribute("blob", b"\xff\xfe\x00"))
    node.attribute.append(make_attribute("none", [], attr_type=onnx.AttributeProto.INTS))
    return plain((node,))


def collision() -> ModelProto:
    """A new name is already in use: to be refused, or two values become one."""
    return plain((make_node("Identity", ["x"], [f"{KEY}_VLLM"]),))


FEATURES: dict[str, tuple[Callable[[], ModelProto], str]] = {
    "value_info": (value_info, "value_info of a buffer"),
    "subgraph": (subgraph, "buffers read inside an If"),
    "formals": (formals, "function parameters called like buffers"),
    "overloads": (overloads, "function overloads"),
    "quantization": (quantization, "quantization annotation of a buffer"),
    "metadata": (metadata, "metadata at four levels"),
    "doc_strings": (doc_strings, "doc strings at four levels"),
    "unknown_field": (unknown_field, "fields of a newer ONNX"),
    "sparse": (sparse_initializer, "sparse initializer"),
    "denotation": (denotation, "type and dimension denotations"),
    "default_value": (default_value, "default value of a KV input"),
    "optional_input": (optional_input, "optional input"),
    "odd_attributes": (odd_attributes, "bytes and empty lists as attributes"),
    "collision": (collision, "new name already in use: must be refused"),
}
REFUSED = ("collision",)


def main(directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    listing = []
    for name, (make, title) in FEATURES.items():
        path = directory / f"{name}.onnx"
        path.write_bytes(make().SerializeToString())
        onnx.checker.check_model(path)
        listing.append({"name": name, "title": title, "refuse": name in REFUSED})
    (directory / "features.json").write_text(json.dumps(listing))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
