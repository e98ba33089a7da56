"""One model or many: read, plan, check, write, read again.

Every model is read, planned and checked before the first is written; one
error in any of them and none is.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from onnxkvrename import (
    checking,
    destination,
    drafts,
    externaldata,
    files,
    onnxfile,
    places,
    planning,
    rulesfile,
    wire,
)
from onnxkvrename.checking import Finding
from onnxkvrename.drafts import Draft, Made, Progress
from onnxkvrename.errors import KvRenameError, ModelError, RulesError, WriteError
from onnxkvrename.externaldata import DataFile
from onnxkvrename.files import Identity, OpenFile
from onnxkvrename.onnxfile import Model
from onnxkvrename.planning import Plan, Wish
from onnxkvrename.results import Job, ModelReport, Options, Report, Status
from onnxkvrename.rules import Rules, token_fault
from onnxkvrename.signature import Signature
from onnxkvrename.wire import Piece

CopyProgress = Callable[[str, int], Progress | None]
"""Asked, with a name and a size in bytes, for a function that hears of bytes copied, if any."""


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
    progress: CopyProgress | None = None,
) -> Report:
    """Rename models, each into its own place, after all of them have been checked.

    Errors of a model become part of its report; those that follow a model that
    could not be written are left as they are. Raises :class:`RulesError` for a
    token or rules that cannot be used, before anything is written.
    """
    check_wish(wish)
    options = options or Options()
    ready = [_prepare(job, wish, rules, options) for job in jobs]
    ready = _together(ready, options)
    if not options.write or any(item.report.failed for item in ready):
        return Report(tuple(item.report for item in ready))
    reports: list[ModelReport] = []
    for item in ready:
        if any(report.error is not None for report in reports):
            reports.append(item.report)
        else:
            reports.append(_write(item, options, progress))
    return Report(tuple(reports))


def check_wish(wish: Wish) -> None:
    """Raise :class:`RulesError` for a token that cannot be used, or none."""
    if wish.token is None and not wish.strip:
        raise RulesError("no token to put in", hint="give a prefix, or ask to strip")
    if wish.token is not None and (fault := token_fault(wish.token)):
        raise RulesError(f"the token {wish.token!r} {fault}", hint="for example VLLM")


class _Ready(NamedTuple):
    """A model that has been read, planned and checked.

    ``copies`` are data files that have to go somewhere; ``there`` says that the
    result stands in its place already.
    """

    job: Job
    report: ModelReport
    identity: Identity | None = None
    pieces: tuple[Piece, ...] = ()
    expected: Signature | None = None
    outputs: tuple[str, ...] = ()
    copies: tuple[tuple[DataFile, Path], ...] = ()
    there: bool = False

    @property
    def done(self) -> bool:
        """Whether the model itself need not be written."""
        return self.there or (self.job.in_place and not self.report.names)


def _prepare(job: Job, wish: Wish, rules: Rules, options: Options) -> _Ready:
    report = ModelReport(str(job.model), str(job.output), "failed")
    try:
        with onnxfile.opened(job.model) as model:
            return _examined(model, _Ready(job, report), wish, rules, options)
    except RulesError:
        raise
    except KvRenameError as error:
        return _Ready(job, report._replace(error=error))


def _examined(model: Model, item: _Ready, wish: Wish, rules: Rules, options: Options) -> _Ready:
    plan = planning.plan(model.signature, rules, wish)
    names = plan.names
    ends = {end.old for pair in plan.pairs for end in pair.ends}
    survey = places.survey(model.source, ends | set(names.values()))
    uses = survey.uses(names)
    symbols = planning.follow(uses.symbols, uses.producers, plan)
    pieces = wire.splice(model.source, survey.edits(names, symbols))
    found = list(externaldata.locate(survey.references, item.job.model))
    data = [one for one in found if isinstance(one, DataFile)]
    findings = [
        *checking.check(model.signature, plan, uses),
        *(one for one in found if isinstance(one, Finding)),
    ]
    report = item.report._replace(
        status="would-rename" if names else "unchanged",
        pairs=plan.pairs,
        kept=plan.kept,
        findings=tuple(findings),
        feed_back=_feed_back(rules, model.signature, item.job, plan),
    )
    item = item._replace(
        report=report,
        identity=model.file.identity,
        pieces=pieces,
        expected=model.signature.renamed(names, symbols),
        outputs=tuple(value.name for value in model.signature.outputs),
    )
    return _placed(item, model, data, options) if options.place else item


def _placed(item: _Ready, model: Model, data: Sequence[DataFile], options: Options) -> _Ready:
    """With what the place of the result has to say."""
    job, report = item.job, item.report
    try:
        forced = options.force or not report.names
        there = destination.stands_already(model.file, job, item.pieces, data, forced=forced)
    except KvRenameError as error:
        return item._replace(report=report._replace(error=error))
    copies, clashes = _copies(job, data, options)
    clashes += destination.in_the_way(job, there, options)
    report = report._replace(findings=(*report.findings, *clashes))
    return item._replace(report=report, copies=copies, there=there)


def _feed_back(rules: Rules, signature: Signature, job: Job, plan: Plan) -> str | None:
    if not plan.pairs or not plan.wish.target:
        return None
    inputs = [value.name for value in signature.inputs]
    return rules.call(inputs, str(job.output), plan.wish.target)


def _copies(
    job: Job, data: Sequence[DataFile], options: Options
) -> tuple[tuple[tuple[DataFile, Path], ...], list[Finding]]:
    """Which data files have to go where; none within one directory."""
    if job.same_directory:
        return (), []
    standing = list(externaldata.standing(data, job.output.parent, force=options.force))
    clashes = [clash for _, _, clash in standing if clash is not None]
    return tuple((item, target) for item, target, _ in standing), clashes


def _together(ready: Sequence[_Ready], options: Options) -> list[_Ready]:
    """Judge the models as one: buffers somewhere, no two results in one place."""
    fine = [item for item in ready if item.report.error is None]
    barren = len(fine) == len(ready) and not any(item.report.pairs for item in fine)
    models = {os.path.realpath(item.job.model): item.job for item in ready}
    outputs = Counter(os.path.realpath(item.job.output) for item in ready)
    placed: dict[str, DataFile] = {}
    claimed: Counter[int] = Counter()
    judged = []
    for item in ready:
        report, output = item.report, os.path.realpath(item.job.output)
        if barren:
            none = checking.no_buffers(item.outputs)
            report = report._replace(findings=(*report.findings, none))
        for data, target in item.copies:
            first = placed.setdefault(os.path.realpath(target), data)
            if first.path != data.path and not externaldata.equal(data, first.path):
                fault = WriteError("is the place of two different data files", path=str(target))
                report = report._replace(error=report.error or fault)
        if options.place and report.error is None:
            report = report._replace(error=_short_of_space(item, claimed))
        if outputs[output] > 1 or models.get(output, item.job) is not item.job:
            fault = WriteError("is another model of this run, or its result", path=report.output)
            report = report._replace(error=report.error or fault)
        if options.strict:
            errors = tuple(finding._replace(severity="error") for finding in report.findings)
            report = report._replace(findings=errors)
        judged.append(item._replace(report=report._replace(status=_status(report))))
    return judged


def _short_of_space(item: _Ready, claimed: Counter[int]) -> KvRenameError | None:
    """What is wrong if a disk cannot hold this result beside those before it.

    In place a result needs room only until it is there.
    """
    if item.done:
        return None
    try:
        directory = destination.base(item.job)
        device = os.stat(directory).st_dev
        needed = sum(data.size for data, _ in item.copies) + wire.total(item.pieces)
        drafts.require_space(directory, claimed[device] + needed, item.job.output)
    except KvRenameError as error:
        return error
    claimed[device] += 0 if item.job.in_place else needed
    return None


def _status(report: ModelReport) -> Status:
    return "failed" if report.failed else report.status


def _write(item: _Ready, options: Options, progress: CopyProgress | None) -> ModelReport:
    """Write one model, its data first: at no moment stands a model without them."""
    report, job = item.report, item.job
    if item.done and not item.copies:
        return report._replace(status="unchanged")
    try:
        with files.opened(job.model) as model, drafts.all_or_none(job.output) as made:
            if model.identity != item.identity:
                raise ModelError("was changed by someone else just now", path=report.path)
            drafts.make_directory(job.output.parent, made)
            for data, target in item.copies:
                _copy(data, target, options, progress, made)
            if not item.done:
                _write_model(model, item, made, force=options.force)
    except KvRenameError as error:
        return report._replace(status="failed", error=error)
    return report._replace(status="renamed" if report.names and not item.done else "unchanged")


def _write_model(model: OpenFile, item: _Ready, made: list[Made], *, force: bool) -> None:
    target, in_place = item.job.output, item.job.in_place
    if in_place and target.is_symlink():
        target = Path(os.path.realpath(target))
    with Draft(target) as draft:
        onnxfile.write(model, item.pieces, draft)
        assert item.expected is not None
        onnxfile.prove(draft, wire.total(item.pieces), item.expected)
        draft.keep(model, owner=in_place, force=force)
        if not in_place:
            made.append(draft.made)
        draft.commit(replace=in_place or force, source=model)


def _copy(
    data: DataFile,
    target: Path,
    options: Options,
    progress: CopyProgress | None,
    made: list[Made],
) -> None:
    if os.path.lexists(target) and externaldata.equal(data, target):
        return  # copied just now, with another model of this run
    drafts.make_directory(target.parent, made)
    with files.opened(data.path) as source, Draft(target) as draft:
        if source.identity != data.identity:
            raise WriteError("was changed by someone else just now", path=str(data.path))
        told = progress(data.location, data.size) if progress is not None else None
        draft.copy(source, 0, data.size, told)
        draft.keep(source, owner=False, force=options.force)
        if not os.path.lexists(target):
            made.append(draft.made)
        draft.commit(replace=options.force, source=source)
