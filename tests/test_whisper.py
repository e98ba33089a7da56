"""Whisper has two caches in every layer: two kinds of the default profile."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest
from cache_models import build_whisper
from models import saved


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return saved(build_whisper(2), tmp_path / "whisper.onnx")


def names(path: Path) -> list[str]:
    graph = onnx.load(path).graph
    return [value.name for value in (*graph.input, *graph.output) if "past_" in value.name]


def test_both_caches_are_renamed_and_back(model: Path, run) -> None:
    before = model.read_bytes()
    assert run(model, "--prefix", "VLLM", "--verify").code == 0
    assert len(names(model)) == 16
    assert "past_value_cross.1_VLLM_RetainedState" in names(model)
    assert all("_VLLM" in name for name in names(model))
    assert run(model, "--strip").code == 0
    assert model.read_bytes() == before


def test_a_layer_with_one_of_the_two_is_not_whole(model: Path, run) -> None:
    changed = onnx.load(model)
    for values in (changed.graph.input, changed.graph.output):
        del values[[v.name.startswith("past_value_cross.1") for v in values].index(True)]
    model.write_bytes(changed.SerializeToString())
    outcome = run(model, "--prefix", "VLLM", "--check")
    assert "KV108: past_key_cross.1 is incomplete: layer 1 has no past_value_cross" in outcome.err


def test_what_a_layer_holds_of_the_encoder_is_cross_attention(model: Path, run) -> None:
    sizes = ("--dim", "decoder_ctx_len=448", "--dim", "encoder_ctx_len=1500")
    outcome = run("inspect", model, *sizes, "--format", "json")
    assert outcome.code == 0
    (found,) = json.loads(outcome.out)["layouts"]
    kinds = {buffer["part"]: buffer["kind"] for buffer in found["buffers"]}
    assert kinds == {
        "key": "full_attention",
        "value": "full_attention",
        "key_cross": "cross_attention",
        "value_cross": "cross_attention",
    }
    # Two layers, key and value, two heads of four floats.
    assert found["totals"]["sequence_bytes"] == 2 * 2 * 2 * 4 * 4 * (448 + 1500)


def test_vllm_takes_the_two_caches_of_a_layer_as_two(model: Path, run) -> None:
    outcome = run("inspect", model, "--vllm", "--format", "json")
    assert outcome.code == 0
    groups = json.loads(outcome.out)["vllm"][0]["grouping"]["groups"]
    assert [(group["kind"], group["layers"]) for group in groups] == [
        ("full_attention", [0, 1]),
        ("cross_attention", [0, 1]),
    ]
