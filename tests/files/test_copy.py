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
MEGABYTE = 1 << 20
Copy = Callable[..., bytes]


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

    def call(offset: int = 5, size: int = SIZE, head: bytes = b"head") -> bytes:
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
@pytest.mark.parametrize("size", [0, 1, SIZE])
@pytest.mark.parametrize(("offset", "head"), [(0, b""), (4096, b"h" * 4096), (4097, b"h")])
def test_part_is_appended_wherever_it_is(size: int, offset: int, head: bytes, copy: Copy) -> None:
    assert copy(offset, size, head) == head + CONTENT[offset : offset + size]


@pytest.mark.usefixtures("either")
@pytest.mark.parametrize("parts", [(0, 8, 15), (8,), ()], ids=str)
def test_holes_stay_holes(parts: tuple[int, ...], source: Path, copy: Copy) -> None:
    """The file has 16 MB, of which some have a few bytes of data."""
    source.write_bytes(b"")
    os.truncate(source, 16 * MEGABYTE)
    with source.open("r+b") as file:
        for part in parts:
            file.seek(part * MEGABYTE)
            file.write(b"data")
    if source.stat().st_blocks * 512 > 4 * MEGABYTE:
        pytest.skip("this file system has no holes")
    assert copy(3, 16 * MEGABYTE - 3) == b"head" + source.read_bytes()[3:]
    assert source.with_name("target").stat().st_blocks * 512 < 4 * MEGABYTE


def refuse_at(nth: int, number: int) -> Callable[[int, bool], int]:
    return lambda n, is_in: refuse(number)() if n == nth else 9_000


@pytest.mark.skipif(not hasattr(os, "splice"), reason="no splice on this system")
@pytest.mark.parametrize(
    ("behave", "error"),
    [
        (lambda nth, is_in: 1000, None),
        (lambda nth, is_in: MEGABYTE if is_in else 999, None),
        (lambda nth, is_in: 0, None),
        (lambda nth, is_in: MEGABYTE if is_in else 0, None),
        (lambda nth, is_in: 1000 if nth < 5 else 0, None),
        *((refuse_at(nth, errno.EINVAL), None) for nth in range(6)),
        *((refuse_at(0, no), None) for no in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM)),
        *((refuse_at(0, no), no) for no in (errno.ENOSPC, errno.EIO)),
    ],
)
def test_copy_is_whole_whatever_splice_moves(
    behave: Callable[[int, bool], int],
    error: int | None,
    copy: Copy,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The greatest size of each call depends on its number and direction. Where splice is refused,
    the rest is copied by hand; a disk that fails is an error."""
    real, calls = os.splice, count()

    def call(source: int, target: int, size: int, **how: int) -> int:
        most = behave(next(calls), "offset_src" in how)
        return real(source, target, min(size, most), **how) if most else 0

    monkeypatch.setattr(os, "splice", call)
    if error is None:
        assert copy() == b"head" + CONTENT[5 : 5 + SIZE]
        return
    monkeypatch.setattr(copying, "_read_and_write", refuse(errno.EBADF))
    with pytest.raises(OSError, match=os.strerror(error)):
        copy()


@pytest.mark.parametrize("size", [1000, 0])
def test_short_write_is_continued_and_empty_one_is_an_error(
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
@pytest.mark.parametrize("left", [0, 5000])
def test_source_that_becomes_shorter_is_refused(left: int, source: Path, copy: Copy) -> None:
    os.truncate(source, left)
    with pytest.raises(SourceError, match="became shorter"):
        copy()


@pytest.mark.parametrize("first", [b"", b"abc", b"a" * MEGABYTE + b"b"])
@pytest.mark.parametrize("second", [b"", b"ab", b"abd", b"a" * MEGABYTE + b"b"])
def test_files_are_the_same_if_all_bytes_are(first: bytes, second: bytes, tmp_path: Path) -> None:
    for name, content in (("first", first), ("second", second)):
        (tmp_path / name).write_bytes(content)
    with open_file(tmp_path / "first") as one, open_file(tmp_path / "second") as other:
        assert has_same_bytes(one, other) is (first == second)
