"""A layout as a member of a document of ``inspect``, and strictly back."""

from __future__ import annotations

import json
import math
import shutil
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import models
import numpy as np
import onnx
import onnx.helper
import pytest
import window_sets
from hypothesis import given
from hypothesis import strategies as st
from models import saved
from schemas import VALIDATOR
from tiers import thin

from onnxkvrename import KvRenameError, ModelError, compare, load_rules
from onnxkvrename.files.find import list_models
from onnxkvrename.findings import CODES, Finding, build_finding
from onnxkvrename.handoff.consumer_checks import check_consumer
from onnxkvrename.handoff.find_consumers import list_consumers, load_consumer
from onnxkvrename.layout import layout as layouts
from onnxkvrename.layout.inspect import Inspection, inspect_models
from onnxkvrename.layout.json import LayoutContent, parse_layout
from onnxkvrename.layout.layout import KvBuffer, Layout
from onnxkvrename.layout.load import LoadedLayout, load_layout
from onnxkvrename.model.signature import Value
from onnxkvrename.report.documents.inspect_json import DOCUMENT, describe_inspection
from onnxkvrename.rules.kinds import list_kinds
from onnxkvrename.rules.plan import UnchangedName
from onnxkvrename.rules.results import ModelReport
from onnxkvrename.verification import trace_buffer_updates

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
EXPORTS = Path(__file__).resolve().parents[3] / "shared" / "exports"
RULES = load_rules()
CONSUMERS = list_consumers()


def render(*loaded: LoadedLayout, code: int = 0) -> str:
    content = describe_inspection(Inspection((), loaded), RULES.profile_choice)
    return DOCUMENT.render(content, code)


def document(layout: Layout, *findings: Finding) -> dict[str, Any]:
    """Return the document of a layout, which its schema allows."""
    report = ModelReport("m.onnx", "m.onnx", "unchanged", findings=findings)
    found: dict[str, Any] = json.loads(render(LoadedLayout(layout, (report,))))
    VALIDATOR.validate(found)
    return found


def load(path: Path, **sizes: int) -> Layout:
    return load_layout([path], RULES, sizes).layout


def inspect(*paths: Path, **sizes: int) -> tuple[LoadedLayout, ...]:
    return inspect_models(list_models(paths), RULES, sizes=sizes).layouts


def describe(layout: Layout) -> dict[str, Any]:
    (found,) = document(layout)["layouts"]
    return found  # type: ignore[no-any-return]


# There and back again.

NAMES = st.one_of(
    st.sampled_from(["past_key.0", "a/b", "", "\x00", "\u202e", "😀", "\x7f\x1b[2J", '"\\\n']),
    st.binary(max_size=8).map(lambda data: data.decode("utf-8", "surrogateescape")),
)
DIMS = st.one_of(st.none(), st.integers(-1, 1 << 62), NAMES, st.just("sliding_window"))
SHAPES = st.one_of(st.none(), st.lists(DIMS, max_size=5).map(tuple))
VALUES = st.builds(Value, NAMES, NAMES, SHAPES)
Values = tuple[list[Value], list[Value]]
SIZES = st.dictionaries(NAMES, st.integers(1, 1 << 40), max_size=3).map(MappingProxyType)


@st.composite
def buffers(draw: st.DrawFn, values: Values, models: list[str]) -> KvBuffer:
    """Draw a buffer with the names and the shape of an input and an output, or of one of them."""
    into, out = (draw(st.sampled_from(side)) if side else None for side in values)
    if into is not None and out is not None and draw(st.booleans()):
        out = None
    shape = next((end.shape for end in (into, out) if end and end.shape is not None), None)
    kind = draw(st.sampled_from(list_kinds()))
    sequence, window = layouts.find_axis_and_window(kind, shape)
    return KvBuffer(
        layer=draw(st.integers(0, 999_999)),
        part=draw(NAMES),
        kind=kind,
        buffer=draw(NAMES),
        scope=draw(NAMES),
        input=None if into is None else into.name,
        output=None if out is None else out.name,
        dtype=draw(st.sampled_from(["FLOAT16", "MXINT8", "INT4", "STRING", "sequence(FLOAT)"])),
        shape=shape,
        sequence_axis=sequence,
        window=window,
        model=draw(st.sampled_from(models)),
        token=draw(st.none() | NAMES),
    )


@st.composite
def any_layouts(draw: st.DrawFn) -> Layout:
    models = draw(st.lists(NAMES, min_size=1, max_size=3))
    named = st.lists(VALUES, max_size=3, unique_by=lambda value: value.name)
    values = (draw(named), draw(named))
    found = st.lists(
        buffers(values, models),
        max_size=4 if any(values) else 0,
        unique_by=lambda buffer: (buffer.layer, buffer.part),
    )
    return Layout(
        models=tuple(models),
        inputs=tuple(values[0]),
        outputs=tuple(values[1]),
        buffers=tuple(draw(found)),
        kept=tuple(draw(st.lists(st.builds(UnchangedName, NAMES, NAMES), max_size=2))),
        sizes=draw(SIZES),
    )


@given(any_layouts())
def test_a_layout_comes_back_whatever_the_names(layout: Layout) -> None:
    text = render(LoadedLayout(layout, ()))
    assert text.isascii()
    VALIDATOR.validate(json.loads(text))
    assert parse_layout(text, "l.json") == (layout, ())


@pytest.mark.parametrize("kind", ["plain", "VLLM"])
@pytest.mark.parametrize("path", sorted((FIXTURES / "plain").glob("*.onnx")), ids=lambda p: p.name)
def test_every_fixture_comes_back(path: Path, kind: str) -> None:
    layout = load(FIXTURES / kind / path.name, ctx_len=48)
    assert parse_layout(json.dumps(document(layout)), "l.json") == (layout, ())


def test_findings_come_back() -> None:
    wrong = (
        build_finding("KV102", "past_key.0", "is", "do"),
        build_finding("KV111", "", "", "")._replace(severity="error"),
    )
    layout = load(FIXTURES / "plain" / "decoder.onnx")
    assert parse_layout(json.dumps(document(layout, *wrong)), "l.json") == (layout, wrong)


# What it says.


def test_a_buffer_says_all_there_is_to_know() -> None:
    said = describe(load(FIXTURES / "VLLM" / "hybrid.onnx", sliding_window=16))
    expected = {
        "layer": 2,
        "part": "key",
        "kind": "sliding_window",
        "kind_guessed": False,
        "update": "untraced",
        "update_axis": None,
        "buffer": "past_key",
        "scope": "",
        "input": "past_key.2_VLLM",
        "output": "past_key.2_VLLM_RetainedState",
        "token": "VLLM",
        "dtype": "FLOAT",
        "shape": ["batch_size", 2, "sliding_window", 4],
        "sized_shape": ["batch_size", 2, 16, 4],
        "axes": [],
        "beside": "",
        "sequence_axis": 2,
        "window": "sliding_window",
        "window_size": 16,
        "bytes_per_token": 32,
        "bytes_per_state": None,
        "bytes": 512,
        "model": str(FIXTURES / "VLLM" / "hybrid.onnx"),
    }
    assert {key: said["buffers"][4][key] for key in expected} == expected
    assert (said["layers"], said["sizes"]) == ([0, 1, 2], {"sliding_window": 16})
    assert said["missing"] == ["ctx_len"]


def test_totals_keep_apart_what_grows_otherwise() -> None:
    path = FIXTURES / "VLLM" / "hybrid.onnx"
    assert describe(load(path))["totals"] == {
        "bytes_per_token": {"context": 64, "window": 64, "encoder": 0},
        "state_bytes": 96 + 128,
        "sequence_bytes": None,
        "batch_bytes": None,
    }
    said = describe(load(path, ctx_len=100, sliding_window=10))["totals"]
    assert (said["sequence_bytes"], said["batch_bytes"]) == (6400 + 640 + 224, None)
    said = describe(load(path, ctx_len=100, sliding_window=10, batch_size=3))["totals"]
    assert said["batch_bytes"] == 3 * said["sequence_bytes"]


def test_one_size_that_is_not_known_leaves_a_total_unknown() -> None:
    layout = load(FIXTURES / "plain" / "mla.onnx", ctx_len=8)
    assert layouts.compute_byte_totals(layout).sequence_bytes == 2 * (8 + 4) * 8 * 4
    odd = layout.buffers[0]._replace(dtype="STRING")
    found = layouts.compute_byte_totals(layout._replace(buffers=(odd, *layout.buffers[1:])))
    assert (found.bytes_per_token.context, found.sequence_bytes) == (None, None)


def test_cross_attention_grows_with_the_encoder() -> None:
    layout = load(FIXTURES / "plain" / "decoder.onnx")
    cross = tuple(buffer._replace(kind="cross_attention") for buffer in layout.buffers)
    found = layouts.compute_byte_totals(layout._replace(buffers=cross)).bytes_per_token
    assert (found.context, found.encoder) == (0, 4 * 32)


def test_kept_buffers_have_their_reasons() -> None:
    said = describe(load(FIXTURES / "plain" / "sampler.onnx"))
    reasons = {kept["name"]: kept["reason"] for kept in said["kept"]}
    assert reasons["past_repetition_penalty_buffer_RetainedState"] == "sampler"
    assert reasons["next_tokens"] == "not retained"


def test_a_finding_says_of_which_model() -> None:
    layout = load(FIXTURES / "plain" / "mla.onnx")
    (said,) = document(layout, build_finding("KV109", "", "a", "b"))["layouts"]
    assert said["findings"] == [
        {
            "model": "m.onnx",
            "code": "KV109",
            "severity": CODES["KV109"].severity,
            "name": "",
            "message": "a",
            "hint": "b",
        }
    ]


# Which models have one.


def test_windows_have_one_layout_and_other_models_one_each(tmp_path: Path) -> None:
    first = window_sets.write_windows(tmp_path / "a", 3)
    second = window_sets.write_windows(tmp_path / "b", 2)
    shutil.copyfile(FIXTURES / "plain" / "decoder.onnx", tmp_path / "decoder.onnx")
    shutil.copyfile(FIXTURES / "plain" / "vlm_dual" / "encoder.onnx", tmp_path / "encoder.onnx")
    found = inspect(tmp_path)
    assert sorted(len(each.layout.models) for each in found) == [1, 2, 3]
    for path in (first, second, tmp_path / "decoder.onnx"):
        assert load(path) in [each.layout for each in found]


@pytest.mark.parametrize("layers", [(0, 3), (1, 3)])
def test_a_merge_beside_its_windows_is_judged_as_in_compare(
    layers: tuple[int, int], tmp_path: Path
) -> None:
    export = window_sets.write_windows(tmp_path, 3)
    saved(window_sets.build_window(*layers), export / "merged_{}-{}.onnx".format(*layers))
    (found,) = inspect(export)
    assert found.layout == load(export)


def test_what_is_found_of_all_models_together_is_with_the_only_layout(tmp_path: Path) -> None:
    export = window_sets.write_windows(tmp_path / "export", 3)
    shutil.rmtree(export / "layer_1_2")
    (found,) = inspect(export)
    loaded = load_layout([export], RULES)
    assert [each.findings for each in found.reports] == [each.findings for each in loaded.reports]
    assert found.failed


def test_a_model_with_two_buffers_in_one_place_has_no_layout(tmp_path: Path) -> None:
    model = models.decoder()
    for value in (*model.graph.input, *model.graph.output):
        if value.name.startswith("past_key"):
            copy = onnx.ValueInfoProto()
            copy.CopyFrom(value)
            copy.name = f"layer_0/{value.name}"
            (model.graph.input if value in model.graph.input else model.graph.output).append(copy)
    path = saved(model, tmp_path / "m.onnx")
    with pytest.raises(ModelError, match="two buffers"):
        load(path)
    assert inspect(path) == ()


# What is refused.


def with_layout(**content: Any) -> str:
    said = document(load(FIXTURES / "plain" / "mla.onnx"))
    said["layouts"][0].update(content)
    return json.dumps(said)


def with_buffer(**content: Any) -> str:
    said = document(load(FIXTURES / "plain" / "mla.onnx"))
    said["layouts"][0]["buffers"][0].update(content)
    return json.dumps(said)


def with_head(**content: Any) -> str:
    return json.dumps({**document(load(FIXTURES / "plain" / "mla.onnx")), **content})


def two_layouts() -> str:
    loaded = LoadedLayout(load(FIXTURES / "plain" / "mla.onnx"), ())
    return render(loaded, loaded)


INVALID = [
    ("", "is not JSON: "),
    ("{", "is not JSON: "),
    ("{" * 100_000, "is not JSON: "),
    ("[]", "is not a layout: it has no schema"),
    ("{}", "is not a layout: it has no schema"),
    (with_head(schema=1), "is not a layout: it has no schema"),
    (with_head(schema="onnxkvrename.report/1"), "is not a layout: it is onnxkvrename.report/1"),
    (with_head(schema="onnxkvrename.inspect/1"), "is onnxkvrename.inspect/1, but this version"),
    (with_head(schema="onnxkvrename.inspect/3"), "reads onnxkvrename.inspect/2 (use the same"),
    (with_head(schema=f"onnxkvrename.inspect/{'9' * 1000}"), "is onnxkvrename.inspect/999"),
    (with_head(error={"message": "", "path": None, "hint": None}), "command that failed"),
    (with_head(exit_code=2), "command that failed"),
    (with_head(layouts=None), "layouts: expected array, got null"),
    (with_head(layouts=[]), "has no layout: its models have no KV buffers"),
    (two_layouts(), "has the layouts of 2 models; pass a file of one"),
    (with_layout(models=None), "valid: layouts[0].models: expected array, got null"),
    (with_layout(models=[1]), "layouts[0].models[0]: expected str, got int"),
    (with_layout(models=[]), "layouts[0].buffers[0].model: is not one of the models"),
    (with_layout(sizes={"ctx_len": True}), "sizes[...]: expected int, got bool"),
    (with_layout(sizes={"ctx_len": 1 << 64}), "does not fit into 64 bits"),
    (with_layout(sizes={"ctx_len": 0}), "layouts[0].sizes: a size is 1 or more"),
    (with_layout(buffers=[[]]), "layouts[0].buffers[0]: expected object"),
    (with_layout(buffers=[{}]), "layouts[0].buffers[0]: object missing required field"),
    (with_layout(inputs=[]), "layouts[0].buffers[0].input: is not one of the inputs"),
    (with_layout(outputs=[]), "layouts[0].buffers[0].output: is not one of the outputs"),
    (with_layout(findings=[{"model": "", "code": "", "severity": 1}]), "findings[0].severity: "),
    (
        with_layout(outputs=[{"name": "x", "dtype": "", "shape": [1] * 257}]),
        "has more than 256 dimensions in a shape",
    ),
    (
        with_layout(inputs=[{"name": "x", "dtype": "", "shape": []}] * 70_000),
        "has more than 65,536 inputs",
    ),
    (
        with_layout(buffers=describe(load(FIXTURES / "plain" / "mla.onnx"))["buffers"] * 1100),
        "has more than 4,096 KV buffers",
    ),
    (with_buffer(kind="attention"), "buffers[0].kind: invalid"),
    (with_buffer(layer=True), "buffers[0].layer: expected int"),
    (with_buffer(layer="0"), "buffers[0].layer: expected int"),
    (with_buffer(layer=-1), "buffers[0].layer: is less than 0"),
    (with_buffer(layer="\ud800"), "not Unicode"),
    (with_buffer(shape=[1.5]), "buffers[0].shape[0]: expected"),
    (with_buffer(shape=["b", 9]), "buffers[0].sequence_axis: this or the window"),
    (with_buffer(sequence_axis=7), "buffers[0].sequence_axis: this or the window"),
    (with_buffer(window=4), "buffers[0].sequence_axis: this or the window"),
    (with_buffer(kind="mamba"), "buffers[0].sequence_axis: this or the window"),
    (with_buffer(axes=["batch"]), "buffers[0].axes: are not as many as the dimensions"),
    (with_buffer(input=None, output=None), "buffers[0].input: is missing, and so is the output"),
    (with_buffer(part="k_pe"), "buffers[1].part: another buffer of this layer is the same part"),
    (with_buffer(update="grows"), "buffers[0].update: "),
    (with_buffer(update=None), "buffers[0].update: expected str"),
    (with_buffer(update_axis=True), "buffers[0].update_axis: expected int"),
    (with_buffer(kind_guessed=1), "buffers[0].kind_guessed: expected bool"),
]


@pytest.mark.parametrize(("text", "reason"), INVALID, ids=[reason for _, reason in INVALID])
def test_a_damaged_file_is_refused_in_one_line(text: str, reason: str) -> None:
    with pytest.raises(ModelError) as error:
        parse_layout(text, "l.json")
    assert str(error.value).startswith("l.json: ")
    assert reason in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 300


@pytest.mark.parametrize("key", LayoutContent._fields)
def test_a_layout_with_something_missing_is_refused(key: str) -> None:
    said = document(load(FIXTURES / "plain" / "mla.onnx"))
    del said["layouts"][0][key]
    with pytest.raises(ModelError, match=f"missing required field {key}"):
        parse_layout(json.dumps(said), "l.json")


def test_members_that_this_version_does_not_know_are_ignored() -> None:
    layout = load(FIXTURES / "plain" / "mla.onnx")
    for text in (with_head(later={}), with_layout(later={}), with_buffer(later={})):
        assert parse_layout(text, "l.json") == (layout, ())


def test_bytes_are_computed_and_not_read() -> None:
    layout = load(FIXTURES / "plain" / "mla.onnx")
    assert parse_layout(with_buffer(bytes=1, bytes_per_token=1), "l.json") == (layout, ())


# Compared with onnx.


def list_expected_bytes(model: onnx.ModelProto, sizes: dict[str, int]) -> dict[str, int]:
    """Return the bytes of one sequence in each KV input: all sizes but the first, and dtype."""
    found = {}
    for value in model.graph.input:
        name = value.name.removesuffix("_VLLM")
        if name.rpartition(".")[0].rpartition("/")[2] in (
            *("past_key", "past_value", "compressed_kv", "k_pe"),
        ):
            tensor = value.type.tensor_type
            dims = [dim.dim_value or sizes[dim.dim_param] for dim in tensor.shape.dim[1:]]
            dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type))
            found[value.name] = math.prod(dims) * dtype.itemsize
    return found


REAL = sorted(
    path.relative_to(EXPORTS)
    for path in EXPORTS.glob("*/*/**/*.onnx")
    if "Encoder" not in path.name
)


@pytest.mark.skipif(not REAL, reason=f"no real exports: {EXPORTS} is not there")
def test_there_are_real_exports_of_every_case() -> None:
    assert len({path.parts[0] for path in REAL}) >= 11


@pytest.mark.skipif(not REAL, reason=f"no real exports: {EXPORTS} is not there")
@pytest.mark.parametrize("path", thin(REAL, 3), ids=str)
def test_bytes_of_a_real_export_are_those_that_onnx_says(path: Path) -> None:
    model = onnx.load(EXPORTS / path, load_external_data=False)
    sizes = {"ctx_len": 96, "sliding_window": 24}
    expected = list_expected_bytes(model, sizes)
    symbols = load(EXPORTS / path).symbols
    (found,) = inspect(
        EXPORTS / path, **{name: size for name, size in sizes.items() if name in symbols}
    )
    said = describe(found.layout)
    assert {
        buffer["input"] or buffer["output"]: buffer["bytes"] for buffer in said["buffers"]
    } == expected
    assert said["totals"]["sequence_bytes"] == sum(expected.values()) > 0
    for buffer in said["buffers"]:
        length = buffer["sized_shape"][buffer["sequence_axis"]]
        assert buffer["bytes"] == buffer["bytes_per_token"] * length
    assert [value["name"] for value in said["inputs"]] == [v.name for v in model.graph.input]
    assert [value["name"] for value in said["outputs"]] == [v.name for v in model.graph.output]
    assert parse_layout(render(found), "l.json")[0] == found.layout


# What a stranger may have written.


def list_places(value: Any) -> list[tuple[Any, ...]]:
    """Return the way to each value of a document."""
    if not isinstance(value, dict | list):
        return []
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return [(key, *deeper) for key, item in items for deeper in ((), *list_places(item))]


HYBRID = load_layout(
    [FIXTURES / "VLLM" / "hybrid.onnx"],
    RULES,
    {"ctx_len": 64},
    trace=trace_buffer_updates,
)
WRITTEN = render(HYBRID)
ANYTHING = st.one_of(
    *(st.none(), st.booleans(), st.integers(-1, 9), st.integers(), st.floats(0, 9)),
    *(st.text(), st.sampled_from(["batch_size", "sliding_window", "FLOAT16", "STRING", "append"])),
    *(st.sampled_from(list_kinds()), st.lists(st.integers(-1, 9) | st.text(), max_size=5)),
)


@given(st.sampled_from(list_places(json.loads(WRITTEN))), ANYTHING, st.sampled_from(CONSUMERS))
def test_a_file_with_any_one_value_changed_is_refused_or_compared(
    way: tuple[Any, ...], new: Any, consumer: str
) -> None:
    said = json.loads(WRITTEN)
    *above, last = way
    holder = said
    for key in above:
        holder = holder[key]
    holder[last] = new
    with suppress(KvRenameError):
        layout, _ = parse_layout(json.dumps(said), "l.json")
        list(check_consumer(layout, load_consumer(consumer)))
        for sides in ((layout, HYBRID.layout), (HYBRID.layout, layout), (layout, layout)):
            str(compare(*sides, consumer))
