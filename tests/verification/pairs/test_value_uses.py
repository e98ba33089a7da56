"""Outputs belong to an input if the graph joins them to it, or reads both in one place."""

from __future__ import annotations

import onnx.parser
import pytest
from models import read_graph_of
from onnx import ModelProto

from onnxkvrename.verification.pairs import value_uses
from onnxkvrename.verification.pairs.value_uses import find_branch_states, find_joined_outputs


def build_model(nodes: str, outputs: str = "k2 v2") -> ModelProto:
    """A model with the caches ``k`` and ``v``, in ONNX text."""
    made = ", ".join(f"float[n] {name}" for name in outputs.split())
    return onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["": 18]>
        main (float[n] k, float[n] v, float[n] x, bool c, int64[1] i) => ({made})
        <float[1] w = {{1}}, float[1] u = {{1}}> {{ {nodes} }}
    """)


# New positions only


@pytest.mark.parametrize(
    "nodes",
    [
        """k2 = MatMul(x, w) a = Concat<axis = 0>(k, k2)
           v2 = MatMul(x, u) b = Concat<axis = 0>(v, v2)""",
        # what is joined was turned, and what is returned was turned otherwise
        """new = MatMul(x, w) kt = Transpose(new) k2 = Cast<to = 1>(new) old = Transpose(k)
           a = Concat<axis = 0>(old, kt) v2 = MatMul(x, u) b = Concat<axis = 0>(v, v2)""",
        # written into the cache at some positions
        "k2 = MatMul(x, w) a = ScatterND(k, i, k2) v2 = MatMul(x, u) b = TensorScatter(v, v2, i)",
        # a head at a time
        """k2a = MatMul(x, w) k2b = MatMul(u, w) k2 = Concat<axis = 0>(k2a, k2b)
           ka, kb = Split<num_outputs = 2>(k) a0 = Concat<axis = 0>(ka, k2a)
           a1 = Concat<axis = 0>(kb, k2b) v2 = MatMul(x, u) b = Concat<axis = 0>(v, v2)""",
    ],
)
def test_new_positions_belong_to_what_they_are_joined_to(nodes: str) -> None:
    model = build_model(nodes)
    assert find_joined_outputs(read_graph_of(model), ["k", "v"], ["v2", "k2"]) == {
        "k2": "k",
        "v2": "v",
    }


@pytest.mark.parametrize(
    "nodes",
    [
        "k2 = MatMul(x, w) v2 = MatMul(x, u)",  # nothing is joined
        "k2 = MatMul(x, w) a = Add(k, k2) v2 = Identity(w)",
        # one value is joined to both
        """k2 = MatMul(x, w) a = Concat<axis = 0>(k, k2) b = Concat<axis = 0>(v, k2)
           v2 = Identity(u)""",
        # both are joined to one
        "k2 = MatMul(x, w) v2 = MatMul(x, u) a = Concat<axis = 0>(k, k2, v2)",
        # a part of it is another value
        "new = MatMul(x, w) k2 = Slice(new, i, i) a = Concat<axis = 0>(k, new) v2 = Identity(u)",
        "k2 = Neg(x) k2 = Neg(w) a = Concat<axis = 0>(k, k2) v2 = Identity(u)",
    ],
)
def test_what_is_joined_otherwise_is_no_pair(nodes: str) -> None:
    assert find_joined_outputs(read_graph_of(build_model(nodes)), ["k", "v"], ["k2", "v2"]) == {}


# Branches


def build_merged(with_cache: str, without_cache: str) -> ModelProto:
    """A decoder of two branches; each makes ``p`` and ``q``, which become ``k2`` and ``v2``."""
    return build_model(f"""
        k2, v2, y = If (c) <
            then_branch = one () => (float[n] p, float[n] q, float[n] o) {{ {with_cache} }},
            else_branch = two () => (float[n] p, float[n] q, float[n] o) {{ {without_cache} }}
        >
    """)


DUMMIES = "p = Constant<value_floats = [0.0]>() q = Constant<value_floats = [0.0]>()"
READS = f"""{DUMMIES} t = Transpose({{0}}) s = MatMul(x, t) m = Softmax(s) r = MatMul(m, {{1}})
            o = MatMul(r, w)"""
MAKES = """p0 = MatMul(x, u) p = Reshape(p0, i) q0 = MatMul(u, x) q = Reshape(q0, i)
           t = Transpose(p0) s = MatMul(x, t) m = Softmax(s) r = MatMul(m, q) o = MatMul(r, w)"""


def test_a_value_made_in_one_branch_belongs_to_what_the_other_reads_in_its_place() -> None:
    model = build_merged(READS.format("k", "v"), MAKES)
    assert find_branch_states(read_graph_of(model), ["k", "v"], ["k2", "v2"]) == {
        "k2": "k",
        "v2": "v",
    }
    swapped = build_merged(READS.format("v", "k"), MAKES)
    assert find_branch_states(read_graph_of(swapped), ["k", "v"], ["k2", "v2"]) == {
        "k2": "v",
        "v2": "k",
    }
    other_way = build_merged(MAKES, READS.format("k", "v"))
    assert find_branch_states(read_graph_of(other_way), ["k", "v"], ["k2", "v2"]) == {
        "k2": "k",
        "v2": "v",
    }


@pytest.mark.parametrize(
    ("with_cache", "without_cache"),
    [
        (READS.format("k", "v"), MAKES.replace("MatMul(r, w)", "MatMul(r, u)")),  # another weight
        (READS.format("k", "v"), MAKES.replace("Softmax(s)", "Softmax(f) f = Neg(s)")),
        (READS.format("k", "k"), MAKES),  # one input in both places
        (
            READS.format("k", "v").replace("p = Constant<value_floats = [0.0]>()", "p = Neg(x)"),
            MAKES,
        ),
        (f"{DUMMIES} o = Add(k, v)", MAKES),
    ],
)
def test_another_place_is_no_proof(with_cache: str, without_cache: str) -> None:
    found = find_branch_states(
        read_graph_of(build_merged(with_cache, without_cache)), ["k", "v"], ["k2", "v2"]
    )
    assert "k2" not in found


def test_values_in_the_same_places_are_not_told_apart() -> None:
    reads = f"{DUMMIES} a = MatMul(k, w) b = MatMul(v, w) o = Add(a, b)"
    makes = "p = MatMul(x, u) q = MatMul(u, x) a = MatMul(p, w) b = MatMul(q, w) o = Add(a, b)"
    assert (
        find_branch_states(read_graph_of(build_merged(reads, makes)), ["k", "v"], ["k2", "v2"])
        == {}
    )


def test_a_graph_with_too_many_steps_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(value_uses, "STEPS_PER_NODE", 0)
    model = build_merged(READS.format("k", "v"), MAKES)
    assert find_branch_states(read_graph_of(model), ["k", "v"], ["k2", "v2"]) == {}
    joined = build_model("k2 = MatMul(x, w) a = Concat<axis = 0>(k, k2) v2 = Identity(u)")
    assert find_joined_outputs(read_graph_of(joined), ["k", "v"], ["k2", "v2"]) == {}
