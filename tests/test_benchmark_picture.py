"""docs/benchmarks: page and picture are those of the measured results, and bars are honest."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parent.parent
BENCH, DOCS = ROOT / "bench", ROOT / "docs"
SVG = "{http://www.w3.org/2000/svg}"
RESULTS = json.loads((BENCH / "results.json").read_text("utf-8"))


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The modules of bench/, which import each other by their plain names."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(BENCH))
    import report

    yield report
    for name in set(sys.modules) - before:
        if (
            getattr(sys.modules[name], "__file__", None)
            and BENCH in Path(sys.modules[name].__file__ or "").parents
        ):
            del sys.modules[name]


def test_page_and_picture_are_those_of_the_results(bench: Any) -> None:
    assert "\n".join(bench.page(RESULTS)) == (DOCS / "benchmarks.md").read_text("utf-8")
    assert bench.picture.draw(RESULTS) == (DOCS / "benchmarks.svg").read_text("utf-8")


def list_bars(picture: str) -> list[list[tuple[str, float, str]]]:
    """The name, the length and the text of each bar, chart by chart."""
    charts = []
    for chart in ElementTree.fromstring(picture).iter(f"{SVG}g"):
        texts = list(chart.iter(f"{SVG}text"))
        names = [item for item in texts if "end" in item.get("class", "").split()]
        shown = [item for item in texts if "value" in item.get("class", "").split()]
        lengths = {
            float(item.attrib["y"]) + 13: float(item.attrib["width"])
            for item in chart.iter(f"{SVG}rect")
        }
        charts.append(
            [
                (name.text or "", lengths.get(float(name.attrib["y"]), 0.0), value.text or "")
                for name, value in zip(names, shown, strict=True)
            ]
        )
    return charts


def test_bars_are_linear_and_each_has_its_ratio(bench: Any) -> None:
    charts = list_bars(bench.picture.draw(RESULTS))
    assert len(charts) == 10
    for chart in charts:
        drawn = [
            (length, float(text.rstrip("\N{MULTIPLICATION SIGN}").replace(",", "")))
            for _, length, text in chart
            if text != "fails" and "(cut)" not in text
        ]
        longest, most = max(drawn)
        for length, value in drawn:
            floor = bench.picture.LEAST_LENGTH
            assert length == pytest.approx(max(longest * value / most, floor), abs=1.5)


def test_a_bar_that_is_cut_says_so(bench: Any) -> None:
    picture = bench.picture.draw(RESULTS)
    cut = [name for chart in list_bars(picture) for name, _, text in chart if "(cut)" in text]
    assert cut == ["onnxruntime"]  # 542 times, where the next one takes 58
    assert picture.count('class="cut"') == 2 * len(cut)
    assert bench.picture.find_axis_end([1.0, 3.0, 9.0]) == 9.0
    assert bench.picture.find_axis_end([1.0, 3.0, 9.1, 500.0]) == pytest.approx(3.0 * 1.15)


def test_onnxkvrename_has_one_name(bench: Any) -> None:
    picture = bench.picture.draw(RESULTS)
    assert not re.search(r"\bours?\b", re.sub(r'class="[^"]*"|\.ours', "", picture))


def test_the_picture_follows_light_and_dark_and_is_described(bench: Any) -> None:
    picture = bench.picture.draw(RESULTS)
    assert "@media (prefers-color-scheme: dark)" in picture
    title = ElementTree.fromstring(picture).find(f"{SVG}title")
    assert title is not None
    assert title.text == bench.picture.describe(RESULTS)
    assert "(a) 11.2, (b) 2.09, (c) 2.57, (d) 4.14, (e) 2.42" in title.text
    assert f"![{title.text}](benchmarks.svg)" in (DOCS / "benchmarks.md").read_text("utf-8")
