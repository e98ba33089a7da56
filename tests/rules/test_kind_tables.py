"""Kinds: what their tables say counts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from exporter_models import HEAD, HEADS, Cache, build_model, list_caches
from models import saved

from onnxkvrename import load_layout
from onnxkvrename.model.signature import Signature, Value
from onnxkvrename.rules.parse import parse_rules
from onnxkvrename.rules.plan import TokenChange, build_rename_plan

RULES = r"""
update = "append"
[[kv]]
input = 'in_{part}{layer}{token}'
output = 'out_{part}{layer}{token}'
name = "own"
roles = { key = "k", value = "v" }
"""
NAMES = ("in_{part}{layer}", "out_{part}{layer}")


def write_rules(tmp_path: Path, more: str, text: str = RULES) -> Path:
    path = tmp_path / "rules.toml"
    path.write_text(f"{text}{more}\n")
    return path


def save_caches(tmp_path: Path, *caches: Cache) -> Path:
    return saved(build_model(caches), tmp_path / "model.onnx")


def test_a_role_says_what_is_in_a_buffer_and_kind_what_vllm_calls_it(tmp_path: Path) -> None:
    model = save_caches(tmp_path, *list_caches(NAMES, [0], "kv"))
    rules = write_rules(tmp_path, 'kind = "sliding_window"')
    buffers = load_layout(model, rules=rules).layout.buffers
    assert [(b.part, b.buffer, b.kind, b.kind_guessed) for b in buffers] == [
        ("key", "k", "sliding_window", False),
        ("value", "v", "sliding_window", False),
    ]


def test_a_layer_lacks_a_part_of_its_kind(tmp_path: Path, run) -> None:
    caches = [*list_caches(NAMES, [0], "kv"), *list_caches(NAMES, [1], "k")]
    rules = write_rules(tmp_path, "")
    outcome = run(save_caches(tmp_path, *caches), "--rules", rules, "--prefix", "X", "-n")
    assert "KV108" in outcome.err


def test_two_kinds_share_no_parts(tmp_path: Path, run) -> None:
    """Two exporters call the same states otherwise: a layer has the parts of one of them."""
    other = RULES.partition("[[kv]]")[2].replace("_{part}", "_x{part}").replace('"own"', '"other"')
    rules = write_rules(tmp_path, "", f"{RULES}[[kv]]{other}")
    names = tuple(name.replace("_", "_x", 1) for name in NAMES)
    caches = [*list_caches(NAMES, [0], "kv"), *list_caches(names, [1], "kv")]
    outcome = run(save_caches(tmp_path, *caches), "--rules", rules, "--prefix", "X", "-n")
    assert (outcome.code, "KV108" in outcome.err) == (0, False)


NAMED_KINDS = r"""
[[kv]]
input = 'in_{layer}_(?P<kind>self)_{part}{token}'
output = 'out_{layer}_(?P<kind>self)_{part}{token}'
roles = { key = "k", value = "v" }
kind = "attention"
name = "self"
update = "append"
[[kv]]
input = 'in_{layer}_(?P<kind>cross)_{part}{token}'
output = 'out_{layer}_(?P<kind>cross)_{part}{token}'
roles = { key = "k", value = "v" }
kind = "cross"
update = "inplace"
"""


def test_a_name_may_say_its_kind_in_the_middle(tmp_path: Path, run) -> None:
    """Two kinds of a layer have the same parts, and their buffers differ all the same."""
    names = [
        (f"in_{{layer}}_{kind}_{{part}}", f"out_{{layer}}_{kind}_{{part}}")
        for kind in ("self", "cross")
    ]
    shape = ("batch_size", HEADS, "encoder_length", HEAD)
    caches = [
        *list_caches(names[0], [0, 1], "kv"),
        *list_caches(names[1], [0, 1], "kv", shape=shape, update="inplace"),
    ]
    model, rules = save_caches(tmp_path, *caches), write_rules(tmp_path, "", NAMED_KINDS)
    before = model.read_bytes()
    assert run("verify", model, "--rules", rules).code == 0
    found = load_layout(model, rules=rules).layout.buffers
    assert [(b.buffer, b.part, b.kind) for b in found if b.layer == 0] == [
        ("self.k", "key", "full_attention"),
        ("self.v", "value", "full_attention"),
        ("cross.k", "key_cross", "cross_attention"),
        ("cross.v", "value_cross", "cross_attention"),
    ]
    outcome = run(model, "--rules", rules, "--prefix", "X", "--verify")
    assert (outcome.code, "KV" in outcome.err) == (0, False)
    assert "in_1_cross_k -> in_1_cross_k_X" in outcome.out
    run(model, "--rules", rules, "--strip")
    assert model.read_bytes() == before
    (missing,) = [b for b in caches if b.input == "in_1_cross_v"]
    model = save_caches(tmp_path, *(cache for cache in caches if cache is not missing))
    assert "KV108: in_1_cross_k" in run("verify", model, "--rules", rules).err


def test_a_name_with_a_kind_that_has_no_such_part_is_none() -> None:
    rules = parse_rules(NAMED_KINDS.replace('"k", value', '"x", value', 1), "r")
    names = ("in_0_self_k", "in_0_cross_k")
    assert [rules.match("input", name) is None for name in names] == [True, False]


SCALES = """
kind = "full_attention"
roles = { key = "k", value = "v", key_scale = "ks" }
beside = { key_scale = "key" }
"""


def test_what_is_beside_a_cache_moves_with_it_and_is_no_layer(tmp_path: Path, run) -> None:
    rules = write_rules(tmp_path, SCALES, RULES.partition("roles")[0])
    scale = ("batch_size", HEADS, "past_sequence_length")
    caches = [
        *list_caches(NAMES, [0], "kv", update="inplace"),
        *list_caches(NAMES, [0], ["ks"], shape=scale, update="inplace"),
    ]
    model = save_caches(tmp_path, *caches)
    outcome = run(model, "--rules", rules, "--prefix", "X")
    assert outcome.code == 0
    assert "in_ks0 -> in_ks0_X" in outcome.out
    document = json.loads(run("inspect", model, "--rules", rules, "--vllm", "--format", "json").out)
    assert {b["part"]: b["beside"] for b in document["layouts"][0]["buffers"]} == {
        "key": "",
        "value": "",
        "key_scale": "key",
    }
    (projection,) = document["vllm"]
    assert [layer["layer"] for layer in projection["layers"]] == [0]
    assert projection["refusals"] == []


def test_a_scale_without_its_cache_stands_alone(tmp_path: Path, run) -> None:
    rules = write_rules(tmp_path, SCALES, RULES.partition("roles")[0])
    caches = [*list_caches(NAMES, [0], "kv"), *list_caches(NAMES, [1], ["v", "ks"])]
    outcome = run(save_caches(tmp_path, *caches), "--rules", rules, "--prefix", "X", "-n")
    assert "KV108: in_v1" in outcome.err
    assert "layer 1 has no k" in outcome.err


def pair_sides(rules: str, inputs: str, outputs: str) -> list[bool]:
    values = [tuple(Value(name, "FLOAT", None) for name in t.split()) for t in (inputs, outputs)]
    plan = build_rename_plan(Signature(*values), parse_rules(rules, "r"), TokenChange("X"))
    return [pair.may_be_alone for pair in plan.pairs]


def test_one_side_may_be_alone_if_all_of_the_kind_are_so() -> None:
    alone = RULES + 'alone = ["output"]'
    assert pair_sides(alone, "", "out_k0 out_v0") == [True, True]
    assert pair_sides(alone, "in_k0 in_v0", "") == [False, False]
    assert pair_sides(alone, "in_k0", "out_k0 out_v0") == [False, False]
    assert pair_sides(RULES, "", "out_k0 out_v0") == [False, False]


@pytest.mark.parametrize(("sides", "code"), [('["output"]', 0), ('["input"]', 1), ("[]", 1)])
def test_a_model_of_the_first_step_has_outputs_alone(
    sides: str, code: int, tmp_path: Path, run
) -> None:
    caches = [each._replace(input=None) for each in list_caches(NAMES, [0], "kv")]
    rules = write_rules(tmp_path, f"alone = {sides}")
    outcome = run(save_caches(tmp_path, *caches), "--rules", rules, "--prefix", "X")
    assert (outcome.code, "KV101" in outcome.err) == (code, bool(code))


def test_axes_say_where_the_context_is(tmp_path: Path, run) -> None:
    shape = (HEADS, 1, HEAD, 16)
    caches = list_caches(NAMES, [0], "kv", shape=shape, update="inplace")
    axes = '[kv.axes]\nkey = ["heads", "batch", "head", "sequence"]'
    rules = write_rules(tmp_path, axes)
    key, value = load_layout(save_caches(tmp_path, *caches), rules=rules).layout.buffers
    assert (key.sequence_axis, key.batch_axis) == (3, 1)
    assert (key.token_shape, key.sequence_shape) == ((HEADS, HEAD), (HEADS, HEAD, 16))
    assert (value.sequence_axis, value.batch_axis) == (None, 0)
