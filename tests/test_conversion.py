"""--to gives buffers the names of another profile, where they are what those names say."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest
from conftest import FIXTURES
from exporter_models import (
    HEAD,
    HEADS,
    HUGGING_FACE,
    build_decoder,
    build_merged_decoder,
    build_model,
    build_qnn_decoder,
    list_caches,
)
from models import saved
from onnx import ModelProto

import onnxkvrename

EXPORTS = Path(__file__).resolve().parents[2] / "shared" / "exports-other"

STATIC = ("batch_size", HEADS, 16, HEAD)


def build_static_decoder() -> ModelProto:
    """A decoder with Hugging Face's names that writes in place."""
    return build_model(list_caches(HUGGING_FACE, shape=STATIC, update="inplace"))


def list_names(path: Path) -> set[str]:
    graph = onnx.load(path).graph
    return {value.name for value in (*graph.input, *graph.output)}


@pytest.mark.parametrize(
    ("build", "own", "other", "example"),
    [
        (build_merged_decoder, "huggingface", "ort-encdec", "present_key_self_0"),
        (build_merged_decoder, "huggingface", "ort-encdec", "past_value_cross_0"),
        (build_static_decoder, "huggingface", "qeff", "past_key.1_RetainedState"),
    ],
)
def test_a_model_gets_the_names_and_comes_back(
    build, own: str, other: str, example: str, tmp_path: Path, run
) -> None:
    source, there, back = (tmp_path / f"{name}.onnx" for name in ("m", "there", "back"))
    saved(build(), source)
    assert run(source, "--to", other, "--verify", "-q", "-o", there).code == 0
    assert example in list_names(there)
    assert run(there, "--to", own, "-q", "-o", back).code == 0
    assert back.read_bytes() == source.read_bytes()


def test_names_that_would_come_back_as_others_are_refused(tmp_path: Path, run) -> None:
    """A decoder alone has `past_key_values.0.key`; from ort-encdec it would get `.decoder.key`."""
    source = saved(build_decoder(), tmp_path / "m.onnx")
    outcome = run(source, "--to", "ort-encdec", "-o", tmp_path / "there.onnx")
    assert (outcome.code, (tmp_path / "there.onnx").exists()) == (2, False)
    assert "converting that name back would give past_key_values.0.decoder.key" in outcome.err


def test_the_converted_model_computes_the_same(tmp_path: Path, run) -> None:
    pytest.importorskip("onnxruntime")
    source, there = saved(build_merged_decoder(), tmp_path / "m.onnx"), tmp_path / "there.onnx"
    run(source, "--to", "ort-encdec", "-q", "-o", there)
    outcome = run("verify", there, "--run", "--reference", source, "--format", "json")
    (found,) = json.loads(outcome.out)["models"]
    assert (outcome.code, found["run"]["same_as"]) == (0, str(source))


def test_the_token_stays_unless_another_is_asked_for(tmp_path: Path, run) -> None:
    model = saved(build_static_decoder(), tmp_path / "m.onnx")
    run(model, "--prefix", "VLLM", "-q")
    for more, example in (
        ((), "past_key.0_VLLM_RetainedState"),
        (("--strip",), "past_key.0_RetainedState"),
        (("--prefix", "NEW", "--replace"), "past_key.0_NEW_RetainedState"),
    ):
        result = tmp_path / "to.onnx"
        assert run(model, "--to", "qeff", *more, "-q", "-o", result, "--force").code == 0
        assert example in list_names(result)


@pytest.mark.parametrize(
    ("build", "target", "reason"),
    [
        (
            build_decoder,
            "qeff",
            "4 names (first: present.0.key) belong to buffers that grow along axis 2, but "
            "qeff's are written in place; programs for qeff would misuse them\n"
            "  -> a rename cannot change that: export the model as qeff requires\n",
        ),
        (
            build_qnn_decoder,
            "huggingface",
            "2 names (first: past_key_0_out) belong to buffers that return the new positions only "
            "along axis 3, but huggingface's grow; programs for",
        ),
        (
            build_decoder,
            "qnn",
            "2 names (first: present.0.key) belong to buffers with axes [batch_size, 2, "
            "past_sequence_length, 4] (batch, ?, sequence, ?), but qnn's have heads, batch, "
            "head, sequence; programs for qnn",
        ),
        (
            lambda: build_model(list_caches(HUGGING_FACE, shape=STATIC[1:], update="inplace")),
            "qeff",
            "4 names (first: present.0.key) belong to buffers with axes [2, 16, 4], but",
        ),
        (
            lambda: build_model(
                [cache._replace(input=None) for cache in list_caches(HUGGING_FACE)]
            ),
            "qeff",
            "4 names (first: present.0.key) belong to buffers without an input, but qeff's "
            "have both sides; programs for qeff",
        ),
    ],
)
def test_what_the_names_would_belie_is_refused(
    build, target: str, reason: str, tmp_path: Path, run
) -> None:
    model = saved(build(), tmp_path / "m.onnx")
    before = model.read_bytes()
    outcome = run(model, "--to", target)
    assert outcome.code == 1
    assert f"error KV203: {reason}" in outcome.err
    assert model.read_bytes() == before


def test_a_buffer_without_a_name_there_is_refused(tmp_path: Path, run) -> None:
    scale = ("batch_size", HEADS, 16)
    caches = list_caches(HUGGING_FACE, shape=STATIC, update="inplace")
    scales = list_caches(HUGGING_FACE, parts=["key_scale"], shape=scale, update="inplace")
    model = saved(build_model([*caches, *scales]), tmp_path / "m.onnx")
    outcome = run(model, "--to", "qeff")
    assert outcome.code == 2
    assert (
        "its content is key_scale of attention, and profile qeff has no name for that"
        in outcome.err
    )


def test_a_name_that_would_not_come_back_is_refused(run) -> None:
    outcome = run(FIXTURES / "plain" / "internal_suffix.onnx", "--to", "huggingface", "-n")
    assert outcome.code == 2
    assert "so the conversion could not be undone" in outcome.err


def test_the_library_converts_too(tmp_path: Path) -> None:
    model, there = saved(build_static_decoder(), tmp_path / "m.onnx"), tmp_path / "there.onnx"
    report = onnxkvrename.rename(model, to="qeff", output=there)
    assert report.name_map["present.0.key"] == "past_key.0_RetainedState"
    assert onnxkvrename.rename_all(there, "VLLM", to="huggingface").models[0].status == "renamed"
    assert "present.0.key_VLLM" in list_names(there)
    with pytest.raises(TypeError):
        onnxkvrename.rename(model, to=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("more", [("--seed-cache",)])
def test_what_does_not_go_with_it_is_said(more: tuple[str, ...], decoder: Path, run) -> None:
    outcome = run(decoder, "--to", "mobius-static", *more)
    assert outcome.code == 2
    assert f"--to and {more[0]} cannot be used together" in outcome.err


def test_a_profile_must_be_there(decoder: Path, run) -> None:
    outcome = run(decoder, "--to", "nobody")
    assert (outcome.code, "no such profile: nobody" in outcome.err) == (2, True)


def test_a_model_that_has_the_names_already_is_told_so(decoder: Path, run) -> None:
    """Its token is not what was asked about."""
    onnxkvrename.rename(decoder, "VLLM")
    outcome = run(decoder, "--to", "qeff")
    assert (outcome.code, outcome.out) == (0, "")
    message = "unchanged: the buffers already have the names of profile qeff"
    assert outcome.err == f"{decoder}: {message}\n"


def test_names_are_converted_for_a_consumer_in_one_run(tmp_path: Path, run) -> None:
    model = saved(build_static_decoder(), tmp_path / "model.onnx")
    assert run(model, "--to", "qeff", "-o", tmp_path / "first.onnx").code == 0
    two = tmp_path / "two.onnx"
    assert run(tmp_path / "first.onnx", "--target", "vllm-qaic", "-o", two).code == 0
    together = ("--to", "qeff", "--target", "vllm-qaic")
    outcome = run(model, *together, "-o", tmp_path / "one.onnx")
    assert (outcome.code, "checked for vllm-qaic" in outcome.err) == (0, True)
    assert (tmp_path / "one.onnx").read_bytes() == two.read_bytes()
    assert run(two, *together, "--check").code == 0
    report = onnxkvrename.rename(model, to="qeff", target="vllm-qaic", dry_run=True)
    assert (report.consumer, report.new_profile) == ("vllm-qaic", "qeff")


@pytest.mark.skipif(
    not (EXPORTS / "genai" / "lfm2-fp32-t5").is_dir(), reason="needs ../shared/exports-other"
)
def test_a_hybrid_with_the_names_of_the_profile_stays_as_it_is(tmp_path: Path, run) -> None:
    outcome = run(EXPORTS / "genai" / "lfm2-fp32-t5", "--to", "huggingface", "-d", tmp_path / "new")
    assert outcome.code == 0
    assert "unchanged: the buffers already have the names of profile huggingface" in outcome.err
