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
from onnxkvrename.verification.ort_session import (
    MAX_FEED_BYTES,
    OrtSession,
    ValueKey,
    build_feed,
    digest_value,
    load_session,
    run_step,
)

pytest.importorskip("onnxruntime")
FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64


def model(*given: tuple[str, int, tuple[int | str, ...]], opset: int = 21) -> ModelProto:
    """A model that hands on each input, by the name, dtype and shape given."""
    inputs = [info(name, *shape, dtype=dtype) for name, dtype, shape in given]
    outputs = [info(f"{name}_again", *shape, dtype=dtype) for name, dtype, shape in given]
    nodes = [node("Identity", [name], [f"{name}_again"]) for name, _, _ in given]
    opsets = [make_opsetid("", opset)]
    graph = make_graph(nodes, "main", inputs, outputs)
    return make_model(graph, opset_imports=opsets, ir_version=10)


def loaded(
    model: ModelProto | bytes, tmp_path: Path, keys: dict[str, ValueKey] | None = None, **dims: int
) -> OrtSession:
    return load_session(models.saved(model, tmp_path / "m.onnx"), keys or {}, dims)


def values(session: OrtSession, step: int = 0, seed: int = 0, slots: int = 8) -> dict[str, Any]:
    """What goes into the inputs, as onnxruntime takes it."""
    return {
        end.name: build_feed(session, end, step, seed=seed, cache_length=slots)
        for end in session.inputs
    }


def fed(session: OrtSession, step: int = 0, seed: int = 0, slots: int = 8) -> dict[str, np.ndarray]:
    """What goes into the inputs, of those dtypes that numpy knows."""
    given = values(session, step, seed, slots)
    return {name: value.numpy().copy() for name, value in given.items()}


def attempt(model: ModelProto | bytes, tmp_path: Path) -> None:
    """Load a model and run one step of it."""
    session = loaded(model, tmp_path)
    run_step(session, values(session), 0)


DTYPES = (
    *("BOOL", "INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64"),
    *("FLOAT", "DOUBLE", "FLOAT16", "BFLOAT16"),
    *("FLOAT8E4M3FN", "FLOAT8E4M3FNUZ", "FLOAT8E5M2", "FLOAT8E5M2FNUZ"),
)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_dtype_is_fed_and_comes_out_as_it_went_in(dtype: str, tmp_path: Path) -> None:
    session = loaded(model(("x", TensorProto.DataType.Value(dtype), (2, 64))), tmp_path)
    value, other = values(session)["x"], values(session, step=1)["x"]
    out = run_step(session, {"x": value}, 0)["x_again"]
    assert value.data_type() == session.inputs[0].dtype
    assert digest_value(out) == digest_value(value) != digest_value(other)


def test_floats_lie_between_0_and_1_and_integers_are_small(tmp_path: Path) -> None:
    dtypes = (FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, INT64, TensorProto.UINT8)
    session = loaded(model(*((f"x{dtype}", dtype, (999,)) for dtype in dtypes)), tmp_path)
    for name, given in fed(session).items():
        low, high = (0.125, 1) if given.dtype.kind == "f" else (0, 4)
        assert low <= given.min(), name
        assert given.max() < high, name
        assert len(np.unique(given)) > 3, name


def test_feeds_follow_from_key_seed_and_step_not_from_the_name(tmp_path: Path) -> None:
    key: ValueKey = ("", "past_key", "0")
    given = {}
    for name in ("past_key.0", "past_key.0_VLLM"):
        session = loaded(model((name, FLOAT, (4, 4))), tmp_path, {name: key})
        given[name] = fed(session)[name]
        for other in (fed(session, step=1), fed(session, seed=1)):
            assert not np.array_equal(given[name], other[name])
    plain, renamed = given.values()
    np.testing.assert_array_equal(plain, renamed)
    strange = loaded(model(("past_key.1", FLOAT, (4, 4))), tmp_path)
    assert not np.array_equal(plain, fed(strange)["past_key.1"])


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
    session = loaded(model(("position_ids", INT64, (1, count))), tmp_path)
    found = [fed(session, step, slots=slots)["position_ids"] for step in range(len(expected))]
    assert [positions.tolist()[0] for positions in found] == expected


def test_inputs_that_point_into_others_stay_within_them(tmp_path: Path) -> None:
    session = loaded(model(("batch_index", INT64, (3, 1)), ("image_idx", INT64, (1, 1))), tmp_path)
    assert fed(session)["batch_index"].tolist() == [[0], [1], [2]]
    assert fed(session)["image_idx"].tolist() == [[0]]


def test_sizes_are_given_or_guessed(tmp_path: Path) -> None:
    shape = ("full_batch_size", "seq_len", "ctx_len", "sliding_window", "heads", 7)
    ends = model(("x", FLOAT, shape))
    assert loaded(ends, tmp_path).inputs[0].shape == (1, 2, 32, 32, 4, 7)
    given = loaded(ends, tmp_path, ctx_len=8, heads=2, batch_size=3)
    assert given.inputs[0].shape == (3, 2, 8, 8, 2, 7)
    assert given.dims["ctx_len"] == 8


def test_feeds_that_would_fill_the_memory_are_refused_before_they_are_made(tmp_path: Path) -> None:
    ends = model(("x", TensorProto.FLOAT16, ("ctx_len", 1 << 20)), ("y", FLOAT, (4,)))
    with pytest.raises(ModelError, match=r"most go into x \[512, 1048576\].*--dim.*ctx_len=512"):
        loaded(ends, tmp_path, ctx_len=512)
    assert loaded(ends, tmp_path, ctx_len=511).inputs[0].byte_size < MAX_FEED_BYTES


def test_a_size_is_one_or_more(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="ctx_len cannot be 0"):
        loaded(model(("x", FLOAT, ("ctx_len",))), tmp_path, ctx_len=0)


@pytest.mark.parametrize("module", ["onnxruntime", "numpy"])
def test_without_onnxruntime_the_error_says_how_to_get_it(
    module: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(KvRenameError, match=f"^{module} cannot be loaded") as caught:
        loaded(models.decoder(), tmp_path)
    assert caught.value.hint == "pip install 'onnxkvrename[run]'"


def custom() -> ModelProto:
    made = models.decoder(node("CtxScatter", ["x"], ["y"], domain="com.qualcomm.cloud"))
    made.opset_import.append(make_opsetid("com.qualcomm.cloud", 1))
    return made


def half(name: str) -> ModelProto:
    nodes = [node("Cast", ["a"], ["c"], to=FLOAT), node("Add", ["a", "c"], ["b"], name=name)]
    body = make_function("local", "Norm", ["a"], ["b"], nodes, [make_opsetid("", 18)])
    cast = node("Cast", ["x"], ["x16"], to=TensorProto.FLOAT16)
    return models.decoder(cast, node("Norm", ["x16"], ["y"], domain="local"), functions=(body,))


def mixed() -> ModelProto:
    cast = node("Cast", ["x"], ["x16"], to=TensorProto.FLOAT16)
    return models.decoder(cast, node("MatMul", ["x16", "x"], ["y"]))


def indexed(index: int) -> ModelProto:
    made = models.decoder(node("GatherND", ["x", "unused"], ["y"], name="/CtxGather"))
    made.graph.initializer.append(make_tensor("unused", INT64, [1], [index]))
    return made


def versioned(ir: int, opset: int) -> ModelProto:
    made = models.decoder()
    made.ir_version, made.opset_import[0].version = ir, opset
    return made


def bare(name: bytes) -> bytes:
    return model(("QQ", FLOAT, (1,))).SerializeToString().replace(b"QQ", name)


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (custom(), "load.* neither it nor onnxruntime defines .* com.qualcomm.cloud:CtxScatter$"),
        (models.decoder(node("F", ["x"], ["y"], domain="a.b")), "load.* no operator set a.b$"),
        (models.decoder(node("Foo", ["x"], ["y"])), "load.* no operator Foo in opset 18$"),
        (half(""), "load.* a node Add is given dtypes that differ, .* FLOAT16$"),
        (half("n7"), "load.* a node Add is given dtypes that differ, .* FLOAT16$"),
        (mixed(), "load.* a node MatMul is given dtypes that differ, .* FLOAT16$"),
        (models.decoder(node("Where", ["flag"] * 3, ["y"], name="w")),
         r"load.* has no Where \(of opset 16\) for the dtypes at node w$"),
        (indexed((1 << 31) - 1),
         "run.* in step 1, the GatherND node /CtxGather is given the index INT32_MAX: "),
        (indexed(77), r"run.* the GatherND node /CtxGather fails: invalid index found, .* 77$"),
        (models.decoder(node("Reshape", ["x", "x"], ["y"])), "load.*Reshape"),
        (versioned(99, 18), "load.* IR version 99, and this onnxruntime reads up to [0-9]+$"),
        (versioned(10, 99), "load.* opset 99, and this onnxruntime knows up to [0-9]+$"),
        (bare(b"\xff\xff"), "load.* not all UTF-8"),
        (b"\0" * 10, "load.* Protobuf parsing failed"),
        (model(("x", TensorProto.STRING, (1,))), r"x is tensor\(string\): only tensors of numbers"),
    ],
)  # fmt: skip
def test_a_model_that_cannot_be_run_is_refused_in_one_line(
    broken: ModelProto | bytes, said: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError) as caught:
        attempt(broken, tmp_path)
    assert caught.value.path == str(tmp_path / "m.onnx")
    assert "\n" not in caught.value.message
    assert "onnxruntime_src" not in caught.value.message
    assert len(caught.value.message) < 300
    assert re.search(said, caught.value.message), caught.value.message


def test_a_size_that_does_not_fit_is_said_with_the_sizes_there_were(tmp_path: Path) -> None:
    made = models.decoder()
    made.graph.input[1].CopyFrom(info(models.KEY, 1, 2, "ctx_len", 4))
    with pytest.raises(ModelError, match=r"Add node write_key fails: .* 8 by 32") as caught:
        attempt(made, tmp_path)
    assert caught.value.hint == "try other sizes with --dim NAME=SIZE; these were ctx_len=32"
