"""Without rules, the token of renamed models is recognised, or --prefix says it."""

from __future__ import annotations

from pathlib import Path

import onnx.parser
import pytest
from models import saved

MODEL = """
    <ir_version: 8, opset_import: ["": 17]>
    main (float[1,8,4] past_0, float[1,8,4] past_1, float[1,1,4] x)
    => (float[1,9,4] cat_7, float[1,9,4] cat_9, float y) {
        cat_7 = Concat<axis = 1>(past_0, x) cat_9 = Concat<axis = 1>(past_1, x)
        a = ReduceSum(cat_7) b = ReduceSum(cat_9) y = Add(a, b)
    }
"""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A model whose names no profile knows."""
    monkeypatch.chdir(tmp_path)
    saved(onnx.parser.parse_model(MODEL), tmp_path / "m.onnx")
    return "m.onnx"


def test_a_renamed_model_is_compared_with_its_source_without_prefix(source: str, run) -> None:
    dataflow = ("--pairs", "dataflow")
    assert run(source, "--prefix", "VLLM", *dataflow, "-o", "new.onnx", "-q").code == 0
    outcome = run("verify", "new.onnx", *dataflow, "--renamed-from", source)
    assert (outcome.code, outcome.err) == (0, "")
    assert "the same bytes as m.onnx but for 4 names" in outcome.out
    assert "VLLM on all 4 names" in run("inspect", "new.onnx", *dataflow).out


@pytest.mark.parametrize("command", ["inspect", "manifest"])
def test_a_token_that_looks_like_a_word_is_named_with_prefix(
    command: str, source: str, run
) -> None:
    dataflow = ("--pairs", "dataflow")
    assert run(source, "--prefix", "abc", *dataflow, "-q").code == 0
    says = {"inspect": "abc on all 4 names", "manifest": '"token": "abc"'}[command]
    assert says not in run(command, source, *dataflow).out
    assert says in run(command, source, *dataflow, "--prefix", "abc").out
    refused = run(command, source, "--prefix", "abc")
    assert (refused.code, "--prefix is for --pairs" in refused.err) == (2, True)


def test_no_second_token_is_added_to_a_name(source: str, run) -> None:
    dataflow = ("--pairs", "dataflow")
    assert run(source, "--prefix", "VLLM", *dataflow, "-q").code == 0
    outcome = run(source, "--prefix", "OTHER", *dataflow, "-o", "y.onnx")
    assert (outcome.code, Path("y.onnx").exists()) == (2, False)
    assert "the names already carry the token VLLM, not OTHER" in outcome.err
    assert "remove it first, with --strip --prefix VLLM" in outcome.err
    assert run(source, "--strip", "--prefix", "VLLM", *dataflow, "-q").code == 0
    assert run(source, "--prefix", "OTHER", *dataflow, "-o", "y.onnx", "-q").code == 0
