"""The benchmark: page and picture are those of the results, bars are honest, features are kept."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import onnx
import pytest
from conftest import Run

ROOT = Path(__file__).resolve().parent.parent
BENCH, DOCS = ROOT / "bench", ROOT / "docs"
SVG = "{http://www.w3.org/2000/svg}"
OURS, BARE = "onnxkvrename", "onnxkvrename, fsync off"
IMPORT, LOOP, LAZY = 'python -c "import onnx"', "onnx loop", "onnx loop, lazy"
SURGEON = "onnx-graphsurgeon"
RESULTS = json.loads((BENCH / "results.json").read_text("utf-8"))


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The modules of bench/, which import each other by their plain names."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(BENCH))
    import features
    import oracle
    import report

    yield SimpleNamespace(features=features, oracle=oracle, report=report)
    for name in set(sys.modules) - before:
        if (
            getattr(sys.modules[name], "__file__", None)
            and BENCH in Path(sys.modules[name].__file__ or "").parents
        ):
            del sys.modules[name]


def test_page_and_picture_are_those_of_the_results(bench: Any) -> None:
    assert "\n".join(bench.report.page(RESULTS)) == (DOCS / "benchmarks.md").read_text("utf-8")
    assert bench.report.picture.draw(RESULTS) == (DOCS / "benchmarks.svg").read_text("utf-8")


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
    charts = list_bars(bench.report.picture.draw(RESULTS))
    assert len(charts) == 10
    for chart in charts:
        drawn = [
            (length, float(text.rstrip("\N{MULTIPLICATION SIGN}").replace(",", "")))
            for _, length, text in chart
            if text != "fails" and "(cut)" not in text
        ]
        longest, most = max(drawn)
        for length, value in drawn:
            floor = bench.report.picture.LEAST_LENGTH
            assert length == pytest.approx(max(longest * value / most, floor), abs=1.5)


def test_a_bar_that_is_cut_says_so(bench: Any) -> None:
    picture = bench.report.picture.draw(RESULTS)
    cut = [name for chart in list_bars(picture) for name, _, text in chart if "(cut)" in text]
    assert cut == ["onnxruntime"]  # 542 times, where the next one takes 58
    assert picture.count('class="cut"') == 2 * len(cut)
    assert bench.report.picture.find_axis_end([1.0, 3.0, 9.0]) == 9.0
    assert bench.report.picture.find_axis_end([1.0, 3.0, 9.1, 500.0]) == pytest.approx(3.0 * 1.15)


def test_onnxkvrename_has_one_name(bench: Any) -> None:
    picture = bench.report.picture.draw(RESULTS)
    assert not re.search(r"\bours?\b", re.sub(r'class="[^"]*"|\.ours', "", picture))


def median(key: str, name: str, what: str = "wall") -> float:
    """What a program took on a workload: seconds, or MB for ``rss``."""
    work = next(work for work in RESULTS["workloads"] if work["key"] == key)
    entry = next(entry for entry in work["contenders"] if entry["name"] == name)
    return float(entry["median"][what])


def best(key: str, name: str) -> float:
    """The seconds of the shortest run of a program on a workload."""
    work = next(work for work in RESULTS["workloads"] if work["key"] == key)
    entry = next(entry for entry in work["contenders"] if entry["name"] == name)
    return min(float(run["wall"]) for run in entry["runs"] if run["round"])


def find_fastest_peer(key: str, what: str = "wall", of: str = "") -> float:
    """What the fastest other program took, among those whose result is right; or another figure."""
    work = next(work for work in RESULTS["workloads"] if work["key"] == key)
    peers = [
        entry["median"]
        for entry in work["contenders"]
        if entry["kind"] == "peer" and entry["verdict"] in ("clean", "changed")
    ]
    return float(min(peers, key=lambda median: float(median[what]))[of or what])


def test_readme_has_the_figures_of_the_results() -> None:
    kept = {
        name: sum(row["verdict"] == "clean" for row in rows.values())
        for name, rows in RESULTS["fidelity"]["results"].items()
    }
    figures = {
        r"the best run of each \| (\S+) . slower": best("a", BARE) / best("a", "cp"),
        r"without fsync \| (\S+) . faster": find_fastest_peer("a") / median("a", BARE),
        r"faster, (\S+) . less memory": find_fastest_peer("a", of="rss") / median("a", OURS, "rss"),
        r"the fastest peer \| (\S+) .": find_fastest_peer("c", "cpu") / median("c", OURS, "cpu"),
        r"in one process \| (\S+) .": median("d", LAZY, "cpu") / median("d", OURS, "cpu"),
        r"alone \| (\S+) . faster": median("e", IMPORT) / median("e", OURS),
        r"it keeps (\d+) of": kept[SURGEON],
        r"of (\d+) features": kept[OURS],
        r"\(`onnx` (\d+), onnxkvrename all\)": kept[LOOP],
        r"needs (\S+) GB of memory for 1.5 GB": median("a", SURGEON, "rss") / 1000,
        r"of weights instead of (\d+) MB": median("a", OURS, "rss"),
        r"takes (\S+) . as long": median("a", SURGEON) / median("a", BARE),
    }
    assert kept[OURS] == len(RESULTS["fidelity"]["features"])
    readme = (ROOT / "README.md").read_text("utf-8")
    for pattern, figure in figures.items():
        (shown,) = re.findall(pattern, readme)
        assert shown == f"{figure:.{len(shown.partition('.')[2])}f}", pattern


def test_the_picture_follows_light_and_dark_and_is_described(bench: Any) -> None:
    picture = bench.report.picture.draw(RESULTS)
    assert "@media (prefers-color-scheme: dark)" in picture
    title = ElementTree.fromstring(picture).find(f"{SVG}title")
    assert title is not None
    assert title.text == bench.report.picture.describe(RESULTS)
    for key in "abcde":
        assert f"({key}) {find_fastest_peer(key) / median(key, BARE):.3g}" in title.text
    assert f"![{title.text}](benchmarks.svg)" in (DOCS / "benchmarks.md").read_text("utf-8")


def test_each_feature_is_kept(bench: Any, tmp_path: Path, run: Run) -> None:
    bench.features.main(tmp_path)
    kept = {}
    for name in bench.features.FEATURES:
        source, target = tmp_path / f"{name}.onnx", tmp_path / f"{name}.VLLM.onnx"
        code = run(source, "--prefix", "VLLM", "-o", target).code
        if name in bench.features.REFUSED:
            kept[name] = code == 1 and not target.exists()
        else:
            kept[name] = code == 0 and bench.oracle.judge(source, target) == ("clean", [])
    assert kept == dict.fromkeys(bench.features.FEATURES, True)


@pytest.mark.parametrize(
    ("names", "verdict"),
    [
        (["past_key.0_VLLM", "x", "past_key.0_VLLM_InternalRetainedState"], "clean"),
        (["x", "x", "past_key.0_InternalRetainedState"], "wrong"),
    ],
    ids=["renamed inside", "two values became one"],
)
def test_names_in_a_function_are_its_own(
    bench: Any, tmp_path: Path, names: list[str], verdict: str
) -> None:
    source, target = tmp_path / "source.onnx", tmp_path / "target.onnx"
    model = bench.features.formals()
    onnx.save(model, source)
    result = bench.oracle.renamed(model)
    function = result.functions[0]
    for place in (function, function.node[0]):
        place.input[:], place.output[:] = names[:2], names[2:]
    onnx.save(result, target)
    assert bench.oracle.judge(source, target)[0] == verdict
