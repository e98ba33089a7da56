"""Records of half done runs: written to be read back, and never believed without a look."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from onnxkvrename import KvRenameError
from onnxkvrename.storage.clean_up import RECORD_SUFFIX
from onnxkvrename.storage.record import (
    FileChange,
    Identity,
    find_protected_names,
    read_record,
    remove_record,
    write_record,
)
from onnxkvrename.storage.recover import end_run, find_half_done_runs
from onnxkvrename.storage.temp_file import build_temp_path

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


def list_texts(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_a_record_is_read_as_it_was_written(changes: list[FileChange], record: Path) -> None:
    found = read_record(record)
    assert found is not None
    assert (found.files, found.directories, found.paths) == (tuple(changes), (), (record,))
    assert list(found.find_states().values()) == ["new", "old"]
    kept = {changes[0].backup, changes[1].backup, changes[0].ready, changes[1].ready, record}
    assert set(found.list_kept_paths()) == kept
    assert find_protected_names([record]) == {path.name for path in kept if path}
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
    assert read_record(record) is None
    assert find_protected_names([record]) == set()
    assert find_half_done_runs([record.parent]) == []
    assert list_texts(record.parent) == before


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"files": 1}', "[" * 5000, "9" * 5000])
def test_what_is_no_record_is_none(text: str, record: Path) -> None:
    record.write_text(text, "utf-8")
    assert read_record(record) is None
    assert find_half_done_runs([record.parent]) == []


def test_a_huge_record_is_refused_and_not_read(record: Path) -> None:
    os.truncate(record, 1 << 40)
    with pytest.raises(KvRenameError):
        read_record(record)


def test_a_link_that_is_named_like_a_record_is_not_followed(record: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere.json"
    os.rename(record, moved)
    record.symlink_to(moved)
    assert record.name.endswith(RECORD_SUFFIX)
    assert find_half_done_runs([record.parent]) == []
    assert find_protected_names([record]) == set()


def test_a_file_that_is_not_the_one_of_the_record_is_not_put_in_place(
    changes: list[FileChange], record: Path
) -> None:
    backup = changes[0].backup
    assert backup is not None
    backup.unlink()
    backup.write_bytes(b"evil")
    (run,) = find_half_done_runs([record.parent])
    before = list_texts(record.parent)
    with pytest.raises(KvRenameError, match="has no copy of its old content"):
        end_run(run, undo=True)
    assert list_texts(record.parent) == before


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs root")
def test_a_record_of_another_user_is_refused(record: Path) -> None:
    os.chown(record, 12345, -1)
    before = list_texts(record.parent)
    with pytest.raises(KvRenameError, match="of another user"):
        find_half_done_runs([record.parent])
    assert list_texts(record.parent) == before
