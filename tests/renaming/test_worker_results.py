"""Workers may be machines of others: no file but the expected ones is touched for their sake."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

import models
import pytest
import window_sets
from onnx import TensorProto

from onnxkvrename import KvRenameError, Report, load_rules
from onnxkvrename.errors import ModelError, WriteError
from onnxkvrename.renaming.prepare import PreparedModel
from onnxkvrename.renaming.run import rename_batch
from onnxkvrename.rules.find_models import find_jobs
from onnxkvrename.rules.plan import TokenChange
from onnxkvrename.rules.results import Options
from onnxkvrename.storage.temp_file import ReadyFile, build_temp_path

Lie = Callable[[Any], Any]
VICTIM = "/nonexistent/victim"


class Liar(ThreadPoolExecutor):
    """An executor whose workers do their work, and send back something else for the first item."""

    def __init__(self, kind: type, lie: Lie) -> None:
        super().__init__(1)
        self.kind, self.lie = kind, lie

    def submit(self, function: Any, /, *args: Any, **how: Any) -> Future[Any]:
        def work() -> Any:
            results = function(*args, **how)
            if isinstance(results[0], self.kind):
                results[0] = self.lie(results[0])
            return results

        return super().submit(work)


class Number(int):
    """An integer that is more than that."""


class Evil(KvRenameError):
    """An error that runs code when it is shown."""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two windows, one with external data, and a file of someone else beside them."""
    root = window_sets.write_windows(tmp_path / "in", 2)
    model = models.decoder()
    weight = models.tensor("w", 1.0)
    weight.ClearField("float_data")
    weight.data_location = TensorProto.EXTERNAL
    entry = weight.external_data.add()
    entry.key, entry.value = "location", "w.bin"
    model.graph.initializer.append(weight)
    (root / "w.bin").write_bytes(bytes(4))
    models.saved(model, root / "a.onnx")
    (tmp_path / "victim").write_bytes(b"precious")
    return root


def rename(root: Path, executor: Any) -> Report:
    jobs = find_jobs([root], directory=root.parent / "out")
    return rename_batch(
        jobs, TokenChange("VLLM"), load_rules(), Options(group_windows=False), None, executor
    )


def list_files(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*.*")}


def test_what_honest_workers_send_is_taken(root: Path) -> None:
    with Liar(object, lambda result: result) as executor:
        report = rename(root, executor)
    assert {model.status for model in report.models} == {"renamed"}
    assert (root.parent / "out" / "w.bin").exists()


def with_report(**fields: Any) -> Lie:
    return lambda result: result._replace(report=result.report._replace(**fields))


def with_job(**fields: Any) -> Lie:
    return lambda result: result._replace(job=result.job._replace(**fields))


def with_copies(change: Callable[[Any, Path], Any]) -> Lie:
    return lambda result: result._replace(
        data_copies=tuple(change(*copy) for copy in result.data_copies)
    )


PREPARED_LIES: dict[str, Lie] = {
    "nothing": lambda result: None,
    "a plain tuple": tuple,
    "a list for a tuple": lambda result: result._replace(data_paths=[]),
    "an error": lambda result: ModelError("no"),
    "a subclass": lambda result: result._replace(
        splice_plan=result.splice_plan._replace(
            identity=result.splice_plan.identity._replace(inode=Number(1))
        )
    ),
    "a path that is no file's": lambda result: result._replace(data_paths=(PurePosixPath("x"),)),
    "an error of its own": with_report(error=Evil("x")),
    "an error without text": with_report(error=KvRenameError(None)),  # type: ignore[arg-type]
    "a wrong status": with_report(status="renamed"),
    "another target": with_job(target=Path(VICTIM)),
    "another output": with_job(output=Path("../victim")),
    "in place": with_job(in_place=True),
    "another report": with_report(output=VICTIM),
    "another model": lambda result: result._replace(
        splice_plan=result.splice_plan._replace(model_path=Path(VICTIM))
    ),
    "a copy elsewhere": with_copies(lambda file, target: (file, target.parent.parent / "victim")),
    "a copy upwards": with_copies(
        lambda file, target: (file._replace(location="../victim"), target.parent / "../victim")
    ),
    "an absolute copy": with_copies(
        lambda file, target: (file._replace(location=VICTIM), Path(VICTIM))
    ),
    "leftovers elsewhere": lambda result: result._replace(data_paths=(Path(VICTIM),)),
}


@pytest.mark.parametrize("lie", PREPARED_LIES.values(), ids=PREPARED_LIES)
def test_a_prepared_model_with_other_types_or_paths_is_refused(lie: Lie, root: Path) -> None:
    before = list_files(root.parent)
    with Liar(PreparedModel, lie) as executor, pytest.raises(KvRenameError) as caught:
        rename(root, executor)
    assert caught.value.message.startswith("a worker returned ")
    assert "\n" not in str(caught.value)
    assert list_files(root.parent) == before


def replace_with(make: Callable[[ReadyFile], object]) -> Lie:
    """A worker that puts something else where its file was."""

    def lie(file: ReadyFile) -> ReadyFile:
        file.temp_path.unlink()
        make(file)
        return file

    return lie


def move_to(make_path: Callable[[ReadyFile], Path]) -> Lie:
    """A worker that puts its file elsewhere, and says so."""

    def lie(file: ReadyFile) -> ReadyFile:
        path = make_path(file)
        path.parent.mkdir(exist_ok=True)
        if not path.exists():
            os.rename(file.temp_path, path)
        return file._replace(temp_path=path)

    return lie


def victim(file: ReadyFile) -> Path:
    """The file of someone else, from any target below ``out`` or the directory staged for it."""
    return next(parent / "victim" for parent in file.target.parents if (parent / "victim").exists())


READY_LIES: dict[str, Lie] = {
    "nothing": lambda file: None,
    "a plain tuple": tuple,
    "an error of its own": lambda file: Evil("x"),
    "a number": lambda file: file._replace(overwrites_target=1),
    "may overwrite": lambda file: file._replace(overwrites_target=True),
    "another target": lambda file: file._replace(target=victim(file)),
    "another name": lambda file: file._replace(display_path=victim(file)),
    "someone's file": move_to(victim),
    "a name without our prefix": move_to(lambda file: file.target.parent / "x"),
    "the name for another target": move_to(
        lambda file: build_temp_path(file.target.with_name("other"))
    ),
    "another directory": move_to(lambda file: victim(file).parent / file.temp_path.name),
    "an upwards path": lambda file: file._replace(
        temp_path=file.target.parent / ".." / file.target.parent.name / file.temp_path.name
    ),
    "nothing there": replace_with(lambda file: None),
    "a directory": replace_with(lambda file: file.temp_path.mkdir()),
    "a symbolic link": replace_with(lambda file: file.temp_path.symlink_to(victim(file))),
    "a hard link": replace_with(lambda file: os.link(victim(file), file.temp_path)),
    "another size": replace_with(lambda file: file.temp_path.write_bytes(b"x")),
}


@pytest.mark.parametrize("lie", READY_LIES.values(), ids=READY_LIES)
def test_a_written_file_that_is_another_one_is_refused(lie: Lie, root: Path) -> None:
    inputs = list_files(root)
    with Liar(ReadyFile, lie) as executor, pytest.raises(KvRenameError) as caught:
        rename(root, executor)
    assert caught.value.message.startswith("a worker returned ")
    assert "\n" not in str(caught.value)
    assert list_files(root) == inputs
    assert (root.parent / "victim").read_bytes() == b"precious"
    assert not (root.parent / "out").exists()


def test_an_error_of_a_worker_is_the_error_of_its_model(root: Path) -> None:
    with Liar(ReadyFile, lambda file: WriteError("disk full")) as executor:
        report = rename(root, executor)
    assert [model.error.message for model in report.models if model.error] == ["disk full"]


@pytest.mark.parametrize("change", [lambda items: items[1:], lambda items: [*items, 1], tuple])
def test_another_number_of_results_is_refused(change: Lie, root: Path) -> None:
    class Miscounting(ThreadPoolExecutor):
        def submit(self, function: Any, /, *args: Any, **how: Any) -> Future[Any]:
            return super().submit(lambda: change(function(*args, **how)))

    before = list_files(root.parent)
    with (
        Miscounting(1) as executor,
        pytest.raises(KvRenameError, match="wrong number of results"),
    ):
        rename(root, executor)
    assert list_files(root.parent) == before
