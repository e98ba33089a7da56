"""A verdict on some windows of a model says which layers were not there."""

from __future__ import annotations

import shutil
from pathlib import Path

import onnx
import pytest
from conftest import FIXTURES, Run

WINDOWS = ("layer_0_1", "layer_1_2", "layer_2_3")
READY, WORKS = "ready for vllm-qaic", "hand-off works"


@pytest.fixture
def windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run) -> Path:
    """Three windows with vllm-qaic's token; the logits of the last are wider than hidden states."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(FIXTURES / "plain" / "windows", "w")
    (last,) = Path("w/layer_2_3").glob("*.onnx")
    model = onnx.load(last, load_external_data=False)
    (logits,) = (value for value in model.graph.output if value.name == "logits")
    logits.type.tensor_type.shape.dim[2].dim_value = 9
    last.write_bytes(model.SerializeToString())
    assert run("w", "--prefix", "vllmKvCache").code == 0
    return Path("w")


@pytest.mark.parametrize(
    ("present", "said"),
    [
        (WINDOWS, ""),
        (WINDOWS[:1], "layers after 0 if the model has any"),
        (WINDOWS[1:2], "layer 0, and layers after 1 if the model has any"),
        (WINDOWS[2:], "layers 0-1"),
        (WINDOWS[:2], "layers after 1 if the model has any"),
    ],
)
def test_a_verdict_names_the_layers_that_no_window_has(
    present: tuple[str, ...], said: str, windows: Path, run: Run
) -> None:
    for name in {*WINDOWS} - {*present}:
        shutil.rmtree(windows / name)
    expected = f"; not there: {said} (pass all its windows)" if said else ""
    for words, verdict in ((("verify", "w", "--target", "vllm-qaic"), READY),
                           (("compare", "w"), WORKS)):  # fmt: skip
        outcome = run(*words)
        assert outcome.code == 0
        (line,) = (line for line in outcome.out.splitlines() if verdict in line)
        assert line.partition("; not there: ")[1:] == expected.partition("; not there: ")[1:]
    Path("w.json").write_text(run("inspect", "w", "--format", "json").out, "utf-8")
    assert run("compare", "w.json").out.splitlines()[0].endswith(expected)


def test_a_model_in_one_file_is_whole(windows: Path, run: Run) -> None:
    shutil.copyfile(FIXTURES / "plain" / "decoder.onnx", "m.onnx")
    assert run("m.onnx", "--target", "vllm-qaic").code == 0
    assert "not there" not in run("verify", "m.onnx", "--target", "vllm-qaic").out
    assert "not there" not in run("compare", "m.onnx").out
