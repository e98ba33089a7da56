from __future__ import annotations

import errno
import importlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from onnxkvrename import WriteError
from onnxkvrename.storage.lock import _Locks, find_lock_path, hold_locks

HOLDING = """
import sys
from pathlib import Path
from onnxkvrename.storage import lock as locks
with locks.hold_locks([Path(name) for name in sys.argv[1:]]):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def another_process(*targets: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Someone else who holds targets, until its input ends."""
    command = [sys.executable, "-c", HOLDING, *map(str, targets)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def taken(*targets: Path) -> bool:
    """Return whether targets can be locked now."""
    try:
        with hold_locks(targets):
            return True
    except WriteError:
        return False


def refuse(number: int) -> Callable[..., Any]:
    def call(*args: object, **kwargs: object) -> None:
        raise OSError(number, os.strerror(number))

    return call


def test_a_lock_is_there_while_it_is_held_and_no_longer(tmp_path: Path) -> None:
    with hold_locks([tmp_path / "m.onnx"]):
        (name,) = os.listdir(tmp_path)
        assert re.fullmatch(r"\.onnxkvrename-[0-9a-f]{8}-lock", name)
    assert os.listdir(tmp_path) == []


def test_it_is_gone_after_a_failure_too(tmp_path: Path) -> None:
    def fail() -> None:
        with hold_locks([tmp_path / "a.onnx", tmp_path / "b.onnx"]):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert os.listdir(tmp_path) == []


def test_it_is_let_go_under_the_name_that_its_directory_has_by_then(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    with hold_locks([old, new, old / "m.onnx"], {old: new}):
        os.rename(old, new)
        assert len(os.listdir(new)) == 1
    assert os.listdir(new) == []
    assert os.listdir(tmp_path) == ["new"]


def test_a_directory_that_kept_its_name_costs_no_other_its_lock(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    new.mkdir()
    with hold_locks([new / "m.onnx"]):
        with hold_locks([old / "m.onnx"], {old: new}):
            pass
        assert len(os.listdir(new)) == 1
        assert os.listdir(old) == []


def test_a_second_run_is_told_who_holds_it_where_and_since_when(tmp_path: Path) -> None:
    target = tmp_path / "m.onnx"
    with another_process(target) as process, pytest.raises(WriteError) as caught:
        hold_locks([target]).__enter__()
    assert caught.value.path == str(target)
    assert "wait" in caught.value.hint
    host = re.escape(os.uname().nodename)
    since = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d [+-]\d{4}"
    message = rf"is being processed by process {process.pid} on {host} since {since}"
    assert re.fullmatch(message, caught.value.message)


def test_a_host_without_uname_goes_by_the_name_that_windows_gives_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "uname", raising=False)
    for name, shown in (("BOX", "BOX"), (None, "here")):
        monkeypatch.delenv("COMPUTERNAME", raising=False)
        if name is not None:
            monkeypatch.setenv("COMPUTERNAME", name)
        with hold_locks([tmp_path / "m.onnx"]):
            text = find_lock_path(tmp_path / "m.onnx").read_text()
        assert text.startswith(f"process {os.getpid()} on {shown} since ")


def test_so_is_a_second_thread_of_this_process(tmp_path: Path) -> None:
    with hold_locks([tmp_path / "m.onnx"]):
        with pytest.raises(WriteError, match=f"process {os.getpid()} "):
            hold_locks([tmp_path / "m.onnx"]).__enter__()
        assert len(os.listdir(tmp_path)) == 1


def test_one_target_that_is_held_and_none_is(tmp_path: Path) -> None:
    first, second, third = (tmp_path / f"{name}.onnx" for name in "abc")
    with another_process(second):
        assert not taken(first, second, third)
        assert len(os.listdir(tmp_path)) == 1
        assert taken(first, third)
        assert not taken(second)
    assert taken(first, second, third)


def test_each_target_has_its_own_lock(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with hold_locks([tmp_path / "a.onnx"]):
        assert taken(tmp_path / "b.onnx")
        assert taken(tmp_path / "other" / "a.onnx")


def test_a_target_may_be_given_twice(tmp_path: Path) -> None:
    with hold_locks([tmp_path / "a.onnx", tmp_path / "b.onnx", tmp_path / "a.onnx"]):
        assert len(os.listdir(tmp_path)) == 2
    assert os.listdir(tmp_path) == []


def test_the_lock_of_a_dead_process_is_nobodys(tmp_path: Path) -> None:
    targets = [tmp_path / f"{name}.onnx" for name in "abc"]
    with another_process(*targets) as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert len(os.listdir(tmp_path)) == 3
    with hold_locks(targets):
        assert not taken(targets[2])
        with pytest.raises(WriteError, match=f"process {os.getpid()} "):
            hold_locks(targets[:1]).__enter__()
    assert os.listdir(tmp_path) == []


def test_a_lock_whose_maker_was_killed_before_it_wrote_is_taken_over(tmp_path: Path) -> None:
    lock_path = find_lock_path(tmp_path / "m.onnx")
    lock_path.touch()
    with hold_locks([tmp_path / "m.onnx"]):
        assert f"process {os.getpid()} ".encode() in lock_path.read_bytes()
    assert os.listdir(tmp_path) == []


# What has the name of a lock, and is none.

TEXTS = {
    "weights": bytes(range(256)) * 100,
    "short": b"process",
    "long": b"process 1 on " + b"x" * 1000,
    "lines": b"process 1 on here\nand more",
}


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("linked", [False, True], ids=["a file", "a hard link"])
@pytest.mark.parametrize("first", [True, False], ids=["alone", "after another"])
def test_a_file_that_is_no_lock_is_refused_and_stays_as_it_is(
    first: bool, linked: bool, name: str, tmp_path: Path
) -> None:
    """Weights under the name of a lock must not become the text of one."""
    target = tmp_path / "m.onnx"
    lock_path, content = find_lock_path(target), TEXTS[name]
    lock_path.write_bytes(content)
    if linked:
        os.link(lock_path, tmp_path / "w.bin")
    before = sorted(os.listdir(tmp_path)), os.stat(lock_path).st_mtime_ns
    with pytest.raises(WriteError) as caught:
        hold_locks([target] if first else [tmp_path / "other.onnx", target]).__enter__()
    assert caught.value.path == str(target)
    assert f"{lock_path} is not a lock" in caught.value.message
    assert f"move {lock_path} away" in caught.value.hint
    assert lock_path.read_bytes() == content
    assert (sorted(os.listdir(tmp_path)), os.stat(lock_path).st_mtime_ns) == before


def test_an_empty_file_with_another_name_loses_the_name_of_the_lock_only(tmp_path: Path) -> None:
    find_lock_path(tmp_path / "m.onnx").touch()
    os.link(find_lock_path(tmp_path / "m.onnx"), tmp_path / "other")
    assert taken(tmp_path / "m.onnx")
    assert (os.listdir(tmp_path), (tmp_path / "other").read_bytes()) == (["other"], b"")


def make_socket(path: Path) -> None:
    import socket

    socket.socket(socket.AF_UNIX).bind(str(path))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes with a name")
@pytest.mark.parametrize("make", [getattr(os, "mkfifo", None), make_socket, os.mkdir])
def test_what_is_no_regular_file_is_refused_without_waiting(
    make: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the path of a socket may not be long
    lock_path = find_lock_path(Path("m.onnx"))
    make(lock_path)
    with pytest.raises(WriteError, match="not a regular"):
        hold_locks([Path("m.onnx")]).__enter__()
    assert os.listdir(tmp_path) == [lock_path.name]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes with a name")
def test_a_pipe_that_appears_after_the_look_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock_path, real = find_lock_path(tmp_path / "m.onnx"), os.open
    lock_path.touch()

    def swap(path: Any, *args: Any) -> int:
        monkeypatch.undo()
        lock_path.unlink()
        os.mkfifo(lock_path)
        return real(path, *args)

    monkeypatch.setattr(os, "open", swap)
    with pytest.raises(WriteError, match="not a regular"):
        hold_locks([tmp_path / "m.onnx"]).__enter__()
    assert os.listdir(tmp_path) == [lock_path.name]


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root gives away")
def test_the_lock_of_another_users_dead_run_is_refused_and_named(tmp_path: Path) -> None:
    lock_path = find_lock_path(tmp_path / "m.onnx")
    lock_path.write_bytes(b"process 1 on elsewhere since 2026-01-01")
    os.chown(lock_path, 12345, 12345)
    with pytest.raises(WriteError, match="user ID 12345"):
        hold_locks([tmp_path / "m.onnx"]).__enter__()
    assert lock_path.read_bytes() == b"process 1 on elsewhere since 2026-01-01"


def test_a_lock_that_may_not_be_opened_is_not_called_work_of_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_lock_path(tmp_path / "m.onnx").touch()
    monkeypatch.setattr(os, "open", refuse(errno.EACCES))
    with pytest.raises(WriteError, match="cannot be opened: Permission"):
        hold_locks([tmp_path / "m.onnx"]).__enter__()


@pytest.mark.usefixtures("few_descriptors")
def test_many_targets_take_few_descriptors(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    targets = [tmp_path / f"{'sub/' * (i % 2)}{i}.onnx" for i in range(300)]
    with hold_locks(targets):
        assert sum(len(names) for _, _, names in os.walk(tmp_path)) == 300
        assert not taken(targets[-1])
    assert os.listdir(tmp_path) == ["sub"]
    assert os.listdir(tmp_path / "sub") == []


@pytest.mark.parametrize("number", [errno.EPERM, errno.EXDEV, errno.EMLINK, errno.EOPNOTSUPP])
def test_without_links_each_target_has_a_file_of_its_own(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", refuse(number))
    targets = [tmp_path / f"{name}.onnx" for name in "abc"]
    with hold_locks(targets):
        assert {path.stat().st_nlink for path in tmp_path.iterdir()} == {1}
        for target in targets:
            assert not taken(target)
    assert os.listdir(tmp_path) == []


def test_a_link_that_is_made_and_reported_as_failed_is_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NFS does, if an answer gets lost."""
    real = os.link

    def told_twice(*args: Any, **how: Any) -> None:
        real(*args, **how)
        raise FileExistsError(errno.EEXIST, "File exists")

    monkeypatch.setattr(os, "link", told_twice)
    with hold_locks([tmp_path / "a.onnx", tmp_path / "b.onnx"]):
        assert {path.stat().st_nlink for path in tmp_path.iterdir()} == {2}
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_that_knows_no_locks_does_not_stop_the_work(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    monkeypatch.setattr(fcntl, "flock", refuse(number))
    assert taken(tmp_path / "a.onnx", tmp_path / "b.onnx")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES])
def test_a_lock_that_cannot_be_tried_is_no_others(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    monkeypatch.setattr(fcntl, "flock", refuse(number))
    with pytest.raises(WriteError, match=f"cannot be written: {os.strerror(number)}"):
        hold_locks([tmp_path / "a.onnx"]).__enter__()


@pytest.mark.parametrize("name", ["open", "flock", "lstat", "write", "link"])
@pytest.mark.parametrize("fault", [OSError(errno.ENOSPC, "No space left"), KeyboardInterrupt()])
def test_a_lock_that_was_half_taken_is_not_left(
    name: str, fault: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module("fcntl" if name == "flock" else "os")
    real, calls = getattr(module, name), []

    def faulty(*args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        if not calls:
            calls.append(args)
            raise fault
        return result

    monkeypatch.setattr(module, name, faulty)
    with suppress(KeyboardInterrupt):
        taken(tmp_path / "a.onnx", tmp_path / "b.onnx")
    assert calls
    assert os.listdir(tmp_path) == []
    monkeypatch.undo()
    assert taken(tmp_path / "a.onnx", tmp_path / "b.onnx")


@pytest.mark.parametrize("removes_first", [True, False])
def test_an_interrupt_while_locks_are_let_go_leaves_none(
    removes_first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = os.unlink, []

    def interrupted(path: Path) -> None:
        calls.append(path)
        is_interrupted = len(calls) in (1, 3)
        if removes_first or not is_interrupted:
            real(path)
        if is_interrupted:
            raise KeyboardInterrupt

    targets = [tmp_path / f"{name}.onnx" for name in "abcd"]
    monkeypatch.setattr(os, "unlink", interrupted)
    with pytest.raises(KeyboardInterrupt):
        taken(*targets)
    assert os.listdir(tmp_path) == []
    assert taken(*targets)


def test_an_interrupt_right_before_locks_are_let_go_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = _Locks.release, []

    def interrupted(self: _Locks) -> None:
        calls.append(self)
        if len(calls) == 1:
            raise KeyboardInterrupt
        real(self)

    monkeypatch.setattr(_Locks, "release", interrupted)
    with pytest.raises(KeyboardInterrupt):
        taken(tmp_path / "a.onnx", tmp_path / "b.onnx")
    assert os.listdir(tmp_path) == []


def test_an_interrupt_after_a_lock_is_gone_costs_no_other_run_its_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, other = os.unlink, "process 1 on elsewhere since now"

    def interrupted(path: Path) -> None:
        real(path)
        monkeypatch.undo()
        Path(path).write_text(other)  # another run was waiting for it
        raise KeyboardInterrupt

    target = tmp_path / "a.onnx"
    monkeypatch.setattr(os, "unlink", interrupted)
    with pytest.raises(KeyboardInterrupt):
        taken(target)
    assert find_lock_path(target).read_text() == other


def test_a_lock_that_is_let_go_while_it_is_opened_is_looked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file that was opened has no name any more: to hold it would keep nobody out."""
    real, first = os.open, hold_locks([tmp_path / "m.onnx"])
    first.__enter__()

    def late(path: Any, *args: Any) -> int:
        descriptor = real(path, *args)
        monkeypatch.undo()
        first.__exit__(None, None, None)
        return descriptor

    monkeypatch.setattr(os, "open", late)
    with hold_locks([tmp_path / "m.onnx"]):
        assert not taken(tmp_path / "m.onnx")


def test_a_lock_that_cannot_be_looked_at_is_not_tried_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "lstat", refuse(errno.EIO))
    with pytest.raises(WriteError, match="cannot be written: Input/output"):
        hold_locks([tmp_path / "a.onnx"]).__enter__()


def test_a_lock_is_no_way_to_write_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("precious")
    with hold_locks([tmp_path / "m.onnx"]):
        (name,) = set(os.listdir(tmp_path)) - {"precious"}
    (tmp_path / name).symlink_to("precious")
    with pytest.raises(WriteError, match=f"{name} is a symbolic"):
        hold_locks([tmp_path / "m.onnx"]).__enter__()
    assert (tmp_path / "precious").read_text() == "precious"
    assert (tmp_path / name).is_symlink()


@pytest.mark.parametrize("destination", ["precious", "nothing"])
def test_a_symbolic_link_is_refused_before_it_is_opened(
    destination: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing keeps `open` from following it, it would be followed for ever."""

    def follow(path: Path, *_: object) -> int:
        raise AssertionError(f"{path} is opened")

    (tmp_path / "precious").write_text("precious")
    lock_path = find_lock_path(tmp_path / "m.onnx")
    lock_path.symlink_to(destination)
    monkeypatch.delattr(os, "O_NOFOLLOW", raising=False)
    monkeypatch.setattr(os, "open", follow)
    with pytest.raises(WriteError) as caught:
        hold_locks([tmp_path / "m.onnx"]).__enter__()
    assert f"{lock_path} is a symbolic" in caught.value.message
    assert f"move {lock_path} away" in caught.value.hint
    assert sorted(os.listdir(tmp_path)) == [lock_path.name, "precious"]


def test_a_lock_beside_another_is_not_linked_over_a_symbolic_link(tmp_path: Path) -> None:
    find_lock_path(tmp_path / "b.onnx").symlink_to("nothing")
    with pytest.raises(WriteError, match="symbolic link"):
        hold_locks([tmp_path / "a.onnx", tmp_path / "b.onnx"]).__enter__()
    assert os.listdir(tmp_path) == [find_lock_path(tmp_path / "b.onnx").name]


def say_not_found(*_: object, **__: object) -> None:
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))


def say_exists(*_: object, **__: object) -> None:
    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))


def say_there_and_gone() -> Any:
    """Return a query that finds a file every other time."""
    real, calls = os.lstat, count()

    def query(path: Any, **how: Any) -> os.stat_result:
        if next(calls) % 2:
            say_not_found()
        return real(path, **how)

    return query


@pytest.mark.parametrize(
    ("there", "name", "answer", "told"),
    [
        (
            True,
            "open",
            say_not_found,
            "exists, then",
        ),
        (
            False,
            "open",
            say_exists,
            "does not exist, then",
        ),
        (
            False,
            "lstat",
            say_not_found,
            "does not exist, then",
        ),
        (True, "lstat", say_there_and_gone(), "disappeared"),
    ],
)
def test_a_file_system_that_contradicts_itself_is_not_asked_for_ever(
    there: bool, name: str, answer: Any, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = find_lock_path(tmp_path / "m.onnx")
    if there:
        lock.touch()
    with monkeypatch.context() as patch:
        patch.setattr(os, name, answer)
        with pytest.raises(WriteError) as caught:
            hold_locks([tmp_path / "m.onnx"]).__enter__()
    assert f"{lock}" in caught.value.message
    assert "100 times" in caught.value.message
    assert f"{told}" in caught.value.message
    hint = "the file system contradicts itself: check it"
    assert (caught.value.hint, caught.value.in_place_hint) == (f"{hint}, or write elsewhere", hint)


@pytest.mark.parametrize("has_descriptors", [True, False])
def test_a_file_that_was_swapped_for_the_first_lock_gets_no_second_name(
    has_descriptors: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever may write to one directory puts no file of theirs into the other."""
    hostile, private = tmp_path / "hostile", tmp_path / "private"
    for directory in (hostile, private):
        directory.mkdir()
    lock, real = find_lock_path(hostile / "a.onnx"), os.link

    def swap_first(*args: Any, **how: Any) -> None:
        os.rename(lock, hostile / "gone")
        lock.write_text("theirs")
        monkeypatch.setattr(os, "link", real)
        real(*args, **how)

    monkeypatch.setattr(os, "link", swap_first)
    if not has_descriptors:
        monkeypatch.setattr(os.path, "isdir", lambda path: False)
    with hold_locks([hostile / "a.onnx", private / "b.onnx"]):
        assert "theirs" not in find_lock_path(private / "b.onnx").read_text()
    assert os.listdir(private) == []
