"""Texts that go with models: read, followed, and what stands against that."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from onnxkvrename import ModelError, ModelReport, Report, load_rules
from onnxkvrename.findings import build_finding
from onnxkvrename.limits import MAX_TEXT_BYTES
from onnxkvrename.renaming.prepare import PreparedModel
from onnxkvrename.renaming.prepare_sidecars import (
    PreparedSidecar,
    Sidecar,
    prepare_sidecars,
)
from onnxkvrename.renaming.request import Request
from onnxkvrename.renaming.run import rename_batch
from onnxkvrename.rules.find_models import build_job
from onnxkvrename.sidecars.rewrite import RewrittenSidecar

LOOK = Request(dry_run=True)


def shouted(data: bytes) -> RewrittenSidecar:
    """A text as these tests have it follow: loudly, as many names as there are letters."""
    letters = [chr(byte) for byte in data if 97 <= byte <= 122]
    renamed = tuple((letter, letter.upper()) for letter in letters)
    return RewrittenSidecar(data.upper(), renamed)


@pytest.fixture
def text(decoder: Path) -> Path:
    """A text beside a model, none of UTF-8."""
    path = decoder.parent / "names.txt"
    path.write_bytes(b"ab\r\n\xff")
    return path


def one(path: Path, output: Path, request: Request = LOOK, follow=shouted) -> PreparedSidecar:
    """Return the result for one sidecar."""
    job = build_job(path.parent / "m.onnx")
    model = PreparedModel(job, ModelReport(str(job.model), "m.onnx", "unchanged"))
    sidecar = Sidecar(build_job(path, output), rewrite=follow)
    (item,) = prepare_sidecars([sidecar], [model], request, load_rules())
    return item


def wrong(data: bytes) -> RewrittenSidecar:
    finding = build_finding("KV404", "x", "is in no model", "take it out")
    return RewrittenSidecar(data, findings=(finding,))


def refusing(data: bytes) -> RewrittenSidecar:
    raise ModelError("is of another kind", path="names.txt")


def states(report: Report) -> list[str]:
    return [item.status for item in (*report.models, *report.sidecars)]


# One text.


def test_a_text_follows_and_is_to_be_written(text: Path) -> None:
    item = one(text, text)
    assert (item.report.status, item.report.changed) == ("would-rename", 2)
    assert item.plan is not None
    assert (item.plan.path, item.plan.content) == (text, b"AB\r\n\xff")
    assert item.plan.identity.inode == text.stat().st_ino
    assert text.read_bytes() == b"ab\r\n\xff"


def test_a_text_that_does_not_change_is_not_written_again(text: Path) -> None:
    text.write_bytes(b"AB")
    item = one(text, text)
    assert (item.report.status, item.plan) == ("unchanged", None)


def test_one_that_goes_elsewhere_is_written_though_it_is_the_same(text: Path) -> None:
    text.write_bytes(b"AB")
    item = one(text, text.with_name("other"))
    assert (item.report.status, item.plan is not None) == ("unchanged", True)


def test_one_that_stands_in_its_place_is_not_written_again(text: Path) -> None:
    there = text.with_name("other")
    there.write_bytes(b"AB\r\n\xff")
    item = one(text, there)
    assert (item.report.status, item.plan, item.findings) == ("unchanged", None, ())


@pytest.mark.parametrize(
    ("request_", "found"),
    [
        (LOOK, ["KV504"]),
        (LOOK._replace(force=True), []),
        (LOOK._replace(check=True), []),
    ],
)
def test_another_text_in_its_place_is_in_the_way(
    request_: Request, found: list[str], text: Path
) -> None:
    there = text.with_name("other")
    there.write_bytes(b"mine")
    item = one(text, there, request_)
    assert [fault.code for fault in item.findings] == found
    assert item.report.status == "would-rename"


def test_a_link_that_leads_nowhere_is_in_the_way_as_it_is_of_a_model(text: Path) -> None:
    there = text.with_name("other")
    there.symlink_to("nowhere")
    assert [fault.code for fault in one(text, there).findings] == ["KV504"]
    assert one(text, there, LOOK._replace(force=True)).findings == ()


def test_what_is_wrong_with_a_text_is_part_of_the_result(text: Path) -> None:
    assert [fault.code for fault in one(text, text, follow=wrong).findings] == ["KV404"]
    item = one(text, text, follow=refusing)
    assert str(item.error).startswith("names.txt: ")
    assert item.report.status == "failed"


def too_long(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(MAX_TEXT_BYTES + 1)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (Path.unlink, "no such file"),
        (lambda path: (path.unlink(), path.mkdir()), "is a directory"),
        (lambda path: (path.unlink(), os.mkfifo(path)), "not a regular"),
        (too_long, f"{MAX_TEXT_BYTES + 1:,} bytes"),
    ],
)
def test_a_text_that_cannot_be_read_is_told_without_waiting(
    spoil: Callable[[Path], object], said: str, text: Path
) -> None:
    spoil(text)
    assert said in str(one(text, text).error)


# With its models.


def renamed_with(decoder: Path, text: Path, follow=shouted, **options: bool) -> Report:
    companion = Sidecar(build_job(text), rewrite=follow)
    jobs = [build_job(decoder, decoder)]
    request = Request(token="VLLM", **options)
    return rename_batch(request, jobs, load_rules(), sidecars=[companion])


def test_text_and_model_change_together(decoder: Path, text: Path, renamed: bytes) -> None:
    text.chmod(0o640)
    report = renamed_with(decoder, text)
    assert (states(report), report.compute_exit_code()) == (["renamed", "renamed"], 0)
    assert (decoder.read_bytes(), text.read_bytes()) == (renamed, b"AB\r\n\xff")
    assert text.stat().st_mode & 0o777 == 0o640
    assert states(renamed_with(decoder, text)) == ["unchanged", "unchanged"]
    assert sorted(os.listdir(decoder.parent)) == ["decoder.onnx", "names.txt"]


@pytest.mark.parametrize(
    ("follow", "options", "code"),
    [
        (wrong, {"strict": True}, 1),
        (refusing, {}, 2),
    ],
)
def test_what_is_wrong_with_a_text_keeps_its_model_from_being_written(
    follow, options: dict[str, bool], code: int, decoder: Path, text: Path, snapshot
) -> None:
    before = snapshot(decoder.parent)
    report = renamed_with(decoder, text, follow, **options)
    assert (report.models[0].status, report.compute_exit_code()) == ("failed", code)
    assert snapshot(decoder.parent) == before


def test_a_warning_about_a_text_does_not(decoder: Path, text: Path, renamed: bytes) -> None:
    report = renamed_with(decoder, text, wrong)
    assert [found.code for found in report.findings] == ["KV404"]
    assert (report.compute_exit_code(), decoder.read_bytes()) == (0, renamed)


def test_what_is_wrong_with_a_model_keeps_its_text_as_it_was(
    decoder: Path, text: Path, snapshot
) -> None:
    decoder.write_bytes(decoder.read_bytes().replace(b"past_key.1_Ret", b"past_key.2_Ret"))
    before = snapshot(decoder.parent)
    assert renamed_with(decoder, text).compute_exit_code() == 1
    assert snapshot(decoder.parent) == before


def test_a_text_that_someone_changes_meanwhile_is_left_to_them(decoder: Path, text: Path) -> None:
    before = decoder.read_bytes()

    def follow(data: bytes) -> RewrittenSidecar:
        text.write_bytes(b"theirs")
        return shouted(data)

    report = renamed_with(decoder, text, follow)
    assert "by another program" in str(report.models[0].error)
    assert (decoder.read_bytes(), text.read_bytes()) == (before, b"theirs")


def test_a_model_that_cannot_be_placed_takes_its_text_back(
    decoder: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, real = decoder.read_bytes(), os.replace

    def refused(source: Path, target: Path, **how: Any) -> None:
        if target == decoder:
            raise OSError(5, "Input/output error")
        real(source, target, **how)

    monkeypatch.setattr(os, "replace", refused)
    report = renamed_with(decoder, text)
    assert "Input/output error" in str(report.models[0].error)
    assert (decoder.read_bytes(), text.read_bytes()) == (before, b"ab\r\n\xff")


def test_a_look_says_what_would_change(decoder: Path, text: Path) -> None:
    report = renamed_with(decoder, text, dry_run=True)
    assert states(report) == ["would-rename", "would-rename"]
    assert (report.compute_exit_code(), report.compute_exit_code(check_only=True)) == (0, 1)
    rename_batch(Request(token="VLLM"), [build_job(decoder, decoder)], load_rules())
    report = renamed_with(decoder, text, dry_run=True)
    assert (states(report), report.compute_exit_code(check_only=True)) == (
        ["unchanged", "would-rename"],
        1,
    )
