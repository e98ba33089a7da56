"""The goals of the issue, each with what was measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from contenders import EACH
from environments import OURS

Summary = dict[str, Any]
RIGHT = ("clean", "changed")
IMPORT_ONNX = 'python -c "import onnx"'
LAZY = "onnx loop, lazy"
NO_SYNC = f"{OURS}, fsync off"


@dataclass(frozen=True)
class Target:
    name: str
    goal: str
    measured: str
    met: bool
    remark: str = ""


class Results:
    """The summaries of one benchmark by workload and contender."""

    def __init__(self, results: Summary) -> None:
        self.all = results
        self.by_key = {
            work["key"]: {entry["name"]: entry for entry in work["contenders"]}
            for work in results["workloads"]
        }

    def of(self, key: str, name: str, what: str) -> float:
        return float(self.by_key[key][name]["median"][what])

    def best(self, key: str, name: str) -> float:
        """The shortest wall time of all runs."""
        return min(float(run["wall"]) for run in self.by_key[key][name]["runs"])

    def fastest(self, key: str, what: str) -> Summary:
        """The peer that took least, among those whose result was right."""
        entries = self.by_key[key].values()
        peers = [e for e in entries if e["kind"] == "peer" and e["verdict"] in RIGHT]
        return min(peers, key=lambda entry: float(entry["median"][what]))


def targets(results: Summary) -> Iterator[Target]:
    """Those whose workloads were run."""
    table = Results(results)
    if "a" in table.by_key:
        yield from _inline_weights(table)
    if "b" in table.by_key and "e" in table.by_key:
        yield _external_data(table)
    if "c" in table.by_key:
        yield _many_nodes(table)
    if "d" in table.by_key:
        yield from _windows(table)
    if "e" in table.by_key:
        yield _tiny(table)
    if "f" in table.by_key:
        yield _help(table)


def _ratio(name: str, limit: float, goal: str, ratio: float, remark: str = "") -> Target:
    shown = f"1/{1 / ratio:.1f}" if goal.startswith("≤ 1/") else f"{ratio:.2f}"
    return Target(name, goal, shown, ratio <= limit, remark)


def _inline_weights(table: Results) -> Iterator[Target]:
    wall = table.of("a", OURS, "wall")
    bare = table.of("a", NO_SYNC, "wall")
    synced = wall / table.of("a", "cp and sync", "wall")
    best = table.best("a", NO_SYNC) / table.best("a", "cp")
    remark = f"the best run of each: {best:.2f}; with fsync, against `cp` and `sync`: {synced:.2f}"
    ratio = bare / table.of("a", "cp", "wall")
    yield _ratio("(a) wall against `cp`, fsync excluded on both", 1.2, "≤ 1.2", ratio, remark)
    peer = table.fastest("a", "wall")
    theirs = peer["median"]["wall"]
    name = "(a) wall against the fastest peer, fsync excluded"
    yield _ratio(name, 0.1, "≤ 1/10", bare / theirs, f"{peer['name']}; no peer syncs")
    remark = f"`cp` and `sync` takes 1/{theirs / table.of('a', 'cp and sync', 'wall'):.1f} of it"
    yield _ratio(
        "(a) the same, fsync of onnxkvrename included", 0.1, "≤ 1/10", wall / theirs, remark
    )
    peak = max(table.of("a", name, "rss") for name in (OURS, NO_SYNC))
    yield Target("(a) peak RSS", "≤ 40 MB", f"{peak:.0f} MB", peak <= 40)


def _external_data(table: Results) -> Target:
    ratio = table.of("b", OURS, "wall") / table.of("e", OURS, "wall")
    bare = table.of("b", NO_SYNC, "wall") / table.of("e", NO_SYNC, "wall")
    return _ratio("(b) wall against (e)", 1.2, "≤ 1.2", ratio, f"without fsync {bare:.2f}")


def _many_nodes(table: Results) -> Target:
    peer = table.fastest("c", "cpu")
    ratio = table.of("c", OURS, "cpu") / peer["median"]["cpu"]
    return _ratio("(c) CPU against the fastest right peer", 1 / 3, "≤ 1/3", ratio, peer["name"])


def _windows(table: Results) -> Iterator[Target]:
    ratio = table.of("d", OURS, "cpu") / table.of("d", LAZY, "cpu")
    yield _ratio("(d) one command, CPU against the lazy script", 0.5, "≤ 1/2", ratio)
    ours, lazy = (table.of("d", f"{name}, {EACH}", "cpu") for name in (OURS, LAZY))
    yield _ratio("(d) a process per file, the same", 0.25, "≤ 1/4", ours / lazy)


def _tiny(table: Results) -> Target:
    onnx = table.of("e", IMPORT_ONNX, "wall")
    bare = table.of("e", NO_SYNC, "wall") / onnx
    ratio = table.of("e", OURS, "wall") / onnx
    remark = f"without fsync {bare:.2f}"
    return _ratio('(e) wall against `python -c "import onnx"`', 0.6, "≤ 0.6", ratio, remark)


def _help(table: Results) -> Target:
    wall = table.of("f", f"{OURS} --help", "wall")
    heavy = table.all["imports"]["--help"]
    remark = f"imports {', '.join(heavy)}" if heavy else "imports no onnx, numpy or rich"
    met = wall <= 0.12 and not heavy
    return Target("(f) `--help`", "≤ 0.12 s, no heavy import", f"{wall:.3f} s", met, remark)
