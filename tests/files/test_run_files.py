"""No result destroys another file of the run.

`tests/renaming/test_file_clashes.py` shows it at the command line.
"""

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
    """A working directory with a model, another name for it, and another directory."""
    (tmp_path / "model").write_text("model")
    os.link(tmp_path / "model", tmp_path / "twin")
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("output", "written", "fault"),
    [
        # What a model needs may come later: its weights, for example.
        ("alias/missing", "another", "is the model missing"),
        ("none/new", "none/a/../new", "is the result none/a"),
        ("new/a/file", "new", "is below new"),
        ("new", "new/a/file", "must be a directory that holds new/a/file"),
        ("models", "another", None),
    ],
)
def test_output_is_a_file_of_its_own_and_none_is_below_another(
    output: str, written: str, fault: str | None, here: Path
) -> None:
    (here / "alias").symlink_to(".")
    files = RunFiles()
    files.add_input(here / "missing", "the model missing")
    files.add_output(Path(written), f"the result {written}")
    result = files.add_output(Path(output), "the output")
    if fault is None:
        files.check_output(result)
        return
    with pytest.raises(WriteError, match=f"{output}: {fault}"):
        files.check_output(result)


def test_result_in_place_replaces_its_source_and_nothing_else(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where case does not count, another spelling is the same file."""
    files = RunFiles()
    model = files.add_input(Path("model"), "the model")
    result = files.add_output(Path("model"), "the result", replaces=model)
    files.check_output(result)
    files.add_input(Path("twin"), "external data of another model")
    with pytest.raises(WriteError, match="model: is external data"):
        files.check_output(result)
    files.add_input(here / "out" / "missing", "the missing file")
    spelled = {str(here / name): here / name.lower() for name in ("MODEL", "OUT")}
    with monkeypatch.context() as patch:
        for name in ("stat", "lstat"):
            real = getattr(os, name)
            patch.setattr(os, name, lambda path, real=real: real(spelled.get(str(path), path)))
        results = [files.add_output(Path(path), "a result") for path in ("MODEL", "OUT/missing")]
    for result in results:
        with pytest.raises(WriteError, match=f"{result.path}: is the"):
            files.check_output(result)
    monkeypatch.setattr(os, "lstat", refuse(errno.EIO))
    with pytest.raises(ModelError, match="Input/output error"):
        files.add_output(Path("new"), "the output")


def test_directory_is_resolved_once_for_all_files_in_it(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, real = list[object](), os.lstat
    monkeypatch.setattr(os, "lstat", lambda path: (calls.append(path), real(path))[1])
    files, counts = RunFiles(), list[int]()
    for index in range(200):
        files.add_input(here / str(index), "a model")
        counts.append(len(calls))
    assert counts[-1] - counts[99] == 100
