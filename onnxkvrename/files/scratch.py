"""A file for the time of one call, where nobody looks for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from onnxkvrename.errors import WriteError


@contextmanager
def open_scratch_file(name: str, data: bytes) -> Iterator[Path]:
    """Context manager that writes a file into a new directory of its own, and removes both.

    Args:
        name: The name of the file.
        data: Its content.

    Raises:
        WriteError: There is no directory for temporary files, or no space in it.
    """
    with ExitStack() as stack:
        try:
            directory = TemporaryDirectory(prefix="onnxkvrename-", ignore_cleanup_errors=True)
            path = Path(stack.enter_context(directory), name)
            path.write_bytes(data)
        except OSError as error:
            raise WriteError(f"no temporary file can be written: {error}") from None
        yield path
