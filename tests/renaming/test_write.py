"""A result is made from the file that was read, or not at all."""

from __future__ import annotations

import errno
import os
import pickle
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any

import models
import pytest
from models import saved

import onnxkvrename
from onnxkvrename import ModelError, WriteError, load_rules, rename
from onnxkvrename.files.find import build_job
from onnxkvrename.files.lock import open_locks
from onnxkvrename.files.staged import Output, write_all
from onnxkvrename.files.temp_file import TempFile, build_key, build_temp_name
from onnxkvrename.renaming.prepare import prepare_model
from onnxkvrename.renaming.run import rename_batch
from onnxkvrename.renaming.write import list_results, write_result
from onnxkvrename.rules.request import Request


@pytest.fixture(params=["data", "model"])
def output(request: pytest.FixtureRequest, external: Path, tmp_path: Path) -> Output:
    """A file to be made from another one, with a path of the user in messages."""
    (tmp_path / "out").mkdir()
    job = build_job(external, tmp_path / "out" / "x.onnx")
    prepared = prepare_model(job, Request(token="VLLM"), load_rules())
    data, model = (result.output for result in list_results([prepared], (), force=False))
    chosen = data if request.param == "data" else model
    return chosen._replace(display_path=Path("called"))


def make(output: Output) -> None:
    with open_locks() as locks:
        write_all([output], write_result, locks=locks)


def test_whoever_gets_the_work_can_do_it(output: Output, tmp_path: Path) -> None:
    def map_elsewhere(work: Any, stages: Iterable[Any]) -> Generator[Any, None, None]:
        work, stages = pickle.loads(pickle.dumps((work, list(stages))))
        yield from map(work, stages)

    with open_locks() as locks:
        write_all([output], write_result, locks=locks, map_stages=map_elsewhere)
    assert output.source is not None
    assert os.listdir(tmp_path / "out") == [output.target.name]
    assert output.target.stat().st_size >= output.source.stat().st_size


@pytest.mark.parametrize("moment", ["before", "while it is copied"])
def test_a_source_that_is_no_longer_what_was_read_gives_no_result(
    moment: str, output: Output, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan would cut it in the wrong places."""
    real, source = TempFile.copy_attributes, output.source
    assert source is not None

    def change(self: TempFile, *args: Any, **how: Any) -> None:
        os.utime(source, ns=(0, 0))
        real(self, *args, **how)

    if moment == "before":
        os.utime(source, ns=(0, 0))
    else:
        monkeypatch.setattr(TempFile, "copy_attributes", change)
    with pytest.raises(ModelError, match=r"by another program.*again when") as caught:
        make(output)
    assert caught.value.path == str(source)
    assert os.listdir(tmp_path / "out") == []


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES])
def test_a_source_that_cannot_be_looked_at_is_not_called_changed(
    number: int, output: Output, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.stat

    def fail(path: Any, **how: Any) -> os.stat_result:
        if path == output.source:
            raise OSError(number, os.strerror(number))
        return real(path, **how)

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", fail)
        with pytest.raises(ModelError, match=f"cannot be read: {os.strerror(number)}") as caught:
            make(output)
    assert caught.value.path == str(output.source)
    assert os.listdir(tmp_path / "out") == []


@pytest.mark.parametrize("output", ["data"], indirect=True)
def test_data_that_now_lead_outside_are_not_copied(output: Output, tmp_path: Path) -> None:
    """Even if they have the same state: the same file was moved, and a link is where it was."""
    assert output.source is not None
    os.rename(output.source, tmp_path / "moved")
    output.source.symlink_to(tmp_path / "moved")
    with pytest.raises(ModelError, match="leads out"):
        make(output)
    assert os.listdir(tmp_path / "out") == []


def test_a_source_that_is_gone_is_an_error(output: Output, tmp_path: Path) -> None:
    assert output.source is not None
    output.source.unlink()
    with pytest.raises(ModelError):
        make(output)
    assert os.listdir(tmp_path / "out") == []


def test_what_cannot_be_written_is_called_what_the_user_calls_it(
    output: Output, tmp_path: Path
) -> None:
    (tmp_path / "out").rmdir()
    with pytest.raises(WriteError) as caught:
        make(output._replace(like_directory=None))
    assert caught.value.path == "called"


# Which model an error belongs to.


@pytest.mark.parametrize(
    ("path", "index"),
    [
        ("second", 1),
        ("second/deep", 1),
        ("second/deep/b.onnx", 1),
        ("first/a.onnx", 0),
        ("b.onnx", 1),
        ("elsewhere", None),
        ("", None),
    ],
)
def test_an_error_of_a_file_or_of_a_directory_around_it_alone_is_that_models(
    path: str, index: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **how: object) -> None:
        raise WriteError("no", path=str(tmp_path / path))

    sources = [saved(models.decoder(), tmp_path / f"{name}.onnx") for name in "ab"]
    targets = [tmp_path / "first" / "a.onnx", tmp_path / "second" / "deep" / "b.onnx"]
    jobs = [build_job(model, target) for model, target in zip(sources, targets, strict=True)]
    monkeypatch.setattr("onnxkvrename.renaming.write.write_all", fail)
    work = Request(token="VLLM"), jobs, load_rules()
    if index is None:
        with pytest.raises(WriteError, match="no"):
            rename_batch(*work)
        return
    report = rename_batch(*work)
    assert [model.error is not None for model in report.models] == [index == 0, index == 1]


# What killed runs left, and where it is looked for.


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> set[Path]:
    """The directories that have been listed, as absolute paths."""
    directories: set[Path] = set()
    for name in ("scandir", "listdir"):
        real = getattr(os, name)

        def record(directory: Any = ".", _real: Any = real) -> Any:
            if not isinstance(directory, int):
                directories.add(Path(os.path.abspath(os.fsdecode(directory))))
            return _real(directory)

        monkeypatch.setattr(os, name, record)
    return directories


@pytest.mark.parametrize("existing", ["", "a", "a/b"])
def test_only_the_directories_of_results_are_listed_and_leftovers_removed(
    existing: str, tmp_path: Path, listed: set[Path]
) -> None:
    """Where a directory is missing, the one above it, in which it is made."""
    (tmp_path / "in").mkdir()  # listed once, for sidecars
    model = saved(models.decoder(), tmp_path / "in" / "m.onnx")
    root = tmp_path / "out"
    (root / existing).mkdir(parents=True)
    left = root / existing / build_temp_name(build_key(), "new")
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
