"""The page of ``inspect --html`` in a real browser: nothing else knows what it looks like."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from browser import CHROMIUM, SKIP_REASON, Browser, Page
from cache_models import MIXED, build_cache_model
from models import saved

from onnxkvrename import load_rules
from onnxkvrename.layout.inspect import inspect_model
from onnxkvrename.report.pages.inspect import render_inspect_page

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=SKIP_REASON)

SHOWN_TIPS = """[...document.querySelectorAll(".tip")]
    .filter((tip) => tip.offsetWidth > 1 && getComputedStyle(tip).visibility === "visible")
    .map((tip) => tip.textContent)"""
OVERFLOWING = """[...document.querySelectorAll("body *")]
    .filter((item) => !item.closest(".tip, th > bdi") && item.getClientRects().length)
    .filter((item) => item.getBoundingClientRect().right > document.documentElement.clientWidth)
    .map((item) => item.outerHTML.slice(0, 80))"""
BOX = """(() => {
    const box = document.querySelectorAll("td")[%d].getBoundingClientRect();
    return [box.left, box.top, box.right, box.bottom];
})()"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


@pytest.fixture
def show(browser: Browser, written: Path) -> Iterator[Callable[..., Page]]:
    """Open the page; it is closed after the test."""
    pages: list[Page] = []

    def open_page(width: int, *, dark: bool = False) -> Page:
        pages.append(browser.open(written, width=width, dark=dark))
        return pages[-1]

    yield open_page
    for page in pages:
        page.close()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a model of 94 layers and one of all kinds, with long and hostile names."""
    here = tmp_path_factory.mktemp("page")
    large = saved(build_cache_model(("full",) * 94), here / "large.onnx")
    mixed = build_cache_model(MIXED, tokens=("VLLM", "VLLM"), without={"past_key.7_VLLM"})
    long = saved(mixed, here / ("n" * 200 + "<img src=x onerror=alert(1)>.onnx"))
    summaries = [inspect_model(path, load_rules()) for path in (large, long)]
    buffers = tuple(
        item._replace(buffer="b" * 300 if item.buffer == "k_pe" else item.buffer)
        for item in summaries[1].buffers
    )
    summaries[1] = summaries[1]._replace(buffers=buffers)
    output = here / "page.html"
    output.write_text(render_inspect_page(summaries), "utf-8")
    return output


@pytest.mark.parametrize("width", [360, 640, 768, 1280, 1920])
def test_nothing_overflows_at_any_width(show: Callable[..., Page], width: int) -> None:
    page = show(width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(OVERFLOWING) == []
    assert page.list_problems() == []
    assert page.list_requests() == []


@pytest.mark.parametrize("width", [360, 1280])
def test_cells_are_in_bands_of_ten(show: Callable[..., Page], width: int) -> None:
    page = show(width)
    first, second, last, next_band = (page.evaluate(BOX % cell) for cell in (0, 1, 9, 20))
    assert first[1] == last[1]
    assert (next_band[0] > last[2]) == (width > 1000)
    assert (next_band[1] > first[3]) == (width < 1000)
    assert second[0] - first[0] >= 24  # the least room for a finger (WCAG 2.2, 2.5.8)


@pytest.mark.parametrize("width", [360, 1280])
def test_pointing_at_a_cell_shows_its_text_inside_the_window(
    show: Callable[..., Page], width: int
) -> None:
    page = show(width)
    assert page.evaluate(SHOWN_TIPS) == []
    left, top, *_ = page.evaluate(BOX % 9)
    page.point_at(left + 3, top + 3)
    (text,) = page.evaluate(SHOWN_TIPS)
    assert text.startswith("past_key, layer 9. full attention, no token. FLOAT16 [")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    tip = "document.querySelectorAll('td')[9].querySelector('.tip')"
    box = page.evaluate(
        f"(({{left, right, top}}) => [left, right, top])({tip}.getClientRects()[0])"
    )
    assert box[0] >= 0
    assert box[1] <= width
    assert box[2] >= 0
    page.press("Escape")
    page.point_at(1, 1)
    assert page.evaluate(SHOWN_TIPS) == []


def test_the_keyboard_reaches_every_cell_and_shows_its_text(show: Callable[..., Page]) -> None:
    page = show(1280)
    page.point_at(1, 1)
    for _ in range(3):  # two links to the models, then the map
        page.press("Tab")
    assert page.evaluate(SHOWN_TIPS)[0].startswith("past_key, layer 0.")
    for key, layer in (("ArrowRight", 1), ("End", 93), ("ArrowLeft", 92), ("Home", 0)):
        page.press(key)
        (text,) = page.evaluate(SHOWN_TIPS)
        assert text.startswith(f"past_key, layer {layer}.")
    page.press("ArrowDown")
    assert page.evaluate(SHOWN_TIPS)[0].startswith("past_value, layer 0.")
    page.press("ArrowDown")  # there is no further row
    assert page.evaluate(SHOWN_TIPS)[0].startswith("past_value, layer 0.")
    page.press("Escape")
    assert page.evaluate(SHOWN_TIPS) == []
    page.press("Tab")  # one stop for a map: the next one is the other model's
    assert page.evaluate(SHOWN_TIPS)[0].startswith("past_key, layer 0. full attention, has the")


def test_a_screen_reader_finds_names_and_structure(show: Callable[..., Page]) -> None:
    page = show(1280)
    found = page.list_accessible()
    roles = [role for role, _ in found]
    for landmark in ("banner", "main", "contentinfo", "navigation"):
        assert roles.count(landmark) == 1
    assert ("heading", "KV caches of 2 models") in found
    assert roles.count("grid") == 10 + 1  # bands
    assert roles.count("gridcell") == 94 * 2 + 8 * 6
    assert ("rowheader", "past_value") in found
    headers = [name for role, name in found if role == "columnheader" and name != "layer"]
    assert headers[:94] == [*map(str, range(94))]
    cells = [name for role, name in found if role == "gridcell"]
    assert cells[0].startswith("past_key, layer 0. full attention, no token. FLOAT16")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_colors_are_those_of_the_readers_scheme(show: Callable[..., Page], scheme: str) -> None:
    page = show(1280, dark=scheme == "dark")
    colors = page.evaluate(
        "(({color, backgroundColor}) => [color, backgroundColor])(getComputedStyle(document.body))"
    )
    expected = {
        "light": ["rgb(31, 35, 40)", "rgb(255, 255, 255)"],
        "dark": ["rgb(230, 237, 243)", "rgb(13, 17, 23)"],
    }
    assert colors == expected[scheme]


def test_a_tap_shows_the_text_of_a_cell(show: Callable[..., Page]) -> None:
    page = show(360)
    left, top, *_ = page.evaluate(BOX % 9)
    points = [{"x": left + 3, "y": top + 3}]
    page.call("Input.dispatchTouchEvent", type="touchStart", touchPoints=points)
    page.call("Input.dispatchTouchEvent", type="touchEnd", touchPoints=[])
    shown = f"new Promise((done) => setTimeout(() => done({SHOWN_TIPS}), 300))"
    reply = page.call("Runtime.evaluate", expression=shown, awaitPromise=True, returnByValue=True)
    assert [text[:18] for text in reply["result"]["value"]] == ["past_key, layer 9."]
