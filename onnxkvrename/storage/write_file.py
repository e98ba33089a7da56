"""Write one file that a command was asked for, completely or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from onnxkvrename.errors import WriteError
from onnxkvrename.storage.temp_file import TempFile
from onnxkvrename.storage.transaction import Transaction


def write_file(output: Path, data: bytes, *, force: bool) -> None:
    """Write one file, completely or not at all.

    Args:
        output: The file.
        data: Its content.
        force: Replace an existing file.

    Raises:
        WriteError: :func:`check_output_path` fails, or the file cannot be written. An existing
            file is then unchanged.
    """
    check_output_path(output, force=force)
    with Transaction() as transaction:
        with TempFile(Path(os.path.abspath(output)), output) as temp_file:
            temp_file.write(data)
            temp_file.set_default_mode()
            ready_file = temp_file.finish(replace=force)
        transaction.place_files([ready_file], final=True)


def check_output_path(output: Path, *, force: bool) -> None:
    """Check that a file can be written.

    Args:
        output: The file.
        force: Accept an existing regular file, or a link to one.

    Raises:
        WriteError: The path is a directory or exists already, or its directory is missing
            or cannot be written to.
    """
    if os.path.isdir(output):
        raise WriteError("is a directory", path=str(output))
    if os.path.lexists(output) and not force:
        raise WriteError("is there already", path=str(output), hint="--force replaces it")
    if os.path.exists(output) and not os.path.isfile(output):
        raise WriteError("is there already, and no plain file", path=str(output))
    with TempFile(Path(os.path.abspath(output)), output):
        pass  # it could be created
