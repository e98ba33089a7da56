from __future__ import annotations

import pytest

from onnxkvrename import load_rules
from onnxkvrename.model.signature import Signature, Value
from onnxkvrename.rules.parse import parse_rules
from onnxkvrename.rules.plan import RenamePlan, TokenChange, build_rename_plan, rename_symbols

QEFF = load_rules()


def planned(inputs: str, outputs: str, token: str | None = "VLLM", **wish: bool) -> RenamePlan:
    """A plan for values by their names; ``~`` stands for ``_RetainedState``."""
    sides = [names.replace("~", "_RetainedState").split() for names in (inputs, outputs)]
    values = [tuple(Value(name, "FLOAT", None) for name in names) for names in sides]
    return build_rename_plan(Signature(*values), QEFF, TokenChange(token, **wish))


def test_both_sides_of_a_buffer_get_the_token() -> None:
    assert planned("input_ids past_key.0", "logits past_key.0~").name_map == {
        "past_key.0": "past_key.0_VLLM",
        "past_key.0_RetainedState": "past_key.0_VLLM_RetainedState",
    }


def test_pairs_are_found_by_buffer_and_layer_not_by_position() -> None:
    found = planned(
        "past_value.10 past_key.2 k_pe.1 past_key.10 compressed_kv.1",
        "past_key.10~ compressed_kv.1~ past_value.10~ k_pe.1~ past_key.2~",
    )
    assert [(pair.layer, pair.kind, pair.buffer) for pair in found.pairs] == [
        (1, "mla", "compressed_kv"),
        (1, "mla", "k_pe"),
        (2, "attention", "past_key"),
        (10, "attention", "past_key"),
        (10, "attention", "past_value"),
    ]
    assert all(len(pair.sides) == 2 for pair in found.pairs)


def test_a_pair_lies_within_one_scope() -> None:
    found = planned("a/past_key.0 past_key.0", "a/past_key.0~ b/past_key.0~")
    assert {pair.scope: [end.old_name for end in pair.sides] for pair in found.pairs} == {
        "": ["past_key.0"],
        "a/": ["a/past_key.0", "a/past_key.0_RetainedState"],
        "b/": ["b/past_key.0_RetainedState"],
    }
    assert found.name_map["a/past_key.0"] == "a/past_key.0_VLLM"


def test_an_export_with_the_token_on_one_side_only_is_repaired() -> None:
    assert planned("past_key.0", "past_key.0_VLLM~").name_map == {"past_key.0": "past_key.0_VLLM"}
    assert planned("past_key.0_VLLM", "past_key.0~").name_map == {
        "past_key.0_RetainedState": "past_key.0_VLLM_RetainedState"
    }


@pytest.mark.parametrize(
    ("token", "wish", "becomes"),
    [
        ("VLLM", {}, "past_key.0_OLD"),
        ("VLLM", {"replace": True}, "past_key.0_VLLM"),
        ("OLD", {}, "past_key.0_OLD"),
        (None, {"strip": True}, "past_key.0"),
        ("OLD", {"strip": True}, "past_key.0"),
        ("VLLM", {"strip": True}, "past_key.0_OLD"),
        ("VLLM", {"strip": True, "replace": True}, "past_key.0"),
    ],
)
def test_another_token_gives_way_only_if_asked(
    token: str | None, wish: dict[str, bool], becomes: str
) -> None:
    found = planned("past_key.0_OLD", "past_key.0_OLD~", token, **wish)
    assert [end.new_name for end in found.pairs[0].sides] == [becomes, f"{becomes}_RetainedState"]


def test_two_names_for_one_side_are_kept_apart_from_the_pair() -> None:
    found = planned("past_key.0 past_key.0_A", "past_key.0~ past_key.0_InternalRetainedState")
    assert found.duplicates == (
        ("past_key.0_A", "past_key.0", "A", ""),
        ("past_key.0_InternalRetainedState", "past_key.0_RetainedState", "", ""),
    )
    assert list(found.name_map) == ["past_key.0", "past_key.0_RetainedState"]


def test_every_output_that_stays_has_a_reason_and_plain_inputs_need_none() -> None:
    found = planned("input_ids vision_embeds", "logits vision_embeds~ indexer_key.3~")
    assert {kept.name: kept.reason for kept in found.unchanged_names} == {
        "vision_embeds": "vision",
        "vision_embeds_RetainedState": "vision",
        "logits": "not retained",
        "indexer_key.3_RetainedState": "unknown",
    }


def test_normalize_changes_the_suffix_even_without_a_new_token() -> None:
    found = planned("k_pe.0_A", "k_pe.0_A_InternalRetainedState", "A", normalize=True)
    assert found.name_map == {"k_pe.0_A_InternalRetainedState": "k_pe.0_A_RetainedState"}


@pytest.mark.parametrize(
    ("symbol", "becomes"),
    [
        ("Concatpast_key.0_RetainedState_dim_2", "Concatpast_key.0_VLLM_RetainedState_dim_2"),
        ("past_key.0_RetainedState_dim_0", "past_key.0_VLLM_RetainedState_dim_0"),
        ("Wherepast_key.0_RetainedState_dim_2", None),
        ("Concatpast_key.0_RetainedState_dim_", None),
        ("Concatpast_key.0_RetainedState_dim_x", None),
        ("Concatpast_key.0_RetainedState_dim_²", None),
        ("Concatpast_key.0_RetainedState_dim_\u0661", None),
        ("xConcatpast_key.0_RetainedState_dim_2", None),
        ("Concatlogits_dim_2", None),
        ("Addpast_value.0_VLLM_RetainedState_dim_2", None),
        ("past_key.0_dim_2", None),
    ],
)
def test_a_symbol_follows_the_output_it_was_made_of(symbol: str, becomes: str | None) -> None:
    found = planned("past_key.0 past_value.0_VLLM", "logits past_key.0~ past_value.0_VLLM~")
    producers = {
        "past_key.0_RetainedState": "Concat",
        "past_value.0_VLLM_RetainedState": "Add",
        "logits": "Concat",
    }
    expected = {} if becomes is None else {symbol: becomes}
    assert rename_symbols(frozenset({symbol, "batch"}), producers, found) == expected


def test_two_rules_may_share_a_kind() -> None:
    rule = """
        [[kv]]
        kind = "attention"
        parts = ["{0}"]
    """
    top = "input = '{part}{layer}{token}'\noutput = '{input}_out'"
    rules = parse_rules(f"{top}\n{rule.format('k')}{rule.format('v')}", "mine")
    given = tuple(Value(name, "FLOAT", None) for name in ("v0", "k0"))
    handed_on = tuple(Value(f"{value.name}_out", "FLOAT", None) for value in given)
    found = build_rename_plan(Signature(given, handed_on), rules, TokenChange("T"))
    assert [pair.buffer for pair in found.pairs] == ["k", "v"]
    assert found.required_parts["attention"] == ("k", "v")
