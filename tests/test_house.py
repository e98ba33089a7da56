"""Rules of the house: which package may know which, and what is promised in writing."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

import onnxkvrename
from onnxkvrename.cli import (
    check_consumer,
    compare,
    custom_io,
    inspect,
    manifest,
    rename,
    verify,
)
from onnxkvrename.cli import main as cli
from onnxkvrename.findings import CODES

PACKAGE = Path(onnxkvrename.__file__).parent
ROOT = Path(__file__).resolve().parent.parent
MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path.read_text("utf-8")
    for path in sorted(PACKAGE.rglob("*.py"))
}
TREES = {name: ast.parse(text) for name, text in MODULES.items()}
ORDER = tuple(
    re.findall(r"^\| `(\w+)(?:/|\.py)` \|", (ROOT / "ARCHITECTURE.md").read_text("utf-8"), re.M)
)
"""The packages from the bottom to the top, as ARCHITECTURE.md lists them."""
APART = {"vllm", "verification", "handoff"}
"""Packages that do not know each other."""
HEAVY = {"onnx", "onnx_graphsurgeon", "onnxruntime", "numpy", "rich", "google.protobuf", "ruamel"}
UNUSED = ("layout", "vllm", "verification", "handoff", "sidecars")
"""Packages that a plain rename has no use for."""
COMMANDS = {
    "": rename.command,
    " verify": verify.command,
    " inspect": inspect.command,
    " custom-io": custom_io.command,
    " manifest": manifest.command,
    " check-consumer": check_consumer.command,
    " compare": compare.command,
}


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


def calls(tree: ast.AST) -> set[str]:
    """The functions that a module calls, as written."""
    return {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}


def test_the_architecture_lists_every_package() -> None:
    inside = {package_of(name) for name in MODULES} - {"__init__", "__main__"}
    assert inside == set(ORDER)


@pytest.mark.parametrize("module", [name for name in MODULES if "__" not in name])
def test_imports_only_go_down_the_order_of_packages(module: str) -> None:
    own = package_of(module)
    allowed = {own, *ORDER[: ORDER.index(own)]} - (APART - {own} if own in APART else set())
    assert imported_packages(TREES[module]) <= allowed


def test_no_folder_is_too_full_to_be_read() -> None:
    folders = [PACKAGE, *(path for path in PACKAGE.rglob("*") if path.is_dir())]
    full = {
        folder: files
        for folder in folders
        if len(files := [path for path in folder.glob("*.py") if path.stem != "__init__"]) > 14
    }
    assert full == {}


def open_calls(tree: ast.AST) -> set[str]:
    forbidden = re.compile(
        r"open|io\.open|os\.(open|fdopen|write|replace|rename|link|symlink|unlink|remove|mkdir|makedirs)"
        r"|shutil\..*|.*\.(write_bytes|write_text|read_bytes|read_text|mkdir|unlink|touch)"
    )
    return {call for call in calls(tree) - {"files.read_text"} if forbidden.fullmatch(call)}


def test_only_storage_opens_and_changes_files() -> None:
    outside = {
        name: found
        for name, tree in TREES.items()
        if package_of(name) != "storage" and (found := open_calls(tree))
    }
    assert outside == {"cli.output": {"open"}}  # os.devnull, for a stdout that broke


def test_one_module_prints_and_none_exits() -> None:
    names = {"print", "click.echo", "echo", "sys.exit", "exit", "quit", "os._exit"}
    found = {name: calls(tree) & names for name, tree in TREES.items() if calls(tree) & names}
    assert found == {"cli.output": {"click.echo"}, "__main__": {"sys.exit"}}


@pytest.mark.parametrize("module", MODULES)
def test_modules_and_functions_fit_on_a_page(module: str) -> None:
    assert len(MODULES[module].splitlines()) <= 450
    long = [
        node.name
        for node in ast.walk(TREES[module])
        if isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.lineno >= 70
    ]
    assert long == []


def loaded(modules: Iterator[str] | list[str]) -> tuple[set[str], set[str]]:
    """The modules of the package, and the heavy ones of others, among those that are loaded."""
    names = set(modules)
    own = {name for name in names if name.split(".")[0] == "onnxkvrename"}
    return own, {name for name in names if any(f"{name}.".startswith(f"{h}.") for h in HEAVY)}


def check_light(modules: list[str]) -> None:
    own, heavy = loaded(modules)
    assert "onnxkvrename.renaming.run" in own
    assert heavy == set()
    assert [name for name in own if name.count(".") and name.split(".")[1] in UNUSED] == []


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


def readme() -> str:
    return (ROOT / "README.md").read_text("utf-8")


def test_the_readme_lists_the_codes() -> None:
    rows = re.findall(r"^\| (KV[0-9]{3}) \| (\w+) \| (.+) \|$", readme(), re.MULTILINE)
    assert rows == [(code, *meaning) for code, meaning in CODES.items()]


def strings(path: Path) -> Iterator[str]:
    """The string constants of a test module, docstrings apart: what a comment says is no test."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_every_code_has_a_test() -> None:
    own = Path(__file__).resolve()
    tests = [path for path in own.parent.rglob("test_*.py") if path.resolve() != own]
    text = "\n".join(text for path in tests for text in strings(path))
    assert [code for code in CODES if code not in text] == []


def test_every_command_is_known_here() -> None:
    assert tuple(COMMANDS) == ("", *(f" {name}" for name in cli.COMMANDS[1:]))


@pytest.mark.parametrize("name", COMMANDS)
def test_the_readme_shows_the_help(name: str) -> None:
    block = rf"<!-- help{name} -->\n```text\n(.*?)```\n<!-- /help{name} -->"
    shown = re.search(block, readme(), re.DOTALL)
    assert shown is not None
    how = {"prog_name": f"onnxkvrename{name}", "terminal_width": 80}
    assert shown[1] == CliRunner().invoke(COMMANDS[name], ["--help"], **how).output


def test_the_changelog_knows_this_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text("utf-8")
    assert re.search(rf"^## {re.escape(onnxkvrename.__version__)}\b", changelog, re.MULTILINE)


def test_what_the_package_offers_is_there_and_documented() -> None:
    for name in onnxkvrename.__all__:
        offered = getattr(onnxkvrename, name)
        assert name == "__version__" or not (offered.__doc__ or "").startswith(f"{name}(")
        assert offered.__doc__
    assert (PACKAGE / "py.typed").exists()
