"""Windows, what is made of them, and whether they fit together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from onnxkvrename import load_rules
from onnxkvrename.model.file import open_model
from onnxkvrename.model.signature import Dim, ExportInfo, Signature, Value
from onnxkvrename.rules.kv_model import KvModel, scan_model
from onnxkvrename.rules.parse import parse_rules
from onnxkvrename.rules.plan import TokenChange, build_rename_plan
from onnxkvrename.rules.profile import Rules
from onnxkvrename.rules.request import Request
from onnxkvrename.rules.windows import PartGroup, check_parts, group_parts

QEFF, VLLM = load_rules(), TokenChange("VLLM")
CHECK, RENAME = Request(token="VLLM", check=True), Request(token="VLLM")
EXPORT = ExportInfo(8, "pytorch", "2.13.0", (("", 17), ("com.qualcomm.cloud", 1)))
MERGED = ExportInfo(10, "QEfficient", "1.21", EXPORT.opsets)
ROOT = "R/onnx_layerwise_tmp"
EXPORTS = Path(__file__).resolve().parents[3] / "shared" / "exports" / "lw_qwen3moe"
FIXTURES = Path(__file__).resolve().parents[2] / "fixtures" / "plain" / "windows"
HINTS = {
    "KV301": ("remove one of the two",),
    "KV302": ("pass all windows of the model, or one of them alone",),
    "KV303": (
        f"`onnxkvrename {ROOT} --prefix VLLM` renames all of them",
        f"`onnxkvrename {ROOT} --prefix VLLM --replace` renames all of them",
        "`onnxkvrename R --prefix VLLM` renames all of them",
    ),
    "KV304": (
        "restore the name that it was exported with",
        "export these layers again; if some of them have no cache, pass the file under a name "
        "without layer numbers",
        "export again, layer by layer with layerwise_window_size=1: QEfficient gives larger "
        "windows the inputs of their first layer only",
    ),
    "KV305": ("export all of them again, together",),
    "KV306": (
        "export all of them again, together; if the layers of this model really differ, rename "
        "each window by itself",
    ),
    "KV307": ("pass all windows that were merged, or merge them again",),
}
"""What each finding may say on how to fix it."""


def value(text: str) -> Value:
    """``name:DTYPE[1,symbol,?]``; without a kind that of a buffer, without brackets no rank."""
    name, _, kind = text.replace("~", "_RetainedState").partition(":")
    dtype, bracket, dims = (kind or "FLOAT16[batch,2,ctx,8]").rstrip("]").partition("[")
    known: dict[str, Dim] = {"?": None}
    shape = [int(dim) if dim.isdigit() else known.get(dim, dim) for dim in dims.split(",") if dim]
    return Value(name, dtype, tuple(shape) if bracket else None)


def part(path: str, inputs: str, outputs: str, made_by: ExportInfo = EXPORT) -> KvModel:
    """A part by its values; ``~`` stands for ``_RetainedState``."""
    signature = Signature(*(tuple(map(value, text.split())) for text in (inputs, outputs)))
    plan = build_rename_plan(signature, QEFF, VLLM)
    return KvModel(path, signature, plan, part=QEFF.set_rule.parse_path(path), export=made_by)


def buffers(layers: Iterable[int], scope: str = "", token: str = "", end: str = "") -> str:
    """Keys and values of some layers, as inputs, or with ``~`` for an end as outputs."""
    token = f"_{token}" if token else ""
    names = [f"past_{what}.{n}{token}{end}" for n in layers for what in ("key", "value")]
    return " ".join(scope + name for name in names)


def window(
    first: int,
    end: int,
    *changes: tuple[str, str],
    root: str = ROOT,
    model: str = "N",
    token: str = "",
    made_by: ExportInfo = EXPORT,
) -> KvModel:
    """A sound window, but for some changes of the text that says its values."""
    layers, taken = range(first, end), "inputs_embeds:FLOAT16[b,s,32]"
    inputs = f"{taken if first else 'input_ids:INT64[b,s]'} position_ids:INT64[b,s] "
    outputs = f"logits:FLOAT16[x,y,32] {buffers(layers, token=token, end='~')}"
    inputs += buffers(layers, token=token)
    for old, new in changes:
        assert old in inputs + outputs
        inputs, outputs = inputs.replace(old, new), outputs.replace(old, new)
    path = f"{root}/layer_{first}_{end}/{model}_layer_tmp_{first}_{end}.onnx"
    return part(path, inputs, outputs, made_by)


def prefixed(first: int, end: int, root: str = "R", token: str = "") -> KvModel:
    """A window made ready to be merged: all its names have a scope."""
    scope, layers = f"layer_{first}/", range(first, end)
    inputs = f"{scope}inputs_embeds:FLOAT16[b,s,32] {buffers(layers, scope, token)}"
    outputs = f"{scope}logits:FLOAT16[x,y,32] {buffers(layers, scope, token, '~')}"
    return part(f"{root}/pref_{first}.onnx", inputs, outputs)


def merged(
    first: int,
    end: int,
    *changes: tuple[str, str],
    root: str = "R",
    token: str = "",
    made_by: ExportInfo = MERGED,
) -> KvModel:
    """A merge of windows of one layer each; all but those from layer 0 on have scopes."""
    inputs = outputs = ""
    for layer in range(first, end):
        scope = f"layer_{layer}/" if first else ""
        inputs += buffers([layer], scope, token) + " "
        outputs += buffers([layer], scope, token, "~") + " "
    for old, new in changes:
        assert old in inputs + outputs
        inputs, outputs = inputs.replace(old, new), outputs.replace(old, new)
    return part(f"{root}/merged_{first}-{end}.onnx", inputs, outputs, made_by)


def called(path: str) -> KvModel:
    """A part of which only the name counts."""
    return part(path, "", "")


def at(model: KvModel, path: str, rules: Rules = QEFF) -> KvModel:
    """The same model at another path."""
    return model._replace(path=path, part=rules.set_rule.parse_path(path))


def found(*parts: KvModel, wish: Request = CHECK) -> list[str]:
    """``CODE layers`` of each finding, with the layers that the file is called by."""
    looked = check_parts(parts, QEFF, wish)
    return [f"{f.code} {parts[at].path.rpartition('_')[2][:-5]}" for at, f in looked]


def said(*parts: KvModel) -> str:
    """Return the message of the only finding."""
    ((_, finding),) = check_parts(parts, QEFF, CHECK)
    assert finding.severity == "error"
    assert finding.hint in HINTS[finding.code]
    return f"{finding.name} {finding.message}".strip()


def path(first: int, end: int, root: str = ROOT) -> str:
    return window(first, end, root=root).path


# Which models are parts of one


def test_windows_are_one_set_whatever_folder_stands_around_each() -> None:
    paths = [
        "R/layer_10_11/N_layer_tmp_10_11.onnx",
        "R/layer_2_3/N_layer_tmp_2_3.onnx",
        "R/N_layer_tmp_0_2.onnx",
    ]
    assert group_parts([called(name) for name in paths]) == (
        PartGroup("window", "R", "N", (2, 1, 0)),
    )


def test_another_name_another_directory_or_another_stage_is_another_set() -> None:
    paths = [
        "R/layer_0_1/N_layer_tmp_0_1.onnx",
        "R/layer_0_1/M_layer_tmp_0_1.onnx",
        "S/layer_0_1/N_layer_tmp_0_1.onnx",
        "R/deep/layer_0_1/N_layer_tmp_0_1.onnx",
        "R/pref_0.onnx",
        "R/merged_0-1.onnx",
        "R/merged_0-2.onnx",
    ]
    assert group_parts([called(name) for name in paths]) == (
        PartGroup("window", "R", "N", (0,)),
        PartGroup("window", "R", "M", (1,)),
        PartGroup("window", "S", "N", (2,)),
        PartGroup("window", "R/deep", "N", (3,)),
        PartGroup("prefixed", "R", "", (4,)),
        PartGroup("merged", "R", "", (5, 6)),
    )


@pytest.mark.parametrize(
    ("one", "root"),
    [
        ("N_layer_tmp_0_1.onnx", ""),
        ("./N_layer_tmp_0_1.onnx", ""),
        ("layer_0_1/N_layer_tmp_0_1.onnx", ""),
        ("./a//b/./layer_0_1/N_layer_tmp_0_1.onnx", "a/b"),
        ("../layer_0_1/N_layer_tmp_0_1.onnx", ".."),
        ("/layer_0_1/N_layer_tmp_0_1.onnx", "/"),
        ("/a/layer_0_1/N_layer_tmp_0_1.onnx", "/a"),
        ("a/layers_0_1/N_layer_tmp_0_1.onnx", "a/layers_0_1"),
        ("layer_0_1/layer_0_1/N_layer_tmp_0_1.onnx", "layer_0_1"),
    ],
)
def test_the_root_is_where_the_windows_lie(one: str, root: str) -> None:
    assert group_parts([called(one)]) == (PartGroup("window", root, "N", (0,)),)


@pytest.mark.parametrize(
    "name",
    [
        "decoder.onnx",
        "layer_0_1/split_graph.onnx",
        "N_layer_tmp_0.onnx",
        "N_layer_tmp_0_1.onnx.bak",
        "N_layer_tmp_00_1.onnx",
        "N_layer_tmp_0_1234567.onnx",
        "_layer_tmp_0_1.onnx",
        "pref_x.onnx",
        "merged_0_2.onnx",
        "merged_0-2-4.onnx",
        "a_merged_0-2.onnx",
        "R/merged_0-2.onnx/model.onnx",
        "",
    ],
)
def test_a_model_with_any_other_name_stands_alone(name: str) -> None:
    assert group_parts([called(name), called(name)]) == ()


def test_models_that_stand_alone_are_not_held_against_each_other() -> None:
    others = [
        part("R/a.onnx", buffers([3]), "", MERGED),
        part("R/b.onnx", buffers([3], token="X"), buffers([5], end="~")),
    ]
    assert found(window(0, 1), window(1, 2), *others) == []


def test_rules_need_not_know_of_sets() -> None:
    rules = parse_rules(
        """
        retained = '.*'
        [[kv]]
        name = "one"
        input = '(?P<part>k){layer}{token}'
        output = '{input}_out'
        """,
        "mine",
    )
    windows = [window(0, 1), window(3, 4)]
    parts = [at(model, model.path, rules) for model in windows]
    assert [model.part for model in parts] == [None, None]
    assert group_parts(parts) == ()
    assert list(check_parts(parts, rules, CHECK)) == []


@pytest.mark.parametrize("wish", [CHECK, RENAME])
@pytest.mark.parametrize(
    "parts",
    [
        [],
        [window(0, 1), window(1, 2), window(2, 3)],
        [window(0, 5), window(5, 10), window(10, 11)],
        [window(5, 6)],
        [window(0, 1), window(1, 2), merged(0, 2)],
        [window(n, n + 1) for n in range(4)] + [merged(n, 4) for n in range(3)],
        [prefixed(0, 2), prefixed(2, 3), merged(0, 3)],
        [merged(0, 4), merged(1, 4), merged(2, 4)],
        [window(0, 1, token="VLLM"), window(1, 2, token="VLLM"), merged(0, 2, token="VLLM")],
    ],
)
def test_a_sound_set_has_no_findings(parts: Sequence[KvModel], wish: Request) -> None:
    assert found(*parts, wish=wish) == []
    assert found(*reversed(parts), wish=wish) == []


# KV301, KV302: each layer in one window


@pytest.mark.parametrize(
    ("ranges", "layers", "first"),
    [
        ([(0, 1), (1, 3), (2, 4)], "layer 2", (1, 3)),
        ([(0, 5), (2, 4)], "layers 2-3", (0, 5)),
        ([(0, 5), (2, 9)], "layers 2-4", (0, 5)),
    ],
)
def test_a_layer_in_two_windows_is_found_with_both_files(
    ranges: list[tuple[int, int]], layers: str, first: tuple[int, int]
) -> None:
    parts = [window(*each) for each in ranges]
    assert found(*parts) == [f"KV301 {ranges[-1][1]}"]
    text = said(*parts)
    assert f"{layers}," in text
    assert f"{path(*first)}" in text


def test_a_window_twice_is_a_layer_in_two_windows() -> None:
    copy = at(window(0, 1), f"{ROOT}/N_layer_tmp_0_1.onnx")
    text = said(window(0, 1), copy)
    assert "layer 0," in text
    assert path(0, 1) in text


def test_windows_of_different_models_may_have_the_same_layers() -> None:
    windows = [window(n, n + 1, model=model) for n in (0, 1) for model in ("N", "M")]
    assert found(*windows) == []
    assert found(window(0, 1), window(0, 1, root="S")) == []


@pytest.mark.parametrize(
    ("ranges", "layers", "why"),
    [
        ([(0, 1), (2, 3)], "layer 1", f"{path(0, 1)} ends before"),
        ([(0, 3), (6, 7), (7, 8)], "layers 3-5", f"{path(0, 3)} ends before"),
        ([(3, 4), (4, 5)], "layers 0-2", "the first file"),
        ([(1, 2), (2, 3)], "layer 0", "the first file"),
    ],
)
def test_layers_that_no_window_has_are_one_finding(
    ranges: list[tuple[int, int]], layers: str, why: str
) -> None:
    parts = [window(*each) for each in ranges]
    text = said(*parts)
    assert f"{layers}," in text
    assert f"{why}" in text


def test_each_gap_is_named_at_the_window_behind_it() -> None:
    parts = [window(n, n + 1) for n in (1, 3, 4, 900_000)]
    assert found(*parts) == ["KV302 2", "KV302 4", "KV302 900001"]


def test_a_window_within_another_does_not_hide_what_follows() -> None:
    assert found(window(0, 5), window(1, 2), window(5, 6)) == ["KV301 2"]


def test_parts_made_ready_to_be_merged_tile_like_windows() -> None:
    assert found(prefixed(0, 2), prefixed(2, 3)) == []
    assert found(prefixed(0, 2), prefixed(3, 4)) == ["KV302 3"]
    assert found(prefixed(0, 2), prefixed(1, 3)) == ["KV301 1"]
    assert found(prefixed(4, 6)) == []


def test_merges_may_overlap_and_need_not_begin_at_layer_0() -> None:
    assert found(merged(2, 4), merged(3, 4)) == []


# KV303: one token


def test_windows_with_different_tokens_are_found_as_they_stand() -> None:
    windows = [window(n, n + 1, token="VLLM") for n in range(7)]
    windows += [window(7, 8), window(8, 9, token="OLD"), window(9, 10)]
    assert found(*windows) == ["KV303 8"]
    text = said(*windows)
    assert f"VLLM in 7 files (first: {path(0, 1)}); no token in 2 files" in text
    assert text.endswith(f"(first: {path(7, 8)}); OLD in {path(8, 9)}")


def test_the_first_file_without_the_token_is_named_however_many_lack_it() -> None:
    windows = [window(0, 1, token="VLLM"), window(1, 2), window(2, 3)]
    assert found(*windows) == ["KV303 2"]
    assert found(*windows, wish=Request(check=True)) == ["KV303 2"]
    assert found(*windows, wish=Request(token="OLD", check=True)) == ["KV303 1"]
    assert found(*windows, wish=Request(strip=True, check=True)) == ["KV303 1"]
    assert found(*windows, wish=RENAME) == []  # a rename completes the set


def test_a_token_on_outputs_only_is_found_in_the_whole_set() -> None:
    names = [
        (f"past_{what}.{n}~", f"past_{what}.{n}_VLLM~") for what in ("key", "value") for n in (0, 1)
    ]
    windows = window(0, 1, names[0], names[2]), window(1, 2, names[1], names[3])
    text = said(*windows)
    assert f"no token and VLLM in 2 files (first: {windows[0].path})" in text


def test_one_window_alone_may_carry_what_it_will() -> None:
    assert found(window(0, 1, ("past_key.0", "past_key.0_OLD"))) == []


def test_merges_carry_the_token_of_their_windows() -> None:
    windows = [window(0, 1), window(1, 2)]
    assert found(*windows, merged(0, 2, token="VLLM")) == ["KV303 1"]
    assert found(window(0, 1, token="VLLM"), merged(0, 1)) == ["KV303 0-1"]
    assert found(*windows, merged(0, 2, root="S", token="VLLM")) == []


def test_without_windows_merges_and_what_they_are_made_of_carry_one_token() -> None:
    assert found(merged(0, 3), merged(1, 3, token="VLLM"), prefixed(0, 1)) == ["KV303 0-3"]
    assert found(merged(0, 2), prefixed(0, 1, token="VLLM")) == ["KV303 0-2"]


def test_what_was_made_ready_carries_the_token_of_the_only_windows_below() -> None:
    windows = [window(0, 1), window(1, 2)]
    ready = [prefixed(0, 1, token="VLLM"), prefixed(1, 2, token="VLLM")]
    assert found(*windows, *ready) == ["KV303 1"]
    assert found(*windows, *(at(w, w.path.replace("N_", "M_")) for w in windows), *ready) == []


def test_a_merge_that_disagrees_with_its_windows_is_still_theirs() -> None:
    wrong = merged(0, 2, ("past_key.1", "x.1"), token="VLLM")
    assert found(window(0, 1), window(1, 2), wrong) == ["KV307 0-2", "KV303 1"]


def test_sets_side_by_side_may_carry_different_tokens() -> None:
    one = [window(n, n + 1, token="VLLM", model="M") for n in (0, 1)]
    other = [window(n, n + 1) for n in (0, 1)]
    assert found(*one, *other) == []


# KV304: the layers of a file's name


@pytest.mark.parametrize(
    ("inputs", "outputs", "message"),
    [
        ([5], range(5, 10), "inputs of layer 5 and outputs of layers 5-9"),
        (range(5, 10), [5, 6, 7, 9], "inputs of layers 5-9 and outputs of layers 5-7, 9"),
        (range(5, 11), range(5, 11), "inputs of layers 5-10 and outputs of layers 5-10"),
        ([], [], "inputs of no layer and outputs of no layer"),
    ],
)
def test_each_side_must_have_the_layers_of_the_name(
    inputs: Iterable[int], outputs: Iterable[int], message: str
) -> None:
    name = "layer_5_10/N_layer_tmp_5_10.onnx"
    faulty = part(name, buffers(inputs), buffers(outputs, end="~"))
    text = said(faulty)
    assert "layers 5-9," in text
    assert f"{message}" in text
    assert found(at(faulty, "R/merged_5-10.onnx")) == ["KV304 5-10"]
    assert found(at(faulty, "N_5_10.onnx")) == []


@pytest.mark.parametrize(("inputs", "outputs"), [([4, 5], [5]), ([5], [6]), ([], [5]), ([], [])])
def test_what_was_made_ready_begins_with_the_layer_of_its_name(
    inputs: list[int], outputs: list[int]
) -> None:
    faulty = part("pref_5.onnx", buffers(inputs), buffers(outputs, end="~"))
    assert "layers from 5" in said(faulty)
    assert found(prefixed(5, 9)) == []


def test_a_range_of_no_layers_is_no_name() -> None:
    faulty = at(window(1, 2), f"{ROOT}/N_layer_tmp_3_3.onnx")
    assert "layers from 3" in said(window(0, 1), window(1, 2), faulty)


# KV305: the seam


@pytest.mark.parametrize(
    ("left", "right", "message"),
    [
        (
            ("logits", "hidden"),
            None,
            f"no output logits, which {path(1, 2)} needs",
        ),
        (
            None,
            ("inputs_embeds", "input_ids"),
            f"input inputs_embeds for the output logits of {path(0, 1)}",
        ),
        (
            None,
            ("embeds:FLOAT16", "embeds:FLOAT"),
            f"but logits of {path(0, 1)} is FLOAT16 [x, y, 32]",
        ),
        (
            ("x,y,32", "x,y,64"),
            None,
            f"but logits of {path(0, 1)} is FLOAT16 [x, y, 64]",
        ),
        (
            ("x,y,32", "y,32"),
            None,
            f"but logits of {path(0, 1)} is FLOAT16 [y, 32]",
        ),
    ],
)
def test_what_one_window_hands_on_the_next_must_take(
    left: tuple[str, str] | None, right: tuple[str, str] | None, message: str
) -> None:
    changed = [[change] if change else [] for change in (left, right)]
    assert message in said(window(0, 1, *changed[0]), window(1, 2, *changed[1]))


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (("x,y,32", "x,1,32"), ("b,s,32", "b,s,?")),
        (("logits:FLOAT16[x,y,32]", "logits:FLOAT16"), ("b,s,32", "b,s,64")),
        (("x,y,32", "a,b,c"), ("b,s,32", "1,2,3")),
    ],
)
def test_what_is_not_known_may_fit(left: tuple[str, str], right: tuple[str, str]) -> None:
    assert found(window(0, 1, left), window(1, 2, right)) == []


def test_the_last_window_and_one_alone_hand_nothing_on() -> None:
    last = window(1, 2, ("x,y,32", "x,y,151936"))
    assert found(window(0, 1), last) == []
    assert found(window(1, 2, ("inputs_embeds", "x"), ("logits", "y"))) == []


def test_windows_with_a_gap_between_have_no_seam() -> None:
    assert found(window(0, 1, ("x,y,32", "x,y,64")), window(2, 3)) == ["KV302 3"]


def test_what_was_made_ready_has_seams_too() -> None:
    left = part(
        "R/pref_0.onnx",
        buffers([0], "layer_0/"),
        f"layer_0/logits:INT8 {buffers([0], 'layer_0/', '', '~')}",
    )
    text = said(left, prefixed(1, 2))
    assert "layer_1/inputs_embeds is" in text
    assert "layer_0/logits of R/pref_0.onnx is INT8" in text


@pytest.mark.parametrize(
    ("kind", "shown"),
    [
        ("INT32[b,s]", "INT32 [b, s]"),
        ("INT64[s]", "INT64 [s]"),
        ("INT64[b,3,s]", "INT64 [b, 3, s]"),
    ],
)
def test_an_input_that_all_windows_share_is_of_one_type(kind: str, shown: str) -> None:
    change = "position_ids:INT64[b,s]", f"position_ids:{kind}"
    windows = [window(0, 1, change), window(1, 2), window(2, 3)]
    assert found(*windows) == ["KV305 1"]
    text = said(*windows)
    assert f"position_ids is {shown}, but INT64 [b, s] in {path(1, 2)}" in text


@pytest.mark.parametrize("kind", ["position_ids:INT64[c,t]", "position_ids:INT64[1,s]", "unused"])
def test_symbols_of_a_shared_input_may_differ_and_who_has_no_use_for_it_lacks_it(
    kind: str,
) -> None:
    change = "position_ids:INT64[b,s]", kind
    assert found(window(0, 1), window(1, 2, change), window(2, 3)) == []


# KV306: one export


@pytest.mark.parametrize(
    ("made_by", "message"),
    [
        (EXPORT._replace(ir_version=9), "IR version 9 (8 in {0})"),
        (EXPORT._replace(producer="other"), "producer other 2.13.0 (pytorch 2.13.0 in {0})"),
        (
            EXPORT._replace(producer="", producer_version=""),
            "producer unknown (pytorch 2.13.0 in {0})",
        ),
        (EXPORT._replace(opsets=(("", 18),)), "opset ai.onnx 18 (17 in {0})"),
        (
            EXPORT._replace(ir_version=9, opsets=(("", 17), ("com.qualcomm.cloud", 2))),
            "IR version 9 (8 in {0})",
        ),
    ],
)
def test_a_window_of_another_export_is_found_once(made_by: ExportInfo, message: str) -> None:
    windows = window(0, 1), window(1, 2, made_by=made_by), window(2, 3)
    assert found(*windows) == ["KV306 2"]
    assert said(*windows) == f"comes from a different model or export: {message.format(path(0, 1))}"


def test_most_are_right_and_of_a_tie_the_first() -> None:
    other = EXPORT._replace(ir_version=9)
    assert found(window(0, 1, made_by=other), window(1, 2), window(2, 3)) == ["KV306 1"]
    assert found(window(0, 1, made_by=other), window(1, 2)) == ["KV306 2"]


@pytest.mark.parametrize(
    "opsets", [(("", 17),), (("ai.onnx", 17), ("custom", 3)), (*reversed(EXPORT.opsets),)]
)
def test_a_domain_that_only_some_windows_use_is_in_order(
    opsets: tuple[tuple[str, int], ...],
) -> None:
    made_by = EXPORT._replace(opsets=opsets)
    assert found(window(0, 1), window(1, 2, made_by=made_by), window(2, 3)) == []


def heads(first: int, end: int, shape: str, only: int | None = None) -> KvModel:
    """A window with buffers of another shape, in one layer or in all."""
    layers = range(first, end) if only is None else [only]
    names = [f"past_{what}.{n}" for what in ("key", "value") for n in layers]
    inputs, outputs = (buffers(range(first, end), end=end_) for end_ in ("", "~"))
    for name in names:
        inputs = inputs.replace(name, f"{name}:FLOAT16[{shape}]")
        outputs = outputs.replace(f"{name}~", f"{name}~:FLOAT16[{shape}]")
    given = f"inputs_embeds:FLOAT16[b,s,32] {inputs}"
    return part(path(first, end), given, f"logits:FLOAT16[x,y,32] {outputs}")


def test_other_head_counts_are_another_model() -> None:
    windows = window(0, 1), window(1, 2), heads(2, 3, "batch,4,ctx,8")
    text = said(*windows)
    assert "past_key [batch, 4, ctx, 8]" in text
    assert path(0, 1) in text


def test_symbols_made_of_an_outputs_name_do_not_hide_other_head_counts() -> None:
    outputs = [
        (f"past_{what}.2~", f"past_{what}.2~:FLOAT16[D{what},?,?,8]") for what in ("key", "value")
    ]
    windows = (
        window(0, 1),
        window(1, 2),
        window(2, 3, ("past_key.2 ", "past_key.2:FLOAT16[batch,4,ctx,8] "), *outputs),
    )
    assert found(*windows) == ["KV306 3"]
    assert found(*windows[:2], window(2, 3, *outputs)) == []


def test_sliding_window_layers_may_have_other_heads() -> None:
    assert found(window(0, 1), heads(1, 2, "batch,4,sliding_window,16"), window(2, 3)) == []
    assert found(heads(0, 1, "b,4,sliding_window,8"), heads(1, 2, "b,2,sliding_window,8")) == [
        "KV306 2"
    ]


def test_what_varies_within_one_window_varies_by_layer() -> None:
    assert (
        found(heads(0, 2, "batch,4,ctx,8", only=1), window(2, 3), heads(3, 4, "batch,4,ctx,8"))
        == []
    )


def of_kind(first: int, *buffers_: str) -> KvModel:
    """A window of one layer with other buffers."""
    inputs = " ".join(f"{name}.{first}:FLOAT16[b,1,ctx,8]" for name in buffers_)
    outputs = inputs.replace(":", "~:")
    taken = "inputs_embeds:FLOAT16[b,s,32]"
    return part(path(first, first + 1), f"{taken} {inputs}", f"logits:FLOAT16[x,y,32] {outputs}")


def test_no_model_has_attention_and_mla() -> None:
    mla = of_kind(2, "compressed_kv", "k_pe")
    text = said(window(0, 1), window(1, 2), mla)
    assert "kind mla" in text
    assert path(0, 1) in text


@pytest.mark.parametrize("other", [("past_key", "past_value"), ("compressed_kv", "k_pe")])
def test_linear_layers_go_with_either(other: tuple[str, str]) -> None:
    linear = (
        of_kind(0, "conv_state", "recurrent_state"),
        of_kind(1, "conv_state", "recurrent_state"),
    )
    assert found(*linear, of_kind(2, *other), of_kind(3, *other)) == []


def test_windows_and_merges_are_made_by_different_programs() -> None:
    other = MERGED._replace(producer_version="1.22")
    assert found(window(0, 1), window(1, 2), merged(0, 2, made_by=other)) == []
    assert found(merged(0, 3), merged(1, 3, made_by=other)) == ["KV306 1-3"]
    windows = [window(n, n + 1) for n in range(3)]
    assert found(*windows, merged(0, 3), merged(1, 3, made_by=other)) == ["KV306 1-3"]


def test_merges_above_several_models_may_be_of_different_exports() -> None:
    other = MERGED._replace(producer_version="1.22")
    windows = [window(n, n + 1, model=model) for n in range(3) for model in ("N", "M")]
    assert found(*windows, merged(0, 3), merged(1, 3, made_by=other)) == []


# KV307: merges


WINDOWS = tuple(window(n, n + 1) for n in range(4))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            [("past_key.2", "x.2"), ("past_key.3", "x.3")],
            f"has no past_key of layer 2, which {path(2, 3)} has",
        ),
        ([("past_key.1 ", "past_key.1:FLOAT[b,2,c,8] ")],
         f"has past_key.1 as FLOAT [b, 2, c, 8], but FLOAT16 [batch, 2, ctx, 8] in {path(1, 2)}"),
        ([("past_key.1~", "past_key.1~:FLOAT16[b,4,c,8]")],
         "has past_key.1_RetainedState as FLOAT16 [b, 4, c, 8], "
         f"but FLOAT16 [batch, 2, ctx, 8] in {path(1, 2)}"),
        ([("past_value.3", "past_value.3 k_pe.3")],
         f"has k_pe of layer 3, which no file it is compared with has (first: {path(0, 1)})"),
    ],
)  # fmt: skip
def test_a_merge_that_is_not_what_the_windows_are_is_found(
    change: list[tuple[str, str]], message: str
) -> None:
    assert message in said(*WINDOWS, merged(0, 4, *change))


def test_a_merge_of_more_than_the_windows_shows_that_the_last_are_missing() -> None:
    assert "has past_key of layer 2, which no file" in said(*WINDOWS[:2], merged(0, 4))
    assert found(*WINDOWS, merged(2, 4)) == []


def test_scopes_symbols_and_what_is_not_known_do_not_matter() -> None:
    change = (
        ("past_key.3 ", "past_key.3:FLOAT16[b,?,other,8] "),
        ("past_key.2~", "past_key.2~:FLOAT16"),
    )
    assert found(*WINDOWS, merged(2, 4, *change)) == []


def test_merges_are_held_against_the_windows_in_or_below_their_directory() -> None:
    wrong = ("past_key.1", "x.1")
    for below in ("R", "R/deep", "R/deep/er", "R/layer_0_4"):
        windows = [window(n, n + 1, root=below) for n in range(4)]
        assert found(*windows, merged(0, 4, wrong)) == ["KV307 0-4"]
    for beside in ("S", "Rest", "..", "/R", "R/../S"):
        windows = [window(n, n + 1, root=beside) for n in range(4)]
        assert found(*windows, merged(0, 4, wrong)) == []


@pytest.mark.parametrize(
    ("top", "below", "far"),
    [(".", "a/b", "../a"), (".", ".", "/a"), ("/x", "/x/a/b", "x/a"), ("..", "../a", "../../a")],
)
def test_what_lies_below_follows_from_the_paths(top: str, below: str, far: str) -> None:
    wrong = merged(0, 1, ("past_key.0 ", "past_key.0:INT8 "), root=top)
    assert found(window(0, 1, root=below), wrong) == ["KV307 0-1"]
    assert found(window(0, 1, root=far), wrong) == []


def test_a_merge_above_windows_of_several_models_is_not_compared() -> None:
    several = [*WINDOWS, *(window(n, n + 1, model="M") for n in range(4))]
    assert found(*several, merged(0, 4, ("past_key", "k_pe"), token="VLLM")) == []


def test_without_windows_merges_are_held_against_the_largest() -> None:
    text = said(merged(0, 4), merged(2, 4, ("past_key.3", "x.3")))
    assert "layer 3" in text
    assert "R/merged_0-4.onnx" in text
    assert found(merged(0, 2), merged(1, 4)) == []


# Real files


def read(path: Path) -> KvModel:
    with open_model(path) as model:
        return scan_model(model.source, model.signature, path, QEFF, VLLM, data_beside=None).model


def test_the_windows_of_the_fixtures_fit_together() -> None:
    windows = [read(path) for path in sorted(FIXTURES.rglob("*.onnx"))]
    assert group_parts(windows) == (PartGroup("window", str(FIXTURES), "Tiny", (0, 1, 2)),)
    assert found(*windows) == []
    assert found(windows[0], windows[2]) == ["KV302 3"]


@pytest.mark.skipif(not EXPORTS.is_dir(), reason=f"no real exports: {EXPORTS} is not there")
def test_real_windows_and_their_merge_fit_together() -> None:
    plain, named = (
        [read(path) for path in sorted(EXPORTS.glob(f"{kind}-*/**/*.onnx"))]
        for kind in ("plain", "VLLM")
    )
    assert [one.stage for one in group_parts(plain)] == ["merged", "window"]
    assert found(*plain, *named) == []
    moved = at(named[2], plain[2].path)
    assert found(plain[0], plain[1], moved) == ["KV303 1"]
    assert found(plain[0], plain[1], moved, wish=RENAME) == []
