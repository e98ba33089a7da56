"""Several files change together, or none of them."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import stat
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

import pytest
from conftest import Sample
from files.conftest import refuse

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
    """Lets the ``nth`` call of the system meet something.

    Attributes:
        met: The name of the function that was called.
        calls: How many calls there were.
    """

    def __init__(self, nth: int, meet: Callable[[Callable[[], Any]], Any]) -> None:
        self.nth, self.meet, self.met, self.calls = nth, meet, "", 0

    def arm(self, patch: pytest.MonkeyPatch, names: Sequence[str] = CALLS) -> None:
        """Wait for the call from now on."""

        def wrap(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **how: Any) -> Any:
                self.calls += not self.met
                if self.met or self.calls != self.nth:
                    return real(*args, **how)
                self.met = name
                return self.meet(lambda: real(*args, **how))

            return call

        for name in names:
            patch.setattr(os, name, wrap(name, getattr(os, name)))


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


def write_with(fault: Fault, here: Path) -> BaseException | None:
    """Write all, and return the error that a fault leads to."""
    with open_locks([here]) as locks, pytest.MonkeyPatch.context() as patch:
        fault.arm(patch)
        try:
            write_all(build_outputs(here), write_text, locks=locks)
        except (KvRenameError, KeyboardInterrupt) as error:
            return error
    return None


@pytest.mark.parametrize("meet", [fail, fail_late, interrupt, interrupt_late])
def test_an_error_or_interrupt_at_any_call_leaves_all_or_none(
    meet: Callable[..., Any], system: str, here: Path, sample: Sample
) -> None:
    counting = Fault(0, meet)
    assert write_with(counting, here) is None
    assert read_state(here) == NEW
    assert {path.lstat().st_nlink for path in here.iterdir() if not path.is_dir()} == {1}
    assert counting.calls > 50
    for nth in sample(range(1, counting.calls + 1), 20):
        write_old(here)
        inodes = [os.lstat(here / name).st_ino for name in OLD]
        fault = Fault(nth, meet)
        error = write_with(fault, here)
        found, where = read_state(here), f"{nth} {fault.met} {error}"
        if isinstance(error, KeyboardInterrupt) or fault.met not in REMOVING:
            assert found == drop_temporary(found), where
            assert os.path.isdir(here / "made") is (drop_temporary(found) == NEW), where
        is_done = error is None or isinstance(error, WrittenInterrupt | FlushError)
        assert drop_temporary(found) == (NEW if is_done else OLD), where
        if found == OLD and system != "no links":
            assert [os.lstat(here / name).st_ino for name in OLD] == inodes, where


@pytest.mark.parametrize("name", ["link", "replace"])
def test_a_change_that_is_made_and_reported_as_failed_is_made(
    name: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last link or rename gives a file its name."""
    names = ["new"] if name == "link" else ["a"]
    fault = Fault(2 if name == "link" and hasattr(os, "O_TMPFILE") else 1, fail_late)
    fault.arm(monkeypatch, [name])
    write_outputs(build_outputs(here, names))
    assert fault.met
    assert read_state(here) == {**OLD, names[0]: NEW[names[0]]}


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_between_two_files_puts_all_back_and_is_not_lost(
    name: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(number: int, frame: object) -> NoReturn:
        raise SystemExit(number)

    number = getattr(signal, name)
    before = signal.signal(number, end)
    fault = Fault(2, lambda call: (signal.raise_signal(number), call())[1])
    fault.arm(monkeypatch, ["replace"])
    try:
        with pytest.raises(SystemExit) as caught:
            write_outputs(build_outputs(here))
        assert signal.getsignal(number) is end
    finally:
        signal.signal(number, before)
    assert (caught.value.code, read_state(here)) == (number, OLD)


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


def write_in_place(path: Path) -> None:
    path.write_text("theirs")


def protect(path: Path) -> None:
    path.chmod(0o600)


@pytest.mark.parametrize(
    "change", [replace_by_another, replace_as_before, write_in_place, protect, Path.unlink]
)
@pytest.mark.parametrize("name", ["a", "c"])
def test_what_someone_else_has_changed_is_not_replaced(
    name: str, change: Callable[[Path], None], system: str, here: Path
) -> None:
    (here / name).chmod(0o640)

    def change_late(output: Output, file: TempFile) -> None:
        write_text(output, file)
        if output.target.name == "y":  # the last one
            change(here / name)

    with pytest.raises(ModelError, match="another program") as caught:
        write_outputs(build_outputs(here), change_late)
    assert caught.value.path == name
    expected = dict(OLD)
    if change is Path.unlink:
        del expected[name]
    elif change in (replace_by_another, write_in_place):
        expected[name] = "theirs"
    assert read_state(here) == expected


@pytest.mark.parametrize("may_replace", [True, False])
@pytest.mark.parametrize("names", [["new"], ["a", "new"]])
def test_nothing_is_put_over_what_has_appeared(
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


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("is_late", [True, False])
def test_a_source_that_has_changed_gives_no_result(
    is_late: bool, in_place: bool, here: Path
) -> None:
    source = here / "c"
    identity = FileIdentity.from_stat(source.stat())
    output = build_outputs(here, ["c" if in_place else "new"])[0]
    output = output._replace(source=source, identity=identity, in_place=in_place)

    def change(output: Output, file: TempFile) -> None:
        write_text(output, file)
        os.utime(source, ns=(0, 0))

    if not is_late:
        os.utime(source, ns=(0, 0))
    with pytest.raises(ModelError, match="another program"):
        write_outputs([output], change if is_late else write_text)
    assert read_state(here) == OLD


# Where it cannot be undone.


@pytest.mark.parametrize("nth", [2, 3])
def test_what_cannot_be_undone_is_named_and_completed_later(
    nth: int, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that has become read-only between two files."""
    calls, real = count(1), os.replace

    def break_disk(*args: Any, **how: Any) -> None:
        if next(calls) >= nth:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        real(*args, **how)

    outputs = build_outputs(here, ["c", "link", "a"])
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", break_disk)
        with pytest.raises(UndoError) as caught:
            write_outputs(outputs)
    error, new = caught.value, ["c", "link"][: nth - 1]
    assert error.new_paths == tuple(here / name for name in new)
    assert error.path == ["link", "a"][nth - 2]
    assert "Read-only file system; the undo failed as well" in error.message
    assert f"{nth - 1} of 3 results are new ({', '.join(new)}), the others as they" in error.message
    assert error.hint == "to finish the work, run the same command again"
    assert read_state(here) == {**OLD, **{name: NEW[name] for name in new}}
    write_outputs(outputs)
    assert read_state(here) == {name: NEW[name] for name in OLD}


# What is on the disk, and when.


def watch_disk(patch: pytest.MonkeyPatch) -> list[str]:
    """Return what will have happened: names that are flushed, and names that are given."""
    events = list[str]()

    def flush(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        is_directory = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        events.append(f"flush {Path(path).name if is_directory else 'a file'}")

    real = os.replace

    def replace(source: Any, target: Any, **how: Any) -> None:
        real(source, target, **how)
        events.append(Path(target).name)

    patch.setattr(os, "fsync", flush)
    patch.setattr(os, "replace", replace)
    return events


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")
def test_models_come_last_and_nothing_has_its_name_before_its_bytes_are_flushed(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new directory is complete before it has its name."""
    monkeypatch.setattr(os, "O_TMPFILE", 0, raising=False)
    monkeypatch.setattr(os, "link", refuse(errno.EPERM))  # so all get their names by renames
    events = watch_disk(monkeypatch)

    def write(output: Output, file: TempFile) -> None:
        write_text(output, file)
        assert not (here / "made").exists()

    write_outputs(build_outputs(here, ["a", "c", "made/in/x"]), write)
    assert [event for event in events if TEMP_PREFIX not in event] == [
        *["flush a file"] * 5,  # three results, two backups
        *("c", "x", "flush in", "made", "a", "flush here"),
    ]


@pytest.mark.parametrize(
    ("number", "is_error"),
    [(errno.EIO, True), *((no, False) for no in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS))],
)
def test_a_directory_that_cannot_be_flushed_in_the_end_is_told_and_undoes_nothing(
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
    ("modes", "expected"),
    [
        ((0o755, 0o755), [0o755, 0o755]),
        ((0o700, 0o777), [0o755, 0o700]),
        ((0o2750, 0o700), [0o700, 0o750]),
        ((0o500, 0o1777), [0o755, 0o700]),
    ],
)
def test_a_directory_has_no_more_rights_than_the_one_that_it_stands_for(
    modes: tuple[int, int], expected: list[int], tmp_path: Path
) -> None:
    source, root = tmp_path / "export" / "in", tmp_path / "out"
    source.mkdir(parents=True)
    root.mkdir()
    for directory, mode in zip((source, source.parent), modes, strict=True):
        directory.chmod(mode)
    assert make(root / "a" / "b" / "m.onnx", source, root) == expected


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root gives away")
@pytest.mark.parametrize(("mode", "expected"), [(0o777, 0o755), (0o770, 0o700), (0o755, 0o755)])
def test_the_rights_of_a_group_do_not_pass_to_another_group(
    mode: int, expected: int, tmp_path: Path
) -> None:
    source = tmp_path / "export"
    source.mkdir()
    source.chmod(mode)
    os.chown(source, -1, 2345)
    assert make(tmp_path / "out" / "m.onnx", source, None) == [expected]


@needs_posix
@pytest.mark.parametrize("kind", ["default", "access"])
def test_an_access_control_list_opens_no_directory(kind: str, tmp_path: Path) -> None:
    """The default list of the place lets user 1234 in; that of the source keeps a group out."""
    source = tmp_path / "export"
    source.mkdir()
    source.chmod(0o770)
    mine = 7 if kind == "default" else 0
    entries = [(1, 7, 0), (2, mine, 1234), (4, 7, 0), (0x10, 7, 0), (0x20, 5, 0)]
    packed = [struct.pack("<HHI", tag, bits, user or 0xFFFFFFFF) for tag, bits, user in entries]
    place = tmp_path if kind == "default" else source
    try:
        os.setxattr(place, f"system.posix_acl_{kind}", struct.pack("<I", 2) + b"".join(packed))
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


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EBADF])
def test_without_a_lock_nothing_is_cleared_but_our_own(
    number: int, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pytest.importorskip("fcntl"), "flock", refuse(number))
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
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o666, 0o4711])
def test_a_single_file_that_is_replaced_keeps_its_permissions(mode: int, here: Path) -> None:
    (here / "a").chmod(mode)
    write_file(here / "a", b"new", [])
    assert (here / "a").read_bytes() == b"new"
    assert stat.S_IMODE((here / "a").stat().st_mode) == mode & 0o777


def test_a_link_is_replaced_and_gives_no_permissions(here: Path) -> None:
    (here / "a").chmod(0o600)
    (here / "nowhere").symlink_to("nothing")
    for name in ("link", "nowhere", "plain"):
        write_file(here / name, b"new", [])
        assert (here / name).lstat().st_mode == (here / "link").lstat().st_mode
    assert read_state(here) == {**OLD, "link": "new", "nowhere": "new", "plain": "new"}


def test_a_file_that_has_its_content_stays_and_leftovers_go(here: Path) -> None:
    os.utime(here / "a", ns=(0, 0))
    for name in (LEFT["new"], LEFT["old"]):
        (here / name).write_text("half")
    write_file(here / "a", b"old a", [here / LEFT["old"]])
    assert (here / "a").stat().st_mtime_ns == 0
    assert list_left(here) == {"old"}


def test_a_file_that_cannot_be_read_is_replaced(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda *args: False)
        patch.setattr(os, "pread", refuse(errno.EIO))
        write_file(here / "a", b"new", [])
    assert (here / "a").read_bytes() == b"new"


@pytest.mark.parametrize(
    ("path", "message"), [("none/x", "create its directory"), ("a/x", "create its"), (".", "is a")]
)
def test_a_place_where_no_file_can_be_is_an_error(path: str, message: str, here: Path) -> None:
    with pytest.raises(WriteError, match=message):
        write_file(here / path, b"new", [])
    with suppress(FileNotFoundError):
        assert read_state(here) == OLD
