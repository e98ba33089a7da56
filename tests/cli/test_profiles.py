from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

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
