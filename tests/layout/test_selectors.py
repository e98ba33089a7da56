"""Expressions that select exactly the KV buffers."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnxkvrename.errors import ModelError
from onnxkvrename.layout.layout import Layout, build_layout
from onnxkvrename.layout.load import load_layout
from onnxkvrename.layout.selectors import (
    build_name_expression,
    build_number_expression,
    build_selectors,
)
from onnxkvrename.model.signature import Signature, Value
from onnxkvrename.rules.kv_model import KvModel
from onnxkvrename.rules.load import load_rules
from onnxkvrename.rules.patterns import compile_pattern
from onnxkvrename.rules.plan import build_minimal_plan

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
LAYERS = st.sets(st.integers(0, 1200), min_size=1, max_size=60)
CHARS = st.characters(min_codepoint=1, max_codepoint=0x2FF)


compile_once = cache(compile_pattern)


def fits(text: str, name: str) -> bool:
    """Return whether an expression matches a name, anchored or not."""
    answers = {
        compile_once(text).matches(name),
        re.fullmatch(text, name) is not None,
        re.match(text, name) is not None,
        re.search(text, name) is not None,
    }
    assert len(answers) == 1, (text, name)
    return answers.pop()


def model(names: dict[str, str], others: tuple[str, ...] = ()) -> Layout:
    """A model with these inputs and their outputs, and with other outputs."""
    shape = ("batch_size", 2, "ctx_len", 4)
    signature = Signature(
        tuple(Value(name, "FLOAT", shape) for name in names),
        tuple(Value(name, "FLOAT", shape) for name in (*names.values(), *others)),
    )
    plan = build_minimal_plan(signature, load_rules())
    return build_layout([KvModel("m.onnx", signature, plan)])


def plain(*layers: int, token: str = "") -> dict[str, str]:
    """Keys and values of these layers."""
    return {
        f"past_{part}.{n}{token}": f"past_{part}.{n}{token}_RetainedState"
        for n in layers
        for part in ("key", "value")
    }


def of(found: Layout, kind: str = "all", side: str = "both") -> str:
    """The expression for a kind and a side."""
    (one,) = [s for s in build_selectors(found) if (s.kind, s.side) == (kind, side)]
    return one.expression


@given(LAYERS)
def test_numbers_fit_exactly_those_that_are_meant(layers: set[int]) -> None:
    text = f"^{build_number_expression(layers)}$"
    near = {n + d for n in layers for d in (-1, 0, 1, 10)} | {int(f"{n}0") for n in layers}
    assert {n for n in near if n >= 0 and fits(text, str(n))} == layers
    assert not any(fits(text, f"0{n}") or fits(text, f"{n}x") for n in layers)


@pytest.mark.parametrize(
    ("layers", "text"),
    [
        ([0], "0"),
        ([3, 34], "(?:3|34)"),
        (range(10), "[0-9]"),
        (range(12), "(?:[0-9]|1[01])"),
        (range(48), "(?:[0-9]|[1-3][0-9]|4[0-7])"),
        (range(3, 48, 4), "(?:[37]|[13][159]|[24][37])"),
    ],
)
def test_numbers_are_told_in_ranges(layers: range, text: str) -> None:
    assert build_number_expression(layers) == text


@given(LAYERS, st.sampled_from(["", "_VLLM", ".1", "1", "_x1.2"]), st.integers(0, 1))
def test_a_layer_is_never_taken_for_another(layers: set[int], token: str, at: int) -> None:
    parts = ("past_key", "past_value1", "k.0")
    names = {
        name: n
        for n in layers
        for part in parts[at:]
        for name in (f"{part}.{n}{token}", f"{part}.{n}{token}_RetainedState")
    }
    text = build_name_expression(names.items())
    assert all(fits(text, name) for name in names)
    near = {f"{name}0" for name in names} | {f"x{name}" for name in names}
    near |= {f"past_key.{n}{token}" for n in range(0, 1300, 7)} - names.keys()
    near |= {re.sub(r"\.", "x", name, count=1) for name in names}
    assert not any(fits(text, name) for name in near - names.keys())


@given(st.dictionaries(st.text(CHARS, min_size=1, max_size=6), st.integers(0, 12), min_size=1))
def test_any_names_are_spelled_exactly(names: dict[str, int]) -> None:
    text = build_name_expression(names.items())
    assert text.isprintable()
    pattern, python = compile_pattern(text), re.compile(text)
    assert all(pattern.matches(name) and python.fullmatch(name) for name in names)
    others = {name[:-1] for name in names} | {f"{name}1" for name in names} - names.keys()
    assert not any(
        pattern.matches(name) or python.fullmatch(name) for name in others - names.keys()
    )


def test_the_layer_is_looked_for_where_most_names_have_it() -> None:
    names = [("k1.0", 0), ("k1.1", 1), ("k1.2", 2)]
    assert build_name_expression(names) == r"^k1\.[0-2]$"


def test_a_number_that_is_written_otherwise_is_no_layer() -> None:
    assert build_name_expression([("k.01", 1)]) == r"^k\.01$"


def test_a_large_model_has_a_short_expression() -> None:
    found = model(plain(*range(93), token="_vllmKvCache"))
    assert of(found) == (
        r"^past_(?:key|value)\.(?:[0-9]|[1-8][0-9]|9[0-2])_vllmKvCache(?:_RetainedState)?$"
    )


def test_both_sides_inputs_and_outputs_are_told_apart() -> None:
    found = model(plain(0, 1))
    assert of(found) == r"^past_(?:key|value)\.[01](?:_RetainedState)?$"
    assert of(found, side="inputs") == r"^past_(?:key|value)\.[01]$"
    assert of(found, side="outputs") == r"^past_(?:key|value)\.[01]_RetainedState$"


def test_kinds_have_expressions_of_their_own() -> None:
    rules = load_rules()
    found = load_layout([FIXTURES / "plain" / "hybrid.onnx"], rules).layout
    assert of(found, "sliding_window") == r"^past_(?:key|value)\.2(?:_RetainedState)?$"
    assert of(found, "mamba", "inputs") == r"^(?:conv|recurrent)_state\.1$"
    names = {s.kind: s.names for s in build_selectors(found) if s.side == "both"}
    assert names == {"all": 12, "full_attention": 4, "mamba": 4, "sliding_window": 4}


def test_a_model_that_is_half_renamed_has_one_all_the_same() -> None:
    found = model({**plain(0), **plain(1, token="_VLLM")})
    assert all(fits(of(found), name) for buffer in found.buffers for name in buffer.names)
    assert not fits(of(found), "past_key.0_VLLM")
    assert not fits(of(found), "past_key.1")


def test_a_model_without_buffers_has_none() -> None:
    assert build_selectors(model({}, ("logits",))) == ()


def test_other_names_of_the_graph_are_never_taken() -> None:
    found = model(plain(3), ("past_key.34_norm", "past_keyx3", "logits"))
    assert not any(fits(of(found), name) for name in ("past_key.34_norm", "past_keyx3"))


def test_where_the_end_of_a_line_passes_for_that_of_a_name_it_is_refused() -> None:
    """To Python's ``$`` a last newline is nothing."""
    with pytest.raises(ModelError, match=r"fails for past_key\.0\n"):
        build_selectors(model(plain(0), ("past_key.0\n",)))


@pytest.mark.parametrize("char", ["\udcff", "\u200b"])
def test_what_cannot_be_spelled_for_all_is_refused(char: str) -> None:
    with pytest.raises(ModelError, match="no expression can"):
        build_name_expression([(f"past_key.0{char}", 0)])


def test_what_cannot_be_seen_is_spelled_by_its_number() -> None:
    assert build_name_expression([("a\t\x7f.0", 0)]) == r"^a\x09\x7f\.0$"
