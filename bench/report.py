"""results.json as a page and a picture: `python bench/report.py` does it without measuring."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import growing
import picture
from contenders import EACH, NO_SYNC
from environments import BENCH, OURS
from targets import IMPORT_ONNX, targets

SHOWN = ("onnx", "numpy", "protobuf", "onnx_graphsurgeon", "onnx-ir", "sor4onnx", "onnxruntime")
BASIS = NO_SYNC.name
LIMITS = ("cp", "cp and sync", IMPORT_ONNX)
"""What no tool can be much faster than."""
REMARKS = BENCH / "remarks.md"
"""Written by hand: where onnxkvrename is slower, and why, and how all is measured."""


def write(results: dict[str, Any], docs: Path) -> None:
    docs.mkdir(parents=True, exist_ok=True)
    (docs / "benchmarks.md").write_text("\n".join(page(results)))
    (docs / "benchmarks.svg").write_text(picture.draw(results))


def page(results: dict[str, Any]) -> Iterator[str]:
    """The lines of docs/benchmarks.md."""
    yield "# Benchmarks\n"
    if results["quick"]:
        yield "**A scaled-down trial of the benchmark itself: these numbers mean nothing.**\n"
    yield from _table(results)
    yield from _growth(results)
    yield f"![{picture.describe(results)}](benchmarks.svg)\n"
    yield REMARKS.read_text()
    yield from _circumstances(results)


def print_targets(results: dict[str, Any]) -> None:
    """Print each goal with what was measured."""
    for target in targets(results):
        met = "met" if target.met else "NOT MET"
        print(f"{target.name}: {target.measured}, goal {target.goal}: {met} ({target.remark})")


def _table(results: dict[str, Any]) -> Iterator[str]:
    """A row for each tool, and a column for each workload of models."""
    works = {
        work["key"]: {entry["name"]: entry for entry in work["contenders"]}
        for work in results["workloads"]
        if any(entry["name"] == BASIS for entry in work["contenders"])
    }
    yield "Wall time and CPU time as multiples of those of *onnxkvrename, fsync off*.\n"
    titles = [f"({work['key']}) {work['title']}" for work in results["workloads"]]
    titles = [title for title in titles if title[1] in works]
    heads = ("", *titles, "peak MB in (a)", "features kept")
    yield f"| {' | '.join(heads)} |"
    yield f"|---|{'--:|' * (len(heads) - 1)}"
    peers = [
        name
        for entries in works.values()
        for name, entry in entries.items()
        if entry["kind"] == "peer" and EACH not in name
    ]
    for name in (BASIS, OURS, *LIMITS, *dict.fromkeys(peers)):
        cells = [
            f"`{name}`" if name in LIMITS else name,
            *(_times(entries, name) for entries in works.values()),
            _memory(works.get("a", {}), name),
            _kept(results, name),
        ]
        yield f"| {' | '.join(cells)} |"
    yield "\n\\*: the model says the same, but something beside the names is gone or different.\n"


def _times(entries: dict[str, Any], name: str) -> str:
    if name not in entries:
        return ""
    entry, base = entries[name], entries[BASIS]["median"]
    if entry["verdict"] in ("failed", "wrong"):
        return {"failed": "fails", "wrong": "**wrong**"}[entry["verdict"]]
    wall, cpu = entry["median"]["wall"], entry["median"]["cpu"]
    if name == BASIS:
        return f"{wall:.3f}, {cpu:.3f} s"
    changed = "\\*" if entry["verdict"] == "changed" else ""
    return f"{_figure(wall / base['wall'])}, {_figure(cpu / base['cpu'])}{changed}"


def _memory(entries: dict[str, Any], name: str) -> str:
    return f"{entries[name]['median']['rss']:,.0f}" if name in entries else ""


def _kept(results: dict[str, Any], name: str) -> str:
    rows = results.get("fidelity", {}).get("results", {}).get(name, {})
    kept = sum(1 for row in rows.values() if row["verdict"] == "clean")
    return f"{kept} of {len(rows)}" if rows else ""


def _growth(results: dict[str, Any]) -> Iterator[str]:
    series = growing.read(results)
    if not series:
        return
    linear = [_describe_end(one) for one in series if one.linear]
    others = [_describe_end(one) for one in series if not one.linear]
    yield f"CPU time and memory grow linearly or less, up to {', '.join(linear)}."
    if others:
        yield f"They grow faster up to {', '.join(others)}."
    yield ""


def _describe_end(one: growing.Series) -> str:
    scale, unit = (1e9, "GB") if one.name == "size" else (1.0, one.name)
    cost = f"{_figure(one.cost())} ms a {growing.UNITS[one.name]}"
    return f"{one.amounts[-1] / scale:,g} {unit} ({cost}, {one.rss[-1]:.0f} MB)"


def _circumstances(results: dict[str, Any]) -> Iterator[str]:
    machine = results["machine"]
    yield "## Where, with what, and again\n"
    packages = {
        name: version
        for versions in results["versions"].values()
        for name, version in versions.items()
        if name in (*SHOWN, OURS)
    }
    yield (
        f"{machine['cores']} cores ({machine['cpu']}), {machine['memory_gib']} GiB, "
        f"{machine['kernel']}, {machine['filesystem']}, {machine['cp']}; "
        f"Python {machine['python']}, {', '.join(f'{p} {v}' for p, v in packages.items())}; "
        f"{results['rounds']} rounds, seed {results['seed']}, {results['date']}.\n"
    )
    yield "```sh"
    yield "python bench/run.py             # half an hour, 16 GB of memory, 10 GB of disk"
    yield "python bench/run.py --quick     # scaled down, to see that it works"
    yield "python bench/run.py --only a,c  # a part; the published results stay"
    yield "python bench/report.py          # this page and its picture, from bench/results.json"
    yield "```\n"


def _figure(value: float) -> str:
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


if __name__ == "__main__":
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else BENCH / "results.json"
    docs = path.parent if len(sys.argv) > 1 else BENCH.parent / "docs"
    write(json.loads(path.read_text()), docs)
    print_targets(json.loads(path.read_text()))
