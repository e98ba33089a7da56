from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import models
import pytest
from models import saved

import onnxkvrename
from onnxkvrename import KvRenameError, WriteError, load_rules, rename
from onnxkvrename.renaming import place
from onnxkvrename.renaming.place import BatchWriter, PlaceError
from onnxkvrename.renaming.prepare import prepare_model
from onnxkvrename.renaming.write import WriteTask
from onnxkvrename.rules.find_models import build_job
from onnxkvrename.rules.request import Request
from onnxkvrename.storage.temp_file import build_file_key, build_key, build_temp_name


def build_task(model: Path, target: Path, index: int) -> WriteTask:
    prepared = prepare_model(build_job(model, target), Request(token="VLLM"), load_rules())
    assert prepared.splice_plan is not None
    return WriteTask(index, prepared.splice_plan, target, target, in_place=False, force=False)


@pytest.fixture
def tasks(tmp_path: Path) -> list[WriteTask]:
    """Two models, whose results go to a directory each."""
    paths = [saved(models.decoder(), tmp_path / f"{name}.onnx") for name in "ab"]
    targets = [tmp_path / "first" / "a.onnx", tmp_path / "second" / "deep" / "b.onnx"]
    return [build_task(paths[index], targets[index], index) for index in range(2)]


def fail_to_lock(path: Path) -> Callable[..., Any]:
    def hold_locks(directories: Iterable[Path]) -> None:
        raise WriteError("is being processed by someone", path=str(path))

    return hold_locks


def test_an_error_of_no_task_is_not_blamed_on_the_first_model(
    tasks: list[WriteTask], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, "hold_locks", fail_to_lock(tmp_path / "elsewhere"))
    with pytest.raises(WriteError, match="someone") as raised:
        BatchWriter(tasks).write()
    assert raised.value.path == str(tmp_path / "elsewhere")
    assert sorted(os.listdir(tmp_path)) == ["a.onnx", "b.onnx"]


@pytest.mark.parametrize("path", ["second", "second/deep", "second/deep/b.onnx"])
def test_an_error_of_a_target_or_of_a_directory_around_it_is_that_models(
    path: str, tasks: list[WriteTask], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, "hold_locks", fail_to_lock(tmp_path / path))
    with pytest.raises(PlaceError) as raised:
        BatchWriter(tasks).write()
    assert raised.value.model_index == 1
    assert raised.value.error.path == str(tmp_path / path)
    assert sorted(os.listdir(tmp_path)) == ["a.onnx", "b.onnx"]


# What killed runs left, and where it is looked for.


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> set[Path]:
    """The directories that have been listed, as absolute paths."""
    directories: set[Path] = set()
    for name in ("scandir", "listdir"):
        real = getattr(os, name)

        def record(directory: Any = ".", _real: Callable[..., Any] = real) -> Any:
            if not isinstance(directory, int):
                directories.add(Path(os.path.abspath(os.fsdecode(directory))))
            return _real(directory)

        monkeypatch.setattr(os, name, record)
    return directories


@pytest.mark.parametrize("existing", ["", "a", "a/b"])
def test_only_the_directories_of_results_are_listed_and_leftovers_removed(
    existing: str, tmp_path: Path, listed: set[Path]
) -> None:
    (tmp_path / "in").mkdir()  # listed once, for sidecars
    model = saved(models.decoder(), tmp_path / "in" / "m.onnx")
    root = tmp_path / "out"
    (root / existing).mkdir(parents=True)
    left = root / existing / build_temp_name(build_key(), build_file_key(), "new")
    left.write_bytes(b"half")
    assert rename(model, "VLLM", output=root / "a" / "b" / "m.onnx").status == "renamed"
    assert (root / "a" / "b" / "m.onnx").exists()
    assert listed.isdisjoint({tmp_path, *tmp_path.parents})
    assert not left.exists()
    assert os.listdir(root) == ["a"]


def test_a_rename_in_place_lists_the_models_directory_only(
    decoder: Path, listed: set[Path]
) -> None:
    package = Path(onnxkvrename.__file__).parent  # it lists its own profiles and checks
    rename(decoder, "VLLM")
    assert {path for path in listed if package not in path.parents} == {decoder.parent}


# What someone else saves at a target while a run is at work.


def save_theirs(path: Path) -> None:
    path.with_name("theirs").write_bytes(b"theirs")
    os.replace(path.with_name("theirs"), path)


def meanwhile(change: Callable[[], object], monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    """Make a change while results are written, or after the sources were checked at last."""
    if moment == "writing":
        real = place.write_temp_file
        monkeypatch.setattr(place, "write_temp_file", lambda *args: (change(), real(*args))[1])
    else:
        check = WriteTask.find_source_error
        monkeypatch.setattr(WriteTask, "find_source_error", lambda task: (check(task), change())[0])


@pytest.mark.parametrize("moment", ["writing", "placing"])
@pytest.mark.parametrize("is_there", [True, False])
def test_with_force_only_what_was_there_at_the_start_is_replaced(
    is_there: bool, moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, output = saved(models.decoder(), tmp_path / "m.onnx"), tmp_path / "out" / "m.onnx"
    output.parent.mkdir()
    if is_there:
        output.write_bytes(b"old")
    meanwhile(lambda: save_theirs(output), monkeypatch, moment)
    error = "was changed by another program during the run" if is_there else "File exists"
    with pytest.raises(KvRenameError, match=error) as caught:
        rename(model, "VLLM", output=output, force=True)
    assert caught.value.path == str(output)
    assert output.read_bytes() == b"theirs"
    assert os.listdir(output.parent) == ["m.onnx"]


@pytest.mark.parametrize(
    "change",
    [save_theirs, lambda path: path.write_bytes(b"theirs"), lambda path: path.chmod(0o600)],
)
def test_in_place_a_model_that_someone_saves_or_protects_at_the_last_moment_stays(
    change: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = saved(models.decoder(), tmp_path / "m.onnx")
    original = model.read_bytes()
    model.chmod(0o644)
    meanwhile(lambda: change(model), monkeypatch, "placing")
    with pytest.raises(KvRenameError, match="by another program"):
        rename(model, "VLLM")
    assert model.read_bytes() in (original, b"theirs")
    assert (model.stat().st_mode & 0o777 == 0o600) is (model.read_bytes() == original)
    assert os.listdir(tmp_path) == ["m.onnx"]
