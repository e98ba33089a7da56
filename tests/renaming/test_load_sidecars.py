"""Sidecars that follow their models, through the command line."""

from __future__ import annotations

import json
import os
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest
from conftest import Sample
from custom_io_files import format_custom_io
from kill_commands import count_until_false, needs_fork, read_directory, run_and_kill
from tiers import full

from onnxkvrename import rename
from onnxkvrename.limits import MAX_TEXT_BYTES
from onnxkvrename.renaming import prepare_sidecars
from onnxkvrename.sidecars.rewrite import RewrittenSidecar

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
EXPORTS = Path(__file__).resolve().parents[3] / "shared" / "exports" / "llama2l"
MODEL, SIDECAR = "decoder.onnx", "custom_io.yaml"


def custom_io(token: str = "", buffers: tuple[str, ...] = ("past_key", "past_value")) -> str:
    """The sidecar of a decoder of two layers, with a comment that someone has left in it."""
    pairs = [
        (f"{buffer}.{layer}{token}", f"{buffer}.{layer}{token}_RetainedState")
        for layer in (0, 1)
        for buffer in buffers
    ]
    return f"# by hand\n{format_custom_io(pairs, 'mxint8')}"


PLAIN, VLLM = custom_io(), custom_io("_VLLM")
WINDOW = FIXTURES / "plain" / "windows" / "layer_0_1" / "Tiny_layer_tmp_0_1.onnx"


@pytest.fixture
def here(decoder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a model and its sidecar."""
    (decoder.parent / SIDECAR).write_text(PLAIN)
    monkeypatch.chdir(decoder.parent)
    return decoder.parent


def refused(outcome, *parts: str) -> bool:
    """Return whether a job failed, with this reason in one line."""
    return (
        (outcome.code, outcome.out, outcome.err.count("\n")) == (2, "", 1)
        and outcome.err.startswith("error: ")
        and all(part in outcome.err for part in parts)
    )


# In place, and back.


def test_a_sidecar_that_is_named_follows_in_place(here: Path, renamed: bytes, run) -> None:
    outcome = run(MODEL, "--prefix", "VLLM", "--sidecar", SIDECAR)
    assert outcome.code == 0
    assert f"{MODEL}: 8 names" in outcome.err
    assert f"{SIDECAR}: 8 names" in outcome.err
    assert read_directory(here) == {MODEL: renamed, SIDECAR: VLLM.encode()}


def test_the_way_back_gives_the_same_bytes(here: Path, run) -> None:
    before = read_directory(here)
    assert run(MODEL, "--prefix", "VLLM", "--sidecar", SIDECAR).code == 0
    assert read_directory(here).keys() == before.keys()
    assert run(MODEL, "--strip", "--sidecar", SIDECAR).code == 0
    assert read_directory(here) == before


def test_one_token_in_the_place_of_another_is_followed_too(here: Path, run) -> None:
    assert run(MODEL, "--prefix", "VLLM", "--sidecar", SIDECAR).code == 0
    assert run(MODEL, "--prefix", "B", "--replace", "--sidecar", SIDECAR).code == 0
    assert (here / SIDECAR).read_text() == custom_io("_B")


def test_a_second_run_changes_nothing(here: Path, run, snapshot) -> None:
    args = (MODEL, "--prefix", "VLLM", "--sidecar", SIDECAR)
    run(*args)
    before = snapshot(here)
    outcome = run(*args)
    assert (outcome.code, outcome.err.count("\n")) == (0, 1)
    assert snapshot(here) == before


def test_a_sidecar_that_is_named_twice_and_found_is_one(here: Path, run) -> None:
    given = ["--sidecar", SIDECAR, "--sidecar", here / SIDECAR, "--sidecar", SIDECAR]
    outcome = run(MODEL, "--prefix", "VLLM", *given)
    assert outcome.code == 0
    assert outcome.err.splitlines()[1:] == [f"{SIDECAR}: 8 names changed"]


def test_what_else_lies_beside_a_model_stays(here: Path, run, snapshot) -> None:
    for name in ("values.yaml", "notes.txt", "qconfig.json", ".custom_io.yaml", "x.yaml.bak"):
        (here / name).write_text("past_key.0: past_key.0\n")
    (here / "below").mkdir()
    shutil.move(here / SIDECAR, here / "below" / SIDECAR)
    before = snapshot(here)
    assert run(MODEL, "--prefix", "VLLM").code == 0
    after = snapshot(here)
    assert before.pop(MODEL) != after.pop(MODEL)
    assert after == before


def test_the_record_of_a_compile_stays_and_cannot_be_named(here: Path, run) -> None:
    """It is hashed into the name of its directory, and its command compiles the plain model."""
    path = here / "hashed_compile_params.json"
    text = json.dumps({"command": [f"-m={MODEL}"], "custom_io": {"past_key.0": "mxint8"}})
    path.write_text(text)
    assert run(MODEL, "--prefix", "VLLM", "--sidecar", SIDECAR).code == 0
    assert path.read_text() == text
    outcome = run(MODEL, "--strip", "--sidecar", path)
    assert (outcome.code, path.name in outcome.err) == (2, True)


def test_the_mode_of_a_sidecar_stays(here: Path, run) -> None:
    (here / SIDECAR).chmod(0o640)
    assert run(MODEL, "--prefix", "VLLM", "--sidecar", SIDECAR).code == 0
    assert stat.S_IMODE((here / SIDECAR).stat().st_mode) == 0o640


def test_paths_are_shown_as_they_were_given(
    decoder: Path, tmp_path: Path, run, monkeypatch
) -> None:
    (decoder.parent / SIDECAR).write_text(PLAIN)
    monkeypatch.chdir(tmp_path)
    found = run("./model/decoder.onnx", "--prefix", "VLLM")
    assert found.err.splitlines()[1] == f"model/{SIDECAR}: 8 names changed"
    given = run(decoder, "--strip", "--sidecar", f"model/../model/{SIDECAR}")
    assert given.err.splitlines() == [
        f"{decoder}: 8 names changed",
        f"model/../model/{SIDECAR}: 8 names changed",
    ]


def test_a_sidecar_elsewhere_follows_where_it_is(here: Path, tmp_path: Path, run) -> None:
    (tmp_path / "compile").mkdir()
    there = shutil.move(here / SIDECAR, tmp_path / "compile" / "io.yml")
    assert run(MODEL, "--prefix", "VLLM", "--sidecar", there).code == 0
    assert there.read_text() == VLLM


def test_a_sidecar_of_windows_may_name_the_buffers_of_all(tmp_path: Path, run) -> None:
    shutil.copytree(FIXTURES / "plain" / "windows", tmp_path / "windows")
    names = [f"past_{part}.{layer}" for layer in range(3) for part in ("key", "value")]
    text = format_custom_io([(name, f"{name}_RetainedState") for name in names], "float16")
    (tmp_path / SIDECAR).write_text(text)
    outcome = run(tmp_path / "windows", "--prefix", "VLLM", "--sidecar", tmp_path / SIDECAR)
    assert (outcome.code, "KV4" in outcome.err) == (0, False)
    assert (tmp_path / SIDECAR).read_text().count("_VLLM") == 12


# Elsewhere.


def test_another_file_in_the_place_of_a_sidecar_stays_unless_forced(here: Path, run) -> None:
    (here / "out").mkdir()
    there = here / "out" / SIDECAR
    there.write_text("mine")
    args = (MODEL, "--prefix", "VLLM", "--sidecar", SIDECAR, "-d", "out")
    outcome = run(*args)
    assert outcome.code == 1
    assert f"error KV504: out/{SIDECAR}" in outcome.err
    assert read_directory(here / "out") == {SIDECAR: b"mine"}
    assert run(*args, "--force").code == 0
    assert there.read_text() == VLLM


def test_two_sidecars_cannot_go_to_one_place(here: Path, run, snapshot) -> None:
    (here / "other").mkdir()
    (here / "other" / SIDECAR).write_text(PLAIN)
    before = snapshot(here)
    given = ["--sidecar", SIDECAR, "--sidecar", f"other/{SIDECAR}"]
    outcome = run(MODEL, "--prefix", "VLLM", *given, "-d", "out", "--force")
    assert refused(outcome, f"out/{SIDECAR}: both {SIDECAR} and other/{SIDECAR}")
    assert snapshot(here) == before
    assert run(MODEL, "--prefix", "VLLM", *given).code == 0


def test_a_link_that_leads_nowhere_is_in_the_way_as_it_is_of_a_model(here: Path, run) -> None:
    (here / "out").mkdir()
    (here / "out" / SIDECAR).symlink_to("nowhere")
    args = (MODEL, "--prefix", "VLLM", "-d", "out")
    outcome = run(*args)
    assert (outcome.code, f"error KV504: out/{SIDECAR}" in outcome.err) == (1, True)
    assert run(*args, "--force").code == 0
    assert (here / "out" / SIDECAR).read_text() == VLLM
    assert not (here / "out" / "nowhere").exists()


def test_one_that_has_the_new_names_goes_along_too(here: Path, run) -> None:
    (here / SIDECAR).write_text(VLLM)
    assert run(MODEL, "--prefix", "VLLM", "-d", "out").code == 0
    assert (here / "out" / SIDECAR).read_text() == VLLM


# What is wrong with them.


def test_what_is_said_of_one_counts_for_its_model(here: Path, run) -> None:
    for folder in ("a", "b"):
        (here / folder).mkdir()
        shutil.copyfile(MODEL, here / folder / MODEL)
    shutil.move(SIDECAR, here / "b" / SIDECAR)
    with (here / "b" / SIDECAR).open("a") as file:
        file.write(" - IOName: past_key.7\n   Precision: mxint8\n")
    outcome = run("a", "b", "--prefix", "VLLM")
    assert outcome.code == 0
    assert f"\nb/{MODEL}: warning KV404: b/{SIDECAR} names past_key.7" in f"\n{outcome.err}"


def test_the_error_of_a_model_comes_before_that_of_its_sidecar(here: Path, run) -> None:
    os.link(MODEL, here / "twin")
    (here / SIDECAR).write_text("- IOName: [")
    assert refused(run(MODEL, "--prefix", "VLLM"), f"{MODEL}: has 2 hard links")


def test_one_that_someone_changes_meanwhile_is_left_to_them(
    here: Path, run, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (here / MODEL).read_bytes()
    real = prepare_sidecars.rewrite_sidecar

    def rewrite(*args: Any, **how: Any) -> RewrittenSidecar:
        (here / SIDECAR).write_text("theirs")
        return real(*args, **how)

    monkeypatch.setattr(prepare_sidecars, "rewrite_sidecar", rewrite)
    assert refused(run(MODEL, "--prefix", "VLLM"), "by another program")
    assert read_directory(here) == {MODEL: before, SIDECAR: b"theirs"}


def test_a_model_that_cannot_be_placed_takes_its_sidecar_back(
    here: Path, run, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, real = read_directory(here), os.replace

    def refuse(source: Path, target: Path, **how: Any) -> None:
        if os.path.basename(target) == MODEL:
            raise OSError(5, "Input/output error")
        real(source, target, **how)

    monkeypatch.setattr(os, "replace", refuse)
    assert refused(run(MODEL, "--prefix", "VLLM"), "Input/output error")
    assert read_directory(here) == before


def test_a_name_that_matches_nothing_is_a_warning(here: Path, run, snapshot) -> None:
    strange = " - IOName: past_key.7\n   Precision: mxint8\n"
    (here / SIDECAR).write_text(PLAIN + strange)
    before = snapshot(here)
    outcome = run(MODEL, "--prefix", "VLLM", "--sidecar", SIDECAR, "--strict")
    assert (outcome.code, outcome.err.count("error KV404")) == (1, 1)
    assert snapshot(here) == before
    outcome = run(MODEL, "--prefix", "VLLM", "--sidecar", SIDECAR)
    assert outcome.code == 0
    assert f"{MODEL}: warning KV404: {SIDECAR} names past_key.7" in outcome.err
    assert (here / SIDECAR).read_text() == VLLM + strange


def test_half_a_pair_is_a_warning(here: Path, run) -> None:
    half = PLAIN.replace(" - IOName: past_key.0\n   Precision: mxint8\n\n", "")
    assert half != PLAIN
    (here / SIDECAR).write_text(half)
    outcome = run(MODEL, "--prefix", "VLLM", "--sidecar", SIDECAR)
    assert outcome.code == 0
    assert f"warning KV405: {SIDECAR} names past_key.0_RetainedState without" in outcome.err


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("nowhere.yaml", "no such file"),
        ("notes.txt", "known formats: custom I/O"),
        (MODEL, "not a sidecar"),
        (".", "is a directory"),
        ("secret.yaml", "cannot be read"),
        ("custom_io_large.yaml", "more than"),
        ("custom_io_torn.yaml", "cannot be read"),
        ("pipe", "not a regular"),
    ],
)
def test_what_cannot_be_followed_ends_the_job_in_one_line(
    name: str, reason: str, here: Path, spawn, snapshot
) -> None:
    (here / "notes.txt").write_text("past_key.0\n")
    (here / "secret.yaml").write_text(PLAIN)
    (here / "custom_io_torn.yaml").write_text("- IOName: [\n")
    os.mkfifo(here / "pipe")
    if name == "custom_io_large.yaml":
        (here / name).write_text(PLAIN + "#" * MAX_TEXT_BYTES)
    before = snapshot(here)
    (here / "secret.yaml").chmod(0)
    process = spawn(MODEL, "--prefix", "VLLM", "--sidecar", SIDECAR, "--sidecar", name)
    (here / "secret.yaml").chmod(0o644)
    assert (process.returncode, process.stdout) == (2, "")
    (line,) = process.stderr.splitlines()
    assert line.startswith("error: ")
    assert name in line
    assert reason in line
    assert snapshot(here) == before


def linked(path: Path) -> None:
    shutil.move(path, path.parent / "io")
    path.symlink_to("io")


@pytest.mark.parametrize(
    ("protect", "reason"),
    [
        (linked, "symbolic link"),
        (lambda path: os.link(path, path.parent / "io"), "has 2 hard links"),
        (lambda path: path.chmod(0o444), "is read-only"),
    ],
)
def test_what_others_may_share_or_have_protected_is_left_unless_forced(
    protect, reason: str, here: Path, run, snapshot
) -> None:
    protect(here / SIDECAR)
    before = snapshot(here)
    args = (MODEL, "--prefix", "VLLM", "--sidecar", SIDECAR)
    assert refused(run(*args), f"{SIDECAR}: ", reason, "--force")
    assert snapshot(here) == before
    was_link = (here / SIDECAR).is_symlink()
    assert run(*args, "--force").code == 0
    assert (here / SIDECAR).read_text() == VLLM
    assert (here / SIDECAR).is_symlink() == was_link


# Stale ones, and looks ahead.


@pytest.mark.parametrize(("look", "code"), [("--check", 1), ("-n", 0), ("--dry-run", 0)])
@pytest.mark.parametrize("before", ["both plain", "the sidecar stale"])
def test_a_look_ahead_writes_nothing(
    look: str, code: int, before: str, here: Path, run, snapshot
) -> None:
    if before == "the sidecar stale":
        rename(MODEL, "VLLM", sidecars="off")
    earlier = snapshot(here)
    outcome = run(MODEL, "--prefix", "VLLM", "--sidecar", SIDECAR, look)
    assert outcome.code == code
    assert f"{SIDECAR}: 8 names would change" in outcome.err
    assert snapshot(here) == earlier


@pytest.mark.parametrize("how", [(), ("-d", "out")])
def test_a_check_of_what_is_renamed_finds_nothing_to_change(
    how: tuple[str, ...], here: Path, run
) -> None:
    assert run(MODEL, "--prefix", "VLLM", "--sidecar", SIDECAR).code == 0
    outcome = run(MODEL, "--prefix", "VLLM", "--sidecar", SIDECAR, "--check", *how)
    assert (outcome.code, "would change" in outcome.err) == (0, False)


# On a cluster, whose workers have working directories of their own.


@full
def test_a_sidecar_follows_on_a_cluster(here: Path, tmp_path: Path, renamed: bytes, run) -> None:
    distributed = pytest.importorskip("distributed", reason="the extra [dask] is not installed")
    how = {"host": "127.0.0.1", "dashboard_address": "127.0.0.1:0", "silence_logs": 50}
    (tmp_path / "worker").mkdir()
    os.chdir(tmp_path / "worker")
    with distributed.LocalCluster(n_workers=1, threads_per_worker=1, processes=True, **how) as made:
        os.chdir(here)
        given = ["--sidecar", SIDECAR, "--dask", made.scheduler_address]
        outcome = run(MODEL, "--prefix", "VLLM", *given)
    assert outcome.code == 0, outcome.err
    assert read_directory(here) == {MODEL: renamed, SIDECAR: VLLM.encode()}


# Killed.


@needs_fork
@pytest.mark.parametrize("how", [(), pytest.param(("-d", "out"), marks=full)])
def test_killed_anywhere_the_same_command_ends_the_work(
    how: tuple[str, ...],
    here: Path,
    tmp_path: Path,
    renamed: bytes,
    run,
    monkeypatch,
    sample: Sample,
) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    pattern, result = tmp_path / "pattern", here / "out" if how else here
    shutil.copytree(here, pattern)
    plain, args = (
        read_directory(pattern),
        (MODEL, "--prefix", "VLLM", "--sidecar", SIDECAR, *how),
    )
    seen = set()

    def kill(name: str, nth: int, *, after: bool) -> bool:
        shutil.rmtree(here / "out", ignore_errors=True)
        for file in plain:
            shutil.copyfile(pattern / file, here / file)
        reached = run_and_kill(name, nth, *args, after=after)
        now = read_directory(result) if result.exists() else {}
        seen.add((now.get(MODEL) == renamed, now.get(SIDECAR) == VLLM.encode()))
        assert run(*args, "-q").code == 0
        assert read_directory(result) == {MODEL: renamed, SIDECAR: VLLM.encode()}
        return reached

    for name in ("replace", "link", *sample(["unlink", "write", "rename"], 0)):
        for after in (False, True):
            count_until_false(lambda nth, name=name, after=after: kill(name, nth, after=after))
    assert {(False, False), (True, True)} <= seen
    assert (True, False) not in seen  # a model is never in place without its sidecar


# A real compile.


@pytest.mark.skipif(not EXPORTS.is_dir(), reason=f"no real exports: {EXPORTS} is not there")
def test_the_sidecar_of_a_real_compile_becomes_that_of_the_prefixed_one(
    tmp_path: Path, run
) -> None:
    (plain,), real = EXPORTS.glob("plain-*"), EXPORTS / "compile-VLLM" / SIDECAR
    for path in (plain / "LlamaForCausalLM.onnx", EXPORTS / "compile-plain" / SIDECAR):
        shutil.copyfile(path, tmp_path / path.name)
    before = read_directory(tmp_path)
    model = tmp_path / "LlamaForCausalLM.onnx"
    assert run(model, "--prefix", "VLLM", "--strict").code == 0
    assert (tmp_path / SIDECAR).read_bytes() == real.read_bytes()
    assert run(model, "--strip").code == 0
    assert read_directory(tmp_path) == before
