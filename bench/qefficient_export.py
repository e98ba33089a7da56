"""The jobs inside QEfficient, in a process of their own: `bench/qefficient.py` starts it.

Reads requests from stdin and answers on stdout, each a line of JSON; whatever else is printed
goes to stderr. The compiler is replaced by a function that notes its command: no device and no
Apps SDK are needed, and what QEfficient writes for the compiler is real.

Needs QEfficient and what it needs; onnxkvrename is not loaded here.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers


class ExportNotFoundError(Exception):
    """QEfficient was about to export, though its cache should have what it looks for."""


def describe(request: dict[str, Any]) -> dict[str, Any]:
    """Return the versions that matter."""
    import QEfficient

    packages = ("torch", "transformers", "onnx", "onnxscript", "onnx-ir", "protobuf", "numpy")
    found = {"python": sys.version.split()[0], **{name: version(name) for name in packages}}
    return {"versions": {"QEfficient": QEfficient.__version__, **found}}


def compile_model(request: dict[str, Any]) -> dict[str, Any]:
    """Load the checkpoint and compile it, which exports it unless the cache has the export.

    Returns:
        The commands that the compiler would have got, as ``model`` and ``custom_io``, and how
        many models were exported.
    """
    import QEfficient
    from QEfficient.base import modeling_qeff
    from QEfficient.utils import export_utils

    export_utils.QEFF_HOME = Path(request["cache"])
    commands: list[dict[str, str | None]] = []

    def note(command: list[str], **_: Any) -> None:
        commands.append(
            {
                "model": find_argument(command, "-m="),
                "custom_io": find_argument(command, "-custom-IO-list-file="),
            }
        )

    failure = modeling_qeff.subprocess.CalledProcessError
    modeling_qeff.subprocess = SimpleNamespace(run=note, CalledProcessError=failure)
    checkpoint = write_checkpoint(request)
    token = {"kv_cache_prefix": request["token"]} if request["token"] else {}
    with watched_exports(request["may_export"]) as exports, kept_windows(request["windows"]):
        owner = getattr(QEfficient, request["owner"])
        model = owner.from_pretrained(str(checkpoint), **request["load"])
        model.compile(**request["compile"], **token)
    return {"commands": commands, "exports": len(exports)}


def merge_windows(request: dict[str, Any]) -> dict[str, Any]:
    """Let QEfficient merge the windows below a directory."""
    from QEfficient.utils import layerwise_pipeline

    return {"merged": layerwise_pipeline(request["directory"], final_data_dir=".")}


def find_argument(command: list[str], option: str) -> str | None:
    """Return the value of an option in a compiler's command."""
    return next((part.removeprefix(option) for part in command if part.startswith(option)), None)


@contextmanager
def watched_exports(may_export: bool) -> Iterator[list[str]]:
    """Count calls of PyTorch's exporter, in the list that is returned, or refuse them."""
    export, seen = torch.onnx.export, []

    def watched(*arguments: Any, **options: Any) -> Any:
        if not may_export:
            raise ExportNotFoundError("QEfficient exports instead of taking what its cache has")
        seen.append("export")
        return export(*arguments, **options)

    torch.onnx.export = watched
    try:
        yield seen
    finally:
        torch.onnx.export = export


@contextmanager
def kept_windows(target: str) -> Iterator[None]:
    """Copy the windows of a layerwise export before QEfficient merges and deletes them."""
    import QEfficient.utils

    merge = QEfficient.utils.layerwise_pipeline

    def copy_and_merge(exported_path: str, **options: Any) -> str:
        shutil.copytree(exported_path, target)
        return merge(exported_path, **options)

    QEfficient.utils.layerwise_pipeline = copy_and_merge
    try:
        yield
    finally:
        QEfficient.utils.layerwise_pipeline = merge


def write_checkpoint(request: dict[str, Any]) -> Path:
    """Write a checkpoint with random weights, always the same ones, unless it is there."""
    checkpoint = Path(request["checkpoint"])
    config_class = type(transformers.AutoConfig.for_model(request["config"]["model_type"]))
    for name, value in request["attributes"].items():
        setattr(config_class, name, value)
    if not checkpoint.is_dir():
        transformers.set_seed(0)
        config = transformers.AutoConfig.for_model(**request["config"])
        model = getattr(transformers, request["loader"]).from_config(config)
        model.to(getattr(torch, request["config"].get("dtype", "float32")))
        model.save_pretrained(checkpoint)
    return checkpoint


JOBS = {"describe": describe, "compile": compile_model, "merge": merge_windows}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = JOBS[request["job"]](request)
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
