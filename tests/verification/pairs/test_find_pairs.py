"""Pairs are found by the dataflow alone: on real exports, and on graphs made to mislead."""

from __future__ import annotations

import onnx.parser
import pytest
from expected_pairs import find_expected_pairs, list_exports
from models import read_graph_of
from onnx import ModelProto, TensorProto
from tiers import thin

from onnxkvrename.errors import ModelError
from onnxkvrename.model.file import open_model
from onnxkvrename.model.proto_reader import read_signature
from onnxkvrename.model.protobuf import ByteSource
from onnxkvrename.verification.graph_bodies import read_graph
from onnxkvrename.verification.pairs import find_pairs
from onnxkvrename.verification.pairs.find_pairs import find_states

EXPORTS = list_exports()


@pytest.mark.skipif(not EXPORTS, reason="the real exports are not there")
@pytest.mark.parametrize("number", thin(range(len(EXPORTS) or 1), 8))
def test_each_buffer_of_a_real_export_is_found_and_nothing_else(number: int) -> None:
    path = EXPORTS[number]
    with open_model(path) as opened:
        graph = read_graph(opened.source)
        found = {
            pair.input.name: pair.output.name for pair in find_states(graph, opened.signature).pairs
        }
    expected = find_expected_pairs(path)
    if "dynamo_subfn/VLLM" in path.as_posix():  # its outputs are inputs, which no node updates
        expected = {}
    assert found == expected


@pytest.mark.skipif(not EXPORTS, reason="the real exports are not there")
def test_the_real_exports_have_many_buffers_of_all_kinds() -> None:
    counts = [len(find_expected_pairs(path)) for path in EXPORTS]
    assert sum(counts) > 230
    assert counts.count(0) < 15


def build_model(inputs: str, outputs: str, nodes: str, weights: str = "") -> ModelProto:
    """A model in ONNX text."""
    return onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["": 18, "com.microsoft": 1, "far": 1]>
        main ({inputs}) => ({outputs}) <float[4,4] w = {{0}} {weights}> {{ {nodes} }}
    """)


def find(model: ModelProto) -> dict[str, str]:
    """The pairs of a model, each with its update."""
    signature = read_signature(ByteSource.from_bytes(model.SerializeToString()))
    return {
        f"{pair.input.name} {pair.output.name}": str(pair.update)
        for pair in find_states(read_graph_of(model), signature).pairs
    }


ATTENTION = """
    keys = MatMul(x, w) values = MatMul(keys, w)
    b = Concat<axis = 1>(k, keys) a = Concat<axis = 1>(v, values)
    scores = MatMul(x, b) soft = Softmax(scores) y = MatMul(soft, a)
"""


def test_names_and_orders_say_nothing() -> None:
    model = build_model(
        "float[n,s,4] x, float[n,p,4] v, float[n,p,4] k",
        "float[n,s,4] y, float[n,t,4] a, float[n,t,4] b",
        ATTENTION,
    )
    assert find(model) == {"v a": "append along axis 1", "k b": "append along axis 1"}


# What comes in, is added to, and goes out again, is a state or a hidden state

RESIDUAL = """
    q = MatMul(x, w) scores = MatMul(q, k) soft = Softmax(scores) mixed = MatMul(soft, k)
    y = Add(x, mixed) new = Concat<axis = 1>(k, q)
"""


@pytest.mark.parametrize(
    "hidden", ["float[n,s,4]", "float[1,1,4]", "float[1,7,4]", "float[n,7,4]", "float"]
)
def test_a_hidden_state_is_not_taken_for_a_state(hidden: str) -> None:
    shape = "1,7" if "7" in hidden else "1,1" if "1" in hidden else "n,s"
    model = build_model(
        f"{hidden} x, float[1,8,4] k, int64[{shape}] ids",
        f"{hidden} y, float[1,9,4] new, int64[{shape}] same",
        f"{RESIDUAL} same = Identity(ids)",
    )
    assert find(model) == {"k new": "append along axis 1"}


def test_a_hidden_state_is_known_by_what_it_feeds_where_shapes_are_numbers() -> None:
    model = build_model(
        "float[1,7,4] x, float[1,8,4] k", "float[1,7,4] y, float[1,15,4] new", RESIDUAL
    )
    assert find(model) == {"k new": "append along axis 1"}


def test_recurrent_states_are_found_layer_by_layer() -> None:
    layer = """
        k{0} = MatMul(x{0}, w) decayed{0} = Mul(s{0}, g) t{0} = Add(decayed{0}, k{0})
        read{0} = MatMul(k{0}, t{0}) x{1} = Add(x{0}, read{0})
    """
    model = build_model(
        "int64[n,s] ids, float[n,2,4,4] s0, float[n,2,4,4] s1",
        "float x2, float[n,2,4,4] t0, float[n,2,4,4] t1",
        f"x0 = Gather(w, ids) {layer.format(0, 1)} {layer.format(1, 2)}",
        ", float[1] g = {0.5}",
    )
    assert find(model) == {"s0 t0": "inplace", "s1 t1": "inplace"}


# Recurrent cells in single operators


GATES = """
    xz = MatMul(x, w) hz = MatMul(h, w) sz = Add(xz, hz) z = Sigmoid(sz) rest = Sub(one, z)
    hn = MatMul(h, w) rn = Mul(z, hn) sn = Add(rn, xz) n = Tanh(sn)
"""


@pytest.mark.parametrize(
    "sum_",
    [
        "new = Mul(rest, n) old = Mul(z, h) t = Add(new, old)",
        "gap = Sub(h, n) part = Mul(gap, z) t = Add(part, n)",
        "gap = Sub(n, h) part = Mul(z, gap) t = Add(h, part)",
        "gap = Sub(h, n) part = Mul(gap, z) t = Sub(h, part)",
    ],
)
def test_the_state_of_a_gru_cell_is_found(sum_: str) -> None:
    nodes = f"{GATES} {sum_} y = MatMul(t, w)"
    weights = ", float[1] one = {1}"
    cell = ("float[n,4] x, float[n,4] h", "float[n,4] y, float[n,4] t", nodes, weights)
    assert find(build_model(*cell)) == {"h t": "inplace"}
    for gate in ("Identity", "Tanh"):  # the weight of a filter's or a scheduler's step
        other = nodes.replace("Sigmoid", gate)
        assert find(build_model(*cell[:2], other, weights)) == {}


@pytest.mark.parametrize("sum_", ["t = Add(h, part)", "t = Sub(n, part)"])
def test_a_value_beyond_both_ends_is_not_the_state_of_a_cell(sum_: str) -> None:
    nodes = f"{GATES} gap = Sub(h, n) part = Mul(gap, z) {sum_} y = MatMul(t, w)"
    ends = "float[n,4] x, float[n,4] h", "float[n,4] y, float[n,4] t"
    assert find(build_model(*ends, nodes, ", float[1] one = {1}")) == {}


def test_the_layers_of_gru_cells_in_one_tensor_are_a_state() -> None:
    layer = """
        h{0} = Gather<axis = 0>(h, n{0}) a{0} = MatMul(x{0}, w) b{0} = MatMul(h{0}, w)
        s{0} = Add(a{0}, b{0}) z{0} = Sigmoid(s{0}) c{0} = Tanh(b{0}) d{0} = Sub(h{0}, c{0})
        e{0} = Mul(d{0}, z{0}) x{1} = Add(e{0}, c{0}) t{0} = Unsqueeze(x{1}, first)
    """
    model = build_model(
        "float[n,4] x0, float[2,n,4] h",
        "float[n,4] y, float[2,n,4] t",
        f"{layer.format(0, 1)} {layer.format(1, 2)} t = Concat<axis = 0>(t0, t1) y = MatMul(x2, w)",
        ", int64 n0 = {0}, int64 n1 = {1}, int64[1] first = {0}",
    )
    assert [*find(model)] == ["h t"]


@pytest.mark.parametrize("peephole", [False, True])
@pytest.mark.parametrize("order", ["float[n,4] c2, float[n,4] h2", "float[n,4] h2, float[n,4] c2"])
@pytest.mark.parametrize("gate", ["Sigmoid", "HardSigmoid"])
def test_the_cell_state_of_an_lstm_is_found_and_its_output_is_not_guessed(
    gate: str, order: str, peephole: bool
) -> None:
    seen = "p = Mul(c, w0) i0 = Add(a, p) f0 = Add(b, p)" if peephole else ""
    i, f = ("i0", "f0") if peephole else ("a", "b")
    nodes = f"""
        xh = Concat<axis = 1>(x, h) all = MatMul(xh, gates)
        a, b, d, e = Split<axis = 1, num_outputs = 4>(all) {seen}
        i = {gate}({i}) f = {gate}({f}) g = Tanh(d) o = {gate}(e)
        ig = Mul(i, g) fc = Mul(f, c) c2 = Add(fc, ig) shown = Tanh(c2) h2 = Mul(o, shown)
        y = MatMul(h2, w)
    """
    model = build_model(
        "float[n,4] x, float[n,4] h, float[n,4] c",
        f"{order}, float[n,4] y",
        nodes,
        ", float[8,16] gates = {0}, float[4] w0 = {1}",
    )
    assert find(model) == {"c c2": "inplace"}


@pytest.mark.parametrize(
    ("inputs", "outputs", "nodes"),
    [
        (  # Adam, with its decay as an input
            "float[4,4] p, float[4,4] g, float[4,4] m, float beta",
            "float[4,4] p2, float[4,4] m2",
            "mb = Mul(m, beta) r = Sub(one, beta) gr = Mul(g, r) m2 = Add(mb, gr) p2 = Sub(p, m2)",
        ),
        (  # a scheduler, which also returns its guess of the last sample
            "float[n,4,8,8] sample, float[n,4,8,8] noise, int64[n] t",
            "float[n,4,8,8] previous, float[n,4,8,8] guess",
            """
            row = Gather(table, t) a = Reshape(row, shape) an = Mul(noise, a)
            d = Sub(sample, an) guess = Div(d, a) ag = Mul(guess, a) previous = Add(ag, an)
            """,
        ),
        (  # two pictures of which a gate takes more or less
            "float[1,3,4] p, float[1,3,4] q",
            "float[1,3,4] y, float z",
            """
            s = Add(p, q) u = MatMul(s, w) g = Sigmoid(u) r = Sub(one, g)
            gp = Mul(g, p) rq = Mul(r, q) y = Add(gp, rq) z = ReduceMean(y)
            """,
        ),
        (  # a picture with its channels scaled by a gate, and a residual
            "float[1,4,8,4] x, float[1,4] cond",
            "float[1,4,8,4] y, float z",
            """
            m = ReduceMean(x) mc = Add(m, cond) g = Sigmoid(mc) u = Mul(x, g) v = MatMul(x, w)
            y = Add(u, v) z = ReduceMean(y)
            """,
        ),
    ],
)
def test_a_step_that_is_no_cell_has_no_state(inputs: str, outputs: str, nodes: str) -> None:
    weights = ", float[1] one = {1}, float[9] table = {1}, int64[4] shape = {-1,1,1,1}"
    assert find(build_model(inputs, outputs, nodes, weights)) == {}


# What is not proved is not said


@pytest.mark.parametrize(
    "nodes",
    [
        "y = MatMul(k, w)",
        "y = far.Update(k, x)",
        "y = Add(k, v)",
        "both = Concat<axis = 0>(k, v) y = Neg(both)",
        "y = Identity(w)",
        "y = Neg(k) z = Abs(k)",
    ],
)
def test_what_cannot_be_told_is_no_pair(nodes: str) -> None:
    outputs = "float[a,4] y" + ", float[a,4] z" * ("z =" in nodes)
    model = build_model("float[a,4] k, float[a,4] v, float[b,4] x", outputs, nodes)
    assert find(model) == {}


def test_of_several_outputs_of_an_input_the_one_that_moves_it_is_its_state() -> None:
    model = build_model(
        "float[a,4] k, float[b,4] x",
        "float[a,4] scaled, float[c,4] new",
        "scaled = Mul(k, w) y = MatMul(x, w) new = Concat<axis = 0>(k, y)",
    )
    assert find(model) == {"k new": "append along axis 0"}


def test_what_is_joined_to_several_caches_is_new_to_each() -> None:
    outputs = "float[c,4] k2, float[c,4] v2, float y, float z"
    nodes = "k2 = Concat<axis = 0>(k, x) y = MatMul(k2, w) v2 = Concat<axis = 0>(x, v)"
    nodes += " z = MatMul(v2, w)"
    model = build_model("float[b,4] x, float[a,4] v, float[a,4] k", outputs, nodes)
    assert find(model) == {"v v2": "append along axis 0", "k k2": "append along axis 0"}
    alone = nodes.split(" v2")[0]
    one = build_model("float[b,4] x, float[a,4] k", "float[c,4] k2, float y", alone)
    assert find(one) == {}  # either may be the cache


def test_integers_weights_and_other_dtypes_and_ranks_are_no_states() -> None:
    nodes = "io = Neg(i) wo = Neg(w2) co = Cast<to = 10>(c) ro = Unsqueeze(r, axes)"
    model = build_model(
        "int64[4] i, float[4,4] w2, float[4] c, float[4] r",
        "int64[4] io, float[4,4] wo, float16[4] co, float[1,4] ro",
        nodes,
        ", float[4,4] w2 = {0}, int64[1] axes = {0}",
    )
    assert find(model) == {}


def test_quantized_caches_and_their_scales_are_states() -> None:
    node = onnx.helper.make_node(
        "PagedAttention",
        ["x", "", "", "k", "v", "n", "n", "n", *[""] * 9, "ks", "vs"],
        ["y", "ko", "vo", "kso", "vso"],
        domain="com.microsoft",
    )
    model = build_model(
        "float[t,8] x, int8[b,4] k, int8[b,4] v, int32[1] n, float[b,1] ks, float[b,1] vs",
        "float[t,8] y, int8[b,4] ko, int8[b,4] vo, float[b,1] kso, float[b,1] vso",
        "",
    )
    model.graph.node.append(node)
    assert find(model) == dict.fromkeys(("k ko", "v vo", "ks kso", "vs vso"), "inplace")


def test_two_values_of_one_name_are_no_pair() -> None:
    model = build_model("float[a,4] k", "float[a,4] y, float[a,4] y", "y = Neg(k)")
    assert find(model) == {}


def test_more_inputs_than_a_model_may_have_buffers_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(find_pairs, "MAX_BUFFERS", 1)
    model = build_model("float[a,4] k, float[a,4] v", "float[a,4] y", "y = Neg(k)")
    with pytest.raises(ModelError, match="more than 1"):
        find(model)


def test_a_dtype_is_a_float_by_its_name() -> None:
    names = set(TensorProto.DataType.keys())
    floats = {name for name in names if "FLOAT" in name or name == "DOUBLE"}
    assert floats == {name for name in names if find_pairs.may_be_state(name)} - {
        *("INT8", "UINT8", "INT4", "UINT4", "INT2", "UINT2")
    }


def test_a_cache_that_is_written_by_a_mask_is_a_state() -> None:
    """Exports for devices without scatters keep or replace each position by multiplying."""
    model = build_model(
        "int64[n,s] ids, float[n,1,c,1] mask, float[n,2,c,4] k, float[n,2,c,4] v",
        "float y, float[n,2,c,4] k2, float[n,2,c,4] v2",
        """
        x = Gather(w, ids) keys = MatMul(x, w) values = MatMul(keys, w)
        keep = Sub(one, mask)
        ko = Mul(k, keep) kn = Mul(keys, mask) k2 = Add(ko, kn)
        vo = Mul(v, keep) vn = Mul(values, mask) v2 = Add(vo, vn)
        scores = MatMul(x, k2) soft = Softmax(scores) y = MatMul(soft, v2)
        """,
        ", float[1] one = {1}",
    )
    assert find(model) == {"k k2": "inplace", "v v2": "inplace"}


@pytest.mark.parametrize(
    "nodes",
    [
        "y = Div(x, t)",  # logits and a temperature
        "a = Sub(x, m) y = Div(a, m)",  # pictures, and constants for all of them
        "d = MatMul(x, w) a = Add(d, t) y = Add(x, a)",  # a block of a residual network
    ],
)
def test_values_of_one_step_are_no_states(nodes: str) -> None:
    model = build_model(
        "float[n,s,4] x, float[n,1,1] t", "float[n,s,4] y", nodes, ", float[1] m = {1}"
    )
    assert find(model) == {}


DECODER = """
    h = Gather(w, ids) keys = MatMul(h, w) k2 = Concat<axis = 1>(k, keys)
    scores = MatMul(h, k2) soft = Softmax(scores) l = MatMul(soft, k2)
"""


@pytest.mark.parametrize(
    ("extra", "nodes"),
    [
        ("float[n,1,1] temperature", "logits = Mul(l, temperature)"),
        ("float[n,s,4] mask", "logits = Add(l, mask)"),
        ("float[1,1,4] bias", "logits = Add(bias, l)"),
        ("bool[n,1,4] keep, float[n,1,4] low", "logits = Where(keep, l, low)"),
        ("bool[n,1,4] keep, float[n,s,4] low", "logits = Where(keep, l, low)"),
        ("float[n,s,4] scale, float[n,s,4] bias", "a = Mul(l, scale) logits = Add(a, bias)"),
    ],
)
@pytest.mark.parametrize("reader", ["", " next = ArgMax(logits)"])
def test_what_logits_are_masked_and_scaled_with_is_no_state(
    extra: str, nodes: str, reader: str
) -> None:
    shape = "float[1,1,4]" if "float[1,1,4]" in extra else "float[n,s,4]"
    model = build_model(
        f"int64[{shape[6:9]}] ids, float[n,p,4] k, {extra}",
        f"float[n,t,4] k2, {shape} logits" + ", int64 next" * bool(reader),
        DECODER + nodes + reader,
    )
    assert find(model) == {"k k2": "append along axis 1"}


def test_a_bias_of_scores_that_are_shown_is_no_state() -> None:
    model = build_model(
        "float[n,2,s,4] q, float[n,2,4,s] k, float[n,2,s,s] bias",
        "float[n,2,s,s] scores, float y",
        "qk = MatMul(q, k) scores = Add(qk, bias) soft = Softmax(scores) y = MatMul(soft, q)",
    )
    assert find(model) == {}


@pytest.mark.parametrize(
    ("inputs", "output", "nodes"),
    [
        ("float[1,3,4] picture", "float[1,3,4] y", "a = Mul(picture, c) y = Add(a, c)"),
        ("float[1,3,4] patches", "float[1,4,4] y", "y = Concat<axis = 1>(first, patches)"),
        (
            "int64[n,3] at, float[n,f,4] features, float[n,s,4] text",
            "float[n,s,4] y",
            "h = MatMul(text, w) y = ScatterElements<axis = 1>(h, at, features)",
        ),
        (
            "int64[n,s] ids, float[n,f,4] features",
            "float[n,t,4] y",
            "h = Gather(w, ids) y = Concat<axis = 1>(features, h)",
        ),
        (
            "float[1,3,4] sample, float[1,3,4] condition",
            "float[1,3,4] y",
            "noise = MatMul(condition, w) y = Sub(sample, noise)",
        ),
    ],
)
def test_what_is_prepared_for_another_model_is_no_state(
    inputs: str, output: str, nodes: str
) -> None:
    weights = ", float[1] c = {1}, float[1,1,4] first = {0}"
    assert find(build_model(inputs, output, nodes, weights)) == {}
    if "picture" in inputs or "patches" in inputs:  # nor if the rest of it follows
        read = f"{nodes} z = MatMul(y, w)"
        assert find(build_model(inputs, f"{output}, float z", read, weights)) == {}


def test_a_loop_behind_what_is_joined_proves_nothing() -> None:
    nodes = "a = Neg(b) b = Neg(a) k2 = Concat<axis = 0>(k, b) y = MatMul(k2, w)"
    assert find(build_model("float[a,4] k", "float[c,4] k2, float y", nodes)) == {}
