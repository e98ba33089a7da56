"""The frame of a page: what a browser, a reader's settings and a screen reader need of it."""

from __future__ import annotations

import base64
import hashlib
import re

import pytest
from contrast import compute_contrast

from onnxkvrename.report.pages.elements import build
from onnxkvrename.report.pages.frame import COLORS, build_start_pattern, make_mark, write_page

SCRIPT = "document.title"


def page(**options: str) -> str:
    body = [build("section", build("h2", "Buffers"))]
    return write_page("llama <KV>", command="inspect", body=body, **options)


def find_policy(text: str) -> dict[str, str]:
    """The directives of a page's Content-Security-Policy, with their values."""
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None
    parts = [part.strip().partition(" ") for part in policy[1].split(";")]
    return {name: value for name, _, value in parts}


def digest(tag: str, text: str) -> str:
    content = re.search(rf"<{tag}>(.*)</{tag}>", text, re.DOTALL)
    assert content is not None
    return f"'sha256-{base64.b64encode(hashlib.sha256(content[1].encode()).digest()).decode()}'"


def test_a_page_names_its_language_title_and_landmarks_once() -> None:
    text = page()
    assert text.startswith('<!DOCTYPE html>\n<html lang="en">')
    assert "<title>llama &lt;KV&gt;</title>" in text
    for tag in ("title", "h1", "main", "header", "footer"):
        assert len(re.findall(rf"<{tag}\b", text)) == 1, tag
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in text


def test_only_its_own_style_and_script_may_run_on_a_page() -> None:
    text = page(style="td { color: var(--bad) }", script=SCRIPT)
    assert find_policy(text) == {
        "default-src": "'none'",
        "style-src": digest("style", text),
        "script-src": digest("script", text),
        "base-uri": "'none'",
        "form-action": "'none'",
    }


def test_without_a_script_none_may_run() -> None:
    text = page()
    assert find_policy(text)["script-src"] == "'none'"
    assert "<script" not in text


def test_a_later_run_knows_a_page_of_its_command_by_the_beginning() -> None:
    assert make_mark("inspect") == "made by onnxkvrename inspect"
    assert re.match(build_start_pattern("inspect"), page()[:512])
    assert not re.match(build_start_pattern("compare"), page()[:512])


@pytest.mark.parametrize("shade", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize("name", sorted(COLORS.keys() - {"paper", "card", "line"}))
def test_text_has_the_contrast_of_wcag_aa(name: str, shade: int) -> None:
    for background in ("paper", "card"):
        assert compute_contrast(COLORS[name][shade], COLORS[background][shade]) >= 4.5
