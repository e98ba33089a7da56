"""Features that are kept for later steps are told from caches by what reads them."""

from __future__ import annotations

import onnx.parser
import pytest
from models import read_graph_of

from onnxkvrename.model.proto_reader import read_signature
from onnxkvrename.model.protobuf import ByteSource
from onnxkvrename.verification.pairs.features import find_features
from onnxkvrename.verification.pairs.find_pairs import find_states

QUERY = "q = MatMul(h, w) all = Concat<axis = 1>(k, q) turned = Transpose(all)"
READ = "score = MatMul(q, turned) soft = Softmax(score) read = MatMul(soft, all)"


def find(nodes: str, functions: str = "", others: str = "", made: str = "") -> frozenset[str]:
    """The features among ``kept`` and others, beside a cache ``k``."""
    model = onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["": 18, "local": 1]>
        main (float[n,s,4] x, float[n,p,4] k, float[n,f,4] kept, bool[n,s,1] is_image{others})
        => (float[n,t,4] all, float[n,f,4] kept_out, float[n,s,4] end{made})
        <float[4,4] w = {{0}}, float[1] half = {{0.5}}>
        {{ kept_out = Identity(kept) {nodes} end = MatMul(read, w) }}
        {functions}
    """)
    signature = read_signature(ByteSource.from_bytes(model.SerializeToString()))
    return find_features(read_graph_of(model), find_states(read_graph_of(model), signature).pairs)


@pytest.mark.parametrize(
    "nodes",
    [
        "h = Add(x, kept)",
        "h = Where(is_image, kept, x)",
        "projected = MatMul(kept, w) h = Add(x, projected)",
        "mean = ReduceMean(kept) h = Add(x, mean)",
        # A norm divides by what is made of the same values.
        "sum = Add(x, kept) square = Mul(sum, sum) mean = ReduceMean(square) h = Div(sum, mean)",
        "h = If(flag) <then_branch = a () => (b) {b = Add(x, kept)}, "
        "else_branch = c () => (d) {d = Identity(x)}>",
        "h = local.Join(x, kept)",
    ],
)
def test_what_weights_are_applied_to_first_are_features(nodes: str) -> None:
    function = '<domain: "local", opset_import: ["": 18]> Join (a, b) => (c) {c = Add(a, b)}'
    others = ", bool flag" if "flag" in nodes else ""
    assert find(f"{nodes} {QUERY} {READ}", function, others) == {"kept"}


@pytest.mark.parametrize(
    "nodes",
    [
        # Keys or values of an encoder.
        "turned_2 = Transpose(kept) score_2 = MatMul(q, turned_2) read_2 = MatMul(score_2, w)",
        "large = Mul(kept, half) read_2 = MatMul(soft, large)",
        "part = Gather<axis = 1>(kept, at) read_2 = MatMul(soft, part)",
        "joined = Concat<axis = 1>(kept, all) read_2 = MatMul(soft, joined)",
        "scaled = Mul(soft, kept) sum = ReduceSum(scaled) read_2 = MatMul(sum, w)",
        "read_2 = local.Custom(kept)",
        "read_2 = local.Attend(soft, kept)",
        "read_2 = If(flag) <then_branch = a () => (b) {b = MatMul(soft, kept)}, "
        "else_branch = c () => (d) {d = Identity(soft)}>",
        "read_2 = Identity(x)",  # nothing reads it
    ],
)
def test_what_attention_reads_is_a_cache(nodes: str) -> None:
    others = ", bool flag, int64[n] at"
    function = '<domain: "local", opset_import: ["": 18]> Attend (a, b) => (c) {c = MatMul(a, b)}'
    nodes = f"h = Identity(x) {QUERY} {READ.replace('read =', 'read_1 =')} {nodes}"
    assert find(f"{nodes} read = Add(read_1, read_2)", function, others) == frozenset()


def test_a_model_of_features_alone_is_left_as_it_is() -> None:
    model = onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 18]>
        main (float[n,4] kept) => (float[n,4] kept_out, float[n,4] y) <float[4,4] w = {0}>
        { kept_out = Identity(kept) y = MatMul(kept, w) }
    """)
    signature = read_signature(ByteSource.from_bytes(model.SerializeToString()))
    pairs = find_states(read_graph_of(model), signature).pairs
    assert [pair.input.name for pair in pairs] == ["kept"]
    assert find_features(read_graph_of(model), pairs) == frozenset()


def test_calls_with_equal_arguments_are_followed_once() -> None:
    calls = "".join(
        f'<domain: "local", opset_import: ["": 18, "local": 1]> F{n} (a) => (c) '
        f"{{b = local.F{n + 1}(a) c = local.F{n + 1}(b)}} "
        for n in range(16)
    )
    last = '<domain: "local", opset_import: ["": 18]> F16 (a) => (c) {c = Abs(a)}'
    nodes = f"far = local.F0(kept) h = Add(x, far) {QUERY} {READ}"
    assert find(nodes, calls + last) == {"kept"}


@pytest.mark.parametrize(("count", "expected"), [(8, {"kept"}), (20, frozenset())])
def test_a_function_that_is_used_in_too_many_ways_proves_nothing(
    count: int, expected: frozenset[str]
) -> None:
    function = '<domain: "local", opset_import: ["": 18]> F (a, b, c, d, e) => (f) {f = Sum(a, b)}'
    uses = [", ".join("x" if n >> bit & 1 else "half" for bit in range(5)) for n in range(count)]
    calls = " ".join(f"y{n} = local.F({use})" for n, use in enumerate(uses))
    nodes = f"{calls} far = local.F(kept, x, x, x, x) h = Add(x, far) {QUERY} {READ}"
    assert find(nodes, function) == expected
