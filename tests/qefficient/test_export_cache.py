"""Directories in which QEfficient keeps an export, with and without a token."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from onnxkvrename import ModelError, load_rules
from onnxkvrename.qefficient.export_cache import (
    CacheEntry,
    ExportParams,
    build_occupied_finding,
    build_renamed_entry,
    build_unrecognized_finding,
    compute_export_hash,
    explain_token_refusal,
    identify_export,
    parse_export_params,
    rename_export_params,
    render_export_params,
)
from onnxkvrename.rules.parse import parse_rules as rules_of
from onnxkvrename.rules.plan import TokenChange
from onnxkvrename.rules.qefficient import PARAMS_FILE, split_directory_name

QEFF = load_rules()
VLLM, STRIP, ANEW = (
    TokenChange("VLLM"),
    TokenChange(None, strip=True),
    TokenChange("NEW", replace=True),
)
CAUSAL = "QEFFAutoModelForCausalLM"
DECODER = "QEffCausalLMForTextImageToTextModel"
ENCODER = "QEffVisionEncoderForTextImageToTextModel"
PLAIN = "logits past_key.0~ past_value.0~"
PREFIXED = "logits past_key.0_VLLM~ past_value.0_VLLM~"

EXPORTS = Path(__file__).resolve().parents[3] / "shared" / "exports"
TWINS = [
    (plain, twin)
    for plain in sorted(EXPORTS.glob("*/plain-*"))
    for twin in sorted(plain.parent.glob("VLLM-*"))
    if next(plain.glob("*.onnx")).name == next(twin.glob("*.onnx")).name
]
real = pytest.mark.skipif(not EXPORTS.is_dir(), reason=f"no real exports: {EXPORTS}")
each_twin = pytest.mark.parametrize(
    ("plain", "twin"),
    TWINS,
    ids=[f"{p.parent.name}-{next(p.glob('*.onnx')).stem}" for p, _ in TWINS],
)


def export(outputs: str = PLAIN, owner: str | None = CAUSAL, **more: Any) -> ExportParams:
    """Parameters of a small export; ``~`` stands for ``_RetainedState``."""
    names = outputs.replace("~", "_RetainedState").split()
    axes = {"input_ids": {0: "batch_size"}, "past_key.0": {0: "batch_size", 2: "ctx_len"}}
    hashed = {
        "config": {"model_type": "toy", "scale": 1e-06},
        "export_params": {"dynamic_axes": axes, "output_names": names},
        "peft_config": None,
        **({"qeff_auto_class": owner} if owner else {}),
        **more,
    }
    return parse_export_params(written(hashed), PARAMS_FILE)


def written(hashed: Any) -> str:
    """Format parameters as QEfficient saves them."""
    return json.dumps(hashed, indent=4, separators=(",", ":"), sort_keys=True)


def hash_of(hashed: Any) -> str:
    """The hash that QEfficient takes of parameters."""
    text = json.dumps(hashed, separators=(",", ":"), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def entry(params: ExportParams) -> CacheEntry:
    """The parameters' export, in a directory called as it should be."""
    found = identify_export(f"Toy-{hash_of(params)}", params)
    assert found is not None
    return found


def outputs(params: ExportParams) -> str:
    return " ".join(params["export_params"]["output_names"]).replace("_RetainedState", "~")


def embedded(params: ExportParams) -> ExportParams:
    """The parameters as a layerwise export saves them, after it took their hash."""
    axes = dict(params["export_params"]["dynamic_axes"])
    axes["inputs_embeds"] = axes.pop("input_ids")
    told = {**params["export_params"], "dynamic_axes": axes}
    return parse_export_params(written({**params, "export_params": told}), PARAMS_FILE)


# The file


def test_parameters_are_written_as_they_were_read() -> None:
    text = '{\n    "a":[\n        1,\n        1e-06,\n        "\\u00e9\\ud83d\\ude00"\n    ],'
    text += '\n    "export_params":{\n        "output_names":[]\n    }\n}'
    assert render_export_params(parse_export_params(text, PARAMS_FILE)) == text


def test_the_order_of_the_file_counts() -> None:
    one, other = '{"a":1,"export_params":{"output_names":[]}}', '{"output_names":[]},"a":1}'
    params = (
        parse_export_params(one, PARAMS_FILE),
        parse_export_params('{"export_params":' + other, PARAMS_FILE),
    )
    assert params[0] == params[1]
    assert compute_export_hash(params[0]) == hash_of(params[0]) != compute_export_hash(params[1])


def test_numbers_among_the_keys_are_hashed_as_they_were_sorted() -> None:
    hashed = {**export(), "id2label": dict.fromkeys(range(12), "x")}
    params = parse_export_params(written(hashed), PARAMS_FILE)
    assert compute_export_hash(params) == hash_of(hashed)
    assert compute_export_hash(params) != hash_of(
        params
    )  # sorted again, 10 and 11 would come after 1


DEEP = 100_000
OF = '{{"export_params":{{"output_names":{names},"dynamic_axes":{axes}}},"more":{more}}}'


def holding(more: str = "0", names: str = "[]", axes: str = "null") -> str:
    """A file that is in order but for what is given."""
    return OF.format(names=names, axes=axes, more=more)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not JSON"),
        ("{", "is not JSON: "),
        (f"\ufeff{holding()}", "is not JSON: Unexpected UTF-8 BOM"),
        (f"{holding()} x", "Extra data"),
        (holding('{"a":1,"a":1}'), "'a' twice"),
        (holding('{"\\n":1,"\\n":2}'), r"'\n' twice"),
        (holding("NaN"), "has NaN"),
        (holding("-Infinity"), "has -Infinity"),
        (holding("1e999"), "1e999"),
        (holding("9" * 5000), "too many digits"),
        (holding("[" * 99 + "]" * 99 + "x"), "is not JSON: "),
        (holding("[" * 100 + "]" * 100), "100 levels"),
        (holding("[" * DEEP + "]" * DEEP), "100 levels"),
        (holding('{"a":' * DEEP + "0" + "}" * DEEP), "100 levels"),
        ("[" * DEEP, "100 levels"),
        ("null", "must hold an object"),
        ('"text"', "must hold an object"),
        ("[]", "must hold an object"),
        ("{}", "export_params is missing"),
        ('{"export_params":[]}', "export_params must be"),
        ('{"export_params":{}}', "export_params.output_names is missing"),
        (holding(names='"past_key.0"'), "export_params.output_names must be"),
        (holding(names='["logits",0]'), "export_params.output_names must be"),
        (holding(names='["\\ud800"]'), "a name that"),
        (holding(axes="[]"), "export_params.dynamic_axes must be"),
        (holding('0,"qeff_auto_class":[]'), "qeff_auto_class must be text"),
        (holding('0,"kv_cache_prefix":7'), "kv_cache_prefix must be text"),
    ],
)
def test_what_qefficient_does_not_write_is_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(ModelError) as refused:
        parse_export_params(text, "there.json")
    told = str(refused.value)
    assert told.startswith("there.json: ")
    assert message in told
    assert "QEfficient writes this" in told
    assert "\n" not in told


@pytest.mark.parametrize(
    "more", ["9" * 19, "[" * 99 + "]" * 99, '{"a":1,"b":1}', '"NaN"', "1e308", '"\\ud800"', "{}"]
)
def test_what_is_only_odd_is_read_hashed_and_written(more: str) -> None:
    hashed = json.loads(holding(more))
    params = parse_export_params(written(hashed), PARAMS_FILE)
    assert params == parse_export_params(holding(more), PARAMS_FILE) == hashed
    assert render_export_params(params) == written(hashed)
    assert compute_export_hash(params) == hash_of(hashed)


# The directory


@pytest.mark.parametrize(
    ("directory", "expected"),
    [
        ("Toy-0123456789abcdef", ("Toy", "0123456789abcdef")),
        ("Toy-lora-0123456789abcdef", ("Toy-lora", "0123456789abcdef")),
        ("a\nb-0123456789abcdef", ("a\nb", "0123456789abcdef")),
        ("Toy-0123456789ABCDEF", None),
        ("Toy-0123456789abcde", None),
        ("Toy-0123456789abcdef\n", None),
        ("Toy0123456789abcdef", None),
        ("-0123456789abcdef", None),
        ("", None),
    ],
)
def test_a_directory_of_the_cache_is_known_by_its_name(
    directory: str, expected: tuple[str, str] | None
) -> None:
    assert split_directory_name(directory) == expected


def test_an_export_is_recognised_by_its_hash() -> None:
    params = export()
    directory = f"Toy-{hash_of(params)}"
    assert identify_export(directory, params) == CacheEntry("Toy", hash_of(params), params)
    assert entry(params).directory_name == directory


def test_a_layerwise_export_was_hashed_before_its_parameters_changed() -> None:
    hashed = export()
    found = identify_export(f"Toy-{hash_of(hashed)}", embedded(hashed))
    assert found == CacheEntry("Toy", hash_of(hashed), embedded(hashed), is_layerwise=True)


def test_an_export_that_takes_embeddings_is_not_layerwise() -> None:
    params = embedded(export())
    assert entry(params) == CacheEntry("Toy", hash_of(params), params, is_layerwise=False)


@pytest.mark.parametrize("name", ["Toy-0123456789abcdef", "Toy", ""])
def test_a_directory_whose_hash_does_not_follow_is_not_guessed_at(name: str) -> None:
    for params in (export(), embedded(export())):
        assert identify_export(name, params) is None


def test_parameters_with_both_kinds_of_input_are_none_of_a_layerwise_export() -> None:
    hashed = export()
    both = embedded(hashed)
    both["export_params"]["dynamic_axes"]["input_ids"] = {}
    assert identify_export(f"Toy-{hash_of(hashed)}", both) is None


def test_an_unknown_directory_is_told_with_what_its_hash_should_be() -> None:
    params = export()
    found = build_unrecognized_finding(Path("cache/Toy-0123456789abcdef"), params)
    assert (found.code, found.severity, found.name) == ("KV401", "error", "Toy-0123456789abcdef")
    assert f"{PARAMS_FILE}" in found.message
    assert f"{hash_of(params)}" in found.message
    assert found.hint.startswith("for cache/Toy-0123456789abcdef alone, `-d renamed`")
    unnamed = build_unrecognized_finding(Path("Toy"), params)
    assert unnamed.message.startswith("is not named NAME-HASH")


# Seeding


def test_a_decoder_is_looked_for_under_its_new_outputs_and_its_token() -> None:
    params = export(PLAIN)
    result = build_renamed_entry(entry(params), QEFF, VLLM)
    assert result.params == export(PREFIXED, kv_cache_prefix="VLLM")
    assert result.directory_name == f"Toy-{hash_of(result.params)}" != entry(params).directory_name
    assert render_export_params(result.params) == written(result.params)


@pytest.mark.parametrize("owner", [DECODER, "_QEFFAutoModelForImageTextToTextSingleQPC"])
def test_a_vision_language_model_is_looked_for_under_its_outputs_alone(owner: str) -> None:
    result = build_renamed_entry(entry(export(PLAIN, owner)), QEFF, VLLM)
    assert result.params == export(PREFIXED, owner)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("past_key.0_InternalRetainedState", "past_key.0_VLLM_InternalRetainedState"),
        ("compressed_kv.3~ k_pe.3~", "compressed_kv.3_VLLM~ k_pe.3_VLLM~"),
        ("conv_state.1~ recurrent_state.1~", "conv_state.1_VLLM~ recurrent_state.1_VLLM~"),
        ("past_key.0~ vision_embeds~ image_idx_output", None),
        ("past_key.0~ pixel_values_InternalRetainedState", None),
        ("past_key.0~ past_presence_penalty_buffer~ next_tokens", None),
        ("past_key.0~ hidden_states past_key.0", None),
    ],
)
def test_kv_buffers_alone_take_the_token(before: str, after: str | None) -> None:
    after = after or before.replace("past_key.0~", "past_key.0_VLLM~")
    told = rename_export_params(export(before), QEFF, TokenChange("VLLM", normalize=True))
    assert outputs(told) == after


def test_dynamic_axes_keep_their_names() -> None:
    axes = export()["export_params"]["dynamic_axes"]
    assert rename_export_params(export(), QEFF, VLLM)["export_params"]["dynamic_axes"] == axes


def test_a_layerwise_export_keeps_what_it_saved_and_is_hashed_as_before() -> None:
    hashed = export(PLAIN)
    found = identify_export(f"Toy-{hash_of(hashed)}", embedded(hashed))
    assert found is not None
    result = build_renamed_entry(found, QEFF, VLLM)
    prefixed = export(PREFIXED, kv_cache_prefix="VLLM")
    assert result == CacheEntry("Toy", hash_of(prefixed), embedded(prefixed), is_layerwise=True)
    assert identify_export(result.directory_name, result.params) == result


@pytest.mark.parametrize("owner", [CAUSAL, DECODER])
def test_seeding_can_be_taken_back_and_twice_is_once(owner: str) -> None:
    plain = entry(export(PLAIN, owner))
    once = build_renamed_entry(plain, QEFF, VLLM)
    assert build_renamed_entry(once, QEFF, VLLM) == once != plain
    assert build_renamed_entry(once, QEFF, STRIP) == plain
    assert build_renamed_entry(plain, QEFF, STRIP) == plain
    assert build_renamed_entry(once, QEFF, ANEW) == build_renamed_entry(
        plain, QEFF, TokenChange("NEW")
    )


def test_another_token_stays_unless_it_is_to_give_way() -> None:
    once = build_renamed_entry(entry(export()), QEFF, VLLM)
    assert build_renamed_entry(once, QEFF, TokenChange("NEW")) == once
    assert build_renamed_entry(once, QEFF, TokenChange("NEW", strip=True)) == once
    assert build_renamed_entry(once, QEFF, TokenChange("VLLM", strip=True)) == entry(export())


def test_a_token_left_over_from_an_earlier_export_gives_way() -> None:
    # The object that exported with a token hashes it into every later export.
    stale = export(PLAIN, kv_cache_prefix="OLD")
    assert rename_export_params(stale, QEFF, VLLM) == export(PREFIXED, kv_cache_prefix="VLLM")
    assert rename_export_params(stale, QEFF, STRIP) == export(PLAIN)


def test_a_key_without_a_token_stays() -> None:
    empty = export(PLAIN, kv_cache_prefix=None)
    assert rename_export_params(empty, QEFF, STRIP) == empty


# Models that QEfficient gives no token


@pytest.mark.parametrize("owner", [CAUSAL, DECODER, "_QEFFAutoModelForImageTextToTextSingleQPC"])
def test_decoders_take_a_token(owner: str) -> None:
    assert explain_token_refusal(export(PLAIN, owner), QEFF) is None
    assert explain_token_refusal(export(PREFIXED, owner), QEFF) is None


@pytest.mark.parametrize(
    "owner",
    [
        "QEFFAutoModelForSpeechSeq2Seq",
        "QEffAutoLoraModelForCausalLM",
        "QEFFAutoModelForCTC",
        "SomethingNew",
    ],
)
def test_seeding_is_of_no_use_for_a_class_that_takes_no_token(owner: str) -> None:
    reason = explain_token_refusal(export(PLAIN, owner), QEFF)
    assert "accept a token" in reason
    assert f"{owner}" in reason


def test_an_adapter_is_known_by_its_configuration() -> None:
    reason = explain_token_refusal(export(PLAIN, None, peft_config={"peft_type": "LORA"}), QEFF)
    assert "PEFT models" in str(reason)
    assert "no known class" in str(explain_token_refusal(export(PLAIN, None), QEFF))


def test_a_vision_encoder_serves_with_any_token() -> None:
    encoder = entry(export("vision_embeds", ENCODER))
    assert build_renamed_entry(encoder, QEFF, VLLM) == encoder
    assert "for all tokens" in str(explain_token_refusal(encoder.params, QEFF))


def test_rules_must_agree_with_qefficient_on_what_is_kv() -> None:
    rules = rules_of(
        r"""
        retained = '.*_RetainedState'
        [[kv]]
        name = "one"
        input = '(?P<part>past_key|mine)\.{layer}{token}'
        output = '{input}_RetainedState'
        """,
        "mine",
    )
    assert explain_token_refusal(export("logits past_key.0~"), rules) is None
    for other in ("mine.0~", "past_value.0~"):
        name = other.replace("~", "_RetainedState")
        reason = explain_token_refusal(export(f"past_key.0~ {other}"), rules)
        assert str(reason).endswith(f"they disagree on {name}")


def test_a_directory_that_is_taken_is_an_error() -> None:
    found = build_occupied_finding("Toy-0123456789abcdef")
    assert (found.code, found.severity, found.name) == ("KV403", "error", "Toy-0123456789abcdef")
    assert found.hint


# Real exports: the directory's name begins with plain or VLLM instead of the model's


def kept(directory: Path) -> CacheEntry:
    found = identify_export(
        directory.name,
        parse_export_params((directory / PARAMS_FILE).read_text("utf-8"), str(directory)),
    )
    assert found is not None
    return found


@real
def test_every_real_export_has_a_twin() -> None:
    assert {plain for plain, _ in TWINS} == set(EXPORTS.glob("*/plain-*"))
    assert {twin for _, twin in TWINS} == set(EXPORTS.glob("*/VLLM-*"))
    assert len(TWINS) >= 12
    assert any(kept(plain).is_layerwise for plain, _ in TWINS)


@real
@each_twin
def test_a_real_export_is_recognised_and_written_again_to_the_byte(plain: Path, twin: Path) -> None:
    for directory in (plain, twin):
        assert kept(directory).directory_name == directory.name
        assert kept(directory).is_layerwise == directory.parent.name.startswith("lw_")
        assert render_export_params(kept(directory).params) == (directory / PARAMS_FILE).read_text(
            "utf-8"
        )


@real
@each_twin
def test_a_real_export_is_seeded_where_its_twin_stands(plain: Path, twin: Path) -> None:
    result = build_renamed_entry(kept(plain), QEFF, VLLM)
    assert result == kept(twin)._replace(name="plain")
    assert render_export_params(result.params) == (twin / PARAMS_FILE).read_text("utf-8")
    assert build_renamed_entry(result, QEFF, VLLM) == result
    assert build_renamed_entry(kept(twin), QEFF, VLLM) == kept(twin)


@real
@each_twin
def test_a_real_export_with_the_token_is_stripped_to_its_plain_twin(
    plain: Path, twin: Path
) -> None:
    result = build_renamed_entry(kept(twin), QEFF, STRIP)
    assert result == kept(plain)._replace(name="VLLM")
    assert render_export_params(result.params) == (plain / PARAMS_FILE).read_text("utf-8")
    other = build_renamed_entry(kept(plain), QEFF, TokenChange("NEW"))
    assert build_renamed_entry(kept(twin), QEFF, ANEW) == other._replace(name="VLLM")


@real
@each_twin
def test_seeding_is_of_use_for_each_real_export_but_the_vision_encoder(
    plain: Path, twin: Path
) -> None:
    encoder = plain.name.partition("-")[2] == twin.name.partition("-")[2]
    assert (explain_token_refusal(kept(plain).params, QEFF) is not None) == encoder
    assert (rename_export_params(kept(plain).params, QEFF, VLLM) == kept(plain).params) == encoder
    assert rename_export_params(kept(twin).params, QEFF, VLLM) == kept(twin).params
