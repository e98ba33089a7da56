"""May a result stand where it is asked to, and does it already."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from onnxkvrename.errors import ModelError, WriteError
from onnxkvrename.findings import Finding, build_finding
from onnxkvrename.model.external_data import DataFile
from onnxkvrename.model.file import read_pieces, sum_piece_sizes
from onnxkvrename.model.protobuf import Piece
from onnxkvrename.rules.results import Options, RenameJob
from onnxkvrename.storage.read import MAX_MODEL_SIZE, OpenFile, has_content
from onnxkvrename.storage.temp_file import find_stale_temp_files

_ELSEWHERE_HINT = "write elsewhere with -o or -d"


def is_up_to_date(
    file: OpenFile,
    job: RenameJob,
    pieces: tuple[Piece, ...],
    data: Sequence[DataFile],
    *,
    forced: bool,
    fixed: bool = False,
) -> bool:
    """Whether the result stands in its place already; of one that is ``fixed`` there is no other.

    Raises :class:`KvRenameError` for a result that has no place.
    """
    size = sum_piece_sizes(pieces)
    if size > MAX_MODEL_SIZE:
        raise ModelError(
            f"would have {size:,} bytes, more than the {MAX_MODEL_SIZE:,} that an ONNX reader takes",
            path=str(job.model),
            hint="choose a shorter token, or move weights to external data",
        )
    if job.in_place:
        if not forced:
            check_in_place_write(job.model, file.status, fixed=fixed)
        return False
    if os.path.isdir(job.output):
        raise WriteError("is a directory", path=str(job.output), hint="-d puts models into one")
    if os.path.exists(job.output) and not os.path.isfile(job.output):
        raise WriteError("is no regular file", path=str(job.output), hint="choose another name")
    taken = {str(item.path) for item in data}
    taken |= {os.path.realpath(job.output.parent / item.location) for item in data}
    if os.path.realpath(job.output) in taken:
        raise WriteError(
            "is the external data of this model", path=str(job.output), hint="choose another name"
        )
    if not os.path.lexists(job.output):
        return False
    try:
        return has_content(job.output, size, read_pieces(file, pieces))
    except ModelError:
        return False


def check_in_place_write(path: Path, status: os.stat_result, *, fixed: bool = False) -> None:
    """Raise :class:`WriteError` for what others may share with this file, or have protected.

    What is ``fixed`` cannot be written elsewhere.
    """
    if path.is_symlink():
        fault = f"is a symbolic link to {os.path.realpath(path)}"
    elif (links := status.st_nlink - _count_backup_links(path, status)) > 1:
        fault = f"has {links} hard links"
    elif not status.st_mode & (stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH):
        fault = "is read-only"
    else:
        return
    hint = "--force writes it all the same" if fixed else f"{_ELSEWHERE_HINT}, or use --force"
    raise WriteError(fault, path=str(path), hint=hint)


def _count_backup_links(path: Path, status: os.stat_result) -> int:
    """How many links of a file a dead run has left."""
    if status.st_nlink == 1:
        return 0
    left = 0
    for name in find_stale_temp_files([path]):
        with suppress(OSError):  # a run that is alive takes its own away
            left += os.path.samestat(status, os.lstat(name))
    return left


def find_outermost_missing_directory(target: Path) -> Path | None:
    """The outermost directory around a target that is not there yet: it can appear as a whole."""
    found = None
    for directory in target.parents:
        if os.path.lexists(directory):
            return found
        found = directory
    return found


def find_writable_directory(job: RenameJob) -> Path:
    """The directory that a result goes to, or the nearest one above it that is there.

    Raises :class:`WriteError` where nothing can be written.
    """
    directory = Path(os.path.abspath(job.output.parent))
    while not os.path.lexists(directory):
        directory = directory.parent
    fault = None
    if not os.path.isdir(directory):
        fault = "is no directory"
    elif not os.access(directory, os.W_OK | os.X_OK):
        fault = "is not writable"
    if fault is not None:
        raise WriteError(
            f"cannot be written: {directory} {fault}",
            path=str(job.output),
            hint=_ELSEWHERE_HINT,
        )
    return directory


def find_blocking_file(job: RenameJob, there: bool, options: Options) -> Iterator[Finding]:
    """KV504, where another file stands in the place of the result."""
    if os.path.lexists(job.output) and not (there or options.force or job.in_place):
        yield build_finding(
            "KV504", str(job.output), "is there already, and differs", "--force replaces it"
        )
