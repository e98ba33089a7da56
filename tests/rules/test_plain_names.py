"""A rule may be plain names, with a place for the token."""

from __future__ import annotations

import pytest

from onnxkvrename.errors import RulesError
from onnxkvrename.rules.parse import parse_rules
from onnxkvrename.rules.profile import Rules

ROW = """
input = 'a{token}'
output = 'cat_7{token}'
layer = 3
part = "key"
"""


def build_rules(*rows: str) -> Rules:
    """Rules of plain names."""
    return parse_rules("".join(f"[[kv]]\nkind = 'attention'\n{row}\n" for row in rows), "mine")


def test_a_plain_name_is_read_with_and_without_a_token() -> None:
    rules = build_rules(ROW)
    for name, token in (("a", ""), ("a_VLLM", "VLLM")):
        match = rules.match("input", name)
        assert match is not None
        assert (match.part, match.layer, match.token) == ("key", 3, token)
        assert rules.rename(match, "T") == "a_T"
        assert rules.rename(match, "") == "a"
    assert rules.is_retained_name("cat_7_VLLM")


@pytest.mark.parametrize("name", ["b", "aa", "a_", "a_V_W", "a_V.W", "", "_", "cat_7"])
def test_other_names_are_not(name: str) -> None:
    assert build_rules(ROW).match("input", name) is None


def test_a_token_may_come_before_the_rest_of_a_name() -> None:
    value = "input = 'b{token}'\noutput = 'cat_8{token}'\nlayer = 3\npart = 'value'"
    rules = build_rules(ROW.replace("7{token}", "7{token}_out"), value)
    for name in ("cat_7_out", "cat_7_VLLM_out"):
        match = rules.match("output", name)
        assert match is not None
        assert rules.rename(match, "T") == "cat_7_T_out"
    for name in ("cat_7", "cat_7_VLLM", "cat_8_V_out"):
        assert rules.match("output", name) is None


def test_a_name_that_is_listed_is_no_other_one_with_a_token() -> None:
    """Whatever the order: `a_b` may be `a` with the token `b`, but it has a rule of its own."""
    other = ROW.replace("'a{", "'a_b{").replace("cat_7", "cat_8").replace("3", "4")
    for rows in ((ROW, other), (other, ROW)):
        match = build_rules(*rows).match("input", "a_b")
        assert match is not None
        assert (match.layer, match.token) == (4, "")


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (ROW.replace("3", "-1"), "kv[0].layer: is less than 0"),
        (ROW.replace("layer = 3", ""), "kv[0].input: needs {layer}, or layer = 0"),
        (ROW.replace('part = "key"', ""), "kv[0].input: needs {part}, or part = 'key' where"),
        (ROW.replace("'a{token}'", "'a'"), "kv[0].input: has no {token}"),
        (ROW + "more = 1", "kv[0].more: is not"),
    ],
)
def test_a_plain_name_that_cannot_be_used_names_the_key(row: str, problem: str) -> None:
    with pytest.raises(RulesError) as raised:
        build_rules(row)
    assert problem in raised.value.message
