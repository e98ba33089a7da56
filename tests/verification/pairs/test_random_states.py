"""In random decoders each state is found, and nothing else, whatever layers they are made of."""

from __future__ import annotations

from random import Random

import onnx.parser
import pytest
from models import read_graph_of
from onnx import ModelProto
from tiers import thin

from onnxkvrename.model.proto_reader import read_signature
from onnxkvrename.model.protobuf import ByteSource
from onnxkvrename.verification.pairs.find_pairs import find_states

# Each layer reads `h`, has the states `a` and perhaps `b`, and makes what is added to `h`.
# Sizes: n batch, s new positions, p old positions, t all of them, c context, 2 heads of 4.
ATTENTION = """
    score_{i} = MatMul(q_{i}, all_a_{i}) soft_{i} = Softmax(score_{i})
    read_{i} = MatMul(soft_{i}, all_b_{i}) out_{i} = MatMul(read_{i}, w)
"""
LAYERS = {
    "append": (
        """k_{i} = MatMul(h_{i}, w) v_{i} = MatMul(h_{i}, u) q_{i} = MatMul(h_{i}, w)
        {a_out} = Concat<axis = 2>({a}, k_{i}) {b_out} = Concat<axis = 2>({b}, v_{i})
        all_a_{i} = Transpose({a_out}) all_b_{i} = Identity({b_out})""",
        "[n,2,p,4] [n,2,t,4]",
    ),
    "scatter": (
        """k_{i} = MatMul(h_{i}, w) v_{i} = MatMul(h_{i}, u) q_{i} = MatMul(h_{i}, w)
        {a_out} = ScatterND({a}, at, k_{i}) {b_out} = ScatterND({b}, at, v_{i})
        all_a_{i} = Transpose({a_out}) all_b_{i} = Identity({b_out})""",
        "[n,2,c,4] [n,2,c,4]",
    ),
    "where": (
        """k_{i} = MatMul(h_{i}, w) v_{i} = MatMul(h_{i}, u) q_{i} = MatMul(h_{i}, w)
        {a_out} = Where(is_new, k_{i}, {a}) {b_out} = Where(is_new, v_{i}, {b})
        all_a_{i} = Transpose({a_out}) all_b_{i} = Identity({b_out})""",
        "[n,2,c,4] [n,2,c,4]",
    ),
    "mask": (
        """k_{i} = MatMul(h_{i}, w) v_{i} = MatMul(h_{i}, u) q_{i} = MatMul(h_{i}, w)
        keep_{i} = Sub(one, is_on) ka_{i} = Mul({a}, keep_{i}) kb_{i} = Mul({b}, keep_{i})
        na_{i} = Mul(k_{i}, is_on) nb_{i} = Mul(v_{i}, is_on)
        {a_out} = Add(ka_{i}, na_{i}) {b_out} = Add(nb_{i}, kb_{i})
        all_a_{i} = Transpose({a_out}) all_b_{i} = Identity({b_out})""",
        "[n,2,c,4] [n,2,c,4]",
    ),
    "delta": (
        """k_{i} = MatMul(h_{i}, w) v_{i} = MatMul(h_{i}, u) q_{i} = MatMul(h_{i}, w)
        {a_out} = Transpose(k_{i}) {b_out} = Identity(v_{i})
        old_{i} = Transpose({a}) all_a_{i} = Concat<axis = 2>(old_{i}, k_{i})
        all_b_{i} = Concat<axis = 2>({b}, v_{i})""",
        "[n,2,p,4] [n,2,s,4]",
    ),
    "window": (
        """k_{i} = MatMul(h_{i}, w) v_{i} = MatMul(h_{i}, u) q_{i} = MatMul(h_{i}, w)
        long_a_{i} = Concat<axis = 2>({a}, k_{i}) long_b_{i} = Concat<axis = 2>({b}, v_{i})
        {a_out} = Slice(long_a_{i}, from, to, axis) {b_out} = Slice(long_b_{i}, from, to, axis)
        all_a_{i} = Transpose(long_a_{i}) all_b_{i} = Identity(long_b_{i})""",
        "[n,2,16,4] [n,2,16,4]",
    ),
    "linear": (
        """k_{i} = MatMul(h_{i}, w) v_{i} = MatMul(h_{i}, u) q_{i} = MatMul(h_{i}, w)
        gate_{i} = Sigmoid(k_{i}) old_{i} = Mul({a}, gate_{i}) new_{i} = MatMul(k_{i}, v_{i})
        {a_out} = Add(old_{i}, new_{i}) long_{i} = Concat<axis = 2>({b}, k_{i})
        {b_out} = Slice(long_{i}, from, to, axis)
        all_a_{i} = Identity({a_out}) all_b_{i} = Identity(long_{i})""",
        "[n,2,4,4] [n,2,4,4]",
    ),
    "rule": (
        """k_{i} = MatMul(h_{i}, w) v_{i} = MatMul(h_{i}, u) q_{i} = MatMul(h_{i}, w)
        was_{i} = MatMul({a}, k_{i}) diff_{i} = Sub(v_{i}, was_{i})
        new_{i} = MatMul(k_{i}, diff_{i})
        old_{i} = Mul({a}, one) {a_out} = Add(old_{i}, new_{i}) {b_out} = Identity({b})
        all_a_{i} = Identity({a_out}) all_b_{i} = Identity({b})""",
        "[n,2,4,4] [n,2,4,4]",
    ),
}


def draw_model(seed: int) -> tuple[ModelProto, dict[str, str]]:
    """A decoder, or a window of one, and the outputs of its states."""
    random = Random(seed)
    names = [f"v{number}" for number in range(40)]
    random.shuffle(names)
    is_window = random.random() < 0.4
    inputs = ["float[n,s,8] hidden"] if is_window else ["int64[n,s] ids"]
    inputs += ["int64[n,s] positions"] if random.random() < 0.7 or is_window else []
    inputs += ["int64[n,3] at", "bool[n,1,c,1] is_new", "float[n,1,c,1] is_on"]
    outputs, expected = [], {}
    nodes = ["h_0 = Identity(hidden)" if is_window else "h_0 = Gather(table, ids)"]
    kinds = random.choices(list(LAYERS), k=random.randint(1, 4))
    for number, kind in enumerate(kinds):
        text, shapes = LAYERS[kind]
        before, after = shapes.split()
        a, b, a_out, b_out = (names.pop() for _ in range(4))
        nodes.append(text.format(i=number, a=a, b=b, a_out=a_out, b_out=b_out))
        nodes.append(ATTENTION.format(i=number))
        nodes.append(f"h_{number + 1} = Add(h_{number}, out_{number})")
        inputs += [f"float{before} {a}", f"float{before} {b}"]
        outputs += [f"float{after} {a_out}", f"float{after} {b_out}"]
        expected |= {a: a_out, b: b_out}
    last = "Mul" if is_window else "MatMul"
    nodes.append(f"end = {last}(h_{len(kinds)}, w)")
    outputs.append("float[n,s,8] end")
    random.shuffle(inputs)
    random.shuffle(outputs)
    model = onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["": 18]>
        main ({", ".join(inputs)}) => ({", ".join(outputs)})
        <float[8,8] w = {{0}}, float[8,8] u = {{0}}, float[9,8] table = {{0}}, float[1] one = {{1}},
         int64[1] from = {{-16}}, int64[1] to = {{9223372036854775807}}, int64[1] axis = {{2}}>
        {{ {" ".join(nodes)} }}
    """)
    if random.random() < 0.5:  # sizes as numbers, as exports for devices have them
        sizes = {"n": 1, "s": 3, "p": 13, "t": 16, "c": 16}
        for value in (*model.graph.input, *model.graph.output):
            for dim in value.type.tensor_type.shape.dim:
                if dim.dim_param:
                    dim.dim_value = sizes[dim.dim_param]
    return model, expected


@pytest.mark.parametrize("seed", thin(range(120), 40))
def test_all_states_of_a_random_decoder_are_found_and_nothing_else(seed: int) -> None:
    model, expected = draw_model(seed)
    signature = read_signature(ByteSource.from_bytes(model.SerializeToString()))
    pairs = find_states(read_graph_of(model), signature).pairs
    assert {pair.input.name: pair.output.name for pair in pairs} == expected
