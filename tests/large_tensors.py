"""Tensors with much data, and every place of a model where one can be."""

from __future__ import annotations

import models
from models import graph, node
from onnx import FunctionProto, ModelProto, SparseTensorProto, TensorProto
from onnx.helper import make_attribute, make_function, make_node, make_opsetid


def weight(name: str = "w", count: int = 1000, **data: object) -> TensorProto:
    """A weight, of raw floats if nothing else is said."""
    if not data:
        data = {"raw_data": bytes(4 * count)}
    return TensorProto(name=name, data_type=data.pop("data_type", 1), dims=[count], **data)


def in_attribute(model: ModelProto) -> None:
    model.graph.node.append(make_node("Constant", [], ["c"], value=weight()))


def in_tensors(model: ModelProto) -> None:
    model.graph.node.append(make_node("Far", [], ["c"], domain="far", many=[weight(), weight()]))


def in_subgraph(model: ModelProto) -> None:
    body = graph(node("Identity", ["w"], ["y"]))
    body.initializer.append(weight())
    model.graph.node.append(models.branch(graph(models.branch(body, "inner"))))


def in_function(model: ModelProto) -> None:
    nodes = [make_node("Constant", [], ["y"], value=weight())]
    model.functions.append(make_function("local", "f", [], ["y"], nodes, [make_opsetid("", 18)]))


def in_default(model: ModelProto) -> None:
    model.functions.append(FunctionProto(name="f", domain="local"))
    model.functions[0].attribute_proto.append(make_attribute("a", weight()))


def in_sparse(model: ModelProto) -> None:
    indices = weight("", 2000, data_type=7, int64_data=range(2000))
    sparse = SparseTensorProto(values=weight(count=2000), indices=indices, dims=[5000])
    model.graph.sparse_initializer.append(sparse)
    model.graph.node.append(make_node("Constant", [], ["c"], sparse_value=sparse))


def in_training(model: ModelProto) -> None:
    model.training_info.add().algorithm.initializer.append(weight())


PLACES = (in_attribute, in_tensors, in_subgraph, in_function, in_default, in_sparse, in_training)
