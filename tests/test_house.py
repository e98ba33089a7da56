"""Rules of the house: who may touch what, and what is promised in writing."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import onnxkvrename
from onnxkvrename import (
    cli,
    command_checkconsumer,
    command_compare,
    command_customio,
    command_inspect,
    command_manifest,
    command_rename,
    command_verify,
)
from onnxkvrename.checking import CODES

PACKAGE = Path(onnxkvrename.__file__).parent
ROOT = Path(__file__).resolve().parent.parent
LAYERS = (
    "errors",
    "signature",
    "wire",
    "messages",
    "places",
    "stamps",
    "weighing",
    "patterns",
    "rules",
    "planning",
    "checking",
    "comparing",
    "kinds",
    "sizing",
    "layouts",
    "pages",
    "aligning",
    "uniformity",
    "packing",
    "grouping",
    "nixl",
    "allocation",
    "strides",
    "projecting",
    "targets",
    "consuming",
    "target_vllm_qaic",
    "selectors",
    "windows",
    "transfer",
    "rehearsing",
    "pairing",
    "sharding",
    "sides",
    "outcomes",
    "handoff",
    "exportcache",
    "spans",
    "yamltext",
    "jsontext",
    "customio",
    "nodeprecision",
    "batchio",
    "compileparams",
    "specializations",
    "sidecars",
    "files",
    "copying",
    "drafts",
    "locks",
    "changeset",
    "externaldata",
    "onnxfile",
    "weightless",
    "operators",
    "origins",
    "bodies",
    "tracing",
    "dataflow",
    "soundness",
    "sessions",
    "retention",
    "rulesfile",
    "results",
    "verifying",
    "destination",
    "discovery",
    "companions",
    "seeding",
    "following",
    "examining",
    "spreading",
    "writing",
    "judging",
    "running",
    "reporting",
    "manifest",
    "gathering",
    "ledger",
    "forecast",
    "anatomy",
    "verdicts",
    "outlook",
    "accounts",
    "terminal",
    "kvmap",
    "pictures",
    "console",
    "arguments",
    "command_rename",
    "command_verify",
    "command_inspect",
    "command_customio",
    "command_manifest",
    "command_checkconsumer",
    "command_compare",
    "cli",
)
"""From the bottom to the top: a module imports only those before it."""
TREES = {
    path.stem: ast.parse(path.read_text("utf-8"))
    for path in PACKAGE.glob("*.py")
    if not path.stem.startswith("__")
}
PURE = (
    {"errors", "signature", "wire", "messages", "places", "rules", "planning", "checking"}
    | {"comparing", "windows", "exportcache", "reporting", "kinds", "weighing"}
    | {"operators", "origins", "spans", "yamltext", "jsontext", "customio"}
    | {"nodeprecision", "batchio", "compileparams", "specializations", "sidecars"}
    | {"stamps", "sizing", "layouts", "consuming", "target_vllm_qaic", "selectors", "manifest"}
    | {"ledger", "forecast"}
    | {"transfer", "rehearsing", "pairing", "sharding", "sides", "outcomes", "handoff", "outlook"}
    | {"accounts"}
    | {"pages", "aligning", "uniformity", "packing", "grouping"}
    | {"nixl", "allocation", "strides", "projecting"}
)  # fmt: skip
DISK = {"files", "copying", "drafts", "locks", "changeset"}
HEAVY = {"onnx", "onnx_graphsurgeon", "onnxruntime", "numpy", "rich", "google", "google.protobuf"}
HEAVY |= {"ruamel", "ruamel.yaml"}
LATER = (
    *("verifying", "dataflow", "soundness", "retention", "verdicts", "anatomy", "kvmap"),
    *("pictures", "command_verify", "command_inspect"),
    *("following", "sidecars", "spans", "yamltext", "jsontext", "customio", "command_customio"),
    *("kinds", "sizing", "layouts", "gathering", "specializations"),
    *("manifest", "ledger", "forecast", "command_manifest"),
    *("targets", "consuming", "target_vllm_qaic", "selectors", "command_checkconsumer"),
    *("transfer", "rehearsing", "pairing", "sharding", "sides", "outcomes", "handoff"),
    *("outlook", "accounts", "command_compare"),
    *("pages", "aligning", "uniformity", "packing", "grouping"),
    *("nixl", "allocation", "strides", "projecting"),
)
"""What a rename has no use for."""
HEAVY |= {f"onnxkvrename.{name}" for name in LATER}
COMMANDS = {
    "": command_rename.command,
    " verify": command_verify.command,
    " inspect": command_inspect.command,
    " custom-io": command_customio.command,
    " manifest": command_manifest.command,
    " check-consumer": command_checkconsumer.command,
    " compare": command_compare.command,
}


def imported(tree: ast.AST) -> set[str]:
    """The modules of the package that a module imports, wherever it does so."""
    found = set()
    for item in ast.walk(tree):
        if isinstance(item, ast.ImportFrom) and item.module == "onnxkvrename":
            found |= {alias.name for alias in item.names} & set(LAYERS)
        elif isinstance(item, ast.ImportFrom) and item.module:
            found |= {item.module.removeprefix("onnxkvrename.")} & set(LAYERS)
    return found


def calls(tree: ast.AST) -> set[str]:
    """What is called, as it is written."""
    return {ast.unparse(item.func) for item in ast.walk(tree) if isinstance(item, ast.Call)}


def outside(tree: ast.AST) -> set[str]:
    """The modules that are imported from elsewhere."""
    found = set()
    for item in ast.walk(tree):
        if isinstance(item, ast.Import):
            found |= {alias.name for alias in item.names}
        elif isinstance(item, ast.ImportFrom) and item.module:
            found.add(item.module)
    return found


def test_every_module_has_its_layer_and_its_line_in_the_architecture() -> None:
    assert set(LAYERS) == set(TREES)
    table = (ROOT / "ARCHITECTURE.md").read_text("utf-8").partition("## The modules")[2]
    assert tuple(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == LAYERS


@pytest.mark.parametrize("name", LAYERS)
def test_a_module_imports_only_from_the_layers_below(name: str) -> None:
    assert imported(TREES[name]) <= set(LAYERS[: LAYERS.index(name)])


@pytest.mark.parametrize("name", sorted(PURE))
def test_a_module_that_decides_touches_nothing(name: str) -> None:
    assert not outside(TREES[name]) & {"os", "io", "pathlib", "shutil", "subprocess", "tempfile"}


@pytest.mark.parametrize("name", sorted(set(LAYERS) - DISK))
def test_files_are_opened_and_changed_in_few_modules(name: str) -> None:
    forbidden = re.compile(
        r"open|io\.open|os\.(open|fdopen|write|replace|rename|link|symlink|unlink|remove|mkdir|makedirs)"
        r"|shutil\..*|.*\.(write_bytes|write_text|read_bytes|read_text|mkdir|unlink|touch)"
    )
    own = {"files.read_text"}
    found = {call for call in calls(TREES[name]) - own if forbidden.fullmatch(call)}
    # For a stdout that broke: os.devnull.
    assert found == ({"open"} if name == "console" else set())


@pytest.mark.parametrize("name", LAYERS)
def test_one_module_prints_and_none_exits(name: str) -> None:
    found = calls(TREES[name]) & {
        "print",
        "click.echo",
        "echo",
        "sys.exit",
        "exit",
        "quit",
        "os._exit",
    }
    assert found == ({"click.echo"} if name == "console" else set())


@pytest.mark.parametrize("name", LAYERS)
def test_modules_and_functions_fit_on_a_page(name: str) -> None:
    assert len((PACKAGE / f"{name}.py").read_text("utf-8").splitlines()) <= 420
    long = [
        item.name
        for item in ast.walk(TREES[name])
        if isinstance(item, ast.FunctionDef) and (item.end_lineno or 0) - item.lineno >= 60
    ]
    assert long == []


def test_a_real_rename_loads_nothing_heavy(decoder: Path, renamed: bytes) -> None:
    script = (
        "import sys; from onnxkvrename import cli; code = cli.main(sys.argv[1:]);"
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
    assert "onnxkvrename.cli" in modules
    assert not HEAVY & set(modules)


def test_the_console_script_loads_nothing_heavy(decoder: Path, spawn) -> None:
    process = spawn(decoder, "--prefix", "VLLM", env={"PYTHONPROFILEIMPORTTIME": "1"})
    modules = {line.rpartition("|")[2].strip() for line in process.stderr.splitlines()}
    assert process.returncode == 0
    assert process.stdout.startswith("past_key.0 -> past_key.0_VLLM\n")
    assert "onnxkvrename.running" in modules
    assert not HEAVY & modules


def readme() -> str:
    return (ROOT / "README.md").read_text("utf-8")


def test_the_readme_lists_the_codes() -> None:
    rows = re.findall(r"^\| (KV[0-9]{3}) \| (\w+) \| (.+) \|$", readme(), re.MULTILINE)
    assert rows == [(code, *meaning) for code, meaning in CODES.items()]


def test_every_code_has_a_test() -> None:
    tests = "".join(
        path.read_text("utf-8") for path in Path(__file__).parent.glob("*.py") if path != __file__
    )
    assert [code for code in CODES if code not in tests] == []


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
        assert name == "__version__" or getattr(onnxkvrename, name).__doc__
    assert (PACKAGE / "py.typed").exists()
