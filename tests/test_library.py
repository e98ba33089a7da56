"""The library beside the command: models in memory, its own words, what a result shows."""

from __future__ import annotations

import copy
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import onnx
import onnx.parser
import pytest
import qefficient_exports
from conftest import FIXTURES, Run
from kill_commands import read_directory
from tiers import thin

import onnxkvrename
from onnxkvrename import Finding, KvRenameError
from onnxkvrename.api.wording import _FUNCTIONS, reword_text
from onnxkvrename.cli.main import COMMANDS

PLAIN, RENAMED = FIXTURES / "plain" / "decoder.onnx", FIXTURES / "VLLM" / "decoder.onnx"
LIBRARY_PAGE = FIXTURES.parent / "docs" / "library.md"
MODELS = [path for path in sorted(FIXTURES.rglob("*.onnx")) if "shared" not in path.parts]
BESIDE = {"KV404", "KV405", "KV406", "KV501", "KV502", "KV503"}
"""Codes of what lies beside a file, which a model in memory does not have."""
WITHOUT_CACHE = onnx.parser.parse_model(
    '<ir_version: 8, opset_import: ["": 17]> g (float[2] x) => (float[2] y) { y = Relu(x) }'
)


def list_codes(value: Any) -> list[str]:
    """The codes of all findings in a result, in their order; those of an error likewise."""
    if isinstance(value, Finding):
        return [value.code] if value.code not in BESIDE else []
    return [code for item in value for code in list_codes(item)] if isinstance(value, tuple) else []


def describe(function: Callable[..., Any], *arguments: Any) -> tuple[str, Any]:
    try:
        result = function(*arguments)
    except KvRenameError as error:
        return type(error).__name__, error.message
    if function is onnxkvrename.find_pairs:
        return "pairs", result
    return getattr(getattr(result, "verdict", None), "outcome", ""), list_codes(result)


@pytest.mark.parametrize(
    "path",
    thin(
        [p for folder in ("plain", "VLLM") for p in sorted((FIXTURES / folder).rglob("*.onnx"))], 9
    ),
    ids=lambda path: str(path.relative_to(FIXTURES)),
)
def test_a_model_in_memory_is_what_its_file_is(path: Path) -> None:
    proto = onnx.load(path, load_external_data=False)
    functions = [
        onnxkvrename.inspect,
        onnxkvrename.verify,
        onnxkvrename.find_pairs,
        onnxkvrename.load_layout,
    ]
    calls: list[tuple[Any, ...]] = [(function,) for function in functions]
    for function, *more in calls:
        expected = describe(function, path, *more)
        assert describe(function, path.read_bytes(), *more) == expected
        assert describe(function, proto, *more) == expected
    assert describe(onnxkvrename.compare, proto, proto) == describe(
        onnxkvrename.compare, path, proto
    )


def test_no_consumer_can_use_a_broken_model(tmp_path: Path) -> None:
    broken = onnx.load(RENAMED)
    del broken.graph.output[-1]
    onnx.save(broken, tmp_path / "broken.onnx")
    for source in (broken, tmp_path / "broken.onnx"):
        found = onnxkvrename.verify(source, target="qefficient").report.findings
        assert "KV102" in list_codes(found)
    found = onnxkvrename.verify(WITHOUT_CACHE, target="vllm-qaic").report.findings
    assert list_codes(found) == ["KV001"]


def test_external_data_of_a_model_in_memory_is_not_read() -> None:
    model = onnx.load(PLAIN)
    embed = model.graph.initializer[0]
    embed.ClearField("float_data")
    embed.ClearField("raw_data")
    embed.data_location = onnx.TensorProto.EXTERNAL
    embed.external_data.add(key="location", value="w.bin")
    assert re.search(r"external data +not read: w.bin", str(onnxkvrename.inspect(model)))
    assert "embed" in {i.name for i in onnxkvrename.rename_model(model, "X").graph.initializer}


def test_a_model_in_memory_is_compared_with_a_file() -> None:
    proved = onnxkvrename.verify(onnx.load(RENAMED), renamed_from=PLAIN)
    assert proved.rename_proof is not None
    assert not proved.report.failed


# Words.


@pytest.mark.parametrize(
    ("text", "reworded"),
    [
        ("`--replace` replaces it", "`replace=True` replaces it"),
        ("`--prefix VLLM --replace`", "`token='VLLM', replace=True`"),
        ("`--rules FILE` or `--profile auto`", "`rules=FILE` or `rules='auto'`"),
        ("add --dim ctx_len=SIZE", "add sizes={'ctx_len': SIZE}"),
        ("--strip and --target x", "strip=True and target x"),
        ("`onnxkvrename m.onnx --target t`", "`onnxkvrename.rename('m.onnx', target='t')`"),
        (
            "`onnxkvrename 'a b.onnx' n.onnx --prefix X`",
            "`onnxkvrename.rename_all(['a b.onnx', 'n.onnx'], token='X')`",
        ),
        (
            "`onnxkvrename '<memory>/model' --target vllm-qaic`",
            "`onnxkvrename.rename_model(model, token='vllmKvCache')`",
        ),
        ("`onnxkvrename verify m.onnx`", "`onnxkvrename.verify('m.onnx')`"),
        ("`onnxkvrename verify m --target t`", "`onnxkvrename.verify('m', target='t')`"),
        ("`onnxkvrename pairs m`", "`onnxkvrename.find_pairs('m')`"),
        ("`onnxkvrename pairs '<memory>/model'`", "`onnxkvrename.find_pairs(model)`"),
        ("`onnxkvrename pairs m --as rules`", "`onnxkvrename.suggest_rules('m')`"),
        # What the library does not have stays as it is.
        ("`onnxkvrename profiles m`", "`onnxkvrename profiles m`"),
        ("`onnxkvrename explain KV001`", "`onnxkvrename explain KV001`"),
        ("`onnxkvrename pairs m --as rules > r`", "`onnxkvrename pairs m --as rules > r`"),
        ("`--jobs 1` uses one", "`--jobs 1` uses one"),
        ("`--sidecar x --replace`", "`--sidecar x --replace`"),
        ("`onnxkvrename m.onnx --dask A`", "`onnxkvrename m.onnx --dask A`"),
        ("`onnxkvrename $'\\140' --strip`", "`onnxkvrename $'\\140' --strip`"),
        ("--kv-cache-dtype fp8 of vLLM", "--kv-cache-dtype fp8 of vLLM"),
        ("a--replace b", "a--replace b"),
        ("a size (--dim c=SIZE)", "a size (sizes={'c': SIZE})"),
    ],
)
def test_an_option_in_a_text_becomes_an_argument(text: str, reworded: str) -> None:
    assert reword_text(text, onnxkvrename.load_layout) == reworded


def test_each_command_is_a_function_or_none_is() -> None:
    """Otherwise its name would be taken for the path of a model."""
    assert set(_FUNCTIONS) == set(COMMANDS)
    assert {name for name in _FUNCTIONS.values() if name} <= set(onnxkvrename.__all__)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda: onnxkvrename.rename(PLAIN, "X", output=PLAIN.parent),
            "`rename_all(..., directory=",
        ),
        (lambda: onnxkvrename.rename_bytes(RENAMED.read_bytes(), "X"), "`replace=True` replaces"),
        (lambda: onnxkvrename.rename(PLAIN, "X", output=RENAMED), "`force=True` replaces it"),
        (lambda: onnxkvrename.rename(PLAIN), "`target='vllm-qaic'`"),
        (
            lambda: onnxkvrename.rename(PLAIN, "A", target="vllm-qaic"),
            "token A: vllm-qaic",
        ),
        (lambda: onnxkvrename.load_layout(PLAIN, sizes={"q": 1}), "sizes q: "),
        (lambda: onnxkvrename.verify(PLAIN, target="vllm-qaic"), "', target='vllm-qaic')`"),
        (lambda: onnxkvrename.compare(onnx.load(PLAIN), PLAIN), "rename_model(prefill, token="),
        (lambda: onnxkvrename.verify(RENAMED, token="X"), ", token='X', replace=True)`"),
    ],
)
def test_findings_and_errors_name_arguments(call: Callable[[], Any], said: str) -> None:
    try:
        texts = list(list_hints(call()))
    except KvRenameError as error:
        texts = [str(error)]
    assert any(said in text for text in texts), texts


def list_hints(value: Any) -> Iterable[str]:
    if isinstance(value, Finding):
        yield f"{value.message} ({value.hint})"
    for item in value if isinstance(value, tuple) else ():
        yield from list_hints(item)


def test_an_argument_of_another_function_comes_with_it() -> None:
    names = ("window_whole", "window")
    full, window = (FIXTURES / "plain" / "serving" / f"{name}.onnx" for name in names)
    handoff = onnxkvrename.compare(full, window)
    assert "load_layout(..., sizes={'sliding_window': SIZE})" in str(handoff)


def test_a_model_on_both_sides_is_renamed_once() -> None:
    handoff = onnxkvrename.compare(PLAIN, PLAIN)
    assert f"`onnxkvrename.rename('{PLAIN}', target='vllm-qaic')`" in str(handoff)


def test_the_command_names_options(run: Run) -> None:
    outcome = run(RENAMED, "--prefix", "X", "-n")
    assert "`--replace`" in outcome.err
    assert "replace=True" not in outcome.err


# What is shown.


def show_results() -> dict[str, Any]:
    return {
        "rename": onnxkvrename.rename(PLAIN, "X", dry_run=True),
        "rename_all": onnxkvrename.rename_all(FIXTURES / "plain", "X", dry_run=True),
        "verify": onnxkvrename.verify(PLAIN),
        "inspect": onnxkvrename.inspect(FIXTURES / "plain" / "hybrid.onnx"),
        "load_layout": onnxkvrename.load_layout(PLAIN),
        "layout": onnxkvrename.load_layout(PLAIN).layout,
        "compare": onnxkvrename.compare(RENAMED, PLAIN),
        "rules": onnxkvrename.load_rules(),
        "pair": onnxkvrename.rename(PLAIN, "X", dry_run=True).pairs[0],
        "state": onnxkvrename.find_pairs(PLAIN)[0],
        "finding": onnxkvrename.verify(PLAIN, target="vllm-qaic").report.findings[0],
        "flow": onnxkvrename.verify(PLAIN).flows[0],
        "buffer": onnxkvrename.load_layout(PLAIN).layout.buffers[0],
        "inspected": onnxkvrename.inspect(PLAIN).buffers[0],
        "proof": onnxkvrename.verify(RENAMED, renamed_from=PLAIN).rename_proof,
    }


def test_a_repr_is_one_short_line(tmp_path: Path) -> None:
    hostile = tmp_path / ("n\n" * 60 + ".onnx")
    shutil.copyfile(PLAIN, hostile)
    for name, result in {**show_results(), "hostile": onnxkvrename.inspect(hostile)}.items():
        assert len(repr(result)) <= 200, name
        assert repr(result).startswith(f"{type(result).__name__}(")
        assert repr(result).isprintable()
        assert str(result).replace("\n", "").isprintable()


def test_a_result_travels_between_processes() -> None:
    for name, result in show_results().items():
        travelled = pickle.loads(pickle.dumps(result))
        assert (type(travelled), repr(travelled)) == (type(result), repr(result)), name
        assert repr(copy.deepcopy(result)) == repr(result), name


def test_an_error_travels_between_processes() -> None:
    for call in (
        lambda: onnxkvrename.rename_bytes(RENAMED.read_bytes(), "X"),
        lambda: onnxkvrename.inspect("none.onnx"),
    ):
        with pytest.raises(KvRenameError) as raised:
            call()
        travelled = pickle.loads(pickle.dumps(raised.value))
        assert str(travelled) == str(raised.value)
        assert travelled.__dict__ == raised.value.__dict__


def test_the_str_of_a_finding_says_all_of_it() -> None:
    (finding,) = onnxkvrename.verify(PLAIN, target="vllm-qaic").report.findings
    assert str(finding) == f"error KV601: {finding.message} ({finding.hint})"


@pytest.mark.parametrize(
    ("result", "arguments"),
    [
        ("rename", (PLAIN, "--prefix", "X", "-n")),
        ("verify", ("verify", PLAIN)),
        ("inspect", ("inspect", FIXTURES / "plain" / "hybrid.onnx")),
    ],
)
def test_a_str_is_what_a_terminal_shows(
    result: str, arguments: tuple[object, ...], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onnxkvrename.cli.output.is_terminal", lambda stream: True)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    outcome = run(*arguments)
    shown = reword_text(outcome.err + outcome.out, onnxkvrename.load_layout)
    assert f"{show_results()[result]}\n" == shown
    assert "--" not in shown


# Files and pages.


def test_an_export_is_seeded_as_by_the_command(run: Run, tmp_path: Path) -> None:
    exports = [qefficient_exports.write_export(tmp_path / name) for name in ("command", "library")]
    assert run(exports[0], "--prefix", "VLLM", "--seed-cache").code == 0
    model = exports[1] / "decoder.onnx"
    report = onnxkvrename.rename(model, "VLLM", seed_cache=True)
    assert report.status == "renamed"
    assert read_directory(tmp_path / "library") == read_directory(tmp_path / "command")


def test_pages_are_those_of_the_command(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copyfile(RENAMED, "p.onnx")
    shutil.copytree(FIXTURES / "plain" / "windows", "windows")
    for function, arguments in (("inspect", ["windows"]), ("compare", ["p.onnx", "p.onnx"])):
        run(function, *arguments, "--html", "page.html", "--force")
        page = getattr(onnxkvrename, f"{function}_page")(*arguments)
        assert page == Path("page.html").read_text("utf-8")
    assert "past_key" in onnxkvrename.inspect_page(onnx.load("p.onnx"))


# The page of the documentation.


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """All examples of the page as one program, with the models that they use beside it."""
    monkeypatch.chdir(tmp_path)
    shutil.copyfile(PLAIN, "model.onnx")
    for name in ("prefill.onnx", "decode.onnx"):
        shutil.copyfile(PLAIN, name)
    blocks = re.findall(r"```python\n(.*?)```", LIBRARY_PAGE.read_text("utf-8"), re.DOTALL)
    Path("program.py").write_text("\n".join(blocks))
    return tmp_path / "program.py"


def test_the_examples_of_the_page_run(program: Path) -> None:
    done = subprocess.run([sys.executable, program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    promised = re.findall(r"#  ?(.+)$", program.read_text(), re.MULTILINE)
    promised = [text.removesuffix(", ...") for text in promised if not text.startswith("then ")]
    lines = done.stdout.splitlines()
    missing = [text for text in promised if not any(line.startswith(text) for line in lines)]
    assert missing == []
    assert promised


def test_the_examples_of_the_page_have_types(program: Path) -> None:
    pytest.importorskip("mypy", reason="mypy is not installed")
    types = program.with_name("typed.py")
    types.write_text(program.read_text() + TYPED)
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--cache-dir", program.parent / "mypy", types],
        capture_output=True,
        text=True,
        cwd=program.parent,
    )
    assert checked.returncode == 0, checked.stdout


TYPED = """

def use_the_rest(proto: onnx.ModelProto, data: bytes, path: Path) -> str:
    each: onnxkvrename.ModelReport = onnxkvrename.rename(path, "X", seed_cache=True, force=True)
    smaller: bytes = onnxkvrename.rename_bytes(data, strip=True)
    layout: onnxkvrename.Layout = onnxkvrename.load_layout([path, str(path)]).layout
    verified: onnxkvrename.VerifiedModel = onnxkvrename.verify(data, target="vllm-qaic")
    findings: tuple[onnxkvrename.Finding, ...] = verified.report.findings
    handoff: onnxkvrename.Handoff = onnxkvrename.compare(proto, data)
    pairs: tuple[onnxkvrename.StatePair, ...] = onnxkvrename.find_pairs(smaller)
    rules: onnxkvrename.Rules = onnxkvrename.suggest_rules(proto)
    summary: onnxkvrename.ModelSummary = onnxkvrename.inspect(path, rules=rules)
    flows = [flow.verdict for flow in onnxkvrename.verify(data, rules="auto").flows]
    page: str = onnxkvrename.compare_page(proto, layout) + onnxkvrename.inspect_page([path])
    return f"{each}{findings}{handoff}{pairs}{summary}{flows}{page}"
"""
