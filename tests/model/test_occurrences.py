"""Every place where a name stands, whose name it is there, and what the graph does with it."""

from __future__ import annotations

import onnx.helper
import pytest
from hypothesis import given
from hypothesis import strategies as st
from models import KEY, KEY_OUT, VALUE, branch, decoder, field, graph, info, node, sparse, tensor
from onnx import GraphProto, ModelProto, TensorProto

from onnxkvrename.errors import ModelError
from onnxkvrename.model.file import splice_payloads
from onnxkvrename.model.occurrences import Occurrences, find_occurrences
from onnxkvrename.model.protobuf import ByteSource, Span

NEW = f"{KEY}_VLLM"


def survey(model: ModelProto | bytes, *names: str) -> Occurrences:
    raw = model if isinstance(model, bytes) else model.SerializeToString()
    return find_occurrences(ByteSource.from_bytes(raw), names or (KEY,))


def found(survey: Occurrences) -> set[tuple[str, str, int]]:
    return {(place.name, place.role, place.scope) for place in survey.occurrences}


def seen(model: ModelProto | bytes, *names: str) -> list[tuple[str, int]]:
    return [(place.role, place.scope) for place in survey(model, *names).in_main_graph]


def exchanged(model: ModelProto, names: dict[str, str]) -> ModelProto:
    """The model with names exchanged all at once."""
    raw = model.SerializeToString()
    source = ByteSource.from_bytes(raw)
    pieces = splice_payloads(source, find_occurrences(source, names).build_edits(names, {}))
    return ModelProto.FromString(
        b"".join(raw[p.offset :][: p.size] if isinstance(p, Span) else p for p in pieces)
    )


def everywhere(name: str) -> ModelProto:
    """A main graph that has the name in every place there is."""
    reader = node("Identity", [name], [f"{name}_copy"], name=name, doc_string=name)
    reader.device_configurations.add().sharding_spec.add(tensor_name=name)
    main = onnx.helper.make_graph(
        [reader, node("Constant", [], [name], value_string=name)],
        name,
        [info(name)],
        [info(name)],
        initializer=[tensor(name, 1.0)],
        value_info=[info(name)],
        doc_string=name,
    )
    main.sparse_initializer.append(sparse(name))
    main.sparse_initializer[0].indices.name = name
    annotation = main.quantization_annotation.add(tensor_name=name)
    annotation.quant_parameter_tensor_names.add(key=name, value=name)
    model = onnx.helper.make_model(main, producer_name=name)
    model.training_info.add().update_binding.add(key=name, value=name)
    return model


def test_a_name_is_found_in_every_place_and_means_something_there():
    roles = ["reads", "produces", "input", "output", "value_info", "initializer", "initializer"]
    roles += ["annotation", "annotation", "sharding", "binding", "binding"]
    found = survey(everywhere(KEY)).occurrences
    assert sorted(place.role for place in found) == sorted(roles)
    assert {place.scope for place in found} == {0}
    assert {place.op_type for place in found} == {"", "Identity", "Constant"}


def test_only_whole_names_are_found():
    for other in ("past_key.1", f"{KEY}0", f"x{KEY}", KEY.upper(), f"{KEY} "):
        assert survey(everywhere(other)).occurrences == ()


def test_what_is_called_like_a_buffer_in_a_function_is_not_one():
    inner = branch(graph(node("Identity", [KEY], [f"{KEY}_copy"])))
    body = [node("Add", [KEY, KEY], [KEY_OUT]), inner]
    function = onnx.helper.make_function(
        "local", "Layer", [KEY], [KEY_OUT], body, [onnx.helper.make_opsetid("", 18)]
    )
    function.value_info.append(info(KEY))
    with_function = decoder(functions=(function,))
    assert found(survey(with_function, KEY, KEY_OUT)) == found(survey(decoder(), KEY, KEY_OUT))


def test_in_functions_names_are_found_by_a_text_in_them_and_belong_to_the_function():
    own = graph(node("Identity", [KEY], ["past_key.7"]), node("Neg", ["past_key.7"], ["y"]))
    body = [node("Add", [KEY, "x"], [KEY_OUT], name=KEY), branch(own)]
    opsets = [onnx.helper.make_opsetid("", 18)]
    function = onnx.helper.make_function("local", "Layer", [KEY, "x"], [KEY_OUT], body, opsets)
    function.value_info.append(info(KEY, f"Add{KEY_OUT}_dim_2"))
    source = ByteSource.from_bytes(decoder(functions=(function, function)).SerializeToString())
    occurrences = find_occurrences(source, (VALUE,), ["past_key"])
    assert {item.name for item in occurrences.occurrences} == {VALUE}
    for inside in occurrences.functions:
        assert [(item.name, item.role) for item in inside.in_main_graph] == [
            *((KEY, "input"), (KEY_OUT, "output"), (KEY, "reads"), (KEY_OUT, "produces")),
            *((KEY, "reads"), (KEY, "value_info")),
        ]
    assert len(occurrences.functions) == 2
    assert occurrences.names_in_functions == {KEY, KEY_OUT}
    assert occurrences.build_name_uses({}).symbols == frozenset()


def test_names_that_are_not_utf8_are_found():
    raw = field(7, field(1, field(1, b"past_\xff.0") + field(2, "y")))
    (place,) = survey(raw, b"past_\xff.0".decode("utf-8", "surrogateescape")).occurrences
    assert place.role == "reads"


def test_no_name_at_all_is_not_found():
    raw = field(7, field(11, field(1, b"")) + field(1, field(1, b"") + field(2, b"")))
    assert survey(raw, "").occurrences == ()


def test_of_a_name_given_twice_the_last_is_the_place():
    raw = field(
        7, field(11, field(1, KEY) + field(1, NEW)) + field(5, field(8, NEW) + field(8, "w"))
    )
    assert found(survey(raw, KEY, NEW)) == {(NEW, "input", 0)}


@pytest.mark.parametrize(
    "twice",
    [
        field(7, field(11, field(1, KEY) + field(2, b"") * 2)),
        field(7, field(1, field(5, field(1, KEY) + field(6, b"") * 2))),
        field(7, field(15, field(1, field(8, KEY)) * 2)),
        field(7, b"") + field(20, field(1, b"") * 2),
        field(7, b"") + field(20, field(2, b"") * 2),
    ],
    ids=["type", "subgraph", "sparse values", "initialization", "algorithm"],
)
def test_a_message_that_parsers_would_merge_is_refused(twice: bytes):
    ModelProto.FromString(twice)
    with pytest.raises(ModelError, match="a second "):
        survey(twice)


# Scopes


def defining(how: str) -> GraphProto:
    """The body of an If that has a ``past_key.0`` of its own."""
    body = graph(branch(graph(node("Identity", [KEY], ["deep"])), "middle"))
    if how == "input":
        body.input.append(info(KEY))
    elif how == "initializer":
        body.initializer.append(tensor(KEY, 1.0))
    elif how == "sparse initializer":
        body.sparse_initializer.append(sparse(KEY))
    else:
        body.node.insert(0, node("Constant", [], [KEY], value_float=1.0))
    return body


@pytest.mark.parametrize("how", ["input", "initializer", "sparse initializer", "node"])
def test_a_graph_that_defines_the_name_hides_the_outer_one_from_all_below(how: str):
    outside = node("Identity", [KEY], ["after"])
    model = decoder(branch(defining(how)), outside)
    assert seen(model) == seen(decoder(outside))
    assert len(survey(model).occurrences) >= len(seen(model)) + 2


@pytest.mark.parametrize("role", ["value_info", "output", "reads"])
def test_a_graph_that_only_speaks_of_the_name_means_the_outer_one(role: str):
    body = graph(node("Identity", ["x"], ["y"]))
    if role == "value_info":
        body.value_info.append(info(KEY))
    elif role == "output":
        body.output.append(info(KEY))
    else:
        body.node.append(node("Identity", [KEY], ["z"]))
    assert [role for role, scope in seen(decoder(branch(body))) if scope > 0] == [role]


def test_scopes_beside_each_other_do_not_hide_names():
    shadow = graph(node("Constant", [], [KEY], value_float=1.0))
    reading = graph(node("Identity", [KEY], ["y"]))
    model = decoder(node("If", ["flag"], ["c"], then_branch=shadow, else_branch=reading))
    assert [role for role, scope in seen(model) if scope > 0] == ["reads"]


def test_graphs_in_a_list_are_scopes_too():
    listed = node("Many", ["x"], ["y"], domain="local")
    bodies = [graph(node("Identity", [name], ["z"])) for name in (KEY, VALUE)]
    listed.attribute.append(onnx.helper.make_attribute("bodies", bodies))
    inner = {item for item in found(survey(decoder(listed), KEY, VALUE)) if item[2] > 0}
    assert inner == {(KEY, "reads", 1), (VALUE, "reads", 2)}


def test_training_graphs_see_the_main_graph_and_bindings_what_they_bind():
    model = decoder()
    training = model.training_info.add()
    training.algorithm.CopyFrom(graph(node("Identity", [KEY], ["step"])))
    training.update_binding.add(key=KEY, value="step")
    training.initialization.CopyFrom(graph(node("Constant", [], [KEY], value_float=1.0)))
    training.initialization_binding.add(key=KEY, value=KEY)
    assert seen(model) == [
        *seen(decoder()),
        ("reads", 2),
        ("binding", 2),
        ("binding", 2),
    ]


def test_bindings_of_an_update_name_what_the_algorithm_defines():
    model = decoder()
    training = model.training_info.add()
    training.algorithm.CopyFrom(graph(node("Relu", ["x"], [KEY])))
    training.update_binding.add(key="weights", value=KEY)
    training.initialization_binding.add(key=KEY, value="zero")
    assert seen(model) == seen(decoder())


# What the graph does with a name


def test_a_producer_is_a_node_of_the_main_graph():
    body = graph(node("Relu", ["x"], [VALUE]))
    told = survey(decoder(branch(body)), KEY_OUT, VALUE).build_name_uses({})
    assert told.producer_op_types == {KEY_OUT: "Add"}


@pytest.mark.parametrize(
    "body",
    [graph(node("Identity", [VALUE], ["y"])), graph(node("Relu", ["x"], ["y"]), outputs=(VALUE,))],
    ids=["by a node", "as an output"],
)
def test_what_a_subgraph_captures_is_read(body: GraphProto):
    model = decoder(branch(body))
    for reader in model.graph.node[:3]:
        reader.input[:] = ["x", "x"]
    assert survey(model, KEY, VALUE).build_name_uses({}).read_names == {VALUE}


def test_a_graph_output_or_a_shadowed_name_is_not_read():
    body = graph(node("Constant", [], [KEY_OUT]), node("Identity", [KEY_OUT], ["y"]))
    model = decoder(branch(body))
    model.graph.node[2].input[:] = ["x", "x"]
    assert survey(model, KEY_OUT).build_name_uses({}).read_names == frozenset()


@pytest.mark.parametrize(
    ("model", "where"),
    [
        (decoder(node("Relu", ["x"], [NEW])), "an output of a Relu node"),
        (decoder(node("Relu", [NEW], ["y"])), "an input of a Relu node"),
        (decoder(branch(graph(node("Relu", [NEW], ["y"])))), "an input of a Relu node in a subg"),
        (everywhere(NEW), "a name in binding"),
    ],
)
def test_a_new_name_that_stands_somewhere_is_taken(model: ModelProto, where: str):
    told = survey(model, KEY, NEW).build_name_uses({KEY: NEW})
    assert list(told.taken_names) == [NEW]
    assert told.taken_names[NEW].startswith(where)


def test_a_subgraph_may_define_a_new_name_that_it_does_not_see():
    body = graph(node("Relu", ["x"], [f"{KEY}_T"]))
    uses = survey(decoder(branch(body)), KEY, f"{KEY}_T").build_name_uses({KEY: f"{KEY}_T"})
    assert (uses.taken_names, list(uses.hidden_names)) == ({}, [f"{KEY}_T"])

    # onnxruntime may put a later node before this one
    first = decoder()
    first.graph.node.insert(0, branch(graph(node("Relu", ["x"], [NEW]))))
    uses = survey(first, KEY_OUT, NEW).build_name_uses({KEY_OUT: NEW})
    assert (uses.taken_names, list(uses.hidden_names)) == ({}, [NEW])

    choice = node("If", ["flag"], [KEY_OUT], then_branch=graph(node("Relu", ["x"], [NEW])))
    model = decoder()
    model.graph.node[0].CopyFrom(choice)
    uses = survey(model, KEY_OUT, NEW).build_name_uses({KEY_OUT: NEW})
    assert (uses.taken_names, uses.hidden_names) == ({}, {})


def test_a_subgraph_that_would_capture_a_new_name_has_taken_it():
    inner = branch(graph(node("Relu", [KEY], ["y"])), "inner")
    body = graph(node("Relu", ["x"], [f"{KEY}_T"]), inner)
    uses = survey(decoder(branch(body)), KEY, f"{KEY}_T").build_name_uses({KEY: f"{KEY}_T"})
    assert uses.taken_names == {f"{KEY}_T": "an output of a Relu node in a subgraph"}


def test_a_name_that_moves_away_is_not_taken():
    assert survey(decoder(), KEY, VALUE).build_name_uses({KEY: VALUE, VALUE: KEY}).taken_names == {}


def test_symbols_come_from_inputs_outputs_and_what_has_to_do_with_a_name():
    model = decoder()
    model.graph.input[0].CopyFrom(info("x", "in_dim_0", "batch"))
    model.graph.output[0].CopyFrom(info("logits", "out_dim_1"))
    model.graph.value_info.append(info(KEY, "named_dim_2"))
    model.graph.value_info.append(info("a", f"Add{KEY}_dim_3"))
    model.graph.value_info.append(info("b", "elsewhere_dim_4"))
    assert survey(model).build_name_uses({}).symbols >= {"in_dim_0", "out_dim_1", "named_dim_2"}
    assert f"Add{KEY}_dim_3" in survey(model).build_name_uses({}).symbols
    assert "elsewhere_dim_4" not in survey(model).build_name_uses({}).symbols


def test_symbols_are_found_wherever_a_block_ends():
    symbol = f"Add{'l' * 100}_dim_0"
    output = field(12, info("logits", symbol).SerializeToString())
    for before in range((1 << 16) - 130, (1 << 16)):
        short = field(10, "d" * 96)
        fillers = short * (before // 98) + field(10, "d" * (before % 98))
        assert survey(field(7, fillers + output + short)).build_name_uses({}).symbols == {symbol}


# Exchanging


def test_names_change_places_all_at_once():
    a, b, c = KEY, KEY_OUT, VALUE
    model = decoder(branch(graph(node("Add", [a, b], ["y"]))))
    turned = exchanged(model, {a: b, b: c, c: a})
    assert [list(n.input) + list(n.output) for n in turned.graph.node[:3]] == [
        [b, "x", c],
        [a, "x", "past_value.0_RetainedState"],
        [c, "past_value.0_RetainedState", "logits"],
    ]
    assert list(turned.graph.node[3].attribute[1].g.node[0].input) == [b, c]
    back = exchanged(turned, {b: a, c: b, a: c})
    assert back.SerializeToString() == model.SerializeToString()


alphabet = st.text(st.sampled_from("ab_/.019"), max_size=6)


@given(st.lists(alphabet, min_size=1, max_size=120), st.sets(alphabet, max_size=100))
def test_names_are_found_whatever_they_have_in_common(present: list[str], wanted: set[str]):
    raw = field(7, b"".join(field(1, field(1, name) + field(2, "out")) for name in present))
    told = [place.name for place in survey(raw, *wanted).occurrences if place.role == "reads"]
    assert told == [name for name in present if name and name in wanted]


def test_hundreds_of_unrelated_names_are_found_at_once():
    letters = [f"{chr(97 + i % 26)}{chr(97 + i // 26)}_{'x' * (i % 7)}" for i in range(600)]
    model = decoder(*[node("Relu", [name], [f"{name}_out"]) for name in letters])
    assert {place.name for place in survey(model, *letters).occurrences} == set(letters)


def test_weights_in_the_way_are_not_read():
    weights = TensorProto(name="w", raw_data=KEY.encode() * 50_000).SerializeToString()
    nodes = field(1, field(1, KEY)) + field(1, field(1, "x"))
    raw, read = field(7, nodes + field(5, weights) + nodes), 0

    def reading(offset: int, size: int) -> bytes:
        nonlocal read
        read += size
        return raw[offset : offset + size]

    assert len(find_occurrences(ByteSource(reading, len(raw)), [KEY]).occurrences) == 2
    assert read < len(raw)
