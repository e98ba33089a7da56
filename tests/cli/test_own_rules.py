"""Rules of the user that match nothing: what is said of them, never to write over their file."""

from __future__ import annotations

import shlex
from pathlib import Path

import models
import pytest
from conftest import Run
from models import saved

RULES = """
update = "inplace"

[[kv]]
kind = "attention"
input = 'cache_{part}\\.{layer}{token}'
output = 'cache_{part}\\.{layer}{token}_out'
roles = { key = "key", value = "value" }
"""


@pytest.mark.parametrize(
    "command",
    ["m.onnx --prefix VLLM", "m.onnx --prefix VLLM --check", "verify m.onnx", "compare m.onnx"],
)
def test_kv001_shows_where_they_fail(
    command: str, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    saved(models.decoder(), tmp_path / "m.onnx")
    Path("rules.toml").write_text(RULES)
    outcome = run(*command.split(), "--rules", "rules.toml")
    assert outcome.code == 1
    assert "KV001: " in outcome.err
    assert "no name matches the rules of rules.toml" in outcome.err
    hint = "onnxkvrename profiles --match m.onnx --rules rules.toml"
    assert f"`{hint}` shows where each name fails" in outcome.err
    assert "> rules.toml" not in outcome.err
    shown = run(*shlex.split(hint)[1:])
    assert (shown.code, "past_key.0" in shown.out) == (0, True)
