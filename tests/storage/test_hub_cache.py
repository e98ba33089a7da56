"""Links of a Hugging Face cache are followed into its blobs, and nowhere else."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hub_cache import REVISION, store_in_cache

from onnxkvrename.errors import ModelError
from onnxkvrename.storage import open_beneath
from onnxkvrename.storage.open_beneath import open_directory
from onnxkvrename.storage.read import OutsideError

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


@pytest.fixture(params=["by descriptor", "by path"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "by path":
        monkeypatch.setattr(open_beneath, "_CAN_WALK", False)
    elif not open_beneath._CAN_WALK:
        pytest.skip("this system opens no files relative to a descriptor")


def read(directory: Path, location: str) -> str:
    with open_directory(directory) as opened, opened.open_file(location) as file:
        return file.read(0, 100).decode()


def test_the_files_of_a_snapshot_are_read(way: None, snapshot: Path, tmp_path: Path) -> None:
    assert read(snapshot, "weights") == "weights"
    assert read(snapshot, "onnx/weights") == "more weights"
    assert read(snapshot / "onnx", "weights") == "more weights"
    (tmp_path / "short").symlink_to(snapshot)  # however the snapshot itself is reached
    assert read(tmp_path / "short", "weights") == "weights"
    (snapshot / "alias").symlink_to("weights")
    assert read(snapshot, "alias") == "weights"
    with open_directory(snapshot) as opened, opened.open_file("weights") as file:
        assert file.path == Path(os.path.realpath(snapshot / "weights"))


def test_a_blob_that_was_not_downloaded_is_missing(way: None, snapshot: Path) -> None:
    (snapshot / "gone").symlink_to(f"../../blobs/{HASH}")
    with pytest.raises(ModelError, match="no such file") as caught:
        read(snapshot, "gone")
    assert not isinstance(caught.value, OutsideError)


def lay_blob(snapshot: Path, name: str = HASH, directory: str = "blobs") -> None:
    path = snapshot.parents[1] / directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("blob")


def link_secret(snapshot: Path) -> None:
    (snapshot / "x").symlink_to("../../../../secret")


def link_other_repository(snapshot: Path) -> None:
    lay_blob(snapshot, directory="../models--you--b/blobs")
    (snapshot / "x").symlink_to(f"../../../models--you--b/blobs/{HASH}")


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


def link_through_another_snapshot(snapshot: Path) -> None:
    lay_blob(snapshot)
    (snapshot / "x").symlink_to(f"../{REVISION}/../../blobs/{HASH}")


def link_with_a_longer_way(snapshot: Path) -> None:
    lay_blob(snapshot)
    (snapshot / "x").symlink_to(f"../../snapshots/../blobs/{HASH}")


def link_a_directory(snapshot: Path) -> None:
    (snapshot.parents[1] / "blobs" / HASH).mkdir()
    (snapshot.parents[1] / "blobs" / HASH / "x").write_text("blob")
    (snapshot / "d").symlink_to(f"../../blobs/{HASH}")


@pytest.mark.parametrize(
    "prepare",
    [
        *(link_secret, link_other_repository, link_no_hash, link_long_hash, link_below_blobs),
        *(link_blob_as_link, link_blobs_as_link),
    ],
)
def test_no_other_link_leads_out(
    prepare: Callable[[Path], None], way: None, snapshot: Path
) -> None:
    prepare(snapshot)
    with pytest.raises(OutsideError):
        read(snapshot, "x")


@pytest.mark.parametrize("prepare", [link_through_another_snapshot, link_with_a_longer_way])
def test_only_the_exact_text_of_the_link_counts(
    prepare: Callable[[Path], None], snapshot: Path
) -> None:
    prepare(snapshot)
    with pytest.raises(OutsideError):
        read(snapshot, "x")


def test_a_directory_in_blobs_is_not_entered(way: None, snapshot: Path) -> None:
    link_a_directory(snapshot)
    with pytest.raises(ModelError):
        read(snapshot, "d/x")
    with pytest.raises(ModelError):
        read(snapshot, "d")


@pytest.mark.parametrize(
    "place", ["models--me/x", "models--me/snapshots", "snapshots/rev", "models/snapshots/rev"]
)
def test_elsewhere_such_a_link_leads_out(place: str, way: None, tmp_path: Path) -> None:
    directory = tmp_path / place
    directory.mkdir(parents=True)
    blobs = directory.parent.parent / "blobs"
    blobs.mkdir()
    (blobs / HASH).write_text("secret")
    (directory / "x").symlink_to(f"../../blobs/{HASH}")
    with pytest.raises(OutsideError):
        read(directory, "x")


def test_a_repository_within_a_snapshot_has_its_own_blobs(way: None, snapshot: Path) -> None:
    """The directories of a repository may have any name: the innermost counts."""
    inner = snapshot / "models--in" / "snapshots" / "r"
    inner.mkdir(parents=True)
    lay_blob(snapshot)
    (inner / "x").symlink_to(f"../../../../../blobs/{HASH}")
    (inner / "y").symlink_to(f"../../blobs/{HASH}")
    with pytest.raises(OutsideError):
        read(inner, "x")
    with pytest.raises(ModelError):  # its own blobs are not there
        read(inner, "y")


def needs_walk() -> None:
    if not open_beneath._CAN_WALK:
        pytest.skip("this system opens no files relative to a descriptor")


@pytest.mark.parametrize("moment", ["repository", "blobs", "snapshots"])
def test_what_is_swapped_for_a_link_meanwhile_is_not_followed(
    moment: str, snapshot: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right before a directory is opened, it becomes a link to one with the same names."""
    needs_walk()
    repository = snapshot.parents[1]
    name = os.readlink(snapshot / "weights").rpartition("/")[2]
    evil = snapshot.parents[3] / "evil"
    (evil / "blobs").mkdir(parents=True)
    (evil / "snapshots" / REVISION).mkdir(parents=True)
    (evil / "blobs" / name).write_text("secret")
    victim = {
        "repository": repository,
        "blobs": repository / "blobs",
        "snapshots": repository / "snapshots",
    }[moment]
    source = evil if moment == "repository" else evil / moment
    real_open, swapped = os.open, []

    def swap_and_open(path, flags, *args, **kwargs):
        if not swapped and Path(path).name == victim.name and flags & os.O_NOFOLLOW:
            swapped.append(path)
            victim.rename(victim.with_name("moved"))
            victim.symlink_to(source)
        return real_open(path, flags, *args, **kwargs)

    with open_directory(snapshot) as opened:
        monkeypatch.setattr(os, "open", swap_and_open)
        with pytest.raises(OutsideError), opened.open_file("weights"):
            pass
    assert swapped


def test_a_snapshot_that_is_another_one_by_now_is_not_trusted(snapshot: Path) -> None:
    """The directory that was opened must be where its repository says that it is."""
    needs_walk()
    with open_directory(snapshot) as opened:
        snapshot.rename(snapshot.with_name("moved"))
        snapshot.mkdir()
        with pytest.raises(OutsideError), opened.open_file("weights"):
            pass


def test_no_descriptor_is_left(way: None, snapshot: Path) -> None:
    link_blob_as_link(snapshot)
    before = set(os.listdir("/proc/self/fd"))
    for _ in range(3):
        read(snapshot, "weights")
        with pytest.raises(OutsideError):
            read(snapshot, "x")
    assert set(os.listdir("/proc/self/fd")) == before
