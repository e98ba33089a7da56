"""Exceptions of the package: reasons why a job could not be done.

::

    KvRenameError
    ├── RulesError    a profile or rules file, or the token, cannot be used
    ├── ModelError    a model cannot be read, or cannot be renamed at all
    └── WriteError    the result cannot be put where it was asked for
        ├── UndoError     some results are in place, the others are not
        └── FlushError    all are in place, but perhaps not on the disk

What is wrong with a model that can be read is a value, not an exception
(:class:`onnxkvrename.findings.Finding`). Whenever one of these exceptions reaches the
caller, every file it names is as it was before, unless it is an :class:`UndoError` or a
:class:`FlushError`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


class KvRenameError(Exception):
    """The job could not be done. `str()` gives all parts on one line.

    Attributes:
        message: What is wrong.
        path: The file it is about, or `None`.
        hint: How to fix it, or `None`.
    """

    def __init__(self, message: str, *, path: str | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.path = path
        self.hint = hint

    def __str__(self) -> str:
        prefix = f"{self.path}: " if self.path is not None else ""
        suffix = f" ({self.hint})" if self.hint is not None else ""
        return f"{prefix}{self.message}{suffix}"


class RulesError(KvRenameError):
    """A profile, a rules file or a token cannot be used."""


class ModelError(KvRenameError):
    """A model cannot be read, or no ONNX reader could read its result."""


class MissingFileError(ModelError):
    """There is no file at a path."""

    def __init__(self, path: str, hint: str | None = None) -> None:
        super().__init__("no such file", path=path, hint=hint)


class ReadError(ModelError):
    """The system failed to read a file: its content is unknown."""


class WriteError(KvRenameError):
    """A result cannot be written to its path; an existing file is unchanged."""


class UndoError(WriteError):
    """Some targets are new and the others as they were, because the undo failed as well.

    Each is whole; the same command again finishes the work.

    Attributes:
        new_paths: The targets that have their new files.
    """

    def __init__(
        self,
        message: str,
        *,
        path: str | None = None,
        hint: str | None = None,
        new_paths: Sequence[Path] = (),
    ) -> None:
        super().__init__(message, path=path, hint=hint)
        self.new_paths = tuple(new_paths)


class FlushError(WriteError):
    """All results are in place, but the names in a directory could not be brought to the disk."""
