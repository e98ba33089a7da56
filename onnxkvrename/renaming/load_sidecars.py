"""Find the sidecars of a run, detect their formats, and decide where their results go."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import NamedTuple

from onnxkvrename.errors import ModelError, WriteError
from onnxkvrename.findings import build_finding, quote_path
from onnxkvrename.renaming.found_sidecars import rewrite_found_sidecar
from onnxkvrename.renaming.prepare_sidecars import Sidecar
from onnxkvrename.renaming.request import Request
from onnxkvrename.rules.find_models import (
    COMPILE_DIRECTORY,
    find_possible_sidecars,
    identify_path,
)
from onnxkvrename.rules.profile import Rules
from onnxkvrename.rules.results import ModelReport, RenameJob
from onnxkvrename.sidecars.bindings import BoundModels
from onnxkvrename.sidecars.formats import SidecarFormat, load_sidecar_formats
from onnxkvrename.sidecars.model_names import ModelNames, OneModel
from onnxkvrename.sidecars.rewrite import STALE_CODE, RewrittenSidecar, rewrite_sidecar
from onnxkvrename.sidecars.search import (
    FoundSidecar,
    detect_sidecars,
    read_sidecar_head,
    read_value_names,
)
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

    Args:
        request: What is asked for.
        jobs: The models of the run.
        rules: The rules that recognise KV names.
        directories: Where to look for files that the user wants to fit, whatever their names are.
        candidates: Files beside the models that may be sidecars by their names, each with the
            directory of its models.

    Raises:
        ModelError: A named file cannot be read or has no known format, or a directory
            cannot be listed.
        WriteError: Two sidecars would be written to the same place.
    """
    run = _Run(request, jobs, rules)
    policy = request.sidecar_policy
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
        distinct.setdefault(identify_path(path), _build_named_sidecar(path, detected, run))
    # Those that stay may be anything.
    with suppress(ModelError) if policy == "leave" else nullcontext():
        for item in detect_sidecars(candidates, formats, strict=is_strict):
            if is_strict:
                sidecar = _build_named_sidecar(item.path, item.format, run, item.directory)
            else:
                sidecar = _build_found_sidecar(item, run)
            distinct.setdefault(identify_path(item.path), sidecar)
    sidecars = tuple(distinct.values())
    if policy == "leave":
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


def _build_named_sidecar(
    path: Path, sidecar_format: SidecarFormat, run: _Run, directory: Path | None = None
) -> Sidecar:
    """Return a sidecar that must fit the models, because the user asked for it."""
    directory = directory or path.parent
    jobs_beside = _list_jobs_beside(directory, run.jobs)
    own_paths = {str(job.model) for job in jobs_beside or run.jobs}
    read_names = _prepare_names(own_paths, run)

    def rewrite(data: bytes, models: Sequence[ModelReport]) -> RewrittenSidecar:
        if _has_unread_model(models, own_paths, directory):
            return RewrittenSidecar(data, stays=True)
        bound, places = _bind_models(path.parent, models, run)
        result = rewrite_sidecar(data, str(path), sidecar_format, read_names(models), bound)
        return _add_place_findings(result, path, output, places, run.jobs, is_found=False)

    job = (jobs_beside or run.jobs)[0]
    if jobs_beside and job.same_directory and not job.in_place:
        raise ModelError(
            f"is beside both {job.model} and {job.output}, and can match only one of them",
            path=str(path),
            hint="write the model into another directory",
        )
    if job.in_place:
        output = path
    else:
        output = _resolve_output(path, job) if jobs_beside else job.output.parent / path.name
    is_package = run.request.takes_folders and sidecar_format.is_package
    root = _find_root(output, job)
    return Sidecar(path, output, rewrite, directory, False, root, is_package)


def _build_found_sidecar(found: FoundSidecar, run: _Run) -> Sidecar:
    """Return a sidecar that follows the models as far as it is theirs."""
    own_jobs = _list_jobs_beside(found.directory, run.jobs)
    own_jobs = own_jobs or _list_jobs_below(found.directory, run.jobs) or list(run.jobs)
    own_paths = {str(job.model) for job in own_jobs}
    read_names = _prepare_names(own_paths, run)
    is_left = run.request.sidecar_policy == "leave"

    def rewrite(data: bytes, models: Sequence[ModelReport]) -> RewrittenSidecar:
        if _has_unread_model(models, own_paths, found.directory):
            return RewrittenSidecar(data, stays=True)
        bound, places = _bind_models(found.path.parent, models, run)
        names = read_names(models)
        result = rewrite_found_sidecar(data, found, names, bound, own_jobs, is_left=is_left)
        path = found.path
        return _add_place_findings(result, path, output, places, run.jobs, is_found=True)

    job = own_jobs[0]
    output = found.path if job.same_directory else _resolve_output(found.path, job)
    root = _find_root(output, job)
    is_package = run.request.takes_folders and found.format.is_package
    return Sidecar(
        found.path,
        output,
        rewrite,
        found.directory,
        is_found=True,
        root=root,
        is_package=is_package,
        is_left=is_left,
    )


def _prepare_names(
    paths: Collection[str], run: _Run
) -> Callable[[Sequence[ModelReport]], ModelNames]:
    """Return a function that collects the names of these models from the reports of all."""

    def read_names(models: Sequence[ModelReport]) -> ModelNames:
        own_models = [_describe_model(report) for report in models if report.path in paths]
        return ModelNames.from_models(own_models, run.request.change, run.rules)

    return read_names


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
    if len(steps) == 1 and COMPILE_DIRECTORY.fullmatch(steps[0]):
        return job.output.parent / steps[0] / path.name
    below = Path(model_directory).parts[-len(steps) :] if set(steps) == {os.pardir} else ()
    if below and job.output.parent.parts[-len(below) :] == below:
        return job.output.parent.parents[len(below) - 1] / path.name
    return job.output.parent / path.name
