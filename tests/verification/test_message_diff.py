from __future__ import annotations

import struct
from collections.abc import Callable

import onnx
import pytest
from models import CLOSE, KEY, OPEN, branch, decoder, field, graph, node, sparse, tensor
from onnx import ModelProto

from onnxkvrename.model.protobuf import ByteSource
from onnxkvrename.verification.message_diff import Difference, compare_models
from onnxkvrename.verification.strip_weights import read_model_without_weights

Change = Callable[[ModelProto], object]


def rich_model() -> ModelProto:
    """A model that has something at most places of the schema."""
    function = onnx.helper.make_function(
        "local", "Twice", ["a"], ["b"], [node("Add", ["a", "a"], ["b"])], []
    )
    other = onnx.helper.make_function("local", "Same", ["a"], ["b"], [], [])
    captures = branch(graph(node("Identity", [KEY], ["copy"])))
    model = decoder(captures, functions=(function, other))
    model.graph.initializer.extend([tensor("w", 1.0, 2.0), tensor("v", 3.0)])
    model.graph.initializer[0].raw_data = bytes(300)
    model.graph.sparse_initializer.append(sparse("s"))
    model.graph.value_info.add(name="copy", doc_string="kept").type.denotation = "IMAGE"
    model.graph.quantization_annotation.add(tensor_name=KEY)
    model.metadata_props.add(key="author", value="nobody")
    model.metadata_props.add(key="license", value="none")
    model.training_info.add().update_binding.add(key="w", value="x")
    return model


def rename_capture(model: ModelProto, name: str) -> None:
    """Change the name by which the branch of the If reads a buffer."""
    body = next(item.g for item in model.graph.node[3].attribute if item.name == "then_branch")
    body.node[0].input[0] = name


def compare(expected: bytes, actual: bytes) -> tuple[Difference | None, tuple[str, ...]]:
    return compare_models(ByteSource.from_bytes(expected), ByteSource.from_bytes(actual))


def compare_changed(change: Change) -> tuple[Difference | None, tuple[str, ...]]:
    expected = rich_model()
    actual = ModelProto.FromString(expected.SerializeToString())
    change(actual)
    return compare(expected.SerializeToString(), actual.SerializeToString())


CONTENT: dict[str, tuple[Change, str, str]] = {
    "a capture of a subgraph": (
        lambda m: rename_capture(m, "other"),
        "graph.node.attribute.g.node.input",
        "graph.node[3] (If).attribute['then_branch'].g.node[0] (Identity).input[0]: "
        "'other' instead of 'past_key.0'",
    ),
    "a function's parameter": (
        lambda m: m.functions[0].input.__setitem__(0, "c"),
        "functions.input",
        "functions['local.Twice'].input[0]: 'c' instead of 'a'",
    ),
    "metadata that is gone": (
        lambda m: m.metadata_props.pop(),
        "metadata_props",
        "metadata_props['license']: nothing instead of a message of 15 bytes",
    ),
    "metadata of one's own": (
        lambda m: m.metadata_props.add(key="tool", value="1"),
        "metadata_props",
        "metadata_props['tool']: a message of 9 bytes instead of nothing",
    ),
    "a doc string": (
        lambda m: m.graph.value_info[0].ClearField("doc_string"),
        "graph.value_info.doc_string",
        "graph.value_info['copy'].doc_string: nothing instead of 'kept'",
    ),
    "a denotation": (
        lambda m: m.graph.value_info[0].type.ClearField("denotation"),
        "graph.value_info.type.denotation",
        "graph.value_info['copy'].type.denotation: nothing instead of 'IMAGE'",
    ),
    "a byte of a weight": (
        lambda m: setattr(m.graph.initializer[0], "raw_data", bytes(299) + b"\1"),
        "graph.initializer.raw_data",
        "graph.initializer['w'].raw_data: differs",
    ),
    "a number of a weight": (
        lambda m: m.graph.initializer[1].float_data.__setitem__(0, 4.0),
        "graph.initializer.float_data",
        "graph.initializer['v'].float_data[0]: 4.0 instead of 3.0",
    ),
    "a sparse weight": (
        lambda m: m.graph.ClearField("sparse_initializer"),
        "graph.sparse_initializer",
        "graph.sparse_initializer[0]: nothing instead of a message of 28 bytes",
    ),
    "an annotation": (
        lambda m: m.graph.ClearField("quantization_annotation"),
        "graph.quantization_annotation",
        "graph.quantization_annotation['past_key.0']: nothing instead of a message of 12 bytes",
    ),
    "a binding of a training": (
        lambda m: setattr(m.training_info[0].update_binding[0], "value", "y"),
        "training_info.update_binding.value",
        "training_info[0].update_binding[0].value: 'y' instead of 'x'",
    ),
    "an operator set": (
        lambda m: setattr(m.opset_import[0], "version", 17),
        "opset_import.version",
        "opset_import[''].version: 17 instead of 18",
    ),
    "a node that is gone": (
        lambda m: m.graph.node.pop(1),
        "graph.node.input",
        "graph.node[1] (Add write_value).input[0]: "
        "'past_key.0_RetainedState' instead of 'past_value.0'",
    ),
    "the order of inputs": (
        lambda m: m.graph.input.reverse(),
        "graph.input.name",
        "graph.input[0] (x).name: 'flag' instead of 'x'",
    ),
    "a size": (
        lambda m: setattr(m.graph.input[0].type.tensor_type.shape.dim[1], "dim_value", 3),
        "graph.input.type.tensor_type.shape.dim.dim_value",
        "graph.input[0] (x).type.tensor_type.shape.dim[1].dim_value: 3 instead of 2",
    ),
}


@pytest.mark.parametrize(("change", "path", "place"), CONTENT.values(), ids=CONTENT.keys())
def test_other_content_is_told_by_its_place(change: Change, path: str, place: str):
    assert compare_changed(change) == (Difference(path, place), ())


@pytest.mark.parametrize(
    ("change", "path"),
    [
        (lambda m: m.functions.reverse(), "functions"),
        (lambda m: m.graph.initializer.reverse(), "graph.initializer"),
        (lambda m: m.metadata_props.reverse(), "metadata_props"),
        (lambda m: m.graph.node[3].attribute.reverse(), "graph.node.attribute"),
    ],
)
def test_another_order_of_what_is_found_by_name_is_told_apart(change: Change, path: str):
    assert compare_changed(change) == (None, (path,))


def compare_graphs(expected: bytes, actual: bytes) -> str:
    """The place in the schema of the first difference; empty for none."""
    difference, _ = compare(field(7, expected), field(7, actual))
    return "" if difference is None else difference.path


def test_numbers_may_be_packed_or_not():
    apart = field(5, b"".join(field(1, dim) for dim in [1, 2, 300]))
    packed, other = (field(5, field(1, b"\x01\x02\xac" + end)) for end in (b"\x02", b"\x03"))
    assert compare_graphs(apart, packed) == ""
    assert compare_graphs(apart, other) == "graph.initializer.dims"


def test_a_byte_of_a_large_weight_counts_and_its_packing_does_not():
    values = struct.pack("<1000f", *range(1000))
    apart = b"".join(b"\x25" + values[at : at + 4] for at in range(0, 4000, 4))
    changed = field(4, values[:-1] + b"\x40")
    assert compare_graphs(field(5, field(4, values)), field(5, apart)) == ""
    assert (
        compare_graphs(field(5, field(4, values)), field(5, changed))
        == "graph.initializer.raw_data"
    )
    fields = [field(5, field(number, bytes(2000))) for number in (5, 7)]
    assert compare_graphs(*fields) == "graph.initializer.raw_data"
    cases = [
        b"".join(field(9, text) for text in texts) for texts in (("a" * 2000, "b"), ("a", "b"))
    ]
    attributes = [field(1, field(5, field(1, "v") + case)) for case in cases]
    assert compare_graphs(*attributes).startswith("graph.node.attribute.")


def test_a_model_cannot_claim_to_have_another_ones_weights():
    model = decoder()
    model.graph.initializer.append(tensor("w", *map(float, range(1000))))
    raw = model.SerializeToString()
    stripped = read_model_without_weights(ByteSource.from_bytes(raw), digest_key=b"guessed")
    difference, _ = compare(raw, stripped.SerializeToString())
    assert difference is not None
    assert difference.path == "graph.initializer.raw_data"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (field(500, "a"), field(500, "b")),
        (b"", field(500, "b")),
        (OPEN + field(1, 1) + CLOSE, OPEN + field(1, 2) + CLOSE),
    ],
)
def test_what_onnx_does_not_know_is_compared_by_its_bytes(one: bytes, other: bytes):
    raw = decoder().SerializeToString()
    assert compare(raw + one, raw + other)[0] is not None
