"""The command ``recover``: ends a run that stopped half way."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from onnxkvrename.cli.options import CONTEXT_SETTINGS, NonEmptyPath, add_version_option
from onnxkvrename.cli.output import print_lines
from onnxkvrename.errors import ModelError
from onnxkvrename.findings import decide_exit_code
from onnxkvrename.report.formats import Line
from onnxkvrename.report.formats.text import build_error_line
from onnxkvrename.storage.recover import HalfDoneRun, end_run, find_half_done_runs
from onnxkvrename.storage.temp_file import resolve_moved_path

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
def command(paths: tuple[Path, ...], undo: bool, finish: bool) -> int:
    """List the files of a run that stopped half way, restore the old or place the new ones.

    A run that is killed, or whose disk fails, may leave some files new and others
    as they were. Each one is complete, and what is needed to go either way is kept
    beside them. PATH is a directory, which is searched with all below it, or a
    file in one.
    """
    if undo and finish:
        raise click.UsageError("--undo and --finish cannot both be")
    try:
        skipped = list[ModelError]()
        runs = find_half_done_runs(paths, skipped.append)
        lines = [line for run in runs for line in _describe_run(run)]
        lines += map(build_error_line, skipped)
        for run in runs if undo or finish else ():
            end_run(run, undo=undo)
    except OSError as error:
        path = None if error.filename is None else os.fsdecode(error.filename)
        raise ModelError(f"cannot be read: {error.strerror}", path=path) from None
    if not runs and not skipped:
        lines.append(Line("no run stopped half way here", err=True))
    elif runs and (undo or finish):
        done = "the old files are restored" if undo else "the new files are in place"
        lines.append(Line(done, err=True))
    elif runs:
        lines += _describe_choices(paths)
    print_lines(lines)
    return decide_exit_code(failed=bool(skipped) or (bool(runs) and not (undo or finish)))


def _describe_run(run: HalfDoneRun) -> Iterator[Line]:
    """Yield a line for each target: its state, and where its other content is."""
    moves = run.record.find_moves()
    for move in run.record.directories:
        yield Line(f"{move.target}: {_STATES[move.find_state()]}")
    for file in run.record.files:
        path, state = resolve_moved_path(file.target, moves), file.find_state(moves)
        other, kept = ("old", file.backup) if state == "new" else ("new", file.ready)
        note = f" (the {other} one is {kept.name})" if kept and state != "changed" else ""
        yield Line(f"{path}: {_STATES[state]}{note}")


def _describe_choices(paths: Sequence[Path]) -> Iterator[Line]:
    command = shlex.join(["onnxkvrename", "recover", *map(str, paths)])
    yield Line(f"{command} --undo restores the old files", err=True)
    yield Line(f"{command} --finish puts the new files in place", err=True)
