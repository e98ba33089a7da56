from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from onnxkvrename.storage import copy as copying
from onnxkvrename.storage.copy import (
    SourceError,
    copy_range,
    find_data,
    has_same_bytes,
    measure_data,
)
from onnxkvrename.storage.read import open_file

CONTENT = bytes(range(251)) * 1024
PAGE = 4096
WAYS = [name for name in ("splice", "copy_file_range", "sendfile") if hasattr(os, name)]

Copy = Callable[..., bytes]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.write_bytes(CONTENT)
    return path


@pytest.fixture
def copy(source: Path, tmp_path: Path) -> Iterator[Copy]:
    """Copies a part of the source behind ``head``, and gives what the target then holds."""
    reader = os.open(source, os.O_RDONLY)

    def call(offset: int, size: int, head: bytes = b"", told: list[int] | None = None) -> bytes:
        writer = os.open(tmp_path / "target", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        try:
            os.write(writer, head)
            for step in copy_range(reader, writer, offset, size):
                if told is not None:
                    told.append(step)
        finally:
            os.close(writer)
        return (tmp_path / "target").read_bytes()

    yield call
    os.close(reader)


@pytest.mark.parametrize(
    ("offset", "head"), [(0, b""), (PAGE, b"h" * PAGE), (7, b""), (0, b"head"), (PAGE + 1, b"h")]
)
def test_a_part_is_appended_wherever_it_stands(offset: int, head: bytes, copy: Copy) -> None:
    assert copy(offset, 200_000, head) == head + CONTENT[offset : offset + 200_000]
    assert copy(offset, 1, head) == head + CONTENT[offset : offset + 1]
    assert copy(offset, 0, head) == head


def test_each_step_is_told(copy: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "_MAX_STEP_SIZE", 30_000)
    told: list[int] = []
    copy(10, 100_000, b"head", told)
    assert told == [30_000, 30_000, 30_000, 10_000]


@pytest.mark.skipif("splice" not in WAYS, reason="no splice on this system")
def test_pages_that_fit_are_left_to_the_file_system(
    copy: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, spliced = os.splice, []

    def watched(*args: Any, **kwargs: Any) -> int:
        spliced.append(args)
        return real(*args, **kwargs)

    monkeypatch.setattr(os, "splice", watched)
    copy(PAGE, 100_000, b"h" * PAGE)
    assert not spliced
    copy(PAGE, 100_000, b"h")
    assert spliced


# The ways to copy, each standing in for the one before.


def shortly(name: str) -> Callable[..., int]:
    """The real call, for at most 1000 bytes at a time."""
    real = getattr(os, name)

    def call(one: int, other: int, third: int, fourth: int) -> int:
        sizes = (
            (min(third, 1000), fourth) if name == "copy_file_range" else (third, min(fourth, 1000))
        )
        return int(real(one, other, *sizes))

    return call


def refusing(number: int) -> Callable[..., int]:
    def call(*args: object, **kwargs: object) -> int:
        raise OSError(number, os.strerror(number))

    return call


def copying_nothing(*args: object, **kwargs: object) -> int:
    return 0


@pytest.mark.parametrize("first", ["short", "refused", "nothing", "gone"])
@pytest.mark.parametrize("second", ["short", "refused", "nothing", "gone"])
def test_every_way_to_copy_gives_the_same_bytes(
    first: str, second: str, copy: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, how in (("splice", first), ("copy_file_range", first), ("sendfile", second)):
        if name not in WAYS or (name, how) == ("splice", "short"):
            continue
        if how == "gone":
            monkeypatch.delattr(os, name)
        else:
            ways = {"refused": refusing(errno.EINVAL), "nothing": copying_nothing}
            monkeypatch.setattr(os, name, ways.get(how) or shortly(name))
    assert copy(3, 200_000, b"head") == b"head" + CONTENT[3:200_003]


def by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in WAYS:
        monkeypatch.delattr(os, name)


def test_a_write_that_takes_nothing_at_all_is_an_error_and_no_endless_loop(
    copy: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_hand(monkeypatch)
    monkeypatch.setattr(os, "write", lambda target, data: 0)
    with pytest.raises(OSError, match="nothing was written"):
        copy(0, 100)


@pytest.mark.skipif("splice" not in WAYS, reason="no splice on this system")
def test_a_pipe_that_passes_nothing_on_is_given_up(
    copy: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.splice

    def stuck(source: int, target: int, size: int, **kwargs: int) -> int:
        return real(source, target, size, **kwargs) if "offset_src" in kwargs else 0

    monkeypatch.setattr(os, "splice", stuck)
    assert copy(5, 200_000) == CONTENT[5:200_005]


def test_a_source_that_cannot_be_read_is_told_from_a_target_that_cannot_be_written(
    copy: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_hand(monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", refusing(errno.EIO))
        with pytest.raises(SourceError, match="Input/output error"):
            copy(0, 100)
    real = os.write
    monkeypatch.setattr(
        os, "write", lambda fd, data: real(fd, data) if not data else refusing(errno.EIO)()
    )
    with pytest.raises(OSError, match="Input/output error") as caught:
        copy(0, 100)
    assert not isinstance(caught.value, SourceError)


def test_a_write_that_takes_little_is_continued(
    copy: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.write
    by_hand(monkeypatch)
    monkeypatch.setattr(os, "write", lambda target, data: real(target, data[:1000]))
    assert copy(0, 200_000) == CONTENT[:200_000]


@pytest.mark.parametrize(
    "number", [errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF, errno.EPERM]
)
def test_a_way_to_copy_may_be_refused_in_the_middle(
    number: int, copy: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[int] = []

    def then_refused(source: int, target: int, size: int, offset: int) -> int:
        if copied:
            raise OSError(number, os.strerror(number))
        copied.append(os.write(target, os.pread(source, 1000, offset)))
        return copied[0]

    monkeypatch.setattr(os, "copy_file_range", then_refused, raising=False)
    assert copy(0, 200_000) == CONTENT[:200_000]
    assert copied == [1000]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EFBIG])
def test_a_disk_that_fails_is_no_reason_to_try_another_way(
    number: int, copy: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "copy_file_range", refusing(number), raising=False)
    with pytest.raises(OSError, match=os.strerror(number)):
        copy(0, 200_000)


@pytest.mark.skipif("splice" not in WAYS, reason="no splice on this system")
@pytest.mark.parametrize("passed", [0, 1, 3])
def test_a_pipe_that_bursts_loses_nothing(
    passed: int, copy: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After some short moves the pipe is refused, and what was in it is copied otherwise."""
    real, calls = os.splice, count()

    def bursting(source: int, target: int, size: int, **kwargs: int) -> int:
        if "offset_src" in kwargs:
            return real(source, target, size, **kwargs)
        if next(calls) >= passed:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(source, target, min(size, 1000))

    monkeypatch.setattr(os, "splice", bursting)
    assert copy(5, 200_000) == CONTENT[5:200_005]
    assert next(calls) > passed


@pytest.mark.parametrize("offset", [0, 1])
def test_a_source_that_becomes_shorter_is_refused(
    offset: int, source: Path, copy: Copy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "_MAX_STEP_SIZE", 1000)
    os.truncate(source, 5000)
    with pytest.raises(OSError, match="became shorter"):
        copy(offset, 200_000)
    by_hand(monkeypatch)
    with pytest.raises(OSError, match="became shorter"):
        copy(offset, 200_000)


# Holes stay holes.

BLOCK = 1 << 16
needs_holes = pytest.mark.skipif(not hasattr(os, "SEEK_DATA"), reason="no holes on this system")


def with_holes(path: Path, pattern: str) -> Path:
    """A file with data for each ``x`` and a hole for each ``_``, and a few bytes more."""
    with path.open("wb") as file:
        for number, kind in enumerate(pattern):
            if kind == "x":
                file.seek(number * BLOCK)
                file.write(bytes([number + 1]) * BLOCK)
        file.truncate(len(pattern) * BLOCK + 7)
    if path.stat().st_blocks * 512 > pattern.count("x") * BLOCK + BLOCK:
        pytest.skip("this file system keeps no holes")
    return path


def copy_file(source: Path, target: Path, offset: int, size: int, head: bytes = b"") -> list[int]:
    reader, writer = os.open(source, os.O_RDONLY), os.open(target, os.O_RDWR | os.O_CREAT)
    try:
        os.write(writer, head)
        return list(copy_range(reader, writer, offset, size))
    finally:
        os.close(reader)
        os.close(writer)


@needs_holes
@pytest.mark.parametrize("pattern", ["x_x", "_x", "x_", "_", "__x__x__", "x", "x___"])
@pytest.mark.parametrize(("offset", "head"), [(0, b""), (0, b"head"), (1000, b"")])
def test_a_copy_has_the_same_bytes_and_the_same_holes(
    pattern: str, offset: int, head: bytes, tmp_path: Path
) -> None:
    source, target = with_holes(tmp_path / "source", pattern), tmp_path / "target"
    size = source.stat().st_size - offset
    steps = copy_file(source, target, offset, size, head)
    assert target.read_bytes() == head + source.read_bytes()[offset:]
    assert sum(steps) == size
    edges = 2 * PAGE * (pattern.count("_") + 1)
    assert target.stat().st_blocks * 512 <= source.stat().st_blocks * 512 + edges


@needs_holes
def test_a_part_that_ends_in_a_hole_has_its_full_size(tmp_path: Path) -> None:
    source, target = with_holes(tmp_path / "source", "x_x"), tmp_path / "target"
    copy_file(source, target, 10, BLOCK + 500)
    assert target.read_bytes() == source.read_bytes()[10 : BLOCK + 510]


@needs_holes
@pytest.mark.parametrize("call", ["refused", "backwards", "unknown"])
def test_a_file_system_that_does_not_tell_its_holes_has_none(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target, real = with_holes(tmp_path / "source", "x_x"), tmp_path / "target", os.lseek
    answers = {"refused": refusing(errno.EINVAL), "backwards": lambda *args: 0}

    def seek(descriptor: int, position: int, how: int) -> int:
        is_question = how in (os.SEEK_DATA, os.SEEK_HOLE)
        return answers[call]() if is_question else real(descriptor, position, how)

    if call == "unknown":
        monkeypatch.delattr(os, "SEEK_DATA")
    else:
        monkeypatch.setattr(os, "lseek", seek)
    size = source.stat().st_size
    assert sum(copy_file(source, target, 0, size)) == size
    assert target.read_bytes() == source.read_bytes()


@needs_holes
def test_a_disk_that_fails_to_tell_its_holes_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, real = with_holes(tmp_path / "source", "x_x"), os.lseek
    monkeypatch.setattr(
        os, "lseek", lambda *args: refusing(errno.EIO)() if args[2] == os.SEEK_DATA else real(*args)
    )
    with pytest.raises(OSError, match="Input/output error"):
        copy_file(source, tmp_path / "target", 0, BLOCK)


@needs_holes
@pytest.mark.parametrize("pattern", ["x_x", "x__", "___"])
def test_a_file_with_holes_that_becomes_shorter_does_not_end_in_a_hole(
    pattern: str, tmp_path: Path
) -> None:
    source = with_holes(tmp_path / "source", pattern)
    with pytest.raises(SourceError, match="became shorter"):
        copy_file(source, tmp_path / "target", 0, source.stat().st_size + 1)


def compare(first: Path, second: Path) -> bool:
    with open_file(first) as one, open_file(second) as other:
        return has_same_bytes(one, other)


@needs_holes
@pytest.mark.parametrize("first", ["x_x", "_xx", "xx_", "___"])
@pytest.mark.parametrize("second", ["x_x", "_xx", "xx_", "___", "x_", "x_x_"])
def test_files_with_holes_are_the_same_if_their_bytes_are(
    first: str, second: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "_COMPARED_SIZE", 5000)
    one, other = with_holes(tmp_path / "one", first), with_holes(tmp_path / "other", second)
    assert compare(one, other) is (first == second)


@needs_holes
@pytest.mark.parametrize("place", [0, BLOCK, 2 * BLOCK - 1, 3 * BLOCK + 6])
def test_one_byte_makes_a_difference_within_a_hole_of_the_other(place: int, tmp_path: Path) -> None:
    one, other = with_holes(tmp_path / "one", "x__"), with_holes(tmp_path / "other", "x__")
    with other.open("r+b") as file:
        file.seek(place)
        file.write(b"y")
    assert not compare(one, other)
    assert not compare(other, one)


@needs_holes
def test_written_zeros_are_the_same_as_a_hole(tmp_path: Path) -> None:
    hole = with_holes(tmp_path / "hole", "x_x")
    (tmp_path / "zeros").write_bytes(hole.read_bytes())
    assert compare(hole, tmp_path / "zeros")


@needs_holes
def test_holes_of_both_files_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [with_holes(tmp_path / name, "x_x") for name in ("one", "other")]
    for path in paths:
        os.truncate(path, 1 << 40)
    real, count_read = os.pread, list[int]()

    def pread(descriptor: int, size: int, offset: int) -> bytes:
        count_read.append(size)
        return real(descriptor, size, offset)

    monkeypatch.setattr(os, "pread", pread)
    assert compare(*paths)
    assert sum(count_read) <= 2 * (3 * BLOCK + PAGE)


@needs_holes
def test_only_data_need_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = with_holes(tmp_path / "source", "x_x__x")
    with source.open("rb") as file:
        size = source.stat().st_size
        assert list(find_data(file.fileno(), 0, size))[:2] == [
            (0, BLOCK),
            (2 * BLOCK, 3 * BLOCK),
        ]
        assert 3 * BLOCK <= measure_data(file.fileno(), size) <= 3 * BLOCK + PAGE
        monkeypatch.setattr(copying, "_MAX_COUNTED_PARTS", 1)
        assert measure_data(file.fileno(), size) == size - BLOCK  # never less than it needs
