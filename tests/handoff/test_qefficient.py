"""QEfficient's own session: prefixes, arrays by position, and what it takes for KV by mistake."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from handoff_sides import build_side_layout, describe_attention, list_codes, predict_handoff
from hypothesis import given
from hypothesis import strategies as st

from onnxkvrename.findings import Finding
from onnxkvrename.handoff.consumer_checks import check_consumer
from onnxkvrename.handoff.consumers.qefficient import CONSUMER
from onnxkvrename.handoff.selection import select_values
from onnxkvrename.layout.layout import Layout
from onnxkvrename.model.signature import Value
from onnxkvrename.report.compare_text import format_handoff_verdict

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
PENALTY = tuple(
    Value(f"past_{kind}_penalty_buffer", "FLOAT", ("batch_size", 32))
    for kind in ("repetition", "presence")
)

RESTS = (
    "based on names, shapes, dtypes and dataflow, and on the code of "
    "quic/efficient-transformers at ebf55e8"
)


def build(*texts: str, token: str = "", **sizes: int) -> Layout:
    return build_side_layout(*texts, token=token, **sizes)


def find(layout: Layout, code: str) -> Finding:
    (finding,) = [each for each in check_consumer(layout, CONSUMER) if each.code == code]
    return finding


@pytest.mark.parametrize(
    ("name", "selected"),
    [
        ("past_key.0", True),
        ("past_key.0_VLLM", True),
        ("past_sliding_window_kv.0", True),
        ("compressed_kv.1", True),
        ("k_pe.1", True),
        ("conv_state.1", True),
        ("recurrent_state.1", True),
        ("past_repetition_penalty_buffer", True),
        ("layer_0/past_key.0", False),
        ("indexer_key_cache.0", False),
        ("conv_states.1", False),
        ("vision_embeds", False),
    ],
)
def test_names_are_selected_by_their_prefix(name: str, selected: bool) -> None:
    assert bool(CONSUMER.selects_input(name)) is selected
    assert bool(CONSUMER.selects_output(f"{name}_RetainedState")) is selected
    assert not CONSUMER.selects_output(f"{name}_InternalRetainedState")
    assert not CONSUMER.selects_output(name)


def expect_order(names: Sequence[str]) -> list[str]:
    """The order of the session, told again: the number behind the first dot, then the name."""

    def place(name: str) -> tuple[int, str]:
        _, dot, rest = name.partition(".")
        return int(rest.partition("_")[0]) if dot else 0, name

    return sorted(names, key=place)


@given(
    st.lists(
        st.tuples(st.sampled_from(["past_key", "past_value", "k_pe"]), st.integers(0, 40)),
        min_size=1,
        unique=True,
    ),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_arrays_are_in_the_order_of_layers(
    buffers: list[tuple[str, int]], sampler: bool, chance: random.Random
) -> None:
    layout = build(*(f"{part}.{layer}:2,ctx_len,4" for part, layer in buffers))
    inputs = [*layout.inputs, *(PENALTY if sampler else ())]
    chance.shuffle(inputs)
    selection = select_values(layout._replace(inputs=tuple(inputs)), CONSUMER)
    names = [each.value.name for each in selection.inputs]
    assert names == expect_order([value.name for value in inputs])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("decoder.onnx", "4 buffers (static"),
        ("mla.onnx", "4 buffers, of different shapes or dtypes"),
        ("hybrid.onnx", "6 buffers, of different shapes or dtypes"),
    ],
)
def test_exports_are_taken_with_a_token_and_without(
    name: str, said: str, tmp_path: Path, run
) -> None:
    path = FIXTURES / "plain" / name
    plain = run("verify", path, "--target", "qefficient")
    assert "ready for qefficient" in plain.out
    assert said in plain.out
    renamed = tmp_path / name
    command = (path, "--prefix", "VLLM", "--target", "qefficient", "-q", "-o", renamed)
    assert run(*command) == (0, "", "")
    outcome = run("verify", renamed, "--target", "qefficient")
    assert (outcome.code, outcome.err) == (0, "")
    assert "ready for qefficient" in outcome.out
    assert said in outcome.out


def test_penalty_buffers_are_taken_for_kv_and_make_the_model_hybrid(run) -> None:
    path = FIXTURES / "plain" / "sampler.onnx"
    outcome = run("verify", path, "--target", "qefficient")
    assert outcome.code == 1
    assert outcome.out.endswith(f"\n{path}: qefficient cannot use it\n")
    assert "warning KV608: 4 values (first: past_presence_penalty_buffer)" in outcome.err
    assert "6 buffers instead of 4" in outcome.err
    assert (
        "error KV610: 2 inputs (first: past_presence_penalty_buffer) have 2 axes"
    ) in outcome.err


def test_a_stranger_on_one_side_is_told_by_the_numbers() -> None:
    layout = build(*describe_attention(0))
    layout = layout._replace(inputs=(*layout.inputs, *PENALTY))
    finding = find(layout, "KV608")
    assert finding.severity == "error"
    assert "4 inputs and 2 outputs" in finding.message


def test_other_ranks_than_those_of_the_slices_are_refused() -> None:
    flat = build("past_key.0:ctx_len,4", "past_value.0:ctx_len,4")
    text = find(flat, "KV610").message
    assert "2 inputs (first: past_key.0) have 3 axes" in text
    assert "for 4" in text
    hybrid = build(*describe_attention(0), "conv_state.1:8,3", "recurrent_state.1:2,4,4")
    assert list(check_consumer(hybrid, CONSUMER)) == []


def test_states_that_are_all_alike_are_left_out() -> None:
    layout = build("conv_state.0:2,4,4", "recurrent_state.0:2,4,4")
    finding = find(layout, "KV610")
    assert "left out" in finding.message


def test_a_name_without_a_number_stops_the_session() -> None:
    layout = build(*describe_attention(0))
    stranger = Value("past_x.y", "FLOAT16", ("batch_size", 2, 8, 4))
    found = predict_handoff(
        layout._replace(inputs=(*layout.inputs, stranger)), layout, consumer=CONSUMER
    )
    assert "KV603" in list_codes(found)
    assert found.verdict.outcome == "fails"


def test_a_hand_off_between_equal_sides_works_whatever_the_context(run) -> None:
    path = FIXTURES / "plain" / "hybrid.onnx"
    outcome = run("compare", path, path, "--target", "qefficient")
    assert outcome.code == 0
    assert "works" in outcome.out
    assert "6 buffers" in outcome.out


def test_buffers_have_arrays_of_their_own_so_nothing_shifts() -> None:
    """What shifts everything behind it in one memory is wrong by itself only."""
    prefill = build(*describe_attention(0, 1), ctx_len=64)
    decode = build("past_key.0:2,32,4", *describe_attention(0, 1)[1:], ctx_len=64)
    found = predict_handoff(prefill, decode, consumer=CONSUMER)
    wrong = {each.pair.name for each in found.pair_results if each.wrong_ranges}
    assert (found.verdict.outcome, wrong) == ("corrupts", {"past_key.0"})
    assert any("is not documented" in note for note in found.notes)
    shared = predict_handoff(
        build(*describe_attention(0, 1), token="vllmKvCache", ctx_len=64),
        build("past_key.0:2,32,4", *describe_attention(0, 1)[1:], token="vllmKvCache", ctx_len=64),
    )
    assert len({each.pair.name for each in shared.pair_results if each.wrong_ranges}) > 1


def test_a_longer_context_on_one_side_does_not_fit_its_arrays() -> None:
    """vllm-qaic moves as much as the prompt fills; QEfficient moves whole arrays."""
    prefill = build(*describe_attention(0), ctx_len=64)
    decode = build(*describe_attention(0), ctx_len=128)
    found = predict_handoff(prefill, decode, consumer=CONSUMER)
    assert (list_codes(found), found.verdict.outcome) == (["KV618"], "corrupts")
    assert found.verdict.corrupt_ranges == ((1, 64),)


@pytest.mark.parametrize("missing", ["prefill", "decode"])
def test_prefill_counts_the_arrays(missing: str) -> None:
    sides = {
        label: build(*describe_attention(0, *(() if label == missing else (1,))), ctx_len=8)
        for label in ("prefill", "decode")
    }
    found = predict_handoff(sides["prefill"], sides["decode"], consumer=CONSUMER)
    assert list_codes(found) == ["KV611"]
    assert (found.verdict.outcome, found.verdict.refused_ranges) == ("fails", ((1, 8),))
    assert "different number of buffers" in format_handoff_verdict(found)


def test_one_buffer_more_on_prefill_shifts_those_behind_it() -> None:
    prefill = build("past_key.0:2,8,4", *describe_attention(1, shape="2,8,4"))
    decode = build(*describe_attention(1, shape="2,8,4"))
    found = predict_handoff(prefill, decode, consumer=CONSUMER)
    assert found.verdict.outcome == "corrupts"
    assert "KV618" in list_codes(found)
    (shifted,) = [each for each in found.findings if each.code == "KV618"]
    assert "different array" in shifted.message


def test_decode_counts_its_own_outputs_as_well() -> None:
    layout = build(*describe_attention(0), ctx_len=8)
    broken = layout._replace(
        outputs=layout.outputs[:-1],
        buffers=(layout.buffers[0], layout.buffers[1]._replace(output=None)),
    )
    found = predict_handoff(layout, broken, consumer=CONSUMER)
    assert "KV624" in list_codes(found)
    (finding,) = [each for each in found.findings if "but 1 output" in each.message]
    assert "2 inputs but 1 output" in finding.message
    assert found.verdict.outcome == "fails"


def test_a_side_that_selects_nothing_is_not_said_to_need_a_token() -> None:
    layout = build("layer_0/past_key.0:2,8,4", "layer_0/past_value.0:2,8,4")
    found = predict_handoff(layout, layout, consumer=CONSUMER)
    (finding,) = [each for each in found.findings if each.code == "KV616"]
    assert "past_*, conv_state.*" in finding.message


def test_prefill_need_not_have_as_many_inputs_as_outputs() -> None:
    """Its outputs are counted against decode's arrays, not against its own inputs."""
    layout = build(*describe_attention(0), ctx_len=8)
    prefill = layout._replace(
        inputs=layout.inputs[:-1],
        buffers=(layout.buffers[0], layout.buffers[1]._replace(input=None)),
    )
    found = predict_handoff(prefill, layout, consumer=CONSUMER)
    assert "KV624" not in list_codes(found)
    assert not any(each.wrong_ranges for each in found.pair_results)
