"""Sentences that readers stumble over do not come back: messages, help, docstrings and pages.

A phrase is in the table once it is gone from all of them, with what to write instead.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

PLAIN_BY_PHRASE = {
    r"(?<!there )\b(?:is|are|was|were) no (?!(?:longer|more|such|limit)\b)": "is not a …",
    r"\btakes no (?!longer)": "does not accept, cannot have",
    r"\bforet(?:ell|old)": "predict",
    r"\botherwise than\b": "different from",
    r"\banother token than\b": "a different token than",
    r"\bis called like\b": "is named …, has the name of",
    r"\bno [a-z]+ is called\b": "no such …, unknown …",
    r"\bin its place the last\b": "instead",
    r"\bin so many words\b": "literally",
    r"\bgo(?:es)? about it\b": "",
    r"\bwould meet\b": "",
    r"\bin peace\b": "ignore, skip",
    r"\blook(?:s)? ahead\b": "preview",
    r"\bnor can (?:it|they) be\b": "a second sentence",
    r"\bcannot be told\b": "cannot be determined",
    r"\bis beyond what\b": "exceeds",
    r"\bis being worked on\b": "is being processed",
    r"\bsomeone else just now\b": "another program",
    r"\bin vain\b": "without effect",
    r"\bspeaks? of\b": "refers to",
    r"\bout of which\b": "from which",
    r"\bstands? for\b": "represents, means, is about",
    r"\bstands? in\b": "is in",
    r"\bas (?:it|they|the \w+) stands?\b": "as it is",
    r"\bbut for\b": "except for",
    r"\ball the same\b": "anyway, nevertheless",
    r"\btells? if\b": "returns whether",
    r"\b(?:rules|profile) that (?:tells?|told)\b": "recognize, recognized",
    r"\bsays? nothing (?:of|about)\b": "does not mention, does not show",
    r"\bvouch": "prove",
    r"\btokens? (?:to (?:put|take)|out\b)": "add, remove",
    r"\bas (?:a consumer|vLLM) meets\b": "as a consumer sees",
    r"\bwhat keeps\b": "why … cannot",
    r"\btaken for (?!granted)": "mistaken for, treated as",
    r"\bgo(?:es)? on\b": "continue",
    r"\bnobody asked\b": "that the user did not choose",
    r"\bmade anew\b|\banew\b": "again",
    r"\bbears?\b|\bwears?\b": "has, can",
    r"\bsuppos(?:e|es|ing)\b": "assumes",
    r"\bholds? [^.;:]{0,40} against\b": "compares … with",
    r"\bgets? to know\b": "learns, stores",
    r"\bhas to know of\b": "must be changed",
    r"\bwhence\b|\bthere(?:of|upon|in)\b|\bwhere(?:in|of|upon)\b": "from which, of it, in it",
    r"\bhitherto\b|\bhenceforth\b|\balbeit\b|\bupon\b|\bheed": "until now, although, on, obey",
    r"\b(?:is|are) spilt\b|\bdoom": "is lost, fails",
    r"\bdeals? [^.;:]{0,40} out\b": "distribute",
    r"\bunequally many\b|\bas many as pay\b": "different numbers, as many as are useful",
}
"""Patterns of phrases, with the words to use instead. Case does not matter."""

PAGES = sorted(
    path
    for pattern in ("*.md", "docs/*.md", "examples/**/*.md", "examples/**/*.py")
    for path in ROOT.glob(pattern)
    if path.name != "CHANGELOG.md"
)
SOURCES = sorted((ROOT / "onnxkvrename").rglob("*.py"))
TEXTS = {path.relative_to(ROOT).as_posix(): path for path in (*PAGES, *SOURCES)}


@cache
def read_texts() -> dict[str, str]:
    """Return each text as one line, by the path of its file."""
    return {name: join_lines(path.read_text("utf-8")) for name, path in TEXTS.items()}


def join_lines(text: str) -> str:
    """Return a text as one line, so that a phrase is found across line breaks and literals."""
    without_quotes = re.sub(r"\"\n\s*f?\"", "", text)
    return re.sub(r"\s+(?:#\s+)?", " ", without_quotes)


@pytest.mark.parametrize("phrase", PLAIN_BY_PHRASE)
def test_nobody_has_to_read_it_again(phrase: str) -> None:
    pattern = re.compile(phrase, re.IGNORECASE)
    found = [
        f"{name}: {match.group()}"
        for name, text in read_texts().items()
        for match in pattern.finditer(text)
    ]
    assert not found, f"{found} (write: {PLAIN_BY_PHRASE[phrase]})"


def test_a_phrase_is_found_across_lines() -> None:
    source = 'raise WriteError(\n    f"is no "\n    "regular file"\n)\n# It speaks\n# of a model.'
    text = join_lines(source)
    assert "is no regular file" in text
    assert "speaks of a model" in text
