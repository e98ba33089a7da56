"""The library, as its users call it: paths in, reports out; models in memory; clear TypeErrors."""

from __future__ import annotations

import doctest
import inspect
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from inspect import signature
from pathlib import Path
from types import FunctionType

import onnx
import onnx_graphsurgeon
import pytest

import onnxkvrename
from onnxkvrename import CheckError, KvRenameError, ModelError, RulesError
from onnxkvrename.rules.request import Request

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures"
PLAIN, RENAMED = FIXTURES / "plain" / "decoder.onnx", FIXTURES / "VLLM" / "decoder.onnx"
SERVING = FIXTURES / "plain" / "serving"


def test_one_model_is_renamed_in_place_and_back(decoder: Path) -> None:
    report = onnxkvrename.rename(decoder, "VLLM")
    assert (report.status, decoder.read_bytes()) == ("renamed", RENAMED.read_bytes())
    assert onnxkvrename.rename(str(decoder), strip=True).status == "renamed"
    assert decoder.read_bytes() == PLAIN.read_bytes()


def test_two_models_take_one_line(decoder: Path) -> None:
    other = shutil.copyfile(decoder, decoder.with_name("other.onnx"))
    report = onnxkvrename.rename_all([decoder, other], "VLLM")
    assert [model.status for model in report.models] == ["renamed", "renamed"]
    assert decoder.read_bytes() == other.read_bytes() == RENAMED.read_bytes()


def test_a_directory_of_models_goes_to_another_with_an_executor(
    decoder: Path, tmp_path: Path
) -> None:
    with ThreadPoolExecutor(2) as executor:
        report = onnxkvrename.rename_all(
            decoder.parent, "VLLM", directory=tmp_path / "out", executor=executor
        )
    assert [model.status for model in report.models] == ["renamed"]
    assert (tmp_path / "out" / "decoder.onnx").read_bytes() == RENAMED.read_bytes()
    assert decoder.read_bytes() == PLAIN.read_bytes()


def test_one_model_that_cannot_be_read_keeps_all_as_they_were(decoder: Path) -> None:
    text = decoder.with_name("text.onnx")
    text.write_text("no model")
    report = onnxkvrename.rename_all([decoder, text], "VLLM")
    assert [model.status for model in report.models] == ["would-rename", "failed"]
    assert decoder.read_bytes() == PLAIN.read_bytes()
    with pytest.raises(ModelError, match="text file"):
        onnxkvrename.rename(text, "VLLM")


def test_a_dry_run_writes_nothing(decoder: Path) -> None:
    report = onnxkvrename.rename(decoder, "VLLM", dry_run=True)
    assert (report.status, len(report.name_map)) == ("would-rename", 8)
    assert decoder.read_bytes() == PLAIN.read_bytes()


def test_bytes_are_renamed_to_what_a_file_becomes() -> None:
    data = onnxkvrename.rename_bytes(PLAIN.read_bytes(), "VLLM")
    assert data == RENAMED.read_bytes()
    assert onnxkvrename.rename_bytes(data, "VLLM") == data
    assert onnxkvrename.rename_bytes(data, strip=True) == PLAIN.read_bytes()


@pytest.mark.parametrize("path", sorted((FIXTURES / "plain").glob("*.onnx")), ids=lambda p: p.name)
def test_bytes_meet_the_checks_of_a_file(path: Path, tmp_path: Path) -> None:
    copy = shutil.copyfile(path, tmp_path / path.name)
    report = onnxkvrename.rename(copy, "VLLM")
    if report.status == "failed":
        with pytest.raises(CheckError) as raised:
            onnxkvrename.rename_bytes(path.read_bytes(), "VLLM")
        assert raised.value.findings == report.findings
    else:
        assert onnxkvrename.rename_bytes(path.read_bytes(), "VLLM") == copy.read_bytes()


def test_a_model_proto_is_renamed_as_a_copy() -> None:
    model = onnx.load(PLAIN)
    renamed = onnxkvrename.rename_model(model, "VLLM")
    assert renamed == onnx.load(RENAMED)
    assert model == onnx.load(PLAIN)
    assert onnxkvrename.rename_model(renamed, strip=True) == model


def test_what_is_no_model_is_refused_in_memory() -> None:
    with pytest.raises(ModelError):
        onnxkvrename.rename_bytes(b"\xff\xff\xff", "VLLM")
    with pytest.raises(RulesError, match="no token"):
        onnxkvrename.rename_bytes(PLAIN.read_bytes())


def test_rules_are_a_profile_a_file_or_rules(tmp_path: Path) -> None:
    text = onnxkvrename.rules.load.PROFILES_DIRECTORY / "qeff.toml"
    copied = shutil.copyfile(text, tmp_path / "mine.toml")
    for rules in ("qeff", copied, str(copied), onnxkvrename.load_rules("qeff"), None):
        data = onnxkvrename.rename_bytes(PLAIN.read_bytes(), "VLLM", rules=rules)
        assert data == RENAMED.read_bytes()
    with pytest.raises(RulesError, match="nobody"):
        onnxkvrename.load_rules("nobody")


def test_no_result_takes_the_place_of_the_rules_that_are_read(
    decoder: Path, tmp_path: Path
) -> None:
    rules = shutil.copyfile(
        onnxkvrename.rules.load.PROFILES_DIRECTORY / "qeff.toml", tmp_path / "rules.onnx"
    )
    before = rules.read_bytes()
    for given in (rules, str(rules)):
        with pytest.raises(KvRenameError, match=r"rules\.onnx"):
            onnxkvrename.rename(decoder, "VLLM", output=rules, rules=given, force=True)
        (tmp_path / "in").mkdir(exist_ok=True)
        shutil.copyfile(decoder, tmp_path / "in" / "rules.onnx")
        report = onnxkvrename.rename_all(
            tmp_path / "in", "VLLM", directory=tmp_path, rules=given, force=True
        )
        assert "a file that this run reads" in str(report.models[0].error)
    assert rules.read_bytes() == before


def test_verify_and_inspect_a_model(decoder: Path) -> None:
    verified = onnxkvrename.verify(decoder)
    assert (verified.report.status, len(verified.flows)) == ("unchanged", 4)
    summary = onnxkvrename.inspect(decoder)
    assert (summary.layers, summary.name_count) == ((0, 1), 8)
    with pytest.raises(ModelError, match="no such file"):
        onnxkvrename.verify(decoder.with_name("none.onnx"))
    with pytest.raises(ModelError, match="no such file"):
        onnxkvrename.inspect(decoder.with_name("none.onnx"))


def test_a_target_brings_its_token(decoder: Path) -> None:
    report = onnxkvrename.rename(decoder, target="vllm-qaic", output=decoder.with_name("q.onnx"))
    assert (report.status, report.consumer) == ("renamed", "vllm-qaic")
    assert report.name_map["past_key.0"] == "past_key.0_vllmKvCache"
    (report,) = onnxkvrename.rename_all(decoder, target="vllm-qaic", dry_run=True).models
    assert report.status == "would-rename"
    with pytest.raises(KvRenameError, match="requires vllmKvCache"):
        onnxkvrename.rename(decoder, "VLLM", target="vllm-qaic")


@pytest.mark.parametrize("function", [onnxkvrename.rename, onnxkvrename.rename_all])
def test_a_parameter_is_a_field_of_the_request(function: Callable[..., object]) -> None:
    """It has its name and its default."""
    for name, parameter in inspect.signature(function).parameters.items():
        if name in Request._field_defaults and name != "models":
            assert parameter.default == Request._field_defaults[name]
        else:
            assert name in {"model", "models", "executor"}


def test_layouts_consumers_and_two_sides(decoder: Path) -> None:
    onnxkvrename.rename(decoder, "vllmKvCache")
    loaded = onnxkvrename.load_layout(decoder, sizes={"ctx_len": 64})
    assert not onnxkvrename.verify(decoder, target="vllm-qaic").report.failed
    (finding,) = onnxkvrename.verify(PLAIN, target="vllm-qaic").report.findings
    assert finding.code == "KV601"
    assert not onnxkvrename.compare(loaded, decoder).failed
    window, full = SERVING / "window.onnx", SERVING / "window_whole.onnx"
    assert onnxkvrename.compare(full, window).failed
    with pytest.raises(KvRenameError, match="no such target"):
        onnxkvrename.verify(decoder, target="nobody")
    with pytest.raises(ValueError, match="full_transfer requires target"):
        onnxkvrename.verify(decoder, full_transfer=True)


ABSENT = "none.onnx"
"""No file: a type is judged before anything is read."""
CALLS = {
    "compare": {"prefill": ABSENT, "decode": ABSENT},
    "compare_page": {"prefill": ABSENT, "decode": ABSENT},
    "find_pairs": {"model": ABSENT},
    "inspect": {"model": ABSENT},
    "inspect_page": {"models": ABSENT},
    "load_layout": {"paths": ABSENT},
    "load_rules": {},
    "rename": {"model": ABSENT, "token": "X"},
    "rename_all": {"models": ABSENT, "token": "X"},
    "rename_bytes": {"data": b"", "token": "X"},
    "rename_graph": {"graph": onnx_graphsurgeon.Graph(), "token": "X"},
    "rename_model": {"model": onnx.ModelProto(), "token": "X"},
    "suggest_rules": {"model": ABSENT},
    "verify": {"model": ABSENT, "renamed_from": ABSENT, "target": "vllm-qaic"},
}
"""Right arguments for each function of the library."""
VALUES = (7, 1.5, b"bytes", ["item"], {"key": "value"}, object(), onnx.ModelProto(), Path)
"""Values of all kinds; each is wrong for nearly all arguments."""
IN_MEMORY = (bytes, onnx.ModelProto)
ACCEPTED = {
    ("compare", "decode"): IN_MEMORY,
    ("compare", "prefill"): IN_MEMORY,
    ("compare_page", "decode"): IN_MEMORY,
    ("compare_page", "prefill"): IN_MEMORY,
    ("find_pairs", "model"): IN_MEMORY,
    ("inspect", "model"): IN_MEMORY,
    ("inspect_page", "models"): (list, dict, *IN_MEMORY),
    ("load_layout", "paths"): (list, dict, *IN_MEMORY),
    ("rename_all", "models"): (list, dict),
    ("suggest_rules", "model"): IN_MEMORY,
    ("verify", "model"): IN_MEMORY,
    ("rename_bytes", "data"): (bytes,),
    ("rename_model", "model"): (onnx.ModelProto,),
}
"""The types among them that an argument accepts."""
ARGUMENTS = [
    (function, argument, value)
    for function in CALLS
    for argument in inspect.signature(getattr(onnxkvrename, function)).parameters
    for value in VALUES
    if type(value) not in ACCEPTED.get((function, argument), ())
]


@pytest.mark.parametrize(
    ("function", "argument", "value"),
    ARGUMENTS,
    ids=lambda value: value if isinstance(value, str) else getattr(type(value), "__name__", ""),
)
def test_a_wrong_type_is_named_with_its_argument(
    function: str, argument: str, value: object
) -> None:
    with pytest.raises(TypeError) as raised:
        getattr(onnxkvrename, function)(**{**CALLS[function], argument: value})
    message = str(raised.value)
    subject, _, rest = message.partition(" must ")
    assert re.fullmatch(rf"(?:each (?:key )?of )?{argument}(?:\[.*\])?", subject), message
    types = {type(value).__name__, "the class Path"}
    types |= {"str"} if isinstance(value, (list, dict)) else set()  # what is in it
    assert any(rest.partition(";")[0].endswith(f" {name}") for name in types), message


def test_the_table_has_all_functions() -> None:
    functions = {
        name for name in onnxkvrename.__all__ if inspect.isfunction(getattr(onnxkvrename, name))
    }
    assert set(CALLS) == functions


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: onnxkvrename.rename(onnx.ModelProto(), "X"),
            "model must be a path (str or os.PathLike), not ModelProto; "
            "rename_model renames a ModelProto",
        ),
        (
            lambda: onnxkvrename.rename(b"bytes", "X"),
            "model must be a path (str or os.PathLike), not bytes; "
            "rename_bytes renames a serialized model",
        ),
        (
            lambda: onnxkvrename.rename_all([onnx.ModelProto()], "X"),
            "each of models must be a path (str or os.PathLike), not ModelProto; "
            "rename_model renames a ModelProto",
        ),
        (
            lambda: onnxkvrename.rename_bytes("m.onnx", "X"),
            "data must be bytes, not str; rename renames a model in a file",
        ),
        (
            lambda: onnxkvrename.rename_bytes(onnx.ModelProto(), "X"),
            "data must be bytes, not ModelProto; rename_model renames a ModelProto",
        ),
        (
            lambda: onnxkvrename.rename_model(b"bytes", "X"),
            "model must be an onnx.ModelProto, not bytes; rename_bytes renames a serialized model",
        ),
        (
            lambda: onnxkvrename.rename_model(Path("m.onnx"), "X"),
            f"model must be an onnx.ModelProto, not {type(Path()).__name__}; "
            "rename renames a model in a file",
        ),
        (
            lambda: onnxkvrename.rename(onnx_graphsurgeon.Graph(), "X"),
            "model must be a path (str or os.PathLike), not Graph; "
            "rename_graph renames a live graph",
        ),
        (
            lambda: onnxkvrename.verify(onnx_graphsurgeon.Graph()),
            "or an onnx.ModelProto, not Graph; export it to one",
        ),
        (
            lambda: onnxkvrename.rename_model(onnx.GraphProto(), "X"),
            "model must be an onnx.ModelProto, not GraphProto",
        ),
        (
            lambda: onnxkvrename.rename("m.onnx", "X", rules=123),
            "rules must be Rules, the name of a profile or the path of a rules file, not int",
        ),
        (
            lambda: onnxkvrename.compare(PLAIN, onnxkvrename.inspect(PLAIN)),
            "decode must be a LoadedLayout, a Layout, a path (str or os.PathLike), bytes or an "
            "onnx.ModelProto, not ModelSummary",
        ),
        (
            lambda: onnxkvrename.rename("m.onnx", "X", strip="yes"),
            "strip must be True or False, not str",
        ),
        (
            lambda: onnxkvrename.rename_all("m.onnx", "X", executor=ThreadPoolExecutor),
            "executor must be a concurrent.futures.Executor or None, "
            "not the class ThreadPoolExecutor",
        ),
        (lambda: onnxkvrename.load_layout(PLAIN, sizes={3: 5}), "each key of sizes must be a str"),
        (lambda: onnxkvrename.load_layout(PLAIN, sizes={"a": "x"}), "sizes['a'] must be an int"),
    ],
)
def test_a_wrong_type_names_the_right_function(
    call, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(TypeError, match=re.escape(message)):
        call()
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("url", ["s3://bucket/m.onnx", "https://host/m.onnx", "file:///m.onnx"])
def test_a_url_is_not_a_path(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path in (url, Path(url)):
        with pytest.raises(ModelError, match="is a URL"):
            onnxkvrename.rename(path, "X")
        with pytest.raises(ModelError, match="is a URL"):
            onnxkvrename.rename(PLAIN, "X", rules=path)
        with pytest.raises(KvRenameError, match="is a URL"):
            onnxkvrename.rename(PLAIN, "X", output=path)
        with pytest.raises(KvRenameError, match="is a URL"):
            onnxkvrename.rename_all(PLAIN, "X", directory=path)
    assert list(tmp_path.iterdir()) == []


def test_the_path_of_a_directory_is_no_output(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="rename_all writes into a directory"):
        onnxkvrename.rename(PLAIN, "X", output=f"{tmp_path}/new/")
    assert list(tmp_path.iterdir()) == []
    onnxkvrename.rename_all(PLAIN, "X", directory=f"{tmp_path}/new/")
    assert (tmp_path / "new" / "decoder.onnx").exists()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: onnxkvrename.rename_all([], "X"), "models must not be empty"),
        (lambda: onnxkvrename.load_layout([]), "paths must not be empty"),
        (lambda: onnxkvrename.rename_all("", "X"), "models must not be an empty path"),
        (lambda: onnxkvrename.rename_all([""], "X"), "each of models must not be an empty path"),
        (lambda: onnxkvrename.rename("", "X"), "model must not be an empty path"),
        (lambda: onnxkvrename.rename(PLAIN, "X", output=""), "output must not be an empty path"),
        (
            lambda: onnxkvrename.rename(PLAIN, "X", sidecars="no"),  # type: ignore[arg-type]
            "sidecars must be one of auto, off, not 'no'",
        ),
        (lambda: onnxkvrename.load_layout(PLAIN, sizes={"ctx_len": 0}), "must be 1 or more, not 0"),
        (
            lambda: onnxkvrename.rename(PLAIN, strip=True, replace=True),
            "strip and replace cannot be used together",
        ),
        (
            lambda: onnxkvrename.rename_all(PLAIN, strip=True, replace=True),
            "strip and replace cannot be used together",
        ),
        (
            lambda: onnxkvrename.rename_bytes(b"", strip=True, replace=True),
            "strip and replace cannot be used together",
        ),
    ],
)
def test_a_value_that_makes_no_sense_is_named(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"token": "a b"}, "may contain only ASCII letters and digits"),
        ({"token": ""}, "is empty"),
    ],
)
def test_a_token_that_cannot_be_used_is_an_error(how, message: str) -> None:
    with pytest.raises(RulesError, match=message):
        onnxkvrename.verify(PLAIN, **how)


def test_a_side_whose_own_model_is_wrong_is_no_hand_off_that_works(tmp_path: Path) -> None:
    model = onnx.load(RENAMED)
    del model.graph.output[-1]
    broken = tmp_path / "broken.onnx"
    onnx.save(model, broken)
    assert onnxkvrename.load_layout(broken).failed
    assert onnxkvrename.compare(RENAMED, broken).failed
    assert onnxkvrename.compare(broken, broken).failed


def test_the_example_of_the_package_runs(decoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(decoder.parent)
    result = doctest.testmod(onnxkvrename)
    assert (result.failed, result.attempted) == (0, 3)


FUNCTIONS = [
    name for name in onnxkvrename.__all__ if isinstance(getattr(onnxkvrename, name), FunctionType)
]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_docstring_says_all_and_its_example_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    function = getattr(onnxkvrename, name)
    for section in ("Args", "Returns", "Raises", "Examples"):
        assert f"\n    {section}:\n" in function.__doc__
    arguments = re.findall(r"^        (\w+):", function.__doc__, re.MULTILINE)
    as_elsewhere = re.findall(r"``(\w+)``", function.__doc__.partition("Args:")[0])
    assert set(signature(function).parameters) <= {*arguments, *as_elsewhere}
    monkeypatch.chdir(tmp_path)
    shutil.copytree(PLAIN.parent / "windows", "windows")
    shutil.copyfile(PLAIN, "model.onnx")
    for side in ("prefill.onnx", "decode.onnx"):
        onnxkvrename.rename("model.onnx", "vllmKvCache", output=side)
    names = {"onnxkvrename": onnxkvrename}
    test = doctest.DocTestParser().get_doctest(function.__doc__, names, name, None, None)
    assert test.examples
    said: list[str] = []
    doctest.DocTestRunner().run(test, out=said.append)
    assert said == []


def test_the_reference_has_every_name_that_the_package_offers() -> None:
    page = (FIXTURES.parent / "docs" / "library.md").read_text("utf-8")
    named = set(re.findall(r"`(\w+)", page))
    assert set(onnxkvrename.__all__) - {"__version__"} <= named


def test_importing_the_package_loads_nothing() -> None:
    script = "import sys, onnxkvrename; print(*(m for m in sys.modules if m.startswith('onnxkv')))"
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert process.stdout.split() == ["onnxkvrename"]


def test_all_names_are_there_with_their_own_docstrings() -> None:
    assert set(onnxkvrename.__all__) <= set(dir(onnxkvrename))
    for name in onnxkvrename.__all__:
        offered = getattr(onnxkvrename, name)
        if name != "__version__":
            assert offered.__doc__
            assert not offered.__doc__.startswith(f"{name}(")
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = onnxkvrename.nothing
