"""Several changes are made together, or none of them."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from onnxkvrename import KvRenameError, ModelError, WriteError
from onnxkvrename.errors import FlushError, UndoError
from onnxkvrename.storage import record, transaction
from onnxkvrename.storage.recover import find_half_done_runs, settle_stopped_runs
from onnxkvrename.storage.temp_file import TEMP_PREFIX, TempFile
from onnxkvrename.storage.transaction import Transaction, sync_directory

State = dict[str, str]


@pytest.fixture
def three(tmp_path: Path) -> list[Path]:
    """Two files to replace, and one that is new."""
    paths = [tmp_path / "set" / name for name in ("a", "new", "c")]
    paths[0].parent.mkdir()
    write_old(paths)
    return paths


def write_old(paths: Sequence[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)
        if path.name != "new":
            path.write_text(f"old {path.name}")


def run(
    paths: Sequence[Path],
    *,
    made: Sequence[Path] = (),
    before: Callable[[], object] = lambda: None,
) -> None:
    """Put ``new NAME`` at each path."""
    overwritten = {path: path.lstat() for path in paths if os.path.lexists(path)}
    with Transaction({path.parent for path in paths}, overwritten, made) as change:
        files = []
        for path in paths:
            with TempFile(path, key=change.key) as temp_file:
                temp_file.write(f"new {path.name}".encode())
                files.append(temp_file.finish(replace=path in overwritten))
        before()
        change.place(files)


def read_state(root: Path) -> State:
    """Return the content of all files below a directory; for links, their targets."""
    return {
        str(path.relative_to(root)): os.readlink(path) if path.is_symlink() else path.read_text()
        for path in sorted(root.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


OLD = {"a": "old a", "c": "old c"}
NEW = {"a": "new a", "c": "new c", "new": "new new"}


class Fault:
    """Lets the ``nth`` call of a function of the system fail, perhaps after it has done its work.

    Attributes:
        is_met: Whether there was such a call.
    """

    def __init__(self, name: str, nth: int, error: BaseException, *, late: bool = False) -> None:
        self.name, self.nth, self.error, self.late = name, nth, error, late
        self.is_met = False

    def arm(self, patch: pytest.MonkeyPatch) -> None:
        """Wait for the call from now on."""
        real, calls = getattr(os, self.name), count(1)

        def call(*args: Any, **how: Any) -> Any:
            if next(calls) != self.nth:
                return real(*args, **how)
            self.is_met = True
            if self.late:
                real(*args, **how)
            raise self.error

        patch.setattr(os, self.name, call)


def refuse_from(nth: int, patch: pytest.MonkeyPatch, *names: str) -> None:
    """From the ``nth`` call on, the disk refuses every one of these calls for good."""
    calls = count(1)

    def call(real: Callable[..., Any], *args: Any, **how: Any) -> Any:
        is_record = any(str(path).endswith("-record") for path in args)
        if not is_record and next(calls) >= nth:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real(*args, **how)

    for name in names:
        patch.setattr(os, name, partial(call, getattr(os, name)))


def full() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


# All or none.


def test_all_take_their_places(three: list[Path]) -> None:
    there = three[0].parent
    run(three)
    assert read_state(there) == NEW
    assert os.listdir(there.parent) == [there.name]
    assert {path.stat().st_nlink for path in there.iterdir()} == {1}


CALLS = ("open", "link", "replace", "rename", "unlink", "lstat", "write", "fsync", "scandir")


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(
    ("error", "late"),
    [(full(), False), (KeyboardInterrupt(), False), (KeyboardInterrupt(), True)],
    ids=["refused", "interrupted before", "interrupted after"],
)
def test_an_error_or_interrupt_at_any_call_leaves_all_or_none(
    error: BaseException,
    late: bool,
    name: str,
    three: list[Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From the moment on at which all files are ready."""
    here = three[0].parent
    for nth in count(1):
        inodes = [path.stat().st_ino for path in (three[0], three[2])]
        fault = Fault(name, nth, error, late=late)
        with monkeypatch.context() as patch:
            try:
                run(three, before=partial(fault.arm, patch))
            except (KvRenameError, KeyboardInterrupt):
                assert fault.is_met
        found = read_state(here)
        if isinstance(error, OSError) and name in ("unlink", "scandir", "lstat"):
            # What the system refuses to find or to remove stays.
            found = {key: text for key, text in found.items() if not key.startswith(TEMP_PREFIX)}
        assert found in (OLD, NEW)
        if not fault.is_met:
            assert found == NEW
            break
        if found == OLD:
            assert [path.stat().st_ino for path in (three[0], three[2])] == inodes
        shutil.rmtree(here)
        here.mkdir()
        write_old(three)
    assert nth > 1 or name == "rename"


@pytest.mark.parametrize("number", [1, 3])
def test_files_of_others_stay_and_new_ones_go_again(number: int, tmp_path: Path) -> None:
    targets = [tmp_path / name for name in "abc"][-number:]
    with pytest.raises(WriteError, match=r"c: .*File exists"):
        run(targets, before=lambda: targets[-1].write_text("theirs"))
    assert read_state(tmp_path) == {"c": "theirs"}


def test_directories_that_were_made_go_again_as_far_as_they_are_empty(tmp_path: Path) -> None:
    made = [tmp_path / "out", tmp_path / "out" / "in", tmp_path / "other"]
    for directory in made:
        directory.mkdir()

    def fail() -> None:
        (tmp_path / "other" / "theirs").write_text("theirs")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run([made[1] / "a", made[2] / "b"], made=made, before=fail)
    assert (os.listdir(tmp_path), os.listdir(tmp_path / "other")) == (["other"], ["theirs"])


@pytest.mark.parametrize("is_first", [False, True])
def test_a_link_that_was_replaced_is_a_link_again(
    is_first: bool, three: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    link = three[0].with_name("link")
    link.symlink_to("a")
    fault = Fault("replace", 2, full())
    with pytest.raises(WriteError) as caught:
        run(
            [link, three[2]] if is_first else [three[2], link],
            before=partial(fault.arm, monkeypatch),
        )
    assert not isinstance(caught.value, UndoError)
    assert read_state(link.parent) == {**OLD, "link": "a"}


def replace_by_another(path: Path) -> None:
    path.with_name("theirs").write_text("theirs")
    os.replace(path.with_name("theirs"), path)


def write_in_place(path: Path) -> None:
    path.write_text("theirs")


def protect(path: Path) -> None:
    path.chmod(0o600)


@pytest.mark.parametrize("change", [replace_by_another, write_in_place, protect, Path.unlink])
@pytest.mark.parametrize("nth", [0, 2])
def test_what_someone_else_has_changed_is_not_replaced(
    nth: int, change: Callable[[Path], None], three: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However late the change comes: each file is looked at just before it is replaced."""
    real, seen = transaction.write_record, list[State]()

    def change_late(record: record.Record) -> None:
        real(record)
        change(three[nth])
        seen.append(read_state(three[0].parent))

    monkeypatch.setattr(transaction, "write_record", change_late)
    with pytest.raises(ModelError, match="another program"):
        run(three)
    expected = {name: text for name, text in seen[0].items() if not name.startswith(TEMP_PREFIX)}
    assert read_state(three[0].parent) == expected


@pytest.mark.parametrize(
    ("number", "name", "nth"),
    [(1, "replace", 1), (3, "replace", 1), (3, "replace", 2), (3, "link", 4), (3, "unlink", 1)],
)
def test_a_change_that_is_made_and_reported_as_failed_is_made(
    number: int, name: str, nth: int, three: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NFS does, if an answer gets lost. The fourth link is the name of the new file."""
    error = OSError(errno.EEXIST, os.strerror(errno.EEXIST))
    fault = Fault(name, nth, error, late=True)
    run(three[:number], before=partial(fault.arm, monkeypatch))
    assert fault.is_met
    assert read_state(three[0].parent) == (NEW if number == 3 else {**OLD, "a": "new a"})


# Where it cannot be undone.


@pytest.mark.parametrize("nth", [2, 3])
def test_what_cannot_be_undone_is_told_and_can_be_undone_later(
    nth: int, three: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that has become read-only between two files."""
    here = three[0].parent
    three[1].write_text("old new")
    with monkeypatch.context() as patch:
        broken = partial(refuse_from, nth, patch, "replace", "rename")
        with pytest.raises(UndoError) as caught:
            run(three, before=broken)
    error = caught.value
    assert (error.new_paths, error.path) == (tuple(three[: nth - 1]), str(three[nth - 1]))
    assert "Read-only file system;" in error.message
    assert f"{nth - 1} of 3 results are new" in error.message
    assert "are kept" in error.message
    assert error.hint == "to finish the work, run the same command again"
    found = read_state(here)
    before = {**OLD, "new": "old new"}
    texts = {name: found[name] for name in before}
    assert list(texts.values()).count("old new") == (nth == 2)
    assert sorted(texts[path.name] for path in three[: nth - 1]) == sorted(
        f"new {path.name}" for path in three[: nth - 1]
    )
    assert len(find_half_done_runs([here])) == 1
    assert not settle_stopped_runs([here])
    assert read_state(here) == before


@pytest.fixture
def no_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without hard links, as on a memory card."""

    def refused(*args: object, **how: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "O_TMPFILE", 0, raising=False)
    monkeypatch.setattr(os, "link", refused)


@pytest.mark.usefixtures("no_links")
@pytest.mark.parametrize(
    ("names", "broken", "new"),
    [
        (("a", "new", "c"), None, ("a", "new", "c")),
        (("a", "new", "c"), 1, ()),
        (("a", "new", "c"), 3, ("a", "new")),  # the old file of the first one is gone
        (("new", "c", "a"), 2, ()),
    ],
)
def test_without_links_what_was_replaced_is_not_restored(
    names: Sequence[str],
    broken: int | None,
    new: Sequence[str],
    three: list[Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = three[0].parent
    fault = Fault("replace", broken or 99, full())
    error: WriteError | None = None
    try:
        run([here / name for name in names], before=partial(fault.arm, monkeypatch))
    except WriteError as caught:
        error = caught
    assert (error is None) is (broken is None)
    if isinstance(error, UndoError):
        assert error.new_paths == tuple(here / name for name in new)
        assert "are kept" not in error.message
    else:
        assert error is None or not new
    found = {name: text for name, text in read_state(here).items() if name in NEW}
    assert found == {**OLD, **{name: NEW[name] for name in new}}
    kept = [name for name in os.listdir(here) if name.startswith(TEMP_PREFIX)]
    assert bool(kept) is (broken == 3)


# What is on the disk, and when.


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("number", [1, 3])
def test_the_record_is_on_the_disk_first_and_goes_last(
    number: int, fails: bool, three: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """First, all changes but one are about to come; last, all are on the disk, or undone."""
    here, events = three[0].parent, list[str]()

    def watch(name: str, patched: Any, place: int = 0) -> None:
        real = getattr(patched, name)

        def call(*args: Any, **how: Any) -> Any:
            path = str(args[place])
            result = real(*args, **how)
            if name != "unlink" or path.endswith("-record"):
                events.append(f"{name} {Path(path).name}")
            return result

        monkeypatch.setattr(patched, name, call)

    def watch_all() -> None:
        watch("unlink", os)
        watch("replace", os, 1)
        for module in (record, transaction):
            watch("sync_directory", module)
        if fails:
            Fault("replace", 2, full()).arm(monkeypatch)

    targets = [three[2], three[0], three[1].with_name("b")][:number]
    targets[-1].write_text("old")
    if number == 1:
        run(targets, before=watch_all)
        assert events == [f"replace {targets[0].name}", f"sync_directory {here.name}"]
        return
    try:
        run(targets, before=watch_all)
    except WriteError:
        assert fails
    sync = f"sync_directory {here.name}"
    changes = ["replace c", "replace c"] if fails else [f"replace {path.name}" for path in targets]
    (gone,) = [event for event in events if event.endswith("-record")]
    assert events == [sync, *changes, sync, gone]


def test_a_directory_that_was_made_is_on_the_disk_with_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = list[Path]()
    for module in (record, transaction):
        monkeypatch.setattr(module, "sync_directory", synced.append)
    made = [tmp_path / "out", tmp_path / "out" / "in"]
    for number in (1, 2):
        for directory in made:
            directory.mkdir(exist_ok=True)
        run([made[1] / f"{number}{name}" for name in "ab"[:number]], made=made)
        wanted = {tmp_path, *made}
        if number == 2:  # so is the record
            assert set(synced[: len(synced) // 2]) == wanted
        assert set(synced) == wanted
        synced.clear()


@pytest.mark.parametrize("name", ["fsync", "open"])
def test_after_the_last_change_a_failed_sync_is_told_and_undoes_nothing(
    name: str, three: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, pytest.raises(FlushError) as caught:
        run(three[:1], before=partial(refuse_from, 1, patch, name))
    assert caught.value.path == str(three[0].parent)
    assert "Read-only file system" in caught.value.message
    assert read_state(three[0].parent) == {**OLD, "a": "new a"}


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_that_cannot_sync_directories_does_not_stop_the_work(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*args: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refused)
    sync_directory(tmp_path)
