"""A model without a KV cache is told from one whose cache no rule matches (KV001)."""

from __future__ import annotations

from pathlib import Path

import models
import pytest
from exporter_models import build_decoder
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


@pytest.mark.parametrize("command", [["--prefix", "VLLM"], ["verify"], ["check-consumer"]])
def test_an_encoder_has_no_cache_and_the_finding_names_the_decoder_beside_it(
    command: list[str], tmp_path: Path, run
) -> None:
    encoder = saved(build_encoder("x"), tmp_path / "encoder.onnx")
    saved(models.decoder(), tmp_path / "decoder.onnx")
    saved(build_decoder(), tmp_path / "other_decoder.onnx")  # has no input x
    saved(build_encoder("image_features"), tmp_path / "other_encoder.onnx")
    verb = command[:1] if command[0] != "--prefix" else []
    outcome = run(*verb, encoder, *command[len(verb) :])
    assert outcome.code == 1
    assert (
        "KV001: no KV buffer here: the outputs are x; "
        f"decoder.onnx beside it reads them and has KV buffers (pass {tmp_path / 'decoder.onnx'})\n"
    ) in outcome.err + outcome.out


def test_the_decoder_may_be_in_a_directory_beside_that_of_the_encoder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("Encoder-1", "Decoder-2", "Empty-3"):
        (tmp_path / name).mkdir()
    decoder = saved(build_decoder(), tmp_path / "Decoder-2" / "model.onnx")
    outputs, rules = [build_decoder().graph.input[0].name], load_rules()
    encoder = saved(build_encoder(outputs[0]), tmp_path / "Encoder-1" / "model.onnx")
    finding = build_no_buffers_finding(outputs, rules, encoder)
    assert finding.hint == f"pass {decoder}"
    assert finding.message.endswith(
        "; Decoder-2/model.onnx beside it reads them and has KV buffers"
    )
    monkeypatch.chdir(encoder.parent)
    nearby = Path("..", "Decoder-2", "model.onnx")
    found = build_no_buffers_finding(outputs, rules, Path("model.onnx"))
    assert found.hint == f"pass {nearby}"
    saved(build_decoder(), encoder.parent / "a.onnx")
    saved(build_decoder(), encoder.parent / "b.onnx")
    nearer = build_no_buffers_finding(outputs, rules, encoder)
    assert nearer.hint == f"pass {encoder.parent / 'a.onnx'}"
    assert nearer.message.endswith("; a.onnx, b.onnx beside it read them and have KV buffers")
    for name in ("a.onnx", "b.onnx"):
        (encoder.parent / name).unlink()
    assert "decoder" not in build_no_buffers_finding(["other"], rules, encoder).message
    for number in range(20):  # a directory full of exports is not one export
        (tmp_path / f"folder{number}").mkdir()
    assert "beside it" not in build_no_buffers_finding(outputs, rules, encoder).message


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
    outputs: list[str], tmp_path: Path
) -> None:
    (tmp_path / "lone").mkdir()
    model = saved(build_encoder(), tmp_path / "lone" / "model.onnx")
    (tmp_path / "lone" / "broken.onnx").write_bytes(b"\xff")
    finding = build_no_buffers_finding(outputs, load_rules(), model)
    assert finding.message == f"no KV buffer here: the outputs are {', '.join(outputs)}"
    assert finding.hint.startswith("export the model with its cache as inputs and outputs; ")


def test_a_profile_that_matches_is_named() -> None:
    finding = build_no_buffers_finding(["logits", "present.0.key"], load_rules())
    assert "matches these rules" in finding.message
    assert "logits, present.0.key" in finding.message
    assert "--profile huggingface" in finding.hint
