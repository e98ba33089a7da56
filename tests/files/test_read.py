"""Files are read without waiting, and an error is never taken for an answer."""

from __future__ import annotations

import errno
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
from files.conftest import refuse

from onnxkvrename import ModelError
from onnxkvrename.files.read import (
    has_content,
    is_directory,
    is_file_unchanged,
    is_link,
    is_occupied,
    open_file,
    read_chunks,
    read_status,
    read_text_file,
    resolve_path,
)

needs_links = pytest.mark.skipif(os.name == "nt", reason="links and their errors as POSIX has them")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source.onnx"
    path.write_bytes(bytes(range(256)) * 5000)
    return path


def test_file_is_read_at_any_place_and_compared_to_its_last_byte(source: Path) -> None:
    content = source.read_bytes()
    with open_file(source) as file:
        assert file.size == 1_280_000
        assert file.read(3, 2) == b"\3\4"
        assert file.read(file.size - 1, 10) == b"\xff"
        assert file.read(file.size, 1) == b""
        parts = list(read_chunks(file, 1, file.size - 1))
    assert [len(part) for part in parts] == [1 << 20, 1_280_000 - (1 << 20) - 1]
    assert b"".join(parts) == content[1:]
    for others in (
        [content[:9], content[9:]],
        [content[:-1]],
        [content[:-1], b"x"],
        [content, b""],
    ):
        is_same = has_content(source, sum(map(len, others)), others)
        assert is_same is (b"".join(others) == content)


@pytest.mark.parametrize(
    "change",
    [
        lambda path: path.write_bytes(b"more"),
        lambda path: os.utime(path, ns=(0, 0)),
        lambda path: path.unlink(),
        lambda path: os.replace(path.with_name("other"), path),
        lambda path: path.chmod(0o600),
    ],
    ids=["written", "touched", "gone", "replaced", "mode"],
)
def test_any_change_of_an_open_file_is_noticed(
    change: Callable[[Path], object], source: Path
) -> None:
    source.with_name("other").write_bytes(source.read_bytes())
    with open_file(source) as file:
        assert is_file_unchanged(source, file.identity)
        # Another machine numbers its file systems differently, and this one can tell.
        travelled = pickle.loads(pickle.dumps(file.identity))
        assert is_file_unchanged(source, travelled)
        assert not is_file_unchanged(
            source, file.identity._replace(device=file.identity.device + 1)
        )
        change(source)
        assert not is_file_unchanged(source, file.identity)
        assert not is_file_unchanged(source, travelled)


@pytest.mark.parametrize(
    ("content", "fault"),
    [(b"x" * 11, "11 bytes"), (b"\xff", "UTF-8"), (b"\xef\xbb\xbf1234567", None)],
)
def test_text_must_be_short_and_utf8(content: bytes, fault: str | None, source: Path) -> None:
    source.write_bytes(content)
    if fault is None:
        assert read_text_file(source, limit=10) == "1234567"
        return
    with pytest.raises(ModelError, match=fault):
        read_text_file(source, limit=10)


# What is at a path.


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a file, a directory, and links to them, to nothing, in a circle."""
    (tmp_path / "directory").mkdir()
    (tmp_path / "file").write_text("text")
    for name, target in {
        "to_file": "file",
        "to_directory": "directory",
        "to_parent": "directory/..",
        "to_nothing": "directory/nothing",
        "to_link": "to_file",
        "circle": "circle",
    }.items():
        (tmp_path / name).symlink_to(target)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@needs_links
@pytest.mark.parametrize(
    ("path", "expected", "answers"),
    [
        ("file", "file", "exists occupied"),
        ("./directory/../file", "file", "exists occupied"),
        ("directory", "directory", "exists occupied directory"),
        ("directory//file/", "directory/file", ""),
        ("to_file", "file", "exists occupied link"),
        ("to_link", "file", "exists occupied link"),
        ("to_directory", "directory", "exists occupied directory link"),
        ("to_directory/new/file", "directory/new/file", ""),
        ("to_parent/to_directory/..", "", "exists occupied directory"),
        ("to_nothing", "directory/nothing", "occupied link"),
        ("nothing/../to_file", "file", ""),
        ("file/below", "file/below", ""),
    ],
)
def test_what_is_at_a_path_and_where_it_leads(
    path: str, expected: str, answers: str, here: Path
) -> None:
    assert resolve_path(path) == os.path.realpath(path)
    assert Path(resolve_path(here / path)) == (here / expected).resolve()
    found = {
        "exists": read_status(path) is not None,
        "occupied": is_occupied(path),
        "directory": is_directory(path),
        "link": is_link(path),
    }
    assert {name for name, answer in found.items() if answer} == set(answers.split())


@needs_links
@pytest.mark.parametrize(
    "question", [read_status, is_directory, is_link, is_occupied, resolve_path]
)
def test_error_is_no_answer(
    question: Callable[[Path | str], object], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons = {"circle/below": os.strerror(errno.ELOOP), "with\0zero": "embedded null"}
    reasons["n" * 300] = os.strerror(errno.ENAMETOOLONG)
    for path, reason in reasons.items():
        with pytest.raises(ModelError, match=reason):
            question(path)
    for number in (errno.EIO, errno.ESTALE, errno.EACCES, errno.ETIMEDOUT):
        with monkeypatch.context() as patch:
            patch.setattr(os, "stat", refuse(number))
            patch.setattr(os, "lstat", refuse(number))
            with pytest.raises(ModelError, match=f"cannot be read: {os.strerror(number)}"):
                question(here / "file")
    if question is resolve_path:
        (here / "gone").mkdir()
        os.chdir(here / "gone")
        (here / "gone").rmdir()
        with pytest.raises(ModelError, match="the working directory"):
            question("file")


@pytest.mark.parametrize("call", ["stat", "fstat", "pread"])
def test_file_that_cannot_be_read_is_named_and_not_called_changed(
    call: str, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_file(source) as file, monkeypatch.context() as patch:
        questions: dict[str, Callable[[], object]] = {
            "stat": lambda: is_file_unchanged(source, file.identity),
            "fstat": file.is_unchanged,
            "pread": lambda: file.read(0, 1),
        }
        patch.setattr(os, call, refuse(errno.EIO))
        with pytest.raises(ModelError, match="Input/output error") as caught:
            questions[call]()
        assert caught.value.path == str(source)
