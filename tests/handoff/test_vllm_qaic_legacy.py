"""vllm-qaic with its legacy slicing spec: a plain export hands over, and nothing else differs."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from handoff_sides import build_side_layout, describe_attention, list_codes, predict_handoff

from onnxkvrename.handoff.consumer_checks import check_consumer
from onnxkvrename.handoff.find_consumers import load_consumer
from onnxkvrename.handoff.selection import select_values
from onnxkvrename.model.signature import Value

LEGACY = load_consumer("vllm-qaic-legacy")
FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"


def test_a_plain_export_hands_over(run) -> None:
    path = FIXTURES / "plain" / "decoder.onnx"
    outcome = run("verify", path, "--target", "vllm-qaic-legacy")
    assert (outcome.code, outcome.err) == (0, "")
    assert f"\n{path}: ready for vllm-qaic-legacy: it will select, pair and move all" in outcome.out
    compared = run("compare", path, path, "--target", "vllm-qaic-legacy")
    assert compared.code == 0
    assert "works" in compared.out
    assert "4 buffers" in compared.out


def test_the_default_says_which_setting_takes_a_plain_export(run) -> None:
    path = FIXTURES / "plain" / "decoder.onnx"
    outcome = run("verify", path, "--target", "vllm-qaic")
    assert outcome.code == 1
    assert "vllm-qaic cannot use it" in outcome.out
    assert "VLLM_QAIC_USE_LEGACY_SLICING_SPEC=1" in outcome.out
    assert "--target vllm-qaic-legacy" in outcome.out


def test_what_neither_takes_is_not_promised(run) -> None:
    outcome = run("verify", FIXTURES / "plain" / "mla.onnx", "--target", "vllm-qaic")
    assert outcome.code == 1
    assert outcome.out.endswith("vllm-qaic cannot use it\n")


def test_no_setting_is_promised_for_a_model_with_errors_of_its_own(decoder: Path, run) -> None:
    """An output that no node computes is never updated, whoever takes it over."""
    model = onnx.load(decoder)
    for node in model.graph.node:
        for at, name in enumerate(node.output):
            if name.endswith("_RetainedState"):
                node.output[at] = f"other{name}"
    onnx.save(model, decoder)
    outcome = run("verify", decoder, "--target", "vllm-qaic")
    assert outcome.code == 1
    assert outcome.out.endswith(f"\n{decoder}: vllm-qaic cannot use it\n")
    assert "error KV105" in outcome.err
    assert run("verify", decoder, "--target", "vllm-qaic-legacy").code == 1


def test_with_strict_no_setting_is_promised_that_brings_warnings(run) -> None:
    path = FIXTURES / "plain" / "chunked.onnx"
    legacy = run("verify", path, "--target", "vllm-qaic-legacy", "--strict")
    assert (legacy.code, "error KV606" in legacy.err) == (1, True)
    said = run("verify", path, "--target", "vllm-qaic").out
    assert "it can (--target vllm-qaic-legacy)" in said
    strict = run("verify", path, "--target", "vllm-qaic", "--strict")
    assert strict.out.endswith(f"\n{path}: vllm-qaic cannot use it\n")


@pytest.mark.parametrize("token", ["", "VLLM", "vllmKvCache"])
def test_a_token_after_the_prefix_does_no_harm(token: str) -> None:
    layout = build_side_layout(*describe_attention(0, 1), token=token)
    assert list(check_consumer(layout, LEGACY)) == []
    assert len(select_values(layout, LEGACY).inputs) == 4


def test_other_names_are_not_handed_over(run) -> None:
    path = FIXTURES / "plain" / "mla.onnx"
    outcome = run("verify", path, "--target", "vllm-qaic-legacy")
    assert outcome.code == 1
    assert ("error KV601: 8 names (first: compressed_kv.0)") in outcome.err
    assert "warning KV607" not in outcome.err


def test_a_scope_before_the_name_hides_it() -> None:
    layout = build_side_layout("layer_0/past_key.0:2,ctx_len,4", token="")
    assert select_values(layout, LEGACY).inputs == ()


def test_its_transfer_is_that_of_vllm_qaic() -> None:
    """A window on one side shifts what follows it, and a missing logits output stops prefill."""
    whole = build_side_layout(*describe_attention(0, 1), token="", ctx_len=64)
    window = build_side_layout(
        *describe_attention(0, shape="2,sliding_window,4"),
        *describe_attention(1),
        token="",
        ctx_len=64,
        sliding_window=8,
    )
    found = predict_handoff(whole, window, consumer=LEGACY)
    assert list_codes(found) == ["KV614", "KV618"]
    assert found.verdict.corrupt_ranges == ((9, 64),)
    silent = whole._replace(outputs=tuple(v for v in whole.outputs if v.name != "logits"))
    assert [each.code for each in check_consumer(silent, LEGACY)] == ["KV604"]


def test_what_begins_like_a_key_and_is_none_is_told() -> None:
    layout = build_side_layout(*describe_attention(0), token="")
    stranger = Value("past_key_padding", "FLOAT16", ("batch_size", 8))
    layout = layout._replace(inputs=(*layout.inputs, stranger))
    (finding,) = [each for each in check_consumer(layout, LEGACY) if each.code == "KV608"]
    assert "not a KV buffer" in finding.message
    assert "past_key* or past_value*" in finding.message
    assert "export" in finding.hint
    assert "another name" in finding.hint


def test_a_rename_with_it_needs_a_token(decoder: Path, run) -> None:
    before = decoder.read_bytes()
    refused = run(decoder, "--target", "vllm-qaic-legacy")
    assert (refused.code, decoder.read_bytes()) == (2, before)
    assert "--prefix TOKEN" in refused.err
    assert "`verify --target vllm-qaic-legacy`" in refused.err
    assert run(decoder, "--target", "vllm-qaic-legacy", "--prefix", "VLLM").code == 0
    assert run(decoder, "--target", "vllm-qaic-legacy", "--strip").code == 0
    assert decoder.read_bytes() == before
