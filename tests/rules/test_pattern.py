from __future__ import annotations

import pickle
import re
import signal
from collections.abc import Iterator

import pytest
from tiers import thin

from onnxkvrename import RulesError
from onnxkvrename.limits import MAX_MATCHED_CHARS
from onnxkvrename.rules.load import list_profiles, load_rules
from onnxkvrename.rules.parse import parse_rules
from onnxkvrename.rules.pattern import forbid_token, match_name, write_expression

RULES = r"""
[[kv]]
kind = "attention"
input = 'in\.{layer}\.{part}{token}'
output = 'out\.{layer}\.{part}{token}'
"""


@pytest.mark.parametrize(
    ("pattern", "name", "fits"),
    [
        ("past_key", "past_key", True),
        ("past_key", "past_key.0", False),
        ("past_key", "my_past_key", False),
        (".*past_key.*", "my_past_key.0", True),
        ("past_key.0", "past_key_0", True),
        (r"past_key\.0", "past_key_0", False),
        (".*", "a\nb", False),
        ("(?s).*", "a\nb", True),
        ("a$", "a\n", False),
        ("", "", True),
        ("[éè]", "é", True),
        (r"\w", "é", False),
        (r"\d", "٣", False),
    ],
)
def test_a_pattern_is_for_whole_names(pattern: str, name: str, fits: bool) -> None:
    assert (match_name(pattern, name) is not None) is fits


@pytest.mark.parametrize(
    ("text", "expression"),
    [
        ("", ""),
        (r"past\.{layer}{token}", r"past\.(L)(T)"),
        (r"a{2}\{layer}\\{layer}", r"a{2}\{layer}\\(L)"),
        (r"(?:x|{token})[^{]", r"(?:x|(T))[^{]"),
    ],
)
def test_shorthand_becomes_groups(text: str, expression: str) -> None:
    assert write_expression(text, {"layer": "(L)", "token": "(T)"}) == expression


@pytest.mark.parametrize("token", [r"(?:_[A-Z]+)?", "_[A-Z]+|", "|_[A-Z]+", "(?:(?:_)(?:[A-Z]+))?"])
def test_a_token_can_be_forbidden_whatever_its_group_is(token: str) -> None:
    for name, fits in (("k.0", True), ("k_T.0", False)):
        bare = match_name(forbid_token(rf"k(?P<token>{token})\.0"), name)
        assert (bare is not None and bare["token"] is not None) is fits


def test_a_rule_travels_to_a_worker() -> None:
    rules = pickle.loads(pickle.dumps(parse_rules(RULES, "mine.toml")))
    assert rules.match("input", "in.3.key_T").pair_key == ("attention", "", "key", 3)


@pytest.mark.parametrize(
    "pattern", ["(", "(?P<layer", "*", "[z-a]", r"(a)\2", "a{99999999999}", "(?P<1>a)"]
)
def test_a_mistake_in_a_pattern_names_its_key(pattern: str) -> None:
    with pytest.raises(RulesError, match=r"^mine\.toml: retained: is not a regular expression: "):
        parse_rules(f"retained = '{pattern}'\n{RULES}", "mine.toml")
    with pytest.raises(RulesError, match=r"^mine\.toml: kv\[0\]\.input: "):
        parse_rules(RULES.replace("'in", f"'{pattern}"), "mine.toml")


def test_no_pattern_is_tried_on_a_very_long_name() -> None:
    assert match_name("a*", "a" * MAX_MATCHED_CHARS) is not None
    assert match_name("a*", "a" * (MAX_MATCHED_CHARS + 1)) is None


def list_built_in_patterns() -> Iterator[str]:
    for rules in map(load_rules, list_profiles()):
        for rule in rules.kv_rules:
            yield from rule.expressions.values()
        yield from filter(None, (*rules.keep, rules.retained_pattern))


PATTERNS = sorted(set(list_built_in_patterns()))
UNITS = (
    *(
        "lora",
        ".weight",
        "a",
        "a/",
        "/",
        "_",
        ".",
        "0",
        "_0",
        ".0",
        "past_key.0",
        "_VLLM",
        "_layer_tmp_",
    ),
    *("_RetainedState", "_InternalRetainedState", "present_key_", "past_", "vision_embeds", "\n"),
)


@pytest.fixture
def at_most_a_minute() -> Iterator[None]:
    """End a match that goes on and on: 200,000 characters take 40 s or more in quadratic time."""
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("at_most_a_minute")
@pytest.mark.parametrize("pattern", thin(PATTERNS, 10))
def test_the_patterns_of_built_in_profiles_take_linear_time(pattern: str) -> None:
    expression = re.compile(pattern, re.ASCII)
    literals = re.findall(r"[A-Za-z_./]{3,}", pattern)
    for unit in (*UNITS, *literals):
        for first, last in (("", "!"), ("lora", ".weight!"), ("a/past_key.0_", "")):
            expression.fullmatch(first + unit * (200_000 // len(unit)) + last)


@pytest.mark.skipif(not hasattr(signal, "alarm"), reason="needs an alarm")
def test_a_quadratic_pattern_would_be_noticed() -> None:
    expression = re.compile(r"(?s).*lora.*\.weight", re.ASCII)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        with pytest.raises(KeyboardInterrupt):
            expression.fullmatch("lora" * 50_000 + "!")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
