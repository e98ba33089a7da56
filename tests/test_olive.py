"""The passes of `examples/olive`, each in the program that it is for."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import onnx
import pytest
from conftest import FIXTURES
from kill_commands import read_directory

import onnxkvrename

EXAMPLE = FIXTURES.parent / "examples" / "olive"
QUIET = {"OLIVE_DISABLE_TELEMETRY": "1", "HF_HUB_OFFLINE": "1", "CI": "1"}
"""So that Olive talks to nobody."""


def run_python(script: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join((str(EXAMPLE), os.environ.get("PYTHONPATH", "")))
    environment = {**os.environ, **QUIET, "PYTHONPATH": path, "HOME": str(cwd)}
    command = [sys.executable, "-c", script]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment)


@pytest.mark.skipif(find_spec("olive") is None, reason="Olive is not installed")
def test_olive_renames_for_a_consumer(tmp_path: Path) -> None:
    shutil.copytree(FIXTURES / "plain" / "external", tmp_path / "export")
    export = tmp_path / "export"
    own = tmp_path / "own" / "model.onnx"
    onnxkvrename.rename(export / "decoder.onnx", target="vllm-qaic", output=own)
    for name in ("workflow.json", "package.json"):
        shutil.copyfile(EXAMPLE / name, tmp_path / name)
    workflow = json.loads((tmp_path / "workflow.json").read_text())
    workflow["input_model"]["model_path"] = "export/decoder.onnx"
    (tmp_path / "workflow.json").write_text(json.dumps(workflow))
    script = "from olive.workflows import run; run('workflow.json', package_config='package.json')"
    done = run_python(script, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (tmp_path / "renamed" / "model_config.json").unlink()  # Olive's own
    assert read_directory(tmp_path / "renamed") == read_directory(own.parent)
    result = tmp_path / "renamed" / "model.onnx"
    assert not onnxkvrename.verify(result, target="vllm-qaic").report.failed


@pytest.mark.skipif(find_spec("olive") is None, reason="Olive is not installed")
def test_olive_gets_no_model_that_a_check_refuses(tmp_path: Path) -> None:
    shutil.copyfile(FIXTURES / "VLLM" / "decoder.onnx", tmp_path / "model.onnx")
    script = (
        "from olive.model import ONNXModelHandler as M\n"
        "from olive.passes.olive_pass import create_pass_from_dict as create\n"
        "from kv_pass import RenameKvBuffers as R\n"
        "create(R, {'target': 'vllm-qaic'}, disable_search=True).run(M('model.onnx'), 'out')\n"
    )
    done = run_python(script, tmp_path)
    assert done.returncode == 1
    assert "KV202" in done.stderr
    assert not list(tmp_path.glob("out/**/*.onnx"))


@pytest.mark.skipif(find_spec("onnx_ir") is None, reason="onnx_ir is not installed")
def test_a_pass_of_onnx_ir_renames_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    import onnx_ir

    monkeypatch.syspath_prepend(str(EXAMPLE))
    from ir_pass import RenameKvBuffers

    model = onnx_ir.serde.deserialize_model(onnx.load(FIXTURES / "plain" / "decoder.onnx"))
    renaming = RenameKvBuffers("VLLM")
    assert renaming(model).modified
    assert not renaming(model).modified
    names = onnx.load(FIXTURES / "VLLM" / "decoder.onnx").graph
    assert [value.name for value in model.graph.outputs] == [each.name for each in names.output]
    assert [value.name for value in model.graph.inputs] == [each.name for each in names.input]
    with pytest.raises(ValueError, match="KV202"):
        RenameKvBuffers("OTHER")(model)
