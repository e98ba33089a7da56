"""Rules that `pairs` wrote rename exactly the caches, and verify and inspect claim no more."""

from __future__ import annotations

import shutil
from pathlib import Path

import onnx
import onnx.parser
import pytest
from conftest import FIXTURES, Run
from expected_pairs import find_expected_pairs, list_exports
from models import saved
from tiers import thin

EXPORTS = list_exports()

RULES = ("--rules", "rules.toml")
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


def write_rules(model: str | Path, run: Run) -> None:
    Path("rules.toml").write_text(run("pairs", "--as", "rules", model).out, "utf-8")


@pytest.fixture
def rename(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch):
    """Writes a model and the rules for it, and renames it with them."""
    monkeypatch.chdir(tmp_path)

    def write_and_rename(text: str) -> bytes:
        saved(onnx.parser.parse_model(HEAD + text), tmp_path / "m.onnx")
        write_rules("m.onnx", run)
        assert run("m.onnx", "--prefix", "KV", "-o", "new.onnx", "--force", *RULES).code == 0
        return Path("m.onnx").read_bytes()

    return write_and_rename


def test_new_positions_of_any_size_are_as_the_graph_joins_them(rename, run: Run) -> None:
    rename(NEW_POSITIONS)
    outcome = run("verify", "new.onnx", *RULES)
    assert (outcome.code, outcome.err) == (0, "")
    assert "2 with new positions only" in outcome.out


def test_new_positions_of_another_cache_are_an_error(rename, run: Run, tmp_path: Path) -> None:
    """Rules may say what the graph does not: that the new values belong to the keys."""
    rename(NEW_POSITIONS)
    rules = run("pairs", "m.onnx", "--as", "rules").out
    swapped = rules.replace("'nk{", "'n?{").replace("'nv{", "'nk{").replace("'n?{", "'nv{")
    assert swapped != rules
    (tmp_path / "rules.toml").write_text(swapped)
    outcome = run("verify", "m.onnx", "--rules", "rules.toml")
    assert (outcome.code, "error KV110: nv is computed from no buffer" in outcome.err) == (1, True)


def test_a_cache_that_may_grow_is_not_shown_to_keep_its_size(rename, run: Run) -> None:
    rename(STACKED)
    outcome = run("verify", "new.onnx", *RULES)
    assert outcome.code == 0
    assert "1 not shown to keep its size" in outcome.out


def test_no_layer_is_made_up(rename, run: Run) -> None:
    rename(STACKED)
    assert "no layer" in run("verify", "new.onnx", *RULES).out
    assert "mem of no layer" in run("inspect", "new.onnx", *RULES).out
    rename(STACKED.replace("mem", "mem0"))
    assert "layer 0" in run("verify", "new.onnx", *RULES).out


def test_a_renamed_model_is_compared_with_its_source(rename, run: Run) -> None:
    rename(NEW_POSITIONS)
    outcome = run("verify", "new.onnx", *RULES, "--renamed-from", "m.onnx")
    assert (outcome.code, outcome.err) == (0, "")
    assert "the same bytes as m.onnx except for 4 names" in outcome.out
    assert "KV on all 4 names" in run("inspect", "new.onnx", *RULES).out


def test_a_model_renamed_in_part_is_completed(rename, run: Run) -> None:
    rename(NEW_POSITIONS)
    model = onnx.load("m.onnx")
    names = {"k": "k_KV", "nk": "nk_KV"}
    for value in (*model.graph.input, *model.graph.output):
        value.name = names.get(value.name, value.name)
    for node in model.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
    saved(model, Path("part.onnx"))
    told = run("verify", "part.onnx", *RULES)
    assert (told.code, "KV116: 2 names (first: v) of 4 do not" in told.err) == (1, True)
    different = run("part.onnx", "--prefix", "OTHER", *RULES)
    assert (different.code, "KV202: 2 names" in different.err) == (1, True)
    completed = run("part.onnx", "--prefix", "KV", *RULES)
    assert completed.out == "v -> v_KV\nnv -> nv_KV\n"


@pytest.mark.parametrize("name", ["vlm_dual/decoder.onnx", "vlm_single.onnx", "serving/vlm.onnx"])
def test_features_of_a_picture_are_left_alone(
    name: str, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plain, renamed = (FIXTURES / folder / name for folder in ("plain", "VLLM"))
    model = Path(shutil.copyfile(plain, "m.onnx"))
    write_rules(model, run)
    assert run(model, "--prefix", "VLLM", *RULES).code == 0
    assert model.read_bytes() == renamed.read_bytes()
    assert "kept            features: " in run("inspect", model, *RULES).out
    again = run(model, "--prefix", "VLLM", *RULES)
    assert (again.code, "unchanged" in again.err) == (0, True)
    assert run("verify", model, *RULES).code == 0
    assert run(model, "--strip", *RULES).code == 0
    assert model.read_bytes() == plain.read_bytes()


def test_who_makes_rules_from_a_renamed_model_is_told(run: Run) -> None:
    outcome = run("pairs", FIXTURES / "VLLM" / "decoder.onnx", "--as", "rules")
    said = "all names carry VLLM: if that is a token, make the rules from the model before its"
    assert (outcome.code, outcome.err.startswith(said)) == (0, True)
    assert run("pairs", FIXTURES / "plain" / "decoder.onnx", "--as", "rules").err == ""


@pytest.mark.skipif(not EXPORTS, reason="the real exports are not there")
@pytest.mark.parametrize("number", thin(range(len(EXPORTS) or 1), 2))
def test_each_real_export_is_renamed_verified_and_given_back(
    number: int, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = EXPORTS[number]
    result, back = tmp_path / "renamed" / path.name, tmp_path / "back" / path.name
    pairs = find_expected_pairs(path)
    written = run("pairs", "--as", "rules", path)
    if not pairs or "dynamo_subfn/VLLM" in path.as_posix():
        assert (written.code, written.out) == (2, "")
        assert "no cache found in the graph" in written.err
        return
    pairs.pop("vision_embeds", None)  # a state, but no cache
    Path("rules.toml").write_text(written.out, "utf-8")
    options = ("--prefix", "Tok", "--sidecars", "off", *RULES)
    outcome = run(path, *options, "-o", result, "--verify")
    assert outcome.code == 0, outcome.err
    assert len(outcome.out.splitlines()) == 2 * len(pairs)
    assert run(result, *options, "--check").code == 0
    assert run(result, *options, "--strip", "-o", back).code == 0
    assert back.read_bytes() == path.read_bytes()
