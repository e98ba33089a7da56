"""Folders of onnxruntime-genai, renamed: it loads them and gives the same tokens.

The wheel is the extra `genai`; without it, or without the real exports, the tests say so and skip.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
from genai_folders import DECODER, build_folder
from kill_commands import read_directory
from models import node
from onnx import ModelProto, TensorProto, helper, numpy_helper
from tiers import thin

EXPORTS = Path(__file__).resolve().parents[2] / "shared" / "exports-other"
FOLDERS = sorted(
    path.parent.relative_to(EXPORTS).as_posix() for path in EXPORTS.glob("*/*/genai_config.json")
)
GENERATE = """
import json, sys
import numpy, onnxruntime_genai as genai

model = genai.Model(sys.argv[1])
config = json.load(open(sys.argv[1] + "/genai_config.json"))["model"]
params = genai.GeneratorParams(model)
params.set_search_options(max_length=24, do_sample=False)
generator = genai.Generator(model, params)
if "encoder" in config:
    inputs = genai.NamedTensors()
    random = numpy.random.default_rng(0)
    inputs["audio_features"] = random.random((1, 80, 3000), numpy.float32)
    generator.set_inputs(inputs)
generator.append_tokens([1, 3, 5, 6])
while not generator.is_done():
    generator.generate_next_token()
print(json.dumps([int(token) for token in generator.get_sequence(0)]))
"""


def generate(folder: Path) -> list[int] | str:
    """The tokens that onnxruntime-genai gives, or what went wrong."""
    done = subprocess.run(
        [sys.executable, "-c", GENERATE, str(folder)], capture_output=True, text=True
    )
    if done.returncode == 0:
        tokens: list[int] = json.loads(done.stdout)
        return tokens
    return f"exit code {done.returncode}: {done.stderr.strip()}"


needs_genai = pytest.mark.skipif(
    importlib.util.find_spec("onnxruntime_genai") is None,
    reason="needs onnxruntime-genai: pip install 'onnxkvrename[genai]'",
)


def build_counting_decoder() -> ModelProto:
    """A decoder whose next token depends on all tokens in its cache, of one layer."""
    table = numpy.random.default_rng(7).random((8, 4), numpy.float32)
    weights = [
        numpy_helper.from_array(table, "table"),
        numpy_helper.from_array(numpy.random.default_rng(8).random((4, 8), numpy.float32), "head"),
        numpy_helper.from_array(numpy.array([1], numpy.int64), "one"),
    ]
    past, present = ("batch", 1, "past", 4), ("batch", 1, "total", 4)
    pairs = [(f"past_key_values.0.{part}", f"present.0.{part}") for part in ("key", "value")]
    nodes = [
        node("Gather", ["table", "input_ids"], ["rows"]),
        node("Unsqueeze", ["rows", "one"], ["news"]),
        *(node("Concat", [old, "news"], [new], axis=2) for old, new in pairs),
        node("ReduceSum", ["present.0.key"], ["sum"], keepdims=1),
        node("Squeeze", ["sum", "one"], ["flat"]),
        node("Sin", ["flat"], ["turned"]),
        node("Add", ["rows", "turned"], ["mixed"]),
        node("MatMul", ["mixed", "head"], ["logits"]),
    ]
    graph = helper.make_graph(
        nodes,
        "main",
        [
            helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "length"]),
            *(helper.make_tensor_value_info(old, TensorProto.FLOAT, past) for old, _ in pairs),
        ],
        [
            helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "length", 8]),
            *(helper.make_tensor_value_info(new, TensorProto.FLOAT, present) for _, new in pairs),
        ],
        initializer=weights,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


CONFIG = {
    "model": {
        "type": "llama",
        "vocab_size": 8,
        "context_length": 64,
        "bos_token_id": 1,
        "eos_token_id": 0,
        "pad_token_id": 0,
        "decoder": {
            "session_options": {"log_id": "onnxruntime-genai", "provider_options": []},
            "filename": "model.onnx",
            "head_size": 4,
            "hidden_size": 4,
            "num_attention_heads": 1,
            "num_hidden_layers": 1,
            "num_key_value_heads": 1,
            **DECODER,
        },
    },
    "search": {"max_length": 24, "past_present_share_buffer": False},
}


@needs_genai
def test_a_folder_of_ours_gives_the_same_tokens(tmp_path: Path, run) -> None:
    folder = build_folder(tmp_path / "folder", json.dumps(CONFIG), model=build_counting_decoder())
    before = generate(folder)
    assert isinstance(before, list), before
    out = tmp_path / "out"
    shutil.copytree(folder, out)
    assert run(out, "--prefix", "VLLM").code == 0
    assert generate(out) == before
    assert run(folder, "--prefix", "VLLM", "--sidecars", "off").code == 0
    assert "past_key_values.0.key" in str(generate(folder))  # what a stale configuration does


@needs_genai
@pytest.mark.skipif(not FOLDERS, reason=f"there are no real exports in {EXPORTS}")
@pytest.mark.parametrize("name", thin(FOLDERS, 1))
def test_a_real_export_gives_the_same_tokens(name: str, tmp_path: Path, run) -> None:
    before = generate(EXPORTS / name)
    if not isinstance(before, list):
        pytest.skip(f"onnxruntime-genai does not run the export itself: {before[-200:]}")
    out = tmp_path / "out"
    shutil.copytree(EXPORTS / name, out, copy_function=shutil.copyfile)
    assert run(out, "--prefix", "VLLM").code == 0
    assert generate(out) == before
    assert run(out, "--strip").code == 0
    assert read_directory(out) == read_directory(EXPORTS / name)
