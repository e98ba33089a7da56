"""Models of other exporters: their names are known, take a token, and come back as they were."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from exporter_models import (
    HEAD,
    HEADS,
    HUGGING_FACE,
    Cache,
    build_decoder,
    build_merged_decoder,
    build_model,
    build_qnn_decoder,
    list_caches,
)
from exporters_table import FOLDERS, HEADINGS, MARKS, OTHERS, PAGE, Row, list_rows
from models import saved
from onnx import ModelProto, TensorProto
from tiers import thin

STATE = ("batch_size", 8, 3)
OWN = ("past_key_values.{layer}.decoder.{part}", "present.{layer}.decoder.{part}")
CROSS = ("past_key_values.{layer}.encoder.{part}", "present.{layer}.encoder.{part}")
ORT_OWN = ("past_{part}_self_{layer}", "present_{part}_self_{layer}")
ORT_CROSS = ("past_{part}_cross_{layer}", "present_{part}_cross_{layer}")
ENCODED = ("batch_size", HEADS, "encoder_sequence_length", HEAD)


def build_states(names: tuple[str, str], *parts: str) -> list[Cache]:
    """States of fixed size in layer 0."""
    return list_caches(names, [0], parts, shape=STATE, update="inplace")


def drop_outputs(caches: list[Cache]) -> list[Cache]:
    return [cache._replace(output=None) for cache in caches]


def drop_inputs(caches: list[Cache]) -> list[Cache]:
    return [cache._replace(input=None) for cache in caches]


def build_cross(names: tuple[str, str]) -> list[Cache]:
    return list_caches(names, [0], shape=ENCODED, update="once")


def build_paged() -> ModelProto:
    """An int8 cache in blocks, with scales beside it."""
    shape, more = ("num_blocks", "block_size", 2, 16), {"update": "inplace"}
    return build_model(
        [
            *list_caches(HUGGING_FACE, shape=shape, dtype=TensorProto.INT8, **more),
            *list_caches(HUGGING_FACE, parts=("key_scale", "value_scale"), shape=shape[:3], **more),
        ]
    )


def build_hybrid(names: tuple[str, str], *parts: str) -> ModelProto:
    return build_model([*build_states(names, *parts), *list_caches(HUGGING_FACE, [1])])


MODELS: dict[str, tuple[str, Callable[[], ModelProto], str]] = {
    "Optimum": ("huggingface", build_decoder, "past_key_values.0.key_VLLM"),
    "Optimum, keys and values in one": (
        "huggingface",
        lambda: build_model(list_caches(HUGGING_FACE, parts=["key_value"])),
        "present.1.key_value_VLLM",
    ),
    "Optimum, first step": (
        "huggingface",
        lambda: build_model(drop_inputs([*list_caches(OWN, [0]), *build_cross(CROSS)])),
        "present.0.encoder.key_VLLM",
    ),
    "Optimum, later steps": (
        "huggingface",
        lambda: build_model([*list_caches(OWN, [0]), *drop_outputs(build_cross(CROSS))]),
        "past_key_values.0.encoder.value_VLLM",
    ),
    "Optimum, merged": ("huggingface", build_merged_decoder, "present.0.decoder.key_VLLM"),
    "genai, hybrid": (
        "huggingface",
        lambda: build_hybrid(("past.{layer}.{part}", "present.{layer}.{part}"), "conv"),
        "past.0.conv_VLLM",
    ),
    "genai, linear attention": (
        "huggingface",
        lambda: build_hybrid(
            ("past.{layer}.{part}", "present.{layer}.{part}"), "conv", "recurrent"
        ),
        "present.0.recurrent_VLLM",
    ),
    "genai, paged": ("huggingface", build_paged, "past_key_values.1.value_scale_VLLM"),
    "genai, pipeline": (
        "huggingface",
        lambda: build_model(
            list_caches(("past_{part}_{layer}", "present_{part}_{layer}"), parts=("keys", "values"))
        ),
        "past_keys_0_VLLM",
    ),
    "mobius, hybrid": (
        "huggingface",
        lambda: build_hybrid(HUGGING_FACE, "conv_state", "recurrent_state"),
        "past_key_values.0.conv_state_VLLM",
    ),
    "transformers.js": (
        "huggingface",
        lambda: build_hybrid(
            ("past_{part}.{layer}", "present_{part}.{layer}"), "conv", "recurrent"
        ),
        "past_conv.0_VLLM",
    ),
    "mobius, static": (
        "mobius-static",
        lambda: build_model(
            list_caches(
                ("{part}_cache.{layer}", "updated_{part}_cache.{layer}"),
                shape=("batch", 32, 32),
                update="inplace",
            )
        ),
        "updated_key_cache.0_VLLM",
    ),
    "onnxruntime, decoder": (
        "ort-encdec",
        lambda: build_model([*list_caches(ORT_OWN, [0]), *drop_outputs(build_cross(ORT_CROSS))]),
        "past_key_self_0_VLLM",
    ),
    "onnxruntime, encoder": (
        "ort-encdec",
        lambda: build_model(drop_inputs(build_cross(ORT_CROSS))),
        "present_key_cross_0_VLLM",
    ),
    "QNN": ("qnn", build_qnn_decoder, "past_key_0_VLLM_in"),
    "QNN with windows": ("qnn", lambda: build_qnn_decoder([1]), "swa_value_1_VLLM_out"),
}


@pytest.mark.parametrize("name", MODELS)
def test_it_is_known_takes_the_token_and_comes_back(name: str, tmp_path: Path, run) -> None:
    profile, build, example = MODELS[name]
    model = saved(build(), tmp_path / "model.onnx")
    before = model.read_bytes()
    outcome = run(model, "--prefix", "VLLM", "--verify", "--format", "json")
    answer = json.loads(outcome.out)
    (renamed,) = answer["models"]
    assert (outcome.code, renamed["findings"]) == (0, [])
    assert answer["profile"] == {"name": profile, "picked": True, "also": []}
    new_names = {
        side["new"] for pair in renamed["pairs"] for side in (pair["input"], pair["output"]) if side
    }
    assert example in new_names
    assert all("VLLM" in new for new in new_names)
    assert run(model, "--strip", "-q").code == 0
    assert model.read_bytes() == before


@pytest.mark.parametrize("name", [name for name in MODELS if "later" not in name])
def test_a_model_with_a_side_lost_is_refused(name: str, tmp_path: Path, run) -> None:
    """An encoder, or a first step, has one side only: there one with both is too many."""
    model = MODELS[name][1]()
    caches = [value for value in model.graph.output if "present" in value.name]
    inputs = {value.name for value in model.graph.input}
    if not any("past" in value for value in inputs | {"past" * (not caches)}):
        (first, *_) = caches
        extra = model.graph.input.add()
        extra.CopyFrom(first)
        extra.name = first.name.replace("present", "past", 1)
        if extra.name.startswith("past."):
            extra.name = extra.name.replace("past.", "past_key_values.", 1)
    else:
        kept = [value for value in model.graph.output if value.name != model.graph.output[-1].name]
        del model.graph.output[:]
        model.graph.output.extend(kept)
    path = saved(model, tmp_path / "model.onnx")
    before = path.read_bytes()
    outcome = run(path, "--prefix", "VLLM")
    assert outcome.code == 1
    assert "error KV101" in outcome.err or "error KV102" in outcome.err
    assert path.read_bytes() == before


def test_a_scale_is_no_key_with_a_token(tmp_path: Path, run) -> None:
    """A token that would make another part's name of one is refused."""
    model = saved(build_paged(), tmp_path / "model.onnx")
    outcome = run(model, "--prefix", "scale")
    assert outcome.code == 2
    assert "past_key_values.0.key_scale'" in outcome.err
    assert "parsed back" in outcome.err
    assert "for example VLLM" in outcome.err


def test_an_unknown_state_is_named(tmp_path: Path, run) -> None:
    odd = list_caches(HUGGING_FACE, parts=["odd"])
    model = saved(build_model([*list_caches(HUGGING_FACE), *odd]), tmp_path / "model.onnx")
    outcome = run(model, "--prefix", "VLLM")
    assert outcome.code == 0
    assert "warning KV111: present.0.odd" in outcome.err


def list_buffers(model: ModelProto, tmp_path: Path, run) -> dict[str, dict[str, object]]:
    path = saved(model, tmp_path / "model.onnx")
    document = json.loads(run("manifest", path).out)
    return {f"{b['layer']} {b['part']}": b for b in document["buffers"]}


def test_a_manifest_knows_kinds_contexts_and_what_moves_beside(tmp_path: Path, run) -> None:
    found = list_buffers(MODELS["Optimum, later steps"][1](), tmp_path, run)
    assert {part: b["kind"] for part, b in found.items()} == {
        "0 key": "full_attention",
        "0 value": "full_attention",
        "0 key_cross": "cross_attention",
        "0 value_cross": "cross_attention",
    }
    assert found["0 key_cross"]["axes"] == ["batch", "", "encoder", ""]
    found = list_buffers(build_paged(), tmp_path, run)
    assert found["0 key"]["sequence_axis"] is None  # blocks, which are no context
    assert found["1 value_scale"]["beside"] == "value"
    found = list_buffers(build_qnn_decoder([1]), tmp_path, run)
    assert (found["0 key"]["sequence_axis"], found["0 value"]["sequence_axis"]) == (3, 2)
    assert found["1 key"]["kind"] == "sliding_window"
    assert found["1 key"]["update"] == "delta"
    static = list_buffers(MODELS["mobius, static"][1](), tmp_path, run)["0 key"]
    assert (static["kind"], static["kind_guessed"], static["sequence_axis"]) == (
        "full_attention",
        False,
        1,
    )
    sliding = list_caches(HUGGING_FACE, [0], past="past_sliding_length")
    window = list_buffers(build_model(sliding), tmp_path, run)["0 key"]
    assert (window["kind"], window["kind_guessed"]) == ("sliding_window", False)
    assert window["window"] == "past_sliding_length"


def test_heads_and_their_size_are_read_by_the_axes(tmp_path: Path, run) -> None:
    """QNN has the heads before the batch, and keys transposed."""
    model = saved(build_qnn_decoder(), tmp_path / "model.onnx")
    document = json.loads(run("manifest", model, "--block-size", 16).out)
    found = {(layer["kv_heads"], layer["head_size"]) for layer in document["vllm"]["layers"]}
    assert found == {(HEADS, HEAD)}


def read_table() -> list[Row]:
    text = PAGE.read_text("utf-8").split(MARKS[0])[1].split(MARKS[1])[0]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    assert cells[0] == list(HEADINGS)
    return [Row(*line) for line in cells[2:]]


@pytest.mark.skipif(not OTHERS.is_dir(), reason=f"no other exporters' models: no {OTHERS}")
@pytest.mark.parametrize("folder", thin(FOLDERS, 1))
def test_real_exports_do_what_the_page_says(folder: str) -> None:
    shown = [row for row in read_table() if row.export.startswith(f"{folder}/")]
    rows = list_rows(with_run=False, folders=[folder])
    assert shown
    assert [row._replace(run="") for row in rows] == [row._replace(run="") for row in shown]


def test_the_page_says_that_all_came_back() -> None:
    rows = [row for row in read_table() if row.names[0].isdigit()]
    assert len(rows) >= 20
    assert {(row.verify, row.strip) for row in rows} == {("holds", "same bytes")}
    assert all(row.run == "equal" or " " in row.run for row in rows)
