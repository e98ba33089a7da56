"""Where results may go: to no file that the run needs, and to none that is not meant."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from onnxkvrename.errors import ModelError, WriteError
from onnxkvrename.files.find import RenameJob
from onnxkvrename.files.inside import CACHE_FAULT, check_inside, find_cache
from onnxkvrename.files.read import (
    find_existing_directory,
    has_content,
    is_directory,
    is_link,
    is_occupied,
    open_file,
    read_status,
    resolve_path,
)
from onnxkvrename.files.temp_file import list_temp_paths
from onnxkvrename.files.write_errors import SPACE_HINT, translate_write_errors
from onnxkvrename.findings import Finding, build_finding
from onnxkvrename.limits import MAX_MODEL_BYTES
from onnxkvrename.text import quote_path, quote_word

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
            check_inside(job.root, path)
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


def is_protected(path: Path) -> bool:
    """Return whether :func:`check_in_place_write` refuses a file without ``--force``."""
    status = read_status(path)
    try:
        if status is not None:
            check_in_place_write(path, status, force=False)
    except WriteError:
        return True
    return False


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
    """Return how many temporary names of runs a file has."""
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


def check_not_cached(output: Path) -> None:
    """Raise :class:`WriteError` for a file that would be in a Hugging Face cache."""
    if find_cache(output) is not None:
        elsewhere = "./" if find_cache(Path(output.name)) is None else "~/"
        target = elsewhere + quote_word(output.name)
        hint = f"run the same command with {target} instead"
        raise WriteError(CACHE_FAULT, path=str(output), hint=hint)


def check_regular(output: Path) -> None:
    """Raise :class:`WriteError` where a directory, a device or the like is."""
    status = read_status(output)
    if status is not None and stat.S_ISDIR(status.st_mode):
        raise WriteError("is a directory", path=str(output), hint="pass a file path")
    if status is not None and not stat.S_ISREG(status.st_mode):
        raise WriteError("already exists and is not a regular file", path=str(output))


def check_replaceable(output: Path, kind: str, start: str) -> None:
    """Raise unless nothing is at a path, or a file that an earlier run of the command made.

    Args:
        output: The file to write, without ``--force``.
        kind: What such a file is, with its article: ``a page made by COMMAND``.
        start: A regular expression for its beginning, of at most 512 bytes. A file that only
            mentions the command is another one.

    Raises:
        WriteError: Another file is there.
        ModelError: It cannot be determined what is there.
    """
    status = read_status(output, follow_links=False)
    if status is None or is_directory(output):  # this has an error of its own
        return
    if stat.S_ISREG(status.st_mode):
        with open_file(output) as file:
            if re.match(start.encode("utf-8"), file.read(0, 512)):
                return
    raise WriteError(
        f"already exists and is not {kind}",
        path=str(output),
        hint=_suggest_force(output, "choose another name, or `--force` replaces it"),
    )


def _suggest_force(output: Path, hint: str) -> str:
    """Return a hint that names ``--force``; another one where a model would be lost."""
    if any(str(path).lower().endswith(".onnx") for path in (output, resolve_path(output))):
        return "choose another name: a file that ends in .onnx is a model"
    return hint


def check_free_space(directory: Path, size: int, target: Path, *, own: int) -> None:
    """Check that a disk has `size` bytes left; it passes where the system does not tell.

    Args:
        directory: A directory on that disk.
        size: The bytes that all results there need.
        target: A result, for the error.
        own: The bytes that it needs with its data.

    Raises:
        WriteError: The disk has fewer.
    """
    with translate_write_errors(target):
        free = _count_free_bytes(directory)
    if free is not None and free < size:
        together = " with the other results" if size > own else ""
        raise WriteError(
            f"needs {size:,} bytes{together}, but the disk has {free:,} left",
            path=str(target),
            hint=SPACE_HINT,
        )


def _count_free_bytes(directory: Path) -> int | None:
    """Return the bytes that a disk has left for this user, ``None`` if the system does not tell.

    Args:
        directory: A directory on that disk.

    Raises:
        OSError: The disk cannot be queried.
    """
    if not hasattr(os, "statvfs"):
        return None
    try:
        status = os.statvfs(directory)
    except OSError as error:
        if error.errno in (errno.ENOSYS, errno.EOPNOTSUPP):
            return None
        raise
    return status.f_bavail * status.f_frsize
