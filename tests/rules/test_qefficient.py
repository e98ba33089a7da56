"""The files of an export in windows, and the call that takes a model back."""

from __future__ import annotations

import pytest

from onnxkvrename.rules.load import load_rules
from onnxkvrename.rules.qefficient import NO_SETS, WINDOW_SETS, PartName, format_compile_call


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("N_layer_tmp_0_1.onnx", PartName("window", "N", 0, 1)),
        ("a b_layer_tmp_5_layer_tmp_5_10.onnx", PartName("window", "a b_layer_tmp_5", 5, 10)),
        ("N\n_layer_tmp_7_3.onnx", PartName("window", "N\n", 7, 3)),
        ("pref_999999.onnx", PartName("prefixed", "", 999_999, None)),
        ("merged_3-12.onnx", PartName("merged", "", 3, 12)),
        ("merged_3-012.onnx", None),
        ("merged_3-1000000.onnx", None),
        ("merged_\u0661-2.onnx", None),
        ("pref_.onnx", None),
        ("pref_1.onnx\n", None),
        ("Pref_1.onnx", None),
        ("layer_0_1", None),
    ],
)
def test_the_name_of_a_part_says_its_layers(file: str, name: PartName | None) -> None:
    part = WINDOW_SETS.parse_path(f"a/{file}")
    assert (part and part.name) == name


@pytest.mark.parametrize(
    ("inputs", "argument"),
    [
        (["input_ids"], "onnx_path"),
        (["input_ids", "vision_embeds"], "lang_onnx_path"),
        (["cross_attention_mask"], "lang_onnx_path"),
        (["layer_0/pixel_values", "vision_embeds"], "onnx_path"),
    ],
)
def test_the_call_goes_by_what_the_model_takes(inputs: list[str], argument: str) -> None:
    call = format_compile_call(inputs, 'C:\\"m".onnx', "VLLM")
    assert call == f'model.compile({argument}="C:\\\\\\"m\\".onnx", kv_cache_prefix="VLLM")'


@pytest.mark.parametrize(("profile", "has_sets"), [("qeff", True), ("huggingface", False)])
def test_only_rules_for_qefficient_have_sets(profile: str, has_sets: bool) -> None:
    rules = load_rules(profile)
    assert rules.set_rule == (WINDOW_SETS if has_sets else NO_SETS)
