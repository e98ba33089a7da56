"""What all pages have: nothing is loaded, nothing runs but their own script, colors can be read."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

import pytest
from contrast import compute_contrast
from handoff_pages import SIZED, compare_window, render
from jinja2 import UndefinedError

from onnxkvrename.layout.inspect import ModelSummary
from onnxkvrename.report.pages import page as page_module
from onnxkvrename.report.pages.inspect import render_inspect_page
from onnxkvrename.report.pages.page import build_start_pattern, render_page
from onnxkvrename.rules.kinds import KINDS

STYLES = Path(page_module.__file__).parent
PAGES = {
    "inspect": render_inspect_page([ModelSummary("a.onnx")]),
    "compare": render(compare_window(**SIZED)),
    "undecided": render(compare_window()),
}


def find_policy(text: str) -> dict[str, str]:
    """The directives of a page's Content-Security-Policy, with their values."""
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None
    parts = [part.strip().partition(" ") for part in policy[1].split(";")]
    return {name: value for name, _, value in parts}


def digest(tag: str, text: str) -> str:
    content = re.search(rf"<{tag}>(.*)</{tag}>", text, re.DOTALL)
    if content is None:
        return "'none'"
    return f"'sha256-{base64.b64encode(hashlib.sha256(content[1].encode()).digest()).decode()}'"


def list_colors() -> dict[str, tuple[str, str]]:
    """The colors of all pages, for light and dark."""
    text = (STYLES / "page.css").read_text("utf-8")
    found = re.findall(r"--(\w+): light-dark\((#\w{6}), (#\w{6})\)", text)
    return {name: (light, dark) for name, light, dark in found}


@pytest.mark.parametrize("name", PAGES)
def test_only_its_own_style_and_script_may_run_on_a_page(name: str) -> None:
    text = PAGES[name]
    assert find_policy(text) == {
        "default-src": "'none'",
        "style-src": digest("style", text),
        "script-src": digest("script", text),
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    assert text.count("<script") == (0 if name == "inspect" else 2)  # data and script
    assert not re.search(r"<[^>]+\s(style|on\w+)=", text)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_needs_nothing_from_elsewhere(name: str) -> None:
    text = PAGES[name]
    assert re.findall(r"(?:src|href)=\"(?!#)[^\"]*\"|\w+://[^\s\"']+", text) == []
    assert not re.search(r"@import|@font-face|url\(|<link", text)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_names_its_language_title_and_landmarks_once(name: str) -> None:
    text = PAGES[name]
    for tag in ("title", "h1", "main", "header", "footer"):
        assert len(re.findall(rf"<{tag}\b", text)) == 1, tag
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in text


def test_a_later_run_knows_a_page_of_its_command_by_the_beginning() -> None:
    assert re.match(build_start_pattern("inspect"), PAGES["inspect"][:512])
    assert not re.match(build_start_pattern("compare"), PAGES["inspect"][:512])


def test_a_template_that_lacks_a_value_writes_nothing() -> None:
    with pytest.raises(UndefinedError):
        render_page("inspect", with_script=False)


@pytest.mark.parametrize("shade", [0, 1], ids=["light", "dark"])
def test_text_has_the_contrast_of_wcag_aa(shade: int) -> None:
    colors = list_colors()
    for name in colors.keys() - {"paper", "card", "line"}:
        for background in ("paper", "card"):
            assert compute_contrast(colors[name][shade], colors[background][shade]) >= 4.5, name
    for kind, traits in KINDS.items():
        assert compute_contrast(traits.page_colors[shade], colors["paper"][shade]) >= 4.5, kind
