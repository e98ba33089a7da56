from __future__ import annotations

import os
from pathlib import Path

import pytest

from onnxkvrename import ModelError, WriteError
from onnxkvrename.storage.run_files import RunFiles


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
    "output",
    ["model", "./model", "out/../model", "link", "alias/model", "alias/alias/link", "twin"],
)
def test_an_output_is_no_file_that_is_read_however_it_is_called(output: str, here: Path) -> None:
    with pytest.raises(WriteError, match="the model model"):
        check(output)
    with pytest.raises(WriteError, match=f"is the model {here / 'model'}"):
        check(output, read=str(here / "model"))


@pytest.mark.parametrize("read", ["missing", "out/missing", "none/missing"])
def test_nor_is_it_one_that_is_missing(read: str, here: Path) -> None:
    """What a model needs may come later: its weights, for example."""
    with pytest.raises(WriteError, match="is the model"):
        check(f"alias/{read}", read=read)


@pytest.mark.parametrize(
    ("first", "second"),
    [("new", "new"), ("new", "alias/new"), ("none/new", "none/a/../new"), ("out/x", "out/x")],
)
def test_two_outputs_are_two_files(first: str, second: str, here: Path) -> None:
    with pytest.raises(WriteError, match=f"{first}: is the result {second}"):
        check(first, written=second)


def test_no_output_goes_below_another_one(here: Path) -> None:
    with pytest.raises(WriteError, match="is below new"):
        check("new/a/file", written="new")
    with pytest.raises(WriteError, match=r"must be .* new/a/file"):
        check("new", written="new/a/file")


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
    def fail(path: object) -> os.stat_result:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "lstat", fail)
    with pytest.raises(ModelError, match="Input/output error"):
        check("new")


def test_a_directory_is_resolved_once_for_all_files_in_it(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def count_calls(number: int) -> int:
        calls = 0
        real = os.lstat

        def count(path: object) -> os.stat_result:
            nonlocal calls
            calls += 1
            return real(path)  # type: ignore[arg-type]

        files = RunFiles()
        with monkeypatch.context() as patch:
            patch.setattr(os, "lstat", count)
            for index in range(number):
                files.add_input(here / "out" / str(index), "a model")
        return calls

    assert count_calls(200) - count_calls(100) == 100
