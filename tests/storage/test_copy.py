"""Bytes are copied by the kernel or by hand, and no fault of either goes unnoticed."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from onnxkvrename.storage import copy as copying
from onnxkvrename.storage.copy import SourceError, copy_range, count_free_bytes, has_same_bytes
from onnxkvrename.storage.read import open_file

CONTENT = bytes(range(251)) * 1024
SIZE = 200_000

Copy = Callable[..., bytes]

needs_splice = pytest.mark.skipif(not hasattr(os, "splice"), reason="no splice on this system")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.write_bytes(CONTENT)
    return path


@pytest.fixture
def copy(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Copy]:
    """Copies a part of the source behind ``head``, and gives what the target then holds."""
    monkeypatch.setattr(copying, "_PIPE_SIZE", 1 << 16)
    reader = os.open(source, os.O_RDONLY)
    before = set(os.listdir("/dev/fd"))

    def call(offset: int = 5, size: int = SIZE, head: bytes = b"") -> bytes:
        writer = os.open(tmp_path / "target", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        try:
            os.write(writer, head)
            assert sum(copy_range(reader, writer, offset, size)) == size
        finally:
            os.close(writer)
        return (tmp_path / "target").read_bytes()

    yield call
    assert set(os.listdir("/dev/fd")) == before
    os.close(reader)


def refuse(number: int) -> Callable[..., Any]:
    def call(*args: object, **how: object) -> None:
        raise OSError(number, os.strerror(number))

    return call


def copy_by_hand(patch: pytest.MonkeyPatch) -> None:
    patch.delattr(os, "splice", raising=False)


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize(
    ("offset", "head"), [(0, b""), (4096, b"h" * 4096), (7, b""), (0, b"head"), (4097, b"h")]
)
@pytest.mark.parametrize("size", [0, 1, SIZE])
def test_a_part_is_appended_wherever_it_stands(
    size: int, offset: int, head: bytes, by_hand: bool, copy: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by_hand:
        copy_by_hand(monkeypatch)
    assert copy(offset, size, head) == head + CONTENT[offset : offset + size]


@pytest.mark.parametrize("by_hand", [False, True])
def test_each_step_is_told(
    by_hand: bool, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "_STEP_SIZE" if hasattr(os, "splice") else "_PIPE_SIZE", 30_000)
    if by_hand:
        copy_by_hand(monkeypatch)
        monkeypatch.setattr(copying, "_PIPE_SIZE", 30_000)
    with source.open("rb") as reader, (tmp_path / "target").open("wb") as writer:
        steps = list(copy_range(reader.fileno(), writer.fileno(), 10, 100_000))
    assert steps == [30_000, 30_000, 30_000, 10_000]


# How splice(2) may behave. Each call is one into the pipe or one out of it.


def break_splice(
    behave: Callable[[int, bool], int | None], monkeypatch: pytest.MonkeyPatch
) -> Iterator[int]:
    """Ask for the greatest size of each call by its number and direction."""
    real, calls = os.splice, count()

    def call(source: int, target: int, size: int, **how: int) -> int:
        most = behave(next(calls), "offset_src" in how)
        return real(source, target, size if most is None else min(size, most), **how) if most else 0

    monkeypatch.setattr(os, "splice", call)
    return calls


def fail(number: int) -> int:
    raise OSError(number, os.strerror(number))


@needs_splice
@pytest.mark.parametrize(
    "behave",
    [
        lambda nth, is_in: 1000,
        lambda nth, is_in: 1 << 20 if is_in else 999,
        lambda nth, is_in: 0,
        lambda nth, is_in: 1 << 20 if is_in else 0,
        lambda nth, is_in: 1000 if nth < 5 else 0,
    ],
    ids=["short", "short out", "nothing", "nothing out", "nothing later"],
)
def test_whatever_splice_moves_the_copy_is_whole(
    behave: Callable[[int, bool], int], copy: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = break_splice(behave, monkeypatch)
    assert copy() == CONTENT[5 : 5 + SIZE]
    assert next(calls)


@needs_splice
@pytest.mark.parametrize("nth", range(8))
@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM])
def test_splice_may_be_refused_at_any_call(
    number: int, nth: int, copy: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has been moved by then is not moved again, and what is in the pipe is not lost."""
    break_splice(lambda n, is_in: fail(number) if n == nth else 9_000, monkeypatch)
    assert copy(5, SIZE, b"head") == b"head" + CONTENT[5 : 5 + SIZE]


@needs_splice
@pytest.mark.parametrize("nth", range(6))
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EFBIG])
def test_a_disk_that_fails_is_no_reason_to_copy_by_hand(
    number: int, nth: int, copy: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_splice(lambda n, is_in: fail(number) if n >= nth else 9_000, monkeypatch)
    monkeypatch.setattr(copying, "_read_and_write", refuse(errno.EBADF))
    with pytest.raises(OSError, match=os.strerror(number)):
        copy()


@needs_splice
def test_a_pipe_may_be_small(copy: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    monkeypatch.setattr(fcntl, "fcntl", refuse(errno.EPERM))
    assert copy() == CONTENT[5 : 5 + SIZE]


# By hand.


def test_a_write_that_takes_little_is_continued(
    copy: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.write
    copy_by_hand(monkeypatch)
    monkeypatch.setattr(os, "write", lambda target, data: real(target, data[:1000]))
    assert copy() == CONTENT[5 : 5 + SIZE]


def test_a_write_that_takes_nothing_is_an_error_and_no_endless_loop(
    copy: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_by_hand(monkeypatch)
    monkeypatch.setattr(os, "write", lambda target, data: 0)
    with pytest.raises(OSError, match="nothing was written"):
        copy()


@pytest.mark.parametrize(("call", "is_source"), [("pread", True), ("write", False)])
def test_by_hand_it_is_known_which_file_has_failed(
    call: str, is_source: bool, copy: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy_by_hand(monkeypatch)
    monkeypatch.setattr(copying, "write_all", lambda descriptor, data: os.write(descriptor, data))
    with monkeypatch.context() as patch:
        real = getattr(os, call)
        patch.setattr(os, call, lambda *args: refuse(errno.EIO)() if args[1] else real(*args))
        with pytest.raises(OSError, match="Input/output error") as caught:
            copy()
    assert isinstance(caught.value, SourceError) is is_source


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("left", [0, 5, 5000])
def test_a_source_that_becomes_shorter_is_refused(
    left: int, by_hand: bool, source: Path, copy: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by_hand:
        copy_by_hand(monkeypatch)
    os.truncate(source, left)
    with pytest.raises(SourceError, match="became shorter"):
        copy()


# What is compared, and how much fits.


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        (b"", b"", True),
        (b"abc", b"abc", True),
        (b"abc", b"abd", False),
        (b"abc", b"ab", False),
        (b"a" * (1 << 20) + b"b", b"a" * (1 << 20) + b"b", True),
        (b"a" * (1 << 20) + b"b", b"a" * (1 << 20) + b"c", False),
        (b"b" + b"a" * (1 << 20), b"c" + b"a" * (1 << 20), False),
    ],
)
def test_files_are_the_same_if_all_bytes_are(
    first: bytes, second: bytes, same: bool, tmp_path: Path
) -> None:
    for name, content in (("first", first), ("second", second)):
        (tmp_path / name).write_bytes(content)
    with open_file(tmp_path / "first") as one, open_file(tmp_path / "second") as other:
        assert has_same_bytes(one, other) is same


def test_the_space_that_is_left_is_known_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (count_free_bytes(tmp_path) or 0) > 0
    for number in (errno.ENOSYS, errno.EOPNOTSUPP):
        monkeypatch.setattr(os, "statvfs", refuse(number), raising=False)
        assert count_free_bytes(tmp_path) is None
    monkeypatch.setattr(os, "statvfs", refuse(errno.EIO), raising=False)
    with pytest.raises(OSError, match="Input/output error"):
        count_free_bytes(tmp_path)
