from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from models import decoder, field, info, node

from onnxkvrename import ModelError
from onnxkvrename.limits import MAX_ENTRIES
from onnxkvrename.model.protobuf import ByteSource
from onnxkvrename.verification.graph_bodies import Body, read_graph
from onnxkvrename.verification.strip_weights import (
    BYTES_PER_PART,
    has_too_many_parts,
    read_model_without_weights,
)

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
COUNT = 6 * MAX_ENTRIES
GRAPH, NODE, INITIALIZER, VALUE_INFO, ATTRIBUTE, SUBGRAPH = 7, 1, 5, 13, 5, 11
EMPTY = {
    "nodes": field(NODE, b"") * COUNT,
    "nodes in nodes": field(NODE, field(ATTRIBUTE, field(SUBGRAPH, field(NODE, b"") * COUNT))),
    "attributes": field(NODE, field(ATTRIBUTE, b"") * COUNT),
    "attributes, a few in each node": field(NODE, field(ATTRIBUTE, b"") * 100) * (COUNT // 100),
    "subgraphs": field(NODE, field(ATTRIBUTE, field(SUBGRAPH, b"") * COUNT)),
    "initializers": field(INITIALIZER, b"") * COUNT,
    "value_info": field(VALUE_INFO, b"") * COUNT * 4,
}


@pytest.mark.parametrize("records", EMPTY.values(), ids=EMPTY)
def test_records_that_would_cost_far_more_than_their_bytes_are_refused(records: bytes) -> None:
    data = field(GRAPH, records)
    with pytest.raises(ModelError, match="65,536 parts"):
        read_model_without_weights(ByteSource.from_bytes(data))


def test_they_are_refused_before_the_file_is_read_to_its_end() -> None:
    data, ends = field(GRAPH, EMPTY["nodes"]), []

    def read(offset: int, size: int) -> bytes:
        ends.append(offset + size)
        return data[offset : offset + size]

    with pytest.raises(ModelError):
        read_model_without_weights(ByteSource(read, len(data)))
    assert max(ends) < len(data)


@pytest.mark.parametrize("kind", ["nodes", "nodes in nodes", "initializers", "attributes"])
def test_a_graph_of_too_many_parts_is_not_read_node_by_node(kind: str) -> None:
    def list_graphs(body: Body) -> None:
        for number in range(body.size):
            for subgraph in body.get_subgraphs(number).values():
                list_graphs(subgraph)

    data = field(GRAPH, EMPTY[kind]) + field(8, b"")
    with pytest.raises(ModelError, match=r"more than .* parts of a "):
        list_graphs(read_graph(ByteSource.from_bytes(data)).main)


def test_what_exporters_write_stays_far_below_the_limit() -> None:
    for path in FIXTURES.rglob("*.onnx"):
        model = onnx.load(path, load_external_data=False).SerializeToString()
        assert not has_too_many_parts(model)
    model = decoder(*(node("Neg", ["x"], [f"output_{i}"]) for i in range(2 * MAX_ENTRIES)))
    model.graph.value_info.extend(info(f"output_{i}", 1, "seq_len", 64) for i in range(MAX_ENTRIES))
    data = model.SerializeToString()
    assert len(data) > MAX_ENTRIES * BYTES_PER_PART
    assert not has_too_many_parts(data)
    assert read_model_without_weights(ByteSource.from_bytes(data)) == model


def test_a_large_graph_with_numbers_for_names_stays_below_the_limit() -> None:
    nodes = (
        field(
            NODE, field(1, str(i)) + field(1, str(i + 1)) + field(2, str(i + 2)) + field(4, "Add")
        )
        for i in range(10_000, 30_000)
    )
    data = field(GRAPH, b"".join(nodes))
    assert not has_too_many_parts(data)
    assert len(read_model_without_weights(ByteSource.from_bytes(data)).graph.node) == 20_000


def test_short_names_with_a_type_for_each_stay_below_the_limit() -> None:
    model = decoder(*(node("Add", [f"a{i}", "x"], [f"a{i + 1}"]) for i in range(60_000)))
    model.graph.value_info.extend(info(f"a{i}", 1, "s", 64, 8) for i in range(60_000))
    assert not has_too_many_parts(model.SerializeToString())


def test_large_weights_and_texts_count_little() -> None:
    tokens = [f"token {i}".encode() for i in range(COUNT)]
    model = decoder(node("Labels", ["x"], ["y"], domain="local", keys=tokens))
    read_model_without_weights(ByteSource.from_bytes(model.SerializeToString()))


@pytest.mark.parametrize("end", range(1, 40))
def test_what_is_cut_short_is_left_to_the_parser(end: int) -> None:
    assert not has_too_many_parts(decoder().SerializeToString()[:end])
