"""Remove what killed runs left."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path

from onnxkvrename.storage.directories import remove_directory
from onnxkvrename.storage.temp_file import LOCK_SUFFIX, TEMP_PREFIX

RECORD_SUFFIX = "-record"
"""End of the name of a record of a run that changes several files."""


def remove_stale_temp_files(paths: Iterable[Path]) -> bool:
    """Remove temporary files of killed runs.

    Locks stay, and so do recorded renames of directories, and what the record of a half done
    run names, in whatever directory its files are.

    Args:
        paths: The result of :func:`find_stale_temp_files`; the caller holds the locks.

    Returns:
        Whether files of a half done run are kept.
    """
    stale = [path for path in paths if not path.name.endswith(f"-{LOCK_SUFFIX}")]
    kept = False
    for directory in dict.fromkeys(path.parent for path in stale):
        try:
            protected = _find_protected_names(directory)
        except OSError:  # nothing is removed of which it cannot be told whether it is needed
            kept = True
            continue
        for path in stale:
            if path.parent == directory:
                if path.name in protected:
                    kept = True
                else:
                    _remove_stale_path(path)
    return kept


def _find_protected_names(directory: Path) -> set[str]:
    """Return the names that records in a directory keep, as their runs are half done.

    Raises:
        OSError: The directory or a record cannot be read.
    """
    with os.scandir(directory) as entries:
        names = [entry.name for entry in entries]
    paths = [
        directory / name
        for name in sorted(names)
        if name.startswith(TEMP_PREFIX) and name.endswith(RECORD_SUFFIX)
    ]
    if not paths:
        return set()
    from onnxkvrename.storage.record import find_protected_names  # there is hardly ever one

    return find_protected_names(paths)


def _remove_stale_path(path: Path) -> None:
    try:
        mode = os.lstat(path).st_mode
        if stat.S_ISDIR(mode):
            remove_directory(path)
        elif not stat.S_ISLNK(mode) or not _is_intent(path):
            os.unlink(path)
    except OSError:
        pass  # it is in nobody's way, and the next run tries again


def _is_intent(path: Path) -> bool:
    from onnxkvrename.storage.intent import read_intent  # only for a symbolic link

    return read_intent(path) is not None
