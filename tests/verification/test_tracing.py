from __future__ import annotations

import gc
from pathlib import Path

import onnx
import onnx.parser
import pytest
from models import read_graph_of
from onnx import ModelProto
from tiers import thin

from onnxkvrename.verification import tracing
from onnxkvrename.verification.provenance import Origin, build_source_origin
from onnxkvrename.verification.tracing import trace_dependencies, trace_origins

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
EXPORTS = Path(__file__).resolve().parents[3] / "shared" / "exports"


def parse_model(nodes: str) -> ModelProto:
    """A graph of these nodes, in ONNX text."""
    return onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 18]>
        main (float[n] a, float[n] b, float[n] x, bool c, int64 m) => (float[n] y)
        {{ {nodes} }}"""
    )


def trace_paths(nodes: str) -> Origin:
    """The origin of ``y`` with the sources ``a`` and ``b``."""
    (origin,) = trace_origins(read_graph_of(parse_model(nodes)), ["a", "b"], ["y"])
    return origin


def trace(nodes: str) -> Origin:
    """The same origin, with everything that ``y`` depends on."""
    (bits,) = trace_dependencies(read_graph_of(parse_model(nodes)), ["a", "b"], ["y"])
    return Origin(trace_paths(nodes).outcomes, bits)


def test_a_source_is_carried_and_touched() -> None:
    assert trace("y = Identity(a)") == build_source_origin(0)


def test_what_is_mixed_is_touched_and_only_deep_down() -> None:
    assert trace("z = Neg(a) y = MatMul(z, x)") == Origin((), 0b01)
    assert trace_paths("z = Neg(a) y = MatMul(z, x)") == Origin()


def test_an_index_and_a_condition_are_touched_but_a_shape_is_not() -> None:
    assert trace("y = Gather(x, b)").dependency_bits == 0b10
    assert trace("y = Where(b, x, x)").dependency_bits == 0b10
    assert trace("s = Shape(b) y = Expand(x, s)").dependency_bits == 0


def test_what_only_the_bodies_of_a_node_see_is_touched_too() -> None:
    nodes = "y = SequenceMap <body = g (float p) => (float q) { q = MatMul(p, b) }> (a)"
    assert trace(nodes).dependency_bits == 0b11


def test_a_value_that_nothing_makes_comes_from_nowhere() -> None:
    assert trace("z = Neg(a)") == Origin()


FILES = [*FIXTURES.rglob("*.onnx"), *EXPORTS.rglob("*.onnx")]


def follow_all_operands(domain: str, op_type: str, operand_count: int) -> range:
    return range(operand_count)


@pytest.mark.parametrize("path", thin(FILES, 24), ids=lambda path: "-".join(path.parts[-3:]))
def test_operands_that_are_not_followed_lead_to_no_path(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: ModelProto = onnx.load(path, load_external_data=False)
    sources = [value.name for value in model.graph.input]
    outputs = [value.name for value in model.graph.output]
    partial = trace_origins(read_graph_of(model), sources, outputs)
    dependencies = trace_dependencies(read_graph_of(model), sources, outputs)
    monkeypatch.setattr(tracing, "find_carried_operands", follow_all_operands)
    full = trace_origins(read_graph_of(model), sources, outputs)
    assert [origin.outcomes for origin in partial] == [origin.outcomes for origin in full]
    assert tuple(origin.dependency_bits for origin in full) == dependencies
    assert all(
        origin.dependency_bits & ~bits == 0
        for origin, bits in zip(partial, dependencies, strict=True)
    )


def test_garbage_collection_is_on_again_after_a_trace() -> None:
    trace_paths("y = Neg(a)")
    assert gc.isenabled()
    gc.disable()
    try:
        trace_paths("y = Neg(a)")
        assert not gc.isenabled()
    finally:
        gc.enable()
