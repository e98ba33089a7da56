from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from exporter_models import HUGGING_FACE, build_decoder, build_model, list_caches
from models import saved

from onnxkvrename.handoff.find_consumers import list_consumers
from onnxkvrename.rules.load import list_profiles


def test_profiles_are_listed_with_what_they_are_for(run: Any) -> None:
    rows = [line.split(maxsplit=1) for line in run("profiles").out.splitlines()]
    assert [name for name, _ in rows] == list(list_profiles())
    assert dict(rows)["qnn"].startswith("QNN and Genie: past_key_N_in -> past_key_N_out")


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("rename", ("--profile", "--target")),
        ("compare", ("--profile", "--target")),
        ("verify", ("--profile", "--target")),
    ],
)
def test_help_lists_the_names_that_an_option_takes(
    command: str, options: tuple[str, ...], run: Any
) -> None:
    shown = re.sub(r"(?<=-)\s+", "", run(command, "--help").out)  # lines are broken at hyphens
    blocks = dict(re.findall(r"\n  (--[a-z]+) .*?((?:\n? .*)+?)(?=\n  -|\n\n)", shown))
    for option in options:
        known = list_consumers() if option == "--target" else list_profiles()
        words = set(re.findall("[a-z-]+", blocks[option]))
        assert words >= set(known), option


@pytest.mark.parametrize("name", list_profiles())
def test_a_printed_profile_is_a_rules_file(
    name: str, decoder: Path, tmp_path: Path, run: Any
) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text(run("profiles", name).out, "utf-8")
    by_file = run(decoder, "--prefix", "VLLM", "--check", "--rules", rules)
    by_name = run(decoder, "--prefix", "VLLM", "--check", "--profile", name)
    assert (by_file.code, by_file.out) == (by_name.code, by_name.out)


def test_an_unknown_profile_is_an_error(run: Any) -> None:
    outcome = run("profiles", "qef")
    assert (outcome.code, outcome.out) == (2, "")
    assert "no such profile: qef (did you mean qeff?)" in outcome.err
    assert "no such profile: x (profiles: " in run("profiles", "x").err


def test_match_shows_which_rule_takes_each_name(tmp_path: Path, run: Any) -> None:
    odd = list_caches(HUGGING_FACE, [0], ["odd"])
    model = saved(
        build_model([*list_caches(HUGGING_FACE, [0], ["key"]), *odd]), tmp_path / "m.onnx"
    )
    outcome = run("profiles", "--match", model)
    rows = [re.split("  +", line.strip()) for line in outcome.out.splitlines()]
    assert (outcome.code, rows[0]) == (0, [f"{model}: huggingface"])
    found = {(side, name): rest for side, name, *rest in (row for row in rows[2:] if len(row) > 1)}
    assert found["input", "past_key_values.0.key{token}"] == ["kv[0]", "attention", "key", "0"]
    assert found["output", "present.0.key{token}"] == ["kv[0]", "attention", "key", "0"]
    nearly = "nearly: kv[0], 'odd' in place of {part}"
    assert found["input", "past_key_values.0.odd"] == [nearly]
    assert found["output", "present.0.odd"] == [nearly]
    run(model, "--prefix", "VLLM")
    assert "past_key_values.0.key{_VLLM}" in run("profiles", "--match", model).out


def test_match_tells_of_rules_of_ones_own_where_they_fail(tmp_path: Path, run: Any) -> None:
    """As they are being written: a literal, a layer, a part, and a name that stays."""
    model = saved(
        build_decoder(("kv.{layer}.{part}_in", "kv.{layer}.{part}_out")), tmp_path / "m.onnx"
    )
    rules = tmp_path / "rules.toml"
    text = r"""
        [[kv]]
        kind = "attention"
        input = 'kv\.{layer}\.(?P<part>key|valve)_in{token}'
        output = 'kv\.{layer}\.{part}_on{token}'
    """

    def show(text: str) -> str:
        rules.write_text(text)
        outcome = run("profiles", "--match", model, "--rules", rules)
        assert outcome.code == 0
        return re.sub("  +", "  ", outcome.out)

    shown = show(text)
    assert "  input  kv.0.key_in{token}  kv[0]  attention  key  0\n" in shown
    assert "kv.0.value_in  nearly: kv[0], 'value' in place of {part}\n" in shown
    assert "kv.0.key_out  nearly: kv[0], '_out' in place of _on\n" in shown
    assert "kv.1.value_out\n" in shown  # which fails at two places
    keep = "[[keep]]\nreason = 'ours'\npattern = 'kv.0.*'"
    assert "kv.0.key_in  stays: ours\n" in show(text + keep)
    assert "kv.0.key_in{token}" in show(text.replace("valve", "value").replace("_on", "_out"))


def test_match_of_a_model_that_no_profile_knows_tries_all(tmp_path: Path, run: Any) -> None:
    names = ("past_key_values.{layer}.k", "present.{layer}.k")
    model = saved(build_model(list_caches(names, parts=[""])), tmp_path / "m.onnx")
    shown = run("profiles", "--match", model).out
    assert "nearly: huggingface kv[0], 'k' in place of {part}" in shown
    assert f"`onnxkvrename pairs {model} --as rules` writes rules" in shown
    assert "nearly: qnn" not in shown
    one = run("profiles", "huggingface", "--match", model).out
    assert "nearly: kv[0], 'k' in place of {part}" in one


def test_match_names_the_file_that_cannot_be_read(tmp_path: Path, run: Any) -> None:
    outcome = run("profiles", "--match", tmp_path / "none.onnx")
    assert (outcome.code, "none.onnx: no such file" in outcome.err) == (2, True)
    outcome = run("profiles", "--rules", tmp_path / "r.toml")
    assert (outcome.code, "--match" in outcome.err) == (2, True)
