from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import models
import onnx
import pytest
from large_tensors import PLACES, weight
from models import decoder, field
from onnx import ModelProto, TensorProto
from onnx.helper import make_node
from tiers import thin

from onnxkvrename import ModelError
from onnxkvrename.model.protobuf import ByteSource
from onnxkvrename.verification.strip_weights import (
    KEPT_BYTES,
    RemovedData,
    list_removed_data,
    read_model_without_weights,
)

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
EXPORTS = Path(__file__).resolve().parents[3] / "shared" / "exports"
DATA = (
    *("raw_data", "string_data", "float_data", "int32_data"),
    *("int64_data", "double_data", "uint64_data"),
)


def strip(model: ModelProto) -> ModelProto:
    return read_model_without_weights(ByteSource.from_bytes(model.SerializeToString()))


def clear_data(model: ModelProto) -> ModelProto:
    """A model without any data of large tensors, by other means: parsed whole, then cleared."""
    result = ModelProto.FromString(model.SerializeToString())
    for message in models.every(result):
        if isinstance(message, TensorProto):
            data = [getattr(message, name) for name in DATA]
            if list_removed_data(message) or sum(map(len, data)) > KEPT_BYTES:
                for name in DATA:
                    message.ClearField(name)
                kept = [e for e in message.metadata_props if e.key != "onnxkvrename.taken"]
                del message.metadata_props[:]
                message.metadata_props.extend(kept)
    return result


@pytest.mark.parametrize("form", models.FORMS)
def test_all_but_the_data_of_large_tensors_is_there(form: str) -> None:
    model = decoder()
    model.graph.initializer.extend([weight("large"), models.tensor("small", 1.0, 2.0)])
    model.graph.initializer[0].metadata_props.add(key="from", value="here")
    data = models.FORMS[form](model)
    stripped = read_model_without_weights(ByteSource.from_bytes(data))
    assert clear_data(stripped) == clear_data(ModelProto.FromString(data))
    assert {tensor.name: list_removed_data(tensor) for tensor in stripped.graph.initializer} == {
        "large": (RemovedData("raw_data", 4000),),
        "small": (),
    }
    assert stripped.ByteSize() < 2000


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (weight(float_data=[0.5] * 1000), RemovedData("float_data", 4000)),
        (weight(data_type=6, int32_data=[-1] * 1000), RemovedData("int32_data", 10_000)),
        (weight(data_type=7, int64_data=[300] * 1000), RemovedData("int64_data", 2000)),
        (weight(data_type=11, double_data=[0.5] * 1000), RemovedData("double_data", 8000)),
        (weight(data_type=13, uint64_data=[300] * 1000), RemovedData("uint64_data", 2000)),
        (weight(data_type=8, string_data=[b"ab"] * 1000), RemovedData("string_data", 1000)),
    ],
)
def test_each_kind_of_data_is_taken_and_leaves_something_in_its_field(
    tensor: TensorProto, expected: RemovedData
) -> None:
    model = decoder()
    model.graph.initializer.append(tensor)
    (stripped,) = strip(model).graph.initializer
    assert list_removed_data(stripped) == (expected,)
    assert [name for name in DATA if getattr(stripped, name)] == [expected.field]
    assert stripped.ByteSize() < 200


def test_data_are_taken_up_to_a_size_only() -> None:
    model = decoder()
    for size in (KEPT_BYTES, KEPT_BYTES + 1):
        model.graph.initializer.add(name="w", data_type=3, dims=[size], raw_data=bytes(size))
    assert [bool(list_removed_data(tensor)) for tensor in strip(model).graph.initializer] == [
        False,
        True,
    ]


@pytest.mark.parametrize("put", PLACES)
def test_data_are_taken_wherever_tensors_stand(put: Callable[[ModelProto], None]) -> None:
    model = decoder()
    put(model)
    stripped = strip(model)
    assert clear_data(stripped) == clear_data(model)
    assert stripped.ByteSize() < decoder().ByteSize() + 800


@pytest.mark.parametrize(
    "values", [{"s": bytes(9000)}, {"f": [0.5] * 3000}, {"i": [1] * 9000}, {"t": ["abc" * 900] * 3}]
)
def test_large_values_of_attributes_are_shortened(values: dict[str, object]) -> None:
    model = decoder(make_node("Far", [], ["c"], domain="far", small=[1, 2], **values))
    attributes = strip(model).graph.node[-1].attribute
    assert {attribute.name: attribute.type for attribute in attributes} == {
        attribute.name: attribute.type for attribute in model.graph.node[-1].attribute
    }
    assert list(next(attribute for attribute in attributes if attribute.name == "small").ints) == [
        1,
        2,
    ]
    assert sum(attribute.ByteSize() for attribute in attributes) < 100


def test_many_small_fields_beside_the_data_are_read_in_a_few_pieces() -> None:
    model = decoder()
    model.graph.initializer.append(weight("large"))
    sizes = field(1, 1) * 5000  # each one a field of its own
    tensors = field(5, weight("larger").SerializeToString() + sizes) * 4
    data = model.SerializeToString() + field(7, tensors)
    reads = []

    def read(offset: int, size: int) -> bytes:
        reads.append(size)
        return data[offset : offset + size]

    stripped = read_model_without_weights(ByteSource(read, len(data)))
    assert sum(len(tensor.dims) for tensor in stripped.graph.initializer) > 4 * 5000
    assert len(reads) < 100


def test_of_a_huge_model_a_few_blocks_are_read() -> None:
    head = field(8, b"\x70\x01")  # raw_data of 1.5 GB in one tensor, a hole in the middle
    size = 1_500_000_000
    tensor_head = field(8, "w") + b"\x10\x01" + b"\x4a" + models.varint(size)
    graph_head = field(2, "g") + b"\x2a" + models.varint(len(tensor_head) + size) + tensor_head
    tail = field(1, field(1, "w") + field(2, "y") + field(4, "Identity"))
    total = len(graph_head) + size + len(tail)
    start = head + b"\x3a" + models.varint(total) + graph_head
    reads = []

    def read_at(offset: int, count: int) -> bytes:
        reads.append(count)
        total = len(start) + size + len(tail)
        count = min(count, total - offset)
        before = start[offset : offset + count]
        after = tail[max(0, offset - len(start) - size) :][
            : max(0, offset + count - len(start) - size)
        ]
        return before + bytes(count - len(before) - len(after)) + after

    model = read_model_without_weights(ByteSource(read_at, len(start) + size + len(tail)))
    assert list_removed_data(model.graph.initializer[0]) == (RemovedData("raw_data", size),)
    assert model.graph.node[0].op_type == "Identity"
    assert sum(reads) < 1 << 20


def test_what_onnx_cannot_parse_is_refused() -> None:
    data = decoder().SerializeToString() + field(7, field(1, b"\x0a\x05x"))
    with pytest.raises(ModelError, match="parsed by onnx"):
        read_model_without_weights(ByteSource.from_bytes(data))


def test_a_mark_that_someone_else_made_does_no_harm() -> None:
    tensor = models.tensor("w", 1.0)
    tensor.metadata_props.add(key="onnxkvrename.taken", value="raw_data:x :9 raw_data")
    assert list_removed_data(tensor) == ()


FILES = [*FIXTURES.rglob("*.onnx"), *EXPORTS.rglob("*.onnx")]


@pytest.mark.parametrize("path", thin(FILES, 18), ids=lambda path: "-".join(path.parts[-3:]))
def test_a_whole_file_is_all_there_but_its_weights(path: Path) -> None:
    stripped = read_model_without_weights(ByteSource.from_bytes(path.read_bytes()))
    assert clear_data(stripped) == clear_data(onnx.load(path, load_external_data=False))
