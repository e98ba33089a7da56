"""Properties of any model, intact or damaged."""

from __future__ import annotations

import contextlib
from pathlib import Path

import onnx.helper
import pytest
from conftest import Sample
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st
from models import (
    BROKEN,
    FORMS,
    KEY,
    KEY_OUT,
    decoder,
    every,
    field,
    info,
    node,
    patched,
    saved,
    sparse,
    tensor,
)
from onnx import GraphProto, ModelProto, NodeProto

from onnxkvrename import KvRenameError, load_rules, rename
from onnxkvrename.model.file import splice_payloads
from onnxkvrename.model.occurrences import find_occurrences
from onnxkvrename.model.proto_reader import read_signature
from onnxkvrename.model.protobuf import ByteSource, Span
from onnxkvrename.rules.checks import check_model
from onnxkvrename.rules.plan import TokenChange, build_rename_plan, rename_symbols

RULES, WISH = load_rules(), TokenChange("VLLM")


def spliced(raw: bytes) -> bytes | None:
    """Rename a model in memory; return ``None`` if findings prevent it."""
    source = ByteSource.from_bytes(raw)
    signature = read_signature(source)
    plan = build_rename_plan(signature, RULES, WISH)
    survey = find_occurrences(source, {*plan.name_map, *plan.name_map.values()})
    uses = survey.build_name_uses(plan.name_map)
    symbols = rename_symbols(uses.symbols, uses.producer_op_types, plan)
    if any(f.severity == "error" for f in check_model(signature, plan, uses)):
        return None
    pieces = splice_payloads(source, survey.build_edits(plan.name_map, symbols))
    return b"".join(raw[p.offset :][: p.size] if isinstance(p, Span) else p for p in pieces)


# Whole models

FEWER = settings(max_examples=settings().max_examples // 4)
"""Models take long to draw."""

near = st.one_of(st.integers(0, 20), st.integers(95, 125), st.integers(4_000, 4_040))
scopes = near.map(lambda size: "7" * size + "/" if size else "")


def _nodes(draw: st.DrawFn, names: list[str], made: list[str], depth: int) -> list[NodeProto]:
    """Nodes that read some of ``names`` and make some of ``made``; some hold graphs."""
    nodes = []
    for _ in range(draw(st.integers(0, 3))):
        reads = draw(st.lists(st.sampled_from(names), max_size=3))
        makes = draw(st.lists(st.sampled_from(made), max_size=2, unique=True))
        nodes.append(node(draw(st.sampled_from(["Add", "If"])), reads, makes, name=KEY))
        for number in range(draw(st.integers(0, 3 - depth))):
            inner = GraphProto(node=_nodes(draw, names, [*made, *names], depth + 1))
            for values in (inner.input, inner.output, inner.value_info):
                values.extend(info(name) for name in draw(st.lists(st.sampled_from(names))))
            nodes[-1].attribute.append(onnx.helper.make_attribute(f"body{number}", inner))
    return nodes


@st.composite
def models(draw: st.DrawFn) -> ModelProto:
    """A model with buffers in any scope of names, read, hidden and spoken of anywhere."""
    scope, layers = draw(scopes), draw(st.integers(1, 3))
    buffers = [
        f"{scope}past_{part}.{layer}" for layer in range(layers) for part in ("key", "value")
    ]
    outputs = [f"{name}_RetainedState" for name in buffers]
    names = [*buffers, *outputs, "x", f"{buffers[0]}0", f"{scope}past_key"]
    main = GraphProto(name=KEY, input=map(info, ["x", *buffers]), output=map(info, outputs))
    main.node.extend(node("Add", [a, "x"], [b]) for a, b in zip(buffers, outputs, strict=True))
    main.node.extend(_nodes(draw, names, ["y", "z", ""], 0))
    some = st.lists(st.sampled_from(names), max_size=4, unique=True)
    main.initializer.extend(tensor(name, 1.0) for name in draw(some))
    main.sparse_initializer.extend(map(sparse, draw(some)))
    main.value_info.extend(info(name, f"{name}_dim", 2) for name in draw(some))
    for name in draw(some):
        main.quantization_annotation.add(tensor_name=name)
    return onnx.helper.make_model(main, doc_string=draw(st.sampled_from(["", KEY, "d" * 120])))


def shadows(model: ModelProto) -> bool:
    """Return whether a subgraph has a value of its own with a buffer's name."""
    names = {value.name for value in (*model.graph.input, *model.graph.output)} - {"x"}
    for graph in list(every(model)):
        if isinstance(graph, GraphProto) and graph is not model.graph:
            own = {value.name for value in graph.input}.union(*(n.output for n in graph.node))
            if names & own and graph.name != KEY:
                return True
    return False


@FEWER
@given(models(), st.sampled_from(sorted(FORMS)))
def test_any_model_is_renamed_as_a_parser_would(model: ModelProto, form: str):
    result = spliced(FORMS[form](model))
    assert result == FORMS[form](patched(model))


@FEWER
@given(models().filter(lambda model: not shadows(model)))
def test_any_model_comes_back_as_it_was(
    tmp_path_factory: pytest.TempPathFactory, model: ModelProto
):
    raw = model.SerializeToString()
    path = saved(raw, tmp_path_factory.getbasetemp() / "any.onnx")
    assert rename(path, "VLLM").status == "renamed"
    assert path.read_bytes() == patched(model).SerializeToString()
    assert rename(path, "VLLM").status == "unchanged"
    assert rename(path, strip=True).status == "renamed"
    assert path.read_bytes() == raw


# Damaged models


def expected(raw: bytes) -> ModelProto | None:
    """Return the expected result; ``None`` if protobuf can read no model, or no names."""
    try:
        return patched(ModelProto.FromString(raw))
    except (DecodeError, UnicodeDecodeError, TypeError):  # names that are bytes
        return None


def test_a_model_cut_off_anywhere_is_refused_or_still_right(tmp_path: Path, sample: Sample):
    raw = decoder().SerializeToString()
    for size in sample(range(len(raw)), 60):
        path = saved(raw[:size], tmp_path / "cut.onnx")
        model = expected(raw[:size])
        try:
            rename(path, "VLLM")
        except KvRenameError:
            assert path.read_bytes() == raw[:size]
            assert model is None or not model.HasField("graph") or not model.opset_import
        else:
            assert model is not None
            assert path.read_bytes() == model.SerializeToString()


def test_a_model_with_a_bit_flipped_is_refused_or_still_right(sample: Sample):
    raw = decoder().SerializeToString()
    for bit in sample(range(8 * len(raw)), 1000):
        flipped = bytearray(raw)
        flipped[bit // 8] ^= 1 << bit % 8
        with contextlib.suppress(KvRenameError):
            result, model = spliced(bytes(flipped)), expected(bytes(flipped))
            if result is not None and model is not None:
                assert ModelProto.FromString(result) == model


def full() -> ModelProto:
    """A model of messages that hold a buffer's name, so that all of them are read."""
    inner = GraphProto(node=[node("Identity", [KEY], ["y"])], input=[info("z", "Addx_dim_0")])
    model = decoder(node("If", ["flag"], ["chosen"], then_branch=inner))
    model.graph.value_info.append(info(KEY, "a_dim_0"))
    model.graph.initializer.append(tensor(KEY, 1.0))
    model.graph.sparse_initializer.append(sparse(KEY))
    annotation = model.graph.quantization_annotation.add(tensor_name=KEY)
    annotation.quant_parameter_tensor_names.add(key="SCALE", value=KEY)
    placed = model.graph.node[0].device_configurations.add()
    placed.sharding_spec.add(tensor_name=KEY)
    model.training_info.add(algorithm=GraphProto(node=[node("Relu", [KEY], ["step"])]))
    model.training_info[0].update_binding.add(key=KEY, value=KEY_OUT)
    del model.opset_import[:]
    return model


def damaged(number: int, damage: bytes) -> tuple[str, bytes]:
    """A model with a broken field at the end of its ``number``-th message, and what that is."""
    model = full()
    message = list(every(model))[number]
    mark = field(500, b"\xee" * (len(damage) + 9))
    message.MergeFromString(mark)
    filler = field(600, b"f" * (len(mark) - len(damage) - 3))
    return message.DESCRIPTOR.full_name, model.SerializeToString().replace(mark, filler + damage)


@pytest.mark.parametrize("damage", BROKEN.values(), ids=BROKEN.keys())
def test_damage_is_refused_wherever_names_are_read(damage: bytes):
    unseen = []
    for number in range(len(list(every(full())))):
        where, raw = damaged(number, damage)
        assert expected(raw) is None
        with contextlib.suppress(KvRenameError):
            spliced(raw)
            unseen.append(where)
    assert unseen == []
