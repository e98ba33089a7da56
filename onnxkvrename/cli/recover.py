"""The command ``recover``: ends a run that stopped half way."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from onnxkvrename.cli.options import declare_command
from onnxkvrename.cli.output import print_answer
from onnxkvrename.errors import KvRenameError, ModelError, ReadError
from onnxkvrename.findings import decide_exit_code, format_count, quote_path
from onnxkvrename.options import Example, Format, Option
from onnxkvrename.report.documents.recover_json import Action, RecoverContent, Run
from onnxkvrename.report.formats import Answer, FileResult, Line, Note
from onnxkvrename.report.formats.text import format_files
from onnxkvrename.rules.results import Report
from onnxkvrename.storage.read import is_directory, resolve_path
from onnxkvrename.storage.record import State, TargetState
from onnxkvrename.storage.recover import (
    end_run,
    find_half_done_runs,
    find_leftovers,
    remove_ended_runs,
)
from onnxkvrename.storage.temp_file import LOCK_NAME

_STATES: dict[Action | None, dict[State, str]] = {
    "list": {"new": "new", "old": "old"},
    "undo": {"new": "restored", "old": "still old"},
    "finish": {"new": "already new", "old": "replaced by the new file"},
}
"""What is said of a file, by what was asked for and the state in which it was found."""
_CHANGED = "changed since then; left as it is"
_MAX_LISTED_FILES = 4
"""Files in the same state that each have a line."""


class RecoverArguments(NamedTuple):
    """What a user asks for with ``recover``."""

    paths: Annotated[tuple[Path, ...], Option("", metavar="PATH...", is_required=True)] = ()
    undo: Annotated[bool, Option("--undo", "Restore the old files.", excludes=("finish",))] = False
    finish: Annotated[bool, Option("--finish", "Put the new files in place.")] = False
    output_format: Format = "text"


@declare_command(
    "recover",
    RecoverArguments,
    "The command that was stopped finishes its work as well. Exit codes: 0 done or nothing to do; "
    "1 there is a run to undo or to finish, a file has changed since the run stopped, or a record "
    "was skipped; 2 the job could not be done, or a directory not be read; 130 interrupted.",
    Example("onnxkvrename recover exports/", "List what a killed run has left."),
    Example("onnxkvrename recover exports/ --undo", "Restore the old files."),
)
def command(arguments: RecoverArguments) -> int:
    """List the files of a run that stopped half way, restore the old or place the new ones.

    A run that is killed, or whose disk fails, may leave some files new and others
    as they were. Each one is complete, and what is needed to go either way is kept
    beside them. PATH is a directory, which is searched with all below it, or a
    file in one.
    """
    paths, undo, finish, output_format = arguments
    try:
        skipped = list[ModelError]()
        runs = [
            (run, tuple(run.record.list_targets()))
            for run in find_half_done_runs(paths, skipped.append)
        ]
        show = _PathNames(paths)
        for run, _ in runs if undo or finish else ():
            end_run(run, undo=undo)
        if undo or finish:
            remove_ended_runs(paths)
        leftovers = () if runs and not (undo or finish) else find_leftovers(paths)
    except OSError as error:
        path = None if error.filename is None else os.fsdecode(error.filename)
        raise ModelError(f"cannot be read: {error.strerror}", path=path) from None
    recovery = RecoverContent(
        "undo" if undo else "finish" if finish else "list",
        tuple(Run(run.path, targets) for run, targets in runs),
        tuple(skipped),
        tuple(leftovers),
    )
    is_left = bool(_list_changed(recovery)) if undo or finish else bool(runs)
    is_unread = any(isinstance(error, ReadError) for error in skipped)
    code = decide_exit_code(failed=bool(skipped) or is_left, not_done=is_unread)
    return print_answer(_build_answer(recovery, code, show), output_format)


def mention_unfinished_runs(answer: Answer) -> Answer:
    """Return the answer of a rename that wrote nothing, with a line on runs that stopped halfway.

    Without it, the files of such a run would look as if nobody had begun to rename them.
    """
    parents = dict.fromkeys(Path(file.path).parent for file in answer.files)
    directories = [path for path in parents if is_directory(path)]
    with suppress(KvRenameError, OSError):  # what cannot be read has a line of its own
        runs = find_half_done_runs(directories, is_recursive=False)
        if runs:
            note = _describe_unfinished(
                [target for run in runs for target in run.record.list_targets()]
            )
            command = " ".join(
                ("onnxkvrename recover", *map(quote_path, _find_common_directory(directories)))
            )
            return _add_note(answer, f"{note} (`{command}` lists them)")
    return answer


def mention_restored_files(answer: Answer, report: Report) -> Answer:
    """Return the answer of a rename that first undid runs that had stopped halfway.

    A line says so of files that this run does not rename itself: nobody would expect them to have
    other names than before.
    """
    renamed = (model for model in report.models if model.status == "renamed")
    own = {resolve_path(model.output) for model in renamed}
    others = [str(path) for path in report.restored if str(path) not in own]
    if not others:
        return answer
    which, verb = (others[0], "is") if len(others) == 1 else (format_files(others), "are")
    return _add_note(
        answer, f"a rename that had stopped halfway was undone first: {which} {verb} as before it"
    )


def _add_note(answer: Answer, text: str) -> Answer:
    def render_text(width: int | None) -> Iterator[Line]:
        yield from answer.render_text(width)
        yield Line(text, err=True)

    return answer._replace(render_text=render_text, notes=(*answer.notes, Note("recover", text)))


def _find_common_directory(directories: Sequence[Path]) -> list[str]:
    """Return the directory that contains all these, or themselves if that is the root."""
    with suppress(ValueError):  # on several drives, or absolute and relative paths
        shared = os.path.commonpath(directories)
        if shared and os.path.dirname(shared) != shared:
            return [shared]
    return [*map(str, directories)]


class _PathNames:
    """Names files as other commands do: below the paths that were typed."""

    def __init__(self, typed: Sequence[Path]) -> None:
        self.typed = typed
        directories = (path if is_directory(path) else path.parent for path in typed)
        self.roots = {Path(resolve_path(path)): path for path in directories}

    def __call__(self, path: Path) -> str:
        for root in (path, *path.parents):
            if root in self.roots:
                return str(self.roots[root] / path.relative_to(root))
        return str(path)


def _build_answer(recovery: RecoverContent, code: int, show: _PathNames) -> Answer:
    level: Literal["error", "notice"] = "error" if recovery.action == "list" else "notice"
    notes = (
        Note(
            "recover",
            _describe_state(target, recovery.action),
            show(target.path),
            "error" if target.state == "changed" else level,
        )
        for run in recovery.runs
        for target in run.targets
    )
    outcomes = _describe_outcome(recovery, show)
    return Answer(
        "recover",
        code,
        build_content=lambda: recovery,
        render_text=partial(_render_text, recovery, show),
        files=tuple(FileResult(error.path or "", error=error) for error in recovery.skipped),
        notes=(*notes, *(Note("recover", outcome) for outcome in outcomes)),
    )


def _render_text(recovery: RecoverContent, show: _PathNames, width: int | None) -> Iterator[Line]:
    for run in recovery.runs:
        groups: dict[tuple[State, bool], list[TargetState]] = {}
        for target in run.targets:
            groups.setdefault((target.state, target.kept is None), []).append(target)
        for group in groups.values():
            yield from _render_group(group, recovery.action, show)
    yield from (Line(outcome, err=True) for outcome in _describe_outcome(recovery, show))
    if recovery.runs and recovery.action == "list":
        shown = " ".join(("onnxkvrename recover", *(quote_path(str(path)) for path in show.typed)))
        yield Line(f"{shown} --undo restores the old files", err=True)
        yield Line(f"{shown} --finish puts the new files in place", err=True)


def _render_group(
    group: Sequence[TargetState], action: Action | None, show: _PathNames
) -> Iterator[Line]:
    """Yield a line for each of a few files in the same state, or one for all of many."""
    if len(group) <= _MAX_LISTED_FILES:
        for target in group:
            yield Line(f"{show(target.path)}: {_describe_state(target, action)}")
        return
    state = _STATES[action].get(group[0].state, _CHANGED)
    if action == "list" and group[0].kept is not None:
        other = "old" if group[0].state == "new" else "new"
        state += f" (the {other} ones are beside them; --format json has their names)"
    yield Line(f"{format_files([show(target.path) for target in group])}: {state}")


def _describe_state(target: TargetState, action: Action | None) -> str:
    state = _STATES[action].get(target.state, _CHANGED)
    if target.kept is None or action != "list":
        return state
    return f"{state} (the {'old' if target.state == 'new' else 'new'} one is {target.kept.name})"


def _describe_unfinished(targets: Sequence[TargetState]) -> str:
    """Return how many files of a run that stopped are in which state."""
    counts = Counter(target.state for target in targets)
    listed = [f"{counts[state]:,} {state}" for state in ("new", "old", "changed") if counts[state]]
    return f"a rename of {format_count(len(targets), 'file')} stopped halfway: {', '.join(listed)}"


def _list_changed(recovery: RecoverContent) -> list[TargetState]:
    """Return the files that were left as they are when their runs were ended."""
    if recovery.action == "list":
        return []
    return [target for run in recovery.runs for target in run.targets if target.state == "changed"]


def _suggest_check(recovery: RecoverContent, show: _PathNames) -> str:
    """Return the command that checks the models of the runs, if there are any."""
    targets = (target.path for run in recovery.runs for target in run.targets)
    models = [Path(show(path)) for path in targets if path.suffix == ".onnx"]
    directories = [*dict.fromkeys(model.parent for model in models)]
    if not directories:
        return ""
    paths = map(quote_path, _find_common_directory(directories))
    command = " ".join(("onnxkvrename verify", *paths))
    return f" (`{command}` checks them)"


def _describe_outcome(recovery: RecoverContent, show: _PathNames) -> Iterator[str]:
    if not recovery.runs and not recovery.skipped:
        yield "no run to undo or to finish here"
    elif changed := _list_changed(recovery):
        done = "restored" if recovery.action == "undo" else "put in place"
        which, they = show(changed[0].path), "it was"
        if len(changed) > 1:
            which, they = f"{len(changed):,} files (first: {which})", "they were"
        yield (
            f"{which} changed since the run stopped, so {they} not {done}; the files of the run "
            f"may not fit together{_suggest_check(recovery, show)}"
        )
    elif recovery.runs and recovery.action == "undo":
        yield "the old files are restored"
    elif recovery.runs and recovery.action == "finish":
        yield "the new files are in place"
    elif recovery.action == "list":
        yield from (_describe_unfinished(run.targets) for run in recovery.runs)
    if recovery.leftovers:
        locks = sum(path.name == LOCK_NAME for path in recovery.leftovers)
        counts = {"lock": locks, "temporary file": len(recovery.leftovers) - locks}
        parts = (f"{count} {noun}{'s' * (count > 1)}" for noun, count in counts.items() if count)
        yield (
            f"{' and '.join(parts)} of runs that were killed or are still running (first: "
            f"{show(recovery.leftovers[0])}); the next rename that writes here removes those of "
            "killed runs"
        )
