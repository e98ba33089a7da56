"""Extended attributes and access control lists: which of them a copy of a file may have.

Where owner and place stay, a file keeps all of them. Elsewhere, a copy may not give any user
what the file did not: `security.*` and `trusted.*` attributes are privileges and labels of
that file, `system.*` ones are access control lists, whose entries for the owner and the group
would mean others. There, only `user.*` attributes are copied, and the permission bits are
cut to what an access control list gave everyone.
"""

from __future__ import annotations

import errno
import os
import struct

from onnxkvrename.storage.read import OpenFile, list_attributes, translate_read_errors
from onnxkvrename.storage.temp_file import cut_permissions

_ACL = "system.posix_acl_access"
_ACL_HEADER_SIZE = 4
_ACL_ENTRY = struct.Struct("<HHI")
"""Tag, permissions and id of an entry."""
_ACL_OWNER = 0x01

_ABSENT_ERRNOS = (errno.EOPNOTSUPP, errno.ENOSYS, errno.ENODATA)
_DENIED_ERRNOS = (errno.EPERM, errno.EACCES)
_TOO_MUCH_ERRNOS = (errno.EINVAL, errno.E2BIG, errno.ERANGE, errno.ENOSPC)
"""A file system's own limits on names and sizes of attributes; no sign of a full disk."""


def copy_access_list(source: OpenFile, target: int) -> None:
    """Give a file the access control list of another one, or none if that has none.

    A list that the target took from its directory is removed.

    Raises:
        ModelError: The list cannot be read.
        OSError: It cannot be set or removed.
    """
    access_list = _read_attribute(source, _ACL)
    if access_list is not None:
        os.setxattr(target, _ACL, access_list)
    elif _ACL in list_attributes(target):
        os.removexattr(target, _ACL)


def find_mode(source: OpenFile, target: int, *, owner: bool) -> int:
    """Return the permission bits of a copy.

    Without the source's owner or place, only the owner of the copy may do more with it
    than with the source. So where the group is another one, or either file has an access
    control list, group and others may do what everyone could do with the source.

    Args:
        source: The file that is copied.
        target: The descriptor of the copy.
        owner: Whether owner, group and access control list are those of the source.

    Raises:
        ModelError: The list of the source cannot be read.
        OSError: The target cannot be examined.
    """
    mode = source.status.st_mode & 0o777
    access_list = _read_attribute(source, _ACL)
    if not owner and access_list is not None:
        common = _find_common_permissions(access_list) * 0o11
        return mode & (0o700 | common) & cut_permissions(mode)
    same_group = os.fstat(target).st_gid == source.status.st_gid
    if owner or (same_group and _ACL not in list_attributes(target)):
        return mode
    return cut_permissions(mode)


def _find_common_permissions(access_list: bytes) -> int:
    """Return what every entry of a list but the owner's allows; 0 for an unknown form."""
    entries, rest = divmod(len(access_list) - _ACL_HEADER_SIZE, _ACL_ENTRY.size)
    if entries < 0 or rest or access_list[:_ACL_HEADER_SIZE] != struct.pack("<I", 2):
        return 0
    common = 0o7
    for tag, permissions, _ in _ACL_ENTRY.iter_unpack(access_list[_ACL_HEADER_SIZE:]):
        if tag != _ACL_OWNER:
            common &= permissions
    return common


def copy_attributes(source: OpenFile, target: int, *, keep_all: bool) -> None:
    """Copy extended attributes, except for access control lists.

    Attributes that the user may not set, or the other file system cannot store, are skipped.

    Args:
        source: The file to copy from.
        target: The descriptor to copy to.
        keep_all: Whether owner and place stay; otherwise only `user.*` is copied.

    Raises:
        ModelError: An attribute cannot be read.
        OSError: One cannot be set, for another reason.
    """
    for name in source.list_attributes():
        if name == _ACL or not (keep_all or name.startswith("user.")):
            continue
        value = _read_attribute(source, name)
        if value is None:
            continue
        try:
            os.setxattr(target, name, value)
        except OSError as error:
            if error.errno not in (*_ABSENT_ERRNOS, *_DENIED_ERRNOS, *_TOO_MUCH_ERRNOS):
                raise


def _read_attribute(source: OpenFile, name: str) -> bytes | None:
    """Return the value of an attribute; ``None`` if there is none, or it may not be read."""
    if not hasattr(os, "getxattr"):
        return None
    with translate_read_errors(source.path):
        try:
            return os.getxattr(source.descriptor, name)
        except OSError as error:
            if error.errno in _ABSENT_ERRNOS or (error.errno in _DENIED_ERRNOS and name != _ACL):
                return None
            raise
