"""Write exports in the form of QEfficient's cache.

An export with the token is not renamed from one without: its models and its parameters
are built with the token, so that a renamed export can be compared with it.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures"
PARAMS = "hashed_export_params.json"
CAUSAL = "QEFFAutoModelForCausalLM"
DECODER = "QEffCausalLMForTextImageToTextModel"
ENCODER = "QEffVisionEncoderForTextImageToTextModel"
SPEECH = "QEFFAutoModelForSpeechSeq2Seq"


def build_params(outputs: list[str], owner: str | None, token: str) -> dict[str, Any]:
    """Build the parameters that QEfficient hashes for an export with these outputs."""
    axes = {"input_ids": {"0": "batch_size"}, "past_key.0": {"0": "batch_size", "2": "ctx_len"}}
    params: dict[str, Any] = {
        "config": {"model_type": "tiny", "rms_norm_eps": 1e-06},
        "export_params": {"dynamic_axes": axes, "output_names": outputs},
        "peft_config": None,
    }
    if owner is not None:
        params["qeff_auto_class"] = owner
    if token and owner == CAUSAL:
        params["kv_cache_prefix"] = token
    return params


def compute_params_hash(params: Mapping[str, Any]) -> str:
    """Compute the hash in the name of an export's directory."""
    text = json.dumps(params, separators=(",", ":"), sort_keys=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()[:16]


def format_params(params: Mapping[str, Any]) -> str:
    """Format the parameters as QEfficient saves them."""
    return json.dumps(params, indent=4, separators=(",", ":"), sort_keys=True)


def read_output_names(model: Path) -> list[str]:
    """Read the names of a model's outputs."""
    graph = onnx.load(model, load_external_data=False).graph
    return [value.name for value in graph.output]


def write_export(
    cache: Path, source: str = "external", token: str = "", owner: str | None = CAUSAL
) -> Path:
    """Write an export of a fixture, one file or a directory, and return its directory."""
    source_path = FIXTURES / (token or "plain") / source
    models = [source_path] if source_path.is_file() else sorted(source_path.glob("*.onnx"))
    params = build_params(read_output_names(models[0]), owner, token)
    directory = cache / f"Tiny-{compute_params_hash(params)}"
    directory.mkdir(parents=True)
    for path in [source_path] if source_path.is_file() else sorted(source_path.iterdir()):
        shutil.copyfile(path, directory / path.name)
    (directory / PARAMS).write_text(format_params(params), "utf-8")
    return directory


def write_dual_export(cache: Path, token: str = "") -> tuple[Path, Path]:
    """Write the vision encoder and the decoder of one model as two exports."""
    encoder = write_export(cache, "vlm_dual/encoder.onnx", token, ENCODER)
    return encoder, write_export(cache, "vlm_dual/decoder.onnx", token, DECODER)


def build_merged(windows: list[Path]) -> bytes:
    """Build a model with the buffers of all windows."""
    merged = onnx.load(windows[0], load_external_data=False)
    graph = merged.graph
    for path in windows[1:]:
        other = onnx.load(path, load_external_data=False).graph
        graph.input.extend(v for v in other.input if "." in v.name)
        graph.output.extend(v for v in other.output if "." in v.name)
    del graph.node[:], graph.initializer[:]
    for value in graph.output:
        name = value.name.removesuffix("_RetainedState")
        source = graph.input[0].name if name == value.name else name
        graph.node.add(op_type="Neg", input=[source], output=[value.name])
    return merged.SerializeToString()


def write_layerwise_export(cache: Path, token: str = "", *, merged: bool = True) -> Path:
    """Write an export of three windows, whose parameters changed between hashing and saving.

    Args:
        cache: The cache.
        token: The token in all names.
        merged: Write the merged file as well, for which QEfficient looks.
    """
    source_path = FIXTURES / (token or "plain") / "windows"
    names = ["logits"]
    for model in sorted(source_path.glob("*/*.onnx")):
        names += [name for name in read_output_names(model) if name != "logits"]
    params = build_params(names, CAUSAL, token)
    directory = cache / f"Tiny-{compute_params_hash(params)}"
    shutil.copytree(source_path, directory / "onnx_layerwise_tmp", copy_function=shutil.copyfile)
    if merged:
        windows = sorted(source_path.glob("*/*.onnx"))
        (directory / f"merged_0-{len(windows)}.onnx").write_bytes(build_merged(windows))
    axes = params["export_params"]["dynamic_axes"]
    axes["inputs_embeds"] = axes.pop("input_ids")
    (directory / PARAMS).write_text(format_params(params), "utf-8")
    return directory
