"""Files that repeat a model's names, under the names that it gets."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from onnxkvrename import ModelError, load_rules
from onnxkvrename.model.file import open_model
from onnxkvrename.model.signature import Signature, Value
from onnxkvrename.rules.plan import TokenChange, build_rename_plan
from onnxkvrename.rules.sidecar_files import may_be_sidecar
from onnxkvrename.sidecars.formats import BUILT_IN, SidecarFormat, detect_format
from onnxkvrename.sidecars.model_names import ModelNames, OneModel
from onnxkvrename.sidecars.rewrite import RewrittenSidecar, rewrite_sidecar

EXPORTS = Path(__file__).resolve().parents[3] / "shared" / "exports" / "llama2l"
QEFF = load_rules()
VLLM, STRIP = TokenChange("VLLM"), TokenChange(None, strip=True)
CUSTOM, BATCH, PRECISION = BUILT_IN[:3]
BUFFERS = "past_key.0 past_value.0 past_key.1 past_value.1"
ENTRIES = """\
# past_key.0 comes first
 - IOName: past_key.0
   Precision: mxint8  # not past_key.0

 - IOName: 'past_key.0_RetainedState'
   Precision: mxint8

"""


def names(
    buffers: str = BUFFERS, wish: TokenChange = VLLM, suffix: str = "_RetainedState"
) -> ModelNames:
    """The names of a model with these buffers, ids and logits."""
    inputs = ("input_ids", *buffers.split())
    outputs = ("logits", *(buffer + suffix for buffer in buffers.split()))
    signature = Signature(*(tuple(Value(n, "FLOAT16", None) for n in s) for s in (inputs, outputs)))
    return ModelNames.from_models([describe(signature, wish)], wish, QEFF)


def describe(signature: Signature, wish: TokenChange) -> OneModel:
    """A model as the plan of a rename describes it."""
    plan = build_rename_plan(signature, QEFF, wish)
    values = (*signature.inputs, *signature.outputs)
    return OneModel(plan.pairs, tuple(value.name for value in values), plan.name_map)


def custom(*listed: str, line: str = "- IOName: {}\n  Precision: mxint8\n") -> str:
    """A custom_io.yaml with these names; ``~`` stands for ``_RetainedState``."""
    return "".join(line.format(name.replace("~", "_RetainedState")) for name in listed)


def done(text: str, of: ModelNames | None = None, kind: SidecarFormat = CUSTOM) -> str:
    return rewrite_sidecar(
        text.encode(), "sidecar", kind, names() if of is None else of
    ).data.decode()


def found(text: str, of: ModelNames | None = None, kind: SidecarFormat = CUSTOM) -> list[str]:
    """Code, severity and message of each finding."""
    followed = rewrite_sidecar(text.encode(), "sidecar", kind, names() if of is None else of)
    assert {finding.name for finding in followed.findings} <= {"sidecar"}
    return [f"{f.code} {f.severity}: {f.message}" for f in followed.findings]


PAIR = custom("past_key.0", "past_key.0~")


# What changes, and what stays


def test_names_change_and_nothing_else_does() -> None:
    renamed = done(ENTRIES)
    assert renamed.count("_VLLM") == 2
    assert "IOName: past_key.0_VLLM\n" in renamed
    assert "IOName: 'past_key.0_VLLM_RetainedState'\n" in renamed
    assert renamed.replace("_VLLM", "") == ENTRIES


def test_what_changed_is_told_in_the_order_of_the_file() -> None:
    followed = rewrite_sidecar(
        custom("past_key.1~", "past_key.1", "logits").encode(), "", CUSTOM, names()
    )
    assert followed.renamed == (
        ("past_key.1_RetainedState", "past_key.1_VLLM_RetainedState"),
        ("past_key.1", "past_key.1_VLLM"),
    )


@pytest.mark.parametrize("ending", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize(
    "form",
    [
        "{}",
        "\ufeff{}",
        "---\n{}...\n",
        "%YAML 1.2\n---\n\n\n{}# end, and no line after it",
        "{}\n\n\n   # é past_key.0\n",
    ],
)
def test_the_form_of_a_file_stays(form: str, ending: str) -> None:
    text = form.format(PAIR).replace("\n", ending)
    renamed = done(text)
    assert renamed == form.format(custom("past_key.0_VLLM", "past_key.0_VLLM~")).replace(
        "\n", ending
    )
    assert done(renamed, names("past_key.0_VLLM past_value.0_VLLM", STRIP)) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            '[{"IOName": "past_key.0", P: x}, {IOName: past_key.0_RetainedState}]',
            '[{"IOName": "past_key.0_VLLM", P: x}, {IOName: past_key.0_VLLM_RetainedState}]',
        ),
        (
            '-   ? IOName\n    : "past\\x5fkey.0"\n-  IOName:   past_key.0_RetainedState   \n',
            '-   ? IOName\n    : "past\\x5fkey.0_VLLM"\n'
            "-  IOName:   past_key.0_VLLM_RetainedState   \n",
        ),
        (
            "- Precision: &kv mxint8\n  IOName: past_key.0\n"
            "- {Precision: *kv, IOName: past_key.0_RetainedState, Note: past_key.0}\n",
            "- Precision: &kv mxint8\n  IOName: past_key.0_VLLM\n"
            "- {Precision: *kv, IOName: past_key.0_VLLM_RetainedState, Note: past_key.0}\n",
        ),
    ],
)
def test_every_style_of_yaml_is_kept(text: str, expected: str) -> None:
    assert done(text) == expected
    assert done(expected, names("past_key.0_VLLM past_value.0_VLLM", STRIP)) == text


@pytest.mark.parametrize("text", ["", "# nothing yet\n", "[]\n"])
def test_a_file_without_entries_stays_as_it_is(text: str) -> None:
    assert rewrite_sidecar(text.encode(), "", CUSTOM, names()) == RewrittenSidecar(
        text.encode(), (), ()
    )


def test_two_buffers_can_change_places() -> None:
    swap = {"past_key.0": "past_key.1", "past_key.1": "past_key.0"}
    text = custom("past_key.0", "past_key.1", "past_key.0")
    assert done(text, names()._replace(name_map=swap)) == custom(
        "past_key.1", "past_key.0", "past_key.1"
    )


STYLES = st.sampled_from(
    [
        "- IOName: {}\n  Precision: mxint8\n",
        "- {{Precision: float16, IOName: '{}'}}  # past_key.0\n\n",
        '- "IOName": "{}"\n',
        "-\n  # IOName: past_key.1\n  IOName: {}\n  Layout: NCHW\n",
    ]
)


@given(
    st.lists(st.tuples(st.sampled_from([*BUFFERS.split(), "logits", "other"]), STYLES)),
    st.sampled_from(["\n", "\r\n"]),
    st.booleans(),
)
def test_a_second_time_changes_nothing_and_the_way_back_gives_the_same_bytes(
    entries: list[tuple[str, str]], ending: str, bom: bool
) -> None:
    text = "\ufeff" * bom + "".join(style.format(name) for name, style in entries)
    data = text.replace("\n", ending).encode()
    first = rewrite_sidecar(data, "", CUSTOM, names())
    renamed = " ".join(f"{name}_VLLM" for name in BUFFERS.split())
    for model in (names(), names(renamed)):
        assert rewrite_sidecar(first.data, "", CUSTOM, model)[:2] == (first.data, ())
    assert rewrite_sidecar(first.data, "", CUSTOM, names(renamed, STRIP)).data == data
    before, after = (yaml.safe_load(b) or [] for b in (data, first.data))
    changes = names().name_map
    assert [e["IOName"] for e in after] == [changes.get(e["IOName"], e["IOName"]) for e in before]


# Models that have been renamed before


def test_a_file_that_was_left_behind_catches_up() -> None:
    renamed = names("past_key.0_VLLM past_value.0_VLLM")
    assert renamed.name_map == {}
    assert done(PAIR, renamed) == custom("past_key.0_VLLM", "past_key.0_VLLM~")
    assert found(PAIR, renamed) == []


def test_a_file_that_went_ahead_waits() -> None:
    ahead = custom("past_key.0_VLLM", "past_key.0_VLLM~")
    assert (done(ahead), found(ahead)) == (ahead, [])


def test_taking_the_token_out_catches_up_too() -> None:
    assert done(custom("past_key.0_OLD", "past_key.0_OLD~"), names(wish=STRIP)) == PAIR


REPLACE = TokenChange("VLLM", replace=True)


def test_a_different_token_is_refused_as_it_is_in_the_model() -> None:
    """Whether the model still has to be renamed makes no difference."""
    for model in (names("past_key.0 past_value.0"), names("past_key.0_VLLM past_value.0_VLLM")):
        text = custom("past_key.0_OLD", "past_key.0_OLD~", "past_value.0_OLD")
        assert done(text, model) == text
        (told,) = found(text, model)
        assert told.startswith("KV406 ")
        assert "3 names" in told
        assert "(first: past_key.0_OLD)" in told


@pytest.mark.parametrize("now", ["", "_VLLM", "_OTHER"])
def test_it_is_replaced_with_that_of_the_model(now: str) -> None:
    model = names(f"past_key.0{now} past_value.0{now}", REPLACE)
    text = custom("past_key.0_OLD", "past_key.0_OLD~")
    assert (done(text, model), found(text, model)) == (text.replace("_OLD", "_VLLM"), [])


@pytest.mark.parametrize("wish", [VLLM, REPLACE])
def test_a_different_token_counts_only_for_buffers_that_have_no_other_name(
    wish: TokenChange,
) -> None:
    """A file may serve several models: of this one it has all names already."""
    text = custom("past_key.0", "past_key.0~", "past_key.0_OLD", "past_key.0_OLD~")
    assert done(text, names(wish=wish)) == text.replace("0\n", "0_VLLM\n").replace(
        "0_R", "0_VLLM_R"
    )
    (told,) = found(text, names(wish=wish))
    assert told.startswith("KV404 warning: names past_key.0_OLD, past_key.0_OLD_RetainedState")


def test_a_name_of_another_model_beside_it_stays() -> None:
    model = names(wish=REPLACE)._replace(neighbour_names=frozenset(["past_key.0_OLD"]))
    text = custom("past_key.0_OLD", "past_value.0_OLD")
    assert done(text, model) == text.replace("past_value.0_OLD", "past_value.0_VLLM")


def test_a_file_for_several_models_follows_all_of_them() -> None:
    windows = [Signature((Value(f"k_pe.{layer}", "F", None),), ()) for layer in (0, 1)]
    models = [describe(window, VLLM) for window in windows]
    text = custom("k_pe.0", "k_pe.1")
    assert done(text, ModelNames.from_models(models, VLLM, QEFF)) == custom(
        "k_pe.0_VLLM", "k_pe.1_VLLM"
    )


# What is odd


def test_names_that_match_nothing_are_told() -> None:
    text = PAIR + custom("past_key.7", "logits", "past_value.7")
    (told,) = found(text)
    assert told.startswith("KV404 warning: ")
    assert "past_key.7, past_value.7" in told
    assert "past_key.0_VLLM" in done(text)


def test_inputs_and_outputs_that_are_no_kv_match() -> None:
    assert found(PAIR + custom("logits", "input_ids")) == []


def test_a_file_of_another_model_is_an_error() -> None:
    (told,) = found(custom("k_pe.0", "k_pe.0~", "logits"))
    assert told.startswith("KV404 warning: belongs")
    assert "k_pe.0, k_pe.0_RetainedState" in told


@pytest.mark.parametrize("text", ["", custom("logits", "input_ids")])
def test_a_file_without_kv_is_not_of_another_model(text: str) -> None:
    assert found(text) == []


def test_a_model_without_kv_has_no_other_model() -> None:
    (told,) = found(custom("pixel_values"), names(""))
    assert told.startswith("KV404 warning")


def test_half_a_pair_is_told() -> None:
    (told,) = found(custom("past_key.0", "past_value.1~"))
    assert told.startswith("KV405 warning: ")
    assert "past_key.0 without past_key.0_RetainedState" in told
    assert "past_value.1_RetainedState without past_value.1" in told
    assert found(custom("past_key.0", "past_value.0~", "past_key.0~", "past_value.0")) == []


def test_a_buffer_may_be_left_out_altogether() -> None:
    assert found(custom("past_value.1", "past_value.1~")) == []


def test_a_name_from_a_hostile_file_is_not_told_at_length() -> None:
    (told,) = found(PAIR + custom("x" * 4000))
    assert len(told) < 200


# Other kinds of files


def test_batch_io_maps_files_to_buffers_and_the_files_stay() -> None:
    document = {
        "IO-files": [
            [
                {"path": "prefill/past_key.0.raw", "io-direction": "in", "map-to": "past_key.0"},
                {"path": "prefill/logits.raw", "io-direction": "out", "map-to": "logits"},
            ],
            [{"path": "past_key.0", "map-to": "past_key.0", "dims": [1, 2]}],
        ]
    }
    for indent in (None, 4):
        text = json.dumps(document, indent=indent)
        expected = text.replace('"map-to": "past_key.0"', '"map-to": "past_key.0_VLLM"')
        assert (done(text, kind=BATCH), found(text, kind=BATCH)) == (expected, [])


def test_batch_io_may_lie_flat_and_is_checked_for_its_model() -> None:
    text = '{"IO-files": [{"map-to": "k_pe\\u002e0"}, {"path": "x"}]}'
    assert found(text, kind=BATCH)[0].startswith("KV404 warning: belongs")
    assert done(text, names("k_pe.0 compressed_kv.0"), BATCH) == text.replace('0"', '0_VLLM"')


INSIDE = "past_key.53_InternalRetainedState"


@pytest.mark.parametrize(
    "text",
    [
        "FP32NodeInstanceNames:\n  - /layers.0/Add_output_0\n  - past_key.0{}_RetainedState\n"
        f"  - {INSIDE} # past_key.0\n",
        "FP16NodeInstanceNames: ['past_key.0{}_RetainedState', '" + INSIDE + "', 109]\n"
        "FP32NodeInstanceNames:\nOther: [past_key.0]\n",
    ],
)
def test_of_node_precisions_only_names_of_the_graph_itself_follow(text: str) -> None:
    assert done(text.format(""), kind=PRECISION) == text.format("_VLLM")
    assert found(text.format(""), kind=PRECISION) == []
    behind = names("past_key.0_VLLM past_value.0_VLLM past_key.53_VLLM")
    assert done(text.format(""), behind, PRECISION) == text.format("_VLLM")


def test_of_node_precisions_names_in_functions_follow_if_they_change_there() -> None:
    inside = {INSIDE: "past_key.53_VLLM_InternalRetainedState", "past_key.0": "another"}
    signature = Signature((Value("past_key.0", "FLOAT16", None),), ())
    model = describe(signature, VLLM)._replace(function_name_map=inside)
    both = ModelNames.from_models([model], VLLM, QEFF)
    text = f"FP32NodeInstanceNames: [past_key.0, {INSIDE}]"
    assert (
        done(text, both, PRECISION) == f"FP32NodeInstanceNames: [past_key.0_VLLM, {inside[INSIDE]}]"
    )
    text = f'{{"IO-files": [{{"map-to": "{INSIDE}"}}]}}'
    assert done(text, both, BATCH) == text


def test_a_suffix_made_normal_changes_within_the_graph_only() -> None:
    buffers, wish = "past_key.0 past_key.53", TokenChange("VLLM", normalize=True)
    model = names(buffers, wish, "_InternalRetainedState")
    text = f"FP32NodeInstanceNames: [{INSIDE}]"
    assert done(text, model, PRECISION) == text.replace(INSIDE, "past_key.53_VLLM_RetainedState")
    renamed = names("past_key.0_VLLM past_key.53_VLLM", wish)
    assert done(text, renamed, PRECISION) == text


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (PRECISION, "- past_key.0"),
        (PRECISION, "<<: {FP32NodeInstanceNames: [past_key.0]}"),
        (PRECISION, "FP32NodeInstanceNames: past_key.0"),
        (PRECISION, "a: &a [past_key.0]\nFP32NodeInstanceNames: *a"),
        (PRECISION, "FP32NodeInstanceNames: [[past_key.0]]"),
        (BATCH, "[]"),
        (BATCH, '{"IO-files": {}}'),
        (BATCH, '{"IO-files": [1]}'),
        (BATCH, '{"IO-files": [["past_key.0"]]}'),
        (BATCH, '{"IO-files": [{"map-to": ["past_key.0"]}]}'),
        (BATCH, '{"IO-files": [], "IO-files": [{"map-to": "past_key.0"}]}'),
        (CUSTOM, "past_key.0"),
    ],
)
def test_another_form_is_refused_with_the_form_it_should_have(
    kind: SidecarFormat, text: str
) -> None:
    with pytest.raises(ModelError, match=f"^dir/x: cannot be .*{kind.caption}") as got:
        rewrite_sidecar(text.encode(), "dir/x", kind, names())
    assert got.value.hint == f"expected: {kind.expected_form}"


# What is refused


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (PAIR.encode("utf-16"), "is not UTF-8 text"),
        (b"# \xff\n" + PAIR.encode(), "is not UTF-8 text"),
        (b"- " * 100_000, "100 levels"),
        (b"- IOName: a\n  IOName: past_key.0\n", "IOName twice"),
        (b"- IOName: >-\n    past_key.0\n", "past_key.0 written"),
        (b"- IOName: !!str past_key.0\n", "past_key.0 written"),
        (custom("past_key.0_VLLM", "past_key.0").encode(), "names both past_key.0_VLLM and past_k"),
    ],
)
def test_what_cannot_be_followed_is_refused_in_one_line(data: bytes, message: str) -> None:
    with pytest.raises(ModelError) as caught:
        rewrite_sidecar(data, "dir/custom_io.yaml", CUSTOM, names())
    told = str(caught.value)
    assert "dir/custom_io.yaml: cannot be read" in told
    assert f"{message}" in told
    assert caught.value.hint is not None
    assert "\n" not in told


@pytest.mark.parametrize("new", ["a: b", "a #b", "- a", "a\nb", " a"])
def test_a_new_name_that_needs_quotes_is_refused_without_them(new: str) -> None:
    model = names()._replace(name_map={"past_key.0": new})
    with pytest.raises(ModelError, match="the new names"):
        done(custom("past_key.0"), model)
    renamed = done('- IOName: "past_key.0"\n', model)
    assert yaml.safe_load(renamed) == [{"IOName": new}]


def test_a_new_name_that_is_not_utf_8_is_refused() -> None:
    model = names()._replace(name_map={"past_key.0": "past_key.0_\udcff"})
    with pytest.raises(ModelError, match="cannot hold"):
        done(custom("past_key.0"), model)
    with pytest.raises(ModelError, match="not UTF-8"):
        done('{"IO-files": [{"map-to": "past_key.0"}]}', model, BATCH)


def test_an_escape_is_no_byte_of_a_name() -> None:
    model = names()._replace(name_map={"past_key\udcff.0": "past_key.9"})
    for escape in ("\\udcff", "\\ud800"):
        text = f'{{"IO-files": [{{"map-to": "past_key{escape}.0"}}]}}'
        assert (done(text, model, BATCH), found(text, model, BATCH)[0][:5]) == (text, "KV404")


# Which files are sidecars


@pytest.mark.parametrize(
    ("file_name", "data", "kind"),
    [
        ("custom_io.yaml", b"", CUSTOM),
        ("custom_io_fp16.yaml", b"", CUSTOM),
        ("kv.yml", PAIR.encode(), CUSTOM),
        ("hashed_compile_params.json", b'{"custom_io": {"past_key.0": "mxint8"}}', None),
        ("aic_batch_io.json", b"", BATCH),
        ("decode.json", b'{"IO-files": []}', BATCH),
        ("npi.yaml", b"FP32NodeInstanceNames: []", PRECISION),
        ("fp16.yaml", b"FP16NodeInstanceNames: []", PRECISION),
        ("specializations.json", b"{}", None),
        ("config.json", b'{"model_type": "llama"}', None),
        ("my_custom_io.yaml", b"a: b", None),
        ("hashed_export_params.json", b"{}", None),
    ],
)
def test_a_sidecar_is_told_by_its_name_or_by_what_is_in_it(
    file_name: str, data: bytes, kind: SidecarFormat | None
) -> None:
    assert detect_format(BUILT_IN, file_name, data) == kind


def test_among_the_files_beside_a_model_few_may_be_sidecars() -> None:
    there = ["npi.yaml", "custom_io_int8.yml", "m.onnx", "config.json", ".hidden.yaml"]
    there += ["aic_batch_io_1.json", "hashed_compile_params.json", "a.yaml.bak", "qconfig.json"]
    there += ["genai_config.json", "generation_config.json", "inference_metadata.yaml"]
    few = ["npi.yaml", "custom_io_int8.yml", "aic_batch_io_1.json"]
    few += ["genai_config.json", "inference_metadata.yaml"]
    assert [name for name in there if may_be_sidecar(name)] == few


def test_no_yaml_is_loaded_before_there_is_some_to_read() -> None:
    script = (
        "import sys; from onnxkvrename.sidecars.formats import BUILT_IN;"
        "loaded = 'ruamel.yaml' in sys.modules;"
        "BUILT_IN[0].parse('a'); print(loaded, 'ruamel.yaml' in sys.modules)"
    )
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert process.stdout == "False True\n"


# Real files


@pytest.mark.skipif(not EXPORTS.is_dir(), reason=f"no real exports: {EXPORTS} is not there")
def test_custom_io_of_a_plain_compile_becomes_that_of_a_compile_with_the_token() -> None:
    plain, twin = (EXPORTS / f"compile-{kind}" / "custom_io.yaml" for kind in ("plain", "VLLM"))
    followed = rewrite_sidecar(plain.read_bytes(), "", CUSTOM, exported("plain", VLLM))
    assert (followed.data, followed.findings) == (twin.read_bytes(), ())
    assert len(followed.renamed) == 8
    stripped = rewrite_sidecar(twin.read_bytes(), "", CUSTOM, exported("VLLM", STRIP))
    assert (stripped.data, stripped.findings) == (plain.read_bytes(), ())


def exported(kind: str, wish: TokenChange) -> ModelNames:
    """The names of a real export."""
    (model,) = EXPORTS.glob(f"{kind}-*/*.onnx")
    with open_model(model) as file:
        signature = file.signature
    return ModelNames.from_models([describe(signature, wish)], wish, QEFF)
