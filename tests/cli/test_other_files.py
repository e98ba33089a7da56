"""A file that lies beside a model is passed in its place."""

from __future__ import annotations

from pathlib import Path

import models
import pytest
from conftest import Run
from models import saved


@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize("content", [b"\x9c\x01\xff\x3e" * 40, bytes(64), b""])
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("m.onnx_data", "the external data of a model"),
        ("m.onnx_data_1", "the external data of a model"),
        ("m.onnx.data", "the external data of a model"),
        ("m.data", "the external data of a model"),
        ("m.bin", "a file of weights or a compile"),
        ("m.tflite", "a TensorFlow Lite model"),
        ("programqpc.bin", "a compile for Cloud AI 100"),
    ],
)
def test_it_is_called_what_it_is_and_the_model_is_named(
    name: str,
    kind: str,
    content: bytes,
    beside: bool,
    tmp_path: Path,
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    saved(content, Path(name))
    own = f"{name.partition('.')[0]}.onnx"
    if beside:
        saved(models.decoder(), Path(own))
    hint = f"pass {own}" if beside else "pass the .onnx file that it belongs to"
    for command in ([name, "--prefix", "KV"], ["verify", name]):
        outcome = run(*command)
        assert (outcome.code, outcome.err) == (
            2,
            f"error: {name}: is {kind}, not an ONNX model ({hint})\n",
        )


def test_a_model_may_have_such_a_name(tmp_path: Path, run: Run) -> None:
    path = saved(models.decoder(), tmp_path / "model.bin")
    assert run(path, "--prefix", "KV").code == 0
