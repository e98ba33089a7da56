"""Rules are made from the dataflow of a model, and hold for exactly its caches."""

from __future__ import annotations

from pathlib import Path

import onnx.parser
import pytest
from models import saved

from onnxkvrename.errors import RulesError
from onnxkvrename.rules.plan import TokenChange, build_rename_plan
from onnxkvrename.verification.pairs.infer_rules import InferredRules, TracedModel, infer_rules
from onnxkvrename.verification.pairs.infer_rules import trace_model as trace_path


def trace(folder: Path, *pairs: str, extra: str = "", name: str = "m.onnx") -> TracedModel:
    """A model that appends to each cache; a pair is ``input output``."""
    inputs = ", ".join(f"float[p,4] {quote(pair.split()[0])}" for pair in pairs)
    outputs = ", ".join(
        f"float[t,4] {quote(pair.split()[1])}, float read{number}"
        for number, pair in enumerate(pairs)
    )
    nodes = " ".join(
        f"x{number} = MatMul(x, w) {quote(pair.split()[1])} = "
        f"Concat<axis = 0>({quote(pair.split()[0])}, x{number}) "
        f"read{number} = ReduceSum({quote(pair.split()[1])})"
        for number, pair in enumerate(pairs)
    )
    both = f"{inputs}, " if inputs else ""
    model = onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["": 18]>
        main ({both}float[s,4] x{extra}) => ({outputs or "float[s,4] y"})
        <float[4,4] w = {{0}}> {{ {nodes or "y = MatMul(x, w)"} }}
    """)
    for value in (*model.graph.input, *model.graph.output):
        value.name = unquote(value.name)
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = [unquote(name) for name in names]
    return trace_path(saved(model, folder / name))


def quote(name: str) -> str:
    return name.replace(".", "__dot__")


def unquote(name: str) -> str:
    return name.replace("__dot__", ".")


def rename(inferred: InferredRules, model: TracedModel, token: str = "T") -> dict[str, str]:
    plan = build_rename_plan(model.signature, inferred.rules, TokenChange(token))
    return dict(plan.name_map)


def test_rules_rename_the_pairs_of_a_model(tmp_path: Path) -> None:
    model = trace(tmp_path, "past.0.k present.0.k", "h cat_3")
    assert rename(infer_rules(model), model) == {
        "past.0.k": "past.0.k_T",
        "present.0.k": "present.0.k_T",
        "h": "h_T",
        "cat_3": "cat_3_T",
    }


def test_a_name_that_only_looks_like_a_state_is_left_alone(tmp_path: Path) -> None:
    model = trace(
        tmp_path, "past.0.k present.0.k", extra=", float past.0.k_scale".replace(".", "__dot__")
    )
    inferred = infer_rules(model)
    assert "past.0.k_scale" not in rename(inferred, model)
    assert inferred.rules.find_reason_to_keep("past.0.k_scale") == "not a state"


def test_a_model_without_states_has_no_rules(tmp_path: Path) -> None:
    with pytest.raises(RulesError, match="no cache found") as raised:
        infer_rules(trace(tmp_path))
    assert raised.value.path == str(tmp_path / "m.onnx")


def test_kinds_follow_the_update_and_not_the_names(tmp_path: Path) -> None:
    model = onnx.parser.parse_model(
        """
        <ir_version: 10, opset_import: ["": 18]>
        main (float[n,4,8] s.0, float[n,8,3] c.0, float[n,6,8] x.0, float[n,p,8] k.0,
              float[n,8,1] e)
        => (float[n,4,8] s.0.out, float[n,8,3] c.0.out, float[n,6,8] x.0.out, float[n,t,8] k.0.out,
            float y)
        <float[8,8] w = {0}, float[1] g = {1}, int64[1] from = {1}, int64[1] to = {9},
         int64[1] axis = {2}> {
            new = MatMul(w, e) d = Mul(s.0, g) s.0.out = Add(d, new)
            old = Slice(c.0, from, to, axis) c.0.out = Concat<axis = 2>(old, new)
            x.0.out = Identity(x.0)
            row = MatMul(new, new) k.0.out = Concat<axis = 1>(k.0, row)
            z = MatMul(x.0, new) y = Sum(s.0.out, c.0.out, k.0.out, z)
        }
    """.replace(".0", "__dot__0").replace(".out", "__dot__out")
    )
    for value in (*model.graph.input, *model.graph.output):
        value.name = unquote(value.name)
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = [unquote(name) for name in names]
    traced = trace_path(saved(model, tmp_path / "m.onnx"))
    rules = infer_rules(traced).rules.kv_rules
    assert {part: rule.cache for rule in rules for part in rule.roles} == {
        "s": "linear",
        "c": "linear",
        "x": "cross",
        "k": "attention",
    }


@pytest.mark.parametrize(("declared", "update"), [("8", "inplace"), ("total", "")])
def test_rules_do_not_call_a_buffer_fixed_that_is_declared_to_grow(
    declared: str, update: str, tmp_path: Path
) -> None:
    """As onnxruntime-genai declares a sliding window: the graph shifts it, its shapes say more."""
    model = onnx.parser.parse_model(f"""
        <ir_version: 10, opset_import: ["": 18]>
        main (float[1,4,8] k, float[1,4,1] x) => (float[1,4,{declared}] k_out, float[1,4,8] y)
        <float[4,4] w = {{0}}, int64[1] from = {{1}}, int64[1] to = {{9}}, int64[1] axis = {{2}}> {{
            new = MatMul(w, x) old = Slice(k, from, to, axis)
            k_out = Concat<axis = 2>(old, new) y = Mul(k_out, x)
        }}
    """)
    rules = infer_rules(trace_path(saved(model, tmp_path / "m.onnx"))).rules.kv_rules
    assert [rule.update for rule in rules] == [update]
