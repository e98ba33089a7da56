"""An output that is declared without a type is taken as onnxruntime takes it."""

from __future__ import annotations

from pathlib import Path

import pytest
from models import saved
from onnx import ModelProto
from updated_models import build_updated_model

SCATTER = "k_out = ScatterElements<axis = 2>"
PLAIN = {
    "k": "past_key.0",
    "v": "past_value.0",
    "k_out": "past_key.0_RetainedState",
    "v_out": "past_value.0_RetainedState",
}
UNKNOWN = {"k": "mem_a", "v": "mem_b", "k_out": "a_next", "v_out": "b_next"}


def without_types(model: ModelProto, *names: str) -> ModelProto:
    """The model with no type for some outputs, all by default."""
    for value in model.graph.output:
        if value.name in names or not names:
            value.ClearField("type")
    return model


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("names", [(), (PLAIN["k_out"],)])
def test_outputs_without_types_are_renamed_and_given_back(
    names: tuple[str, ...], here: Path, run
) -> None:
    model = without_types(build_updated_model(f"{SCATTER}(k, i, new)", names=PLAIN), *names)
    path = saved(model, here / "m.onnx")
    before = path.read_bytes()
    outcome = run("m.onnx", "--target", "vllm-qaic", "--verify")
    assert (outcome.code, "UNDEFINED" in outcome.out + outcome.err) == (0, False)
    assert "2 of 2 buffers retained" in outcome.err
    for command in (
        ("verify", "m.onnx", "--target", "vllm-qaic"),
        ("inspect", "m.onnx"),
        ("compare", "m.onnx", "m.onnx"),
    ):
        outcome = run(*command)
        assert (outcome.code, "UNDEFINED" in outcome.out + outcome.err) == (0, False), command
    assert run("m.onnx", "--strip").code == 0
    assert path.read_bytes() == before


def test_the_checker_says_so_in_a_warning_and_checks_all_else(here: Path, run) -> None:
    model = without_types(build_updated_model(f"{SCATTER}(k, i, new)"))
    model.graph.output[0].type.tensor_type.elem_type = 1
    saved(model, here / "m.onnx")
    outcome = run("verify", "m.onnx")
    assert outcome.code == 0
    assert "warning KV115: has 2 outputs declared without a type (past_key.0_vll" in outcome.err
    assert "warning KV115: has an output declared without a shape (logits)" in outcome.err
    model.graph.node[-1].input[0] = "nowhere"
    saved(model, here / "m.onnx")
    outcome = run("verify", "m.onnx")
    assert (outcome.code, "error KV115: onnx's checker rejects" in outcome.err) == (1, True)


def test_pairs_are_found_whatever_the_names(here: Path, run) -> None:
    nodes = f"{SCATTER}(k, i, new) q = MatMul(k_out, small) r = MatMul(v_out, small)"
    weights = "float[4,1] small = {1, 2, 3, 4}"
    model = build_updated_model(nodes, constants=weights, names=UNKNOWN)
    extra = [value for value in model.graph.output if value.name == "logits"]
    for name in ("q", "r"):
        model.graph.output.add().CopyFrom(extra[0])
        model.graph.output[-1].name = name
    saved(without_types(model), here / "m.onnx")
    rows = [line.split()[:2] for line in run("pairs", "m.onnx").out.splitlines()]
    assert ["mem_a", "a_next"] in rows
    assert ["mem_b", "b_next"] in rows
    outcome = run("m.onnx", "--prefix", "KV")
    assert (outcome.code, "the graph has 2 caches" in outcome.err) == (1, True)


def test_another_dtype_is_still_an_error(here: Path, run) -> None:
    model = build_updated_model(f"{SCATTER}(k, i, new)")
    model.graph.output[1].type.tensor_type.elem_type = 10
    saved(model, here / "m.onnx")
    outcome = run("m.onnx", "--prefix", "VLLM", "--replace", "-n")
    said = "_RetainedState is FLOAT16, but its input past_key.0_vllmKvCache is FLOAT"
    assert (outcome.code, said in outcome.err) == (1, True)
