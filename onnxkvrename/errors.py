"""What can go wrong.

::

    KvRenameError
    ├── RulesError    a profile or rules file, or the token, cannot be used
    ├── ModelError    a model cannot be read, or cannot be renamed at all
    └── WriteError    the result cannot be put where it was asked for

Faults *of a model* that the checks find are not exceptions but values
(:class:`onnxkvrename.findings.Finding`). Whenever one of these exceptions
reaches the caller, every file it names is as it was before.
"""

from __future__ import annotations


class KvRenameError(Exception):
    """The job could not be done.

    ``message`` says what is wrong, ``path`` where (a file, or ``None``), and
    ``hint`` how to mend it; ``str()`` gives them on one line.
    """

    def __init__(self, message: str, *, path: str | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.path = path
        self.hint = hint

    def __str__(self) -> str:
        where = f"{self.path}: " if self.path is not None else ""
        mend = f" ({self.hint})" if self.hint is not None else ""
        return f"{where}{self.message}{mend}"


class RulesError(KvRenameError):
    """A profile, a rules file or a token that cannot be used."""


class ModelError(KvRenameError):
    """A model that cannot be read, or whose result no ONNX reader could read."""


class WriteError(KvRenameError):
    """A result that cannot be put in its place; what stood there still stands."""
