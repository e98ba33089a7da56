"""One run at a time writes in one directory."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from onnxkvrename import WriteError
from onnxkvrename.storage import lock
from onnxkvrename.storage.lock import hold_locks
from onnxkvrename.storage.temp_file import LOCK_NAME, remove_temp_files

HOLDING = """
import sys
from pathlib import Path
from onnxkvrename.storage.lock import hold_locks
with hold_locks([Path(name) for name in sys.argv[1:]]):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def another_process(*directories: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Someone else who holds directories, until its input ends."""
    command = [sys.executable, "-c", HOLDING, *map(str, directories)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "_MAX_WAIT", 0)


def is_free(*directories: Path) -> bool:
    """Return whether directories can be locked now."""
    try:
        with hold_locks(directories):
            return True
    except WriteError as error:
        if "is being processed by another run" not in error.message:
            raise
        return False


def refuse_flock(number: int, only_directories: bool, patch: pytest.MonkeyPatch) -> None:
    """Let the system refuse the lock of every file, or of directories, as NFS does."""
    import fcntl

    real = fcntl.flock

    def flock(descriptor: int, how: int) -> None:
        if not only_directories or os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(number, os.strerror(number))
        real(descriptor, how)

    patch.setattr(fcntl, "flock", flock)


def use_directories(patch: pytest.MonkeyPatch) -> None:
    """Lock the directories themselves."""


def use_files(patch: pytest.MonkeyPatch) -> None:
    """Lock a file in each directory, as on NFS."""
    refuse_flock(errno.EBADF, True, patch)


def use_files_in_what_is_not_listed(patch: pytest.MonkeyPatch) -> None:
    """Lock a file in each directory that may be written to, but not be opened."""
    real = os.open

    def call(path: Any, flags: int, *args: Any, **how: Any) -> int:
        if flags & os.O_DIRECTORY:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return real(path, flags, *args, **how)

    patch.setattr(os, "open", call)


WAYS = [use_directories, use_files, use_files_in_what_is_not_listed]


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    request.param(monkeypatch)
    return str(request.param.__name__)


@pytest.mark.usefixtures("impatient")
def test_a_directory_is_held_until_the_end_and_nothing_is_left(way: str, tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    for directory in (a, b):
        directory.mkdir()
    (tmp_path / "link").symlink_to("b")
    for error in (None, KeyboardInterrupt):
        try:
            with hold_locks([a, b, tmp_path / "link", a]):
                assert not is_free(a)
                assert not is_free(tmp_path / "link")
                assert is_free(tmp_path)
                assert os.listdir(a) == ([] if way == "use_directories" else [LOCK_NAME])
                if error is not None:
                    raise error
        except KeyboardInterrupt:
            pass
        assert is_free(a, b)
        assert (os.listdir(a), os.listdir(b)) == ([], [])


@pytest.mark.usefixtures("impatient")
def test_if_one_is_held_none_is(way: str, tmp_path: Path) -> None:
    directories = [tmp_path / name for name in "abc"]
    for directory in directories:
        directory.mkdir()
    with hold_locks(directories[1:2]):
        with pytest.raises(WriteError) as caught, hold_locks(directories):
            pass
        assert caught.value.path == str(directories[1])
        assert "wait" in str(caught.value.hint)
        assert is_free(directories[0], directories[2])
    assert is_free(*directories)


def test_another_process_is_waited_for(tmp_path: Path) -> None:
    with another_process(tmp_path) as process:
        timer = threading.Timer(0.2, process.kill)
        timer.start()
        with hold_locks([tmp_path]):
            assert timer.finished.is_set()
        timer.join()


@pytest.mark.usefixtures("impatient")
def test_another_process_that_takes_too_long_is_not_waited_for_and_may_be_killed(
    tmp_path: Path,
) -> None:
    with another_process(tmp_path) as process:
        assert not is_free(tmp_path)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert is_free(tmp_path)
    assert os.listdir(tmp_path) == []


@pytest.mark.usefixtures("impatient")
def test_a_lock_file_that_is_removed_while_a_run_waits_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was opened has no name any more: to hold it would keep nobody out."""
    import fcntl

    use_files(monkeypatch)
    real, paths = fcntl.flock, [tmp_path / LOCK_NAME]

    def late(descriptor: int, how: int) -> None:
        if not os.path.isdir(f"/proc/self/fd/{descriptor}") and paths:
            paths.pop().unlink()  # by the run that has held it until now
        real(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with hold_locks([tmp_path]):
        assert not is_free(tmp_path)
    assert not paths


@pytest.mark.usefixtures("impatient")
def test_the_lock_file_is_no_leftover_while_it_is_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_files(monkeypatch)
    with hold_locks([tmp_path]):
        remove_temp_files(tmp_path)
        assert not is_free(tmp_path)
    assert os.listdir(tmp_path) == []


@pytest.mark.usefixtures("impatient")
def test_what_a_killed_run_left_is_no_lock_and_goes(way: str, tmp_path: Path) -> None:
    (tmp_path / LOCK_NAME).touch()
    assert is_free(tmp_path)
    assert os.listdir(tmp_path) == []


def make_weights(path: Path) -> None:
    path.write_bytes(b"weights")


def make_link(path: Path) -> None:
    path.with_name("weights").write_bytes(b"weights")
    path.symlink_to("weights")


def make_link_to_nothing(path: Path) -> None:
    path.symlink_to("nothing")


@pytest.mark.parametrize(
    "make", [make_weights, make_link, make_link_to_nothing, os.mkdir, os.mkfifo]
)
def test_what_has_the_name_of_a_lock_stays_as_it_is(
    make: Callable[[Path], None], way: str, tmp_path: Path
) -> None:
    path = tmp_path / LOCK_NAME
    make(path)
    before = {entry.name: entry.stat(follow_symlinks=False) for entry in os.scandir(tmp_path)}
    with suppress(WriteError), hold_locks([tmp_path]):
        pass
    after = {entry.name: entry.stat(follow_symlinks=False) for entry in os.scandir(tmp_path)}
    assert after.keys() == before.keys()
    for name, status in before.items():
        assert os.path.samestat(after[name], status)
        assert after[name].st_size == status.st_size


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL])
def test_a_file_system_without_locks_does_not_stop_the_work(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_flock(number, False, monkeypatch)
    with hold_locks([tmp_path]):
        pass
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS])
def test_a_lock_that_cannot_be_tried_is_an_error(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_flock(number, False, monkeypatch)
    with pytest.raises(WriteError, match=os.strerror(number)), hold_locks([tmp_path]):
        pass


def test_a_directory_that_is_missing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(WriteError) as caught, hold_locks([tmp_path, tmp_path / "none"]):
        pass
    assert caught.value.path == str(tmp_path / "none")
    assert is_free(tmp_path)


@pytest.mark.usefixtures("few_descriptors", "impatient")
def test_more_directories_are_held_than_files_may_be_open(tmp_path: Path) -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < soft + 100:
        pytest.skip("this user may not open more files")
    directories = [tmp_path / str(number) for number in range(soft + 1)]
    for directory in directories:
        directory.mkdir()
    before = set(os.listdir("/dev/fd"))
    with hold_locks(directories):
        assert not is_free(directories[-1])
    assert set(os.listdir("/dev/fd")) == before
