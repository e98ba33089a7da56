"""The page of a hand-off in a real Chromium: what moves, what a keyboard does, what fits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import CHROMIUM, SKIP_REASON, Browser, Page
from handoff_pages import SIZED, Reader, compare_window, find_class, render, render_length
from handoff_sides import build_side_layout, describe_attention, draw_sides, predict_handoff
from readability import list_low_contrast, list_overflowing, list_unmarked_stops

from onnxkvrename.handoff.compare import Handoff
from onnxkvrename.handoff.consumer import Consumer
from onnxkvrename.handoff.find_consumers import load_consumer
from onnxkvrename.handoff.simulate import is_in_ranges

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=SKIP_REASON)
CONSUMERS = [load_consumer("vllm-qaic"), load_consumer("qefficient")]
KINDS = ["correct", "wrong", "none", "unknown"]
READ_PAGE = """((kind) => ({
  outcome: document.getElementById("outcome").textContent,
  length: document.getElementById("length").textContent,
  totals: [...document.querySelectorAll(".total span")].map((item) => item.textContent),
  kinds: [...document.querySelectorAll("#rows tr")].map(kind),
  cells: [...document.querySelectorAll("#rows tr")].map(
    (row) => [...row.children].map((cell) => cell.textContent)
  ),
  slots: [...document.querySelectorAll(".slot")].map(
    (slot) => [slot.getAttribute("x"), slot.getAttribute("width"), kind(slot),
      slot.getAttribute("aria-label")]
  ),
  links: [...document.querySelectorAll("#links line:not(.chosen)")].map(
    (line) => [line.getAttribute("x1"), line.getAttribute("x2"), kind(line)]
  ),
}))((item) => [...item.classList].find((name) => KINDS.includes(name)))""".replace(
    "KINDS", json.dumps(KINDS)
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as running:
        yield running


def save(handoff: Handoff, directory: Path) -> Path:
    path = directory / "page.html"
    path.write_text(render(handoff), "utf-8")
    return path


def move(page: Page, tokens: int) -> None:
    """Move the slider as a reader does it: to a value, with its event."""
    page.evaluate(
        f"""{{const slider = document.getElementById("slider"); slider.value = {tokens};
        slider.dispatchEvent(new Event("input", {{bubbles: true}}));}}"""
    )


def read_written(handoff: Handoff, tokens: int) -> dict[str, Any]:
    """Read the page that a template writes for a length, in the form of `READ_PAGE`."""
    page = Reader(render_length(handoff, tokens))
    elements = [(tag, find_class(attributes), attributes) for tag, attributes in page.elements]
    slots = [(names, each) for _, names, each in elements if "slot" in names]
    lines = [(names, each) for tag, names, each in elements if tag == "line"]
    return {
        "outcome": page.texts["outcome"],
        "length": page.texts["length"],
        "totals": page.totals,
        "kinds": page.kinds,
        "cells": page.rows,
        "slots": [[e["x"], e["width"], _find_kind(names), e["aria-label"]] for names, e in slots],
        "links": [
            [e["x1"], e["x2"], _find_kind(names)] for names, e in lines if names != ["chosen"]
        ],
    }


def _find_kind(names: list[str]) -> str:
    return next(name for name in names if name in KINDS)


@pytest.mark.parametrize("consumer", CONSUMERS, ids=lambda consumer: consumer.name)
@pytest.mark.parametrize("seed", range(12))
def test_the_script_draws_each_length_as_python_writes_it(
    seed: int, consumer: Consumer, browser: Browser, tmp_path: Path
) -> None:
    handoff = predict_handoff(*draw_sides(seed), consumer=consumer)
    page = browser.open(save(handoff, tmp_path))
    for tokens in (1, 2, 3, 4, 5, 7, 8, 9):
        move(page, tokens)
        assert page.evaluate(READ_PAGE) == read_written(handoff, tokens), tokens
    assert page.list_problems() == []
    page.close()


@pytest.mark.parametrize("tokens", [1, 128, 129, 2000, 4096])
def test_red_rows_are_those_of_the_comparison(
    tokens: int, browser: Browser, tmp_path: Path
) -> None:
    handoff = compare_window(**SIZED)
    page = browser.open(Path(f"{save(handoff, tmp_path)}#tokens={tokens}"))
    red = page.evaluate(
        "[...document.querySelectorAll('#rows tr.wrong bdi')].map((name) => name.textContent)"
    )
    assert red == [
        result.pair.name
        for result in handoff.pair_results
        if is_in_ranges(tokens, result.wrong_ranges)
    ]
    assert page.evaluate("document.getElementById('length').textContent") == (
        "1 token" if tokens == 1 else f"{tokens:,} tokens"
    )
    page.close()


def test_a_chosen_buffer_says_which_bytes_decode_reads(browser: Browser, tmp_path: Path) -> None:
    page = browser.open(save(compare_window(**SIZED), tmp_path))
    page.evaluate("document.querySelectorAll('#read .slot')[4].focus()")
    assert page.evaluate("document.getElementById('detail').textContent") == (
        "past_key.2_vllmKvCache. Prefill's place: bytes 8,256 to 10,319. Decode's place: bytes "
        "8,224 to 10,287, where prefill has 32 bytes of past_value.1_vllmKvCache, 2,032 bytes of "
        "past_key.2_vllmKvCache. ✕ wrong."
    )
    page.close()


def test_bytes_beyond_the_memory_are_named(browser: Browser, tmp_path: Path) -> None:
    page = browser.open(save(compare_window(prefill_window=True, **SIZED), tmp_path))
    page.evaluate("document.querySelectorAll('#read .slot')[5].focus()")
    detail = page.evaluate("document.getElementById('detail').textContent")
    assert "32 bytes beyond the memory" in detail
    assert "○ not transferred" in detail
    page.close()


def test_a_keyboard_moves_the_slider_and_walks_along_the_memory(
    browser: Browser, tmp_path: Path
) -> None:
    page = browser.open(save(compare_window(**SIZED), tmp_path))
    read_length = "document.getElementById('length').textContent"
    page.evaluate("document.getElementById('slider').focus()")
    page.press("ArrowLeft")
    assert page.evaluate(read_length) == "128 tokens"
    assert page.evaluate("document.getElementById('outcome').textContent") == "ok"
    assert page.evaluate("location.hash") == "#tokens=128"
    page.press("End")
    assert page.evaluate(read_length) == "4,096 tokens"
    spoken = page.evaluate("document.getElementById('slider').getAttribute('aria-valuetext')")
    assert spoken == "4,096 tokens: 4 of 6 buffers wrong (KV614)"
    page.evaluate("document.querySelector('#written .slot').focus()")
    for key, label in {
        "ArrowRight": "past_value.0_vllmKvCache: correct",
        "End": "past_value.2_vllmKvCache: wrong",
        "ArrowDown": "past_value.2_vllmKvCache: wrong",
        "Home": "past_key.0_vllmKvCache: correct",
    }.items():
        page.press(key)
        focused = "document.activeElement.getAttribute('aria-label')"
        assert page.evaluate(focused) == label, key
    assert page.evaluate("document.activeElement.parentElement.id") == "read"
    assert page.evaluate("document.activeElement.getAttribute('aria-selected')") == "true"
    assert page.evaluate("document.querySelectorAll('.slot[tabindex=\"0\"]').length") == 1
    page.close()


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [360, 1280])
def test_the_page_is_never_wider_than_the_window(
    width: int, dark: bool, browser: Browser, tmp_path: Path
) -> None:
    many = build_side_layout(*describe_attention(*range(60)), ctx_len=131072)
    long = "past_key.0_" + "very_long_name" * 12
    named = many._replace(
        inputs=(many.inputs[0]._replace(name=f"{long}_vllmKvCache"), *many.inputs[1:]),
        buffers=(many.buffers[0]._replace(input=f"{long}_vllmKvCache"), *many.buffers[1:]),
        models=("/a/long/path/" * 20 + "model.onnx",),
    )
    for handoff in (compare_window(**SIZED), predict_handoff(named, named)):
        page = browser.open(save(handoff, tmp_path), width=width, dark=dark)
        page.evaluate("document.getElementById('zoom').value = '16'")
        page.evaluate("document.getElementById('zoom').dispatchEvent(new Event('change'))")
        assert page.evaluate("document.documentElement.scrollWidth") == width
        assert page.evaluate("document.querySelector('.scroll svg').clientWidth") > width * 10
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (background == "rgb(13, 17, 23)") == dark
        assert page.list_problems() == []
        page.close()


def list_handoffs() -> dict[str, Handoff]:
    """List hand-offs whose pages look different."""
    whole = build_side_layout(*describe_attention(0, 1, 2), ctx_len=4096)
    plain = build_side_layout(*describe_attention(0, 1), token="", ctx_len=4096)
    single = build_side_layout("past_key.0:2,ctx_len,4", ctx_len=4096)
    other = build_side_layout(*describe_attention(0, 1, 2, dtype="INT8"), ctx_len=4096)
    path = f"/exports/{'a-long-name-of-a-model-' * 20}/model.onnx"
    return {
        "works": predict_handoff(whole, whole),
        "wrong": compare_window(**SIZED),
        "refused": compare_window(prefill_window=True, **SIZED),
        "arrays": predict_handoff(whole, other, consumer=CONSUMERS[1]),
        "no token": predict_handoff(plain, plain),
        "undecided": compare_window(),
        "one buffer": predict_handoff(single, single),
        "long path": predict_handoff(whole._replace(models=(path,)), whole),
    }


@pytest.mark.parametrize("letters", [16, 32])
@pytest.mark.parametrize("width", [360, 950, 1280])
def test_nothing_overflows_at_any_width_and_size_of_text(
    width: int, letters: int, browser: Browser, tmp_path: Path
) -> None:
    for name, handoff in list_handoffs().items():
        page = browser.open(save(handoff, tmp_path), width=width, letters=letters)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, name
        assert list_overflowing(page) == [], name
        size = "getComputedStyle(document.querySelector('main p')).fontSize"
        assert page.evaluate(size) == f"{letters}px"
        page.close()


@pytest.mark.parametrize("dark", [False, True])
def test_every_text_has_the_contrast_of_wcag_aa(
    dark: bool, browser: Browser, tmp_path: Path
) -> None:
    for name, handoff in list_handoffs().items():
        page = browser.open(save(handoff, tmp_path), dark=dark)
        assert list_low_contrast(page) == [], name
        page.close()


def test_every_stop_of_the_keyboard_is_seen(browser: Browser, tmp_path: Path) -> None:
    page = browser.open(save(compare_window(**SIZED), tmp_path))
    stops = 4 + 4 + 2  # the controls, the lengths to look at, the memory and a buffer in it
    assert list_unmarked_stops(page, stops) == []
    assert page.evaluate("document.activeElement.closest('.slot') !== null")
    page.close()


@pytest.mark.parametrize("width", [360, 1280])
def test_a_label_is_on_the_line_of_its_control(
    width: int, browser: Browser, tmp_path: Path
) -> None:
    page = browser.open(save(compare_window(**SIZED), tmp_path), width=width)
    for control in ("zoom", "number"):
        boxes = page.evaluate(
            f"""["[for={control}]", "#{control}"].map((selector) => {{
              const box = document.querySelector(selector).getBoundingClientRect();
              return [box.top, box.bottom];
            }})"""
        )
        (top, bottom), (start, end) = boxes
        assert start <= (top + bottom) / 2 <= end, control
    page.close()


def shift_most_of(count: int) -> Handoff:
    """Compare layers of which decode keeps a window in the first."""
    window = describe_attention(0, shape="2,sliding_window,4")
    sides = [describe_attention(*range(count)), (*window, *describe_attention(*range(1, count)))]
    sizes = {"ctx_len": 131072, "sliding_window": 65536}
    prefill, decode = (build_side_layout(*side, **sizes) for side in sides)
    return predict_handoff(prefill, decode)


@pytest.mark.parametrize("width", [920, 1280])
def test_no_column_of_the_table_is_too_narrow_for_words(
    width: int, browser: Browser, tmp_path: Path
) -> None:
    page = browser.open(save(shift_most_of(12), tmp_path), width=width)
    assert page.evaluate("document.querySelectorAll('#rows tr.wrong').length") == 24
    widths = "[...document.querySelector('#rows tr').children].map((cell) => cell.clientWidth)"
    assert min(page.evaluate(widths)) >= 75
    page.close()


def test_buffers_of_few_pixels_still_show_where_they_are_wrong(
    browser: Browser, tmp_path: Path
) -> None:
    handoff = shift_most_of(94)
    page = browser.open(save(handoff, tmp_path), width=360)
    fills = page.evaluate(
        """[...document.querySelectorAll("#read .wrong rect")].map((rect) => {
          const {fill, strokeWidth} = getComputedStyle(rect);
          return [fill, strokeWidth];
        })"""
    )
    assert len(fills) == 188
    assert {tuple(fill) for fill in fills} == {("rgb(194, 28, 40)", "0px")}
    shown = "getComputedStyle(document.querySelector('#links line:not(.chosen)')).display"
    assert page.evaluate(shown) == "none"  # closer than they could be told apart
    page.close()


def test_on_paper_the_page_is_light_and_has_no_controls(browser: Browser, tmp_path: Path) -> None:
    page = browser.open(save(compare_window(**SIZED), tmp_path), dark=True)
    features = [{"name": "prefers-color-scheme", "value": "dark"}]
    page.call("Emulation.setEmulatedMedia", media="print", features=features)
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == "rgb(255, 255, 255)"
    for part in (".controls", "#detail"):
        shown = f"getComputedStyle(document.querySelector('{part}')).display"
        assert page.evaluate(shown) == "none"
    assert list_low_contrast(page) == []
    page.close()


def test_the_table_can_be_limited_to_what_is_not_correct(browser: Browser, tmp_path: Path) -> None:
    page = browser.open(save(compare_window(**SIZED), tmp_path))
    page.evaluate("document.getElementById('failing').click()")
    count = "[...document.querySelectorAll('#rows tr')].filter((row) => row.offsetHeight).length"
    assert page.evaluate(count) == 4
    move(page, 128)
    assert page.evaluate(count) == 0
    page.close()


def test_a_page_asks_for_nothing_and_logs_nothing(browser: Browser, tmp_path: Path) -> None:
    page = browser.open(save(compare_window(**SIZED), tmp_path))
    move(page, 7)
    assert page.list_requests() == []
    assert page.list_problems() == []
    page.close()


def test_without_a_script_the_page_still_says_it_all(browser: Browser, tmp_path: Path) -> None:
    handoff = compare_window(**SIZED)
    page = browser.open(save(handoff, tmp_path), script=False)
    page.call("Emulation.setScriptExecutionDisabled", value=False)
    found = page.evaluate(READ_PAGE)
    assert found == read_written(handoff, 129)
    assert page.evaluate("getComputedStyle(document.querySelector('.controls')).display") == "none"
    assert "KV614" in page.evaluate("document.body.innerText")
    page.close()


@pytest.mark.parametrize("text", ["0", "-3", "5000", "12.5", ""])
def test_a_length_that_cannot_be_is_not_shown(text: str, browser: Browser, tmp_path: Path) -> None:
    page = browser.open(save(compare_window(**SIZED), tmp_path))
    typed = json.dumps(text)
    page.evaluate(
        f"""{{const number = document.getElementById("number"); number.value = {typed};
        for (const name of ["input", "change"]) number.dispatchEvent(new Event(name));}}"""
    )
    length = int(
        page.evaluate("document.getElementById('length').textContent").split()[0].replace(",", "")
    )
    assert 1 <= length <= 4096
    assert page.list_problems() == []
    page.close()


@pytest.mark.parametrize("fragment", ["tokens=99999999", "tokens=0", "tokens=-1", "nothing"])
def test_an_address_that_names_no_length_is_harmless(
    fragment: str, browser: Browser, tmp_path: Path
) -> None:
    page = browser.open(Path(f"{save(compare_window(**SIZED), tmp_path)}#{fragment}"))
    length = int(
        page.evaluate("document.getElementById('length').textContent").split()[0].replace(",", "")
    )
    assert 1 <= length <= 4096
    assert page.list_problems() == []
    page.close()
