"""The benchmark, by one command: `python bench/run.py`.

It makes the environments and the models, runs everybody side by side, checks every result, and
writes bench/results.json, docs/benchmarks.md and docs/benchmarks.svg.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import machine
import report
from contenders import COPY, FIDELITY, LINEUP, NO_SYNC, NO_SYNC_DIRECTORY, Contender
from environments import BENCH, OURS, Environments, prepare
from running import Bench, Entry
from workloads import FULL, MAKERS, QUICK, Sizes, Workload, growth

ROOT = BENCH.parent
BLOCKS = (("a",), ("b", "e", "f"), ("c",), ("d",))
EXTRAS = ("fidelity", "growth")
HEAVY = {"onnx", "numpy", "rich", "google", "onnx_graphsurgeon", "onnx_ir"}


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds (default 5)")
    parser.add_argument("--only", default="", help=f"some of {','.join((*MAKERS, *EXTRAS))}")
    parser.add_argument("--quick", action="store_true", help="scaled down, to try the benchmark")
    parser.add_argument("--seed", type=int, default=20260801)
    parser.add_argument("--tool", default=str(ROOT), help="what pip installs as onnxkvrename")
    parser.add_argument(
        "--work",
        type=Path,
        default=Path.home() / ".cache" / "onnxkvrename-bench",
        help="environments and models; needs some 10 GB (default: %(default)s)",
    )
    chosen = parser.parse_args()
    known = (*MAKERS, *EXTRAS)
    chosen.only = chosen.only.split(",") if chosen.only else list(known)
    if unknown := set(chosen.only) - set(known):
        parser.error(f"--only takes {', '.join(known)}, not {', '.join(sorted(unknown))}")
    chosen.whole = set(chosen.only) == set(known) and not chosen.quick
    return chosen


def workloads(bench: Bench, chosen: argparse.Namespace, sizes: Sizes) -> list[dict[str, Any]]:
    """Block by block; the models of a block exist only while it runs."""
    results = []
    for block in BLOCKS:
        keys = [key for key in block if key in chosen.only]
        models = bench.work / "models"
        made = [MAKERS[key](models / key, sizes, chosen.seed) for key in keys]
        entries = [Entry(work, contender) for work in made for contender in LINEUP[work.key]]
        if entries:
            bench.measure(entries, chosen.rounds)
        for work in made:
            mine = [entry.summary() for entry in entries if entry.workload is work]
            results.append({"key": work.key, "title": work.title, "contenders": mine})
        shutil.rmtree(models, ignore_errors=True)
    return sorted(results, key=lambda result: str(result["key"]))


def fidelity(bench: Bench) -> dict[str, Any]:
    """Run each single-file contender on models of one feature each."""
    models, out = bench.work / "features", bench.work / "features-out"
    python = bench.environments.python("onnx")
    subprocess.run([python, str(BENCH / "features.py"), str(models)], check=True)
    features = json.loads((models / "features.json").read_text())
    out.mkdir(exist_ok=True)
    results: dict[str, dict[str, Any]] = {}
    for contender in FIDELITY:
        results[contender.name] = {}
        for feature in features:
            source = models / f"{feature['name']}.onnx"
            work = Workload("fidelity", feature["title"], (source,), models, out)
            verdict, words = _faithful(bench, Entry(work, contender), feature["refuse"])
            results[contender.name][feature["name"]] = {"verdict": verdict, "words": words}
    shutil.rmtree(models)
    shutil.rmtree(out)
    titles = {feature["name"]: feature["title"] for feature in features}
    return {"features": titles, "results": results}


def _faithful(bench: Bench, entry: Entry, refuse: bool) -> tuple[str, list[str]]:
    run = bench.run(entry, 0)
    if not refuse:
        return bench.verdict(entry, run)
    if run.code and entry.workload.found()[0][1] is None:
        said = bench.last_line().replace(f"{entry.workload.sources[0].parent}/", "")
        return "clean", [f"refused: {said}"]
    return "wrong", ["two values got one name"]


def grow(bench: Bench, chosen: argparse.Namespace, sizes: Sizes) -> dict[str, Any]:
    """Ours against size, without fsync; `cp` beside it where bytes are what grows."""
    results: dict[str, Any] = {}
    models = bench.work / "growth"
    for series, points in growth(sizes).items():
        ours = NO_SYNC_DIRECTORY if series == "files" else NO_SYNC
        lineup: Sequence[Contender] = (ours, COPY) if series == "size" else (ours,)
        results[series] = []
        for amount, make in points:
            work = make(models, chosen.seed)
            entries = [Entry(work, contender) for contender in lineup]
            bench.measure(entries, chosen.rounds)
            point = {"amount": amount, "bytes": sum(path.stat().st_size for path in work.sources)}
            results[series].append({**point, "contenders": [entry.summary() for entry in entries]})
            shutil.rmtree(models)
    return results


def imports(bench: Bench, chosen: argparse.Namespace) -> dict[str, list[str]]:
    """The heavy packages that a run of ours loads."""
    work = MAKERS["e"](bench.work / "imports", QUICK, chosen.seed)
    source, target = (str(path) for path in work.pairs[0])
    program = bench.environments.program(OURS, OURS)
    commands = {
        "--help": [program, "--help"],
        "--version": [program, "--version"],
        "rename": [program, source, "--prefix", "VLLM", "-o", target],
    }
    python = bench.environments.python(OURS)
    loaded = {name: _loaded(python, command) for name, command in commands.items()}
    shutil.rmtree(bench.work / "imports")
    return loaded


def _loaded(python: str, command: list[str]) -> list[str]:
    done = subprocess.run(
        [python, "-X", "importtime", *command], capture_output=True, text=True, check=True
    )
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    modules = {line.rpartition("|")[2].strip().partition(".")[0] for line in lines}
    return sorted(modules & HEAVY)


def collect(chosen: argparse.Namespace, environments: Environments) -> dict[str, Any]:
    sizes = QUICK if chosen.quick else FULL
    bench = Bench(environments, chosen.work)
    started = datetime.datetime.now(datetime.timezone.utc)
    results: dict[str, Any] = {
        "schema": "onnxkvrename.bench/1",
        "date": started.date().isoformat(),
        "quick": chosen.quick,
        "rounds": chosen.rounds,
        "seed": chosen.seed,
        "machine": machine.describe(chosen.work),
        "versions": environments.versions(),
        "workloads": workloads(bench, chosen, sizes),
        "imports": imports(bench, chosen),
    }
    if "fidelity" in chosen.only:
        results["fidelity"] = fidelity(bench)
    if "growth" in chosen.only:
        results["growth"] = grow(bench, chosen, sizes)
    ended = datetime.datetime.now(datetime.timezone.utc)
    results["minutes"] = round((ended - started).total_seconds() / 60, 1)
    return results


def _lines(results: dict[str, Any]) -> str:
    """JSON with every innermost object and list on a line of its own."""
    text = json.dumps(results, indent=1)
    return re.sub(r"[\[{][^\[\]{}]*[\]}]", lambda found: " ".join(found[0].split()), text) + "\n"


def main() -> None:
    chosen = options()
    chosen.work.mkdir(parents=True, exist_ok=True)
    environments = prepare(chosen.work / "environments", chosen.tool)
    results = collect(chosen, environments)
    here, docs = (BENCH, ROOT / "docs") if chosen.whole else (chosen.work, chosen.work)
    path = here / "results.json"
    path.write_text(_lines(results))
    report.write(results, docs)
    report.print_targets(results)
    print(f"{path}\n{docs / 'benchmarks.md'}\n{docs / 'benchmarks.svg'}")
    if not chosen.whole:
        print("A part, or scaled down: the published results are left alone.", file=sys.stderr)


if __name__ == "__main__":
    main()
