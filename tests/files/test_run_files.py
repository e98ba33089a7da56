"""No result destroys another file of the run."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from files.conftest import refuse

from onnxkvrename import ModelError, WriteError
from onnxkvrename.files.run_files import RunFiles


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a model, other names for it, and another directory."""
    (tmp_path / "model").write_text("model")
    (tmp_path / "link").symlink_to("model")
    (tmp_path / "alias").symlink_to(".")
    os.link(tmp_path / "model", tmp_path / "twin")
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def check(output: str, *, read: str = "model", written: str | None = None) -> None:
    """Check an output of a run that reads one file, and writes another one."""
    files = RunFiles()
    files.add_input(Path(read), f"the model {read}")
    if written is not None:
        files.add_output(Path(written), f"the result {written}")
    files.check_output(files.add_output(Path(output), "the output"))


@pytest.mark.parametrize(
    ("output", "read"),
    [
        *((name, "model") for name in ("model", "./model", "out/../model", "link", "twin")),
        *((name, "model") for name in ("alias/model", "alias/alias/link")),
        # What a model needs may come later: its weights, for example.
        *((f"alias/{name}", name) for name in ("missing", "out/missing", "none/missing")),
    ],
)
def test_an_output_is_no_file_that_is_read_however_it_is_called(
    output: str, read: str, here: Path
) -> None:
    for path in (read, str(here / read)):
        with pytest.raises(WriteError, match=f"is the model {path}"):
            check(output, read=path)


@pytest.mark.parametrize(
    ("first", "second", "fault"),
    [
        ("new", "new", "is the result new"),
        ("new", "alias/new", "is the result alias/new"),
        ("none/new", "none/a/../new", "is the result none/a"),
        ("new/a/file", "new", "is below new"),
        ("new", "new/a/file", r"must be .* new/a/file"),
    ],
)
def test_two_outputs_are_two_files_of_which_none_is_below_the_other(
    first: str, second: str, fault: str, here: Path
) -> None:
    with pytest.raises(WriteError, match=f"{first}: {fault}"):
        check(first, written=second)


@pytest.mark.parametrize("output", ["new", "out/model", "out/new", "models", "Model"])
def test_every_other_place_is_free(output: str, here: Path) -> None:
    check(output, written="another")


def test_a_result_in_place_may_replace_its_source_and_nothing_else(here: Path) -> None:
    files = RunFiles()
    model = files.add_input(Path("model"), "the model")
    result = files.add_output(Path("link"), "the result", replaces=model)
    files.check_output(result)
    files.add_input(Path("alias/twin"), "external data of another model")
    with pytest.raises(WriteError, match="link: is external data"):
        files.check_output(result)


def test_where_case_does_not_count_another_spelling_is_the_same_file(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.lstat
    monkeypatch.setattr(
        os, "lstat", lambda path: real(str(path).replace(str(here / "MODEL"), str(here / "model")))
    )
    with pytest.raises(WriteError, match="MODEL: is the"):
        check("MODEL")


def test_what_is_at_a_path_must_be_known(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "lstat", refuse(errno.EIO))
    with pytest.raises(ModelError, match="Input/output error"):
        check("new")


def test_a_directory_is_resolved_once_for_all_files_in_it(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, real = list[object](), os.lstat
    monkeypatch.setattr(os, "lstat", lambda path: (calls.append(path), real(path))[1])
    files, counts = RunFiles(), list[int]()
    for index in range(200):
        files.add_input(here / "out" / str(index), "a model")
        counts.append(len(calls))
    assert counts[-1] - counts[99] == 100
