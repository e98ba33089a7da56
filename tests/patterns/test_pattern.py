from __future__ import annotations

import pickle
import re
import sys
from pathlib import Path

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from onnxkvrename import RulesError
from onnxkvrename.patterns.matcher import LinearMatcher
from onnxkvrename.patterns.pattern import Re2Matcher, compile_pattern
from onnxkvrename.patterns.syntax import (
    MAX_GROUPS,
    MAX_LENGTH,
    MAX_POSITIONS,
    MAX_STEPS,
    PatternSyntaxError,
    parse_pattern,
)
from onnxkvrename.rules.load import PROFILES_DIRECTORY, list_profiles, parse_rules

try:
    import re2
except ImportError:
    re2 = None
needs_re2 = pytest.mark.skipif(re2 is None, reason="google-re2 is not installed (extra [re2])")
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


@needs_re2
def test_bytes_that_are_no_text_come_back_as_they_were() -> None:
    pattern = compile_pattern(r"(?P<scope>\C*)/(?P<rest>.*)")
    assert pattern.match_groups(NOT_TEXT) == {"scope": "\udcff", "rest": "past_key.0"}


def test_bytes_that_are_no_text_match_no_class() -> None:
    for pattern in ("(?s).*", "[^a]*past_key.0", r"\W/past_key\.0"):
        assert not compile_pattern(pattern).matches(NOT_TEXT)


REFUSED = [
    ("(", "missing )"),
    ("a)", "unexpected )"),
    ("[", "missing ]"),
    ("*", "no argument for repetition"),
    ("a{3,2}", "invalid repetition size"),
    ("\\", "trailing \\"),
    ("(?=a)", "invalid perl operator"),
    ("(?<!a)b", "invalid perl operator"),
    (r"(a)\1", "invalid escape sequence"),
    ("a{2000}", "invalid repetition size"),
    ("a**", "bad repetition operator"),
    ("[z-a]", "invalid character class range"),
]


@needs_re2
@pytest.mark.parametrize(("pattern", "reason"), REFUSED)
def test_what_re2_does_not_take_is_refused_with_its_reason(
    pattern: str, reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match="RE2") as caught:
        compile_pattern(pattern)
    assert str(caught.value).startswith(f"is not an RE2 pattern: {reason}")
    assert capfd.readouterr() == ("", "")


@pytest.fixture
def without_re2(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make google-re2 look as if it were not installed."""
    monkeypatch.setitem(sys.modules, "re2", None)


@pytest.mark.usefixtures("without_re2")
@pytest.mark.parametrize(("pattern", "reason"), REFUSED)
def test_without_re2_a_malformed_pattern_is_refused_all_the_same(pattern: str, reason: str) -> None:
    with pytest.raises(ValueError, match="RE2") as caught:
        compile_pattern(pattern)
    assert str(caught.value).startswith(f"is not an RE2 pattern: {reason}")


def name_groups(count: int) -> str:
    return "".join(f"(?P<g{number}>a*)" for number in range(count))


BEYOND = [
    ("(?i)past_key", "(?i"),
    (r"\bpast", "the escape \\b"),
    (r"\C*", "the escape \\C"),
    (r"\pL+", "the escape \\p"),
    ("[[:alpha:]]+", "a class such as [:alpha:]"),
    ("a{", "an unescaped {"),
    ("(?P<a>(?:x?)*)", "a repetition of something that may be empty"),
    (f"(?:ab){{{MAX_POSITIONS // 2 + 1}}}", f"more than {MAX_POSITIONS} characters"),
    ("(?:){0,1000}" * 300, f"more than {MAX_POSITIONS} characters"),
    ("a" * (MAX_LENGTH + 1), f"more than {MAX_LENGTH} characters of text"),
    (name_groups(MAX_GROUPS + 1), f"more than {MAX_GROUPS} named groups"),
    ("(?:a?){300}", f"more than {MAX_STEPS} ways"),
]


@needs_re2
@pytest.mark.parametrize("pattern", [pattern for pattern, _ in BEYOND])
def test_other_syntax_is_for_re2(pattern: str) -> None:
    assert isinstance(compile_pattern(pattern), Re2Matcher)


@pytest.mark.usefixtures("without_re2")
@pytest.mark.parametrize(("pattern", "reason"), BEYOND)
def test_without_re2_other_syntax_is_refused_with_the_fix(pattern: str, reason: str) -> None:
    with pytest.raises(ValueError, match="requires google-re2") as caught:
        compile_pattern(pattern)
    assert f"because it contains {reason}" in str(caught.value)
    assert "pip install 'onnxkvrename[re2]', or write it without" in str(caught.value)


@pytest.mark.usefixtures("without_re2")
def test_without_re2_rules_name_the_key_of_a_pattern_that_needs_it() -> None:
    with pytest.raises(RulesError, match=r"^mine\.toml: retained: requires google-re2, .*\(\?i"):
        parse_rules(
            "retained = '(?i)x'\n[[kv]]\n"
            "input = '(?P<buffer>k)(?P<layer>0)(?:_(?P<token>T))?'\n"
            "output = '(?P<buffer>k)(?P<layer>0)(?:_(?P<token>T))?_out'\n"
            "input_name = '{buffer}{layer}[_{token}]'\n"
            "output_name = '{buffer}{layer}[_{token}]_out'\n"
            "kinds = {attention = ['k']}",
            "mine.toml",
        )


@pytest.mark.usefixtures("without_re2")
@pytest.mark.parametrize("name", list_profiles())
def test_built_in_profiles_need_no_re2(name: str) -> None:
    text = (PROFILES_DIRECTORY / f"{name}.toml").read_text("utf-8")
    assert parse_rules(text, name).kv_rules


@pytest.mark.usefixtures("without_re2")
@pytest.mark.parametrize("path", ["README.md", "docs"])
def test_patterns_of_the_documentation_need_no_re2(path: str) -> None:
    root = Path(__file__).resolve().parents[2] / path
    pages = [root] if root.is_file() else sorted(root.rglob("*.md"))
    texts = [text for page in pages for text in toml_patterns(page.read_text("utf-8"))]
    assert [type(compile_pattern(text)) for text in texts] == [LinearMatcher] * len(texts)


def toml_patterns(text: str) -> list[str]:
    return re.findall(r"^(?:retained|input|output|pattern|file|folder) = '(.*)'", text, re.M)


class Probe(LinearMatcher):
    """Counts the transitions that are computed: each is at most one for a character."""

    computed = 0

    def _compute_transition(self, viable: int, positions: int) -> int:
        self.computed += 1
        return super()._compute_transition(viable, positions)


@pytest.mark.parametrize(
    ("pattern", "unit", "end"),
    [
        ("(a+)+$", "a", "!"),
        ("(.*)*x", "a", "!"),
        ("(a|a)*b", "a", "!"),
        ("(a|aa)+$", "a", "!"),
        ("(?s).*lora.*\\.weight(?:_(?:Internal)?RetainedState)?", "lora", ".weight_"),
        (".*_VLLM(_.*)?", "_VLLM", "\n"),
        ("(?P<a>.*)(?P<b>.*)(?P<c>.*)x", "a", "!"),
        ("(?P<scope>(?:.*/)?)(?P<buffer>[a-z_]+)\\.(?P<layer>[0-9]+)", "a/", "a."),
        ("(x+x+)+y", "x", ""),
        ("(?:a?){100}a{100}", "a", "!"),
    ],
)
def test_a_hostile_name_is_read_once(pattern: str, unit: str, end: str) -> None:
    for name in (unit * 50_000 + end, end + unit * 50_000):
        matcher = Probe(pattern)
        matcher.match_groups(name)
        assert matcher.computed <= 50 * MAX_POSITIONS


def test_characters_that_a_pattern_does_not_tell_apart_share_their_transitions() -> None:
    matcher = Probe(r"(?P<scope>(?:.*/)?)(?P<buffer>[a-z_]+)\.(?P<layer>[0-9]+)")
    scope = "".join(map(chr, range(0x4E00, 0x9E20))) + "/"
    assert matcher.match_groups(f"{scope}k.0") == {"scope": scope, "buffer": "k", "layer": "0"}
    assert matcher.computed <= 10


@pytest.mark.parametrize(
    "pattern",
    [
        "a" * MAX_POSITIONS,
        name_groups(MAX_GROUPS),
        "[ab]?" * 90 + name_groups(MAX_GROUPS),
        f"(?:{'|'.join('a' * 150)})+",
        f"(?:{'|'.join('a' * 150)})" + name_groups(MAX_GROUPS),
        "(?:a?){150}",
        "(?:a{0,3}|bc){1,5}?" * 4,
    ],
)
def test_what_an_accepted_pattern_takes_to_build_is_bounded(pattern: str) -> None:
    steps = LinearMatcher(pattern)._load_automaton().steps
    assert len(steps) <= MAX_POSITIONS + 2
    # Each position can also come first, and can come last.
    assert sum(map(len, steps)) <= MAX_STEPS + 2 * len(steps)


def test_the_groups_of_a_hostile_name_are_found_without_going_back() -> None:
    pattern = compile_pattern("(?P<a>.*)(?P<b>a.*)(?P<c>b+)")
    name = "ab" * 50_000
    assert pattern.match_groups(name) == {"a": name[:-2], "b": "a", "c": "b"}


# Patterns and names over few characters, so that they meet; é and newline for their own rules.
ATOMS = st.sampled_from(
    [
        r"a",
        r"b",
        r"_",
        r"1",
        r"é",
        r"\.",
        r".",
        r"[ab]",
        r"[^a]",
        r"[^/é]",
        r"[a-z_]",
        r"[\d_]",
        r"[^\w]",
        r"\d",
        r"\w",
        r"\s",
        r"\D",
        r"\W",
        r"\S",
        r"\n",
        r"\x61",
        r"[]a]",
        r"[a-]",
        r"[-a]",
        r"^",
        r"$",
        r"(?s)",
    ]
)
REPEATS = st.sampled_from(
    ["?", "*", "+", "{2}", "{0,2}", "{1,}", "{0}", "??", "*?", "+?", "{1,2}?"]
)


def extend(patterns: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.lists(patterns, max_size=4).map("".join),
        st.lists(patterns, min_size=2, max_size=3).map("|".join).map("(?:{})".format),
        st.builds("({}){}".format, patterns, REPEATS),
        st.builds("(?:{}){}".format, patterns, REPEATS),
        st.builds("(?P<NAME>{})".format, patterns),
        st.builds("(?s:{})".format, patterns),
        st.builds("{}{}".format, patterns, REPEATS),
    )


PATTERNS = st.recursive(ATOMS, extend, max_leaves=10).map(
    lambda text: "".join(
        f"{part}<g{number}>" if part.endswith("(?P") else part
        for number, part in enumerate(re.split("<NAME>", text))
    )
)
NAMES = st.text(st.sampled_from("ab_1é/. \n\v\udcff"), max_size=8)


@needs_re2
@given(PATTERNS, st.lists(NAMES, min_size=1, max_size=8))
@example("(?P<g0>a|ab)(?P<g1>c|bcd)?(?P<g2>d*)", ["abcd", "ab"])
@example("(?s).$", ["\n", "é"])
def test_every_accepted_pattern_means_what_it_means_to_re2(pattern: str, names: list[str]) -> None:
    try:
        matcher = LinearMatcher(pattern)
    except PatternSyntaxError as error:
        if error.is_malformed:
            with pytest.raises(re2.error):
                re2.compile(pattern, quiet())
        return
    compiled = re2.compile(pattern, quiet())
    reference = Re2Matcher(compiled, tuple(dict(compiled.groupindex).items()))
    assert sorted(matcher.groups) == sorted(reference.groups)
    for name in names:
        assert matcher.matches(name) == reference.matches(name)
        assert matcher.match_groups(name) == reference.match_groups(name)


def quiet() -> object:
    options = re2.Options()
    options.log_errors = False
    return options


@needs_re2
@given(st.text("ab()[]{}|*+?^$.\\-:PsidwC<>12,=\n", max_size=12), NAMES)
def test_re2_and_this_package_refuse_the_same_malformed_patterns(pattern: str, name: str) -> None:
    try:
        matcher = LinearMatcher(pattern)
    except PatternSyntaxError as error:
        if error.is_malformed:
            with pytest.raises(re2.error):
                re2.compile(pattern, quiet())
        return
    compiled = re2.compile(pattern, quiet())
    matched = compiled.fullmatch(name.encode("utf-8", "surrogateescape")) is not None
    assert matcher.matches(name) == matched


@given(st.text(max_size=20), st.text(max_size=20))
def test_escaped_text_matches_itself_only(text: str, other: str) -> None:
    try:
        matcher = LinearMatcher(re.sub(r"([!-/:-@\[-^`{-~])", r"\\\1", text))
    except PatternSyntaxError:
        assume(False)
    assert matcher.matches(text)
    assert matcher.matches(other) is (other == text)


@pytest.mark.parametrize("pattern", ["(?P<a>x+)y", pytest.param(r"(?P<a>\C+)y", marks=needs_re2)])
def test_a_pattern_travels_to_a_worker(pattern: str) -> None:
    compiled = compile_pattern(pattern)
    assert compiled.match_groups("xxy") == {"a": "xx"}
    assert pickle.loads(pickle.dumps(compiled)).match_groups("xxy") == {"a": "xx"}


def test_a_pattern_has_its_groups_in_the_order_in_which_they_open() -> None:
    assert parse_pattern("(?P<b>(?P<c>x))(y)(?P<a>z)").groups == ("b", "c", "a")
