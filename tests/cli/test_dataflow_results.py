"""Verify, inspect and --strip after a rename by dataflow: they claim what is known, and no more."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx.parser
import pytest
from conftest import Run
from models import saved

DATAFLOW = ("--pairs", "dataflow")
HEAD = '<ir_version: 8, opset_import: ["": 17]> main '
NEW_POSITIONS = """
    (float[b,p,4] k, float[b,p,4] v, float[b,s,4] x, float[4,4] w)
    => (float[b,s,4] nk, float[b,s,4] nv, float[b,s,4] y) {
        nk = MatMul(x, w) t = Add(x, x) nv = MatMul(t, w)
        ks = Concat<axis = 1>(k, nk) vs = Concat<axis = 1>(v, nv)
        kt = Transpose<perm = [0,2,1]>(ks) a = MatMul(x, kt) c = Softmax(a) y = MatMul(c, vs)
    }
"""
STACKED = """
    (float[2,b,p,4] mem, float[b,s,4] x, float[4,4] w) => (float[2,b,t,4] mem_next, float[b,s,4] y)
    <int64 zero = {0}, int64 one = {1}> {
        k = Gather<axis = 0>(mem, zero) v = Gather<axis = 0>(mem, one)
        n = MatMul(x, w) ks = Concat<axis = 1>(k, n) vs = Concat<axis = 1>(v, n)
        axes = Constant<value_ints = [0]>()
        ku = Unsqueeze(ks, axes) vu = Unsqueeze(vs, axes) mem_next = Concat<axis = 0>(ku, vu)
        kt = Transpose<perm = [0,2,1]>(ks) a = MatMul(x, kt) c = Softmax(a) y = MatMul(c, vs)
    }
"""


@pytest.fixture
def rename(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch):
    """Writes a model and renames it by dataflow."""
    monkeypatch.chdir(tmp_path)

    def write_and_rename(text: str) -> bytes:
        saved(onnx.parser.parse_model(HEAD + text), tmp_path / "m.onnx")
        assert run("m.onnx", "--prefix", "KV", "-o", "new.onnx", "--force", *DATAFLOW).code == 0
        return Path("m.onnx").read_bytes()

    return write_and_rename


def test_new_positions_of_any_size_are_as_the_graph_joins_them(rename, run: Run) -> None:
    rename(NEW_POSITIONS)
    outcome = run("verify", "new.onnx", *DATAFLOW)
    assert (outcome.code, outcome.err) == (0, "")
    assert "2 with new positions only" in outcome.out


def test_new_positions_of_another_cache_are_an_error(rename, run: Run, tmp_path: Path) -> None:
    """Rules may say what the graph does not: that the new values belong to the keys."""
    rename(NEW_POSITIONS)
    rules = run("pairs", "m.onnx", "--as", "rules").out
    swapped = rules.replace('"nk"', '"n?"').replace('"nv"', '"nk"').replace('"n?"', '"nv"')
    assert swapped != rules
    (tmp_path / "rules.toml").write_text(swapped)
    outcome = run("verify", "m.onnx", "--rules", "rules.toml")
    assert (outcome.code, "error KV110: nv is computed from no buffer" in outcome.err) == (1, True)


def test_a_cache_that_may_grow_is_not_shown_to_keep_its_size(rename, run: Run) -> None:
    rename(STACKED)
    outcome = run("verify", "new.onnx", *DATAFLOW)
    assert outcome.code == 0
    assert "1 not shown to keep its size" in outcome.out


def test_no_layer_is_made_up(rename, run: Run) -> None:
    rename(STACKED)
    assert "no layer" in run("verify", "new.onnx", *DATAFLOW).out
    assert "mem of no layer" in run("inspect", "new.onnx", *DATAFLOW).out
    rename(STACKED.replace("mem", "mem0"))
    assert "layer 0" in run("verify", "new.onnx", *DATAFLOW).out
