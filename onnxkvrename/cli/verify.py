"""The command ``verify``: proves that each KV buffer is retained."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from onnxkvrename.api.arguments import find_rules
from onnxkvrename.api.verification import verify_together
from onnxkvrename.cli.options import declare_command
from onnxkvrename.cli.output import print_answer, print_choice, show_progress
from onnxkvrename.errors import KvRenameError
from onnxkvrename.files.find import find_jobs
from onnxkvrename.files.read import is_directory, read_status
from onnxkvrename.handoff.find_consumers import load_consumer
from onnxkvrename.handoff.target import TargetCheck
from onnxkvrename.options import Example
from onnxkvrename.renaming.parallel import map_ordered, open_executor
from onnxkvrename.renaming.run import check_token_change
from onnxkvrename.report.verify_text import build_verify_answer
from onnxkvrename.rules.plan import TokenChange
from onnxkvrename.rules.profile import ProfileChoice, Rules
from onnxkvrename.verification.verify import (
    VerifiedModel,
    VerifyRequest,
    verify_model,
)


@declare_command(
    "verify",
    VerifyRequest,
    "Exit codes: 0 all holds; 1 a finding of severity error; 2 the job could not be done; "
    "130 interrupted.",
    Example("onnxkvrename verify exports/", "Check all models, and windows together."),
    Example("onnxkvrename verify renamed.onnx --target vllm-qaic", "Also check for a consumer."),
    Example("onnxkvrename verify renamed.onnx --renamed-from model.onnx", "Prove a rename."),
)
def command(request: VerifyRequest) -> int:
    """Prove that every KV buffer is retained, in the models as they are; write nothing.

    Beside all checks of a rename: each retained output is computed from its own
    input, through subgraphs and local functions; onnx's checker accepts the
    model; external data are there. With --target, a consumer selects the buffers by
    name, orders and pairs them, and moves the part of each that it takes for the
    prompt's. Weights are not read.
    """
    models, check, profile = _verify_models(request)
    answer = build_verify_answer(
        models, profile, check, quiet=request.quiet, verbose=request.verbose
    )
    return print_answer(answer, request.output_format)


def _verify_models(
    request: VerifyRequest,
) -> tuple[tuple[VerifiedModel, ...], TargetCheck | None, ProfileChoice]:
    """Verify each model, then all together, also for a consumer, by the profile that is named."""
    if request.target is not None:
        load_consumer(request.target)  # before a model is read
    if request.token is not None:
        check_token_change(TokenChange(request.token))
    paths = [job.model for job in find_jobs(request.models)]
    sources = _find_sources(paths, request)
    rules = find_rules(request.profile, request.rules, paths)
    print_choice(rules.choice, request.output_format, request.quiet)
    verify = partial(_verify_with_source, rules=rules, request=request)
    is_watched = request.output_format == "text" and not request.quiet
    with (
        open_executor(None, request.jobs, len(paths)) as executor,
        show_progress(is_wanted=is_watched) as progress,
    ):
        count = progress.track_models("verifying", len(paths)) if progress is not None else None
        items = [*sources.items()]
        models = tuple(map_ordered(verify, items, executor, count, is_read_only=True))
    verified, check = verify_together(models, rules, request)
    return verified, check, rules.profile_choice


def _verify_with_source(
    item: tuple[Path, Path | None], rules: Rules, request: VerifyRequest
) -> VerifiedModel:
    path, source = item
    return verify_model(path, rules, request._replace(renamed_from=source))


def _find_sources(paths: Sequence[Path], request: VerifyRequest) -> dict[Path, Path | None]:
    """Return for each model the one of ``--renamed-from``; in a directory, by its relative path.

    Raises:
        KvRenameError: There is no such model, or it is one file for several models.
    """
    source = request.renamed_from
    if source is None or not is_directory(source):
        if source is not None and len(paths) > 1:
            raise KvRenameError(
                f"--renamed-from names one model, but {len(paths):,} are verified",
                hint="pass the directory of their sources",
            )
        return dict.fromkeys(paths, source)
    sources: dict[Path, Path | None] = {}
    for path in paths:
        typed = next(each for each in request.models if each == path or each in path.parents)
        found = source / (path.name if typed == path else path.relative_to(typed))
        if read_status(found) is None:
            hint = "models are matched by their paths below the directories"
            raise KvRenameError(f"no source of {path}", path=str(found), hint=hint)
        sources[path] = found
    return sources
