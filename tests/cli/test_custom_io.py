"""The command that writes custom_io.yaml."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import models
import onnx.helper
import pytest
from kill_commands import read_directory
from models import info, node, saved

import onnxkvrename
from onnxkvrename import rename

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
EXPORTS = Path(__file__).resolve().parents[3] / "shared" / "exports" / "llama2l"
MODEL, SIDECAR = "decoder.onnx", "custom_io.yaml"
NAMES = [
    *("past_key.0", "past_key.0_RetainedState", "past_value.0", "past_value.0_RetainedState"),
    *("past_key.1", "past_key.1_RetainedState", "past_value.1", "past_value.1_RetainedState"),
]
WRITTEN = "".join(f" - IOName: {name}\n   Precision: mxint8\n\n" for name in NAMES)


@pytest.fixture
def here(decoder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a model in it."""
    monkeypatch.chdir(decoder.parent)
    return decoder.parent


# The file.


def test_it_is_written_beside_the_model(here: Path, run) -> None:
    before = read_directory(here)
    outcome = run("custom-io", MODEL, "--precision", "mxint8")
    assert (outcome.code, outcome.out) == (0, "")
    assert outcome.err == f"{SIDECAR}: 8 names, mxint8\n"
    assert read_directory(here) == {**before, SIDECAR: WRITTEN.encode()}


def test_inputs_and_outputs_stand_by_layer_and_buffer(tmp_path: Path, run) -> None:
    model = FIXTURES / "plain" / "mla.onnx"
    outcome = run("custom-io", model, "--precision", "float16", "-o", "-")
    names = [line.split()[-1] for line in outcome.out.splitlines() if "IOName" in line]
    assert names[:4] == [
        *("compressed_kv.0", "compressed_kv.0_RetainedState"),
        *("k_pe.0", "k_pe.0_RetainedState"),
    ]
    layers = [int(name.split(".")[1].split("_")[0]) for name in names]
    assert layers == sorted(layers)


def test_what_is_no_kv_is_left_out(run) -> None:
    outcome = run("custom-io", FIXTURES / "VLLM" / "vlm_single.onnx", "--precision", "float", "-o-")
    names = [line.split()[-1] for line in outcome.out.splitlines() if "IOName" in line]
    assert names
    assert [name for name in names if "_VLLM" not in name] == []


@pytest.mark.parametrize(
    ("model", "vision"),
    [
        ("vlm_single.onnx", ["pixel_values"]),
        ("vlm_dual/decoder.onnx", ["vision_embeds", "deepstack_features"]),
    ],
)
def test_vision_buffers_are_listed_on_demand_and_named_otherwise(
    model: str, vision: list[str], run
) -> None:
    """QEfficient lists them first, with the precision of the weights."""
    args = ("custom-io", FIXTURES / "VLLM" / model, "--precision", "mxint8", "-o", "-")
    names = [name for stem in vision for name in (stem, f"{stem}_RetainedState")]
    outcome = run(*args)
    assert outcome.code == 0
    assert f"{', '.join(names)}" in outcome.err
    assert "--vision float16" in outcome.err
    listed = run(*args, "--vision", "float16")
    entries = "".join(f" - IOName: {name}\n   Precision: float16\n\n" for name in names)
    assert (listed.out, listed.err) == (entries + outcome.out, "")
    assert run(*args, "--vision", "banana").code == 2


def test_a_renamed_model_has_its_new_names_in_it(here: Path, run) -> None:
    rename(MODEL, "VLLM")
    assert run("custom-io", MODEL, "--precision", "mxint8").code == 0
    outcome = run(MODEL, "--prefix", "VLLM", "--sidecars", "require", "--check", "--strict")
    assert outcome.code == 0
    assert run(MODEL, "--strip", "--sidecars", "require").code == 0
    assert (here / SIDECAR).read_text() == WRITTEN


def test_a_dash_gives_exactly_the_file(here: Path, piped) -> None:
    before = read_directory(here)
    process = piped(f"$K custom-io {MODEL} --precision mxint8 -o -", here)
    assert (process.returncode, process.stdout, process.stderr) == (0, WRITTEN, "")
    assert read_directory(here) == before


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full")
def test_a_dash_that_cannot_be_written_is_an_error(here: Path, piped) -> None:
    process = piped(f"$K custom-io {MODEL} --precision mxint8 -o - > /dev/full", here)
    assert process.returncode == 2
    assert process.stderr.startswith("error: ")


@pytest.mark.skipif(not EXPORTS.is_dir(), reason=f"no real exports: {EXPORTS} is not there")
@pytest.mark.parametrize("kind", ["plain", "VLLM"])
def test_for_a_real_export_it_is_what_qefficient_wrote(kind: str, tmp_path: Path, run) -> None:
    (export,) = EXPORTS.glob("plain-*")
    model = tmp_path / "LlamaForCausalLM.onnx"
    shutil.copyfile(export / model.name, model)
    if kind == "VLLM":
        rename(model, "VLLM")
    assert run("custom-io", model, "--precision", "float16").code == 0
    real = EXPORTS / f"compile-{kind}" / SIDECAR
    assert (tmp_path / SIDECAR).read_bytes() == real.read_bytes()


# Its place.


def test_another_place_can_be_named(here: Path, run) -> None:
    (here / "out").mkdir()
    outcome = run("custom-io", MODEL, "--precision", "mxint8", "-o", "out/io.yaml")
    assert (outcome.code, outcome.err) == (0, "out/io.yaml: 8 names, mxint8\n")
    assert read_directory(here / "out") == {"io.yaml": WRITTEN.encode()}
    assert not (here / SIDECAR).exists()


def test_it_gets_the_mode_of_any_new_file(here: Path, run) -> None:
    mask = os.umask(0o027)
    try:
        assert run("custom-io", MODEL, "--precision", "mxint8").code == 0
    finally:
        os.umask(mask)
    assert stat.S_IMODE((here / SIDECAR).stat().st_mode) == 0o640


def test_a_file_that_is_there_stays_unless_forced(here: Path, run, snapshot) -> None:
    (here / SIDECAR).write_text("mine")
    before = snapshot(here)
    outcome = run("custom-io", MODEL, "--precision", "mxint8")
    assert (outcome.code, outcome.out) == (2, "")
    assert f"error: {SIDECAR}: already" in outcome.err
    assert "--force" in outcome.err
    assert snapshot(here) == before
    assert run("custom-io", MODEL, "--precision", "mxint8", "--force").code == 0
    assert (here / SIDECAR).read_text() == WRITTEN


@pytest.mark.parametrize("force", [(), ("--force",)])
@pytest.mark.parametrize(
    ("place", "reason"),
    [
        (MODEL, "the model itself"),
        (f"../model/{MODEL}", "the model itself"),
        ("link.onnx", "the model itself"),
        ("below", "is a directory"),
        ("nowhere/io.yaml", "cannot be written"),
    ],
)
def test_a_place_that_cannot_be_is_refused(
    place: str, reason: str, force: tuple[str, ...], here: Path, run, snapshot
) -> None:
    (here / "below").mkdir()
    (here / "link.onnx").symlink_to(MODEL)
    before = snapshot(here)
    outcome = run("custom-io", MODEL, "--precision", "mxint8", "-o", place, *force)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith(f"error: {place}: ")
    assert reason in outcome.err
    assert snapshot(here) == before


# What it is asked for.


@pytest.mark.parametrize(
    ("precision", "hint"),
    [
        ("mxint", "did you mean mxint8?"),
        ("int8", "a scale and"),
        ("banana", "there are: float16, mxint8, float"),
    ],
)
def test_another_precision_is_refused_with_what_may_be_meant(
    precision: str, hint: str, here: Path, run
) -> None:
    outcome = run("custom-io", MODEL, "--precision", precision)
    assert (outcome.code, outcome.out, outcome.err.count("\n")) == (2, "", 1)
    assert f"unknown precision {precision} (" in outcome.err
    assert hint in outcome.err
    assert not (here / SIDECAR).exists()


def test_a_precision_must_be_named(here: Path, run) -> None:
    outcome = run("custom-io", MODEL)
    assert (outcome.code, "--precision" in outcome.err) == (2, True)


def test_there_is_no_json(here: Path, run) -> None:
    outcome = run("custom-io", MODEL, "--precision", "mxint8", "--format", "json")
    assert outcome.code == 2
    assert "--format" in outcome.err
    assert not (here / SIDECAR).exists()


def test_a_model_without_kv_buffers_has_nothing_to_write(here: Path, run) -> None:
    graph = onnx.helper.make_graph([node("Neg", ["x"], ["y"])], "g", [info("x")], [info("y")])
    saved(onnx.helper.make_model(graph), here / "other.onnx")
    outcome = run("custom-io", "other.onnx", "--precision", "mxint8")
    assert (outcome.code, outcome.out) == (2, "")
    assert "error: other.onnx: has no" in outcome.err
    assert not (here / SIDECAR).exists()


def test_a_buffer_with_one_side_missing_is_refused(here: Path, run) -> None:
    broken = models.decoder()
    broken.graph.output.pop()
    saved(broken, here / "broken.onnx")
    outcome = run("custom-io", "broken.onnx", "--precision", "mxint8")
    assert (outcome.code, outcome.out) == (2, "")
    assert "error: broken.onnx: has" in outcome.err
    assert not (here / SIDECAR).exists()


@pytest.mark.parametrize(
    ("name", "reason"),
    [("nowhere.onnx", "no such file"), ("empty", "has no .onnx file"), ("text.onnx", "")],
)
def test_what_is_no_model_is_refused(name: str, reason: str, here: Path, run) -> None:
    (here / "text.onnx").write_text("import onnx\n")
    (here / "empty").mkdir()
    outcome = run("custom-io", name, "--precision", "mxint8")
    assert (outcome.code, outcome.out, outcome.err.count("\n")) == (2, "", 1)
    assert outcome.err.startswith(f"error: {name}: {reason}")


PROFILE = Path(onnxkvrename.__file__).parent / "rules" / "profiles" / "qeff.toml"


def test_rules_of_ones_own_say_what_a_buffer_is(here: Path, run) -> None:
    (here / "rules.toml").write_text(PROFILE.read_text("utf-8").replace("past_", "passed_"))
    outcome = run("custom-io", MODEL, "--precision", "mxint8", "--rules", "rules.toml")
    assert (outcome.code, "has no KV buffer" in outcome.err) == (2, True)


def test_a_name_that_is_not_utf_8_is_told_with_its_model(here: Path, run) -> None:
    args = ("custom-io", "odd.onnx", "--precision", "mxint8", "-o", "-")
    key, state = "AA/past_key.0", "AA/past_key.0_RetainedState"
    nodes = [node("Add", [key, "x"], [state])]
    graph = onnx.helper.make_graph(nodes, "g", [info("x"), info(key)], [info(state)])
    data = onnx.helper.make_model(graph).SerializeToString()
    saved(data, here / "odd.onnx")
    assert run(*args).code == 0
    saved(data.replace(b"AA/", b"A\xff/"), here / "odd.onnx")
    outcome = run(*args)
    assert (outcome.code, outcome.out, outcome.err.count("\n")) == (2, "", 1)
    assert "error: odd.onnx:" in outcome.err
    assert "not UTF-8" in outcome.err


@pytest.mark.parametrize("name", ["json", "github"])
def test_a_format_it_does_not_know_prints_nothing_on_stdout(name: str, decoder: Path, run) -> None:
    outcome = run("custom-io", decoder, "--precision", "float16", "--format", name)
    assert (outcome.code, outcome.out) == (2, "")
    assert "--format" in outcome.err


def test_a_model_in_a_directory_is_named(decoder: Path, run) -> None:
    outcome = run("custom-io", decoder.parent, "--precision", "float16")
    assert (outcome.code, outcome.out) == (2, "")
    assert f"such as {decoder}" in outcome.err
