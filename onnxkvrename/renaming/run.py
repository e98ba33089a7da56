"""Rename one model or many: prepare all, check all together, write all or none."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from onnxkvrename.errors import (
    KvRenameError,
    ModelError,
    RulesError,
)
from onnxkvrename.findings import promote_to_errors
from onnxkvrename.renaming.batch_checks import check_batch
from onnxkvrename.renaming.parallel import map_ordered
from onnxkvrename.renaming.place import (
    BatchWriter,
    PlaceError,
    Progress,
    find_targets_to_clean,
    remove_stale_files,
)
from onnxkvrename.renaming.prepare import (
    PreparedModel,
    prepare_model,
    prepare_stamp,
)
from onnxkvrename.renaming.request import Request
from onnxkvrename.renaming.write import list_tasks
from onnxkvrename.rules.find_models import find_candidates
from onnxkvrename.rules.plan import TokenChange
from onnxkvrename.rules.profile import Rules, find_token_error
from onnxkvrename.rules.results import (
    ModelReport,
    PlacedInterrupt,
    RenameJob,
    Report,
    SidecarReport,
    Status,
)
from onnxkvrename.storage.read import is_directory
from onnxkvrename.storage.temp_file import resolve_moved_path

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from onnxkvrename.renaming.prepare_sidecars import PreparedSidecar, Sidecar
    from onnxkvrename.storage.read import FileIdentity


def rename_batch(
    request: Request,
    jobs: Sequence[RenameJob],
    rules: Rules,
    *,
    sidecars: Sequence[Sidecar] = (),
    progress: Progress | None = None,
    executor: Executor | None = None,
    directory_map: Mapping[Path, Path] | None = None,
) -> Report:
    """Rename models, and the text files that go with them, all of them or none.

    All are read, planned and checked, then all results are written under temporary names,
    and only then the first is put in place. A killed run is completed by the same call.

    Args:
        request: What is asked for.
        jobs: The models, each with the path of its result.
        rules: The rules that recognize KV names.
        sidecars: Text files that follow the names of the models, beside those that are found.
        progress: The display of the progress.
        executor: Runs the reads and writes, on any machine where the jobs' paths mean the same
            files; results are put in place by this process. By default it does all.
        directory_map: Directories that get another name in the end, by absolute paths; the
            report has the old names.

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
    targets = _list_targets_to_clean([*jobs, *(sidecar.job for sidecar in sidecars)])
    inputs = [*request.read_files, *(job.model for job in jobs), *(item.path for item in sidecars)]
    keeps_files = request.writes and remove_stale_files(targets, inputs, links_only=True)
    models = _prepare_models(request, jobs, rules, progress, executor)
    models = check_batch(models, request, rules)
    prepared_sidecars: tuple[PreparedSidecar, ...] = ()
    if sidecars:
        models, prepared_sidecars = _prepare_sidecars(models, sidecars, request)
    models = _check_places(models, prepared_sidecars, request, rules, directory_map or {})
    models = tuple(_settle(model, strict=request.strict) for model in models)
    if not request.writes or any(model.report.failed for model in models):
        return Report(_list_reports(models), _list_sidecar_reports(prepared_sidecars))
    inputs += [file.path for model in models for file in model.data_files]
    keeps_files |= remove_stale_files([*targets, *_list_data_paths(models)], inputs)
    tasks = list_tasks(models, prepared_sidecars, force=request.force)
    writer = BatchWriter(tasks, progress, executor, directory_map, inputs)
    report = _write_results(models, prepared_sidecars, writer)
    if keeps_files and not report.failed:
        _remove_kept_files(targets, models, directory_map or {}, inputs)
    return report


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
    directory_map: Mapping[Path, Path],
) -> tuple[PreparedModel, ...]:
    """Return the models with what is wrong with the places of all results together."""
    jobs = [model.job for model in models]
    directories = [job.output.parent for job in jobs if not job.same_directory]
    if any(each.sidecar.is_found and each.plan is None for each in sidecars):
        directories += [job.output.parent for job in jobs if job.in_place]
    if directories:
        with suppress(ModelError):  # a directory that takes files, but cannot be listed
            if find_candidates(directories, rules):
                from onnxkvrename.renaming.found_sidecars import check_sidecars_there

                models = check_sidecars_there(models, sidecars, rules)
    if sidecars or directory_map or len(models) > 1 or not all(job.in_place for job in jobs):
        from onnxkvrename.renaming.file_clashes import check_files_together

        models = check_files_together(models, sidecars, directory_map, request.read_files)
    return models


def _prepare_sidecars(
    models: tuple[PreparedModel, ...], sidecars: Sequence[Sidecar], request: Request
) -> tuple[tuple[PreparedModel, ...], tuple[PreparedSidecar, ...]]:
    """Prepare the text files, and return the models with the findings about them."""
    from onnxkvrename.renaming.prepare_sidecars import add_sidecar_findings, prepare_sidecars

    prepared = tuple(prepare_sidecars(sidecars, _list_reports(models), request))
    models = add_sidecar_findings(models, prepared)
    if not request.only_checks and any(item.takes_folder for item in prepared):
        from onnxkvrename.renaming.package_files import add_package_files  # only with -d

        models, prepared = add_package_files(models, prepared, force=request.force)
    return models, prepared


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
        if request.sidecar_policy != "leave":
            raise
    if not jobs or not (candidates or request.sidecar or request.sidecars):
        return ()
    from onnxkvrename.renaming.load_sidecars import load_sidecars  # most models have none

    return load_sidecars(request, jobs, rules, tuple(directories), candidates)


def stamp_models(
    jobs: Sequence[RenameJob],
    reports: Sequence[ModelReport],
    identities: Sequence[FileIdentity],
    digest: str,
    rules: Rules,
    *,
    data_paths: Sequence[Path] = (),
    force: bool = False,
) -> Report:
    """Put a layout digest into the metadata of models, in place, all of them or none.

    Args:
        jobs: The models.
        reports: What was found of them before.
        identities: The states of the files that were read for it.
        digest: The digest, hexadecimal.
        rules: The rules that recognize KV names.
        data_paths: The files of their external data, which no result may replace.
        force: Whether to write over links and read-only files.

    Returns:
        The result of each model. An error is in the model's report; then all are as they were.
        It is an error that a file has changed since it was read.
    """
    targets = _list_targets_to_clean(jobs)
    inputs = [*data_paths, *(job.model for job in jobs)]
    keeps_files = remove_stale_files(targets, inputs, links_only=True)
    models = tuple(
        prepare_stamp(job, report, identity, digest, force=force)
        for job, report, identity in zip(jobs, reports, identities, strict=True)
    )
    models = tuple(map(_settle, check_batch(models, Request(), rules)))
    if any(model.report.failed for model in models):
        return Report(_list_reports(models))
    keeps_files |= remove_stale_files(targets, inputs)
    writer = BatchWriter(list_tasks(models, (), force=force), inputs=inputs)
    report = _write_results(models, (), writer)
    if keeps_files and not report.failed:
        _remove_kept_files(targets, models, {}, inputs)
    return report


def remove_links_of_killed_runs(jobs: Sequence[RenameJob]) -> None:
    """Remove second links that killed runs left of models, before the models are read.

    To remove one later would change the status of a model, and it would no longer be the file
    that was read.

    Args:
        jobs: The models, which are about to be rewritten in place.
    """
    models = [job.model for job in jobs]
    remove_stale_files(_list_targets_to_clean(jobs), models, links_only=True)


def check_token_change(change: TokenChange) -> None:
    """Raise :class:`RulesError` for a missing token, or for one that no name may carry."""
    if change.token is None and not (change.strip or change.keeps_tokens):
        hint = "for example `--target vllm-qaic`"
        raise RulesError("no token given: pass a target or a token", hint=hint)
    if change.token is not None and (fault := find_token_error(change.token)):
        raise RulesError(f"the token {change.token!r} {fault}", hint="for example VLLM")


def _list_targets_to_clean(jobs: Sequence[RenameJob]) -> list[Path]:
    targets = (find_targets_to_clean(job.target, job.root) for job in jobs)
    return list(dict.fromkeys(path for paths in targets for path in paths))


def _remove_kept_files(
    targets: Sequence[Path],
    models: Sequence[PreparedModel],
    moves: Mapping[Path, Path],
    inputs: Sequence[Path],
) -> None:
    """Remove what a half done run had kept, after the work was finished."""
    from onnxkvrename.storage.recover import remove_ended_runs  # only after a half done run

    paths = [resolve_moved_path(path, moves) for path in (*targets, *_list_data_paths(models))]
    with suppress(KvRenameError):  # the work is done; the next run tries again
        remove_ended_runs(dict.fromkeys(path.parent for path in (*paths, *moves.values())))
    remove_stale_files(paths, [resolve_moved_path(path, moves) for path in inputs])


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
    models: Sequence[PreparedModel],
    sidecars: Sequence[PreparedSidecar],
    writer: BatchWriter,
) -> Report:
    written = _report_written(models, sidecars)
    try:
        writer.write()
    except PlaceError as failure:
        reports = tuple(_build_failure_reports(models, failure))
        return Report(reports, _list_sidecar_reports(sidecars))
    except KeyboardInterrupt:
        if writer.is_done:
            raise PlacedInterrupt(written) from None
        raise
    return written


def _report_written(models: Sequence[PreparedModel], sidecars: Sequence[PreparedSidecar]) -> Report:
    """Return the report on files that are all in place."""
    return Report(
        tuple(model.report._replace(status=_resolve_status(model)) for model in models),
        tuple(_resolve_sidecar_report(sidecar.report) for sidecar in sidecars),
    )


def _list_data_paths(models: Sequence[PreparedModel]) -> list[Path]:
    return [Path(os.path.abspath(path)) for model in models for path in model.data_paths]


def _list_reports(models: Sequence[PreparedModel]) -> tuple[ModelReport, ...]:
    return tuple(model.report for model in models)


def _list_sidecar_reports(sidecars: Sequence[PreparedSidecar]) -> tuple[SidecarReport, ...]:
    return tuple(item.report for item in sidecars)


def _resolve_status(model: PreparedModel) -> Status:
    return "renamed" if model.report.has_changes and model.needs_write else "unchanged"


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
