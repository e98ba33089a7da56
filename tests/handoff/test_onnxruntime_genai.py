"""onnxruntime-genai: names come from the templates of the configuration beside the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hugging_face import build_decoder, save_decoder

from onnxkvrename import KvRenameError
from onnxkvrename.findings import Finding
from onnxkvrename.handoff.consumer_checks import check_consumer
from onnxkvrename.handoff.consumers.onnxruntime_genai import (
    CONFIG_NAME,
    CONSUMER,
    compose_name,
    list_templates,
    read_layer,
)
from onnxkvrename.handoff.find_consumers import configure_consumer
from onnxkvrename.handoff.selection import select_values
from onnxkvrename.layout.layout import Layout
from onnxkvrename.model.signature import Value

NAMES = {
    "past_key_names": "past_key_values.%d.key",
    "past_value_names": "past_key_values.%d.value",
}
OUTPUTS = {"present_key_names": "present.%d.key", "present_value_names": "present.%d.value"}


def write_config(folder: Path, end: str = "", **encoder: Any) -> None:
    """Write a configuration whose templates end in `end`."""
    sides = {
        "inputs": {key: name + end for key, name in NAMES.items()},
        "outputs": {key: name + end for key, name in OUTPUTS.items()},
    }
    document = {"model": {"type": "llama", "decoder": sides, **encoder}}
    (folder / CONFIG_NAME).write_text(json.dumps(document), "utf-8")


def find(layout: Layout) -> list[Finding]:
    return list(check_consumer(layout, configure_consumer(CONSUMER, layout)))


@pytest.mark.parametrize(
    ("template", "name", "layer"),
    [
        ("past_key_values.%d.key", "past_key_values.12.key", "12"),
        ("past_key_self_%d", "past_key_self_3", "3"),
        ("past_key_values.%d.key", "past_key_values.0.decoder.key", "0.decoder"),
        ("past_key_values.%d.key", "past_key_values.0.key_VLLM", None),
        ("past_key_values.%d.key", "past_key_values..key", None),
        ("", "past", None),
    ],
)
def test_a_name_is_read_by_its_template(template: str, name: str, layer: str | None) -> None:
    assert read_layer(template, name) == layer
    if layer is not None:
        assert compose_name(template, layer) == name


def test_states_of_linear_layers_are_derived_from_the_template_of_keys() -> None:
    templates = {each.past: each.present for each in list_templates(NAMES | OUTPUTS)}
    assert templates["past_key_values.%d.conv_state"] == "present.%d.conv_state"
    assert templates["past_key_values.%d.recurrent_state"] == "present.%d.recurrent_state"
    whisper = list_templates({"past_key_names": "past_key_self_%d"})
    assert not any("state" in each.past for each in whisper)


def test_a_folder_with_its_configuration_is_taken(tmp_path: Path, run) -> None:
    model, rules = save_decoder(tmp_path)
    write_config(tmp_path)
    outcome = run("check-consumer", model, "--rules", rules, "--target", "onnxruntime-genai")
    said = (
        "4 buffers, layers 0-1, all with the same shape and dtype; "
        "rests on names, shapes, dtypes and dataflow, "
        "read as microsoft/onnxruntime-genai at a0c04eb reads them"
    )
    assert outcome == (0, f"{model}: onnxruntime-genai can use it: {said}\n", "")


def test_the_configuration_may_lie_one_folder_above(tmp_path: Path) -> None:
    write_config(tmp_path, "_X")
    folder = tmp_path / "decoder"
    folder.mkdir()
    assert find(build_decoder(folder, token="X")) == []
    assert [each.code for each in find(build_decoder(folder))] == ["KV601"]


def test_without_a_configuration_its_defaults_are_assumed(tmp_path: Path) -> None:
    layout = build_decoder(tmp_path)
    (finding,) = find(layout)
    assert (finding.code, finding.severity) == ("KV625", "warning")
    assert finding.message.startswith("no genai_config.json beside the model: ")
    assert len(select_values(layout, configure_consumer(CONSUMER, layout)).inputs) == 4


def test_a_configuration_from_before_a_rename_finds_nothing(tmp_path: Path) -> None:
    write_config(tmp_path)
    (finding,) = find(build_decoder(tmp_path, token="VLLM"))
    assert (finding.code, finding.name) == ("KV601", "past_key_values.0.key_VLLM")
    assert finding.message.startswith(
        "8 names (first: past_key_values.0.key_VLLM) do not match past_key_values.%d.key, "
        "past_key_values.%d.value"
    )
    assert str(tmp_path / CONFIG_NAME) in finding.hint
    write_config(tmp_path, "_VLLM")
    assert find(build_decoder(tmp_path, token="VLLM")) == []


def test_a_layer_needs_keys_and_values(tmp_path: Path) -> None:
    write_config(tmp_path)
    layout = build_decoder(tmp_path)
    gone = layout.buffers[1]
    layout = layout._replace(
        inputs=tuple(v for v in layout.inputs if v.name != gone.input),
        outputs=tuple(v for v in layout.outputs if v.name != gone.output),
        buffers=tuple(b for b in layout.buffers if b is not gone),
    )
    (finding,) = find(layout)
    assert (finding.code, finding.name) == ("KV609", "past_key_values.0.key")
    assert "no counterpart: onnxruntime-genai needs past_key_values.0.value" in finding.message


def test_an_input_needs_the_output_of_its_template(tmp_path: Path) -> None:
    write_config(tmp_path)
    assert [each.code for each in find(build_decoder(tmp_path, present="updated"))] == [
        "KV601",
        "KV609",
    ]


def test_something_else_than_a_number_stops_it(tmp_path: Path) -> None:
    write_config(tmp_path)
    layout = build_decoder(tmp_path)
    stranger = Value("past_key_values.x.key", "FLOAT", None)
    findings = find(layout._replace(inputs=(*layout.inputs, stranger)))
    assert [each.code for each in findings] == ["KV603", "KV609"]
    assert findings[0].name == stranger.name


def test_all_keys_and_values_have_one_dtype(tmp_path: Path) -> None:
    write_config(tmp_path)
    (finding,) = find(build_decoder(tmp_path, dtypes=("FLOAT", "FLOAT16")))
    assert finding.code == "KV610"
    assert "uses the dtype of the first buffer, FLOAT," in finding.message


def test_keys_and_values_have_four_axes(tmp_path: Path) -> None:
    write_config(tmp_path)
    (finding,) = find(build_decoder(tmp_path, shape=("batch_size", "past_length", 8)))
    assert (finding.code, "four axes" in finding.message) == ("KV610", True)


def test_names_have_at_most_63_bytes(tmp_path: Path) -> None:
    token = "T" * 50
    write_config(tmp_path, f"_{token}")
    (finding,) = find(build_decoder(tmp_path, token=token))
    assert (finding.code, finding.hint) == ("KV601", "use a shorter token")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not JSON"),
        ("[]", "is not an object"),
        ("{}", "model is missing"),
        ('{"model": {"decoder": {"inputs": {"past_key_names": 3}}}}', "must be text"),
    ],
)
def test_a_configuration_that_cannot_be_read_is_an_error(
    text: str, said: str, tmp_path: Path, run
) -> None:
    model, rules = save_decoder(tmp_path)
    (tmp_path / CONFIG_NAME).write_text(text, "utf-8")
    outcome = run("check-consumer", model, "--rules", rules, "--target", "onnxruntime-genai")
    assert (outcome.code, outcome.out) == (2, "")
    assert f"{tmp_path / CONFIG_NAME}: " in outcome.err
    assert said in outcome.err
    with pytest.raises(KvRenameError):
        find(build_decoder(tmp_path))


def test_a_rename_cannot_check_what_it_changes_itself(tmp_path: Path, run) -> None:
    model, rules = save_decoder(tmp_path)
    write_config(tmp_path)
    before = model.read_bytes()
    outcome = run(model, "--rules", rules, "--prefix", "X", "--target", "onnxruntime-genai")
    assert (outcome.code, model.read_bytes()) == (2, before)
    assert "it reads names from a file that the rename changes as well" in outcome.err


def test_what_an_encoder_writes_needs_no_output(tmp_path: Path) -> None:
    """Whisper's decoder reads the cross caches that the encoder's model has as outputs."""
    templates = {each: f"past_{each}_cross_%d" for each in ("key", "value")}
    document = {
        "model": {
            "decoder": {
                "inputs": {
                    **NAMES,
                    **{f"cross_past_{key}_names": name for key, name in templates.items()},
                },
                "outputs": OUTPUTS,
            },
            "encoder": {
                "outputs": {
                    f"cross_present_{key}_names": name.replace("past", "present")
                    for key, name in templates.items()
                }
            },
        }
    }
    (tmp_path / CONFIG_NAME).write_text(json.dumps(document), "utf-8")
    layout = build_decoder(tmp_path)
    cross = layout.buffers[0]._replace(
        layer=0, part="key_cross", input="past_key_cross_0", output=None
    )
    layout = layout._replace(
        inputs=(*layout.inputs, Value("past_key_cross_0", "FLOAT", cross.shape)),
        buffers=(*layout.buffers, cross),
    )
    assert find(layout) == []
    assert len(select_values(layout, configure_consumer(CONSUMER, layout)).inputs) == 5
