"""Build folders as onnxruntime-genai loads them: models, a configuration, a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from models import info, node, saved
from onnx import ModelProto, helper

RULES = """
retained = 'present.*'
input = 'past(?:_key_values)?[.]{layer}[.]{part}{token}'
output = 'present[.]{layer}[.]{part}{token}'
[[kv]]
kind = "attention"
[[kv]]
name = "conv"
parts = ["conv"]
[[kv]]
name = "state"
parts = ["conv_state"]
"""
"""Rules for onnxruntime-genai's names."""
DECODER = {
    "inputs": {
        "input_ids": "input_ids",
        "past_key_names": "past_key_values.%d.key",
        "past_value_names": "past_key_values.%d.value",
    },
    "outputs": {
        "logits": "logits",
        "present_key_names": "present.%d.key",
        "present_value_names": "present.%d.value",
    },
}


def build_decoder(
    layers: Iterable[int] = (0, 1), parts: Iterable[str] = ("key", "value"), stem: str = ""
) -> ModelProto:
    """A decoder with these layers, whose buffers pass through an addition.

    Args:
        layers: The numbers of its layers.
        parts: The parts of each layer.
        stem: What its inputs begin with; `past_key_values` by default.
    """
    stem = stem or "past_key_values"
    names = [f"{layer}.{part}" for layer in layers for part in parts]
    graph = helper.make_graph(
        [
            node("Neg", ["x"], ["logits"]),
            *(node("Add", [f"{stem}.{name}", "x"], [f"present.{name}"]) for name in names),
        ],
        "main",
        [info("x", 2), *(info(f"{stem}.{name}", 1, 1, 2) for name in names)],
        [info("logits", 2), *(info(f"present.{name}", 1, 1, 2) for name in names)],
    )
    opsets = [helper.make_opsetid("", 18)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def render_config(decoder: dict[str, Any] | None = None, **sections: Any) -> str:
    """The text of a configuration, written as onnxruntime-genai's builder does.

    Args:
        decoder: Members of the decoder, in addition to those of `DECODER`.
        sections: Further sections of the model.
    """
    own = {"filename": "model.onnx", **DECODER, **(decoder or {})}
    return json.dumps({"model": {"decoder": own, **sections}, "search": {}}, indent=4)


def build_folder(folder: Path, config: str | None = None, **models: ModelProto) -> Path:
    """Write a folder with `genai_config.json` and a tokenizer.

    Args:
        folder: The folder to make.
        config: The text of the configuration.
        models: The models, by file name without `.onnx`; a decoder as `model` by default.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, model in (models or {"model": build_decoder()}).items():
        saved(model, folder / f"{name}.onnx")
    (folder / "genai_config.json").write_text(render_config() if config is None else config)
    (folder / "tokenizer.json").write_text("{}")
    return folder
