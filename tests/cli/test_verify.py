from __future__ import annotations

import json
import shutil
from pathlib import Path

import models
import onnx
import pytest
import window_sets
from conftest import Run
from models import KEY, KEY_OUT, VALUE, VALUE_OUT, node, saved
from onnx import ModelProto
from tiers import full, thin

import onnxkvrename
from onnxkvrename.findings import CODES
from onnxkvrename.rules.load import list_profiles

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
EXPORTS = Path(__file__).resolve().parents[3] / "shared" / "exports"
MODEL = "decoder.onnx"
SAID = (
    "decoder.onnx: 4 of 4 buffers retained by dataflow, layers 0-1, updated by ScatterElements; "
    "no token"
)


def swapped() -> ModelProto:
    """Key and value change places, though every name looks right."""
    model = models.decoder()
    names = {KEY_OUT: VALUE_OUT, VALUE_OUT: KEY_OUT}
    for item in model.graph.node:
        item.output[:] = [names.get(name, name) for name in item.output]
    return model


def with_unknown_operator() -> ModelProto:
    """With an operator beside the buffers that nothing defines."""
    return models.decoder(node("Mystery", ["x"], ["y"], domain="local"))


@pytest.fixture
def here(decoder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with sound models, faulty ones, and files that are no models."""
    here = decoder.parent
    shutil.copyfile(FIXTURES / "VLLM" / MODEL, here / "renamed.onnx")
    shutil.copyfile(FIXTURES / "plain" / "vlm_dual" / "encoder.onnx", here / "encoder.onnx")
    saved(swapped(), here / "swapped.onnx")
    saved(with_unknown_operator(), here / "custom.onnx")
    saved(b"import onnx\n", here / "text.onnx")
    (here / "empty").mkdir()
    window_sets.write_windows(here / "windows", 3)
    monkeypatch.chdir(here)
    return here


# Exit codes.


@pytest.mark.parametrize(
    "args",
    [
        (MODEL,),
        (MODEL, "renamed.onnx", "custom.onnx"),
        (MODEL, "encoder.onnx"),
        ("windows",),
        ("windows/layer_1_2",),
        ("renamed.onnx", "--prefix", "VLLM"),
        (MODEL, "--strict"),
        (MODEL, "--jobs", "1"),
    ],
    ids=" ".join,
)
def test_where_all_holds_the_exit_code_is_0(args: tuple[str, ...], here: Path, run) -> None:
    outcome = run("verify", *args)
    assert (outcome.code, outcome.err) == (0, "")
    assert "buffers retained" in outcome.out


@pytest.mark.parametrize(
    ("args", "code"),
    [
        (("swapped.onnx",), "KV110"),
        ((MODEL, "swapped.onnx"), "KV110"),
        (("encoder.onnx",), "KV001"),
        (("windows/layer_0_1", "windows/layer_2_3"), "KV302"),
        ((MODEL, "--prefix", "VLLM"), "KV116"),
        (("renamed.onnx", "--prefix", "VLL"), "KV116"),
    ],
)
def test_a_finding_of_severity_error_is_1(
    args: tuple[str, ...], code: str, here: Path, run
) -> None:
    outcome = run("verify", *args)
    assert outcome.code == 1
    assert f": error {code}: " in outcome.err
    assert "does not verify" in outcome.out


MISTAKES = pytest.mark.parametrize(
    ("args", "said"),
    [
        ((), "no MODEL given: pass an .onnx file or a directory"),
        ((MODEL, "--prefix"), "option '--prefix' requires an argument"),
        ((MODEL, "--prefix", "a_b"), "the token 'a_b' may contain only ASCII letters and digits"),
        ((MODEL, "--prefix", ""), "the token '' is empty"),
        ((MODEL, "--nonsense"), "--nonsense"),
        ((MODEL, "-o", "x.onnx"), "-o"),
        (
            (MODEL, "--profile", "nobody"),
            f"no such profile: nobody (profiles: {', '.join(list_profiles())})",
        ),
        ((MODEL, "--rules", "none.toml"), "none.toml: no such file"),
        (("decodr.onnx",), "decodr.onnx: no such file (did you mean decoder.onnx?)"),
        (("text.onnx",), "text.onnx: is a text file, not an ONNX model"),
        (("empty",), "empty: has no .onnx file, at any depth"),
        (("",), "an empty path: is a variable not set?"),
    ],
)


@MISTAKES
def test_a_mistake_gets_one_line_and_exit_code_2(
    args: tuple[str, ...], said: str, here: Path, run, snapshot
) -> None:
    before = snapshot(here)
    outcome = run("verify", *args)
    (error,) = outcome.err.splitlines()
    assert (outcome.code, outcome.out) == (2, "")
    assert error.startswith("error: ")
    assert said in error
    assert "a bug in" not in error
    assert snapshot(here) == before


@MISTAKES
def test_a_mistake_is_told_in_json_too(args: tuple[str, ...], said: str, here: Path, run) -> None:
    outcome = run("verify", "--format", "json", *args)
    document = json.loads(outcome.out)
    errors = [document["error"], *(model["error"] for model in document["models"])]
    told = [f"{error['path']}: {error['message']} ({error['hint']})" for error in errors if error]
    assert said in told[0].removeprefix("None: ")
    assert outcome.code == document["exit_code"] == 2


def test_a_model_that_cannot_be_read_is_2_and_the_others_are_still_judged(here: Path, run) -> None:
    outcome = run("verify", "text.onnx", MODEL, "swapped.onnx")
    assert outcome.code == 2
    assert outcome.out == f"{SAID}\nswapped.onnx: does not verify\n"
    assert outcome.err.startswith("error: text.onnx: is a text file")


# Answers.


def test_verdicts_are_answered_on_stdout_and_findings_on_stderr(here: Path, run) -> None:
    assert run("verify", MODEL) == (0, f"{SAID}\n", "")
    outcome = run("verify", "swapped.onnx")
    assert outcome.out == "swapped.onnx: does not verify\n"
    assert outcome.err == (
        "swapped.onnx: error KV110: past_key.0_RetainedState is computed from past_value.0, "
        "not from its own input past_key.0; likewise past_value.0_RetainedState\n"
        "  -> the cache would be mixed up or lost; export the model again; -v shows each\n"
    )


def test_quiet_says_nothing_but_what_is_wrong(here: Path, run) -> None:
    assert run("verify", MODEL, "-q") == (0, "", "")
    outcome = run("verify", "swapped.onnx", "--quiet")
    assert (outcome.code, outcome.out, outcome.err.count("KV110")) == (1, "", 1)


def test_verbose_tells_each_buffer(here: Path, run) -> None:
    outcome = run("verify", MODEL, "-v")
    assert outcome.out.splitlines()[::4] == [
        SAID,
        "  past_value.1 -> past_value.1_RetainedState: updated by ScatterElements, "
        "written in place",
    ]
    assert "  past_key.0 -> past_key.0_RetainedState: not from its input" in (
        run("verify", "swapped.onnx", "--verbose").out
    )


@pytest.mark.parametrize(
    ("args", "code", "verified"),
    thin(
        [
            ((MODEL,), 0, [True]),
            (("swapped.onnx",), 1, [False]),
            ((MODEL, "text.onnx", "swapped.onnx"), 2, [True, False, False]),
            (("windows",), 0, [True] * 3),
            (("none.onnx",), 2, []),
            ((), 2, []),
        ],
        6,
    ),
)
@pytest.mark.parametrize(
    "spelling", [("--format", "json"), pytest.param(("--format=json",), marks=full)]
)
def test_json_is_one_valid_document_whatever_happens(
    spelling: tuple[str, ...],
    args: tuple[str, ...],
    code: int,
    verified: list[bool],
    here: Path,
    run,
) -> None:
    outcome = run("verify", *args, *spelling)
    document = json.loads(outcome.out)
    assert outcome.code == document["exit_code"] == code
    assert [model["verified"] for model in document["models"]] == verified
    assert (document["error"] is not None) == (not verified)


@pytest.mark.parametrize(
    ("error", "code"), [(ZeroDivisionError("/ 0"), 2), (KeyboardInterrupt, 130)]
)
def test_json_of_a_bug_or_an_interrupt_is_a_document_too(
    error: BaseException, code: int, here: Path, run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **how: object) -> None:
        raise error

    monkeypatch.setattr("onnxkvrename.cli.verify.verify_model", fail)
    outcome = run("verify", MODEL, "--format", "json")
    document = json.loads(outcome.out)
    assert outcome.code == document["exit_code"] == code
    assert ("a bug in onnxkvrename: ZeroDivisionError" in outcome.err) == (code == 2)
    if code == 2:
        assert "in verify_model\n" not in outcome.err
        assert run("verify", MODEL, "-v").err.startswith("Traceback (most recent call last):")


def test_github_annotates_the_models(here: Path, run) -> None:
    outcome = run("verify", MODEL, "swapped.onnx", "text.onnx", "--format", "github")
    assert (outcome.code, outcome.err) == (2, "")
    assert outcome.out.splitlines() == [
        f"::notice file=decoder.onnx,title=verify::{SAID.removeprefix('decoder.onnx: ')}",
        "::error file=swapped.onnx,title=KV110::past_key.0_RetainedState is computed from "
        "past_value.0, not from its own input past_key.0 "
        "(the cache would be mixed up or lost; export the model "
        "again)",
        "::error file=swapped.onnx,title=KV110::past_value.0_RetainedState is computed from "
        "past_key.0, not from its own input past_value.0 "
        "(the cache would be mixed up or lost; export the model "
        "again)",
        "::notice file=swapped.onnx,title=verify::does not verify",
        "::error file=text.onnx,title=failed::text.onnx: is a text file, not an ONNX model "
        "(pass a binary .onnx file)",
    ]
    assert run("verify", MODEL, "--format", "github", "-q") == (0, "", "")


def test_github_annotates_what_kept_the_job_from_being_done(here: Path, run) -> None:
    outcome = run("verify", "lost.onnx", "--format", "github")
    assert outcome.code == 2
    assert outcome.out.startswith("::error file=lost.onnx,title=failed::lost.onnx: no such file")
    outcome = run("verify", MODEL, "--nonsense", "--format=github")
    assert outcome.out.startswith("::error title=failed::no such option")


HOSTILE = "##[x]\x1b[2J\u202e[/red]:smiley:"
LINES = f"a\n::error::{HOSTILE}"
"""No buffer is called like this: no pattern goes over the end of a line."""


def hostile(path: Path) -> Path:
    """A model with a hostile name in every place, and with faults that name them."""
    model = swapped()
    names = {name: f"{HOSTILE}/{name}" for name in (KEY, VALUE, KEY_OUT, VALUE_OUT)}
    names["logits"] = f"{LINES}VLLM"
    for item in model.graph.node:
        item.name = LINES
        item.input[:] = [names.get(name, name) for name in item.input]
        item.output[:] = [names.get(name, name) for name in item.output]
    for value in (*model.graph.input, *model.graph.output):
        value.name = names.get(value.name, value.name)
    extra = node(LINES, ["x"], [f"{LINES}_RetainedState"], domain="local")
    model.graph.node.append(extra)
    model.graph.output.append(models.info(f"{LINES}_RetainedState", LINES))
    return saved(model, path)


@pytest.mark.parametrize("form", ["text", "github"])
def test_hostile_names_are_only_shown(form: str, here: Path, run) -> None:
    path = hostile(here / "a\n::error::b.onnx")
    asked = ("-v", "--prefix", "VLLM")
    outcome = run("verify", path.name, "--format", form, *asked)
    said = outcome.out + outcome.err
    assert outcome.code == 1
    codes = {"KV110", "KV111", "KV116"}
    assert {code for code in CODES if code in said} == codes
    assert "[x]\\x1b[2J\\u202e[/red]:smiley:" in said
    assert not set(said) & {"\x1b", "\u202e", "\r"}
    commands = ("::error file=", "::warning file=", "::notice file=")
    for line in said.splitlines():
        assert line.startswith(commands if form == "github" else ("a\\x0a::error::b.onnx: ", "  "))
    assert form == "text" or "##[" not in said


def test_hostile_names_are_whole_in_json(here: Path, run) -> None:
    path = hostile(here / "a\nb.onnx")
    outcome = run("verify", path.name, "--format", "json")
    document = json.loads(outcome.out)
    (model,) = document["models"]
    assert model["path"] == "a\nb.onnx"
    assert model["pairs"][0]["input"] == f"{HOSTILE}/past_key.0"
    assert model["pairs"][0]["updated_by"]["node"] == LINES


def test_names_that_are_no_text_do_not_upset_it(here: Path, run) -> None:
    data = models.decoder().SerializeToString().replace(b"logits", b"\xfe\xffVLLM")
    path = saved(data.replace(b"past_key.0", b"\xffast_key.0"), here / "m.onnx")
    outcome = run("verify", path.name, "-v", "--prefix", "VLLM")
    assert outcome.code == 1
    assert "error KV116: \\xfe\\xffVLLM contains VLLM, but is not a KV buffer" in outcome.err
    assert (outcome.out + outcome.err).isascii()


# Many models.


def test_windows_are_checked_together(here: Path, run) -> None:
    (here / "windows" / "layer_1_2" / "Tiny_layer_tmp_1_2.onnx").unlink()
    outcome = run("verify", "windows")
    assert (outcome.code, outcome.err.count("KV302")) == (1, 1)
    window_sets.write_windows(here / "again", 2)
    saved(
        window_sets.build_window(1, 2, "V"),
        here / "again" / "layer_1_2" / "Tiny_layer_tmp_1_2.onnx",
    )
    outcome = run("verify", "again")
    assert (outcome.code, "KV303" in outcome.err) == (1, True)


def test_in_processes_side_by_side_the_answer_is_the_same(here: Path, run) -> None:
    args = ("verify", ".", "--prefix", "VLLM", "-v")
    alone = run(*args, "--jobs", "1")
    assert alone.code == 2
    assert alone.out.count("\n  ") > 8
    assert run(*args, "--jobs", "2") == alone


# Models of all sorts.

MODELS = sorted(path.relative_to(FIXTURES).as_posix() for path in FIXTURES.rglob("*.onnx"))
ENCODERS = {f"{kind}/vlm_dual/encoder.onnx" for kind in ("plain", "VLLM")}


@pytest.mark.parametrize("name", thin(MODELS, 15))
def test_every_fixture_verifies(name: str, run) -> None:
    beside = FIXTURES / Path(name).parent if name in ENCODERS else FIXTURES / name
    token = ("--prefix", "VLLM") if name.startswith("VLLM") else ()
    outcome = run("verify", beside, *token)
    assert outcome.code == 0
    assert "error" not in outcome.err
    assert ("KV112" in outcome.err) == ("internal_suffix" in name)
    assert "buffers retained" in outcome.out


@full
def test_all_fixtures_of_one_token_verify_together(run) -> None:
    assert run("verify", FIXTURES / "plain").code == 0
    assert run("verify", FIXTURES / "VLLM", "--prefix", "VLLM").code == 0
    outcome = run("verify", FIXTURES / "plain", "--prefix", "VLLM", "-q")
    assert (outcome.code, "KV116" in outcome.err) == (1, True)


EXPORTED = sorted(path.relative_to(EXPORTS).as_posix() for path in EXPORTS.glob("*/*/**/*.onnx"))
SOUND = [name for name in EXPORTED if "EncoderWrapper" not in name and "subfn/VLLM" not in name]
BROKEN = [name for name in EXPORTED if "llama2l_dynamo_subfn/VLLM" in name]
SOUND += [name for name in EXPORTED if "llama2l_subfn/VLLM" in name]
GROWING = [name for name in SOUND if name.startswith("gemma3text/")]
SOUND = [name for name in SOUND if name not in GROWING]
real = pytest.mark.skipif(not EXPORTED, reason=f"no real exports: {EXPORTS} is not there")


@real
@pytest.mark.parametrize("name", thin(SOUND, 3))
def test_a_real_export_verifies(name: str, run) -> None:
    token = ("--prefix", "VLLM") if "/VLLM-" in name else ()
    outcome = run("verify", EXPORTS / name, *token)
    assert (outcome.code, outcome.err) == (0, "")
    proved, _, count = outcome.out.partition(": ")[2].partition(" buffers")[0].partition(" of ")
    assert proved == count != "0"
    plain = run("verify", EXPORTS / name, "--prefix", "OTHER")
    assert (plain.code, "KV116" in plain.err) == (1, True)


@real
@pytest.mark.parametrize("name", GROWING)
def test_the_real_export_that_grows_does_not_verify(name: str, run) -> None:
    outcome = run("verify", EXPORTS / name, "--format", "json")
    (model,) = json.loads(outcome.out)["models"]
    assert (outcome.code, model["verified"]) == (1, False)
    assert {found["code"] for found in model["findings"]} == {"KV120"}
    assert {(pair["update"], pair["update_axis"]) for pair in model["pairs"]} == {("append", 2)}


@real
@pytest.mark.parametrize("name", BROKEN)
def test_the_broken_export_names_its_fault(name: str, run) -> None:
    outcome = run("verify", EXPORTS / name, "-v")
    assert outcome.code == 1
    codes = {part.partition(":")[0] for part in outcome.err.split(": error ")[1:]}
    assert codes == {"KV106"}
    assert outcome.err.count("is both a graph input and a retained output") == 4


@real
def test_every_export_is_judged_by_one_of_these_tests(run) -> None:
    encoders = [name for name in EXPORTED if "EncoderWrapper" in name]
    assert {*SOUND, *GROWING, *BROKEN, *encoders} == set(EXPORTED)
    assert (len(BROKEN), len(encoders), len([*SOUND, *GROWING]) >= 25) == (1, 2, True)
    for name in encoders:
        outcome = run("verify", EXPORTS / name)
        assert (outcome.code, "KV001" in outcome.err) == (1, True)
    decoders = [EXPORTS / name for name in SOUND if "gemma3vlm_dual/VLLM" in name]
    assert run("verify", EXPORTS / encoders[0], *decoders, "--prefix", "VLLM").code == 0


@real
@pytest.mark.parametrize("kind", ["plain", "VLLM"])
def test_the_windows_of_a_real_export_verify_together(kind: str, run) -> None:
    (windows,) = EXPORTS.glob(f"lw_qwen3moe/{kind}-*/onnx_layerwise_tmp")
    merged = windows.parent / "merged_0-2.onnx"
    token = ("--prefix", "VLLM") if kind == "VLLM" else ()
    outcome = run("verify", windows, merged, *token)
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.count("buffers retained") == 3
    (first, _) = sorted(windows.rglob("*.onnx"))
    outcome = run("verify", first, merged, "--format", "json")
    found = [
        item["code"] for model in json.loads(outcome.out)["models"] for item in model["findings"]
    ]
    assert (outcome.code, found) == (1, ["KV307"])


# A set and its sources.


@pytest.fixture
def renamed_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run) -> Path:
    """The working directory, with a set in ``export`` and its result in ``renamed``."""
    monkeypatch.chdir(tmp_path)
    window_sets.write_windows(tmp_path / "export", 3)
    assert run("rename", "export", "--prefix", "VLLM", "-d", "renamed", "-q").code == 0
    return tmp_path


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_set_is_compared_with_the_sources_of_the_same_paths(
    jobs: str, renamed_set: Path, run
) -> None:
    outcome = run("verify", "renamed", "--renamed-from", "export", "--jobs", jobs)
    assert outcome.code == 0, outcome
    changed = sorted((renamed_set / "renamed").rglob("*.onnx"))[1]
    model = onnx.load(changed)
    model.producer_name = "another"
    changed.write_bytes(model.SerializeToString())
    outcome = run("verify", "renamed", "--renamed-from", "export", "--jobs", jobs)
    assert outcome.code == 1
    assert f"{changed.relative_to(renamed_set)}: error KV121: " in outcome.err
    assert outcome.err.count("KV121") == 1


def test_one_model_is_found_in_the_directory_of_its_source(renamed_set: Path, run) -> None:
    model = sorted((renamed_set / "renamed").rglob("*.onnx"))[0]
    export = renamed_set / "export" / model.parent.relative_to(renamed_set / "renamed")
    assert run("verify", model, "--renamed-from", export).code == 0


def test_a_model_without_a_source_is_named(renamed_set: Path, run) -> None:
    missing = sorted((renamed_set / "export").rglob("*.onnx"))[1].relative_to(renamed_set)
    missing.unlink()
    outcome = run("verify", "renamed", "--renamed-from", "export")
    path = Path("renamed") / missing.relative_to("export")
    assert (outcome.code, outcome.err) == (
        2,
        f"error: {missing}: no source of {path} (models are matched by their paths below the "
        "directories)\n",
    )


def test_one_file_is_not_the_source_of_several_models(renamed_set: Path, run) -> None:
    source = next((renamed_set / "export").rglob("*.onnx"))
    outcome = run("verify", "renamed", "--renamed-from", source)
    assert (outcome.code, outcome.err) == (
        2,
        "error: --renamed-from names one model, but 3 are verified (pass the directory of their "
        "sources)\n",
    )


def build_tiled_decoder() -> onnx.ModelProto:
    """A decoder whose key is repeated, as often as some nodes compute: once."""
    model = models.decoder()
    (write,) = (node for node in model.graph.node if node.name == "write_key")
    write.output[0] = "written"
    dtype = onnx.TensorProto.INT64
    model.graph.initializer.append(onnx.helper.make_tensor("zeros", dtype, [1], [0]))
    shape = [models.node("Shape", [models.KEY], ["shape"])]
    once = [models.node("Mul", ["shape", "zeros"], ["none"])]
    once.append(models.node("Equal", ["none", "zeros"], ["is_once"]))
    once.append(models.node("Cast", ["is_once"], ["once"], to=dtype))
    tile = [models.node("Tile", ["written", "once"], [models.KEY_OUT])]
    nodes = [*model.graph.node[:1], *shape, *once, *tile, *model.graph.node[1:]]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return model


def test_size_that_the_graph_does_not_show_is_a_warning(tmp_path: Path, run) -> None:
    path = saved(build_tiled_decoder(), tmp_path / "model.onnx")
    outcome = run("verify", path)
    assert (outcome.code, outcome.err.count("warning KV113")) == (0, 1)
    assert "cannot be proved to have the size of past_key.0" in outcome.err
    assert ", 1 not shown to keep its size, " in outcome.out
    assert run("verify", path, "--strict").code == 1


def test_the_line_of_a_model_ends_in_its_token(here: Path, run: Run) -> None:
    assert run("verify", MODEL).out.endswith("; no token\n")
    assert run(MODEL, "--target", "vllm-qaic", "-o", "two/renamed.onnx").code == 0
    for options in ((), ("--target", "vllm-qaic"), ("--renamed-from", MODEL)):
        line = run("verify", "two/renamed.onnx", *options).out.splitlines()[0]
        assert line.endswith("; token vllmKvCache")
    shutil.copyfile(MODEL, "two/plain.onnx")
    both = run("verify", "two").out
    assert ("; no token\n" in both, "; token vllmKvCache\n" in both) == (True, True)


def test_two_tokens_in_one_model_are_an_error(here: Path, run: Run) -> None:
    model = models.decoder()
    renamed = onnxkvrename.rename_model(model, "A")
    half = renamed.SerializeToString().replace(b"past_value.0_A", b"past_value.0_B")
    saved(half, Path("half.onnx"))
    outcome = run("verify", "half.onnx")
    assert (outcome.code, outcome.out) == (1, "half.onnx: does not verify\n")
    assert "error KV116: 2 names " in outcome.err
