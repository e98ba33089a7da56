"""A further check is one file in ``rules/checks/``."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from onnxkvrename.findings import CODES, declare_code
from onnxkvrename.rules import checks

TOO_MANY = '''
"""A model with more layers than the device has memory for."""

from onnxkvrename.findings import build_finding, declare_code

declare_code("KV190", "error", "a model with more than one layer")


def check(signature, plan, uses):
    layers = {pair.layer for pair in plan.pairs}
    if len(layers) > 1:
        yield build_finding("KV190", "", f"has {len(layers)} layers", "split the model")
'''


@pytest.fixture
def one_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The folder of checks with one file more."""
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "too_many_layers.py").write_text(TOO_MANY, "utf-8")
    monkeypatch.setattr(checks, "__path__", [*checks.__path__, str(tmp_path / "more")])
    yield
    CODES.pop("KV190", None)
    sys.modules.pop("onnxkvrename.rules.checks.too_many_layers", None)


@pytest.mark.usefixtures("one_more")
def test_a_file_more_is_a_finding_more(decoder: Path, run) -> None:
    before = decoder.read_bytes()
    outcome = run(decoder, "--prefix", "VLLM")
    assert outcome.code == 1
    assert "error KV190: has 2 layers (split the model)" in outcome.err
    assert decoder.read_bytes() == before
    assert "KV190" in run("verify", decoder).err


def test_without_it_there_is_none(decoder: Path, run) -> None:
    assert checks.find_further_checks() == []
    assert run(decoder, "--prefix", "VLLM").code == 0


def test_a_code_that_is_taken_is_refused() -> None:
    declare_code("KV101", *CODES["KV101"])
    with pytest.raises(ValueError, match="KV101 is taken"):
        declare_code("KV101", "warning", "something else")
