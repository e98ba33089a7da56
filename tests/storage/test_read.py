from __future__ import annotations

import errno
import os
import pickle
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from onnxkvrename import ModelError
from onnxkvrename.storage.read import (
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
    path.write_bytes(bytes(range(256)) * 1024)
    return path


def test_a_file_is_read_at_any_place_and_not_past_its_end(source: Path) -> None:
    with open_file(source) as file:
        assert file.size == 256 * 1024
        assert file.read(3, 2) == b"\3\4"
        assert file.read(file.size - 1, 10) == b"\xff"
        assert file.read(file.size, 1) == b""


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "no such file"),
        (lambda path: os.mkfifo(path), "not a regular"),
        (os.mkdir, "is a directory"),
        (lambda path: path.symlink_to("/dev/zero"), "not a regular"),
        (lambda path: path.symlink_to(path), "Too many levels"),
        (lambda path: path.symlink_to("nowhere"), "no such file"),
        (lambda path: socket.socket(socket.AF_UNIX).bind(path.name), "cannot be"),
    ],
    ids=["nothing", "pipe", "directory", "device", "loop", "dangling", "socket"],
)
def test_what_is_no_file_is_refused_without_waiting(
    make: Callable[[Path], object], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the path of a socket has a limit of about 100 bytes
    make(tmp_path / "x")
    with pytest.raises(ModelError, match=message) as caught, open_file(tmp_path / "x"):
        pass
    assert caught.value.path == str(tmp_path / "x")


@pytest.mark.parametrize("name", ["n" * 300, "a\0b"])
def test_a_path_that_cannot_be_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be"), open_file(tmp_path / name):
        pass


@pytest.mark.parametrize("call", ["fstat", "pread"])
def test_a_source_that_cannot_be_read_is_named(
    call: str, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise OSError(5, "Input/output error")

    def read() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(os, call, fail)
            with open_file(source) as file:
                file.read(0, 1)

    with pytest.raises(ModelError, match="Input/output error") as caught:
        read()
    assert caught.value.path == str(source)


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


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EACCES, errno.ELOOP])
def test_an_error_does_not_tell_that_a_file_has_changed(
    number: int, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise OSError(number, os.strerror(number))

    with open_file(source) as file:
        with monkeypatch.context() as patch:
            patch.setattr(os, "stat", fail)
            with pytest.raises(ModelError, match=os.strerror(number)):
                is_file_unchanged(source, file.identity)
        assert file.is_unchanged()
        os.utime(source, ns=(0, 0))
        assert not file.is_unchanged()


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
    ("content", "message"),
    [(b"\xff", "is not UTF-8 text"), (b"x" * 11, "11 bytes")],
)
def test_text_must_be_short_and_utf8(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "rules.toml"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=message):
        read_text_file(path, limit=10)


def test_text_may_have_as_many_bytes_as_the_limit_says(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"x" * 10)
    assert read_text_file(tmp_path / "x", limit=10) == "x" * 10


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"\xef\xbb\xbfa")
    assert read_text_file(tmp_path / "x") == "a"


@pytest.mark.parametrize(
    ("parts", "same"),
    [
        ([b"ab", b"c"], True),
        ([b"abc", b""], True),
        ([b"ab", b"d"], False),
        ([b"ab"], False),
        ([b"ab", b"cd"], False),
    ],
)
def test_content_is_compared_to_the_last_byte(
    parts: list[bytes], same: bool, tmp_path: Path
) -> None:
    (tmp_path / "x").write_bytes(b"abc")
    assert has_content(tmp_path / "x", sum(map(len, parts)), parts) is same


def test_chunks_are_a_megabyte_and_leave_nothing_out(tmp_path: Path) -> None:
    content = os.urandom((1 << 20) + 5)
    (tmp_path / "x").write_bytes(content)
    with open_file(tmp_path / "x") as file:
        parts = list(read_chunks(file, 1, len(content) - 1))
    assert [len(part) for part in parts] == [1 << 20, 4]
    assert b"".join(parts) == content[1:]


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
