"""Rules in TOML: what they say counts, and a mistake is an error that names table and key."""

from __future__ import annotations

import pickle
import re
import shutil
from pathlib import Path

import pytest
from exporter_models import build_model, list_caches
from models import saved
from real_exports import EXPORTS

from onnxkvrename import RulesError
from onnxkvrename.rules.load import list_profiles, load_rules
from onnxkvrename.rules.parse import parse_rules
from onnxkvrename.rules.rewrite import rewrite_name

RULES = r"""
description = "for the tests"
retained = '.*_out'
[[kv]]
input = 'in_(?P<buffer>k|v|ks)(?P<layer>[0-9]+)(?:_(?P<token>[A-Za-z0-9]+))?'
output = '(?P<buffer>k|v|ks)(?P<layer>[0-9]+)(?:_(?P<token>[A-Za-z0-9]+))?_out'
input_name = "in_{buffer}{layer}[_{token}]"
output_name = "{buffer}{layer}[_{token}]_out"
[kv.kinds.own]
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
KINDS = f"[kv.kinds.own]\n{ROLES}"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("[[kv]]", "[[kv]", "not TOML"),
        ("[[kv]]", "retained = 1\n[[kv]]", "not TOML"),
        ("'in_", '"in_', "not TOML"),
        (DESCRIPTION, "a = " + "[" * 50_000, "not TOML"),
        (DESCRIPTION, "a = " + "9" * 5_000, "not TOML"),
        (DESCRIPTION, "kv = 1\n[other]", "not TOML"),
        (DESCRIPTION, "description = 1", "description: must be text"),
        (DESCRIPTION, "colour = 1", "colour: is not a known key"),
        (DESCRIPTION, 'update = "grow"', "update: grow is not one of inplace, append,"),
        (DESCRIPTION, "update = 3", "update: must be text"),
        ("[[kv]]", "[[kvs]]", "kvs: is not a known key"),
        ("[[kv]]", "[kv]", "kv: needs two brackets"),
        (RULES, "", "kv: is missing"),
        (RULES, "kv = [3]", "kv: must be"),
        # What there was before.
        (KEEP, "[set]\nshared = ['x']\n[[keep]]", "set: is not a known key"),
        (KEEP, "[[feed_back]]\ninput = 'x'\n[[keep]]", "feed_back: is not a known key"),
        (KINDS, f"update = {{ own = 'once' }}\n{KINDS}", "kv[0].update: is not a known key"),
        (KINDS, f"by_shape = ['own']\n{KINDS}", "kv[0].by_shape: is not a known key"),
        (KINDS, '[kv.kinds]\nown = ["k"]', "kv[0].kinds.own: must be a table"),
        # Patterns and templates.
        (".*_out'", "('", "retained: is not a regular expression"),
        (".*_out'", "(?<x)'", "retained: is not a regular expression"),
        ("'.*_out'", "true", "retained: must be text"),
        ("(?P<buffer>k", "(?P<buffer>(k", "kv[0].input: is not a regular expression"),
        ("input =", "inputs =", "kv[0].inputs: is not a known key; did you mean input?"),
        ("(?P<buffer>k|v|ks)", "(k|v|ks)", "kv[0].input_name: {buffer} is not"),
        ("(?P<layer>[0-9]+)", "[0-9]+", "kv[0].input: has no group (?P<layer>"),
        ("(?:_(?P<token>[A-Za-z0-9]+))?'", "'", "kv[0].input: has no group (?P<token>"),
        ('"in_{buffer}{layer}[_{token}]"', '"in_{layer}"', "kv[0].input_name: must contain"),
        ("layer}[_{token}]", "layer}_{token}", "kv[0].input_name: must contain"),
        ("in_{buffer}", "{scope}", "kv[0].input_name: {scope} is"),
        ("in_{buffer}", "{0.__class__}", "kv[0].input_name: has a {"),
        ("in_{buffer}", "[[{buffer}]", "kv[0].input_name: has a ["),
        ('input_name = "in_{buffer}{layer}[_{token}]"', "", "kv[0].input_name: is missing"),
        # Kinds.
        (KINDS, "", "kv[0].kinds: is missing"),
        (KINDS, "kinds = 1", "kv[0].kinds: must be a table"),
        (KINDS, "kinds = {}", "kv[0].kinds: must be a table"),
        (ROLES, f"colour = 1\n{ROLES}", "own.colour: is not"),
        (ROLES, "", "own.roles: needs either"),
        (ROLES, "roles = {}", "own.roles: needs either"),
        (ROLES, f'parts = ["k"]\n{ROLES}', "own.roles: needs either"),
        (ROLES, "parts = [1]", "own.parts: must be"),
        ("key =", "keys =", "own.roles: keys is not one of key, value,"),
        ('"v" }', "1 }", "own.roles.value: must be text"),
        (ROLES, f"kind = 'full'\n{ROLES}", "own.kind: full is not one of attention, mla,"),
        (ROLES, f"update = 'grow'\n{ROLES}", "own.update: grow is"),
        (ROLES, f"by_shape = 1\n{ROLES}", "own.by_shape: must be true or false"),
        (ROLES, f"alone = ['left']\n{ROLES}", "own.alone: left is"),
        (ROLES, f"beside = {{ v = 'k' }}\n{ROLES}", "own.beside: v is"),
        (ROLES, f"axes = ['rows']\n{ROLES}", "own.axes: rows is"),
        (ROLES, f"axes = {{ k = ['head'] }}\n{ROLES}", "own.axes: k is"),
        (ROLES, f"axes = 1\n{ROLES}", "own.axes: must be"),
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
    ("old", "new", "hint"),
    [
        ("(?:_(?P<token>[A-Za-z0-9]+))?'", "'", "(?:_(?P<token>[A-Za-z0-9]+))?"),
        ("[_{token}]", "", 'input_name = "past.{layer}.{buffer}[_{token}]"'),
        ("'in_", '"in_', "single quotes"),
        (KINDS, '[kv.kinds]\nown = ["k"]', "[kv.kinds.attention] with roles"),
        (KINDS, f"update = {{ own = 'once' }}\n{KINDS}", "or in the table of a kind"),
    ],
)
def test_a_mistake_shows_what_is_expected(old: str, new: str, hint: str) -> None:
    with pytest.raises(RulesError) as caught:
        parse_rules(RULES.replace(old, new, 1), "mine.toml")
    assert hint in str(caught.value.hint)


def test_only_a_rule_about_one_part_needs_no_group_for_it() -> None:
    text = RULES.replace("(?P<buffer>k|v|ks)", "k").replace("{buffer}", "k")
    with pytest.raises(RulesError, match=r"input: has no group \(\?P<buffer>"):
        parse_rules(text, "r")
    match = parse_rules(text.replace(', value = "v"', ""), "r").match("input", "in_k3_X")
    assert match is not None
    assert (match.buffer, match.layer, match.token) == ("k", 3, "X")


def test_parts_of_one_kind_in_two_rules_add_up_and_the_rest_must_be_equal() -> None:
    rule = RULES.partition("[[keep]]")[0].partition("[[kv]]")[2]
    other = rule.replace("k|v|ks", "ck|cv").replace('"k"', '"ck"').replace('"v"', '"cv"')
    rules = parse_rules(f"[[kv]]{rule}[[kv]]{other}", "r")
    assert rules.kinds["own"].parts == ("k", "v", "ck", "cv")
    with pytest.raises(RulesError, match=r"kv\[1\]\.kinds\.own: differs"):
        parse_rules(f'[[kv]]{rule}[[kv]]{other}update = "once"', "mine.toml")


@pytest.mark.parametrize(
    ("top", "own", "update"),
    [("", "", ""), ("append", "", "append"), ("append", "delta", "delta"), ("", "once", "once")],
)
def test_an_update_is_that_of_the_kind_or_of_the_file(top: str, own: str, update: str) -> None:
    text = f"update = '{top}'\n{RULES}" if top else RULES
    text = text.replace(ROLES, f"{ROLES}\nupdate = '{own}'") if own else text
    assert parse_rules(text, "r").updates_by_kind == {"own": update}


def test_without_retained_the_outputs_of_the_rules_count() -> None:
    rules = parse_rules(RULES.replace("retained = '.*_out'", ""), "mine")
    assert rules.is_retained_name("k1_out")
    assert not rules.is_retained_name("other_out")


@pytest.mark.parametrize("name", list_profiles())
def test_every_built_in_profile_can_be_sent_to_a_worker(name: str) -> None:
    rules = load_rules(name)
    assert pickle.loads(pickle.dumps(rules)).kinds == rules.kinds


T5 = "input.past_key_values.self_attention_cache.layers.0.keys"
REAL_T5 = EXPORTS.with_name("exports-other") / "new" / "hf5-t5" / "model.onnx"


def test_the_examples_of_the_page_are_rules() -> None:
    page = Path(__file__).parents[2] / "docs" / "rules.md"
    examples = re.findall(r"```toml\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
    first, second, third = (parse_rules(text, "rules.md") for text in examples)
    assert first.updates_by_kind == {"attention": "append"}
    match = second.match("input", "past.3.k_scale_VLLM")
    assert match is not None
    kind = match.kind
    assert (kind.roles["k"], kind.beside, kind.alone) == ("key", {"k_scale": "k"}, ("output",))
    assert rewrite_name(second, match, "") == "past.3.k_scale"
    assert second.dims["total"] == "past + new"
    for word, update in (("self", "append"), ("cross", "once")):
        match = third.match("input", T5.replace("self", word))
        assert match is not None
        assert (match.kind.name, match.kind.update) == (word, update)


def test_each_key_of_rules_is_explained_on_the_page() -> None:
    """In a sentence: a key that only an example has is not explained."""
    from onnxkvrename.rules import parse

    page = (Path(__file__).parents[2] / "docs" / "rules.md").read_text("utf-8")
    prose = re.sub(r"```.*?```", "", page.partition("## Your own rules")[2], flags=re.DOTALL)
    keys = (parse._TOP_KEYS, parse._PATTERN_KEYS, parse._KIND_KEYS, parse._NAME_KEYS)
    other = ("reason", "pattern", "file", "reader")
    words = set(re.findall(r"[a-z_]+", " ".join(re.findall(r"`[^`]*`", prose))))
    assert {key for group in (*keys, other) for key in group} <= words


@pytest.mark.parametrize("where", ["small", "real"])
def test_the_example_of_the_page_renames_what_it_is_for(where: str, tmp_path: Path, run) -> None:
    page = (Path(__file__).parents[2] / "docs" / "rules.md").read_text("utf-8")
    rules = tmp_path / "t5.toml"
    rules.write_text(re.findall(r"```toml\n(.*?)```", page, re.DOTALL)[2])
    model = tmp_path / "model.onnx"
    if where == "small":
        into = T5.replace("0.keys", "{layer}.{part}")
        own = into, into.replace("input", "output", 1)
        cross = own[0].replace("self", "cross"), own[1].replace("self", "cross")
        shape = ("batch_size", 2, "encoder_sequence_length", 4)
        caches = list_caches(own, parts=("keys", "values"))
        caches += list_caches(cross, parts=("keys", "values"), shape=shape, update="once")
        saved(build_model(caches), model)
    elif not REAL_T5.exists():
        pytest.skip(f"no real export: no {REAL_T5}")
    else:
        shutil.copytree(REAL_T5.parent, tmp_path, copy_function=shutil.copyfile, dirs_exist_ok=True)
    before = model.read_bytes()
    options = ("--prefix", "VLLM", "--rules", rules)
    outcome = run(model, *options, "--verify")
    assert (outcome.code, "16 names changed" in outcome.err) == (0, True), outcome.err
    assert run(model, *options, "--strip", "-q").code == 0
    assert model.read_bytes() == before
