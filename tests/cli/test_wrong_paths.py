"""Paths that cannot be what is meant: URLs, a directory as a file, a mistyped directory."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
MODEL, RENAME = "decoder.onnx", ("decoder.onnx", "--prefix", "VLLM")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a model."""
    shutil.copyfile(FIXTURES / "plain" / MODEL, tmp_path / MODEL)
    monkeypatch.chdir(tmp_path)
    return tmp_path


READ_PATHS = [
    ("{}", "--prefix", "VLLM"),
    (MODEL, "{}", "--prefix", "VLLM"),
    (*RENAME, "--sidecar", "{}"),
    (*RENAME, "--rules", "{}"),
    ("verify", "{}"),
    ("verify", MODEL, "--renamed-from", "{}"),
    ("inspect", "{}"),
    ("verify", "{}", "--target", "vllm-qaic"),
    ("compare", "{}", MODEL),
    ("compare", MODEL, "{}"),
    ("pairs", "{}"),
]


@pytest.mark.parametrize("args", READ_PATHS, ids=" ".join)
@pytest.mark.parametrize("url", ["s3://bucket/m.onnx", "HTTPS://host/m.onnx", "hf://org/m.onnx"])
def test_a_url_is_not_read(args: tuple[str, ...], url: str, here: Path, run, snapshot) -> None:
    before = snapshot(here)
    outcome = run(*(arg.format(url) for arg in args))
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err == (
        f"error: {url}: is a URL, but only local files can be read "
        "(download the file first, then pass its local path)\n"
    )
    assert snapshot(here) == before


@pytest.mark.parametrize("args", READ_PATHS, ids=" ".join)
@pytest.mark.parametrize("end", ["/", "/."])
def test_a_file_is_not_read_by_the_path_of_a_directory(
    args: tuple[str, ...], end: str, here: Path, run, snapshot
) -> None:
    before = snapshot(here)
    outcome = run(*(arg.format(MODEL + end) for arg in args))
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err == f"error: {MODEL}{end}: not a directory (pass {MODEL})\n"
    assert snapshot(here) == before


@pytest.mark.parametrize(
    "args",
    [
        (*RENAME, "-o", "{}"),
        (*RENAME, "-d", "{}"),
        ("inspect", MODEL, "--html", "{}"),
    ],
    ids=" ".join,
)
def test_a_url_is_not_written(args: tuple[str, ...], here: Path, run, snapshot) -> None:
    before = snapshot(here)
    outcome = run(*(arg.format("gs://bucket/x.onnx") for arg in args))
    assert (outcome.code, outcome.err) == (
        2,
        "error: gs://bucket/x.onnx: is a URL, but only local files can be written "
        "(write a local file, then upload it)\n",
    )
    assert snapshot(here) == before


def test_a_file_url_is_passed_as_a_path(here: Path, run) -> None:
    outcome = run(f"file://{here}/{MODEL}", "--prefix", "VLLM")
    assert (outcome.code, "(pass the path without file://)" in outcome.err) == (2, True)


def test_a_directory_with_a_colon_can_be_given_from_here(here: Path, run) -> None:
    Path("s3:").mkdir()
    assert run(*RENAME, "-o", "./s3:/m.onnx").code == 0
    assert run("verify", "./s3:/m.onnx").code == 0


@pytest.mark.parametrize("output", ["new/", "new/.", "new/sub/..", ".", ".."])
def test_a_file_is_not_written_where_a_directory_is_named(
    output: str, here: Path, run, snapshot
) -> None:
    before = snapshot(here)
    outcome = run(*RENAME, "-o", output)
    message = f"{output} names a directory, not a file (-d {output} writes into it)\n"
    assert (outcome.code, outcome.err.endswith(message)) == (2, True)
    assert snapshot(here) == before
    assert run(*RENAME, "-d", "new/").code == 0
    assert Path("new", MODEL).exists()


def test_a_directory_is_named_where_a_command_writes_only_files(here: Path, run) -> None:
    outcome = run("inspect", MODEL, "--html", "new/")
    assert (outcome.code, "new/ names a directory, not a file" in outcome.err) == (2, True)


@pytest.mark.parametrize(
    "command",
    [(*RENAME, "-o"), ("inspect", MODEL, "--html"), ("compare", MODEL, MODEL, "--html")],
)
def test_a_dash_is_not_a_file_where_a_command_cannot_write_to_stdout(
    command: tuple[str, ...], here: Path, run, snapshot
) -> None:
    before = snapshot(here)
    outcome = run(*command, "-")
    assert (outcome.code, outcome.out) == (2, "")
    assert "cannot write to stdout: pass the path of a file" in outcome.err
    assert snapshot(here) == before


def test_a_file_that_is_called_a_dash_is_written_with_its_directory(here: Path, run) -> None:
    assert run(*RENAME, "-o", "./-").code == 0
    assert Path("-").is_file()


def test_the_directory_of_a_result_is_created_as_the_help_says(here: Path, run) -> None:
    assert "creates its directory if missing" in " ".join(run("rename", "-h").out.split())
    outcome = run(*RENAME, "-o", "new/sub/m.onnx")
    assert (outcome.code, "-> new/sub/m.onnx" in outcome.err) == (0, True)
    assert run("verify", "new/sub/m.onnx", "--prefix", "VLLM").code == 0


def test_only_a_directory_of_a_result_is_created(here: Path, run, snapshot) -> None:
    before = snapshot(here)
    outcome = run("inspect", MODEL, "--html", "new/file")
    assert (outcome.code, "(create its directory first)" in outcome.err) == (2, True)
    assert snapshot(here) == before
