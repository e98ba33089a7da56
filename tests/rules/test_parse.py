"""Rules in TOML: what they say counts, and a mistake is an error that names table and key."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import pytest
from exporter_models import build_model, list_caches
from models import saved

from onnxkvrename import RulesError
from onnxkvrename.rules.load import list_profiles, load_rules
from onnxkvrename.rules.parse import parse_rules
from onnxkvrename.rules.pattern import SHORTHAND

RULES = r"""
description = "for the tests"
retained = '.*_out'
[[kv]]
name = "own"
input = 'in_(?P<part>k|v|ks){layer}{token}'
output = '(?P<part>k|v|ks){layer}{token}_out'
roles = { key = "k", value = "v" }
[[keep]]
reason = "vision"
pattern = "pixels"
[dims]
past = "sequence"
[[sidecar]]
file = 'names\.json'
"""
DESCRIPTION = 'description = "for the tests"'
KEEP = "[[keep]]"
ROLES = 'roles = { key = "k", value = "v" }'


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("[[kv]]", "[[kv]", "not TOML"),
        ("[[kv]]", "retained = 1\n[[kv]]", "not TOML"),
        ("'in_", '"in_\\.', "not TOML"),
        (DESCRIPTION, "a = " + "[" * 50_000, "not TOML"),
        (DESCRIPTION, "a = " + "9" * 5_000, "not TOML"),
        (DESCRIPTION, "kv = 1\n[other]", "not TOML"),
        (DESCRIPTION, "description = 1", "description: must be text"),
        (DESCRIPTION, "colour = 1", "colour: is not a known key"),
        (DESCRIPTION, 'update = "grow"', "kv[0].update: grow is not one of inplace, append,"),
        (DESCRIPTION, "update = 3", "kv[0].update: must be text"),
        ("[[kv]]", "[[kvs]]", "kvs: is not a known key"),
        ("[[kv]]", "[kv]", "kv: needs two brackets"),
        (RULES, "", "kv: is missing"),
        (RULES, "kv = [3]", "kv: must be"),
        # What there was before.
        (ROLES, f'input_name = "in_{{layer}}"\n{ROLES}', "kv[0].input_name: is not a known key"),
        (ROLES, f'names = ["k"]\n{ROLES}', "kv[0].names: is not a known key"),
        (ROLES, f"{ROLES}\n[kv.kinds.own]", "kv[0].kinds: is not a known key"),
        # Patterns.
        (".*_out'\n[", "('\n[", "retained: is not a regular expression"),
        (".*_out'\n[", "(?<x)'\n[", "retained: is not a regular expression"),
        ("'.*_out'", "true", "retained: must be text"),
        ("in_(?P<part>k", "in_((?P<part>k", "kv[0].input: is not a regular expression"),
        ("input =", "inputs =", "kv[0].inputs: is not a known key; did you mean input?"),
        ("input = 'in_(?P<part>k|v|ks){layer}{token}'", "", "kv[0].input: is missing"),
        (
            "(?P<part>k|v|ks){layer}{token}'",
            "k{layer}{token}'",
            "kv[0].input: needs {part}, or part = 'key' where",
        ),
        ("k|v|ks", "[a-z]+", "kv[0].input: must list its parts, as in (?P<part>key|value)"),
        ("k|v|ks", "k.v", "kv[0].input: must list its parts"),
        ("k|v|ks", "v|ks", "kv[0].roles: k is not one of v, ks"),
        ("{layer}", "", "kv[0].input: needs {layer}, or layer = 0"),
        (ROLES, f"layer = 0\n{ROLES}", "kv[0].input: needs {layer}, or layer = 0"),
        ("{token}'", "'", "kv[0].input: has no {token}: write it where a token goes"),
        ("{token}'", "{token}{layer}'", "kv[0].input: has a group twice: write a [[kv]] for each"),
        ("{token}'", "{token}|in{layer}{token}'", "kv[0].input: has a group twice"),
        (
            "{token}'",
            "{tokn}'",
            "kv[0].input: has {tokn}, which is not one of {scope}, {layer}, {token}",
        ),
        ("{token}'", "{token}{suffix}'", "kv[0].input: has {suffix}, which is not one of"),
        ("{token}'", "{token}{input}'", "kv[0].input: has {input}, which is not one of"),
        # Kinds.
        ('name = "own"', "", "kv[0].kind: is missing"),
        (ROLES, f"colour = 1\n{ROLES}", "kv[0].colour: is not"),
        (ROLES, "parts = [1]", "kv[0].parts: must be"),
        ("key =", "keys =", "kv[0].roles: keys is not one of key, value,"),
        ('"v" }', "1 }", "kv[0].roles.value: must be text"),
        (ROLES, f"kind = 'full'\n{ROLES}", "kv[0].kind: full is not one of attention, mla,"),
        (ROLES, f"update = 'grow'\n{ROLES}", "kv[0].update: grow is"),
        (ROLES, f"by_shape = 1\n{ROLES}", "kv[0].by_shape: must be true or false"),
        (ROLES, f"alone = ['left']\n{ROLES}", "kv[0].alone: left is"),
        (ROLES, f"beside = {{ v = 'k' }}\n{ROLES}", "kv[0].beside: v is"),
        (ROLES, f"beside = {{ value = 'x' }}\n{ROLES}", "kv: x is not one of k, v, ks"),
        (ROLES, f"axes = ['rows']\n{ROLES}", "kv[0].axes: rows is"),
        (ROLES, f"axes = {{ k = ['head'] }}\n{ROLES}", "kv[0].axes: k is"),
        (ROLES, f"axes = 1\n{ROLES}", "kv[0].axes: must be"),
        # The other tables.
        ('reason = "vision"', "", "keep[0].reason: is missing"),
        ('reason = "vision"', 'reason = "v"\ncolour = 1', "keep[0].colour: is not"),
        (KEEP, "[keep]", "keep: needs two brackets"),
        (KEEP, "[suffixes]\na = 1\n[[keep]]", "suffixes.a: must be text"),
        ('"sequence"', "1", "dims.past: must be text"),
        ('"sequence"', "'long'", "dims.past: must be one of batch,"),
        ('"sequence"', "'sequence'\ntotal = 'past + new'", "dims.total: must be one of batch,"),
        ('"sequence"', "'sequence'\ntotal = 'past + '", "dims.total: must be one of batch,"),
        ("file = ", "files = ", "sidecar[0].files: is not"),
    ],
)
def test_a_mistake_names_the_place(old: str, new: str, said: str) -> None:
    assert old in RULES
    parse_rules(RULES, "mine.toml")
    with pytest.raises(RulesError) as caught:
        parse_rules(RULES.replace(old, new, 1), "mine.toml")
    assert caught.value.path == "mine.toml"
    assert said in caught.value.message
    assert "\n" not in str(caught.value)
    assert str(caught.value.hint).endswith("docs/rules.md explains each key")


@pytest.mark.parametrize(
    ("keys", "names", "roles"),
    [
        ("", "in_key3 in_value3", {"key": "key", "value": "value"}),
        ("roles = { key = 'k' }", "in_k3", {"k": "key"}),
        ("parts = ['k_pe', 'x']", "in_k_pe3 in_x3", {"k_pe": "k_pe", "x": ""}),
        ("roles = { key = 'a.b' }\nparts = ['c']", "in_a.b3 in_c3", {"a.b": "key", "c": ""}),
    ],
)
def test_parts_are_in_the_keys_or_called_key_and_value(
    keys: str, names: str, roles: dict[str, str]
) -> None:
    text = RULES.replace("(?P<part>k|v|ks)", "{part}").replace(ROLES, keys)
    rules = parse_rules(text, "r")
    assert rules.kv_rules[0].roles == roles
    matches = [rules.match("input", name) for name in names.split()]
    assert [match.part for match in matches if match] == list(roles)


def test_only_a_rule_about_one_part_needs_no_group_for_it() -> None:
    text = RULES.replace("(?P<part>k|v|ks)", "k")
    match = parse_rules(text.replace(', value = "v"', ""), "r").match("input", "in_k3_X")
    assert match is not None
    assert (match.part, match.layer, match.token) == ("k", 3, "X")


def test_parts_of_one_kind_in_two_rules_add_up_and_the_rest_must_be_equal() -> None:
    rule = RULES.partition("[[keep]]")[0].partition("[[kv]]")[2]
    other = rule.replace("k|v|ks", "ck|cv").replace('"k"', '"ck"').replace('"v"', '"cv"')
    rules = parse_rules(f"[[kv]]{rule}[[kv]]{other}", "r")
    assert rules.part_order == ("k", "v", "ks", "ck", "cv")
    assert list(rules.kinds) == ["own"]
    with pytest.raises(RulesError, match=r"kv\[1\]\.kind: differs from the own of another"):
        parse_rules(f'[[kv]]{rule}[[kv]]{other}update = "once"', "mine.toml")


@pytest.mark.parametrize("key", ["input", "output", "update", "runner"])
def test_the_top_of_a_file_is_for_all_rules_without_their_own(key: str) -> None:
    values = {
        "input": (r"past\.{layer}\.{part}{token}", r"k\.{layer}\.{part}{token}"),
        "output": (r"{input}_out", r"o_{input}"),
        "update": ("append", "once"),
        "runner": ("a", "b"),
    }
    lines = {each: f"{each} = '{top}'" for each, (top, _) in values.items()}
    own = f"{key} = '{values[key][1]}'"
    names = "[[kv]]\nkind = 'attention'\n[[kv]]\nname = 'other'\n"
    shared, changed = parse_rules("\n".join((*lines.values(), names + own)), "r").kv_rules
    plain = "\n".join((*lines.values(), "[[kv]]\nname = 'other'"))
    own_plain = "\n".join(({**lines, key: own}).values()) + "\n[[kv]]\nname = 'other'"
    assert shared[3:] != changed[3:]
    assert parse_rules(plain, "r").kv_rules[0][3:] == shared._replace(cache="other")[3:]
    assert parse_rules(own_plain, "r").kv_rules[0][3:] == changed[3:]


def test_without_retained_the_outputs_of_the_rules_count() -> None:
    rules = parse_rules(RULES.replace("retained = '.*_out'", ""), "mine")
    assert rules.is_retained_name("k1_out")
    assert not rules.is_retained_name("other_out")


@pytest.mark.parametrize("name", list_profiles())
def test_every_built_in_profile_can_be_sent_to_a_worker(name: str) -> None:
    rules = load_rules(name)
    assert pickle.loads(pickle.dumps(rules)) == rules


PAGE = (Path(__file__).parents[2] / "docs" / "rules.md").read_text("utf-8")
EXAMPLES = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)


def test_the_examples_of_the_page_are_rules() -> None:
    short, plain, full = (parse_rules(text, "rules.md") for text in EXAMPLES)
    assert [rule.update for rule in full.kv_rules] == ["append", "inplace"]
    match = full.match("output", "present.3.k_scale_VLLM_new")
    assert match is not None
    rule = match.rule
    assert (rule.roles["k"], rule.beside, rule.alone) == ("key", {"k_scale": "k"}, ("output",))
    assert full.rename(match, "", normalize=True) == "present.3.k_scale"
    for rules, name, renamed in (
        (short, "kv.0.value_out", "kv.0.value_out_T"),
        (plain, "cat_7", "cat_7_T"),
        (full, "present.0.conv_new", "present.0.conv_T_new"),
    ):
        match = rules.match("output", name)
        assert match is not None
        assert rules.rename(match, "T") == renamed


def test_each_key_of_rules_is_explained_on_the_page() -> None:
    """In a sentence: a key that only an example has is not explained."""
    from onnxkvrename.rules import parse

    prose = re.sub(r"```.*?```", "", PAGE.partition("## Your own rules")[2], flags=re.DOTALL)
    words = set(re.findall(r"[a-z_]+", " ".join(re.findall(r"`[^`]*`", prose))))
    shorthand = [*SHORTHAND, "part", "suffix", "input"]
    assert {*parse._TOP_KEYS, *parse._KV_KEYS, *shorthand} - {"kv", "description"} <= words


def test_the_page_is_short() -> None:
    assert len(PAGE.split()) <= 1200


@pytest.mark.parametrize("example", [0, 2])
def test_an_example_of_the_page_renames_what_it_is_for(example: int, tmp_path: Path, run) -> None:
    rules, model = tmp_path / "rules.toml", tmp_path / "model.onnx"
    rules.write_text(EXAMPLES[example])
    names, parts = ("kv.{layer}.{part}_in", "kv.{layer}.{part}_out"), ("key", "value")
    if example:
        names, parts = ("past.{layer}.{part}", "present.{layer}.{part}_new"), ("k", "v", "k_scale")
    saved(build_model(list_caches(names, parts=parts)), model)
    before = model.read_bytes()
    options = ("--prefix", "VLLM", "--rules", rules)
    outcome = run(model, *options, "--verify")
    assert (outcome.code, f"{4 * len(parts)} names changed" in outcome.err) == (0, True)
    assert run(model, *options, "--strip", "-q").code == 0
    assert model.read_bytes() == before
