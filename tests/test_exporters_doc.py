"""The examples of other exporters in docs/rules.md are what the commands print."""

from __future__ import annotations

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
    list_caches,
)
from models import saved
from onnx import ModelProto

PAGE = Path(__file__).resolve().parent.parent / "docs" / "rules.md"
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


MAKERS: dict[str, Callable[[Path], None]] = {"optimum": make_optimum}


def test_every_example_has_its_models() -> None:
    assert EXAMPLES.keys() == MAKERS.keys()


@pytest.mark.parametrize("name", MAKERS)
def test_an_example_prints_what_the_page_shows(
    name: str, run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("llama", "t5"):
        (tmp_path / folder).mkdir()
    MAKERS[name](tmp_path)
    monkeypatch.chdir(tmp_path)
    text = ""
    for command in re.findall(r"^\$ onnxkvrename (.*)$", EXAMPLES[name], re.MULTILINE):
        outcome = run(*shlex.split(command))
        text += f"$ onnxkvrename {command}\n{outcome.out}{outcome.err}"
    assert text == EXAMPLES[name]
