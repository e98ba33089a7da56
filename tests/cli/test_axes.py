"""The order of a buffer's axes, and the axis along which it is written, are proved as well."""

from __future__ import annotations

from pathlib import Path

import pytest
from models import saved
from onnx import ModelProto
from updated_models import GRAPH_COMMANDS, build_updated_model

SCATTER = "ScatterElements<axis = {}>"
IN_PLACE = "s = ScatterElements<axis = 2>(k, i, new)"
EXCHANGED = "[batch_size,ctx_len,2,4]"
CONSTANTS = """
    int64[1] start = {0}, int64[1] one = {1}, int64[1] two = {2}, int64[1] three = {3},
    int64[1] end = {9223372036854775807}, int64 first = {0}, int64 number = {2}, int64 step = {1},
    int64[3] before = {1, 2, 3}, int64[3] heads_at = {0, 2, 3}, int64[2] at_batch = {2, 3},
    int64[2,2] rows = {0, 0, 0, 1}, int64[3] flat = {-1, 16, 4}, int64[4] turned = {0, -1, 2, 4},
    int64[4] heads_first = {0, 2, -1, 4}
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def build_model(nodes: str, **settings: object) -> ModelProto:
    return build_updated_model(nodes, constants=CONSTANTS, **settings)  # type: ignore[arg-type]


def scatter_by_columns(batch: str, heads: str, positions: str) -> str:
    """A ScatterND by three columns of indices, as exporters write them."""
    return f"""
        sn = Shape(new) sb = Slice(sn, start, one) sh = Slice(sn, one, two)
        sp = Slice(sn, two, three) size = Concat<axis = 0>(sb, sh, sp, one)
        nb = Squeeze(sb, start) bs = Range(first, nb, step) b0 = Unsqueeze(bs, before)
        hs = Range(first, number, step) h0 = Unsqueeze(hs, heads_at)
        np = Squeeze(sp, start) ps = Range(first, np, step) all = Unsqueeze(ps, before)
        p0 = Unsqueeze(position_ids, inner)
        cb = Expand({batch}, size) ch = Expand({heads}, size) cp = Expand({positions}, size)
        at3 = Concat<axis = 3>(cb, ch, cp) k_out = ScatterND(k, at3, new)
    """


WRITTEN = {
    "scattered": "k_out = ScatterElements<axis = 1>(k, i, new)",
    "scattered, from the end": "k_out = ScatterElements<axis = -3>(k, i, new)",
    "scattered along the size of a head": "k_out = ScatterElements<axis = 3>(k, i, new)",
    "scattered by the old operator": "k_out = Scatter<axis = 1>(k, i, new)",
    "scattered into turned axes": "t = Transpose<perm = [0, 2, 1, 3]>(k)"
    " s = ScatterElements<axis = 2>(t, i, new) k_out = Transpose<perm = [0, 2, 1, 3]>(s)",
    "scattered after a cast": "f = Cast<to = 10>(k) n = Cast<to = 10>(new)"
    " s = ScatterElements<axis = 1>(f, i, n) k_out = Cast<to = 1>(s)",
    "scattered as rows": "k_out = ScatterND(k, rows, new)",
    "scattered by rows that come in": "k_out = ScatterND(k, index, new)",
    "scattered by turned columns": "t = Transpose<perm = [1, 0, 2, 3]>(k)"
    " at1 = Unsqueeze(slot, one) s = ScatterND(t, at1, new)"
    " k_out = Transpose<perm = [1, 0, 2, 3]>(s)",
    "scattered by columns": scatter_by_columns("b0", "p0", "all"),
    "written as a tensor": "k_out = TensorScatter<axis = 1>(k, new)",
    "written along the size of a head": "k_out = TensorScatter<axis = -1>(k, new)",
    "shifted": "old = Slice(k, one, end, one) n = ReduceMax<keepdims = 1>(new, one)"
    " k_out = Concat<axis = 1>(old, n)",
    "shifted along the size of a head": "old = Slice(k, one, end, three)"
    " n = ReduceMax<keepdims = 1>(new, three) k_out = Concat<axis = 3>(old, n)",
    "shifted by a Split": "a, b = Split<axis = 1, num_outputs = 2>(k)"
    " n = ReduceMax<keepdims = 1>(new, one) k_out = Concat<axis = 1>(b, n)",
    "cut after it was joined": "n = ReduceMax<keepdims = 1>(new, one)"
    " j = Concat<axis = 1>(k, n) k_out = Slice(j, one, end, one)",
    "put between": "a, b = Split<axis = 1, num_outputs = 2>(k)"
    " n = ReduceMax<keepdims = 1>(new, one) j = Concat<axis = 1>(a, n, b)"
    " k_out = Slice(j, one, end, one)",
    "rolled": "a = Slice(k, one, end, one) b = Slice(k, start, one, one)"
    " j = Concat<axis = 1>(a, b) k_out = Add(j, zero)",
    "rolled by a Split": "a, b = Split<axis = 1, num_outputs = 2>(k)"
    " j = Concat<axis = 1>(b, a) k_out = Add(j, zero)",
    "in a function": "k_out = local.write(k, i, new)",
    "in one branch": "k_out = If(c) <then_branch = a () => (float[b,2,t,4] p)"
    " { p = ScatterElements<axis = 2>(k, i, new) },"
    " else_branch = e () => (float[b,2,t,4] q) { q = ScatterElements<axis = 1>(k, i, new) }>",
}
FUNCTION = """
    <opset_import: ["": 18], domain: "local">
    write (data, at, updates) => (o) { o = ScatterElements<axis = 1>(data, at, updates) }
"""


@pytest.mark.parametrize("case", WRITTEN)
def test_a_cache_that_is_written_along_its_heads_is_an_error(case: str, here: Path, run) -> None:
    inputs = "bool c, int64[m,2] index, int64[m] slot"
    functions = FUNCTION if "local" in WRITTEN[case] else ""
    model = build_model(WRITTEN[case], inputs=inputs, functions=functions)
    saved(model, here / "m.onnx")
    outcome = run("verify", "m.onnx")
    axis = 3 if "size" in case or "size of a head" in case else 1
    said = f"takes new values along axis {axis} ({4 if axis == 3 else 2}) of its own input past_key"
    assert (outcome.code, said in outcome.err) == (1, True)
    assert "but positions are along axis 2 (ctx_len)" in outcome.err
    assert [line for line in outcome.err.splitlines() if "KV113" in line or "KV120" in line] == []


def test_new_heads_that_are_joined_are_an_error(here: Path, run) -> None:
    model = build_model("k_out = Concat<axis = 1>(k, new)", out="[batch_size,4,ctx_len,4]")
    model.graph.output[1].type.tensor_type.shape.dim[1].dim_param = "more"
    saved(model, here / "m.onnx")
    outcome = run("verify", "m.onnx")
    assert (
        outcome.code,
        "error KV110: past_key.0_vllmKvCache_RetainedState takes new" in (outcome.err),
    ) == (1, True)
    assert "KV120" not in outcome.err


TURNED = {
    "turned": (f"{IN_PLACE} k_out = Transpose<perm = [0, 2, 1, 3]>(s)", EXCHANGED),
    "turned, declared as before": (f"{IN_PLACE} k_out = Transpose<perm = [0, 2, 1, 3]>(s)", ""),
    "turned, not declared": (f"{IN_PLACE} k_out = Transpose<perm = [0, 2, 1, 3]>(s)", "no"),
    "size of a head turned": (f"{IN_PLACE} k_out = Transpose<perm = [0, 1, 3, 2]>(s)", ""),
    "all turned": (f"{IN_PLACE} k_out = Transpose(s)", "[4,ctx_len,2,batch_size]"),
    "turned first": (
        "t = Transpose<perm = [0, 2, 1, 3]>(k) n = Transpose<perm = [0, 2, 1, 3]>(new)"
        " at1 = Transpose<perm = [0, 2, 1, 3]>(i) k_out = ScatterElements<axis = 1>(t, at1, n)",
        EXCHANGED,
    ),
    "by an Einsum": (f'{IN_PLACE} k_out = Einsum<equation = "bhsd->bshd">(s)', EXCHANGED),
    "by an Einsum, declared as before": (
        f'{IN_PLACE} k_out = Einsum<equation = "b h s d -> b s h d">(s)',
        "",
    ),
    "by a Reshape": (f"{IN_PLACE} k_out = Reshape(s, turned)", EXCHANGED),
    "by a Reshape, not declared": (f"{IN_PLACE} k_out = Reshape(s, turned)", "no"),
    "turned, and reshaped as before": (
        f"{IN_PLACE} t = Transpose<perm = [0, 2, 1, 3]>(s) k_out = Reshape(t, heads_first)",
        "",
    ),
    "in a function": ("k_out = local.turn(k, i, new)", EXCHANGED),
    "in one branch": (
        f"{IN_PLACE} k_out = If(c) <then_branch = a () => (float[b,2,t,4] p) {{ p = Identity(s) }},"
        " else_branch = e () => (float[b,t,2,4] q) {"
        " q = Transpose<perm = [0, 2, 1, 3]>(s) }>",
        "",
    ),
}
TURN = """
    <opset_import: ["": 18], domain: "local">
    turn (data, at, updates) => (o) {
        s = ScatterElements<axis = 2>(data, at, updates) o = Transpose<perm = [0, 2, 1, 3]>(s)
    }
"""


@pytest.mark.parametrize("case", TURNED)
def test_axes_in_another_order_are_an_error(case: str, here: Path, run) -> None:
    nodes, out = TURNED[case]
    inputs = "bool c" if "If(c)" in nodes else ""
    functions = TURN if "local" in nodes else ""
    model = build_model(nodes, out="" if out == "no" else out, inputs=inputs, functions=functions)
    if out == "no":
        model.graph.output[1].type.tensor_type.ClearField("shape")
    saved(model, here / "m.onnx")
    outcome = run("verify", "m.onnx")
    assert (outcome.code, outcome.err.count("error KV104")) == (1, 1)
    assert case == "all turned" or "in another order" in outcome.err
    assert "KV113" not in outcome.err


def test_a_cache_that_grows_and_is_turned_is_an_error(here: Path, run) -> None:
    nodes = "j = Concat<axis = 2>(k, new) k_out = Transpose<perm = [0, 2, 1, 3]>(j)"
    names = {
        "k": "past_key_values.0.key",
        "v": "past_key_values.0.value",
        "k_out": "present.0.key",
        "v_out": "present.0.value",
    }
    model = build_model(
        nodes, into="[batch_size,2,past,4]", out="[batch_size,total,2,4]", names=names
    )
    saved(model, here / "m.onnx")
    outcome = run("verify", "m.onnx")
    assert (outcome.code, "error KV104: present.0.key has the axes of its" in outcome.err) == (
        1,
        True,
    )


@pytest.mark.parametrize(
    ("nodes", "out", "code"),
    [
        (WRITTEN["scattered"], "", "KV110"),
        (WRITTEN["shifted"], "", "KV110"),
        (TURNED["turned"][0], EXCHANGED, "KV104"),
        (TURNED["by a Reshape"][0], EXCHANGED, "KV104"),
    ],
)
def test_each_command_that_follows_the_graph_says_so(
    nodes: str, out: str, code: str, here: Path, run
) -> None:
    saved(build_model(nodes, out=out), here / "m.onnx")
    outcomes = {" ".join(command): run(*command) for command in GRAPH_COMMANDS}
    missing = [
        command
        for command, outcome in outcomes.items()
        if outcome.code != 1 or f"error {code}: " not in outcome.err
    ]
    assert missing == []


@pytest.mark.parametrize(
    ("nodes", "into"),
    [
        ("k_out = ScatterElements<axis = 2>(k, i, new)", ""),
        ("k_out = ScatterElements<axis = -2>(k, i, new)", ""),
        ("k_out = TensorScatter(k, new)", ""),
        (scatter_by_columns("b0", "h0", "p0"), ""),
        ("k_out = ScatterElements<axis = 0>(k, i, new)", ""),  # rows of the batch
        ("k_out = ScatterND(k, index, new)", ""),
        (
            "t = Transpose<perm = [2, 0, 1, 3]>(k) at1 = Unsqueeze(slot, one)"
            " s = ScatterND(t, at1, new) k_out = Transpose<perm = [1, 2, 0, 3]>(s)",
            "",
        ),
        (
            "t = Transpose<perm = [0, 2, 1, 3]>(k) r = Reshape(t, turned)"
            " u = Transpose<perm = [0, 2, 1, 3]>(r) k_out = ScatterElements<axis = 2>(u, i, new)",
            "",
        ),
        ("r = Reshape(k, heads_first) k_out = ScatterElements<axis = 2>(r, i, new)", ""),
        (
            "t = Transpose<perm = [0, 2, 1, 3]>(k) s = ScatterElements<axis = 1>(t, i, new)"
            " k_out = Transpose<perm = [0, 2, 1, 3]>(s)",
            "",
        ),
        (
            'e = Einsum<equation = "bhsd->sbhd">(k) s = ScatterElements<axis = 0>(e, i, new)'
            ' k_out = Einsum<equation = "sbhd->bhsd">(s)',
            "",
        ),
        (
            "f = Reshape(k, flat) n = Reshape(new, flat) at1 = Reshape(i, flat)"
            " s = ScatterElements<axis = 1>(f, at1, n) old = Shape(k) k_out = Reshape(s, old)",
            "[batch_size,2,ctx_len,4]",
        ),
        (  # each head for itself
            "a, b = Split<axis = 1, num_outputs = 2>(k)"
            " n, m = Split<axis = 1, num_outputs = 2>(new)"
            " j, l = Split<axis = 1, num_outputs = 2>(i) c = ScatterElements<axis = 2>(a, j, n)"
            " d = ScatterElements<axis = 2>(b, l, m) k_out = Concat<axis = 1>(c, d)",
            "",
        ),
        (
            "old = Slice(k, one, end, two) n = ReduceMax<keepdims = 1>(new, two)"
            " k_out = Concat<axis = 2>(old, n)",
            "",
        ),
        (
            "a = Slice(k, one, end, two) b = Slice(k, start, one, two)"
            " j = Concat<axis = 2>(a, b) k_out = ScatterElements<axis = 2>(j, i, new)",
            "",
        ),
        (
            "a = Slice(k, start, one, one) b = Slice(k, one, end, one)"
            " c = Neg(a) d = Neg(b) k_out = Concat<axis = 1>(c, d)",
            "",
        ),
        (  # the first positions stay
            "sink = Slice(k, start, one, two) old = Slice(k, two, end, two)"
            " n = ReduceMax<keepdims = 1>(new, two) k_out = Concat<axis = 2>(sink, old, n)",
            "",
        ),
        (
            "n = Transpose<perm = [0, 2, 1, 3]>(new) at1 = Transpose<perm = [0, 2, 1, 3]>(i)"
            " k_out = ScatterElements<axis = 1>(k, at1, n)",
            "[batch_size,ctx_len,2,4]",
        ),
        ("k_out = ScatterElements<axis = 1>(k, i, new)", "[1,2,16,4]"),  # nothing tells the axis
    ],
)
def test_a_cache_that_is_written_along_its_positions_is_retained(
    nodes: str, into: str, here: Path, run
) -> None:
    settings = {"into": into} if into else {}
    inputs = "int64[m,3] index, int64[m] slot"
    saved(build_model(nodes, inputs=inputs, **settings), here / "m.onnx")
    outcome = run("verify", "m.onnx")
    errors = [line for line in outcome.err.splitlines() if " KV104" in line or " KV110" in line]
    assert errors == []
    assert "2 of 2 buffers retained" in outcome.out or "KV115" in outcome.err


def test_axes_of_one_element_may_change_places(here: Path, run) -> None:
    nodes = "s = Add(k, zero) k_out = Transpose<perm = [0, 2, 1, 3]>(s)"
    saved(build_model(nodes, into="[1,1,1,4]"), here / "m.onnx")
    outcome = run("verify", "m.onnx")
    assert (outcome.code, "2 of 2 buffers retained" in outcome.out) == (0, True)


@pytest.mark.parametrize("axis", [1, 2])
def test_words_of_a_profile_tell_the_axes(axis: int, here: Path, run) -> None:
    names = {"k": "past_key_0", "v": "past_value_0", "k_out": "present_key_0"}
    names["v_out"] = "present_value_0"
    nodes = f"k_out = ScatterElements<axis = {axis}>(k, i, new)"
    saved(build_model(nodes, into="[1,2,16,4]", names=names), here / "m.onnx")
    outcome = run("verify", "m.onnx")
    assert ("KV110" in outcome.err) == (axis == 1)
