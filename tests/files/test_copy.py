"""Bytes are copied by the kernel or by hand, and no fault of either goes unnoticed."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest
from files.conftest import refuse

from onnxkvrename.files import copy as copying
from onnxkvrename.files.copy import SourceError, copy_range, has_same_bytes, write_all_bytes
from onnxkvrename.files.read import open_file

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
    """Copies a part of the source after ``head``, and returns what the target then holds."""
    monkeypatch.setattr(copying, "_PIPE_SIZE", 1 << 16)
    before = set(os.listdir("/dev/fd"))

    def call(offset: int = 5, size: int = SIZE, head: bytes = b"") -> bytes:
        reader = os.open(source, os.O_RDONLY)
        writer = os.open(tmp_path / "target", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        try:
            os.write(writer, head)
            assert sum(copy_range(reader, writer, offset, size)) == size
            os.write(writer, b"tail")
        finally:
            os.close(writer)
            os.close(reader)
        copied = (tmp_path / "target").read_bytes()
        assert copied.endswith(b"tail")
        return copied[:-4]

    yield call
    assert set(os.listdir("/dev/fd")) == before


@pytest.fixture(params=["by the kernel", "by hand"])
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "by hand":
        monkeypatch.delattr(os, "splice", raising=False)
    elif not hasattr(os, "splice"):
        pytest.skip("no splice on this system")


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize(
    ("offset", "head"), [(0, b""), (4096, b"h" * 4096), (7, b""), (0, b"head"), (4097, b"h")]
)
@pytest.mark.parametrize("size", [0, 1, SIZE])
def test_a_part_is_appended_wherever_it_is(size: int, offset: int, head: bytes, copy: Copy) -> None:
    assert copy(offset, size, head) == head + CONTENT[offset : offset + size]


MEGABYTE = 1 << 20


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("head", [b"", b"head"])
@pytest.mark.parametrize("parts", [(0,), (8,), (0, 8, 15), ()], ids=str)
def test_holes_stay_holes(parts: tuple[int, ...], head: bytes, source: Path, copy: Copy) -> None:
    """The file has 16 MB, of which some have a few bytes of data."""
    source.write_bytes(b"")
    os.truncate(source, 16 * MEGABYTE)
    with source.open("r+b") as file:
        for part in parts:
            file.seek(part * MEGABYTE)
            file.write(b"data")
    if source.stat().st_blocks * 512 > 4 * MEGABYTE:
        pytest.skip("this file system has no holes")
    assert copy(3, 16 * MEGABYTE - 3, head) == head + source.read_bytes()[3:]
    assert source.with_name("target").stat().st_blocks * 512 < 4 * MEGABYTE


# How splice(2) may behave. Each call is one into the pipe or one out of it.


def break_splice(behave: Callable[[int, bool], int], patch: pytest.MonkeyPatch) -> Iterator[int]:
    """Ask for the greatest size of each call by its number and direction."""
    real, calls = os.splice, count()

    def call(source: int, target: int, size: int, **how: int) -> int:
        most = behave(next(calls), "offset_src" in how)
        return real(source, target, min(size, most), **how) if most else 0

    patch.setattr(os, "splice", call)
    return calls


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
@pytest.mark.parametrize("nth", range(6))
@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM])
def test_splice_may_be_refused_at_any_call(
    number: int, nth: int, copy: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has been moved by then is not moved again, and what is in the pipe is not lost."""
    break_splice(lambda n, is_in: refuse(number)() if n == nth else 9_000, monkeypatch)
    assert copy(5, SIZE, b"head") == b"head" + CONTENT[5 : 5 + SIZE]


@needs_splice
@pytest.mark.parametrize("nth", [0, 1, 4])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_fails_is_no_reason_to_copy_by_hand(
    number: int, nth: int, copy: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_splice(lambda n, is_in: refuse(number)() if n >= nth else 9_000, monkeypatch)
    monkeypatch.setattr(copying, "_read_and_write", refuse(errno.EBADF))
    with pytest.raises(OSError, match=os.strerror(number)):
        copy()


@pytest.mark.parametrize("size", [1000, 0])
def test_a_write_that_takes_little_is_continued_and_one_that_takes_nothing_an_error(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:size]) if size else 0)
    with (tmp_path / "target").open("wb") as file:
        if size:
            write_all_bytes(file.fileno(), CONTENT)
        else:
            with pytest.raises(OSError, match="nothing was written"):
                write_all_bytes(file.fileno(), CONTENT)
    assert (tmp_path / "target").read_bytes() == (CONTENT if size else b"")


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("left", [0, 5, 5000])
def test_a_source_that_becomes_shorter_is_refused(left: int, source: Path, copy: Copy) -> None:
    os.truncate(source, left)
    with pytest.raises(SourceError, match="became shorter"):
        copy()


BIG = b"a" * (1 << 20)


@pytest.mark.parametrize("first", [b"", b"abc", b"a" * MEGABYTE + b"b", b"b" + b"a" * MEGABYTE])
@pytest.mark.parametrize("second", [b"", b"ab", b"abd", b"a" * MEGABYTE + b"b"])
def test_files_are_the_same_if_all_bytes_are(first: bytes, second: bytes, tmp_path: Path) -> None:
    for name, content in (("first", first), ("second", second)):
        (tmp_path / name).write_bytes(content)
    with open_file(tmp_path / "first") as one, open_file(tmp_path / "second") as other:
        assert has_same_bytes(one, other) is (first == second)
