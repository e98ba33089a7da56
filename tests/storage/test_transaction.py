from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from onnxkvrename import ModelError, WriteError
from onnxkvrename.errors import FlushError, UndoError
from onnxkvrename.storage import directories
from onnxkvrename.storage import transaction as changeset
from onnxkvrename.storage.clean_up import remove_stale_temp_files
from onnxkvrename.storage.directories import StagedDirectory
from onnxkvrename.storage.intent import find_intents, write_intent
from onnxkvrename.storage.lock import hold_locks
from onnxkvrename.storage.temp_file import (
    ReadyFile,
    TempFile,
    build_temp_path,
    build_temp_prefix,
    find_stale_temp_files,
)
from onnxkvrename.storage.transaction import Transaction, sync_directory


@pytest.fixture
def three(tmp_path: Path) -> list[Path]:
    """Three files, old."""
    paths = [tmp_path / "set" / name for name in ("a", "b", "c")]
    paths[0].parent.mkdir()
    for path in paths:
        path.write_text(f"old {path.name}")
    return paths


def make_ready_file(target: Path, *, replace: bool = True) -> ReadyFile:
    with TempFile(target) as temp_file:
        temp_file.write(f"new {target.name}".encode())
        return temp_file.finish(replace=replace)


def state(directory: Path) -> dict[str, str]:
    """Return the content of a directory; for links, their targets."""
    return {
        path.name: os.readlink(path) if path.is_symlink() else path.read_text()
        for path in sorted(directory.iterdir())
    }


@pytest.fixture(autouse=True)
def _no_syncing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes long, and here only the order of calls matters."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


OLD = {name: f"old {name}" for name in "abc"}
NEW = {name: f"new {name}" for name in "abc"}


def failing(
    nth: int, monkeypatch: pytest.MonkeyPatch, fault: BaseException, *, name: str = "replace"
) -> None:
    """The ``nth`` call does its work and ends in an interrupt, or does nothing and fails."""
    real, calls = getattr(os, name), []

    def call(*args: Any, **kwargs: Any) -> None:
        calls.append(args)
        if len(calls) != nth:
            return real(*args, **kwargs)
        if isinstance(fault, KeyboardInterrupt):
            real(*args, **kwargs)
        raise fault

    monkeypatch.setattr(os, name, call)


def full() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")


def test_files_take_their_places_together(three: list[Path]) -> None:
    ready_files = [make_ready_file(path) for path in three]
    with Transaction() as transaction:
        transaction.place_files(ready_files[:1], final=False)
        transaction.place_files(ready_files[1:], final=True)
    assert state(three[0].parent) == NEW
    assert {path.stat().st_nlink for path in three} == {1}


def test_the_record_is_on_the_disk_before_anything_is_replaced(
    three: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    events, real = [], os.replace
    monkeypatch.setattr(
        changeset, "sync_directory", lambda directory: events.append(f"sync {directory.name}")
    )

    def replace(source: Path, target: Path, **how: Any) -> None:
        events.append("replace")
        real(source, target, **how)

    ready_files = [make_ready_file(path) for path in three]
    monkeypatch.setattr(os, "replace", replace)
    with Transaction() as transaction:
        transaction.write_record(ready_files, (), {})
        assert events == [f"sync {three[0].parent.name}"]
        transaction.place_files(ready_files, final=True)
    assert events.count("replace") == 3


def test_new_files_and_replaced_ones_may_be_one_change(three: list[Path]) -> None:
    fourth = three[0].with_name("d")
    with Transaction() as transaction:
        new_file = make_ready_file(fourth, replace=False)
        transaction.place_files([new_file, *map(make_ready_file, three)], final=True)
    assert state(fourth.parent) == {**NEW, "d": "new d"}


@pytest.mark.parametrize("nth", [1, 2, 3])
@pytest.mark.parametrize("fault", [full(), KeyboardInterrupt()], ids=["refused", "interrupted"])
def test_what_was_replaced_comes_back_if_another_cannot_be(
    nth: int, fault: BaseException, three: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = [path.stat().st_ino for path in three]
    ready_files = [make_ready_file(path) for path in three]
    failing(nth, monkeypatch, fault)
    with pytest.raises((WriteError, KeyboardInterrupt)) as caught, Transaction() as transaction:
        transaction.place_files(ready_files, final=True)
    complete = nth == 3 and isinstance(fault, KeyboardInterrupt)  # all have their places by then
    for ready_file in ready_files:
        ready_file.discard()
    assert state(three[0].parent) == (NEW if complete else OLD)
    if isinstance(caught.value, WriteError):
        assert caught.value.path == str(three[nth - 1])
    if not complete:
        assert [path.stat().st_ino for path in three] == before


@pytest.mark.parametrize("name", ["link", "unlink", "lstat"])
def test_an_interrupt_anywhere_leaves_all_or_none(
    name: str, three: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def goes_well(nth: int) -> bool:
        ready_files = [make_ready_file(path) for path in three]
        with monkeypatch.context() as patch:
            failing(nth, patch, KeyboardInterrupt(), name=name)
            try:
                with Transaction() as transaction:
                    transaction.place_files(ready_files, final=True)
            except KeyboardInterrupt:
                remove_stale_temp_files(find_stale_temp_files(three))
                return False
        return True

    for nth in count(1):
        done, found = goes_well(nth), state(three[0].parent)
        assert found == NEW if done else found in (OLD, NEW)
        for path in three:
            path.write_text(f"old {path.name}")
        if done:
            assert nth > 2
            break


def test_new_files_go_again_and_those_of_others_stay(three: list[Path]) -> None:
    directory = three[0].parent
    ready_files = [make_ready_file(directory / name, replace=False) for name in "def"]
    (directory / "f").write_text("theirs")
    with pytest.raises(WriteError, match="File exists"), Transaction() as transaction:
        transaction.place_files(ready_files, final=True)
    assert state(directory) == {**OLD, "f": "theirs"}


def test_a_file_to_replace_that_was_not_there_goes_again(three: list[Path]) -> None:
    directory = three[0].parent
    ready_files = [make_ready_file(directory / name) for name in "dab"]
    ready_files[2].discard()
    with pytest.raises(WriteError), Transaction() as transaction:
        transaction.place_files(ready_files, final=True)
    assert state(directory) == OLD


def test_what_someone_else_has_put_in_the_place_meanwhile_stays(three: list[Path]) -> None:
    def fail() -> None:
        with Transaction() as transaction:
            transaction.place_files([make_ready_file(three[0])], final=False)
            (three[0].parent / "theirs").write_text("theirs")
            os.replace(three[0].parent / "theirs", three[0])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert state(three[0].parent) == {**OLD, "a": "theirs"}


def test_a_link_that_was_replaced_is_a_link_again(three: list[Path]) -> None:
    link = three[0].with_name("link")
    link.symlink_to("a")
    ready_files = [make_ready_file(link), make_ready_file(three[1])]
    ready_files[1].discard()
    with pytest.raises(WriteError), Transaction() as transaction:
        transaction.place_files(ready_files, final=True)
    assert state(link.parent) == {**OLD, "link": "a"}


def test_the_last_file_decides_though_it_needs_no_way_back(
    three: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupt just after it has its place undoes nothing."""
    seen: list[list[str]] = []
    real = os.replace

    def watched(*args: Any, **how: Any) -> None:
        seen.append([name for name in os.listdir(three[0].parent) if name not in OLD])
        real(*args, **how)

    def interrupt(directory: Path) -> None:
        raise KeyboardInterrupt

    ready_files = [make_ready_file(path) for path in three]
    monkeypatch.setattr(os, "replace", watched)
    monkeypatch.setattr(changeset, "sync_directory", interrupt)
    with pytest.raises(KeyboardInterrupt), Transaction() as transaction:
        transaction.place_files(ready_files, final=True)
    assert state(three[0].parent) == NEW
    assert len(seen[0]) == 4  # three drafts and a backup
    assert len(seen[2]) == 3  # one draft and two backups


def replace_by_another(path: Path) -> None:
    path.with_name("theirs").write_text("theirs")
    os.replace(path.with_name("theirs"), path)


def write_in_place(path: Path) -> None:
    path.write_text("theirs")


def protect(path: Path) -> None:
    path.chmod(0o600)


@pytest.mark.parametrize("change", [replace_by_another, write_in_place, protect, Path.unlink])
@pytest.mark.parametrize("nth", [0, 2])
@pytest.mark.parametrize("has_links", [True, False])
def test_what_someone_else_has_changed_is_not_replaced(
    has_links: bool,
    nth: int,
    change: Callable[[Path], None],
    three: list[Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However late the change comes: each file is looked at just before it is replaced."""
    ready_files = [make_ready_file(path) for path in three]
    overwritten = {path: path.lstat() for path in three}
    changed = three[nth]

    def link_late(source: Path, target: Path) -> None:
        if source == changed:
            change(changed)
            seen.append(changed.lstat() if changed.exists() else None)
        if not has_links:
            raise OSError(errno.EPERM, "Operation not permitted")
        real(source, target)

    def place() -> None:
        with Transaction(overwritten) as transaction:
            transaction.place_files(ready_files, final=False)

    real, seen = os.link, list[os.stat_result | None]()
    monkeypatch.setattr(os, "link", link_late)
    with pytest.raises((ModelError, UndoError), match="another program") as caught:
        place()
    assert isinstance(caught.value, UndoError) is (nth > 0 and not has_links)
    (status,) = seen
    found = changed.lstat() if changed.exists() else None
    assert (found and (found.st_ino, found.st_mode, found.st_mtime_ns)) == (
        status and (status.st_ino, status.st_mode, status.st_mtime_ns)
    )
    left = {path for path in three if path.exists() and path.read_text() == f"new {path.name}"}
    assert left == (set() if has_links else set(three[:nth]))
    for ready_file in ready_files:
        ready_file.discard()
    assert not list(find_stale_temp_files(three))


@pytest.fixture
def no_links(three: list[Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def refused(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    with monkeypatch.context() as patch:
        patch.setattr(os, "O_TMPFILE", 0, raising=False)
        patch.setattr(os, "link", refused)
        yield


@pytest.mark.usefixtures("no_links")
def test_without_links_nothing_can_be_undone_and_what_is_new_is_told(three: list[Path]) -> None:
    ready_files = [make_ready_file(path) for path in three]
    ready_files[2].discard()
    with pytest.raises(WriteError) as caught, Transaction() as transaction:
        transaction.place_files(ready_files, final=True)
    assert state(three[0].parent) == {**NEW, "c": "old c"}
    assert isinstance(caught.value, UndoError)
    assert caught.value.new_paths == tuple(three[:2])


@pytest.mark.usefixtures("no_links")
def test_without_links_new_files_go_again_all_the_same(three: list[Path]) -> None:
    ready_files = [make_ready_file(three[0].with_name(name), replace=False) for name in "de"]
    ready_files[1].discard()
    with pytest.raises(WriteError) as caught, Transaction() as transaction:
        transaction.place_files(ready_files, final=True)
    assert state(three[0].parent) == OLD
    assert not isinstance(caught.value, UndoError)


@pytest.mark.usefixtures("no_links")
def test_without_links_all_goes_well_if_all_goes_well(three: list[Path]) -> None:
    with Transaction() as transaction:
        transaction.place_files([make_ready_file(path) for path in three], final=True)
    assert state(three[0].parent) == NEW


def place_with_record(ready_files: list[ReadyFile]) -> None:
    with Transaction() as transaction:
        transaction.write_record(ready_files, (), {})
        transaction.place_files(ready_files, final=True)


def refuse_from(nth: int, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """From the ``nth`` call on the disk refuses every one of these calls for good."""
    calls = count(1)

    def call(real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if next(calls) >= nth:
            raise OSError(errno.EROFS, "Read-only file system")
        return real(*args, **kwargs)

    for name in names:
        monkeypatch.setattr(os, name, partial(call, getattr(os, name)))


@pytest.mark.parametrize("nth", [2, 3])
def test_what_cannot_be_undone_is_told_and_all_files_are_kept(
    nth: int, three: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that has become read-only between two files."""
    ready_files = [make_ready_file(path) for path in three]
    directory, done = three[0].parent, "abc"[: nth - 1]
    refuse_from(nth, monkeypatch, "replace", "rename")
    with pytest.raises(UndoError) as caught:
        place_with_record(ready_files)
    monkeypatch.undo()
    left = {name: text for name, text in state(directory).items() if name in OLD}
    assert left == {name: (NEW if name in done else OLD)[name] for name in OLD}
    assert caught.value.new_paths == tuple(three[: nth - 1])
    assert caught.value.path == str(three[nth - 1])
    assert "Read-only file system;" in caught.value.message
    assert f"{nth - 1} of 3" in caught.value.message
    assert "are kept" in caught.value.message
    assert caught.value.hint is not None
    assert f"onnxkvrename recover {directory}" in caught.value.hint
    kept = list(find_stale_temp_files(three))
    assert remove_stale_temp_files(kept)
    assert sorted(find_stale_temp_files(three)) == sorted(kept)
    texts = {path.read_text() for path in kept}
    assert texts >= {OLD[name] for name in done} | {NEW[name] for name in "abc" if name not in done}


def test_a_record_is_kept_for_a_mix_only(three: list[Path]) -> None:
    """It is written where several files change, and is gone after success and after an undo."""
    for fails in (False, True):
        ready_files = [make_ready_file(path) for path in three]
        with suppress(KeyboardInterrupt), Transaction() as transaction:
            transaction.write_record(ready_files, (), {})
            (record,) = three[0].parent.glob("*-record")
            transaction.place_files(ready_files[:2], final=False)
            if fails:
                raise KeyboardInterrupt
            transaction.place_files(ready_files[2:], final=True)
        assert not record.exists()
        ready_files[2].discard()
        assert state(three[0].parent) == NEW


@pytest.mark.parametrize("names", ["a", "de"])
def test_one_file_and_new_files_need_no_record(names: str, three: list[Path]) -> None:
    targets = [three[0].with_name(name) for name in names]
    ready_files = [make_ready_file(path, replace=path.exists()) for path in targets]
    with Transaction() as transaction:
        transaction.write_record(ready_files, (), {})
        assert transaction.record_paths == ()
        transaction.place_files(ready_files, final=True)


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_move_that_is_made_and_reported_as_failed_is_made(
    nth: int, three: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NFS does, if an answer gets lost."""
    ready_files, real, calls = [make_ready_file(path) for path in three], os.replace, count(1)

    def repeated(*args: Any, **how: Any) -> None:
        real(*args, **how)
        if next(calls) == nth:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory")

    monkeypatch.setattr(os, "replace", repeated)
    with Transaction() as transaction:
        transaction.place_files(ready_files, final=True)
    assert state(three[0].parent) == NEW


def test_if_the_last_move_cannot_be_judged_nothing_is_undone(
    three: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last file has no backup: with the others undone, the set could be mixed for good."""
    ready_files, real = [make_ready_file(path) for path in three], os.lstat

    def fail(path: Any, **kwargs: Any) -> os.stat_result:
        if path == three[2] and calls:
            raise OSError(errno.EIO, "Input/output error")
        return real(path, **kwargs)

    def interrupt(directory: Path) -> None:
        calls.append(directory)
        raise KeyboardInterrupt

    calls = list[Path]()
    monkeypatch.setattr(os, "lstat", fail)
    monkeypatch.setattr(changeset, "sync_directory", interrupt)
    with pytest.raises(UndoError) as caught, Transaction() as transaction:
        transaction.place_files(ready_files, final=True)
    monkeypatch.undo()
    assert {path.read_text() for path in three} == set(NEW.values())
    assert f"{three[2]} is new" in str(caught.value)
    assert caught.value.new_paths == tuple(three[:2])


# A directory that appears at once.


def fill(stage: StagedDirectory, *names: str) -> None:
    for name in names:
        stage.prepare_path(stage.target / name).write_text(name)


def test_a_new_directory_appears_with_all_that_is_in_it(tmp_path: Path) -> None:
    with StagedDirectory(tmp_path / "new") as stage:
        fill(stage, "a", "sub/b")
        (name,) = os.listdir(tmp_path)
        assert name.startswith(build_temp_prefix(tmp_path / "new"))
        stage.move_into_place()
    assert os.listdir(tmp_path) == ["new"]
    assert (tmp_path / "new" / "a").read_text() == "a"
    assert (tmp_path / "new" / "sub" / "b").read_text() == "sub/b"


def test_a_directory_that_is_not_placed_is_gone(tmp_path: Path) -> None:
    with StagedDirectory(tmp_path / "new") as stage:
        fill(stage, "a", "sub/b")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("stand", [Path.mkdir, Path.touch, lambda path: path.symlink_to("no")])
def test_what_has_appeared_in_its_place_meanwhile_stays(
    stand: Callable[[Path], object], tmp_path: Path
) -> None:
    with StagedDirectory(tmp_path / "new") as stage:
        fill(stage, "a")
        stand(tmp_path / "new")
        with pytest.raises(WriteError, match="File exists") as caught:
            stage.move_into_place()
    assert caught.value.path == str(tmp_path / "new")
    assert os.listdir(tmp_path) == ["new"]
    assert not (tmp_path / "new" / "a").exists()


def test_a_directory_needs_one_to_stand_in(tmp_path: Path) -> None:
    with pytest.raises(WriteError, match="create its directory"):
        StagedDirectory(tmp_path / "none" / "new").__enter__()


def test_all_of_a_directory_is_on_the_disk_before_it_appears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    real = os.rename
    for module in (changeset, directories):
        monkeypatch.setattr(module, "sync_directory", lambda path: seen.append(path.name))
    monkeypatch.setattr(
        os, "rename", lambda *args, **how: (seen.append("rename"), real(*args, **how))
    )
    with StagedDirectory(tmp_path / "new") as stage, Transaction() as transaction:
        fill(stage, "a", "sub/b")
        transaction.place_directories([stage], final=True)
    assert seen == [stage.directory.name, "sub", "rename", tmp_path.name]


def test_what_fails_after_a_directory_was_placed_takes_it_back(tmp_path: Path) -> None:
    def fail() -> None:
        one, other = StagedDirectory(tmp_path / "one"), StagedDirectory(tmp_path / "other")
        with one, other, Transaction() as transaction:
            fill(one, "a")
            fill(other, "b")
            (tmp_path / "other").touch()
            transaction.place_directories([one, other], final=True)

    with pytest.raises(WriteError, match="File exists"):
        fail()
    assert os.listdir(tmp_path) == ["other"]


def test_an_interrupt_after_the_last_directory_was_placed_undoes_nothing(tmp_path: Path) -> None:
    def interrupted() -> None:
        with StagedDirectory(tmp_path / "one") as stage, Transaction() as transaction:
            fill(stage, "a")
            transaction.place_directories([stage], final=True)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert os.listdir(tmp_path) == ["one"]


@pytest.mark.parametrize("name", ["fsync", "open"])
def test_after_the_last_change_a_failed_sync_is_told_and_undoes_nothing(
    name: str, three: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    ready_files = [make_ready_file(path) for path in three]
    refuse_from(1, monkeypatch, name)
    with pytest.raises(FlushError) as caught, Transaction() as transaction:
        transaction.place_files(ready_files, final=True)
    assert caught.value.path == str(three[0].parent)
    assert "all results are" in caught.value.message
    assert "Read-only file system" in caught.value.message
    monkeypatch.undo()
    assert state(three[0].parent) == NEW


def test_before_the_last_change_a_failed_sync_undoes_all(
    three: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    ready_files = [make_ready_file(path) for path in three]
    refuse_from(1, monkeypatch, "fsync")
    with pytest.raises(WriteError, match="not be flushed") as caught, Transaction() as run:
        run.place_files(ready_files[:2], final=False)
    assert not isinstance(caught.value, FlushError)
    ready_files[2].discard()
    assert state(three[0].parent) == OLD


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_that_cannot_sync_directories_does_not_stop_the_work(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*args: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refused)
    sync_directory(tmp_path)


# Directories that get other names in the end.


def renamed(three: list[Path]) -> dict[Path, Path]:
    """Return the new name for the directory of the three files."""
    return {three[0].parent: three[0].parent.with_name("moved")}


def test_a_directory_gets_its_name_after_all_in_it_have_their_places(three: list[Path]) -> None:
    moves = renamed(three)
    with Transaction() as transaction:
        transaction.place_files([make_ready_file(path) for path in three], final=False)
        assert state(three[0].parent).items() >= NEW.items()
        transaction.rename_directories(moves)
    (there,) = moves.values()
    assert (state(there), os.listdir(there.parent)) == (NEW, ["moved"])
    assert {path.stat().st_nlink for path in there.iterdir()} == {1}


@pytest.mark.parametrize("name", ["link", "unlink", "lstat", "replace", "rename"])
def test_an_interrupt_anywhere_leaves_all_with_the_new_name_or_none(
    name: str, three: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    old, moves = three[0].parent, renamed(three)
    (new,) = moves.values()

    def goes_well(nth: int) -> bool:
        ready_files = [make_ready_file(path) for path in three]
        with monkeypatch.context() as patch:
            failing(nth, patch, KeyboardInterrupt(), name=name)
            try:
                with Transaction() as transaction:
                    transaction.place_files(ready_files, final=False)
                    transaction.rename_directories(moves)
            except KeyboardInterrupt:
                remove_stale_temp_files(find_stale_temp_files(three))
                return False
        return True

    for nth in count(1):
        done = goes_well(nth)
        assert not (done and old.exists())
        if new.exists():
            remove_stale_temp_files(find_stale_temp_files(new / path.name for path in three))
            assert (state(new), old.exists()) == (NEW, False)
            os.rename(new, old)
        else:
            assert state(old) == OLD
        for path in three:
            path.write_text(f"old {path.name}")
        if done:
            assert nth > 1
            break


def test_of_several_directories_all_get_their_names_or_none(tmp_path: Path) -> None:
    moves = {tmp_path / name: tmp_path / f"new {name}" for name in "abc"}
    for directory in (*moves, moves[tmp_path / "c"]):
        directory.mkdir()
    taken = pytest.raises(WriteError, match=r"new c: .*File exists")
    with taken, Transaction() as transaction:
        transaction.rename_directories(moves)
    assert sorted(os.listdir(tmp_path)) == ["a", "b", "c", "new c"]


def test_what_is_announced_is_there_for_others_while_it_lasts(tmp_path: Path) -> None:
    moves = {tmp_path / "a\n\udcff": tmp_path / "b"}
    with write_intent(moves):
        (mark,) = find_intents(tmp_path)
        assert mark.move == ("a\n\udcff", "b")
        remove_stale_temp_files([mark.path])
        assert list(find_intents(tmp_path)) == [mark]
    assert os.listdir(tmp_path) == []


def test_what_was_announced_before_is_taken_back_by_who_ends_it(tmp_path: Path) -> None:
    moves, others = ({tmp_path / "a": tmp_path / name} for name in "bc")

    def fail() -> None:
        with write_intent(moves):
            raise KeyboardInterrupt

    with write_intent(others):
        left = build_temp_path(tmp_path / "a")
        left.symlink_to("a/b")
        with pytest.raises(KeyboardInterrupt):
            fail()
        assert sorted(mark.move for mark in find_intents(tmp_path)) == [
            ("a", "b"),
            ("a", "c"),
        ]
        with write_intent(moves):
            pass
        assert [mark.move for mark in find_intents(tmp_path)] == [("a", "c")]


# What dead runs have left.


def test_leftovers_of_any_kind_are_cleared_and_locks_are_not(tmp_path: Path) -> None:
    target = tmp_path / "m"
    target.write_text("old")
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "x").touch()
    build_temp_path(target).touch()
    os.link(target, build_temp_path(target))
    link = build_temp_path(target)
    link.symlink_to("precious")
    stage = build_temp_path(target)
    (stage / "sub").mkdir(parents=True)
    (stage / "sub" / "x.onnx").touch()
    with hold_locks([target]):
        remove_stale_temp_files(find_stale_temp_files([target]))
        assert len(os.listdir(tmp_path)) == 4
        with pytest.raises(WriteError):
            hold_locks([target]).__enter__()
    # No run leaves a link that is not a record of its own: this one is somebody's.
    assert sorted(os.listdir(tmp_path)) == [link.name, "m", "precious"]
    assert os.listdir(tmp_path / "precious") == ["x"]
    assert target.stat().st_nlink == 1


def test_one_that_cannot_be_cleared_does_not_keep_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [build_temp_path(tmp_path / "m") for _ in range(3)]
    for path in left:
        path.touch()
    failing(2, monkeypatch, OSError(errno.EACCES, "Permission denied"), name="unlink")
    remove_stale_temp_files(left)
    assert list(tmp_path.iterdir()) == [left[1]]
