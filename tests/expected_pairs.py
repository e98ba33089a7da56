"""The buffers of real exports, by what lies beside each model, or by its exporter's names.

The tracer is judged by these, so nothing of it is used here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import onnx

SHARED = Path(__file__).resolve().parents[2] / "shared"
OTHER_EXPORTS = SHARED / "exports-other"
EXPORTERS = ("by-hand", "dynamo", "genai", "mobius", "optimum", "qnn")
FLOATS = {"FLOAT", "FLOAT16", "BFLOAT16", "DOUBLE", "UINT8", "INT8"}
DYNAMO = {  # in the order of the arguments and results that torch.onnx.export was called with
    "d_tuple": {
        "past_0_0": "cat_7",
        "past_0_1": "cat_8",
        "past_1_0": "cat_11",
        "past_1_1": "cat_12",
    },
    "e_static_lists": {
        "k_cache_0": "index_put",
        "k_cache_1": "index_put_2",
        "v_cache_0": "index_put_1",
        "v_cache_1": "index_put_3",
    },
}


def list_exports() -> list[Path]:
    """All models of the exporters that are known here; none where they are not there."""
    folders = (SHARED / "exports", *(OTHER_EXPORTS / name for name in EXPORTERS))
    return [path for folder in folders for path in sorted(folder.rglob("*.onnx"))]


def find_expected_pairs(path: Path) -> dict[str, str]:
    """Return the inputs of a model that are buffers, each with its output."""
    graph = onnx.load(path, load_external_data=False).graph
    inputs = [
        value.name
        for value in graph.input
        if onnx.TensorProto.DataType.Name(value.type.tensor_type.elem_type) in FLOATS
    ]
    outputs = [value.name for value in graph.output]
    pairs = dict(_find_by_names(path, inputs)) | dict(_find_by_config(path))
    return {name: out for name, out in pairs.items() if name in inputs and out in outputs}


def _find_by_config(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the names that onnxruntime-genai or onnx-genai read from the file beside a model."""
    for folder in (path.parent, path.parent.parent):
        config = folder / "genai_config.json"
        if config.exists():
            decoder: dict[str, Any] = json.loads(config.read_text("utf-8"))["model"]["decoder"]
            if folder / decoder["filename"] != path:
                continue
            for key, template in decoder["inputs"].items():
                made = decoder["outputs"].get(key.replace("past_", "present_"))
                if key.startswith("past_") and made:
                    for layer in range(decoder["num_hidden_layers"]):
                        yield template % layer, made % layer
    metadata = path.parent / "inference_metadata.yaml"
    if metadata.exists():
        text = metadata.read_text("utf-8")
        for part in ("key", "value"):
            lists = [
                re.search(rf"{part}_cache_{side}:\n((?: +- .*\n)+)", text)
                for side in ("inputs", "outputs")
            ]
            names = [re.findall("- (.*)", match[1]) for match in lists if match]
            yield from zip(*names, strict=True)


def _find_by_names(path: Path, inputs: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the pairs by the names that an exporter always makes."""
    parts = path.relative_to(SHARED).parts
    if parts[1] == "dynamo":
        yield from DYNAMO[path.stem].items()
    for name in inputs:
        if parts[1] in ("optimum", "mobius"):
            yield name, name.replace("past_key_values.", "present.")
        elif parts[1] == "qnn":
            yield name, name.replace("_in", "_out")
        elif parts[0] == "exports" or parts[1] == "by-hand":
            yield name, f"{name}_RetainedState"
