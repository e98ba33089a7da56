"""Several files change together, or none of them."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import stat
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest
from conftest import Sample
from files.conftest import refuse, watch_calls

from onnxkvrename import KvRenameError, ModelError, WriteError
from onnxkvrename.errors import FlushError, UndoError
from onnxkvrename.files.lock import open_locks
from onnxkvrename.files.read import FileIdentity
from onnxkvrename.files.staged import (
    Output,
    WrittenInterrupt,
    clear_leftovers,
    write_all,
    write_file,
)
from onnxkvrename.files.temp_file import TEMP_PREFIX, TempFile, build_key, build_temp_name

State = dict[str, str]
OLD = {"a": "old a", "c": "old c", "link": "-> a"}
NEW = {"a": "new a", "c": "new c", "link": "new link", "new": "new new"}
NEW |= {"made/in/x": "new x", "made/y": "new y"}
needs_posix = pytest.mark.skipif(not hasattr(os, "fchmod"), reason="needs permissions of POSIX")


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A directory with two files and a link, which are replaced."""
    write_old(tmp_path / "here")
    return tmp_path / "here"


def write_old(here: Path) -> None:
    shutil.rmtree(here, ignore_errors=True)
    here.mkdir()
    for name in ("a", "c"):
        (here / name).write_text(OLD[name])
    (here / "a").chmod(0o640)
    (here / "link").symlink_to("a")


def build_outputs(here: Path, names: Sequence[str] = tuple(NEW), **how: Any) -> list[Output]:
    """Return ``new NAME`` for each name; ``a`` is a model."""
    how = {"may_replace": True, "root": here, "like_directory": here, **how}
    return [
        Output(here / name, Path(name), f"new {Path(name).name}", is_model=name == "a", **how)
        for name in names
    ]


def write_text(output: Output, file: TempFile) -> None:
    file.write(str(output.content).encode())


def write_outputs(outputs: Sequence[Output], write: Callable[..., None] = write_text) -> None:
    with open_locks() as locks:
        write_all(outputs, write, locks=locks)


def read_state(root: Path) -> State:
    """Return the content of all files below a directory; for links, where they lead."""
    return {
        str(path.relative_to(root)): f"-> {os.readlink(path)}"
        if path.is_symlink()
        else path.read_text()
        for path in sorted(root.rglob("*"))
        if path.is_symlink() or path.is_file()
    }


def drop_temporary(state: State) -> State:
    return {path: text for path, text in state.items() if TEMP_PREFIX not in path}


# All or none.

CALLS = ("open", "close", "link", "replace", "unlink", "symlink", "mkdir", "lstat", "write")
CALLS += ("fsync", "scandir", "fchmod", "rmdir")
REMOVING = ("unlink", "scandir", "lstat", "rmdir", "open", "close")
"""Where one of these fails, what the system refuses to find or to remove may stay."""


class Fault:
    """Lets the ``nth`` call of the system meet something, and perhaps all later ones.

    Attributes:
        met: The name of the function that was called.
        calls: How many calls there were.
    """

    def __init__(self, nth: int, meet: Callable[[Callable[[], Any]], Any]) -> None:
        self.nth, self.meet, self.met, self.calls = nth, meet, "", 0

    def __call__(self, nth: int, name: str, call: Callable[[], Any]) -> Any:
        """Make a call, or let it meet that."""
        self.calls = nth
        if nth == self.nth:
            self.met = name
        elif not self.met or self.meet is not interrupt_again_and_again:
            return call()
        return self.meet(call)


def fail(call: Callable[[], Any]) -> NoReturn:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def fail_late(call: Callable[[], Any]) -> NoReturn:
    """As NFS does, if an answer gets lost: the call is made and repeated."""
    call()
    raise OSError(errno.EEXIST, os.strerror(errno.EEXIST))


def interrupt(call: Callable[[], Any]) -> Any:
    signal.raise_signal(signal.SIGINT)
    return call()


def interrupt_late(call: Callable[[], Any]) -> Any:
    try:
        return call()
    finally:
        signal.raise_signal(signal.SIGINT)


def interrupt_again_and_again(call: Callable[[], Any]) -> Any:
    return interrupt(call)


def write_with(fault: Fault, here: Path) -> BaseException | None:
    """Write all, and return the error that a fault leads to."""
    with open_locks([here]) as locks, pytest.MonkeyPatch.context() as patch:
        watch_calls(patch, CALLS, fault)
        try:
            write_all(build_outputs(here), write_text, locks=locks)
        except (KvRenameError, KeyboardInterrupt) as error:
            return error
    return None


@pytest.mark.parametrize(
    "meet", [fail, fail_late, interrupt, interrupt_late, interrupt_again_and_again]
)
def test_error_or_interrupt_at_any_call_leaves_all_or_none(
    meet: Callable[..., Any], system: str, here: Path, sample: Sample
) -> None:
    counting = Fault(0, meet)
    assert write_with(counting, here) is None
    assert read_state(here) == NEW
    assert {path.lstat().st_nlink for path in here.iterdir() if not path.is_dir()} == {1}
    assert counting.calls > 50
    for nth in sample(range(1, counting.calls + 1), 20):
        write_old(here)
        before = [os.stat(here / name) for name in OLD]
        fault = Fault(nth, meet)
        error = write_with(fault, here)
        found, where = read_state(here), f"{nth} {fault.met} {error}"
        if isinstance(error, KeyboardInterrupt) or fault.met not in REMOVING:
            assert found == drop_temporary(found), where
            assert os.path.isdir(here / "made") is (drop_temporary(found) == NEW), where
        assert meet in (fail, fail_late) or isinstance(error, KeyboardInterrupt), where
        is_done = error is None or isinstance(error, WrittenInterrupt | FlushError)
        assert drop_temporary(found) == (NEW if is_done else OLD), where
        if found == OLD:
            for name, status in zip(OLD, before, strict=True):
                now = os.stat(here / name)
                assert (now.st_mode, now.st_mtime_ns) == (status.st_mode, status.st_mtime_ns), where
                assert system == "no links" or os.path.samestat(now, status), where


@pytest.mark.parametrize("name", ["link", "replace"])
def test_change_that_is_made_and_reported_as_failed_is_made(
    name: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last link or rename gives a file its name."""
    names = ["new"] if name == "link" else ["a"]
    fault = Fault(2 if name == "link" and hasattr(os, "O_TMPFILE") else 1, fail_late)
    watch_calls(monkeypatch, [name], fault)
    write_outputs(build_outputs(here, names))
    assert fault.met
    assert read_state(here) == {**OLD, names[0]: NEW[names[0]]}


# What someone else does meanwhile.


def replace_by_another(path: Path) -> None:
    path.with_name("theirs").write_text("theirs")
    os.replace(path.with_name("theirs"), path)


def replace_as_before(path: Path) -> None:
    """Only the inode differs."""
    status = path.stat()
    path.with_name("theirs").write_text(path.read_text())
    os.utime(path.with_name("theirs"), ns=(0, status.st_mtime_ns))
    os.replace(path.with_name("theirs"), path)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (replace_by_another, "theirs"),
        (replace_as_before, "old a"),
        (lambda path: path.write_text("theirs"), "theirs"),
        (lambda path: path.chmod(0o600), "old a"),
        (Path.unlink, None),
    ],
)
def test_file_that_someone_else_has_changed_is_not_replaced(
    change: Callable[[Path], None], expected: str | None, system: str, here: Path
) -> None:
    def change_late(output: Output, file: TempFile) -> None:
        write_text(output, file)
        if output.target.name == "y":  # the last one
            change(here / "a")

    with pytest.raises(ModelError, match="another program") as caught:
        write_outputs(build_outputs(here), change_late)
    assert caught.value.path == "a"
    others = {name: text for name, text in OLD.items() if name != "a"}
    assert read_state(here) == (others if expected is None else {**others, "a": expected})


@pytest.mark.parametrize(
    ("names", "may_replace"), [(["new"], False), (["a", "new"], False), (["a", "new"], True)]
)
def test_file_that_has_appeared_is_not_replaced(
    names: list[str], may_replace: bool, system: str, here: Path
) -> None:
    def appear(output: Output, file: TempFile) -> None:
        write_text(output, file)
        (here / "new").write_text("theirs")

    outputs = build_outputs(here, names)
    outputs[-1] = outputs[-1]._replace(may_replace=may_replace)
    with pytest.raises(WriteError, match=r"File exists|Operation not") as caught:
        write_outputs(outputs, appear)
    assert caught.value.path == "new"
    assert read_state(here) == {**OLD, "new": "theirs"}


@pytest.mark.parametrize("name", ["c", "new"])
@pytest.mark.parametrize("is_late", [True, False])
def test_source_that_has_changed_has_no_result(is_late: bool, name: str, here: Path) -> None:
    source = here / "c"
    output = build_outputs(here, [name])[0]._replace(
        source=source, identity=FileIdentity.from_stat(source.stat()), in_place=name == "c"
    )

    def change(output: Output, file: TempFile) -> None:
        write_text(output, file)
        os.utime(source, ns=(0, 0))

    if not is_late:
        os.utime(source, ns=(0, 0))
    with pytest.raises(ModelError, match="another program"):
        write_outputs([output], change if is_late else write_text)
    assert read_state(here) == OLD


def test_file_of_a_worker_that_is_not_visible_here_is_an_error(here: Path) -> None:
    def map_elsewhere(work: Callable[[Any], Any], stages: Sequence[Any]) -> Iterator[Any]:
        for stage in stages:
            written = work(stage)
            written.unlink()
            yield written

    outputs, expected = build_outputs(here), r"a: .*not visible here .*all workers"
    with open_locks() as locks, pytest.raises(WriteError, match=expected):
        write_all(outputs, write_text, locks=locks, map_stages=map_elsewhere)
    assert read_state(here) == OLD


# Where it cannot be undone.


@pytest.mark.parametrize("name", ["replace", "lstat"])
def test_result_that_cannot_be_undone_is_named_and_completed_later(
    name: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk becomes read-only before the last of three files, or answers nothing any more."""
    broken, replaced = {"replace", name}, 0

    def break_disk(nth: int, name: str, call: Callable[[], Any]) -> Any:
        nonlocal replaced
        replaced += name == "replace"
        if replaced >= 3 and name in broken:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return call()

    outputs = build_outputs(here, ["c", "link", "a"])
    with monkeypatch.context() as patch:
        watch_calls(patch, ["replace", "lstat"], break_disk)
        with pytest.raises(UndoError) as caught:
            write_outputs(outputs)
    new = ["c", "link"] if name == "replace" else ["c", "link", "a"]  # perhaps new
    error = caught.value
    assert (error.new_paths, error.path) == (tuple(here / each for each in new), "a")
    assert "Read-only file system; the undo failed as well" in error.message
    said = f"{len(new)} of 3 results are new ({', '.join(new)}), the others as they"
    assert said in error.message
    assert error.hint == "to finish the work, run the same command again"
    assert read_state(here) == {**OLD, "c": NEW["c"], "link": NEW["link"]}
    write_outputs(outputs)
    assert read_state(here) == {name: NEW[name] for name in OLD}


# What is on the disk, and when.


def watch_disk(patch: pytest.MonkeyPatch) -> list[str]:
    """Return what will have happened: what is flushed, and names that are given or removed."""
    events = list[str]()

    def flush(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        is_directory = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        events.append(f"flush {Path(path).name if is_directory else 'a file'}")

    real_replace, real_unlink = os.replace, os.unlink

    def replace(source: Any, target: Any, **how: Any) -> None:
        real_replace(source, target, **how)
        events.append(Path(target).name)

    def unlink(path: Any, **how: Any) -> None:
        real_unlink(path, **how)
        events.append("remove")

    patch.setattr(os, "fsync", flush)
    patch.setattr(os, "replace", replace)
    patch.setattr(os, "unlink", unlink)
    return events


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")
def test_models_come_last_and_nothing_has_its_name_before_its_bytes_are_flushed(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new directory is complete before it has its name. What is removed does not come back."""
    monkeypatch.setattr(os, "O_TMPFILE", 0, raising=False)
    monkeypatch.setattr(os, "link", refuse(errno.EPERM))  # so all get their names by renames
    events = watch_disk(monkeypatch)

    def write(output: Output, file: TempFile) -> None:
        write_text(output, file)
        assert not (here / "made").exists()

    write_outputs(build_outputs(here, ["a", "c", "made/in/x"]), write)
    assert [event for event in events if TEMP_PREFIX not in event] == [
        *["flush a file"] * 5,  # three results, two backups
        *("c", "x", "flush in", "made", "a"),
        *("remove", "remove", "flush here"),
    ]


@pytest.mark.parametrize(("number", "is_error"), [(errno.EIO, True), (errno.EINVAL, False)])
def test_directory_that_cannot_be_flushed_is_reported_and_nothing_undone(
    number: int, is_error: bool, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some file systems cannot flush any: that is no error."""

    def flush(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            refuse(number)()

    monkeypatch.setattr(os, "fsync", flush)
    if is_error:
        with pytest.raises(FlushError, match="Input/output error") as caught:
            write_outputs(build_outputs(here, ["a"]))
        assert caught.value.path == str(here)
    else:
        write_outputs(build_outputs(here, ["a", "made/in/x"]))
    assert (here / "a").read_text() == "new a"


# Directories that are made.


def make(target: Path, like: Path, root: Path | None) -> list[int]:
    """Write a file in directories that are missing, and return their modes."""
    missing = [path for path in reversed(target.parents) if not path.exists()]
    write_outputs([Output(target, target, "x", root=root, like_directory=like)])
    return [stat.S_IMODE(path.stat().st_mode) for path in missing]


@needs_posix
@pytest.mark.parametrize(
    ("modes", "group", "expected"),
    [
        ((0o755, 0o755), None, [0o755, 0o755]),
        ((0o700, 0o777), None, [0o755, 0o700]),
        ((0o2750, 0o700), None, [0o700, 0o750]),
        # What a group may do is not for another group.
        ((0o777, 0o755), 2345, [0o755, 0o755]),
        ((0o770, 0o755), 2345, [0o755, 0o700]),
    ],
)
def test_new_directory_has_no_more_rights_than_the_one_of_its_source(
    modes: tuple[int, int], group: int | None, expected: list[int], tmp_path: Path
) -> None:
    source, root = tmp_path / "export" / "in", tmp_path / "out"
    source.mkdir(parents=True)
    root.mkdir()
    for directory, mode in zip((source, source.parent), modes, strict=True):
        directory.chmod(mode)
    if group is not None:
        if os.geteuid() != 0:
            pytest.skip("only root gives away")
        os.chown(source, -1, group)
    assert make(root / "a" / "b" / "m.onnx", source, root) == expected


@needs_posix
def test_default_access_control_list_opens_no_directory(tmp_path: Path) -> None:
    """The default list of the place lets user 1234 in."""
    source = tmp_path / "export"
    source.mkdir()
    source.chmod(0o770)
    entries = [(1, 7, 0), (2, 7, 1234), (4, 7, 0), (0x10, 7, 0), (0x20, 5, 0)]
    packed = [struct.pack("<HHI", tag, bits, user or 0xFFFFFFFF) for tag, bits, user in entries]
    try:
        os.setxattr(tmp_path, "system.posix_acl_default", struct.pack("<I", 2) + b"".join(packed))
    except OSError:
        pytest.skip("this file system has no such lists")
    assert make(tmp_path / "out" / "m.onnx", source, None) == [0o700]


# What killed runs have left.

LEFT = {kind: build_temp_name(build_key(), kind) for kind in ("new", "old", "dir")}
ALMOST = f"{build_temp_name(build_key(), 'new')}-x"


def leave(here: Path) -> None:
    """Leave what killed runs do: a file, a link to ``a``, a directory; and what is not theirs."""
    (here / LEFT["new"]).write_text("half")
    os.link(here / "a", here / LEFT["old"])
    (here / LEFT["dir"] / "in").mkdir(parents=True)
    (here / LEFT["dir"] / "in" / "x").write_text("half")
    (here / "shortcut").symlink_to(LEFT["new"])
    (here / ALMOST).write_text("theirs")
    (here / build_temp_name(build_key(), "new")).mkdir()


def list_left(here: Path) -> set[str]:
    return {kind for kind, name in LEFT.items() if (here / name).exists()}


@pytest.mark.parametrize(
    ("inputs", "links_only", "left"),
    [
        ([], False, set()),
        ([], True, {"new", "dir"}),
        ([LEFT["new"]], False, {"new"}),
        (["shortcut"], False, {"new"}),
        ([LEFT["old"]], True, {"new", "dir", "old"}),
        ([f"{LEFT['dir']}/in/x"], False, {"dir"}),
    ],
)
def test_leftovers_go_and_no_file_that_is_read(
    inputs: list[str], links_only: bool, left: set[str], here: Path
) -> None:
    leave(here)
    with open_locks([here]) as locks:
        clear_leftovers(locks, [here / name for name in inputs], links_only=links_only)
    assert list_left(here) == left
    assert (here / ALMOST).exists()
    assert len([path for path in here.glob(".onnx*-new") if path.is_dir()]) == 1
    assert (here / "a").read_text() == "old a"


def test_without_a_lock_nothing_is_cleared_but_our_own(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pytest.importorskip("fcntl"), "flock", refuse(errno.ENOLCK))
    leave(here)
    with open_locks([here]) as locks:
        clear_leftovers(locks, [])
        before = set(os.listdir(here))
        assert list_left(here) == set(LEFT)
        write_all(build_outputs(here), write_text, locks=locks)
    assert set(os.listdir(here)) == before | {"new", "made"}


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root gives away")
@pytest.mark.parametrize(("directory_owner", "goes"), [(0, False), (1234, True), (99, False)])
def test_leftovers_of_other_users_stay_unless_the_directory_is_theirs(
    directory_owner: int, goes: bool, here: Path
) -> None:
    leave(here)
    os.chown(here, directory_owner, -1)
    os.chown(here / LEFT["new"], 1234, -1)
    with open_locks([here]) as locks:
        clear_leftovers(locks, [])
    assert (here / LEFT["new"]).exists() is not goes


# One file: a page, rules, or the like.


@needs_posix
@pytest.mark.parametrize("mode", [0o600, 0o666, 0o4711])
def test_single_file_that_is_replaced_keeps_its_permissions(
    mode: int, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that cannot be read; a link gives none."""
    (here / "a").chmod(mode)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", refuse(errno.EIO))
        write_file(here / "a", b"new", [])
    assert (here / "a").read_bytes() == b"new"
    assert stat.S_IMODE((here / "a").stat().st_mode) == mode & 0o777
    for name in ("link", "plain"):
        write_file(here / name, b"newer", [])
    assert (here / "link").lstat().st_mode == (here / "plain").lstat().st_mode
    assert read_state(here) == {**OLD, "a": "new", "link": "newer", "plain": "newer"}
