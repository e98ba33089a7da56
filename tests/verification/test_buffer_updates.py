"""How a retained output is made from its input, told from the graph and its shapes."""

from __future__ import annotations

from itertools import product
from typing import get_args

import onnx.parser
import pytest
from models import read_graph_of
from onnx import ModelProto

from onnxkvrename import load_rules
from onnxkvrename.layout.updates import (
    BufferUpdate,
    build_update_finding,
    choose_worst_update,
    compare_dims,
)
from onnxkvrename.model.protobuf import ByteSource
from onnxkvrename.model.signature import Dim, Value
from onnxkvrename.rules.plan import KvPair, PairSide
from onnxkvrename.verification import trace_buffer_updates
from onnxkvrename.verification.dataflow import (
    BufferFlow,
    check_buffer_flows,
    trace_buffer_flows,
)
from onnxkvrename.verification.operators import SizeChange
from onnxkvrename.verification.provenance import Resizing, _chain_resizings, _limit_resizings

CACHE: tuple[Dim, ...] = ("batch", 2, "ctx", 4)


def format_type(shape: tuple[Dim, ...]) -> str:
    """The type in ONNX text, which has no sums; what counts is the shape of the pair."""
    return f"float[{','.join(str(dim).replace(' + ', '_') for dim in shape)}]"


def build_model(
    nodes: str, into: tuple[Dim, ...], out: tuple[Dim, ...], functions: str = ""
) -> ModelProto:
    """A buffer ``k``, new values ``x``, positions ``i`` and ``n``, a flag ``c``; the output is

    ``k_out``.
    """
    opsets = '["": 24, "com.microsoft": 1, "com.qualcomm.cloud": 1, "local": 1]'
    text = f"""
        <ir_version: 10, opset_import: {opsets}>
        main ({format_type(into)} k, float[batch,2,seq,4] x, int64[batch,seq] i, int64[1] n, bool c)
        => ({format_type(out)} k_out) <float[1] w = {{2.0}}> {{ {nodes} }}
    """
    return onnx.parser.parse_model(text + functions)


def build_pair(into: tuple[Dim, ...] | None, out: tuple[Dim, ...] | None) -> KvPair:
    sides = (PairSide(Value("k", "FLOAT", into), "", "k"),)
    sides += (PairSide(Value("k_out", "FLOAT", out), "", "k_out"),)
    return KvPair("attention", "", "k", 0, *sides)


def trace_flow(
    nodes: str,
    into: tuple[Dim, ...] = CACHE,
    out: tuple[Dim, ...] = CACHE,
    functions: str = "",
) -> BufferFlow:
    model = build_model(nodes, into, out, functions)
    (flow,) = trace_buffer_flows(read_graph_of(model), [build_pair(into, out)])
    return flow


def trace_update(*args: object, **kwargs: object) -> str:
    return str(trace_flow(*args, **kwargs).update)  # type: ignore[arg-type]


GROWN: tuple[Dim, ...] = ("batch", 2, "ctx + seq", 4)
DERIVED: tuple[Dim, ...] = ("batch", 2, "Concatk_out_dim_2", 4)
_BOUNDS = {"zero": 0, "one": 1, "two": 2, "five": 5, "minus_four": -4, "end": 2**31 - 1}
BOUNDS = "".join(
    f"{name} = Constant<value = int64[1] {{{value}}}>() " for name, value in _BOUNDS.items()
)
GQA = "y, k_out, v = com.microsoft.GroupQueryAttention<num_heads = 2, kv_num_heads = 2>"


@pytest.mark.parametrize(
    "nodes",
    [
        "k_out = ScatterElements<axis = 2>(k, i, x)",
        "k_out = ScatterND(k, i, x)",
        "k_out = TensorScatter(k, x, n)",
        "k_out = com.qualcomm.cloud.CtxScatter(k, i, x)",
        "k_out = com.qualcomm.cloud.CtxScatter3D(k, i, x)",
        "k_out = com.qualcomm.cloud.CtxScatterCB(k, i, i, x)",
        "k_out = Where(c, x, k)",
        "t = Transpose<perm = [2, 0, 1, 3]>(k) u = ScatterND(t, i, x) "
        "k_out = Transpose<perm = [1, 2, 0, 3]>(u)",
        "a, b = Split<axis = 1, num_outputs = 2>(k) s = ScatterND(a, i, x) "
        "t = ScatterND(b, i, x) j = Concat<axis = 1>(s, t) k_out = Add(j, j)",
        "d = Mul(k, w) m = MatMul(x, x) k_out = Add(d, m)",
        f"{GQA}(x, x, x, k, k, i, i)",
        "y, k_out = com.microsoft.PagedAttention(x, x, x, k, k)",
        "one = Concat<axis = 2>(k) k_out = ScatterND(one, i, x)",
    ],
)
def test_what_is_written_in_place_keeps_its_size(nodes: str) -> None:
    assert trace_update(nodes) in ("inplace", "shift")


@pytest.mark.parametrize(
    ("nodes", "out"),
    [
        ("k_out = Concat<axis = 2>(k, x)", GROWN),
        ("k_out = Concat<axis = -2>(k, x)", DERIVED),
        # The operators are proved; that the sizes are equal is only declared.
        ("k_out = Concat<axis = 2>(k, x)", CACHE),
        ("one = Concat<axis = 2>(k) k_out = Concat<axis = 2>(one, x)", DERIVED),
        ("wide = Cast<to = 10>(k) k_out = Concat<axis = 2>(wide, x)", DERIVED),
        (f"{GQA}(x, x, x, k, k, i, i)", ("batch", 2, "total", 4)),
        ("y, k_out, v = Attention(x, x, x, , k, k)", DERIVED),
        ("y, k_out, v = com.microsoft.MultiHeadAttention(x, x, x, , , , k, k)", GROWN),
        ("k_out = Pad(k, n)", GROWN),
        # What cannot be traced has the size that is declared.
        ("k_out = com.microsoft.Mystery(k, x)", GROWN),
    ],
)
def test_what_is_longer_than_its_input_is_appended_to(nodes: str, out: tuple[Dim, ...]) -> None:
    assert trace_update(nodes, out=out) == "append along axis 2"


def test_a_shared_buffer_of_onnxruntime_does_not_grow() -> None:
    decoder = "com.microsoft.DecoderMaskedMultiHeadAttention"
    for shared, update in ((1, "inplace"), (0, "append along axis 2")):
        node = f"y, k_out, v = {decoder}<past_present_share_buffer = {shared}>(x, x, x, , , k, k)"
        assert trace_update(node) == update


def test_a_window_of_onnxruntime_has_one_size_whatever_its_symbols_are_called() -> None:
    into, out = ("batch", 2, "past_sliding", 4), ("batch", 2, "total_sliding", 4)
    for rolls, update in ((1, "shift"), (0, "append along axis 2")):
        node = GQA.replace("<", f"<sliding_window_cache = {rolls}, ")
        assert trace_update(f"{node}(x, x, x, k, k, i, i)", into, out) == update


@pytest.mark.parametrize(
    "nodes",
    [
        "j = Concat<axis = 2>(k, x) k_out = Slice(j, n, n)",
        "old = Slice(k, n, n) k_out = Concat<axis = 2>(old, x)",
        "y, k_out = com.microsoft.CausalConvWithState(x, x, x, k)",
    ],
)
def test_a_rolling_window_goes_back_into_its_input(nodes: str) -> None:
    assert trace_update(nodes) == "shift"
    if "Slice" in nodes:  # which sizes cancel out is not computed
        assert trace_update(nodes, out=DERIVED) == "unknown"
        assert trace_update(nodes, out=GROWN) == "append along axis 2"


@pytest.mark.parametrize(
    "nodes",
    [
        "j = Slice(k, n, n) k_out = Add(j, w)",
        "j = GatherElements<axis = 2>(k, i) k_out = Add(j, w)",
        "wide = Expand(k, n) k_out = Concat<axis = 2>(wide, x)",
        "both = SequenceConstruct(k, k) k_out = ConcatFromSequence<axis = 2>(both)",
        "k_out = Pad(k, n)",
        "k_out = Tile(k, n)",
        "k_out = Slice(k, n, n)",
        "k_out = Compress<axis = 2>(k, c)",
        "last, k_out = Loop(n, c, k) <body = b (int64 number, bool go, float[q] state)"
        " => (bool go_on, float[q] next, float[q] each)"
        " { go_on = Identity(go) next = Identity(state) each = Identity(state) }>",
    ],
)
@pytest.mark.parametrize("out", [CACHE, ("batch", 2, 1, 4), ("batch", 2, "other", 4)])
def test_equal_symbols_do_not_vouch_for_a_size_that_operators_change(
    nodes: str, out: tuple[Dim, ...]
) -> None:
    flow = trace_flow(nodes, out=out)
    assert (flow.verdict, flow.update.kind) == ("updated", "unknown")
    (warning,) = check_buffer_flows([flow], {"attention": "inplace"}, "mine")
    assert (warning.code, warning.severity, warning.name) == ("KV113", "warning", "k_out")
    assert "cannot be proved" in warning.message
    assert list(check_buffer_flows([flow])) == []  # nothing says that it must go back


@pytest.mark.parametrize(
    "nodes",
    [
        "j = Gather<axis = 0>(k, n) k_out = Concat<axis = 2>(j, x)",
        "j = Gather(k, n) k_out = Concat<axis = -2>(j, x)",
        "z = Concat<axis = 2>(k, x) j = Gather(z, n) k_out = Add(j, w)",
        "j = Concat<axis = 2>(k, x) a = Constant<value_ints = [3]>() k_out = Slice(j, n, n, a)",
        "j = Concat<axis = 2>(k, x) k_out = Slice(j, zero, end, two)",
        "j = Concat<axis = 2>(k, x) k_out = Slice(j, zero, end, two, one)",
        "j = Concat<axis = 2>(k, x) a, b = Split<axis = 1, num_outputs = 2>(j) "
        "k_out = Concat<axis = 1>(a, b)",
    ],
)
def test_a_cut_along_another_axis_does_not_make_room_for_what_is_appended(nodes: str) -> None:
    assert trace_update(BOUNDS + nodes) == "append along axis 2"


@pytest.mark.parametrize(
    ("nodes", "update"),
    [
        ("j = Concat<axis = -2>(k, x) k_out = Slice(j, one, end, two)", "shift"),
        ("j = Concat<axis = 2>(k, x) k_out = Slice(j, zero, end, two, two)", "shift"),
        ("j = Slice(k, one, end, two) k_out = Concat<axis = 2>(j, x)", "shift"),
        ("j = Gather(k, n) k_out = ScatterND(j, i, x)", "inplace"),
        ("j = Slice(k, zero, end, two) k_out = ScatterND(j, i, x)", "inplace"),
    ],
)
def test_a_cut_along_the_same_axis_or_of_the_batch_leaves_it_to_the_shapes(
    nodes: str, update: str
) -> None:
    assert trace_update(BOUNDS + nodes) == update


@pytest.mark.parametrize(
    ("nodes", "doubt"),
    [
        ("j = Concat<axis = 2>(k, x) k_out = Slice(j, zero, five, two)", "cut off again"),
        ("j = Concat<axis = -2>(k, x) k_out = Slice(j, zero, five, two)", "cut off again"),
        ("j = Concat<axis = 2>(k, x) k_out, rest = Split<axis = 2>(j, n, n)", "cut off again"),
        ("j = Concat<axis = 2>(x, k) k_out = Slice(j, zero, five, two)", ""),  # the oldest go
        ("j = Concat<axis = 2>(k, x) k_out = Slice(j, one, end, two)", ""),
        ("j = Concat<axis = 2>(k, x) u = Slice(j, one, end, two) k_out, v = Split<axis=2>(u)", ""),
        ("s = ScatterND(k, i, x) j = Concat<axis = 2>(s, x) k_out = Slice(j, zero, five, two)", ""),
        ("j = Concat<axis = 2>(k, x) s = ScatterND(j, i, x) k_out = Slice(s, zero, five, two)", ""),
    ],
)
def test_what_is_appended_and_cut_off_again_is_not_retained(nodes: str, doubt: str) -> None:
    """A spare row that is appended and cut off again is harmless where values are written too."""
    flow = trace_flow(BOUNDS + nodes)
    assert (flow.verdict == "untraced", doubt in flow.reason) == (bool(doubt), True)


SQUARE: tuple[Dim, ...] = ("batch", 2, 4, 4)


@pytest.mark.parametrize(
    ("nodes", "is_turned"),
    [
        ("t = Transpose<perm = [0, 1, 3, 2]>(k) k_out = ScatterND(t, i, x)", True),
        ("t = Transpose(k) k_out = ScatterND(t, i, x)", True),
        ("t = Transpose(k) u = Transpose<perm = [3, 2, 0, 1]>(t) k_out = ScatterND(u, i, x)", True),
        ("t = Transpose(k) u = ScatterND(t, i, x) k_out = Transpose(u)", False),
        (
            "t = Transpose(k) u = Transpose<perm = [3, 2, 1, 0]>(t) k_out = ScatterND(u, i, x)",
            False,
        ),
        (
            "t = Transpose<perm = [0, 1, 3, 2]>(k) s = Shape(k) r = Reshape(t, s) k_out = Neg(r)",
            False,
        ),
        ("t = Transpose<perm = [0, 1, 1, 1]>(k) u = Transpose(t) k_out = Neg(u)", False),
    ],
)
def test_axes_that_come_out_in_another_order_are_not_retained_where_they_were(
    nodes: str, is_turned: bool
) -> None:
    """Axes of equal sizes hide it; behind a Reshape nothing is known about the axes."""
    flow = trace_flow(nodes, SQUARE, SQUARE)
    assert ("another order" in flow.reason) is is_turned
    assert (flow.verdict == "untraced") is is_turned


@pytest.mark.parametrize(
    ("axis", "batch", "expected"),
    [
        ("zero", "batch", "unknown"),
        ("minus_four", "batch", "unknown"),
        ("zero", 1, "inplace"),  # all of it
    ],
)
def test_a_slice_of_a_batch_of_any_size_is_not_all_of_it(
    axis: str, batch: Dim, expected: str
) -> None:
    nodes = f"{BOUNDS} j = Slice(k, zero, one, {axis}) k_out = ScatterND(j, i, x)"
    shape = (batch, *SQUARE[1:])
    assert trace_update(nodes, shape, shape) == expected


def test_multi_head_attention_shares_a_buffer_only_if_it_is_told_the_length_of_the_past() -> None:
    node = "y, k_out, v = com.microsoft.MultiHeadAttention(x, x, x, , , , k, k{})"
    assert trace_update(node.format("")) == "append along axis 2"
    assert trace_update(node.format(", , i")) == "append along axis 2"
    assert trace_update(node.format(", n")) == "inplace"


def test_what_passes_through_or_does_not_read_its_input_is_written_once() -> None:
    assert trace_update("k_out = Identity(k)") == "once"
    assert trace_update("k_out = Identity(x)", (1, 2, 3, 4), (1, 2, 3, 4)) == "once"
    assert trace_update("k_out = Identity(x)", (1, 2, 8, 4), (1, 2, 1, 4)) == "delta along axis 2"
    assert trace_update("k_out = Identity(x)", CACHE, DERIVED) == "unknown"
    assert trace_update("k_out = MatMul(k, x)") == "unknown"


def test_of_branches_the_worst_counts() -> None:
    branches = {
        "inplace": "k_out = ScatterND(k, i, x)",
        "append along axis 2": "k_out = Concat<axis = 2>(k, x)",
        "once": "k_out = Identity(k)",
        "new": "k_out = Identity(x)",
    }
    order = ["append along axis 2", "inplace", "once", "new"]
    for first, second in product(branches, branches):
        if (first, second) == ("new", "new"):
            continue
        bodies = [
            f"{name} = g () => (float[batch,2,m,4] k_out) {{ {branches[kind]} }}"
            for name, kind in (("then_branch", first), ("else_branch", second))
        ]
        worst = min(first, second, key=order.index)
        update = trace_update(f"k_out = If(c) <{', '.join(bodies)}>", out=DERIVED)
        assert update == worst, (first, second)


def test_bodies_are_summed_up_with_what_they_do_to_the_size() -> None:
    opsets = '["": 24, "local": 1]'
    functions = "".join(
        f'<opset_import: {opsets}, domain: "local"> {head} {{ {nodes} }}'
        for head, nodes in (
            ("Join (a, b) => (c)", "c = Concat<axis = 2>(a, b)"),
            ("Keep <size> (a) => (c)", "c = Concat<axis: int = @size>(a, a)"),
            ("Move (a) => (c)", "s = Shape(a) c = Reshape(a, s)"),
        )
    )
    assert trace_update("k_out = local.Join(k, x)", out=DERIVED, functions=functions) == (
        "append along axis 2"
    )
    # An attribute that the caller decides, and axes that are not known after a Reshape.
    assert trace_update("k_out = local.Keep<size = 2>(k)", functions=functions) == "append"
    moved = "j = local.Join(k, x) k_out = local.Move(j)"
    assert trace_update(moved, functions=functions) == "append"
    loop = """
        k_out = Loop(n, c, k) <body = b (int64 number, bool go, float[q] state)
        => (bool go_on, float[q] next) {
            go_on = Identity(go) next = Concat<axis = 2>(state, x)
        }>
    """
    assert trace_update(loop) == "append along axis 2"


def test_many_different_sizes_settle_in_one() -> None:
    many = {Resizing(SizeChange.APPENDS, axis) for axis in range(9)}
    (merged,) = _limit_resizings(many)
    assert merged == Resizing(SizeChange.APPENDS | SizeChange.SEVERAL, None, axes=None)
    again = _limit_resizings({merged, Resizing(SizeChange.CUTS)})
    assert len(again) == 1
    assert _chain_resizings(again, frozenset(many)) == again


@pytest.mark.parametrize(
    ("before", "after", "change"),
    [
        ("past_sequence_length", "past_sequence_length + sequence_length", "grows"),
        ("past_sequence_length", "sequence_length+past_sequence_length", "grows"),
        ("past_sequence_length", "total_sequence_length", "grows"),
        ("past_sliding_length", "total_sliding_length", "grows"),
        ("past_len", "past_len2 + seq", "open"),
        ("ctx_len", "ctx_len", "same"),
        ("ctx_len", "total", "open"),
        ("a" * 5000, "a" * 5000 + " + b", "open"),
        (3, 5, "grows"),
        (16, 4, "shrinks"),
        (16, 16, "same"),
        (16, "n", "open"),
        (None, None, "open"),
    ],
)
def test_declared_sizes_say_whether_an_axis_grows(before: Dim, after: Dim, change: str) -> None:
    assert compare_dims((before,), (after,)) == (change,)


def test_shapes_that_are_not_there_or_of_other_ranks_say_nothing() -> None:
    assert compare_dims(None, (1,)) is None
    assert compare_dims((1,), (1, 2)) is None
    flow = trace_buffer_flows(
        read_graph_of(build_model("k_out = Concat<axis = 2>(k, x)", CACHE, CACHE)),
        [build_pair(None, None)],
    )[0]
    assert str(flow.update) == "append along axis 2"
    model = build_model("k_out = Concat<axis = -2>(k, x)", CACHE, CACHE)
    assert (
        str(trace_buffer_flows(read_graph_of(model), [build_pair(None, None)])[0].update)
        == "append"
    )
    assert choose_worst_update([]).kind == "unknown"


def test_kv120_says_what_grows_and_who_minds() -> None:
    flow = trace_flow("k_out = Concat<axis = 2>(k, x)", out=GROWN)
    (warning,) = check_buffer_flows([flow])
    assert (warning.code, warning.severity, warning.name) == ("KV120", "warning", "k_out")
    assert "along axis 2" in warning.message
    assert "(ctx -> ctx + seq)" in warning.message
    for meant in ("inplace", "once"):
        (error,) = check_buffer_flows([flow], {"attention": meant}, "mine")
        assert (error.code, error.severity) == ("KV120", "error")
        assert "profile mine retains" in error.message
    assert list(check_buffer_flows([flow], {"attention": "append"})) == []
    shapeless = build_update_finding(
        "k", "k_out", BufferUpdate("delta"), (None, None), needed_by=None, more=3
    )
    assert "only the new" in shapeless.message
    assert "3 more" in shapeless.message


def test_an_update_that_the_profile_means_is_no_fault() -> None:
    delta = trace_flow("k_out = Identity(x)", (1, 2, 8, 4), (1, 2, 1, 4))
    assert [found.code for found in check_buffer_flows([delta])] == ["KV120"]
    assert list(check_buffer_flows([delta], {"attention": "delta"})) == []
    through = trace_flow("k_out = Identity(k)")
    assert [found.code for found in check_buffer_flows([through])] == ["KV114"]
    assert list(check_buffer_flows([through], {"attention": "once"})) == []


def test_updates_are_traced_from_bytes_and_damage_is_not_reported_here() -> None:
    model = build_model("k_out = Concat<axis = 2>(k, x)", CACHE, GROWN)
    source = ByteSource.from_bytes(model.SerializeToString())
    pairs = [build_pair(CACHE, GROWN)]
    assert trace_buffer_updates(source, pairs) == {"k_out": BufferUpdate("append", 2)}
    assert trace_buffer_updates(ByteSource.from_bytes(b"\x3a\x02\xff\xff"), pairs) == {}


def test_every_kind_of_an_update_that_profiles_name_exists() -> None:
    from onnxkvrename.layout.updates import UpdateKind
    from onnxkvrename.rules.profile import UPDATES

    assert set(UPDATES) < set(get_args(UpdateKind))
    kinds = load_rules().kinds
    assert {"attention", "mla", "linear"} <= set(kinds)
    assert {kind.update for kind in kinds.values()} == {"inplace"}
