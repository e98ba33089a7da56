from __future__ import annotations

import os
from pathlib import Path

import pytest

from onnxkvrename import Finding, WriteError, rename
from onnxkvrename.model.external_data import find_data_files
from onnxkvrename.model.proto_reader import ExternalReference
from onnxkvrename.storage.read import open_file


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A place for a model, with data of ten bytes beside it, and others elsewhere."""
    here = tmp_path / "here"
    for directory in (here / "sub", tmp_path / "elsewhere"):
        directory.mkdir(parents=True)
        (directory / "w.bin").write_bytes(bytes(10))
    (here / "w.bin").write_bytes(bytes(10))
    (here / "w..bin").write_bytes(bytes(10))
    (here / "model.onnx").write_bytes(b"model")
    (here / "within").symlink_to("w.bin")
    (here / "without").symlink_to("../elsewhere/w.bin")
    (here / "linked").symlink_to("../elsewhere")
    (here / "loop").symlink_to("loop")
    os.link(here / "model.onnx", here / "twin.onnx")
    os.mkfifo(here / "pipe")
    return here / "model.onnx"


def located(model: Path, *references: ExternalReference) -> list[str]:
    """For each reference the path below the model's directory, or the finding."""
    with open_file(model) as file:
        all_found = list(find_data_files(references, file))
    return [
        f"{found.code} {found.message}"
        if isinstance(found, Finding)
        else str(found.path.relative_to(model.parent))
        for found in all_found
    ]


@pytest.mark.parametrize(
    ("location", "expected"),
    [
        ("w.bin", "w.bin"),
        ("./w.bin", "w.bin"),
        ("sub/w.bin", "sub/w.bin"),
        ("w..bin", "w..bin"),
        ("within", "w.bin"),
        ("../elsewhere/w.bin", "KV501"),
        ("../here/w.bin", "KV501"),
        ("sub/../w.bin", "KV501"),
        ("sub/../../elsewhere/w.bin", "KV501"),
        ("/etc/passwd", "KV501"),
        ("C:\\w.bin", "KV501"),
        ("C:w.bin", "KV501"),
        ("\\\\host\\share\\w.bin", "KV501"),
        ("sub\\..\\..\\w.bin", "KV501"),
        ("w.bin\0", "KV501"),
        ("without", "KV501"),
        ("linked/w.bin", "KV501"),
        ("model.onnx", "KV501 is the model itself"),
        ("twin.onnx", "KV501 is the model itself"),
        ("none", "KV502 holds w, but is missing"),
        ("~", "KV502"),
        ("file:///etc/passwd", "KV502"),
        ("n" * 5000, "KV502"),
        ("loop", "KV502"),
        (".", "KV502 holds w, but is a directory"),
        ("sub", "KV502 holds w, but is a directory"),
        ("pipe", "KV502 holds w, but is no regular file"),
    ],
)
def test_data_must_be_a_file_that_lies_with_the_model(
    location: str, expected: str, model: Path
) -> None:
    (found,) = located(model, ExternalReference(location, 10, "w"))
    assert found.startswith(expected)


def test_data_must_be_long_enough(model: Path) -> None:
    assert located(model, ExternalReference("w.bin", 11, "w")) == [
        "KV503 has 10 bytes, but w ends at 11"
    ]
    assert located(model, ExternalReference("w.bin", 1 << 60, "w"))[0].startswith("KV503")


def test_an_entry_that_is_wrong_in_itself_is_not_looked_for(model: Path) -> None:
    (found,) = located(model, ExternalReference("", 0, "w", "has no location"))
    assert found == "KV503 external data of w has no location"


def test_each_file_is_given_once(model: Path) -> None:
    references = [ExternalReference("w.bin", end, f"w{end}") for end in (1, 2)]
    assert located(model, *references) == ["w.bin"]


def test_a_model_in_the_working_directory_needs_no_directory_in_its_path(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model.parent)
    with open_file(Path("model.onnx")) as file:
        (found,) = find_data_files([ExternalReference("w.bin", 10, "w")], file)
    assert not isinstance(found, Finding)


# Data on their way with the model.

DATA = "decoder.onnx.data"


def test_in_the_same_directory_data_stay_untouched(external: Path, snapshot) -> None:
    before = snapshot(external.parent)[DATA]
    rename(external, "VLLM", output=external.with_name("renamed.onnx"))
    rename(external, "VLLM")
    after = snapshot(external.parent)
    assert after.pop(DATA) == before
    assert set(after) == {"decoder.onnx", "renamed.onnx"}


def test_into_another_directory_data_are_copied_with_their_mode(
    external: Path, tmp_path: Path
) -> None:
    (external.parent / DATA).chmod(0o604)
    report = rename(external, "VLLM", output=tmp_path / "new" / "dir" / "m.onnx")
    copy = tmp_path / "new" / "dir" / DATA
    assert report.status == "renamed"
    assert copy.read_bytes() == (external.parent / DATA).read_bytes()
    assert copy.stat().st_mode & 0o777 == 0o604
    assert not copy.is_symlink()
    assert copy.stat().st_nlink == 1


def test_the_same_data_there_already_are_left_alone(external: Path, tmp_path: Path) -> None:
    (tmp_path / DATA).write_bytes((external.parent / DATA).read_bytes())
    os.utime(tmp_path / DATA, ns=(0, 0))
    assert rename(external, "VLLM", output=tmp_path / "m.onnx").status == "renamed"
    assert (tmp_path / DATA).stat().st_mtime_ns == 0


def test_data_that_are_gone_are_put_back_beside_a_result_that_stands(
    external: Path, tmp_path: Path
) -> None:
    rename(external, "VLLM", output=tmp_path / "m.onnx")
    (tmp_path / DATA).unlink()
    assert rename(external, "VLLM", output=tmp_path / "m.onnx").status == "unchanged"
    assert (tmp_path / DATA).read_bytes() == (external.parent / DATA).read_bytes()


@pytest.mark.parametrize("link", [False, True])
def test_other_data_there_are_replaced_only_with_force(
    link: bool, external: Path, tmp_path: Path
) -> None:
    output, there = tmp_path / "m.onnx", tmp_path / DATA
    if link:
        there.symlink_to("nowhere")
    else:
        there.write_bytes(b"other")
    report = rename(external, "VLLM", output=output)
    assert [(found.code, found.name) for found in report.findings] == [("KV504", str(there))]
    assert there.is_symlink() or there.read_bytes() == b"other"
    assert not output.exists()
    assert rename(external, "VLLM", output=output, force=True).status == "renamed"
    assert there.read_bytes() == (external.parent / DATA).read_bytes()


def test_a_directory_there_is_not_replaced_even_with_force(external: Path, tmp_path: Path) -> None:
    (tmp_path / DATA).mkdir()
    report = rename(external, "VLLM", output=tmp_path / "m.onnx")
    assert [found.code for found in report.findings] == ["KV504"]
    with pytest.raises(WriteError, match="Is a directory"):
        rename(external, "VLLM", output=tmp_path / "m.onnx", force=True)
    assert not (tmp_path / "m.onnx").exists()


def test_with_force_a_link_is_replaced_and_what_it_leads_to_is_not(
    external: Path, tmp_path: Path
) -> None:
    (tmp_path / "precious").write_bytes(b"precious")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / DATA).symlink_to(tmp_path / "precious")
    rename(external, "VLLM", output=tmp_path / "out" / "m.onnx", force=True)
    assert (tmp_path / "precious").read_bytes() == b"precious"
    assert not (tmp_path / "out" / DATA).is_symlink()


def test_data_that_are_too_short_stop_everything(external: Path, tmp_path: Path) -> None:
    os.truncate(external.parent / DATA, 100)
    report = rename(external, "VLLM", output=tmp_path / "m.onnx")
    assert (report.status, [found.code for found in report.findings]) == ("failed", ["KV503"])
    assert not (tmp_path / "m.onnx").exists()
    assert report.findings[0].severity == "error"


def test_a_model_that_has_its_token_still_takes_its_data_along(
    external: Path, tmp_path: Path
) -> None:
    rename(external, "VLLM")
    report = rename(external, "VLLM", output=tmp_path / "m.onnx")
    assert report.status == "unchanged"
    assert (tmp_path / "m.onnx").read_bytes() == external.read_bytes()
    assert (tmp_path / DATA).exists()
