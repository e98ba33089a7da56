"""Rules that are written for pairs recognise those pairs, and give each name its token."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnxkvrename.errors import RulesError
from onnxkvrename.model.signature import Signature, Value
from onnxkvrename.report.inert import escape_text
from onnxkvrename.rules.parse import parse_rules
from onnxkvrename.rules.plan import TokenChange, build_rename_plan
from onnxkvrename.rules.rules_text import StateNames, split_suffix, write_rules


def write(*pairs: str) -> str:
    """Return the rules for pairs of names."""
    return write_rules([name_state(*pair.split()) for pair in pairs], "m.onnx")


def name_state(name: str, output: str) -> StateNames:
    """Return the names of a cache that grows."""
    return StateNames(name, *split_suffix(name, output), "attention", "append")


def rename(text: str, pairs: dict[str, str], token: str = "T") -> dict[str, str]:
    """Return the new names of a model's inputs and outputs."""
    signature = Signature(
        tuple(Value(name, "FLOAT", None) for name in pairs),
        tuple(Value(name, "FLOAT", None) for name in pairs.values()),
    )
    plan = build_rename_plan(signature, parse_rules(text, "test"), TokenChange(token))
    assert all(pair.input and pair.output for pair in plan.pairs)
    return dict(plan.name_map)


@pytest.mark.parametrize(
    ("pairs", "places"),
    [
        (["past.0.key present.0.key", "past.11.key present.11.key"], ["past_key 0", "past_key 11"]),
        (["past_key.3 past_key.3_RetainedState"], ["past_key 3"]),
        # of two numbers the one that counts further is the layer
        (
            [f"past_{n}_{m} cat_{n}_{m}" for n in range(3) for m in range(2)],
            [f"past_{m} {n}" for n in range(3) for m in range(2)],
        ),
        (["h new_h", "007 x007"], ["h 0", "007 0"]),
        (["a.0 x", "a_0 y"], ["a 0", "a_2 0"]),  # two parts that would have one name
    ],
)
def test_the_layer_and_the_part_are_in_the_name_of_the_input(
    pairs: list[str], places: list[str]
) -> None:
    rules = parse_rules(write(*pairs), "test")
    found = [rules.match("input", pair.split()[0]) for pair in pairs]
    assert [f"{match.part} {match.layer}" for match in found if match] == places


def test_names_are_listed() -> None:
    text = write("past_0_0 cat_7", "past_1_0 cat_11")
    table = (
        "[[kv]]",
        'kind = "attention"',
        "input = 'past_1_0{token}'",
        "output = 'cat_11{token}'",
        "layer = 1",
        'part = "past_0"',
        'update = "append"',
    )
    assert "\n".join(table) in text
    assert rename(text, {"past_0_0": "cat_7", "past_1_0_T": "cat_11"}) == {
        "past_0_0": "past_0_0_T",
        "cat_7": "cat_7_T",
        "cat_11": "cat_11_T",
    }
    assert rename(text, {"past_9_0": "cat_9"}) == {}


def test_the_token_comes_before_what_the_output_has_more() -> None:
    text = write("h h_RetainedState", "past.0 past.0_out")
    assert "output = 'h{token}_RetainedState'" in text
    pairs = {"h": "h_RetainedState", "past.0": "past.0_out"}
    assert set(rename(text, pairs).values()) == {
        *("h_T", "h_T_RetainedState"),
        *("past.0_T", "past.0_T_out"),
    }


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("past", "present"), ("present", "")),
        (("past", "past_out"), ("past", "_out")),
        (("past.1", "past.10"), ("past.10", "")),
        (("past", "past"), ("past", "")),
    ],
)
def test_a_suffix_follows_the_whole_name_of_the_input(
    names: tuple[str, str], expected: tuple[str, str]
) -> None:
    assert split_suffix(*names) == expected


def test_parts_of_other_layers_or_updates_are_other_kinds() -> None:
    states = [
        StateNames("k.0", "n.k.0", "", "attention", "append"),
        StateNames("v.0", "n.v.0", "", "attention", "append"),
        StateNames("k.2", "n.k.2", "", "attention", "append"),
        StateNames("v.2", "n.v.2", "", "attention", "append"),
        StateNames("w.1", "n.w.1", "", "attention", "append"),
        StateNames("x.0", "n.x.0", "", "cross", "once"),
        StateNames("k.3", "n.k.3", "", "attention", "delta"),
        StateNames("s.0", "n.s.0", "", "linear", "unknown"),
    ]
    text = write_rules(states, "m.onnx")
    rules = parse_rules(text, "test").kv_rules
    assert [(*rule.roles, rule.kind, rule.cache, rule.update) for rule in rules] == [
        ("k", "attention", "attention", "append"),
        ("k", "attention", "attention", "append"),
        ("k_2", "attention_2", "attention", "delta"),
        ("v", "attention", "attention", "append"),
        ("v", "attention", "attention", "append"),
        ("w", "attention_3", "attention", "append"),
        ("x", "cross", "cross", "once"),
        ("s", "linear", "linear", ""),
    ]


def test_scales_are_beside_their_cache() -> None:
    states = [
        StateNames("p.0.key", "q.0.key", "", "attention", "inplace", is_quantized=True),
        StateNames("p.0.key_scale", "q.0.key_scale", "", "attention", "inplace"),
    ]
    text = write_rules(states, "m.onnx")
    assert 'beside = { "p_key_scale" = "p_key" }' in text
    _, scale = parse_rules(text, "test").kv_rules
    assert scale.beside == {"p_key_scale": "p_key"}


def test_names_are_left_alone() -> None:
    text = write_rules(
        [StateNames("past.0", "present.0", "", "attention", "append")],
        "m",
        kept_names={"past.1": "not a state"},
        notes={"past.1": "not a state: it is\nnot read"},
    )
    assert "\n# not a state: it is?not read\n[[keep]]\n" in text
    assert rename(text, {"past.0": "present.0"}) == {
        "past.0": "past.0_T",
        "present.0": "present.0_T",
    }
    assert parse_rules(text, "test").find_reason_to_keep("past.1") == "not a state"


def test_a_title_stays_one_line() -> None:
    text = write_rules([StateNames("a.0", "b.0", "", "x", "")], "m\nevil = 1\x85")
    assert text.splitlines()[0].startswith("# m?evil = 1?, found")


def test_what_is_no_unicode_cannot_be_written() -> None:
    with pytest.raises(RulesError, match="is not Unicode"):
        write("a\udcff b")


NAMES = st.text(st.characters(exclude_categories=["Cs", "Z"]), min_size=1, max_size=8)


@given(st.dictionaries(NAMES, NAMES, min_size=1, max_size=4))
def test_rules_can_be_written_for_any_names(pairs: dict[str, str]) -> None:
    outputs = {name: f"out:{number}:{made}" for number, (name, made) in enumerate(pairs.items())}
    text = write_rules([name_state(*pair) for pair in outputs.items()], "m")
    rules = parse_rules(text, "test")
    for name, output in outputs.items():
        into, out = rules.match("input", name), rules.match("output", output)
        assert into is not None
        assert out is not None
        assert into.pair_key == out.pair_key
        assert rules.rename(into, "T") != name


@pytest.mark.parametrize("part", ["##a[", "\u034f", "\U000e0101", "\u3164", "größe", "\x7f"])
def test_what_a_terminal_shows_of_the_rules_can_be_read_as_rules(part: str) -> None:
    text = write(f"p{part}.0 q{part}.0", f"'{part}a\\ '{part}b")
    shown = "\n".join(map(escape_text, text.split("\n")))
    names = {f"p{part}.0": f"q{part}.0", f"'{part}a\\": f"'{part}b"}
    assert rename(shown, names).keys() == {*names.keys(), *names.values()}
