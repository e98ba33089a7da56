"""No result destroys another file of the run, whatever the system answers.

`tests/renaming/test_file_clashes.py` has the ways in which a user may ask for that.
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
    """A working directory with a model, and another name for it."""
    (tmp_path / "model").write_text("model")
    os.link(tmp_path / "model", tmp_path / "twin")
    monkeypatch.chdir(tmp_path)
    return tmp_path


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
    real = os.lstat
    spelled = {str(here / "MODEL"): here / "model"}
    with monkeypatch.context() as patch:
        patch.setattr(os, "lstat", lambda path: real(spelled.get(str(path), path)))
        result = files.add_output(Path("MODEL"), "the output")
    with pytest.raises(WriteError, match="MODEL: is the"):
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
