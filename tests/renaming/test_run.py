from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import models
import pytest
from models import KEY, info, node, saved

from onnxkvrename import (
    KvRenameError,
    ModelError,
    Report,
    RulesError,
    WriteError,
    load_rules,
    rename,
)
from onnxkvrename.files import lock
from onnxkvrename.files.find import build_job, find_jobs
from onnxkvrename.files.lock import open_locks
from onnxkvrename.files.temp_file import (
    TempFile,
    build_key,
    build_temp_name,
)
from onnxkvrename.model import external_data as externaldata
from onnxkvrename.model import file as onnxfile
from onnxkvrename.renaming import write
from onnxkvrename.renaming.run import rename_batch
from onnxkvrename.rules import kv_model
from onnxkvrename.rules.request import Request
from onnxkvrename.rules.results import Status

QEFF = load_rules()
LOOK = Request(dry_run=True)


class Watching:
    """Keeps what it hears of, by what it was told is next."""

    def __init__(self) -> None:
        self.seen: dict[tuple[str, int], list[int]] = {}

    def track_models(self, doing: str, count: int) -> Callable[[int], None]:
        return self.seen.setdefault((doing, count), []).append

    def track_bytes(self, doing: str, size: int) -> Callable[[int], None]:
        return self.seen.setdefault((f"{doing} bytes", size), []).append


def together(
    *paths: Path, directory: Path | None = None, strip: bool = False, **options: bool
) -> Report:
    jobs = find_jobs(list(paths), None, directory)
    return rename_batch(Request(token="VLLM", strip=strip, **options), jobs, QEFF)


def statuses(report: Report) -> list[Status]:
    return [model.status for model in report.models]


def codes(report: Report) -> list[list[str]]:
    return [[found.code for found in model.findings] for model in report.models]


def test_a_model_is_renamed_in_place(decoder: Path, renamed: bytes) -> None:
    report = rename(decoder, "VLLM")
    assert decoder.read_bytes() == renamed
    assert os.listdir(decoder.parent) == ["decoder.onnx"]
    assert (report.status, report.path, report.output) == ("renamed", str(decoder), str(decoder))
    assert report.name_map["past_value.1"] == "past_value.1_VLLM"
    assert len(report.name_map) == 8


def test_a_model_is_renamed_into_another_file(decoder: Path, renamed: bytes) -> None:
    before = decoder.stat()
    report = rename(str(decoder), "VLLM", output=str(decoder.with_name("new.onnx")))
    assert decoder.with_name("new.onnx").read_bytes() == renamed
    assert decoder.stat().st_mtime_ns == before.st_mtime_ns
    assert report.output.endswith("new.onnx")


@pytest.mark.parametrize("output", [None, "new.onnx"])
def test_only_in_place_is_the_owner_kept(
    output: str | None, decoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(
        TempFile, "copy_attributes", lambda draft, source, *, owner, **how: asked.append(owner)
    )
    rename(decoder, "VLLM", output=output and decoder.with_name(output))
    assert asked == [output is None]


def test_the_same_token_again_changes_nothing(decoder: Path) -> None:
    rename(decoder, "VLLM")
    before = decoder.stat()
    assert rename(decoder, "VLLM").status == "unchanged"
    assert decoder.stat().st_mtime_ns == before.st_mtime_ns


def test_strip_undoes_a_rename_to_the_byte(decoder: Path) -> None:
    before = decoder.read_bytes()
    for strip in ({"token": "VLLM"}, {"token": None}):
        rename(decoder, "VLLM")
        assert rename(decoder, strip=True, **strip).status == "renamed"
        assert decoder.read_bytes() == before
    assert rename(decoder, strip=True).status == "unchanged"


def test_another_token_is_refused_unless_replaced(decoder: Path, renamed: bytes) -> None:
    rename(decoder, "OLD")
    before = decoder.read_bytes()
    report = rename(decoder, "VLLM")
    assert (report.status, [found.code for found in report.findings]) == ("failed", ["KV202"])
    assert "8 names" in report.findings[0].message
    assert "past_key.0_OLD)" in report.findings[0].message
    assert "VLLM: OLD" in report.findings[0].message
    assert decoder.read_bytes() == before
    assert rename(decoder, "VLLM", replace=True).status == "renamed"
    assert decoder.read_bytes() == renamed


def test_normalize_renames_the_suffix_along(tmp_path: Path) -> None:
    model = models.decoder()
    for text in (model.graph.output[1], *model.graph.value_info):
        text.name = f"{KEY}_InternalRetainedState"
    for part in model.graph.node:
        for ends in (part.input, part.output):
            ends[:] = [end.replace("key.0_Ret", "key.0_InternalRet") for end in ends]
    path = saved(model, tmp_path / "m.onnx")
    report = rename(path, "V", normalize=True)
    assert report.name_map[f"{KEY}_InternalRetainedState"] == f"{KEY}_V_RetainedState"
    assert b"Internal" not in path.read_bytes()


def test_to_look_ahead_writes_nothing(decoder: Path, snapshot, tmp_path: Path) -> None:
    before = snapshot(tmp_path)
    report = rename(decoder, "VLLM", output=tmp_path / "new" / "m.onnx", dry_run=True)
    assert report.status == "would-rename"
    assert len(report.name_map) == 8
    assert snapshot(tmp_path) == before
    assert not (tmp_path / "new").exists()


def test_a_look_that_does_not_mind_the_place_sees_only_the_model(decoder: Path) -> None:
    decoder.chmod(0o444)
    request = Request(token="VLLM", check=True)
    (report,) = rename_batch(request, [build_job(decoder)], QEFF).models
    assert report.status == "would-rename"
    with pytest.raises(WriteError, match="read-only"):
        rename(decoder, "VLLM", dry_run=True)


@pytest.mark.parametrize("token", [None, "a_b"])
def test_a_token_that_cannot_be_is_an_exception(token: str | None, decoder: Path) -> None:
    with pytest.raises(RulesError):
        rename(decoder, token)


def test_the_call_that_feeds_back_names_output_and_token(decoder: Path) -> None:
    output = decoder.with_name("{token}.onnx")
    report = rename(decoder, "VLLM", output=output)
    assert report.feed_back_call == f'model.compile(onnx_path="{output}", kv_cache_prefix="VLLM")'
    assert rename(output, strip=True).feed_back_call is None


def test_one_bad_model_of_three_and_none_is_written(tmp_path: Path, snapshot) -> None:
    good = saved(models.decoder(), tmp_path / "a.onnx")
    bad = saved(models.decoder(), tmp_path / "b.onnx")
    bad.write_bytes(
        bad.read_bytes().replace(b"past_key.0_RetainedState", b"past_key.1_RetainedState")
    )
    other = saved(models.decoder(), tmp_path / "c.onnx")
    before = snapshot(tmp_path)
    report = together(good, bad, other)
    assert statuses(report) == ["would-rename", "failed", "would-rename"]
    assert {"KV101", "KV102"} <= {finding.code for finding in report.findings}
    assert snapshot(tmp_path) == before
    assert (report.compute_exit_code(), report.compute_exit_code(check_only=True)) == (1, 1)


def test_an_unreadable_model_of_two_is_worse_than_a_finding(tmp_path: Path, snapshot) -> None:
    good = saved(models.decoder(), tmp_path / "a.onnx")
    saved(b"text", tmp_path / "b.onnx")
    before = snapshot(tmp_path)
    report = together(tmp_path)
    assert statuses(report) == ["would-rename", "failed"]
    assert isinstance(report.models[1].error, ModelError)
    assert snapshot(tmp_path) == before
    assert report.compute_exit_code() == 2
    assert good.exists()


def test_no_buffer_in_any_model_is_a_finding_that_lists_the_outputs(tmp_path: Path) -> None:
    model = models.decoder()
    del model.graph.output[1:], model.graph.input[1:3], model.graph.node[:]
    model.graph.node.append(node("Neg", ["x"], ["logits"]))
    encoder = saved(model, tmp_path / "encoder.onnx")
    report = together(encoder)
    assert codes(report) == [["KV001"]]
    assert "are logits" in report.models[0].findings[0].message
    assert report.compute_exit_code() == 1
    saved(models.decoder(), tmp_path / "decoder.onnx")
    report = together(tmp_path)
    assert codes(report) == [[], []]
    assert statuses(report) == ["renamed", "unchanged"]
    assert report.models[1].feed_back_call is None
    assert encoder.read_bytes() == model.SerializeToString()


def test_no_two_results_may_stand_in_one_place(tmp_path: Path, snapshot) -> None:
    one = saved(models.decoder(), tmp_path / "one.onnx")
    two = saved(models.decoder(), tmp_path / "two.onnx")
    before = snapshot(tmp_path)
    for jobs in (
        [build_job(one, tmp_path / "new.onnx"), build_job(two, tmp_path / "new.onnx")],
        [build_job(one, tmp_path / "three.onnx"), build_job(two, one)],
    ):
        report = rename_batch(Request(token="VLLM", force=True), jobs, QEFF)
        assert report.models[1].error is not None
        assert report.models[1].error.message.removeprefix("is the ") in (
            f"result of {one}",
            f"model {one}",
        )
        assert report.compute_exit_code() == 2
        assert snapshot(tmp_path) == before


def test_strict_makes_a_warning_stop_the_work(tmp_path: Path) -> None:
    model = models.decoder()
    model.graph.output.append(info("mystery_RetainedState"))
    path = saved(model, tmp_path / "m.onnx")
    assert statuses(together(path, strict=True)) == ["failed"]
    assert path.read_bytes() == model.SerializeToString()
    assert statuses(together(path)) == ["renamed"]


def test_data_that_two_models_share_are_copied_once(external: Path, tmp_path: Path) -> None:
    external.with_name("other.onnx").write_bytes(external.read_bytes())
    jobs, watch = find_jobs([external.parent], None, tmp_path / "out"), Watching()
    assert statuses(rename_batch(Request(token="VLLM"), jobs, QEFF, progress=watch)) == [
        "renamed",
        "renamed",
    ]
    size = external.with_name("decoder.onnx.data").stat().st_size
    assert [steps.count(size) for (doing, _), steps in watch.seen.items() if "bytes" in doing] == [
        1
    ]
    assert sorted(os.listdir(tmp_path / "out")) == [
        "decoder.onnx",
        "decoder.onnx.data",
        "other.onnx",
    ]


@pytest.mark.parametrize("force", [False, True])
def test_models_that_share_a_place_for_different_data_do_not_overwrite_them(
    force: bool, external: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other" / "other.onnx"
    other.parent.mkdir()
    other.write_bytes(external.read_bytes())
    weights = external.with_name("decoder.onnx.data").read_bytes()
    other.with_name("decoder.onnx.data").write_bytes(weights[::-1])
    out = tmp_path / "out"
    jobs = [build_job(external, out / "a.onnx"), build_job(other, out / "b.onnx")]
    report = rename_batch(Request(token="VLLM", force=force), jobs, QEFF)
    assert report.compute_exit_code() != 0
    assert not (out / "b.onnx").exists()
    assert not out.exists() or (out / "decoder.onnx.data").read_bytes() == weights


def test_one_model_that_cannot_be_written_and_all_are_as_they_were(
    tmp_path: Path, snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [saved(models.decoder(), tmp_path / f"{name}.onnx") for name in "abc"]
    before, real = snapshot(tmp_path), onnxfile.check_written_model

    def fail(draft: TempFile, *args: Any) -> None:
        real(draft, *args)
        if draft.display_path.name == "b.onnx":
            raise WriteError("no", path=str(draft.display_path))

    monkeypatch.setattr("onnxkvrename.renaming.write.check_written_model", fail)
    for directory in (None, tmp_path / "new"):
        report = together(*paths, directory=directory)
        assert statuses(report) == ["would-rename", "failed", "would-rename"]
        assert report.compute_exit_code() == 2
        assert snapshot(tmp_path) == before
        assert sorted(os.listdir(tmp_path)) == ["a.onnx", "b.onnx", "c.onnx"]


@pytest.mark.parametrize("name", ["a.onnx", "b.onnx", "c.onnx"])
def test_one_model_that_cannot_take_its_place_and_all_are_as_they_were(
    name: str, tmp_path: Path, snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [saved(models.decoder(), tmp_path / f"{name}.onnx") for name in "abc"]
    before, real = snapshot(tmp_path), os.replace

    def fail(source: Path, target: Path, **how: Any) -> None:
        if Path(target).name == name and Path(source).name.endswith("-new"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(source, target, **how)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        report = together(*paths)
    assert [model.path for model in report.models if model.error] == [str(tmp_path / name)]
    assert "renamed" not in statuses(report)
    assert snapshot(tmp_path) == before
    assert statuses(together(*paths)) == ["renamed"] * 3


def test_what_could_not_be_undone_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that becomes read-only just after the first model."""
    paths = [saved(models.decoder(), tmp_path / f"{name}.onnx") for name in "abc"]
    real, calls = os.replace, []

    def once(*args: Any, **how: Any) -> None:
        calls.append(args)
        if len(calls) > 1:
            raise OSError(30, "Read-only file system")
        real(*args, **how)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", once)
        assert statuses(together(*paths)) == ["renamed", "failed", "would-rename"]
    assert statuses(together(*paths)) == ["unchanged", "renamed", "renamed"]
    assert sorted(os.listdir(tmp_path)) == ["a.onnx", "b.onnx", "c.onnx"]


@pytest.mark.parametrize("output", [None, "new.onnx"])
def test_a_model_that_is_changed_meanwhile_is_refused(
    output: str | None, decoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the checks and the writing, and while it is written."""
    place = None if output is None else decoder.with_name(output)
    for module, name in ((kv_model, "check_model"), (write, "write_pieces")):
        theirs = decoder.read_bytes() + b"\x82\x01\0"  # an unknown field
        real = getattr(module, name)

        def meddle(*args: object, _real=real, _theirs: bytes = theirs) -> object:
            decoder.write_bytes(_theirs)
            return _real(*args)

        with monkeypatch.context() as patch:
            patch.setattr(module, name, meddle)
            with pytest.raises(KvRenameError, match="by another program"):
                rename(decoder, "VLLM", output=place)
        assert decoder.read_bytes() == theirs
        assert os.listdir(decoder.parent) == ["decoder.onnx"]


@pytest.mark.parametrize("name", ["m.onnx", "decoder.onnx.data"])
def test_a_file_that_appears_meanwhile_is_left_alone(
    name: str, external: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, theirs = TempFile.copy_attributes, tmp_path / "new" / name
    theirs.parent.mkdir()

    def meddle(draft: TempFile, *args: Any, **how: Any) -> None:
        real(draft, *args, **how)
        if draft.display_path == theirs:
            theirs.write_bytes(b"theirs")

    monkeypatch.setattr(TempFile, "copy_attributes", meddle)
    with pytest.raises(WriteError, match="File exists"):
        rename(external, "VLLM", output=tmp_path / "new" / "m.onnx")
    assert theirs.read_bytes() == b"theirs"
    assert os.listdir(theirs.parent) == [name]


def test_what_appears_in_a_new_directory_meanwhile_stays(
    external: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, theirs = TempFile.copy_attributes, tmp_path / "new" / "theirs"

    def meddle(*args: Any, **how: Any) -> None:
        real(*args, **how)
        theirs.parent.mkdir(exist_ok=True)
        theirs.touch()

    monkeypatch.setattr(TempFile, "copy_attributes", meddle)
    with pytest.raises(WriteError, match=r"Directory not empty.*appeared there"):
        rename(external, "VLLM", output=tmp_path / "new" / "m.onnx")
    assert os.listdir(tmp_path / "new") == ["theirs"]
    assert sorted(os.listdir(tmp_path)) == ["external", "new"]


def test_data_that_are_changed_meanwhile_are_refused(
    external: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, weights = externaldata.plan_data_copies, external.with_name("decoder.onnx.data")

    def meddle(*args: object, **how: object) -> object:
        weights.write_bytes(weights.read_bytes()[::-1])
        return real(*args, **how)

    monkeypatch.setattr("onnxkvrename.renaming.prepare.plan_data_copies", meddle)
    with pytest.raises(ModelError, match="by another program"):
        rename(external, "VLLM", output=tmp_path / "new" / "m.onnx")
    assert not (tmp_path / "new").exists()


def test_the_space_for_model_and_data_is_asked_for_beforehand(
    external: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, wanted = os.statvfs, external.with_name("decoder.onnx.data").stat().st_size

    def little(path: object) -> os.statvfs_result:
        given = list(real(tmp_path))
        given[4] = wanted // given[1] + 1  # f_bavail, enough for the data alone
        return os.statvfs_result(given)

    monkeypatch.setattr(os, "statvfs", little)
    with pytest.raises(WriteError, match="the disk has"):
        rename(external, "VLLM", output=tmp_path / "new" / "m.onnx")
    assert not (tmp_path / "new").exists()


# What looks on, and what helps.


def test_a_watch_hears_of_each_model_read_and_of_each_file_written(
    external: Path, tmp_path: Path
) -> None:
    external.with_name("other.onnx").write_bytes(external.read_bytes())
    watch = Watching()
    jobs = find_jobs([external.parent], None, tmp_path / "out")
    rename_batch(Request(token="VLLM"), jobs, QEFF, progress=watch)
    assert watch.seen.pop(("reading", 2)) == [1, 1]
    assert watch.seen.pop(("writing", 3)) == [1, 1, 1]
    size = sum(path.stat().st_size for path in (tmp_path / "out").iterdir())
    assert [(key, sum(steps)) for key, steps in watch.seen.items()] == [
        (("writing bytes", size), size)
    ]


@pytest.fixture(params=[ThreadPoolExecutor, ProcessPoolExecutor])
def executor(request: pytest.FixtureRequest) -> Iterator[Executor]:
    with request.param(2) as pool:
        yield pool


def test_any_executor_may_do_the_work(external: Path, tmp_path: Path, executor: Executor) -> None:
    for name in ("b.onnx", "c.onnx"):
        external.with_name(name).write_bytes(external.read_bytes())
    here, there = (
        find_jobs([external.parent], None, tmp_path / name) for name in ("here", "there")
    )
    alone = rename_batch(Request(token="VLLM"), here, QEFF)
    spread = rename_batch(Request(token="VLLM"), there, QEFF, executor=executor)
    assert statuses(spread) == statuses(alone) == ["renamed"] * 3
    names = sorted(os.listdir(tmp_path / "here"))
    assert sorted(os.listdir(tmp_path / "there")) == names
    for name in names:
        assert (tmp_path / "there" / name).read_bytes() == (tmp_path / "here" / name).read_bytes()
    assert sorted(os.listdir(tmp_path)) == ["external", "here", "there"]


def test_so_does_it_tell_what_is_wrong(tmp_path: Path, executor: Executor, snapshot) -> None:
    saved(models.decoder(), tmp_path / "a.onnx")
    saved(b"text", tmp_path / "b.onnx")
    before = snapshot(tmp_path)
    report = rename_batch(Request(token="VLLM"), find_jobs([tmp_path]), QEFF, executor=executor)
    assert statuses(report) == ["would-rename", "failed"]
    assert str(report.models[1].error).startswith(f"{tmp_path / 'b.onnx'}: ")
    assert snapshot(tmp_path) == before


# What others have left, and others who are at work.


def test_a_second_run_in_the_same_directory_is_refused_after_a_while_and_changes_nothing(
    tmp_path: Path, snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "abc":
        (tmp_path / name).mkdir()
    paths = [saved(models.decoder(), tmp_path / name / "m.onnx") for name in "abc"]
    left = paths[1].with_name(build_temp_name(build_key(), "new"))
    left.touch()
    before = snapshot(tmp_path)
    monkeypatch.setattr(lock, "_MAX_WAIT", 0)
    said = "is being processed by another run"
    with open_locks([paths[1].parent]), pytest.raises(WriteError, match=said) as caught:
        together(*paths)
    assert caught.value.path == str(tmp_path / "b")
    assert snapshot(tmp_path) == before
    assert statuses(together(*paths)) == ["renamed"] * 3
    assert not left.exists()


def test_a_model_of_which_a_dead_run_has_kept_a_link_is_renamed_at_once(decoder: Path) -> None:
    """Killed between keeping a way back and the replacement. To clear it is no change."""
    os.link(decoder, decoder.with_name(build_temp_name(build_key(), "old")))
    assert rename(decoder, "VLLM", dry_run=True).status == "would-rename"
    assert len(os.listdir(decoder.parent)) == 2
    assert rename(decoder, "VLLM").status == "renamed"
    assert os.listdir(decoder.parent) == ["decoder.onnx"]


@pytest.mark.usefixtures("few_descriptors")
def test_a_large_set_takes_few_descriptors(tmp_path: Path) -> None:
    content = models.decoder().SerializeToString()
    for number in range(100):
        (tmp_path / f"{number}.onnx").write_bytes(content)
    assert statuses(together(tmp_path)) == ["renamed"] * 100
    assert sorted(os.listdir(tmp_path)) == sorted(f"{number}.onnx" for number in range(100))


# What a plain rename has no need of is not done for it.


def test_a_plain_rename_resolves_few_paths(decoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resolved: list[str] = []
    real = os.path.realpath

    def record(path: Any, **options: Any) -> Any:
        resolved.append(os.fspath(path))
        return real(path, **options)

    monkeypatch.setattr(os.path, "realpath", record)
    assert statuses(together(decoder)) == ["renamed"]
    assert len(resolved) <= 6
    resolved.clear()
    assert rename(decoder, strip=True).status == "renamed"
    assert len(resolved) <= 6


def test_a_plain_rename_looks_for_no_data(decoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise AssertionError(args)

    monkeypatch.setattr("onnxkvrename.rules.kv_model.find_data_files", fail)
    monkeypatch.setattr("onnxkvrename.rules.kv_model.read_export_info", fail)
    assert rename(decoder, "VLLM").status == "renamed"
