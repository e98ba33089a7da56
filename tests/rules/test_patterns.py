from __future__ import annotations

import pickle
import re
import signal
from collections.abc import Iterator

import pytest
from tiers import thin

from onnxkvrename import RulesError
from onnxkvrename.documents import parse_toml
from onnxkvrename.limits import MAX_MATCHED_CHARS
from onnxkvrename.rules.load import PROFILES_DIRECTORY, list_profiles
from onnxkvrename.rules.parse import parse_rules
from onnxkvrename.rules.patterns import compile_pattern
from onnxkvrename.rules.rewrite import rewrite_name

RULES = f"""
[[kv]]
input = '(?P<buffer>k+)(?P<layer>[0-9]+)(?:_(?P<token>T))?'
output = '(?P<buffer>k+)(?P<layer>[0-9]+)(?:_(?P<token>T))?_out'
input_name = "past_{{layer}}[_{{token}}]"
output_name = "past_{{layer}}[_{{token}}]_out"
kinds.attention.parts = ["{"k" * 1000}", "v"]
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
    assert compile_pattern(pattern).matches(name) is fits


def test_the_groups_of_a_name_are_its_parts() -> None:
    pattern = compile_pattern(r"(?P<buffer>k|v)(?P<layer>[0-9]+)(?:_(?P<token>[A-Z]+))?")
    assert pattern.groups == ("buffer", "layer", "token")
    assert pattern.match_groups("k12_V") == {"buffer": "k", "layer": "12", "token": "V"}
    assert pattern.match_groups("v0") == {"buffer": "v", "layer": "0", "token": ""}
    assert pattern.match_groups("v") is None


def test_a_pattern_travels_to_a_worker() -> None:
    pattern = pickle.loads(pickle.dumps(compile_pattern("(?P<a>x+)y")))
    assert pattern.match_groups("xxy") == {"a": "xx"}


@pytest.mark.parametrize("pattern", ["(", "*", "[z-a]", r"(a)\2", "a{99999999999}", "(?P<1>a)"])
def test_a_mistake_in_a_pattern_names_its_key(pattern: str) -> None:
    with pytest.raises(RulesError, match=r"^mine\.toml: retained: is not a regular expression: "):
        parse_rules(f"retained = '{pattern}'\n{RULES}", "mine.toml")


def test_a_template_that_makes_endless_names_is_refused() -> None:
    rules = parse_rules(RULES.replace("past_{layer}", "{buffer}" * 500), "mine.toml")
    match = rules.match("input", "k" * 1000 + "0")
    assert match is not None
    with pytest.raises(RulesError, match="cannot be parsed back"):
        rewrite_name(rules, match, "VLLM")


def test_no_pattern_is_tried_on_a_very_long_name() -> None:
    pattern = compile_pattern("a*")
    assert pattern.match_groups("a" * MAX_MATCHED_CHARS) == {}
    assert not pattern.matches("a" * (MAX_MATCHED_CHARS + 1))


def list_built_in_patterns() -> Iterator[str]:
    def walk(value: object) -> Iterator[str]:
        if isinstance(value, dict):
            for key, item in value.items():
                is_pattern = key in ("retained", "input", "output", "pattern", "file", "folder")
                yield from [item] if is_pattern and isinstance(item, str) else walk(item)
        elif isinstance(value, list):
            for item in value:
                yield from walk(item)

    for name in list_profiles():
        yield from walk(parse_toml((PROFILES_DIRECTORY / f"{name}.toml").read_text("utf-8")))


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
