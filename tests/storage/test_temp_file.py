"""Files are written beside their targets, put in place whole, and give nobody a right."""

from __future__ import annotations

import errno
import os
import pickle
import struct
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from onnxkvrename import KvRenameError, WriteError
from onnxkvrename.storage.read import open_file
from onnxkvrename.storage.temp_file import (
    TEMP_NAME,
    ReadyFile,
    TempFile,
    build_file_key,
    build_key,
    build_temp_name,
    check_free_space,
    translate_write_errors,
)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source.onnx"
    path.write_bytes(bytes(range(256)) * 1024)
    return path


@pytest.fixture(params=["unnamed", "named"])
def file_kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Drafts without a name, and with a temporary one as where O_TMPFILE is not known."""
    if request.param == "named":
        monkeypatch.setattr(os, "O_TMPFILE", 0, raising=False)
    elif not hasattr(os, "O_TMPFILE"):
        pytest.skip("this system knows no unnamed files")
    return str(request.param)


def make_ready_file(target: Path, content: bytes = b"new", *, replace: bool) -> ReadyFile:
    with TempFile(target) as temp_file:
        temp_file.write(content)
        return temp_file.finish(replace=replace)


def refuse(number: int) -> Any:
    def call(*args: object, **kwargs: object) -> None:
        raise OSError(number, os.strerror(number))

    return call


@pytest.mark.parametrize("keeps_name", [False, True])
@pytest.mark.parametrize("replace", [False, True])
def test_a_file_takes_its_place_whole(
    replace: bool, keeps_name: bool, file_kind: str, source: Path, tmp_path: Path
) -> None:
    target = tmp_path / "target.onnx"
    if replace:
        target.write_bytes(b"old")
    progress = list[int]()
    with open_file(source) as file, TempFile(target, progress=progress.append) as temp_file:
        temp_file.write(b"head")
        temp_file.copy_from(file, 10, 100_000)
        temp_file.write(bytearray(b"tail"))
        assert (temp_file.read(4, 2), temp_file.size) == (b"\n\v", 100_008)
        ready_file = pickle.loads(pickle.dumps(temp_file.finish(replace=replace)))
    assert not target.exists() or target.read_bytes() == b"old"
    ready_file.move_into_place(keeps_name=keeps_name)
    assert target.read_bytes() == b"head" + source.read_bytes()[10:100_010] + b"tail"
    assert sum(progress) == 100_008
    kept = [ready_file.temp_path.name] if keeps_name else []
    assert sorted(os.listdir(tmp_path)) == [*kept, "source.onnx", "target.onnx"]
    assert target.stat().st_nlink == 1 + keeps_name


@pytest.mark.parametrize("is_finished", [False, True])
@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_a_file_that_is_not_finished_or_fails_is_gone(
    error: type[BaseException] | None, is_finished: bool, file_kind: str, tmp_path: Path
) -> None:
    with suppress(KeyboardInterrupt), TempFile(tmp_path / "target.onnx") as temp_file:
        temp_file.write(b"half")
        assert len(os.listdir(tmp_path)) == (file_kind == "named")
        assert not list(tmp_path.glob("*.onnx"))
        assert os.fstat(temp_file.descriptor).st_mode & 0o777 == 0o600
        if is_finished:
            temp_file.finish(replace=False)
        if error is not None:
            raise error
    assert len(os.listdir(tmp_path)) == (is_finished and error is None)


@pytest.mark.parametrize("keeps_name", [False, True])
@pytest.mark.parametrize(
    "number", [None, errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK]
)
def test_nothing_is_put_over_what_has_appeared(
    number: int | None, keeps_name: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With hard links or without."""
    if number is not None:
        monkeypatch.setattr(os, "O_TMPFILE", 0, raising=False)
        monkeypatch.setattr(os, "link", refuse(number))
    target = tmp_path / "target.onnx"
    make_ready_file(target, replace=False).move_into_place(keeps_name=keeps_name)
    assert target.read_bytes() == b"new"
    ready_file = make_ready_file(target, b"other", replace=False)
    with pytest.raises(WriteError):
        ready_file.move_into_place(keeps_name=keeps_name)
    assert target.read_bytes() == b"new"
    make_ready_file(target, b"other", replace=True).move_into_place(keeps_name=keeps_name)
    assert target.read_bytes() == b"other"


@pytest.mark.parametrize("keeps_name", [False, True])
def test_the_bytes_are_on_the_disk_before_the_name_is(
    keeps_name: bool, file_kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = list[str]()
    for name in ("fsync", "link", "replace"):
        real = getattr(os, name)

        def watched(*args: object, _name: str = name, _real: Any = real, **how: object) -> object:
            seen.append(_name)
            return _real(*args, **how)

        monkeypatch.setattr(os, name, watched)
    make_ready_file(tmp_path / "target.onnx", replace=True).move_into_place(keeps_name=keeps_name)
    named, kept = ["link"] * (file_kind == "unnamed"), ["link"] * keeps_name
    assert seen == ["fsync", *named, *kept, "replace"]


def test_errors_call_the_target_what_the_user_calls_it(tmp_path: Path) -> None:
    with pytest.raises(WriteError, match="create its directory") as caught:
        TempFile(tmp_path / "none" / "target.onnx", Path("out/target.onnx"))
    assert caught.value.path == "out/target.onnx"
    with TempFile(tmp_path / "target.onnx", Path("out/target.onnx")) as temp_file:
        ready_file = temp_file.finish(replace=False)
    ready_file.temp_path.unlink()
    with pytest.raises(WriteError) as caught:
        ready_file.move_into_place(keeps_name=False)
    assert caught.value.path == "out/target.onnx"


@pytest.mark.parametrize(
    ("numbers", "hint"),
    [
        ((errno.ENOSPC, errno.EDQUOT), "free some space"),
        ((errno.EFBIG,), "ulimit -f"),
        ((errno.EROFS,), "another directory"),
        ((errno.EACCES, errno.EPERM), "its directory must be writable"),
        ((errno.EEXIST,), "run the same command again"),
        ((errno.ENOENT, errno.ENOTDIR), "create its directory first"),
        ((errno.EIO,), None),
    ],
)
def test_an_error_of_the_system_says_how_to_fix_it(
    numbers: tuple[int, ...], hint: str | None
) -> None:
    for number in numbers:
        with pytest.raises(WriteError) as caught, translate_write_errors(Path("m.onnx")):
            raise OSError(number, os.strerror(number))
        error = caught.value
        assert error.path == "m.onnx"
        assert error.message == f"cannot be written: {os.strerror(number)}"
        assert (error.hint is None) if hint is None else hint in str(error.hint)


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT, 0])
def test_where_a_file_must_have_a_name_it_has_one_that_no_exporter_takes(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, unnamed = os.open, getattr(os, "O_TMPFILE", 0)

    def refuse_unnamed(path: Any, flags: int, *args: Any, **how: Any) -> int:
        if unnamed and flags & unnamed == unnamed:
            raise OSError(number, os.strerror(number))
        return real(path, flags, *args, **how)

    if number:
        monkeypatch.setattr(os, "open", refuse_unnamed)
    else:  # no /proc
        monkeypatch.setattr(os.path, "isdir", lambda path: False)
    with TempFile(tmp_path / "target.onnx"):
        (name,) = os.listdir(tmp_path)
    assert TEMP_NAME.fullmatch(name)
    assert not name.endswith(".onnx")


def test_a_temporary_name_is_short_and_has_the_key_of_its_run() -> None:
    names = [
        build_temp_name(build_key(), build_file_key(), kind) for kind in ("new", "old", "probe")
    ]
    for name in names:
        match = TEMP_NAME.fullmatch(name)
        assert match
        assert len(match["key"]) == 24
        assert len(name) < 64
    assert len({name[:38] for name in names}) == 3


DEFAULT_ACL = "system.posix_acl_default"
USER_OBJ, USER, GROUP_OBJ, MASK, OTHER = 1, 2, 4, 0x10, 0x20


def acl(*entries: tuple[int, int, int]) -> bytes:
    """An access control list of tags, permissions and ids, as the kernel takes it."""
    return struct.pack("<I", 2) + b"".join(
        struct.pack("<HHI", tag, bits, number or 0xFFFFFFFF) for tag, bits, number in entries
    )


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o027, 0o077])
def test_the_default_mode_is_that_of_any_new_file(
    file_kind: str, mask: int, tmp_path: Path
) -> None:
    before = os.umask(mask)
    try:
        with TempFile(tmp_path / "target.json") as temp_file:
            temp_file.set_default_mode()
            assert len(os.listdir(tmp_path)) == (file_kind == "named")
            temp_file.finish(replace=False).move_into_place(keeps_name=False)
    finally:
        os.umask(before)
    assert (tmp_path / "target.json").stat().st_mode & 0o7777 == 0o666 & ~mask
    assert os.listdir(tmp_path) == ["target.json"]


@pytest.mark.parametrize(
    "entries",
    [
        [(USER_OBJ, 7, 0), (GROUP_OBJ, 7, 0), (OTHER, 0, 0)],
        [(USER_OBJ, 6, 0), (USER, 6, 1234), (GROUP_OBJ, 4, 0), (MASK, 6, 0), (OTHER, 4, 0)],
    ],
    ids=["modes alone", "another user"],
)
def test_in_a_directory_with_default_modes_these_count_and_not_the_umask(
    file_kind: str, entries: list[tuple[int, int, int]], tmp_path: Path
) -> None:
    try:
        os.setxattr(tmp_path, DEFAULT_ACL, acl(*entries))
    except OSError:
        pytest.skip("this file system knows no default modes")
    (tmp_path / "any").touch()
    with TempFile(tmp_path / "target.json") as temp_file:
        temp_file.set_default_mode()
        temp_file.finish(replace=False).move_into_place(keeps_name=False)
    new, target = tmp_path / "any", tmp_path / "target.json"
    assert target.stat().st_mode == new.stat().st_mode
    assert os.listxattr(target) == os.listxattr(new)
    for name in os.listxattr(new):
        assert os.getxattr(target, name) == os.getxattr(new, name)


def test_the_umask_of_other_threads_is_left_alone(
    file_kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse_umask(mask: int) -> int:
        raise AssertionError("the umask is the whole process's")

    monkeypatch.setattr(os, "umask", refuse_umask)
    with TempFile(tmp_path / "target.json") as temp_file:
        temp_file.set_default_mode()


def test_an_owner_that_cannot_be_kept_takes_force(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fchown", refuse(errno.EPERM))
    with open_file(source) as file, TempFile(tmp_path / "copy") as temp_file:
        temp_file.copy_attributes(file, owner=True, force=False)  # the same owner: nothing to do
        real = os.fstat(temp_file.descriptor)
        other = os.stat_result((*real[:4], real.st_uid + 1, *real[5:]))
        monkeypatch.setattr(os, "fstat", lambda descriptor: other)
        with pytest.raises(WriteError, match=r"owner could not .*--force"):
            temp_file.copy_attributes(file, owner=True, force=False)
        temp_file.copy_attributes(file, owner=True, force=True)
        temp_file.copy_attributes(file, owner=False, force=False)


# Nobody gains a right by a copy.

needs_root = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root may give files away"
)
ACCESS_ACL = "system.posix_acl_access"


def copy_of(source: Path, target: Path, *, owner: bool, force: bool = False) -> os.stat_result:
    """Copy what is kept of a file to a new one, and return the status of that."""
    with open_file(source) as file, TempFile(target) as temp_file:
        temp_file.copy_attributes(file, owner=owner, force=force)
        temp_file.finish(replace=False).move_into_place(keeps_name=False)
    return target.stat()


def set_attribute(path: Path, name: str, value: bytes) -> None:
    try:
        os.setxattr(path, name, value)
    except OSError as error:
        pytest.skip(f"this user or file system does not set {name}: {error.strerror}")


@pytest.mark.parametrize("owner", [True, False])
def test_only_permission_bits_are_copied(owner: bool, source: Path, tmp_path: Path) -> None:
    source.chmod(0o7755)
    assert copy_of(source, tmp_path / "copy", owner=owner).st_mode & 0o7777 == 0o755


@needs_root
def test_a_copy_of_another_users_program_is_not_roots_program(source: Path, tmp_path: Path) -> None:
    os.chown(source, 1234, 2345)
    source.chmod(0o6755)
    status = copy_of(source, tmp_path / "copy", owner=False)
    assert (status.st_uid, status.st_mode & 0o7777) == (0, 0o755)


CAPABILITY = struct.pack("<IIIII", 0x02000001, 1 << 13, 0, 0, 0)  # cap_net_raw+ep


@needs_root
@pytest.mark.parametrize(
    ("owner", "kept"),
    [(True, {"security.capability", "trusted.x", "user.x"}), (False, {"user.x"})],
    ids=["in place", "elsewhere"],
)
def test_privileged_attributes_stay_with_owner_and_place(
    owner: bool, kept: set[str], source: Path, tmp_path: Path
) -> None:
    os.chown(source, 1234, 2345)
    set_attribute(source, "security.capability", CAPABILITY)
    set_attribute(source, "trusted.x", b"1")
    set_attribute(source, "user.x", b"1")
    copy_of(source, tmp_path / "copy", owner=owner)
    assert (
        set(os.listxattr(tmp_path / "copy")) & {*kept, "trusted.x", "security.capability"} == kept
    )


@needs_root
@pytest.mark.parametrize(
    ("mode", "copied"), [(0o664, 0o644), (0o640, 0o600), (0o604, 0o600), (0o444, 0o444)]
)
def test_the_rights_of_a_group_do_not_pass_to_another_group(
    mode: int, copied: int, source: Path, tmp_path: Path
) -> None:
    source.chmod(mode)
    assert copy_of(source, tmp_path / "same", owner=False).st_mode & 0o777 == mode
    os.chown(source, -1, 2345)
    assert copy_of(source, tmp_path / "other", owner=False).st_mode & 0o777 == copied


@needs_root
def test_an_owner_that_is_not_kept_takes_the_privileges_along(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With --force the result has another owner: then it is as any other copy."""
    os.chown(source, 1234, 2345)
    source.chmod(0o640)
    set_attribute(source, "trusted.x", b"1")
    monkeypatch.setattr(os, "fchown", refuse(errno.EPERM))
    status = copy_of(source, tmp_path / "copy", owner=True, force=True)
    assert status.st_mode & 0o777 == 0o600
    assert "trusted.x" not in os.listxattr(tmp_path / "copy")


GROUP_MAY_NOT = acl(
    (USER_OBJ, 6, 0), (USER, 6, 1234), (GROUP_OBJ, 0, 0), (MASK, 6, 0), (OTHER, 4, 0)
)


def test_an_access_control_list_stays_in_place_and_nobody_reads_a_copy_elsewhere(
    source: Path, tmp_path: Path
) -> None:
    """In the mode of such a file, the bits of the group are those of the mask."""
    set_attribute(source, ACCESS_ACL, GROUP_MAY_NOT)
    before = source.stat().st_mode
    assert copy_of(source, tmp_path / "in_place", owner=True).st_mode == before
    assert os.getxattr(tmp_path / "in_place", ACCESS_ACL) == os.getxattr(source, ACCESS_ACL)
    assert copy_of(source, tmp_path / "elsewhere", owner=False).st_mode & 0o777 == 0o600
    assert ACCESS_ACL not in os.listxattr(tmp_path / "elsewhere")


def test_a_directorys_default_list_opens_no_file_that_was_closed(
    file_kind: str, source: Path, tmp_path: Path
) -> None:
    source.chmod(0o640)
    entries = [(USER_OBJ, 7, 0), (USER, 7, 1234), (GROUP_OBJ, 7, 0), (MASK, 7, 0), (OTHER, 5, 0)]
    set_attribute(tmp_path, DEFAULT_ACL, acl(*entries))
    assert copy_of(source, tmp_path / "in_place", owner=True).st_mode & 0o777 == 0o640
    assert ACCESS_ACL not in os.listxattr(tmp_path / "in_place")
    # Here the bits of the group are the most that the entries of the list may give.
    assert copy_of(source, tmp_path / "elsewhere", owner=False).st_mode & 0o777 == 0o600


def test_a_list_that_cannot_be_kept_takes_force(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_attribute(source, ACCESS_ACL, GROUP_MAY_NOT)
    monkeypatch.setattr(os, "setxattr", refuse(errno.EOPNOTSUPP))
    with pytest.raises(WriteError, match="access control list"):
        copy_of(source, tmp_path / "copy", owner=True)
    assert not (tmp_path / "copy").exists()
    assert copy_of(source, tmp_path / "copy", owner=True, force=True).st_mode & 0o777 == 0o600


@pytest.mark.parametrize("call", ["fchown", "fchmod", "setxattr", "listxattr", "getxattr"])
def test_until_its_permissions_are_final_only_the_owner_may_read_a_file(
    call: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before each call that takes part in it, nobody has more rights than in the end."""
    source.chmod(0o644)
    set_attribute(source, ACCESS_ACL, GROUP_MAY_NOT)
    set_attribute(source, "user.x", b"1")
    if os.geteuid() == 0:
        os.chown(source, 1234, 2345)
    real, seen = getattr(os, call), []

    def record(descriptor: int, *args: object) -> object:
        seen.append(os.fstat(descriptor).st_mode & 0o777)
        return real(descriptor, *args)

    monkeypatch.setattr(os, call, record)
    copy_of(source, tmp_path / "in_place", owner=True)
    assert set(seen) <= {0o600, 0o664}
    assert copy_of(source, tmp_path / "elsewhere", owner=False).st_mode & 0o777 == 0o600


@pytest.mark.parametrize("call", ["listxattr", "getxattr", "setxattr"])
def test_an_attribute_that_a_disk_fails_to_give_or_take_is_an_error(
    call: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_attribute(source, "user.x", b"1")
    monkeypatch.setattr(os, call, refuse(errno.EIO))
    with pytest.raises(KvRenameError, match="Input/output error") as caught:
        copy_of(source, tmp_path / "copy", owner=False)
    assert caught.value.path == str(tmp_path / "copy")


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSPC, errno.EOPNOTSUPP])
def test_an_attribute_that_another_file_system_has_no_place_for_is_left_out(
    number: int, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_attribute(source, "user.x", b"1")
    monkeypatch.setattr(os, "setxattr", refuse(number))
    copy_of(source, tmp_path / "copy", owner=False)
    assert os.listxattr(tmp_path / "copy") == []


def test_a_file_system_without_attributes_does_not_matter(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "listxattr", refuse(errno.EOPNOTSUPP), raising=False)
    source.chmod(0o600)
    assert copy_of(source, tmp_path / "copy", owner=False).st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("call", "number", "path", "message"),
    [
        ("pread", errno.EIO, "source.onnx", "read: Input/output"),
        ("write", errno.EIO, "target", "while .*source.onnx was"),
        ("write", errno.ENOSPC, "target", "written: No space"),
        ("splice", errno.EIO, "target", "while .*source.onnx was"),
    ],
)
def test_a_copy_that_fails_names_the_file_that_did(
    call: str,
    number: int,
    path: str,
    message: str,
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the kernel copies, both."""
    if call != "splice":
        monkeypatch.delattr(os, "splice", raising=False)
    with open_file(source) as file, TempFile(tmp_path / "target") as temp_file:
        monkeypatch.setattr(os, call, refuse(number), raising=False)
        with pytest.raises(KvRenameError, match=message) as caught:
            temp_file.copy_from(file, 0, 100)
    assert caught.value.path == str(tmp_path / path)


def test_a_target_whose_state_is_unknown_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without links a file is put in place by a rename, which replaces what is there."""
    monkeypatch.setattr(os, "O_TMPFILE", 0, raising=False)
    target = tmp_path / "target.onnx"
    ready_file = make_ready_file(target, replace=False)
    target.write_bytes(b"theirs")
    monkeypatch.setattr(os, "link", refuse(errno.EPERM))
    with monkeypatch.context() as patch:
        patch.setattr(os, "lstat", refuse(errno.EIO))
        with pytest.raises(KvRenameError, match="Input/output error"):
            ready_file.move_into_place(keeps_name=False)
    assert target.read_bytes() == b"theirs"


@pytest.mark.parametrize(
    ("number", "fails"), [(errno.EIO, True), (errno.ESTALE, True), (errno.ENOSYS, False)]
)
def test_a_disk_that_cannot_be_asked_for_its_space_is_not_a_large_one(
    number: int, fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "statvfs", refuse(number), raising=False)
    if not fails:
        check_free_space(tmp_path, 1, tmp_path / "x")
        return
    with pytest.raises(WriteError, match=os.strerror(number)):
        check_free_space(tmp_path, 1, tmp_path / "x")


def test_too_little_space_is_said_before_work_starts(tmp_path: Path) -> None:
    check_free_space(tmp_path, 1, tmp_path / "x")
    with pytest.raises(WriteError, match=r"needs 1,152,921,504,606,846,976 bytes.*left"):
        check_free_space(tmp_path, 1 << 60, tmp_path / "x")


def test_nothing_else_has_a_hand_in_a_draft(tmp_path: Path) -> None:
    """Not even a child of this process inherits it."""
    with TempFile(tmp_path / "x") as temp_file:
        path = f"/proc/self/fd/{temp_file.descriptor}"
        assert subprocess.run(["test", "-e", path], close_fds=False).returncode == 1
