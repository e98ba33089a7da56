from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from onnxkvrename import ModelError
from onnxkvrename.storage.read import (
    is_directory,
    is_link,
    is_occupied,
    read_status,
    resolve_path,
)

needs_links = pytest.mark.skipif(os.name == "nt", reason="links and their errors as POSIX has them")


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
def test_what_is_at_a_path(here: Path) -> None:
    paths = ["file", "directory", "to_file", "to_directory", "to_nothing", "nothing", "file/below"]
    assert [path for path in paths if read_status(path) is None] == [
        *("to_nothing", "nothing", "file/below")
    ]
    assert [path for path in paths if is_occupied(path)] == paths[:5]
    assert [path for path in paths if is_directory(path)] == ["directory", "to_directory"]
    assert [path for path in paths if is_link(path)] == ["to_file", "to_directory", "to_nothing"]


QUESTIONS = [read_status, is_directory, is_link, is_occupied, resolve_path]


@needs_links
@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES, errno.ETIMEDOUT])
@pytest.mark.parametrize("question", QUESTIONS)
def test_an_error_is_no_answer(
    question: Callable[[Path], object], number: int, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: object) -> os.stat_result:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "stat", fail)
    monkeypatch.setattr(os, "lstat", fail)
    with pytest.raises(ModelError, match=f"cannot be read: {os.strerror(number)}"):
        question(here / "file")


@needs_links
@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("circle/below", os.strerror(errno.ELOOP)),
        ("n" * 300, os.strerror(errno.ENAMETOOLONG)),
        ("with\0zero", "embedded null"),
    ],
)
@pytest.mark.parametrize("question", QUESTIONS)
def test_a_path_that_no_file_can_have_is_an_error_with_its_reason(
    question: Callable[[str], object], path: str, reason: str, here: Path
) -> None:
    with pytest.raises(ModelError, match=reason):
        question(path)


@needs_links
@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("file", "file"),
        ("./directory/../file", "file"),
        ("to_link", "file"),
        ("to_directory/new/file", "directory/new/file"),
        ("to_parent/to_directory/..", ""),
        ("to_nothing", "directory/nothing"),
        ("nothing/../to_file", "file"),
        ("directory//file/", "directory/file"),
    ],
)
def test_a_path_is_resolved_as_python_does(path: str, expected: str, here: Path) -> None:
    assert resolve_path(path) == os.path.realpath(path)
    assert Path(resolve_path(here / path)) == (here / expected).resolve()


@needs_links
def test_links_in_a_circle_lead_nowhere(here: Path) -> None:
    with pytest.raises(ModelError, match=f"circle: .*{os.strerror(errno.ELOOP)}"):
        resolve_path("circle")


@needs_links
def test_without_a_working_directory_a_relative_path_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(ModelError, match="the working directory"):
        resolve_path("file")
    assert resolve_path(tmp_path) == os.path.realpath(tmp_path)
