"""Rules that read names in two ways: what they make can be undone, or one error says why not."""

from __future__ import annotations

import shlex
from pathlib import Path

import onnx
import pytest
from exporter_models import HEAD, HEADS, list_caches
from exporter_models import build_model as build
from models import saved

from onnxkvrename.rules.load import PROFILES_DIRECTORY

QEFF_NAMES = ("past_{part}.{layer}", "past_{part}.{layer}_RetainedState")
NO_LIST = "kv[0].input: must list its parts, as in (?P<part>key|value)"
TRAPS = {
    "a part that takes the token, so that a second run adds another one": (
        QEFF_NAMES,
        r"'(?P<part>[a-z_]+){token}\.{layer}'",
        "'{input}_RetainedState'",
        NO_LIST,
    ),
    "a part that stops at an underscore, so that past_key is past with a token": (
        QEFF_NAMES,
        r"'(?P<part>[a-z_]+?){token}\.{layer}'",
        "'{input}_RetainedState'",
        NO_LIST,
    ),
    "layers in two alternatives": (
        QEFF_NAMES,
        r"'past_{part}\.{layer}{token}|{part}\.{layer}{token}'",
        "'{input}_RetainedState'",
        "kv[0].input: has a group twice: write a [[kv]] for each form of the names",
    ),
    "a group that need not take part": (
        QEFF_NAMES,
        r"'past_{part}\.{layer}(?:_(?P<token>[A-Za-z0-9]+))?'",
        "'{input}_RetainedState'",
        "kv[0].input: 'past_key.0' fits, but not all groups take part in it (write (?P<token>",
    ),
    "the slot at the start": (
        QEFF_NAMES,
        r"'{token}past_{part}\.{layer}'",
        "'{input}_RetainedState'",
        "kv[0].input: 'past_key.0' would become '_VLLMpast_key.0', which does not read as key, "
        "layer 0, with VLLM as a word (",
    ),
    "a wildcard that takes the token": (
        ("{part}.{layer}_in", "{part}.{layer}_out"),
        r"'{part}\.{layer}{token}.*'",
        r"'{part}\.{layer}{token}.*'",
        "kv[0].input: 'key.0_in' would become 'key.0_VLLM_in', which does not read as key, "
        "layer 0, with VLLM as a word (let {token} alone match _VLLM",
    ),
}


def save(tmp_path: Path, names: tuple[str, str], parts: tuple[str, ...] = ("key", "value")) -> Path:
    """A model of two layers."""
    return saved(build(list_caches(names, parts=parts)), tmp_path / "model.onnx")


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "rules.toml"
    path.write_text(f"[[kv]]\nkind = 'attention'\n{text}\n")
    return path


@pytest.mark.parametrize("trap", TRAPS)
def test_a_rule_that_could_not_be_undone_is_one_error(trap: str, tmp_path: Path, run) -> None:
    names, into, out, said = TRAPS[trap]
    model, rules = save(tmp_path, names), write(tmp_path, f"input = {into}\noutput = {out}")
    before = model.read_bytes()
    outcome = run(model, "--prefix", "VLLM", "--rules", rules)
    assert (outcome.code, model.read_bytes()) == (2, before)
    assert f"rules.toml: {said}" in outcome.err
    assert outcome.err.count("\n") == 1


@pytest.mark.parametrize("order", ["key|value|key_cache|value_cache", "key_cache|key"])
def test_the_longest_part_before_the_slot_counts(order: str, tmp_path: Path, run) -> None:
    """Whatever their order: key_cache is no key with the token cache."""
    parts = tuple(order.split("|"))
    model = save(tmp_path, ("{part}.{layer}", "{part}.{layer}_out"), parts)
    names = rf"input = '(?P<part>{order}){{token}}\.{{layer}}'"
    rules = write(tmp_path, f"{names}\noutput = '{{input}}_out'\nupdate = 'append'")
    check_bijection(model, rules, "key_cache.1 -> key_cache_VLLM.1", run)


def check_bijection(model: Path, rules: Path, line: str, run) -> None:
    """Check a rename, that a second one changes nothing, and that a token can be removed."""
    before = model.read_bytes()
    outcome = run(model, "--prefix", "VLLM", "--rules", rules)
    assert (outcome.code, line in outcome.out) == (0, True), outcome.err
    after = model.read_bytes()
    assert run(model, "--prefix", "VLLM", "--rules", rules).code == 0
    assert model.read_bytes() == after
    assert run("verify", model, "--prefix", "VLLM", "--rules", rules).code == 0
    assert run(model, "--strip", "--rules", rules).code == 0
    assert model.read_bytes() == before


def test_one_word_of_the_rules_moves_the_token_before_the_layer(tmp_path: Path, run) -> None:
    text = (PROFILES_DIRECTORY / "qeff.toml").read_text()
    assert text.count("{token}") == 1
    rules = tmp_path / "mine.toml"
    rules.write_text(text.replace(r"\.{layer}{token}", r"{token}\.{layer}"))
    model = save(tmp_path, QEFF_NAMES)
    moved = list_caches(QEFF_NAMES, update="inplace", shape=("batch_size", HEADS, "ctx_len", HEAD))
    saved(build(moved), model)
    check_bijection(model, rules, "past_key.0_RetainedState -> past_key_VLLM.0_RetainedState", run)


@pytest.mark.parametrize(
    ("token", "name"),
    [
        ("(?P<token>(?:[A-Za-z0-9]+_)?)past_", "VLLM_past_key.0"),
        (r"past_(?P<token>(?:[A-Z]+\.)?)", None),
        ("past(?P<token>(?:-[A-Z]+)?)_", "past-VLLM_key.0"),
        (r"past(?P<token>(?:\.[A-Z]+)?)_", "past.VLLM_key.0"),
        ("past(?P<token>[A-Z]*)_", "pastVLLM_key.0"),
    ],
)
def test_a_token_may_look_different(token: str, name: str | None, tmp_path: Path, run) -> None:
    model = save(tmp_path, ("past_{part}.{layer}", "past_{part}.{layer}_out"))
    names = rf"input = '{token}{{part}}\.{{layer}}'"
    rules = write(tmp_path, f"{names}\noutput = '{{input}}_out'\nupdate = 'append'")
    if name is None:
        assert "would become" in run(model, "--prefix", "VLLM", "--rules", rules).err
    else:
        check_bijection(model, rules, f"past_key.0 -> {name}\n", run)


LENGTHS = """
input = 'cache_last_(?P<part>channel|time){token}'
output = '{input}_next'
layer = 0
update = 'append'
"""
KEEP = "[[keep]]\nreason = 'length'\npattern = 'cache_last_channel_len(_next)?'"


def test_a_name_that_looks_like_a_token_stays_if_the_rules_keep_it(tmp_path: Path, run) -> None:
    names = ("cache_last_{part}", "cache_last_{part}_next")
    caches = list_caches(names, [0], ("channel", "time", "channel_len"))
    model = saved(build(caches), tmp_path / "model.onnx")
    outcome = run(model, "--prefix", "VLLM", "--rules", write(tmp_path, LENGTHS))
    assert (outcome.code, "KV106: cache_last_channel_len" in outcome.err) == (1, True)
    assert "token len" in outcome.err
    rules = write(tmp_path, LENGTHS + KEEP)
    line = "cache_last_channel_next -> cache_last_channel_VLLM_next"
    check_bijection(model, rules, line, run)
    outcome = run(model, "--prefix", "len", "--rules", rules)
    assert (outcome.code, "'cache_last_channel_len', which does not" in outcome.err) == (2, True)


@pytest.mark.parametrize("name", ["past_key_0_in", "past_1_key", "past_0_0"])
def test_a_profile_takes_no_name_of_another_exporter_for_one_with_a_token(
    name: str, tmp_path: Path, run
) -> None:
    caches = list_caches((name, f"{name.replace('past', 'present')}"), [0], [""])
    model = saved(build(caches), tmp_path / "model.onnx")
    outcome = run(model, "--prefix", "VLLM", "--profile", "ort-decoder")
    assert (outcome.code, "KV001" in outcome.err) == (1, True)
    assert onnx.load(model).graph.input[-1].name == name


def test_a_hint_of_an_error_is_a_command_that_can_be_pasted(tmp_path: Path, run) -> None:
    """A token that is the end of another part's name: another one does it."""
    model = save(tmp_path, ("in.{layer}.{part}", "out.{layer}.{part}"), ("key", "key_scale"))
    names = r"input = 'in\.{layer}\.(?P<part>key|key_scale){token}'"
    rules = write(tmp_path, f"{names}\noutput = 'out\\.{{layer}}\\.{{part}}{{token}}'")
    outcome = run(*shlex.split(f"{model} --prefix scale --rules {rules}"))
    assert outcome.code == 2
    assert "'in.0.key' would become 'in.0.key_scale', which does not read as key" in outcome.err
    assert "choose another token, for example VLLM" in outcome.err
    assert run(model, "--prefix", "VLLM", "--rules", rules).code == 0
