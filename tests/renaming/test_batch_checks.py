from __future__ import annotations

import os
import shutil
from pathlib import Path

import models
import pytest
from genai_folders import build_decoder
from models import saved
from window_sets import build_window, write_windows

from onnxkvrename import Report, load_rules
from onnxkvrename.files.find import RenameJob, build_job
from onnxkvrename.renaming.run import rename_batch
from onnxkvrename.rules.request import Request

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"


def judged(*jobs: RenameJob, **options: bool) -> Report:
    return rename_batch(Request(token="VLLM", dry_run=True, **options), jobs, load_rules())


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three models, and room for the results of two of them."""
    real = os.statvfs
    size = saved(models.decoder(), tmp_path / "a.onnx").stat().st_size + len("_VLLM") * 10
    for name in ("b.onnx", "c.onnx"):
        saved(models.decoder(), tmp_path / name)

    def little(path: object) -> os.statvfs_result:
        given = list(real(tmp_path))
        given[1], given[4] = 1, 2 * size + size // 2  # f_frsize, f_bavail
        return os.statvfs_result(given)

    monkeypatch.setattr(os, "statvfs", little)
    return tmp_path


def errors(report: Report) -> list[str]:
    return [str(model.error) for model in report.models if model.error is not None]


@pytest.mark.parametrize("place", [".", "new"])
def test_the_disk_must_hold_all_results_at_once(place: str, disk: Path) -> None:
    """In place, too: no model is replaced before all are written."""
    jobs = [build_job(disk / name, disk / place / name) for name in ("a.onnx", "b.onnx", "c.onnx")]
    assert errors(judged(*jobs[:2])) == []
    size = jobs[0].model.stat().st_size + len("_VLLM") * 10
    for job, error in zip(jobs, errors(judged(*jobs)), strict=True):
        assert error.startswith(str(job.output))
        assert f"needs {3 * size:,} bytes with the other results, but the disk has" in error


def test_what_is_not_written_needs_no_room(disk: Path) -> None:
    jobs = [build_job(disk / name, disk / name) for name in ("a.onnx", "b.onnx", "c.onnx")]
    rename_batch(Request(token="VLLM"), jobs[:2], load_rules())
    assert errors(judged(*jobs)) == []


def test_to_look_at_the_models_alone_needs_none(disk: Path) -> None:
    jobs = [build_job(disk / name, disk / name) for name in ("a.onnx", "b.onnx", "c.onnx")]
    assert errors(judged(*jobs, check=True)) == []


def test_a_result_may_not_stand_where_another_model_does_whatever_it_is_called(
    tmp_path: Path,
) -> None:
    one, two = (saved(models.decoder(), tmp_path / name) for name in ("a.onnx", "b.onnx"))
    (tmp_path / "alias").symlink_to(".")
    jobs = [build_job(one, one), build_job(two, tmp_path / "alias" / "a.onnx")]
    assert len(errors(judged(*jobs, force=True))) == 2
    jobs = [build_job(one, tmp_path / "c.onnx"), build_job(two, tmp_path / "alias" / "c.onnx")]
    assert len(errors(judged(*jobs, force=True))) == 2
    jobs = [build_job(one, tmp_path / "c.onnx"), build_job(two, tmp_path / "alias" / "d.onnx")]
    assert errors(judged(*jobs, force=True)) == []


def test_a_model_that_cannot_be_read_keeps_others_from_being_called_barren(tmp_path: Path) -> None:
    """It may be the one with the buffers."""
    model = models.decoder()
    del model.graph.output[1:], model.graph.input[1:3], model.graph.node[:2]
    model.graph.node[0].input[:] = ["x", "x"]
    encoder = saved(model, tmp_path / "encoder.onnx")
    broken = saved(b"text", tmp_path / "broken.onnx")
    report = judged(build_job(encoder, encoder), build_job(broken, broken))
    assert [finding.code for finding in report.findings] == []
    assert [finding.code for finding in judged(build_job(encoder, encoder)).findings] == ["KV001"]


def test_a_model_that_cannot_be_read_hides_nothing_that_one_model_shows(
    tmp_path: Path, run
) -> None:
    saved(build_decoder(), tmp_path / "foreign.onnx")
    broken = saved(b"text", tmp_path / "broken.onnx")
    saved(models.decoder(), tmp_path / "decoder.onnx")

    def check() -> list[str]:
        lines = run("verify", tmp_path).err.splitlines()
        lines += run(tmp_path, "--prefix", "VLLM", "--check").err.splitlines()
        # With a model that cannot be read, no command would do, so none is shown.
        others = ("broken", " models: ", "-> run `")
        return [line for line in lines if not any(text in line for text in others)]

    with_broken = check()
    broken.unlink()
    assert with_broken == check()
    assert any("another profile" in line or "profile huggingface does" in line for line in check())


@pytest.mark.parametrize(
    ("option", "unchecked"),
    [("--prefix=vllmKvCache", "with each other)"), ("--target=vllm-qaic", "and for vllm-qaic)")],
)
def test_windows_are_not_checked_without_one_of_them_and_that_is_said(
    option: str, unchecked: str, tmp_path: Path, run
) -> None:
    """No error about a missing window is true, and no silence means that all is well."""
    windows = tmp_path / "windows"
    shutil.copytree(FIXTURES / "plain" / "windows", windows)
    saved(models.decoder(), tmp_path / "decoder.onnx")
    broken = next(windows.glob("*/*_1_2.onnx"))
    broken.write_bytes(b"text")
    outcome = run(tmp_path, option, "--check")
    assert (outcome.code, outcome.err.count("KV3")) == (2, 0)
    (error,) = [line for line in outcome.err.splitlines() if line.startswith("error")]
    assert str(broken) in error
    assert error.endswith(unchecked)


def test_windows_that_overlap_are_a_finding_for_a_target_too(tmp_path: Path, run) -> None:
    windows = write_windows(tmp_path / "a", 3)
    saved(build_window(0, 1), windows / "layer_1_2" / "Tiny_layer_tmp_1_2.onnx")
    outcome = run(windows, "--target", "vllm-qaic", "--check")
    assert outcome.code == 1
    assert "error KV304" in outcome.err
