"""A renamed model is the old one with other names, to the byte; taken back, it is the old one.

What comes out is held against a patch by other means: the whole model parsed,
renamed by reflection, and serialised again.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import onnx
import onnx.helper
import pytest
from conftest import Sample
from faults.fuzz_models import fuzz_model
from google.protobuf.message import DecodeError, Message
from models import (
    FORMS,
    KEY,
    KEY_OUT,
    VALUE,
    VALUE_OUT,
    branch,
    decoder,
    every,
    field,
    graph,
    info,
    node,
    patched,
    saved,
    sparse,
    tensor,
)
from onnx import AttributeProto, ModelProto, TensorProto
from tiers import thin

from onnxkvrename import KvRenameError, ModelError, rename

FIXTURES = Path(__file__).parent.parent / "fixtures"
# Where a name lives, and where it only looks so


def in_value_info() -> ModelProto:
    model = decoder()
    model.graph.value_info.extend([info(KEY), info(VALUE_OUT), info("hidden")])
    return model


def with_a_default() -> ModelProto:
    model = decoder()
    model.graph.initializer.extend([tensor(KEY, 0.5), tensor("w", 1.0)])
    model.graph.sparse_initializer.extend([sparse(VALUE), sparse("s")])
    model.graph.sparse_initializer[0].indices.name = VALUE
    return model


def quantized() -> ModelProto:
    model = decoder()
    annotation = model.graph.quantization_annotation.add(tensor_name=KEY_OUT)
    annotation.quant_parameter_tensor_names.add(key="SCALE_TENSOR", value=KEY)
    annotation.quant_parameter_tensor_names.add(key=VALUE, value="zero")
    return model


def sharded() -> ModelProto:
    model = decoder()
    placed = model.graph.node[0].device_configurations.add(configuration_id=KEY)
    placed.sharding_spec.add(tensor_name=KEY, device=[0, 1])
    placed.sharding_spec.add(tensor_name="x")
    return model


def trained() -> ModelProto:
    model = decoder()
    training = model.training_info.add()
    training.initialization.CopyFrom(graph(node("Constant", [], ["zero"], value_float=0.0)))
    training.algorithm.CopyFrom(graph(node("Add", [KEY, VALUE], ["step"])))
    training.initialization_binding.add(key=KEY, value="zero")
    training.update_binding.add(key=VALUE, value=KEY_OUT)
    return model


def nested(depth: int, *, inner: str = KEY) -> ModelProto:
    """A name captured ``depth`` graphs below the main one."""
    body = onnx.helper.make_graph([node("Identity", [inner], ["y"])], "inner", [], [])
    for _ in range(depth - 1):
        body = onnx.helper.make_graph([node("If", ["flag"], ["y"], then_branch=body)], "", [], [])
    return decoder(node("If", ["flag"], ["chosen"], then_branch=body))


def captured() -> ModelProto:
    return nested(1)


def captured_below() -> ModelProto:
    return nested(2, inner=VALUE_OUT)


def captured_as_deep_as_can_be() -> ModelProto:
    return nested(32)


def captured_by_a_list_of_graphs() -> ModelProto:
    listed = node("Many", ["x"], ["y"], domain="local")
    bodies = [graph(node("Identity", [name], ["z"])) for name in (KEY, KEY_OUT)]
    listed.attribute.append(onnx.helper.make_attribute("bodies", bodies))
    return decoder(listed)


def shadowed() -> ModelProto:
    """One name of the main graph's is captured, another hidden, from there on down."""
    deep = graph(node("Add", [KEY, VALUE], ["deep"]))
    body = graph(node("Relu", ["x"], [KEY]), branch(deep, "middle"))
    body.value_info.extend([info(KEY), info(VALUE)])
    loop = graph(node("Identity", [VALUE], ["y"]))
    loop.input.append(info(VALUE))
    return decoder(branch(body), node("Loop", ["", "flag"], ["looped"], body=loop))


def merged() -> ModelProto:
    """Two decoders in the branches of an If, whose outputs are called as the outer ones."""
    bodies = [
        graph(
            node("Add", [KEY, "x"], [KEY_OUT]),
            node(op_type, [VALUE, "x"], [VALUE_OUT]),
            outputs=(KEY_OUT, VALUE_OUT),
        )
        for op_type in ("Add", "Sub")
    ]
    model = decoder()
    del model.graph.node[:2]
    choice = node(
        "If", ["flag"], [KEY_OUT, VALUE_OUT], then_branch=bodies[0], else_branch=bodies[1]
    )
    model.graph.node.insert(0, choice)
    return model


def in_functions() -> ModelProto:
    body = [node("Add", [KEY, "x"], [KEY_OUT]), branch(graph(node("Relu", [KEY], ["y"])))]
    opsets = [onnx.helper.make_opsetid("", 18)]
    functions = [
        onnx.helper.make_function(
            "local", "Layer", [KEY, "x"], [KEY_OUT], body, opsets, overload=overload
        )
        for overload in ("", KEY)
    ]
    functions[0].value_info.append(info(KEY))
    calls = [
        node("Layer", [KEY, "x"], [f"y{index}"], domain="local", overload=overload)
        for index, overload in enumerate(["", KEY])
    ]
    return decoder(*calls, functions=tuple(functions))


def in_prose() -> ModelProto:
    """Metadata, doc strings, domains and the names of what is no value."""
    model = decoder(branch(graph(node("Relu", [KEY], ["y"]), name=KEY)))
    model.graph.initializer.append(tensor(KEY, 1.0))
    for message in every(model):
        known = message.DESCRIPTOR.fields_by_name
        if "metadata_props" in known:
            message.metadata_props.add(key=KEY, value=KEY_OUT)
        for name in {"doc_string", "producer_name", "denotation", "domain"} & set(known):
            setattr(message, name, KEY)
    for each in model.graph.node:
        each.name = KEY
    model.graph.name = KEY
    return model


def in_data() -> ModelProto:
    words = onnx.helper.make_tensor(KEY, TensorProto.STRING, [1], [KEY.encode()])
    constant = node("Constant", [], ["c"], value=words)
    strings = node("Opaque", ["x"], ["y"], domain="local", one=KEY, many=[KEY, VALUE])
    strings.attribute.append(onnx.helper.make_attribute(KEY, b"\xff\xfe\x00past_key.0"))
    strings.attribute.append(onnx.helper.make_attribute("none", [], attr_type=AttributeProto.INTS))
    strings.attribute.add(name="sparse", type=AttributeProto.SPARSE_TENSOR)
    strings.attribute[-1].sparse_tensor.CopyFrom(sparse(KEY))
    strings.attribute.add(name="type", type=AttributeProto.TYPE_PROTO, ref_attr_name=KEY)
    strings.attribute[-1].tp.CopyFrom(info("", KEY).type)
    model = decoder(constant, strings)
    model.graph.initializer.append(words)
    return model


def of_other_types() -> ModelProto:
    model = decoder()
    kind = model.graph.input[0].type
    for make in (onnx.helper.make_optional_type_proto, onnx.helper.make_sequence_type_proto):
        model.graph.input.append(onnx.helper.make_value_info("more", make(kind)))
    for value in (model.graph.input[1], model.graph.output[1]):
        value.type.tensor_type.shape.dim[0].denotation = KEY
        value.type.tensor_type.shape.dim[2].dim_param = KEY
    return model


def from_a_newer_onnx() -> ModelProto:
    model = in_functions()
    model.graph.quantization_annotation.add(tensor_name=KEY)
    for message in list(every(model)):
        message.MergeFromString(field(500, KEY) + field(501, field(1, KEY)))
    return model


MODELS: dict[str, Callable[[], ModelProto]] = {
    make.__name__: make
    for make in (
        *(decoder, in_value_info, with_a_default, quantized, sharded, trained),
        *(captured, captured_below, captured_as_deep_as_can_be, captured_by_a_list_of_graphs),
        *(shadowed, merged, in_functions, in_prose, in_data, of_other_types, from_a_newer_onnx),
    )
}


@pytest.mark.parametrize("form", thin(FORMS.values(), 20), ids=FORMS.keys())
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())
def test_a_model_changes_its_names_and_nothing_else(
    make: Callable[[], ModelProto], form: Callable[[Message], bytes], tmp_path: Path
):
    before, expected = form(make()), form(patched(make()))
    path = saved(before, tmp_path / "model.onnx")
    assert rename(path, "VLLM").status == "renamed"
    assert path.read_bytes() == expected != before
    assert ModelProto.FromString(expected) == patched(ModelProto.FromString(before))


@pytest.mark.parametrize("form", thin(FORMS.values(), 20), ids=FORMS.keys())
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())
def test_taking_the_token_out_gives_back_the_old_model(
    make: Callable[[], ModelProto], form: Callable[[Message], bytes], tmp_path: Path
):
    path = saved(form(patched(make())), tmp_path / "model.onnx")
    assert rename(path, strip=True).status == "renamed"
    assert path.read_bytes() == form(make())


def hidden(name: str) -> ModelProto:
    """A model with a branch that calls a value of its own as an input of the main graph."""
    return decoder(branch(graph(node("Relu", ["x"], [name]))))


def test_no_name_is_given_that_a_subgraph_hides(tmp_path: Path):
    """Even where nothing would be captured: onnx and onnxruntime refuse such a graph."""
    path = saved(hidden(f"{KEY}_VLLM"), tmp_path / "model.onnx")
    report = rename(path, "VLLM")
    assert report.status == "failed"
    (finding,) = report.findings
    assert (finding.code, finding.severity) == ("KV201", "error")


def test_what_was_hidden_before_is_hidden_again_with_a_warning(tmp_path: Path):
    before = hidden(KEY).SerializeToString()
    path = saved(before, tmp_path / "model.onnx")
    assert rename(path, "VLLM").findings == ()
    report = rename(path, strip=True)
    assert path.read_bytes() == before
    (finding,) = report.findings
    assert (finding.code, finding.severity) == ("KV201", "warning")


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_a_name_is_not_given_where_a_subgraph_would_capture_it(depth: int, tmp_path: Path):
    """The innermost graph reads the buffer, and a graph around it defines the new name."""
    inner = graph(node("Identity", [KEY], ["y"]))
    for _ in range(depth - 1):
        inner = graph(branch(inner))
    around = graph(node("Relu", ["x"], [f"{KEY}_VLLM"]), branch(inner))
    path = saved(decoder(branch(around)), tmp_path / "model.onnx")
    report = rename(path, "VLLM")
    assert report.status == "failed"
    assert {finding.code for finding in report.findings} == {"KV201"}


def test_random_models_that_are_renamed_come_back_to_the_byte(tmp_path: Path, sample: Sample):
    renamed = 0
    seeds = sample(range(200), 20)
    for seed in seeds:
        before = fuzz_model(seed)
        path = saved(before, tmp_path / "model.onnx")
        try:
            if rename(path, "VLLM").status != "renamed":
                continue
        except KvRenameError:
            continue
        renamed += 1
        rename(path, strip=True)
        assert path.read_bytes() == before, seed
    assert renamed > len(seeds) // 5


def test_symbols_made_of_an_outputs_name_follow_and_others_stay(tmp_path: Path):
    symbols = {
        f"Add{KEY_OUT}_dim_2": f"Add{KEY}_VLLM_RetainedState_dim_2",
        f"{VALUE_OUT}_dim_0": f"{VALUE}_VLLM_RetainedState_dim_0",
    }
    alike = (f"Mul{KEY_OUT}_dim_2", f"Add{KEY}_dim_2", f"Add{KEY_OUT}_dim_", f"Add{KEY_OUT}_dim_x")
    body = graph(node("Relu", [KEY_OUT], ["y"]))
    body.value_info.append(info(KEY_OUT, *symbols))
    opsets = [onnx.helper.make_opsetid("", 18)]
    function = onnx.helper.make_function("local", "F", [], [], [branch(body, "location")], opsets)
    function.value_info.append(info(KEY_OUT, *symbols))
    model = decoder(branch(body), node("Relu", [KEY], ["r"]), functions=(function,))
    model.graph.output[1].CopyFrom(info(KEY_OUT, *symbols, *alike))
    model.graph.value_info.append(info("hidden", *symbols, *alike))
    sequence = onnx.helper.make_sequence_type_proto(info("", *symbols).type)
    model.graph.output.append(onnx.helper.make_value_info("r", sequence))
    model.graph.input[1].CopyFrom(info(KEY, *symbols, *alike))
    path = saved(model, tmp_path / "model.onnx")
    assert rename(path, "VLLM").status == "renamed"
    assert path.read_bytes() == patched(model, symbols).SerializeToString()
    rename(path, strip=True)
    assert path.read_bytes() == model.SerializeToString()


def test_a_symbol_that_undoing_would_change_is_in_the_way(tmp_path: Path):
    model = decoder()
    model.graph.value_info.append(info("hidden", f"Add{KEY}_VLLM_RetainedState_dim_1"))
    path = saved(model, tmp_path / "model.onnx")
    if rename(path, "VLLM").status == "renamed":
        rename(path, strip=True)
    assert path.read_bytes() == model.SerializeToString()


def test_a_graph_deeper_than_protobuf_reads_is_refused(tmp_path: Path):
    path = saved(nested(33), tmp_path / "model.onnx")
    with pytest.raises(DecodeError):
        onnx.load_model(path)
    with pytest.raises(ModelError, match="100 deep"):
        rename(path, "VLLM")


# Second runs, other runs

PLAIN = sorted(
    path.relative_to(FIXTURES / "plain")
    for path in (FIXTURES / "plain").rglob("*.onnx")
    if path.stem != "encoder"
)


@pytest.mark.parametrize("strip", [False, True])
def test_a_second_run_does_not_touch_the_file(strip: bool, tmp_path: Path):
    path = saved(with_a_default(), tmp_path / "model.onnx")
    rename(path, "VLLM", strip=strip)
    before = path.stat()
    assert rename(path, "VLLM", strip=strip).status == "unchanged"
    after = path.stat()
    assert (after.st_mtime_ns, after.st_ctime_ns, after.st_ino) == (
        before.st_mtime_ns,
        before.st_ctime_ns,
        before.st_ino,
    )


def test_every_process_writes_the_same(tmp_path: Path):
    code = "import sys, onnxkvrename as o; [o.rename(path, 'VLLM') for path in sys.argv[1:]]"
    results = []
    for seed in ("1", "2"):
        shutil.copytree(FIXTURES / "plain", tmp_path / seed)
        paths = [tmp_path / seed / name for name in PLAIN]
        paths += [saved(make(), tmp_path / seed / name) for name, make in MODELS.items()]
        env = {**os.environ, "PYTHONHASHSEED": seed}
        subprocess.run([sys.executable, "-c", code, *paths], check=True, env=env)
        results.append([path.read_bytes() for path in paths])
    assert results[0] == results[1]


# What taking the token back does not undo


def test_a_suffix_that_was_changed_stays_when_the_token_is_removed(tmp_path: Path):
    """So the page on renaming says where the promise of the original bytes ends."""
    path = tmp_path / "model.onnx"
    shutil.copyfile(FIXTURES / "plain" / "internal_suffix.onnx", path)
    before = path.read_bytes()
    rename(path, "VLLM", normalize=True)
    rename(path, strip=True)
    assert b"_InternalRetainedState" in before
    assert b"_InternalRetainedState" not in path.read_bytes()
    readme = (FIXTURES.parent / "README.md").read_text("utf-8")
    page = (FIXTURES.parent / "docs" / "rename.md").read_text("utf-8")
    assert "([except](docs/rename.md#undo) after `--normalize`)" in readme
    assert "`--strip` keeps the new suffix" in page
