"""One command seeds a cache with everything in it, once it leaves out what cannot be."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import onnx
import pytest
import qefficient_exports
from cache_models import build_whisper
from kill_commands import read_directory
from models import saved
from qefficient_exports import CAUSAL, DECODER, ENCODER, PARAMS, SPEECH

SEED = ("--prefix", "VLLM", "--seed-cache")
SINGLE = "_QEFFAutoModelForImageTextToTextSingleQPC"
EXPORTS = (
    ("external", CAUSAL),
    ("mla.onnx", CAUSAL),
    ("hybrid.onnx", CAUSAL),
    ("sampler.onnx", CAUSAL),
    ("vlm_single.onnx", SINGLE),
    ("vlm_dual/decoder.onnx", DECODER),
)
LORA = "QEffAutoLoraModelForCausalLM"


def write_whisper(cache: Path, *, subfunctions: bool = False) -> Path:
    """Write an export of Whisper; with subfunctions its retained outputs are bare numbers."""
    model = build_whisper(2)
    for number, output in enumerate(model.graph.output if subfunctions else (), 985):
        node = next(node for node in model.graph.node if node.output[0] == output.name)
        if output.name != "logits":
            node.output[0] = output.name = str(number)
    names = [value.name for value in model.graph.output]
    params = qefficient_exports.build_params(names, SPEECH, "")
    directory = cache / f"Whisper-{qefficient_exports.compute_params_hash(params)}"
    directory.mkdir(parents=True)
    (directory / PARAMS).write_text(qefficient_exports.format_params(params), "utf-8")
    saved(model, directory / "Whisper.onnx")
    return directory


def write_seedable(cache: Path, token: str = "") -> None:
    """Write one export of each kind that QEfficient makes with a token, too."""
    for source, owner in EXPORTS:
        qefficient_exports.write_export(cache, source, token, owner)
    qefficient_exports.write_layerwise_export(cache, token)


@pytest.fixture
def left_out(cache: Path) -> list[Path]:
    """Exports in the cache that QEfficient makes with no token."""
    return [
        write_whisper(cache),
        write_whisper(cache, subfunctions=True),
        qefficient_exports.write_export(cache, "decoder.onnx", owner=LORA),
    ]


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cache with an export of each kind, without a token."""
    write_seedable(tmp_path / "cache")
    qefficient_exports.write_export(tmp_path / "cache", "vlm_dual/encoder.onnx", owner=ENCODER)
    return tmp_path / "cache"


@pytest.mark.parametrize("with_twins", [False, True])
def test_the_hint_seeds_all_that_can_be_and_twice_is_once(
    with_twins: bool, cache: Path, left_out: list[Path], tmp_path: Path, snapshot, run
) -> None:
    plain = read_directory(cache)
    write_seedable(tmp_path / "twins", "VLLM")
    if with_twins:
        shutil.copytree(tmp_path / "twins", cache, dirs_exist_ok=True)
    before = snapshot(cache)
    outcome = run(cache, *SEED, "-v")
    assert (outcome.code, outcome.err.count("error KV407")) == (1, len(left_out))
    assert "KV407: cannot be seeded: QEfficient does not accept a token" in outcome.err
    assert snapshot(cache) == before
    (command,) = set(re.findall("`onnxkvrename (.*)` seeds the others", outcome.err))
    assert run(*shlex.split(command)).code == 0
    assert read_directory(cache) == {**plain, **read_directory(tmp_path / "twins")}
    before = snapshot(cache)
    assert run(*shlex.split(command)).code == 0
    assert snapshot(cache) == before


def test_each_hint_leads_on(left_out: list[Path], tmp_path: Path, run) -> None:
    """What is left out is renamed elsewhere by its own directory; a broken one says what to do."""
    whisper, broken, lora = left_out
    for directory in (whisper, lora):
        target = tmp_path / directory.name
        assert run(directory, "--prefix", "VLLM", "-d", target).code == 0
        assert any("_VLLM" in value.name for value in read_outputs(target))
    outcome = run(broken, "--prefix", "VLLM", "-d", tmp_path / "broken")
    assert (outcome.code, "export the model again without use_onnx_sub" in outcome.err) == (1, True)


def read_outputs(directory: Path) -> list[onnx.ValueInfoProto]:
    """Read the outputs of the only model in a directory."""
    (model,) = directory.glob("*.onnx")
    return list(onnx.load(model, load_external_data=False).graph.output)
