from __future__ import annotations

import json
import os
import shutil
import stat
from pathlib import Path
from typing import Any

import models
import onnx
import pytest
from models import node, saved
from schemas import validate
from tiers import thin
from window_sets import write_windows

import onnxkvrename
from onnxkvrename.layout.inspect import inspect_model
from onnxkvrename.report.pages.inspect import render_inspect_page
from onnxkvrename.report.pages.page import make_mark
from onnxkvrename.rules.load import list_profiles
from onnxkvrename.verification import trace_buffer_updates

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
EXPORTS = Path(__file__).resolve().parents[3] / "shared" / "exports"
MODEL = "decoder.onnx"
WRITTEN = "x.html: page written\n"


@pytest.fixture
def here(decoder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a sound model, a broken one, and files that are no models."""
    here = decoder.parent
    broken = models.decoder()
    broken.graph.output.pop()
    saved(broken, here / "broken.onnx")
    saved(b"import onnx\n", here / "text.onnx")
    profile = Path(onnxkvrename.__file__).parent / "rules" / "profiles" / "qeff.toml"
    shutil.copyfile(profile, here / "rules.toml")
    shutil.copytree(FIXTURES / "plain" / "external", here / "external")
    (here / "empty").mkdir()
    monkeypatch.chdir(here)
    return here


# What is told, and the exit code.


def test_what_is_in_a_model_is_told_on_stdout(here: Path, run) -> None:
    outcome = run("inspect", MODEL)
    assert (outcome.code, outcome.err) == (0, "")
    lines = outcome.out.splitlines()
    assert lines[0] == "decoder.onnx  2.2 KiB"
    assert "  full attention  past_key, past_value of layers 0-1" in lines
    assert "  past_key     f   f" in lines
    assert [line for line in lines if line != line.rstrip()] == []


def test_sizes_are_shown_beside_their_symbols(here: Path, run) -> None:
    outcome = run("inspect", MODEL, "--dim", "ctx_len=64")
    assert "FLOAT [batch_size, 2, ctx_len=64, 4]" in outcome.out
    assert "128 bytes for each token\n" in outcome.out
    assert "8 KiB (8,192 bytes) for a sequence\n" in outcome.out
    document = json.loads(run("inspect", MODEL, "--dim", "ctx_len=64", "--format", "json").out)
    validate(document)
    for totals in (document["models"][0]["totals"], document["layouts"][0]["totals"]):
        assert totals["sequence_bytes"] == 8192
    assert run("inspect", MODEL, "--dim", "ctx_len=64", "--html", "a.html").code == 0
    page = Path("a.html").read_text("utf-8")
    assert "ctx_len=64" in page
    assert "8 KiB (8,192 bytes) for a sequence" in page


def test_a_size_for_no_symbol_of_any_model_is_refused(here: Path, run) -> None:
    hybrid = FIXTURES / "plain" / "hybrid.onnx"
    assert run("inspect", MODEL, hybrid, "--dim", "sliding_window=16").code == 0
    outcome = run("inspect", MODEL, hybrid, "--dim", "ctx_lem=16")
    assert (outcome.code, outcome.out) == (2, "")
    assert "--dim ctx_lem: buffers have no such dimension" in outcome.err
    assert "did you mean ctx_len?" in outcome.err


def test_a_layout_file_is_no_model_to_inspect(here: Path, run) -> None:
    Path("layout.json").write_text(run("inspect", MODEL, "--format", "json").out, "utf-8")
    outcome = run("inspect", "layout.json")
    assert outcome.code == 2
    assert "layout.json: is a layout file, not an ONNX model (compare" in outcome.err


@pytest.mark.parametrize("path", ["decoder.onnx", "hybrid.onnx", "mla.onnx", "windows", "vlm_dual"])
@pytest.mark.parametrize("kind", ["plain", "VLLM"])
def test_compare_takes_the_file_in_place_of_the_model(
    kind: str, path: str, here: Path, run
) -> None:
    model = FIXTURES / kind / path
    layout = here / "layout.json"
    layout.write_text(run("inspect", model, "--format", "json").out, "utf-8")
    expected = run("compare", model, model, "--full-transfer")
    for sides in ((layout, model), (model, layout), (layout, layout)):
        found = run("compare", *sides, "--full-transfer")
        assert found.code == expected.code
        table = [outcome.out.splitlines()[1:] for outcome in (found, expected)]
        assert table[0] == table[1]


def test_compare_refuses_a_file_of_several_models(here: Path, run) -> None:
    text = run("inspect", MODEL, FIXTURES / "plain" / "mla.onnx", "--format", "json").out
    Path("layout.json").write_text(text, "utf-8")
    outcome = run("compare", "layout.json", MODEL)
    assert outcome.code == 2
    assert "layout.json: has the layouts of 2 models; pass a file of one (" in outcome.err


def test_what_vllm_makes_of_a_model_is_shown_below_it(here: Path, run) -> None:
    outcome = run("inspect", MODEL, "--vllm", "--block-size", "64", "--tokens", "300")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.startswith(run("inspect", MODEL).out)
    lines = outcome.out.splitlines()
    assert "vLLM 0.24, blocks of 64 tokens, tensor parallel size 1" in lines
    for number in ("37853", "37885", "46252"):
        assert f"(vllm#{number})" in outcome.out
    (row,) = (line.split() for line in lines if line.startswith("  unpacked (default)  300"))
    assert row[2:4] == ["300", "tokens"]


def test_json_has_what_vllm_makes_of_each_layout(here: Path, run) -> None:
    models = (MODEL, FIXTURES / "plain" / "mla.onnx", FIXTURES / "plain" / "vlm_dual")
    document = json.loads(run("inspect", *models, "--format", "json").out)
    assert document["vllm"] is None
    options = ("--vllm", "--tensor-parallel-size", "2", "--enable-cross-layers-blocks")
    document = json.loads(run("inspect", *models, *options, "--format", "json").out)
    validate(document)
    assert len(document["layouts"]) == len(document["vllm"]) == 3
    for layout, projection in zip(document["layouts"], document["vllm"], strict=True):
        assert [layer["layer"] for layer in projection["layers"]] == layout["layers"]
        assert (projection["block_size"], projection["tp"]) == (16, 2)
        assert projection["enable_cross_layers_blocks"]
    text = run("inspect", *models, *options).out
    assert "decoder.onnx: 4 buffers, layers 0-1\nvLLM 0.24" in text


@pytest.mark.parametrize(
    "option",
    [
        ("--block-size", "16"),
        ("--tensor-parallel-size", "2"),
        ("--kv-cache-dtype", "fp8"),
        ("--enable-cross-layers-blocks",),
        ("--tokens", "8"),
    ],
)
def test_settings_of_vllm_need_the_option(option: tuple[str, ...], here: Path, run) -> None:
    outcome = run("inspect", MODEL, *option)
    assert (outcome.code, outcome.out) == (2, "")
    assert f"error: {option[0]} requires --vllm (add `--vllm`)" in outcome.err


def test_of_several_models_each_is_told(here: Path, run) -> None:
    outcome = run("inspect", MODEL, "external", "broken.onnx")
    assert outcome.code == 1
    heads = [line for line in outcome.out.splitlines() if line and not line.startswith(" ")]
    assert [head.split()[0] for head in heads] == [
        "decoder.onnx",
        "external/decoder.onnx",
        "broken.onnx",
    ]
    assert "error KV102" in outcome.err


def test_a_model_that_cannot_be_read_is_2_and_the_others_are_still_told(here: Path, run) -> None:
    outcome = run("inspect", "text.onnx", MODEL)
    assert outcome.code == 2
    assert outcome.out.startswith("decoder.onnx  ")
    assert outcome.err == (
        "error: text.onnx: is a text file, not an ONNX model (pass a binary .onnx file)\n"
    )


def test_rules_of_ones_own_are_used(here: Path, run) -> None:
    rules = (here / "rules.toml").read_text("utf-8")
    (here / "rules.toml").write_text(rules.replace("past_key", "other_key"), "utf-8")
    outcome = run("inspect", MODEL, "--rules", "rules.toml", "--format", "json")
    (model,) = json.loads(outcome.out)["models"]
    known = {item["buffer"] for item in model["buffers"] if item["state"] != "missing"}
    assert known == {"past_value"}


MISTAKES = pytest.mark.parametrize(
    ("args", "said"),
    [
        ((), "no MODEL given: pass an .onnx file or a directory"),
        ((MODEL, "--nonsense"), "--nonsense"),
        ((MODEL, "--prefix", "VLLM"), "--prefix"),
        (
            (MODEL, "--profile", "nobody"),
            f"no such profile: nobody (profiles: {', '.join(list_profiles())})",
        ),
        ((MODEL, "--rules", "none.toml"), "none.toml: no such file"),
        ((MODEL, "--rules", "text.onnx"), "text.onnx: not TOML"),
        (("decodr.onnx",), "decodr.onnx: no such file (did you mean decoder.onnx?)"),
        (("text.onnx",), "text.onnx: is a text file, not an ONNX model"),
        (("empty",), "empty: has no .onnx file, at any depth"),
        (("",), "an empty path: is a variable not set?"),
        ((MODEL, "--html", ""), "an empty path: is a variable not set?"),
        ((MODEL, "--html"), "option '--html' requires an argument"),
        ((MODEL, "--html", "nowhere/x.html"), "nowhere/x.html: cannot be written: No such file"),
        ((MODEL, "--html", "empty"), "empty: is a directory"),
        ((MODEL, "--html", "text.onnx/x"), "text.onnx/x: cannot be written: Not a directory"),
        ((MODEL, "--html", "n" * 300), "cannot be read: File name too long"),
        ((MODEL, "--html", "empty/"), "empty/ names a directory, not a file"),
        *(
            ((*given, "--html", path), f"{path}: is {role}")
            for given, path, role in (
                ((MODEL,), MODEL, "the model decoder.onnx"),
                ((MODEL,), "empty/../decoder.onnx", "the model decoder.onnx"),
                ((MODEL,), "link", "the model decoder.onnx"),
                (("link",), MODEL, "the model link"),
                ((".",), "external/decoder.onnx", "the model external/decoder.onnx"),
                (("broken.onnx", MODEL), MODEL, "the model decoder.onnx"),
                (("text.onnx", MODEL), "text.onnx", "the model text.onnx"),
                (("external",), "external/decoder.onnx.data", "external data of external/"),
                ((MODEL, "--rules", "rules.toml"), "rules.toml", "the file of rules"),
            )
        ),
    ],
)


@MISTAKES
def test_a_mistake_gets_one_line_and_exit_code_2(
    args: tuple[str, ...], said: str, here: Path, run, snapshot
) -> None:
    os.symlink(MODEL, "link")
    before = snapshot(here)
    outcome = run("inspect", *args)
    (error,) = outcome.err.splitlines()
    assert (outcome.code, outcome.out) == (2, "")
    assert error.startswith("error: ")
    assert said in error
    assert "a bug in" not in error
    assert " -o " not in error
    assert snapshot(here) == before
    assert os.readlink("link") == MODEL


@MISTAKES
def test_a_mistake_is_told_in_json_too(args: tuple[str, ...], said: str, here: Path, run) -> None:
    os.symlink(MODEL, "link")
    outcome = run("inspect", "--format", "json", *args)
    document = json.loads(outcome.out)
    validate(document)
    errors = [document["error"], *(model["error"] for model in document["models"])]
    told = [f"{error['path']}: {error['message']} ({error['hint']})" for error in errors if error]
    assert said in told[0].removeprefix("None: ")
    assert outcome.code == document["exit_code"] == 2


@pytest.mark.parametrize(
    ("args", "code", "count"),
    [
        ((MODEL,), 0, 1),
        (("broken.onnx",), 1, 1),
        ((MODEL, "text.onnx"), 2, 2),
        ((MODEL, "external", "broken.onnx"), 1, 3),
        (("none.onnx",), 2, 0),
        ((), 2, 0),
    ],
)
@pytest.mark.parametrize("spelling", [("--format", "json"), ("--format=json",)])
def test_json_is_one_valid_document_whatever_happens(
    spelling: tuple[str, ...], args: tuple[str, ...], code: int, count: int, here: Path, run
) -> None:
    outcome = run("inspect", *args, *spelling)
    document = json.loads(outcome.out)
    validate(document)
    assert outcome.code == document["exit_code"] == code
    assert len(document["models"]) == count
    assert (document["error"] is not None) == (count == 0)


@pytest.mark.parametrize(
    ("error", "code"), [(ZeroDivisionError("/ 0"), 2), (KeyboardInterrupt, 130)]
)
def test_json_of_a_bug_or_an_interrupt_is_a_document_too(
    error: BaseException, code: int, here: Path, run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise error

    monkeypatch.setattr("onnxkvrename.cli.inspect.inspect_models", fail)
    outcome = run("inspect", MODEL, "--format", "json")
    document = json.loads(outcome.out)
    validate(document)
    assert outcome.code == document["exit_code"] == code
    assert ("a bug in onnxkvrename: ZeroDivisionError" in outcome.err) == (code == 2)


HOSTILE = "::error::##[x]\x1b[2J\u202e[/red]:smiley:</text><script>&"


def hostile(path: Path) -> Path:
    """A model with hostile names."""
    model = models.decoder(node("Neg", ["x"], [f"a\n{HOSTILE}_RetainedState"]))
    model.producer_name = HOSTILE
    model.opset_import.add(domain=HOSTILE, version=1)
    model.graph.output.append(models.info(f"a\n{HOSTILE}_RetainedState"))
    for value in (*model.graph.input, *model.graph.output):
        if "past_key" in value.name:
            value.name = f"{HOSTILE}/{value.name}"
    for item in model.graph.node:
        for ends in (item.input, item.output):
            ends[:] = [f"{HOSTILE}/{end}" if "past_key" in end else end for end in ends]
    return saved(model, path)


def test_hostile_names_are_only_shown(here: Path, run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    path = hostile(here / "a\n::error::b.onnx")
    outcome = run("inspect", path.name, "--html", "x.html")
    assert (outcome.code, outcome.err.count("KV111"), outcome.err.endswith(WRITTEN)) == (0, 1, True)
    assert "\\x1b[2J\\u202e[/red]:smiley:</text><script>&" in outcome.out
    shown = outcome.out + outcome.err
    assert not set(shown) & {"\x1b", "\u202e", "\r"}
    assert not any(line.startswith("::") for line in shown.splitlines())
    assert (here / "x.html").read_text("utf-8").count("<script>") == 1  # its own


# The page.


def test_a_page_is_written_beside_the_answer(here: Path, run) -> None:
    outcome = run("inspect", MODEL, "broken.onnx", "--html", "x.html")
    assert (outcome.code, outcome.out.startswith("decoder.onnx  2.2 KiB")) == (1, True)
    found = tuple(
        inspect_model(Path(name), onnxkvrename.load_rules(), trace_buffer_updates)
        for name in (MODEL, "broken.onnx")
    )
    assert (here / "x.html").read_text("utf-8") == render_inspect_page(found)
    assert [name for name in os.listdir(here) if name.startswith(".")] == []


def test_a_page_may_be_read_by_those_who_may_read_a_new_file(here: Path, run) -> None:
    (here / "plain").touch()
    assert run("inspect", MODEL, "--html", "x.html").code == 0
    modes = [stat.S_IMODE((here / name).stat().st_mode) for name in ("x.html", "plain")]
    assert modes[0] == modes[1]


def test_a_page_that_cannot_take_its_place_leaves_the_older_one(
    here: Path, run, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = ("inspect", MODEL, "--html", "x.html")
    assert run(*call).code == 0
    with (here / "x.html").open("ab") as file:
        file.write(b"older")
    old = (here / "x.html").read_bytes()

    def refuse(source: Path, target: Path, **how: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "replace", refuse)
    outcome = run(*call)
    assert (outcome.code, "error: x.html: cannot be written: " in outcome.err) == (2, True)
    assert (here / "x.html").read_bytes() == old
    assert [name for name in os.listdir(here) if name.startswith(".")] == []


def test_a_directory_that_may_not_be_written_is_named(here: Path, spawn) -> None:
    (here / "empty").chmod(0o555)
    process = spawn("inspect", MODEL, "--html", "empty/x.html")
    (here / "empty").chmod(0o755)
    assert (process.returncode, process.stdout) == (2, "")
    assert process.stderr.startswith(
        "error: empty/x.html: cannot be written: empty is not writable ("
    )
    assert os.listdir("empty") == []


def test_locations_that_are_no_paths_do_not_upset_a_page(here: Path, run) -> None:
    model = models.decoder()
    for location in ("a\0b", "n" * 5000, "../x", "LATER"):
        weight = model.graph.initializer.add(name="w", data_type=1, dims=[4], data_location=1)
        weight.external_data.add(key="location", value=location)
    saved(model.SerializeToString().replace(b"LATER", b"\xff\xfe\xed\xa0\x80"), here / "odd.onnx")
    outcome = run("inspect", "odd.onnx", "--html", "x.html")
    assert (outcome.code, outcome.err.endswith("\nx.html: page written\n")) == (1, True)
    assert (here / "x.html").exists()


# Models of all sorts.

MODELS = sorted(path.relative_to(FIXTURES).as_posix() for path in FIXTURES.rglob("*.onnx"))
EXPORTED = sorted(path.relative_to(EXPORTS).as_posix() for path in EXPORTS.glob("*/*/**/*.onnx"))


@pytest.mark.parametrize("name", thin(MODELS, 15))
def test_every_fixture_is_shown(name: str, run) -> None:
    outcome = run("inspect", FIXTURES / name)
    assert (outcome.code, "error" in outcome.err) == (0, False)
    assert ("no KV buffer" in outcome.out) == ("encoder" in name)
    document = json.loads(run("inspect", FIXTURES / name, "--format", "json").out)
    validate(document)
    states = {item["state"] for item in document["models"][0]["buffers"]}
    assert states <= {"token" if name.startswith("VLLM/") else "plain"}


@pytest.mark.skipif(not EXPORTED, reason=f"no real exports: {EXPORTS} is not there")
@pytest.mark.parametrize("name", thin(EXPORTED, 2))
def test_every_real_export_is_shown(name: str, run, tmp_path: Path) -> None:
    broken = "llama2l_dynamo_subfn/VLLM" in name
    html = tmp_path / "x.html"
    outcome = run("inspect", EXPORTS / name, "--html", html)
    assert (outcome.code, f"{html}: page written\n" in outcome.err) == (int(broken), True)
    assert ("error KV106" in outcome.err) == broken
    document = json.loads(run("inspect", EXPORTS / name, "--format", "json").out)
    validate(document)
    states = {item["state"] for item in document["models"][0]["buffers"]}
    if not broken:
        assert states <= {"token" if "/VLLM-" in name else "plain"}
    assert bool(states) == ("EncoderWrapper" not in name)


def test_what_was_written_is_told_on_stderr(here: Path, run) -> None:
    assert run("inspect", MODEL, "--html", "x.html").err == WRITTEN
    assert run("inspect", MODEL, "--html", "x.html", "--format", "json").err == ""
    assert run("inspect", MODEL).err == ""


def test_a_page_replaces_an_earlier_one_and_nothing_else(decoder: Path, run) -> None:
    option, place = "--html", decoder.with_name("page")
    for _ in range(2):
        assert run("inspect", decoder, option, place).code == 0
    earlier = place.read_bytes()
    marked = make_mark("inspect").encode()
    produced = onnx.load(decoder)
    produced.producer_name = make_mark("inspect")
    page = b'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">\n<title>'
    for theirs in (
        decoder.read_bytes(),
        b"<svg>mine",
        b"<!DOCTYPE html><html>mine</html>",
        b"# Notes\nThe pages were " + marked + b" --html\n",
        produced.SerializeToString(),
        page + marked + b"</title>",
        b"\n" + earlier,
    ):
        place.write_bytes(theirs)
        outcome = run("inspect", decoder, option, place)
        assert outcome.code == 2
        assert "exists and is not a page made by onnxkvrename inspect" in outcome.err
        assert place.read_bytes() == theirs
    assert run("inspect", decoder, option, place, "--force").code == 0
    assert place.read_bytes() == earlier
    place.unlink()
    place.symlink_to("elsewhere")
    assert run("inspect", decoder, option, place).code == 2
    assert place.is_symlink()


def test_windows_of_a_set_are_shown_once_and_listed_one_by_one_in_json(here: Path, run) -> None:
    write_windows(here / "set", 94)
    outcome = run("inspect", "set", "--html", "x.html")
    assert (outcome.code, outcome.err) == (0, WRITTEN)
    assert outcome.out.startswith("94 windows of Tiny in set  56.5 KiB\n")
    assert outcome.out.count("\n  past_key ") == 2  # bands of one map
    assert (here / "x.html").read_text("utf-8").count("<table") == 10  # bands of ten layers
    assert len(json.loads(run("inspect", "set", "--format", "json").out)["models"]) == 94


def test_windows_with_different_tokens_are_said_as_by_verify(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run
) -> None:
    monkeypatch.chdir(tmp_path)
    write_windows(tmp_path / "set", 3)
    second = sorted((tmp_path / "set").rglob("*.onnx"))[1].relative_to(tmp_path)
    assert run("inspect", "set").code == 0
    onnxkvrename.rename_all([second], "VLLM")
    outcome = run("inspect", "set", "--html", "page.html")
    assert (outcome.code, outcome.err.count("error KV303")) == (1, 1)
    assert (tmp_path / "page.html").read_text().count("KV303") == 1
    findings = {}
    for command in ("inspect", "verify"):
        files = json.loads(run(command, "set", "--format", "json").out)["models"]
        findings[command] = [each for file in files for each in file["findings"]]
    assert findings["inspect"] == findings["verify"]
    assert run("inspect", second).code == 0  # of one window alone nothing is known
    others = [
        path for path in sorted((tmp_path / "set").rglob("*.onnx")) if path.name != second.name
    ]
    assert run("inspect", *others).code == 0  # windows may be missing
