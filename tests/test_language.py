"""Sentences that readers stumble over do not come back: messages, help, docstrings and pages.

A phrase is in the table once it is gone from all of them, with what to write instead.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

PLAIN_BY_PHRASE = {
    r"(?<!there )(?:is|was|are) no (?:regular|director|UTF-8|YAML\b|sidecar)": "is not a …",
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


def join_lines(text: str) -> str:
    """Return a text as one line, so that a phrase is found across line breaks and literals."""
    without_quotes = re.sub(r"\"\n\s*f?\"", "", text)
    return re.sub(r"\s+(?:#\s+)?", " ", without_quotes)


@pytest.mark.parametrize("phrase", PLAIN_BY_PHRASE)
def test_nobody_has_to_read_it_again(phrase: str) -> None:
    pattern = re.compile(phrase, re.IGNORECASE)
    found = [
        f"{name}: {match.group()}"
        for name, path in TEXTS.items()
        for match in pattern.finditer(join_lines(path.read_text("utf-8")))
    ]
    assert not found, f"{found} (write: {PLAIN_BY_PHRASE[phrase]})"


def test_a_phrase_is_found_across_lines() -> None:
    source = 'raise WriteError(\n    f"is no "\n    "regular file"\n)\n# It speaks\n# of a model.'
    text = join_lines(source)
    assert "is no regular file" in text
    assert "speaks of a model" in text
