"""Find the sidecars of a run, and decide what becomes of each and where its result goes."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import NamedTuple

from onnxkvrename.errors import ModelError, WriteError
from onnxkvrename.findings import CODES, Finding, build_finding, quote_path
from onnxkvrename.limits import shorten_text
from onnxkvrename.renaming.prepare import PreparedModel
from onnxkvrename.renaming.prepare_sidecars import PreparedSidecar, Sidecar
from onnxkvrename.renaming.request import Request
from onnxkvrename.rules.find_models import COMPILE_DIRECTORY, find_possible_sidecars, identify_path
from onnxkvrename.rules.plan import KvPair, build_minimal_plan
from onnxkvrename.rules.profile import Rules
from onnxkvrename.rules.results import ModelReport, RenameJob
from onnxkvrename.sidecars.bindings import BoundModels
from onnxkvrename.sidecars.formats import MODEL_SUFFIX, SidecarFormat, load_sidecar_formats
from onnxkvrename.sidecars.model_names import ModelNames, OneModel
from onnxkvrename.sidecars.rewrite import STALE_CODE, RewrittenSidecar, rewrite_sidecar
from onnxkvrename.sidecars.search import (
    LEAVE_HINT,
    FoundSidecar,
    Neighbours,
    detect_sidecars,
    read_neighbours,
    read_sidecar_head,
    read_value_names,
)
from onnxkvrename.sidecars.stale import build_unknown_finding, find_stale_sidecars
from onnxkvrename.storage.read import resolve_path


class _Run(NamedTuple):
    """What a run does, for each of its sidecars."""

    request: Request
    jobs: Sequence[RenameJob]
    rules: Rules


def load_sidecars(
    request: Request,
    jobs: Sequence[RenameJob],
    rules: Rules,
    directories: Sequence[Path],
    candidates: Sequence[tuple[Path, Path]] = (),
) -> tuple[Sidecar, ...]:
    """Return sidecars, each ready to be rewritten with the models that it belongs to.

    A sidecar belongs to the models in its directory, or else to those below it; one of a
    compile to those above its directory; one that is elsewhere to all.

    Files in `directories` are those that the user wants to fit, whatever their names are. The
    `candidates` are files beside the models that may be sidecars by their names, each with the
    directory of its models.

    Raises:
        ModelError: A named file cannot be read or has no known format, or a directory
            cannot be listed.
        WriteError: Two sidecars would be written to the same place.
    """
    run = _Run(request, jobs, rules)
    policy = request.sidecars
    is_strict = policy == "require"
    formats = load_sidecar_formats(rules)
    if is_strict:
        found = find_possible_sidecars(directories, formats.may_be_sidecar)
        candidates = tuple(dict.fromkeys((*found, *candidates)))
    distinct: dict[str, Sidecar] = {}
    for path in request.sidecar:
        detected = formats.detect(path.name, read_sidecar_head(path))
        if detected is None:
            raise ModelError(
                "is not a sidecar of a known format",
                path=str(path),
                hint=formats.describe_formats(),
            )
        named = FoundSidecar(path, path.parent, detected, has_known_name=True)
        distinct.setdefault(identify_path(path), _build_sidecar(named, run, is_named=True))
    # Those that stay may be anything.
    with suppress(ModelError) if policy == "off" else nullcontext():
        for item in detect_sidecars(candidates, formats, strict=is_strict):
            sidecar = _build_sidecar(item, run, is_named=is_strict)
            distinct.setdefault(identify_path(item.path), sidecar)
    sidecars = tuple(distinct.values())
    if policy == "off":
        sidecars = tuple(item for item in sidecars if not item.is_found or _is_readable(item.path))
    _check_distinct_outputs(sidecars)
    return sidecars


def _check_distinct_outputs(sidecars: Iterable[Sidecar]) -> None:
    by_output: dict[str, Sidecar] = {}
    for sidecar in sidecars:
        first = by_output.setdefault(resolve_path(sidecar.output), sidecar)
        if first is not sidecar:
            raise WriteError(
                f"both {first.path} and {sidecar.path} would be written here",
                path=str(sidecar.output),
                hint="rename with one of them at a time",
            )


def _is_readable(path: Path) -> bool:
    with suppress(ModelError):
        read_sidecar_head(path)
        return True
    return False


def _build_sidecar(found: FoundSidecar, run: _Run, *, is_named: bool) -> Sidecar:
    """Return a sidecar that follows the models as far as it is theirs.

    One that the user asked for must fit them; it is of all models if none is beside it.
    """
    path, directory = found.path, found.directory
    beside = _list_jobs_beside(directory, run.jobs)
    below = [] if is_named else _list_jobs_below(directory, run.jobs)
    own_jobs = beside or below or list(run.jobs)
    own_paths = {str(job.model) for job in own_jobs}
    is_left = not is_named and run.request.sidecars == "off"
    job = own_jobs[0]
    if is_named and beside and job.same_directory and not job.in_place:
        raise ModelError(
            f"is beside both {job.model} and {job.output}, and can match only one of them",
            path=str(path),
            hint="write the model into another directory",
        )
    if job.in_place or (not is_named and job.same_directory):
        output = path
    elif is_named and not beside:
        output = job.output.parent / path.name
    else:
        output = _resolve_output(path, job)

    def rewrite(data: bytes, models: Sequence[ModelReport]) -> RewrittenSidecar:
        if _has_unread_model(models, own_paths, directory):
            return RewrittenSidecar(data, stays=True)
        bound, places = _bind_models(path.parent, models, run)
        own_models = [_describe_model(report) for report in models if report.path in own_paths]
        names = ModelNames.from_models(own_models, run.request.change, run.rules)
        if is_named:
            result = rewrite_sidecar(data, str(path), found.format, names, bound)
        else:
            result = _rewrite_found(data, found, names, bound, own_jobs, is_left=is_left)
        return _add_place_findings(result, path, output, places, run.jobs, is_found=not is_named)

    return Sidecar(
        path,
        output,
        rewrite,
        directory,
        is_found=not is_named,
        root=_find_root(output, job),
        is_package=run.request.takes_folders and found.format.is_package,
        is_left=is_left,
    )


def _has_unread_model(
    reports: Iterable[ModelReport], own_paths: Collection[str], directory: Path
) -> bool:
    """Return whether a model that a sidecar belongs to cannot be read.

    Then nothing is known about the names in it, and its models fail with the error of that one.
    """
    return any(
        report.path in own_paths or Path(report.path).parent == directory
        for report in reports
        if report.error is not None and not report.value_names
    )


def _describe_model(report: ModelReport) -> OneModel:
    return OneModel(report.pairs, report.value_names, report.name_map)


def _bind_models(
    directory: Path, reports: Sequence[ModelReport], run: _Run
) -> tuple[BoundModels, dict[str, str]]:
    """Return the models that a configuration in a directory may refer to, one by one.

    Also the path, links resolved, of each model that it turns out to name, by its location.
    """
    places: dict[str, str] = {}
    known: dict[str, OneModel | None] = {
        identify_path(report.path): _describe_model(report) for report in reports
    }
    real_directory = resolve_path(directory)
    beside = [
        known[identify_path(report.path)]
        for report in reports
        if resolve_path(Path(report.path).parent) == real_directory
    ]

    prefix = os.path.join(real_directory, "")
    near = [known[path] for path in known if path.startswith(prefix)]

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

    bound = BoundModels(
        find,
        tuple(model for model in beside if model is not None),
        lambda models: ModelNames.from_models(models, run.request.change, run.rules),
        tuple(model for model in near if model is not None),
    )
    return bound, places


def _add_place_findings(
    result: RewrittenSidecar,
    path: Path,
    output: Path,
    places: Mapping[str, str],
    jobs: Iterable[RenameJob],
    *,
    is_found: bool,
) -> RewrittenSidecar:
    """Add KV406 for a model whose result is not where its configuration looks for it.

    Such a configuration could not be loaded. So one that was found is not written beside the
    result, with a warning; for one that the user named, it is an error.
    """
    job_by_path = {identify_path(job.model): job for job in jobs}
    for location, real_path in places.items():
        job = job_by_path.get(real_path)
        if job is None or job.in_place or job.same_directory or result.stays:
            continue
        if resolve_path(output.parent / location) != resolve_path(job.output):
            message = f"names {location}, but the result is {job.output}"
            hint = f"rename the whole folder {quote_path(str(path.parent))} with `-d renamed`"
            if is_found:
                message += ", so it is not copied"
            finding = build_finding(STALE_CODE, str(path), message, hint)
            finding = finding._replace(severity="warning" if is_found else "error")
            return result._replace(findings=(*result.findings, finding), stays=True)
    return result


def _list_jobs_beside(directory: Path, jobs: Sequence[RenameJob]) -> list[RenameJob]:
    real_directory = resolve_path(directory)
    return [job for job in jobs if resolve_path(job.model.parent) == real_directory]


def _list_jobs_below(directory: Path, jobs: Sequence[RenameJob]) -> list[RenameJob]:
    prefix = os.path.join(resolve_path(directory), "")
    return [job for job in jobs if resolve_path(job.model.parent).startswith(prefix)]


def _find_root(output: Path, job: RenameJob) -> Path | None:
    """Return the directory that was given for the results of a job, if an output is below it."""
    is_below = job.root is not None and job.root in Path(os.path.abspath(output)).parents
    return job.root if is_below else None


def _resolve_output(path: Path, job: RenameJob) -> Path:
    """Return where a sidecar goes: in the same place relative to the result as to the model.

    Where the directories between an upper sidecar and its model are others on the side of the
    result, it goes beside the result.
    """
    directory, model_directory = resolve_path(path.parent), resolve_path(job.model.parent)
    steps = Path(os.path.relpath(directory, model_directory)).parts
    if len(steps) == 1 and re.fullmatch(COMPILE_DIRECTORY, steps[0]):
        return job.output.parent / steps[0] / path.name
    below = Path(model_directory).parts[-len(steps) :] if set(steps) == {os.pardir} else ()
    if below and job.output.parent.parts[-len(below) :] == below:
        return job.output.parent.parents[len(below) - 1] / path.name
    return job.output.parent / path.name


def _rewrite_found(
    data: bytes,
    found: FoundSidecar,
    names: ModelNames,
    models: BoundModels,
    jobs: Sequence[RenameJob],
    *,
    is_left: bool,
) -> RewrittenSidecar:
    """Return a found sidecar with the new names, or as it is if it cannot follow its models.

    It stays as it is if the user wants that, if a model beside it keeps the old names, or if it
    has no name of the models. KV406 says so where it then has the old names.
    """
    path = str(found.path)
    try:
        result = rewrite_sidecar(data, path, found.format, names, models)
    except ModelError:
        if found.has_known_name and not is_left and names.kv_names:
            raise
        return RewrittenSidecar(data, stays=True)
    neighbours = Neighbours({})
    if result.shared_names or result.findings:
        known = {path for job in jobs for path in (job.model, job.output)}
        neighbours = read_neighbours(found.directory, known)
        names_model = found.format.is_binding and MODEL_SUFFIX.encode() in data
        if neighbours.values and not names_model:
            names = names._replace(neighbour_names=neighbours.names)
            models = models.with_neighbours(neighbours.names)
            result = rewrite_sidecar(data, path, found.format, names, models)
        if neighbours.unread and not names_model:
            result = _drop_unproved_findings(result, path, neighbours.unread[0])
    is_refused = any(finding.code == STALE_CODE for finding in result.findings)
    if jobs[0].same_directory and (result.renamed or is_refused) and not result.has_other_token:
        holders = neighbours.find_holders(result.shared_names)
        explanation = _explain_stay(found, result, names, jobs[0], holders, is_left=is_left)
        if explanation is not None:
            return _leave(data, path, result, found.format.effect, explanation)
    is_copy = jobs[0].same_directory and not jobs[0].in_place
    findings = tuple(_adapt_finding(each, found, is_copy=is_copy) for each in result.findings)
    stays = is_left or not result.matched_names
    is_strange = found.format.is_binding and stays and not is_refused
    return result._replace(findings=() if is_left or is_strange else findings, stays=stays)


def _drop_unproved_findings(result: RewrittenSidecar, path: str, unread: Path) -> RewrittenSidecar:
    """Return the result without findings about names that a model that cannot be read may have."""
    kept = tuple(finding for finding in result.findings if finding.code == "KV405")
    if kept == result.findings:
        return result
    findings = (*kept, build_unknown_finding(path, unread))
    return result._replace(findings=findings, has_other_token=False)


def check_sidecars_there(
    models: Sequence[PreparedModel],
    sidecars: Sequence[PreparedSidecar],
    rules: Rules,
) -> tuple[PreparedModel, ...]:
    """Return the models with KV406 for sidecars beside the results that have the old names.

    It is an error, as in verify, for one beside models that all stay as they are: the run would
    leave it so, and nothing else shows it. Otherwise it is a warning.

    What the run writes, or has KV406 already, does not matter.

    Raises:
        ModelError: A directory cannot be listed.
    """
    pairs: dict[Path, list[KvPair]] = {}
    first: dict[Path, int] = {}
    changed: set[Path] = set()
    for index, model in enumerate(models):
        job = model.job
        is_second = job.same_directory and not job.in_place
        if model.splice_plan is None or is_second or (job.in_place and model.report.failed):
            continue
        directory = job.output.parent
        if model.report.name_map or not job.in_place:
            changed.add(directory)
        plan = build_minimal_plan(model.splice_plan.expected_signature, rules)
        pairs.setdefault(directory, []).extend(plan.pairs)
        first.setdefault(directory, index)
    replaced = {os.path.abspath(each.sidecar.output) for each in sidecars if each.plan is not None}
    replaced.update(
        os.path.abspath(finding.name)
        for each in sidecars
        for finding in each.findings
        if finding.code == STALE_CODE
    )
    is_left = any(each.sidecar.is_left for each in sidecars)
    checked = list(models)
    for directory, index in first.items():
        model = models[index]
        others = [other.job.output for other in models if other.job.output.parent == directory]
        findings = tuple(
            find_stale_sidecars(
                model.job.output,
                pairs[directory],
                rules,
                is_error=directory not in changed and not is_left,
                replaced_paths=replaced,
                others=others,
                is_left=is_left,
            )
        )
        stale = {finding.name for finding in findings}
        known = [f for f in model.report.findings if f.code != "KV404" or f.name not in stale]
        checked[index] = model._replace(report=model.report._replace(findings=(*known, *findings)))
    return tuple(checked)


def _leave(
    data: bytes, path: str, result: RewrittenSidecar, effect: str, explanation: tuple[str, str]
) -> RewrittenSidecar:
    """Return an unchanged sidecar with KV406; the explanation is a clause and the hint."""
    clause, hint = explanation
    names = "its names"
    if result.renamed:
        old, new = result.renamed[0]
        names = (
            f"{len(result.renamed)} old names (first: {shorten_text(old)}, "
            f"now {shorten_text(new)} in the result)"
        )
    finding = build_finding(
        STALE_CODE, path, f"keeps {names}{clause}; with the result, {effect}", hint
    )
    return RewrittenSidecar(data, findings=(finding,), stays=True)


def _explain_stay(
    found: FoundSidecar,
    result: RewrittenSidecar,
    names: ModelNames,
    job: RenameJob,
    holders: Sequence[Path],
    *,
    is_left: bool,
) -> tuple[str, str] | None:
    """Return why a sidecar beside the result stays as it is, and a hint; ``None`` if it changes."""
    path = str(found.path)
    if not job.in_place:
        has_names = all(names.may_be_current(old) for old, _ in result.renamed)
        reason = f" because {job.model} keeps them" if has_names else ""
        return reason, _hint_at_copy(found.format)
    if is_left:
        refusals = [finding for finding in result.findings if finding.code == STALE_CODE]
        if refusals:
            return "", refusals[0].hint
        return "", f"`--sidecar {quote_path(path)}` renames them"
    return _explain_shared(path, holders[0]) if holders else None


def _hint_at_copy(sidecar_format: SidecarFormat) -> str:
    hint = "`-d renamed` takes both along"
    if sidecar_format.requires_pairs:
        hint += "; `onnxkvrename custom-io --help` shows how to write another one"
    return hint


def _explain_shared(path: str, holder: Path) -> tuple[str, str]:
    hint = (
        f"rename both models together, or `--sidecar {quote_path(path)}` renames them here anyway"
    )
    return f" because {holder} also has them", hint


def _adapt_finding(finding: Finding, found: FoundSidecar, *, is_copy: bool) -> Finding:
    """Return the finding as a warning: the file of another model may be beside this one.

    One that cannot follow its own model stays an error, unless it is of an earlier compile, or
    the result is a copy beside the model.
    """
    severity = CODES[finding.code][0]
    if finding.code != STALE_CODE:
        return finding._replace(severity=severity)
    if is_copy:
        hint = "`-d renamed --replace` takes both along"
        return finding._replace(severity=severity, hint=hint)
    hint = f"{finding.hint}; {LEAVE_HINT}"
    is_beside = found.directory == found.path.parent
    return finding._replace(severity=finding.severity if is_beside else severity, hint=hint)
