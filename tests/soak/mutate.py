"""Measure whether the tests notice mistakes: make one at a time, and run the tests that apply.

    python tests/soak/mutate.py --sample 300 --seed 1 --log mutants.jsonl

Every mutant is tried in a copy of the repository. A log that exists is continued: what was
tried on the same text of the module is not tried again. The answer is the share of mutants
that a test fails for, and a list of the survivors.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from soak.mutants import Mutant, list_mutants

ROOT = Path(__file__).resolve().parent.parent.parent
FAULTS = "tests/faults/test_rename_faults.py"
FIDELITY = ("tests/test_fidelity.py", "tests/test_properties.py")
RUNS = ("tests/renaming", "tests/test_api.py", "tests/test_sets.py")
TESTS: dict[str, tuple[str, ...]] = {
    "rules/plan.py": ("tests/rules/test_profile.py", "tests/renaming/test_run.py", *FIDELITY),
    "rules/checks/pairs.py": ("tests/rules", "tests/renaming/test_run.py"),
    "rules/windows.py": ("tests/rules/test_window_diff.py", "tests/test_sets.py"),
    "model/occurrences.py": FIDELITY,
    "model/protobuf.py": ("tests/model", *FIDELITY),
    "model/proto_reader.py": ("tests/model", *FIDELITY),
    "model/file.py": ("tests/model", *FIDELITY, "tests/renaming/test_run.py"),
    "model/external_data.py": ("tests/renaming", "tests/layout/test_inspect.py"),
    "model/metadata.py": ("tests/cli/test_manifest.py", *FIDELITY),
    **{
        f"storage/{name}.py": ("tests/storage", "tests/renaming", *more, FAULTS)
        for name, more in {
            "attributes": (),
            "clean_up": ("tests/qefficient/test_seed_cache.py",),
            "copy": (),
            "directories": ("tests/qefficient/test_seed_cache.py",),
            "intent": ("tests/qefficient/test_seed_cache.py",),
            "lock": (),
            "open_beneath": ("tests/model/test_external_data.py",),
            "read": ("tests/model/test_file.py",),
            "read_status": ("tests/rules/test_find_models.py",),
            "record": ("tests/cli/test_recover.py",),
            "recover": ("tests/cli/test_recover.py",),
            "temp_file": (),
            "transaction": ("tests/cli/test_recover.py", "tests/qefficient/test_seed_cache.py"),
            "write_file": ("tests/cli/test_manifest.py", "tests/cli/test_custom_io.py"),
        }.items()
    },
    "renaming/place.py": (*RUNS, FAULTS),
    "renaming/write.py": (*RUNS, FAULTS),
    "renaming/output_path.py": ("tests/renaming", "tests/rules/test_find_models.py"),
    "renaming/prepare.py": (*RUNS, "tests/model/test_metadata.py", *FIDELITY),
    "renaming/batch_checks.py": RUNS,
    "renaming/run.py": RUNS,
    "cli/output.py": ("tests/cli", "tests/report", "tests/faults/test_inert_output.py"),
    "cli/main.py": ("tests/cli", "tests/test_api.py"),
    "report/inert.py": ("tests/report", "tests/faults/test_inert_output.py"),
    "report/rename_text.py": ("tests/report", "tests/renaming", "tests/cli"),
}
"""Modules that plan, check, splice, save and print, each with the tests that apply beside its
mirror, ``tests/<package>/test_<module>.py``. A path that is not there is left out."""
CPU_LIMIT = 400
"""Seconds of processor time until a mutant counts as noticed: it runs without end."""
WALL_LIMIT = 1800
PRELOADED = (
    "onnx",
    "onnx.helper",
    "onnx.checker",
    "numpy",
    "pytest",
    "_pytest.assertion.rewrite",
    "hypothesis",
    "hypothesis.strategies",
    "click",
    "rich.console",
    "ruamel.yaml",
    "google.protobuf.text_format",
    "jsonschema",
)


def list_tests(module: str, root: Path) -> list[str]:
    """Return the test files that apply to a module, its mirror first."""
    package, _, name = module.rpartition("/")
    mirror = f"tests/{package}/test_{name}"
    paths = dict.fromkeys([mirror, *TESTS[module]])
    return [path for path in paths if (root / path).exists()]


def copy_repository(directory: Path) -> Path:
    """Copy what the tests need, compiled, and return the copy's root."""
    copy = directory / "repository"
    ignored = shutil.ignore_patterns(".git", ".venv", "build", "*.pyc", ".hypothesis", ".*_cache")
    shutil.copytree(ROOT, copy, ignore=ignored, symlinks=True)
    return copy


def try_mutant(root: Path, module: str, mutant: Mutant | None, tests: list[str]) -> dict[str, Any]:
    """Run the tests with one mutant in place, and return what came of it."""
    path = root / "onnxkvrename" / module
    source = path.read_bytes()
    started = time.monotonic()
    try:
        if mutant is not None:
            path.write_bytes(mutant.apply(source))
        verdict, tail = _run_tests(root, tests)
    finally:
        path.write_bytes(source)
    return {"verdict": verdict, "seconds": round(time.monotonic() - started, 1), "tail": tail}


def _run_tests(root: Path, tests: list[str]) -> tuple[str, str]:
    with tempfile.TemporaryFile() as output:
        child = os.fork()
        if child == 0:
            _run_tests_in_child(root, tests, output.fileno())
        deadline = time.monotonic() + WALL_LIMIT
        while True:
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                break
            if time.monotonic() > deadline:
                os.killpg(child, signal.SIGKILL)
            time.sleep(0.05)
        with contextlib.suppress(OSError):  # what the tests started and left
            os.killpg(child, signal.SIGKILL)
        output.seek(0)
        tail = output.read()[-600:].decode("utf-8", "replace")
    if os.WIFSIGNALED(status):
        return "timeout", tail
    return {0: "survived", 1: "caught", 2: "caught"}.get(os.WEXITSTATUS(status), "broken"), tail


def _run_tests_in_child(root: Path, tests: list[str], output: int) -> None:
    """Replace this process by a run of the tests; never returns."""
    code = 99
    try:
        os.setpgid(0, 0)
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_LIMIT, CPU_LIMIT))
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        os.chdir(root)
        sys.dont_write_bytecode = True
        os.environ |= {"PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
        sys.path[:0] = [str(root)]
        for name in [
            name for name in sys.modules if name.split(".")[0] in ("soak", "onnxkvrename")
        ]:
            del sys.modules[name]
        import pytest

        options = [
            "-x",
            "-q",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
            "--no-header",
            "--tb=line",
        ]
        code = int(pytest.main([*options, "-p", "no:randomly", *tests]))
        sys.stdout.flush()
    finally:
        os._exit(code)


def read_log(path: Path) -> dict[tuple[str, str, str], dict[str, Any]]:
    """Return what was tried before, by module, digest of its text, and mutant."""
    entries = {}
    if path.exists():
        for line in path.read_text("utf-8").splitlines():
            entry = json.loads(line)
            entries[entry["module"], entry["digest"], entry["key"]] = entry
    return entries


def choose_mutants(
    sample: int, seed: int, only: list[str], root: Path
) -> list[tuple[str, str, Mutant]]:
    """Return a random sample of the mutants of all modules, in a random order."""
    everything = []
    for module in TESTS:
        path = root / "onnxkvrename" / module
        if path.exists() and (not only or module in only):
            source = path.read_bytes()
            digest = hashlib.sha256(source).hexdigest()[:16]
            everything += [(module, digest, mutant) for mutant in list_mutants(source)]
    print(f"{len(everything)} mutants of {len({module for module, *_ in everything})} modules")
    chooser = random.Random(seed)
    chooser.shuffle(everything)
    return everything[:sample]


def report(entries: list[dict[str, Any]]) -> None:
    """Print the score, by module and in all, and the survivors."""
    modules: dict[str, Counter[str]] = {}
    for entry in entries:
        modules.setdefault(entry["module"], Counter())[entry["verdict"]] += 1
    total: Counter[str] = Counter()
    for module, verdicts in sorted(modules.items()):
        total += verdicts
        print(f"{module:28} {_score(verdicts)}")
    print(f"{'all':28} {_score(total)}")
    for entry in entries:
        if entry["verdict"] in ("survived", "broken"):
            before, after = (" ".join(entry[key].split())[:90] for key in ("before", "after"))
            where = f"{entry['module']}:{entry['line']}"
            print(f"{entry['verdict']}: {where} {entry['operator']}: {before} -> {after}")


def _score(verdicts: Counter[str]) -> str:
    number = sum(verdicts.values())
    noticed = verdicts["caught"] + verdicts["timeout"]
    return f"{noticed:4} of {number:4} noticed, {100 * noticed / max(number, 1):5.1f} %"


def main() -> None:
    """Try a sample of mutants."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--sample", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log", type=Path, default=Path("mutants.jsonl"))
    parser.add_argument("--module", action="append", default=[], help="as rules/plan.py")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--report", action="store_true", help="only print what the log says")
    parser.add_argument("--unchecked", action="store_true", help="the tests pass without a mutant")
    arguments = parser.parse_args()
    if arguments.report:
        report(list(read_log(arguments.log).values()))
        return
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory:
        root = copy_repository(Path(directory))
        chosen = choose_mutants(arguments.sample, arguments.seed, arguments.module, root)
        if not arguments.unchecked:
            check_unchanged(root, {module for module, *_ in chosen})
        report(try_mutants(root, chosen, arguments.log, 60 * arguments.minutes))


def check_unchanged(root: Path, modules: Iterable[str]) -> None:
    """Stop if a test fails without a mutant, too."""
    tests = dict.fromkeys(test for module in modules for test in list_tests(module, root))
    outcome = try_mutant(root, next(iter(TESTS)), None, list(tests))
    print(f"without a mutant: {outcome['verdict']}, {outcome['seconds']} s", flush=True)
    if outcome["verdict"] != "survived":
        raise SystemExit(outcome["tail"])


def try_mutants(
    root: Path, chosen: list[tuple[str, str, Mutant]], log_path: Path, seconds: float
) -> list[dict[str, Any]]:
    """Try mutants that the log does not have, and return what came of all."""
    log, deadline, results = read_log(log_path), time.monotonic() + seconds, []
    for module, digest, mutant in chosen:
        entry = log.get((module, digest, mutant.key))
        if entry is None:
            if time.monotonic() > deadline:
                break
            outcome = try_mutant(root, module, mutant, list_tests(module, root))
            names = {"module": module, "digest": digest, "key": mutant.key}
            entry = {**names, **mutant._asdict(), **outcome}
            with log_path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry) + "\n")
            print(
                f"{entry['verdict']:9} {entry['seconds']:6} s {module}:{mutant.line} "
                f"{mutant.operator}",
                flush=True,
            )
        results.append(entry)
    return results


if __name__ == "__main__":
    main()
