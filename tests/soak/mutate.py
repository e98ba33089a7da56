"""Measure whether the tests notice mistakes: make one at a time, and run the tests that apply.

    python tests/soak/mutate.py --sample 300 --seed 1 --log mutants.jsonl

First every test file runs once without a mistake, and the lines of the package that it runs are
recorded. Then every mutant is tried in a copy of the repository, by the test files that run its
line: first the module's own, then the quickest, until a test fails. So a mutant survives only
after all of them have passed. A log that exists is continued: what was tried on the same text of
the module is not tried again. The answer is the share of mutants that a test fails for, and a
list of the survivors.

The tests are those of the default tier. What it does not notice is tried on both tiers by the same
command with `--again --full`.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
import importlib
import json
import math
import os
import random
import resource
import runpy
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from soak.mutants import Mutant, list_mutants

ROOT = Path(__file__).resolve().parent.parent.parent
RECORDER = Path("tests/soak/record_lines")
MODULES = (
    "rules/plan.py",
    "rules/checks.py",
    "rules/windows.py",
    "model/occurrences.py",
    "model/protobuf.py",
    "model/proto_reader.py",
    "model/file.py",
    "model/external_data.py",
    "files/copy.py",
    "files/inside.py",
    "files/lock.py",
    "files/new_directories.py",
    "files/read.py",
    "files/signals.py",
    "files/staged.py",
    "files/step.py",
    "files/targets.py",
    "files/temp_file.py",
    "renaming/write.py",
    "renaming/prepare.py",
    "renaming/batch_checks.py",
    "renaming/run.py",
    "cli/output.py",
    "cli/main.py",
    "report/inert.py",
    "report/rename_text.py",
)
"""Modules that plan, check, splice, save and print."""
FAULTS = ("tests/faults/test_rename_faults.py", "tests/faults/test_writing_commands.py")
"""Minutes of faults at every call, only for the packages that write files."""
WRITING = ("files", "renaming")
LEFT_OUT = ("tests/test_house.py", "tests/test_ci.py")
"""Test files that judge texts, those of the mutants among them."""
FIRST_BATCH = 2
"""Seconds of CPU time of the tests that start together; each further batch takes twice as long."""
RECORDING = 600
"""Seconds of CPU time for a test file without a mutant."""
STUCK = 600
"""Seconds without any CPU time until tests count as stuck, however busy the machine is."""
NOTICED = ("caught", "timeout")
MEMORY_LIMIT = 8 << 30
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


class TestFile(NamedTuple):
    """What a test file does without a mutant.

    Attributes:
        path: Relative to the repository.
        digest: The tier, and SHA-256 of the package and of the tests that it was recorded with.
        seconds: The CPU time that it takes.
        verdict: ``survived`` if it passes.
        lines: Numbers of the lines that it runs, by module.
        used: Modules of which it runs a function.
    """

    path: str
    digest: str
    seconds: float
    verdict: str
    lines: dict[str, list[int]]
    used: list[str]


def copy_repository(directory: Path) -> Path:
    """Copy what the tests need, and return the copy's root."""
    copy = directory / "repository"
    ignored = shutil.ignore_patterns(".git", ".venv", "build", "*.pyc", ".hypothesis", ".*_cache")
    shutil.copytree(ROOT, copy, ignore=ignored, symlinks=True)
    return copy


def share_work(roots: list[Path], count: int, work: Callable[[Path, int], None]) -> None:
    """Call `work` with each number below `count`, in as many processes as there are roots."""
    source, sink = os.pipe()
    os.write(sink, b"".join(number.to_bytes(4, "big") for number in range(count)))
    os.close(sink)
    workers = []
    for root in roots:
        worker = os.fork()
        if worker == 0:
            code = 1
            try:
                while number := os.read(source, 4):
                    work(root, int.from_bytes(number, "big"))
                code = 0
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        workers.append(worker)
    os.close(source)
    if any(os.waitpid(worker, 0)[1] for worker in workers):
        raise SystemExit("a worker failed")


def append_entry(log: Path, entry: dict[str, Any]) -> None:
    """Add a line to a log, whole, whoever else does."""
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(descriptor, json.dumps(entry).encode() + b"\n")
    os.close(descriptor)


def record_tests(
    roots: list[Path], log: Path, wanted: Sequence[str], tier: Sequence[str]
) -> list[TestFile]:
    """Run test files without a mutant, and return those that pass.

    Args:
        roots: Copies of the repository.
        log: What was recorded before; it is continued.
        wanted: The test files or their directories, by what their paths begin with.
        tier: The option that chooses the tier, if any.
    """
    root = roots[0]
    digest = _hash_files(sorted([*(root / "onnxkvrename").rglob("*.py"), *root.glob("tests/*.py")]))
    digests = {
        name: "-".join([digest, _hash_files([root / name]), *tier])
        for path in sorted(root.glob("tests/**/test_*.py"))
        if (name := path.relative_to(root).as_posix()) not in LEFT_OUT
        and name.startswith(tuple(wanted))
    }
    known = _read_recorded(log)
    missing = [name for name in digests if (name, digests[name]) not in known]

    def record(root: Path, number: int) -> None:
        test = _record_test(root, missing[number], digests[missing[number]], tier)
        append_entry(log, test._asdict())
        print(f"{test.verdict:9} {test.seconds:6} s {test.path}", flush=True)

    share_work(roots, len(missing), record)
    known = _read_recorded(log)
    tests = [known[name, digest] for name, digest in digests.items()]
    for test in tests:
        if test.verdict != "survived":
            print(f"left out, as it fails without a mutant: {test.path}", flush=True)
    return [test for test in tests if test.verdict == "survived"]


def _read_recorded(log: Path) -> dict[tuple[str, str], TestFile]:
    lines = log.read_text("utf-8").splitlines() if log.exists() else []
    tests = [TestFile(**json.loads(line)) for line in lines]
    return {(test.path, test.digest): test for test in tests}


def _record_test(root: Path, name: str, digest: str, tier: Sequence[str]) -> TestFile:
    before = _read_cpu_time()
    with tempfile.NamedTemporaryFile() as file:
        verdict, tail = run_tests(root, [*tier, name], RECORDING, file.name)
        recorded = Path(file.name).read_text("utf-8").splitlines()
    seconds = round(_read_cpu_time() - before, 1)
    if verdict != "survived":  # a limit of the test may be too tight for a recorded run
        verdict, tail = run_tests(root, [*tier, name], RECORDING)
    if verdict != "survived":
        print(tail, flush=True)
    lines: dict[str, set[int]] = {}
    used = set()
    for module, number, inside in (entry.split(":") for entry in recorded):
        lines.setdefault(module, set()).add(int(number))
        used |= {module} if inside else set()
    return TestFile(
        name,
        digest,
        seconds,
        verdict,
        {module: sorted(numbers) for module, numbers in lines.items() if module in MODULES},
        sorted(used.intersection(MODULES)),
    )


def _read_cpu_time() -> float:
    """Return the seconds of CPU of all processes that ended; other work changes it little."""
    times = os.times()
    return times.children_user + times.children_system


def _hash_files(paths: list[Path]) -> str:
    hasher = hashlib.sha256()
    for path in paths:
        hasher.update(path.read_bytes())
    return hasher.hexdigest()[:16]


def choose_tests(source: bytes, module: str, line: int, tests: list[TestFile]) -> list[TestFile]:
    """Return the test files that run the statement on a line, the module's own first.

    What runs when the module is imported, as a constant does, is tried by all tests that run a
    function of the module.
    """
    package, name = module.split("/")[0], Path(module).stem
    statement, on_import = _find_statement(ast.parse(source), line)
    chosen = [
        test
        for test in tests
        if (
            module in test.used
            if on_import
            else not statement.isdisjoint(test.lines.get(module, ()))
        )
        and (test.path not in FAULTS or package in WRITING)
    ]

    def rank(test: TestFile) -> tuple[bool, float]:
        own = test.path.startswith(f"tests/{package}/") and test.path.endswith(f"/test_{name}.py")
        return (not own, test.seconds)

    return sorted(chosen, key=rank)


def _find_statement(tree: ast.Module, line: int) -> tuple[set[int], bool]:
    """Return the lines of the innermost statement on a line, and whether an import runs it.

    Of a compound statement these are the lines before its body.
    """
    found, on_import = {line}, True

    def visit(node: ast.AST, in_function: bool) -> None:
        nonlocal found, on_import
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt):
                body = getattr(child, "body", None)
                end = body[0].lineno - 1 if body else child.end_lineno or child.lineno
                if child.lineno <= line <= max(end, child.lineno):
                    found, on_import = (
                        set(range(child.lineno, max(end, child.lineno) + 1)),
                        (not in_function),
                    )
            visit(child, in_function or isinstance(node, ast.FunctionDef))

    visit(tree, in_function=False)
    return found, on_import


def split_into_batches(tests: list[TestFile]) -> Iterator[list[TestFile]]:
    """Yield the test files in their order, each batch about twice as long as the one before."""
    batch: list[TestFile] = []
    limit: float = FIRST_BATCH
    for test in tests:
        if batch and sum(other.seconds for other in batch) + test.seconds > limit:
            yield batch
            batch, limit = [], 2 * limit
        batch.append(test)
    if batch:
        yield batch


def try_mutant(
    root: Path,
    module: str,
    mutant: Mutant,
    tests: list[TestFile],
    limit: float,
    tier: Sequence[str],
) -> dict[str, Any]:
    """Run the tests with one mutant in place, and return what came of it.

    Args:
        root: The repository's copy.
        module: The module.
        mutant: The mutant.
        tests: What the test files do without it.
        limit: Seconds of CPU time of tests after which no further batch is started.
        tier: The option that chooses the tier, if any.
    """
    path = root / "onnxkvrename" / module
    source = path.read_bytes()
    chosen = choose_tests(source, module, mutant.line, tests)
    started = time.monotonic()
    verdict, tail = "survived", "no test runs this line"
    try:
        path.write_bytes(mutant.apply(source))
        for batch in split_into_batches(chosen):
            if limit <= 0:
                verdict = "undecided"
                break
            limit -= sum(test.seconds for test in batch)
            seconds = 20 + 2 * sum(test.seconds for test in batch)
            verdict, tail = run_tests(root, [*tier, *(test.path for test in batch)], seconds)
            if verdict != "survived":
                break
    finally:
        path.write_bytes(source)
    took = round(time.monotonic() - started, 1)
    return {"verdict": verdict, "seconds": took, "tests": len(chosen), "tail": tail}


def run_tests(
    root: Path, wanted: list[str], seconds: float, recorded: str | None = None
) -> tuple[str, str]:
    """Run test files in a process until one fails.

    Args:
        root: The repository's copy.
        wanted: The option that chooses the tier, if any, and the test files, in their order.
        seconds: CPU time until the mutant counts as noticed: it runs without end.
        recorded: A file for the lines that run.

    Returns:
        The verdict, and the end of what pytest printed.
    """
    with tempfile.TemporaryFile() as output:
        child = os.fork()
        if child == 0:
            _run_tests_in_child(root, wanted, int(seconds), recorded, output.fileno())
        used, since = 0, time.monotonic()
        while True:
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                break
            if used != (used := _read_ticks(child)):
                since = time.monotonic()
            elif time.monotonic() > since + STUCK:
                os.killpg(child, signal.SIGKILL)
            time.sleep(0.05)
        with contextlib.suppress(OSError):  # what the tests started and left
            os.killpg(child, signal.SIGKILL)
        output.seek(0)
        tail = output.read()[-600:].decode("utf-8", "replace")
    if os.WIFSIGNALED(status):
        return "timeout", tail
    return {0: "survived", 1: "caught", 2: "caught"}.get(os.WEXITSTATUS(status), "broken"), tail


def _read_ticks(child: int) -> int:
    """Return the CPU time of a process and those of its own that ended, in ticks."""
    fields = Path(f"/proc/{child}/stat").read_text("utf-8").rpartition(")")[2].split()
    return sum(map(int, fields[11:15]))


def _run_tests_in_child(
    root: Path, wanted: list[str], seconds: int, recorded: str | None, output: int
) -> None:
    """Replace this process by a run of the tests; never returns."""
    code = 99
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job ignores it
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_LIMIT, MEMORY_LIMIT))
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        os.chdir(root)
        sys.dont_write_bytecode = True
        search = [str(root)]
        if recorded:
            search.append(str(root / RECORDER))
            package = str(root / "onnxkvrename")
            os.environ |= {"RECORDED_PACKAGE": package, "RECORDED_LINES": recorded}
            runpy.run_path(str(root / RECORDER / "sitecustomize.py"))
        environment = {"PYTHONPATH": os.pathsep.join(search), "PYTHONDONTWRITEBYTECODE": "1"}
        os.environ |= environment
        sys.path[:0] = [str(root)]
        for name in [name for name in sys.modules if name.split(".")[0] == "soak"]:
            del sys.modules[name]
        import pytest

        options = "-x -q -p no:cacheprovider -n 0 -p no:randomly --no-header --tb=line"
        code = int(pytest.main([*options.split(), *wanted]))
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
    sources = {name: (root / "onnxkvrename" / name).read_bytes() for name in only or MODULES}
    digests = {name: hashlib.sha256(source).hexdigest()[:16] for name, source in sources.items()}
    everything = [(name, mutant) for name in sources for mutant in list_mutants(sources[name])]
    print(f"{len(everything)} mutants of {len(sources)} modules", flush=True)
    random.Random(seed).shuffle(everything)
    valid = ((name, mutant) for name, mutant in everything if mutant.is_python(sources[name]))
    return [(name, digests[name], mutant) for name, mutant in islice(valid, sample)]


def list_unnoticed(
    log: dict[tuple[str, str, str], dict[str, Any]], root: Path
) -> list[tuple[str, str, Mutant]]:
    """Return the mutants that no test has noticed, of modules that are still the same."""
    found = []
    for (module, digest, _), entry in log.items():
        source = (root / "onnxkvrename" / module).read_bytes()
        is_same = digest == hashlib.sha256(source).hexdigest()[:16]
        if is_same and entry["verdict"] not in NOTICED:
            found.append((module, digest, Mutant(*(entry[name] for name in Mutant._fields))))
    return found


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
        if entry["verdict"] not in NOTICED:
            before, after = (" ".join(entry[key].split())[:90] for key in ("before", "after"))
            where = f"{entry['module']}:{entry['line']}"
            print(f"{entry['verdict']}: {where} {entry['operator']}: {before} -> {after}")


def _score(verdicts: Counter[str]) -> str:
    number = sum(verdicts.values())
    noticed = sum(verdicts[verdict] for verdict in NOTICED)
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
    parser.add_argument("--tests", action="append", default=[], help="as tests/rules; or all")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--quick", type=float, default=math.inf, help="seconds for each mutant")
    parser.add_argument("--full", action="store_true", help="with the full tier of the tests")
    parser.add_argument("--again", action="store_true", help="only what was not noticed")
    parser.add_argument("--report", action="store_true", help="only print what the log says")
    arguments = parser.parse_args()
    if arguments.report:
        report(list(read_log(arguments.log).values()))
        return
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory:
        roots = [copy_repository(Path(directory) / str(job)) for job in range(arguments.jobs)]
        recorded = arguments.log.with_suffix(".tests.jsonl")
        tier = ["--full"] if arguments.full else []
        tests = record_tests(roots, recorded, arguments.tests or ["tests/"], tier)
        known = read_log(arguments.log)
        if arguments.again:
            missing = list_unnoticed(known, roots[0])
        else:
            chosen = choose_mutants(arguments.sample, arguments.seed, arguments.module, roots[0])
            missing = [item for item in chosen if (*item[:2], item[2].key) not in known]
        deadline = time.monotonic() + 60 * arguments.minutes

        def work(root: Path, number: int) -> None:
            if time.monotonic() < deadline:
                module, digest, mutant = missing[number]
                names = {"module": module, "digest": digest, "key": mutant.key}
                outcome = try_mutant(root, module, mutant, tests, arguments.quick, tier)
                append_entry(arguments.log, {**names, **mutant._asdict(), **outcome})
                print(
                    f"{outcome['verdict']:9} {outcome['seconds']:6} s {module}:{mutant.line} "
                    f"{mutant.operator}: {mutant.before[:60]!r} -> {mutant.after[:60]!r}",
                    flush=True,
                )

        share_work(roots, len(missing), work)
        report(list(read_log(arguments.log).values()))


if __name__ == "__main__":
    main()
