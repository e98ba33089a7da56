"""Remove what killed runs left.

A file is removed only if it is surely one of ours: its name has exactly the form that this
program gives, it is a regular file or a directory, and it belongs to the user who runs this; for
root, also to the owner of the directory. What the run reads is never removed, whatever its name.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

from onnxkvrename.errors import KvRenameError
from onnxkvrename.storage.directories import remove_directory
from onnxkvrename.storage.read import resolve_path
from onnxkvrename.storage.temp_file import LOCK_SUFFIX, RECORD_SUFFIX, TEMP_PREFIX


def find_reserved_names(paths: Iterable[Path]) -> set[str]:
    """Return the names, of files or of directories above them, that look like our temporary ones.

    Args:
        paths: Files that a run reads. None of these names may be removed.
    """
    names: set[str] = set()
    for path in paths:
        for text in (str(path), resolve_path(path)):
            if TEMP_PREFIX in text:
                names.update(part for part in Path(text).parts if part.startswith(TEMP_PREFIX))
    return names


def remove_stale_temp_files(
    paths: Iterable[Path],
    *,
    inputs: Iterable[Path] = (),
    links_of: Collection[Path] | None = None,
) -> bool:
    """Remove temporary files of killed runs.

    Locks stay, and so do recorded renames of directories, and what the record of a half done
    run names, in whatever directory its files are.

    Args:
        paths: The result of :func:`find_stale_temp_files`; the caller holds the locks.
        inputs: All files that the run reads.
        links_of: Remove nothing but further names of these files, so that no content is lost,
            whatever else there is: for a run that does not yet know what it reads.

    Returns:
        Whether files of a half done run are kept.
    """
    stale = [path for path in paths if not path.name.endswith(f"-{LOCK_SUFFIX}")]
    if not stale:
        return False
    reserved = find_reserved_names(inputs)
    inodes = None if links_of is None else _read_inodes(links_of)
    kept = False
    for directory in dict.fromkeys(path.parent for path in stale):
        try:
            owners = find_trusted_owners(directory)
            protected = find_protected_names(directory, owners)
        except OSError:  # nothing is removed of which it cannot be determined whether it is needed
            kept = True
            continue
        for path in stale:
            if path.parent != directory or path.name in reserved:
                continue
            if path.name in protected:
                kept = True
            elif links_of is None or path not in links_of:
                _remove_stale_path(path, owners, inodes)
    return kept


def find_trusted_owners(directory: Path) -> set[int] | None:
    """Return the users whose files in a directory may be ours; ``None`` where there are no users.

    Raises:
        OSError: The directory cannot be looked at.
    """
    if not hasattr(os, "geteuid"):
        return None
    user = os.geteuid()
    return {user} if user else {user, os.stat(directory).st_uid}


def find_protected_names(directory: Path, owners: set[int] | None) -> set[str]:
    """Return the names that records in a directory keep, as their runs are half done.

    Args:
        directory: The directory.
        owners: The users whose records count; ``None`` for all.

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
    from onnxkvrename.storage.record import read_record  # there is hardly ever one

    protected: set[str] = set()
    for path in paths:
        status = os.lstat(path)
        if owners is not None and status.st_uid not in owners:
            continue
        try:
            record = read_record(path, status)
        except KvRenameError as error:
            raise OSError(str(error)) from None
        if record is not None and record.is_half_done():
            kept = (*record.find_kept_identities(), *record.paths)
            protected.update(path.name for path in kept)
    return protected


def _remove_stale_path(
    path: Path, owners: set[int] | None, inodes: set[tuple[int, int]] | None
) -> None:
    try:
        status = os.lstat(path)
        if owners is not None and status.st_uid not in owners:
            return
        if stat.S_ISREG(status.st_mode):
            if inodes is None or (status.st_dev, status.st_ino) in inodes:
                os.unlink(path)
        elif stat.S_ISDIR(status.st_mode) and inodes is None:
            remove_directory(path)
    except OSError:
        pass  # it blocks nothing, and the next run tries again


def _read_inodes(paths: Iterable[Path]) -> set[tuple[int, int]]:
    inodes = set()
    for path in paths:
        with suppress(OSError):
            status = os.lstat(path)
            inodes.add((status.st_dev, status.st_ino))
    return inodes
