"""Reading a model: dtypes and shapes as protobuf reads them, and its external data."""

from __future__ import annotations

import onnx
import pytest
from google.protobuf.message import DecodeError
from models import FORMS, SHAPE, branch, decoder, field, graph, info, node, tensor, varint, written
from onnx import GraphProto, TensorProto, TypeProto
from onnx.helper import (
    make_function,
    make_map_type_proto,
    make_opsetid,
    make_optional_type_proto,
    make_sequence_type_proto,
    make_sparse_tensor,
    make_sparse_tensor_type_proto,
    make_tensor_type_proto,
    make_value_info,
)

from onnxkvrename.errors import ModelError
from onnxkvrename.model.occurrences import find_occurrences
from onnxkvrename.model.proto_reader import (
    ExternalReference,
    count_nodes,
    get_dtype_name,
    read_export_info,
    read_function_names,
    read_signature,
)
from onnxkvrename.model.protobuf import ByteSource
from onnxkvrename.model.signature import Dim, ExportInfo, Value

FLOAT = make_tensor_type_proto(TensorProto.FLOAT, SHAPE)


def value(type_: TypeProto | bytes, name: str = "x") -> Value:
    """A graph input as it is read back."""
    raw = type_ if isinstance(type_, bytes) else type_.SerializeToString()
    return value_of(field(1, name) + field(2, raw))


def value_of(raw: bytes) -> Value:
    (found,) = read_signature(ByteSource.from_bytes(field(7, field(11, raw)))).inputs
    return found


def shape(*dims: bytes) -> tuple[Dim, ...] | None:
    """The shape of a tensor with these dimensions."""
    return value(field(1, field(1, 1) + field(2, b"".join(field(1, dim) for dim in dims)))).shape


def test_inputs_and_outputs_come_in_the_files_order_doubles_included():
    model = decoder()
    model.graph.input.append(info("x", "batch", 2))
    raw = model.SerializeToString()
    found = read_signature(ByteSource.from_bytes(raw))
    assert [value.name for value in found.inputs] == [value.name for value in model.graph.input]
    assert [value.name for value in found.outputs] == [value.name for value in model.graph.output]
    assert found.inputs[0] == Value("x", "FLOAT", SHAPE)
    assert found.inputs[-1] == Value("x", "FLOAT", ("batch", 2))


@pytest.mark.parametrize(
    ("type_", "dtype", "dims"),
    [
        (FLOAT, "FLOAT", SHAPE),
        (make_tensor_type_proto(TensorProto.FLOAT16, ()), "FLOAT16", ()),
        (make_tensor_type_proto(TensorProto.INT64, None), "INT64", None),
        (make_tensor_type_proto(999, ("a", None, 0)), "DataType(999)", ("a", None, 0)),
        (make_sparse_tensor_type_proto(TensorProto.FLOAT, (3,)), "sparse_tensor(FLOAT)", (3,)),
        (make_sequence_type_proto(FLOAT), "sequence(FLOAT)", None),
        (make_optional_type_proto(FLOAT), "optional(FLOAT)", None),
        (make_map_type_proto(TensorProto.INT64, FLOAT), "map(FLOAT)", None),
        (
            make_optional_type_proto(make_sequence_type_proto(FLOAT)),
            "optional(sequence(FLOAT))",
            None,
        ),
        (TypeProto(sequence_type=TypeProto.Sequence()), "sequence()", None),
        (TypeProto(opaque_type=TypeProto.Opaque()), "opaque()", None),
        (TypeProto(denotation="IMAGE"), "UNDEFINED", None),
        (TypeProto(tensor_type=TypeProto.Tensor()), "UNDEFINED", None),
    ],
)
def test_a_type_is_read(type_: TypeProto, dtype: str, dims: tuple[Dim, ...] | None):
    assert value(type_) == Value("x", dtype, dims)


@pytest.mark.parametrize("number", TensorProto.DataType.values())
def test_a_dtype_goes_by_the_name_that_onnx_gives_it(number: int):
    assert get_dtype_name(number) == TensorProto.DataType.Name(number)


def test_an_opaque_type_may_have_a_domain():
    opaque = TypeProto(opaque_type=TypeProto.Opaque(domain="ai.example", name="Tokenizer"))
    assert value(opaque).dtype.startswith("opaque")


def test_a_value_may_have_no_type_and_no_name():
    assert value_of(b"") == Value("", "UNDEFINED", None)


@pytest.mark.parametrize(
    ("dims", "expected"),
    [
        ([field(1, 7)], (7,)),
        ([field(1, (1 << 64) - 1)], (-1,)),
        ([field(2, "batch")], ("batch",)),
        ([field(2, "")], ("",)),
        ([b"", field(3, "a denotation")], (None, None)),
        ([field(1, 7) + field(2, "batch")], ("batch",)),
        ([field(2, "batch") + field(3, "") + field(1, 7)], (7,)),
        ([field(1, 7) + field(1, 8)], (8,)),
        ([field(9, "unknown") + field(1, 7)], (7,)),
        ([field(1, "a size is no text") + field(2, 5)], (None,)),
    ],
)
def test_in_a_dimension_the_last_word_counts(dims: list[bytes], expected: tuple[Dim, ...]):
    assert shape(*dims) == expected


def test_of_a_string_given_twice_the_last_counts():
    assert value_of(field(1, "past") + field(2, b"") + field(1, "present")).name == "present"


def test_a_field_of_another_wire_type_is_unknown_and_not_the_name():
    assert value_of(field(1, "x") + field(1, 5) + field(2, 5)) == Value("x", "UNDEFINED", None)
    with pytest.raises(ModelError, match="no graph"):
        read_signature(ByteSource.from_bytes(field(7, 5)))


TENSOR = field(1, field(1, 1))
TWICE = {
    "graph": field(7, b"") * 2,
    "type": field(7, field(11, field(2, TENSOR) * 2)),
    "kind of type": field(7, field(11, field(2, TENSOR * 2))),
    "kind of type, another": field(7, field(11, field(2, TENSOR + field(4, b"")))),
    "shape": field(7, field(11, field(2, field(1, field(2, b"") * 2)))),
    "element type": field(7, field(12, field(2, field(4, field(1, TENSOR) * 2)))),
}


@pytest.mark.parametrize("what", TWICE)
def test_a_message_that_parsers_would_merge_is_refused(what: str):
    onnx.ModelProto.FromString(TWICE[what])
    with pytest.raises(ModelError, match=f"a second {what.split(',')[0]} at byte"):
        read_signature(ByteSource.from_bytes(TWICE[what]))


# Who wrote it


def origin(*raw: bytes) -> ExportInfo:
    return read_export_info(ByteSource.from_bytes(b"".join(raw)))


def test_an_export_says_who_wrote_it_and_for_what():
    model = decoder()
    model.producer_name, model.producer_version = "pytorch", "2.13.0"
    opsets = (("", 18), ("local", 1))
    assert origin(model.SerializeToString()) == ExportInfo(10, "pytorch", "2.13.0", opsets)
    assert origin(written(model, backwards=True)) == ExportInfo(
        10, "pytorch", "2.13.0", opsets[::-1]
    )


def test_what_an_export_does_not_say_is_nothing():
    assert origin() == origin(field(7, b"")) == ExportInfo(0, "", "", ())
    assert origin(field(8, b"")).opsets == (("", 0),)


def test_of_an_origin_given_twice_the_last_counts_and_numbers_have_64_bits():
    twice = field(1, 7) + field(1, 1 << 40) + field(2, "a") + field(2, "b")
    opset = field(8, field(2, 17) + field(2, (1 << 64) - 1) + field(1, "x") + field(1, ""))
    assert origin(twice, opset) == ExportInfo(1 << 40, "b", "", (("", -1),))


def test_an_origin_of_another_wire_type_is_none():
    wrong = field(1, "8") + field(2, 5) + field(3, 5) + field(8, 17)
    assert origin(wrong) == ExportInfo(0, "", "", ())


def test_a_producer_that_is_no_text_survives():
    raw = field(2, b"\xff")
    assert origin(raw).producer.encode("utf-8", "surrogateescape") == b"\xff"


def test_the_graph_is_stepped_over():
    weights = 1 << 20
    raw = field(1, 8) + field(7, field(5, field(9, bytes(weights)))) + field(8, field(2, 17))
    asked = []

    def read(offset: int, size: int) -> bytes:
        asked.append(size)
        return raw[offset : offset + size]

    assert read_export_info(ByteSource(read, len(raw))) == ExportInfo(8, "", "", (("", 17),))
    assert sum(asked) < weights // 4


def test_a_damaged_origin_is_refused():
    with pytest.raises(ModelError):
        origin(field(1, 8), b"\x42\x05")


@pytest.mark.parametrize("raw", [b"", field(1, 8), field(2, "pytorch"), b"\x3a" * 3])
def test_what_has_no_graph_is_no_model(raw: bytes):
    with pytest.raises(ModelError):
        read_signature(ByteSource.from_bytes(raw))


# External data


def external(*entries: tuple[str, str], dims: tuple[int, ...] = (4, 2), name: str = "w", **more):
    """A tensor whose data lie in a file."""
    told = TensorProto(name=name, dims=dims, data_type=more.get("data_type", TensorProto.FLOAT))
    told.data_location = TensorProto.EXTERNAL
    for key, text in entries:
        told.external_data.add(key=key, value=text)
    return told


def references(model: onnx.ModelProto) -> tuple[ExternalReference, ...]:
    return find_occurrences(
        ByteSource.from_bytes(model.SerializeToString()), ["past_key.0"]
    ).references


def reference(*entries: tuple[str, str], **tensor) -> ExternalReference:
    model = decoder()
    model.graph.initializer.append(external(("location", "w.bin"), *entries, **tensor))
    (found,) = references(model)
    return found


@pytest.mark.parametrize(
    ("entries", "end"),
    [
        ([], 32),
        ([("offset", "4096")], 4128),
        ([("length", "32")], 32),
        ([("offset", "7"), ("length", "40"), ("checksum", "?")], 47),
        ([("offset", "5"), ("offset", "6")], 38),
        ([("__class__", "x")], 32),
    ],
)
def test_external_data_end_where_offset_and_length_say(entries: list[tuple[str, str]], end: int):
    assert reference(*entries) == ExternalReference("w.bin", end, "w")


@pytest.mark.parametrize(
    ("data_type", "dims", "end"),
    [
        ("FLOAT16", (3, 5), 30),
        ("INT64", (3,), 24),
        ("BOOL", (3,), 3),
        ("COMPLEX128", (2,), 32),
        ("INT4", (3,), 2),
        ("UINT2", (5,), 2),
        ("FLOAT8E4M3FN", (6,), 6),
        ("FLOAT", (), 4),
        ("FLOAT", (5, 0), 0),
    ],
)
def test_without_a_length_the_dimensions_say_it(data_type: str, dims: tuple[int, ...], end: int):
    number = TensorProto.DataType.Value(data_type)
    assert reference(data_type=number, dims=dims).end_offset == end


@pytest.mark.parametrize(
    "text", ["-1", "+5", " 5", "1e3", "1_0", "0x10", "\u0661\u0662", "9" * 20, ""]
)
@pytest.mark.parametrize("key", ["offset", "length"])
def test_offset_and_length_are_plain_numbers(key: str, text: str):
    assert key in reference((key, text)).problem


@pytest.mark.parametrize(
    ("entries", "more", "problem"),
    [
        ([("location", "")], {}, "has no location"),
        ([], {"dims": (-1, 4)}, "has a negative dimension"),
        (
            [],
            {"dims": (1 << 62, 4)},
            "needs more than 9,223,372,036,854,775,807 bytes, by its dimensions",
        ),
        ([("offset", "+1")], {}, "has the offset '+1', which is not a plain number"),
        ([("length", "31")], {}, "has the length 31 but needs 32 bytes"),
    ],
)
def test_data_with_a_fault_end_nowhere(entries: list[tuple[str, str]], more, problem: str):
    found = reference(*entries, **more)
    assert (found.end_offset, found.tensor_name) == (0, "w")
    assert found.problem == problem


def test_six_bits_are_packed_too():
    float6e2m3 = 27  # onnx 1.22 has no name for it
    assert reference(data_type=float6e2m3, dims=(8,)).end_offset == 6


def test_a_length_must_hold_the_tensor():
    assert "needs 32 bytes" in reference(("length", "31")).problem


def test_a_negative_dimension_is_a_fault():
    assert "negative" in reference(dims=(-1, 4)).problem
    assert "negative" in reference(dims=(-1, -4)).problem


def test_data_without_a_location_are_a_fault():
    assert "no location" in reference(("location", "")).problem


def test_packed_dimensions_count_as_others_do():
    packed = field(1, varint(4) + varint(2)) + field(2, 1) + field(8, "w") + field(14, 1)
    raw = field(5, packed + field(13, field(1, "location") + field(2, "w.bin")))
    (found,) = find_occurrences(ByteSource.from_bytes(field(7, raw)), ["past_key.0"]).references
    assert found == ExternalReference("w.bin", 32, "w")


def find_external(tensor: bytes, *, in_indices: bool = False) -> tuple[ExternalReference, ...]:
    graph = field(15, field(2, tensor)) if in_indices else field(5, tensor)
    return find_occurrences(ByteSource.from_bytes(field(7, graph)), ["past_key.0"]).references


def test_an_entry_may_say_its_value_first():
    entry = field(13, field(2, "w.bin") + field(1, "location"))
    tensor = field(1, 4) + field(2, 1) + field(8, "w") + field(14, 1) + entry
    assert find_external(tensor) == (ExternalReference("w.bin", 16, "w"),)


def test_indices_of_a_sparse_tensor_may_be_external_too():
    entry = field(13, field(1, "location") + field(2, "w.bin"))
    tensor = field(1, 4) + field(2, 7) + field(14, 1) + entry
    assert find_external(tensor, in_indices=True) == (ExternalReference("w.bin", 32, ""),)


@pytest.mark.parametrize("is_packed", [True, False])
def test_a_tensor_has_256_dimensions_at_most(is_packed: bool):
    def find(count: int) -> tuple[ExternalReference, ...]:
        dims = field(1, varint(1) * count) if is_packed else field(1, 1) * count
        entry = field(13, field(1, "location") + field(2, "w.bin"))
        raw = field(5, dims + field(2, 1) + field(8, "w") + field(14, 1) + entry)
        return find_occurrences(ByteSource.from_bytes(field(7, raw)), ["past_key.0"]).references

    assert find(256) == (ExternalReference("w.bin", 4, "w"),)
    with pytest.raises(ModelError, match="has more than 256 dimensions in a tensor, at byte "):
        find(257)


def test_data_in_the_model_are_no_reference():
    model = decoder()
    inline = external(("location", "stale.bin"))
    inline.data_location = TensorProto.DEFAULT
    model.graph.initializer.append(inline)
    assert references(model) == ()
    raw = field(14, 1) + field(14, 0) + field(13, field(1, "location") + field(2, "w.bin"))
    assert (
        find_occurrences(ByteSource.from_bytes(field(7, field(5, raw))), ["past_key.0"]).references
        == ()
    )


@pytest.mark.parametrize("location", [field(14, 1) + field(14, 7), field(14, (1 << 32) + 1)])
def test_where_data_lie_is_read_as_protobuf_reads_it(location: bytes):
    raw = field(13, field(1, "location") + field(2, "../w.bin")) + location
    assert TensorProto.FromString(raw).data_location == TensorProto.EXTERNAL
    assert find_occurrences(
        ByteSource.from_bytes(field(7, field(5, raw))), ["past_key.0"]
    ).references


def test_dimensions_of_another_wire_type_are_unknown():
    raw = field(2, 1) + b"\x09" + varint(9) * 8 + field(14, 1)
    raw += field(13, field(1, "location") + field(2, "w.bin"))
    assert list(TensorProto.FromString(raw).dims) == []
    (found,) = find_occurrences(
        ByteSource.from_bytes(field(7, field(5, raw))), ["past_key.0"]
    ).references
    assert found.end_offset == 4


def test_packed_dimensions_that_are_cut_off_are_refused():
    raw = field(1, b"\x04\x82") + field(2, 1) + field(14, 1)
    raw = field(5, raw + field(13, field(1, "location") + field(2, "w.bin")))
    with pytest.raises(DecodeError):
        GraphProto.FromString(raw)
    with pytest.raises(ModelError):
        find_occurrences(ByteSource.from_bytes(field(7, raw)), ["past_key.0"])


def test_tensors_in_one_file_are_one_reference_up_to_the_last_of_them():
    model = decoder()
    for name, offset in (("first", "0"), ("last", "64"), ("middle", "32")):
        model.graph.initializer.append(
            external(("location", "w.bin"), ("offset", offset), name=name)
        )
    assert references(model) == (ExternalReference("w.bin", 96, "last"),)


def test_a_faulty_reference_does_not_hide_behind_a_good_one():
    model = decoder()
    for name, offset in (("good", "0"), ("faulty", "-1"), ("other", "64")):
        model.graph.initializer.append(
            external(("location", "w.bin"), ("offset", offset), name=name)
        )
    assert [reference.tensor_name for reference in references(model)] == ["other", "faulty"]


def test_external_data_are_found_wherever_a_tensor_is():
    def away(name: str) -> TensorProto:
        return external(("location", f"{name}.bin"), name=name)

    def constant(name: str, **attribute) -> onnx.NodeProto:
        return node("Constant", [], [name], name=name, **attribute)

    inner = graph(constant("c", value=away("in_subgraph")))
    inner.initializer.append(away("subgraph_initializer"))
    body = [constant("y", value=away("in_function"))]
    function = make_function("local", "F", [], ["y"], body, [make_opsetid("", 18)])
    model = decoder(
        constant("a", value=away("in_attribute")),
        constant("b", tensors=[away("in_a_list")]),
        node("If", ["flag"], ["chosen"], then_branch=inner, else_branch=inner),
        functions=(function,),
    )
    model.graph.initializer.append(away("initializer"))
    sparse = make_sparse_tensor(away("sparse_values"), away("sparse_indices"), (4,))
    model.graph.sparse_initializer.append(sparse)
    found = node("Constant", [], ["s"])
    found.attribute.add(name="sparse_value", type=onnx.AttributeProto.SPARSE_TENSOR)
    found.attribute[0].sparse_tensor.values.CopyFrom(away("in_sparse_attribute"))
    model.graph.node.append(found)
    model.training_info.add().algorithm.initializer.append(away("in_training"))
    assert {reference.tensor_name for reference in references(model)} == {
        *("in_attribute", "in_a_list", "in_subgraph", "subgraph_initializer", "in_function"),
        *("initializer", "sparse_values", "sparse_indices", "in_sparse_attribute", "in_training"),
    }


def test_a_value_info_of_a_sequence_can_be_read_with_its_symbols():
    nested = make_sequence_type_proto(make_tensor_type_proto(TensorProto.FLOAT, ("Addx_dim_1", 2)))
    raw = make_value_info("x", nested).SerializeToString()
    source = ByteSource.from_bytes(field(7, field(11, raw)))
    survey = find_occurrences(source, ["past_key.0"])
    assert [name for name, _ in survey.symbols] == ["Addx_dim_1"]


@pytest.mark.parametrize("form", FORMS.values(), ids=list(FORMS))
def test_nodes_of_the_main_graph_are_counted_in_any_form_of_the_file(form: object) -> None:
    function = make_function("local", "F", ["a"], ["b"], [node("Neg", ["a"], ["b"])], [])
    inner = graph(node("Neg", ["x"], ["a"]), node("Neg", ["a"], ["b"]))
    large = node("Constant", [], ["c"], value=tensor("w", *[1.0] * 300))
    model = decoder(branch(inner), large, functions=(function,))
    source = ByteSource.from_bytes(form(model))  # type: ignore[operator]
    assert count_nodes(source) == 5 == len(model.graph.node)
    assert read_function_names(source) == ("F",)


def test_nodes_of_what_is_no_model_are_not_counted() -> None:
    for data in (b"\x12\x02a", field(7, b"\x0a\xff\x7f")):
        with pytest.raises(ModelError):
            count_nodes(ByteSource.from_bytes(data))
