"""results.json as a page and a picture: `python bench/report.py` does it without measuring."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import growing
import picture
from contenders import NO_SYNC
from environments import BENCH, OURS
from targets import targets

SHOWN = ("onnx", "numpy", "protobuf", "onnx_graphsurgeon", "onnx-ir", "sor4onnx", "onnxruntime")
VERDICTS = {"": "-", "clean": "right", "changed": "right, but", "wrong": "**wrong**"}
CELLS = {"clean": "kept", "changed": "changed", "wrong": "**wrong**", "failed": "fails"}
BASIS = NO_SYNC.name
REMARKS = BENCH / "remarks.md"
"""The assessment of the targets: written by hand, for the published results."""

METHOD = """\
- Every run is a fresh process, measured by its parent with `wait4`: wall time, user and system
  CPU time, and peak resident memory of the whole process (floor: some 8 MB, the launcher's own).
- Before a run the older result is removed, every input is read once so that it is in the page
  cache, and `sync` is called so that nothing is left to write.
- Each contender first runs once uncounted and its result is judged; every later result has to
  hash the same or is judged again. Then come the rounds: all contenders in turn, each round
  starting one further on. Shown are medians; the spread is (slowest - fastest) / median of wall
  time.
- What takes less than 3 s has four turns in a round, since noise weighs more there. A contender
  that fails, or takes more than 60 s, is run once only; its row says 1 run.
- The judge (`bench/oracle.py`) is an independent full ModelProto patch of the source, compared
  field by field, unknown fields included; weights by hash. *right*: equal. *right, but*: the
  model says the same, yet something beside the names is gone or different. **wrong**: a name, a
  node, a weight or a reference is not what it must be.
- Everybody writes a new file (`-o`, `-d`); in (b) into the directory of the data, so that the
  reference can stay; in (d) into an empty directory. onnxkvrename checks before it writes, syncs,
  and reads the result again; *fsync off* is the same command with `os.fsync` stubbed, to
  compare with programs that never sync.
"""


def write(results: dict[str, Any], docs: Path) -> None:
    docs.mkdir(parents=True, exist_ok=True)
    (docs / "benchmarks.md").write_text("\n".join(page(results)))
    (docs / "benchmarks.svg").write_text(picture.draw(results))


def page(results: dict[str, Any]) -> Iterator[str]:
    """The lines of docs/benchmarks.md."""
    yield "# Benchmarks\n"
    if results["quick"]:
        yield "**A scaled-down trial of the benchmark itself: these numbers mean nothing.**\n"
    yield "Made by `python bench/run.py`; every number is in `bench/results.json`.\n"
    yield f"![{picture.describe(results)}](benchmarks.svg)\n"
    yield from _targets(results)
    yield REMARKS.read_text()
    for work in results["workloads"]:
        yield from _workload(work)
    yield from _fidelity(results)
    yield from _growth(results)
    yield "## How it is measured\n"
    yield METHOD
    yield from _circumstances(results)


def _targets(results: dict[str, Any]) -> Iterator[str]:
    yield "## Targets\n"
    yield "| | goal | measured | | |"
    yield "|---|---|---|---|---|"
    for target in targets(results):
        met = "met" if target.met else "**not met**"
        yield f"| {target.name} | {target.goal} | {target.measured} | {met} | {target.remark} |"
    yield ""


def _workload(work: dict[str, Any]) -> Iterator[str]:
    """Ratios against our own row; its absolute numbers stand in the caption."""
    entries = work["contenders"]
    names = [entry["name"] for entry in entries]
    base = entries[names.index(BASIS) if BASIS in names else 0]
    wall, cpu = base["median"]["wall"], base["median"]["cpu"]
    yield f"## ({work['key']}) {work['title'][0].upper()}{work['title'][1:]}\n"
    yield f"Against *{base['name']}*: {wall:.3f} s wall, {cpu:.3f} s CPU.\n"
    yield "| | wall ratio | CPU ratio | peak MB | spread | runs | result |"
    yield "|---|--:|--:|--:|--:|--:|---|"
    for entry in entries:
        median = entry["median"]
        cells = [
            f"**{entry['name']}**" if entry["kind"] == "ours" else entry["name"],
            f"{_figure(median['wall'] / wall)}",
            f"{_figure(median['cpu'] / cpu)}",
            f"{median['rss']:,.0f}",
            "-" if entry["once"] else f"{entry['spread']:.0%}",
            "1" if entry["once"] else str(sum(1 for run in entry["runs"] if run["round"])),
            _result(entry),
        ]
        yield f"| {' | '.join(cells)} |"
    yield ""


def _result(entry: dict[str, Any]) -> str:
    words = "; ".join(_plain(word) for word in entry["words"][:4])
    if len(entry["words"]) > 4:
        words += f"; {len(entry['words']) - 4} more"
    if entry["verdict"] == "failed":
        return f"**fails**: {words}"
    verdict = VERDICTS[entry["verdict"]]
    return f"{verdict}: {words}" if words else verdict


def _fidelity(results: dict[str, Any]) -> Iterator[str]:
    """One row a feature, one column a contender."""
    if "fidelity" not in results:
        return
    features, table = results["fidelity"]["features"], results["fidelity"]["results"]
    yield "## What each keeps\n"
    yield "Small models with one feature each, renamed and judged as above.\n"
    yield f"| | {' | '.join(table)} |"
    yield f"|---|{'---|' * len(table)}"
    for feature, title in features.items():
        verdicts = (rows[feature]["verdict"] for rows in table.values())
        yield f"| {title} | {' | '.join(CELLS[verdict] for verdict in verdicts)} |"
    kept = [sum(1 for row in rows.values() if row["verdict"] == "clean") for rows in table.values()]
    yield f"| **of {len(features)}** | {' | '.join(f'**{count}**' for count in kept)} |"
    yield "\n<details><summary>In words</summary>\n"
    for name, rows in table.items():
        for feature, row in rows.items():
            if row["verdict"] != "clean":
                words = "; ".join(_plain(word) for word in row["words"][:3])
                yield f"- {name}, {features[feature]}: {words}"
    yield "\n</details>\n"


def _growth(results: dict[str, Any]) -> Iterator[str]:
    series = growing.read(results)
    if not series:
        return
    yield "## Growth\n"
    yield "onnxkvrename with fsync off. The exponent is the slope on log-log paper over the upper"
    yield "half of the points: 1 is linear, less is better than linear.\n"
    yield "| | from | to | CPU ratio | exponent | peak MB | exponent | one more costs | |"
    yield "|---|--:|--:|--:|--:|--:|--:|--:|---|"
    for one in series:
        scale = 1e9 if one.name == "size" else 1.0
        cells = [
            "size, GB" if one.name == "size" else one.name,
            f"{one.amounts[0] / scale:,g}",
            f"{one.amounts[-1] / scale:,g}",
            f"{_figure(one.cpu[-1] / one.cpu[0])}",
            f"{one.exponent(one.cpu):.2f}",
            f"{one.rss[0]:.0f} → {one.rss[-1]:.0f}",
            f"{one.exponent(one.rss):.2f}",
            f"{one.cost():.2g} ms a {growing.UNITS[one.name]}",
            "linear or better" if one.linear else "**more than linear**",
        ]
        yield f"| {' | '.join(cells)} |"
    yield from _against_cp(results["growth"]["size"])


def _against_cp(points: list[dict[str, Any]]) -> Iterator[str]:
    yield "\nWall time against `cp`, fsync excluded on both:\n"
    yield f"| GB | {' | '.join(_figure(point['amount'] / 1e9) for point in points)} |"
    yield f"|---|{'--:|' * len(points)}"
    ratios = []
    for point in points:
        ours, copy = (entry["median"]["wall"] for entry in point["contenders"])
        ratios.append(f"{ours / copy:.2f}")
    yield f"| | {' | '.join(ratios)} |\n"


def _circumstances(results: dict[str, Any]) -> Iterator[str]:
    machine = results["machine"]
    yield "## Where and with what\n"
    yield f"{machine['cores']} cores ({machine['cpu']}), {machine['memory_gib']} GiB,"
    yield f"{machine['kernel']}, {machine['filesystem']}, {machine['cp']}, load at the start"
    yield f"{machine['load'][0]}. Python {machine['python']}, {results['rounds']} rounds,"
    yield f"seed {results['seed']}, {results['date']},"
    yield f"{results.get('minutes', 0):.0f} minutes.\n"
    yield "| environment | |"
    yield "|---|---|"
    for name, packages in results["versions"].items():
        chosen = [package for package in packages if package in (*SHOWN, OURS, "click", "rich")]
        yield f"| {name} | {', '.join(f'{p} {packages[p]}' for p in chosen)} |"
    yield "\n## Again\n"
    yield "    python bench/run.py             # everything: 16 GB of memory, 10 GB of disk"
    yield "    python bench/run.py --quick     # scaled down, to see that it works"
    yield "    python bench/run.py --only a,c  # a part; the published results stay"
    yield "    python bench/report.py          # the page and the picture, from results.json\n"


def _plain(word: str) -> str:
    return re.sub(r"\bmodel\.(graph\.)?", "", word).replace("|", "\\|")


def _figure(value: float) -> str:
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"


if __name__ == "__main__":
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else BENCH / "results.json"
    docs = path.parent if len(sys.argv) > 1 else BENCH.parent / "docs"
    write(json.loads(path.read_text()), docs)
