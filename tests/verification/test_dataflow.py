from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import onnx.numpy_helper
import onnx.parser
import pytest
from models import read_graph_of
from onnx import ModelProto
from tiers import thin

from onnxkvrename import load_rules
from onnxkvrename.model.proto_reader import read_signature
from onnxkvrename.model.protobuf import ByteSource
from onnxkvrename.model.signature import Value
from onnxkvrename.rules.plan import KvPair, PairSide, TokenChange, build_rename_plan
from onnxkvrename.verification.dataflow import BufferFlow, check_buffer_flows, trace_buffer_flows
from onnxkvrename.verification.graph_bodies import Body, sort_operations
from onnxkvrename.verification.strip_weights import read_model_without_weights

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
EXPORTS = Path(__file__).resolve().parents[3] / "shared" / "exports"
BROKEN = "llama2l_dynamo_subfn/VLLM-"


def build_pair(name: str) -> KvPair:
    """A buffer whose output is called like its input, and ``_out``."""
    sides = [PairSide(Value(each, "FLOAT", None), "", each) for each in (name, f"{name}_out")]
    return KvPair("attention", "", name, 0, *sides)


def build_model(nodes: str, functions: str = "", buffers: str = "k v") -> ModelProto:
    """A model of these nodes, in ONNX text; beside its buffers it has the input ``x``,

    positions ``i``, a flag ``c``, and the weights ``w`` and ``z``.
    """
    inputs = [f"float[a,b] {name}" for name in buffers.split()]
    outputs = [f"float[a,b] {name}_out" for name in buffers.split()]
    text = f"""
        <ir_version: 10, opset_import: ["": 18, "local": 1, "com.qualcomm.cloud": 1, "far": 1]>
        main ({", ".join(inputs)}, float[a,b] x, int64[a,b] i, bool c, int64 n)
        => ({", ".join(outputs)}) <float[1] w = {{2.0}}, float[1] z = {{0.0}}> {{ {nodes} }}
    """
    return onnx.parser.parse_model(text + functions)


def format_function(head: str, nodes: str) -> str:
    """A local function in ONNX text."""
    opsets = '["": 18, "local": 1, "com.qualcomm.cloud": 1, "far": 1]'
    return f'<opset_import: {opsets}, domain: "local"> {head} {{ {nodes} }}'


def describe_flow(flow: BufferFlow) -> str:
    """A flow in a few words."""
    if flow.verdict == "updated":
        assert flow.updated_by is not None
        return f"updated by {flow.updated_by.op_type}"
    if flow.verdict == "not from its input":
        return f"made of {' '.join(flow.other_inputs) or 'nothing'}"
    return f"untraced: {flow.reason}" if flow.verdict == "untraced" else flow.verdict


def trace_flows(
    nodes: str, functions: str = "", buffers: str = "k v", change: Callable[..., object] = id
) -> list[str]:
    """Return the flow of each buffer."""
    model = build_model(nodes, functions, buffers)
    change(model)
    return [
        describe_flow(flow)
        for flow in trace_buffer_flows(read_graph_of(model), map(build_pair, buffers.split()))
    ]


SCATTER = "ScatterElements<axis = 1>"
SOUND_V = f"v_out = {SCATTER}(v, i, x)"

# Forms of an update


@pytest.mark.parametrize(
    ("update", "op_type"),
    [
        (f"k_out = {SCATTER}(k, i, x)", "ScatterElements"),
        ("k_out = ScatterND(k, i, x)", "ScatterND"),
        ("k_out = TensorScatter(k, x, i)", "TensorScatter"),
        ("k_out = Concat<axis = 1>(k, x)", "Concat"),
        ("old = Slice(k, n, n) k_out = Concat<axis = 1>(x, old)", "Concat"),
        ("k_out = Where(c, x, k)", "Where"),
        ("k_out = Where(c, k, x)", "Where"),
        ("wide = Cast<to = 1>(k) new = Concat<axis = 1>(wide, x) k_out = Transpose(new)", "Concat"),
        (f"empty = Mul(x, z) k_out = {SCATTER}(empty, i, k)", "ScatterElements"),
        ("decayed = Mul(k, w) new = MatMul(x, x) k_out = Add(decayed, new)", "Add"),
        ("decayed = Mul(k, w) read = MatMul(k, x) k_out = Sub(decayed, read)", "Sub"),
        ("k_out = com.qualcomm.cloud.CtxScatter(k, i, x)", "CtxScatter"),
        ("k_out = com.qualcomm.cloud.CtxScatterCB(k, i, i, x)", "CtxScatterCB"),
        ("y, k_out, u = Attention(x, x, x, , k, v)", "Attention"),
        ("y, k_out = com.microsoft.GroupQueryAttention(x, x, x, k, v)", "GroupQueryAttention"),
        ("y, k_out = LSTM(x, x, x, , , k, v)", "LSTM"),
        ("k_out = Concat<axis = 1>(k, new) new = Identity(x)", "Concat"),
    ],
)
def test_an_update_is_proved_and_its_operator_named(update: str, op_type: str) -> None:
    assert trace_flows(f"{update} {SOUND_V}") == [
        f"updated by {op_type}",
        "updated by ScatterElements",
    ]


DECODER = """
    new_k0 = MatMul(x, x) new_v0 = MatMul(x, w)
    k0_out = ScatterElements<axis = 1>(k0, i, new_k0)
    v0_out = ScatterElements<axis = 1>(v0, i, new_v0)
    scores0 = MatMul(x, k0_out) soft0 = Softmax(scores0) context0 = MatMul(soft0, v0_out)
    hidden = Add(x, context0)
    new_k1 = MatMul(hidden, x) new_v1 = MatMul(hidden, w)
    k1_out = ScatterElements<axis = 1>(k1, i, new_k1)
    v1_out = ScatterElements<axis = 1>(v1, i, new_v1)
"""
LAYERS = "k0 v0 k1 v1"


def rename_values(text: str, **names: str) -> str:
    """The same nodes with some names exchanged, all at once."""
    words = {f"{old}_out": f"{new}_out" for old, new in names.items()}
    for old in words:
        text = text.replace(old, f"<{old}>")
    for old, new in words.items():
        text = text.replace(f"<{old}>", new)
    return text


def test_in_a_decoder_that_is_sound_every_buffer_is_proved() -> None:
    assert trace_flows(DECODER, buffers=LAYERS) == ["updated by ScatterElements"] * 4


@pytest.mark.parametrize(
    ("swapped", "expected"),
    [
        ({"k0": "v0", "v0": "k0"}, ["made of v0", "made of k0", "", ""]),
        ({"k1": "v1", "v1": "k1"}, ["", "", "made of v1", "made of k1"]),
        ({"k0": "k1", "k1": "k0"}, ["made of k1", "", "made of k0", ""]),
        (
            {"k0": "v1", "v1": "k1", "k1": "v0", "v0": "k0"},
            ["made of v0", "made of k1", "made of v1", "made of k0"],
        ),
    ],
)
def test_swapped_outputs_are_found_though_each_depends_on_both(
    swapped: dict[str, str], expected: list[str]
) -> None:
    descriptions = trace_flows(rename_values(DECODER, **swapped), buffers=LAYERS)
    assert descriptions == [each or "updated by ScatterElements" for each in expected]


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        (f"k_out = {SCATTER}(v, i, x)", "made of v"),
        (f"mean = ReduceMean(k) k_out = {SCATTER}(v, i, mean)", "made of v"),
        (f"k_out = {SCATTER}(v, i, k)", "made of v"),
        ("k_out = Concat<axis = 1>(x, w)", "made of nothing"),
        ("k_out = ConstantOfShape(s) s = Shape(k)", "made of nothing"),
        ("s = Shape(k) k_out = Expand(w, s)", "made of nothing"),
        ("new = MatMul(x, v) k_out = Identity(new)", "made of nothing"),
        ("k_out = Constant<value_float = 1.0>()", "made of nothing"),
        ("k_out = Identity(x)", "made of nothing"),
    ],
)
def test_an_output_that_is_made_of_something_else_is_found(nodes: str, expected: str) -> None:
    assert trace_flows(f"{nodes} {SOUND_V}") == [expected, "updated by ScatterElements"]


@pytest.mark.parametrize("nodes", ["Identity(k)", "Transpose(k)", "Cast(k)"])
def test_a_buffer_that_nothing_is_written_to_passes_through(nodes: str) -> None:
    assert trace_flows(f"k_out = {nodes} {SOUND_V}") == [
        "passed through",
        "updated by ScatterElements",
    ]


LINEAR = """
    kept = Slice(conv, n, n) conv_out = Concat<axis = 1>(kept, x)
    weighted = Mul(conv_out, w) mixed = Sigmoid(weighted) update = Mul(mixed, x)
    decayed = Mul(state, w) state_out = Add(decayed, update)
"""


def test_a_recurrent_state_may_depend_on_the_convolution_state_of_its_layer() -> None:
    assert trace_flows(LINEAR, buffers="conv state") == ["updated by Concat", "updated by Add"]


def test_swapped_linear_states_are_found_though_one_depends_on_both() -> None:
    swapped = rename_values(LINEAR, conv="state", state="conv")
    assert trace_flows(swapped, buffers="conv state") == ["made of state", "made of conv"]


# Values that are lost, or copied from another buffer


def set_constants(**values: object) -> Callable[[ModelProto], None]:
    """Give a model these constants."""

    def change(model: ModelProto) -> None:
        for name, value in values.items():
            model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(value), name))

    return change


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ("k_out = Mul(k, z)", "made of nothing"),
        (f"none = Mul(z, k) k_out = {SCATTER}(none, i, x)", "made of nothing"),
        ("k_out = Sub(k, k)", "made of nothing"),
        ("none = Sub(k, k) k_out = Add(none, v)", "made of v"),
        ("k_out = Where(no, k, x)", "made of nothing"),
        ("k_out = Where(no, k, v)", "made of v"),
        ("a = Mul(v, w) k_out = Where(no, k, a)", "made of v"),
        ("k_out = Where(no, v, k)", "updated by Where"),
        ("k_out = Where(yes, k, v)", "updated by Where"),
        ("k_out = Where(partly, k, x)", "updated by Where"),
        ("none = Mul(k, z) a = Mul(v, w) b = Mul(a, w) k_out = Add(none, b)", "made of v"),
        ("none = Mul(k, z) a = MatMul(v, w) k_out = Add(none, a)", "made of nothing"),
    ],
)
def test_what_constants_leave_out_is_not_what_an_output_is_made_of(
    nodes: str, expected: str
) -> None:
    change = set_constants(no=[[False]], yes=[[True]], partly=[[True, False]])
    assert trace_flows(f"{nodes} {SOUND_V}", change=change)[0] == expected


@pytest.mark.parametrize(("always", "expected"), [(True, "made of nothing"), (False, "updated by")])
def test_a_branch_that_a_constant_condition_never_takes_proves_nothing(
    always: bool, expected: str
) -> None:
    nodes = format_if("t = MatMul(x, x)", f"e = {SCATTER}(k, i, x)").replace("If (c)", "If (d)")
    assert trace_flows(nodes, change=set_constants(d=always))[0].startswith(expected)


def test_constants_whose_data_are_not_read_leave_it_open() -> None:
    """A large weight is read without its data, and external data are not read at all."""

    def make_external(model: ModelProto) -> None:
        model.graph.initializer[-1].data_location = onnx.TensorProto.EXTERNAL

    def make_large(model: ModelProto) -> None:
        set_constants(d=np.zeros((1, 2000), np.float32))(model)

    def make_default(model: ModelProto) -> None:
        set_constants(d=np.zeros((1, 1), np.float32))(model)
        model.graph.input.add().CopyFrom(model.graph.input[0])
        model.graph.input[-1].name = "d"

    nodes = f"k_out = Mul(k, {{}}) {SOUND_V}"
    for change, name in ((make_external, "z"), (make_large, "d"), (make_default, "d")):
        assert trace_flows(nodes.format(name), change=change)[0] == "updated by Mul"


@pytest.mark.parametrize(
    "nodes",
    [
        f"k_out = {SCATTER}(k, i, v)",
        f"old = {SCATTER}(k, i, x) a = Mul(v, w) k_out = {SCATTER}(old, i, a)",
        "a = Mul(v, w) both = Concat<axis = 1>(k, a) k_out = Slice(both, n, n)",
        "a = Mul(v, w) k_out = Where(c, k, a)",
        "difference = Sub(v, k) k_out = Add(k, difference)",
        "a = Mul(v, w) b = Div(a, x) d = Transpose(b) e = Neg(d) k_out = Add(k, e)",
    ],
)
def test_a_copy_of_another_buffer_leaves_it_open_what_is_retained(nodes: str) -> None:
    why = "untraced: values of v are copied or added into it as well"
    assert trace_flows(f"{nodes} {SOUND_V}") == [why, "updated by ScatterElements"]


@pytest.mark.parametrize(
    "nodes",
    [
        f"new = MatMul(v, x) k_out = {SCATTER}(k, i, new)",
        f"new = Sigmoid(v) k_out = {SCATTER}(k, i, new)",
        f"gate = Sigmoid(v) new = Mul(v, gate) k_out = {SCATTER}(k, i, new)",
        "a = Max(v, x) scale = Neg(a) k_out = Mul(k, scale)",
        f"new = far.Project(v) k_out = {SCATTER}(k, i, new)",
    ],
)
def test_what_is_computed_from_another_buffer_is_no_copy_of_it(nodes: str) -> None:
    assert trace_flows(f"{nodes} {SOUND_V}")[0].startswith("updated by")


# What is not proved


@pytest.mark.parametrize(
    ("nodes", "why"),
    [
        ("k_out = far.Update(k, x)", "Update of far"),
        ("new = far.Pick(v, k) k_out = Neg(new)", "Pick of far"),
        ("new = far.Pick(k) k_out = Add(v, new)", "Pick of far"),
        ("k_out = MatMul(k, x)", "that mix values"),
        ("a = Neg(k) k_out = MatMul(a, x)", "that mix values"),
        (
            "both = Concat<axis = 0>(k, v) k_out = Slice(both, n, n)",
            "computed from v",
        ),
        ("k_out = Add(k, v)", "computed from v"),
    ],
)
def test_what_cannot_be_told_is_never_counted_as_proved(nodes: str, why: str) -> None:
    description = trace_flows(f"{nodes} {SOUND_V}")[0]
    assert description.startswith("untraced: ")
    assert why in description


def test_a_sum_of_its_own_state_and_of_another_sound_one_is_not_called_wrong() -> None:
    nodes = "a = Mul(k, w) b = Mul(a, w) k_out = Add(b, v)"
    why = "untraced: it is computed from v, and from its own input in more steps"
    assert trace_flows(f"{nodes} {SOUND_V}") == [why, "updated by ScatterElements"]
    swapped = f"{nodes} v_out = {SCATTER}(k, i, x)"  # v has no later state of its own
    assert trace_flows(swapped) == ["made of v", "made of k"]


def test_buffers_that_are_stacked_and_taken_apart_again_are_not_called_wrong() -> None:
    names = [f"k{n}" for n in range(40)]
    slices = " ".join(f"{name}_out = Slice(both, n, n)" for name in names)
    descriptions = trace_flows(
        f"both = Concat<axis = 0>({', '.join(names)}) {slices}", buffers=" ".join(names)
    )
    (description,) = set(descriptions)
    assert "more than 16" in description


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        (f"new = far.Norm(x, v) k_out = {SCATTER}(k, i, new)", "updated by ScatterElements"),
        ("new = far.Norm(x, v) k_out = Concat<axis = 1>(k, new)", "updated by Concat"),
        ("k_out = far.Update(v, x)", "made of v"),
        ("k_out = far.Make(x)", "made of nothing"),
    ],
)
def test_a_custom_operator_beside_the_way_leaves_no_doubt(nodes: str, expected: str) -> None:
    assert trace_flows(f"{nodes} {SOUND_V}")[0] == expected


@pytest.mark.parametrize(
    ("nodes", "why"),
    [
        ("a = Add(k, b) b = Neg(a) k_out = Neg(a)", "in a circle"),
        ("k_out = Neg(k) k_out = Neg(x)", "two nodes make k_out"),
    ],
)
def test_a_graph_without_an_order_is_untraced(nodes: str, why: str) -> None:
    description = trace_flows(f"{nodes} {SOUND_V}")[0]
    assert description.startswith("untraced: ")
    assert why in description


# Subgraphs


def format_if(then: str, other: str) -> str:
    """An If that makes ``k_out``, its last values called ``t`` and ``e``."""
    return f"""
        k_out = If (c) <
            then_branch = one () => (float[a,b] t) {{ {then} }},
            else_branch = two () => (float[a,b] e) {{ {other} }}
        > {SOUND_V}
    """


AS_MUCH = "untraced: it is computed from v as much as from its own input"
UNCHANGED = "e = Identity(k)"


@pytest.mark.parametrize(
    ("then", "other", "expected"),
    [
        (f"t = {SCATTER}(k, i, x)", UNCHANGED, "updated by ScatterElements"),
        ("t = Identity(k)", UNCHANGED, "passed through"),
        ("t = Mul(k, z)", UNCHANGED, "updated by Mul"),
        ("t = Identity(k)", "e = Mul(k, z)", "updated by Mul"),
        (
            "t = Identity(k)",
            "e = Add(k, v)",
            AS_MUCH,
        ),
        ("t = MatMul(x, x)", f"e = {SCATTER}(k, i, x)", "updated by ScatterElements"),
        (f"t = {SCATTER}(v, i, x)", UNCHANGED, "made of v"),
        (f"t = {SCATTER}(v, i, x)", "e = Neg(v)", "made of v"),
        ("t = Neg(x)", "e = Neg(x)", "made of nothing"),
        ("t = far.Update(k)", UNCHANGED, "untraced: Update of far has no body in the model"),
        ("k = Neg(v) t = Neg(k)", "e = Neg(v)", "made of v"),
    ],
)
def test_both_branches_of_an_if_are_followed(then: str, other: str, expected: str) -> None:
    assert trace_flows(format_if(then, other)) == [expected, "updated by ScatterElements"]


def test_a_branch_in_a_branch_sees_what_is_around_both() -> None:
    inner = format_if(f"t = {SCATTER}(cached, i, x)", "e = Neg(cached)").replace(SOUND_V, "")
    then = f"{inner.replace('k_out', 'q')} t = Identity(q)"
    sound = f"cached = Identity(k) {format_if(then, UNCHANGED)}"
    assert trace_flows(sound)[0] == "updated by ScatterElements"
    assert trace_flows(sound.replace("Identity(k)", "Identity(v)", 1))[0] == "made of v"


def test_a_weight_of_a_branch_hides_the_buffer_of_its_name() -> None:
    def hide(model: ModelProto) -> None:
        model.graph.node[0].attribute[0].g.initializer.add(name="k", data_type=1, dims=[0])

    nodes = format_if("t = Neg(k)", "e = Neg(x)")
    assert trace_flows(nodes)[0] == "updated by Neg"
    assert trace_flows(nodes, change=hide)[0] == "made of nothing"


def format_loop(body: str, first: str = "k, v", outputs: str = "k_out, v_out") -> str:
    """A Loop with two states, ``s`` and ``t`` in its body, that become ``p`` and ``q``."""
    return f"""
        {outputs} = Loop (n, c, {first}) <body = step (
            int64 round, bool go, float[a,b] s, float[a,b] t
        ) => (bool went, float[a,b] p, float[a,b] q) {{ went = Identity(go) {body} }}>
    """


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        (
            format_loop("p = ScatterND(s, i, x) q = Mul(t, w)"),
            ["updated by ScatterND", "updated by Mul"],
        ),
        (format_loop("p = Identity(s) q = Mul(t, w)"), ["passed through", "updated by Mul"]),
        (format_loop("p = ScatterND(t, i, x) q = ScatterND(s, i, x)"), ["made of v", "made of k"]),
        (
            format_loop("p = ScatterND(s, i, x) q = Neg(t)", first="v, k"),
            ["made of v", "made of k"],
        ),
        (format_loop("p = Neg(s) q = Neg(t)", outputs="v_out, k_out"), ["made of v", "made of k"]),
        (format_loop("p = Neg(x) q = Neg(t)"), ["made of nothing", "updated by Neg"]),
        (format_loop("p = Neg(k) q = Neg(t)"), ["updated by Neg", "updated by Neg"]),
        (
            format_loop("p = Neg(s) q = Add(t, s)"),
            ["updated by Neg", "untraced: it is computed from k as much"],
        ),
    ],
)
def test_the_states_of_a_loop_are_followed_round(node: str, expected: list[str]) -> None:
    for description, start in zip(trace_flows(node), expected, strict=True):
        assert description.startswith(start)


def format_scan(body: str, outputs: str = "k_out, v_out, y") -> str:
    """A Scan over ``x`` with two states."""
    return f"""
        {outputs} = Scan <num_scan_inputs = 1, body = step (
            float[a] s, float[a] t, float[a] row
        ) => (float[a] p, float[a] q, float[a] out) {{ {body} out = Identity(row) }}> (k, v, x)
    """


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        (format_scan("p = Add(s, row) q = Mul(t, row)"), ["updated by Add", "updated by Mul"]),
        (format_scan("p = Add(t, row) q = Mul(s, row)"), ["made of v", "made of k"]),
        (
            format_scan("p = Neg(s) q = Neg(t)", "y, v_out, k_out"),
            ["made of nothing", "updated by Neg"],
        ),
    ],
)
def test_the_states_of_a_scan_are_followed(node: str, expected: list[str]) -> None:
    assert trace_flows(node) == expected


def test_a_loop_that_does_not_fit_its_body_is_untraced() -> None:
    def shortened(model: ModelProto) -> None:
        del model.graph.node[0].attribute[0].g.input[-1]

    assert trace_flows(format_loop("p = Neg(s) q = Neg(s)"), change=shortened) == [
        "untraced: the Loop does not fit its body"
    ] * 2  # fmt: skip


def test_a_branch_with_an_input_is_untraced() -> None:
    def widen(model: ModelProto) -> None:
        graph = model.graph.node[0].attribute[0].g
        graph.input.add().CopyFrom(model.graph.input[0])
        graph.input[0].name = "extra"

    node = format_if("t = Neg(k)", UNCHANGED)
    assert trace_flows(node, change=widen)[0] == "untraced: the If does not fit its body"


# Local functions

LAYER = format_function(
    "layer (h, i, k, v) => (h_out, k_out, v_out)",
    """
    key = MatMul(h, h)  value = MatMul(h, key)
    k_out = com.qualcomm.cloud.CtxScatter(k, i, key) v_out = ScatterND(v, i, value)
    scores = MatMul(h, k_out) context = MatMul(scores, v_out) h_out = Add(h, context)
    """,
)
CALLS = """
    h1, k0_out, v0_out = local.layer(x, i, k0, v0)
    h2, k1_out, v1_out = local.layer(h1, i, k1, v1)
"""
SCATTERED = ["updated by CtxScatter", "updated by ScatterND"]


def test_a_layer_as_a_function_is_followed_into() -> None:
    assert trace_flows(CALLS, LAYER, LAYERS) == SCATTERED * 2


@pytest.mark.parametrize(
    ("calls", "layer", "expected"),
    [
        (CALLS, LAYER.replace("Scatter(k,", "Scatter(v,"), ["made of v0", SCATTERED[1]]),
        (CALLS, LAYER.replace("(h_out, k_out, v_out)", "(h_out, v_out, k_out)"), ["v0", "k0"]),
        (CALLS, LAYER.replace("Scatter(k,", "Scatter(h,"), ["made of nothing", SCATTERED[1]]),
        (CALLS, LAYER.replace("ScatterND(v, i, value)", "Identity(v)"), [SCATTERED[0], "passed"]),
        (CALLS.replace("x, i, k0, v0", "x, i, v0, k0"), LAYER, ["made of v0", "made of k0"]),
        (rename_values(CALLS, k0="v0", v0="k0"), LAYER, ["made of v0", "made of k0"]),
        (rename_values(CALLS, k0="k1", k1="k0"), LAYER, ["made of k1", SCATTERED[1]]),
        (CALLS.replace("k0, v0)", "k1, v0)"), LAYER, ["made of k1", SCATTERED[1]]),
        (CALLS.replace("i, k0, v0)", "i, x, v0)"), LAYER, ["made of nothing", SCATTERED[1]]),
    ],
)
def test_faults_in_a_function_and_around_it_are_found(
    calls: str, layer: str, expected: list[str]
) -> None:
    for description, part in zip(trace_flows(calls, layer, LAYERS), expected, strict=False):
        assert part in description


def test_functions_in_functions_are_followed_and_the_scatter_named_where_it_is_called() -> None:
    scatter = format_function("CtxScatter (d, i, u) => (o)", "o = ScatterND(d, i, u)")
    scatter = scatter.replace('domain: "local"', 'domain: "com.qualcomm.cloud"')
    model = build_model(
        CALLS, LAYER.replace("k_out = com", "[inner] k_out = com") + scatter, LAYERS
    )
    model.graph.node[0].name = "first"
    flows = trace_buffer_flows(read_graph_of(model), map(build_pair, LAYERS.split()))
    assert [describe_flow(flow) for flow in flows] == SCATTERED * 2
    assert flows[0].updated_by == ("CtxScatter", "inner in first")


def test_one_summary_serves_every_call_of_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    followed = []
    operations = sort_operations

    def counted(body: Body, *rest: object, **how: bool) -> object:
        followed.append(body.outputs)
        return operations(body, *rest, **how)  # type: ignore[arg-type]

    monkeypatch.setattr("onnxkvrename.verification.tracing.sort_operations", counted)
    buffers = " ".join(f"k{n} v{n}" for n in range(94))
    calls = [f"h{n + 1}, k{n}_out, v{n}_out = local.layer(h{n}, i, k{n}, v{n})" for n in range(94)]
    assert trace_flows(f"h0 = Neg(x) {' '.join(calls)}", LAYER, buffers) == SCATTERED * 94
    assert followed.count(("h_out", "k_out", "v_out")) == 1  # all that was met is followed


def test_a_function_that_calls_itself_is_untraced() -> None:
    circle = format_function("one (a) => (b)", "b = local.two(a)") + format_function(
        "two (a) => (b)", "b = local.one(a)"
    )
    assert trace_flows(f"k_out = local.one(k) {SOUND_V}", circle)[0].endswith("calls itself")
    assert trace_flows(f"k_out = local.one(v) {SOUND_V}", circle)[0] == "made of v"


@pytest.mark.parametrize(
    ("count", "expected"), [(90, "updated by Neg"), (2000, "is used too often")]
)
def test_functions_in_each_other_are_followed_to_a_depth(count: int, expected: str) -> None:
    calls = [format_function(f"f{n} (a) => (b)", f"b = local.f{n + 1}(a)") for n in range(count)]
    last = format_function(f"f{count} (a) => (b)", "b = Neg(a)")
    assert expected in trace_flows(f"k_out = local.f0(k) {SOUND_V}", "".join(calls) + last)[0]


def test_a_branch_in_a_function_is_judged_by_what_the_call_gives_it() -> None:
    body = format_if("t = ScatterND(k, i, u)", "e = Identity(u)").replace(SOUND_V, "")
    update = format_function("update (c, k, i, u) => (k_out)", body)
    call = f"k_out = local.update(c, k, i, new) {SOUND_V}"
    assert trace_flows(f"new = MatMul(x, x) {call}", update)[0] == "updated by ScatterND"
    assert trace_flows(f"new = Neg(v) {call}", update)[0] == "made of v"


@pytest.mark.parametrize(("overloaded", "expected"), [(0, "made of v"), (1, "updated by Neg")])
def test_functions_are_told_apart_by_their_overload(overloaded: int, expected: str) -> None:
    def overload(model: ModelProto) -> None:
        model.functions[overloaded].overload = model.graph.node[0].overload = "second"

    both = format_function("f (a, b) => (c)", "c = Neg(a)") + format_function(
        "f (a, b) => (c)", "c = Neg(b)"
    )
    assert trace_flows(f"k_out = local.f(v, k) {SOUND_V}", both, change=overload)[0] == expected


def test_doubt_is_carried_through_a_call() -> None:
    turned = format_function("f (a) => (b)", "b = Neg(a)")
    description = trace_flows(f"new = far.Pick(k, v) k_out = local.f(new) {SOUND_V}", turned)[0]
    assert "untraced: Pick of far" in description


def test_a_function_may_be_given_fewer_arguments_than_it_takes() -> None:
    taking = format_function("f (a, b) => (c)", "c = Concat<axis = 0>(a, b)")
    assert trace_flows(f"k_out = local.f(k) {SOUND_V}", taking)[0] == "updated by Concat"


# Hostile models


def test_long_chains_need_no_stack() -> None:
    chain = [f"a{n + 1} = Neg(a{n})" for n in range(10_000)]
    nodes = f"a0 = Neg(k) {' '.join(chain)} k_out = Neg(a10000) {SOUND_V}"
    assert trace_flows(nodes)[0] == "updated by Neg"


def test_functions_that_double_and_loops_in_loops_cost_no_more_than_their_text() -> None:
    doubling = [
        format_function(f"f{n} (a) => (b)", f"c = local.f{n + 1}(a) b = local.f{n + 1}(c)")
        for n in range(50)
    ]
    doubling.append(format_function("f50 (a) => (b)", "b = Neg(a)"))
    nested = "p20 = Neg(s20)"
    for depth in range(20, 0, -1):
        nested = f"""p{depth - 1} = Loop (n, c, s{depth - 1}) <body = g (
            int64 r{depth}, bool go{depth}, float s{depth}) => (bool on{depth}, float p{depth})
            {{ on{depth} = Identity(go{depth}) {nested} }}>"""
    nested = nested.replace("s0)", "v)").replace("p0 =", "v_out =")
    assert (
        trace_flows(f"k_out = local.f0(k) {nested}", " ".join(doubling)) == ["updated by Neg"] * 2
    )


def test_states_that_change_places_without_end_are_not_proved() -> None:
    names = [f"k{n}" for n in range(40)]
    states = ", ".join(f"float s{n}" for n in range(40))
    turned = " ".join(f"p{n} = Identity(s{(n + 1) % 40})" for n in range(40))
    node = f"""{", ".join(f"{name}_out" for name in names)} = Loop (n, c, {", ".join(names)})
        <body = g (int64 r, bool go, {states}) => (bool on, {states.replace("s", "p")})
        {{ on = Identity(go) {turned} }}>"""
    descriptions = trace_flows(node, buffers=" ".join(names))
    assert not [each for each in descriptions if each.startswith(("updated", "passed"))]


def test_names_that_are_not_utf_8_are_followed_like_others() -> None:
    data = build_model(f"k_out = Neg(k) {SOUND_V}", buffers="k v").SerializeToString()
    model = ModelProto.FromString(
        data.replace(b"k_out", b"k\xff\xfeut").replace(b"\x01k", b"\x01\xff")
    )
    input_name, output_name = (
        raw.decode("utf-8", "surrogateescape") for raw in (b"\xff", b"k\xff\xfeut")
    )
    sides = [PairSide(Value(name, "FLOAT", None), "", name) for name in (input_name, output_name)]
    (flow,) = trace_buffer_flows(read_graph_of(model), [KvPair("attention", "", "k", 0, *sides)])
    assert describe_flow(flow) == "updated by Neg"


# Findings


@pytest.mark.parametrize(
    ("nodes", "finding"),
    [
        (
            f"k_out = {SCATTER}(v, i, x)",
            ("KV110", "error", "k_out", "is computed from v, not from its own input k"),
        ),
        (
            "k_out = Neg(x)",
            ("KV110", "error", "k_out", "is computed from no buffer, not from its own input k"),
        ),
        (
            "k_out = Neg(a) a = far.Op(k)",
            (
                *("KV113", "warning", "k_out"),
                "could not be traced to its input k, so retention is not proved: "
                "Op of far has no body in the model",
            ),
        ),
        (
            "k_out = Identity(k)",
            *[
                (
                    "KV114",
                    "warning",
                    "k_out",
                    "is its input k, unchanged: the model never writes to this buffer",
                )
            ],
        ),
    ],
)
def test_each_fault_has_its_finding(nodes: str, finding: tuple[str, ...]) -> None:
    (first,) = check_buffer_flows(
        trace_buffer_flows(read_graph_of(build_model(f"{nodes} {SOUND_V}")), map(build_pair, "kv"))
    )
    assert first[:4] == finding


def test_a_sound_model_has_no_findings() -> None:
    assert (
        list(
            check_buffer_flows(
                trace_buffer_flows(
                    read_graph_of(build_model(DECODER, buffers=LAYERS)),
                    map(build_pair, LAYERS.split()),
                )
            )
        )
        == []
    )


def test_a_pair_with_one_side_missing_is_left_to_other_checks() -> None:
    half = build_pair("k")._replace(input=None)
    flows = trace_buffer_flows(
        read_graph_of(build_model(f"k_out = Neg(v) {SOUND_V}")), [half, build_pair("v")]
    )
    assert [(flow.pair.buffer, flow.verdict) for flow in flows] == [("v", "updated")]


# Whole files


def trace_file(path: Path, change: Callable[[ModelProto], object] = id) -> tuple[BufferFlow, ...]:
    """The flows in a file, after a change to the model."""
    source = ByteSource.from_bytes(path.read_bytes())
    pairs = build_rename_plan(
        read_signature(source), load_rules(), TokenChange(None, strip=True)
    ).pairs
    model = read_model_without_weights(source)
    change(model)
    return trace_buffer_flows(read_graph_of(model), pairs)


@pytest.mark.parametrize(
    "path", sorted(FIXTURES.rglob("*.onnx")), ids=lambda path: str(path.relative_to(FIXTURES))
)
def test_every_buffer_of_every_fixture_is_proved(path: Path) -> None:
    flows = trace_file(path)
    assert {flow.verdict for flow in flows} <= {"updated"}
    assert bool(flows) == (path.name != "encoder.onnx")


def list_exports(*kinds: str) -> list[str]:
    """Real exports, by their paths."""
    flows = sorted(path for kind in kinds for path in EXPORTS.glob(f"*/{kind}-*/**/*.onnx"))
    return [str(path.relative_to(EXPORTS)) for path in flows]


real = pytest.mark.skipif(not EXPORTS.is_dir(), reason=f"no real exports: {EXPORTS} is not there")
DECODERS = [path for path in list_exports("plain") if "Encoder" not in path]


@real
@pytest.mark.parametrize("path", thin(list_exports("plain", "VLLM"), 4))
def test_every_buffer_of_a_real_export_is_proved(path: str) -> None:
    flows = trace_file(EXPORTS / path)
    updated = {flow.updated_by.op_type for flow in flows if flow.updated_by is not None}
    assert {flow.verdict for flow in flows} <= {"updated"}
    assert updated <= {"CtxScatter", "CtxScatterCB", "Concat"}
    assert bool(flows) == ("Encoder" not in path and not path.startswith(BROKEN))


def exchange_outputs(model: ModelProto, first: str, second: str) -> None:
    """Let two outputs change names, wherever the graph sees them."""
    names = {first: second, second: first}
    for node in model.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]


@real
@pytest.mark.parametrize("path", thin(DECODERS, 2))
def test_two_outputs_that_are_exchanged_in_a_real_export_are_found(path: str) -> None:
    sides = [flow.pair.output for flow in trace_file(EXPORTS / path)]
    names = [side.old_name for side in sides if side is not None]
    for first, second in ((names[0], names[1]), (names[0], names[-1])):
        flows = trace_file(EXPORTS / path, partial(exchange_outputs, first=first, second=second))
        wrong = {
            flow.pair.output.old_name for flow in flows if flow.verdict == "not from its input"
        }
        assert wrong == {first, second}
        assert {flow.verdict for flow in flows} <= {"updated", "not from its input"}


@real
@pytest.mark.parametrize("path", [path for path in DECODERS if "subfn" in path])
def test_key_and_value_exchanged_in_the_function_of_a_real_export_are_found(path: str) -> None:
    def exchanged(model: ModelProto) -> None:
        (layer,) = [item for item in model.functions if "DecoderLayer" in item.name]
        scatters = [node for node in layer.node if node.op_type == "CtxScatter"]
        key, value = (node.input[0] for node in scatters)
        scatters[0].input[0], scatters[1].input[0] = value, key

    assert {flow.verdict for flow in trace_file(EXPORTS / path, exchanged)} == {
        "not from its input"
    }
