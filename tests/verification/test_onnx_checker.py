from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import models
import onnx
import pytest
from large_tensors import PLACES, weight
from models import branch, decoder, graph, info, node
from onnx import ModelProto, NodeProto, SparseTensorProto, TensorProto
from onnx.helper import make_attribute, make_function, make_opsetid
from tiers import thin

from onnxkvrename.findings import Finding
from onnxkvrename.model.protobuf import ByteSource
from onnxkvrename.verification.onnx_checker import check_onnx_validity
from onnxkvrename.verification.strip_weights import read_model_without_weights

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
EXPORTS = Path(__file__).resolve().parents[3] / "shared" / "exports"


def check(data: bytes) -> list[Finding]:
    """Return the findings on a model without its weights."""
    source = ByteSource.from_bytes(data)
    return list(check_onnx_validity(read_model_without_weights(source), source))


def list_refusals(model: ModelProto) -> list[str]:
    """Return why a model is refused, which is all that is found."""
    findings = check(model.SerializeToString())
    assert {(finding.code, finding.severity) for finding in findings} <= {("KV115", "error")}
    return [finding.message for finding in findings]


def is_refused_by_onnx(model: ModelProto) -> bool:
    """Return whether onnx refuses the model with all its weights."""
    try:
        onnx.checker.check_model(model)
    except onnx.checker.ValidationError:
        return True
    return False


def add_large_weights(model: ModelProto) -> None:
    """Give the model weights of every kind, all large."""
    model.graph.initializer.extend(
        [
            weight("raw"),
            weight("floats", float_data=[0.5] * 1000),
            weight("halves", data_type=10, int32_data=[1] * 1000),
            weight("fours", data_type=22, raw_data=bytes(1500), count=3000),
            weight("integers", data_type=7, int64_data=[-1] * 1000),
            weight("doubles", data_type=11, double_data=[0.5] * 1000),
            weight("unsigned", data_type=13, uint64_data=[1] * 2000, count=2000),
            weight("complex", data_type=14, float_data=[0.5] * 2000),
            weight("wide", data_type=15, raw_data=bytes(16_000)),
            weight("strings", data_type=8, string_data=[b"ab"] * 1000),
        ]
    )


def test_a_model_with_large_weights_of_every_kind_is_sound() -> None:
    model = decoder()
    add_large_weights(model)
    assert not is_refused_by_onnx(model)
    assert list_refusals(model) == []


def add_weight(**data: object) -> Callable[[ModelProto], None]:
    return lambda model: model.graph.initializer.append(weight("broken", **data))


def without_opset(model: ModelProto) -> None:
    del model.opset_import[:]


def without_the_opset_in_use(model: ModelProto) -> None:
    model.graph.node.append(node("F", ["x"], ["y"], domain="ai.onnx.ml"))


def without_ir_version(model: ModelProto) -> None:
    model.ClearField("ir_version")


def undefined_input(model: ModelProto) -> None:
    model.graph.node.append(node("Neg", ["nowhere"], ["y"]))


def undefined_in_subgraph(model: ModelProto) -> None:
    model.graph.node.append(branch(graph(node("Neg", ["nowhere"], ["y"]))))


def name_made_twice(model: ModelProto) -> None:
    model.graph.node.append(node("Neg", ["x"], ["logits"]))


def unsorted_nodes(model: ModelProto) -> None:
    model.graph.node.extend([node("Neg", ["late"], ["y"]), node("Neg", ["x"], ["late"])])


def operator_of_a_later_opset(model: ModelProto) -> None:
    model.graph.node.append(node("RMSNormalization", ["x", "x"], ["y"]))


def operator_that_is_gone(model: ModelProto) -> None:
    model.graph.node.append(node("Upsample", ["x", "x"], ["y"]))


def unknown_operator_without_its_opset(model: ModelProto) -> None:
    model.graph.node.append(node("Negate", ["x"], ["y"], domain="ai.onnx.ml"))


def node_without_operator(model: ModelProto) -> None:
    model.graph.node.append(node("", ["x"], ["y"]))


def attribute_of_a_wrong_type(model: ModelProto) -> None:
    model.graph.node.append(node("Softmax", ["x"], ["y"], axis=1.5))


def unknown_attribute(model: ModelProto) -> None:
    model.graph.node.append(node("Neg", ["x"], ["y"], axis=1))


def missing_attribute(model: ModelProto) -> None:
    model.graph.node.append(node("Cast", ["x"], ["y"]))


def too_few_inputs(model: ModelProto) -> None:
    model.graph.node.append(node("Add", ["x"], ["y"]))


def two_values_in_an_attribute(model: ModelProto) -> None:
    model.graph.node.append(node("Softmax", ["x"], ["y"], axis=1))
    model.graph.node[-1].attribute[0].f = 1.0


def nameless_graph(model: ModelProto) -> None:
    model.graph.ClearField("name")


def input_without_type(model: ModelProto) -> None:
    model.graph.input.add(name="z")


def function_without_its_opset(model: ModelProto) -> None:
    body = [node("Neg", ["a"], ["b"])]
    model.functions.append(make_function("local", "f", ["a"], ["b"], body, []))
    model.graph.node.append(node("f", ["x"], ["y"], domain="local"))


def two_functions_with_one_name(model: ModelProto) -> None:
    for operator in ("Neg", "Abs"):
        body = [node(operator, ["a"], ["b"])]
        opsets = [make_opsetid("", 18)]
        model.functions.append(make_function("local", "f", ["a"], ["b"], body, opsets))
    model.opset_import.append(make_opsetid("local", 1))


def two_fields_of_data(model: ModelProto) -> None:
    model.graph.initializer.append(weight("broken"))
    model.graph.initializer[-1].float_data.extend([0.5] * 1000)


def no_data(model: ModelProto) -> None:
    model.graph.initializer.add(name="broken", data_type=1, dims=[1000])


def data_of_an_empty_tensor(model: ModelProto) -> None:
    model.graph.initializer.append(weight("broken", count=0, raw_data=bytes(4000)))


def negative_dimension(model: ModelProto) -> None:
    model.graph.initializer.append(weight("broken", count=-5, raw_data=bytes(4000)))


def dimensions_past_counting(model: ModelProto) -> None:
    model.graph.initializer.append(weight("broken"))
    model.graph.initializer[-1].dims[:] = [1 << 40, 1 << 40]


def short_in_attribute(model: ModelProto) -> None:
    value = weight("broken", 1001, raw_data=bytes(4000))
    model.graph.node.append(node("Constant", [], ["y"], value=value))


def sparse_of_a_wrong_type(model: ModelProto) -> None:
    indices = weight("", 1000, data_type=1, raw_data=bytes(4000))
    sparse = SparseTensorProto(values=weight("s", 1000), indices=indices, dims=[5000])
    model.graph.sparse_initializer.append(sparse)


def data_beside_external_data(model: ModelProto) -> None:
    model.graph.initializer.append(weight("broken"))
    model.graph.initializer[-1].data_location = TensorProto.EXTERNAL
    model.graph.initializer[-1].external_data.add(key="location", value="w")


def external_data_nowhere(model: ModelProto) -> None:
    model.graph.initializer.add(name="w", data_type=1, dims=[9], data_location=1)


BROKEN = (
    *(without_opset, without_the_opset_in_use, without_ir_version, undefined_input),
    *(undefined_in_subgraph, name_made_twice, unsorted_nodes),
    *(operator_of_a_later_opset, operator_that_is_gone, unknown_operator_without_its_opset),
    *(node_without_operator, two_functions_with_one_name),
    *(attribute_of_a_wrong_type, unknown_attribute, missing_attribute, too_few_inputs),
    *(two_values_in_an_attribute, nameless_graph, input_without_type, function_without_its_opset),
    *(two_fields_of_data, no_data, data_of_an_empty_tensor, negative_dimension),
    *(dimensions_past_counting, short_in_attribute, sparse_of_a_wrong_type),
    *(data_beside_external_data, external_data_nowhere),
)


@pytest.mark.parametrize("breaks", BROKEN, ids=lambda breaks: breaks.__name__)
def test_what_onnx_refuses_is_refused_without_the_weights_too(
    breaks: Callable[[ModelProto], None],
) -> None:
    model = decoder()
    add_large_weights(model)
    breaks(model)
    assert is_refused_by_onnx(model)
    (message,) = list_refusals(model)
    assert "onnx's checker rejects" in message
    assert "\n" not in message


TENSORS = [
    {"count": 1001, "raw_data": bytes(4000)},
    {"count": 1000, "raw_data": bytes(4001)},
    {"count": 1001, "float_data": [0.5] * 1000},
    {"count": 1001, "double_data": [0.5] * 1000, "data_type": 11},
    {"count": 1001, "data_type": 14, "float_data": [0.5] * 2000},
    {"count": 3001, "data_type": 22, "raw_data": bytes(1500)},
    {"count": 2000, "data_type": 27, "raw_data": bytes(1500)},
    {"count": 2001, "data_type": 27, "raw_data": bytes(1500)},
    {"count": 2001, "data_type": 7, "int64_data": [1] * 2000},
    {"count": 2001, "data_type": 9, "int32_data": [1] * 2000},
    {"count": 1001, "data_type": 8, "string_data": [b"ab"] * 1000},
    {"count": 1000, "data_type": 8, "raw_data": bytes(4000)},
    {"count": 1000, "data_type": 7, "float_data": [0.5] * 1000},
    {"count": 1000, "data_type": 0, "raw_data": bytes(4000)},
    {"count": 1000, "data_type": 99, "raw_data": bytes(4000)},
    {"count": 1000, "data_type": 99, "int32_data": [1] * 2000},
]


@pytest.mark.parametrize("data", TENSORS)
def test_whether_data_fit_their_tensor_is_judged_as_onnx_does(data: dict[str, object]) -> None:
    model = decoder()
    add_weight(**data)(model)
    assert bool(list_refusals(model)) == is_refused_by_onnx(model)


def test_data_that_are_too_few_are_told_with_their_real_size() -> None:
    model = decoder()
    add_weight(count=1001, raw_data=bytes(4000))(model)
    (refusal,) = list_refusals(model)
    assert "broken has 4,000 bytes" in refusal
    assert "[1001]" in refusal


@pytest.mark.parametrize("put", PLACES, ids=lambda put: put.__name__)
def test_large_tensors_are_judged_alike_wherever_they_stand(
    put: Callable[[ModelProto], None],
) -> None:
    model = decoder()
    put(model)
    assert bool(list_refusals(model)) == is_refused_by_onnx(model)


def sound(model: ModelProto) -> None:
    model.graph.node.append(node("Far", ["x"], ["y"], domain="far", anything=[1, 2]))
    model.opset_import.append(make_opsetid("far", 1))


def far_without_opset(model: ModelProto) -> None:
    model.graph.node.append(node("Far", ["x"], ["y"], domain="far"))


def wrong_in_shape(model: ModelProto) -> None:
    model.graph.value_info.append(info("logits", 7, 7))


@pytest.mark.parametrize("change", [sound, far_without_opset, wrong_in_shape])
def test_domains_of_others_and_shapes_are_judged_as_onnx_does(
    change: Callable[[ModelProto], None],
) -> None:
    model = decoder()
    change(model)
    assert bool(list_refusals(model)) == is_refused_by_onnx(model)


def test_a_domain_of_others_is_no_fault() -> None:
    model = decoder()
    sound(model)
    assert list_refusals(model) == []


def test_functions_that_double_take_no_time() -> None:
    model = decoder(node("f0", ["x"], ["y"], domain="local"))
    opsets = [make_opsetid("", 18), make_opsetid("local", 1)]
    for n in range(60):
        calls = [node(f"f{n + 1}", [one], [other], domain="local") for one, other in ("ac", "cb")]
        model.functions.append(make_function("local", f"f{n}", ["a"], ["b"], calls, opsets))
    last = [node("Neg", ["a"], ["b"])]
    model.functions.append(make_function("local", "f60", ["a"], ["b"], last, opsets))
    assert list_refusals(model) == []


def test_an_attribute_in_a_function_default_is_looked_at() -> None:
    model = decoder()
    model.functions.append(make_function("local", "f", [], [], [], [make_opsetid("", 18)]))
    model.functions[0].attribute_proto.append(make_attribute("a", weight()))
    assert bool(list_refusals(model)) == is_refused_by_onnx(model)


def test_external_data_need_not_be_there(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    shutil.copyfile(FIXTURES / "plain" / "external" / "decoder.onnx", path)
    assert list_refusals(onnx.load(path, load_external_data=False)) == []


FILES = [*FIXTURES.rglob("*.onnx"), *EXPORTS.rglob("*.onnx")]


@pytest.mark.parametrize("path", thin(FILES, 18), ids=lambda path: "-".join(path.parts[-3:]))
def test_a_whole_file_is_judged_as_onnx_judges_it(path: Path) -> None:
    onnx.checker.check_model(str(path))
    assert list_refusals(onnx.load(path, load_external_data=False)) == []


def normalize(domain: str = "", output: str = "y") -> NodeProto:
    """Return a node whose operator onnxruntime has in onnx's own domain, and onnx does not."""
    return node("SimplifiedLayerNormalization", ["x", "x"], [output], domain=domain, axis=-1)


def normalize_in_a_function(model: ModelProto) -> None:
    body, opsets = [normalize(output="z")], [make_opsetid("", 18)]
    model.functions.append(make_function("local", "f", ["x"], ["z"], body, opsets))
    model.opset_import.append(make_opsetid("local", 1))
    model.graph.node.append(node("f", ["x"], ["y"], domain="local"))


UNKNOWN = {
    "graph": lambda model: model.graph.node.append(normalize()),
    "subgraph": lambda model: model.graph.node.append(branch(graph(normalize(output="z")))),
    "function": normalize_in_a_function,
    "other name of the domain": lambda model: model.graph.node.append(normalize("ai.onnx")),
}


@pytest.mark.parametrize("put", UNKNOWN.values(), ids=UNKNOWN)
def test_an_operator_that_onnx_does_not_define_is_a_warning(
    put: Callable[[ModelProto], None],
) -> None:
    model = decoder()
    put(model)
    assert is_refused_by_onnx(model)
    (finding,) = check(model.SerializeToString())
    assert (finding.code, finding.severity) == ("KV123", "warning")
    assert "1 node" in finding.message
    assert "(Simplified" in finding.message


def test_unknown_operators_are_named_once_with_the_number_of_their_nodes() -> None:
    model = decoder(*(normalize(output=f"n{i}") for i in range(7)), node("Frob", ["x"], ["y"]))
    (finding,) = check(model.SerializeToString())
    assert "8 nodes" in finding.message
    assert "(Frob, SimplifiedLayerNormalization)" in finding.message


@pytest.mark.parametrize("breaks", BROKEN, ids=lambda breaks: breaks.__name__)
def test_beside_an_unknown_operator_everything_else_is_still_checked(
    breaks: Callable[[ModelProto], None],
) -> None:
    model = decoder(normalize(output="normalized"))
    add_large_weights(model)
    breaks(model)
    assert "KV115" in [finding.code for finding in check(model.SerializeToString())]


def test_what_an_unknown_operator_reads_and_makes_is_checked() -> None:
    late = node("Neg", ["x"], ["late"])
    for nodes in (
        [node("Frob", ["late"], ["y"]), late],
        [node("Frob", ["x"], ["late"]), late],
        [node("Frob", ["x"], ["y"], body=graph(node("Neg", ["nowhere"], ["z"])))],
    ):
        codes = [finding.code for finding in check(decoder(*nodes).SerializeToString())]
        assert codes == ["KV123", "KV115"]


def test_an_operator_that_the_model_defines_itself_is_known() -> None:
    model = decoder(node("Frob", ["x"], ["y"]))
    body, opsets = [node("Neg", ["a"], ["b"])], [make_opsetid("", 18)]
    model.functions.append(make_function("", "Frob", ["a"], ["b"], body, opsets))
    assert check(model.SerializeToString()) == []


def add_function(model: ModelProto, value: TensorProto) -> None:
    body, opsets = [node("Constant", [], ["b"], value=value)], [make_opsetid("", 18)]
    model.functions.append(make_function("local", "f", ["a"], ["b"], body, opsets))


def test_functions_that_are_copies_of_each_other_are_a_warning() -> None:
    model = decoder(node("f", ["x"], ["y"], domain="local"))
    model.opset_import.append(make_opsetid("local", 1))
    for _ in range(3):
        add_function(model, weight())
    assert is_refused_by_onnx(model)
    (finding,) = check(model.SerializeToString())
    assert (finding.code, finding.severity) == ("KV124", "warning")
    assert "(local::f)" in finding.message
    undefined_input(model)
    assert [found.code for found in check(model.SerializeToString())] == ["KV124", "KV115"]


def test_functions_that_differ_in_a_large_constant_alone_are_no_copies() -> None:
    model = decoder()
    model.opset_import.append(make_opsetid("local", 1))
    for byte in (b"\0", b"\1"):
        add_function(model, weight("w", raw_data=byte * 4000))
    (message,) = list_refusals(model)
    assert "multiple local functions" in message


GENAI = sorted((EXPORTS.parent / "exports-other" / "genai").rglob("*.onnx"))


@pytest.mark.skipif(not GENAI, reason="no exports of genai at ../shared/exports-other")
@pytest.mark.parametrize("path", GENAI, ids=lambda path: path.parent.name + "-" + path.stem)
def test_what_genai_exports_is_not_refused(path: Path) -> None:
    model = onnx.load(path, load_external_data=False)
    assert {finding.code for finding in check(model.SerializeToString())} <= {"KV123"}


def test_names_that_are_not_utf_8_are_judged_without_a_crash() -> None:
    nodes = [node("Neg", ["nowhere!!"], ["y"]), node("operator!", ["x"], ["z"])]
    data = models.decoder(*nodes).SerializeToString()
    for name in (b"nowhere!!", b"operator!"):
        data = data.replace(name, name[:-2] + b"\xff\xfe")
    assert [finding.code for finding in check(data)] == ["KV115"]
