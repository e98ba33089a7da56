"""New directories: made with no more rights than those of the source."""

from __future__ import annotations

import os
from pathlib import Path

from onnxkvrename.files.inside import open_inside
from onnxkvrename.files.read import read_status
from onnxkvrename.files.temp_file import ACCESS_LIST, cut_permissions, list_attributes


def make_directory(directory: Path, like: Path, root: Path | None) -> None:
    """Make a directory with the rights that a new one gets there, and no more than another one has.

    Raises:
        OSError, KvRenameError: It cannot be made.
    """
    with open_inside(root, directory) as (path, parent):
        status = read_status(like)
        mode = 0o700
        if status is not None and ACCESS_LIST not in list_attributes(like):
            mode |= status.st_mode & 0o777
        os.mkdir(path, mode, dir_fd=parent)
        made = os.stat(path, dir_fd=parent)
        is_other_group = status is not None and made.st_gid != status.st_gid
        if is_other_group or ACCESS_LIST in list_attributes(directory):
            special = made.st_mode & 0o7000  # a new directory may get the group of its parent
            os.chmod(path, special | cut_permissions(made.st_mode), dir_fd=parent)
