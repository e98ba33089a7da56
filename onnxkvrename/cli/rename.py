"""The command ``rename``, which is the default."""

from __future__ import annotations

from functools import partial

from onnxkvrename.api.files import run_rename
from onnxkvrename.cli.options import declare_command
from onnxkvrename.cli.output import print_answer, print_choice, show_progress
from onnxkvrename.options import Example
from onnxkvrename.renaming.request import Request
from onnxkvrename.report.rename_text import build_rename_answer
from onnxkvrename.rules.results import report_placed


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
        answer = build_rename_answer(report, request)
        if not request.writes:
            from onnxkvrename.cli.recover import mention_unfinished_runs  # nothing is written

            answer = mention_unfinished_runs(answer)
        elif report.restored:
            from onnxkvrename.cli.recover import mention_restored_files  # a run was killed

            answer = mention_restored_files(answer, report)
        return print_answer(answer, request.output_format)
