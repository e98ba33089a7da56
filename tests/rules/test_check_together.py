"""A model without a KV cache is told from one whose cache no rule matches (KV001)."""

from __future__ import annotations

from pathlib import Path

import pytest
from models import saved
from onnx import TensorProto, helper

from onnxkvrename.rules.check_together import build_no_buffers_finding
from onnxkvrename.rules.load import load_rules


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


@pytest.mark.parametrize(
    "command", [["--prefix", "VLLM"], ["verify"], ["verify", "--target", "vllm-qaic"]]
)
def test_an_encoder_has_no_cache_and_the_hint_asks_for_its_decoder(
    command: list[str], tmp_path: Path, run
) -> None:
    encoder = saved(build_encoder("x"), tmp_path / "encoder.onnx")
    verb = command[:1] if command[0] != "--prefix" else []
    outcome = run(*verb, encoder, *command[len(verb) :])
    assert outcome.code == 1
    shown = outcome.err + outcome.out
    assert "KV001: no KV buffer here: the outputs are x" in shown
    assert "pass its decoder" in shown


@pytest.mark.parametrize(
    "outputs",
    [
        ["vision_embeds", "deepstack"],
        ["last_hidden_state"],  # of an encoder, or of a llama without its head
        ["encoder_out", "new_embed_states"],  # of a whole streaming model of speech
        ["logits", "hidden_states"],
    ],
)
def test_names_of_outputs_do_not_say_that_a_model_computes_embeddings(
    outputs: list[str],
) -> None:
    finding = build_no_buffers_finding(outputs, load_rules())
    assert finding.message == f"no KV buffer here: the outputs are {', '.join(outputs)}"
    assert finding.hint.startswith("export the model with its cache as inputs and outputs; ")


def test_a_profile_that_matches_is_named() -> None:
    finding = build_no_buffers_finding(["logits", "present.0.key"], load_rules())
    assert "matches these rules" in finding.message
    assert "logits, present.0.key" in finding.message
    assert "--profile huggingface" in finding.hint
