"""The example `examples/run_retention.py`: two models that must give equal results, and a cache
that does not fit back into its input."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import onnx
import pytest
from conftest import FIXTURES
from exporter_models import build_decoder
from models import saved

EXAMPLE = FIXTURES.parent / "examples" / "run_retention.py"
PLAIN, RENAMED = FIXTURES / "plain" / "decoder.onnx", FIXTURES / "VLLM" / "decoder.onnx"


@pytest.fixture
def go(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Return a function that runs the example and returns what it says."""
    pytest.importorskip("onnxruntime")

    def run(*words: object) -> str:
        monkeypatch.setattr(sys, "argv", [EXAMPLE.name, *map(str, words)])
        try:
            runpy.run_path(str(EXAMPLE), run_name="__main__")
        except SystemExit as end:
            return f"exit 1: {end}"
        return capsys.readouterr().out

    return run


def test_renamed_model_gives_the_results_of_its_source(go) -> None:
    said = f"{RENAMED}: 3 steps, every buffer fits into its input"
    assert go(RENAMED) == f"{said}\n"
    assert go(RENAMED, "--like", PLAIN) == f"{said}, bit for bit equal to {PLAIN}\n"
    said = go(RENAMED, "--like", PLAIN, "--steps", 5, "--dim", "ctx_len=8", "--dim", "seq_len=2")
    assert said.startswith(f"{RENAMED}: 5 steps")


def test_changed_weight_shows_in_a_buffer(tmp_path: Path, go) -> None:
    model = onnx.load(RENAMED)
    (scale,) = (weight for weight in model.graph.initializer if weight.name == "key_scale")
    scale.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(scale) * 2, scale.name))
    changed = saved(model, tmp_path / "m.onnx")
    said = go(changed, "--like", PLAIN)
    assert said.startswith(f"exit 1: {changed}: ")
    assert said.endswith(f" differs from {PLAIN} in step 1")


def test_cache_that_grows_does_not_fit_into_its_input(tmp_path: Path, go) -> None:
    path = saved(build_decoder(), tmp_path / "m.onnx")
    assert go(path).startswith(f"exit 1: {path}: present.0.key is (")


def test_model_without_buffers_is_no_success(go) -> None:
    encoder = FIXTURES / "plain" / "vlm_dual" / "encoder.onnx"
    assert go(encoder) == f"exit 1: {encoder}: no KV buffer"
