"""Files are read without waiting, and an error is never taken for an answer."""

from __future__ import annotations

import errno
import os
import pickle
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from files.conftest import refuse

from onnxkvrename import ModelError
from onnxkvrename.files.read import (
    FileIdentity,
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


def test_a_file_is_read_at_any_place_and_not_past_its_end(source: Path) -> None:
    with open_file(source) as file:
        assert file.size == 1_280_000
        assert file.read(3, 2) == b"\3\4"
        assert file.read(file.size - 1, 10) == b"\xff"
        assert file.read(file.size, 1) == b""
        parts = list(read_chunks(file, 1, file.size - 1))
    assert [len(part) for part in parts] == [1 << 20, 1_280_000 - (1 << 20) - 1]
    assert b"".join(parts) == source.read_bytes()[1:]


@pytest.mark.parametrize(
    ("name", "make", "message"),
    [
        ("x", lambda path: None, "no such file"),
        ("x", lambda path: os.mkfifo(path), "not a regular"),
        ("x", os.mkdir, "is a directory"),
        ("x", lambda path: path.symlink_to("/dev/zero"), "not a regular"),
        ("x", lambda path: path.symlink_to(path), "Too many levels"),
        ("x", lambda path: path.symlink_to("nowhere"), "no such file"),
        ("x", lambda path: socket.socket(socket.AF_UNIX).bind(path.name), "cannot be"),
        ("n" * 300, lambda path: None, "cannot be"),
        ("a\0b", lambda path: None, "cannot be"),
    ],
    ids=["nothing", "pipe", "directory", "device", "loop", "dangling", "socket", "long", "zero"],
)
def test_what_is_no_file_is_refused_without_waiting(
    name: str,
    make: Callable[[Path], object],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)  # the path of a socket has a limit of about 100 bytes
    make(tmp_path / name)
    with pytest.raises(ModelError, match=message) as caught, open_file(tmp_path / name):
        pass
    assert caught.value.path == str(tmp_path / name)


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
        change(source)
        assert not is_file_unchanged(source, file.identity)


def test_a_file_of_another_file_system_is_another_one_where_that_can_be_told() -> None:
    """Another machine numbers its file systems differently."""
    here, other = FileIdentity(1, 2, 3, 4, device=5), FileIdentity(1, 2, 3, 4, device=6)
    assert here.matches(here)
    assert not here.matches(other)
    travelled = pickle.loads(pickle.dumps(other))
    assert here.matches(travelled)
    assert travelled.matches(here)
    assert not here.matches(travelled._replace(ctime_ns=5))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"\xff", "is not UTF-8 text"),
        (b"x" * 11, "11 bytes"),
        (b"x" * 10, None),
        (b"\xef\xbb\xbfa", None),
    ],
)
def test_text_must_be_short_and_utf8(content: bytes, expected: str | None, tmp_path: Path) -> None:
    path = tmp_path / "rules.toml"
    path.write_bytes(content)
    if expected is None:
        assert read_text_file(path, limit=10) == content.decode("utf-8-sig")
        return
    with pytest.raises(ModelError, match=expected):
        read_text_file(path, limit=10)


@pytest.mark.parametrize(
    "parts", [[b"ab", b"c"], [b"abc", b""], [b"ab", b"d"], [b"ab"], [b"ab", b"cd"]]
)
def test_content_is_compared_to_the_last_byte(parts: list[bytes], tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abc")
    is_same = has_content(tmp_path / "x", sum(map(len, parts)), parts)
    assert is_same is (b"".join(parts) == b"abc")


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
def test_what_is_at_a_path(here: Path) -> None:
    paths = ["file", "directory", "to_file", "to_directory", "to_nothing", "nothing", "file/below"]
    assert [path for path in paths if read_status(path) is None] == paths[4:]
    assert [path for path in paths if is_occupied(path)] == paths[:5]
    assert [path for path in paths if is_directory(path)] == ["directory", "to_directory"]
    assert [path for path in paths if is_link(path)] == ["to_file", "to_directory", "to_nothing"]


@needs_links
@pytest.mark.parametrize(
    "question", [read_status, is_directory, is_link, is_occupied, resolve_path]
)
def test_an_error_is_no_answer(
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


@pytest.mark.parametrize("call", ["stat", "fstat", "pread"])
def test_a_file_that_cannot_be_read_is_named_and_not_called_changed(
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


@needs_links
@pytest.mark.parametrize(
    ("path", "expected"),
    [
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
def test_without_a_working_directory_a_relative_path_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(ModelError, match="the working directory"):
        resolve_path("file")
    assert resolve_path(tmp_path) == os.path.realpath(tmp_path)
