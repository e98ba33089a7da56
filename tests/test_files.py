from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from onnxkvrename import ModelError, WriteError, drafts, files
from onnxkvrename.drafts import Draft, Made

HAS_UNNAMED = hasattr(os, "O_TMPFILE")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source.onnx"
    path.write_bytes(bytes(range(256)) * 1024)
    return path


@pytest.fixture(params=["unnamed", "named"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Drafts without a name, and with a temporary one as where O_TMPFILE is not known."""
    if request.param == "named":
        monkeypatch.setattr(os, "O_TMPFILE", 0, raising=False)
    elif not HAS_UNNAMED:
        pytest.skip("this system knows no unnamed files")
    return str(request.param)


def test_a_file_is_read_at_any_place_and_not_past_its_end(source: Path) -> None:
    with files.opened(source) as file:
        assert file.size == 256 * 1024
        assert file.read(3, 2) == b"\3\4"
        assert file.read(file.size - 1, 10) == b"\xff"
        assert file.read(file.size, 1) == b""


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: None, "no such file"),
        (os.mkfifo, "is no regular file"),
        (os.mkdir, "is a directory"),
        (lambda path: path.symlink_to("/dev/zero"), "is no regular file"),
        (lambda path: path.symlink_to(path), "Too many levels of symbolic links"),
        (lambda path: path.symlink_to("nowhere"), "no such file"),
        (lambda path: socket.socket(socket.AF_UNIX).bind(str(path)), "cannot be"),
    ],
    ids=["nothing", "pipe", "directory", "device", "loop", "dangling", "socket"],
)
def test_what_is_no_file_is_refused_without_waiting(
    make: Callable[[Path], object], said: str, tmp_path: Path
) -> None:
    make(tmp_path / "x")
    with pytest.raises(ModelError, match=said) as caught, files.opened(tmp_path / "x"):
        pass
    assert caught.value.path == str(tmp_path / "x")


@pytest.mark.parametrize("name", ["n" * 300, "a\0b"])
def test_a_path_that_cannot_be_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be"), files.opened(tmp_path / name):
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
            with files.opened(source) as file:
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
    with files.opened(source) as file:
        assert file.unchanged()
        change(source)
        assert not file.unchanged()


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"\xff", "is no UTF-8 text"), (b"x" * 11, "is 11 bytes, more than 10")],
)
def test_text_must_be_short_and_utf8(content: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "rules.toml"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=said):
        files.read_text(path, limit=10)


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"\xef\xbb\xbfa")
    assert files.read_text(tmp_path / "x") == "a"


def test_a_draft_takes_its_place_whole(
    way: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafts, "_CHUNK", 30_000)
    target = tmp_path / "target.onnx"
    told: list[int] = []
    with files.opened(source) as file, Draft(target) as draft:
        draft.write(b"head")
        draft.copy(file, 10, 100_000, told.append)
        draft.write(bytearray(b"tail"))
        assert draft.read(4, 2) == b"\n\v"
        assert not target.exists()
        draft.commit(replace=False)
    assert target.read_bytes() == b"head" + source.read_bytes()[10:100_010] + b"tail"
    assert told == [30_000, 30_000, 30_000, 10_000]
    assert sorted(os.listdir(tmp_path)) == ["source.onnx", "target.onnx"]


def test_a_draft_that_is_not_committed_is_gone(way: str, tmp_path: Path) -> None:
    with Draft(tmp_path / "target.onnx") as draft:
        draft.write(b"half")
        names = os.listdir(tmp_path)
        assert draft.status.st_mode & 0o777 == 0o600  # nobody else's to read before it is whole
    assert len(names) == (way == "named")
    assert not any(name.endswith(".onnx") for name in names)
    assert os.listdir(tmp_path) == []


def test_a_draft_puts_nothing_over_what_has_appeared(way: str, tmp_path: Path) -> None:
    target = tmp_path / "target.onnx"
    with Draft(target) as draft:
        target.write_bytes(b"theirs")
        with pytest.raises(WriteError, match=r"File exists .*--force"):
            draft.commit(replace=False)
    assert target.read_bytes() == b"theirs"
    assert os.listdir(tmp_path) == ["target.onnx"]


def test_a_draft_replaces_if_asked(way: str, source: Path) -> None:
    with Draft(source) as draft:
        draft.write(b"new")
        draft.commit(replace=True)
    assert source.read_bytes() == b"new"
    assert os.listdir(source.parent) == ["source.onnx"]


def test_the_bytes_are_on_the_disk_before_the_name_is(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    for name in ("fsync", "link", "replace"):
        real = getattr(os, name)

        def watched(*args: object, _name: str = name, _real=real, **how: object) -> object:
            seen.append(_name)
            return _real(*args, **how)

        monkeypatch.setattr(os, name, watched)
    with Draft(tmp_path / "target.onnx") as draft:
        draft.commit(replace=True)
    assert seen in (["fsync", "link", "replace", "fsync"], ["fsync", "replace", "fsync"])


def test_a_draft_needs_a_directory_that_is_there(tmp_path: Path) -> None:
    with pytest.raises(WriteError, match="make its directory first"):
        Draft(tmp_path / "none" / "target.onnx")


def test_mode_owner_and_attributes_are_kept(source: Path, tmp_path: Path) -> None:
    source.chmod(0o640)
    if os.geteuid() == 0:
        os.chown(source, 1234, 2345)
    try:
        os.setxattr(source, "user.origin", b"here")
    except OSError:
        pytest.skip("this file system keeps no attributes")
    with files.opened(source) as file, Draft(tmp_path / "copy") as draft:
        draft.keep(file, owner=True, force=False)
        draft.commit(replace=False)
    there, here = (path.stat() for path in (source, tmp_path / "copy"))
    assert (here.st_mode, here.st_uid, here.st_gid) == (there.st_mode, there.st_uid, there.st_gid)
    assert os.getxattr(tmp_path / "copy", "user.origin") == b"here"


def test_an_owner_that_cannot_be_kept_takes_force(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "fchown", refuse)
    with files.opened(source) as file, Draft(tmp_path / "copy") as draft:
        draft.keep(file, owner=True, force=False)  # the same owner: nothing to do
        real = os.fstat(draft.descriptor)
        other = os.stat_result((*real[:4], real.st_uid + 1, *real[5:]))
        monkeypatch.setattr(os, "fstat", lambda descriptor: other)
        with pytest.raises(WriteError, match=r"owner could not be kept \(.*--force"):
            draft.keep(file, owner=True, force=False)
        draft.keep(file, owner=True, force=True)
        draft.keep(file, owner=False, force=False)


def test_a_file_system_without_attributes_does_not_matter(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int) -> list[str]:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "listxattr", refuse, raising=False)
    source.chmod(0o600)
    with files.opened(source) as file, Draft(tmp_path / "copy") as draft:
        draft.keep(file, owner=False, force=False)
        draft.commit(replace=False)
    assert (tmp_path / "copy").stat().st_mode & 0o777 == 0o600


def make(path: Path, made: list[Made]) -> None:
    path.touch()
    made.append(Made(path, (path.stat().st_dev, path.stat().st_ino)))


def test_what_was_made_goes_again_if_it_fails_and_nothing_else(tmp_path: Path) -> None:
    def fail() -> None:
        with drafts.all_or_none(tmp_path / "result") as made:
            drafts.make_directory(tmp_path / "a" / "b" / "c", made)
            assert [path for path, _ in made] == [tmp_path / "a" / "b", tmp_path / "a" / "b" / "c"]
            make(tmp_path / "a" / "b" / "file", made)
            make(tmp_path / "a" / "theirs", made)
            os.replace(tmp_path / "theirs", tmp_path / "a" / "theirs")
            raise KeyboardInterrupt

    (tmp_path / "a").mkdir()
    (tmp_path / "theirs").touch()
    with pytest.raises(KeyboardInterrupt):
        fail()
    assert os.listdir(tmp_path / "a") == ["theirs"]


def test_what_was_made_stays_once_the_result_is_in_its_place(tmp_path: Path) -> None:
    def fail() -> None:
        with drafts.all_or_none(tmp_path / "result") as made:
            make(tmp_path / "data", made)
            make(tmp_path / "result", made)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert sorted(os.listdir(tmp_path)) == ["data", "result"]


def test_someone_elses_file_in_the_place_of_the_result_keeps_nothing(tmp_path: Path) -> None:
    def fail() -> None:
        with drafts.all_or_none(tmp_path / "result") as made:
            make(tmp_path / "data", made)
            (tmp_path / "result").touch()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert os.listdir(tmp_path) == ["result"]


def test_made_directories_stay_if_all_goes_well(tmp_path: Path) -> None:
    with drafts.all_or_none(tmp_path / "result") as made:
        drafts.make_directory(tmp_path / "a" / "b", made)
    drafts.make_directory(tmp_path / "a" / "b", made)
    assert (tmp_path / "a" / "b").is_dir()
    assert len(made) == 2


@pytest.mark.parametrize("name", ["file/below", "n" * 300])
def test_a_directory_that_cannot_be_made_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(WriteError, match="cannot be written"):
        drafts.make_directory(tmp_path / name, [])


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
    assert files.same_content(tmp_path / "x", sum(map(len, parts)), parts) is same


def test_chunks_are_a_megabyte_and_leave_nothing_out(tmp_path: Path) -> None:
    content = os.urandom((1 << 20) + 5)
    (tmp_path / "x").write_bytes(content)
    with files.opened(tmp_path / "x") as file:
        parts = list(files.chunks(file, 1, len(content) - 1))
    assert [len(part) for part in parts] == [1 << 20, 4]
    assert b"".join(parts) == content[1:]


def test_too_little_space_is_said_before_work_starts(tmp_path: Path) -> None:
    drafts.require_space(tmp_path, 1, tmp_path / "x")
    with pytest.raises(WriteError, match=r"needs 1,152,921,504,606,846,976 bytes.*left"):
        drafts.require_space(tmp_path, 1 << 60, tmp_path / "x")


def test_nothing_else_has_a_hand_in_a_draft(tmp_path: Path) -> None:
    """Not even a child of this process inherits it."""
    with Draft(tmp_path / "x") as draft:
        path = f"/proc/self/fd/{draft.descriptor}"
        assert subprocess.run(["test", "-e", path], close_fds=False).returncode == 1
