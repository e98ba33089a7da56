"""The command ``rename``, which is the default."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from onnxkvrename.api.files import run_rename, use_token_of_target
from onnxkvrename.cli.options import declare_command
from onnxkvrename.cli.output import print_answer, print_choice, show_progress
from onnxkvrename.files.read import is_occupied
from onnxkvrename.files.targets import is_protected
from onnxkvrename.options import Example
from onnxkvrename.report.rename_text import build_rename_answer
from onnxkvrename.rules.request import Request, format_rename
from onnxkvrename.rules.results import Report, report_placed

_ELSEWHERE = Path("renamed")
"""Where the command of a failing ``--check`` writes if it may not write in place."""


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
        return print_answer(answer, request.output_format)


def _format_fix(request: Request, report: Report) -> str:
    """Return the command that writes what ``--check`` finds, over a different result that is there.

    Where a model may not be replaced, as one that is read-only, it writes to a new directory.
    A text file that changes has a different one in its place where there is one.
    """
    places = (item.output for item in report.sidecars if item.status == "would-rename")
    is_different = any(model.result_state == "different" for model in report.models)
    is_elsewhere = any((request.output, request.directory, request.seed_cache))
    if is_different or (is_elsewhere and any(is_occupied(Path(place)) for place in places)):
        request = request._replace(force=True)
    pending = (Path(model.path) for model in report.models if model.status == "would-rename")
    if not (is_elsewhere or request.force) and any(map(is_protected, pending)):
        request = request._replace(directory=_ELSEWHERE)
    return format_rename(request)
