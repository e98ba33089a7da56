"""An independent judge of renamed files: onnx-graphsurgeon, which knows objects, not names.

It imports a model into tensors that nodes share, so it renames by giving an object another name:
whatever refers to it follows. Our file, read and written again by the same library, has to be
the same model. No module of the program is used: the names come from the JSON it prints.

What the library loses is lost on both sides: dimensions named after a buffer keep their names in
its result, so symbols are compared by position only; doc strings, metadata, unknown fields,
``value_info`` of what nothing uses, types of tensors in a body that it does not infer, and the
order of what is unordered. The contents of weights are not compared here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import pytest
from contract.matrix import build_matrix
from contract.observe import ROOTS, call, find_source
from tiers import full

gs = pytest.importorskip("onnx_graphsurgeon")

pytestmark = pytest.mark.filterwarnings("ignore")
INSIDE = re.compile(
    r"((?:past_key|past_value|compressed_kv|k_pe)\.[0-9]+)(_InternalRetainedState)?"
)
"""What QEfficient calls a buffer within the function of a layer, whichever layer that is."""
WITHOUT_BUFFERS = ("plain/vlm_dual/encoder.onnx",)
Wiring = dict[str, Any]


def list_cases() -> list[Any]:
    """List every fixture without a token; every real export in the full tier."""
    cases = []
    for group, rows in build_matrix().items():
        for row in rows:
            source = row.name.removeprefix(f"{group}/rename ")
            if source != row.name and source.endswith(".onnx") and "VLLM" not in source:
                name = f"{group}/{source}" if group in ROOTS else source
                cases.append(pytest.param(name, marks=[full] if group in ROOTS else []))
    return cases


def walk_graphs(graph: Any) -> Iterator[Any]:
    """Walk a graph, the bodies in it and the functions it calls."""
    yield graph
    for inner in [*graph.subgraphs(), *getattr(graph, "functions", [])]:
        if inner is not graph:
            yield from walk_graphs(inner)


def collect_tensors(graph: Any) -> dict[str, Any]:
    """Collect the tensors of the main graph by name, each one object."""
    tensors = graph.tensors()
    for value in (*graph.inputs, *graph.outputs):
        assert tensors.setdefault(value.name, value) is value
    return dict(tensors)


def rename_by_object(path: Path, names: dict[str, str]) -> Wiring:
    """Rename tensors as objects, those of functions too, and describe what is exported then."""
    graph = gs.import_onnx(load(path))
    tensors = collect_tensors(graph)
    missing = sorted(names.keys() - tensors.keys())
    assert missing == [], "renamed, and no tensor of the main graph"
    chosen = [(tensors[old], new) for old, new in names.items()]
    for function in graph.functions if names else ():
        found = {name: INSIDE.fullmatch(name) for name in collect_tensors(function)}
        inner = {name: f"{m[1]}_VLLM{m[2] or ''}" for name, m in found.items() if m}
        chosen += [(collect_tensors(function)[old], new) for old, new in inner.items()]
    for tensor, new in chosen:
        tensor.name = new
    return describe(gs.export_onnx(graph))


def pass_through(path: Path) -> Wiring:
    """Describe a model as the library exports it when nothing is renamed."""
    return describe(gs.export_onnx(gs.import_onnx(load(path))))


def load(path: Path) -> onnx.ModelProto:
    """Load a model without the weights that lie beside it."""
    model = onnx.load(path, load_external_data=False)
    for tensor in walk_weights(model.graph):
        if tensor.data_location == onnx.TensorProto.EXTERNAL:  # its place is no name
            tensor.ClearField("external_data")
            tensor.ClearField("data_location")
            tensor.ClearField("dims")
            tensor.ClearField("raw_data")
            tensor.dims.append(0)
    return model


def walk_weights(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    """Walk the initializers of a graph and of the bodies in it."""
    yield from graph.initializer
    for node in graph.node:
        for attribute in node.attribute:
            for body in [attribute.g, *attribute.graphs]:
                yield from walk_weights(body)


def describe(model: onnx.ModelProto) -> Wiring:
    """Describe which names an exported model has, and how they are wired."""
    return {
        "graph": describe_graph(model.graph),
        "functions": sorted(
            (item.domain, item.name, list(item.input), list(item.output), describe_nodes(item.node))
            for item in model.functions
        ),
    }


def describe_graph(graph: onnx.GraphProto) -> Wiring:
    """Describe a graph: its ends in order, its weights, its nodes, and the bodies in them."""
    return {
        "inputs": [describe_end(value) for value in graph.input],
        "outputs": [describe_end(value) for value in graph.output],
        "weights": sorted(tensor.name for tensor in graph.initializer),
        "nodes": describe_nodes(graph.node),
    }


def describe_end(value: onnx.ValueInfoProto) -> tuple[str, int, list[int | None]]:
    """Describe an input or output: name, type, and sizes, where they are numbers."""
    kind = value.type.tensor_type
    sizes = [dim.dim_value if dim.HasField("dim_value") else None for dim in kind.shape.dim]
    return value.name, kind.elem_type, sizes


def describe_nodes(nodes: Any) -> list[Any]:
    """Describe nodes in order: operator, what they read and write, and the bodies they have."""
    return [
        (
            node.op_type,
            list(node.input),
            list(node.output),
            [
                (attribute.name, describe_graph(body))
                for attribute in node.attribute
                for body in ([attribute.g] if attribute.HasField("g") else attribute.graphs)
            ],
        )
        for node in nodes
    ]


def rename(source: Path, directory: Path, *options: str) -> tuple[dict[str, str], Path]:
    """Rename a copy of a model and return the names that the JSON says, and the result."""
    target = directory / "result" / source.name
    answer = call(
        [str(source), *options, "-o", str(target), "--sidecars", "off", "--format", "json"]
    )
    document = json.loads(answer.out)
    names: dict[str, str] = {}
    for model in document["models"]:
        for pair in model["pairs"]:
            ends = (pair["input"], pair["output"])
            names |= {end["old"]: end["new"] for end in ends if end and not pair["scope"]}
    return {old: new for old, new in names.items() if old != new}, target


@pytest.mark.parametrize("name", list_cases())
def test_a_renamed_model_is_wired_as_one_renamed_by_object(name: str, tmp_path: Path) -> None:
    source = find_source(name)
    names, target = rename(source, tmp_path, "--prefix", "VLLM")
    if not target.is_file():  # without names that a profile knows, rules of the graph have to do
        rules = tmp_path / "rules.toml"
        rules.write_text(call(["pairs", str(source), "--as", "rules"]).out, "utf-8")
        names, target = rename(source, tmp_path, "--prefix", "VLLM", "--rules", str(rules))
    if not target.is_file() or not names:
        assert name in WITHOUT_BUFFERS or name.startswith("exports")
        pytest.skip("nothing to rename in this model")
    assert pass_through(target) == rename_by_object(source, names)


@pytest.mark.parametrize("name", ["plain/control_flow.onnx", "plain/functions.onnx"])
def test_a_swapped_pair_and_a_name_left_in_a_body_are_noticed(name: str, tmp_path: Path) -> None:
    source = find_source(name)
    names, target = rename(source, tmp_path, "--prefix", "VLLM")
    expected = rename_by_object(source, names)
    one, other, *_ = names
    swapped = {**names, one: names[other], other: names[one]}
    assert rename_by_object(source, swapped) != expected

    left = onnx.load(target)
    change_one_name(left, {new: old for old, new in names.items()})
    onnx.save(left, target)
    assert pass_through(target) != expected


def change_one_name(model: onnx.ModelProto, names: dict[str, str]) -> None:
    """Change one name in one place, in a body where there is one."""
    bodies = [
        node
        for outer in model.graph.node
        for attribute in outer.attribute
        for node in attribute.g.node
    ]
    inside = [node for function in model.functions for node in function.node]
    for node in [*inside, *bodies, *model.graph.node]:
        for index, name in enumerate(node.input):
            if name in names:
                node.input[index] = names[name]
                return
    raise AssertionError("no name to change")
