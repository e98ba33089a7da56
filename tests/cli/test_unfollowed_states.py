"""Where the cache goes through what is not followed, what is joined to it is not called the cache.

The cache is `past`, or `packed`, and the new keys are `x`, an input as well.
"""

from __future__ import annotations

import json
from pathlib import Path

import onnx.parser
import pytest
from models import saved
from onnx import ModelProto

CACHE = "float[b,2,p,4] past"
NEW = "float[b,2,s,4] x"
JOIN = "y = Concat<axis = 2>(old, x)"


def build_model(inputs: str, nodes: str, *, functions: str = "", output: str = "") -> ModelProto:
    """A model that makes `y` of inputs and reads it, beside a cache of its own, `mem` to `mem2`."""
    opsets = '["": 21, "acme": 1, "com.microsoft": 1, "local": 1]'
    return onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: {opsets}>
        main ({inputs}, float[b,2,m,4] mem, float[b,2,1,8] h)
        => (float z, {output or "float[b,2,t,4]"} y, float[b,2,n,4] mem2)
        <float[8,4] w = {{{", ".join(["1"] * 32)}}}, float scale = {{0.5}}, int64 first = {{0}},
         int64[1] second = {{1}}, int64[4] heads = {{0, 2, -1, 4}}, uint8 bits = {{15}}> {{
            new = MatMul(h, w) mem2 = Concat<axis = 2>(mem, new) {nodes}
            read = Concat<axis = 2>(y, mem2) z = ReduceSum<keepdims = 0>(read)
        }} {functions}
    """)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


UNFOLLOWED = {
    "custom operator": (CACHE, f"old = acme.Unpack(past) {JOIN}"),
    "new keys first": (CACHE, "old = acme.Unpack(past) y = Concat<axis = 2>(x, old)"),
    "with a scale": (CACHE, f"raw = acme.Unpack(past) old = Mul(raw, scale) {JOIN}"),
    "two operators": (CACHE, f"raw = acme.A(past) old = acme.B(raw, scale) {JOIN}"),
    "scores choose": (CACHE, f"old = acme.Evict(past, new) {JOIN}"),
    "a scale that is kept": (
        f"uint8[b,2,p,4] past, {CACHE.replace('past', 'scales')}",
        f"old = acme.Unpack(past, scales) {JOIN}",
    ),
    "quantized": ("uint8[b,2,p,4] past", f"old = acme.Unpack(past) {JOIN}"),
    "quantized, in one piece": ("uint8[n] past", f"old = acme.Unpack(past) {JOIN}"),
    "dequantized by onnxruntime": (
        "uint8[b,2,p,2] past",
        f"old = com.microsoft.DequantizeWithOrder(past, scale) {JOIN}",
    ),
    "all in one axis": ("float16[b,n] past", f"old = acme.Unpack(past) {JOIN}"),
    "two outputs": (CACHE, f"other, old = acme.Unpack(past) {JOIN}"),
    "optional, and asked for": (
        "optional(float[b,2,p,4]) past",
        "c = OptionalHasElement(past) y = If(c) <then_branch = a () => (float[b,2,t,4] p) {"
        " o = OptionalGetElement(past) p = Concat<axis = 2>(o, x) },"
        " else_branch = e () => (float[b,2,t,4] q) { q = Identity(x) }>",
    ),
    "packed in 32 bits": (
        "int32[b,2,p,1] past",
        f"raw = acme.Unpack(past) old = Mul(raw, scale) {JOIN}",
    ),
    "unpacked by known operators": (
        "uint8[b,2,p,2] past",
        "low = BitwiseAnd(past, bits) up = Cast<to = 1>(low) wide = Concat<axis = 3>(up, up)"
        f" old = Mul(wide, scale) {JOIN}",
    ),
    "packed in 32 bits, unpacked by known operators": (
        "int32[b,2,p,4] past",
        f"low = Cast<to = 1>(past) old = Mul(low, scale) {JOIN}",
    ),
    "optional": ("optional(float[b,2,p,4]) past", f"old = OptionalGetElement(past) {JOIN}"),
    "sequence": ("seq(float[b,2,p,4]) past", f"old = SequenceAt(past, first) {JOIN}"),
    "sequence that is joined": (
        "seq(float[b,2,p,4]) past",
        "all = SequenceInsert(past, x) y = ConcatFromSequence<axis = 2>(all)",
    ),
    "sequence that is mapped": (
        "seq(float[b,2,p,4]) past",
        "each = SequenceMap(past) <body = g (float[b,2,p,4] e) => (float[b,2,p,4] f)"
        " { f = Neg(e) }>"
        f" old = ConcatFromSequence<axis = 2>(each) {JOIN}",
    ),
    "in a function": (CACHE, "y = local.join(past, x)"),
    "in a branch": (
        f"{CACHE}, bool c",
        "y = If(c) <then_branch = a () => (float[b,2,t,4] p) {"
        " o = acme.Unpack(past) p = Concat<axis = 2>(o, x) },"
        " else_branch = e () => (float[b,2,t,4] q) { q = Identity(x) }>",
    ),
    "in a loop": (
        f"{CACHE}, int64 n, bool c",
        "old = Loop(n, c, past) <body = g (int64 i, bool go, float[b,2,p,4] s)"
        " => (bool on, float[b,2,p,4] next) { on = Identity(go) next = acme.Step(s) }>"
        f" {JOIN}",
    ),
    "in a scan": (
        f"{CACHE}, float[k] rows",
        "old = Scan<num_scan_inputs = 1, body = g (float[b,2,p,4] s, float r)"
        f" => (float[b,2,p,4] next) {{ next = acme.Step(s, r) }}>(past, rows) {JOIN}",
    ),
    "chosen": (f"{CACHE}, bool c", "old = acme.Unpack(past) y = Where(c, old, x)"),
    "added": (CACHE, "old = acme.Unpack(past) y = Add(old, x)"),
}
NOT_CLAIMED = ("unpacked by known operators", "sequence that is joined")
"""Those whose output has as much of two inputs, or a size that is not known, in any case."""
FUNCTION = """
    <opset_import: ["": 21, "acme": 1], domain: "local">
    join (p, q) => (r) { o = acme.Unpack(p) r = Concat<axis = 2>(o, q) }
"""
RULES = """
[[kv]]
kind = "attention"
input = '{}{{token}}'
output = 'y{{token}}'
layer = 0
part = "k"
[[kv]]
kind = "attention"
input = 'mem{{token}}'
output = 'mem2{{token}}'
layer = 0
part = "m"
"""


@pytest.mark.parametrize("case", UNFOLLOWED)
def test_new_keys_are_not_called_the_cache(case: str, here: Path, run) -> None:
    cache, nodes = UNFOLLOWED[case]
    is_equal = "Where" in nodes or "Add" in nodes
    if is_equal:
        cache = cache.replace("b,2,p,4", "b,2,s,4")
    shape = "float[b,2,s,4]" if is_equal else ""
    functions = FUNCTION if "local" in nodes else ""
    model = build_model(f"{NEW}, {cache}", nodes, functions=functions, output=shape)
    saved(model, here / "m.onnx")
    document = json.loads(run("pairs", "m.onnx", "--format", "json").out)
    pairs = [(pair["input"], pair["output"]) for pair in document["models"][0]["pairs"]]
    assert pairs == [("mem", "mem2")]
    rules = run("pairs", "m.onnx", "--as", "rules").out
    (here / "rules.toml").write_text(rules, "utf-8")
    if case not in NOT_CLAIMED:
        assert "# y may be a later state of past, which is not proved: " in rules
    outcome = run("m.onnx", "--prefix", "KV", "--rules", "rules.toml", "-n")
    assert (outcome.code, "x_KV" in outcome.out, "mem_KV" in outcome.out) == (0, False, True)
    (here / "mine.toml").write_text(RULES.format("x"), "utf-8")
    outcome = run("verify", "m.onnx", "--rules", "mine.toml")
    assert "warning KV113: y could not be traced to its input x" in outcome.err
    assert "it may be a later state of past" in outcome.err


def test_all_layers_in_one_input_are_the_cache_of_none(here: Path, run) -> None:
    nodes = """
        a = Gather(past, first) y = Concat<axis = 2>(a, x)
        b = Gather(past, second) b1 = Squeeze(b, second) y2 = Concat<axis = 2>(b1, x2)
        more = ReduceSum<keepdims = 1>(y2)
    """
    model = build_model(f"{NEW}, float[b,2,s,4] x2, float[2,b,2,p,4] past", nodes)
    for name in ("y2", "more"):
        model.graph.output.add().CopyFrom(model.graph.output[1])
        model.graph.output[-1].name = name
    saved(model, here / "m.onnx")
    document = json.loads(run("pairs", "m.onnx", "--format", "json").out)
    pairs = [(pair["input"], pair["output"]) for pair in document["models"][0]["pairs"]]
    assert pairs == [("mem", "mem2")]


@pytest.mark.parametrize(
    ("inputs", "nodes"),
    [
        (CACHE, "n = acme.Rope(new) y = Concat<axis = 2>(past, n)"),
        (f"{CACHE}, int64[b,s] ids", "e = acme.Embed(ids) y = Concat<axis = 2>(past, e)"),
        (
            f"{CACHE}, int64[b,s] ids, float[b,1,s,4] cos, float[b,1,s,4] sin",
            "n = acme.Rope(new, cos, sin) y = Concat<axis = 2>(past, n)",
        ),
        (f"{CACHE}, int64[3,b,s] ids", "n = acme.Rope(new, ids) y = Concat<axis = 2>(past, n)"),
        (
            f"{CACHE}, int64[b,s] ids, float[b,s,8] embeds",
            "n = acme.Project(embeds) y = Concat<axis = 2>(past, n)",
        ),
        (
            CACHE,
            "q = acme.Attention(new, mem2) n = acme.Project(q) y = Concat<axis = 2>(past, n)",
        ),
        (f"{CACHE}, float[b,16] voice", "n = acme.Say(voice) y = Concat<axis = 2>(past, n)"),
        (f"{CACHE}, float[1] rate", "n = acme.Scale(new, rate) y = Concat<axis = 2>(past, n)"),
    ],
)
def test_what_is_new_may_go_through_any_operator(inputs: str, nodes: str, here: Path, run) -> None:
    saved(build_model(inputs, nodes), here / "m.onnx")
    document = json.loads(run("pairs", "m.onnx", "--format", "json").out)
    pairs = [(pair["input"], pair["output"]) for pair in document["models"][0]["pairs"]]
    assert sorted(pairs) == [("mem", "mem2"), ("past", "y")]
    (here / "mine.toml").write_text(RULES.format("past"), "utf-8")
    outcome = run("verify", "m.onnx", "--rules", "mine.toml")
    assert "KV113" not in outcome.err


def test_without_another_cache_the_draft_of_rules_says_what_is_not_followed(
    here: Path, run
) -> None:
    model = onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["": 21, "acme": 1]>
        main ({NEW}, {CACHE}) => (float z, float[b,2,t,4] y)
        {{ old = acme.Unpack(past) {JOIN} z = ReduceSum<keepdims = 0>(y) }}
    """)
    saved(model, here / "m.onnx")
    outcome = run("pairs", "m.onnx", "--as", "rules")
    said = "## y may be a later state of past, which is not proved: Unpack of acme has no body"
    assert (outcome.code, said in outcome.out) == (0, True)
    assert "no output is proved" in run("pairs", "m.onnx").out


@pytest.mark.parametrize(
    ("nodes", "pairs"),
    [
        ("y = Concat<axis = 2>(past, new)", [("mem", "mem2"), ("past", "y")]),
        (
            "old = Cast<to = 10>(past) n = Cast<to = 10>(new) y = Concat<axis = 2>(old, n)",
            [("mem", "mem2")],
        ),
    ],
)
def test_an_output_without_a_type_may_have_that_of_its_input(
    nodes: str, pairs: list[tuple[str, str]], here: Path, run
) -> None:
    model = build_model(CACHE, nodes.replace("y =", "y1 =") + " y = Identity(y1)")
    model.graph.node[-2].input[0] = "mem2"
    model.graph.node.add(op_type="ReduceMax", input=["y"], output=["m"])
    model.graph.output.add(name="m")
    model.graph.output[1].ClearField("type")
    saved(model, here / "m.onnx")
    document = json.loads(run("pairs", "m.onnx", "--format", "json").out)
    found = [(pair["input"], pair["output"]) for pair in document["models"][0]["pairs"]]
    assert sorted(found) == pairs
