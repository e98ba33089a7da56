"""Results go where they were sent, and over no file that others share."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from files.conftest import refuse

from onnxkvrename import ModelError, ModelReport, WriteError, rename
from onnxkvrename.files import targets
from onnxkvrename.files.find import build_job
from onnxkvrename.files.targets import find_writable_directory
from onnxkvrename.files.temp_file import build_key, build_temp_name


def attempt(model: Path, output: Path | None = None, **options: bool) -> ModelReport:
    return rename(model, "VLLM", output=output, **options)


def link(path: Path) -> None:
    shutil.move(path, path.with_name("real"))
    path.symlink_to("real")


def hard_link(path: Path) -> None:
    os.link(path, path.with_name("twin"))


def protect(path: Path) -> None:
    path.chmod(0o444)


@pytest.mark.parametrize(
    ("share", "said"),
    [
        (link, "symbolic link to .*real"),
        (hard_link, "has 2 hard links"),
        (protect, "is read-only"),
    ],
)
def test_shared_file_is_changed_in_place_only_with_force(
    share: Callable[[Path], None],
    said: str,
    decoder: Path,
    renamed: bytes,
    snapshot,
    tmp_path: Path,
) -> None:
    original = decoder.read_bytes()
    share(decoder)
    before, mode = snapshot(tmp_path), decoder.stat().st_mode
    with pytest.raises(WriteError, match=said):
        attempt(decoder)
    assert snapshot(tmp_path) == before
    assert attempt(decoder, tmp_path / "elsewhere.onnx").status == "renamed"
    assert attempt(decoder, force=True).status == "renamed"
    assert (decoder.read_bytes(), decoder.stat().st_mode) == (renamed, mode)
    assert decoder.is_symlink() is (share is link)
    assert share is not hard_link or decoder.with_name("twin").read_bytes() == original
    assert attempt(decoder).status == "unchanged"  # whoever shares it


@pytest.mark.parametrize(
    ("name", "is_shared"),
    [
        (build_temp_name(build_key(), "old"), False),
        (f"{build_temp_name(build_key(), 'old')}-x", True),
    ],
    ids=["ours", "almost ours"],
)
def test_link_that_a_killed_run_has_left_does_not_count(
    name: str, is_shared: bool, decoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.link(decoder, decoder.with_name(name))
    if not is_shared:
        assert attempt(decoder, dry_run=True).status == "would-rename"
        hard_link(decoder)
        # One that a living run removes meanwhile is no fault.
        monkeypatch.setattr(targets, "list_temp_paths", lambda directory: [directory / "gone"])
    with pytest.raises(WriteError, match=r"has [23] hard links"):
        attempt(decoder, dry_run=True)


@pytest.mark.parametrize(
    "lay", [lambda path: path.write_bytes(b"other"), lambda path: path.symlink_to("nowhere")]
)
def test_other_file_at_the_output_is_replaced_only_with_force(
    lay: Callable[[Path], object],
    decoder: Path,
    renamed: bytes,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    output = decoder.with_name("output.onnx")
    lay(output)
    inode = output.lstat().st_ino
    report = attempt(decoder, output)
    assert (report.status, [found.code for found in report.findings]) == ("failed", ["KV504"])
    assert output.lstat().st_ino == inode
    assert attempt(decoder, output, force=True).status == "renamed"
    assert output.read_bytes() == renamed
    assert not output.with_name("nowhere").exists()
    os.utime(output, ns=(0, 0))
    assert attempt(decoder, output).status == "unchanged"
    assert output.stat().st_mtime_ns == 0
    # One that cannot be read is not called different.
    read_error = ModelError("cannot be read: Input/output error", path=str(output))
    monkeypatch.setattr(targets, "has_content", lambda *args: (_ for _ in ()).throw(read_error))
    with pytest.raises(ModelError, match="cannot be read: Input/output"):
        attempt(decoder, output)
    assert attempt(decoder, output, force=True).status == "renamed"


@pytest.mark.parametrize(("option", "code"), [("-v", 0), ("--check", 1), ("--dry-run", 0)])
def test_result_that_is_too_large_for_readers_is_refused_before_work_starts(
    option: str, code: int, decoder: Path, renamed: bytes, run, snapshot, monkeypatch
) -> None:
    before = snapshot(decoder.parent)
    monkeypatch.setattr(targets, "MAX_MODEL_BYTES", len(renamed) - 1)
    outcome = run(decoder, "--prefix", "VLLM", option)
    assert (outcome.code, outcome.out) == (2, "")
    assert f"would have {len(renamed):,} bytes" in outcome.err
    assert snapshot(decoder.parent) == before
    monkeypatch.setattr(targets, "MAX_MODEL_BYTES", len(renamed))
    assert run(decoder, "--prefix", "VLLM", option).code == code


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOENT])
def test_disk_that_answers_nothing_is_an_error_and_no_endless_search(
    number: int, decoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = build_job(decoder, decoder.parent / "new" / "m.onnx")
    monkeypatch.setattr(os, "lstat", refuse(number))
    if number == errno.EIO:
        with pytest.raises(ModelError, match="Input/output error"):
            find_writable_directory(job)
    elif os.access(decoder.anchor, os.W_OK):
        assert find_writable_directory(job) == Path(decoder.anchor)
    else:
        with pytest.raises(WriteError, match="is not writable"):
            find_writable_directory(job)
