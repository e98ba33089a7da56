"""transformers.js: names are computed in its code, so a token would break a model."""

from __future__ import annotations

from pathlib import Path

import pytest
from hugging_face import build_decoder, save_decoder

from onnxkvrename.handoff.consumer_checks import check_consumer
from onnxkvrename.handoff.consumers.transformers_js import CONSUMER


@pytest.mark.parametrize(
    ("past", "present"),
    [
        ("past_key_values.0.key", "present.0.key"),
        ("past_key_values.10.encoder.value", "present.10.encoder.value"),
        ("past_conv.0", "present_conv.0"),
        ("past_ssm.2", "present_ssm.2"),
        ("past_recurrent.2", "present_recurrent.2"),
    ],
)
def test_an_output_becomes_the_input_of_the_next_step(past: str, present: str) -> None:
    assert CONSUMER.selects_input(past)
    assert CONSUMER.selects_output(present)
    assert CONSUMER.input_name_of(present) == past


@pytest.mark.parametrize("name", ["past_key_values.0.key_VLLM", "past_key.0", "past.0.conv"])
def test_no_other_name_is_computed(name: str) -> None:
    assert not CONSUMER.selects_input(name)


def test_a_plain_export_is_taken(tmp_path: Path) -> None:
    assert list(check_consumer(build_decoder(tmp_path), CONSUMER)) == []


def test_a_token_is_refused_with_the_reason(tmp_path: Path, run) -> None:
    model, rules = save_decoder(tmp_path)
    before = model.read_bytes()
    refused = run(model, "--rules", rules, "--prefix", "VLLM", "--target", "transformers-js")
    assert (refused.code, model.read_bytes()) == (2, before)
    assert "transformers-js cannot take a renamed" in refused.err


def test_a_renamed_model_is_found_and_repaired(tmp_path: Path, run) -> None:
    model, rules = save_decoder(tmp_path)
    assert run(model, "--rules", rules, "--prefix", "VLLM", "-q").code == 0
    found = run("check-consumer", model, "--rules", rules, "--target", "transformers-js")
    assert found.code == 1
    assert ("error KV601: 8 names (first: past_key_values.0.key_VLLM)") in found.err
    strip = run(model, "--rules", rules, "--strip", "--target", "transformers-js", "-q")
    assert strip.code == 0
    checked = run("check-consumer", model, "--rules", rules, "--target", "transformers-js")
    assert checked.code == 0
