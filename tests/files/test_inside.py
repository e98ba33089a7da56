"""Nothing is read or written outside a directory, wherever links in it lead."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from files.conftest import watch_calls
from hub_cache import REVISION, store_in_cache

from onnxkvrename import ModelError, WriteError
from onnxkvrename.files import inside
from onnxkvrename.files.inside import Folder, check_inside
from onnxkvrename.files.lock import open_locks
from onnxkvrename.files.read import OutsideError
from onnxkvrename.files.staged import Output, write_all

LINKS = {
    "to_file": "w.bin",
    "to_sub": "sub",
    "to_link": "to_file",
    "sub/up": "../w.bin",
    "sub/round": "../sub/deep/../w.bin",
    "out_and_in": "../here/w.bin",
    "absolute": "{here}/w.bin",
    "alias": "{root}/other_name/w.bin",
    "to_outside": "../secret/w.bin",
    "to_outside_directory": "../secret",
    "absolute_outside": "{root}/secret/w.bin",
    "sub/far": "../../secret/w.bin",
    "to_here_and_out": "{here}/to_outside_directory",
    "circle": "circle",
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
    return tmp_path / "here"


@pytest.fixture(params=["with /proc", "without /proc"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system says where what was opened lies, or the path alone does."""
    real = os.readlink

    def readlink(path: Any, **how: Any) -> str:
        if str(path).startswith("/proc"):
            raise FileNotFoundError(2, "No such file or directory")
        return real(path, **how)

    if request.param == "without /proc":
        monkeypatch.setattr(os, "readlink", readlink)


def read(directory: Path, location: str) -> str:
    before = set(os.listdir("/dev/fd"))
    try:
        with Folder(directory).open_file(location) as file:
            assert str(file.path) == os.path.realpath(file.path)
            return file.read(0, 100).decode()
    finally:
        assert set(os.listdir("/dev/fd")) == before


OUT = "leads out"
OUTSIDE = ("to_outside", "to_outside_directory/w.bin", "absolute_outside", "sub/far", "..", "/")
OUTSIDE += ("to_here_and_out/w.bin", "../secret/w.bin", "sub/../../secret/w.bin", "../w.bin")
NO_FILE = {"nothing": "no such file", "w.bin/x": "Not a directory", "": "is a directory"}
NO_FILE |= {
    "pipe": "not a regular",
    "to_sub": "is a directory",
    "circle": "Too many levels",
    "n\0": "cannot be read",
}


@pytest.mark.parametrize(
    ("location", "expected"),
    [
        *((name, "here/w.bin") for name in ("w.bin", "./w.bin", "to_file", "to_link", "sub/up")),
        *((name, "here/w.bin") for name in ("to_sub/up", "out_and_in", "absolute", "alias")),
        *((name, "here/sub/w.bin") for name in ("sub//w.bin", "to_sub/w.bin", "sub/round")),
        *((name, OUT) for name in (*OUTSIDE, "../here2/w.bin")),
        *NO_FILE.items(),
    ],
)
@pytest.mark.usefixtures("way")
def test_only_files_in_the_directory_are_opened_whatever_links_do(
    location: str, expected: str, here: Path
) -> None:
    (here.parent / "here2").mkdir()
    (here.parent / "here2" / "w.bin").touch()
    os.mkfifo(here / "pipe")
    for directory in (here, here.parent / "other_name"):
        if expected.startswith("here/"):
            assert read(directory, location) == expected
            continue
        with pytest.raises(ModelError, match=expected) as caught:
            read(directory, location)
        assert isinstance(caught.value, OutsideError) is (expected == OUT)


# Whoever changes the directory between two calls of the system.

CALLS = ("open", "readlink", "stat", "lstat", "fstat")


def run_swapping(work: Callable[[], object], swap: Callable[[], None], numbers: set[int]) -> int:
    """Call something while a swap is made before some of its calls of the system; count these."""
    calls = 0

    def meet(nth: int, name: str, call: Callable[[], Any]) -> Any:
        nonlocal calls
        calls = nth
        if nth in numbers:
            swap()
        return call()

    with pytest.MonkeyPatch.context() as patch:
        watch_calls(patch, CALLS, meet)
        work()
    return calls


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs to know what was opened")
@pytest.mark.parametrize(
    ("location", "victim"), [("w.bin", "w.bin"), ("sub/w.bin", "sub"), ("to_link", "to_file")]
)
def test_swap_between_any_two_calls_opens_nothing_outside(
    location: str, victim: str, here: Path
) -> None:
    """A directory or file becomes a link that leads out, and perhaps comes back."""
    path, prepared = here / victim, here.parent / "prepared"
    secret = here.parent / "secret"
    prepared.symlink_to(secret if path.is_dir() else secret / "w.bin")
    read_texts = list[str]()

    def work() -> None:
        try:
            with Folder(here).open_file(location) as file:
                read_texts.append(file.read(0, 100).decode())
        except ModelError:
            read_texts.append("refused")

    def swap() -> None:
        os.rename(path, path.with_name("aside"))
        os.rename(prepared, path)
        os.rename(path.with_name("aside"), prepared)

    calls = run_swapping(work, swap, set())
    assert calls > 3
    places = range(1, calls + 1)
    for numbers in (*combinations(places, 1), *combinations(places, 2)):
        run_swapping(work, swap, set(numbers))
        if prepared.exists() and not prepared.is_symlink():
            swap()
    assert set(read_texts) <= {"here/w.bin", "here/sub/w.bin", "refused"}
    assert {read_texts[0], "refused"} <= set(read_texts)


# A Hugging Face cache.

HASH = "a" * 64


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """A snapshot with a file beside others, and one in a directory; a secret outside."""
    folder = tmp_path / "folder"
    (folder / "onnx").mkdir(parents=True)
    (folder / "weights").write_text("weights")
    (folder / "onnx" / "weights").write_text("more weights")
    (tmp_path / "secret").write_text("secret")
    return store_in_cache(tmp_path / "hub", folder)


@pytest.mark.parametrize(
    ("link", "laid", "place"),
    [
        # the link, a file that it leads to, and the directory of the link, all of the repository
        ("../../../../secret", None, ""),
        (f"../../../models--you--b/blobs/{HASH}", f"../models--you--b/blobs/{HASH}", ""),
        ("../other/x", "snapshots/other/x", ""),
        ("../../blobs/id_rsa", "blobs/id_rsa", ""),
        (f"../../blobs/{HASH}a", f"blobs/{HASH}a", ""),
        (f"../../blobs/blobs/{HASH}", f"blobs/blobs/{HASH}", ""),
        (f"../../blobs/{HASH}", "elsewhere", ""),  # the blobs themselves are behind a link
        # A repository may be in another one: the innermost counts.
        (f"../../../../../blobs/{HASH}", f"blobs/{HASH}", f"models--in/snapshots/{REVISION}"),
        # Such a link counts in a snapshot of a repository only.
        (f"../../blobs/{HASH}", f"../models/blobs/{HASH}", "../../../models/snapshots/rev"),
        (f"../../blobs/{HASH}", f"../models--me/blobs/{HASH}", "../../../models--me/x/rev"),
    ],
)
def test_no_other_link_leads_out_of_a_snapshot(
    link: str, laid: str | None, place: str, snapshot: Path
) -> None:
    repository, directory = snapshot.parents[1], snapshot / place
    directory.mkdir(parents=True, exist_ok=True)
    if laid == "elsewhere":
        (repository / "blobs").rename(snapshot.parents[3] / laid)
        (repository / "blobs").symlink_to(snapshot.parents[3] / laid)
        laid = f"blobs/{HASH}"
    if laid is not None:
        path = repository / laid
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("blob")
    (directory / "x").symlink_to(link)
    assert (directory / "x").exists()
    with pytest.raises(OutsideError):
        read(directory, "x")


# What is written.


@pytest.fixture(params=[True, False], ids=["by descriptor", "by path"])
def writing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Directories are opened one from the other, or as on Windows checked before."""
    if request.param and not inside._CAN_WALK:
        pytest.skip("this system opens no files relative to a descriptor")
    monkeypatch.setattr(inside, "_CAN_WALK", request.param)
    before = set(os.listdir("/dev/fd"))
    yield
    assert set(os.listdir("/dev/fd")) == before


def write(target: Path, root: Path | None, meanwhile: Callable[[], object] = lambda: None) -> None:
    output = Output(target, target, b"new", may_replace=True, root=root, like_directory=root)
    with open_locks() as locks:
        write_all([output], lambda output, file: (file.write(b"new"), meanwhile())[0], locks=locks)


@pytest.mark.usefixtures("writing")
@pytest.mark.parametrize("root", ["here", "other_name"])
@pytest.mark.parametrize(
    ("path", "is_inside"),
    [
        *((path, True) for path in ("new", "sub/deep/new", "to_file", "made/in/new")),
        *((path, False) for path in ("to_sub/new", "to_outside_directory/new", "to_sub/deep/new")),
        ("to_sub/made/new", False),
    ],
)
def test_results_are_written_below_the_root_and_through_no_link_in_it(
    path: str, is_inside: bool, root: str, here: Path
) -> None:
    """The root itself may be a link."""
    before, directory = sorted(here.parent.rglob("*")), here.parent / root
    if is_inside:
        check_inside(directory, directory / path)
        write(directory / path, directory)
        assert (here / path).read_bytes() == b"new"
        assert (here / "w.bin").read_text() == "here/w.bin"
        return
    for call in (write, lambda target, root: check_inside(root, target)):
        with pytest.raises(WriteError, match="symbolic link") as caught:
            call(directory / path, directory)
        assert caught.value.path == str(directory / path.partition("/")[0])
    assert sorted(here.parent.rglob("*")) == before


@pytest.mark.usefixtures("writing")
@pytest.mark.parametrize("target", ["sub/new", "sub/w.bin", "sub/made/new"])
def test_link_that_appears_before_the_result_is_placed_is_not_followed(
    target: str, here: Path
) -> None:
    """What the other has moved away stays there; nothing is written where the link leads."""
    secret = here.parent / "secret"

    def swap() -> None:
        os.rename(here / "sub", here / "aside")
        for path in (here / "aside").glob(".onnx*"):
            os.rename(path, secret / path.name)
        (here / "sub").symlink_to("../secret")

    with pytest.raises((WriteError, ModelError)):
        write(here / target, here, swap)
    assert {path.name for path in secret.iterdir()} == {"w.bin"}
    assert (secret / "w.bin").read_text() == "secret/w.bin"
