"""The command ``recover``: ends a run that stopped half way."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import click

from onnxkvrename.cli.options import (
    CONTEXT_SETTINGS,
    NonEmptyPath,
    add_format_option,
    add_version_option,
    check_exclusive,
)
from onnxkvrename.cli.output import print_answer
from onnxkvrename.errors import KvRenameError, ModelError
from onnxkvrename.findings import decide_exit_code
from onnxkvrename.report.documents.recover_json import Recovery, recovery_to_json
from onnxkvrename.report.formats import Answer, FileResult, Line, Note, Screen
from onnxkvrename.report.formats.text import build_error_line
from onnxkvrename.storage.recover import (
    TargetState,
    end_run,
    find_half_done_runs,
    find_leftovers,
    list_target_states,
)
from onnxkvrename.storage.temp_file import LOCK_SUFFIX

_STATES = {
    "new": "new",
    "old": "old",
    "changed": "changed since then; left as it is",
}


@click.command(
    "recover",
    context_settings=CONTEXT_SETTINGS,
    epilog="The command that was stopped finishes its work as well. Exit codes: 0 done or nothing "
    "to do; 1 there is a run to undo or to finish, or a record was skipped; 2 the job could not be "
    "done; 130 interrupted.",
)
@click.argument(
    "paths",
    nargs=-1,
    metavar="PATH...",
    type=NonEmptyPath(path_type=Path),
    required=True,
)
@click.option("--undo", is_flag=True, help="Restore the old files.")
@click.option("--finish", is_flag=True, help="Put the new files in place.")
@add_version_option()
@add_format_option()
def command(paths: tuple[Path, ...], undo: bool, finish: bool, output_format: str) -> int:
    """List the files of a run that stopped half way, restore the old or place the new ones.

    A run that is killed, or whose disk fails, may leave some files new and others
    as they were. Each one is complete, and what is needed to go either way is kept
    beside them. PATH is a directory, which is searched with all below it, or a
    file in one.
    """
    check_exclusive("--undo", undo, "--finish", finish)
    try:
        skipped = list[ModelError]()
        runs = [
            (run, list_target_states(run)) for run in find_half_done_runs(paths, skipped.append)
        ]
        for run, _ in runs if undo or finish else ():
            end_run(run, undo=undo)
        leftovers = () if runs and not (undo or finish) else find_leftovers(paths)
    except OSError as error:
        path = None if error.filename is None else os.fsdecode(error.filename)
        raise ModelError(f"cannot be read: {error.strerror}", path=path) from None
    recovery = Recovery(
        "undo" if undo else "finish" if finish else "list", runs, skipped, leftovers
    )
    code = decide_exit_code(failed=bool(skipped) or (bool(runs) and not (undo or finish)))
    return print_answer(_build_answer(recovery, code, paths), output_format)


def render_failure(code: int, error: KvRenameError) -> str:
    """Return the JSON document of a job that could not be done."""
    return recovery_to_json(None, code, error)


def _build_answer(recovery: Recovery, code: int, paths: Sequence[Path]) -> Answer:
    level: Literal["error", "notice"] = "error" if recovery.action == "list" else "notice"
    notes = (
        Note("recover", _describe_state(target), str(target.path), level)
        for _, targets in recovery.runs
        for target in targets
    )
    return Answer(
        "recover",
        code,
        render_json=partial(recovery_to_json, recovery, code),
        render_text=partial(_render_text, recovery, paths),
        files=tuple(FileResult(error.path or "", error=error) for error in recovery.skipped),
        notes=(*notes, *(Note("recover", outcome) for outcome in _describe_outcome(recovery))),
    )


def _render_text(recovery: Recovery, paths: Sequence[Path], screen: Screen) -> Iterator[Line]:
    for _, targets in recovery.runs:
        yield from (Line(f"{target.path}: {_describe_state(target)}") for target in targets)
    yield from map(build_error_line, recovery.skipped)
    yield from (Line(outcome, err=True) for outcome in _describe_outcome(recovery))
    if recovery.runs and recovery.action == "list":
        shown = shlex.join(["onnxkvrename", "recover", *map(str, paths)])
        yield Line(f"{shown} --undo restores the old files", err=True)
        yield Line(f"{shown} --finish puts the new files in place", err=True)


def _describe_state(target: TargetState) -> str:
    other = "old" if target.state == "new" else "new"
    note = "" if target.kept is None else f" (the {other} one is {target.kept.name})"
    return _STATES[target.state] + note


def _describe_outcome(recovery: Recovery) -> Iterator[str]:
    if not recovery.runs and not recovery.skipped:
        yield "no run to undo or to finish here"
    elif recovery.runs and recovery.action == "undo":
        yield "the old files are restored"
    elif recovery.runs and recovery.action == "finish":
        yield "the new files are in place"
    if recovery.leftovers:
        locks = sum(path.name.endswith(LOCK_SUFFIX) for path in recovery.leftovers)
        counts = {"lock": locks, "temporary file": len(recovery.leftovers) - locks}
        parts = (f"{count} {noun}{'s' * (count > 1)}" for noun, count in counts.items() if count)
        yield (
            f"{' and '.join(parts)} of runs that were killed or are still running (first: "
            f"{recovery.leftovers[0]}); the next rename of the same models removes those of "
            "killed runs"
        )
