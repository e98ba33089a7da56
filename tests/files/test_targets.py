from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import models
import pytest

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
def test_what_others_may_share_is_not_changed_in_place(
    share: Callable[[Path], None], said: str, decoder: Path, snapshot, tmp_path: Path
) -> None:
    share(decoder)
    before = snapshot(tmp_path)
    with pytest.raises(WriteError, match=said):
        attempt(decoder)
    assert snapshot(tmp_path) == before
    assert attempt(decoder, tmp_path / "elsewhere.onnx").status == "renamed"


def test_force_goes_through_a_link_to_the_real_file(decoder: Path, renamed: bytes) -> None:
    link(decoder)
    assert attempt(decoder, force=True).status == "renamed"
    assert decoder.is_symlink()
    assert decoder.with_name("real").read_bytes() == renamed


def test_force_parts_a_file_from_its_hard_links(decoder: Path, renamed: bytes) -> None:
    hard_link(decoder)
    before = decoder.read_bytes()
    assert attempt(decoder, force=True).status == "renamed"
    assert decoder.read_bytes() == renamed
    assert decoder.with_name("twin").read_bytes() == before


def test_force_replaces_a_read_only_file_and_keeps_it_so(decoder: Path, renamed: bytes) -> None:
    protect(decoder)
    assert attempt(decoder, force=True).status == "renamed"
    assert decoder.read_bytes() == renamed
    assert decoder.stat().st_mode & 0o777 == 0o444


@pytest.mark.parametrize("share", [link, hard_link, protect])
def test_a_model_that_does_not_change_may_be_shared(
    share: Callable[[Path], None], decoder: Path
) -> None:
    attempt(decoder)
    share(decoder)
    assert attempt(decoder).status == "unchanged"


def test_the_same_result_there_already_is_left_alone(decoder: Path, renamed: bytes) -> None:
    output = decoder.with_name("output.onnx")
    output.write_bytes(renamed)
    os.utime(output, ns=(0, 0))
    report = attempt(decoder, output)
    assert (report.status, output.stat().st_mtime_ns) == ("unchanged", 0)


@pytest.mark.parametrize(
    "stand",
    [
        lambda path: path.write_bytes(b"other"),
        lambda path: path.symlink_to("nowhere"),
    ],
    ids=["file", "dangling link"],
)
def test_something_else_there_is_replaced_only_with_force(
    stand: Callable[[Path], object], decoder: Path, renamed: bytes
) -> None:
    output = decoder.with_name("output.onnx")
    stand(output)
    inode = output.lstat().st_ino
    report = attempt(decoder, output)
    assert (report.status, [found.code for found in report.findings]) == ("failed", ["KV504"])
    assert output.lstat().st_ino == inode
    assert attempt(decoder, output, force=True).status == "renamed"
    assert output.read_bytes() == renamed
    assert not output.with_name("nowhere").exists()


@pytest.mark.parametrize("force", [False, True])
def test_a_hard_link_to_the_model_is_no_place_for_its_result(
    force: bool, decoder: Path, snapshot
) -> None:
    """Where case does not count, another spelling of the model's name looks the same."""
    output = decoder.with_name("output.onnx")
    os.link(decoder, output)
    before = snapshot(decoder.parent)
    with pytest.raises(WriteError, match=f"output.onnx: is the model {decoder}"):
        attempt(decoder, output, force=force)
    assert snapshot(decoder.parent) == before


def test_a_directory_is_no_place_for_a_model(decoder: Path, tmp_path: Path) -> None:
    (tmp_path / "directory").mkdir()
    for force in (False, True):
        with pytest.raises(WriteError, match="is a directory"):
            attempt(decoder, tmp_path / "directory", force=force)


def test_the_model_may_not_take_the_place_of_its_data(
    external: Path, tmp_path: Path, snapshot
) -> None:
    before = snapshot(tmp_path)
    alias = tmp_path / "alias"
    alias.symlink_to(external.parent)
    for output, model in (
        (external.with_name("decoder.onnx.data"), external),
        (tmp_path / "new" / "decoder.onnx.data", tmp_path / "new" / "decoder.onnx.data"),
        (alias / "decoder.onnx.data", external),
    ):
        with pytest.raises(WriteError, match=f"external data of {model}"):
            attempt(external, output, force=True)
    alias.unlink()
    assert snapshot(tmp_path) == before


def test_nor_that_of_data_in_a_directory_below(tmp_path: Path) -> None:
    model = models.decoder()
    weight = model.graph.initializer.add(name="w", dims=[4], data_type=2, data_location=1)
    weight.external_data.add(key="location", value="sub/w.bin")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "w.bin").write_bytes(b"data")
    path = models.saved(model, tmp_path / "m.onnx")
    with pytest.raises(WriteError, match=f"external data of {path}"):
        attempt(path, tmp_path / "sub" / "w.bin", force=True)
    assert (tmp_path / "sub" / "w.bin").read_bytes() == b"data"


def test_a_result_that_no_reader_takes_is_refused_before_work_starts(
    decoder: Path, renamed: bytes, snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = snapshot(decoder.parent)
    monkeypatch.setattr(targets, "MAX_MODEL_BYTES", len(renamed) - 1)
    with pytest.raises(ModelError, match=f"would have {len(renamed):,} bytes.*external data"):
        attempt(decoder)
    assert snapshot(decoder.parent) == before
    monkeypatch.setattr(targets, "MAX_MODEL_BYTES", len(renamed))
    assert attempt(decoder).status == "renamed"


@pytest.mark.parametrize("option", ["--check", "--dry-run"])
def test_no_option_promises_a_result_that_no_reader_takes(
    option: str, decoder: Path, renamed: bytes, run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(targets, "MAX_MODEL_BYTES", len(renamed) - 1)
    outcome = run(decoder, "--prefix", "VLLM", option)
    assert outcome.code == 2
    assert f"would have {len(renamed):,} bytes" in outcome.err
    assert "would change" not in outcome.out
    monkeypatch.setattr(targets, "MAX_MODEL_BYTES", len(renamed))
    assert run(decoder, "--prefix", "VLLM", option).code == (0 if option == "--dry-run" else 1)


def test_a_new_directory_is_gone_again_if_the_result_could_not_be_written(
    external: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise WriteError("no")

    monkeypatch.setattr("onnxkvrename.renaming.write.check_written_model", fail)
    with pytest.raises(WriteError, match="no"):
        attempt(external, tmp_path / "a" / "b" / "m.onnx")
    assert sorted(os.listdir(tmp_path)) == ["external"]


# What dead runs have left, and directories that are not there yet.


def test_links_that_a_dead_run_has_left_are_no_other_peoples(decoder: Path) -> None:
    os.link(decoder, decoder.with_name(build_temp_name(build_key(), "old")))
    assert attempt(decoder, dry_run=True).status == "would-rename"
    hard_link(decoder)
    with pytest.raises(WriteError, match="has 2 hard links"):
        attempt(decoder, dry_run=True)


def test_a_link_with_almost_such_a_name_is(decoder: Path) -> None:
    os.link(decoder, decoder.with_name(f"{build_temp_name(build_key(), 'old')}-x"))
    with pytest.raises(WriteError, match="has 2 hard links"):
        attempt(decoder)


def test_a_link_that_a_living_run_takes_away_meanwhile_is_no_fault(
    decoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hard_link(decoder)
    gone = decoder.with_name(build_temp_name(build_key(), "old"))
    monkeypatch.setattr("onnxkvrename.files.targets.list_temp_paths", lambda directory: [gone])
    with pytest.raises(WriteError, match="has 2 hard links"):
        attempt(decoder, dry_run=True)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOENT])
def test_a_disk_that_answers_nothing_is_an_error_and_no_endless_search(
    number: int, decoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: object) -> os.stat_result:
        raise OSError(number, os.strerror(number))

    job = build_job(decoder, decoder.parent / "new" / "m.onnx")
    monkeypatch.setattr(os, "lstat", fail)
    if number == errno.EIO:
        with pytest.raises(ModelError, match="Input/output error"):
            find_writable_directory(job)
    elif os.access(decoder.anchor, os.W_OK):
        assert find_writable_directory(job) == Path(decoder.anchor)
    else:
        with pytest.raises(WriteError, match="is not writable"):
            find_writable_directory(job)


def test_a_file_there_that_cannot_be_read_is_not_called_different(
    decoder: Path, renamed: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ``force`` it may be replaced, whatever it is."""
    output = decoder.with_name("output.onnx")
    output.write_bytes(renamed)

    def fail(path: Path, *args: object) -> bool:
        raise ModelError("cannot be read: Input/output error", path=str(path))

    monkeypatch.setattr(targets, "has_content", fail)
    with pytest.raises(ModelError, match="cannot be read: Input/output"):
        attempt(decoder, output)
    assert attempt(decoder, output, force=True).status == "renamed"
