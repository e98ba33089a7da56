"""OpenVINO's NPUW: it replaces ``past_key_values`` by ``present``, and wants what it finds so."""

from __future__ import annotations

from pathlib import Path

import pytest
from hugging_face import build_decoder, save_decoder

from onnxkvrename.handoff.consumer_checks import check_consumer
from onnxkvrename.handoff.consumers.openvino_npuw import CONSUMER
from onnxkvrename.handoff.selection import select_values


@pytest.mark.parametrize(
    ("past", "present"),
    [
        ("past_key_values.0.key", "present.0.key"),
        ("past_key_values.0.key_VLLM", "present.0.key_VLLM"),
        ("past_key_values.3.decoder.value", "present.3.decoder.value"),
        ("cache_params.past.conv.0", "cache_params.present.conv.0"),
        ("cache_params.past.ssm.12", "cache_params.present.ssm.12"),
    ],
)
def test_an_output_is_named_like_its_input_with_present(past: str, present: str) -> None:
    assert CONSUMER.selects_input(past)
    assert CONSUMER.selects_output(present)
    assert CONSUMER.input_name_of(present) == past


@pytest.mark.parametrize("name", ["past_key.0", "past.0.conv", "cache_params.past.conv", "x"])
def test_other_names_are_not_selected(name: str) -> None:
    assert not CONSUMER.selects_input(name)


def test_a_decoder_is_taken_with_a_token_and_without(tmp_path: Path) -> None:
    for token in ("", "VLLM"):
        layout = build_decoder(tmp_path, token=token)
        assert list(check_consumer(layout, CONSUMER)) == []
        pairs = select_values(layout, CONSUMER).value_pairs
        assert [into.name for into, _ in pairs if into] == [b.input for b in layout.buffers]
        assert [out.name for _, out in pairs if out] == [b.output for b in layout.buffers]


def test_a_growing_cache_is_what_it_wants(tmp_path: Path, run) -> None:
    model, rules = save_decoder(tmp_path)
    outcome = run("check-consumer", model, "--rules", rules, "--target", "openvino-npuw")
    said = "4 buffers, layers 0-1"
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.startswith(f"{model}: openvino-npuw can use it: {said}")


def test_an_input_without_its_output_stops_it(tmp_path: Path) -> None:
    """As the keys and values of an encoder in a decoder for later steps."""
    layout = build_decoder(tmp_path)
    first = layout.buffers[0]
    layout = layout._replace(
        outputs=tuple(value for value in layout.outputs if value.name != first.output),
        buffers=(first._replace(output=None), *layout.buffers[1:]),
    )
    (finding,) = check_consumer(layout, CONSUMER)
    assert (finding.code, finding.name) == ("KV609", first.input)
    assert "by name" in finding.message


def test_an_output_of_another_name_is_not_found(tmp_path: Path) -> None:
    layout = build_decoder(tmp_path, present="updated")
    codes = [each.code for each in check_consumer(layout, CONSUMER)]
    assert codes == ["KV601", "KV609"]


def test_a_cache_of_three_axes_cannot_be_copied(tmp_path: Path) -> None:
    layout = build_decoder(tmp_path, shape=("batch", "past", 8))
    (finding,) = check_consumer(layout, CONSUMER)
    assert finding.code == "KV610"
    assert "[1, heads, tokens, head size]" in (finding.message)


def test_a_state_with_the_name_of_a_cache_is_cut(tmp_path: Path) -> None:
    layout = build_decoder(tmp_path)
    layout = layout._replace(
        buffers=tuple(b._replace(kind="mamba", sequence_axis=None) for b in layout.buffers)
    )
    assert [each.code for each in check_consumer(layout, CONSUMER)] == ["KV605"]


def test_it_hands_nothing_from_one_model_to_another(tmp_path: Path, run) -> None:
    model, rules = save_decoder(tmp_path)
    outcome = run("compare", model, model, "--rules", rules, "--target", "openvino-npuw")
    assert (outcome.code, outcome.out) == (2, "")
    assert "nothing to compare" in outcome.err
