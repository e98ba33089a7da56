from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import models
import numpy as np
import pytest
from models import info, node
from onnx import ModelProto, TensorProto
from onnx.helper import make_function, make_graph, make_model, make_opsetid, make_tensor

from onnxkvrename import KvRenameError, ModelError
from onnxkvrename.limits import MAX_FEED_BYTES
from onnxkvrename.verification.running.ort_session import (
    OrtSession,
    ValueKey,
    build_feed,
    digest_value,
    load_session,
    run_step,
)

pytest.importorskip("onnxruntime")
FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64


def build_model(*values: tuple[str, int, tuple[int | str, ...]], opset: int = 21) -> ModelProto:
    """A model that hands on each input, by the name, dtype and shape given."""
    inputs = [info(name, *shape, dtype=dtype) for name, dtype, shape in values]
    outputs = [info(f"{name}_again", *shape, dtype=dtype) for name, dtype, shape in values]
    nodes = [node("Identity", [name], [f"{name}_again"]) for name, _, _ in values]
    opsets = [make_opsetid("", opset)]
    graph = make_graph(nodes, "main", inputs, outputs)
    return make_model(graph, opset_imports=opsets, ir_version=10)


def load(
    model: ModelProto | bytes, tmp_path: Path, keys: dict[str, ValueKey] | None = None, **dims: int
) -> OrtSession:
    return load_session(models.saved(model, tmp_path / "m.onnx"), keys or {}, dims)


def build_feeds(
    session: OrtSession, step: int = 0, seed: int = 0, slots: int = 8
) -> dict[str, Any]:
    """Return the feeds as onnxruntime takes them."""
    return {
        end.name: build_feed(session, end, step, seed=seed, cache_length=slots)
        for end in session.inputs
    }


def build_arrays(
    session: OrtSession, step: int = 0, seed: int = 0, slots: int = 8
) -> dict[str, np.ndarray]:
    """Return the feeds of the dtypes that numpy has."""
    feeds = build_feeds(session, step, seed, slots)
    return {name: value.numpy().copy() for name, value in feeds.items()}


def load_and_run(model: ModelProto | bytes, tmp_path: Path) -> None:
    """Load a model and run one step of it."""
    session = load(model, tmp_path)
    run_step(session, build_feeds(session), 0)


DTYPES = (
    *("BOOL", "INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64"),
    *("FLOAT", "DOUBLE", "FLOAT16", "BFLOAT16"),
    *("FLOAT8E4M3FN", "FLOAT8E4M3FNUZ", "FLOAT8E5M2", "FLOAT8E5M2FNUZ"),
)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_dtype_is_fed_and_comes_out_as_it_went_in(dtype: str, tmp_path: Path) -> None:
    session = load(build_model(("x", TensorProto.DataType.Value(dtype), (2, 64))), tmp_path)
    value, other = build_feeds(session)["x"], build_feeds(session, step=1)["x"]
    out = run_step(session, {"x": value}, 0)["x_again"]
    assert value.data_type() == session.inputs[0].dtype
    assert digest_value(out) == digest_value(value) != digest_value(other)


def test_floats_lie_between_0_and_1_and_integers_are_small(tmp_path: Path) -> None:
    dtypes = (FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, INT64, TensorProto.UINT8)
    session = load(build_model(*((f"x{dtype}", dtype, (999,)) for dtype in dtypes)), tmp_path)
    for name, array in build_arrays(session).items():
        low, high = (0.125, 1) if array.dtype.kind == "f" else (0, 4)
        assert low <= array.min(), name
        assert array.max() < high, name
        assert len(np.unique(array)) > 3, name


def test_feeds_follow_from_key_seed_and_step_not_from_the_name(tmp_path: Path) -> None:
    key: ValueKey = ("", "past_key", "0")
    arrays = {}
    for name in ("past_key.0", "past_key.0_VLLM"):
        session = load(build_model((name, FLOAT, (4, 4))), tmp_path, {name: key})
        arrays[name] = build_arrays(session)[name]
        for other in (build_arrays(session, step=1), build_arrays(session, seed=1)):
            assert not np.array_equal(arrays[name], other[name])
    plain, renamed = arrays.values()
    np.testing.assert_array_equal(plain, renamed)
    strange = load(build_model(("past_key.1", FLOAT, (4, 4))), tmp_path)
    assert not np.array_equal(plain, build_arrays(strange)["past_key.1"])


@pytest.mark.parametrize(
    ("count", "slots", "expected"),
    [
        (3, 8, [[0, 1, 7], [2, 3, 7], [4, 5, 7], [6, 0, 7]]),
        (1, 8, [[7], [7]]),
        (4, 4, [[0, 1, 2, 3], [0, 1, 2, 3]]),
        (2, 1, [[0, 0]]),
    ],
)
def test_positions_go_on_and_the_last_fills_the_cache(
    count: int, slots: int, expected: list[list[int]], tmp_path: Path
) -> None:
    session = load(build_model(("position_ids", INT64, (1, count))), tmp_path)
    positions_by_step = [
        build_arrays(session, step, slots=slots)["position_ids"] for step in range(len(expected))
    ]
    assert [positions.tolist()[0] for positions in positions_by_step] == expected


def test_inputs_that_point_into_others_stay_within_them(tmp_path: Path) -> None:
    session = load(
        build_model(("batch_index", INT64, (3, 1)), ("image_idx", INT64, (1, 1))), tmp_path
    )
    assert build_arrays(session)["batch_index"].tolist() == [[0], [1], [2]]
    assert build_arrays(session)["image_idx"].tolist() == [[0]]


def test_sizes_are_given_or_guessed(tmp_path: Path) -> None:
    shape = ("full_batch_size", "seq_len", "ctx_len", "sliding_window", "heads", 7)
    model = build_model(("x", FLOAT, shape))
    assert load(model, tmp_path).inputs[0].shape == (1, 2, 32, 32, 4, 7)
    session = load(model, tmp_path, ctx_len=8, heads=2, batch_size=3)
    assert session.inputs[0].shape == (3, 2, 8, 8, 2, 7)
    assert session.dims["ctx_len"] == 8


def test_feeds_that_would_fill_the_memory_are_refused_before_they_are_made(tmp_path: Path) -> None:
    model = build_model(("x", TensorProto.FLOAT16, ("ctx_len", 1 << 20)), ("y", FLOAT, (4,)))
    with pytest.raises(ModelError, match=r"x \[512, 1048576\].*--dim.*ctx_len=512"):
        load(model, tmp_path, ctx_len=512)
    assert load(model, tmp_path, ctx_len=511).inputs[0].byte_size < MAX_FEED_BYTES


def test_a_size_is_one_or_more(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="ctx_len cannot be 0"):
        load(build_model(("x", FLOAT, ("ctx_len",))), tmp_path, ctx_len=0)


@pytest.mark.parametrize("module", ["onnxruntime", "numpy"])
def test_without_onnxruntime_the_error_says_how_to_get_it(
    module: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(KvRenameError, match=f"^{module} cannot be loaded") as caught:
        load(models.decoder(), tmp_path)
    assert caught.value.hint == f"`python -m pip install {module}`"


def build_custom_operator() -> ModelProto:
    model = models.decoder(node("CtxScatter", ["x"], ["y"], domain="com.qualcomm.cloud"))
    model.opset_import.append(make_opsetid("com.qualcomm.cloud", 1))
    return model


def build_half_function(name: str) -> ModelProto:
    nodes = [node("Cast", ["a"], ["c"], to=FLOAT), node("Add", ["a", "c"], ["b"], name=name)]
    body = make_function("local", "Norm", ["a"], ["b"], nodes, [make_opsetid("", 18)])
    cast = node("Cast", ["x"], ["x16"], to=TensorProto.FLOAT16)
    return models.decoder(cast, node("Norm", ["x16"], ["y"], domain="local"), functions=(body,))


def build_mixed_dtypes() -> ModelProto:
    cast = node("Cast", ["x"], ["x16"], to=TensorProto.FLOAT16)
    return models.decoder(cast, node("MatMul", ["x16", "x"], ["y"]))


def build_gather(index: int) -> ModelProto:
    model = models.decoder(node("GatherND", ["x", "unused"], ["y"], name="/CtxGather"))
    model.graph.initializer.append(make_tensor("unused", INT64, [1], [index]))
    return model


def build_versioned(ir: int, opset: int) -> ModelProto:
    model = models.decoder()
    model.ir_version, model.opset_import[0].version = ir, opset
    return model


def build_bare(name: bytes) -> bytes:
    return build_model(("QQ", FLOAT, (1,))).SerializeToString().replace(b"QQ", name)


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (build_custom_operator(),
         "load.* defines .* com.qualcomm.cloud:CtxScatter$"),
        (models.decoder(node("F", ["x"], ["y"], domain="a.b")), "load.* no operator set a.b$"),
        (models.decoder(node("Foo", ["x"], ["y"])), "load.* Foo in opset 18$"),
        (build_half_function(""), "load.* node Add .* FLOAT16$"),
        (build_half_function("n7"), "load.* node Add .* FLOAT16$"),
        (build_mixed_dtypes(), "load.* node MatMul .* FLOAT16$"),
        (models.decoder(node("Where", ["flag"] * 3, ["y"], name="w")),
         r"load.* Where \(of opset 16\) .* node w$"),
        (build_gather((1 << 31) - 1),
         "run.* step 1, .* /CtxGather .* INT32_MAX: "),
        (build_gather(77),
         "run.* /CtxGather fails: .* 77$"),
        (models.decoder(node("Reshape", ["x", "x"], ["y"])), "load.*Reshape"),
        (build_versioned(99, 18), "load.* IR version 99, .*[0-9]+$"),
        (build_versioned(10, 99), "load.* opset 99, .*[0-9]+$"),
        (build_bare(b"\xff\xff"), "load.* not all UTF-8"),
        (b"\0" * 10, "load.* Protobuf parsing failed"),
        (build_model(("x", TensorProto.STRING, (1,))),
         r"x is tensor\(string\)"),
    ],
)  # fmt: skip
def test_a_model_that_cannot_be_run_is_refused_in_one_line(
    broken: ModelProto | bytes, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError) as caught:
        load_and_run(broken, tmp_path)
    assert caught.value.path == str(tmp_path / "m.onnx")
    assert "\n" not in caught.value.message
    assert "onnxruntime_src" not in caught.value.message
    assert len(caught.value.message) < 300
    assert re.search(reason, caught.value.message), caught.value.message


def test_a_size_that_does_not_fit_is_said_with_the_sizes_there_were(tmp_path: Path) -> None:
    model = models.decoder()
    model.graph.input[1].CopyFrom(info(models.KEY, 1, 2, "ctx_len", 4))
    with pytest.raises(ModelError, match=r"write_key fails: .* 8 by 32") as caught:
        load_and_run(model, tmp_path)
    assert "--dim NAME=SIZE" in caught.value.hint
    assert "ctx_len=32" in caught.value.hint
