"""Errors of the system while files are written, as errors of the program with a hint."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from onnxkvrename.errors import WriteError

SPACE_HINT = "free some space, or write to another disk"

_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_DIRECTORY_HINT = "its directory must be writable"
_APPEARED_HINT = "a file appeared there during the run; run the same command again"
_ERROR_HINTS = {
    errno.ENOSPC: SPACE_HINT,
    errno.EDQUOT: SPACE_HINT,
    errno.EFBIG: "raise the file size limit (ulimit -f)",
    errno.EROFS: "write to another directory",
    errno.EACCES: _DIRECTORY_HINT,
    errno.EPERM: _DIRECTORY_HINT,
    errno.EEXIST: _APPEARED_HINT,
    errno.ENOTEMPTY: _APPEARED_HINT,
    errno.ENOENT: "create its directory first",
    errno.ENOTDIR: "create its directory first",
}
"""How to fix an error of the system."""


@contextmanager
def translate_write_errors(target: Path) -> Iterator[None]:
    """Turn an OSError of the context into a :class:`WriteError` for `target`, with a hint."""
    try:
        yield
    except OSError as error:
        raise build_write_error(target, error) from None


def build_write_error(target: Path, error: OSError, source: Path | None = None) -> WriteError:
    """Return the error of a target. With a source, either file may be at fault."""
    reason = error.strerror or str(error)
    if source is not None and error.errno not in (*_FULL_ERRNOS, errno.EROFS):
        reason += f", while {source} was copied"
    hint = _ERROR_HINTS.get(error.errno or 0)
    is_there = os.access(target.parent, os.F_OK)
    if hint == _DIRECTORY_HINT and is_there and not os.access(target.parent, os.W_OK | os.X_OK):
        reason, hint = f"{target.parent} is not writable", "write to another directory"
    return WriteError(f"cannot be written: {reason}", path=str(target), hint=hint)
