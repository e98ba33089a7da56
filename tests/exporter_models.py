"""Build small models with the names, shapes and updates of other exporters; all of them run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy
from models import info, node
from onnx import (
    GraphProto,
    ModelProto,
    NodeProto,
    TensorProto,
    ValueInfoProto,
    helper,
    numpy_helper,
)

HEADS, HEAD = 2, 4
HUGGING_FACE = ("past_key_values.{layer}.{part}", "present.{layer}.{part}")
Dim = int | str


class Cache(NamedTuple):
    """A cache of a model.

    Attributes:
        input: The name of its input, if there is one.
        output: The name of its output, if there is one.
        shape: The shape of the input, or of an output alone.
        grown: The shape of an output that is longer.
        update: How the output is made: ``append``, ``inplace``, ``delta`` or ``once``.
        axis: The axis of the positions.
        dtype: What it holds.
    """

    input: str | None
    output: str | None
    shape: Sequence[Dim]
    grown: Sequence[Dim] = ()
    update: str = "append"
    axis: int = 2
    dtype: int = TensorProto.FLOAT


def build_model(caches: Iterable[Cache], *, new: Dim = "sequence_length") -> ModelProto:
    """A model that writes something made of its tokens to each cache."""
    tokens = info("input_ids", "batch_size", new, dtype=TensorProto.INT64)
    inputs, outputs = [tokens], [info("logits", "batch_size", new, HEAD)]
    # [batch, new] becomes [batch, heads, new, head].
    shape = numpy.array([1, HEADS, 1, HEAD], dtype=numpy.int64)
    weights = [
        numpy_helper.from_array(shape, "spread"),
        numpy_helper.from_array(numpy.array([1], dtype=numpy.int64), "axis_1"),
        numpy_helper.from_array(numpy.array([3], dtype=numpy.int64), "axis_3"),
    ]
    nodes = [
        node("Cast", ["input_ids"], ["ids"], to=TensorProto.FLOAT),
        node("Unsqueeze", ["ids", "axis_1"], ["with_heads"]),
        node("Unsqueeze", ["with_heads", "axis_3"], ["with_size"]),
        node("Expand", ["with_size", "spread"], ["x"]),
        node("ReduceSum", ["x", "axis_1"], ["hidden"], keepdims=0),
    ]
    terms = ["hidden"]
    for number, cache in enumerate(caches):
        if cache.input is not None:
            inputs.append(info(cache.input, *cache.shape, dtype=cache.dtype))
            nodes += _read(cache.input, f"read_{number}", cache.dtype)
            terms.append(f"read_{number}")
        if cache.output is not None:
            outputs.append(info(cache.output, *(cache.grown or cache.shape), dtype=cache.dtype))
            nodes += _write(cache, f"cache_{number}")
    nodes.append(node("Sum", terms, ["logits"]))
    graph = helper.make_graph(nodes, "main", inputs, outputs, weights)
    opsets = [helper.make_opsetid("", 18)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def _read(name: str, result: str, dtype: int) -> list[NodeProto]:
    """Nodes that make a number of a cache, so that what is fed counts."""
    if dtype == TensorProto.FLOAT:
        return [node("ReduceMean", [name], [result], keepdims=0)]
    return [
        node("Cast", [name], [f"{result}_float"], to=TensorProto.FLOAT),
        node("ReduceMean", [f"{result}_float"], [result], keepdims=0),
    ]


def _write(cache: Cache, prefix: str) -> list[NodeProto]:
    """Nodes that make the output of a cache."""
    assert cache.output is not None
    if cache.update == "inplace" or (cache.update == "once" and cache.input is not None):
        first = [node("ReduceMean", ["x"], [f"{prefix}_mean"], keepdims=0)]
        if cache.dtype != TensorProto.FLOAT:
            mean = [f"{prefix}_mean"], [f"{prefix}_cast"]
            first.append(node("Cast", *mean, to=cache.dtype))
        added = first[-1].output[0]
        return [*first, node("Add", [cache.input or "x", added], [cache.output])]
    values, nodes = "x", list[NodeProto]()
    if cache.update == "delta":  # [heads, batch, new, head], keys [heads, batch, head, new]
        order = [1, 0, 2, 3] if cache.axis == 2 else [1, 0, 3, 2]
        values = f"{prefix}_turned"
        nodes.append(node("Transpose", ["x"], [values], perm=order))
    if cache.input is None or cache.update == "delta":
        return [*nodes, node("Identity", [values], [cache.output])]
    return [*nodes, node("Concat", [cache.input, values], [cache.output], axis=cache.axis)]


def list_caches(
    names: tuple[str, str],
    layers: Iterable[int] = (0, 1),
    parts: Sequence[str] = ("key", "value"),
    **how: Any,
) -> list[Cache]:
    """Caches that grow, by the names of both sides with ``{layer}`` and ``{part}``."""
    past, new = how.pop("past", "past_sequence_length"), how.pop("new", "sequence_length")
    how.setdefault("shape", ("batch_size", HEADS, past, HEAD))
    if how.setdefault("update", "append") == "append":
        how.setdefault("grown", ("batch_size", HEADS, f"{past} + {new}", HEAD))
    return [
        Cache(*(name.format(layer=layer, part=part) for name in names), **how)
        for layer in layers
        for part in parts
    ]


def build_decoder(names: tuple[str, str] = HUGGING_FACE) -> ModelProto:
    """A decoder of two layers, as Optimum exports one."""
    return build_model(list_caches(names))


def build_static_decoder() -> ModelProto:
    """A decoder as transformers' own exporter names one with a static cache, without counters."""
    names = (
        "input.past_key_values.layers.{layer}.{part}",
        "output.past_key_values.layers.{layer}.{part}",
    )
    shape = ("batch_size", HEADS, "ctx_len", HEAD)
    return build_model(list_caches(names, parts=["keys", "values"], update="inplace", shape=shape))


def build_merged_decoder() -> ModelProto:
    """An encoder-decoder's decoder of one layer, the first step's model and the others' in one.

    As Optimum merges them: the branches' outputs have the names of the outer ones, and the
    cache branch has dummies for what the first step made of the encoder's output.
    """
    past = ("batch_size", HEADS, "past_decoder_sequence_length", HEAD)
    grown = (*past[:2], "past_decoder_sequence_length + decoder_sequence_length", HEAD)
    cross = ("batch_size", HEADS, "encoder_sequence_length", HEAD)
    own = list_caches(
        ("past_key_values.{layer}.decoder.{part}", "present.{layer}.decoder.{part}"),
        [0],
        shape=past,
        grown=grown,
    )
    other = list_caches(
        ("past_key_values.{layer}.encoder.{part}", "present.{layer}.encoder.{part}"),
        [0],
        shape=cross,
        update="once",
    )
    model = build_model([], new="decoder_sequence_length")
    graph = model.graph
    hidden = ("batch_size", "encoder_sequence_length", HEAD)
    graph.input.append(info("encoder_hidden_states", *hidden))
    for cache in (*own, *other):
        graph.input.append(info(str(cache.input), *cache.shape))
        graph.output.append(info(str(cache.output), *(cache.grown or cache.shape)))
    graph.input.append(info("use_cache_branch", 1, dtype=TensorProto.BOOL))
    spread = numpy_helper.from_array(numpy.array([1, HEADS, 1, 1], dtype=numpy.int64), "spread_1")
    graph.initializer.append(spread)
    graph.node[-1].output[0] = "first_logits"
    names = ["logits", *(str(cache.output) for cache in (*own, *other))]
    graph.node.append(
        node(
            "If",
            ["use_cache_branch"],
            names,
            then_branch=_build_cache_branch(own, other),
            else_branch=_build_first_branch(own, other),
        )
    )
    return model


def _build_cache_branch(own: Sequence[Cache], other: Sequence[Cache]) -> GraphProto:
    nodes, terms = list[NodeProto](), ["first_logits"]
    for number, cache in enumerate((*own, *other)):
        nodes += _read(str(cache.input), f"then_{number}", TensorProto.FLOAT)
        terms.append(f"then_{number}")
    for cache in own:
        nodes.append(node("Concat", [str(cache.input), "x"], [str(cache.output)], axis=2))
    dummy = helper.make_tensor("dummy", TensorProto.FLOAT, (0, HEADS, 1, HEAD), [])
    nodes += (node("Constant", [], [str(cache.output)], value=dummy) for cache in other)
    nodes.append(node("Sum", terms, ["logits"]))
    return _build_branch("then", nodes, own, other)


def _build_first_branch(own: Sequence[Cache], other: Sequence[Cache]) -> GraphProto:
    nodes = [
        node("Unsqueeze", ["encoder_hidden_states", "axis_1"], ["hidden_with_heads"]),
        node("Expand", ["hidden_with_heads", "spread_1"], ["encoder_heads"]),
        node("Identity", ["first_logits"], ["logits"]),
    ]
    nodes += (node("Identity", ["x"], [str(cache.output)]) for cache in own)
    nodes += (node("Identity", ["encoder_heads"], [str(cache.output)]) for cache in other)
    return _build_branch("else", nodes, own, other)


def _build_branch(
    name: str, nodes: Sequence[NodeProto], own: Sequence[Cache], other: Sequence[Cache]
) -> GraphProto:
    outputs = [info("logits", "batch_size", "decoder_sequence_length", HEAD)]
    outputs += (info(str(cache.output), *(cache.grown or cache.shape)) for cache in (*own, *other))
    for value in outputs:  # a dummy has other sizes
        for dim in value.type.tensor_type.shape.dim:
            dim.Clear()
    return helper.make_graph(nodes, name, [], outputs)


def build_qnn_decoder(window_layers: Iterable[int] = ()) -> ModelProto:
    """A decoder whose outputs have the new positions only, keys transposed."""
    window_layers = set(window_layers)
    caches = []
    for layer in (0, 1):
        prefix, length = ("swa", 8) if layer in window_layers else ("past", 16)
        names = f"{prefix}_{{part}}_{layer}_in", f"{prefix}_{{part}}_{layer}_out"
        for part, shape, grown, axis in (
            ("key", (HEADS, 1, HEAD, length), (HEADS, 1, HEAD, 4), 3),
            ("value", (HEADS, 1, length, HEAD), (HEADS, 1, 4, HEAD), 2),
        ):
            sides = [name.format(part=part) for name in names]
            caches.append(Cache(*sides, shape, grown, "delta", axis))
    model = build_model(caches, new=4)
    for value in (*model.graph.input[:1], *model.graph.output[:1]):
        _set_dim(value, 0, 1)
    return model


def _set_dim(value: ValueInfoProto, axis: int, size: int) -> None:
    dim = value.type.tensor_type.shape.dim[axis]
    dim.Clear()
    dim.dim_value = size
