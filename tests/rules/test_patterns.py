from __future__ import annotations

import pickle

import pytest

from onnxkvrename.rules.patterns import compile_pattern

NOT_TEXT = b"\xff/past_key.0".decode("utf-8", "surrogateescape")


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
        ("a", "a\n", False),
        ("", "", True),
        ("", "a", False),
        ("[éè]", "é", True),
        (".", "漢", True),
    ],
)
def test_a_pattern_is_for_whole_names(pattern: str, name: str, fits: bool) -> None:
    assert compile_pattern(pattern).matches(name) is fits


def test_the_groups_of_a_name_are_its_parts() -> None:
    pattern = compile_pattern(r"(?P<buffer>k|v)(?P<layer>[0-9]+)(?:_(?P<token>\w+))?")
    assert pattern.match_groups("k12_é") is None
    assert pattern.match_groups("k12_V") == {"buffer": "k", "layer": "12", "token": "V"}
    assert pattern.match_groups("v0") == {"buffer": "v", "layer": "0", "token": ""}
    assert pattern.match_groups("v") is None
    assert compile_pattern("(a)(?P<b>.)").match_groups("aé") == {"b": "é"}


def test_bytes_that_are_no_text_come_back_as_they_were() -> None:
    pattern = compile_pattern(r"(?P<scope>\C*)/(?P<rest>.*)")
    assert pattern.match_groups(NOT_TEXT) == {"scope": "\udcff", "rest": "past_key.0"}
    assert not compile_pattern(".*").matches(NOT_TEXT)


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("(", "is no RE2 pattern: missing )"),
        ("[", "is no RE2 pattern: missing ]"),
        ("(?=a)", "is no RE2 pattern: invalid perl operator"),
        (r"(a)\1", "is no RE2 pattern: invalid escape sequence"),
        ("a{2000}", "is no RE2 pattern: invalid repetition size"),
        ("*", "is no RE2 pattern: no argument for repetition"),
    ],
)
def test_what_re2_does_not_take_is_refused_with_its_reason(
    pattern: str, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match="RE2") as caught:
        compile_pattern(pattern)
    assert str(caught.value).startswith(said)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("pattern", ["(a+)+$", "(.*)*x", "(a|a)*b"])
def test_no_pattern_takes_for_ever_on_a_hostile_name(pattern: str) -> None:
    assert not compile_pattern(pattern).matches("a" * 100_000 + "!")


def test_a_pattern_travels_to_a_worker() -> None:
    pattern = pickle.loads(pickle.dumps(compile_pattern("(?P<a>x+)y")))
    assert pattern.match_groups("xxy") == {"a": "xx"}
