"""Runs that stopped half way are found and undone, and what is planted undoes nothing."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from onnxkvrename import KvRenameError, ModelError, WriteError
from onnxkvrename.storage import lock, recover
from onnxkvrename.storage.lock import hold_locks
from onnxkvrename.storage.record import Record, build_record_path, play_back, remove_record
from onnxkvrename.storage.recover import (
    find_half_done_runs,
    settle_stopped_runs,
)
from onnxkvrename.storage.temp_file import (
    build_file_key,
    build_key,
    build_temp_name,
    remove_temp_files,
)

StopRun = Callable[..., Record]

needs_root = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root may give files away"
)

OLD = {"in/a": "old a", "in/b": "old b", "in/sub/c": "old c"}
NEW = {name: f"new {name[-1]}" for name in (*OLD, "made/d")}


@pytest.fixture
def targets(tmp_path: Path) -> list[Path]:
    """Three files to replace, and one in a directory that the run has made."""
    for name, text in OLD.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "made").mkdir()
    return [tmp_path / name for name in NEW]


@pytest.fixture
def half_done(targets: list[Path], stop_run: StopRun) -> Record:
    """A run that has replaced the first of four files."""
    return stop_run(targets, 1, made=[targets[-1].parent])


def read_state(root: Path) -> dict[str, str]:
    paths = [path for path in root.rglob("*") if path.is_file()]
    return {str(path.relative_to(root)): path.read_text("latin-1") for path in paths}


def call_until(
    nth: int, calls: Iterator[int], real: Callable[..., Any], *args: Any, **how: Any
) -> Any:
    """Call a function of the system, which fails from the ``nth`` call on."""
    if next(calls) >= nth:
        raise OSError(errno.EIO, os.strerror(errno.EIO))
    return real(*args, **how)


# Runs are undone.


@pytest.mark.parametrize("name", ["link", "replace", "fsync"])
def test_what_fails_half_way_is_continued_by_the_same_call(
    name: str,
    targets: list[Path],
    tmp_path: Path,
    stop_run: StopRun,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    record = stop_run(targets, 3)
    for nth in range(20):
        assert find_half_done_runs(record.directories) in ([record], [])
        with monkeypatch.context() as patch:
            patch.setattr(os, name, partial(call_until, nth, count(), getattr(os, name)))
            try:
                settle_stopped_runs(record.directories)
            except KvRenameError as error:
                if "Input/output error" not in error.message:
                    raise
            else:
                break
    assert nth
    assert read_state(tmp_path) == OLD
    assert find_half_done_runs(record.directories) == []


def swap_for_content(path: Path) -> None:
    path.unlink()
    path.write_text("evil")


def swap_for_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("sub/c")


@pytest.mark.parametrize("swap", [Path.unlink, swap_for_content, swap_for_link])
def test_what_is_not_the_file_of_the_run_is_not_put_in_place(
    swap: Callable[[Path], None],
    half_done: Record,
    find_kept: Callable[..., Path],
    targets: list[Path],
    tmp_path: Path,
) -> None:
    swap(find_kept(half_done, 0, "old"))
    before = read_state(tmp_path)
    assert settle_stopped_runs(half_done.directories)
    with pytest.raises(WriteError, match="has no copy of its old content") as caught:
        play_back(half_done)
    assert caught.value.path == str(targets[0])
    assert read_state(tmp_path) == before


# Where runs are looked for.


def plant_garbage(path: Path) -> None:
    path.write_text("{")


def plant_link(path: Path) -> None:
    path.symlink_to(path)


def plant_copy(path: Path) -> None:
    """The record of another directory."""
    (found,) = (path.parent.parent / "in").glob(".*-record")
    path.with_name(found.name).write_bytes(found.read_bytes())


def plant_anothers(path: Path) -> None:
    path.write_text("{}")
    os.chown(path, 12345, -1)


@pytest.mark.parametrize(
    "plant",
    [
        plant_garbage,
        plant_link,
        os.mkfifo,
        pytest.param(plant_anothers, marks=needs_root),
    ],
)
def test_what_is_planted_is_skipped_and_hides_no_run(
    plant: Callable[[Path], None], half_done: Record, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    plant(build_record_path(tmp_path / "other", build_key()))
    plant(build_record_path(tmp_path / "in", build_key()))
    directories = [tmp_path / "other", tmp_path / "in"]
    assert find_half_done_runs(directories) == [half_done]


# The next run settles what it finds.


@pytest.mark.parametrize("done", [0, 1, 3, 4])
def test_a_run_settles_the_one_before(
    done: int, targets: list[Path], tmp_path: Path, stop_run: StopRun
) -> None:
    """What was half done is undone, and what was complete is left as it is."""
    stop_run(targets, done, made=[tmp_path / "made"])
    assert not settle_stopped_runs([tmp_path / "in", tmp_path / "none"])
    assert read_state(tmp_path) == (NEW if done == 4 else OLD)
    assert (tmp_path / "made").exists() is (done == 4)


@pytest.mark.parametrize("change", ["in/b", "kept"])
def test_a_run_that_cannot_be_undone_keeps_its_record_until_its_work_is_done(
    change: str,
    half_done: Record,
    find_kept: Callable[..., Path],
    targets: list[Path],
    tmp_path: Path,
) -> None:
    if change == "kept":
        change = f"in/{find_kept(half_done, 0, 'old').name}"
    (tmp_path / change).write_text("theirs")
    before = read_state(tmp_path)
    assert settle_stopped_runs([tmp_path / "in"])
    remove_temp_files(tmp_path / "in")
    assert read_state(tmp_path) == before
    for path in targets[1:]:  # the same command again
        path.with_name("ready").write_text(f"new {path.name}")
        os.replace(path.with_name("ready"), path)
    assert not settle_stopped_runs([tmp_path / "in"])
    assert read_state(tmp_path) == NEW


def test_in_a_copy_of_the_tree_a_half_done_run_keeps_the_only_old_files(
    half_done: Record, tmp_path: Path
) -> None:
    shutil.copytree(tmp_path, tmp_path / "copy", ignore=lambda *found: ["copy"])
    before = read_state(tmp_path / "copy")
    assert not settle_stopped_runs([tmp_path / "copy" / "in"])
    remove_temp_files(tmp_path / "copy" / "in")
    assert read_state(tmp_path / "copy") == before


@pytest.mark.parametrize("has_old", [False, True])
@pytest.mark.parametrize("plant", [plant_garbage, plant_copy])
def test_a_record_that_is_none_goes_unless_it_may_keep_the_only_copy(
    plant: Callable[[Path], None], has_old: bool, half_done: Record, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    key = half_done.key if plant is plant_copy else build_key()
    plant(build_record_path(other, key))
    (other / build_temp_name(key, build_file_key(), "new")).write_text("new")
    if has_old:
        (other / build_temp_name(key, build_file_key(), "old")).write_text("old")
    assert not settle_stopped_runs([other])
    assert len(os.listdir(other)) == (3 if has_old else 0)
    remove_temp_files(other)
    assert len(os.listdir(other)) == (3 if has_old else 0)


EMPTY_RECORD = b'{"directories": ["."], "files": [], "made": []}'
OTHER_RECORD = EMPTY_RECORD.replace(b"[]", b'[[0, "m", "bbbbbbbbbbbb", null, [1, 2, 3]]]', 1)


@pytest.mark.parametrize("content", [b"none", EMPTY_RECORD, OTHER_RECORD])
def test_what_came_with_a_planted_record_may_be_data_that_is_read(
    content: bytes, tmp_path: Path
) -> None:
    key = build_key()
    data = tmp_path / build_temp_name(key, "b" * 12, "new")
    data.write_text("data of the model m")
    (tmp_path / "m").write_text("model")
    build_record_path(tmp_path, key).write_bytes(content)
    assert not settle_stopped_runs([tmp_path], [tmp_path / "m"], knows_inputs=False)
    assert read_state(tmp_path) == {"m": "model", data.name: "data of the model m"}
    remove_temp_files(tmp_path, kept=[data.name])
    assert data.exists()


@needs_root
def test_copies_of_files_of_another_user_go_with_the_record(
    targets: list[Path], tmp_path: Path, stop_run: StopRun
) -> None:
    """What was replaced by force."""
    for path in targets[:2]:
        os.chown(path, 12345, -1)
    record = stop_run(targets, len(targets), made=[tmp_path / "made"])
    remove_record(record)
    assert read_state(tmp_path) == NEW


def test_a_record_stays_until_all_that_it_keeps_could_be_removed(
    targets: list[Path],
    tmp_path: Path,
    stop_run: StopRun,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing else would tell the next run, which has nothing to write, what to remove."""
    record = stop_run(targets, len(targets), made=[tmp_path / "made"])
    unlink = os.unlink

    def fail(path: Any, **options: Any) -> None:
        if str(path).endswith("-old"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        unlink(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", fail)
        remove_record(record)
    assert not settle_stopped_runs([tmp_path / "in"], knows_inputs=False)
    assert read_state(tmp_path) == NEW


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES])
def test_a_record_that_cannot_be_read_now_stays(
    number: int,
    targets: list[Path],
    tmp_path: Path,
    stop_run: StopRun,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No old file would tell that the run is half done: the first one is new."""
    stop_run(targets[::-1], 1)
    before = read_state(tmp_path)

    def fail(*args: object) -> bytes:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", fail)
        settle_stopped_runs([tmp_path / "in", tmp_path / "made"])
    assert read_state(tmp_path) == before


@needs_root
def test_so_does_the_one_of_another_user(
    targets: list[Path], tmp_path: Path, stop_run: StopRun
) -> None:
    record = stop_run(targets[::-1], 1)
    for directory in record.directories:
        os.chown(directory, 12345, -1)
        for name in os.listdir(directory):
            os.chown(directory / name, 12345, -1)
    before = read_state(tmp_path)
    settle_stopped_runs(record.directories)
    assert read_state(tmp_path) == before


def test_of_many_records_only_some_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at = list[Path]()

    def refuse(path: Path) -> Record:
        looked_at.append(path)
        raise ModelError("is none")

    for number in range(20):
        (tmp_path / f".onnxkvrename-{number:024}-record").mkdir()
    monkeypatch.setattr(recover, "read_record", refuse)
    assert not settle_stopped_runs([tmp_path])
    assert len(looked_at) == 8


def test_a_run_that_is_at_work_is_not_settled(
    half_done: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "_MAX_WAIT", 0)
    before = read_state(tmp_path)
    with (
        hold_locks([tmp_path / "in" / "sub"]),
        pytest.raises(WriteError, match="is being processed by another run"),
    ):
        settle_stopped_runs([tmp_path / "in"])
    assert read_state(tmp_path) == before


# What has a temporary name and no record.


def test_before_all_inputs_are_known_only_second_names_go(tmp_path: Path) -> None:
    (tmp_path / "m.onnx").write_text("model")
    second, other, read = (
        tmp_path / build_temp_name(build_key(), build_file_key(), "new") for _ in range(3)
    )
    for path in (second, read):
        os.link(tmp_path / "m.onnx", path)
    other.write_text("perhaps weights")
    settle_stopped_runs([tmp_path])
    assert {path.name for path in tmp_path.iterdir()} == {"m.onnx", other.name}
    remove_temp_files(tmp_path, kept=[other.name])
    assert other.exists()
    remove_temp_files(tmp_path)
    assert os.listdir(tmp_path) == ["m.onnx"]


@pytest.mark.parametrize(
    "name",
    [
        ".onnxkvrename-precious",
        f".onnxkvrename-{'0' * 23}-0-new",
        f".onnxkvrename-{'A' * 24}-0-new",
        f".onnxkvrename-{'0' * 24}-0-new.onnx",
        f".onnxkvrename-{'0' * 24}-x-new",
        f"{'0' * 24}-0-new",
    ],
)
def test_nothing_is_removed_that_only_looks_like_ours(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("mine")
    settle_stopped_runs([tmp_path])
    remove_temp_files(tmp_path)
    assert os.listdir(tmp_path) == [name]


def make_link(path: Path) -> None:
    path.symlink_to("precious")


def make_file_of_another(path: Path) -> None:
    path.write_text("theirs")
    os.chown(path, 12345, -1)


@pytest.mark.parametrize(
    "make",
    [make_link, os.mkdir, os.mkfifo, pytest.param(make_file_of_another, marks=needs_root)],
)
def test_what_no_run_of_this_user_makes_is_not_removed(
    make: Callable[[Path], None], tmp_path: Path
) -> None:
    path = tmp_path / build_temp_name(build_key(), build_file_key(), "new")
    make(path)
    settle_stopped_runs([tmp_path])
    remove_temp_files(tmp_path)
    assert os.path.lexists(path)


@needs_root
def test_for_root_what_the_owner_of_the_directory_left_is_as_good_as_its_own(
    tmp_path: Path,
) -> None:
    path = tmp_path / build_temp_name(build_key(), build_file_key(), "new")
    path.touch()
    for owned in (path, tmp_path):
        os.chown(owned, 12346, -1)
    remove_temp_files(tmp_path)
    assert not path.exists()
