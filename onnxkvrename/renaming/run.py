"""Rename one model or many: prepare all, check all together, write all or none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from onnxkvrename.errors import (
    ModelError,
    RulesError,
)
from onnxkvrename.files.find import RenameJob
from onnxkvrename.files.lock import Locks, open_locks
from onnxkvrename.files.read import MEMORY, find_existing_directory, is_directory
from onnxkvrename.files.staged import WrittenInterrupt, clear_leftovers
from onnxkvrename.files.targets import check_result_size
from onnxkvrename.findings import CheckError, Finding, promote_to_errors
from onnxkvrename.model.file import join_pieces, read_model_signature, sum_piece_sizes
from onnxkvrename.model.proto_reader import read_signature
from onnxkvrename.model.protobuf import ByteSource
from onnxkvrename.renaming.batch_checks import check_batch, check_space
from onnxkvrename.renaming.parallel import map_ordered
from onnxkvrename.renaming.prepare import PreparedModel, prepare_model
from onnxkvrename.renaming.write import PlaceError, Progress, list_results, write_results
from onnxkvrename.rules.check_together import check_models_together
from onnxkvrename.rules.kv_model import scan_model, splice_model
from onnxkvrename.rules.lone_sides import has_lone_sides
from onnxkvrename.rules.plan import TokenChange
from onnxkvrename.rules.profile import Rules, find_token_error
from onnxkvrename.rules.request import Request
from onnxkvrename.rules.results import (
    ModelReport,
    PlacedInterrupt,
    Report,
    ReportCheck,
    SidecarReport,
    Status,
    report_placed,
)
from onnxkvrename.rules.sidecar_files import find_candidates, find_compiles

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from onnxkvrename.renaming.prepare_sidecars import PreparedSidecar, Sidecar


def rename_batch(
    request: Request,
    jobs: Sequence[RenameJob],
    rules: Rules,
    *,
    sidecars: Sequence[Sidecar] = (),
    check_reports: ReportCheck = tuple,
    progress: Progress | None = None,
    executor: Executor | None = None,
) -> Report:
    """Rename models, and the text files that go with them, all of them or none.

    All are read, planned and checked, then all results are written under temporary names,
    and only then the first is put in place. A killed run is completed by the same call.

    Args:
        request: What is asked for.
        jobs: The models, each with the path of its result.
        rules: The rules that recognize KV names.
        sidecars: Text files that follow the names of the models, beside those that are found.
        check_reports: A further check of all models.
        progress: The display of the progress.
        executor: Runs the reads and writes, on any machine where the jobs' paths mean the same
            files; results are put in place by this process. By default it does all.

    Returns:
        The outcome for each model and sidecar. An error of one model is in its report; then
        all files are as they were.

    Raises:
        RulesError: The token or the rules cannot be used.
        KvRenameError: The executor failed, or a path that belongs to no single model could not be
            written. Nothing has changed.
    """
    check_token_change(request.change)
    sidecars = (*sidecars, *_find_sidecars(request, jobs, rules))
    reports = list[Report]()
    with report_placed(reports), open_locks() as locks:
        if request.writes:  # so another run changes nothing between a check and the writing
            all_jobs = [*jobs, *(sidecar.job for sidecar in sidecars)]
            locks.hold(find_existing_directory(job.target.parent) for job in all_jobs)
            # Before anything is read: the state of a file is another one without a second name.
            read = [*request.read_files, *(job.model for job in all_jobs)]
            clear_leftovers(locks, read, links_only=True)
        run = _Run(request, jobs, rules, sidecars, check_reports, progress, executor, locks)
        reports.append(_rename_batch(run))
    return reports[0]


class _Run(NamedTuple):
    """What a rename works with; the arguments of :func:`rename_batch`, and the locks."""

    request: Request
    jobs: Sequence[RenameJob]
    rules: Rules
    sidecars: Sequence[Sidecar]
    check_reports: ReportCheck
    progress: Progress | None
    executor: Executor | None
    locks: Locks


def _rename_batch(run: _Run) -> Report:
    """Rename models and sidecars in directories that are locked."""
    request, jobs, rules, sidecars = run.request, run.jobs, run.rules, run.sidecars
    models = _prepare_models(request, jobs, rules, run.progress, run.executor)
    models = check_batch(models, request, rules, run.check_reports)
    prepared_sidecars: tuple[PreparedSidecar, ...] = ()
    if sidecars:
        models, prepared_sidecars = _prepare_sidecars(models, sidecars, request, rules)
    if request.writes:
        read = [*request.read_files, *(job.model for job in jobs)]
        read += [each.path for each in sidecars]
        read += [file.path for model in models for file in model.data_files]
        clear_leftovers(run.locks, read)
    if not request.check:
        models = check_space(models)
    models = _check_places(models, prepared_sidecars, request, rules)
    models = tuple(_settle(model, strict=request.strict) for model in models)
    if not request.writes or any(model.report.failed for model in models):
        sidecar_reports = _list_sidecar_reports(prepared_sidecars)
        return Report(_list_reports(models), sidecar_reports)
    return _write_results(models, prepared_sidecars, run)


def _settle(model: PreparedModel, *, strict: bool = False) -> PreparedModel:
    """Return the model with its final findings, and failed if one of them is an error."""
    report = model.report
    if strict:
        report = report._replace(findings=promote_to_errors(report.findings))
    return model._replace(report=report._replace(status="failed") if report.failed else report)


def _check_places(
    models: tuple[PreparedModel, ...],
    sidecars: tuple[PreparedSidecar, ...],
    request: Request,
    rules: Rules,
) -> tuple[PreparedModel, ...]:
    """Return the models with what is wrong with the places of all results together."""
    jobs = [model.job for model in models]
    directories = [job.output.parent for job in jobs if not job.same_directory]
    if any("asked" not in each.sidecar.facts and each.plan is None for each in sidecars):
        directories += [job.output.parent for job in jobs if job.in_place]
    with suppress(ModelError):  # a directory that takes files, but cannot be listed
        replaced = dict.fromkeys(m.job.output.parent for m in models if m.replaces_model)
        compiled = [each for each in replaced if any(True for _ in find_compiles(each))]
        directories += compiled
        if directories and (compiled or find_candidates(directories, rules)):
            from onnxkvrename.renaming.load_sidecars import check_sidecars_there

            models = check_sidecars_there(models, sidecars, rules)
    if sidecars or len(models) > 1 or not all(job.in_place for job in jobs):
        from onnxkvrename.renaming.file_clashes import check_files_together

        models = check_files_together(models, sidecars, request.read_files)
    return models


def _prepare_sidecars(
    models: tuple[PreparedModel, ...], sidecars: Sequence[Sidecar], request: Request, rules: Rules
) -> tuple[tuple[PreparedModel, ...], tuple[PreparedSidecar, ...]]:
    """Prepare the text files, and return the models with the findings about them."""
    from onnxkvrename.renaming.prepare_sidecars import add_sidecar_findings, prepare_sidecars

    prepared = tuple(prepare_sidecars(sidecars, models, request, rules))
    return add_sidecar_findings(models, prepared), prepared


def _find_sidecars(
    request: Request, jobs: Sequence[RenameJob], rules: Rules
) -> tuple[Sidecar, ...]:
    """Return the text files that go with models.

    Raises:
        ModelError: A named file cannot be used, or a directory cannot be listed.
        WriteError: Two would be written to the same place.
    """
    directories = dict.fromkeys(job.model.parent for job in jobs)
    if request.output is None:  # the results keep the layout of a directory
        paths = (path for path in request.models if path.suffix != ".onnx")
        directories |= dict.fromkeys(path for path in paths if is_directory(path))
    candidates: tuple[tuple[Path, Path], ...] = ()
    try:
        candidates = find_candidates(directories, rules)
    except ModelError:
        if request.sidecars != "off":
            raise
    if not jobs or not (candidates or request.sidecar):
        return ()
    from onnxkvrename.renaming.load_sidecars import load_sidecars  # most models have none

    return load_sidecars(request, jobs, rules, candidates)


def check_token_change(change: TokenChange) -> None:
    """Raise :class:`RulesError` for a missing token, or for one that no name may carry."""
    if change.token is None and not change.strip:
        hint = "for example `--target vllm-qaic`"
        raise RulesError("no token given: pass a target or a token", hint=hint)
    if change.token is not None and (fault := find_token_error(change.token)):
        raise RulesError(f"the token {change.token!r} {fault}", hint="for example VLLM")


def _prepare_models(
    request: Request,
    jobs: Sequence[RenameJob],
    rules: Rules,
    progress: Progress | None,
    executor: Executor | None,
) -> tuple[PreparedModel, ...]:
    prepare = partial(prepare_model, request=request, rules=rules)
    count_model = progress.track_models("reading", len(jobs)) if progress is not None else None
    return tuple(map_ordered(prepare, jobs, executor, count_model))


def _write_results(
    models: Sequence[PreparedModel], sidecars: Sequence[PreparedSidecar], run: _Run
) -> Report:
    force = run.request.force
    results = list_results(models, sidecars, force=force)
    written = _report_written(models, sidecars)
    try:
        write_results(results, run.progress, run.executor, locks=run.locks, force=force)
    except PlaceError as failure:
        reports = tuple(_build_failure_reports(models, failure))
        return Report(reports, _list_sidecar_reports(sidecars))
    except WrittenInterrupt:
        raise PlacedInterrupt(written) from None
    return written


def _report_written(models: Sequence[PreparedModel], sidecars: Sequence[PreparedSidecar]) -> Report:
    """Return the report on files that are all in place."""
    return Report(
        tuple(model.report._replace(status=_resolve_status(model)) for model in models),
        tuple(_resolve_sidecar_report(sidecar.report) for sidecar in sidecars),
    )


def _list_reports(models: Sequence[PreparedModel]) -> tuple[ModelReport, ...]:
    return tuple(model.report for model in models)


def _list_sidecar_reports(sidecars: Sequence[PreparedSidecar]) -> tuple[SidecarReport, ...]:
    return tuple(item.report for item in sidecars)


def _resolve_status(model: PreparedModel) -> Status:
    writes = model.needs_write or model.data_copies
    return "renamed" if model.report.has_changes and writes else "unchanged"


def _resolve_sidecar_report(report: SidecarReport) -> SidecarReport:
    return report._replace(status="renamed" if report.status == "would-rename" else "unchanged")


def _build_failure_reports(
    models: Sequence[PreparedModel], failure: PlaceError
) -> Iterator[ModelReport]:
    for index, model in enumerate(models):
        if index == failure.model_index:
            yield model.report._replace(status="failed", error=failure.error)
        elif model.job.target in failure.kept_targets:
            yield model.report._replace(status="renamed")
        else:
            yield model.report


def rename_in_memory(data: bytes, change: TokenChange, rules: Rules) -> bytes:
    """Return the bytes of the renamed model, which is a serialized ModelProto.

    External data is neither read nor changed: the bytes do not say where it is.

    Raises:
        CheckError: A check refuses the model; its ``findings`` say why.
        ModelError: The bytes are not a readable model, or would become too many.
        RulesError: The token or the rules cannot be used.
    """
    check_token_change(change)
    source = ByteSource.from_bytes(data)
    scanned = scan_model(
        source, read_model_signature(source), MEMORY, rules, change, data_beside=None
    )
    model = scanned.model
    if has_lone_sides(model):
        from onnxkvrename.verification.pairs.other_sides import explain_lone_sides  # onnx, for few

        command = "" if change.strip else "onnxkvrename"
        explained = explain_lone_sides(source, model, model.findings, command)
        model = model._replace(findings=explained)
    (set_findings,) = check_models_together([model], rules, Request())
    refuse_errors((*model.findings, *set_findings))
    name_map = model.plan.name_map
    if not name_map:
        return data
    pieces, expected = splice_model(source, scanned)
    check_result_size(sum_piece_sizes(pieces))
    result = join_pieces(source, pieces)
    if read_signature(ByteSource.from_bytes(result)) != expected:
        raise ModelError(
            "the result did not read back as planned",
            hint="this is a bug in onnxkvrename: please report it",
        )
    return result


def refuse_errors(findings: tuple[Finding, ...]) -> None:
    """Raise :class:`CheckError` if one of the findings is an error."""
    errors = [finding for finding in findings if finding.severity == "error"]
    if errors:
        first = errors[0]
        subject = f"{first.subject} " if first.subject else ""
        more = f" and {len(errors) - 1} more errors" if len(errors) > 1 else ""
        raise CheckError(f"{first.code}: {subject}{first.message}{more}", findings, hint=first.hint)
