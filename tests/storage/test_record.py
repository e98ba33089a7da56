"""Records of half done runs: written to be read back, and never believed without a look."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from onnxkvrename import KvRenameError
from onnxkvrename.storage.clean_up import find_protected_names, remove_stale_temp_files
from onnxkvrename.storage.record import (
    DirectoryMove,
    FileChange,
    Identity,
    Record,
    read_record,
    remove_record,
    write_record,
)
from onnxkvrename.storage.recover import end_run, find_half_done_runs, remove_ended_runs
from onnxkvrename.storage.temp_file import (
    RECORD_SUFFIX,
    build_temp_path,
    build_temp_prefix,
    find_stale_temp_files,
)

Document = dict[str, Any]


def read_identity(path: Path) -> Identity:
    identity = Identity.read(path)
    assert identity is not None
    return identity


@pytest.fixture
def changes(tmp_path: Path) -> list[FileChange]:
    """Two files, one new already and one still old, with all that a run keeps of them."""
    made = []
    (tmp_path / "in").mkdir()
    for name in ("a", "b"):
        target = tmp_path / "in" / name
        backup, ready = build_temp_path(target), build_temp_path(target)
        target.write_bytes(b"old")
        ready.write_bytes(b"new one")
        os.link(target, backup)
        made.append(FileChange(target, read_identity(target), read_identity(ready), backup, ready))
    os.replace(made[0].ready, made[0].target)
    return made


@pytest.fixture
def record(changes: list[FileChange]) -> Path:
    (path,) = write_record(changes, [])
    return path


def read(path: Path) -> Record | None:
    return read_record(path, os.lstat(path))


def list_texts(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_a_record_is_read_as_it_was_written(changes: list[FileChange], record: Path) -> None:
    found = read(record)
    assert found is not None
    assert (found.files, found.directories, found.paths) == (tuple(changes), (), (record,))
    assert list(found.find_states().values()) == ["new", "old"]
    kept = {changes[0].backup, changes[1].backup, changes[0].ready, changes[1].ready, record}
    assert {*found.find_kept_identities(), *found.paths} == kept
    assert find_protected_names(record.parent, None) == {path.name for path in kept if path}
    remove_record(found.paths)
    assert not record.exists()


def lead_up(document: Document) -> None:
    document["files"][0]["target"] += "/../../outside"


def lead_to_relative_path(document: Document) -> None:
    document["files"][0]["target"] = "a"


def keep_in_another_directory(document: Document) -> None:
    document["files"][0]["backup"] = "../outside"


def keep_under_a_plain_name(document: Document) -> None:
    document["files"][0]["ready"] = "b"


def keep_under_the_name_of_another(document: Document) -> None:
    document["files"][0]["backup"] = document["files"][1]["backup"]


def lie_in_a_plain_file(document: Document) -> None:
    document["records"] = [str(Path(document["files"][0]["target"]).with_name("b"))]


def have_numbers_for_paths(document: Document) -> None:
    document["files"][0]["target"] = 7


def have_no_files(document: Document) -> None:
    del document["files"]


@pytest.mark.parametrize(
    "damage",
    [
        lead_up,
        lead_to_relative_path,
        keep_in_another_directory,
        keep_under_a_plain_name,
        keep_under_the_name_of_another,
        lie_in_a_plain_file,
        have_numbers_for_paths,
        have_no_files,
    ],
)
def test_a_record_with_other_paths_than_ours_is_none(
    damage: Callable[[Document], None], record: Path
) -> None:
    document = json.loads(record.read_text("utf-8"))
    damage(document)
    record.write_text(json.dumps(document), "utf-8")
    before = list_texts(record.parent)
    assert read(record) is None
    assert find_protected_names(record.parent, None) == set()
    assert find_half_done_runs([record.parent]) == []
    assert list_texts(record.parent) == before


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"files": 1}', "[" * 5000, "9" * 5000])
def test_what_is_no_record_is_none(text: str, record: Path) -> None:
    record.write_text(text, "utf-8")
    assert read(record) is None
    assert find_half_done_runs([record.parent]) == []


def test_a_huge_record_is_none_and_not_read(record: Path) -> None:
    os.truncate(record, 1 << 40)
    assert read(record) is None


def test_a_record_that_can_be_none_is_skipped_with_the_reason(record: Path) -> None:
    with record.open("r+b") as file:
        file.truncate((1 << 23) + 1)
    (skipped,) = find_skipped(record.parent)
    assert "8,388,609 bytes" in skipped
    record.unlink()
    record.mkdir()
    (skipped,) = find_skipped(record.parent)
    assert "not a regular" in skipped


def test_a_link_that_is_named_like_a_record_is_not_followed(record: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere.json"
    os.rename(record, moved)
    record.symlink_to(moved)
    assert record.name.endswith(RECORD_SUFFIX)
    assert find_half_done_runs([record.parent]) == []
    assert find_protected_names(record.parent, None) == set()


@pytest.mark.parametrize(
    ("undo", "fault"),
    [(True, "has no copy of its old content"), (False, "has lost its new content")],
)
def test_a_file_that_is_not_the_one_of_the_record_is_not_put_in_place(
    undo: bool, fault: str, changes: list[FileChange], record: Path
) -> None:
    kept = changes[0].backup if undo else changes[1].ready
    assert kept is not None
    kept.unlink()
    kept.write_bytes(b"evil")
    (run,) = find_half_done_runs([record.parent])
    before = list_texts(record.parent)
    with pytest.raises(KvRenameError) as caught:
        end_run(run, undo=undo)
    assert caught.value.path == str(changes[0 if undo else 1].target)
    assert fault in caught.value.message
    assert "run the stopped" in caught.value.hint
    assert list_texts(record.parent) == before


def test_a_run_with_a_file_elsewhere_is_ended_if_both_directories_are_given(
    changes: list[FileChange], tmp_path: Path
) -> None:
    (tmp_path / "mine").mkdir()
    mine = tmp_path / "mine" / "m"
    mine.write_bytes(b"mine")
    write_record(
        [FileChange(mine, None, read_identity(mine), None, build_temp_path(mine)), *changes], []
    )
    (skipped,) = find_skipped(tmp_path / "in")
    assert f"a file in {mine.parent}" in skipped
    (run,) = find_half_done_runs([tmp_path / "in", tmp_path / "mine"])
    end_run(run, undo=False)
    assert sorted(list_texts(tmp_path)) == ["a", "b", "m"]


def find_skipped(directory: Path) -> list[str]:
    skipped = list[KvRenameError]()
    assert find_half_done_runs([directory], skipped.append) == []
    return [f"{error.message}; {error.hint}" if error.hint else error.message for error in skipped]


needs_root = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root to give files away"
)


@needs_root
def test_a_record_of_another_user_is_skipped_and_keeps_nothing(
    record: Path, changes: list[FileChange]
) -> None:
    os.chown(record, 12345, -1)
    before = list_texts(record.parent)
    (skipped,) = find_skipped(record.parent)
    assert "user ID 12345" in skipped
    assert list_texts(record.parent) == before
    assert not remove_stale_temp_files(find_stale_temp_files(file.target for file in changes))
    assert record.exists()


@pytest.mark.parametrize(
    "target",
    [
        "/zzz" + "/a" * 300_000 + "/m",
        "/" + "n" * 300 + "/m",
        "/\ud800/m",
        "/in/\ud800",
        "/" + "n" * 4096,
    ],
    ids=["deep", "long name", "no text", "no name", "long"],
)
def test_a_path_that_can_be_none_makes_no_record(target: str, record: Path) -> None:
    """Each of them is an error of the system, an error of Python, or minutes of work."""
    document = json.loads(record.read_text("utf-8"))
    document["files"][0] |= {"target": target, "ready": ".onnxkvrename-00000000-" + "0" * 24}
    record.write_text(json.dumps(document), "utf-8")
    assert read(record) is None
    assert find_protected_names(record.parent, None) == set()
    (skipped,) = find_skipped(record.parent)
    assert "not a record" in skipped


@pytest.mark.parametrize("content", [b"\xff", b"{", b""])
def test_what_is_no_record_is_skipped_with_a_line(content: bytes, record: Path) -> None:
    record.write_bytes(content)
    (skipped,) = find_skipped(record.parent)
    assert "not a record" in skipped


def test_only_what_is_named_like_a_record_is_opened(
    record: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever else lies there may be large, or not be readable."""
    (record.parent / f"notes{RECORD_SUFFIX}").write_bytes(record.read_bytes())
    build_temp_path(record.parent / "c").write_bytes(record.read_bytes())
    opened = []

    def read_and_note(path: Path, status: os.stat_result) -> Record | None:
        opened.append(path)
        return read_record(path, status)

    monkeypatch.setattr("onnxkvrename.storage.record.read_record", read_and_note)
    assert record.name in find_protected_names(record.parent, None)
    assert opened == [record]


def test_one_that_is_skipped_does_not_hide_the_others(record: Path) -> None:
    bad = record.with_name(record.name.replace(record.name[14:22], "0" * 8)[:23] + "0" * 24)
    bad = bad.with_name(bad.name + RECORD_SUFFIX)
    bad.write_text("{")
    skipped = list[KvRenameError]()
    assert [run.path for run in find_half_done_runs([record.parent], skipped.append)] == [record]
    assert [error.path for error in skipped] == [str(bad)]


def test_a_record_lies_where_it_says(record: Path, tmp_path: Path) -> None:
    """Else it could name the files of any directory."""
    other = tmp_path / "other" / record.name.replace(record.name[14:22], "0" * 8)
    other.parent.mkdir()
    os.rename(record, other)
    assert read(other) is None


def end_by_hand(changes: list[FileChange]) -> None:
    os.replace(changes[1].ready, changes[1].target)


def test_an_ended_run_is_removed_by_who_finished_its_work(
    changes: list[FileChange], record: Path
) -> None:
    remove_ended_runs([record.parent])
    assert record.exists()  # not yet ended
    end_by_hand(changes)
    remove_ended_runs([record.parent])
    assert sorted(os.listdir(record.parent)) == ["a", "b"]


def test_of_an_ended_run_nothing_is_removed_that_is_not_what_it_kept(
    changes: list[FileChange], record: Path
) -> None:
    """A record may name the only copy of an old model as what it may remove."""
    end_by_hand(changes)
    backup = changes[0].backup
    assert backup is not None
    backup.unlink()
    backup.write_bytes(b"only copy")
    remove_ended_runs([record.parent])
    assert backup.read_bytes() == b"only copy"


def test_an_ended_run_with_a_file_elsewhere_stays(
    changes: list[FileChange], tmp_path: Path
) -> None:
    """Otherwise a record in one directory would lock and remove files in any other."""
    end_by_hand(changes)
    (tmp_path / "mine").mkdir()
    mine = tmp_path / "mine" / "m"
    mine.write_bytes(b"mine")
    identity = read_identity(mine)
    here = FileChange(mine, None, identity, None, build_temp_path(mine))
    paths = write_record([here, *changes], [])
    before = list_texts(tmp_path)
    remove_ended_runs([tmp_path / "mine"])
    assert list_texts(tmp_path) == before
    remove_ended_runs({path.parent for path in paths})
    assert sorted(list_texts(tmp_path)) == ["a", "b", "m"]


def test_a_record_that_could_not_be_read_again_is_not_written(tmp_path: Path) -> None:
    deep = tmp_path.joinpath(*("d" * 3 for _ in range(130)), "m")
    deep.parent.mkdir(parents=True)
    deep.write_bytes(b"x")
    identity = read_identity(deep)
    with pytest.raises(KvRenameError, match="too long paths"):
        write_record([FileChange(deep, identity, identity, None, build_temp_path(deep))], [])
    assert os.listdir(deep.parent) == ["m"]


@pytest.mark.parametrize("undo", [True, False])
def test_a_renamed_directory_is_ended_with_its_intent(
    undo: bool, changes: list[FileChange], tmp_path: Path
) -> None:
    source, target = tmp_path / "in" / "export", tmp_path / "in" / "renamed"
    source.mkdir()
    build_temp_path(source).symlink_to("export/renamed")  # what the run was about to do
    write_record(changes, [DirectoryMove(source, target, os.lstat(source).st_ino)])
    (run,) = find_half_done_runs([tmp_path / "in"])
    end_run(run, undo=undo)
    assert sorted(os.listdir(tmp_path / "in")) == ["a", "b", "export" if undo else "renamed"]


@pytest.mark.parametrize("is_ours", [True, False])
def test_of_an_ended_run_a_staged_directory_goes_but_no_other_of_its_name(
    is_ours: bool, changes: list[FileChange], tmp_path: Path
) -> None:
    target = tmp_path / "in" / "new"
    staged = build_temp_path(target)
    staged.mkdir()
    write_record(changes, [DirectoryMove(staged, target, os.lstat(staged).st_ino)])
    end_by_hand(changes)
    if is_ours:
        target.mkdir()  # by someone else: there is no place any more
    else:
        os.rename(staged, target)
        staged.mkdir()
    (staged / "c").write_bytes(b"content")
    remove_ended_runs([tmp_path / "in"])
    assert staged.exists() is not is_ours
    assert sorted(os.listdir(tmp_path / "in")) == sorted(
        ["a", "b", "new", *([] if is_ours else [staged.name])]
    )


def test_a_record_that_is_too_long_to_be_read_again_is_not_written(
    changes: list[FileChange], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = list_texts(changes[0].target.parent)
    monkeypatch.setattr("onnxkvrename.storage.record._MAX_RECORD_BYTES", 400)
    with pytest.raises(KvRenameError) as caught:
        write_record(changes, [])
    assert caught.value.path == str(changes[0].target)
    assert "too many files" in caught.value.message
    assert "fewer models" in caught.value.hint
    assert list_texts(changes[0].target.parent) == before


@pytest.mark.parametrize("undo", [True, False])
def test_what_was_kept_is_put_in_place_only_if_it_is_a_file(
    undo: bool, changes: list[FileChange], tmp_path: Path
) -> None:
    """A record may name a link with the very identity that it has."""
    (tmp_path / "foreign").write_bytes(b"foreign")
    kept = changes[0].backup if undo else changes[1].ready
    assert kept is not None
    kept.unlink()
    kept.symlink_to(tmp_path / "foreign")
    if undo:
        changes[0] = changes[0]._replace(old=read_identity(kept))
    else:
        changes[1] = changes[1]._replace(new=read_identity(kept))
    write_record(changes, [])
    (run,) = find_half_done_runs([kept.parent])
    with pytest.raises(KvRenameError) as caught:
        end_run(run, undo=undo)
    assert caught.value.path == str(changes[0 if undo else 1].target)
    assert "not a regular" in caught.value.message
    assert [change.target.read_bytes() for change in changes] == [b"new one", b"old"]


# What is cleared away without a record.


def test_nothing_is_removed_that_only_looks_like_ours(tmp_path: Path) -> None:
    target = tmp_path / "m.onnx"
    prefix = build_temp_prefix(target)
    key = "0" * 24
    mine = [prefix + "precious", prefix + key[1:], prefix + key + "-data", prefix + "A" * 24]
    for name in mine:
        (tmp_path / name).write_bytes(b"mine")
    os.symlink("precious", tmp_path / f"{prefix}{'1' * 24}")
    assert list(find_stale_temp_files([target])) == [tmp_path / f"{prefix}{'1' * 24}"]
    remove_stale_temp_files(find_stale_temp_files([target]))
    assert sorted(os.listdir(tmp_path)) == sorted([*mine, f"{prefix}{'1' * 24}"])


def test_what_the_run_reads_is_not_removed_whatever_its_name(tmp_path: Path) -> None:
    target = tmp_path / "m.onnx"
    data, directory, left = (build_temp_path(target) for _ in range(3))
    data.write_bytes(b"weights")
    left.write_bytes(b"half")
    directory.mkdir()
    (directory / "a.onnx").write_bytes(b"model")
    (tmp_path / "w.bin").symlink_to(data.name)
    inputs = [tmp_path / "w.bin", directory / "a.onnx"]
    remove_stale_temp_files([data, directory, left], inputs=inputs)
    assert data.read_bytes() == b"weights"
    assert (directory / "a.onnx").read_bytes() == b"model"
    assert not left.exists()


def test_what_a_record_keeps_stays_while_another_directory_is_cleaned(
    record: Path, changes: list[FileChange], tmp_path: Path
) -> None:
    left = build_temp_path(tmp_path / "elsewhere" / "m.onnx")
    left.parent.mkdir()
    left.write_bytes(b"half")
    before = list_texts(record.parent)
    stale = find_stale_temp_files(file.target for file in changes)
    assert remove_stale_temp_files([*stale, left])
    assert list_texts(record.parent) == before
    assert not left.exists()


def test_before_all_inputs_are_known_only_second_names_go(tmp_path: Path) -> None:
    target = tmp_path / "m.onnx"
    target.write_bytes(b"model")
    second, other = build_temp_path(target), build_temp_path(target)
    os.link(target, second)
    other.write_bytes(b"perhaps weights")
    remove_stale_temp_files([second, other], links_of=[target])
    assert sorted(os.listdir(tmp_path)) == sorted([target.name, other.name])


@needs_root
def test_what_belongs_to_another_user_stays(tmp_path: Path) -> None:
    """For root, what the owner of the directory left is as good as its own."""
    target = tmp_path / "m.onnx"
    theirs, owners = build_temp_path(target), build_temp_path(target)
    for path, user in ((theirs, 12345), (owners, 12346), (tmp_path, 12346)):
        if path != tmp_path:
            path.write_bytes(b"left")
        os.chown(path, user, -1)
    remove_stale_temp_files([theirs, owners])
    assert os.listdir(tmp_path) == [theirs.name]


def test_a_staged_directory_goes_however_deep_it_is(tmp_path: Path) -> None:
    """Deeper than Python recurses, and with paths longer than the system takes."""
    staged = build_temp_path(tmp_path / "m.onnx")
    staged.mkdir()
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "x").touch()
    descriptor = os.open(staged, os.O_RDONLY)
    for _ in range(2000):
        os.mkdir("dddd", dir_fd=descriptor)
        os.symlink(tmp_path / "precious", "link", dir_fd=descriptor)
        inner = os.open("dddd", os.O_RDONLY, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = inner
    os.close(descriptor)
    remove_stale_temp_files([staged])
    assert os.listdir(tmp_path) == ["precious"]
    assert os.listdir(tmp_path / "precious") == ["x"]
