from __future__ import annotations

from contextlib import suppress

import onnx.helper
import onnx.parser
import pytest
from models import CLOSE, OPEN, field, read_graph_of, varint
from onnx import ModelProto

from onnxkvrename import ModelError
from onnxkvrename.model.protobuf import ByteSource
from onnxkvrename.verification.graph_bodies import (
    Body,
    OperandSelector,
    UntraceableError,
    read_graph,
    sort_operations,
)


def build_model(nodes: str, functions: str = "") -> ModelProto:
    """A model of these nodes, in ONNX text; its inputs are ``x`` and ``c``, its weight ``w``."""
    return onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 18, "local": 1]>
        main (float x, bool c) => (float y) <float w = {{1.0}}> {{ {nodes} }} {functions}"""
    )


def build_main_body(nodes: str) -> Body:
    return read_graph_of(build_model(nodes)).main


def select_all_operands(_: object, operands: int) -> range:
    return range(operands)


def list_sorted_outputs(
    body: Body, *names: str, select_operands: OperandSelector = select_all_operands
) -> list[str]:
    """Return the outputs of the nodes that some values depend on, in their order."""
    return [
        " ".join(operation.outputs) for operation in sort_operations(body, names, select_operands)
    ]


def test_only_the_nodes_behind_a_value_are_given() -> None:
    body = build_main_body("a = Neg(x) b = Neg(a) d = Abs(x) y = Add(b, x)")
    assert list_sorted_outputs(body, "y") == ["a", "b", "y"]
    assert list_sorted_outputs(body, "d", "a") == ["a", "d"]
    assert list_sorted_outputs(body, "x", "nowhere") == []


def test_an_operand_that_leads_nowhere_is_not_followed() -> None:
    body = build_main_body("a = Neg(x) b = Neg(x) y = Add(a, b)")
    first = lambda function, _: {("", "Add", ""): [1]}.get(function, [0])  # noqa: E731
    assert list_sorted_outputs(body, "y", select_operands=first) == ["b", "y"]


def test_nodes_come_behind_those_they_read_whatever_the_order_of_the_file() -> None:
    assert list_sorted_outputs(build_main_body("y = Neg(b) b = Neg(a) a = Neg(x)"), "y") == [
        "a",
        "b",
        "y",
    ]


IF = """y = If (c) <
    then_branch = one () => (float t) { t = Add(a, w) },
    else_branch = two () => (float e) { x = Neg(a) e = Add(x, b) }
>"""


def test_what_a_subgraph_sees_of_the_values_around_it() -> None:
    body = build_main_body(f"a = Neg(x) b = Abs(x) d = Neg(x) {IF}")
    then, other = body.get_subgraphs(3).values()
    assert then.captured_names == ("a", "w")
    assert other.captured_names == ("a", "b")
    assert list_sorted_outputs(body, "y") == ["a", "b", "y"]


def test_an_outer_value_that_a_subgraph_hands_on_is_seen_too() -> None:
    model = build_model(f"a = Neg(x) b = Neg(x) {IF}")
    model.graph.node[2].attribute[0].g.output[0].name = "b"
    assert "b" in read_graph_of(model).main.get_subgraphs(2)["then_branch"].captured_names


@pytest.mark.parametrize(
    ("nodes", "why"),
    [
        ("a = Add(x, b) b = Neg(a) y = Neg(b)", "in a circle"),
        ("y = Neg(x) y = Abs(x)", "make y"),
    ],
)
def test_nodes_without_an_order_cannot_be_read(nodes: str, why: str) -> None:
    with pytest.raises(UntraceableError, match=why):
        list_sorted_outputs(build_main_body(nodes), "y")


WEIGHT = onnx.helper.make_tensor("w", onnx.TensorProto.FLOAT, [2000], [1.0] * 2000)
LARGE = {
    "weight": onnx.helper.make_node("Constant", [], ["a"], value=WEIGHT),
    "text": onnx.helper.make_node("Neg", ["x"], ["a"], text="t" * 5000),
    "name": onnx.helper.make_node("Neg", ["x" * 300], ["a"], name="n" * 300, axis=1),
    "subgraph": onnx.helper.make_node(
        "Loop", ["x"], ["a"], body=onnx.helper.make_graph([], "b", [], [], [WEIGHT]), k=1
    ),
}


@pytest.mark.parametrize("node", LARGE.values(), ids=LARGE)
def test_a_large_node_is_read_without_its_weights(node: onnx.NodeProto) -> None:
    model = build_model("y = Neg(x)")
    model.graph.node.append(node)
    model.graph.initializer.append(WEIGHT)
    body = read_graph_of(model).main
    operation = body.get_operation(body.producers["a"])
    assert operation.inputs == tuple(node.input)
    assert (operation.op_type, operation.name) == (node.op_type, node.name)
    assert [each.name for each in operation.list_attributes()] == [a.name for a in node.attribute]
    assert sum(map(len, operation.attribute_bytes)) < 300
    assert body.constants["w"] is None
    assert [each.inputs for each in body.get_subgraphs(operation.number).values()] == (
        [()] if node.op_type == "Loop" else []
    )


def test_graphs_in_each_other_come_to_an_end() -> None:
    """Bytes that protobuf's parsers refuse, as they nest messages more than 100 deep."""
    data = b""
    for _ in range(40):
        data = field(1, field(2, "a") + field(5, field(20, 5) + field(6, data)))
    body = read_graph(ByteSource.from_bytes(field(7, data) + field(8, b""))).main

    def follow(body: Body) -> None:
        follow(body.get_subgraphs(0)[""])

    with pytest.raises(ModelError, match="in each other"):
        follow(body)


@pytest.mark.parametrize("end", [*range(1, 40)])
def test_a_node_that_is_cut_short_is_refused_or_has_fewer_fields(end: int) -> None:
    node = onnx.helper.make_node("Slice", ["x"], ["y"], name="n" * 10, axis=1).SerializeToString()
    data = field(7, field(1, node[:end])) + field(8, b"")
    with suppress(ModelError):
        operation = read_graph(ByteSource.from_bytes(data)).main.get_operation(0)
        assert onnx.NodeProto.FromString(node[:end]).op_type == operation.op_type


# Bytes that protobuf does not write, and a parser may understand differently from what they seem.

LONG = "n" * 1100


def fixed64(number: int, text: str) -> bytes:
    """A field of eight bytes, where a text belongs: for a parser, one that it does not know."""
    return varint(number << 3 | 1) + text.encode().ljust(8)[:8]


def tensor_of(*ints: int) -> bytes:
    return (
        field(1, len(ints))
        + field(2, 7)
        + field(9, b"".join(n.to_bytes(8, "little") for n in ints))
    )


@pytest.mark.parametrize(
    "node",
    {
        "another operator": field(2, "y") + field(4, "Neg") + fixed64(4, "Identity"),
        "another operand": field(1, "x") + fixed64(1, "operand2") + field(2, "y") + field(4, "Neg"),
        "another output": field(2, "y") + fixed64(2, "output_2") + field(4, "Neg"),
        "a long operand": field(1, LONG) + field(1, "x") + field(2, "y") + field(4, "F"),
        "a long output": field(1, "x") + field(2, LONG) + field(2, "y") + field(4, "F"),
        "an unknown group": field(2, "y") + OPEN + field(4, "Abs") + CLOSE + field(4, "Neg"),
        "an overlong tag": field(2, "y") + b"\xa2\x00\x03Neg",
        "an overlong length": field(2, "y") + field(4, "Neg", width=3),
        "two values of one attribute": field(2, "y")
        + field(4, "Constant")
        + field(
            5,
            field(1, "value")
            + field(20, 4)
            + field(5, tensor_of(1, 2)[:2])
            + field(5, tensor_of(1, 2)[2:]),
        ),
        "a value of another type": field(2, "y")
        + field(4, "Constant")
        + field(5, field(1, "value_ints") + field(8, 3) + field(20, 2)),
        "a value of another wire type": field(2, "y")
        + field(4, "Constant")
        + field(5, field(1, "value_ints") + field(8, 3) + fixed64(8, "12345678") + field(20, 7)),
        "a value without a type": field(2, "y")
        + field(4, "Constant")
        + field(5, field(1, "value_ints") + field(8, 3)),
    }.items(),
    ids=lambda case: case[0],
)
def test_a_node_is_what_onnx_makes_of_its_bytes(node: tuple[str, bytes]) -> None:
    data = field(7, field(1, node[1]))
    model = ModelProto.FromString(data)
    model.DiscardUnknownFields()
    assert describe(data) == describe(model.SerializeToString())


def describe(data: bytes) -> object:
    (operation,) = read_graph(ByteSource.from_bytes(data)).main.list_operations()
    attributes = [
        (each.name, each.integers, each.get_bytes(5)) for each in operation.list_attributes()
    ]
    return operation._replace(attribute_bytes=()), attributes


@pytest.mark.parametrize(
    "values",
    [field(8, b"\x80") + field(20, 7), field(7, b"\0" * 5) + field(20, 6)],
    ids=["integers", "floats"],
)
def test_a_packed_list_that_is_not_whole_is_an_error(values: bytes) -> None:
    node = field(2, "y") + field(4, "Constant") + field(5, field(1, "value") + values)
    with pytest.raises(ModelError, match="onnx"):
        describe(field(7, field(1, node)))


@pytest.mark.parametrize(
    "damage",
    [
        b"\xa2\x80\x80\x80\x80\x00\x03Neg",
        b"\x00",
        b"\x22\x90\x80\x80\x80\x80\x80\x80\x80\x80\x80\x00",
    ],
    ids=["a tag of six bytes", "field 0", "a length of eleven bytes"],
)
def test_a_node_that_onnx_cannot_parse_is_an_error(damage: bytes) -> None:
    with pytest.raises(ModelError, match="onnx"):
        read_graph(ByteSource.from_bytes(field(7, field(1, field(2, "y") + damage))))


def test_a_long_list_of_one_attribute_is_left_out_and_not_cut() -> None:
    ints = b"".join(field(8, 1) for _ in range(100_000))
    node = field(2, "y") + field(4, "Constant")
    node += field(5, field(1, "value_ints") + ints + field(20, 7) + field(8, 5))
    (operation,) = read_graph(
        ByteSource.from_bytes(field(7, field(1, node)))
    ).main.list_operations()
    assert [each.integers for each in operation.list_attributes()] == [()]


def test_no_name_is_left_out_of_a_large_node() -> None:
    node = field(1, LONG) + field(1, "x") + field(2, LONG + "2") + field(2, "y") + field(4, LONG)
    (operation,) = read_graph(
        ByteSource.from_bytes(field(7, field(1, node + field(6, LONG))))
    ).main.list_operations()
    assert operation.inputs == (LONG, "x")
    assert operation.outputs == (LONG + "2", "y")
    assert operation.op_type == LONG
