"""Live graphs: what is renamed in them is what a rename of their file changes.

The judge is the library itself: a renamed graph, exported, is the renamed file, imported and
exported. So what the library loses on the way is lost on both sides.
"""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import pytest
from contract.observe import ROOTS, find_source
from models import (
    KEY,
    KEY_OUT,
    SHAPE,
    VALUE,
    VALUE_OUT,
    branch,
    decoder,
    graph,
    info,
    node,
    saved,
    tensor,
)
from onnx import ModelProto, TensorProto
from test_fixtures import FIXTURES
from tiers import full, thin

import onnxkvrename
from onnxkvrename import CheckError, KvRenameError, ModelError, ModelReport, WriteError
from onnxkvrename.api import graphs

gs = pytest.importorskip("onnx_graphsurgeon")
ir = pytest.importorskip("onnx_ir")

pytestmark = pytest.mark.filterwarnings("ignore")


class Library(NamedTuple):
    """A library of live graphs: into it and out of it, and the values that are there."""

    load: Callable[[ModelProto], Any]
    export: Callable[[Any], ModelProto]
    main: Callable[[Any], Any]

    def write(self, live: Any) -> bytes:
        return self.export(live).SerializeToString(deterministic=True)

    def pass_through(self, model: ModelProto) -> bytes:
        return self.write(self.load(model))


LIBRARIES = {
    "gs": Library(gs.import_onnx, gs.export_onnx, lambda live: live),
    "ir": Library(ir.from_proto, ir.to_proto, lambda live: live.graph),
}


@pytest.fixture(autouse=True)
def _is_silent(capfd: pytest.CaptureFixture[str]):
    """Let nothing be printed by a rename; the libraries themselves may warn at an import."""
    logging.disable(logging.WARNING)
    severity, gs.logger.G_LOGGER.severity = gs.logger.G_LOGGER.severity, gs.logger.G_LOGGER.CRITICAL
    yield
    gs.logger.G_LOGGER.severity = severity
    logging.disable(logging.NOTSET)


def list_models() -> list[Any]:
    """List a few fixtures; in the full tier all, and all real exports."""
    roots = {"plain": FIXTURES / "plain", "VLLM": FIXTURES / "VLLM", **ROOTS}
    names = {
        group: [f"{group}/{path.relative_to(root)}" for path in sorted(root.rglob("*.onnx"))]
        for group, root in roots.items()
    }
    real = [pytest.param(name, marks=full) for group in ROOTS for name in names[group]]
    return [*thin(names["plain"] + names["VLLM"], 14), *real]


def read(path: Path) -> ModelProto:
    return onnx.load(path, load_external_data=False)


def summarize(report: ModelReport) -> tuple[object, ...]:
    """Return what a report says of the names, wherever the model is."""
    codes = sorted(finding.code for finding in report.findings if finding.code != "KV501")
    return report.name_map, report.function_name_map, report.pairs, report.unchanged_names, codes


def check_alike(library: Library, model: ModelProto, renamed: ModelProto, **how: Any) -> Any:
    """Rename a live graph, compare what it exports with the renamed file, and return it."""
    live = library.load(model)
    report = onnxkvrename.rename_graph(live, **how)
    assert report.status in ("renamed", "unchanged")
    assert library.write(live) == library.pass_through(renamed)
    return live, report


@pytest.mark.parametrize("name", list_models())
def test_file_proto_and_live_graphs_get_the_same_names(name: str, tmp_path: Path) -> None:
    source = find_source(name) if name.partition("/")[0] in ROOTS else FIXTURES / name
    result = tmp_path / "result" / source.name
    report = onnxkvrename.rename(source, "VLLM", output=result, sidecars="off")
    if report.failed:
        with pytest.raises(CheckError):
            onnxkvrename.rename_model(read(source), "VLLM")
    else:
        expected = onnxkvrename.rename_model(read(source), "VLLM")
        result = result if report.status == "renamed" else source
        assert read(result).SerializeToString() == expected.SerializeToString()
    for library in LIBRARIES.values():
        before = library.pass_through(read(source))
        if report.failed:
            live = library.load(read(source))
            found = onnxkvrename.rename_graph(live, "VLLM")
            assert (found.status, library.write(live)) == ("failed", before)
        else:
            live, found = check_alike(library, read(source), read(result), token="VLLM")
            assert found.status == report.status
            assert onnxkvrename.rename_graph(live, "VLLM").status == "unchanged"
            if report.status == "renamed" and not any(
                s.token for p in report.pairs for s in p.sides
            ):
                onnxkvrename.rename_graph(live, strip=True)
                assert library.write(live) == before
        assert summarize(found) == summarize(report)


def with_default() -> ModelProto:
    """A cache with an initial value, between two other weights."""
    model = decoder(node("Add", ["before", "after"], ["sum"]))
    zeros = onnx.helper.make_tensor(KEY, TensorProto.FLOAT, (1, 2, 8, 4), bytes(256), raw=True)
    model.graph.initializer.extend([tensor("before", 1), zeros, tensor("after", 2)])
    return model


def with_annotation() -> ModelProto:
    model = decoder()
    annotation = model.graph.quantization_annotation.add(tensor_name=KEY)
    annotation.quant_parameter_tensor_names.add(key="SCALE_TENSOR", value=KEY_OUT)
    return model


def with_symbols() -> ModelProto:
    """Dimensions named after a retained output, in the main graph, in a body and in a function."""
    symbol = f"Add{KEY_OUT}_dim_2"
    body = graph(node("Neg", [KEY], ["inner_value"]))
    body.value_info.append(info("inner_value", 1, 2, symbol, 4))
    function = with_function("b").functions[0]
    function.value_info.append(info("b", 1, 2, symbol, 4))
    model = decoder(branch(body), functions=(function,))
    model.graph.output[1].CopyFrom(info(KEY_OUT, 1, 2, symbol, 4))
    model.graph.value_info.append(info("chosen", "batch", symbol))
    return model


def with_function(*names: str) -> ModelProto:
    """A local function with inner values of these names."""
    names = ("a", *names, "z")
    nodes = [node("Neg", [old], [new]) for old, new in pairwise(names)]
    opsets = [onnx.helper.make_opsetid("", 18)]
    function = onnx.helper.make_function("local", "F", ["a"], ["z"], nodes, opsets)
    return decoder(node("F", [KEY], ["called"], domain="local"), functions=(function,))


def with_metadata() -> ModelProto:
    model = decoder()
    onnx.helper.set_model_props(model, {"kept": "x"})
    return model


MODELS = {
    "an initial value": with_default(),
    "an annotation": with_annotation(),
    "symbols": with_symbols(),
    "a function": with_function("b"),
    "a function with names of buffers": with_function(KEY, KEY_OUT),
    "metadata": with_metadata(),
    "a captured value": decoder(branch(graph(node("Add", [KEY, KEY_OUT], ["z"])))),
    "a body in a body": decoder(branch(graph(branch(graph(node("Neg", [KEY], ["z"])), "w")))),
    "an inner value of that name": decoder(
        branch(graph(node("Neg", ["x"], [VALUE_OUT]), node("Neg", [VALUE_OUT], ["z"])))
    ),
    "an omitted input": decoder(node("Clip", [KEY, "", "x"], ["z"])),
}


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("what", MODELS)
def test_what_else_has_names_follows(what: str, library: str) -> None:
    model = onnx.load_model_from_string(MODELS[what].SerializeToString())
    passed = LIBRARIES[library].export(LIBRARIES[library].load(model))
    try:
        renamed = onnxkvrename.rename_model(passed, "VLLM")
    except CheckError:  # a library that drops a default value drops the input with it
        assert (what, library) == ("an initial value", "gs")
        return
    check_alike(LIBRARIES[library], passed, renamed, token="VLLM")


def without_input() -> ModelProto:
    model = decoder()
    del model.graph.input[1]
    model.graph.node[0].input[0] = "x"
    return model


REFUSED = {
    "KV201": [
        decoder(node("Neg", ["x"], [f"{KEY}_VLLM"])),
        decoder(branch(graph(node("Neg", ["x"], [f"{KEY}_VLLM"]), node("Abs", [KEY], ["z"])))),
    ],
    "KV101": [without_input()],
}


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(
    ("code", "model"), [(code, model) for code, models in REFUSED.items() for model in models]
)
def test_a_refused_graph_is_as_it_was(code: str, model: ModelProto, library: str) -> None:
    live = LIBRARIES[library].load(model)
    before = LIBRARIES[library].write(live)
    report = onnxkvrename.rename_graph(live, "VLLM")
    assert (report.status, [item.code for item in report.findings]) == ("failed", [code])
    assert LIBRARIES[library].write(live) == before


@pytest.mark.parametrize(
    ("library", "model"),
    [("gs", with_symbols()), ("ir", with_symbols()), ("ir", with_default())],
)
def test_a_change_that_fails_undoes_the_others(
    library: str, model: ModelProto, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = LIBRARIES[library].load(model)
    before = LIBRARIES[library].write(live)
    names = [value.name for value in LIBRARIES[library].main(live).inputs]
    changes: list[Any] = []

    def apply(planned: Any) -> None:
        changes.extend(planned)
        broken = graphs._Change(lambda shape: 1 / len(shape or ()), (1,), ())
        real([*changes, broken])

    real = graphs._apply
    monkeypatch.setattr(graphs, "_apply", apply)
    with pytest.raises(ZeroDivisionError):
        onnxkvrename.rename_graph(live, "VLLM")
    assert len(changes) > 4
    assert [value.name for value in LIBRARIES[library].main(live).inputs] == names
    assert LIBRARIES[library].write(live) == before


class Stubborn(gs.Variable):
    """A variable whose name cannot be set again."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "name" and hasattr(self, "name"):
            raise PermissionError(value)
        super().__setattr__(name, value)


def test_a_name_that_cannot_be_set_leaves_the_others_as_they_were() -> None:
    live = gs.import_onnx(decoder())
    stubborn = Stubborn(VALUE_OUT, np.float32, list(SHAPE))
    writer, reader = live.nodes[1:3]
    live.outputs[2] = writer.outputs[0] = reader.inputs[1] = stubborn
    before = LIBRARIES["gs"].write(live)
    with pytest.raises(PermissionError, match=f"{VALUE}_VLLM_RetainedState"):
        onnxkvrename.rename_graph(live, "VLLM")
    assert LIBRARIES["gs"].write(live) == before


def test_a_body_that_is_a_default_of_a_function_follows() -> None:
    """onnx_graphsurgeon does not read such a function."""
    model = with_function(KEY)
    body = graph(node("Neg", [KEY], ["w"]))
    default = onnx.helper.make_attribute("body", body)
    model.functions[0].attribute_proto.extend([default, onnx.helper.make_attribute("number", 3)])
    model.functions[0].attribute.append("required")
    passed = ir.to_proto(ir.from_proto(model))
    check_alike(LIBRARIES["ir"], passed, onnxkvrename.rename_model(passed, "VLLM"), token="VLLM")


def test_a_shape_stays_what_it_is() -> None:
    live = ir.from_proto(with_symbols())
    for value in live.graph.outputs:
        value.shape.freeze()
    assert onnxkvrename.rename_graph(live, "VLLM").status == "renamed"
    assert all(value.shape.frozen for value in live.graph.outputs)
    assert "VLLM" in str(live.graph.outputs[1].shape)
    surgeon = gs.import_onnx(with_symbols())
    surgeon.outputs[1].shape = tuple(surgeon.outputs[1].shape)
    assert onnxkvrename.rename_graph(surgeon, "VLLM").status == "renamed"
    assert surgeon.outputs[1].shape == (1, 2, f"Add{KEY}_VLLM_RetainedState_dim_2", 4)


@pytest.mark.parametrize("fails", ["tempfile.mkdtemp", "pathlib.Path.write_bytes"])
def test_without_space_for_a_temporary_file_the_graph_is_as_it_was(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **kwargs: object) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    live = gs.import_onnx(decoder())
    before = LIBRARIES["gs"].write(live)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(fails, refuse)
    with pytest.raises(WriteError, match="no temporary file can be written"):
        onnxkvrename.rename_graph(live, "VLLM")
    assert LIBRARIES["gs"].write(live) == before
    assert list(tmp_path.iterdir()) == []


def test_one_object_for_two_values_is_refused() -> None:
    live = gs.import_onnx(MODELS["an inner value of that name"])
    outer = next(value for value in live.outputs if value.name == VALUE_OUT)
    body = live.nodes[-1].attrs["then_branch"]
    body.nodes[0].outputs[0] = outer
    before = [value.name for value in live.outputs]
    with pytest.raises(ModelError, match="an object of its own"):
        onnxkvrename.rename_graph(live, "VLLM")
    assert [value.name for value in live.outputs] == before


def test_objects_of_one_name_are_one_value() -> None:
    """An export knows names only: whatever object a body has for an outer value, it follows."""
    live = gs.import_onnx(MODELS["a captured value"])
    body = live.nodes[-1].attrs["then_branch"]
    body.nodes[0].inputs[0] = gs.Variable(KEY)
    assert onnxkvrename.rename_graph(live, "VLLM").status == "renamed"
    assert body.nodes[0].inputs[0].name == f"{KEY}_VLLM"


class Unread(ir.LazyTensor):
    """A tensor that cannot be evaluated."""

    def __init__(self, name: str) -> None:
        super().__init__(self.fail, dtype=ir.DataType.FLOAT, shape=ir.Shape([64, 4]), name=name)

    def fail(self) -> Any:
        raise AssertionError("a weight was read")


def test_weights_are_neither_read_nor_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    model = decoder(node("MatMul", ["x", "weight"], ["z"]))
    weight = onnx.numpy_helper.from_array(np.ones((512, 512), np.float32), "weight")
    model.graph.initializer.append(weight)
    sizes: list[int] = []
    real = graphs.open_scratch_file

    def count(name: str, data: bytes) -> Any:
        sizes.append(len(data))
        return real(name, data)

    monkeypatch.setattr(graphs, "open_scratch_file", count)
    surgeon, lazy = gs.import_onnx(model), ir.from_proto(model)
    monkeypatch.setattr(gs.ir.tensor.LazyValues, "load", Unread.fail)
    lazy.graph.initializers["weight"].const_value = Unread("weight")
    values = gs.import_onnx(model)
    values.nodes[-1].inputs[1].values = np.ones((512, 512), np.float32)
    for live in (surgeon, lazy, values):
        assert onnxkvrename.rename_graph(live, "VLLM").status == "renamed"
    assert len(sizes) == 3
    assert max(sizes) < 2_000


def test_target_profile_and_dry_run_are_as_for_a_file(tmp_path: Path) -> None:
    plain = FIXTURES / "plain" / "decoder.onnx"
    for how in (
        {"target": "vllm-qaic"},
        {"target": "vllm-qaic", "strict": True},
        {"token": "VLLM", "rules": "auto"},
        {"token": "VLLM", "dry_run": True},
        {"strip": True},
    ):
        source = saved(plain.read_bytes(), tmp_path / "model.onnx")
        report = onnxkvrename.rename(source, sidecars="off", **how)
        for library in LIBRARIES.values():
            live = library.load(read(plain))
            found = onnxkvrename.rename_graph(live, **how)
            assert (found.status, found.path) == (report.status, "<memory>")
            assert summarize(found) == summarize(report)
            assert library.write(live) == library.pass_through(read(source))


def test_hints_and_errors_name_no_temporary_file() -> None:
    empty = gs.import_onnx(decoder())
    for number, value in enumerate((*empty.inputs, *empty.outputs)):
        value.name = f"value_{number}"
    (finding,) = onnxkvrename.rename_graph(empty, "VLLM").findings
    assert finding.code == "KV001"
    assert "/" not in finding.hint
    with pytest.raises(KvRenameError) as caught:
        onnxkvrename.rename_graph(gs.import_onnx(decoder()), "not a token")
    assert "/" not in str(caught.value)
    broken = gs.import_onnx(decoder())
    broken.nodes[0].inputs[0].name = None
    with pytest.raises(ModelError, match="cannot be exported"):
        onnxkvrename.rename_graph(broken, "VLLM")


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (None, "NoneType"),
        (decoder(), "rename_model renames a ModelProto"),
        ("model.onnx", "rename renames a model in a file"),
        (ir.from_proto(decoder()).graph, "not Graph"),
        (gs.Function("F"), "not Function"),
        (gs.Graph, "the class Graph"),
    ],
    ids=str,
)
def test_another_object_is_refused(value: object, hint: str) -> None:
    with pytest.raises(
        TypeError, match=r"an onnx_graphsurgeon\.Graph or an onnx_ir\.Model"
    ) as caught:
        onnxkvrename.rename_graph(value, "VLLM")
    assert hint in str(caught.value)


def test_no_library_is_loaded_that_the_caller_does_not_have() -> None:
    script = (
        "import sys, onnxkvrename\n"
        "try: onnxkvrename.rename_graph(1, 'VLLM')\n"
        "except TypeError: print(*sys.modules)"
    )
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "onnxkvrename.api.graphs" in process.stdout.split()
    assert not {"onnx_graphsurgeon", "onnx_ir"} & set(process.stdout.split())


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_graph_with_local_functions_is_renamed_without_a_message(
    library: str, capfd: pytest.CaptureFixture[str]
) -> None:
    live = LIBRARIES[library].load(with_function("b"))
    gs.logger.G_LOGGER.severity = gs.logger.G_LOGGER.ERROR
    assert onnxkvrename.rename_graph(live, "VLLM").status == "renamed"
    assert capfd.readouterr() == ("", "")
