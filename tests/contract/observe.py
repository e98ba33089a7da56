"""Run a row of the contract and observe what a user could: exit code, codes, JSON, files.

Nothing here knows a module of the program. It is run through the console script that its
distribution declares, in this process, and everything else is read from what it leaves behind.
"""

from __future__ import annotations

import gc
import hashlib
import io
import json
import os
import re
import shlex
import shutil
import signal
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib.metadata import distribution
from pathlib import Path
from typing import Any, NamedTuple

from qefficient_exports import write_export

TESTS = Path(__file__).resolve().parents[1]
REPOSITORY = TESTS.parent
SHARED = REPOSITORY.parent / "shared"
ROOTS = {
    "exports": SHARED / "exports",
    "exports-other": SHARED / "exports-other",
}
"""Where a path in a row begins that is not one of a fixture."""

CODE = re.compile(r"\bKV\d{3}\b")
OPTION = re.compile(r"^  ((?:-\w, )?--[a-z-]+(?:, --[a-z-]+)*)(.*(?:\n    .*)*)", re.MULTILINE)
VALUES = re.compile(
    r"\[([\w.-]+(?:\|[\w.-]+)+)\]|[:(] ?((?:[a-z\d_-]+, )+[a-z\d_-]+)(?=$|[.;)]| \()"
)
COMMAND = re.compile(r"^  ([a-z][a-z-]*)  ", re.MULTILINE)
HIDDEN = re.compile(r"\.onnxkvrename-[\w-]+")
MAPS = ("sizes", "dims", "names", "name_map")
"""Objects whose keys are data, not fields."""
VOLATILE = ("version", "leftovers")
"""Fields that a release changes, and files of a killed run."""
NEW = {"verify": ("target", "sets")}
"""Fields that came after rows were recorded, which do not depend on them where they are empty."""
SENTENCES = {"compare": ("notes",), "rename": ("pending", "fix")}
"""Fields that say for people what other fields say for programs: no row depends on them."""
PAGES = (".html",)
"""Written for people: that such a file is there is promised, its bytes are not."""
ENVIRONMENT = {
    "PATH": os.environ.get("PATH", os.defpath),
    "COLUMNS": "80",
    "LC_ALL": "C.UTF-8",
    "NO_COLOR": "1",
    "TERM": "dumb",
    "TZ": "UTC",
}

Shape = dict[str, set[str]]


class Answer(NamedTuple):
    """Exit code and output of a command line."""

    code: int
    out: str
    err: str


@dataclass(frozen=True)
class Row:
    """What is done, as written in the table; what came of it follows it there.

    Attributes:
        why: The number of the promise that the row serves, as docs/scope.md lists it.
    """

    name: str
    run: str
    why: str
    given: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    is_slow: bool = False
    keeps_stdout: bool = False

    @cached_property
    def argv(self) -> list[str]:
        """The arguments after the name of the program."""
        return shlex.split(self.run)

    @property
    def roots(self) -> list[str]:
        """The real exports that are copied."""
        return [root for root in ROOTS if f"copy {root}/" in " ".join(self.given)]

    @property
    def is_full(self) -> bool:
        """Whether only the full tier runs it."""
        return self.is_slow or bool(self.roots or "onnxruntime" in self.needs)

    def find_absent(self) -> str:
        """Return what this row needs and this machine lacks, or nothing."""
        if not hasattr(os, "fork") and any(line.startswith("kill ") for line in self.given):
            return "os.fork"
        for need in (*self.roots, *self.needs):
            if need in ROOTS and not ROOTS[need].is_dir():
                return f"the real exports in ../shared/{need}"
            if need == "onnxruntime":
                try:
                    distribution(need)
                except ImportError:
                    return need
        return ""


@dataclass
class Observation:
    """What came of a row."""

    lines: list[str] = field(default_factory=list)
    schema: str = ""
    shape: Shape = field(default_factory=dict)


def load_console_script() -> Any:
    """Load the function that the installed distribution declares as its console script."""
    scripts = distribution("onnxkvrename").entry_points.select(group="console_scripts")
    return next(iter(scripts)).load()


def call(argv: list[str]) -> Answer:
    """Run a command line as its process would, in this one."""
    run = load_console_script()
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", newline="", write_through=True)
    err = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", newline="", write_through=True)
    before = sys.argv
    handlers = {name: signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM)}
    sys.argv = ["onnxkvrename", *argv]
    code: Any = 0
    try:
        with redirect_stdout(out), redirect_stderr(err):
            run()
    except SystemExit as end:
        code = end.code or 0
    finally:
        sys.argv = before
        gc.unfreeze()
        for name, handler in handlers.items():
            signal.signal(name, handler)
    texts = [stream.buffer.getvalue().decode("utf-8", "replace") for stream in (out, err)]
    return Answer(int(code), *texts)


@contextmanager
def enter(directory: Path, variables: Mapping[str, str]) -> Iterator[None]:
    """Work in a directory, in an environment without anything of this machine's."""
    before, outside = dict(os.environ), Path.cwd()
    home = directory.parent / "home"
    home.mkdir(exist_ok=True)
    os.environ.clear()
    os.environ.update(ENVIRONMENT, HOME=str(home), **variables)
    os.chdir(directory)
    try:
        yield
    finally:
        os.chdir(outside)
        os.environ.clear()
        os.environ.update(before)


def observe(row: Row, directory: Path) -> Observation:
    """Do what a row says below a new directory, and say what came of it."""
    work = directory / "work"
    work.mkdir(parents=True)
    variables = dict(line[4:].split("=", 1) for line in row.given if line.startswith("env "))
    with enter(work, variables):
        for line in row.given:
            prepare(line)
        before = _read_files()
        answer = call(row.argv)
        after = _read_files()
    seen = Observation([f"exit {answer.code}"])
    _observe_output(row, answer, str(work), seen)
    seen.lines += _compare_files(before, after)
    if "Traceback" in answer.out + answer.err or "a bug in onnxkvrename" in answer.err:
        seen.lines.append("bug")
    left = [path for path in (directory / "home").rglob("*") if path.is_file()]
    seen.lines += [f"home {path.relative_to(directory)}" for path in sorted(left)]
    return seen


# ---- what is given ----


def prepare(line: str) -> None:
    """Do what a line of a row says before its command runs."""
    verb, *words = shlex.split(line)
    if verb == "copy":
        _copy(words[0], Path(words[-1]))
    elif verb == "write":
        _make_parent(words[0]).write_bytes(words[1].replace("\\n", "\n").encode())
    elif verb == "cut":
        os.truncate(words[0], int(words[1]))
    elif verb == "link":
        _make_parent(words[1]).symlink_to(words[0])
    elif verb == "hardlink":
        os.link(words[0], _make_parent(words[1]))
    elif verb == "mode":
        os.chmod(words[0], int(words[1], 8))
    elif verb == "mkdir":
        Path(words[0]).mkdir(parents=True)
    elif verb == "remove":
        Path(words[0]).unlink()
    elif verb == "replace":
        path = Path(words[0])
        path.write_bytes(path.read_bytes().replace(words[1].encode(), words[2].encode()))
    elif verb == "export":
        write_export(Path(words[1]), words[0], *words[2:])
    elif verb == "kv":
        call(words)
    elif verb == "save":
        Path(words[0]).write_text(call(words[1:]).out, encoding="utf-8")
    elif verb == "kill":
        _kill_halfway(words)
    elif verb != "env":
        raise ValueError(f"no such line in a row: {line}")


def _make_parent(name: str) -> Path:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def find_source(name: str) -> Path:
    """Return where a file or directory is that a row names: a fixture, or a real export."""
    root, _, rest = name.partition("/")
    return ROOTS[root] / rest if root in ROOTS else REPOSITORY / "fixtures" / name


def _copy(name: str, target: Path) -> None:
    source = find_source(name)
    if source.is_dir():
        shutil.copytree(source, target, copy_function=shutil.copyfile, dirs_exist_ok=True)
    else:
        shutil.copyfile(source, _make_parent(str(target)))


def _kill_halfway(argv: list[str]) -> None:
    """Run a command in a child that dies at once when some models have changed, and others not."""
    before = {path: path.read_bytes() for path in Path().rglob("*.onnx")}
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        if os.WEXITSTATUS(status) != 99:
            raise AssertionError(f"not killed halfway: {argv}")
        return
    is_busy = False

    def die_halfway(event: str, _: Any) -> None:
        nonlocal is_busy
        if is_busy or not event.startswith(("os.", "open", "shutil.")):
            return
        is_busy = True
        there = [path for path in before if path.is_file()]
        changed = sum(path.read_bytes() != before[path] for path in there)
        if 0 < changed < len(before):
            os._exit(99)
        is_busy = False

    sys.addaudithook(die_halfway)
    try:
        call(argv)
    finally:
        os._exit(1)


# ---- what is observed ----


def _observe_output(row: Row, answer: Answer, place: str, seen: Observation) -> None:
    """Add the codes, the JSON and what else is promised of the output."""
    document = _leave_out(_read_json(answer.out))
    if row.argv[-1:] == ["--help"]:
        seen.lines += _list_help(answer.out)
    if document is None:
        codes = sorted(set(CODE.findall(answer.out + answer.err)))
        seen.lines += [f"codes {' '.join(codes)}"] if codes else []
    else:
        found = Counter(_find_codes(document))
        seen.lines += [
            f"{severity} {code} {found[severity, code]}" for severity, code in sorted(found)
        ]
        seen.schema, seen.shape = _name_schema(document), measure_shape(document)
        seen.lines.append(f"facts {digest_facts(document, place)}")
    if row.keeps_stdout:
        text = answer.out.replace(place, ".")
        seen.lines.append(f"stdout {text.count(chr(10))} lines {digest(text.encode())}")


def _list_help(text: str) -> Iterator[str]:
    """List the commands, options and values of options that a help page names."""
    for command in COMMAND.findall(text):
        yield f"command {command}"
    for names, rest in OPTION.findall(text):
        yield f"option {names}"
        # A hyphen at the end of a line belongs to a value.
        found = VALUES.search(re.sub(r"\s+", " ", re.sub(r"-\n +", "-", rest)))
        if found:
            values = (found[1] or found[2]).replace("|", ", ")
            yield f"values {names.rpartition(', ')[2]}: {values}"


def _read_json(text: str) -> Any:
    if not text.startswith(("{", "[")):
        return None
    try:
        return json.loads(text)
    except ValueError:
        return None


def _leave_out(document: Any) -> Any:
    """Return a document without its sentences, and without fields that came later and are empty."""
    if not isinstance(document, dict):
        return document
    command = str(document.get("command"))
    sentences, new = SENTENCES.get(command, ()), NEW.get(command, ())
    kept = {
        key: value
        for key, value in document.items()
        if key not in sentences and (value or key not in new)
    }
    if isinstance(kept.get("models"), list):
        kept["models"] = [
            {key: value for key, value in model.items() if key not in sentences}
            if isinstance(model, dict)
            else model
            for model in kept["models"]
        ]
    return kept


def _name_schema(document: Any) -> str:
    if not isinstance(document, dict):
        return "list"
    name = str(document.get("schema", "object"))
    return name.rpartition("onnxkvrename.")[2].replace("/", "-")


def _find_codes(value: Any) -> Iterator[tuple[str, str]]:
    """Find the findings in a document: severity and code."""
    if isinstance(value, list):
        for item in value:
            yield from _find_codes(item)
    elif isinstance(value, dict):
        code, severity = value.get("code"), value.get("severity")
        if severity and isinstance(code, str) and CODE.fullmatch(code):
            yield str(severity), code
        for item in value.values():
            yield from _find_codes(item)


def measure_shape(document: Any) -> Shape:
    """Measure which paths a document has, and what is there: a type, null, empty, or missing."""
    shape: Shape = defaultdict(set)
    objects: dict[str, list[dict[str, Any]]] = defaultdict(list)

    def walk(value: Any, path: str) -> None:
        if isinstance(value, dict) and path.rpartition(".")[2] not in MAPS:
            shape[path].add("object")
            objects[path].append(value)
            for key, item in value.items():
                walk(item, f"{path}.{key}" if path else key)
        elif isinstance(value, dict):
            shape[path].add("map" if value else "empty")
        elif isinstance(value, list):
            shape[path].add("list" if value else "empty")
            for item in value:
                walk(item, f"{path}[]")
        else:
            kind = {type(None): "null", float: "number", int: "number", bool: "bool"}
            shape[path].add(kind.get(type(value), "text"))

    walk(document, "")
    for path, found in objects.items():
        for key in set().union(*found):
            if any(key not in each for each in found):
                shape[f"{path}.{key}" if path else key].add("missing")
    del shape[""]
    return dict(shape)


def digest_facts(document: Any, place: str) -> str:
    """Return a digest of all values of a document but its sentences and what a release changes."""

    def strip(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: strip(item) for key, item in value.items() if key not in VOLATILE}
        if isinstance(value, list):
            return [strip(item) for item in value]
        if isinstance(value, str):
            return (
                "a sentence" if value.count(" ") > 1 else HIDDEN.sub("", value.replace(place, "."))
            )
        return value

    return digest(json.dumps(strip(document), sort_keys=True).encode())


def digest(content: bytes) -> str:
    """Return the beginning of a SHA-256: enough to notice a change, short enough to read."""
    return hashlib.sha256(content).hexdigest()[:16]


def _read_files() -> dict[str, str]:
    """Describe each file here; hidden ones of a run that was killed are one entry."""
    found = {}
    for path in sorted(Path().rglob("*")):
        hidden = any(part.startswith(".") for part in path.parts)
        if path.is_symlink():
            found[str(path)] = f"link {os.readlink(path)}"
        elif path.is_file():
            name = str(path.parent / "(hidden)") if hidden else str(path)
            found[name] = "" if hidden else _describe_file(path)
    return found


def _describe_file(path: Path) -> str:
    content = path.read_bytes()
    if path.suffix in PAGES:
        return "a page"
    found = digest(content)
    twin = list_known_models().get(found)
    return f"is {twin}" if twin else found


@cache
def list_known_models() -> dict[str, str]:
    """List fixtures and real exports by their digests, to tell a reader what a file is."""
    roots = {"": REPOSITORY / "fixtures", **{f"{name}/": root for name, root in ROOTS.items()}}
    return {
        digest(path.read_bytes()): f"{name}{path.relative_to(root)}"
        for name, root in reversed(roots.items())
        for path in sorted(root.rglob("*.onnx"), reverse=True)
    }


def _compare_files(before: dict[str, str], after: dict[str, str]) -> Iterable[str]:
    """Say which files are new, changed or gone."""
    for name in sorted(before | after):
        if name not in before:
            yield f"new {name}: {after[name]}"
        elif name not in after:
            yield f"gone {name}"
        elif before[name] != after[name]:
            yield f"changed {name}: {after[name]}"
