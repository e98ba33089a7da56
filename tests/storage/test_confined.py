"""Nothing is read or written outside a directory, wherever links in it lead."""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Callable, Iterator
from itertools import combinations, count
from pathlib import Path
from typing import Any

import pytest
from hub_cache import REVISION, store_in_cache

from onnxkvrename import ModelError, WriteError
from onnxkvrename.storage import confined
from onnxkvrename.storage.confined import Folder, check_no_link, open_parent
from onnxkvrename.storage.directories import find_missing_directories, make_directories
from onnxkvrename.storage.read import OutsideError
from onnxkvrename.storage.temp_file import TempFile

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


def has_proc(patch: pytest.MonkeyPatch) -> None:
    """Let the system tell where what was opened lies."""


def has_no_proc(patch: pytest.MonkeyPatch) -> None:
    """Go by the path alone, as where there is no /proc."""
    real = os.readlink

    def readlink(path: Any, **how: Any) -> str:
        if str(path).startswith("/proc"):
            raise FileNotFoundError(2, "No such file or directory")
        return real(path, **how)

    patch.setattr(os, "readlink", readlink)


WAYS = [has_proc, has_no_proc]


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    request.param(monkeypatch)


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
def test_links_that_stay_in_the_directory_are_followed(
    way: None, location: str, expected: str, here: Path
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
def test_nothing_outside_is_opened(way: None, location: str, here: Path) -> None:
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
def test_what_is_no_file_is_refused_with_the_reason(
    way: None, location: str, message: str, here: Path
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


def test_the_files_of_a_snapshot_are_read(way: None, snapshot: Path, tmp_path: Path) -> None:
    (tmp_path / "short").symlink_to(snapshot)
    (snapshot / "alias").symlink_to("weights")
    for directory in (snapshot, tmp_path / "short"):  # however the snapshot itself is reached
        assert read(directory, "weights") == read(directory, "alias") == "weights"
        assert read(directory, "onnx/weights") == read(directory / "onnx", "weights")


def test_a_blob_that_was_not_downloaded_is_missing(snapshot: Path) -> None:
    (snapshot / "x").symlink_to(f"../../blobs/{HASH}")
    with pytest.raises(ModelError, match="no such file"):
        read(snapshot, "x")


def lay_blob(snapshot: Path, name: str = HASH, directory: str = "blobs") -> None:
    path = snapshot.parents[1] / directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("blob")


def link_secret(snapshot: Path) -> None:
    (snapshot / "x").symlink_to("../../../../secret")


def link_other_repository(snapshot: Path) -> None:
    lay_blob(snapshot, directory="../models--you--b/blobs")
    (snapshot / "x").symlink_to(f"../../../models--you--b/blobs/{HASH}")


def link_other_snapshot(snapshot: Path) -> None:
    lay_blob(snapshot, "x", "snapshots/other")
    (snapshot / "x").symlink_to("../other/x")


def link_no_hash(snapshot: Path) -> None:
    lay_blob(snapshot, "id_rsa")
    (snapshot / "x").symlink_to("../../blobs/id_rsa")


def link_long_hash(snapshot: Path) -> None:
    lay_blob(snapshot, HASH + "a")
    (snapshot / "x").symlink_to(f"../../blobs/{HASH}a")


def link_below_blobs(snapshot: Path) -> None:
    lay_blob(snapshot, directory="blobs/blobs")
    (snapshot / "x").symlink_to(f"../../blobs/blobs/{HASH}")


def link_blob_as_link(snapshot: Path) -> None:
    (snapshot.parents[1] / "blobs" / HASH).symlink_to(snapshot.parents[3] / "secret")
    (snapshot / "x").symlink_to(f"../../blobs/{HASH}")


def link_blobs_as_link(snapshot: Path) -> None:
    blobs, elsewhere = snapshot.parents[1] / "blobs", snapshot.parents[3] / "elsewhere"
    blobs.rename(elsewhere)
    (elsewhere / HASH).write_text("secret")
    blobs.symlink_to(elsewhere)
    (snapshot / "x").symlink_to(f"../../blobs/{HASH}")


def link_a_directory(snapshot: Path) -> None:
    lay_blob(snapshot, "x", f"blobs/{HASH}")
    (snapshot / "x").symlink_to(f"../../blobs/{HASH}/x")


@pytest.mark.parametrize(
    "prepare",
    [
        *(link_secret, link_other_repository, link_other_snapshot, link_no_hash, link_long_hash),
        *(link_below_blobs, link_blob_as_link, link_blobs_as_link, link_a_directory),
    ],
)
def test_no_other_link_leads_out_of_a_snapshot(
    prepare: Callable[[Path], None], snapshot: Path
) -> None:
    prepare(snapshot)
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
    lay_blob(snapshot)
    (inner / "x").symlink_to(f"../../../../../blobs/{HASH}")
    with pytest.raises(OutsideError):
        read(inner, "x")


# What is written.


def walks(patch: pytest.MonkeyPatch) -> None:
    if not confined._CAN_WALK:
        pytest.skip("this system opens no files relative to a descriptor")


def goes_by_path(patch: pytest.MonkeyPatch) -> None:
    """Write by path and check that before, as on Windows."""
    patch.setattr(confined, "_CAN_WALK", False)


@pytest.fixture(params=[walks, goes_by_path])
def writing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    request.param(monkeypatch)
    before = set(os.listdir("/dev/fd"))
    yield
    assert set(os.listdir("/dev/fd")) == before


@pytest.mark.parametrize("path", ["new", "sub/new", "sub/deep/new", "to_file"])
@pytest.mark.parametrize("root", ["here", "other_name"])
def test_a_result_is_written_below_the_root_however_that_is_reached(
    writing: None, root: str, path: str, here: Path
) -> None:
    target = here.parent / root / path
    check_no_link(target, here.parent / root)
    with TempFile(target, root=here.parent / root) as temp_file:
        temp_file.write(b"new")
        temp_file.finish(replace=True).move_into_place(keeps_name=False)
    assert (here / path).read_bytes() == b"new"
    assert (here / "w.bin").read_text() == "here/w.bin"


@pytest.mark.parametrize("path", ["to_sub/new", "to_outside_directory/new", "to_sub/deep/new"])
def test_no_result_is_written_through_a_link(writing: None, path: str, here: Path) -> None:
    target = here / path
    with pytest.raises(WriteError, match="symbolic link") as caught:
        TempFile(target, root=here)
    assert caught.value.path == str(here / path.partition("/")[0])
    with pytest.raises(WriteError, match="symbolic link"):
        check_no_link(target, here)
    with pytest.raises(WriteError, match="symbolic link"):
        make_directories(here / path / "x", here, here)
    assert {entry.name for entry in (here / "sub").iterdir()} == {
        *("deep", "w.bin", "up", "round", "far")
    }
    assert os.listdir(here.parent / "secret") == ["w.bin"]


def test_a_link_that_appears_before_the_result_is_placed_is_not_followed(
    writing: None, here: Path
) -> None:
    secret = here.parent / "secret"
    with TempFile(here / "sub" / "new", root=here) as temp_file:
        ready_file = temp_file.finish(replace=True)
    os.rename(ready_file.temp_path, secret / ready_file.temp_path.name)
    os.rename(here / "sub", here / "aside")
    (here / "sub").symlink_to("../secret")
    with pytest.raises(WriteError, match="symbolic link"):
        ready_file.move_into_place(keeps_name=False)
    assert not (secret / "new").exists()


def test_without_a_root_links_may_lead_anywhere(here: Path) -> None:
    with open_parent(here / "to_outside_directory" / "x", None) as place:
        assert place == (here / "to_outside_directory" / "x", None)


@pytest.mark.parametrize("path", ["none/new", "w.bin/new"])
def test_a_directory_that_is_missing_is_an_error(path: str, here: Path) -> None:
    with pytest.raises(WriteError, match="create its directory"):
        TempFile(here / path, root=here)


# Directories that are made for results.


def make(target: Path, source: Path, root: Path | None) -> list[str]:
    made = find_missing_directories(target)
    make_directories(target, source, root)
    return [str(path.relative_to(target.parents[len(made)])) for path in made]


@pytest.mark.parametrize(
    ("modes", "expected"),
    [
        ((0o755, 0o755), [0o755, 0o755]),
        ((0o700, 0o777), [0o755, 0o700]),
        ((0o2750, 0o700), [0o700, 0o750]),
        ((0o500, 0o1777), [0o755, 0o700]),
    ],
)
def test_a_directory_has_no_more_rights_than_the_one_that_it_stands_for(
    modes: tuple[int, int], expected: list[int], tmp_path: Path
) -> None:
    source, root = tmp_path / "export" / "in", tmp_path / "out"
    source.mkdir(parents=True)
    root.mkdir()
    for directory, mode in zip((source, source.parent), modes, strict=True):
        directory.chmod(mode)
    assert make(root / "a" / "b" / "m.onnx", source, root) == ["a", "a/b"]
    found = [stat.S_IMODE((root / path).stat().st_mode) for path in ("a", "a/b")]
    assert found == expected
    assert make(root / "a" / "b" / "m.onnx", source, root) == []


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root gives away")
@pytest.mark.parametrize(
    ("mode", "expected"), [(0o777, 0o755), (0o770, 0o700), (0o775, 0o755), (0o755, 0o755)]
)
def test_the_rights_of_a_group_do_not_pass_to_another_group(
    mode: int, expected: int, tmp_path: Path
) -> None:
    source = tmp_path / "export"
    source.mkdir()
    source.chmod(mode)
    os.chown(source, -1, 2345)
    make(tmp_path / "out" / "m.onnx", source, None)
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == expected


def acl(*entries: tuple[int, int, int]) -> bytes:
    """An access control list of tags, permissions and ids, as the kernel takes it."""
    return struct.pack("<I", 2) + b"".join(
        struct.pack("<HHI", tag, bits, number or 0xFFFFFFFF) for tag, bits, number in entries
    )


def test_the_default_list_of_a_directory_opens_no_directory_that_was_closed(
    tmp_path: Path,
) -> None:
    """Here user 1234 may do all, and the bits of the group are the most that a list may give."""
    entries = acl((1, 7, 0), (2, 7, 1234), (4, 7, 0), (0x10, 7, 0), (0x20, 5, 0))
    (tmp_path / "export").mkdir(mode=0o770)
    (tmp_path / "export").chmod(0o770)
    try:
        os.setxattr(tmp_path, "system.posix_acl_default", entries)
    except OSError:
        pytest.skip("this file system has no default lists")
    make(tmp_path / "out" / "m.onnx", tmp_path / "export", None)
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o700


def test_what_stands_for_a_directory_with_a_list_is_for_its_owner_alone(tmp_path: Path) -> None:
    (tmp_path / "export").mkdir()
    entries = acl((1, 7, 0), (2, 0, 1234), (4, 7, 0), (0x10, 7, 0), (0x20, 5, 0))
    try:
        os.setxattr(tmp_path / "export", "system.posix_acl_access", entries)
    except OSError:
        pytest.skip("this file system has no lists")
    make(tmp_path / "out" / "m.onnx", tmp_path / "export", None)
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o700
