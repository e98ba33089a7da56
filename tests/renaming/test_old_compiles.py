"""A compile beside a model that is renamed has the old names, which only its binary repeats."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import qefficient_exports
from conftest import FIXTURES, Run

from onnxkvrename import rename

MODEL, COMPILE = Path("m.onnx"), Path("qpc-0123456789abcdef")
VLLM = ("--prefix", "VLLM")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model and a compile of it, which is younger."""
    monkeypatch.chdir(tmp_path)
    shutil.copyfile(FIXTURES / "plain" / "decoder.onnx", MODEL)
    compile_model(MODEL)


def compile_model(model: Path, name: Path = COMPILE, *, seconds: int = 1) -> Path:
    """Write a compile that is so much younger than a model, and return its binary."""
    binary = model.parent / name / "qpc" / "programqpc.bin"
    binary.parent.mkdir(parents=True)
    binary.write_bytes(b"\0compiled")
    time = model.stat().st_mtime + seconds
    os.utime(binary, (time, time))
    return binary


def find_old(text: str) -> list[str]:
    """Return the lines about compiles, without the model."""
    return [line.partition(": ")[2] for line in text.splitlines() if "KV406" in line]


OLD = f"warning KV406: {COMPILE} was compiled before this rename, and has the names of that time"


@pytest.mark.parametrize("option", ["", "-n", "--check"])
@pytest.mark.parametrize("change", ["rename", "strip", "replace", "output"])
def test_a_rename_in_place_names_the_compiles_that_are_there(
    change: str, option: str, run: Run
) -> None:
    args = (str(MODEL), *VLLM)
    if change in ("strip", "replace"):
        shutil.copyfile(FIXTURES / "VLLM" / "decoder.onnx", MODEL)
        args = (str(MODEL), *(["--strip"] if change == "strip" else ["--prefix", "X", "--replace"]))
    elif change == "output":
        shutil.copyfile(MODEL, "source.onnx")
        Path("source").mkdir()
        args = ("source/m.onnx", *VLLM, "-o", str(MODEL), "--force")
        shutil.move("source.onnx", "source/m.onnx")
    outcome = run(*args, *filter(None, [option]))
    assert (outcome.code, find_old(outcome.err)) == (int(option == "--check"), [OLD])
    assert f"-> compile the model again, and delete {COMPILE}" in outcome.err
    assert Path(COMPILE, "qpc", "programqpc.bin").read_bytes() == b"\0compiled"


def test_verify_names_it_until_it_is_gone(run: Run) -> None:
    target = ("verify", MODEL, "--target", "vllm-qaic")
    assert run(MODEL, "--target", "vllm-qaic", "-q").code == 0
    time = MODEL.stat().st_mtime - 5
    os.utime(COMPILE / "qpc" / "programqpc.bin", (time, time))
    compile_model(MODEL, Path("qpc-fedcba9876543210"))
    for command in (target, ("verify", MODEL)):
        outcome = run(*command)
        (old,) = find_old(outcome.err)
        assert (
            old == f"warning KV406: {COMPILE} is older than m.onnx, and has the names of that time"
        )
        assert outcome.code == 0
        assert run(*command, "--strict").code == 1
    shutil.rmtree(COMPILE)
    assert run(*target).err.count("KV406") == 0


def test_a_fresh_compile_is_not_named(run: Run) -> None:
    shutil.rmtree(COMPILE)
    assert run(MODEL, *VLLM, "-q") == (0, "", "")
    compile_model(MODEL)
    for command in (("verify", MODEL), (MODEL, *VLLM), (MODEL, *VLLM, "--check")):
        outcome = run(*command)
        assert (outcome.code, find_old(outcome.err)) == (0, [])


@pytest.mark.parametrize(
    "args",
    [("-o", "new.onnx"), ("-d", "out"), ("--prefix", "")],
    ids=["output", "directory", "unchanged"],
)
def test_a_model_that_stays_has_no_old_compile(args: tuple[str, ...], run: Run) -> None:
    change = ("--strip",) if args[0] == "--prefix" else (*VLLM, *args)
    outcome = run(MODEL, *change)
    assert (outcome.code, find_old(outcome.err)) == (0, [])


def test_a_plain_model_that_was_copied_after_its_compile_is_not_named(run: Run) -> None:
    os.utime(COMPILE / "qpc" / "programqpc.bin", (1, 1))
    assert find_old(run("verify", MODEL).err) == []


def test_a_directory_without_a_binary_is_no_compile(run: Run) -> None:
    Path(COMPILE, "qpc", "programqpc.bin").unlink()
    assert find_old(run(MODEL, *VLLM).err) == []


def test_a_text_file_in_it_says_which_names_it_has(run: Run) -> None:
    names = Path(COMPILE, "custom_io.yaml")
    names.write_text(" - IOName: past_key.0\n   Precision: float16\n")
    (old,) = find_old(run(MODEL, *VLLM, "-n").err)
    assert old.startswith(f"warning KV406: {names} has 1 name that the model")
    names.write_text(" - IOName: past_key.0_VLLM\n   Precision: float16\n")
    assert find_old(run(MODEL, *VLLM, "-n").err) == []


def test_each_of_several_is_named(run: Run) -> None:
    compile_model(MODEL, Path("qpc-fedcba9876543210"))
    report = rename(MODEL, "VLLM")
    names = [finding.name for finding in report.findings if finding.code == "KV406"]
    assert names == [str(COMPILE), "qpc-fedcba9876543210"]


def test_an_export_that_is_replaced_in_the_cache_leaves_a_compile_of_the_old_one(run: Run) -> None:
    plain = qefficient_exports.write_export(Path("cache"))
    seed = (plain, *VLLM, "--seed-cache")
    assert run(*seed, "-q").code == 0
    (seeded,) = (path for path in plain.parent.iterdir() if path != plain)
    compile_model(seeded / "decoder.onnx")
    assert find_old(run(*seed).err) == []
    model = seeded / "decoder.onnx"
    model.write_bytes(model.read_bytes() + b"\x32\x00")
    outcome = run(*seed, "--force")
    (old,) = find_old(outcome.err)
    assert str(COMPILE) in old
