"""An encoder whose outputs fill a decoder's buffers: renamed together, or not at all."""

from __future__ import annotations

from pathlib import Path

import onnx.helper
import pytest
from exporter_models import build_merged_decoder, build_model, list_caches
from models import info, node, saved
from onnx import ModelProto

IMAGE = ("batch_size", 2, 6404, 16)
TEXT = ("batch_size", 2, "ctx_len", 16)


def build(nodes, inputs, outputs) -> ModelProto:
    graph = onnx.helper.make_graph(nodes, "main_graph", inputs, outputs)
    opset = [onnx.helper.make_opsetid("", 17)]
    return onnx.helper.make_model(graph, opset_imports=opset, ir_version=8)


def encoder(token: str = "") -> ModelProto:
    """A vision encoder with the keys and values of layer 1, as that of Llama-3.2-Vision."""
    names = [f"past_{part}.1{token}" for part in ("key", "value")]
    nodes = [node("Neg", ["pixel_values"], [name]) for name in names]
    return build(nodes, [info("pixel_values", *IMAGE)], [info(name, *IMAGE) for name in names])


def decoder(token: str = "") -> ModelProto:
    """Its decoder: layer 0 writes a cache, layer 1 hands on what the encoder wrote."""
    nodes = [node("Neg", ["x"], ["logits"])]
    inputs, outputs = [info("x")], [info("logits")]
    for layer, shape, written in ((0, TEXT, ["Add", "x"]), (1, IMAGE, ["Identity"])):
        for part in ("key", "value"):
            name = f"past_{part}.{layer}{token}"
            nodes.append(node(written[0], [name, *written[1:]], [f"{name}_RetainedState"]))
            inputs.append(info(name, *shape))
            outputs.append(info(f"{name}_RetainedState", *shape))
    return build(nodes, inputs, outputs)


@pytest.fixture
def both(tmp_path: Path) -> tuple[Path, Path]:
    return (
        saved(encoder(), tmp_path / "encoder.onnx"),
        saved(decoder(), tmp_path / "decoder.onnx"),
    )


def test_both_get_the_token_and_lose_it_again(both: tuple[Path, Path], run) -> None:
    before = [path.read_bytes() for path in both]
    assert run(*both, "--prefix", "VLLM", "--jobs", 2).code == 0
    renamed = [encoder("_VLLM"), decoder("_VLLM")]
    assert [onnx.load(path) for path in both] == renamed
    assert run(*both, "--prefix", "VLLM", "--check").code == 0
    assert run(*both, "--strip").code == 0
    assert [path.read_bytes() for path in both] == before


def test_what_was_renamed_alone_is_joined_again(both: tuple[Path, Path], run) -> None:
    saved(decoder("_VLLM"), both[1])
    assert run(*both, "--prefix", "VLLM", "--check").code == 1
    assert run(*both, "--prefix", "VLLM").code == 0
    assert [onnx.load(path) for path in both] == [encoder("_VLLM"), decoder("_VLLM")]


def test_a_buffer_that_the_encoder_fills_needs_no_warning(both: tuple[Path, Path], run) -> None:
    """Alone nothing shows who fills it, nor with an encoder that writes under another name."""
    outcome = run(*both, "--prefix", "VLLM", "--verify", "--strict")
    assert (outcome.code, "KV114" in outcome.err) == (0, False)
    assert "4 of 4 buffers retained" in outcome.err
    outcome = run("verify", *both, "--strict")
    assert (outcome.code, outcome.err) == (0, "")
    assert "2 of 4 buffers retained by dataflow, 2 filled by another model" in outcome.out
    assert "it fills 2 KV buffers of another model" in outcome.out
    assert "error KV114" in run("verify", both[1], "--strict").err
    saved(encoder(), both[0])
    assert "warning KV114" in run("verify", *both).err


def test_an_encoder_shows_what_it_fills(both: tuple[Path, Path], run) -> None:
    text = run("inspect", both[0]).out
    assert "2 KV buffers of another model: past_key.1, past_value.1" in " ".join(text.split())
    assert "no KV buffer" not in text


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (0, "past_key.1 fills"),
        (1, "past_key.1 is only passed"),
    ],
)
def test_one_without_the_other_is_refused(
    given: int, said: str, both: tuple[Path, Path], snapshot, run
) -> None:
    before = snapshot(both[0].parent)
    outcome = run(both[given], "--prefix", "VLLM")
    assert (outcome.code, f"error KV308: {said}" in outcome.err) == (1, True)
    assert "(and 1 more)" in outcome.err
    assert snapshot(both[0].parent) == before


def move(model: ModelProto, first: str, last: str, value: str) -> ModelProto:
    """The same model, where two operators hand a buffer on instead of one."""
    nodes = list(model.graph.node)
    del model.graph.node[:]
    for each in nodes:
        if each.op_type == "Identity":
            moved = f"{each.output[0]}_moved"
            more = [value] if value else []
            model.graph.node.append(node(first, [each.input[0], *more], [moved]))
            model.graph.node.append(node(last, [moved, *more], each.output))
        else:
            model.graph.node.append(each)
    return model


@pytest.mark.parametrize(
    ("first", "last", "value"),
    [("Transpose", "Transpose", ""), ("Reshape", "Reshape", "shape"), ("Identity", "Cast", "")],
)
def test_a_buffer_may_be_passed_through_by_what_only_moves_it(
    first: str, last: str, value: str, tmp_path: Path, run
) -> None:
    path = saved(move(decoder(), first, last, value), tmp_path / "decoder.onnx")
    outcome = run(path, "--prefix", "VLLM")
    assert (outcome.code, "error KV308: past_key.1" in outcome.err) == (1, True)
    saved(encoder(), tmp_path / "encoder.onnx")
    assert run(tmp_path, "--prefix", "VLLM").code == 0


def test_a_buffer_that_is_written_before_it_is_moved_asks_for_no_encoder(
    tmp_path: Path, run
) -> None:
    path = saved(move(decoder(), "Neg", "Transpose", ""), tmp_path / "decoder.onnx")
    outcome = run(path, "--prefix", "VLLM")
    assert (outcome.code, "KV308" in outcome.err) == (0, False)


def test_another_token_on_the_encoder_is_not_replaced_unasked(both: tuple[Path, Path], run) -> None:
    saved(encoder("_OTHER"), both[0])
    outcome = run(*both, "--prefix", "VLLM")
    assert (outcome.code, "KV202" in outcome.err) == (1, True)
    assert run(*both, "--prefix", "VLLM", "--replace").code == 0
    assert onnx.load(both[0]) == encoder("_VLLM")


def test_a_cache_that_is_shared_or_of_fixed_size_asks_for_no_encoder(tmp_path: Path, run) -> None:
    fixed = decoder()
    for value in (*fixed.graph.input, *fixed.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            dim.dim_value = dim.dim_value or 4
    outcome = run(saved(fixed, tmp_path / "fixed.onnx"), "--prefix", "VLLM")
    assert (outcome.code, "KV308" in outcome.err) == (0, False)


def test_the_buffers_of_image_tokens_are_no_state(both: tuple[Path, Path], run) -> None:
    shown = run("inspect", both[1], both[0]).out
    assert "linear state" not in shown


def test_the_layout_of_a_decoder_needs_no_encoder(both: tuple[Path, Path], run) -> None:
    for command in (("verify",), ("inspect",), ("inspect", "--format", "json")):
        outcome = run(*command, both[1])
        assert "KV308" not in outcome.out + outcome.err
    assert "KV001" in run("verify", both[0]).err


def test_a_renamed_pair_verifies_together_and_each_against_its_source(
    both: tuple[Path, Path], run
) -> None:
    out = both[0].parent / "out"
    assert run(*both, "--prefix", "VLLM", "--verify", "-d", out).code == 0
    renamed = [out / path.name for path in both]
    for options in ([], ["--prefix", "VLLM"]):
        outcome = run("verify", *renamed, *options)
        assert (outcome.code, "error" in outcome.err) == (0, False), outcome.err
    for path, source in zip(renamed, both, strict=True):
        outcome = run("verify", path, "--renamed-from", source)
        assert (outcome.code, "error" in outcome.err) == (0, False), outcome.err


def test_an_output_that_only_has_the_token_is_still_refused(both: tuple[Path, Path], run) -> None:
    model = encoder("_VLLM")
    model.graph.node.append(node("Neg", ["pixel_values"], ["pixels_VLLM"]))
    model.graph.output.append(info("pixels_VLLM", *IMAGE))
    saved(model, both[0])
    saved(decoder("_VLLM"), both[1])
    outcome = run("verify", *both)
    assert (outcome.code, "KV116: pixels_VLLM contains VLLM" in outcome.err) == (1, True)


@pytest.mark.parametrize("renamed", [0, 1])
def test_a_pair_of_which_one_is_renamed_does_not_verify(
    renamed: int, both: tuple[Path, Path], run
) -> None:
    saved((encoder, decoder)[renamed]("_VLLM"), both[renamed])
    names = ["past_key.1", "past_key.1_VLLM"]
    output, expected = names[:: 1 if renamed else -1]
    said = (
        f"KV308: {output} does not fill the decoder's input, whose name is {expected} (and 1 more)"
    )
    outcome = run("verify", *both)
    assert (outcome.code, said in outcome.err) == (1, True), outcome.err
    assert run("verify", *both, "--prefix", "VLLM").code == 1


@pytest.mark.parametrize(("written", "taken"), [(IMAGE, TEXT), (("batch_size", 2, 100, 16), IMAGE)])
def test_a_decoder_that_the_encoder_cannot_fill_is_not_its_decoder(
    written: tuple[object, ...], taken: tuple[object, ...], both: tuple[Path, Path], snapshot, run
) -> None:
    """A model with the same layer, but a cache of text there, or buffers of another size."""
    models = encoder(), decoder()
    for value in models[0].graph.output:
        value.CopyFrom(info(value.name, *written))
    for value in (*models[1].graph.input, *models[1].graph.output):
        if ".1" in value.name:
            value.CopyFrom(info(value.name, *taken))
    for model, path in zip(models, both, strict=True):
        saved(model, path)
    before = snapshot(both[0].parent)
    outcome = run(*both, "--prefix", "VLLM")
    said = "KV308: past_key.1 does not fit the input of the same name of any other model: "
    assert (outcome.code, said in outcome.err) == (1, True), outcome.err
    assert snapshot(both[0].parent) == before


def test_a_size_that_is_declared_as_a_symbol_of_its_own_fits(both: tuple[Path, Path], run) -> None:
    """Exporters name what they do not know; and images may have a context of their own."""
    derived, other = encoder(), decoder()
    for value in derived.graph.output:
        value.CopyFrom(info(value.name, "batch_size", 2, f"Neg{value.name}_dim_2", 16))
    for value in (*other.graph.input, *other.graph.output):
        if ".1" in value.name:
            value.CopyFrom(info(value.name, "batch_size", 2, "image_len", 16))
    saved(derived, both[0])
    assert run(*both, "--prefix", "VLLM", "--dry-run").code == 0
    saved(other, both[1])
    assert run(*both, "--prefix", "VLLM", "--dry-run").code == 0
    saved(encoder(), both[0])
    assert run(*both, "--prefix", "VLLM", "--dry-run").code == 0


def test_an_encoder_decoder_with_different_tokens_is_a_warning(tmp_path: Path, run) -> None:
    names = ("past_key_values.{layer}.decoder.{part}", "present.{layer}.decoder.{part}")
    outputs = [cache._replace(input=None) for cache in list_caches(names, [0])]
    first = saved(build_model(outputs), tmp_path / "decoder_model.onnx")
    merged = saved(build_merged_decoder(), tmp_path / "decoder_model_merged.onnx")
    assert run("verify", tmp_path).code == 0
    assert run(first, "--prefix", "VLLM", "-q").code == 0
    outcome = run("verify", tmp_path)
    assert outcome.code == 0
    assert ("warning KV303") in outcome.err
    assert f"VLLM in {first.name}" in outcome.err
    assert f"no token in {merged.name}" in outcome.err
    assert run(merged, "--prefix", "VLLM", "-q").code == 0
    assert "KV303" not in run("verify", tmp_path).err
