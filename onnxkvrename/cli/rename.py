"""The command ``rename``, which is the default."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

from onnxkvrename.api.files import run_rename, use_token_of_target
from onnxkvrename.cli.options import declare_command
from onnxkvrename.cli.output import print_answer, print_choice, show_progress
from onnxkvrename.errors import KvRenameError
from onnxkvrename.findings import format_count
from onnxkvrename.options import Example
from onnxkvrename.report.formats import Answer, Line, Note
from onnxkvrename.report.formats.text import format_files
from onnxkvrename.report.rename_text import build_rename_answer
from onnxkvrename.rules.request import Request, format_rename
from onnxkvrename.rules.results import Report, report_placed
from onnxkvrename.storage.read import is_directory, is_occupied, resolve_path
from onnxkvrename.storage.recover import find_half_done_runs


@declare_command(
    "rename",
    Request,
    "Exit codes: 0 done or nothing to do; 1 a finding of severity error, or --check found "
    "a name that would change; 2 the job could not be done; 130 interrupted.",
    Example("onnxkvrename model.onnx --target vllm-qaic -n", "Show what would change."),
    Example("onnxkvrename model.onnx --target vllm-qaic", "Rename in place, and check the result."),
    Example("onnxkvrename exports/ --prefix VLLM -d renamed/", "Rename all models, or none."),
    Example("onnxkvrename renamed.onnx --strip", "Give back the bytes before the rename."),
)
def command(request: Request) -> int:
    """Rename the KV-cache buffers of exported ONNX models so that vLLM can select them.

    MODEL is an .onnx file, or a directory: then every .onnx file below it. Each
    output past_key.0_RetainedState and its input past_key.0 become
    past_key.0_TOKEN_RetainedState and past_key.0_TOKEN everywhere in the graph;
    vision and all other buffers stay. Nothing is written unless every model
    passes every check.
    """
    is_watched = request.output_format == "text" and not request.quiet
    report = run_rename(request, open_bars=partial(show_progress, is_wanted=is_watched))
    with report_placed([report]):
        print_choice(report.profile, request.output_format, request.quiet)
        command_line = _format_fix(request, report) if request.check else ""
        answer = build_rename_answer(report, use_token_of_target(request), command_line)
        if not request.writes:
            answer = _mention_unfinished_runs(answer)
        elif report.restored:
            answer = _mention_restored_files(answer, report)
        return print_answer(answer, request.output_format)


def _format_fix(request: Request, report: Report) -> str:
    """Return the command that writes what ``--check`` finds, over a different result that is there.

    A text file that changes has a different one in its place where there is one.
    """
    places = (item.output for item in report.sidecars if item.status == "would-rename")
    is_different = any(model.result_state == "different" for model in report.models)
    is_elsewhere = any((request.output, request.directory, request.seed_cache))
    if is_different or (is_elsewhere and any(is_occupied(Path(place)) for place in places)):
        request = request._replace(force=True)
    return format_rename(request)


def _mention_unfinished_runs(answer: Answer) -> Answer:
    """Return the answer of a rename that wrote nothing, with a line on runs that stopped halfway.

    Without it, the files of such a run would look as if nobody had begun to rename them.
    """
    parents = dict.fromkeys(Path(file.path).parent for file in answer.files)
    with suppress(KvRenameError, OSError):  # what cannot be read has a line of its own
        records = find_half_done_runs(path for path in parents if is_directory(path))
        targets = [target for record in records for target in record.list_targets()]
        if targets:
            counts = Counter(target.state for target in targets)
            states = [f"{counts[s]:,} {s}" for s in ("new", "old", "changed") if counts[s]]
            files = format_count(len(targets), "file")
            return _add_note(
                answer,
                f"a rename of {files} stopped halfway: {', '.join(states)} "
                "(run the stopped command again)",
            )
    return answer


def _mention_restored_files(answer: Answer, report: Report) -> Answer:
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

    return answer._replace(render_text=render_text, notes=(*answer.notes, Note("stopped", text)))
