"""A grown cache goes back into the model, and the sizes of everything else follow it."""

from __future__ import annotations

import json
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
from models import node, saved
from onnx import ModelProto, TensorProto

from onnxkvrename import VerifiedModel, verify
from onnxkvrename.verification.running.dim_sizes import advance_sizes, resolve_dim_sizes

pytest.importorskip("onnxruntime")

MEANINGS = {"past": "sequence", "other_past": "sequence", "new": "new", "total": "past + new"}


def verify_run(model: ModelProto, path: Path, **how: object) -> VerifiedModel:
    verified = verify(saved(model, path), run=True, **how)  # type: ignore[arg-type]
    assert [f for f in verified.report.findings if f.code in ("KV118", "KV119")] == []
    return verified


def list_shapes(verified: VerifiedModel, part: str) -> list[tuple[int, ...]]:
    assert verified.run is not None
    return [step["", part, "0"].shape for step in verified.run.step_results]


def test_a_cache_grows_from_step_to_step(tmp_path: Path) -> None:
    verified = verify_run(build_decoder(), tmp_path / "m.onnx")
    lengths = [(1, HEADS, length, HEAD) for length in (6, 8, 10)]
    assert list_shapes(verified, "key") == lengths


def test_inputs_as_long_as_the_whole_follow_it(tmp_path: Path) -> None:
    """A mask as long as the past and the new positions, added to the grown cache."""
    model = build_decoder()
    total = "past_sequence_length + sequence_length"
    mask = model.graph.input.add()
    mask.name = "attention_mask"
    mask.type.tensor_type.elem_type = TensorProto.INT64
    for symbol in ("batch_size", total):
        mask.type.tensor_type.shape.dim.add().dim_param = symbol
    for op_type, inputs, outputs in (
        ("Shape", ["attention_mask"], ["mask_shape"]),
        ("Shape", ["present.0.key"], ["cache_shape"]),
        ("Gather", ["mask_shape", "axis_1"], ["mask_length"]),
        ("Gather", ["cache_shape", "axis_2"], ["cache_length"]),
        ("Expand", ["attention_mask", "cache_length"], ["fits"]),
    ):
        model.graph.node.add(op_type=op_type, input=inputs, output=outputs)
    two = model.graph.initializer.add(name="axis_2", data_type=TensorProto.INT64, dims=[1])
    two.int64_data.append(2)
    verify_run(model, tmp_path / "m.onnx")


def test_the_renamed_model_gives_the_same_step_by_step(tmp_path: Path, run) -> None:
    for number, model in enumerate((build_decoder(), build_qnn_decoder(), build_merged_decoder())):
        source = saved(model, tmp_path / f"{number}.onnx")
        renamed = tmp_path / f"renamed{number}.onnx"
        assert run(source, "--prefix", "VLLM", "-q", "-o", renamed).code == 0
        outcome = run("verify", renamed, "--run", "--reference", source, "--format", "json")
        (found,) = json.loads(outcome.out)["models"]
        assert outcome.code == 0
        assert found["run"]["same_as"] == str(source)


def test_new_positions_alone_are_joined_to_what_was_fed(tmp_path: Path) -> None:
    verified = verify_run(build_qnn_decoder(window_layers=[1]), tmp_path / "m.onnx")
    assert list_shapes(verified, "key") == [(HEADS, 1, HEAD, 4)] * 3
    assert verified.run is not None
    assert len(verified.run.retained_inputs) == 4


def test_a_merged_decoder_takes_its_first_branch_once(tmp_path: Path) -> None:
    verified = verify_run(build_merged_decoder(), tmp_path / "m.onnx")
    lengths = [shape[2] for shape in list_shapes(verified, "decoder.key")]
    assert lengths == [2, 4, 6]  # the first step has no past
    assert list_shapes(verified, "encoder.key") == [
        (1, HEADS, 6, HEAD),
        (0, HEADS, 1, HEAD),  # a dummy, which does not go back
        (0, HEADS, 1, HEAD),
    ]


def test_a_buffer_that_should_stay_in_place_and_grows_is_still_an_error(
    tmp_path: Path, run
) -> None:
    names = ("past_{part}.{layer}", "past_{part}.{layer}_RetainedState")
    outcome = run("verify", saved(build_decoder(names), tmp_path / "m.onnx"), "--run")
    assert outcome.code == 1
    assert "error KV118: past_key.0_RetainedState" in outcome.err


def test_a_cache_that_grows_out_of_a_fixed_size_is_run_once(tmp_path: Path) -> None:
    shape, grown = (1, HEADS, 4, HEAD), (1, HEADS, 6, HEAD)
    model = build_model(list_caches(HUGGING_FACE, [0], shape=shape, grown=grown))
    assert list_shapes(verify_run(model, tmp_path / "m.onnx"), "key") == [grown]


def test_caches_of_one_length_must_grow_alike(tmp_path: Path, run) -> None:
    key, value = list_caches(HUGGING_FACE, [0])
    model = build_model([key, value._replace(output="grown_once")])
    model.graph.output[-1].name = str(value.output)
    model.graph.node.append(node("Concat", ["grown_once", "x"], [str(value.output)], axis=2))
    outcome = run("verify", saved(model, tmp_path / "m.onnx"), "--run")
    assert outcome.code == 1
    assert "error KV118: present.0.value" in outcome.err


def test_what_is_written_once_goes_back_as_it_is(tmp_path: Path) -> None:
    cross = ("past_key_values.{layer}.encoder.{part}", "present.{layer}.encoder.{part}")
    shape = ("batch_size", HEADS, "encoder_sequence_length", HEAD)
    verified = verify_run(
        build_model(list_caches(cross, [0], shape=shape, update="once")), tmp_path / "m.onnx"
    )
    assert list_shapes(verified, "encoder.key") == [(1, HEADS, 6, HEAD)] * 3


def test_an_input_alone_is_fed_and_an_output_alone_is_not_fed_back(tmp_path: Path) -> None:
    own = list_caches(HUGGING_FACE, [0])
    for alone in (
        [each._replace(input=None) for each in own],
        [
            *list_caches(tuple(f"{n[:-6]}decoder.{{part}}" for n in HUGGING_FACE), [0]),
            Cache("past_key_values.0.encoder.key", None, ("batch_size", HEADS, 5, HEAD)),
            Cache("past_key_values.0.encoder.value", None, ("batch_size", HEADS, 5, HEAD)),
        ],
    ):
        verify_run(build_model(alone), tmp_path / "m.onnx")


@pytest.mark.parametrize(
    ("dims", "expected"),
    [
        ({}, {"past": 4, "other_past": 4, "new": 2, "total": 6, "past + new": 6, "x + new": 6}),
        ({"past": 7}, {"past": 7, "other_past": 7, "total": 9, "past + new": 9}),
        ({"other_past": 7, "new": 1}, {"past": 7, "total": 8}),
        ({"total": 5}, {"past": 4, "total": 5, "past + new": 6}),
    ],
)
def test_symbols_of_one_word_have_one_size_and_sums_are_sums(
    dims: dict[str, int], expected: dict[str, int]
) -> None:
    symbols = ("past", "other_past", "new", "total", "past + new", "x + new")
    sizes = resolve_dim_sizes([symbols], dims, MEANINGS)
    assert {symbol: sizes[symbol] for symbol in expected} == expected


def test_a_context_fills_a_window_whose_size_is_known() -> None:
    """What a ring buffer has room for, and no position, is not defined."""
    meanings = {**MEANINGS, "slid": "window"}
    symbols = ("past", "total", "slid")
    assert resolve_dim_sizes([symbols], {"slid": 16}, meanings) == {
        "past": 16,
        "total": 18,
        "slid": 16,
    }
    assert resolve_dim_sizes([symbols], {"slid": 16, "past": 5}, meanings)["past"] == 5


def test_sums_grow_with_what_they_are_sums_of() -> None:
    sizes = {"past": 4, "other_past": 4, "new": 2, "total": 9, "past + new": 6, "x": 3}
    assert advance_sizes(sizes, {"past": 6}, MEANINGS) == {
        "past": 6,
        "other_past": 6,
        "new": 2,
        "total": 11,
        "past + new": 8,
        "x": 3,
    }
