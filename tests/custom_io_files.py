"""custom_io.yaml as QEfficient writes it beside a compile."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from onnxkvrename.rules.kv_model import read_kv_model
from onnxkvrename.rules.load import load_rules


def format_custom_io(pairs: Iterable[tuple[str, str]], precision: str) -> str:
    """Return the text with a precision for the input and the output of each buffer."""
    names = (name for pair in pairs for name in pair)
    return "".join(f" - IOName: {name}\n   Precision: {precision}\n\n" for name in names)


def write_custom_io(path: Path, model: Path, precision: str) -> Path:
    """Write a file with a precision for each KV buffer of a model, and return its path."""
    pairs = read_kv_model(model, load_rules(), check_data=False).pairs
    names = [(pair.sides[0].old_name, pair.sides[-1].old_name) for pair in pairs]
    path.write_text(format_custom_io(names, precision), "utf-8")
    return path
