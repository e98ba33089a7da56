"""Render half done runs as JSON: each target with its state and where its other content is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from onnxkvrename.errors import KvRenameError
from onnxkvrename.findings import render_json_document, serialize_error
from onnxkvrename.storage.record import TargetState
from onnxkvrename.storage.recover import HalfDoneRun

SCHEMA = "onnxkvrename.recover/1"


class Recovery(NamedTuple):
    """What was found, and what became of it.

    Attributes:
        action: What was asked for.
        runs: The half done runs, each with its targets as they were found.
        skipped: Why a directory was not searched, or a record not believed.
        leftovers: Temporary files and locks that other runs have left, or are using.
    """

    action: Literal["list", "undo", "finish"]
    runs: Sequence[tuple[HalfDoneRun, Sequence[TargetState]]]
    skipped: Sequence[KvRenameError]
    leftovers: Sequence[Path]


def recovery_to_json(
    recovery: Recovery | None, code: int, error: KvRenameError | None = None
) -> str:
    """Return the JSON document of a recovery.

    Args:
        recovery: The recovery, or ``None`` for a job that could not be done.
        code: The exit code.
        error: What kept the job from being done.
    """
    content: dict[str, Any] = {"action": None, "runs": [], "skipped": [], "leftovers": []}
    if recovery is not None:
        content = {
            "action": recovery.action,
            "runs": [
                {"record": str(run.path), "targets": list(map(_serialize_target, targets))}
                for run, targets in recovery.runs
            ],
            "skipped": list(map(serialize_error, recovery.skipped)),
            "leftovers": list(map(str, recovery.leftovers)),
        }
    return render_json_document(SCHEMA, "recover", code, error, **content)


def _serialize_target(target: TargetState) -> dict[str, str | None]:
    kept = None if target.kept is None else str(target.kept)
    return {"path": str(target.path), "state": target.state, "kept": kept}
