"""Rename models in files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

from onnxkvrename.api.arguments import (
    PathLike,
    RulesLike,
    build_request,
    find_rules,
    read_arguments,
    speak_python,
)
from onnxkvrename.errors import ModelError
from onnxkvrename.files.find import RenameJob, build_job, find_jobs
from onnxkvrename.files.read import is_directory
from onnxkvrename.qefficient.export_reuse import check_exports, restate_reuse
from onnxkvrename.renaming.parallel import open_executor
from onnxkvrename.renaming.run import check_token_change, rename_batch
from onnxkvrename.rules.load import AUTO_PROFILE, load_rules
from onnxkvrename.rules.profile import Rules
from onnxkvrename.rules.request import Request, SidecarPolicy
from onnxkvrename.rules.results import ModelReport, Report, report_placed

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from onnxkvrename.renaming.prepare_sidecars import Sidecar
    from onnxkvrename.renaming.write import Progress

    ProgressContext = AbstractContextManager[Progress | None]


@speak_python
def rename(
    model: PathLike,
    token: str | None = None,
    *,
    target: str | None = None,
    output: PathLike | None = None,
    strip: bool = False,
    replace: bool = False,
    normalize: bool = False,
    rules: RulesLike = None,
    verify: bool = False,
    strict: bool = False,
    force: bool = False,
    sidecars: SidecarPolicy = "auto",
    seed_cache: bool = False,
    dry_run: bool = False,
) -> ModelReport:
    """Rename the KV buffers of one model: in place, or into ``output``.

    After an exception, all files are as they were.

    Args:
        model: The model's path.
        token: The infix token to add; with ``strip`` the one to remove, ``None`` for any.
        target: The consumer of the result, such as ``vllm-qaic``: its token is added, and the
            result is checked for it.
        output: The file for the result. Its directory is created if it is missing, and gets a copy
            of the external data if it is not that of the model. By default the result replaces the
            model.
        strip: Remove the token.
        replace: Replace a different token.
        normalize: Give outputs the suffix that consumers pair with an input.
        rules: Rules, a profile's name or the path of a rules file.
        verify: Prove dataflow and validity of the result before it is written.
        strict: Treat every warning as an error.
        force: Overwrite existing and read-only files; write through links; rename in place in
            QEfficient's cache.
        sidecars: Whether text files beside the model that repeat its names, such as
            ``custom_io.yaml``, are renamed as well: ``auto`` for those that belong to the model,
            ``off`` for none, with a warning.
        seed_cache: For an export in QEfficient's cache: put the result where the cache looks for
            it.
        dry_run: Plan and check only.

    Returns:
        The report. Its status is ``renamed``, ``unchanged``, ``would-rename`` (with
        ``dry_run``), or ``failed`` with the findings that say why; then no file has changed.

    Raises:
        RulesError: The token or the rules cannot be used.
        ModelError: The model cannot be read.
        WriteError: The result cannot be written.
        KvRenameError: The target does not exist, or requires another token.
        TypeError: An argument has the wrong type.
        ValueError: Two arguments contradict each other, or a path is empty.

    Examples:
        >>> report = onnxkvrename.rename("model.onnx", "VLLM", output="renamed.onnx")
        >>> report.status, report.failed, report.name_map["past_key.0"]
        ('renamed', False, 'past_key.0_VLLM')
    """
    arguments = read_arguments(rename, locals())
    path = arguments["model"]
    if is_directory(path):
        raise ModelError("is a directory", path=str(path), hint="rename_all takes directories")
    request = build_request(Request, arguments, models=(path,), jobs=1)  # without processes
    (report,) = run_rename(request).models
    if report.error is not None:
        raise report.error
    return report


@speak_python
def rename_all(
    models: PathLike | Iterable[PathLike],
    token: str | None = None,
    *,
    target: str | None = None,
    directory: PathLike | None = None,
    strip: bool = False,
    replace: bool = False,
    normalize: bool = False,
    rules: RulesLike = None,
    verify: bool = False,
    strict: bool = False,
    force: bool = False,
    sidecars: SidecarPolicy = "auto",
    seed_cache: bool = False,
    dry_run: bool = False,
    executor: Executor | None = None,
) -> Report:
    """Rename many models, all of them or none.

    After an exception, all files are as they were. ``strip``, ``replace``, ``normalize``,
    ``rules``, ``verify``, ``strict``, ``force``, ``sidecars``, ``seed_cache``
    and ``dry_run`` are as for `rename`.

    Args:
        models: Paths of models, and of directories: then every ``.onnx`` file below.
        token: As for `rename`.
        target: As for `rename`.
        directory: Where the results go, laid out like the models; by default in place.
        executor: Reads and writes, such as a ``ProcessPoolExecutor`` or Dask's; results are
            put in place by this process.

    Returns:
        The report on each model. Where one failed, no file changed.

    Raises:
        RulesError: The token or the rules cannot be used.
        ModelError: A path leads to no model.
        WriteError: Two results have one path, or a result would replace another model.
        KvRenameError: The target does not exist, or requires another token.
        TypeError: An argument has the wrong type.
        ValueError: Two arguments contradict each other, or a path is empty.

    Examples:
        >>> report = onnxkvrename.rename_all("windows", "VLLM", directory="renamed")
        >>> [model.status for model in report.models]
        ['renamed', 'renamed', 'renamed']
    """
    arguments = read_arguments(rename_all, locals())
    return run_rename(build_request(Request, arguments, jobs=1), executor)


def use_token_of_target(request: Request) -> Request:
    """Return a request with the token that its target requires.

    Raises:
        KvRenameError: There is no such target, or it requires another token.
    """
    if request.target is None:
        return request
    from onnxkvrename.handoff.find_consumers import choose_token  # only for a target

    token = choose_token(request.target, request.token, strip=request.strip)
    return request._replace(token=token)


def run_rename(
    request: Request,
    executor: Executor | None = None,
    open_bars: Callable[[], ProgressContext] = nullcontext,
) -> Report:
    """Rename what is asked for; the command does it as the functions do.

    Args:
        request: The request.
        executor: Reads and writes; by default as many processes as the request says.
        open_bars: Opens the display of the progress.

    Returns:
        The report on each model, and the profile.

    Raises:
        KvRenameError: The job cannot be done; no file has changed.
    """
    typed = request
    request = use_token_of_target(request)
    knows_rules = request.profile != AUTO_PROFILE
    rules = find_rules(request.profile, request.rules) if knows_rules else load_rules()
    jobs = find_jobs(request.models, request.output, request.directory)
    check_token_change(request.change)
    if not knows_rules:
        rules = _pick_rules(request, jobs)
    run = _rename_in_cache if request.seed_cache else _run_jobs
    report = run(request, jobs, rules, executor, open_bars)
    is_default = (request.profile or request.rules) is None
    if report.has_no_buffers and is_default and not request.seed_cache:
        rules = _pick_rules(request, jobs)
        if rules.choice is not None:
            report = _run_jobs(request, jobs, rules, executor, open_bars)
    if report.has_no_buffers and not request.seed_cache:
        from onnxkvrename.api.unnamed_caches import explain_unknown_names  # nothing is renamed

        report = explain_unknown_names(report, typed, request.token or "")
    return report._replace(profile=rules.profile_choice)


def _pick_rules(request: Request, jobs: Sequence[RenameJob]) -> Rules:
    """Return rules that fit the models, by their names."""
    models = [job.model for job in jobs]
    return find_rules(request.profile, request.rules, models)


def _rename_in_cache(
    request: Request,
    jobs: Sequence[RenameJob],
    rules: Rules,
    executor: Executor | None,
    open_bars: Callable[[], ProgressContext],
) -> Report:
    """Rename exports of QEfficient's cache, with their parameters and directories."""
    from onnxkvrename.qefficient.seed_cache import plan_seeds  # only for --seed-cache

    models = [job.model for job in jobs]
    plan = plan_seeds(models, rules, request)
    if plan.refused:
        request = request._replace(dry_run=True)
    jobs = plan.redirect_jobs(jobs)
    params = plan.build_sidecars(jobs)
    report = _run_jobs(request, jobs, rules, executor, open_bars, params)
    return report._replace(models=(*report.models, *plan.kept, *plan.refused))


def _run_jobs(
    request: Request,
    jobs: Sequence[RenameJob],
    rules: Rules,
    executor: Executor | None,
    open_bars: Callable[[], ProgressContext],
    sidecars: Sequence[Sidecar] = (),
) -> Report:
    """Rename models with the workers that are asked for, and say of a cache what it holds now."""
    if request.dask is not None:  # a worker has a working directory of its own
        jobs = tuple(build_job(j.model.absolute(), j.output.absolute(), j.root) for j in jobs)
        request = request._replace(sidecar=tuple(path.absolute() for path in request.sidecar))
    workers = (
        nullcontext(executor)
        if executor is not None
        else open_executor(request.dask, request.jobs, len(jobs))
    )
    reports: list[Report] = []
    with report_placed(reports), workers as executor, open_bars() as progress:
        report = rename_batch(
            request,
            jobs,
            rules,
            sidecars=sidecars,
            check_reports=partial(check_exports, rules=rules, request=request),
            progress=progress,
            executor=executor,
        )
        reports.append(report)
        models = (
            restate_reuse(model, rules) if model.status == "renamed" else model
            for model in report.models
        )
        return report._replace(models=tuple(models))
