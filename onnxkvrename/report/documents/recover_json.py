"""Half done runs as JSON: each target with its state and where its other content is."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, NamedTuple

from onnxkvrename.errors import KvRenameError
from onnxkvrename.records import Document
from onnxkvrename.storage.record import TargetState

Action = Literal["list", "undo", "finish"]


class Run(NamedTuple):
    """A run that stopped halfway.

    Attributes:
        record: The file that says what the run was to do; it is removed when the run is ended.
        targets: The files and directories of the run.
    """

    record: Path
    targets: tuple[TargetState, ...]


class RecoverContent(NamedTuple):
    """Runs that stopped halfway, and what became of them.

    Attributes:
        action: With undo and finish, all runs below are ended; `None` if the job could not be done.
        runs: The latest run first. Empty if no run stopped halfway, or the job could not be done.
        skipped: Directories that cannot be searched, and records that cannot be trusted.
        leftovers: Temporary files and locks of runs that were killed or are still running, in the
            searched directories. Empty if a run below is still to be ended.
    """

    action: Action | None
    runs: tuple[Run, ...]
    skipped: tuple[KvRenameError, ...]
    leftovers: tuple[Path, ...]


DOCUMENT = Document("onnxkvrename.recover/1", "recover", RecoverContent(None, (), (), ()))
