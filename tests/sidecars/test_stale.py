"""Stale sidecars: found by every command that judges a model, and never where they are right."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest
from custom_io_files import format_custom_io
from hints import find_commands

from onnxkvrename import rename
from onnxkvrename.rules.load import PROFILES_DIRECTORY

MODEL, SIDECAR = "decoder.onnx", "custom_io.yaml"
NAMES = [f"past_{part}.{layer}" for layer in (0, 1) for part in ("key", "value")]
PLAIN = format_custom_io([(name, f"{name}_RetainedState") for name in NAMES], "mxint8")
VLLM = format_custom_io([(f"{n}_VLLM", f"{n}_VLLM_RetainedState") for n in NAMES], "mxint8")


@pytest.fixture
def stale(decoder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of a renamed model whose sidecar has the names from before."""
    rename(decoder, "VLLM")
    (decoder.parent / SIDECAR).write_text(PLAIN)
    monkeypatch.chdir(decoder.parent)
    return decoder.parent


@pytest.mark.parametrize(
    ("command", "code", "severity"),
    [("verify", 1, "error"), ("inspect", 0, "warning")],
)
def test_each_command_that_judges_a_model_finds_it(
    command: str, code: int, severity: str, stale: Path, run
) -> None:
    assert run(command, MODEL, "--format", "github").out.count("KV406") == 1
    outcome = run(command, MODEL, "--format", "json")
    assert outcome.code == code
    assert '"KV406"' in outcome.out
    assert f"::{severity} " in run(command, MODEL, "--format", "github").out
    (stale / SIDECAR).unlink()
    assert "KV406" not in run(command, MODEL, "--format", "json").out


def test_it_keeps_a_model_from_being_ready_for_a_consumer(stale: Path, run) -> None:
    rename(MODEL, "vllmKvCache", replace=True, sidecars="off")
    outcome = run("verify", MODEL, "--target", "vllm-qaic")
    assert (outcome.code, "vllm-qaic cannot use it" in outcome.out) == (1, True)


@pytest.mark.parametrize("start", ["renamed", "stripped", "another token"])
def test_the_hint_is_a_command_that_mends_it(start: str, stale: Path, run) -> None:
    if start == "stripped":
        rename(MODEL, strip=True, sidecars="off")
        (stale / SIDECAR).write_text(VLLM)
    elif start == "another token":
        (stale / SIDECAR).write_text(VLLM.replace("VLLM", "OTHER"))
    models = json.loads(run("inspect", MODEL, "--format", "json").out)["models"]
    (hint,) = [f["hint"] for f in models[0]["findings"] if f["code"] == "KV406"]
    assert run(*shlex.split(hint.strip("`"))[1:]).code == 0
    assert "KV406" not in run("verify", MODEL).err


@pytest.mark.parametrize("now", ["", "VLLM"])
@pytest.mark.parametrize("look", [(), ("--check",), ("-n",), ("-d", "out")])
def test_a_rename_refuses_a_different_token_in_a_sidecar_as_in_a_model(
    now: str, look: tuple[str, ...], stale: Path, run, snapshot
) -> None:
    """One answer, whether the model still has to be renamed or not; --replace changes both."""
    if not now:
        rename(MODEL, strip=True, sidecars="off")
    (stale / SIDECAR).write_text(VLLM.replace("VLLM", "OTHER"))
    before = snapshot(stale)
    for _ in range(2):
        outcome = run(MODEL, "--prefix", "VLLM", *look)
        assert (outcome.code, outcome.err.count("KV4")) == (1, 1)
        assert f"error KV406: {SIDECAR} has 8" in outcome.err
        assert "--replace" in outcome.err
        assert snapshot(stale) == before
    assert run(MODEL, "--prefix", "VLLM", "--replace").code == 0
    assert (stale / SIDECAR).read_text() == VLLM
    assert run(MODEL, "--prefix", "VLLM", *look).err.count("KV4") == 0
    assert "KV4" not in run("verify", MODEL).err


def test_strip_removes_any_token_in_one_run(stale: Path, run) -> None:
    (stale / SIDECAR).write_text(VLLM.replace("VLLM", "OTHER"))
    outcome = run(MODEL, "--strip", "--prefix", "VLLM")
    assert (outcome.code, outcome.err.count("error KV406")) == (1, 1)
    assert "--strip" in outcome.err
    assert run(MODEL, "--strip").code == 0
    assert (stale / SIDECAR).read_text() == PLAIN


def test_one_of_a_different_token_goes_along_with_replace(stale: Path, run) -> None:
    rename(MODEL, strip=True, sidecars="off")
    (stale / SIDECAR).write_text(VLLM.replace("VLLM", "OTHER"))
    assert run(MODEL, "--prefix", "VLLM", "--replace", "-d", "out").code == 0
    assert (stale / "out" / SIDECAR).read_text() == VLLM


def test_a_copy_beside_the_model_leaves_it_with_a_warning(stale: Path, run) -> None:
    """It can fit one of the two models only, and with a different token it fits neither."""
    rename(MODEL, strip=True, sidecars="off")
    other = VLLM.replace("VLLM", "OTHER")
    (stale / SIDECAR).write_text(other)
    for number, replace in enumerate([(), ("--replace",)]):
        outcome = run(MODEL, "--prefix", "VLLM", "-o", f"new{number}.onnx", *replace)
        assert (outcome.code, outcome.err.count("warning KV406")) == (0, 1)
        assert "-d renamed" in outcome.err
        assert "KV404" not in outcome.err
        assert f"because {MODEL} keeps them" not in outcome.err
        assert (stale / SIDECAR).read_text() == other


def test_it_may_be_the_sidecar_of_another_model_in_the_directory(stale: Path, run) -> None:
    """With --replace, too, names that another model has are not those of this one."""
    rename(MODEL, "OTHER", replace=True, output="other.onnx", sidecars="off")
    (stale / SIDECAR).write_text(VLLM.replace("VLLM", "OTHER"))
    before = (stale / SIDECAR).read_text()
    for options in (["--prefix=VLLM"], ["--prefix=VLLM", "--replace"], ["--strip"]):
        outcome = run(MODEL, *options)
        assert (outcome.code, outcome.err.count("KV4")) == (0, 0)
        assert (stale / SIDECAR).read_text() == before


def test_a_rename_that_leaves_sidecars_warns_of_any_old_names(stale: Path, run) -> None:
    (stale / SIDECAR).write_text(VLLM.replace("VLLM", "OTHER"))
    outcome = run(MODEL, "--prefix", "VLLM", "--sidecars", "off")
    assert (outcome.code, "warning KV406" in outcome.err) == (0, True)
    (repair,) = find_commands(outcome.err)
    assert run(*shlex.split(repair)[1:]).code == 0
    assert (stale / SIDECAR).read_text() == VLLM


def test_the_hint_has_the_rules_of_the_command(stale: Path, run) -> None:
    shutil.copyfile(PROFILES_DIRECTORY / "qeff.toml", "my rules.toml")
    outcome = run("verify", MODEL, "--rules", "my rules.toml")
    assert f"-> `onnxkvrename {MODEL} --prefix VLLM --rules 'my rules.toml'`" in outcome.err


def test_one_of_an_earlier_compile_is_a_warning(stale: Path, run) -> None:
    (stale / "qpc-0123456789abcdef").mkdir()
    (stale / SIDECAR).rename(stale / "qpc-0123456789abcdef" / SIDECAR)
    outcome = run("verify", MODEL)
    assert (outcome.code, "warning KV406" in outcome.err) == (0, True)
    assert "-> compile the model again" in outcome.err


def test_names_of_another_model_in_the_directory_are_right(stale: Path, run) -> None:
    rename(MODEL, strip=True, output="plain.onnx", sidecars="off")
    assert "KV406" not in run("verify", MODEL).err


@pytest.mark.parametrize(
    "text", [VLLM, PLAIN + VLLM, "- {IOName: pixel_values, Precision: float16}", ""]
)
def test_current_and_unrelated_names_are_right(text: str, stale: Path, run) -> None:
    (stale / SIDECAR).write_text(text)
    assert run("verify", MODEL).code == 0


def test_a_name_that_cannot_be_replaced_is_stale_too(stale: Path, run) -> None:
    (stale / SIDECAR).write_text("- IOName: >-\n    past_key.0\n")
    outcome = run("verify", MODEL)
    assert (outcome.code, outcome.err.count("error KV406")) == (1, 1)


def test_a_known_name_that_cannot_be_read_is_said(stale: Path, run) -> None:
    (stale / SIDECAR).write_text("- IOName: [")
    (stale / "other.yaml").write_text("- IOName: [")
    outcome = run("verify", MODEL)
    assert (outcome.code, outcome.err.count("KV406")) == (0, 1)
    assert f"{SIDECAR} cannot be checked" in outcome.err


@pytest.mark.parametrize("command", ["verify", "inspect"])
def test_a_model_that_cannot_be_read_may_have_the_old_names(command: str, stale: Path, run) -> None:
    """Nobody is told to change a file that may be right."""
    (stale / "other.onnx").write_bytes(b"torn")
    outcome = run(command, MODEL, "--format", "json")
    assert outcome.code == 0
    assert "other.onnx cannot" in outcome.out
    assert "before a rename" not in outcome.out
