"""Files are written beside their targets, flushed, and give nobody a right."""

from __future__ import annotations

import errno
import os
import struct
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
from files.conftest import refuse

from onnxkvrename import KvRenameError, WriteError
from onnxkvrename.files.read import open_file
from onnxkvrename.files.temp_file import TEMP_NAME, TempFile, build_key, build_temp_name
from onnxkvrename.files.write_errors import translate_write_errors


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source.onnx"
    path.write_bytes(bytes(range(256)) * 1024)
    return path


def create(target: Path) -> TempFile:
    return TempFile(target.with_name(build_temp_name(build_key(), "new")), target)


@pytest.mark.usefixtures("system")
def test_file_has_what_was_written_and_copied(source: Path, tmp_path: Path) -> None:
    """Its name is no model's, and no child of this process inherits it."""
    progress = list[int]()
    with open_file(source) as file, create(tmp_path / "target.onnx") as temp_file:
        temp_file.progress = progress.append
        temp_file.write(b"head")
        temp_file.copy_from(file, 10, 100_000)
        temp_file.write(bytearray(b"tail"))
        assert (temp_file.read(4, 2), temp_file.size) == (b"\n\v", 100_008)
        temp_file.finish()
        descriptor = f"/proc/self/fd/{temp_file.descriptor}"
        assert subprocess.run(["test", "-e", descriptor], close_fds=False).returncode == 1
    expected = b"head" + source.read_bytes()[10:100_010] + b"tail"
    assert temp_file.temp_path.read_bytes() == expected
    assert sum(progress) == 100_008
    name = temp_file.temp_path.name
    assert sorted(os.listdir(tmp_path)) == [name, "source.onnx"]
    assert TEMP_NAME.fullmatch(name)
    assert len(name) < 64
    assert not name.endswith(".onnx")


@pytest.mark.parametrize("is_finished", [False, True])
def test_file_that_is_not_finished_or_fails_is_gone(
    is_finished: bool, system: str, tmp_path: Path
) -> None:
    with suppress(KeyboardInterrupt), create(tmp_path / "target.onnx") as temp_file:
        temp_file.write(b"half")
        assert len(os.listdir(tmp_path)) == (system != "unnamed")
        if is_finished:
            temp_file.finish()
            raise KeyboardInterrupt
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("numbers", "hint"),
    [
        ((errno.ENOSPC, errno.EDQUOT), "free some space"),
        ((errno.EFBIG,), "ulimit -f"),
        ((errno.EROFS,), "another directory"),
        ((errno.EACCES, errno.EPERM), "its directory must be writable"),
        ((errno.EEXIST,), "run the same command again"),
        ((errno.ENOENT, errno.ENOTDIR), "create its directory first"),
        ((errno.EIO,), "None"),
    ],
)
def test_error_of_the_system_says_how_to_fix_it(numbers: tuple[int, ...], hint: str) -> None:
    for number in numbers:
        with pytest.raises(WriteError) as caught, translate_write_errors(Path("m.onnx")):
            raise OSError(number, os.strerror(number))
        error = caught.value
        assert (error.path, error.message) == (
            "m.onnx",
            f"cannot be written: {os.strerror(number)}",
        )
        assert hint in str(error.hint)


@pytest.mark.parametrize(
    ("call", "number", "path", "message"),
    [
        ("pread", errno.EIO, "source.onnx", "read: Input/output"),
        ("write", errno.EIO, "target", "while .*source.onnx was"),
        ("write", errno.ENOSPC, "target", "written: No space"),
        ("splice", errno.EIO, "target", "while .*source.onnx was"),
    ],
)
def test_copy_that_fails_names_the_file_that_did(
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
    with open_file(source) as file, create(tmp_path / "target") as temp_file:
        monkeypatch.setattr(os, call, refuse(number), raising=False)
        with pytest.raises(KvRenameError, match=message) as caught:
            temp_file.copy_from(file, 0, 100)
    assert caught.value.path == str(tmp_path / path)


# Permissions.

needs_root = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root may give files away"
)
DEFAULT_ACL, ACCESS_ACL = "system.posix_acl_default", "system.posix_acl_access"
USER_OBJ, USER, GROUP_OBJ, MASK, OTHER = 1, 2, 4, 0x10, 0x20
CAPABILITY = struct.pack("<IIIII", 0x02000001, 1 << 13, 0, 0, 0)  # cap_net_raw+ep


def acl(*entries: tuple[int, int]) -> bytes:
    """An access control list of tags and permissions, as the kernel takes it; the user is 1234."""
    return struct.pack("<I", 2) + b"".join(
        struct.pack("<HHI", tag, bits, 1234 if tag == USER else 0xFFFFFFFF) for tag, bits in entries
    )


def set_attribute(path: Path, name: str, value: bytes) -> None:
    try:
        os.setxattr(path, name, value)
    except OSError as error:
        pytest.skip(f"this user or file system does not set {name}: {error.strerror}")


OTHER_USER = acl((USER_OBJ, 7), (USER, 7), (GROUP_OBJ, 7), (MASK, 7), (OTHER, 5))
GROUP_MAY_NOT = acl((USER_OBJ, 6), (USER, 6), (GROUP_OBJ, 0), (MASK, 6), (OTHER, 4))


@pytest.mark.usefixtures("system")
@pytest.mark.parametrize(
    ("mask", "default"), [(0o000, None), (0o027, None), (0o022, OTHER_USER)], ids=["0", "27", "ACL"]
)
def test_default_mode_is_that_of_any_new_file(
    mask: int, default: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the umask, which is the whole process's, is not touched."""
    if default is not None:
        set_attribute(tmp_path, DEFAULT_ACL, default)
    before = os.umask(mask)
    try:
        (tmp_path / "any").touch()
        with monkeypatch.context() as patch, create(tmp_path / "target.json") as temp_file:
            patch.setattr(os, "umask", refuse(errno.EPERM))
            temp_file.set_default_mode()
            temp_file.finish()
    finally:
        os.umask(before)
    new, path = tmp_path / "any", temp_file.temp_path
    assert sorted(os.listdir(tmp_path)) == [path.name, "any"]
    assert path.stat().st_mode == new.stat().st_mode
    for name in {*os.listxattr(new), *os.listxattr(path)}:
        assert os.getxattr(path, name) == os.getxattr(new, name)


def copy_of(source: Path, target: Path, *, owner: bool, force: bool = False) -> os.stat_result:
    """Copy what is kept of a file to a new one, and return the status of that."""
    with open_file(source) as file, create(target) as temp_file:
        temp_file.copy_attributes(file, owner=owner, force=force)
        temp_file.finish()
    os.rename(temp_file.temp_path, target)
    return target.stat()


@needs_root
@pytest.mark.parametrize(
    ("mode", "ids", "owner", "copied"),
    [
        (0o7755, (0, 0), True, 0o755),  # permission bits alone
        (0o6755, (1234, 2345), True, 0o755),
        (0o6755, (1234, 2345), False, 0o755),  # another user's program is not root's
        (0o664, (0, 0), False, 0o664),
        (0o664, (0, 2345), False, 0o644),  # the rights of a group are not those of another
        (0o604, (0, 2345), False, 0o600),
        (0o444, (0, 2345), False, 0o444),
        (0o640, (0, 2345), True, 0o640),
    ],
)
def test_no_copy_gives_a_right(
    mode: int, ids: tuple[int, int], owner: bool, copied: int, source: Path, tmp_path: Path
) -> None:
    os.chown(source, *ids)
    source.chmod(mode)
    names = {"security.capability": CAPABILITY, "trusted.x": b"1", "user.x": b"1"}
    for name, value in names.items():
        set_attribute(source, name, value)
    status = copy_of(source, tmp_path / "copy", owner=owner)
    assert (status.st_uid, status.st_gid) == (ids if owner else (0, 0))
    assert status.st_mode & 0o7777 == copied
    kept = names.keys() if owner else {"user.x"}
    assert set(os.listxattr(tmp_path / "copy")) & names.keys() == kept


@needs_root
def test_owner_that_cannot_be_kept_requires_force_and_takes_the_privileges_along(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the result is as any other copy."""
    monkeypatch.setattr(os, "fchown", refuse(errno.EPERM))
    copy_of(source, tmp_path / "same", owner=True)  # the same owner: nothing to do
    os.chown(source, 1234, 2345)
    source.chmod(0o640)
    set_attribute(source, "trusted.x", b"1")
    with pytest.raises(WriteError, match=r"owner could not .*--force"):
        copy_of(source, tmp_path / "copy", owner=True)
    assert not (tmp_path / "copy").exists()
    status = copy_of(source, tmp_path / "copy", owner=True, force=True)
    assert status.st_mode & 0o777 == 0o600
    assert "trusted.x" not in os.listxattr(tmp_path / "copy")


@pytest.mark.usefixtures("system")
def test_access_control_list_stays_in_place_and_opens_no_copy_elsewhere(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the mode of such a file, the bits of the group are those of the mask."""
    source.chmod(0o640)
    (tmp_path / "listed").mkdir()
    set_attribute(tmp_path / "listed", DEFAULT_ACL, OTHER_USER)  # opens no file that was closed
    in_place = copy_of(source, tmp_path / "listed" / "in_place", owner=True)
    assert in_place.st_mode & 0o777 == 0o640
    assert ACCESS_ACL not in os.listxattr(tmp_path / "listed" / "in_place")
    elsewhere = copy_of(source, tmp_path / "listed" / "elsewhere", owner=False)
    assert elsewhere.st_mode & 0o777 == 0o600
    set_attribute(source, ACCESS_ACL, GROUP_MAY_NOT)
    before = source.stat().st_mode
    assert copy_of(source, tmp_path / "in_place", owner=True).st_mode == before
    assert os.getxattr(tmp_path / "in_place", ACCESS_ACL) == os.getxattr(source, ACCESS_ACL)
    assert copy_of(source, tmp_path / "elsewhere", owner=False).st_mode & 0o777 == 0o600
    assert ACCESS_ACL not in os.listxattr(tmp_path / "elsewhere")
    monkeypatch.setattr(os, "setxattr", refuse(errno.EOPNOTSUPP))
    with pytest.raises(WriteError, match="access control list"):
        copy_of(source, tmp_path / "copy", owner=True)
    assert copy_of(source, tmp_path / "copy", owner=True, force=True).st_mode & 0o777 == 0o600


@pytest.mark.parametrize("call", ["fchown", "fchmod", "setxattr", "listxattr", "getxattr"])
def test_until_permissions_are_final_only_the_owner_may_read_a_file(
    call: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before each call that takes part in it, nobody has more rights than in the end."""
    source.chmod(0o644)
    set_attribute(source, ACCESS_ACL, GROUP_MAY_NOT)
    set_attribute(source, "user.x", b"1")
    if os.geteuid() == 0:
        os.chown(source, 1234, 2345)
    real, seen = getattr(os, call), list[int]()

    def record(descriptor: int, *args: object) -> object:
        seen.append(os.fstat(descriptor).st_mode & 0o777)
        return real(descriptor, *args)

    monkeypatch.setattr(os, call, record)
    copy_of(source, tmp_path / "in_place", owner=True)
    assert set(seen) <= {0o600, 0o664}


@pytest.mark.parametrize(
    ("call", "number", "is_error"),
    [
        *((call, errno.EIO, True) for call in ("listxattr", "getxattr", "setxattr")),
        *(("setxattr", number, False) for number in (errno.EPERM, errno.ENOSPC, errno.EOPNOTSUPP)),
        ("listxattr", errno.EOPNOTSUPP, False),
    ],
)
def test_attribute_without_a_place_is_left_out_and_a_disk_that_fails_is_an_error(
    call: str,
    number: int,
    is_error: bool,
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_attribute(source, "user.x", b"1")
    with monkeypatch.context() as patch:
        patch.setattr(os, call, refuse(number))
        if is_error:
            with pytest.raises(KvRenameError, match="Input/output error") as caught:
                copy_of(source, tmp_path / "copy", owner=False)
            assert caught.value.path == str(tmp_path / "copy")
            return
        copy_of(source, tmp_path / "copy", owner=False)
    assert os.listxattr(tmp_path / "copy") == []
