"""New directories, written under temporary names; and what is done with directories."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

from onnxkvrename.errors import UndoError
from onnxkvrename.storage.read import is_occupied
from onnxkvrename.storage.temp_file import build_temp_path, translate_write_errors
from onnxkvrename.storage.transaction import sync_directory


class StagedDirectory:
    """A temporary directory beside its target that one rename moves into place.

    A context manager: on exit, the directory is removed unless it has been moved, or is kept
    because a change could not be undone.

    Args:
        target: The final path of the directory.

    Raises:
        WriteError: On entering, if the temporary directory cannot be created.
    """

    def __init__(self, target: Path) -> None:
        self.target = target
        self.directory = build_temp_path(target)

    def __enter__(self) -> StagedDirectory:
        with translate_write_errors(self.target):
            self.directory.mkdir()
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        if not isinstance(error, UndoError):
            remove_directory(self.directory)

    def prepare_path(self, path: Path) -> Path:
        """Return the staged path for a path below the target, and create its parent directory.

        Args:
            path: The final path, below `target`.

        Raises:
            WriteError: The parent directory could not be created.
        """
        inside = self.directory / path.relative_to(self.target)
        with translate_write_errors(path):
            inside.parent.mkdir(parents=True, exist_ok=True)
        return inside

    def move_into_place(self) -> None:
        """Move the directory to its target.

        Raises:
            WriteError: The rename failed, or the target exists by now; it is then unchanged.
        """
        with translate_write_errors(self.target):
            for folder, _, _ in os.walk(self.directory, onerror=_raise):
                sync_directory(Path(folder))
        rename_directory(self.directory, self.target)


def _raise(error: OSError) -> None:
    raise error


def rename_directory(directory: Path, target: Path) -> None:
    """Rename a directory; its parent is not synced.

    Raises:
        WriteError: The target exists, or the rename failed.
    """
    with translate_write_errors(target):
        if is_occupied(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        os.rename(directory, target)


def remove_directory(directory: Path) -> None:
    """Remove a directory and its content, as far as possible."""
    import shutil  # takes 5 ms to import, and a rename in place does not need it

    with suppress(OSError):  # `ignore_errors` does not cover all of them
        shutil.rmtree(directory, ignore_errors=True)
