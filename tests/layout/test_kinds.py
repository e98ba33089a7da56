from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from cache_models import LAYERS, build_cache_model
from conftest import FIXTURES
from models import saved

from onnxkvrename import load_rules
from onnxkvrename.layout import kinds as layout_kinds
from onnxkvrename.layout.json import parse_layout
from onnxkvrename.layout.kinds import find_pair_dtype, find_pair_shape, infer_buffer_kind
from onnxkvrename.model.signature import Dim, Signature, Value
from onnxkvrename.records import _define_struct
from onnxkvrename.report.documents.inspect_json import DOCUMENT
from onnxkvrename.rules import kinds
from onnxkvrename.rules.kinds import KINDS, KindTraits
from onnxkvrename.rules.parse import parse_rules
from onnxkvrename.rules.plan import KvPair, TokenChange, build_rename_plan

QEFF = load_rules()


def value(text: str) -> Value:
    """``name:batch,2,ctx_len,4``, with ``?`` for what is not said; without a shape no rank."""
    name, _, dims = text.partition(":")
    known: dict[str, Dim] = {"?": None}
    shape = [int(dim) if dim.isdigit() else known.get(dim, dim) for dim in dims.split(",")]
    return Value(name, "FLOAT16", tuple(shape) if dims else None)


def pairs(*inputs: str, outputs: tuple[str, ...] = ()) -> tuple[KvPair, ...]:
    """The buffers of a layer: each input with an output of its shape, unless outputs are given."""
    into = tuple(map(value, inputs))
    retained = [one._replace(name=f"{one.name}_RetainedState") for one in into]
    out = tuple(map(value, outputs)) if outputs else tuple(retained)
    return build_rename_plan(Signature(into, out), QEFF, TokenChange(None)).pairs


def told(*inputs: str, outputs: tuple[str, ...] = ()) -> list[str]:
    layer = pairs(*inputs, outputs=outputs)
    return [infer_buffer_kind(pair, layer).kind for pair in layer]


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        ("batch_size,2,ctx_len,4", "full_attention"),
        ("full_batch_size,2,ctx_len,4", "full_attention"),
        ("1,2,past_sequence_length,4", "full_attention"),
        ("batch_size,ctx_len,128", "full_attention"),  # GPTBigCode: all heads in one axis
        ("batch_size,2,sliding_window,4", "sliding_window"),
        ("1,2,sliding_window,4", "sliding_window"),
        ("full_batch_size,8,chunk_ctx_len,128", "chunked_local_attention"),
    ],
)
def test_attention_has_a_context_axis(shape: str, kind: str) -> None:
    assert told(f"past_key.0:{shape}", f"past_value.0:{shape}") == [kind, kind]


@pytest.mark.parametrize(
    ("axis", "kind"),
    [("ctx_len", "mla_attention"), ("sliding_window", "sliding_window_mla")],
)
def test_mla_is_told_by_its_name_and_its_window_by_the_axis(axis: str, kind: str) -> None:
    layer = (f"compressed_kv.0:batch_size,1,{axis},512", f"k_pe.0:batch_size,1,{axis},64")
    assert told(*layer) == [kind, kind]


def test_states_under_their_own_names_are_linear() -> None:
    layer = ("conv_state.1:batch_size,8,3", "recurrent_state.1:batch_size,2,4,4")
    assert told(*layer) == ["mamba", "mamba"]
    assert told("conv_state.1", "recurrent_state.1:1,2,4,4") == ["mamba", "mamba"]


@pytest.mark.parametrize("batch", ["batch_size", "1"])
def test_states_under_the_names_of_attention_are_told_by_the_rank_of_one(batch: str) -> None:
    layer = (f"past_key.1:{batch},512,4", f"past_value.1:{batch},16,128,128")
    assert told(*layer) == ["mamba", "mamba"]


def test_a_state_of_unknown_rank_is_told_by_the_other_of_its_layer() -> None:
    assert told("past_key.1:batch_size,512,4", "past_value.1") == ["mamba", "mamba"]
    assert told("past_key.1:batch_size,2,ctx_len,4", "past_value.1") == [
        "full_attention",
        "unknown",
    ]


def test_beside_a_context_axis_a_rank_of_three_is_no_state() -> None:
    layer = ("past_key.1:batch_size,512,4", "past_value.1:batch_size,2,ctx_len,4")
    assert told(*layer) == ["unknown", "full_attention"]


def test_a_rank_of_four_without_a_context_does_not_make_a_state() -> None:
    """Keys and values of image tokens look like that, too."""
    for shape in ("16,128,128", "2,6404,16"):
        layer = (f"past_key.1:batch_size,{shape}", f"past_value.1:batch_size,{shape}")
        assert told(*layer) == ["unknown", "unknown"]


@pytest.mark.parametrize(
    "shape", [":1,2,32,4", "", ":?,2,?,4", ":batch_size,2,?,4", ":batch_size", ":1"]
)
def test_what_no_shape_tells_is_unknown(shape: str) -> None:
    assert told(f"past_key.0{shape}", f"past_value.0{shape}") == ["unknown", "unknown"]


def test_other_layers_and_other_buffers_of_the_layer_do_not_count() -> None:
    attention = ("past_key.0:1,2,32,4", "past_value.0:1,2,32,4")
    beside = ("conv_state.0:1,8,3", "recurrent_state.0:1,2,4,4", "past_key.1:1,8,3")
    assert told(*attention, *beside)[:4] == ["unknown", "unknown", "mamba", "mamba"]


def test_parallel_attention_and_states_in_one_layer_are_told_apart() -> None:
    attention = ("past_key.0:b,2,ctx_len,4", "past_value.0:b,2,ctx_len,4")
    states = ("conv_state.0:b,8,3", "recurrent_state.0:b,2,4,4")
    assert told(*attention, *states) == ["full_attention", "full_attention", "mamba", "mamba"]


def test_what_was_derived_from_a_name_is_no_context() -> None:
    derived = "Wherepast_value.1_RetainedState_dim_2"
    outputs = ("past_key.1_RetainedState:b,8,3", f"past_value.1_RetainedState:b,2,{derived},4")
    assert told(outputs=outputs) == ["mamba", "mamba"]
    assert told(outputs=outputs[1:]) == ["unknown"]


def test_an_input_says_more_than_its_output() -> None:
    layer = pairs(
        "past_key.0:b,2,ctx_len,4",
        "past_value.0",
        outputs=(
            "past_key.0_RetainedState:b,2,Concatpast_key.0_RetainedState_dim_2,4",
            "past_value.0_RetainedState:b,2,sliding_window,4",
        ),
    )
    assert [find_pair_shape(pair) for pair in layer] == [
        ("b", 2, "ctx_len", 4),
        ("b", 2, "sliding_window", 4),
    ]
    assert [infer_buffer_kind(pair, layer).kind for pair in layer] == [
        "full_attention",
        "sliding_window",
    ]
    assert find_pair_dtype(layer[0]) == "FLOAT16"
    assert find_pair_shape(pairs("past_key.0")[0]) is None


def test_mla_with_chunks_is_unknown_as_vllm_has_none() -> None:
    assert told("compressed_kv.0:b,1,chunk_ctx_len,512") == ["unknown"]


@pytest.mark.parametrize("trait", ["label", "symbol", "color", "page_colors"])
def test_no_two_rows_look_alike_in_a_map(trait: str) -> None:
    assert len({getattr(row, trait) for row in KINDS.values()}) == len(KINDS)


AddRow = Callable[[KindTraits], None]


@pytest.fixture
def add_row(monkeypatch: pytest.MonkeyPatch) -> AddRow:
    """Add a row in front of the others."""

    def add(row: KindTraits) -> None:
        rows = {"new": row, **KINDS}
        for module in (kinds, layout_kinds):
            monkeypatch.setattr(module, "KINDS", rows)
        _define_struct.cache_clear()

    return add


INDEXER = KindTraits(
    "index keys", "i", "red", ("#010203", "#fff"), "window", "attention", window_symbol="indexed"
)


def test_a_new_kind_is_one_row(
    tmp_path: Path, add_row: AddRow, monkeypatch: pytest.MonkeyPatch, run
) -> None:
    add_row(INDEXER)
    shapes = dict.fromkeys(("past_key", "past_value"), ("batch_size", 2, "indexed", 4))
    monkeypatch.setitem(LAYERS, "indexed", shapes)
    model = saved(build_cache_model(["indexed"]), tmp_path / "m.onnx")
    text = run("inspect", model, "--format", "json").out
    assert {buffer["kind"] for buffer in json.loads(text)["layouts"][0]["buffers"]} == {"new"}
    layout, _ = parse_layout(text, "layout.json")
    assert {buffer.kind for buffer in layout.buffers} == {"new"}
    assert "index keys" in run("inspect", model).out
    page = tmp_path / "page.html"
    run("inspect", model, "--html", page)
    assert "#010203" in page.read_text("utf-8")
    assert '"new"' in json.dumps(DOCUMENT.build_schema())
    assert infer("new", "key.0:b,2,ctx_len,4") == [("new", False)]


STATE = KindTraits("delta state", "d", "red", ("#010203", "#fff"), "nothing", "linear")


def test_a_new_kind_of_state_is_one_row(add_row: AddRow, run) -> None:
    command = ("inspect", FIXTURES / "plain" / "hybrid.onnx", "--vllm", "--format", "json")
    before = json.loads(run(*command).out)
    add_row(STATE._replace(vllm_kind="mamba"))
    after = json.loads(run(*command).out)
    (layout,) = after["layouts"]
    assert [buffer["kind"] for buffer in layout["buffers"]][2:4] == ["new"] * 2
    assert layout["totals"] == before["layouts"][0]["totals"]
    assert after["vllm"] == before["vllm"]
    assert "delta state" in run("inspect", FIXTURES / "plain" / "hybrid.onnx").out
    assert told("past_key.1:1,512,4", "past_value.1:1,16,128,128") == ["new"] * 2


def test_a_kind_of_state_that_vllm_does_not_have_is_refused(add_row: AddRow, run) -> None:
    add_row(STATE)
    answer = run("inspect", FIXTURES / "plain" / "hybrid.onnx", "--vllm", "--format", "json")
    (refusal,) = json.loads(answer.out)["vllm"][0]["refusals"]
    assert (answer.code, refusal["layers"]) == (0, [1])
    assert "vLLM has no cache of kind new (delta state)" in refusal["reason"]


OPEN_RULES = """
retained = '.*_out'
[[kv]]
input = '{part}[.]{layer}{token}'
output = '{input}_out'
"""


def infer(kind: str, *inputs: str) -> list[tuple[str, bool]]:
    """Return kinds under rules of their own, which call all these buffers a kind."""
    into = tuple(map(value, inputs))
    buffers = ", ".join(repr(each.name.partition(".")[0]) for each in into)
    rules = parse_rules(f"{OPEN_RULES}name = '{kind}'\nparts = [{buffers}]", "r")
    layer = build_rename_plan(Signature(into, ()), rules, TokenChange(None)).pairs
    return [tuple(infer_buffer_kind(pair, layer)) for pair in layer]


STATIC = ("key_cache.0:batch,32,32", "value_cache.0:batch,32,32")


@pytest.mark.parametrize(
    ("kind", "shapes", "expected"),
    [
        # A static cache of rank 3 is what its rules say, and no convolution.
        ("attention", STATIC, "full_attention"),
        ("full_attention", STATIC, "full_attention"),
        ("sliding_window", ("key.0:b,2,ctx_len,4",), "sliding_window"),
        ("attention", ("key.0:b,2,sliding_window,4",), "sliding_window"),
        ("mamba", ("recurrent.0:b,state_window,2,4,4",), "mamba"),
        ("linear", ("recurrent.0:b,state_window,2,4,4",), "mamba"),
        ("cross", ("key.0:b,2,encoder_length,4",), "cross_attention"),
    ],
)
def test_the_profiles_kind_settles_it(kind: str, shapes: tuple[str, ...], expected: str) -> None:
    assert infer(kind, *shapes) == [(expected, False)] * len(shapes)


@pytest.mark.parametrize(
    ("kind", "shapes", "expected"),
    [
        ("attention", ("key.0:b,2,past_sliding_length,dim",), "sliding_window"),
        ("recurrent", ("recurrent.0:b,state_window,2,4,4",), "mamba"),
        ("cache", ("conv.0:b,128,3",), "mamba"),
        ("cache", ("key.0:b,2,past_length,4",), "full_attention"),
        ("cache", ("a.0:b,8,3", "b.0:b,2,4,4"), "mamba"),
    ],
)
def test_what_only_a_shape_or_a_name_suggests_is_a_guess(
    kind: str, shapes: tuple[str, ...], expected: str
) -> None:
    assert infer(kind, *shapes) == [(expected, True)] * len(shapes)


def test_states_under_the_names_of_attention_are_a_guess_of_qefficients_profile() -> None:
    layer = pairs("past_key.1:b,512,4", "past_value.1:b,16,128,128")
    assert [infer_buffer_kind(pair, layer) for pair in layer] == [("mamba", True)] * 2
    layer = pairs("past_key.0:b,2,ctx_len,4", "past_value.0:b,2,ctx_len,4")
    assert [infer_buffer_kind(pair, layer) for pair in layer] == [("full_attention", False)] * 2


def test_a_guess_is_marked_wherever_kinds_are_shown(tmp_path: Path, run) -> None:
    path = saved(build_cache_model(["qwen", "full"]), tmp_path / "m.onnx")
    assert "linear state (a guess)  past_key" in run("inspect", path).out
    assert "full attention (a guess)" not in run("inspect", path).out
    document = json.loads(run("inspect", path, "--format", "json").out)
    for described in (document["models"][0], document["layouts"][0]):
        guesses = [b["kind_guessed"] for b in described["buffers"]]
        assert guesses == [True, True, False, False]
