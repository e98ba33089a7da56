"""Without rules, the token of renamed models is recognised, or --prefix says it."""

from __future__ import annotations

import shutil
from pathlib import Path

import onnx
import onnx.parser
import pytest
from conftest import FIXTURES
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
    """A model whose names no profile matches."""
    monkeypatch.chdir(tmp_path)
    saved(onnx.parser.parse_model(MODEL), tmp_path / "m.onnx")
    return "m.onnx"


def test_a_renamed_model_is_compared_with_its_source_without_prefix(source: str, run) -> None:
    dataflow = ("--pairs", "dataflow")
    assert run(source, "--prefix", "VLLM", *dataflow, "-o", "new.onnx", "-q").code == 0
    outcome = run("verify", "new.onnx", *dataflow, "--renamed-from", source)
    assert (outcome.code, outcome.err) == (0, "")
    assert "the same bytes as m.onnx except for 4 names" in outcome.out
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
    assert (refused.code, "--prefix requires --pairs" in refused.err) == (2, True)


def test_no_second_token_is_added_to_a_name(source: str, run) -> None:
    dataflow = ("--pairs", "dataflow")
    assert run(source, "--prefix", "VLLM", *dataflow, "-q").code == 0
    outcome = run(source, "--prefix", "OTHER", *dataflow, "-o", "y.onnx")
    assert (outcome.code, Path("y.onnx").exists()) == (1, False)
    assert "KV202: 4 names (first: past_0_VLLM) already carry a different token" in outcome.err
    assert run(source, "--prefix", "OTHER", *dataflow, "-o", "y.onnx", "--replace").code == 0
    assert run(source, "--strip", "--prefix", "OTHER", *dataflow).code == 1
    assert run(source, "--strip", "--prefix", "VLLM", *dataflow, "-q").code == 0
    assert run(source, "--prefix", "OTHER", *dataflow, "-o", "z.onnx", "-q").code == 0
    assert Path("y.onnx").read_bytes() == Path("z.onnx").read_bytes()


@pytest.mark.parametrize("name", ["vlm_dual/decoder.onnx", "vlm_single.onnx", "serving/vlm.onnx"])
def test_features_of_a_picture_are_left_alone(name: str, tmp_path: Path, run) -> None:
    dataflow = ("--pairs", "dataflow")
    plain, renamed = (FIXTURES / folder / name for folder in ("plain", "VLLM"))
    model = Path(shutil.copyfile(plain, tmp_path / "m.onnx"))
    assert run(model, "--prefix", "VLLM", *dataflow).code == 0
    assert model.read_bytes() == renamed.read_bytes()
    assert "kept            features: " in run("inspect", model, *dataflow).out
    again = run(model, "--prefix", "VLLM", *dataflow)
    assert (again.code, "unchanged" in again.err) == (0, True)
    different = run(model, "--prefix", "OTHER", *dataflow)
    assert (different.code, "KV202" in different.err) == (1, True)
    assert model.read_bytes() == renamed.read_bytes()
    assert run("verify", model, *dataflow).code == 0
    assert run(model, "--strip", "--prefix", "VLLM", *dataflow).code == 0
    assert model.read_bytes() == plain.read_bytes()


def rename_by_hand(path: Path, names: dict[str, str]) -> None:
    """Rename values as another program does, or an earlier export did."""
    model = onnx.load(path)
    for value in (*model.graph.input, *model.graph.output):
        value.name = names.get(value.name, value.name)
    for node in model.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
    saved(model, path)


def test_features_that_have_a_token_lose_it_with_the_caches(tmp_path: Path, run) -> None:
    dataflow = ("--pairs", "dataflow")
    model = tmp_path / "m.onnx"
    shutil.copyfile(FIXTURES / "plain" / "vlm_dual" / "decoder.onnx", model)
    before = onnx.load(model)
    assert run(model, "--prefix", "VLLM", *dataflow).code == 0
    output = "vision_embeds_VLLM_RetainedState"
    rename_by_hand(
        model, {"vision_embeds": "vision_embeds_VLLM", "vision_embeds_RetainedState": output}
    )
    assert "unchanged" in run(model, "--prefix", "VLLM", *dataflow).err
    assert run(model, "--strip", "--prefix", "VLLM", *dataflow).code == 0
    assert onnx.load(model) == before


def test_a_model_renamed_in_part_is_told_as_such_and_completed(source: str, run) -> None:
    dataflow = ("--pairs", "dataflow")
    rename_by_hand(Path(source), {"past_0": "past_0_VLLM", "cat_7": "cat_7_VLLM"})
    told = run("verify", source, *dataflow)
    assert (told.code, "KV116: 2 names (first: past_1) of 4 do not" in told.err) == (1, True)
    assert "VLLM on 2 of 4 names" in run("inspect", source, *dataflow).out
    different = run(source, "--prefix", "OTHER", *dataflow)
    assert (different.code, "KV202: 2 names" in different.err) == (1, True)
    completed = run(source, "--prefix", "VLLM", *dataflow)
    assert completed.out == "past_1 -> past_1_VLLM\ncat_9 -> cat_9_VLLM\n"


def test_another_state_of_a_renamed_model_is_named_and_left_alone(tmp_path: Path, run) -> None:
    text = MODEL.replace("past_0", "past_0_V1").replace("cat_7", "cat_7_V1")
    text = text.replace("past_1", "past_1_V1").replace("cat_9", "cat_9_V1")
    text = text.replace("float[1,1,4] x", "float[1,1,4] x, float[1,1,4] state")
    text = text.replace("float y)", "float[1,1,4] state_out, float y)")
    text = text.replace("a = ", "state_out = Add(state, x) a = ")
    text = text.replace("Add(a, b)", "Sum(a, b, state)")
    model = saved(onnx.parser.parse_model(text), tmp_path / "m.onnx")
    outcome = run(model, "--prefix", "V1", "--pairs", "dataflow")
    assert (outcome.code, outcome.out) == (0, "")
    assert "unchanged: every buffer carries V1" in outcome.err
    assert (
        "warning KV111: state_out looks like a retained state, but no rule matches it"
        in outcome.err
    )


def test_a_token_in_another_place_is_not_added_again(tmp_path: Path, run) -> None:
    text = MODEL.replace("past_0", "past_0_VLLM_in").replace("cat_7", "past_0_VLLM_out")
    text = text.replace("past_1", "past_1_VLLM_in").replace("cat_9", "past_1_VLLM_out")
    model = saved(onnx.parser.parse_model(text), tmp_path / "m.onnx")
    before = model.read_bytes()
    for command in ((), ("--strip",), ("verify",)):
        outcome = run(*command, model, "--prefix", "VLLM", "--pairs", "dataflow")
        assert (outcome.code, model.read_bytes()) == (2, before)
        assert "past_0_VLLM_in already has VLLM, but not where --pairs puts" in outcome.err
