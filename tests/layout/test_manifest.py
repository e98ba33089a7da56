"""The manifest: a layout as a JSON document, and back."""

from __future__ import annotations

import json
import math
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx
import onnx.helper
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tiers import thin

from onnxkvrename import ModelError, load_rules
from onnxkvrename.findings import CODES, Finding, build_finding
from onnxkvrename.layout import layout as layouts
from onnxkvrename.layout import load as gathering
from onnxkvrename.layout import manifest
from onnxkvrename.layout.layout import KvBuffer, Layout
from onnxkvrename.layout.load import CompileInfo
from onnxkvrename.model.signature import Value
from onnxkvrename.rules.kinds import list_kinds
from onnxkvrename.rules.plan import UnchangedName
from onnxkvrename.rules.results import ModelReport

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
EXPORTS = Path(__file__).resolve().parents[3] / "shared" / "exports"
RULES = load_rules()


def render(layout: Layout, *reports: ModelReport) -> str:
    return manifest.DOCUMENT.render(manifest.describe_layout(layout, reports), 0)


def document(layout: Layout, *findings: Finding) -> dict[str, Any]:
    """The document of a layout, held against its schema."""
    report = ModelReport("m.onnx", "m.onnx", "unchanged", findings=findings)
    found: dict[str, Any] = json.loads(render(layout, report))
    return found


def gathered(path: Path, **sizes: int) -> Layout:
    return gathering.load_layout([path], RULES, CompileInfo(sizes)).layout


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
    """A buffer with the names and the shape of an input and an output, or of one of them."""
    into, out = (draw(st.sampled_from(side or [None])) for side in values)
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
    found = st.lists(buffers(values, models), max_size=4 if any(values) else 0)
    return Layout(
        models=tuple(models),
        inputs=tuple(values[0]),
        outputs=tuple(values[1]),
        buffers=tuple(draw(found)),
        kept=tuple(draw(st.lists(st.builds(UnchangedName, NAMES, NAMES), max_size=2))),
        sizes=draw(SIZES),
    )


@given(any_layouts())
def test_a_manifest_gives_back_its_layout_whatever_the_names(layout: Layout) -> None:
    text = render(layout)
    assert text.isascii()
    assert manifest.parse_manifest(text, "m.json")[0] == layout


@pytest.mark.parametrize("kind", ["plain", "VLLM"])
@pytest.mark.parametrize("path", sorted((FIXTURES / "plain").glob("*.onnx")), ids=lambda p: p.name)
def test_every_fixture_comes_back(path: Path, kind: str) -> None:
    layout = gathered(FIXTURES / kind / path.name, ctx_len=48)
    assert manifest.parse_manifest(json.dumps(document(layout)), "m.json")[0] == layout


def test_findings_come_back() -> None:
    wrong = (
        build_finding("KV102", "past_key.0", "is", "do"),
        build_finding("KV111", "", "", "")._replace(severity="error"),
    )
    report = ModelReport("m.onnx", "m.onnx", "failed", findings=wrong)
    layout = gathered(FIXTURES / "plain" / "decoder.onnx")
    text = render(layout, report)
    assert manifest.parse_manifest(text, "m.json") == (layout, wrong)


def test_a_job_that_could_not_be_done_has_every_key_and_is_no_manifest() -> None:
    fault = ModelError("no such file", path="m.onnx")
    text = manifest.DOCUMENT.render(manifest.DOCUMENT.empty, 2, fault)
    said = json.loads(text)
    assert (said["error"]["path"], said["exit_code"]) == ("m.onnx", 2)
    with pytest.raises(ModelError, match=r"m\.json: is the output"):
        manifest.parse_manifest(text, "m.json")


# What it says.


def test_a_buffer_says_all_there_is_to_know() -> None:
    said = document(gathered(FIXTURES / "VLLM" / "hybrid.onnx", sliding_window=16))
    assert said["buffers"][4] == {
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
    assert (said["layers"], said["sizes"]) == ([0, 1, 2], {"sliding_window": 16})
    assert said["missing"] == ["ctx_len"]


def test_totals_keep_apart_what_grows_otherwise() -> None:
    path = FIXTURES / "VLLM" / "hybrid.onnx"
    said = document(gathered(path))["totals"]
    assert said == {
        "bytes_per_token": {"context": 64, "window": 64, "encoder": 0},
        "state_bytes": 96 + 128,
        "sequence_bytes": None,
        "batch_bytes": None,
    }
    said = document(gathered(path, ctx_len=100, sliding_window=10))["totals"]
    assert (said["sequence_bytes"], said["batch_bytes"]) == (6400 + 640 + 224, None)
    said = document(gathered(path, ctx_len=100, sliding_window=10, batch_size=3))["totals"]
    assert said["batch_bytes"] == 3 * said["sequence_bytes"]


def test_one_size_that_is_not_known_leaves_a_total_unknown() -> None:
    layout = gathered(FIXTURES / "plain" / "mla.onnx", ctx_len=8)
    assert manifest.compute_byte_totals(layout).sequence_bytes == 2 * (8 + 4) * 8 * 4
    odd = layout.buffers[0]._replace(dtype="STRING")
    found = manifest.compute_byte_totals(layout._replace(buffers=(odd, *layout.buffers[1:])))
    assert (found.bytes_per_token.context, found.sequence_bytes) == (None, None)


def test_cross_attention_grows_with_the_encoder() -> None:
    layout = gathered(FIXTURES / "plain" / "decoder.onnx")
    cross = tuple(buffer._replace(kind="cross_attention") for buffer in layout.buffers)
    found = manifest.compute_byte_totals(layout._replace(buffers=cross)).bytes_per_token
    assert (found.context, found.encoder) == (0, 4 * 32)


def test_kept_buffers_have_their_reasons() -> None:
    said = document(gathered(FIXTURES / "plain" / "sampler.onnx"))
    reasons = {kept["name"]: kept["reason"] for kept in said["kept"]}
    assert reasons["past_repetition_penalty_buffer_RetainedState"] == "sampler"
    assert reasons["next_tokens"] == "not retained"


def test_a_finding_says_of_which_model() -> None:
    said = document(gathered(FIXTURES / "plain" / "mla.onnx"), build_finding("KV109", "", "a", "b"))
    assert said["findings"] == [
        {
            "model": "m.onnx",
            "code": "KV109",
            "severity": CODES["KV109"][0],
            "name": "",
            "message": "a",
            "hint": "b",
        }
    ]


# The digest.


def own_digest(said: dict[str, Any]) -> str:
    """The digest from the document alone, as a worker in another language would take it."""
    rows = [
        [
            *(buffer[key] for key in ("layer", "part", "kind", "dtype")),
            buffer["sized_shape"] and [None, *buffer["sized_shape"][1:]],
            buffer["input"] or buffer["output"],
        ]
        for buffer in said["buffers"]
    ]
    return sha256(json.dumps(rows, separators=(",", ":")).encode("ascii")).hexdigest()


@pytest.mark.parametrize("name", ["decoder.onnx", "hybrid.onnx", "mla.onnx", "windows", "vlm_dual"])
@pytest.mark.parametrize("sizes", [{}, {"ctx_len": 128, "batch_size": 2}], ids=["open", "sized"])
def test_the_digest_follows_from_the_document(name: str, sizes: dict[str, int]) -> None:
    said = document(gathered(FIXTURES / "VLLM" / name, **sizes))
    assert said["kv_layout_sha256"] == own_digest(said)


def test_a_layout_without_buffers_has_no_digest_to_be_equal() -> None:
    layout = gathered(FIXTURES / "plain" / "vlm_dual" / "encoder.onnx")
    said = document(layout)
    assert (said["kv_layout_sha256"], said["buffers"]) == (None, [])
    assert manifest.parse_manifest(json.dumps(said), "m.json")[0] == layout


# What is refused.


def sealed(said: dict[str, Any]) -> str:
    """A document with the digest of what it says, as another program may have written it."""
    return json.dumps({**said, "sha256": manifest.compute_document_digest(said)})


def changed(**content: Any) -> str:
    return sealed({**document(gathered(FIXTURES / "plain" / "mla.onnx")), **content})


def with_buffer(**content: Any) -> str:
    said = document(gathered(FIXTURES / "plain" / "mla.onnx"))
    said["buffers"][0].update(content)
    return sealed(said)


def test_the_whole_document_is_sealed() -> None:
    said = document(gathered(FIXTURES / "plain" / "mla.onnx"))
    rest = {key: said[key] for key in sorted(said) if key != "sha256"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    assert said["sha256"] == sha256(text.encode("ascii")).hexdigest()


WRITTEN = render(
    gathered(FIXTURES / "VLLM" / "hybrid.onnx", ctx_len=64),
    ModelReport("m.onnx", "m.onnx", "unchanged", findings=(build_finding("KV109", "", "a", "b"),)),
)


def places(value: Any) -> list[tuple[Any, ...]]:
    """The way to each value of a document."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return [(key, *deeper) for key, item in items for deeper in ((), *within(item))]


def within(value: Any) -> list[tuple[Any, ...]]:
    return places(value) if isinstance(value, dict | list) else []


ANYTHING = st.one_of(st.none(), st.booleans(), st.integers(-1, 99), st.floats(0, 9), st.text())


@given(st.sampled_from(places(json.loads(WRITTEN))), ANYTHING)
def test_a_manifest_with_any_one_value_changed_is_refused(way: tuple[Any, ...], new: Any) -> None:
    said = json.loads(WRITTEN)
    *above, last = way
    holder = said
    for key in above:
        holder = holder[key]
    assume(json.dumps(holder[last]) != json.dumps(new))
    holder[last] = new
    with pytest.raises(ModelError):
        manifest.parse_manifest(json.dumps(said), "m.json")


@pytest.mark.parametrize(
    "change",
    [
        lambda said: said["sizes"].update(ctx_len=4),
        lambda said: said["buffers"][0].update(bytes=1),
        lambda said: said["findings"].clear(),
        lambda said: said.update(later={}),
        lambda said: said.pop("totals"),
        lambda said: said.pop("sha256"),
    ],
)
def test_a_manifest_that_was_changed_by_hand_says_so(change: Any) -> None:
    said = json.loads(WRITTEN)
    change(said)
    with pytest.raises(ModelError, match=r"m\.json: was changed") as error:
        manifest.parse_manifest(json.dumps(said), "m.json")
    assert "command manifest" in str(error.value)


def test_another_layout_of_the_same_document_is_no_change() -> None:
    said = dict(reversed(json.loads(WRITTEN).items()))
    assert manifest.parse_manifest(json.dumps(said), "m.json") == manifest.parse_manifest(
        WRITTEN, "m.json"
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is not JSON: "),
        ("{", "is not JSON: "),
        ("{" * 100_000, "is not JSON: "),
        ("[]", "not a manifest"),
        ("{}", "not a manifest"),
        (changed(schema=1), "not a manifest"),
        (changed(schema="onnxkvrename.manifest/2"), "it is onnxkvrename.m"),
        (changed(schema="onnxkvrename.report/1"), "it is onnxkvrename.report/1"),
        (changed(models=None), "valid: models: expected array, got null"),
        (changed(models=[1]), "models[0]: expected str, got int"),
        (changed(sizes={"ctx_len": True}), "sizes[...]: expected int, got bool"),
        (changed(buffers=[[]]), "buffers[0]: expected object"),
        (changed(buffers=[{}]), "buffers[0]: object missing required field"),
        (changed(findings=[{"model": "", "code": "", "severity": 1}]), "findings[0].severity: "),
        (with_buffer(kind="attention"), "buffers[0].kind: invalid"),
        (with_buffer(layer=True), "buffers[0].layer: expected int"),
        (with_buffer(layer="0"), "buffers[0].layer: expected int"),
        (with_buffer(shape=[1.5]), "buffers[0].shape[0]: expected"),
        (with_buffer(shape=["b", 9, "ctx_len", 8]), "kv_layout_sha256"),
        (with_buffer(dtype="FLOAT16"), "kv_layout_sha256"),
        (with_buffer(layer=7), "kv_layout_sha256"),
        (with_buffer(part="k_pe"), "kv_layout_sha256"),
        (changed(sizes={"ctx_len": 5}), "kv_layout_sha256"),
        (changed(buffers=[]), "kv_layout_sha256"),
        (changed(kv_layout_sha256=None), "kv_layout_sha256"),
    ],
)  # fmt: skip
def test_what_is_no_manifest_or_a_damaged_one_is_refused_in_one_line(
    text: str, reason: str
) -> None:
    with pytest.raises(ModelError) as error:
        manifest.parse_manifest(text, "m.json")
    assert str(error.value).startswith("m.json: ")
    assert reason in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 300


NEEDED = ("models", "sizes", "inputs", "outputs", "buffers", "kept", "findings")


@pytest.mark.parametrize("key", NEEDED)
def test_a_manifest_with_something_missing_is_refused(key: str) -> None:
    said = json.loads(changed())
    del said[key]
    with pytest.raises(ModelError, match=f"missing required field {key}"):
        manifest.parse_manifest(sealed(said), "m.json")


def test_a_manifest_with_more_in_it_is_read() -> None:
    layout = gathered(FIXTURES / "plain" / "mla.onnx")
    assert manifest.parse_manifest(changed(later={}), "m.json")[0] == layout


# Held against onnx.


def witness(model: onnx.ModelProto, sizes: dict[str, int]) -> dict[str, int]:
    """Bytes of one sequence in each KV input: product of all sizes but the first, and dtype."""
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
    expected = witness(model, sizes)
    layout = gathered(EXPORTS / path)
    known = {name: size for name, size in sizes.items() if name in layout.symbols}
    said = document(layouts.apply_sizes(layout, known))
    assert {
        buffer["input"] or buffer["output"]: buffer["bytes"] for buffer in said["buffers"]
    } == expected
    assert said["totals"]["sequence_bytes"] == sum(expected.values()) > 0
    for buffer in said["buffers"]:
        length = buffer["sized_shape"][buffer["sequence_axis"]]
        assert buffer["bytes"] == buffer["bytes_per_token"] * length
    assert [value["name"] for value in said["inputs"]] == [v.name for v in model.graph.input]
    assert [value["name"] for value in said["outputs"]] == [v.name for v in model.graph.output]
    assert said["kv_layout_sha256"] == own_digest(said)
    assert manifest.parse_manifest(json.dumps(said), "m.json")[0] == layouts.apply_sizes(
        layout, known
    )


@pytest.mark.parametrize(
    ("key", "value", "fault"),
    [
        ("update", "grows", r"buffers\[0\]\.update: "),
        ("update", None, r"\.update: expected str"),
        ("update_axis", True, r"\.update_axis: expected int"),
        ("kind_guessed", 1, r"\.kind_guessed: expected bool"),
        ("layer", "\ud800", "not Unicode"),
    ],
)
def test_an_update_that_cannot_be_is_refused(key: str, value: object, fault: str) -> None:
    said = document(gathered(FIXTURES / "VLLM" / "hybrid.onnx"))
    said["buffers"][0][key] = value
    with pytest.raises(ModelError, match=fault):
        manifest.parse_manifest(sealed(said), "m.json")
