"""Pages of ``inspect`` that are hard to draw, as a browser draws them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import models
import pytest
from browser import CHROMIUM, SKIP_REASON, Browser, Page
from cache_models import MIXED, build_cache_model
from models import saved
from readability import list_low_contrast, list_overflowing, list_unmarked_stops

from onnxkvrename import load_rules
from onnxkvrename.layout.inspect import ModelSummary, inspect_model
from onnxkvrename.report.pages.inspect import render_inspect_page

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=SKIP_REASON)
NAMES = (
    "</td></span><script>alert(1)</script>&amp;\"'{x}\x1b[2J\u202e\x00\udcff",
    "שלום_עולם.7",
    "n" * 10_000,
    "a b " * 2_500,
    "漢字" * 40,
    "W" * 300,
)
CUT_NUMBERS = """[...document.querySelectorAll(".map thead th")]
  .filter((head) => !head.textContent.includes("-") && head.scrollWidth > head.clientWidth)
  .map((head) => head.textContent)"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


@pytest.fixture(scope="module")
def summaries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelSummary]:
    """Models that are hard to draw, by what is hard about them."""
    here = tmp_path_factory.mktemp("models")

    def inspect(model: models.onnx.ModelProto, name: str) -> ModelSummary:
        return inspect_model(saved(model, here / f"{name}.onnx"), load_rules())

    mixed = build_cache_model(MIXED, tokens=("VLLM", "VLLM"), without={"past_key.7_VLLM"})
    found = {
        "hybrid": inspect(mixed, "hybrid"),
        "no cache": inspect(build_cache_model(()), "none"),
        "3,840 buffers": inspect(build_cache_model(("full",) * 1920), "many"),
        "280 layers": inspect(build_cache_model(MIXED * 40), "layers"),
    }
    first = found["hybrid"].buffers[0]
    buffers = tuple(
        first._replace(layer=layer, buffer=name, input=name, output=f"{name}_o", shape=(name, 8))
        for name in NAMES
        for layer in range(3)
    )
    findings = tuple(
        item._replace(name=name, message=f"of {name}: {item.message}", hint=name)
        for name in NAMES
        for item in found["hybrid"].findings
    )
    path = f"exports/{'W' * 300}/<b>שלום</b>\u202e{'w' * 300}.onnx"
    hostile = found["hybrid"]._replace(path=path, buffers=buffers, findings=findings)
    return {**found, "hostile": hostile}


@pytest.fixture
def show(browser: Browser, tmp_path: Path) -> Iterator[Callable[..., Page]]:
    """Open a file with some text; it is closed after the test."""
    pages: list[Page] = []

    def open_text(name: str, text: str, **options: int) -> Page:
        path = tmp_path / name
        path.write_text(text, "utf-8")
        pages.append(browser.open(path, **options))
        return pages[-1]

    yield open_text
    for page in pages:
        page.close()


@pytest.mark.parametrize("letters", [16, 32])
@pytest.mark.parametrize("width", [320, 360, 1280])
def test_no_page_overflows_at_any_width_and_size_of_text(
    width: int, letters: int, show: Callable[..., Page], summaries: dict[str, ModelSummary]
) -> None:
    for name, summary in summaries.items():
        page = show("page.html", render_inspect_page([summary]), width=width, letters=letters)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, name
        assert list_overflowing(page) == [], name
        assert page.list_problems() == [], name
        size = "getComputedStyle(document.querySelector('dd')).fontSize"
        assert page.evaluate(size) == f"{letters}px"
        assert page.evaluate(CUT_NUMBERS) == [], name


def test_very_long_names_do_not_make_a_page_endless(
    show: Callable[..., Page], summaries: dict[str, ModelSummary]
) -> None:
    page = show("page.html", render_inspect_page([summaries["hostile"]]), width=360)
    assert page.evaluate("document.querySelector('h1').offsetHeight") < 300
    facts = "[...document.querySelectorAll('dd > span, .findings span')]"
    assert page.evaluate(f"Math.max(...{facts}.map((line) => line.offsetHeight))") < 1600
    assert page.evaluate("document.querySelector('.path').textContent.length") > 600


@pytest.mark.parametrize("dark", [False, True])
def test_every_text_has_the_contrast_of_wcag_aa(
    dark: bool, show: Callable[..., Page], summaries: dict[str, ModelSummary]
) -> None:
    for name, summary in summaries.items():
        page = show("page.html", render_inspect_page([summary]), dark=dark)
        assert list_low_contrast(page) == [], name


def test_every_stop_of_the_keyboard_is_seen(
    show: Callable[..., Page], summaries: dict[str, ModelSummary]
) -> None:
    two = [summaries["hybrid"], summaries["3,840 buffers"]]
    page = show("page.html", render_inspect_page(two))
    assert list_unmarked_stops(page, 4) == []  # two links, two maps
    assert page.evaluate("document.activeElement.closest('#model-2 td') !== null")


def test_on_paper_a_page_is_light_and_its_cells_keep_their_colors(
    show: Callable[..., Page], summaries: dict[str, ModelSummary]
) -> None:
    page = show("page.html", render_inspect_page([summaries["hybrid"]]))
    features = [{"name": "prefers-color-scheme", "value": "dark"}]
    page.call("Emulation.setEmulatedMedia", media="print", features=features)
    get = "getComputedStyle(document.querySelector('{}')).{}"
    assert page.evaluate(get.format("body", "backgroundColor")) == "rgb(255, 255, 255)"
    assert page.evaluate(get.format("td .mark", "printColorAdjust")) == "exact"
    assert page.evaluate(get.format(".keys", "display")) == "none"
    assert page.evaluate(get.format(".tip", "display")) == "none"
    assert list_low_contrast(page) == []


def test_nothing_moves_on_its_own(
    show: Callable[..., Page], summaries: dict[str, ModelSummary]
) -> None:
    page = show("page.html", render_inspect_page([summaries["hybrid"]]))
    assert page.evaluate("document.getAnimations().length") == 0
    moving = """[...document.querySelectorAll("*")].filter((item) => {
      const {transitionDuration, animationName} = getComputedStyle(item);
      return transitionDuration !== "0s" || animationName !== "none";
    }).length"""
    assert page.evaluate(moving) == 0
