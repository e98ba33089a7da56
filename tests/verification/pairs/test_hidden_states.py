"""States that a model computes with stay; hidden states that look like them go."""

from __future__ import annotations

import onnx.parser
import pytest
from models import read_graph_of
from onnx import ModelProto

from onnxkvrename.layout.updates import BufferUpdate
from onnxkvrename.model.proto_reader import read_signature
from onnxkvrename.model.protobuf import ByteSource
from onnxkvrename.verification.pairs.hidden_states import StatePair, drop_hidden_states

SYMBOLS = "float[n,2,c,4]"


def build_model(shape: str, nodes: str, functions: str = "") -> ModelProto:
    """A model with the state ``s``, which becomes ``t``, and the new values ``x`` and ``m``."""
    return onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["": 18, "local": 1]>
        main ({shape} s, float[n,2,1,4] x, float[n,1,8,1] m) => ({shape} t)
        <float[1] one = {{1}}> {{ {nodes} }} {functions}
    """)


def is_kept(model: ModelProto) -> bool:
    """Return whether the pair ``s`` and ``t`` stays."""
    signature = read_signature(ByteSource.from_bytes(model.SerializeToString()))
    pair = StatePair(signature.inputs[0], signature.outputs[0], BufferUpdate("inplace"), True)
    return drop_hidden_states([pair], read_graph_of(model), signature) == [pair]


GATED = "keep = Sub(one, m) old = Mul(s, keep) new = Mul(x, m) t = Add(old, new)"
DELTA = "read = MatMul(s, x) d = Sub(x, read) old = Mul(s, m) t = Add(old, d)"


IN_A_BRANCH = """c = Constant<value_int = 1>() t = If (c) <
    then_branch = a () => (float q) { q = Add(s, x) },
    else_branch = b () => (float r) { r = Add(s, x) }>"""


@pytest.mark.parametrize(
    ("shape", "nodes", "kept"),
    [
        (SYMBOLS, GATED, True),  # what is combined with it knows nothing of it
        (SYMBOLS, DELTA, False),  # it does here, and an axis may be of positions
        ("float[n,3,8,4]", DELTA, True),  # here none can be
        ("float[n,2,8,4]", DELTA, False),  # but this is laid out like x
        (SYMBOLS, "t = Mul(s, one)", False),  # nothing is new
        (SYMBOLS, "old = Mul(s, m) size = Shape(s) e = Expand(x, size) t = Add(old, e)", True),
        (SYMBOLS, "t = Add(s, x)", False),  # a bias, perhaps: nothing makes room
        (SYMBOLS, "old = Mul(s, one) t = Add(old, x)", False),  # nor does a constant
        (SYMBOLS, IN_A_BRANCH, False),  # not looked into
    ],
)
def test_a_state_is_known_by_what_it_is_combined_with_or_by_its_shape(
    shape: str, nodes: str, kept: bool
) -> None:
    assert is_kept(build_model(shape, nodes)) is kept


def test_a_function_is_not_looked_into() -> None:
    function = '<opset_import: ["": 18], domain: "local"> Mix (a, b) => (c) { c = Add(a, b) }'
    assert not is_kept(build_model(SYMBOLS, "t = local.Mix(s, x)", function))


def test_a_graph_without_an_order_proves_nothing() -> None:
    assert not is_kept(build_model(SYMBOLS, "a = Add(s, b) b = Neg(a) t = Add(a, x)"))
