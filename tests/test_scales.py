"""Two models whose caches are quantized: decode must use the scales that prefill used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from models import node
from onnx import ModelProto, TensorProto, numpy_helper
from quantized_models import (
    NAMES,
    Quantization,
    build_quantized_model,
    draw_quantized_pair,
    hand_over,
    save_quantized_model,
)
from tiers import thin

import onnxkvrename


def check_drawn_pair(seed: int, directory: Path) -> None:
    pair = draw_quantized_pair(seed, directory)
    found = onnxkvrename.compare(pair.prefill, pair.decode)
    codes = {finding.code for finding in found.findings}
    if pair.is_computed:
        assert any("KV627" in note for note in found.notes)
    else:
        works = hand_over(pair)
        assert codes == (set() if works else {"KV626"})
        assert found.verdict.outcome == ("works" if works else "corrupts")
        assert not any("KV627" in note for note in found.notes)


@pytest.mark.parametrize("seed", thin(range(400), 15))
def test_compare_says_whether_decode_reads_what_prefill_meant(seed: int, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    check_drawn_pair(seed, tmp_path)


TENTH, FIFTH = (Quantization(np.float32(scale)) for scale in (0.1, 0.2))


@pytest.fixture
def tenth(tmp_path: Path) -> Path:
    return save_quantized_model(
        build_quantized_model("scatter", TENTH, TENTH), tmp_path / "tenth.onnx"
    )


def list_outcome(prefill: Path, decode: Path) -> tuple[str, set[str], bool]:
    """The outcome, the codes, and whether some scale is not known."""
    found = onnxkvrename.compare(prefill, decode)
    is_unknown = any("KV627" in note for note in found.notes)
    assert is_unknown is any("KV627" in each for each in found.basis.conditions)
    return found.verdict.outcome, {each.code for each in found.findings}, is_unknown


WORKS, CORRUPTS, UNKNOWN = (
    ("works", set[str](), False),
    ("corrupts", {"KV626"}, False),
    ("works", set[str](), True),
)


def read_in_function(model: ModelProto) -> None:
    """Key and value are dequantized in a function."""
    nodes = model.graph.node
    opsets = [onnx.helper.make_opsetid("", 21)]
    body = [node("DequantizeLinear", ["cache", "by"], ["made"])]
    read = onnx.helper.make_function("local", "Read", ["cache", "by"], ["made"], body, opsets)
    model.functions.append(read)
    model.opset_import.append(onnx.helper.make_opsetid("local", 1))
    for each in nodes:
        if each.op_type == "DequantizeLinear":
            each.op_type, each.domain = "Read", "local"


def read_in_branch(model: ModelProto) -> None:
    """The key is dequantized in a branch, too."""
    key = f"{NAMES[0]}_RetainedState"
    made = [
        onnx.helper.make_graph(
            [node("DequantizeLinear", [key, "key_scale_c"], [name])],
            name,
            [],
            [onnx.helper.make_tensor_value_info(name, TensorProto.FLOAT, None)],
        )
        for name in ("then", "else")
    ]
    flag = numpy_helper.from_array(np.array(True), "flag")
    model.graph.initializer.append(flag)
    chosen = node("If", ["flag"], ["chosen"], then_branch=made[0], else_branch=made[1])
    model.graph.node.append(chosen)


def multiply_by_hand(model: ModelProto) -> None:
    """The key becomes a value by a cast and a product."""
    for each in model.graph.node:
        if each.op_type == "DequantizeLinear" and NAMES[0] in each.input[0]:
            each.op_type = "Cast"
            del each.input[1:]
            each.attribute.append(onnx.helper.make_attribute("to", TensorProto.FLOAT))


def feed_scale(model: ModelProto) -> None:
    """The scale of the key is an input with a default."""
    value = onnx.helper.make_tensor_value_info("key_scale_c", TensorProto.FLOAT, [])
    model.graph.input.append(value)


def read_twice(model: ModelProto) -> None:
    """The key is also read with another scale."""
    model.graph.initializer.append(numpy_helper.from_array(np.float32(0.2), "other"))
    key = f"{NAMES[0]}_RetainedState"
    model.graph.node.append(node("DequantizeLinear", [key, "other"], ["again"]))


def turn_scale(model: ModelProto) -> None:
    """The scale of the key is transposed, which changes nothing."""
    for each in model.graph.node:
        each.input[:] = ["turned" if name == "key_scale_c" else name for name in each.input]
    model.graph.node.insert(0, node("Transpose", ["key_scale_c"], ["turned"]))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (read_in_function, WORKS),
        (read_in_branch, UNKNOWN),
        (multiply_by_hand, UNKNOWN),
        (feed_scale, UNKNOWN),
        (turn_scale, WORKS),
        (read_twice, CORRUPTS),
    ],
)
def test_scales_are_found_wherever_a_graph_uses_them(
    change: Any, expected: object, tenth: Path, tmp_path: Path
) -> None:
    model = build_quantized_model("scatter", TENTH, TENTH)
    change(model)
    assert list_outcome(tenth, save_quantized_model(model, tmp_path / "decode.onnx")) == expected


def build_blocked_model(scales: np.ndarray, block_size: int) -> ModelProto:
    """The key has a scale for each block of positions of a head, as opset 21 has them."""
    model = build_quantized_model("scatter", TENTH, TENTH)
    weight = next(each for each in model.graph.initializer if each.name == "key_scale_c")
    weight.CopyFrom(numpy_helper.from_array(scales, weight.name))
    for each in model.graph.node:
        if weight.name in each.input:
            each.attribute.append(onnx.helper.make_attribute("axis", 3))
            each.attribute.append(onnx.helper.make_attribute("block_size", block_size))
    return model


FOURS = np.linspace(0.1, 0.2, 48, dtype=np.float32).reshape(1, 2, 12, 2)
"""A scale for each four positions of the key's last axis."""


@pytest.mark.parametrize(
    ("scales", "block_size", "expected"),
    [
        (FOURS, 4, WORKS),
        (FOURS * 2, 4, CORRUPTS),
        (FOURS.repeat(2, 3), 2, WORKS),
        (FOURS.repeat(2, 3)[:, :, ::-1], 2, CORRUPTS),
        (FOURS[..., [0, 0, 1]], 3, UNKNOWN),  # the last block is not full
        (FOURS, 1 << 40, UNKNOWN),
        (FOURS.reshape(-1, 2), 4, UNKNOWN),
    ],
)
def test_scales_of_blocks_are_compared_by_value(
    scales: np.ndarray, block_size: int, expected: object, tmp_path: Path
) -> None:
    paths = [
        save_quantized_model(build_blocked_model(*each), tmp_path / f"{number}.onnx")
        for number, each in enumerate(((FOURS, 4), (np.ascontiguousarray(scales), block_size)))
    ]
    assert list_outcome(*paths) == expected


def test_a_scale_may_have_another_precision_on_the_other_side(tenth: Path, tmp_path: Path) -> None:
    for scale, expected in ((0.1, WORKS), (0.101, CORRUPTS)):
        half = TENTH._replace(scale=np.float16(scale))
        model = build_quantized_model("scatter", half, half)
        for each in model.graph.node:  # onnx: the result has the dtype of the scale
            if each.op_type == "QuantizeLinear":
                each.input[0] = "half"
        for value in (*model.graph.input, *model.graph.output):
            if value.type.tensor_type.elem_type == TensorProto.FLOAT:
                value.type.tensor_type.elem_type = TensorProto.FLOAT16
        assert list_outcome(tenth, save_quantized_model(model, tmp_path / "half.onnx")) == expected


def test_large_scales_are_read_from_nodes_and_files_or_not_known(tmp_path: Path) -> None:
    scales = np.linspace(0.1, 0.2, 600, dtype=np.float32)
    paths = []
    for number, last in enumerate((0.2, 0.2, 0.3)):
        many = Quantization(np.append(scales[:-1], np.float32(last)), axis=3)
        place = ("node", "external", "node")[number]
        model = build_quantized_model("scatter", many, TENTH, place)
        for value in (*model.graph.input, *model.graph.output):
            if len(value.type.tensor_type.shape.dim) == 4:
                value.type.tensor_type.shape.dim[3].dim_value = 600
        paths.append(save_quantized_model(model, tmp_path / f"{number}.onnx", place))
    assert list_outcome(paths[0], paths[1]) == WORKS
    assert list_outcome(paths[1], paths[2]) == CORRUPTS
    (tmp_path / "1.data").unlink()
    assert list_outcome(paths[0], paths[1])[2]


def test_a_cache_of_values_needs_no_scale(tmp_path: Path) -> None:
    model = build_quantized_model("scatter", TENTH, TENTH)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.elem_type = TensorProto.FLOAT
    path = save_quantized_model(model, tmp_path / "model.onnx")
    assert list_outcome(path, path) == WORKS


def test_the_command_compares_models_with_manifests(run, tenth: Path, tmp_path: Path) -> None:
    fifth = save_quantized_model(
        build_quantized_model("scatter", TENTH, FIFTH), tmp_path / "fifth.onnx"
    )
    manifest = tmp_path / "tenth.json"
    assert run("manifest", tenth, "-o", manifest).code == 0
    assert run("compare", manifest, tenth).code == 0
    outcome = run("compare", manifest, fifth)
    assert outcome.code == 1
    assert "hand-off would corrupt every prompt: " in outcome.out
    assert f"KV626: {NAMES[1]} is stored with scale 0.1 on prefill and read with scale 0.2" in (
        outcome.err
    )


def test_a_computed_scale_fails_only_with_strict(run, tenth: Path, tmp_path: Path) -> None:
    made = build_quantized_model("scatter", TENTH, TENTH, "computed")
    path = save_quantized_model(made, tmp_path / "computed.onnx")
    outcome = run("compare", tenth, path)
    assert outcome.code == 0
    assert "use the same scales (KV627)" in outcome.out.splitlines()[0]
    strict = run("compare", tenth, path, "--strict")
    assert strict.code == 1
    assert strict.out.startswith("cannot decide: ")
    assert "error KV627" in strict.err
