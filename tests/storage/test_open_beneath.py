"""Below a directory, files are opened by the rules of the program, not by those of the system."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from onnxkvrename import ModelError
from onnxkvrename.storage import open_beneath
from onnxkvrename.storage.open_beneath import open_directory
from onnxkvrename.storage.read import OutsideError, open_file

LINKS = {
    "to_file": "w.bin",
    "to_sub": "sub",
    "to_link": "to_file",
    "sub/up": "../w.bin",
    "sub/round": "../sub/deep/../w.bin",
    "out_and_in": "../here/w.bin",
    "absolute": "{here}/w.bin",
    "absolute_sub": "{here}/sub",
    "alias": "{root}/other_name/w.bin",
    "dots": "./sub/.//w.bin",
    "to_outside": "../secret/w.bin",
    "to_outside_directory": "../secret",
    "absolute_outside": "{root}/secret/w.bin",
    "sub/far": "../../secret/w.bin",
    "to_here_and_out": "{here}/to_outside_directory",
    "circle": "circle",
    "back": "forth",
    "forth": "back",
    "nowhere": "nothing",
}


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A directory with files and links, some of which lead out of it."""
    (tmp_path / "here" / "sub" / "deep").mkdir(parents=True)
    (tmp_path / "secret").mkdir()
    (tmp_path / "other_name").symlink_to("here")
    for path in ("here/w.bin", "here/sub/w.bin", "secret/w.bin"):
        (tmp_path / path).write_text(path)
    for link, text in LINKS.items():
        path = tmp_path / "here" / link
        path.symlink_to(text.format(here=tmp_path / "here", root=tmp_path))
    for number in range(50):
        (tmp_path / "here" / f"chain{number}").symlink_to(f"chain{number + 1}")
    (tmp_path / "here" / "chain50").symlink_to("w.bin")
    return tmp_path / "here"


def walks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Open part by part, as on Linux and macOS."""
    if not open_beneath._CAN_WALK:
        pytest.skip("this system opens no files relative to a descriptor")


def goes_by_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Open by path and check that afterwards, as on Windows."""
    monkeypatch.setattr(open_beneath, "_CAN_WALK", False)


@pytest.fixture(params=[walks, goes_by_path])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    request.param(monkeypatch)


def read_beneath(here: Path, location: str) -> tuple[str, Path]:
    with open_directory(here) as directory, directory.open_file(location) as file:
        return file.read(0, 100).decode(), file.path


@pytest.mark.parametrize(
    ("location", "expected"),
    [
        ("w.bin", "w.bin"),
        ("./w.bin", "w.bin"),
        ("sub//w.bin", "sub/w.bin"),
        ("to_file", "w.bin"),
        ("to_sub/w.bin", "sub/w.bin"),
        ("to_link", "w.bin"),
        ("sub/up", "w.bin"),
        ("to_sub/up", "w.bin"),
        ("sub/round", "sub/w.bin"),
        ("out_and_in", "w.bin"),
        ("absolute", "w.bin"),
        ("absolute_sub/w.bin", "sub/w.bin"),
        ("alias", "w.bin"),
        ("dots", "sub/w.bin"),
    ],
)
def test_links_that_stay_in_the_directory_are_followed(
    way: None, location: str, expected: str, here: Path
) -> None:
    assert read_beneath(here, location) == (f"here/{expected}", here / expected)
    assert read_beneath(here.parent / "other_name", location)[1] == here / expected


@pytest.mark.parametrize(
    "location",
    [
        *("to_outside", "to_outside_directory/w.bin", "absolute_outside", "sub/far"),
        *("to_here_and_out/w.bin", "../secret/w.bin", "sub/../../secret/w.bin", "..", "../w.bin"),
    ],
)
def test_nothing_outside_is_opened(way: None, location: str, here: Path) -> None:
    with pytest.raises(OutsideError, match="leads out"):
        read_beneath(here, location)


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("nothing", "no such file"),
        ("nowhere", "no such file"),
        ("nothing/w.bin", "no such file"),
        ("w.bin/x", "Not a directory"),
        ("to_file/x", "Not a directory"),
        (".", "is a directory"),
        ("", "is a directory"),
        ("sub", "is a directory"),
        ("to_sub", "is a directory"),
        ("sub/..", "is a directory"),
        ("circle", "Too many levels"),
        ("back/w.bin", "Too many levels"),
        ("chain0", "Too many levels"),
        ("n" * 300, "name too long"),
        ("n\0", "cannot be read"),
    ],
)
def test_what_is_no_file_is_refused_with_the_reason(
    way: None, location: str, message: str, here: Path
) -> None:
    with pytest.raises(ModelError, match=message):
        read_beneath(here, location)


def test_as_many_links_as_the_system_follows_are_followed(here: Path) -> None:
    assert read_beneath(here, "chain11") == ("here/w.bin", here / "w.bin")


@pytest.mark.parametrize("location", ["sub/../" * 10 + "w.bin", "x/" * 300 + "w.bin"])
def test_the_number_of_steps_is_bounded(
    location: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    walks(monkeypatch)
    (here / "x").symlink_to(".")
    monkeypatch.setattr(open_beneath, "_MAX_STEPS", 9)
    calls: list[object] = []
    real = os.open
    monkeypatch.setattr(os, "open", lambda *args, **how: calls.append(args) or real(*args, **how))
    with pytest.raises(ModelError, match="9 parts"):
        read_beneath(here, location)
    assert len(calls) <= 10


def test_a_pipe_is_not_waited_for(way: None, here: Path) -> None:
    os.mkfifo(here / "pipe")
    with pytest.raises(ModelError, match="not a regular"):
        read_beneath(here, "pipe")


def test_a_directory_that_may_be_searched_need_not_be_listed(here: Path) -> None:
    here.chmod(0o311)
    assert read_beneath(here, "w.bin")[0] == "here/w.bin"


def test_a_directory_that_is_not_there_is_named(way: None, here: Path) -> None:
    with pytest.raises(ModelError) as caught:
        read_beneath(here / "none", "w.bin")
    assert str(here / "none") in str(caught.value.path)
    assert caught.value.message == "no such file"


@pytest.mark.parametrize("location", ["w.bin", "to_sub/w.bin", "sub/up", "sub/round", "circle"])
def test_no_descriptor_is_left(way: None, location: str, here: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    for _ in range(3):
        try:
            read_beneath(here, location)
        except ModelError:
            assert location == "circle"
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_file_is_known_by_its_name_in_the_directory(way: None, here: Path) -> None:
    with open_file(here / "w.bin") as file, open_directory(here) as directory:
        assert directory.has_file("w.bin", file)
        assert directory.has_file("to_file", file)
        assert not directory.has_file("sub", file)
        with pytest.raises(ModelError, match="no such file"):
            directory.has_file("nothing", file)


# Whoever changes the directory between two calls of the system.

CALLS = ("open", "readlink", "stat", "lstat", "fstat", "dup")


def to_secret(path: Path, root: Path) -> Callable[[], None]:
    """Return what exchanges a path with a link to the same outside, and back."""
    secret = root / "secret"
    prepared = root / "prepared"
    prepared.symlink_to(secret if path.is_dir() else secret / "w.bin")

    def swap() -> None:
        os.rename(path, root / "aside")
        os.rename(prepared, path)
        os.rename(root / "aside", prepared)

    return swap


def moved_away(path: Path, root: Path) -> Callable[[], None]:
    """Return what moves a directory outside and back, so that its `..` is another one."""

    def swap() -> None:
        here, there = (path, root / "secret" / "sub")
        if path.exists():
            os.rename(here, there)
        else:
            os.rename(there, here)

    return swap


@pytest.fixture
def swapped(monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Calls something while a swap is made before some of its calls of the system."""
    real = {name: getattr(os, name) for name in CALLS}

    def run(work: Callable[[], object], swap: Callable[[], None], numbers: set[int]) -> int:
        counter = 0

        def wrap(name: str) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                nonlocal counter
                if counter in numbers:
                    numbers.discard(counter)
                    with monkeypatch.context() as inner:
                        for other in CALLS:
                            inner.setattr(os, other, real[other])
                        swap()
                counter += 1
                return real[name](*args, **kwargs)

            return call

        with monkeypatch.context() as patch:
            for name in CALLS:
                patch.setattr(os, name, wrap(name))
            work()
        return counter

    return run


SWAPS = [
    ("w.bin", "w.bin", to_secret),
    ("sub/w.bin", "sub", to_secret),
    ("sub/w.bin", "sub/w.bin", to_secret),
    ("to_sub/w.bin", "sub", to_secret),
    ("to_link", "to_file", to_secret),
    ("sub/up", "sub", moved_away),
    ("sub/round", "sub", moved_away),
    ("sub/round", "sub/deep", to_secret),
    ("absolute_sub/w.bin", "sub", to_secret),
    ("out_and_in", "w.bin", to_secret),
]


@pytest.mark.parametrize(("location", "target", "kind"), SWAPS)
def test_a_swap_between_any_two_calls_opens_nothing_outside(
    location: str, target: str, kind: Any, here: Path, swapped: Callable[..., int]
) -> None:
    """Before each call, and between each two calls there and back."""
    if not open_beneath._CAN_WALK:
        pytest.skip("this system opens no files relative to a descriptor")
    swap = kind(here / target, here.parent)
    is_swapped = False
    read: list[str] = []

    def toggle() -> None:
        nonlocal is_swapped
        swap()
        is_swapped = not is_swapped

    def work() -> None:
        try:
            read.append(read_beneath(here, location)[0])
        except ModelError:
            read.append("refused")

    calls = swapped(work, toggle, set())
    assert calls > 2
    for first in range(calls):
        for second in (None, *range(first + 1, calls)):
            swapped(work, toggle, {first} if second is None else {first, second})
            if is_swapped:
                toggle()
    assert set(read) <= {"here/w.bin", "here/sub/w.bin", "refused"}
    assert read[0].startswith("here/")
    assert "refused" in read


def test_a_control_that_follows_links_is_caught(here: Path, swapped: Callable[..., int]) -> None:
    """What resolves a path, judges it and opens it afterwards reads the secret."""
    swap = to_secret(here / "w.bin", here.parent)
    read: list[bytes] = []

    def work() -> None:
        path = os.path.realpath(here / "w.bin")
        if path.startswith(f"{here}/"):
            descriptor = os.open(path, os.O_RDONLY)
            read.append(os.read(descriptor, 100))
            os.close(descriptor)

    calls = swapped(work, swap, set())
    for number in range(calls):
        swapped(work, swap, {number})
        if (here / "w.bin").is_symlink():
            swap()
    assert b"secret/w.bin" in read


@pytest.mark.parametrize("call", ["open", "readlink", "fstat", "stat"])
def test_an_error_of_the_disk_is_no_answer(
    call: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    walks(monkeypatch)
    real = getattr(os, call)
    with open_directory(here) as directory, open_file(here / "w.bin") as file:

        def fail(*args: object, **kwargs: object) -> object:
            if call in ("readlink", "stat") and "dir_fd" not in kwargs:
                return real(*args, **kwargs)
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        def work() -> None:
            if call == "stat":
                directory.has_file("w.bin", file)
            with directory.open_file("to_file"):
                pass

        with monkeypatch.context() as patch:
            patch.setattr(os, call, fail)
            with pytest.raises(ModelError, match="Input/output error"):
                work()
