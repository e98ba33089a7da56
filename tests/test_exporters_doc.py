"""The examples in docs/exporters.md are what the commands print."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from exporter_models import (
    HEAD,
    HEADS,
    HUGGING_FACE,
    build_merged_decoder,
    build_model,
    build_qnn_decoder,
    list_caches,
)
from exporters_table import PAGE
from models import saved
from onnx import ModelProto

EXAMPLES = dict(
    re.findall(r"<!-- exporter (\w+) -->\n```console\n(.*?)```", PAGE.read_text("utf-8"), re.S)
)
OWN = ("past_key_values.{layer}.decoder.{part}", "present.{layer}.decoder.{part}")
CROSS = ("past_key_values.{layer}.encoder.{part}", "present.{layer}.encoder.{part}")
ENCODED = ("batch_size", HEADS, "encoder_sequence_length", HEAD)


def build_later_steps(own: tuple[str, str], cross: tuple[str, str]) -> ModelProto:
    """A decoder that reads the encoder's keys and values, and has no output for them."""
    read = list_caches(cross, [0], shape=ENCODED, update="once")
    return build_model([*list_caches(own, [0]), *(each._replace(output=None) for each in read)])


def make_optimum(root: Path) -> None:
    saved(build_model(list_caches(HUGGING_FACE, [0])), root / "llama" / "model.onnx")


def make_t5(root: Path) -> None:
    first = [*list_caches(OWN, [0]), *list_caches(CROSS, [0], shape=ENCODED, update="once")]
    outputs = [each._replace(input=None) for each in first]
    saved(build_model(outputs), root / "t5" / "decoder_model.onnx")
    saved(build_later_steps(OWN, CROSS), root / "t5" / "decoder_with_past_model.onnx")
    saved(build_merged_decoder(), root / "t5" / "decoder_model_merged.onnx")


def make_genai(root: Path) -> None:
    state = {"shape": ("batch_size", 8, 2), "update": "inplace"}
    states = list_caches(("past.{layer}.{part}", "present.{layer}.{part}"), [0], ["conv"], **state)
    saved(build_model([*states, *list_caches(HUGGING_FACE, [1])]), root / "model" / "model.onnx")
    templates = {"key": "past_key_values.%d.key", "value": "past_key_values.%d.value"}
    inputs = {f"past_{part}_names": text for part, text in templates.items()}
    outputs = {f"present_{part}_names": f"present.%d.{part}" for part in templates}
    config = {
        "filename": "model.onnx",
        "num_hidden_layers": 2,
        "layer_types": ["conv", "full_attention"],
        "inputs": {**inputs, "past_conv_names": "past.%d.conv"},
        "outputs": {**outputs, "present_conv_names": "present.%d.conv"},
    }
    text = json.dumps({"model": {"type": "lfm2", "decoder": config}}, indent=4)
    (root / "model" / "genai_config.json").write_text(text)


def make_whisper(root: Path) -> None:
    own = ("past_{part}_self_{layer}", "present_{part}_self_{layer}")
    cross = ("past_{part}_cross_{layer}", "present_{part}_cross_{layer}")
    written = list_caches(cross, [0], shape=ENCODED, update="once")
    encoder = build_model([each._replace(input=None) for each in written])
    saved(encoder, root / "whisper" / "encoder.onnx")
    saved(build_later_steps(own, cross), root / "whisper" / "decoder.onnx")


def make_qnn(root: Path) -> None:
    model = build_qnn_decoder()
    for values in (model.graph.input, model.graph.output):
        kept = [value for value in values if "_1_" not in value.name]
        del values[:]
        values.extend(kept)
    removed = {"read_2", "read_3", "past_key_1_in", "past_value_1_in"}
    for each in list(model.graph.node):
        if removed & {*each.input} and each.op_type != "Sum":
            model.graph.node.remove(each)
    total = next(each for each in model.graph.node if each.op_type == "Sum")
    total.input[:] = [name for name in total.input if name not in removed]
    saved(model, root / "qnn" / "model.onnx")


def make_both(root: Path) -> None:
    make_t5(root)
    make_optimum(root)


MAKERS: dict[str, Callable[[Path], None]] = {
    "optimum": make_optimum,
    "t5": make_t5,
    "genai": make_genai,
    "whisper": make_whisper,
    "qnn": make_qnn,
    "convert": make_both,
}


def test_every_example_has_its_models() -> None:
    assert EXAMPLES.keys() == MAKERS.keys()


@pytest.mark.parametrize("name", MAKERS)
def test_an_example_prints_what_the_page_shows(
    name: str, run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("llama", "t5", "model", "whisper", "qnn"):
        (tmp_path / folder).mkdir()
    MAKERS[name](tmp_path)
    monkeypatch.chdir(tmp_path)
    text = ""
    for command in re.findall(r"^\$ onnxkvrename (.*)$", EXAMPLES[name], re.MULTILINE):
        outcome = run(*shlex.split(command))
        text += f"$ onnxkvrename {command}\n{outcome.out}{outcome.err}"
    assert text == EXAMPLES[name]
