"""One model or many: examine all, judge all, draft all, and only then replace."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from onnxkvrename.errors import KvRenameError, RulesError, WriteError
from onnxkvrename.model.external_data import DataFile
from onnxkvrename.renaming.batch_checks import add_sidecar_findings, check_batch
from onnxkvrename.renaming.extra_files import PreparedSidecar, Sidecar, prepare_sidecars
from onnxkvrename.renaming.output_path import find_outermost_missing_directory
from onnxkvrename.renaming.parallel import map_ordered
from onnxkvrename.renaming.prepare import PreparedModel, SplicePlan, prepare_model, prepare_stamp
from onnxkvrename.renaming.write import WriteTask, build_source_changed_error, write_temp_file
from onnxkvrename.rules.load import load_rules
from onnxkvrename.rules.plan import TokenChange
from onnxkvrename.rules.profile import Rules, find_token_error
from onnxkvrename.rules.results import ModelReport, Options, RenameJob, Report, Status
from onnxkvrename.storage.lock import hold_locks
from onnxkvrename.storage.temp_file import (
    ProgressCallback,
    ReadyFile,
    find_stale_temp_files,
    find_targets_with_temp_files,
    resolve_moved_path,
)
from onnxkvrename.storage.transaction import (
    StagedDirectory,
    Transaction,
    remove_stale_temp_files,
    write_intent,
)

if TYPE_CHECKING:
    from concurrent.futures import Executor


class Progress(Protocol):
    """Someone who wants to see how far the work is. Each method may return ``None``."""

    def track_models(self, doing: str, count: int) -> ProgressCallback | None:
        """``count`` models are next to be read or written; who hears of each that is done?"""

    def track_data_file(self, name: str, size: int) -> ProgressCallback | None:
        """A data file of ``size`` bytes is next to be copied; who hears of its bytes?"""


def rename(
    model: str | os.PathLike[str],
    token: str | None = None,
    *,
    output: str | os.PathLike[str] | None = None,
    strip: bool = False,
    replace: bool = False,
    normalize: bool = False,
    rules: Rules | None = None,
    options: Options | None = None,
) -> ModelReport:
    """Rename one model: in place, or into ``output`` with a copy of its external data.

    The report says ``renamed``, ``unchanged``, ``would-rename`` (if options say
    not to write) or ``failed`` with the findings that stood against it; then,
    as after any exception, no file has changed. Raises :class:`RulesError`,
    :class:`ModelError` or :class:`WriteError` for a job that cannot be done.
    """
    path = Path(model)
    job = RenameJob(path, path if output is None else Path(output))
    wish = TokenChange(token, strip=strip, replace=replace, normalize=normalize)
    (report,) = rename_batch([job], wish, rules or load_rules(), options).models
    if report.error is not None:
        raise report.error
    return report


def rename_batch(
    jobs: Sequence[RenameJob],
    wish: TokenChange,
    rules: Rules,
    options: Options | None = None,
    watch: Progress | None = None,
    executor: Executor | None = None,
    texts: Sequence[Sidecar] = (),
    moves: Mapping[Path, Path] | None = None,
) -> Report:
    """Rename models, and texts that go with them, all of them or none, each into its own place.

    In the end directories that ``moves`` names, by absolute paths, get the names
    that it gives them; the report has them as they were.

    All are read, planned and checked, then all results are written under
    temporary names, and only then the first takes its place. Any executor can
    do the reading and writing, on any machine for which the jobs' paths mean the
    same files; placing is done here. A killed run is ended by the same call again.

    Errors of a model become part of its report; then all models are as they
    were. Raises :class:`RulesError` for a token or rules that cannot be used and
    :class:`KvRenameError` for an executor that fails, with nothing changed.
    """
    check_token_change(wish)
    options = options or Options()
    if options.write:
        _clean_up_outputs([*jobs, *(text.job for text in texts)])
    examine = partial(prepare_model, wish=wish, rules=rules, options=options)
    heard = watch.track_models("reading", len(jobs)) if watch is not None else None
    examined = tuple(map_ordered(examine, jobs, executor, heard))
    judged = check_batch(examined, wish, rules, options)
    read = tuple(prepare_sidecars(texts, [item.report for item in judged], options))
    judged = add_sidecar_findings(judged, read, options)
    if not options.write or any(item.report.failed for item in judged):
        reports = tuple(item.report for item in read)
        return Report(tuple(item.report for item in judged), reports)
    return _write_results(judged, read, options, _WriteContext(watch, executor, moves or {}))


def stamp_models(
    jobs: Sequence[RenameJob],
    reports: Sequence[ModelReport],
    digest: str,
    rules: Rules,
    options: Options,
) -> Report:
    """Put the digest of their layout into the metadata of models, in place, all or none.

    ``reports`` are what was found of them. Otherwise as :func:`rename_set`.
    """
    _clean_up_outputs(jobs)
    items = tuple(
        prepare_stamp(job, report, digest, options)
        for job, report in zip(jobs, reports, strict=True)
    )
    judged = check_batch(items, TokenChange(None), rules, options)
    if any(item.report.failed for item in judged):
        return Report(tuple(item.report for item in judged))
    return _write_results(judged, (), options, _WriteContext(None, None, {}))


def check_token_change(wish: TokenChange) -> None:
    """Raise :class:`RulesError` for a token that cannot be used, or none."""
    if wish.token is None and not wish.strip:
        raise RulesError("no token to put in", hint="give a prefix, or ask to strip")
    if wish.token is not None and (fault := find_token_error(wish.token)):
        raise RulesError(f"the token {wish.token!r} {fault}", hint="for example VLLM")


class _TaskError(Exception):
    """The work of one model, by its number, could not be done."""

    def __init__(self, owner: int, error: KvRenameError) -> None:
        super().__init__(owner, error)
        self.owner = owner
        self.error = error


class _WriteContext(NamedTuple):
    """Who makes the drafts, who looks on, and which directories are renamed in the end."""

    progress: Progress | None
    executor: Executor | None
    moves: Mapping[Path, Path]


def _write_results(
    items: Sequence[PreparedModel],
    texts: Sequence[PreparedSidecar],
    options: Options,
    work: _WriteContext,
) -> Report:
    _remove_stale_files([path for item in items for path in item.data_paths])
    tasks = (*_list_tasks(items, options), *_list_sidecar_tasks(texts, options))
    stuck: list[Path] = []
    try:
        with _attribute_errors(tasks):
            _run_tasks(tasks, work, stuck)
    except _TaskError as stopped:
        return Report(
            tuple(_build_failure_reports(items, stopped, stuck)),
            tuple(item.report for item in texts),
        )
    return Report(
        tuple(item.report._replace(status=_resolve_status(item)) for item in items),
        tuple(item.report._replace(status=_resolve_sidecar_status(item)) for item in texts),
    )


def _resolve_status(item: PreparedModel) -> Status:
    return "renamed" if item.report.has_changes and not item.needs_no_write else "unchanged"


def _resolve_sidecar_status(item: PreparedSidecar) -> Status:
    return "renamed" if item.report.status == "would-rename" else "unchanged"


def _list_tasks(items: Sequence[PreparedModel], options: Options) -> Iterator[WriteTask]:
    """The models and data to be made; data that several models share are one."""
    seen: set[Path] = set()
    for owner, item in enumerate(items):
        for data, called in item.data_copies:
            target = Path(os.path.abspath(called))
            if target not in seen:
                seen.add(target)
                yield WriteTask(owner, data, target, called, False, options.force)
        if not item.needs_no_write and item.splice_plan is not None:
            job = item.job
            yield WriteTask(
                owner, item.splice_plan, job.target, job.output, job.in_place, options.force
            )


def _list_sidecar_tasks(texts: Sequence[PreparedSidecar], options: Options) -> Iterator[WriteTask]:
    for item in texts:
        if item.plan is not None:
            job = item.sidecar.job
            yield WriteTask(
                item.model_index, item.plan, job.target, job.output, job.in_place, options.force
            )


def _build_failure_reports(
    items: Sequence[PreparedModel], stopped: _TaskError, stuck: Sequence[Path]
) -> Iterator[ModelReport]:
    for owner, item in enumerate(items):
        if owner == stopped.owner:
            yield item.report._replace(status="failed", error=stopped.error)
        elif item.job.target in stuck:
            yield item.report._replace(status="renamed")
        else:
            yield item.report


@contextmanager
def _attribute_errors(tasks: Sequence[WriteTask]) -> Iterator[None]:
    """Say of an error whose it is, by the path that it names; one of nobody passes."""
    try:
        yield
    except KvRenameError as error:
        owners = {
            str(path): task.model_index
            for task in tasks
            for path in (task.target, task.display_path)
        }
        if error.path is None or not tasks:
            raise
        raise _TaskError(owners.get(error.path, tasks[0].model_index), error) from None


def _run_tasks(tasks: Sequence[WriteTask], work: _WriteContext, stuck: list[Path]) -> None:
    """Make all files, alone with their targets; new directories in a stage each."""
    moves = work.moves
    if not tasks and not moves:
        return
    fresh = [find_outermost_missing_directory(task.target) for task in tasks]
    places = [new or task.target for new, task in zip(fresh, tasks, strict=True)]
    targets = list(dict.fromkeys([*moves, *moves.values(), *places]))
    sweep = work.executor is not None
    with (
        write_intent(moves),
        _lock_targets(targets, moves, sweep=sweep),
        ExitStack() as stack,
    ):
        stages = {
            new: stack.enter_context(StagedDirectory(new)) for new in dict.fromkeys(fresh) if new
        }
        inside = [
            task._replace(target=stages[new].prepare_path(task.target)) if new is not None else task
            for new, task in zip(fresh, tasks, strict=True)
        ]
        _write_and_place(inside, work, tuple(stages.values()), stuck)


def _clean_up_outputs(jobs: Sequence[RenameJob]) -> None:
    """Take away what dead runs have left beside results, before their models are looked at.

    A backup is a second link of a model, and to remove it would look like a change.
    """
    targets = [job.target for job in jobs]
    # A directory that appeared at once was made beside its place, too.
    around = {path for job in jobs if not job.in_place for path in job.target.parents}
    _remove_stale_files([*targets, *around])


def _remove_stale_files(targets: Sequence[Path]) -> None:
    with suppress(WriteError), _lock_targets(find_targets_with_temp_files(targets), {}):
        pass  # if one is alive after all, let it be


@contextmanager
def _lock_targets(
    targets: Sequence[Path], moves: Mapping[Path, Path], *, sweep: bool = False
) -> Iterator[None]:
    """Work on targets with nobody else, and without what dead runs have left there.

    What this one leaves goes when it fails; to ``sweep`` also when it ends well, as
    a worker may have died and its work been done by another.
    """
    with hold_locks(targets, moves):
        remove_stale_temp_files(find_stale_temp_files(targets))
        try:
            yield
        except BaseException:
            remove_stale_temp_files(find_stale_temp_files(targets))
            raise
        if sweep:
            remove_stale_temp_files(
                find_stale_temp_files(resolve_moved_path(path, moves) for path in targets)
            )


def _write_and_place(
    tasks: Sequence[WriteTask],
    work: _WriteContext,
    stages: Sequence[StagedDirectory],
    stuck: list[Path],
) -> None:
    """Draft all, look once more whether nobody has touched a source, and place all.

    Models come last: at no moment stands one without what belongs to it.
    """
    with Transaction(stuck) as changes:
        drafted = _write_temp_files(tasks, work)
        for task in tasks:
            if not task.source_unchanged:
                raise _TaskError(task.model_index, build_source_changed_error(task))
        staged, others, models = list[ReadyFile](), list[ReadyFile](), list[ReadyFile]()
        new = {stage.directory for stage in stages}
        for task, made in zip(tasks, drafted, strict=True):
            if not new.isdisjoint(made.target.parents):
                staged.append(made)
            elif isinstance(task.source, SplicePlan):
                models.append(made)
            else:
                others.append(made)
        changes.place_files(staged, final=False)
        still = not work.moves
        changes.place_directories(stages, final=still and not others and not models)
        changes.place_files(others, final=still and not models)
        changes.place_files(models, final=still)
        changes.rename_directories(work.moves)


def _write_temp_files(tasks: Sequence[WriteTask], work: _WriteContext) -> list[ReadyFile]:
    heard = work.progress.track_models("writing", len(tasks)) if work.progress is not None else None
    draft: Callable[[WriteTask], ReadyFile | KvRenameError] = write_temp_file
    if work.executor is None:
        draft = partial(_write_with_progress, watch=work.progress)
    drafted = []
    with closing(map_ordered(draft, tasks, work.executor, heard)) as results:
        for task, made in zip(tasks, results, strict=True):
            if isinstance(made, KvRenameError):
                raise _TaskError(task.model_index, made)
            drafted.append(made)
    return drafted


def _write_with_progress(task: WriteTask, watch: Progress | None) -> ReadyFile | KvRenameError:
    heard = None
    if watch is not None and isinstance(task.source, DataFile):
        heard = watch.track_data_file(task.source.location, task.source.size)
    return write_temp_file(task, heard)
