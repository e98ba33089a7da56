from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from onnxkvrename.rules.load import list_profiles


def test_profiles_are_listed(run: Any) -> None:
    assert run("profiles").out.split() == list(list_profiles())


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
