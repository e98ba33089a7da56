"""A model without a KV cache is told from one whose cache no rule matches (KV001)."""

from __future__ import annotations

from pathlib import Path

import models
import pytest
from exporter_models import build_decoder
from models import saved
from onnx import TensorProto, helper

from onnxkvrename.rules.load import load_rules
from onnxkvrename.rules.no_buffers import build_no_buffers_finding


def build_encoder(output: str = "vision_embeds"):
    """A vision encoder: it turns pixels into embeddings and has no cache."""
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Neg", ["pixel_values"], [output])],
        "encoder",
        [info("pixel_values", TensorProto.FLOAT, [1, 4])],
        [info(output, TensorProto.FLOAT, [1, 4])],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


@pytest.mark.parametrize("command", [["--prefix", "VLLM"], ["verify"], ["check-consumer"]])
def test_an_encoder_has_no_cache_and_the_finding_names_the_decoder_beside_it(
    command: list[str], tmp_path: Path, run
) -> None:
    encoder = saved(build_encoder(), tmp_path / "encoder.onnx")
    saved(models.decoder(), tmp_path / "decoder.onnx")
    saved(build_encoder("image_features"), tmp_path / "other_encoder.onnx")
    verb = command[:1] if command[0] != "--prefix" else []
    outcome = run(*verb, encoder, *command[len(verb) :])
    assert outcome.code == 1
    text = outcome.err + outcome.out
    assert "KV001:" in text
    assert "decoder.onnx beside it" in text


def test_the_decoder_may_be_in_a_directory_beside_that_of_the_encoder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("Encoder-1", "Decoder-2", "Empty-3"):
        (tmp_path / name).mkdir()
    encoder = saved(build_encoder("last_hidden_state"), tmp_path / "Encoder-1" / "model.onnx")
    decoder = saved(build_decoder(), tmp_path / "Decoder-2" / "model.onnx")
    outputs, rules = ["last_hidden_state"], load_rules()
    finding = build_no_buffers_finding(outputs, rules, encoder)
    assert finding.hint == f"pass {decoder}"
    assert "Decoder-2/model.onnx" in finding.message
    monkeypatch.chdir(encoder.parent)
    nearby = Path("..", "Decoder-2", "model.onnx")
    assert build_no_buffers_finding(outputs, rules, Path("model.onnx")).hint == f"pass {nearby}"
    saved(build_decoder(), encoder.parent / "a.onnx")
    saved(build_decoder(), encoder.parent / "b.onnx")
    nearer = build_no_buffers_finding(outputs, rules, encoder)
    assert f"{encoder.parent / 'a.onnx'}" in nearer.hint
    assert "a.onnx, b.onnx" in nearer.message
    for name in ("a.onnx", "b.onnx"):
        (encoder.parent / name).unlink()
    for number in range(20):  # a directory full of exports is not one export
        (tmp_path / f"folder{number}").mkdir()
    assert "decoder's file" in build_no_buffers_finding(outputs, rules, encoder).hint


def test_without_a_decoder_nearby_the_user_is_asked_for_it(tmp_path: Path) -> None:
    (tmp_path / "lone").mkdir()
    encoder = saved(build_encoder(), tmp_path / "lone" / "encoder.onnx")
    (tmp_path / "lone" / "broken.onnx").write_bytes(b"\xff")
    finding = build_no_buffers_finding(["vision_embeds", "deepstack"], load_rules(), encoder)
    assert "vision_embeds, deepstack" in finding.message
    assert "decoder's file" in finding.hint


def test_a_decoder_without_a_cache_is_not_called_an_encoder() -> None:
    finding = build_no_buffers_finding(["logits", "hidden_states"], load_rules())
    assert "no KV buffer here" in finding.message
    assert "logits, hidden_states" in finding.message
    assert "export the model" in finding.hint


def test_a_profile_that_matches_is_named() -> None:
    finding = build_no_buffers_finding(["logits", "present.0.key"], load_rules())
    assert "matches these rules" in finding.message
    assert "logits, present.0.key" in finding.message
    assert "--profile huggingface" in finding.hint
