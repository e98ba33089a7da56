from __future__ import annotations

import struct
from collections.abc import Callable

import onnx
import pytest
from models import CLOSE, KEY, OPEN, branch, decoder, field, graph, node, sparse, tensor, written
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


def compare(expected: bytes, actual: bytes) -> tuple[Difference, ...]:
    return compare_models(ByteSource.from_bytes(expected), ByteSource.from_bytes(actual))


def compare_changed(change: Change) -> tuple[Difference, ...]:
    expected = rich_model()
    actual = ModelProto.FromString(expected.SerializeToString())
    change(actual)
    return compare(expected.SerializeToString(), actual.SerializeToString())


def test_equal_bytes_differ_nowhere():
    raw = rich_model().SerializeToString()
    assert compare(raw, raw) == ()


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
        "metadata_props['license']: is missing",
    ),
    "metadata of one's own": (
        lambda m: m.metadata_props.add(key="tool", value="1"),
        "metadata_props",
        "metadata_props['tool']: is new",
    ),
    "a doc string": (
        lambda m: m.graph.value_info[0].ClearField("doc_string"),
        "graph.value_info.doc_string",
        "graph.value_info['copy'].doc_string: 'kept' is missing",
    ),
    "a denotation": (
        lambda m: m.graph.value_info[0].type.ClearField("denotation"),
        "graph.value_info.type.denotation",
        "graph.value_info['copy'].type.denotation: 'IMAGE' is missing",
    ),
    "a byte of a weight": (
        lambda m: setattr(m.graph.initializer[0], "raw_data", bytes(299) + b"\1"),
        "graph.initializer.raw_data",
        "graph.initializer['w'].raw_data: differs from position 299 on",
    ),
    "a number of a weight": (
        lambda m: m.graph.initializer[1].float_data.__setitem__(0, 4.0),
        "graph.initializer.float_data",
        "graph.initializer['v'].float_data[0]: 4.0 instead of 3.0",
    ),
    "a sparse weight": (
        lambda m: m.graph.ClearField("sparse_initializer"),
        "graph.sparse_initializer",
        "has 0 entries, SOURCE has 1; the first difference is at [0]",
    ),
    "an annotation": (
        lambda m: m.graph.ClearField("quantization_annotation"),
        "graph.quantization_annotation",
        "graph.quantization_annotation['past_key.0']: is missing",
    ),
    "a binding of a training": (
        lambda m: setattr(m.training_info[0].update_binding[0], "value", "y"),
        "training_info.update_binding.value",
        "training_info[0].update_binding['w'].value: 'y' instead of 'x'",
    ),
    "an operator set": (
        lambda m: setattr(m.opset_import[0], "version", 17),
        "opset_import.version",
        "opset_import[''].version: 17 instead of 18",
    ),
    "a node that is gone": (
        lambda m: m.graph.node.pop(1),
        "graph.node",
        "has 3 entries, SOURCE has 4; the first difference is at [1]",
    ),
    "the order of inputs": (
        lambda m: m.graph.input.reverse(),
        "graph.input",
        "they are in a different order",
    ),
    "a size": (
        lambda m: setattr(m.graph.input[0].type.tensor_type.shape.dim[1], "dim_value", 3),
        "graph.input.type.tensor_type.shape.dim.dim_value",
        "graph.input['x'].type.tensor_type.shape.dim[1].dim_value: 3 instead of 2",
    ),
}


@pytest.mark.parametrize(("change", "path", "place"), CONTENT.values(), ids=CONTENT.keys())
def test_other_content_is_told_by_its_place(change: Change, path: str, place: str):
    (difference,) = compare_changed(change)
    assert difference == Difference("content", path, place)


def test_nodes_in_another_order_are_other_content():
    def swap(model: ModelProto) -> None:
        first, second = model.graph.node[0], model.graph.node[1]
        nodes = [second, first, *model.graph.node[2:]]
        del model.graph.node[:]
        model.graph.node.extend(nodes)

    assert {difference.kind for difference in compare_changed(swap)} == {"content"}


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
    (difference,) = compare_changed(change)
    assert (difference.kind, difference.path) == ("order", path)


def test_behind_another_order_other_content_is_still_found():
    def shuffle(model: ModelProto) -> None:
        model.functions.reverse()
        model.functions[1].doc_string = "changed"

    assert [(item.kind, item.path) for item in compare_changed(shuffle)] == [
        ("content", "functions.doc_string"),
    ]


def test_the_same_content_in_other_bytes_is_no_difference():
    model = decoder()
    assert compare(model.SerializeToString(), written(model, width=5)) == ()


def test_numbers_may_be_packed_or_not():
    dims = [1, 2, 300]
    apart = b"".join(field(1, dim) for dim in dims)
    packed = field(1, b"\x01\x02\xac\x02")
    graphs = [field(7, field(5, numbers)) for numbers in (apart, packed)]
    assert compare(*graphs) == ()
    (difference,) = compare(graphs[0], field(7, field(5, field(1, b"\x01\x02\xac\x03"))))
    assert difference.text == "graph.initializer[''].dims[2]: 428 instead of 300"


def test_a_byte_of_a_large_weight_counts_and_its_packing_does_not():
    numbers = [float(number) for number in range(1000)]
    model = decoder()
    model.graph.initializer.append(tensor("w", *numbers))
    raw = model.SerializeToString()
    model.graph.initializer[-1].float_data[999] = 1.0
    (difference,) = compare(raw, model.SerializeToString())
    assert difference.path == "graph.initializer.float_data"
    values = struct.pack("<1000f", *numbers)
    packed = field(4, values)
    apart = b"".join(b"\x25" + values[at : at + 4] for at in range(0, 4000, 4))
    assert compare(*(field(7, field(5, data)) for data in (packed, apart))) == ()
    cases = [
        b"".join(field(9, text) for text in texts) for texts in (("a" * 2000, "b"), ("a", "b"))
    ]
    attributes = [field(7, field(1, field(5, field(1, "v") + case))) for case in cases]
    (difference,) = compare(*attributes)
    assert difference.path.startswith("graph.node.attribute.")


def test_a_model_cannot_claim_to_have_another_ones_weights():
    model = decoder()
    model.graph.initializer.append(tensor("w", *map(float, range(1000))))
    raw = model.SerializeToString()
    stripped = read_model_without_weights(ByteSource.from_bytes(raw), digest_key=b"guessed")
    (difference,) = compare(raw, stripped.SerializeToString())
    assert difference.path == "graph.initializer.float_data"


def test_what_onnx_does_not_know_is_compared_by_its_bytes():
    raw = decoder().SerializeToString()
    for one, other in [
        (field(500, "a"), field(500, "b")),
        (b"", field(500, "b")),
        (OPEN + field(1, 1) + CLOSE, OPEN + field(1, 2) + CLOSE),
    ]:
        (difference,) = compare(raw + one, raw + other)
        assert difference.kind == "content"


def test_of_many_differences_the_first_is_told():
    def rename_nodes(model: ModelProto) -> None:
        for item in model.graph.node:
            item.doc_string = "new"

    (difference,) = compare_changed(rename_nodes)
    assert difference.text.startswith("graph.node[0] (")
