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
from onnxkvrename.verification.provenance import NO_ORIGIN, Origin, build_source_origin
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


def trace(nodes: str) -> tuple[Origin, int]:
    """The origin of ``y`` with the sources ``a`` and ``b``, and all that it depends on."""
    graph = read_graph_of(parse_model(nodes))
    (origin,) = trace_origins(graph, ["a", "b"], ["y"])
    (bits,) = trace_dependencies(graph, ["a", "b"], ["y"])
    return origin, bits


MAPPED = "y = SequenceMap <body = g (float p) => (float q) { q = MatMul(p, b) }> (a)"


@pytest.mark.parametrize(
    ("nodes", "is_carried", "dependencies"),
    [
        ("y = Identity(a)", True, 0b01),
        ("z = Neg(a) y = MatMul(z, x)", False, 0b01),
        ("y = Gather(x, b)", False, 0b10),
        ("y = Where(b, x, x)", False, 0b10),
        ("s = Shape(b) y = Expand(x, s)", False, 0),
        (MAPPED, False, 0b11),  # what only the bodies of a node see
        ("z = Neg(a)", False, 0),  # nothing makes y
    ],
)
def test_what_is_mixed_or_chosen_by_is_depended_on_and_not_carried(
    nodes: str, is_carried: bool, dependencies: int
) -> None:
    assert trace(nodes) == (build_source_origin(0) if is_carried else NO_ORIGIN, dependencies)


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
    monkeypatch.setattr(tracing, "find_carried_operands", follow_all_operands)
    assert trace_origins(read_graph_of(model), sources, outputs) == partial


def test_garbage_collection_is_on_again_after_a_trace() -> None:
    trace("y = Neg(a)")
    assert gc.isenabled()
    gc.disable()
    try:
        trace("y = Neg(a)")
        assert not gc.isenabled()
    finally:
        gc.enable()
