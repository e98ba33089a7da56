from __future__ import annotations

from pathlib import Path

import onnx
import onnx.parser
import pytest
from onnx import ModelProto

from onnxkvrename.verification.provenance import Origin, build_source_origin
from onnxkvrename.verification.tracing import trace_origins

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
EXPORTS = Path(__file__).resolve().parents[3] / "shared" / "exports"


def traced(nodes: str, *, deep: bool = True) -> Origin:
    """The origin of ``y`` in a graph of these nodes with the sources ``a`` and ``b``."""
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 18]>
        main (float[n] a, float[n] b, float[n] x, bool c, int64 m) => (float[n] y)
        {{ {nodes} }}"""
    )
    (found,) = trace_origins(model, ["a", "b"], ["y"], deep=deep)
    return found


def test_a_source_is_carried_and_touched() -> None:
    assert traced("y = Transpose(a)") == build_source_origin(0)


def test_what_is_mixed_is_touched_and_only_deep_down() -> None:
    assert traced("z = Neg(a) y = MatMul(z, x)") == Origin((), 0b01)
    assert traced("z = Neg(a) y = MatMul(z, x)", deep=False) == Origin()


def test_an_index_and_a_condition_are_touched_but_a_shape_is_not() -> None:
    assert traced("y = Gather(x, b)").dependency_bits == 0b10
    assert traced("y = Where(b, x, x)").dependency_bits == 0b10
    assert traced("s = Shape(b) y = Expand(x, s)").dependency_bits == 0


def test_what_only_the_bodies_of_a_node_see_is_touched_too() -> None:
    nodes = "y = SequenceMap <body = g (float p) => (float q) { q = MatMul(p, b) }> (a)"
    assert traced(nodes).dependency_bits == 0b11


def test_a_value_that_nothing_makes_comes_from_nowhere() -> None:
    assert traced("z = Neg(a)") == Origin()


FILES = [*FIXTURES.rglob("*.onnx"), *EXPORTS.rglob("*.onnx")]


@pytest.mark.parametrize("path", FILES, ids=lambda path: "-".join(path.parts[-3:]))
def test_deep_or_not_the_ways_are_the_same(path: Path) -> None:
    model: ModelProto = onnx.load(path, load_external_data=False)
    sources = [value.name for value in model.graph.input]
    outputs = [value.name for value in model.graph.output]
    shallow, deep = (trace_origins(model, sources, outputs, deep=deep) for deep in (False, True))
    assert [origin.outcomes for origin in shallow] == [origin.outcomes for origin in deep]
    assert all(
        one.dependency_bits & ~other.dependency_bits == 0
        for one, other in zip(shallow, deep, strict=True)
    )
