"""Rules of the house: which package may know which, and what is promised in writing."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import NamedTuple

import pytest

import onnxkvrename
from onnxkvrename.errors import KvRenameError
from onnxkvrename.findings import CODES

PACKAGE = Path(onnxkvrename.__file__).parent
ROOT = Path(__file__).resolve().parent.parent
MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path.read_text("utf-8")
    for path in sorted(PACKAGE.rglob("*.py"))
}
OWN_MODULES = {f"onnxkvrename.{name}" for name in MODULES if "__" not in name}
ORDER = tuple(
    re.findall(r"^\| `(\w+)(?:/|\.py)` \|", (ROOT / "ARCHITECTURE.md").read_text("utf-8"), re.M)
)
"""The packages from the bottom to the top, as ARCHITECTURE.md lists them."""
APART = {"vllm", "verification", "handoff"}
"""Packages that do not know each other."""
HEAVY = {
    *("onnx", "onnx_graphsurgeon", "onnx_ir", "onnxruntime", "numpy", "rich", "google.protobuf"),
    *("ruamel", "jinja2", "markupsafe", "msgspec"),
}
UNUSED = ("layout", "vllm", "verification", "handoff", "sidecars")
"""Packages that a plain rename has no use for."""


@cache
def parse_module(name: str) -> ast.Module:
    return ast.parse(MODULES[name])


def list_trees() -> Iterator[tuple[str, ast.Module]]:
    """Yield all modules, by name; each is parsed when it is its turn."""
    return ((name, parse_module(name)) for name in MODULES)


def package_of(module: str) -> str:
    return module.partition(".")[0]


def imported_packages(tree: ast.AST) -> set[str]:
    """The packages that a module imports from, wherever in its text it does so."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names |= set(re.findall(r"^onnxkvrename\.[\w.]+$", node.value))
    inside = {name.split(".")[1] for name in names if name.startswith("onnxkvrename.")}
    return inside & set(ORDER)


@cache
def calls(tree: ast.AST) -> set[str]:
    """The functions that a module calls, as written."""
    return {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}


def test_the_architecture_lists_every_package() -> None:
    inside = {package_of(name) for name in MODULES} - {"__init__", "__main__"}
    assert inside == set(ORDER)


def test_imports_only_go_down_the_order_of_packages() -> None:
    wrong = {}
    for name, tree in list_trees():
        own = package_of(name)
        if "__" not in name:
            allowed = {own, *ORDER[: ORDER.index(own)]} - (APART - {own} if own in APART else set())
            wrong[name] = imported_packages(tree) - allowed
    assert {name: found for name, found in wrong.items() if found} == {}


def open_calls(tree: ast.AST) -> set[str]:
    forbidden = re.compile(
        r"open|io\.open|os\.(open|fdopen|write|replace|rename|link|symlink|unlink|remove|mkdir|makedirs)"
        r"|shutil\..*|.*\.(write_bytes|write_text|read_bytes|read_text|mkdir|unlink|touch)"
    )
    no_file = {"files.read_text", "super().write_text"}  # a resource, and a formatter of help
    return {call for call in calls(tree) - no_file if forbidden.fullmatch(call)}


def test_only_files_opens_and_changes_files() -> None:
    outside = {
        name: found
        for name, tree in list_trees()
        if package_of(name) != "files" and (found := open_calls(tree))
    }
    assert outside == {
        "cli.main": {"os.write"},  # stderr, where the modules that print cannot be loaded
        "cli.output": {"os.open"},  # os.devnull, for streams that broke or are closed
    }


def find_error_swallowers(tree: ast.AST) -> list[str]:
    """The calls that take a failed query of the disk for an answer, as written.

    ``os.path.isdir`` and its like say no where the disk fails; ``os.walk`` and ``glob`` leave
    out what they cannot list. ``files/read.py`` tells what is there or fails.
    """
    forbidden = re.compile(
        r"os\.path\.(exists|lexists|isfile|isdir|islink|ismount|realpath|samefile)"
        r"|(?!entry\.).*\.(exists|is_file|is_dir|is_symlink|resolve|glob|rglob)"
        r"|os\.walk|suppress\(.*\bOSError\b.*\)"
    )
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    texts = [
        ast.unparse(
            node if isinstance(node.func, ast.Name) and node.func.id == "suppress" else node.func
        )
        for node in nodes
    ]
    return sorted(text for text in texts if forbidden.fullmatch(text))


MAY_SWALLOW_ERRORS = {
    "__main__": 2,  # stderr cannot be written: there is no other place to say so
    "cli.main": 1,  # what a mistyped word may mean, and what a shell completes
    "report.progress_bars": 3,  # nor is there one for a bar, nor for what draws it
    "renaming.parallel": 1,  # asks the kernel to end a worker with its parent, if it can
    "files.copy": 1,  # a larger pipe, if the system allows one
    "files.read": 2,  # os.path.realpath, which is strict; close
    "files.staged": 3,  # what workers left in a new directory; an undo; clean-up
    "files.targets": 1,  # second names that other runs keep; without them, it is refused
    "files.temp_file": 6,  # /proc and O_TMPFILE, else a named file; leftovers, as far as possible
}
"""How many such calls a module may have, each with its reason beside it."""


def test_no_failed_query_of_the_disk_is_taken_for_an_answer() -> None:
    swallowers = {name: find_error_swallowers(tree) for name, tree in list_trees()}
    assert {
        name: found
        for name, found in swallowers.items()
        if len(found) > MAY_SWALLOW_ERRORS.get(name, 0)
    } == {}


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("os.path.isdir(path)", 1),
        ("path.parent.is_dir()", 1),
        ("path.resolve()", 1),
        ("with suppress(OSError), open(path): ...", 1),
        ("with suppress(KeyError, OSError): ...", 1),
        ("with suppress(FileNotFoundError): ...", 0),
        ("entry.is_dir(follow_symlinks=False)", 0),  # tells errors, unlike pathlib
        ("read_status(path)", 0),
    ],
)
def test_the_calls_that_swallow_errors_are_known(text: str, count: int) -> None:
    assert len(find_error_swallowers(ast.parse(text))) == count


def test_one_module_prints_and_none_exits() -> None:
    names = {"print", "click.echo", "echo", "sys.exit", "exit", "quit", "os._exit"}
    found = {name: calls(tree) & names for name, tree in list_trees() if calls(tree) & names}
    assert found == {"cli.output": {"click.echo"}, "__main__": {"sys.exit"}}


def find_heavy(modules: Iterable[str]) -> set[str]:
    """The heavy modules of other packages among these."""
    return {name for name in modules if any(f"{name}.".startswith(f"{h}.") for h in HEAVY)}


def check_light(modules: list[str]) -> None:
    """A plain rename loads no heavy module, and no package that it has no use for."""
    own = {name.removeprefix("onnxkvrename.") for name in modules if name in OWN_MODULES}
    assert "renaming.run" in own
    assert {name for name in own if name.startswith("api.")} == {"api.arguments", "api.files"}
    assert find_heavy(modules) == set()
    assert {package_of(name) for name in own} & set(UNUSED) == set()


def test_to_import_the_package_is_cheap() -> None:
    script = "import sys, onnxkvrename; print(*sys.modules)"
    command = [sys.executable, "-c", script]
    modules = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert "onnxkvrename" in modules
    assert find_heavy(modules) == set()
    assert {"click", "onnxkvrename.cli", "onnxkvrename.report"} & set(modules) == set()


def test_nothing_is_loaded_before_the_program_can_catch_an_interrupt() -> None:
    script = "import sys; known = {*sys.modules}; import onnxkvrename.__main__;"
    script += "print(*{*sys.modules} - known)"
    command = [sys.executable, "-c", script]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert set(loaded) <= {"__future__", "gc", "onnxkvrename", "onnxkvrename.__main__"}


def test_a_real_rename_loads_nothing_heavy(decoder: Path, renamed: bytes) -> None:
    script = (
        "import sys; from onnxkvrename.cli.main import main; code = main(sys.argv[1:]);"
        "print(code, *sys.modules, file=sys.stderr)"
    )
    process = subprocess.run(
        [sys.executable, "-c", script, str(decoder), "--prefix", "VLLM", "-q"],
        cwd=decoder.parent,
        capture_output=True,
        text=True,
    )
    code, *modules = process.stderr.split()
    assert (code, process.stdout) == ("0", "")
    assert decoder.read_bytes() == renamed
    check_light(modules)


def test_the_console_script_loads_nothing_heavy(decoder: Path, spawn) -> None:
    process = spawn(decoder, "--prefix", "VLLM", env={"PYTHONPROFILEIMPORTTIME": "1"})
    assert process.returncode == 0
    assert process.stdout.startswith("past_key.0 -> past_key.0_VLLM\n")
    check_light([line.rpartition("|")[2].strip() for line in process.stderr.splitlines()])


def asserted_codes(tree: ast.AST) -> set[str]:
    """The codes that the tests of a module assert, themselves or by a helper that asserts, and
    those among the cases of a parametrization.

    Neither a comment nor a string somewhere counts, nor an assertion that a code is absent.
    """
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    helpers = {
        function.name
        for function in functions
        if any(isinstance(node, ast.Assert) for node in ast.walk(function))
    }
    expressions: list[ast.expr] = []
    for test in (function for function in functions if function.name.startswith("test_")):
        for decorator in test.decorator_list:
            if ast.unparse(decorator).startswith("pytest.mark.parametrize("):
                expressions.append(decorator)
        for node in ast.walk(test):
            if isinstance(node, ast.Assert):
                expressions += positive_parts(node.test)
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in helpers:
                expressions += node.args
    texts = (
        constant.value
        for expression in expressions
        for constant in ast.walk(expression)
        if isinstance(constant, ast.Constant) and isinstance(constant.value, str)
    )
    return {code for text in texts for code in re.findall(r"KV[0-9]{3}", text)}


def positive_parts(test: ast.expr) -> list[ast.expr]:
    """The parts of a condition that say what is, and not what is not."""
    if isinstance(test, ast.BoolOp):
        return [part for value in test.values for part in positive_parts(value)]
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return []
    if isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.NotIn | ast.NotEq):
        return []
    return [test]


def test_every_code_has_a_test() -> None:
    own = Path(__file__).resolve()
    tests = [path for path in own.parent.rglob("test_*.py") if path.resolve() != own]
    texts = (path.read_text("utf-8") for path in tests)
    trees = (ast.parse(text) for text in texts if re.search(r"KV[0-9]{3}", text))
    tested = {code for tree in trees for code in asserted_codes(tree)}
    assert CODES.keys() - tested == set()


@pytest.mark.parametrize(
    ("text", "codes"),
    [
        ("def test_it(): assert code == 'KV101'", {"KV101"}),
        ("def test_it(): assert a and 'error KV101: ' in err", {"KV101"}),
        ("@pytest.mark.parametrize('code', ['KV101'])\ndef test_it(code): ...", {"KV101"}),
        ("def only(code): assert code in found\ndef test_it(): only('KV101')", {"KV101"}),
        ("def only(code): found(code)\ndef test_it(): only('KV101')", set()),
        ("def unused(): assert code == 'KV101'", set()),
        ("def test_it(): ...  # KV101", set()),
        ("def test_it():\n    'KV101 is tested elsewhere.'", set()),
        ("EXPECTED = 'KV101'", set()),
        ("def test_it(): assert 'KV101' not in err", set()),
        ("def test_it(): assert not 'KV101' in err and code != 'KV102'", set()),
    ],
)
def test_only_what_is_asserted_is_tested(text: str, codes: set[str]) -> None:
    assert asserted_codes(ast.parse(text)) == codes


def test_every_file_that_contributing_names_is_there() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    named = set(re.findall(r"`([\w./-]+(?:\.\w+|/))`", text)) - {"../shared/exports"}
    files = {path for path in named if "NAME" not in path and "/" in path}
    assert len(files) > 12
    assert [
        path for path in files if not ((ROOT / path).exists() or (PACKAGE / path).exists())
    ] == []


def test_the_changelog_knows_this_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text("utf-8")
    assert re.search(rf"^## {re.escape(onnxkvrename.__version__)}\b", changelog, re.MULTILINE)


def has_own_docstring(value: type | FunctionType) -> bool:
    """A named tuple and a dataclass have one that Python makes: ``Name(field, ...)``."""
    docstring = vars(value).get("__doc__") if isinstance(value, type) else value.__doc__
    return bool(docstring) and not docstring.startswith(f"{value.__name__}(")


def test_what_the_package_offers_is_there_and_documented() -> None:
    offered = {name: getattr(onnxkvrename, name) for name in onnxkvrename.__all__}
    documented = [name for name, value in offered.items() if isinstance(value, type | FunctionType)]
    assert offered.keys() - documented == {"__version__"}
    assert [name for name in documented if not has_own_docstring(offered[name])] == []
    assert (PACKAGE / "py.typed").exists()


def test_a_docstring_that_python_makes_is_none() -> None:
    class Bare(NamedTuple):
        field: int

    @dataclass
    class Plain:
        field: int

    class Inherited(KvRenameError):
        pass

    class Documented(NamedTuple):
        """A field."""

        field: int

    types = (Bare, Plain, Inherited, Documented)
    assert [has_own_docstring(value) for value in types] == [False, False, False, True]
