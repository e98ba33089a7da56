"""Models that differ only in names that nothing outside of them uses, and near misses."""

from __future__ import annotations

from collections.abc import Callable

import onnx
import onnx.helper
import pytest
from conftest import FIXTURES
from models import branch, every, graph, info, node, tensor
from onnx import FunctionProto, GraphProto, ModelProto, NodeProto

from onnxkvrename.model.protobuf import ByteSource
from onnxkvrename.verification.inner_names import differ_only_in_inner_names

Change = Callable[[ModelProto], object]


def export() -> ModelProto:
    """One layer function for two layers, a graph in each body, and weights."""
    model = onnx.load(FIXTURES / "VLLM" / "functions.onnx")
    body = branch(graph(node("Add", ["x", "hidden"], ["sum"]), node("Neg", ["sum"], ["kept"])))
    body.input[0] = "slots"
    model.functions[0].node.append(body)
    model.functions[0].node.append(node("Helper", ["hidden"], ["helped"], domain="local"))
    opsets = [onnx.helper.make_opsetid("", 18)]
    helper = onnx.helper.make_function(
        "local", "Helper", ["a"], ["b"], [node("Neg", "a", "b")], opsets
    )
    model.functions.append(helper)
    model.functions[0].node.append(node("Sub", ["lost", "found"], ["unread"]))
    model.opset_import.add(domain="local", version=1)
    model.graph.value_info.append(info("hidden_1"))
    model.graph.initializer.append(tensor("unused", 1.0))
    return model


def equal(first: ModelProto, second: ModelProto) -> bool:
    sources = (ByteSource.from_bytes(model.SerializeToString()) for model in (first, second))
    return differ_only_in_inner_names(*sources)


def renumber(model: ModelProto, name: Callable[[str], str]) -> None:
    """Give every inner value another name, by other means than the program.

    A weight that nothing uses keeps its own: nothing shows which one it is.
    """
    ends = {value.name for value in (*model.graph.input, *model.graph.output)} | {"", "unused"}
    values = (onnx.ValueInfoProto, onnx.TensorProto)
    for root in (model.graph, *model.functions):
        outer = ends if isinstance(root, GraphProto) else {""}
        for message in every(root):
            lists = [message.input, message.output] if isinstance(message, NodeProto) else []
            if isinstance(message, FunctionProto):
                lists += [message.input, message.output]
            for names in lists:
                names[:] = [each if each in outer else name(each) for each in names]
            if isinstance(message, values) and message.name not in outer:
                message.name = name(message.name)


def rename_function(model: ModelProto, old: str, new: str) -> None:
    for message in every(model):
        if isinstance(message, FunctionProto) and message.name == old:
            message.name = new
        if isinstance(message, NodeProto) and message.op_type == old:
            message.op_type = new


def add_notes(model: ModelProto) -> None:
    for message in every(model.graph):
        if isinstance(message, NodeProto):
            message.metadata_props.add(key="pkg.torch.onnx.original_node_name", value="past_key.0")
            message.name, message.doc_string = f"n{len(message.name)}", "written later"
    model.graph.name = "other"


def reorder(model: ModelProto) -> None:
    functions = list(model.functions)
    model.ClearField("functions")
    model.functions.extend(reversed(functions))
    weights = list(model.graph.initializer)
    model.graph.ClearField("initializer")
    model.graph.initializer.extend(reversed(weights))


SAME: dict[str, Change] = {
    "nothing": lambda m: None,
    "numbers of values": lambda m: renumber(m, lambda name: f"onnx::{len(name)}_{name[::-1]}"),
    "the layer of a function": lambda m: renumber(
        m, lambda name: name.replace("past_key.1_VLLM", "past_key.0")
    ),
    "names that change places": lambda m: renumber(
        m, lambda name: {"hidden_0": "hidden_1", "hidden_1": "hidden_0"}.get(name, name)
    ),
    "a function's name": lambda m: rename_function(m, "TinyDecoderLayer", "TinyDecoderLayer.1"),
    "notes": add_notes,
    "the order of what has names": reorder,
}


@pytest.mark.parametrize("change", SAME.values(), ids=SAME.keys())
def test_models_with_other_inner_names_are_the_same(change: Change) -> None:
    other = export()
    change(other)
    assert equal(export(), other)
    assert equal(other, export())


def swap(names: onnx.NodeProto | FunctionProto, first: int, second: int) -> None:
    values = names.input
    values[first], values[second] = values[second], values[first]


def call(model: ModelProto) -> NodeProto:
    return next(each for each in model.graph.node if each.op_type == "TinyDecoderLayer")


def find(model: ModelProto, op_type: str) -> NodeProto:
    return next(each for each in model.functions[0].node if each.op_type == op_type)


def merge(model: ModelProto) -> None:
    """Let one value take the place of another one, under a name of its own."""
    for each in model.functions[0].node:
        each.input[:] = ["value_scale" if name == "key_scale" else name for name in each.input]


OTHER: dict[str, Change] = {
    "a graph input": lambda m: setattr(m.graph.input[2], "name", "past_key.9_VLLM"),
    "graph outputs in each other's place": lambda m: m.graph.output.reverse(),
    "key and value of a call": lambda m: swap(call(m), 2, 3),
    "key and value of a function": lambda m: swap(m.functions[0], 2, 3),
    "operands in a function": lambda m: swap(find(m, "MatMul"), 0, 1),
    "one value instead of another": merge,
    "a value in a graph in a function": lambda m: (
        find(m, "If").attribute[-1].g.node[0].input.__setitem__(0, "slots")
    ),
    "an attribute": lambda m: setattr(m.functions[0].node[4].attribute[0], "i", 1),
    "a weight": lambda m: m.graph.initializer[-1].float_data.__setitem__(0, 2.0),
    "a node that is missing": lambda m: m.functions[0].node.pop(),
    "a function that does something else": lambda m: setattr(
        m.functions[1].node[0], "op_type", "Abs"
    ),
    "who made it": lambda m: setattr(m, "producer_name", "tool"),
    "an unused weight with the name of another": lambda m: setattr(
        m.graph.initializer[-1], "name", "hidden_1"
    ),
    "two values that nothing makes as one": lambda m: find(m, "Sub").input.__setitem__(
        1, find(m, "Sub").input[0]
    ),
}


@pytest.mark.parametrize("change", OTHER.values(), ids=OTHER.keys())
def test_models_that_differ_in_more_are_not(change: Change) -> None:
    other = export()
    change(other)
    assert not equal(export(), other)
    assert not equal(other, export())
    renumber(other, lambda name: f"{name}_")
    assert not equal(export(), other)


def test_functions_may_call_each_other_without_end() -> None:
    model = export()
    rename_function(model, "Helper", "TinyDecoderLayer.1")
    model.functions[1].node[0].CopyFrom(node("TinyDecoderLayer.1", ["a"], ["b"], domain="local"))
    assert equal(model, model)
    assert not equal(model, export())


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.graph.quantization_annotation.add(tensor_name="hidden_0"),
        lambda m: m.training_info.add(),
        lambda m: m.graph.node[0].device_configurations.add(configuration_id="a"),
    ],
    ids=["scales", "training", "shards"],
)
def test_names_in_places_that_are_not_followed_are_not_said_to_be_equal(change: Change) -> None:
    model = export()
    change(model)
    assert not equal(model, model)
