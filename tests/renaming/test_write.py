from __future__ import annotations

import errno
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from onnxkvrename import KvRenameError, ModelError, WriteError, load_rules
from onnxkvrename.model.external_data import DataFile
from onnxkvrename.renaming.prepare import prepare_model
from onnxkvrename.renaming.write import WriteTask, write_temp_file
from onnxkvrename.rules.find_models import build_job
from onnxkvrename.rules.request import Request
from onnxkvrename.storage.read import open_file
from onnxkvrename.storage.temp_file import ReadyFile, TempFile


def of_model(model: Path, target: Path) -> WriteTask:
    found = prepare_model(build_job(model, target), Request(token="VLLM"), load_rules())
    assert found.splice_plan is not None
    return WriteTask(0, found.splice_plan, target, Path("called"), in_place=False, force=False)


def of_data(model: Path, target: Path) -> WriteTask:
    path = model.with_name("decoder.onnx.data")
    with open_file(path) as file:
        data_file = DataFile(path.name, path, file.identity, path.parent)
    return WriteTask(0, data_file, target, Path("called"), in_place=False, force=False)


@pytest.fixture(params=[(of_model, ModelError), (of_data, ModelError)], ids=["model", "data"])
def case(request: pytest.FixtureRequest, external: Path, tmp_path: Path) -> tuple[WriteTask, type]:
    """A file to be made, and what it is called if its source has changed."""
    (tmp_path / "out").mkdir()
    make, error = request.param
    return make(external, tmp_path / "out" / "x"), error


def test_a_file_is_made_beside_its_place_by_whoever_gets_the_task(
    case: tuple[WriteTask, type], tmp_path: Path
) -> None:
    task, _ = case
    assert task.find_source_error() is None
    made = write_temp_file(pickle.loads(pickle.dumps(task)))
    assert isinstance(made, ReadyFile)
    assert (made.target, made.display_path, made.overwrites_target) == (
        task.target,
        Path("called"),
        False,
    )
    assert os.listdir(tmp_path / "out") == [made.temp_path.name]
    assert made.temp_path.stat().st_size == task.source.size


def test_a_source_that_is_no_longer_what_was_read_is_left_alone(
    case: tuple[WriteTask, type], tmp_path: Path
) -> None:
    """The recipe would cut it in the wrong places."""
    task, error = case
    os.utime(task.source_path, ns=(0, 0))
    assert task.find_source_error() is not None
    said = write_temp_file(task)
    assert isinstance(said, error)
    assert "by another program" in said.message
    assert said.path == str(task.source_path)
    assert os.listdir(tmp_path / "out") == []


def test_a_source_that_changes_while_it_is_copied_is_no_result(
    case: tuple[WriteTask, type], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, error = case
    real = TempFile.copy_attributes

    def change(self: TempFile, *args: Any, **kwargs: Any) -> None:
        os.utime(task.source_path, ns=(0, 0))
        real(self, *args, **kwargs)

    monkeypatch.setattr(TempFile, "copy_attributes", change)
    said = write_temp_file(task)
    assert isinstance(said, error)
    assert "by another program" in said.message
    assert "again when" in said.hint
    assert os.listdir(tmp_path / "out") == []


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_a_source_that_cannot_be_looked_at_is_not_called_changed(
    number: int, case: tuple[WriteTask, type], monkeypatch: pytest.MonkeyPatch
) -> None:
    task, _ = case

    def fail(path: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "stat", fail)
    said = task.find_source_error()
    assert said is not None
    assert (said.message, said.path) == (
        f"cannot be read: {os.strerror(number)}",
        str(task.source_path),
    )


def test_data_that_now_lead_outside_are_not_copied(external: Path, tmp_path: Path) -> None:
    """Even if they have the same state: the same file was moved, and a link is in its place."""
    (tmp_path / "out").mkdir()
    task = of_data(external, tmp_path / "out" / "x")
    os.rename(task.source_path, tmp_path / "moved")
    task.source_path.symlink_to(tmp_path / "moved")
    said = write_temp_file(task)
    assert isinstance(said, ModelError)
    assert "leads out" in said.message
    assert os.listdir(tmp_path / "out") == []


def test_a_source_that_is_gone_is_an_error(case: tuple[WriteTask, type], tmp_path: Path) -> None:
    task, _ = case
    task.source_path.unlink()
    assert task.find_source_error() is not None
    assert isinstance(write_temp_file(task), KvRenameError)
    assert os.listdir(tmp_path / "out") == []


def test_what_cannot_be_written_is_called_what_the_user_calls_it(
    case: tuple[WriteTask, type], tmp_path: Path
) -> None:
    task, _ = case
    (tmp_path / "out").rmdir()
    said = write_temp_file(task)
    assert isinstance(said, WriteError)
    assert said.path == "called"
