"""Whether QEfficient's exports meet what docs/qefficient.md says: `python bench/qefficient.py`.

For each kind of `qefficient_kinds.py` QEfficient exports a tiny model with random weights twice,
without a token and with it, each into a cache of its own, and compiles it up to the compiler.
Then four checks:

  twin      the plain export, renamed, is QEfficient's own export with the token
  seed      after --seed-cache QEfficient finds the renamed export, and does not export
  merge     windows that were renamed are merged by QEfficient, and are its own merge

Needs QEfficient (https://github.com/quic/efficient-transformers) with what its pyproject.toml
pins, in the environment of --python; no device and no compiler. The results of docs/qefficient.md
name the commit: give it with --commit.

Exit code: 0 everything holds; 1 a check does not; 2 something could not be run.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import onnx
from machine import describe
from qefficient_kinds import KINDS, Kind

BENCH = Path(__file__).resolve().parent
sys.path.insert(0, str(BENCH.parent))

import onnxkvrename  # noqa: E402

TOKEN = "VLLM"


class NotRunError(Exception):
    """QEfficient could not do its part, so nothing is known."""


class Worker:
    """A process with QEfficient in it, which takes long to load; after an error a new one."""

    def __init__(self, python: str, log: Path) -> None:
        self.command = [python, str(BENCH / "qefficient_export.py")]
        self.log = log
        self.process: subprocess.Popen[str] | None = None

    def ask(self, job: str, **request: Any) -> dict[str, Any]:
        """Return the answer to a request.

        Raises:
            NotRunError: QEfficient failed, or its process ended.
        """
        process = self.process = self.process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps({"job": job, **request}) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        answer: dict[str, Any] = json.loads(line) if line else {"error": last_line(self.log)}
        if "error" in answer:
            self.close()
            raise NotRunError(answer["error"].partition("\n")[0])
        return answer

    def close(self) -> None:
        """End the process."""
        if self.process is not None:
            self.process.communicate()
            self.process = None

    def _start(self) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        with self.log.open("a") as log:
            return subprocess.Popen(self.command, stdin=pipe, stdout=pipe, stderr=log, text=True)


class Exports(NamedTuple):
    """The two exports of a kind.

    Attributes:
        kind: The kind.
        work: The directory of everything; ``plain`` and ``twin`` in it are caches.
        worker: QEfficient.
        plain: The models without a token: one, or the encoder and the decoder.
        twin: The same models with the token.
    """

    kind: Kind
    work: Path
    worker: Worker
    plain: list[Path]
    twin: list[Path]

    def compile(self, token: str, cache: str, **request: Any) -> list[dict[str, Any]]:
        return compile_with(self.worker, self.kind, self.work, token, cache, **request)


class Outcome(NamedTuple):
    """What came out of one check; ``result`` is holds, differs or not run."""

    kind: str
    check: str
    result: str
    note: str = ""


def compile_with(
    worker: Worker, kind: Kind, work: Path, token: str, cache: str, *, may_export: bool = True
) -> list[dict[str, Any]]:
    """Let QEfficient compile a kind with a cache; return the commands for the compiler."""
    answer = worker.ask(
        "compile",
        config=dict(kind.config),
        load=dict(kind.load),
        compile={"prefill_seq_len": 8, "ctx_len": 32, **kind.compile},
        attributes=dict(kind.attributes),
        owner=kind.classes[0],
        loader=kind.classes[1],
        checkpoint=str(work / "checkpoint"),
        token=token,
        cache=str(work / cache),
        windows=str(work / f"{cache}-windows"),
        may_export=may_export,
    )
    commands: list[dict[str, Any]] = answer["commands"]
    return commands


def make_exports(worker: Worker, kind: Kind, work: Path) -> Exports:
    plain = compile_with(worker, kind, work, "", "plain")
    twin = compile_with(worker, kind, work, TOKEN, "twin")
    return Exports(
        kind,
        work,
        worker,
        [Path(command["model"]) for command in plain],
        [Path(command["model"]) for command in twin],
    )


def check_twin(exports: Exports) -> str:
    """Return what differs between renamed and own exports, empty for nothing."""
    return join(
        compare_models(twin, plain, exports.kind.is_varying)
        for plain, twin in zip(exports.plain, exports.twin, strict=True)
    )


def check_seed(exports: Exports) -> str:
    """Return where QEfficient does not find a seeded export, empty if it does."""
    commands = exports.compile(TOKEN, "plain", may_export=False)
    found = [Path(command["model"]) for command in commands]
    return join(
        "" if mine.parent.name == own.parent.name else f"it takes {mine}"
        for mine, own in zip(found, exports.twin, strict=True)
    )


def check_merge(exports: Exports) -> str:
    """Return what differs in a merge of renamed windows, empty for nothing."""
    renamed = exports.work / "renamed-windows"
    report = onnxkvrename.rename_all(exports.work / "plain-windows", TOKEN, directory=renamed)
    if report.failed:
        return "the windows cannot be renamed"
    (windows,) = {path.parents[1] for path in renamed.glob("**/layer_*/*.onnx")}
    merged = exports.worker.ask("merge", directory=str(windows.parent))["merged"]
    proof = onnxkvrename.verify(merged, token=TOKEN)
    errors = (each.message for each in proof.report.findings if each.severity == "error")
    return join(chain([compare_models(Path(merged), exports.twin[0], is_varying=True)], errors))


CHECKS: dict[str, Callable[[Exports], str]] = {
    "twin": check_twin,
    "seed": check_seed,
    "merge": check_merge,
}


def compare_models(renamed: Path, plain: Path, is_varying: bool) -> str:
    """Return how a model with the token differs from a renamed plain one, empty for not at all."""
    if not has_kv_buffers(plain):
        return "" if renamed.read_bytes() == plain.read_bytes() else f"{plain.name}: other bytes"
    if is_varying:
        expected = onnx.load_from_string(onnxkvrename.rename_bytes(plain.read_bytes(), TOKEN))
        return compare_names(onnx.load(renamed, load_external_data=False), expected)
    verified = onnxkvrename.verify(renamed, renamed_from=plain)
    assert verified.rename_proof is not None
    differences = [
        f"{finding.code} {finding.name} {finding.message}"
        for finding in verified.report.findings
        if finding.code == "KV121"
    ]
    for name in verified.rename_proof.data_files:
        if not filecmp.cmp(renamed.parent / name, plain.parent / name, shallow=False):
            differences.append(f"{name} differs")
    return join(differences)


def compare_names(model: onnx.ModelProto, expected: onnx.ModelProto) -> str:
    """Return whether inputs and outputs differ, by name, type and shape, in any order."""
    sides = [
        {value.SerializeToString(deterministic=True) for value in (*graph.input, *graph.output)}
        for graph in (model.graph, expected.graph)
    ]
    return "" if sides[0] == sides[1] else "inputs or outputs differ"


def has_kv_buffers(model: Path) -> bool:
    return bool(onnxkvrename.inspect(model).buffers)


def run_tool(*arguments: str) -> str:
    """Run onnxkvrename's command and return its stdout."""
    command = [sys.executable, "-m", "onnxkvrename", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=BENCH.parent)
    if done.returncode:
        raise RuntimeError(f"onnxkvrename {arguments[0]}: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def check_kind(worker: Worker, kind: Kind, work: Path) -> Iterator[Outcome]:
    """Make the exports of a kind, and yield what comes out of each check."""
    checks = {name: check for name, check in CHECKS.items() if name != "merge" or kind.layers}
    try:
        exports = make_exports(worker, kind, work)
        run_tool(str(work / "plain"), "--prefix", TOKEN, "--seed-cache", "-q")
    except (NotRunError, RuntimeError) as error:
        result = "not run" if isinstance(error, NotRunError) else "differs"
        yield from (Outcome(kind.name, name, result, str(error)) for name in checks)
        return
    for name, check in checks.items():
        try:
            note = check(exports)
        except (NotRunError, RuntimeError, onnxkvrename.KvRenameError) as error:
            note = str(error)
        yield Outcome(kind.name, name, "differs" if note else "holds", note)


def join(notes: Iterable[str]) -> str:
    return "; ".join(filter(None, notes))


def last_line(log: Path) -> str:
    lines = log.read_text("utf-8", "replace").split("\n")
    return next((line for line in reversed(lines) if line.strip()), "no message")


def print_table(outcomes: list[Outcome]) -> None:
    results = {(each.kind, each.check): each.result for each in outcomes}
    names = dict.fromkeys(each.kind for each in outcomes)
    width = max(map(len, names), default=0)
    print(f"{'':{width}}  {'  '.join(f'{check:8}' for check in CHECKS)}")
    for name in names:
        row = "  ".join(f"{results.get((name, check), '-'):8}" for check in CHECKS)
        print(f"{name:{width}}  {row}")
    for each in outcomes:
        if each.note:
            print(f"{each.kind}, {each.check}: {each.note}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", default=sys.executable, help="has QEfficient")
    parser.add_argument("--commit", default="not given", help="QEfficient's, for the record")
    parser.add_argument("--only", action="append", default=[], metavar="WORD", help="of a kind")
    parser.add_argument("--work", type=Path, help="keep everything here")
    parser.add_argument("--json", type=Path, help="write the results here")
    options = parser.parse_args()
    kinds = [
        kind
        for kind in KINDS
        if not options.only or any(word in kind.name for word in options.only)
    ]
    with tempfile.TemporaryDirectory() as temporary:
        work = (options.work or Path(temporary)).resolve()
        work.mkdir(parents=True, exist_ok=True)
        outcomes: list[Outcome] = []
        worker = Worker(options.python, work / "qefficient.log")
        try:
            if shutil.which(options.python) is None:
                raise NotRunError(f"there is no {options.python}")
            versions = worker.ask("describe")["versions"]
            for kind in kinds:
                place = work / kind.name.replace(", ", "-").replace(" ", "_")
                place.mkdir()
                for outcome in check_kind(worker, kind, place):
                    outcomes.append(outcome)
                    print(*outcome, sep="  ", file=sys.stderr)
        except NotRunError as error:
            print(f"not run: no QEfficient in {options.python}: {error}", file=sys.stderr)
            return 2
        finally:
            worker.close()
        print(", ".join(f"{name} {number}" for name, number in versions.items()))
        print_table(outcomes)
        if options.json:
            record = {
                "commit": options.commit,
                "versions": {**versions, "onnxkvrename": onnxkvrename.__version__},
                "machine": describe(work),
                "results": [outcome._asdict() for outcome in outcomes],
            }
            options.json.write_text(json.dumps(record, indent=2) + "\n", "utf-8")
    results = {outcome.result for outcome in outcomes}
    return 1 if "differs" in results else 2 if "not run" in results else 0


if __name__ == "__main__":
    sys.exit(main())
