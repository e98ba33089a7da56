"""States that each step replaces are found by names and types, beside those that are proved."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest
from models import saved
from onnx import ModelProto

from onnxkvrename.verification.pairs.infer_rules import trace_model

STATE = "float[b,4,8]"


def build_model(state: str, result: str, type_: str = STATE, made: str = "") -> ModelProto:
    """A decoder with a cache that grows, `past_0` to `present_0`, and what may be a state.

    The second `made` is of the input alone: nothing carries a state on.
    """
    text = f"""
        <ir_version: 10, opset_import: ["": 18, "far": 1]>
        main (float[b,p,8] past_0, float[b,s,8] x, {type_} S) =>
             (float[b,s,8] logits, float[b,t,8] present_0, {type_} R)
        <float[8,8] w = {{0}}, int64[1] first = {{1}}, float[1] one = {{1}}> {{
            new = MatMul(x, w)
            present_0 = Concat<axis = 1>(past_0, new)
            all = ReduceSum<keepdims = 1>(present_0, first)
            {made or "size = Shape(S) R = Expand(one, size)"}
            other = ReduceSum<keepdims = 0>(S)
            logits = Sum(x, all, other)
        }}
    """
    model = onnx.parser.parse_model(text)
    names = {"S": state, "R": result}
    for value in (*model.graph.input, *model.graph.output):
        value.name = names.get(value.name, value.name)
    for node in model.graph.node:
        for side in (node.input, node.output):
            side[:] = [names.get(name, name) for name in side]
    return model


@pytest.mark.parametrize(
    ("state", "result", "type_", "is_found"),
    [
        ("xx_0", "xx_0_r", STATE, True),
        ("state", "stateN", STATE, True),
        ("embed_states", "new_embed_states", STATE, True),
        ("past_states", "present_states", STATE, True),  # as past_0 is called present_0
        ("cache.0.recurrent", "new.0.recurrent", "float[3,b,2,4,4]", True),
        ("input.0", "output.0", STATE, False),
        ("hidden", "hidden_out", "float[b,s,8]", False),  # laid out like tokens
        ("h", "logits_of_h0", STATE, False),
        ("seen", "new_seen", "int64[b]", False),
    ],
)
def test_a_state_that_is_replaced_is_reported_by_its_names(
    state: str, result: str, type_: str, is_found: bool, tmp_path: Path, run
) -> None:
    path = saved(build_model(state, result, type_), tmp_path / "model.onnx")
    rules = tmp_path / "rules.toml"
    rules.write_text(run("pairs", path, "--as", "rules").out, "utf-8")
    for command in ([path], [path], ["verify", path]):  # before the rename, and after it
        outcome = run(*command, "--rules", rules, "--prefix", "VLLM", "--format", "json")
        (model,) = json.loads(outcome.out)["models"]
        codes = {(found["code"], found["name"]) for found in model["findings"]} - {("KV115", "")}
        assert codes == ({("KV111", result)} if is_found else set())


@pytest.mark.parametrize(
    ("type_", "made", "reason"),
    [
        (STATE, "", "no node carries its values on"),
        (STATE, "R = far.Update(S, x)", "Update of far has no body in the model"),
        (STATE, "mix = MatMul(S, w) R = Softmax(mix)", "it is reached only through operators"),
        ("float[b,p,8]", "R = far.Update(S, x)", "Update of far has no body in the model"),
    ],
)
def test_rules_say_in_a_comment_why_a_state_is_not_proved(
    type_: str, made: str, reason: str, tmp_path: Path, run
) -> None:
    model = build_model("past_1", "present_1", type_, made)
    if "p" in type_:  # it grows like the one that is proved
        model.graph.output[2].type.tensor_type.shape.dim[1].dim_param = "t"
    path = saved(model, tmp_path / "model.onnx")
    lines = run("pairs", path, "--as", "rules").out.splitlines()
    said = "# present_1 may be a later state of past_1, which is not proved: "
    (comment,) = (line for line in lines if line.startswith(said))
    assert reason in comment
    assert lines[lines.index(comment) + 1] == "[[keep]]"
    assert 'pattern = "present_1"' in lines


def test_what_nothing_reads_is_no_state(tmp_path: Path) -> None:
    model = build_model("xx_0", "xx_0_r")
    (node,) = (node for node in model.graph.node if node.op_type == "Sum")
    node.input.remove("other")
    path = saved(model, tmp_path / "model.onnx")
    assert trace_model(path).lone_states == ()


def test_an_input_that_is_only_returned_is_no_cache(tmp_path: Path) -> None:
    for is_read in (True, False):
        made = "R = Identity(S)"
        model = build_model("encoded", "last_hidden", "float[b,e,8]", made)
        if not is_read:
            (node,) = (node for node in model.graph.node if node.op_type == "Sum")
            node.input.remove("other")
        pairs = trace_model(saved(model, tmp_path / "model.onnx")).pairs
        assert ("encoded" in {pair.input.name for pair in pairs}) is is_read
