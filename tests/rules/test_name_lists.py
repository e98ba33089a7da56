"""A rule may list names one by one."""

from __future__ import annotations

import pytest

from onnxkvrename.errors import RulesError
from onnxkvrename.rules.parse import parse_rules
from onnxkvrename.rules.profile import Rules
from onnxkvrename.rules.rewrite import rewrite_name

ROW = 'layer = 3, buffer = "key", input = "a", output = "cat_7"'


def build_rules(*rows: str, more: str = "") -> Rules:
    """Rules that list names."""
    listed = ", ".join(f"{{ {row} }}" for row in rows)
    text = f"[[kv]]\n{more}\nnames = [{listed}]\n[kv.kinds.attention]\nparts = ['key', 'value']\n"
    return parse_rules(text, "mine")


def test_a_listed_name_is_read_with_and_without_a_token() -> None:
    rules = build_rules(ROW)
    for name, token in (("a", ""), ("a_VLLM", "VLLM")):
        match = rules.match("input", name)
        assert match is not None
        assert (match.buffer, match.layer, match.token) == ("key", 3, token)
        assert rewrite_name(rules, match, "T") == "a_T"
        assert rewrite_name(rules, match, "") == "a"
    assert rules.is_retained_name("cat_7_VLLM")


@pytest.mark.parametrize("name", ["b", "aa", "a_", "a_V_W", "a_V.W", "", "_", "cat_7"])
def test_other_names_are_not(name: str) -> None:
    assert build_rules(ROW).match("input", name) is None


def test_a_token_comes_before_the_suffix_of_an_output() -> None:
    value = 'layer = 3, buffer = "value", input = "b", output = "cat_8"'
    rules = build_rules(f'{ROW}, suffix = "_out"', value)
    for name in ("cat_7_out", "cat_7_VLLM_out"):
        match = rules.match("output", name)
        assert match is not None
        assert rewrite_name(rules, match, "T") == "cat_7_T_out"
    for name in ("cat_7", "cat_7_VLLM", "cat_8_V_out"):
        assert rules.match("output", name) is None


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([ROW, ROW], "kv[0].names[1].buffer: is listed"),
        (
            [ROW, ROW.replace('"key"', '"value"')],
            "kv[0].names[1].input: is empty",
        ),
        ([ROW.replace('"a"', '""')], "kv[0].names[0].input: is empty"),
        ([ROW.replace("3", "-1")], "kv[0].names[0].layer: is less than 0"),
        ([f"{ROW}, more = 1"], "kv[0].names[0].more: is not"),
        ([ROW.replace("layer = 3, ", "")], "kv[0].names[0].layer: is missing"),
    ],
)
def test_a_list_that_cannot_be_used_names_the_key(rows: list[str], problem: str) -> None:
    with pytest.raises(RulesError) as raised:
        build_rules(*rows)
    assert problem in raised.value.message


def test_names_and_patterns_do_not_mix() -> None:
    with pytest.raises(RulesError, match="input: is not"):
        build_rules(ROW, more="input = '(?P<buffer>k)(?P<layer>0)'")


def test_a_part_that_no_kind_has_is_not_matched() -> None:
    assert build_rules(ROW.replace('"key"', '"other"')).match("input", "a") is None
