"""Results stay where the user sent them, whatever links lie there, and gain nobody a right."""

from __future__ import annotations

import itertools
import os
import shutil
import stat
import struct
from pathlib import Path

import models
import onnx
import pytest
import qefficient_exports
from models import saved

needs_links = pytest.mark.skipif(os.name == "nt", reason="links and modes of POSIX")
pytestmark = needs_links


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Models in a tree, a directory for results in which a link leads out, and its target."""
    (tmp_path / "in" / "sub").mkdir(parents=True)
    for name in ("k.onnx", "sub/m.onnx"):
        saved(models.decoder(), tmp_path / "in" / name)
    (tmp_path / "out").mkdir()
    (tmp_path / "outside").mkdir()
    (tmp_path / "out" / "sub").symlink_to("../outside")
    return tmp_path


def move_data(model: Path, location: str) -> None:
    """Give the data of a model another place below its directory."""
    proto = onnx.load(model, load_external_data=False)
    for tensor in proto.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = location
    model.write_bytes(proto.SerializeToString())
    target = model.parent / location
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.move(model.parent / "decoder.onnx.data", target)


@pytest.mark.parametrize("how", [(), ("--force",)])
def test_no_model_leaves_the_directory_through_a_link_in_it(
    how: tuple[str, ...], tree: Path, run
) -> None:
    outcome = run(tree / "in", "--prefix", "VLLM", "-d", tree / "out", *how)
    assert outcome.code == 2
    error = outcome.err.splitlines()[0]
    assert f"{tree}/out/sub: is a symbolic link, through which the result would leave" in error
    assert os.listdir(tree / "outside") == []
    assert os.listdir(tree / "out") == ["sub"]


def test_no_data_leave_the_directory_through_a_link_in_it(external: Path, tree: Path, run) -> None:
    move_data(external, "sub/weights")
    for place in (("-d", tree / "out"), ("-o", tree / "out" / "m.onnx")):
        outcome = run(external, "--prefix", "VLLM", *place)
        assert (outcome.code, "is a symbolic link" in outcome.err) == (2, True)
    assert os.listdir(tree / "outside") == []
    assert os.listdir(tree / "out") == ["sub"]


def test_a_dry_run_says_so_too(tree: Path, run) -> None:
    outcome = run(tree / "in", "--prefix", "VLLM", "-d", tree / "out", "--dry-run")
    assert (outcome.code, "is a symbolic link" in outcome.err) == (2, True)


def test_the_directory_itself_may_be_a_link(tree: Path, run) -> None:
    """The user has named it."""
    (tree / "alias").symlink_to("outside")
    assert run(tree / "in", "--prefix", "VLLM", "-d", tree / "alias").code == 0
    assert sorted(os.listdir(tree / "outside")) == ["k.onnx", "sub"]


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize("how", [(), ("--force",)])
def test_a_link_that_no_check_has_seen_is_not_followed(
    how: tuple[str, ...], nth: int, tree: Path, run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link appears when the nth file is flushed: before the directory is opened, or after."""
    place, real, calls = tree / "out" / "sub", os.fsync, itertools.count(1)
    place.unlink()
    place.mkdir()

    def swap(descriptor: int) -> None:
        real(descriptor)
        if next(calls) == nth:
            for path in place.iterdir():
                shutil.copy(path, tree / "outside")
            place.rename(tree / "out" / "moved")
            place.symlink_to("../outside")

    monkeypatch.setattr(os, "fsync", swap)
    outcome = run(tree / "in", "--prefix", "VLLM", "-d", tree / "out", *how)
    assert outcome.code == 2
    assert "m.onnx" not in os.listdir(tree / "outside")


def test_no_export_is_seeded_through_a_link_in_the_cache(tmp_path: Path, run) -> None:
    plain = qefficient_exports.write_export(tmp_path / "cache")
    twin = qefficient_exports.write_export(tmp_path / "twins", token="VLLM")
    outside = tmp_path / "outside"
    outside.mkdir()
    params = "hashed_export_params.json"
    shutil.copy(twin / params, outside)
    (plain.parent / twin.name).symlink_to("../outside")
    outcome = run(plain, "--prefix", "VLLM", "--seed-cache")
    assert (outcome.code, "is a symbolic link" in outcome.err) == (2, True)
    assert os.listdir(outside) == [params]


@pytest.mark.parametrize("mode", [0o700, 0o750, 0o755, 0o555, 0o777])
def test_a_new_directory_has_no_more_rights_than_the_one_that_it_stands_for(
    mode: int, tree: Path, run
) -> None:
    (tree / "in" / "sub").chmod(mode)
    (tree / "in").chmod(0o755)
    assert run(tree / "in", "--prefix", "VLLM", "-d", tree / "new" / "er").code == 0
    (tree / "in" / "sub").chmod(0o755)
    default = tree / "default"
    default.mkdir()
    new = stat.S_IMODE(default.stat().st_mode)
    modes = [stat.S_IMODE((tree / "new" / name).stat().st_mode) for name in ("", "er", "er/sub")]
    assert modes == [new, 0o755 & new, mode & new | 0o700]


def test_a_seeded_export_stays_private(tmp_path: Path, run) -> None:
    plain = qefficient_exports.write_export(tmp_path / "cache")
    plain.chmod(0o700)
    assert run(plain, "--prefix", "VLLM", "--seed-cache").code == 0
    modes = {stat.S_IMODE(path.stat().st_mode) for path in plain.parent.iterdir()}
    assert (len(os.listdir(plain.parent)), modes) == (2, {0o700})


def test_a_directory_in_the_place_of_one_with_an_access_list_is_its_owners_only(
    tmp_path: Path, run
) -> None:
    """The list may keep out whom the permission bits let in, and is not copied."""
    plain = qefficient_exports.write_export(tmp_path / "cache")
    plain.chmod(0o755)
    entries = ((1, 7, -1), (2, 0, 4321), (4, 5, -1), (16, 5, -1), (32, 5, -1))  # one is kept out
    text = struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *entry) for entry in entries)
    try:
        os.setxattr(plain, "system.posix_acl_access", text)
    except (AttributeError, OSError) as error:
        pytest.skip(f"this system sets no access control lists: {error}")
    assert run(plain, "--prefix", "VLLM", "--seed-cache").code == 0
    (seeded,) = set(plain.parent.iterdir()) - {plain}
    assert stat.S_IMODE(seeded.stat().st_mode) == 0o700


@pytest.mark.parametrize("location", [".bashrc", ".git/hooks/post-checkout", "sub/.data"])
@pytest.mark.parametrize("how", [(), ("--force",)])
def test_data_are_never_written_under_a_hidden_name(
    location: str, how: tuple[str, ...], external: Path, tmp_path: Path, run
) -> None:
    move_data(external, location)
    home = tmp_path / "home"
    (home / location).parent.mkdir(parents=True)
    (home / location).write_text("mine")
    outcome = run(external, "--prefix", "VLLM", "-o", home / "m.onnx", *how)
    assert (outcome.code, "has a hidden name" in outcome.err) == (1, True)
    assert (home / location).read_text() == "mine"
    assert not (home / "m.onnx").exists()
    assert run(external, "--prefix", "VLLM").code == 0  # nothing is copied


def test_copied_data_are_no_program(external: Path, tmp_path: Path, run) -> None:
    data = external.with_name("decoder.onnx.data")
    data.chmod(0o755)
    assert run(external, "--prefix", "VLLM", "-d", tmp_path / "out").code == 0
    assert stat.S_IMODE((tmp_path / "out" / data.name).stat().st_mode) == 0o644
