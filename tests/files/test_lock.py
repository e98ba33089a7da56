"""One run at a time writes in one directory."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from files.conftest import refuse

from onnxkvrename import WriteError
from onnxkvrename.files import lock
from onnxkvrename.files.lock import open_locks

fcntl = pytest.importorskip("fcntl")


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "_MAX_WAIT", 0)


@pytest.fixture
def directories(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / name for name in "cab"]
    for path in paths:
        path.mkdir()
    (tmp_path / "link").symlink_to("b")
    return paths


def is_free(*directories: Path) -> bool:
    """Return whether directories can be locked now."""
    try:
        with open_locks(directories):
            return True
    except WriteError as error:
        if "is being processed by another run" not in error.message:
            raise
        return False


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_directories_are_held_until_the_end_and_nothing_is_left(
    error: type[BaseException] | None, directories: Sequence[Path], tmp_path: Path
) -> None:
    c, a, b = directories
    try:
        with open_locks([b]) as locks:
            assert is_free(a)
            locks.hold([a, tmp_path / "link", b, a])
            assert sorted(locks.directories) == [a, b]
            assert not is_free(a)
            assert not is_free(tmp_path / "link")
            assert is_free(tmp_path, c)
            if error is not None:
                raise error
    except KeyboardInterrupt:
        pass
    assert is_free(a, b)
    assert (os.listdir(a), os.listdir(b)) == ([], [])


def test_another_run_is_waited_for_and_all_lock_in_the_same_order(
    directories: Sequence[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that has waited in vain holds no directory."""
    c, a, b = directories
    with open_locks([b]):
        with monkeypatch.context() as patch:
            patch.setattr(lock, "_MAX_WAIT", 0)
            with pytest.raises(WriteError, match=f"{b}: is being .*wait"), open_locks(directories):
                pass
        assert is_free(a, c)
    real, opened, ended = os.open, list[str](), threading.Event()
    stack = ExitStack()
    stack.enter_context(open_locks([c]))
    timer = threading.Timer(0.2, lambda: (ended.set(), stack.close()))
    timer.start()
    monkeypatch.setattr(
        os, "open", lambda path, *how: (opened.append(str(path)), real(path, *how))[1]
    )
    with open_locks(directories):
        assert ended.is_set()
    timer.join()
    assert opened == sorted(map(str, directories))


@pytest.mark.parametrize(
    "number",
    [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EBADF, errno.EACCES, None],
)
def test_where_there_are_no_locks_a_run_goes_on_and_knows_that(
    number: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On NFS, on Windows, or where a directory takes files but cannot be opened."""
    if number is None:
        monkeypatch.setattr(lock, "fcntl", None)
    elif number == errno.EACCES:
        monkeypatch.setattr(os, "open", refuse(number))
    else:
        monkeypatch.setattr(fcntl, "flock", refuse(number))
    with open_locks([tmp_path]) as locks:
        assert locks.directories == ()


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
    with open_locks(directories) as locks:
        assert len(locks.directories) == len(directories)
        assert not is_free(directories[-1])
    assert set(os.listdir("/dev/fd")) == before
