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
from onnxkvrename.renaming import batch_checks as judging
from onnxkvrename.renaming import extra_files as companions
from onnxkvrename.renaming import output_path as destination
from onnxkvrename.renaming import parallel as spreading
from onnxkvrename.renaming import prepare as examining
from onnxkvrename.renaming import write as writing
from onnxkvrename.renaming.extra_files import Companion, Read
from onnxkvrename.renaming.prepare import Examined
from onnxkvrename.renaming.write import Task
from onnxkvrename.rules import load as rulesfile
from onnxkvrename.rules.plan import Wish
from onnxkvrename.rules.profile import Rules, token_fault
from onnxkvrename.rules.results import Job, ModelReport, Options, Report, Status
from onnxkvrename.storage import lock as locks
from onnxkvrename.storage import temp_file as drafts
from onnxkvrename.storage import transaction as changeset
from onnxkvrename.storage.temp_file import Heard, Staged
from onnxkvrename.storage.transaction import Changeset, Stage

if TYPE_CHECKING:
    from concurrent.futures import Executor


class Watch(Protocol):
    """Someone who wants to see how far the work is. Each method may return ``None``."""

    def models(self, doing: str, count: int) -> Heard | None:
        """``count`` models are next to be read or written; who hears of each that is done?"""

    def data(self, name: str, size: int) -> Heard | None:
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
    job = Job(path, path if output is None else Path(output))
    wish = Wish(token, strip=strip, replace=replace, normalize=normalize)
    (report,) = rename_set([job], wish, rules or rulesfile.load(), options).models
    if report.error is not None:
        raise report.error
    return report


def rename_set(
    jobs: Sequence[Job],
    wish: Wish,
    rules: Rules,
    options: Options | None = None,
    watch: Watch | None = None,
    executor: Executor | None = None,
    texts: Sequence[Companion] = (),
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
    check_wish(wish)
    options = options or Options()
    if options.write:
        _tidy([*jobs, *(text.job for text in texts)])
    examine = partial(examining.examine, wish=wish, rules=rules, options=options)
    heard = watch.models("reading", len(jobs)) if watch is not None else None
    examined = tuple(spreading.spread(examine, jobs, executor, heard))
    judged = judging.judge(examined, wish, rules, options)
    read = tuple(companions.read(texts, [item.report for item in judged], options))
    judged = judging.with_texts(judged, read, options)
    if not options.write or any(item.report.failed for item in judged):
        reports = tuple(item.report for item in read)
        return Report(tuple(item.report for item in judged), reports)
    return _written(judged, read, options, _Work(watch, executor, moves or {}))


def stamp_set(
    jobs: Sequence[Job],
    reports: Sequence[ModelReport],
    digest: str,
    rules: Rules,
    options: Options,
) -> Report:
    """Put the digest of their layout into the metadata of models, in place, all or none.

    ``reports`` are what was found of them. Otherwise as :func:`rename_set`.
    """
    _tidy(jobs)
    items = tuple(
        examining.stamped(job, report, digest, options)
        for job, report in zip(jobs, reports, strict=True)
    )
    judged = judging.judge(items, Wish(None), rules, options)
    if any(item.report.failed for item in judged):
        return Report(tuple(item.report for item in judged))
    return _written(judged, (), options, _Work(None, None, {}))


def check_wish(wish: Wish) -> None:
    """Raise :class:`RulesError` for a token that cannot be used, or none."""
    if wish.token is None and not wish.strip:
        raise RulesError("no token to put in", hint="give a prefix, or ask to strip")
    if wish.token is not None and (fault := token_fault(wish.token)):
        raise RulesError(f"the token {wish.token!r} {fault}", hint="for example VLLM")


class _Stopped(Exception):
    """The work of one model, by its number, could not be done."""

    def __init__(self, owner: int, error: KvRenameError) -> None:
        super().__init__(owner, error)
        self.owner = owner
        self.error = error


class _Work(NamedTuple):
    """Who makes the drafts, who looks on, and which directories are renamed in the end."""

    watch: Watch | None
    executor: Executor | None
    moves: Mapping[Path, Path]


def _written(
    items: Sequence[Examined], texts: Sequence[Read], options: Options, work: _Work
) -> Report:
    _clear([path for item in items for path in item.beside])
    tasks = (*_tasks(items, options), *_text_tasks(texts, options))
    stuck: list[Path] = []
    try:
        with _attributed(tasks):
            _carry_out(tasks, work, stuck)
    except _Stopped as stopped:
        return Report(tuple(_after(items, stopped, stuck)), tuple(item.report for item in texts))
    return Report(
        tuple(item.report._replace(status=_status(item)) for item in items),
        tuple(item.report._replace(status=_text_status(item)) for item in texts),
    )


def _status(item: Examined) -> Status:
    return "renamed" if item.report.changed and not item.done else "unchanged"


def _text_status(item: Read) -> Status:
    return "renamed" if item.report.status == "would-rename" else "unchanged"


def _tasks(items: Sequence[Examined], options: Options) -> Iterator[Task]:
    """The models and data to be made; data that several models share are one."""
    seen: set[Path] = set()
    for owner, item in enumerate(items):
        for data, called in item.copies:
            target = Path(os.path.abspath(called))
            if target not in seen:
                seen.add(target)
                yield Task(owner, data, target, called, False, options.force)
        if not item.done and item.recipe is not None:
            job = item.job
            yield Task(owner, item.recipe, job.target, job.output, job.in_place, options.force)


def _text_tasks(texts: Sequence[Read], options: Options) -> Iterator[Task]:
    for item in texts:
        if item.text is not None:
            job = item.companion.job
            yield Task(item.owner, item.text, job.target, job.output, job.in_place, options.force)


def _after(
    items: Sequence[Examined], stopped: _Stopped, stuck: Sequence[Path]
) -> Iterator[ModelReport]:
    for owner, item in enumerate(items):
        if owner == stopped.owner:
            yield item.report._replace(status="failed", error=stopped.error)
        elif item.job.target in stuck:
            yield item.report._replace(status="renamed")
        else:
            yield item.report


@contextmanager
def _attributed(tasks: Sequence[Task]) -> Iterator[None]:
    """Say of an error whose it is, by the path that it names; one of nobody passes."""
    try:
        yield
    except KvRenameError as error:
        owners = {str(path): task.owner for task in tasks for path in (task.target, task.called)}
        if error.path is None or not tasks:
            raise
        raise _Stopped(owners.get(error.path, tasks[0].owner), error) from None


def _carry_out(tasks: Sequence[Task], work: _Work, stuck: list[Path]) -> None:
    """Make all files, alone with their targets; new directories in a stage each."""
    moves = work.moves
    if not tasks and not moves:
        return
    fresh = [destination.fresh(task.target) for task in tasks]
    places = [new or task.target for new, task in zip(fresh, tasks, strict=True)]
    targets = list(dict.fromkeys([*moves, *moves.values(), *places]))
    sweep = work.executor is not None
    with (
        changeset.announced(moves),
        _alone(targets, moves, sweep=sweep),
        ExitStack() as stack,
    ):
        stages = {new: stack.enter_context(Stage(new)) for new in dict.fromkeys(fresh) if new}
        inside = [
            task._replace(target=stages[new].within(task.target)) if new is not None else task
            for new, task in zip(fresh, tasks, strict=True)
        ]
        _replace(inside, work, tuple(stages.values()), stuck)


def _tidy(jobs: Sequence[Job]) -> None:
    """Take away what dead runs have left beside results, before their models are looked at.

    A backup is a second link of a model, and to remove it would look like a change.
    """
    targets = [job.target for job in jobs]
    # A directory that appeared at once was made beside its place, too.
    around = {path for job in jobs if not job.in_place for path in job.target.parents}
    _clear([*targets, *around])


def _clear(targets: Sequence[Path]) -> None:
    with suppress(WriteError), _alone(drafts.littered(targets), {}):
        pass  # if one is alive after all, let it be


@contextmanager
def _alone(
    targets: Sequence[Path], moves: Mapping[Path, Path], *, sweep: bool = False
) -> Iterator[None]:
    """Work on targets with nobody else, and without what dead runs have left there.

    What this one leaves goes when it fails; to ``sweep`` also when it ends well, as
    a worker may have died and its work been done by another.
    """
    with locks.held(targets, moves):
        changeset.clear(drafts.leftovers(targets))
        try:
            yield
        except BaseException:
            changeset.clear(drafts.leftovers(targets))
            raise
        if sweep:
            changeset.clear(drafts.leftovers(drafts.moved(path, moves) for path in targets))


def _replace(
    tasks: Sequence[Task], work: _Work, stages: Sequence[Stage], stuck: list[Path]
) -> None:
    """Draft all, look once more whether nobody has touched a source, and place all.

    Models come last: at no moment stands one without what belongs to it.
    """
    with Changeset(stuck) as changes:
        drafted = _drafted(tasks, work)
        for task in tasks:
            if not task.unchanged:
                raise _Stopped(task.owner, writing.changed(task))
        staged, others, models = list[Staged](), list[Staged](), list[Staged]()
        new = {stage.directory for stage in stages}
        for task, made in zip(tasks, drafted, strict=True):
            if not new.isdisjoint(made.target.parents):
                staged.append(made)
            elif isinstance(task.source, examining.Recipe):
                models.append(made)
            else:
                others.append(made)
        changes.place(staged, final=False)
        still = not work.moves
        changes.place_stages(stages, final=still and not others and not models)
        changes.place(others, final=still and not models)
        changes.place(models, final=still)
        changes.move(work.moves)


def _drafted(tasks: Sequence[Task], work: _Work) -> list[Staged]:
    heard = work.watch.models("writing", len(tasks)) if work.watch is not None else None
    draft: Callable[[Task], Staged | KvRenameError] = writing.draft
    if work.executor is None:
        draft = partial(_watched, watch=work.watch)
    drafted = []
    with closing(spreading.spread(draft, tasks, work.executor, heard)) as results:
        for task, made in zip(tasks, results, strict=True):
            if isinstance(made, KvRenameError):
                raise _Stopped(task.owner, made)
            drafted.append(made)
    return drafted


def _watched(task: Task, watch: Watch | None) -> Staged | KvRenameError:
    heard = None
    if watch is not None and isinstance(task.source, DataFile):
        heard = watch.data(task.source.location, task.source.size)
    return writing.draft(task, heard)
