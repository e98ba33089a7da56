from __future__ import annotations

import struct
from pathlib import Path

import models
import onnx.helper
import pytest
from models import branch, field, graph, node, sparse, tensor, varint
from onnx import ModelProto, NodeProto, TensorProto

from onnxkvrename import ModelError
from onnxkvrename.model.protobuf import ByteSource
from onnxkvrename.model.statistics import ModelStats, collect_model_stats


def weighed(model: ModelProto) -> ModelStats:
    return collect_model_stats(ByteSource.from_bytes(model.SerializeToString()))


def large(name: str = "w") -> TensorProto:
    """A weight of 1,200 bytes."""
    return tensor(name, *[1.0] * 300)


def constant(name: str = "c") -> NodeProto:
    return node("Constant", [], [name], value=large())


def test_nodes_are_those_of_the_main_graph() -> None:
    assert weighed(models.decoder()).node_count == 3
    inner = graph(node("Neg", ["x"], ["a"]), node("Neg", ["a"], ["b"]))
    assert weighed(models.decoder(branch(inner))).node_count == 4


@pytest.mark.parametrize(
    ("dtype", "values", "size"),
    [
        (TensorProto.FLOAT, [1.0, 2.0], 8),
        (TensorProto.DOUBLE, [1.0, 2.0], 16),
        (TensorProto.FLOAT16, [1.0], 2),  # as a varint in int32_data
        (TensorProto.INT64, [1, 200], 3),
        (TensorProto.UINT64, [1], 1),
        (TensorProto.STRING, [b"abc", b"de"], 5),
    ],
)
def test_a_weight_is_as_large_as_its_values(dtype: int, values: list[object], size: int) -> None:
    model = models.decoder()
    model.graph.initializer.append(onnx.helper.make_tensor("w", dtype, [len(values)], values))
    found = weighed(model)
    assert (found.inline_tensor_count, found.inline_bytes, found.external_tensor_count) == (
        1,
        size,
        0,
    )


def test_names_and_sizes_of_a_weight_weigh_nothing() -> None:
    model = models.decoder()
    weight = TensorProto(name="w" * 1000, dims=[2] * 100, raw_data=b"abcd", data_type=1)
    weight.doc_string = "d" * 1000
    model.graph.initializer.append(weight)
    assert weighed(model).inline_bytes == 4


def test_every_tensor_counts_wherever_it_is() -> None:
    function = onnx.helper.make_function(
        "local", "F", [], ["c"], [constant()], [onnx.helper.make_opsetid("", 18)]
    )
    lists = node("Neg", ["x"], ["d"], tensors=[large()], graphs=[graph(constant())])
    inner = graph(constant(), branch(graph(constant()), "deep"))
    inner.initializer.append(large())
    model = models.decoder(constant(), lists, branch(inner), functions=(function,))
    model.graph.initializer.append(large())
    training = model.training_info.add()
    training.algorithm.CopyFrom(graph(constant()))
    training.initialization.CopyFrom(graph(constant()))
    found = weighed(model)
    assert (found.inline_tensor_count, found.inline_bytes) == (10, 12_000)
    assert found.function_names == ("F",)


def test_a_sparse_weight_is_its_values_and_indices() -> None:
    model = models.decoder()
    model.graph.sparse_initializer.append(sparse("w"))
    assert weighed(model) == ModelStats(3, (), 2, 4 + 1, 0)


def test_a_small_constant_is_no_weight() -> None:
    small = node("Constant", [], ["c"], value=tensor("w", *[1.0] * 200))
    assert weighed(models.decoder(small)) == ModelStats(4)
    assert weighed(models.decoder(constant())) == ModelStats(4, (), 1, 1200)


def test_external_weights_weigh_nothing_here() -> None:
    model = models.decoder()
    outside = TensorProto(name="w", dims=[1 << 40], data_type=1, data_location=1)
    outside.external_data.add(key="location", value="w.bin")
    model.graph.initializer.extend([outside, outside, large()])
    assert weighed(model) == ModelStats(3, (), 1, 1200, 2)


@pytest.mark.parametrize("form", models.FORMS.values(), ids=list(models.FORMS))
def test_the_form_of_a_file_does_not_matter(form: object) -> None:
    model = models.decoder(constant())
    model.graph.initializer.append(TensorProto(name="w", raw_data=b"abcd"))
    assert collect_model_stats(ByteSource.from_bytes(form(model))) == ModelStats(4, (), 2, 1204)  # type: ignore[operator]


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(ModelError):
        collect_model_stats(ByteSource.from_bytes(b"\x12\x02a"))
    with pytest.raises(ModelError):
        collect_model_stats(
            ByteSource.from_bytes(field(7, field(5, b"\x4a\xff\x7f")) + field(8, field(2, 18)))
        )


def test_weights_are_stepped_over_not_read(tmp_path: Path) -> None:
    path = heavy(tmp_path / "heavy.onnx", count=20, size=95_000_000)
    read = 0

    def counted(offset: int, size: int) -> bytes:
        nonlocal read
        file.seek(offset)
        data = file.read(size)
        read += len(data)
        return data

    with path.open("rb", buffering=0) as file:
        found = collect_model_stats(ByteSource(counted, path.stat().st_size))
    assert (found.inline_tensor_count, found.inline_bytes) == (20, 1_900_000_000)
    assert read < 1 << 20


def heavy(path: Path, count: int, size: int) -> Path:
    """A decoder with ``count`` weights of ``size`` bytes each, which are holes in the file."""
    main = models.decoder().graph.SerializeToString()
    named = field(2, 1) + field(8, "w") + varint(9 << 3 | 2) + varint(size)
    tensor_head = varint(5 << 3 | 2) + varint(len(named) + size) + named
    whole = len(main) + count * (len(tensor_head) + size)
    with path.open("wb") as file:
        file.write(field(1, 10) + varint(7 << 3 | 2) + varint(whole) + main)
        for _ in range(count):
            file.write(tensor_head)
            file.seek(size, 1)
        file.write(field(8, field(2, 18)))
    return path


def test_a_value_that_looks_like_a_weight_is_none() -> None:
    model = models.decoder()
    model.graph.value_info.append(models.info("w" * 2000))
    model.graph.doc_string = struct.pack("<f", 1.0).hex() * 1000
    assert weighed(model) == ModelStats(3)
