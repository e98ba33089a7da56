"""Rules that are written for pairs recognise those pairs, and give each name its token."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnxkvrename.errors import RulesError
from onnxkvrename.model.signature import Signature, Value
from onnxkvrename.report.inert import escape_text
from onnxkvrename.rules.name_patterns import Nature, StateNames, build_tables
from onnxkvrename.rules.parse import parse_rules
from onnxkvrename.rules.plan import TokenChange, build_rename_plan
from onnxkvrename.rules.rules_text import find_suffixes, write_rules

GROWS = Nature("attention", "append")


def write(*pairs: str) -> str:
    """Return the rules for pairs of names."""
    return write_states(*(name_state(*pair.split()) for pair in pairs))


def write_states(*states: StateNames) -> str:
    return write_rules(build_tables(states, ()), "m.onnx")


def name_state(
    name: str, output: str, nature: Nature = GROWS, *, is_quantized: bool = False
) -> StateNames:
    """Return the names of a cache."""
    return StateNames(name, output, find_suffixes(name, output), nature, is_quantized)


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
        (["past.0.key new.0.key", "past.0.value new.0.value"], ["key 0", "value 0"]),
        (["past_key.3 past_key.3_RetainedState"], ["past_key 3"]),
        # of two numbers the one that counts further is the layer
        (
            [f"past_{n}_{m} cat_{n}_{m}" for n in range(3) for m in range(2)],
            [f"{m} {n}" for n in range(3) for m in range(2)],
        ),
        # of one layer, the number that is not a part of a word
        (["val1_5 new_val1_5"], ["val1 5"]),
        (["h new_h", "007 x007"], ["h 0", "007 0"]),
        (["a.0 x", "a_0 y"], ["a 0", "a_2 0"]),  # two parts that would have one name
        (["a.0 b.0", "a_0 y"], ["a 0", "a_2 0"]),  # a pattern's and a listed one
    ],
)
def test_the_layer_and_the_part_are_in_the_name_of_the_input(
    pairs: list[str], places: list[str]
) -> None:
    rules = parse_rules(write(*pairs), "test")
    found = [rules.match("input", pair.split()[0]) for pair in pairs]
    assert [f"{match.part} {match.layer}" for match in found if match] == places


def test_names_of_the_next_model_are_known() -> None:
    text = write(*(f"kv.{n}.{part} new.{n}.{part}" for n in (0, 1) for part in "kv"))
    table = (
        "[[kv]]",
        'kind = "attention"',
        r"input = 'kv\.{layer}\.(?P<part>k|v){token}'",
        r"output = 'new\.{layer}\.(?P<part>k|v){token}'",
        'roles = { key = "k", value = "v" }',
        'update = "append"',
    )
    assert text.split("\n\n")[1:] == ["\n".join(table) + "\n"]
    assert rename(text, {"kv.17.v": "new.17.v"}) == {
        "kv.17.v": "kv.17.v_T",
        "new.17.v": "new.17.v_T",
    }


@pytest.mark.parametrize(
    ("pairs", "pattern"),
    [
        # the longest word first, and scales in one table with their cache
        ("k_{}.s x_{}.s, k_{}.s_x x_{}.s_x", "k_{layer}\\.(?P<part>s_x|s){token}"),
        # of several places that differ, the one in most names, then the shortest words
        (
            "a.{}.in.k b.{}.in.k, a.{}.in.v b.{}.in.v, a.{}.of.k b.{}.of.k",
            "a\\.{layer}\\.(?P<part>in\\.k|in\\.v|of\\.k){token}",
        ),
        # words that are roles are not cut
        (
            "conv_state.{} x.conv_state.{}, recurrent_state.{} x.recurrent_state.{}",
            "(?P<part>conv_state|recurrent_state)\\.{layer}{token}",
        ),
        # after the layer, as QNN's profile has it
        ("a_{}_in a_{}_out, b_{}_in b_{}_out", "(?P<part>a|b)_{layer}{token}_in"),
    ],
)
def test_parts_differ_by_a_word_in_one_place(pairs: str, pattern: str) -> None:
    text = write(*(pair.replace("{}", str(n)) for n in (0, 1) for pair in pairs.split(", ")))
    assert f"input = '{pattern}'" in text
    assert text.count("[[kv]]") == 1


@pytest.mark.parametrize(
    "pairs",
    [
        ("past_0 cat_7", "past_1 cat_11"),  # the number of a value
        ("k0 same", "k1 other"),
        ("h new_h",),
        ("x\0.0 y\0.0",),
    ],
)
def test_names_without_a_layer_in_both_are_listed(pairs: tuple[str, ...]) -> None:
    text = write(*pairs)
    assert ("{layer}" in text, text.count("[[kv]]")) == (False, len(pairs))


def test_names_that_have_nothing_in_common_are_listed() -> None:
    """A pattern is tried on every name, so there are few."""
    words = [f"{chr(97 + n // 26)}{chr(97 + n % 26)}" for n in range(70)]
    text = write(*(f"{word}{word}.0 new{word}.0" for word in words))
    assert ("{layer}" in text, text.count("[[kv]]")) == (False, 70)


@pytest.mark.parametrize(
    ("natures", "lines"),
    [
        ((GROWS, Nature("attention", "")), ['kind = "attention"', "input", "output", "part"]),
        (
            (Nature("linear", "inplace"), Nature("attention", "inplace")),
            ['kind = "attention"', "input", "output", "part", "update", "by_shape = true"],
        ),
    ],
)
def test_layers_that_differ_have_one_rule(natures: tuple[Nature, ...], lines: list[str]) -> None:
    states = [name_state(f"s.{n}", f"t.{n}", nature) for n, nature in enumerate(natures)]
    rules = write_states(*states).split("[[kv]]\n")[1].splitlines()
    assert len(rules) == len(lines)
    assert all(map(str.startswith, rules, lines))


def test_a_layer_whose_sides_differ_in_shape_needs_a_rule_of_its_own() -> None:
    states = [name_state("s.0", "t.0"), name_state("s.1", "t.1", Nature("attention", "delta"))]
    assert "{layer}" not in write_states(*states)


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
        (("past", "present"), ("", "")),
        (("past", "past_out"), ("", "_out")),
        (("past.1", "past.10"), ("", "")),
        (("past", "past"), ("", "")),
        (("past_1_in", "past_1_out"), ("_in", "_out")),
        (("past_1.input", "past_1.output"), (".input", ".output")),
        (("past_1_in", "past_2_out"), ("", "")),
        (("past_1_out", "past_1_in"), ("", "")),
        (("past_in", "past_out"), ("", "")),
        (("1.k_in", "1.k_out"), ("", "")),
    ],
)
def test_a_suffix_follows_the_whole_name_of_the_input_or_the_layer(
    names: tuple[str, str], expected: tuple[str, str]
) -> None:
    assert find_suffixes(*names) == expected


def test_parts_of_other_layers_or_updates_are_other_kinds() -> None:
    text = write_states(
        *(name_state(f"{part}.{n}", f"n.{part}.{n}") for part in "kv" for n in (0, 2)),
        name_state("w.1", "n.w.1"),
        name_state("x.0", "n.x.0", Nature("cross", "once")),
        name_state("k.y", "n.k.y", Nature("attention", "delta")),
        name_state("s.0", "n.s.0", Nature("linear", "")),
    )
    rules = parse_rules(text, "test").kv_rules
    assert [(*rule.roles, rule.kind, rule.cache, rule.update) for rule in rules] == [
        ("k", "v", "attention", "attention", "append"),
        ("w", "attention_2", "attention", "append"),
        ("x", "cross", "cross", "once"),
        ("k_y", "attention_3", "attention", "delta"),
        ("s", "linear", "linear", ""),
    ]


def test_scales_are_beside_their_cache() -> None:
    text = write_states(
        name_state("p.0.key", "q.0.key", is_quantized=True),
        name_state("p.0.key_scale", "q.0.key_scale"),
    )
    assert 'beside = { key_scale = "key" }' in text
    (rule,) = parse_rules(text, "test").kv_rules
    assert rule.beside == {"key_scale": "key"}


def test_names_are_left_alone() -> None:
    tables = build_tables([name_state("past.0", "present.0")], ())
    text = write_rules(
        tables, "m", {r"past\.1": "not a state"}, {"not a state": ["it is\nnot read"]}
    )
    assert "\n# it is?not read\n[[keep]]\n" in text
    assert rename(text, {"past.0": "present.0"}) == {
        "past.0": "past.0_T",
        "present.0": "present.0_T",
    }
    assert parse_rules(text, "test").find_reason_to_keep("past.1") == "not a state"


def test_a_title_stays_one_line() -> None:
    text = write_rules([], "m\nevil = 1\x85")
    assert text.splitlines()[0].startswith("# m?evil = 1?, found")


def test_what_is_no_unicode_cannot_be_written() -> None:
    with pytest.raises(RulesError, match="is not Unicode"):
        write("a\udcff b")


NAMES = st.text(st.characters(exclude_categories=["Cs", "Z"]), min_size=1, max_size=8)


@given(st.dictionaries(NAMES, NAMES, min_size=1, max_size=4))
def test_rules_can_be_written_for_any_names(pairs: dict[str, str]) -> None:
    outputs = {name: f"out:{number}:{made}" for number, (name, made) in enumerate(pairs.items())}
    text = write_states(*(name_state(*pair) for pair in outputs.items()))
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
