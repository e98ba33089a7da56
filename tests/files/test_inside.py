"""Nothing is read or written outside a directory, wherever links in it lead."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from itertools import combinations, count
from pathlib import Path
from typing import Any

import pytest
from hub_cache import REVISION, store_in_cache

from onnxkvrename import ModelError, WriteError
from onnxkvrename.files import inside
from onnxkvrename.files.inside import Folder, check_inside, find_cache, open_inside
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


@pytest.mark.parametrize(
    ("location", "expected"),
    [
        *(("w.bin", "w.bin"), ("./w.bin", "w.bin"), ("sub//w.bin", "sub/w.bin")),
        *(("to_file", "w.bin"), ("to_sub/w.bin", "sub/w.bin"), ("to_link", "w.bin")),
        *(("sub/up", "w.bin"), ("to_sub/up", "w.bin"), ("sub/round", "sub/w.bin")),
        *(("out_and_in", "w.bin"), ("absolute", "w.bin"), ("alias", "w.bin")),
        ("sub/../w.bin", "w.bin"),
    ],
)
@pytest.mark.usefixtures("way")
def test_links_that_stay_in_the_directory_are_followed(
    location: str, expected: str, here: Path
) -> None:
    assert read(here, location) == f"here/{expected}"
    assert read(here.parent / "other_name", location) == f"here/{expected}"


@pytest.mark.parametrize(
    "location",
    [
        *("to_outside", "to_outside_directory/w.bin", "absolute_outside", "sub/far", ".."),
        *("to_here_and_out/w.bin", "../secret/w.bin", "sub/../../secret/w.bin", "../w.bin"),
        *("../here2/w.bin", "/etc/passwd", "/"),
    ],
)
@pytest.mark.usefixtures("way")
def test_nothing_outside_is_opened(location: str, here: Path) -> None:
    (here.parent / "here2").mkdir()
    (here.parent / "here2" / "w.bin").touch()
    with pytest.raises(OutsideError, match="leads out"):
        read(here, location)


@pytest.mark.parametrize(
    ("location", "message"),
    [
        *(("nothing", "no such file"), ("nowhere", "no such file"), ("none/x", "no such file")),
        *(("w.bin/x", "Not a directory"), (".", "is a directory"), ("", "is a directory")),
        *(("to_sub", "is a directory"), ("sub/..", "is a directory"), ("pipe", "not a regular")),
        *(("circle", "Too many levels"), ("n" * 300, "name too long"), ("n\0", "cannot be read")),
    ],
)
@pytest.mark.usefixtures("way")
def test_what_is_no_file_is_refused_with_the_reason(
    location: str, message: str, here: Path
) -> None:
    os.mkfifo(here / "pipe")
    with pytest.raises(ModelError, match=message) as caught:
        read(here, location)
    assert not isinstance(caught.value, OutsideError)


def test_a_directory_that_may_be_searched_need_not_be_listed(here: Path) -> None:
    here.chmod(0o311)
    assert read(here, "w.bin") == "here/w.bin"


# Whoever changes the directory between two calls of the system.

CALLS = ("open", "readlink", "stat", "lstat", "fstat")


def run_swapping(work: Callable[[], object], swap: Callable[[], None], numbers: set[int]) -> int:
    """Call something while a swap is made before some of its calls of the system; count these."""
    real = {name: getattr(os, name) for name in CALLS}
    calls = count()

    def wrap(name: str) -> Callable[..., Any]:
        def call(*args: Any, **how: Any) -> Any:
            if next(calls) in numbers:
                with pytest.MonkeyPatch.context() as inner:
                    for other in CALLS:
                        inner.setattr(os, other, real[other])
                    swap()
            return real[name](*args, **how)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, wrap(name))
        work()
    return next(calls)


def swap_paths(path: Path, other: Path) -> None:
    os.rename(path, path.with_name("aside"))
    os.rename(other, path)
    os.rename(path.with_name("aside"), other)


@pytest.mark.parametrize(
    ("location", "victim"),
    [("w.bin", "w.bin"), ("sub/w.bin", "sub"), ("sub/w.bin", "sub/w.bin"), ("to_link", "to_file")],
)
def test_a_swap_between_any_two_calls_opens_nothing_outside(
    location: str, victim: str, here: Path
) -> None:
    """A directory or file becomes a link that leads out, and perhaps comes back."""
    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("this system does not tell what was opened")
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
        swap_paths(path, prepared)

    calls = run_swapping(work, swap, set())
    assert calls > 3
    for numbers in (*combinations(range(calls), 1), *combinations(range(calls), 2)):
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


@pytest.mark.usefixtures("way")
def test_the_files_of_a_snapshot_are_read(snapshot: Path, tmp_path: Path) -> None:
    (tmp_path / "short").symlink_to(snapshot)
    (snapshot / "alias").symlink_to("weights")
    for directory in (snapshot, tmp_path / "short"):  # however the snapshot itself is reached
        assert read(directory, "weights") == read(directory, "alias") == "weights"
        assert read(directory, "onnx/weights") == read(directory / "onnx", "weights")


OUT = [
    # the link, where something is laid, and whether that is a link to the secret
    ("../../../../secret", None, False),
    (f"../../../models--you--b/blobs/{HASH}", f"../models--you--b/blobs/{HASH}", False),
    ("../other/x", "snapshots/other/x", False),
    ("../../blobs/id_rsa", "blobs/id_rsa", False),
    (f"../../blobs/{HASH}a", f"blobs/{HASH}a", False),
    (f"../../blobs/blobs/{HASH}", f"blobs/blobs/{HASH}", False),
    (f"../../blobs/{HASH}/x", f"blobs/{HASH}/x", False),
    (f"../../blobs/{HASH}", f"blobs/{HASH}", True),
    (f"../../blobs/{HASH}", "elsewhere", False),  # the blobs themselves are behind a link
]


@pytest.mark.parametrize(("link", "laid", "is_link"), OUT)
def test_no_other_link_leads_out_of_a_snapshot(
    link: str, laid: str | None, is_link: bool, snapshot: Path
) -> None:
    blobs = snapshot.parents[1] / "blobs"
    if laid == "elsewhere":
        blobs.rename(snapshot.parents[3] / laid)
        blobs.symlink_to(snapshot.parents[3] / laid)
        (blobs / HASH).write_text("blob")
    elif laid is not None:
        path = snapshot.parents[1] / laid
        path.parent.mkdir(parents=True, exist_ok=True)
        if is_link:
            path.symlink_to(snapshot.parents[3] / "secret")
        else:
            path.write_text("blob")
    (snapshot / "x").symlink_to(link)
    assert (snapshot / "x").exists()
    with pytest.raises(OutsideError):
        read(snapshot, "x")


@pytest.mark.parametrize(
    "place", ["models--me/x", "models--me/snapshots", "snapshots/rev", "models/snapshots/rev"]
)
def test_elsewhere_such_a_link_leads_out(place: str, tmp_path: Path) -> None:
    directory = tmp_path / place
    directory.mkdir(parents=True)
    blobs = directory.parent.parent / "blobs"
    blobs.mkdir()
    (blobs / HASH).write_text("secret")
    (directory / "x").symlink_to(f"../../blobs/{HASH}")
    with pytest.raises(OutsideError):
        read(directory, "x")


def test_a_repository_within_a_snapshot_has_its_own_blobs(snapshot: Path) -> None:
    """The directories of a repository may have any name: the innermost counts."""
    inner = snapshot / "models--in" / "snapshots" / REVISION
    inner.mkdir(parents=True)
    (snapshot.parents[1] / "blobs" / HASH).write_text("blob")
    (inner / "x").symlink_to(f"../../../../../blobs/{HASH}")
    with pytest.raises(OutsideError):
        read(inner, "x")


@pytest.mark.parametrize(
    ("path", "is_cached"),
    [
        ("models--me--a/snapshots/rev/m.onnx", True),
        ("models--me--a/snapshots/rev/new/m.onnx", True),
        ("models--me--a/blobs/x", True),
        ("short/m.onnx", True),
        ("models--me--a/m.onnx", False),
        ("models--me--a/refs/main", False),
        ("snapshots/rev/m.onnx", False),
    ],
)
def test_a_place_is_in_a_cache_however_it_is_reached(
    path: str, is_cached: bool, tmp_path: Path
) -> None:
    repository = tmp_path / "models--me--a"
    (repository / "snapshots" / "rev").mkdir(parents=True)
    (tmp_path / "short").symlink_to(repository / "snapshots" / "rev")
    assert find_cache(tmp_path / path) == (repository if is_cached else None)


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
@pytest.mark.parametrize("path", ["new", "sub/new", "sub/deep/new", "to_file", "made/in/new"])
@pytest.mark.parametrize("root", ["here", "other_name"])
def test_a_result_is_written_below_the_root_however_that_is_reached(
    root: str, path: str, here: Path
) -> None:
    target = here.parent / root / path
    check_inside(here.parent / root, target)
    write(target, here.parent / root)
    assert (here / path).read_bytes() == b"new"
    assert (here / "w.bin").read_text() == "here/w.bin"


@pytest.mark.usefixtures("writing")
@pytest.mark.parametrize(
    "path", ["to_sub/new", "to_outside_directory/new", "to_sub/deep/new", "to_sub/made/new"]
)
def test_no_result_is_written_through_a_link(path: str, here: Path) -> None:
    before = list_all(here.parent)
    for call in (write, lambda target, root: check_inside(root, target)):
        with pytest.raises(WriteError, match="symbolic link") as caught:
            call(here / path, here)
        assert caught.value.path == str(here / path.partition("/")[0])
    assert list_all(here.parent) == before


def list_all(root: Path) -> list[str]:
    return sorted(str(path) for path in root.rglob("*"))


@pytest.mark.usefixtures("writing")
@pytest.mark.parametrize("target", ["sub/new", "sub/w.bin", "sub/made/new"])
def test_a_link_that_appears_before_the_result_is_placed_is_not_followed(
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
    assert {path.name for path in secret.iterdir()} - {"w.bin"} == set()
    assert (secret / "w.bin").read_text() == "secret/w.bin"


def test_without_a_root_links_may_lead_anywhere(here: Path) -> None:
    with open_inside(None, here / "to_outside_directory" / "x") as place:
        assert place == (here / "to_outside_directory" / "x", None)
