"""Sidecars, the text files that repeat a model's names: read them and plan their new content."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from onnxkvrename.errors import KvRenameError, ModelError
from onnxkvrename.files.find import RenameJob, build_job, identify_path
from onnxkvrename.files.read import FileIdentity, open_file, resolve_path
from onnxkvrename.files.targets import check_output, has_result
from onnxkvrename.findings import Finding, build_finding, promote_to_errors
from onnxkvrename.limits import MAX_TEXT_BYTES, shorten_text
from onnxkvrename.renaming.prepare import PreparedModel, SidecarPlan
from onnxkvrename.rules.profile import Rules
from onnxkvrename.rules.request import Request
from onnxkvrename.rules.results import ModelReport, SidecarReport
from onnxkvrename.sidecars.bindings import BoundModels
from onnxkvrename.sidecars.decisions import Decision, Fact, decide
from onnxkvrename.sidecars.model_names import ModelNames, OneModel
from onnxkvrename.sidecars.rewrite import STALE_CODE, RewrittenSidecar, rewrite_sidecar
from onnxkvrename.sidecars.search import FoundSidecar, Neighbours, read_neighbours, read_value_names
from onnxkvrename.sidecars.stale import build_unknown_finding
from onnxkvrename.text import format_count, quote_path


class Sidecar(NamedTuple):
    """A text file that is rewritten together with models, or not at all.

    Attributes:
        job: The file, and where its result goes, in the same form as a model's.
        owners: The models that it belongs to, by their indexes. Its findings and errors count as
            those of the first.
        rewrite: Returns the new content from the old one. By default its format says where the
            names are, and the table in :mod:`onnxkvrename.sidecars.decisions` what becomes of it.
        found: Its format, and the directory whose models it goes with.
        facts: What is known of it before it is read.
    """

    job: RenameJob
    owners: tuple[int, ...] = (0,)
    rewrite: Callable[[bytes], RewrittenSidecar] | None = None
    found: FoundSidecar | None = None
    facts: frozenset[Fact] = frozenset[Fact](["asked"])

    @property
    def path(self) -> Path:
        """The file."""
        return self.job.model


class PreparedSidecar(NamedTuple):
    """A sidecar that has been read and rewritten in memory.

    Attributes:
        sidecar: The sidecar.
        report: What is reported about it.
        plan: The plan of its new bytes; ``None`` if there is nothing to write.
        findings: Problems with it.
        error: Why it cannot be read, rewritten or written.
    """

    sidecar: Sidecar
    report: SidecarReport
    plan: SidecarPlan | None = None
    findings: tuple[Finding, ...] = ()
    error: KvRenameError | None = None

    @property
    def model_index(self) -> int:
        """The index of the model whose findings and errors are those of the sidecar."""
        return self.sidecar.owners[0]


def prepare_sidecars(
    sidecars: Sequence[Sidecar], models: Sequence[PreparedModel], request: Request, rules: Rules
) -> Iterator[PreparedSidecar]:
    """Read sidecars and rewrite them in memory; nothing is written.

    Yields:
        Each sidecar, with its error if it has one.
    """
    run = _Run([model.report for model in models], [model.job for model in models], request, rules)
    for sidecar in sidecars:
        report = SidecarReport(str(sidecar.path), str(sidecar.job.output), "failed", 0)
        item = PreparedSidecar(sidecar, report)
        try:
            if sidecar.rewrite is None:
                yield _follow_decision(item, run)
            else:
                content = _read_content(sidecar)
                yield _plan_write(item, content, sidecar.rewrite(content.data), request)
        except KvRenameError as error:
            yield item._replace(error=error)


def add_sidecar_findings(
    models: Sequence[PreparedModel], sidecars: Sequence[PreparedSidecar]
) -> tuple[PreparedModel, ...]:
    """Return the models, each with the findings and errors of its sidecars."""
    reports = [model.report for model in models]
    for sidecar in sidecars:
        report = reports[sidecar.model_index]
        reports[sidecar.model_index] = report._replace(
            findings=(*report.findings, *sidecar.findings), error=report.error or sidecar.error
        )
    return tuple(
        model._replace(report=report) for model, report in zip(models, reports, strict=True)
    )


class _Run:
    """What all sidecars of a run share.

    Attributes:
        models: The reports of the models.
        jobs: The models, and where their results go.
    """

    def __init__(
        self,
        models: Sequence[ModelReport],
        jobs: Sequence[RenameJob],
        request: Request,
        rules: Rules,
    ) -> None:
        self.models = models
        self.jobs = jobs
        self.request = request
        self.rules = rules
        self._neighbours: dict[tuple[Path, tuple[int, ...]], Neighbours] = {}

    def collect_names(self, models: Iterable[OneModel]) -> ModelNames:
        """Return the names of some models."""
        return ModelNames.from_models(models, self.request.change, self.rules)

    def read_neighbours(self, directory: Path, owners: tuple[int, ...]) -> Neighbours:
        """Return the other models in the directory of some; each is read once for all sidecars."""
        key = directory, owners
        if key not in self._neighbours:
            jobs = [self.jobs[index] for index in owners]
            known = {path for job in jobs for path in (job.model, job.output)}
            self._neighbours[key] = read_neighbours(directory, known)
        return self._neighbours[key]


class _Content(NamedTuple):
    """A file as it was read."""

    data: bytes
    identity: FileIdentity
    status: os.stat_result


def _read_content(sidecar: Sidecar) -> _Content:
    with open_file(sidecar.path) as file:
        if file.size > MAX_TEXT_BYTES:
            message = f"is {file.size:,} bytes, more than {MAX_TEXT_BYTES:,}"
            raise ModelError(message, path=str(sidecar.path))
        return _Content(file.read(0, file.size), file.identity, file.status)


def _plan_write(
    item: PreparedSidecar, content: _Content, rewritten: RewrittenSidecar, request: Request
) -> PreparedSidecar:
    """Return a sidecar with the plan to write its new text, if that is not there yet."""
    sidecar, job, data = item.sidecar, item.sidecar.job, rewritten.data
    changes, findings = data != content.data, rewritten.findings
    if not request.check:
        force = request.force
        is_there, blocking = check_output(
            job, content.status, len(data), [data], changes=changes, force=force
        )
        refusal = decide({*sidecar.facts, "unwritable"})
        findings += tuple(each._replace(hint=refusal.format_hint(each.hint)) for each in blocking)
    elif job.in_place:
        is_there = not changes
    else:
        is_there = has_result(job, len(data), [data], force=True)
    is_unchanged = is_there or not changes
    report = item.report._replace(
        status="unchanged" if is_unchanged else "would-rename", changed=len(rewritten.renamed)
    )
    plan = None if is_there else SidecarPlan(sidecar.path, content.identity, data)
    return item._replace(report=report, plan=plan, findings=findings)


def _follow_decision(item: PreparedSidecar, run: _Run) -> PreparedSidecar:
    """Return a sidecar as the table of decisions says."""
    sidecar = item.sidecar
    case = _examine(sidecar, run)
    decision = decide(case.facts)
    if decision.told == "the error":
        raise _complete_error(case.error, decision)
    findings = tuple(_list_findings(sidecar, case, decision))
    if decision.verdict == "refuse":
        findings = promote_to_errors(findings)
    if decision.verdict == "leave" or case.content is None:
        return item._replace(
            sidecar=sidecar._replace(job=build_job(sidecar.path)),
            report=item.report._replace(output=str(sidecar.path), status="unchanged"),
            findings=findings,
        )
    try:
        result = case.result._replace(findings=findings)
        return _plan_write(item, case.content, result, run.request)
    except KvRenameError as error:
        raise _complete_error(error, decide({*sidecar.facts, "unwritable"})) from None


class _Case(NamedTuple):
    """A sidecar in a run: what decides what becomes of it, and what there is to tell.

    Attributes:
        facts: What holds for it.
        error: Why it cannot be read, or can fit only one of two models.
        content: What was read of it.
        result: Its new text, and what is wrong with its names.
        reason: Which model has the names that change, and keeps them.
        misplaced: A model as it names it, and where that model will be.
    """

    facts: set[Fact]
    error: KvRenameError | None = None
    content: _Content | None = None
    result: RewrittenSidecar = RewrittenSidecar(b"")
    reason: str = ""
    misplaced: tuple[str, Path] | None = None


def _examine(sidecar: Sidecar, run: _Run) -> _Case:
    """Read a sidecar and rewrite it in memory, as far as it is possible."""
    assert sidecar.found is not None
    facts, own_models = set(sidecar.facts), [run.models[index] for index in sidecar.owners]
    own_job = run.jobs[sidecar.owners[0]]
    names = run.collect_names(map(_describe_model, own_models))
    if not names.kv_names:
        facts.add("of no buffers")
    if facts.issuperset(("asked", "beside both")):
        both = f"{own_job.model} and {own_job.output}"
        message = f"is beside both {both}, and can match only one of them"
        hint = "write the model into another directory"
        return _Case(facts, ModelError(message, path=str(sidecar.path), hint=hint))
    directory = sidecar.found.directory
    beside = (each for each in run.models if Path(each.path).parent == directory)
    if any(each.error is not None and not each.value_names for each in (*own_models, *beside)):
        # Nothing is known of the names in it, and its models fail with the error of that one.
        return _Case({*facts, "of an unread model"})
    bound, places = _bind_models(sidecar.path.parent, run)
    try:
        content = _read_content(sidecar)
        result, holders = _rewrite(sidecar, content.data, names, bound, run)
    except KvRenameError as error:
        return _Case({*facts, "unreadable"}, error)
    misplaced = _find_misplaced_model(sidecar, run.models, places)
    is_stale = result.problem == "refused" or (result.renamed and not result.problem)
    further: dict[Fact, object] = {
        "refused": result.problem in ("refused", "of another token"),
        "of another token": result.problem == "of another token",
        "stale": is_stale and own_job.same_directory,
        "shared": is_stale and own_job.in_place and holders,
        "foreign": result.problem == "foreign",
        "nameless": not result.matched_names,
        "misplaced": misplaced,
    }
    facts.update(fact for fact, holds in further.items() if holds)
    reason, old_names = "", [old for old, _ in result.renamed]
    if "beside both" in facts and old_names and all(map(names.may_be_current, old_names)):
        reason = f" because {own_job.model} keeps them"
    elif "found" in facts and holders:
        reason = f" because {holders[0]} also has them"
    return _Case(facts, None, content, result, reason, misplaced)


def _rewrite(
    sidecar: Sidecar, data: bytes, names: ModelNames, models: BoundModels, run: _Run
) -> tuple[RewrittenSidecar, list[Path]]:
    """Return the new text of a sidecar, and the other models that have the names that change.

    Names of other models beside one that the user did not ask for stay as they are.
    """
    assert sidecar.found is not None
    path, sidecar_format = str(sidecar.path), sidecar.found.format
    result = rewrite_sidecar(data, path, sidecar_format, names, models)
    if "asked" in sidecar.facts or not (result.shared_names or result.findings):
        return result, []
    neighbours = run.read_neighbours(sidecar.found.directory, sidecar.owners)
    if not sidecar_format.names_models(data):
        if neighbours.values:
            names = names._replace(neighbour_names=neighbours.names)
            models = models._replace(neighbour_names=neighbours.names)
            result = rewrite_sidecar(data, path, sidecar_format, names, models)
        if neighbours.unread:
            result = _drop_unproved_findings(result, path, neighbours.unread[0])
    return result, neighbours.find_holders(result.shared_names)


def _drop_unproved_findings(result: RewrittenSidecar, path: str, unread: Path) -> RewrittenSidecar:
    """Return the result without findings about names that a model that cannot be read may have."""
    kept = tuple(finding for finding in result.findings if finding.code == "KV405")
    if kept == result.findings:
        return result
    return result._replace(findings=(*kept, build_unknown_finding(path, unread)), problem=None)


def _list_findings(sidecar: Sidecar, case: _Case, decision: Decision) -> Iterator[Finding]:
    """Yield what a decision tells the user; it is an error if the sidecar refuses the run."""
    assert sidecar.found is not None
    path = str(sidecar.path)
    hints = {"path": quote_path(path), "folder": quote_path(str(sidecar.path.parent))}
    is_error = decision.verdict == "refuse"
    if decision.told in ("its names", "its place"):
        for finding in case.result.findings:
            if finding.code == STALE_CODE:
                finding = finding._replace(hint=decision.format_hint(finding.hint, **hints))
            yield finding
    if decision.told == "its place" and case.misplaced is not None:
        location, place = case.misplaced
        message = f"names {location}, but the result is {place}"
        message += "" if is_error else ", so it is not copied"
        yield build_finding(STALE_CODE, path, message, decision.format_hint(**hints))
    if decision.told == "it stays":
        own_hint = next((f.hint for f in case.result.findings if f.code == STALE_CODE), "")
        names = _describe_names(case.result.renamed) + case.reason
        message = f"keeps {names}; with the result, {sidecar.found.format.effect}"
        yield build_finding(STALE_CODE, path, message, decision.format_hint(own_hint, **hints))


def _describe_names(renamed: Sequence[tuple[str, str]]) -> str:
    """Return how many names a sidecar keeps, and the first."""
    if not renamed:
        return "its names"
    old, new = renamed[0]
    return (
        f"{format_count(len(renamed), 'old name')} (first: {shorten_text(old)}, "
        f"now {shorten_text(new)} in the result)"
    )


def _complete_error(error: KvRenameError | None, decision: Decision) -> KvRenameError:
    """Return an error with the hint of a decision."""
    assert error is not None
    error.hint = decision.format_hint(error.hint) or None
    return error


def _describe_model(report: ModelReport) -> OneModel:
    names = report.value_names, report.name_map, report.function_name_map
    return OneModel(report.pairs, *names)


def _bind_models(directory: Path, run: _Run) -> tuple[BoundModels, dict[str, str]]:
    """Return the models that a configuration in a directory may refer to, one by one.

    Also the path, links resolved, of each model that it turns out to name, by its location.
    """
    places: dict[str, str] = {}
    described = {identify_path(report.path): _describe_model(report) for report in run.models}
    known: dict[str, OneModel | None] = {**described}
    real_directory = resolve_path(directory)
    beside = [
        described[identify_path(report.path)]
        for report in run.models
        if resolve_path(Path(report.path).parent) == real_directory
    ]
    near = [described[path] for path in described if _is_below(path, real_directory)]

    def find(location: str) -> OneModel | None:
        if "\0" in location:
            return None
        try:
            path = identify_path(directory / location)
        except ModelError:
            return None
        leads_out = os.path.isabs(location) or os.pardir in location.split("/")
        if leads_out and path not in known:
            return None  # a file of elsewhere is opened only if the user gave it
        places[location] = path
        if path not in known:
            names = read_value_names(directory / location)
            known[path] = None if names is None else OneModel(graph_values=tuple(names))
        return known[path]

    return BoundModels(find, tuple(beside), run.collect_names, tuple(near)), places


def _find_misplaced_model(
    sidecar: Sidecar, models: Iterable[ModelReport], places: Mapping[str, str]
) -> tuple[str, Path] | None:
    """Return a model that will not be where a sidecar names it, so that nothing can load it.

    The places are the paths of the models that it names, links resolved.
    """
    reports = {identify_path(report.path): report for report in models}
    for location, real_path in places.items():
        if real_path in reports:
            path, output = Path(reports[real_path].path), Path(reports[real_path].output)
            is_moved = resolve_path(output.parent) != resolve_path(path.parent)
            place = sidecar.job.output.parent / location
            if is_moved and resolve_path(place) != resolve_path(output):
                return location, output
    return None


def _is_below(directory: str, ancestor: str) -> bool:
    return directory == ancestor or directory.startswith(ancestor.rstrip(os.sep) + os.sep)
