"""Recognize by their names the files that lie beside a model, and are passed in its place."""

from __future__ import annotations

import re
from pathlib import Path

from onnxkvrename.errors import ModelError
from onnxkvrename.files.read import read_status
from onnxkvrename.text import quote_path

_DATA_NAME = re.compile(r"(?P<stem>.+?)(?:\.onnx)?[._]data(?:[._-]?[0-9]+)?", re.IGNORECASE)
"""The name of external data: ``model.onnx_data``, ``model.onnx.data``, ``model.data``."""
_NAMES = {
    "programqpc.bin": "a compile for Cloud AI 100",
    ".bin": "a file of weights or a compile",
    ".tflite": "a TensorFlow Lite model",
}
"""What files are, by their names or suffixes, in lower case."""


def describe_other_file(path: Path) -> tuple[str, str] | None:
    """Return what a file is that cannot be read as a model, and which model to pass.

    ``None`` if its name does not say.
    """
    data = _DATA_NAME.fullmatch(path.name)
    name, suffix = path.name.lower(), path.suffix.lower()
    kind = "the external data of a model" if data else _NAMES.get(name) or _NAMES.get(suffix)
    if kind is None:
        return None
    model = path.with_name(f"{data['stem'] if data else path.stem}.onnx")
    if model != path and _is_there(model):
        return kind, f"pass {quote_path(str(model))}"
    return kind, "pass the .onnx file that it belongs to"


def _is_there(path: Path) -> bool:
    """Return whether there is something at a path, as far as the system says."""
    try:
        return read_status(path) is not None
    except ModelError:
        return False
