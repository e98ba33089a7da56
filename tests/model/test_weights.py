"""Which weights of a model are described, and what of them."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import numpy as np
import onnx
from models import info, node
from onnx import ModelProto, numpy_helper

from onnxkvrename.model.file import open_model
from onnxkvrename.model.weights import WEIGHT_COUNT, Weight, describe_weights, merge_weights


def model_with(**weights: np.ndarray) -> ModelProto:
    """A model with initializers of these names; a double underscore stands for a dot."""
    tensors = [
        numpy_helper.from_array(value, name.replace("__", ".").replace("_SLASH_", "/"))
        for name, value in weights.items()
    ]
    graph = onnx.helper.make_graph(
        [node("Neg", ["x"], ["y"])], "g", [info("x", 2)], [info("y", 2)], tensors
    )
    opset = [onnx.helper.make_opsetid("", 17)]
    return onnx.helper.make_model(graph, opset_imports=opset, ir_version=8)


def describe(path: Path) -> tuple[Weight, ...]:
    with open_model(path) as opened:
        return describe_weights(opened.source, path.parent)


ROW = np.arange(6, dtype=np.float32).reshape(2, 3)


def test_parameters_are_described_by_name_type_and_first_bytes(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    proto = model_with(
        model__embed__weight=ROW, model__cos_cached=ROW, val_1=ROW, **{"onnx::MatMul_1": ROW}
    )
    onnx.save(proto, path)
    digest = sha256(ROW.tobytes()).hexdigest()
    assert describe(path) == (Weight("model.embed.weight", "FLOAT", (2, 3), digest),)


def test_a_merged_window_calls_its_weights_as_the_window_does(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(
        model_with(
            layer_0_SLASH_a__weight=ROW,
            layer_0_SLASH_shared__bias=ROW,
            layer_1_SLASH_shared__bias=ROW + 1,
        ),
        path,
    )
    assert [weight.name for weight in describe(path)] == ["a.weight"]


def test_weights_in_a_file_are_read_from_there(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    proto = model_with(a__weight=ROW, b__weight=ROW + 1)
    onnx.save(proto, path, save_as_external_data=True, location="data.bin", size_threshold=0)
    digests = [sha256(value.tobytes()).hexdigest() for value in (ROW, ROW + 1)]
    assert [weight.sha256 for weight in describe(path)] == digests
    (tmp_path / "data.bin").unlink()
    assert [weight.sha256 for weight in describe(path)] == [None, None]


def test_nothing_is_read_outside_of_the_directory_of_the_model(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    path = tmp_path / "inner" / "model.onnx"
    proto = model_with(a__weight=ROW)
    onnx.save(proto, path, save_as_external_data=True, location="data.bin", size_threshold=0)
    (tmp_path / "inner" / "data.bin").rename(tmp_path / "data.bin")
    raw = onnx.load(path, load_external_data=False)
    raw.graph.initializer[0].external_data[0].value = "../data.bin"
    path.write_bytes(raw.SerializeToString())
    (weight,) = describe(path)
    assert weight.sha256 is None


def test_only_some_are_described_and_always_the_same_ones(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    many = {f"layers__{number}__weight": ROW for number in range(2 * WEIGHT_COUNT)}
    onnx.save(model_with(**many, embed__weight=ROW), path)
    names = [weight.name for weight in describe(path)]
    onnx.save(model_with(embed__weight=ROW, **dict(reversed(many.items()))), path)
    assert names == [weight.name for weight in describe(path)]
    assert (len(names), names[0]) == (WEIGHT_COUNT, "embed.weight")


def test_windows_that_disagree_on_a_weight_say_nothing_of_it() -> None:
    one, other = Weight("a.weight", "FLOAT", (2,), "x"), Weight("a.weight", "FLOAT", (2,), "y")
    alone = Weight("b.weight", "FLOAT", (2,), "x")
    assert merge_weights([[one, alone], [other]]) == (alone,)
    assert merge_weights([[one], [one]]) == (one,)
