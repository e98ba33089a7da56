from __future__ import annotations

import json
from pathlib import Path

import models
import numpy as np
import pytest
from models import KEY, KEY_OUT, VALUE, VALUE_OUT, info, node
from onnx import ModelProto, NodeProto, TensorProto, numpy_helper

from onnxkvrename import ModelError, load_rules
from onnxkvrename.rules.kv_model import read_kv_model
from onnxkvrename.verification.running.dim_sizes import (
    list_corrections,
    read_specialized_sizes,
    resolve_dim_sizes,
)
from onnxkvrename.verification.running.isolated_run import check_retention
from onnxkvrename.verification.running.retention_loop import RunnableModel
from onnxkvrename.verification.verify import build_runnable_model

RULES = load_rules()


def build_decoder(
    symbol: str, *nodes: NodeProto, constants: dict[str, np.ndarray] | None = None
) -> ModelProto:
    """A decoder whose input ``x`` and buffers have a symbolic axis 2, and these nodes beside."""
    model = models.decoder(*nodes)
    for value in (*model.graph.input, *model.graph.output):
        if value.name != "flag":
            value.CopyFrom(info(value.name, 1, 2, symbol, 4))
    for name, values in (constants or {}).items():
        model.graph.initializer.append(numpy_helper.from_array(values, name))
    return model


def save_model(model: ModelProto, path: Path) -> RunnableModel:
    models.saved(model, path)
    return build_runnable_model(read_kv_model(path, RULES), path.stat().st_size)


def write_specializations(folder: Path, **sizes: int) -> None:
    folder.mkdir(exist_ok=True)
    symbols = {symbol: str(size) for symbol, size in sizes.items()}
    text = json.dumps({"specializations": [{"name": "only", "symbols": symbols}]})
    (folder / "specializations.json").write_text(text)


def needs_a_constant_of_15_positions() -> ModelProto:
    """As an encoder has, whose positions are weights."""
    positions = np.zeros((1, 2, 15, 4), np.float32)
    return build_decoder(
        "encoder_ctx_len",
        node("Add", [KEY, "positions"], ["y"]),
        constants={"positions": positions},
    )


def needs_a_size_of_16() -> ModelProto:
    """As a vision tower does, in which the size follows from a shape."""
    shape = np.array([2, 8, 8], np.int64)
    return build_decoder(
        "img_size", node("Reshape", ["x", "shape"], ["y"]), constants={"shape": shape}
    )


def test_a_size_that_a_constant_of_the_graph_settles_is_found(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    model = save_model(needs_a_constant_of_15_positions(), tmp_path / "m.onnx")
    run, findings = check_retention(model)
    assert (run and run.dims, findings) == ({"encoder_ctx_len": 15}, ())


def test_a_size_that_was_asked_for_is_never_changed(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    model = save_model(needs_a_constant_of_15_positions(), tmp_path / "m.onnx")
    write_specializations(tmp_path, encoder_ctx_len=15)
    with pytest.raises(ModelError, match="in step 1") as caught:
        check_retention(model, dims={"encoder_ctx_len": 7})
    assert "encoder_ctx_len=7" in str(caught.value.hint)


@pytest.mark.parametrize("folder", ["", "qpc-0123456789abcdef"])
def test_sizes_are_those_of_a_compile(folder: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    model = save_model(needs_a_size_of_16(), tmp_path / "m.onnx")
    with pytest.raises(ModelError):
        check_retention(model)
    write_specializations(tmp_path / folder, img_size=16, other=3)
    run, findings = check_retention(model)
    assert (run and run.dims, findings) == ({"img_size": 16}, ())


def test_where_the_sizes_of_a_compile_do_not_work_they_are_guessed(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    for ctx_len in (0, 1 << 40):
        model = save_model(build_decoder("ctx_len"), tmp_path / "m.onnx")
        write_specializations(tmp_path, ctx_len=ctx_len)
        run, _ = check_retention(model)
        assert (run and run.dims) == {"ctx_len": 32}


@pytest.mark.parametrize(
    ("dims", "expected"),
    [
        ({}, {"ctx_len": 64, "comp_ctx_lengths": 48}),
        ({"ctx_len": 16}, {"ctx_len": 16, "comp_ctx_lengths": 16}),
        ({"ctx_len": 56}, {"ctx_len": 56, "comp_ctx_lengths": 48}),
        ({"ctx_len": 16, "comp_ctx_lengths": 20}, {"ctx_len": 16, "comp_ctx_lengths": 20}),
    ],
)
def test_the_part_of_a_context_that_is_read_is_not_longer_than_it(
    dims: dict[str, int], expected: dict[str, int], tmp_path: Path
) -> None:
    pytest.importorskip("onnxruntime")
    decoder = build_decoder("ctx_len")
    decoder.graph.input.append(models.info("comp_ctx_lengths", "comp_ctx_lengths"))
    write_specializations(tmp_path, ctx_len=64, comp_ctx_lengths=48)
    run, _ = check_retention(save_model(decoder, tmp_path / "m.onnx"), dims=dims)
    assert (run and run.dims) == expected


def test_a_model_runs_with_the_sizes_of_its_reference(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    (tmp_path / "renamed").mkdir()
    reference = save_model(needs_a_size_of_16(), tmp_path / "m.onnx")
    model = save_model(needs_a_size_of_16(), tmp_path / "renamed" / "m.onnx")
    for side in (tmp_path, tmp_path / "renamed"):
        write_specializations(side, img_size=16)
        run, findings = check_retention(model, reference)
        assert (run and run.dims, findings) == ({"img_size": 16}, ())
        (side / "specializations.json").unlink()


def test_of_several_specializations_the_first_counts(tmp_path: Path) -> None:
    document = {"specializations": [{"ctx_len": 64, "seq_len": 8}, {"ctx_len": 64, "seq_len": 1}]}
    (tmp_path / "specializations.json").write_text(json.dumps(document))
    assert read_specialized_sizes(tmp_path / "m.onnx") == {"ctx_len": 64, "seq_len": 8}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"specializations": [{"ctx_len": "much"}]}'])
def test_a_file_that_cannot_be_read_is_passed_over(text: str, tmp_path: Path) -> None:
    (tmp_path / "specializations.json").write_text(text)
    write_specializations(tmp_path / "qpc-1", ctx_len=9)
    assert read_specialized_sizes(tmp_path / "m.onnx") == {"ctx_len": 9}
    assert read_specialized_sizes(tmp_path / "nowhere" / "m.onnx") == {}


def test_no_chunk_is_too_short_for_its_logits() -> None:
    sizes = resolve_dim_sizes([("batch_size", "seq_len"), ("num_logits_to_keep", 1)], {})
    assert sizes["num_logits_to_keep"] <= sizes["seq_len"]


def test_positions_end_where_the_decoder_does(tmp_path: Path) -> None:
    """And not where the encoder does, whose buffers are longer."""
    pytest.importorskip("onnxruntime")
    table = np.zeros((32, 4), np.float32)
    model = build_decoder(
        "decoder_ctx_len",
        node("Gather", ["table", "position_ids"], ["y"]),
        constants={"table": table},
    )
    model.graph.input.append(info("position_ids", 1, 2, dtype=TensorProto.INT64))
    for value in (*model.graph.input, *model.graph.output):
        if value.name in (VALUE, VALUE_OUT):
            value.CopyFrom(info(value.name, 1, 2, 1500, 4))
    del model.graph.node[:3]
    for name, output in ((KEY, KEY_OUT), (VALUE, VALUE_OUT), ("x", "logits")):
        model.graph.node.append(node("Neg", [name], [output]))
    run, findings = check_retention(save_model(model, tmp_path / "m.onnx"))
    assert (run and run.dims, findings) == ({"decoder_ctx_len": 32}, ())


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("an axis by a dimension other than 1. 4 by 1500", [("a", 1500)]),
        ("index: 2 Got: 4 Expected: 9", [("a", 9)]),
        ("Axis 1 has mismatched dimensions of 9 and 4", [("a", 9)]),
        ("X Shape: {1,1,2,32}, Y Shape: {2,1500}", [("b", 1500)]),
        ("idx=31 must be within the inclusive range [-7,6]", [("b", 7)]),
        ("4 by 4", []),
        ("no size at all", []),
    ],
)
def test_a_message_says_which_size_was_wrong(message: str, expected: list[tuple[str, int]]) -> None:
    found = dict(list_corrections(message, {"a": 4, "b": 32, "c": 4}, fixed=["c"]))
    assert expected == [(symbol, found[symbol]) for symbol, _ in expected]
    assert "c" not in found
    assert bool(found) == bool(expected)
