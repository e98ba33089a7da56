"""Exports that QEfficient would not look for stop a seeding, and are named."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from pathlib import Path

import onnx.helper
import pytest
import qefficient_exports
from hints import find_commands, split_words
from kill_commands import read_directory
from models import info, node, saved
from qefficient_exports import CAUSAL, DECODER, ENCODER, PARAMS

SEED = ("--prefix", "VLLM", "--seed-cache")
LORA = "QEffAutoLoraModelForCausalLM"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cache to put exports into."""
    return tmp_path / "cache"


def find_command(text: str) -> list[str]:
    """Return the words of the command that seeds the others."""
    (command,) = re.findall("  -> `onnxkvrename (.*)` seeds the others\n", text)
    return shlex.split(command)


def test_one_that_takes_no_token_stops_all_and_the_hint_seeds_the_others(
    cache: Path, tmp_path: Path, snapshot, run
) -> None:
    lora = qefficient_exports.write_export(cache, "decoder.onnx", owner=LORA)
    plain = qefficient_exports.write_export(cache)
    twin = qefficient_exports.write_export(tmp_path / "twins", token="VLLM")
    before = snapshot(cache)
    outcome = run(cache, *SEED)
    assert outcome.code == 1
    assert f"{lora / 'decoder.onnx'}: error KV407: cannot be seeded: " in outcome.err
    assert f"token for {LORA}" in outcome.err
    assert outcome.err.endswith("nothing was written\n")
    assert snapshot(cache) == before
    command = find_command(outcome.err)
    assert command == [str(plain), *SEED]
    assert run(*command).code == 0
    assert read_directory(cache / twin.name) == read_directory(twin)


@pytest.mark.parametrize(
    ("fault", "code", "said"),
    [
        ("renamed", 1, "error KV401: "),
        ("parameters", 2, "is not JSON"),
        ("outside", 2, "is not part of a QEfficient export"),
    ],
)
def test_an_export_that_is_not_recognized_stops_all_and_the_hint_seeds_the_others(
    fault: str, code: int, said: str, cache: Path, snapshot, run
) -> None:
    bad = qefficient_exports.write_export(cache, "mla.onnx")
    plain = qefficient_exports.write_export(cache)
    if fault == "renamed":
        bad.rename(bad.with_name("Tiny-0123456789abcdef"))
    elif fault == "parameters":
        (bad / qefficient_exports.PARAMS).write_text("{")
    else:
        (bad / qefficient_exports.PARAMS).unlink()
    before = snapshot(cache)
    outcome = run(cache, *SEED)
    assert (outcome.code, said in outcome.err, "KV402" in outcome.err) == (code, True, False)
    assert snapshot(cache) == before
    (command,) = find_commands(outcome.err)
    assert command == f"onnxkvrename {plain} {' '.join(SEED)}"
    assert f"`{command}` seeds the others" in outcome.err
    assert run(*split_words(command)[1:]).code == 0


def test_the_command_for_the_others_has_the_options_of_the_run(cache: Path, run) -> None:
    qefficient_exports.write_export(cache, "decoder.onnx", owner=LORA)
    plain = qefficient_exports.write_export(cache)
    options = ("--target", "vllm-qaic", "--seed-cache", "--profile", "qeff")
    command = find_command(run(cache, *options).err)
    assert command == [str(plain), *options]
    assert run(*command).code == 0


def test_the_document_names_what_cannot_be_seeded(cache: Path, run) -> None:
    lora = qefficient_exports.write_export(cache, "decoder.onnx", owner=LORA)
    qefficient_exports.write_export(cache)
    outcome = run(cache, *SEED, "--format", "json")
    models = json.loads(outcome.out)["models"]
    assert [model["status"] for model in models] == ["would-rename", "failed"]
    assert models[1]["path"] == str(lora / "decoder.onnx")
    assert [finding["code"] for finding in models[1]["findings"]] == ["KV407"]


@pytest.mark.parametrize("more", [(), ("--replace",)])
def test_two_tokens_are_seeded_one_after_the_other(
    more: tuple[str, ...], cache: Path, tmp_path: Path, run
) -> None:
    """What the first run has made stays for those who use its token."""
    plain = qefficient_exports.write_export(cache)
    first = qefficient_exports.write_export(tmp_path / "twins", token="VLLM")
    assert run(cache, *SEED).code == 0
    before = read_directory(cache)
    second = run(cache, "--target", "vllm-qaic", "--seed-cache", *more)
    assert second.code == 0
    assert f"{cache / first.name / 'decoder.onnx'}: unchanged: every buffer carries VLLM" in (
        second.err
    )
    (new,) = {path.name for path in cache.iterdir()} - {plain.name, first.name}
    assert b"past_key.0_vllmKvCache" in (cache / new / "decoder.onnx").read_bytes()
    kept = {path: data for path, data in read_directory(cache).items() if new not in str(path)}
    assert kept == before
    again = read_directory(cache)
    assert run(cache, *SEED).code == run(cache, "--target", "vllm-qaic", "--seed-cache").code == 0
    assert read_directory(cache) == again


def test_layerwise_without_the_merged_file_would_not_be_found(cache: Path, snapshot, run) -> None:
    export = qefficient_exports.write_layerwise_export(cache, merged=False)
    before = snapshot(cache)
    outcome = run(cache, *SEED)
    assert (outcome.code, "reads only merged_0-N.onnx" in outcome.err) == (2, True)
    assert snapshot(cache) == before
    qefficient_exports.write_export(cache, owner=CAUSAL)
    outcome = run(cache, *SEED)
    assert (outcome.code, outcome.err.count("error KV407")) == (1, 1)
    assert outcome.err.startswith("3 files in ")
    assert len(os.listdir(cache)) == 2
    assert run(*find_command(outcome.err)).code == 0
    assert len(os.listdir(cache)) == 3
    assert run(export, "--prefix", "VLLM", "-d", cache.parent / "elsewhere").code == 0


def test_an_export_of_a_single_window_would_not_be_found(cache: Path, run) -> None:
    export = qefficient_exports.write_layerwise_export(cache, merged=False)
    (window,) = export.glob("*/layer_0_1/*.onnx")
    shutil.move(window, export / "pref_0.onnx")
    shutil.rmtree(export / "onnx_layerwise_tmp")
    outcome = run(cache, *SEED)
    assert (outcome.code, "pref_0.onnx" in outcome.err) == (2, True)


def write_model(cache: Path, owner: str, nodes, inputs, outputs) -> Path:
    """Write an export of a model with these nodes."""
    graph = onnx.helper.make_graph(nodes, "main_graph", inputs, outputs)
    opset = [onnx.helper.make_opsetid("", 17)]
    model = onnx.helper.make_model(graph, opset_imports=opset, ir_version=8)
    names = [value.name for value in outputs]
    params = qefficient_exports.build_params(names, owner, "")
    directory = cache / f"Tiny-{qefficient_exports.compute_params_hash(params)}"
    directory.mkdir(parents=True)
    (directory / PARAMS).write_text(qefficient_exports.format_params(params), "utf-8")
    return saved(model, directory / "model.onnx")


def test_an_encoder_that_fills_buffers_and_its_decoder_stay_as_they_are(
    cache: Path, snapshot, run
) -> None:
    """QEfficient would take the plain encoder for the decoder with the token."""
    image, text = ("batch_size", 2, 6404, 16), ("batch_size", 2, "ctx_len", 16)
    parts = ("key", "value")
    filled = [f"past_{part}.1" for part in parts]
    nodes = [node("Neg", ["x"], [name]) for name in filled]
    encoder = write_model(cache, ENCODER, nodes, [info("x")], [info(n, *image) for n in filled])
    names = [f"past_{part}.{layer}" for layer in (0, 1) for part in parts]
    states = [f"{name}_RetainedState" for name in names]
    nodes = [node("Add", [names[i], "x"], [states[i]]) for i in (0, 1)]
    nodes += [node("Identity", [names[i]], [states[i]]) for i in (2, 3)]
    shapes = (text, text, image, image)
    inputs = [info("x"), *(info(n, *shape) for n, shape in zip(names, shapes, strict=True))]
    outputs = [info(n, *shape) for n, shape in zip(states, shapes, strict=True)]
    decoder = write_model(cache, DECODER, nodes, inputs, outputs)
    before = snapshot(cache)
    outcome = run(cache, *SEED)
    assert (outcome.code, "cannot be seeded: " in outcome.err) == (2, True)
    assert snapshot(cache) == before
    qefficient_exports.write_export(cache)
    before = snapshot(encoder.parent), snapshot(decoder.parent)
    outcome = run(cache, *SEED)
    assert (outcome.code, outcome.err.count("error KV407")) == (1, 2)
    assert "QEfficient's vision encoder fills past_key.1" in outcome.err
    (command,) = set(re.findall("`onnxkvrename (.*)` seeds the others", outcome.err))
    assert run(*shlex.split(command)).code == 0
    assert (snapshot(encoder.parent), snapshot(decoder.parent)) == before
    assert len(os.listdir(cache)) == 4
