"""Records of runs: written to be read back, and never believed without a look."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from onnxkvrename import ModelError, WriteError
from onnxkvrename.storage import record as records
from onnxkvrename.storage.record import Record, build_record_path, read_record

StopRun = Callable[..., Record]
Document = dict[str, Any]

needs_root = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root may give files away"
)


def make_files(root: Path, *names: str) -> list[Path]:
    """Return files that are old, but for those whose names begin with ``made``."""
    paths = [root / name for name in names]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.name.startswith("made"):
            path.write_bytes(b"old " + os.fsencode(path.name))
    return paths


def read_all(record: Record) -> list[Record]:
    """Return what is read in each directory of a record."""
    return [read_record(build_record_path(place, record.key)) for place in record.directories]


@pytest.fixture
def two(tmp_path: Path, stop_run: StopRun) -> Record:
    """The record of a run with one file in each of two directories, the first one new."""
    return stop_run(make_files(tmp_path / "tree", "in/a", "in/sub/b"))


# What is written is read.


@pytest.mark.parametrize(
    "names",
    [
        ("a", "b"),
        ("a", "made"),
        ("in/a", "in/b", "other/made"),
        ("a", "in/deep/er/b"),
        ("a\udcff\n", "d\udcff/b", "back\\slash", '"quoted"'),
        ("in/in/a", "in/in/in/b"),
    ],
)
@pytest.mark.parametrize("done", [0, 1, 2])
def test_a_record_is_read_as_it_was_written(
    names: tuple[str, ...], done: int, tmp_path: Path, stop_run: StopRun
) -> None:
    record = stop_run(make_files(tmp_path, *names), done)
    assert set(read_all(record)) == {record}
    states = [target.state for target in record.list_targets()]
    assert states == ["new"] * done + ["old"] * (len(names) - done)


def test_a_tree_may_be_moved_with_its_record(tmp_path: Path, two: Record) -> None:
    os.rename(tmp_path / "tree", tmp_path / "elsewhere")
    found = read_record(build_record_path(tmp_path / "elsewhere/in", two.key))
    assert [target[:2] for target in found.list_targets()] == [
        (tmp_path / "elsewhere/in/a", "new"),
        (tmp_path / "elsewhere/in/sub/b", "old"),
    ]


def test_a_record_that_could_not_be_read_again_is_not_written(
    tmp_path: Path, stop_run: StopRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "MAX_RECORD_BYTES", 100)
    with pytest.raises(WriteError, match="too many files"):
        stop_run(make_files(tmp_path, "a", "b"))
    assert not list(tmp_path.glob(".*-record"))


# What lies there and is none.


def lead(path: str) -> Callable[[Document], None]:
    return lambda document: document["directories"].append(path)


def put(*keys: Any, value: Any) -> Callable[[Document], None]:
    """Return what puts a value into a document, as the keys say."""

    def damage(document: Document) -> None:
        inner: Any = document
        for key in keys[:-1]:
            inner = inner[key]
        inner[keys[-1]] = value

    return damage


def drop(key: str) -> Callable[[Document], None]:
    return lambda document: document.pop(key)


DAMAGES = {
    "up": lead("sub/../.."),
    "absolute": lead("/etc"),
    "empty": lead(""),
    "null byte": lead("a\0b"),
    "no text": lead("\ud800"),
    "number": lead(7),  # type: ignore[arg-type]
    "the same twice": lead("sub"),
    "no record there": lead("sub/none"),
    "very deep": lead("a/" * 500_000 + "a"),
    "name up": put("files", 0, 1, value=".."),
    "name here": put("files", 0, 1, value="."),
    "name with a directory": put("files", 0, 1, value="sub/b"),
    "name absolute": put("files", 0, 1, value="/a"),
    "name empty": put("files", 0, 1, value=""),
    "name with a null byte": put("files", 0, 1, value="a\0"),
    "name of lists": put("files", 0, 1, value=["a"]),
    "no such directory": put("files", 0, 0, value=99),
    "no number": put("files", 0, 2, value="x"),
    "infinite": put("files", 0, 3, value=[1e999, 1, 1]),
    "no identity": put("files", 0, 4, value=None),
    "an empty identity": put("files", 0, 3, value=[]),
    "too many numbers": put("files", 0, 4, value=[1, 2, 3, 4]),
    "too many parts": put("files", 0, value=[0] * 6),
    "no list": put("files", value=7),
    "made above": put("made", value=[".."]),
    "made elsewhere": put("made", value=["other"]),
    **{f"without {key}": drop(key) for key in ("directories", "files", "made")},
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_record_that_no_run_writes_is_none(
    damage: Callable[[Document], None], two: Record
) -> None:
    paths = [build_record_path(place, two.key) for place in two.directories]
    document = json.loads(paths[0].read_text("utf-8"))
    damage(document)
    for path in paths:
        path.write_text(json.dumps(document), "utf-8")
    for path in paths:
        with pytest.raises(ModelError, match="skipped"):
            read_record(path)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b"7", b'{"files": 1}', b"[" * 5000, b"9" * 5000, b"\xff"],
)
def test_what_is_no_document_is_no_record(content: bytes, two: Record) -> None:
    for place in two.directories:
        build_record_path(place, two.key).write_bytes(content)
    with pytest.raises(ModelError, match="not a record"):
        read_record(build_record_path(two.directories[0], two.key))


def remove(path: Path) -> None:
    path.unlink()


def make_larger(path: Path) -> None:
    os.truncate(path, records.MAX_RECORD_BYTES + 1)


def change(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b" ")


def replace_by_link(path: Path) -> None:
    os.rename(path, path.with_name("aside"))
    path.symlink_to("aside")


def replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def replace_by_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def give_away(path: Path) -> None:
    os.chown(path, 12345, -1)


@pytest.mark.parametrize(
    "damage",
    [
        *(remove, make_larger, change, replace_by_link, replace_by_pipe, replace_by_directory),
        pytest.param(give_away, marks=needs_root),
    ],
)
@pytest.mark.parametrize("where", [0, 1])
def test_the_same_record_lies_in_every_directory_or_it_is_none(
    damage: Callable[[Path], None], where: int, two: Record
) -> None:
    """It is not waited for either."""
    paths = [build_record_path(place, two.key) for place in two.directories]
    damage(paths[where])
    for path in paths:
        with pytest.raises(ModelError, match=r"skipped|no such"):
            read_record(path)


def test_a_record_with_many_names_is_read_once(
    two: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the time grows with its size times the number of directories that it names."""
    path, other = (build_record_path(place, two.key) for place in two.directories)
    other.unlink()
    os.link(path, other)
    read, was_read = records._read_content, list[Path]()
    monkeypatch.setattr(
        records, "_read_content", lambda path: (was_read.append(path), read(path))[1]
    )
    assert read_record(path) == two
    assert was_read == [path]


def test_a_record_names_only_where_it_lies(tmp_path: Path, two: Record) -> None:
    """Else the directories that it names could be any."""
    path = build_record_path(two.directories[1], two.key)
    planted = tmp_path / "downloads" / path.name
    planted.parent.mkdir()
    planted.write_bytes(path.read_bytes())
    with pytest.raises(ModelError, match="skipped"):
        read_record(planted)


@needs_root
def test_a_record_of_another_user_names_that_user(two: Record) -> None:
    path = build_record_path(two.directories[0], two.key)
    give_away(path)
    with pytest.raises(ModelError, match="user ID 12345"):
        read_record(path)


# What is at a target is judged by its identity and by the link that the run keeps.


def unlink_kept(kept: Path) -> None:
    kept.unlink()


def copy_kept(kept: Path) -> None:
    content = kept.read_bytes()
    kept.unlink()
    kept.write_bytes(content)


@pytest.mark.parametrize("damage", [unlink_kept, copy_kept])
def test_without_its_link_what_is_at_a_target_is_somebody_elses(
    damage: Callable[[Path], None],
    find_kept: Callable[..., Path],
    tmp_path: Path,
    stop_run: StopRun,
) -> None:
    """An inode, a size and a time may be known to whoever plants a record."""
    record = stop_run(make_files(tmp_path, "a", "b", "made", "made_too"), 1)
    damage(find_kept(record, 0, "new"))
    damage(find_kept(record, 1, "old"))
    assert [target.state for target in record.list_targets()] == [
        "changed",
        "changed",
        "old",
        "old",
    ]
    assert not [name for name in os.listdir(tmp_path) if name.endswith("-probe")]


def refuse_links(*args: object, **how: object) -> None:
    raise OSError(errno.EPERM, os.strerror(errno.EPERM))


def test_where_there_are_no_links_the_identity_has_to_do(
    tmp_path: Path, stop_run: StopRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", refuse_links)
    monkeypatch.setattr(os, "O_TMPFILE", 0, raising=False)
    record = stop_run(make_files(tmp_path, "a", "b", "made"), 1)
    assert [target.state for target in record.list_targets()] == ["new", "old", "old"]
    (tmp_path / "b").write_bytes(b"theirs")
    assert [target.state for target in record.list_targets()] == ["new", "changed", "old"]


@pytest.mark.parametrize(
    ("name", "state"),
    [("a", "changed"), ("b", "changed"), ("made", "changed"), ("made_too", "changed")],
)
def test_what_somebody_has_changed_is_neither_new_nor_old(
    name: str, state: str, tmp_path: Path, stop_run: StopRun
) -> None:
    record = stop_run(make_files(tmp_path, "made", "a", "b", "made_too"), 2)
    (tmp_path / name).write_bytes(b"theirs")
    found = {target.path.name: target.state for target in record.list_targets()}
    assert found == {"made": "new", "a": "new", "b": "old", "made_too": "old", name: state}
