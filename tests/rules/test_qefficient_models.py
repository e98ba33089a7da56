"""Names of models that QEfficient exports, after its source: what is KV, and what stays.

No export of these models is at hand. Names and symbols are those of QEfficient's modeling files.
"""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import onnx.helper
import pytest
from models import info, node, saved
from onnx import ModelProto

Shape = tuple[str | int, ...]
CONTEXT: Shape = ("batch_size", 2, "ctx_len", 16)
MLA: dict[str, Shape] = {
    "compressed_kv": ("batch_size", 1, "ctx_len", 16),
    "k_pe": ("batch_size", 1, "ctx_len", 8),
}
SLIDING: dict[str, Shape] = {"past_sliding_window_kv": ("batch_size", 1, "ctx_len", 16)}
BUFFER: Shape = ("batch_size", 1, 8, 32)


def compressed(layer: int, *names: str) -> dict[str, Shape]:
    """The buffers of one compressor of DeepSeek-V4."""
    shapes: dict[str, Shape] = dict.fromkeys(names, BUFFER)
    return shapes | {names[-1]: ("batch_size", 1, f"compressed_ctx_len_{layer}", 16)}


HEAVY = (
    "past_compressor_kv_buffer",
    "past_compressor_gate_buffer",
    "past_actual_compressed_kv",
)
INDEXER = (
    "past_indexer_kv_buffer",
    "past_indexer_gate_buffer",
    "past_actual_indexer_compressed_kv",
)
OVERLAP = dict.fromkeys(
    (
        "past_compressor_overlap_kv",
        "past_compressor_overlap_gate",
        "past_indexer_overlap_kv",
        "past_indexer_overlap_gate",
    ),
    BUFFER,
)
DEEPSEEK_V4 = [
    SLIDING,
    SLIDING | compressed(1, *HEAVY),
    SLIDING | compressed(2, *HEAVY) | compressed(2, *INDEXER),
    SLIDING | compressed(3, *HEAVY) | compressed(3, *INDEXER) | OVERLAP,
]
ATTENTION = [{"past_key": CONTEXT, "past_value": CONTEXT}] * 2
DUAL: dict[str, Shape] = {"vision_embeds": (1, "vision_size", 32)}
SINGLE: dict[str, Shape] = {"pixel_values": ("batched_num_patches", 3, "img_size", "img_size")}


def build(layers: list[dict[str, Shape]], vision: dict[str, Shape], token: str = "") -> ModelProto:
    """Build a model with these buffers by layer, and with these retained vision inputs."""
    nodes, inputs, outputs = [node("Neg", ["x"], ["logits"])], [info("x")], [info("logits")]
    if vision:
        nodes.append(node("Neg", ["image_idx"], ["image_idx_output"]))
        inputs.append(info("image_idx", 1, 1))
        outputs.append(info("image_idx_output", 1, 1))
    for name, shape in vision.items():
        nodes.append(node("Identity", [name], [f"{name}_RetainedState"]))
        inputs.append(info(name, *shape))
        outputs.append(info(f"{name}_RetainedState", *shape))
    for layer, buffers in enumerate(layers):
        for part, shape in buffers.items():
            name = f"{part}.{layer}{token}"
            nodes.append(node("Add", [name, "x"], [f"{name}_RetainedState"]))
            inputs.append(info(name, *shape))
            outputs.append(info(f"{name}_RetainedState", *shape))
    graph = onnx.helper.make_graph(nodes, "main_graph", inputs, outputs)
    opset = [onnx.helper.make_opsetid("", 17)]
    return onnx.helper.make_model(graph, opset_imports=opset, ir_version=8)


MODELS = {
    "deepseek_v4": (DEEPSEEK_V4, {}),
    "kimi_k25": (ATTENTION, {"vision_embeds": ("num_image_tokens", 32)}),
    "kimi_k25 compressed": ([MLA] * 2, {"vision_embeds": ("num_image_tokens", 32)}),
    "internvl dual": (ATTENTION, DUAL),
    "internvl single": (ATTENTION, SINGLE),
    "molmo dual": (ATTENTION, {"vision_embeds": ("vision_batch_size", "valid_size", 32)}),
    "molmo single": (ATTENTION, {"pixel_values": ("batch_size", "num_images", "img_tile", 8)}),
}


@pytest.mark.parametrize(("layers", "vision"), MODELS.values(), ids=MODELS)
def test_kv_gets_the_token_and_nothing_else_does(
    layers: list[dict[str, Shape]], vision: dict[str, Shape], tmp_path: Path, run
) -> None:
    path = saved(build(layers, vision), tmp_path / "model.onnx")
    before = path.read_bytes()
    outcome = run(path, "--prefix", "VLLM", "--strict", "--verify")
    assert (outcome.code, "KV1" in outcome.err) == (0, False)
    assert onnx.load(path) == build(layers, vision, "_VLLM")
    assert run(path, "--strip").code == 0
    assert path.read_bytes() == before


def test_a_compressor_that_lacks_a_part_is_named(tmp_path: Path, run) -> None:
    layers = [SLIDING | compressed(0, *HEAVY[:-1])]
    outcome = run(saved(build(layers, {}), tmp_path / "m.onnx"), "--prefix", "VLLM", "--check")
    assert "KV108" in outcome.err
    assert "has no past_actual_compressed_kv" in outcome.err


def test_what_only_a_shape_suggests_is_a_guess(tmp_path: Path, run) -> None:
    path = saved(build(DEEPSEEK_V4, {}), tmp_path / "model.onnx")
    buffers = json.loads(run("inspect", path, "--format", "json").out)["models"][0]["buffers"]
    assert {buffer["kind"] for buffer in buffers} == {"full_attention", "unknown"}
