"""Check that a result can go where it is asked to, and whether it is already there."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from onnxkvrename.errors import ModelError, WriteError
from onnxkvrename.findings import Finding, build_finding, quote_path, quote_word
from onnxkvrename.limits import MAX_MODEL_BYTES
from onnxkvrename.rules.results import RenameJob
from onnxkvrename.storage.confined import check_no_link
from onnxkvrename.storage.directories import find_existing_directory
from onnxkvrename.storage.read import (
    CACHE_FAULT,
    find_cache,
    has_content,
    is_directory,
    is_link,
    is_occupied,
    read_status,
    resolve_path,
)
from onnxkvrename.storage.temp_file import list_temp_paths

_MAX_COUNTS = 10
"""Counts of the names of a file while a run that is at work makes and removes some."""
_ELSEWHERE_HINT = "`-d renamed` writes elsewhere"


def check_result_size(size: int, path: str | None = None) -> None:
    """Raise :class:`ModelError` for a result of more bytes than ONNX readers accept.

    The error names `path`; it is ``None`` for a model in memory.
    """
    if size > MAX_MODEL_BYTES:
        raise ModelError(
            f"would have {size:,} bytes, more than the {MAX_MODEL_BYTES:,} of ONNX readers",
            path=path,
            hint="choose a shorter token, or move weights to external data",
        )


def check_output_place(job: RenameJob, *others: Path) -> None:
    """Check that results that are not in place go to no cache, and through no link to elsewhere.

    The links below the directory that the user gave are checked again, by what is opened, when
    results are written and put in place.

    The `others` are written for the same job, such as its data.

    Raises:
        WriteError: A directory on the way is a symbolic link, or a result would be in a
            Hugging Face cache.
        ModelError: It cannot be determined what is there.
    """
    if job.root is None:
        return
    for path in (job.target, *(Path(os.path.abspath(path)) for path in others)):
        if path.parent != job.root:
            check_no_link(path, job.root)
        repository = find_cache(path)
        if repository is not None and not _is_copied_folder(repository, job.root):
            named = job.output if path == job.target else path
            raise _build_cache_error(named, repository)


def _is_copied_folder(repository: Path, root: Path) -> bool:
    """Return whether a folder has its name from a source that is a whole cache, and is none."""
    real_root = Path(resolve_path(root))
    return real_root in repository.parents and read_status(repository / "blobs") is None


def check_output(
    job: RenameJob,
    status: os.stat_result,
    size: int,
    parts: Iterable[bytes],
    others: Iterable[Path] = (),
    *,
    changes: bool,
    force: bool,
) -> tuple[bool, tuple[Finding, ...]]:
    """Check that a result can go where it is asked to.

    Args:
        job: The source, and where the result goes.
        status: The status of the source.
        size: The number of bytes of the result.
        parts: These bytes, in any parts.
        others: Further results of the job, such as its data.
        changes: Whether the result differs from the source.
        force: Whether to overwrite what is there.

    Returns:
        Whether the result is there already, and KV504 if a different file is there.

    Raises:
        WriteError: The result cannot be there.
        ModelError: It cannot be determined what is there.
    """
    if job.in_place:
        if changes:
            check_in_place_write(job.model, status, force=force)
        return not changes, ()
    check_output_place(job, *others)
    _check_output_file(job)
    if has_result(job, size, parts, force=force):
        return True, ()
    if force or not is_occupied(job.output):
        return False, ()
    message = "already exists with different content"
    return False, (build_finding("KV504", str(job.output), message, "`--force` replaces it"),)


def _check_output_file(job: RenameJob) -> None:
    """Check that the result of a job that is not in place can be a file where it goes.

    Raises:
        WriteError: There is a directory or a device.
        ModelError: It cannot be determined what is there.
    """
    status = read_status(job.output)
    if status is None or stat.S_ISREG(status.st_mode):
        return
    if stat.S_ISDIR(status.st_mode):
        raise WriteError(
            "is a directory",
            path=str(job.output),
            hint=f"`-d {quote_path(str(job.output))}` puts the result into it",
        )
    raise WriteError("is not a regular file", path=str(job.output), hint="choose another name")


def has_result(job: RenameJob, size: int, parts: Iterable[bytes], *, force: bool) -> bool:
    """Return whether the file at the output already has the bytes of the result.

    The job is not in place. With `force` the file there may be overwritten, so it need not be
    readable.

    Raises:
        ModelError: The file there cannot be read.
    """
    if read_status(job.output) is None:
        return False
    try:
        return has_content(job.output, size, parts)
    except ModelError:
        if force:
            return False
        raise


def check_in_place_write(path: Path, status: os.stat_result, *, force: bool) -> None:
    """Check that a file is neither protected nor shared under another name.

    With `force` only a file of a Hugging Face cache is protected.

    Raises:
        WriteError: It is a symbolic link, has several hard links, is read-only, or is in a
            Hugging Face cache.
        ModelError: It cannot be determined what is at the path.
    """
    _check_not_cached(path)
    if force:
        return
    if is_link(path):
        fault = f"is a symbolic link to {resolve_path(path)}"
    elif (links := _count_links(path, status)) > 1:
        fault = f"has {links} hard links"
    elif not status.st_mode & (stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH):
        fault = "is read-only"
    else:
        return
    raise WriteError(fault, path=str(path), hint=f"{_ELSEWHERE_HINT}, or use --force")


def _check_not_cached(path: Path) -> None:
    """Raise for a file of a Hugging Face cache, be it a blob or, without links, a real file."""
    repository = find_cache(Path(resolve_path(path)))
    if repository is not None:
        raise _build_cache_error(path, repository)


def _build_cache_error(path: Path, repository: Path) -> WriteError:
    """Return an error for a file of a cache, with a command that writes elsewhere."""
    elsewhere = "./" if find_cache(Path("result")) is None else "~/"
    target = elsewhere + quote_word(repository.name.rpartition("--")[2])
    return WriteError(CACHE_FAULT, path=str(path), hint=f"`-d {target}` writes elsewhere")


def _count_links(path: Path, status: os.stat_result) -> int:
    """Return how many names a file has, except for those that other runs keep, dead or alive."""
    links = status.st_nlink
    for _ in range(_MAX_COUNTS):
        if links == 1:
            break
        kept = _count_kept_names(path, status)
        now = read_status(path)
        if now is None or now.st_nlink == links:
            return links - kept
        status, links = now, now.st_nlink
    return links


def _count_kept_names(path: Path, status: os.stat_result) -> int:
    count = 0
    with suppress(OSError):
        for kept in list_temp_paths(Path(os.path.abspath(path)).parent):
            kept_status = read_status(kept, follow_links=False)
            if kept_status is not None:  # a run that is alive may remove its own meanwhile
                count += os.path.samestat(status, kept_status)
    return count


def find_writable_directory(job: RenameJob) -> Path:
    """Return the directory that a result goes to, or the nearest existing one above it.

    Raises:
        WriteError: That is not a directory, or not writable.
        ModelError: It cannot be determined what is there.
    """
    directory = find_existing_directory(Path(os.path.abspath(job.output.parent)))
    fault = None
    if not is_directory(directory):
        fault = "is not a directory"
    elif not os.access(directory, os.W_OK | os.X_OK):
        fault = "is not writable"
    if fault is not None:
        raise WriteError(
            f"cannot be written: {directory} {fault}",
            path=str(job.output),
            hint="write to another directory",
        )
    return directory
