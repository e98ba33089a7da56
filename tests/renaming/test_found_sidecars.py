"""Sidecars beside a model that nobody named: they follow it, or a warning says why not."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import models
import pytest
from custom_io_files import format_custom_io
from kill_commands import read_directory
from models import saved

from onnxkvrename import rename, rename_all
from onnxkvrename.limits import MAX_TEXT_BYTES

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
MODEL, SIDECAR, COMPILE = "decoder.onnx", "custom_io.yaml", "qpc-0123456789abcdef"
RENAME = (MODEL, "--prefix", "VLLM")


def custom_io(token: str = "", layers: int = 2, stem: str = "past_") -> str:
    names = [f"{stem}{part}.{layer}{token}" for layer in range(layers) for part in ("key", "value")]
    return format_custom_io([(name, f"{name}_RetainedState") for name in names], "mxint8")


PLAIN, VLLM = custom_io(), custom_io("_VLLM")


@pytest.fixture
def here(decoder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a model and its sidecar."""
    (decoder.parent / SIDECAR).write_text(PLAIN)
    monkeypatch.chdir(decoder.parent)
    return decoder.parent


def read(path: Path) -> str:
    return path.read_text()


# In place.


def test_a_sidecar_beside_a_model_follows_without_an_option(
    here: Path, renamed: bytes, run
) -> None:
    before = read_directory(here)
    outcome = run(*RENAME)
    assert outcome.code == 0
    assert f"{MODEL}: 8 names" in outcome.err
    assert f"{SIDECAR}: 8 names" in outcome.err
    assert read_directory(here) == {MODEL: renamed, SIDECAR: VLLM.encode()}
    assert run(MODEL, "--strip").code == 0
    assert read_directory(here) == before


def test_a_stale_one_is_mended_by_the_same_command_again(here: Path, run) -> None:
    rename(MODEL, "VLLM", sidecars="off")
    assert read(here / SIDECAR) == PLAIN
    assert run(*RENAME, "--check").code == 1
    outcome = run(*RENAME)
    assert (outcome.code, outcome.out) == (0, "")
    assert f"{SIDECAR}: 8 names changed" in outcome.err
    assert read(here / SIDECAR) == VLLM


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("custom_io.yml", True),
        ("custom_io_fp16.yaml", True),
        ("io.yaml", True),
        ("notes.yml", True),
        (".io.yaml", False),
        ("io.txt", False),
        ("io.yaml.orig", False),
        ("my_io.json", False),
    ],
)
def test_yaml_for_the_compiler_follows_whatever_its_name(
    name: str, changes: bool, here: Path, run
) -> None:
    """docs/sidecars.md says which files change: the name of such a file is free."""
    (here / SIDECAR).rename(here / name)
    assert run(*RENAME).code == 0
    assert read(here / name) == (VLLM if changes else PLAIN)


def test_no_sidecars_leaves_it_and_warns(here: Path, renamed: bytes, run) -> None:
    outcome = run(*RENAME, "--sidecars", "off")
    assert outcome.code == 0
    assert f"{MODEL}: warning KV406: {SIDECAR}" in outcome.err
    assert read_directory(here) == {MODEL: renamed, SIDECAR: PLAIN.encode()}
    run(MODEL, "--strip", "--sidecars", "off")
    assert "KV406" not in run(MODEL, "--strip", "--sidecars", "off").err
    assert run(*RENAME, "--sidecars", "off", "--strict").code == 1


def test_the_interface_for_python_does_the_same(here: Path) -> None:
    (finding,) = rename(MODEL, "VLLM", sidecars="off", dry_run=True).findings
    assert (finding.code, finding.name) == ("KV406", SIDECAR)
    assert rename(MODEL, "VLLM").findings == ()
    assert read(here / SIDECAR) == VLLM
    report = rename_all([here], strip=True)
    assert [(Path(item.path).name, item.status) for item in report.sidecars] == [
        (SIDECAR, "renamed")
    ]
    assert read(here / SIDECAR) == PLAIN


@pytest.mark.parametrize("policy", ["auto", "off"])
def test_a_compile_below_the_export_keeps_its_names_with_a_warning(
    policy: str, here: Path, run
) -> None:
    """It was made from the model as it was; only a new compile knows the new names."""
    (here / COMPILE).mkdir()
    (here / SIDECAR).rename(here / COMPILE / SIDECAR)
    outcome = run(*RENAME, "--sidecars", policy)
    assert outcome.code == 0
    assert (
        f"warning KV406: {COMPILE}/{SIDECAR} has 8 names that the model no longer has"
        in outcome.err
    )
    assert "-> compile the model again" in outcome.err
    assert read(here / COMPILE / SIDECAR) == PLAIN
    assert run(MODEL, "--strip", "-q") == (0, "", "")  # the names of the compile again


@pytest.mark.parametrize("text", ["- IOName: [", VLLM.replace("VLLM", "OTHER")])
def test_no_compile_below_the_export_stops_a_rename(text: str, here: Path, run) -> None:
    (here / COMPILE).mkdir()
    (here / COMPILE / SIDECAR).write_text(text)
    assert run(*RENAME).code == 0
    assert read(here / COMPILE / SIDECAR) == text
    assert read(here / SIDECAR) == VLLM


def test_one_sidecar_for_all_windows_follows_all(tmp_path: Path, run) -> None:
    windows = tmp_path / "windows"
    shutil.copytree(FIXTURES / "plain" / "windows", windows)
    (windows / SIDECAR).write_text(custom_io(layers=3))
    outcome = run(windows, "--prefix", "VLLM", "-d", tmp_path / "out")
    assert (outcome.code, "KV4" in outcome.err) == (0, False)
    assert read(tmp_path / "out" / SIDECAR) == custom_io("_VLLM", layers=3)
    assert read(windows / SIDECAR) == custom_io(layers=3)
    assert run(windows, "--prefix", "VLLM").code == 0
    assert read(windows / SIDECAR) == custom_io("_VLLM", layers=3)


# Elsewhere.


@pytest.mark.parametrize("how", [("-d", "out"), ("-o", "out/new.onnx")])
def test_it_goes_beside_a_result_elsewhere_and_stays_beside_the_source(
    how: tuple[str, str], here: Path, run, snapshot
) -> None:
    (here / COMPILE).mkdir()
    (here / COMPILE / SIDECAR).write_text(PLAIN)
    before = snapshot(here)
    outcome = run(*RENAME, *how)
    assert outcome.code == 0
    assert f"{SIDECAR}: 8 names changed -> out/{SIDECAR}" in outcome.err
    assert read(here / "out" / SIDECAR) == VLLM
    assert not (here / "out" / COMPILE).exists()
    assert {name: now for name, now in snapshot(here).items() if name in before} == before
    again = snapshot(here)
    assert (run(*RENAME, *how).code, snapshot(here)) == (0, again)


@pytest.mark.parametrize("options", [["-o", f"out/{MODEL}"], ["-d", "out"]])
def test_one_that_is_where_the_result_goes_and_has_the_old_names_is_said(
    options: list[str], here: Path, run
) -> None:
    """A compile of the result would ignore its entries; the hint mends it."""
    (here / "out").mkdir()
    (here / SIDECAR).rename(here / "out" / SIDECAR)
    outcome = run(*RENAME, *options, "--dry-run", "--strict")
    assert (outcome.code, "error KV406" in outcome.err) == (1, True)
    outcome = run(*RENAME, *options)
    assert outcome.code == 0
    assert f"warning KV406: {Path('out') / SIDECAR}" in outcome.err
    assert read(here / "out" / SIDECAR) == PLAIN
    assert run(Path("out") / MODEL, "--prefix", "VLLM").code == 0
    assert read(here / "out" / SIDECAR) == VLLM


def test_so_it_is_where_each_result_replaces_a_model_that_has_them(here: Path, run) -> None:
    """The second model there has the old names only until this run replaces it."""
    (here / "out").mkdir()
    (here / SIDECAR).rename(here / "out" / SIDECAR)
    for name in (f"other-{MODEL}", f"out/{MODEL}", f"out/other-{MODEL}"):
        shutil.copyfile(MODEL, name)
    outcome = run(MODEL, f"other-{MODEL}", "--prefix", "VLLM", "-d", "out", "--force")
    assert outcome.code == 0
    assert outcome.err.count(f"warning KV406: {Path('out') / SIDECAR}") == 1


def test_what_is_replaced_where_the_result_goes_is_not_said(here: Path, run) -> None:
    (here / "out").mkdir()
    shutil.copyfile(here / SIDECAR, here / "out" / SIDECAR)
    outcome = run(*RENAME, "-d", "out", "--force")
    assert (outcome.code, "KV406" in outcome.err) == (0, False)
    assert read(here / "out" / SIDECAR) == VLLM


def test_no_sidecars_leaves_it_where_it_is(here: Path, renamed: bytes, run) -> None:
    outcome = run(*RENAME, "-d", "out", "--sidecars", "off")
    assert (outcome.code, "KV4" in outcome.err) == (0, False)
    assert read_directory(here / "out") == {MODEL: renamed}


def test_another_file_in_its_place_stays_unless_forced(here: Path, run) -> None:
    (here / "out").mkdir()
    (here / "out" / SIDECAR).write_text(PLAIN)
    outcome = run(*RENAME, "-d", "out")
    assert outcome.code == 1
    assert f"KV504: out/{SIDECAR} already exists" in outcome.err
    assert "--sidecars off" in outcome.err
    assert read_directory(here / "out") == {SIDECAR: PLAIN.encode()}


# Other models in the directory.


def other_model(path: Path, *, stem: str = "past_") -> None:
    data = (FIXTURES / "plain" / "decoder.onnx").read_bytes()
    path.write_bytes(data.replace(b"past_", stem.encode()))


def test_a_sidecar_that_a_model_which_stays_needs_too_stays(here: Path, run) -> None:
    other_model(here / "prefill.onnx")
    outcome = run(*RENAME)
    assert outcome.code == 0
    assert f"warning KV406: {SIDECAR}" in outcome.err
    assert "because prefill.onnx" in outcome.err
    assert read(here / SIDECAR) == PLAIN
    assert run(*RENAME, "--sidecar", SIDECAR).code == 0  # asked for
    assert read(here / SIDECAR) == VLLM


def test_renamed_together_models_share_a_sidecar(here: Path, run) -> None:
    other_model(here / "prefill.onnx")
    assert run(here, "--prefix", "VLLM").code == 0
    assert read(here / SIDECAR) == VLLM


def test_names_of_another_model_stay_in_a_sidecar_of_both(here: Path, run) -> None:
    other_model(here / "draft.onnx", stem="seen_")
    (here / SIDECAR).write_text(PLAIN + custom_io(stem="seen_"))
    outcome = run(*RENAME, "--strict")
    assert (outcome.code, outcome.err.count("KV4")) == (0, 0)
    assert read(here / SIDECAR) == VLLM + custom_io(stem="seen_")


def test_a_sidecar_of_another_model_alone_is_none_of_the_business(
    here: Path, run, snapshot
) -> None:
    (here / SIDECAR).write_text(custom_io(stem="seen_"))
    stays = read(here / SIDECAR)
    outcome = run(*RENAME, "-d", "out")
    assert (outcome.code, outcome.err.count("warning KV404")) == (0, 1)  # nobody knows its names
    assert not (here / "out" / SIDECAR).exists()
    other_model(here / "draft.onnx", stem="seen_")
    outcome = run(*RENAME)
    assert (outcome.code, outcome.err) == (0, f"{MODEL}: 8 names changed\n")
    assert read(here / SIDECAR) == stays


# What cannot be read or written.


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--check",),
        ("--sidecar", SIDECAR),
    ],
)
@pytest.mark.parametrize("spoil", ["truncate", "dangle", "replace"])
def test_nothing_is_said_of_the_sidecar_of_a_model_that_cannot_be_read(
    spoil: str, options: tuple[str, ...], here: Path, run
) -> None:
    """It is right; its names match nothing only because the model is not known."""
    data = (here / MODEL).read_bytes()
    (here / MODEL).unlink()
    if spoil == "dangle":
        (here / MODEL).symlink_to("nowhere")
    else:
        (here / MODEL).write_bytes(data[:-40] if spoil == "truncate" else b"text")
    outcome = run(*RENAME, *options)
    assert (outcome.code, outcome.err.count("error:")) == (2, 1)
    assert "KV4" not in outcome.err
    assert SIDECAR not in outcome.err.replace(" ".join(options), "")
    assert read(here / SIDECAR) == PLAIN


def test_names_may_be_of_a_model_beside_it_that_cannot_be_read(here: Path, run) -> None:
    (here / "draft.onnx").write_bytes(b"text")
    for text in (custom_io(stem="seen_"), PLAIN + custom_io(stem="seen_"), custom_io("_OTHER")):
        (here / SIDECAR).write_text(text)
        for _ in range(2):
            outcome = run(*RENAME)
            assert (outcome.code, outcome.err.count("KV4")) == (0, 1)
            assert f"warning KV406: {SIDECAR}" in outcome.err
            assert "remove draft.onnx" in outcome.err
        assert run(MODEL, "--strip").code == 0


def test_files_that_are_no_sidecars_are_passed_over(here: Path, run, snapshot) -> None:
    (here / SIDECAR).unlink()
    (here / "torn.yaml").write_text("IOName: [past_key.0")
    (here / "large.yaml").write_text(PLAIN + "#" * MAX_TEXT_BYTES)
    (here / "values.yaml").write_text("past_key.0: past_key.0\n")
    (here / "not-text.yml").write_bytes(b"IOName \xff")
    (here / "chart.yaml").mkdir()
    os.mkfifo(here / "pipe.yaml")
    (here / "lost.yaml").symlink_to("nowhere")
    before = snapshot(here)
    outcome = run(*RENAME)
    assert (outcome.code, outcome.err) == (0, f"{MODEL}: 8 names changed\n")
    after = snapshot(here)
    assert after.pop(MODEL) != before.pop(MODEL)
    assert after == before


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda path: path.write_text("- IOName: ["), "custom I/O"),
        (lambda path: path.write_bytes(b"\xff"), "is not UTF-8 text"),
        (lambda path: path.write_text(PLAIN + "#" * MAX_TEXT_BYTES), "more than"),
        (lambda path: (path.unlink(), path.mkdir()), "is a directory"),
        (lambda path: (path.unlink(), path.symlink_to("nowhere")), "no such file"),
        (lambda path: (path.rename("io"), path.symlink_to("io")), "symbolic link"),
        (lambda path: os.link(path, "io"), "has 2 hard links"),
        (lambda path: path.chmod(0o444), "is read-only"),
    ],
)
def test_a_known_name_that_cannot_follow_is_an_error_with_the_way_around(
    spoil, reason: str, here: Path, renamed: bytes, run, snapshot
) -> None:
    spoil(here / SIDECAR)
    before = snapshot(here)
    outcome = run(*RENAME)
    assert (outcome.code, outcome.out, outcome.err.count("\n")) == (2, "", 1)
    assert outcome.err.startswith(f"error: {SIDECAR}: ")
    assert reason in outcome.err
    assert "--sidecars off" in outcome.err
    assert snapshot(here) == before
    assert run(*RENAME, "--sidecars", "off").code == 0
    assert (here / MODEL).read_bytes() == renamed


def test_there_is_an_end_to_how_much_is_looked_at(here: Path, run, snapshot) -> None:
    for number in range(9):  # YAML takes far longer to parse than JSON
        (here / f"io_{number}.yaml").write_text(f"- IOName: a\n#{'#' * (1 << 17)}"[: 1 << 17])
    assert MAX_TEXT_BYTES // 8 < 9 << 17
    before = snapshot(here)
    outcome = run(*RENAME)
    assert (outcome.code, outcome.err.count("\n")) == (2, 1)
    assert "8,388,608" in outcome.err
    assert "--sidecars off" in outcome.err
    assert snapshot(here) == before
    assert "KV406" in run(*RENAME, "--sidecars", "off").err
    assert "KV406" in run("verify", MODEL).err


def test_a_directory_that_cannot_be_listed_is_an_error(here: Path, spawn) -> None:
    here.chmod(0o311)
    process = spawn("./decoder.onnx", "--prefix", "VLLM", "--dry-run")
    here.chmod(0o755)
    assert (process.returncode, "cannot be listed" in process.stderr) == (2, True)


def test_a_model_that_fails_leaves_it_as_it_was(here: Path, run, snapshot) -> None:
    broken = models.decoder()
    broken.graph.output.pop()
    saved(broken, here / MODEL)
    before = snapshot(here)
    assert (run(*RENAME).code, snapshot(here)) == (1, before)


# What it costs.


def test_without_a_candidate_a_rename_lists_once_and_opens_nothing_more(
    here: Path, run, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / SIDECAR).unlink()
    for name in ("config.json", "hashed_export_params.json", "tokenizer.json", "notes.txt"):
        (here / name).write_text("{}")
    listed, opened = [], []
    real_scandir, real_open = os.scandir, os.open

    def scandir(path: object = "."):
        listed.append(os.path.abspath(os.fspath(path)))
        return real_scandir(path)

    def count_open(path: object, *args: object, **how: object) -> int:
        opened.append(os.path.basename(os.fspath(path)))
        return real_open(path, *args, **how)

    counts = []
    for policy in ("off", "auto"):
        listed.clear()
        with monkeypatch.context() as patches:
            patches.setattr(os, "scandir", scandir)
            patches.setattr(os, "open", count_open)
            assert run(*RENAME, "--sidecars", policy, "--dry-run").code == 0
        counts.append(listed.count(str(here)))
    listed.clear()
    monkeypatch.setattr("onnxkvrename.renaming.run.find_candidates", lambda *_: ())
    monkeypatch.setattr(os, "scandir", scandir)
    assert run(*RENAME, "--dry-run").code == 0
    assert counts[0] == listed.count(str(here)) + 1
    assert not {"config.json", "hashed_export_params.json", "notes.txt"} & set(opened)


def test_a_model_beside_several_sidecars_is_read_once(
    here: Path, run, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename(MODEL, "OTHER", output="other.onnx", sidecars="off")
    for digit in range(3):
        shutil.copyfile(SIDECAR, f"custom_io_{digit}.yaml")
    opened, real = [], os.open

    def count_open(path: object, *args: object, **how: object) -> int:
        opened.append(os.path.basename(os.fspath(path)))
        return real(path, *args, **how)

    monkeypatch.setattr(os, "open", count_open)
    assert run(*RENAME).code == 0
    assert opened.count("other.onnx") == 1
    assert [read(path) for path in here.glob("custom_io*.yaml")] == [VLLM] * 4
