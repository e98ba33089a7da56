from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import models
import pytest
from models import KEY, info, node, saved

from onnxkvrename import (
    Job,
    KvRenameError,
    ModelError,
    Options,
    Report,
    RulesError,
    Wish,
    WriteError,
    externaldata,
    find,
    load_rules,
    onnxfile,
    rename,
    rename_set,
)
from onnxkvrename.drafts import Draft
from onnxkvrename.results import Status

QEFF = load_rules()
LOOK = Options(write=False)


def together(
    *paths: Path, directory: Path | None = None, strip: bool = False, **options: bool
) -> Report:
    jobs = find(list(paths), None, directory)
    return rename_set(jobs, Wish("VLLM", strip=strip), QEFF, Options(**options))


def statuses(report: Report) -> list[Status]:
    return [model.status for model in report.models]


def codes(report: Report) -> list[list[str]]:
    return [[found.code for found in model.findings] for model in report.models]


def test_a_model_is_renamed_in_place(decoder: Path, renamed: bytes) -> None:
    report = rename(decoder, "VLLM")
    assert decoder.read_bytes() == renamed
    assert os.listdir(decoder.parent) == ["decoder.onnx"]
    assert (report.status, report.path, report.output) == ("renamed", str(decoder), str(decoder))
    assert report.names["past_value.1"] == "past_value.1_VLLM"
    assert len(report.names) == 8


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
    monkeypatch.setattr(Draft, "keep", lambda draft, source, *, owner, force: asked.append(owner))
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
    assert report.findings[0].message.endswith("one of 8 such names: OLD")
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
    assert report.names[f"{KEY}_InternalRetainedState"] == f"{KEY}_V_RetainedState"
    assert b"Internal" not in path.read_bytes()


def test_to_look_ahead_writes_nothing(decoder: Path, snapshot, tmp_path: Path) -> None:
    before = snapshot(tmp_path)
    report = rename(decoder, "VLLM", output=tmp_path / "new" / "m.onnx", options=LOOK)
    assert report.status == "would-rename"
    assert len(report.names) == 8
    assert snapshot(tmp_path) == before
    assert not (tmp_path / "new").exists()


def test_a_look_that_does_not_mind_the_place_sees_only_the_model(decoder: Path) -> None:
    decoder.chmod(0o444)
    options = Options(write=False, place=False)
    assert rename(decoder, "VLLM", options=options).status == "would-rename"
    with pytest.raises(WriteError, match="read-only"):
        rename(decoder, "VLLM", options=LOOK)


@pytest.mark.parametrize("token", [None, "a_b"])
def test_a_token_that_cannot_be_is_an_exception(token: str | None, decoder: Path) -> None:
    with pytest.raises(RulesError):
        rename(decoder, token)


def test_the_call_that_feeds_back_names_output_and_token(decoder: Path) -> None:
    output = decoder.with_name("{token}.onnx")
    report = rename(decoder, "VLLM", output=output)
    assert report.feed_back == f'compile(onnx_path="{output}", kv_cache_prefix="VLLM")'
    assert rename(output, strip=True).feed_back is None


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
    assert (report.exit_code(), report.exit_code(look=True)) == (1, 1)


def test_an_unreadable_model_of_two_is_worse_than_a_finding(tmp_path: Path, snapshot) -> None:
    good = saved(models.decoder(), tmp_path / "a.onnx")
    saved(b"text", tmp_path / "b.onnx")
    before = snapshot(tmp_path)
    report = together(tmp_path)
    assert statuses(report) == ["would-rename", "failed"]
    assert isinstance(report.models[1].error, ModelError)
    assert snapshot(tmp_path) == before
    assert report.exit_code() == 2
    assert good.exists()


def test_no_buffer_in_any_model_is_a_finding_that_lists_the_outputs(tmp_path: Path) -> None:
    model = models.decoder()
    del model.graph.output[1:], model.graph.input[1:3], model.graph.node[:]
    model.graph.node.append(node("Neg", ["x"], ["logits"]))
    encoder = saved(model, tmp_path / "encoder.onnx")
    report = together(encoder)
    assert codes(report) == [["KV001"]]
    assert "the outputs are logits" in report.models[0].findings[0].message
    assert report.exit_code() == 1
    saved(models.decoder(), tmp_path / "decoder.onnx")
    report = together(tmp_path)
    assert codes(report) == [[], []]
    assert statuses(report) == ["renamed", "unchanged"]
    assert report.models[1].feed_back is None
    assert encoder.read_bytes() == model.SerializeToString()


def test_no_two_results_may_stand_in_one_place(tmp_path: Path, snapshot) -> None:
    one = saved(models.decoder(), tmp_path / "one.onnx")
    two = saved(models.decoder(), tmp_path / "two.onnx")
    before = snapshot(tmp_path)
    for jobs in (
        [Job(one, tmp_path / "new.onnx"), Job(two, tmp_path / "new.onnx")],
        [Job(one, tmp_path / "three.onnx"), Job(two, one)],
    ):
        report = rename_set(jobs, Wish("VLLM"), QEFF, Options(force=True))
        assert "is another model of this run" in str(report.models[1].error)
        assert report.exit_code() == 2
        assert snapshot(tmp_path) == before


def test_strict_makes_a_warning_stop_the_work(tmp_path: Path) -> None:
    model = models.decoder()
    model.graph.output.append(info("mystery_RetainedState"))
    path = saved(model, tmp_path / "m.onnx")
    assert statuses(together(path, strict=True)) == ["failed"]
    assert path.read_bytes() == model.SerializeToString()
    assert statuses(together(path)) == ["renamed"]


def test_data_that_two_models_share_are_copied_once(
    external: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    external.with_name("other.onnx").write_bytes(external.read_bytes())
    copied: list[tuple[str, int]] = []
    jobs = find([external.parent], None, tmp_path / "out")
    report = rename_set(jobs, Wish("VLLM"), QEFF, None, lambda *what: copied.append(what))
    assert statuses(report) == ["renamed", "renamed"]
    size = external.with_name("decoder.onnx.data").stat().st_size
    assert copied == [("decoder.onnx.data", size)]
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
    jobs = [Job(external, out / "a.onnx"), Job(other, out / "b.onnx")]
    report = rename_set(jobs, Wish("VLLM"), QEFF, Options(force=force))
    assert report.exit_code() != 0
    assert not (out / "b.onnx").exists()
    assert not out.exists() or (out / "decoder.onnx.data").read_bytes() == weights


def test_after_a_model_that_could_not_be_written_the_others_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [saved(models.decoder(), tmp_path / f"{name}.onnx") for name in "abc"]
    before = paths[0].read_bytes()
    real = onnxfile.prove

    def fail(draft, *args) -> None:
        real(draft, *args)
        if draft.target.name == "b.onnx":
            raise WriteError("no", path=str(draft.target))

    monkeypatch.setattr(onnxfile, "prove", fail)
    report = together(*paths)
    assert statuses(report) == ["renamed", "failed", "would-rename"]
    assert [path.read_bytes() == before for path in paths] == [False, True, True]
    assert report.exit_code() == 2
    assert sorted(os.listdir(tmp_path)) == ["a.onnx", "b.onnx", "c.onnx"]


@pytest.mark.parametrize("output", [None, "new.onnx"])
def test_a_model_that_is_changed_meanwhile_is_refused(
    output: str | None, decoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the checks and the writing, and while it is written."""
    place = None if output is None else decoder.with_name(output)
    for module, name in ((externaldata, "locate"), (onnxfile, "write")):
        theirs = decoder.read_bytes() + b"\x82\x01\0"  # an unknown field
        real = getattr(module, name)

        def meddle(*args: object, _real=real, _theirs: bytes = theirs) -> object:
            decoder.write_bytes(_theirs)
            return _real(*args)

        with monkeypatch.context() as patch:
            patch.setattr(module, name, meddle)
            with pytest.raises(KvRenameError, match="was changed by someone else just now"):
                rename(decoder, "VLLM", output=place)
        assert decoder.read_bytes() == theirs
        assert os.listdir(decoder.parent) == ["decoder.onnx"]


@pytest.mark.parametrize("name", ["m.onnx", "decoder.onnx.data"])
def test_a_file_that_appears_meanwhile_is_left_alone(
    name: str, external: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, theirs = Draft.keep, tmp_path / "new" / name

    def meddle(draft: Draft, *args: Any, **how: Any) -> None:
        real(draft, *args, **how)
        if draft.target == theirs:
            theirs.write_bytes(b"theirs")

    monkeypatch.setattr(Draft, "keep", meddle)
    with pytest.raises(WriteError, match="File exists"):
        rename(external, "VLLM", output=tmp_path / "new" / "m.onnx")
    assert theirs.read_bytes() == b"theirs"


def test_data_that_are_changed_meanwhile_are_refused(
    external: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, weights = externaldata.standing, external.with_name("decoder.onnx.data")

    def meddle(*args: object, **how: object) -> object:
        weights.write_bytes(weights.read_bytes()[::-1])
        return real(*args, **how)

    monkeypatch.setattr(externaldata, "standing", meddle)
    with pytest.raises(WriteError, match="was changed by someone else just now"):
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
    with pytest.raises(WriteError, match="but the disk has"):
        rename(external, "VLLM", output=tmp_path / "new" / "m.onnx")
    assert not (tmp_path / "new").exists()
