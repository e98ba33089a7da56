from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from models import FORMS, decoder, field, saved
from onnx import ModelProto

from onnxkvrename import ModelReport, load_rules, rename
from onnxkvrename.model.file import STAMP_KEY, open_model, read_pieces, read_stamp, write_stamp
from onnxkvrename.model.protobuf import ByteSource, Span
from onnxkvrename.renaming.request import Request
from onnxkvrename.renaming.run import rename_batch, stamp_models
from onnxkvrename.rules.find_models import build_job
from onnxkvrename.storage.read import FileIdentity

DIGEST = "0123456789abcdef" * 4
OTHER = DIGEST[::-1]


def source(content: bytes) -> ByteSource:
    return ByteSource(lambda offset, size: content[offset : offset + size], len(content))


def written(path: Path, stamp: str | None) -> bytes:
    with open_model(path) as model:
        pieces = write_stamp(model.source, stamp, (Span(0, model.file.size),))
        return b"".join(read_pieces(model.file, pieces))


def stamped(path: Path, digest: str = DIGEST) -> Path:
    report = ModelReport(str(path), str(path), "unchanged", pairs=pairs(path))
    identity = FileIdentity.from_stat(path.stat())
    jobs = [build_job(path, path)]
    result = stamp_models(jobs, [report], [identity], digest, load_rules())
    assert result.compute_exit_code() == 0
    return path


def pairs(path: Path):  # type: ignore[no-untyped-def]
    return rename(path, strip=True, dry_run=True).pairs


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return saved(decoder(), tmp_path / "model.onnx")


def entries(path: Path) -> list[tuple[str, str]]:
    return [(entry.key, entry.value) for entry in onnx.load(path).metadata_props]


def test_a_stamp_is_one_entry_of_the_metadata(model: Path) -> None:
    before = onnx.load(model)
    stamped(model)
    after = onnx.load(model)
    assert entries(model) == [(STAMP_KEY, DIGEST)]
    del after.metadata_props[:]
    assert after == before


def test_a_model_without_one_has_none(model: Path) -> None:
    with open_model(model) as found:
        assert read_stamp(found.source) is None


def test_a_second_stamp_takes_the_place_of_the_first(model: Path) -> None:
    stamped(stamped(model), OTHER)
    assert entries(model) == [(STAMP_KEY, OTHER)]


def test_the_same_stamp_leaves_the_file_alone(model: Path) -> None:
    before = stamped(model).stat()
    assert stamped(model).stat().st_ino == before.st_ino


def test_to_strip_gives_the_bytes_from_before(model: Path) -> None:
    before = model.read_bytes()
    report = rename(stamped(model), strip=True)
    assert (report.status, report.stamp) == ("renamed", "")
    assert model.read_bytes() == before


def test_a_new_token_makes_the_stamp_void(model: Path, tmp_path: Path) -> None:
    plain = saved(decoder(), tmp_path / "plain.onnx")
    rename(plain, "VLLM")
    report = rename(stamped(model), "VLLM")
    assert (len(report.name_map), report.stamp) == (4, "")
    assert model.read_bytes() == plain.read_bytes()


def test_a_rename_that_changes_nothing_leaves_the_stamp(model: Path) -> None:
    rename(model, "VLLM")
    before = stamped(model).read_bytes()
    report = rename(model, "VLLM")
    assert (report.status, report.stamp) == ("unchanged", None)
    assert model.read_bytes() == before


def test_a_look_ahead_says_that_the_stamp_would_go(model: Path) -> None:
    before = stamped(model).read_bytes()
    report = rename(model, strip=True, dry_run=True)
    assert (report.status, report.has_changes, report.name_map) == ("would-rename", True, {})
    assert model.read_bytes() == before


def test_what_others_wrote_into_the_metadata_stays(tmp_path: Path) -> None:
    model = decoder()
    onnx.helper.set_model_props(model, {"framework": "pt", STAMP_KEY: OTHER, "seed": "7"})
    path = stamped(saved(model, tmp_path / "model.onnx"))
    assert entries(path) == [("framework", "pt"), ("seed", "7"), (STAMP_KEY, DIGEST)]
    rename(path, strip=True)
    assert entries(path) == [("framework", "pt"), ("seed", "7")]


@pytest.mark.parametrize("form", FORMS)
def test_however_a_stamp_is_written_it_is_found_and_goes(form: str, tmp_path: Path) -> None:
    plain = decoder()
    model = ModelProto.FromString(plain.SerializeToString())
    onnx.helper.set_model_props(model, {STAMP_KEY: OTHER})
    path = saved(FORMS[form](model), tmp_path / "model.onnx")
    with open_model(path) as found:
        assert read_stamp(found.source) == OTHER
    assert written(path, None) == FORMS[form](plain)


def test_a_tag_that_was_written_too_long_goes_as_a_whole() -> None:
    entry = field(1, STAMP_KEY) + field(2, OTHER)
    tag = bytes([0x80 | 14 << 3 & 0x7F | 2, 0x80, 0x00])
    before, after = field(2, "pt"), field(3, "1")
    found = source(before + tag + bytes([len(entry)]) + entry + after)
    assert read_stamp(found) == OTHER
    pieces = write_stamp(found, None, (Span(0, found.size),))
    parts = [
        found.read_slice(piece.offset, piece.size) for piece in pieces if isinstance(piece, Span)
    ]
    assert parts == [before, after]


def test_the_windows_of_a_set_are_stamped_all_or_none(tmp_path: Path) -> None:
    paths = [saved(decoder(), tmp_path / f"{name}.onnx") for name in ("one", "two", "three")]
    before = [path.read_bytes() for path in paths]
    paths[1].chmod(0o444)
    jobs = [build_job(path, path) for path in paths]
    reports = [ModelReport(str(p), str(p), "unchanged", pairs=pairs(p)) for p in paths]
    files = [FileIdentity.from_stat(path.stat()) for path in paths]
    refused = stamp_models(jobs, reports, files, DIGEST, load_rules())
    assert (refused.compute_exit_code(), [p.read_bytes() for p in paths]) == (2, before)
    forced = stamp_models(jobs, reports, files, DIGEST, load_rules(), force=True)
    assert (forced.compute_exit_code(), [entries(path) for path in paths]) == (
        0,
        [[(STAMP_KEY, DIGEST)]] * 3,
    )
    rename_batch(Request(strip=True, force=True), jobs, load_rules())
    assert [path.read_bytes() for path in paths] == before
