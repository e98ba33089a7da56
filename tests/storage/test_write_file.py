from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from onnxkvrename import KvRenameError, WriteError
from onnxkvrename.storage import lock
from onnxkvrename.storage.lock import hold_locks
from onnxkvrename.storage.temp_file import build_file_key, build_key, build_temp_name
from onnxkvrename.storage.write_file import check_replaceable, write_files

needs_modes = pytest.mark.skipif(not hasattr(os, "fchmod"), reason="a system without fchmod")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["m.onnx", "M.ONNX", "link"])
def test_force_is_not_suggested_where_it_would_replace_a_model(here: Path, name: str) -> None:
    Path("m.onnx").write_bytes(b"model")
    if name == "link":
        Path(name).symlink_to("m.onnx")
    else:
        Path(name).write_bytes(b"model")
    with pytest.raises(WriteError, match=r"\.onnx is a model") as caught:
        check_replaceable(Path(name), "a page made by x", "<svg")
    assert "--force" not in (caught.value.hint or "")


def test_all_files_are_written_or_none(here: Path) -> None:
    Path("two").mkdir()
    with pytest.raises(WriteError, match="two: is a directory"):
        write_files({Path("one"): b"1", Path("two"): b"2"})
    assert os.listdir(here) == ["two"]
    Path("two").rmdir()
    Path("two").write_bytes(b"old")
    write_files({Path("one"): b"1", Path("two"): b"2"})
    assert {name: Path(name).read_bytes() for name in os.listdir(here)} == {
        "one": b"1",
        "two": b"2",
    }


def test_one_that_fails_at_the_end_takes_the_others_back(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = os.replace, 0

    def fail_later(source: object, target: object, **how: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise OSError(5, "Input/output error")
        real(source, target, **how)  # type: ignore[arg-type]

    for name in ("one", "two"):
        Path(name).write_bytes(b"old")
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail_later)
        with pytest.raises(WriteError, match=r"two: cannot be .*Input/output"):
            write_files({Path("one"): b"1", Path("two"): b"2"})
    assert {name: Path(name).read_bytes() for name in os.listdir(here)} == {
        "one": b"old",
        "two": b"old",
    }


@pytest.mark.parametrize("is_there", [True, False])
def test_what_someone_else_saves_meanwhile_stays(
    is_there: bool, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save_theirs(descriptor: int) -> None:
        Path("theirs").write_bytes(b"theirs")
        os.replace("theirs", "file")

    if is_there:
        Path("file").write_bytes(b"old")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", save_theirs)
        with pytest.raises(KvRenameError, match=r"another program|File exists"):
            write_files({Path("file"): b"new"})
    assert Path("file").read_bytes() == b"theirs"
    assert os.listdir(here) == ["file"]


@needs_modes
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o666, 0o4711])
def test_a_file_that_is_replaced_keeps_its_permissions(mode: int, here: Path) -> None:
    Path("file").write_bytes(b"old")
    Path("file").chmod(mode)
    write_files({Path("file"): b"new"})
    assert Path("file").read_bytes() == b"new"
    assert stat.S_IMODE(Path("file").stat().st_mode) == mode & 0o777


@needs_modes
def test_a_link_that_is_replaced_gives_no_permissions(here: Path) -> None:
    Path("private").write_bytes(b"old")
    Path("private").chmod(0o600)
    Path("link").symlink_to("private")
    write_files({Path("link"): b"new", Path("plain"): b"new"})
    assert Path("link").lstat().st_mode == Path("plain").lstat().st_mode
    assert Path("private").read_bytes() == b"old"


def test_a_file_that_has_its_content_stays(here: Path) -> None:
    Path("file").write_bytes(b"content")
    os.utime("file", ns=(0, 0))
    write_files({Path("file"): b"content"})
    assert Path("file").stat().st_mtime_ns == 0


@pytest.mark.parametrize("content", [b"content", b"other"])
def test_what_a_killed_run_left_is_removed_but_nothing_that_is_read(
    content: bytes, here: Path
) -> None:
    Path("file").write_bytes(content)
    left, read = (Path(build_temp_name(build_key(), build_file_key(), "new")) for _ in range(2))
    for path in (left, read):
        path.write_bytes(b"half")
    write_files({Path("file"): b"content"}, inputs=[read])
    assert read.exists()
    assert left.exists() is (content == b"content")  # where nothing is written, nothing is lost
    assert Path("file").read_bytes() == b"content"


def test_another_run_at_work_there_keeps_its_files(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "_MAX_WAIT", 0)
    left = Path(build_temp_name(build_key(), build_file_key(), "new"))
    left.touch()
    with hold_locks([here]), pytest.raises(WriteError, match="is being processed"):
        write_files({Path("file"): b"content"})
    assert os.listdir(here) == [left.name]


def test_a_link_that_leads_nowhere_is_replaced(here: Path) -> None:
    Path("link").symlink_to("nowhere")
    write_files({Path("link"): b"new"})
    assert not Path("link").is_symlink()
    assert Path("link").read_bytes() == b"new"


def test_a_file_that_cannot_be_read_is_replaced(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> bytes:
        raise OSError(5, "Input/output error")

    Path("file").write_bytes(b"content")
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda *args: False)
        patch.setattr(os, "pread", fail)
        write_files({Path("file"): b"new"})
    assert Path("file").read_bytes() == b"new"
