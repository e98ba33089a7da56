"""A kind as a table: what it says counts, and what it cannot say is an error that names the key."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from exporter_models import HEAD, HEADS, Cache, build_model, list_caches
from models import saved

from onnxkvrename import RulesError, load_layout
from onnxkvrename.layout.kinds import KINDS
from onnxkvrename.model.signature import Signature, Value
from onnxkvrename.rules.load import load_rules
from onnxkvrename.rules.parse import parse_rules
from onnxkvrename.rules.plan import TokenChange, build_rename_plan
from onnxkvrename.rules.profile import CACHE_KINDS
from onnxkvrename.rules.rewrite import rewrite_name

RULES = r"""
update = "append"
[[kv]]
input = 'in_(?P<buffer>k|v|ks)(?P<layer>[0-9]+)(?:_(?P<token>[A-Z]+))?'
output = 'out_(?P<buffer>k|v|ks)(?P<layer>[0-9]+)(?:_(?P<token>[A-Z]+))?'
input_name = "in_{buffer}{layer}[_{token}]"
output_name = "out_{buffer}{layer}[_{token}]"
[kv.kinds.own]
roles = { key = "k", value = "v" }
"""
NAMES = ("in_{part}{layer}", "out_{part}{layer}")


def write_rules(tmp_path: Path, more: str, text: str = RULES) -> Path:
    path = tmp_path / "rules.toml"
    path.write_text(f"{text}{more}\n")
    return path


def save_caches(tmp_path: Path, *caches: Cache) -> Path:
    return saved(build_model(caches), tmp_path / "model.onnx")


def test_what_settles_a_kind_are_the_kinds_of_a_layout() -> None:
    profile_kinds = {row.profile_kind for row in KINDS.values()} - {None}
    assert set(CACHE_KINDS) == {"attention", *profile_kinds, *KINDS} - {"unknown"}


def test_a_role_says_what_is_in_a_buffer_and_kind_what_vllm_calls_it(tmp_path: Path) -> None:
    model = save_caches(tmp_path, *list_caches(NAMES, [0], "kv"))
    rules = write_rules(tmp_path, 'kind = "sliding_window"')
    buffers = load_layout(model, rules=rules).layout.buffers
    assert [(b.part, b.buffer, b.kind, b.is_kind_guessed) for b in buffers] == [
        ("key", "k", "sliding_window", False),
        ("value", "v", "sliding_window", False),
    ]


@pytest.mark.parametrize("optional", [False, True])
def test_a_layer_may_lack_what_is_optional(optional: bool, tmp_path: Path, run) -> None:
    caches = [*list_caches(NAMES, [0], "kv"), *list_caches(NAMES, [1], "k")]
    rules = write_rules(tmp_path, 'optional = ["value"]' if optional else "")
    outcome = run(save_caches(tmp_path, *caches), "--rules", rules, "--prefix", "X", "-n")
    assert ("KV108" in outcome.err) is not optional


def test_parts_are_counted_by_the_rule_that_knows_the_names(tmp_path: Path, run) -> None:
    """Two exporters call the same states otherwise: a layer has the parts of one of them."""
    other = RULES.partition("[[kv]]")[2].replace("_(?P<b", "_x(?P<b").replace("_{b", "_x{b")
    rules = write_rules(tmp_path, "", f"{RULES}[[kv]]{other.replace('k|v|ks', 'k|v')}")
    names = tuple(name.replace("_", "_x", 1) for name in NAMES)
    caches = [*list_caches(NAMES, [0], "kv"), *list_caches(names, [1], "kv")]
    outcome = run(save_caches(tmp_path, *caches), "--rules", rules, "--prefix", "X", "-n")
    assert (outcome.code, "KV108" in outcome.err) == (0, False)


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
    document = json.loads(run("manifest", model, "--rules", rules, "--block-size", 16).out)
    assert {b["part"]: b["beside"] for b in document["buffers"]} == {
        "key": "",
        "value": "",
        "key_scale": "key",
    }
    assert [layer["layer"] for layer in document["vllm"]["layers"]] == [0]
    assert document["vllm"]["refusals"] == []


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
    axes = '[kv.kinds.own.axes]\nkey = ["heads", "batch", "head", "sequence"]'
    rules = write_rules(tmp_path, axes)
    key, value = load_layout(save_caches(tmp_path, *caches), rules=rules).layout.buffers
    assert (key.sequence_axis, key.batch_axis) == (3, 1)
    assert (key.token_shape, key.sequence_shape) == ((HEADS, HEAD), (HEADS, HEAD, 16))
    assert (value.sequence_axis, value.batch_axis) == (None, 0)


def test_a_rule_about_one_part_needs_no_group_for_it() -> None:
    text = RULES.replace("(?P<buffer>k|v|ks)", "kv").replace("{buffer}", "kv")
    text = text.replace('key = "k", value = "v"', 'key_value = "kv"')
    match = parse_rules(text, "r").match("input", "in_kv3_X")
    assert match is not None
    assert (match.buffer, match.layer, match.token) == ("kv", 3, "X")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("roles = {", "colour = 1\nroles = {", "own.colour: is not"),
        ('roles = { key = "k", value = "v" }', "", "own.roles: needs either"),
        ("roles = {", 'parts = ["k"]\nroles = {', "own.roles: needs either"),
        ("key =", "keys =", "own.roles.keys: is not"),
        ('"v" }', '"k" }', "own.roles: gives one"),
        ('"v" }', "1 }", "own.roles.value: must be text"),
        ('{ key = "k", value = "v" }', "{}", "own.roles: does not"),
        ("roles = {", "kind = 'full'\nroles = {", "own.kind: must be"),
        ("roles = {", "update = 'grow'\nroles = {", "own.update: must be"),
        ("roles = {", "alone = ['left']\nroles = {", "own.alone: left is"),
        ("roles = {", "optional = ['k']\nroles = {", "own.optional: k is"),
        ("roles = {", "beside = { v = 'k' }\nroles = {", "own.beside: v is"),
        (
            "roles = {",
            "beside = { key = 'value', value = 'key' }\nroles = {",
            "own.beside.key: moves",
        ),
        ("roles = {", "axes = ['rows']\nroles = {", "own.axes: rows is"),
        ("roles = {", "axes = ['head', 'head']\nroles = {", "own.axes: has head twice"),
        ("roles = {", "axes = { k = ['head'] }\nroles = {", "own.axes: k is"),
        ("roles = {", "axes = 1\nroles = {", "own.axes: must be"),
        (
            "[kv.kinds.own]",
            "update = { own = 'delta' }\n[kv.kinds.own]\nupdate = 'once'",
            "kv[0].update: own",
        ),
    ],
)
def test_a_table_that_cannot_be_used_says_where_and_why(old: str, new: str, said: str) -> None:
    assert old in RULES
    with pytest.raises(RulesError) as caught:
        parse_rules(RULES.replace(old, new, 1), "mine.toml")
    assert str(caught.value).startswith("mine.toml: ")
    assert said in str(caught.value)


def test_a_kind_of_two_rules_is_updated_in_one_way() -> None:
    rule = RULES.partition("[[kv]]")[2]
    with pytest.raises(RulesError, match=r"kv\[1\]\.kinds\.own\.update: "):
        parse_rules(f'{RULES}[[kv]]{rule}update = "delta"', "mine.toml")


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("first = false", "branch[0].input: is missing"),
        (
            "input = 'use_cache'",
            "branch[0].first: is missing",
        ),
        ("input = 'use_cache'\nfirst = 0", "branch[0].first: must be"),
        ("input = 'u'\nfirst = true\nthen = 1", "branch[0].then: is not"),
    ],
)
def test_a_branch_that_cannot_be_used_says_why(table: str, said: str) -> None:
    with pytest.raises(RulesError) as caught:
        parse_rules(f"[[branch]]\n{table}\n{RULES}", "mine.toml")
    assert said in str(caught.value)


def test_every_built_in_profile_can_be_loaded_and_sent_to_a_worker() -> None:
    import pickle

    from onnxkvrename.rules.load import list_profiles

    for name in list_profiles():
        rules = load_rules(name)
        assert pickle.loads(pickle.dumps(rules)).updates_by_kind == rules.updates_by_kind


def test_the_examples_of_the_page_are_rules() -> None:
    import re

    page = Path(__file__).parents[2] / "docs" / "rules.md"
    examples = re.findall(r"```toml\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
    first, second = (parse_rules(text, "rules.md") for text in examples)
    assert first.updates_by_kind == {"attention": "append"}
    match = second.match("input", "past.3.k_scale_VLLM")
    assert match is not None
    rule = match.rule.get_kind_rule(match.kind)
    assert (rule.roles["k"], rule.beside, rule.alone) == ("key", {"k_scale": "k"}, ("output",))
    assert rewrite_name(second, match, "") == "past.3.k_scale"
    assert (second.dims["total"], second.branches[0].first) == ("past + new", False)
