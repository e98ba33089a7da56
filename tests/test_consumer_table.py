"""Each consumer over real exports of both folders: how much it selects, and why it cannot take it.

A cell says how many inputs and outputs are selected, and the codes of errors, if there are any.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from real_exports import EXPORTS
from tiers import thin

from onnxkvrename.handoff.consumer_checks import check_consumer
from onnxkvrename.handoff.find_consumers import load_consumer
from onnxkvrename.handoff.selection import select_values
from onnxkvrename.layout.load import load_layout
from onnxkvrename.rules.pick import pick_rules
from onnxkvrename.verification import trace_buffer_updates

OTHER_EXPORTS = EXPORTS.parent / "exports-other"
CONSUMERS = ("vllm-qaic", "vllm-qaic-legacy", "qefficient")
NONE = "0/0 KV601"
PREFIXES = (NONE, "4/4", "4/4")
GROWS = ("0/0 KV120", "4/0 KV120", "4/0 KV120")
QEFFICIENT = {
    "deepseekv3_mla": (NONE, NONE, "4/4"),
    "gemma3text": ("0/0 KV120", "4/4 KV120", "4/4 KV120"),
    "gemma3vlm_dual/*/Gemma3DecoderWrapper.onnx": PREFIXES,
    "llama12l": (NONE, "24/24", "24/24"),
    "llama2l": PREFIXES,
    "llama2l_cb": PREFIXES,
    "llama2l_dynamo": PREFIXES,
    "llama2l_sampler": ("0/0 KV601 KV604", "4/4 KV604", "6/6 KV610"),
    "llama2l_subfn": PREFIXES,
    "lw_qwen3moe/*/merged_0-2.onnx": PREFIXES,
}
"""QEfficient's exports, with a token and without; the file is the only one where none is given."""
OTHERS = {
    "optimum/llama": GROWS,
    "optimum/gpt_bigcode": GROWS,
    "genai/llama-int4": GROWS,
    "genai/gemma2-fp32": GROWS,
    "genai/lfm2-fp32-t5": GROWS,
    "genai/llama-cuda-paged-int8kv": ("0/0 KV610", "8/0 KV610", "9/0 KV608 KV610"),
    "genai/whisper-fp32-t5/decoder.onnx": ("0/0 KV120", "8/0 KV120 KV605", "8/0 KV120"),
    "optimum/t5/decoder_model_merged.onnx": ("0/0 KV120", "8/0 KV120 KV605", "8/0 KV120"),
    "optimum/t5/decoder_with_past_model.onnx": (
        "0/0 KV120",
        "8/0 KV120 KV605",
        "8/0 KV120",
    ),
    "mobius/llama-ort-genai": GROWS,
    "mobius/llama-static": ("0/0 KV610", "0/0 KV610", NONE),  # three axes
    "mobius/qwen3_5-ort-genai/decoder": ("0/0 KV120", "8/0 KV120 KV605", "8/0 KV120"),
}


def build_cells(model: Path) -> tuple[str, ...]:
    """Return what each consumer makes of a model."""
    rules = pick_rules([model], None, None)
    layout = load_layout([model], rules, trace=trace_buffer_updates).layout
    cells = []
    for name in CONSUMERS:
        consumer = load_consumer(name)
        selection = select_values(layout, consumer)
        findings = check_consumer(layout, consumer)
        errors = sorted({each.code for each in findings if each.severity == "error"})
        cells.append(" ".join((f"{len(selection.inputs)}/{len(selection.outputs)}", *errors)))
    return tuple(cells)


@pytest.mark.skipif(not EXPORTS.is_dir(), reason=f"no real exports: {EXPORTS} is not there")
@pytest.mark.parametrize("pattern", thin(QEFFICIENT, 2))
def test_exports_of_qefficient(pattern: str) -> None:
    models = sorted(EXPORTS.glob(pattern if "*" in pattern else f"{pattern}/*/*.onnx"))
    assert len(models) >= 2, "one with the token and one without"
    assert {build_cells(model) for model in models} == {QEFFICIENT[pattern]}


@pytest.mark.skipif(
    not OTHER_EXPORTS.is_dir(), reason=f"no real exports: {OTHER_EXPORTS} is not there"
)
@pytest.mark.parametrize("folder", thin(OTHERS, 2))
def test_exports_of_others(folder: str) -> None:
    path = OTHER_EXPORTS / folder
    assert build_cells(path if path.suffix else path / "model.onnx") == OTHERS[folder]
