from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest

from onnxkvrename import KvRenameError, ModelError, Options, Wish, WriteError, load_rules
from onnxkvrename.model.external_data import DataFile
from onnxkvrename.renaming import prepare as examining
from onnxkvrename.renaming import write as writing
from onnxkvrename.renaming.write import Task
from onnxkvrename.rules.results import Job
from onnxkvrename.storage import read as files
from onnxkvrename.storage.temp_file import Staged


def of_model(model: Path, target: Path) -> Task:
    found = examining.examine(Job(model, target), Wish("VLLM"), load_rules(), Options())
    assert found.recipe is not None
    return Task(0, found.recipe, target, Path("called"), in_place=False, force=False)


def of_data(model: Path, target: Path) -> Task:
    path = model.with_name("decoder.onnx.data")
    with files.opened(path) as file:
        return Task(
            0, DataFile(path.name, path, file.identity), target, Path("called"), False, False
        )


@pytest.fixture(params=[(of_model, ModelError), (of_data, WriteError)], ids=["model", "data"])
def case(request: pytest.FixtureRequest, external: Path, tmp_path: Path) -> tuple[Task, type]:
    """A file to be made, and what it is called if its source has changed."""
    (tmp_path / "out").mkdir()
    make, error = request.param
    return make(external, tmp_path / "out" / "x"), error


def test_a_file_is_made_beside_its_place_by_whoever_gets_the_task(
    case: tuple[Task, type], tmp_path: Path
) -> None:
    task, _ = case
    assert task.unchanged
    made = writing.draft(pickle.loads(pickle.dumps(task)))
    assert isinstance(made, Staged)
    assert (made.target, made.called, made.replace) == (task.target, Path("called"), False)
    assert os.listdir(tmp_path / "out") == [made.temporary.name]
    assert made.temporary.stat().st_size == task.source.size


def test_a_source_that_is_no_longer_what_was_read_is_left_alone(
    case: tuple[Task, type], tmp_path: Path
) -> None:
    """The recipe would cut it in the wrong places."""
    task, error = case
    os.utime(task.path, ns=(0, 0))
    assert not task.unchanged
    said = writing.draft(task)
    assert isinstance(said, error)
    assert (said.message, said.path) == ("was changed by someone else just now", str(task.path))
    assert os.listdir(tmp_path / "out") == []


def test_a_source_that_is_gone_is_an_error(case: tuple[Task, type], tmp_path: Path) -> None:
    task, _ = case
    task.path.unlink()
    assert not task.unchanged
    assert isinstance(writing.draft(task), KvRenameError)
    assert os.listdir(tmp_path / "out") == []


def test_what_cannot_be_written_is_called_what_the_user_calls_it(
    case: tuple[Task, type], tmp_path: Path
) -> None:
    task, _ = case
    (tmp_path / "out").rmdir()
    said = writing.draft(task)
    assert isinstance(said, WriteError)
    assert said.path == "called"
