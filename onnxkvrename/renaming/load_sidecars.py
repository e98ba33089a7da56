"""Find the sidecars of a run, where the result of each goes, and what is stale there."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path

from onnxkvrename.errors import ModelError, WriteError
from onnxkvrename.files.find import RenameJob, build_job, identify_path
from onnxkvrename.files.read import resolve_path
from onnxkvrename.renaming.prepare import PreparedModel
from onnxkvrename.renaming.prepare_sidecars import PreparedSidecar, Sidecar
from onnxkvrename.rules.plan import KvPair, build_minimal_plan
from onnxkvrename.rules.profile import Rules
from onnxkvrename.rules.request import Request, SidecarPolicy
from onnxkvrename.sidecars.decisions import Fact
from onnxkvrename.sidecars.formats import describe_formats, detect_format, load_sidecar_formats
from onnxkvrename.sidecars.rewrite import STALE_CODE
from onnxkvrename.sidecars.search import FoundSidecar, detect_sidecars, read_sidecar_head
from onnxkvrename.sidecars.stale import find_stale_sidecars

_FOUND: Mapping[SidecarPolicy, Fact] = {"auto": "found", "off": "off"}


def load_sidecars(
    request: Request,
    jobs: Sequence[RenameJob],
    rules: Rules,
    candidates: Sequence[tuple[Path, Path]],
) -> tuple[Sidecar, ...]:
    """Return the sidecars that are named or found, each with the models that it belongs to.

    A sidecar belongs to the models in its directory, or else to those below it; one of a
    compile to those above its directory, and it stays; one that is elsewhere to all.

    Args:
        request: What is asked for, named sidecars too.
        jobs: The models.
        rules: The rules, which may name further files.
        candidates: Files beside the models that may be sidecars by their names, each with the
            directory of its models.

    Raises:
        ModelError: A named file cannot be read or has no known format, or a directory
            cannot be listed.
        WriteError: Two sidecars would be written to the same place.
    """
    formats = load_sidecar_formats(rules)
    directories = [resolve_path(job.model.parent) for job in jobs]
    distinct: dict[str, Sidecar] = {}

    def add(found: FoundSidecar, how: Fact) -> None:
        sidecar = _place_sidecar(found, how, request, jobs, directories)
        distinct.setdefault(identify_path(found.path), sidecar)

    for path in request.sidecar:
        detected = detect_format(formats, path.name, read_sidecar_head(path))
        if detected is None:
            raise ModelError(
                "is not a sidecar of a known format",
                path=str(path),
                hint=describe_formats(formats),
            )
        add(FoundSidecar(path, path.parent, detected, has_known_name=True), "asked")
    # Those that stay may be anything.
    with suppress(ModelError) if request.sidecars == "off" else nullcontext():
        for item in detect_sidecars(candidates, formats):
            add(item, _FOUND[request.sidecars])
    _check_distinct_outputs(distinct.values())
    return tuple(distinct.values())


def _check_distinct_outputs(sidecars: Iterable[Sidecar]) -> None:
    by_output: dict[str, Sidecar] = {}
    for sidecar in sidecars:
        output = sidecar.job.output
        first = by_output.setdefault(resolve_path(output), sidecar)
        if first is not sidecar:
            raise WriteError(
                f"both {first.path} and {sidecar.path} would be written here",
                path=str(output),
                hint="rename with one of them at a time",
            )


def _place_sidecar(
    found: FoundSidecar,
    how: Fact,
    request: Request,
    jobs: Sequence[RenameJob],
    directories: Sequence[str],
) -> Sidecar:
    """Return a sidecar with its models, and what its place says about it.

    One that the user asked for is of all models if none is beside it. The directories are those of
    the models, links resolved.
    """
    path, directory = found.path, found.directory
    is_asked, is_of_compile = how == "asked", directory != path.parent
    real_directory = resolve_path(directory)
    prefix = os.path.join(real_directory, "")
    beside = [index for index, each in enumerate(directories) if each == real_directory]
    below = [index for index, each in enumerate(directories) if each.startswith(prefix)]
    owners = beside or (not is_asked and below) or range(len(jobs))
    job = jobs[owners[0]]
    if is_of_compile or job.in_place or (not is_asked and job.same_directory):
        output = path
    elif is_asked and not beside:
        output = job.output.parent / path.name
    else:
        output = _resolve_output(found, job)
    own_job = build_job(path, output, _find_root(output, job))
    facts: dict[Fact, bool] = {
        how: True,
        "beside both": job.same_directory and not job.in_place and not (is_asked and not beside),
        "of a compile": is_of_compile,
        "known by content": not found.has_known_name,
        "a binding": found.format.is_binding,
    }
    return Sidecar(
        own_job,
        tuple(owners),
        found=found,
        facts=frozenset(fact for fact, holds in facts.items() if holds),
    )


def _find_root(output: Path, job: RenameJob) -> Path | None:
    """Return the directory that was given for the results of a job, if an output is below it."""
    is_below = job.root is not None and job.root in Path(os.path.abspath(output)).parents
    return job.root if is_below else None


def _resolve_output(found: FoundSidecar, job: RenameJob) -> Path:
    """Return where a sidecar goes: in the same place relative to the result as to the model.

    Where the directories between an upper sidecar and its model are others on the side of the
    result, it goes beside the result.
    """
    directory, model_directory = resolve_path(found.directory), resolve_path(job.model.parent)
    steps = Path(os.path.relpath(directory, model_directory)).parts
    below = Path(model_directory).parts[-len(steps) :] if set(steps) == {os.pardir} else ()
    place = job.output.parent
    if below and place.parts[-len(below) :] == below:
        place = place.parents[len(below) - 1]
    return place / found.path.name


def check_sidecars_there(
    models: Sequence[PreparedModel],
    sidecars: Sequence[PreparedSidecar],
    rules: Rules,
) -> tuple[PreparedModel, ...]:
    """Return the models with KV406 for sidecars and compiles beside the results with old names.

    It is an error, as in verify, for one beside models that all stay as they are: the run would
    leave it so, and nothing else shows it. Otherwise it is a warning.

    What the run writes, or has KV406 already, does not matter.

    Raises:
        ModelError: A directory cannot be listed.
    """
    pairs: dict[Path, list[KvPair]] = {}
    first: dict[Path, int] = {}
    changed: set[Path] = set()
    replaced: set[Path] = set()
    for index, model in enumerate(models):
        job = model.job
        is_second = job.same_directory and not job.in_place
        if model.splice_plan is None or is_second or (job.in_place and model.report.failed):
            continue
        directory = job.output.parent
        if model.report.name_map or not job.in_place:
            changed.add(directory)
        if model.replaces_model:
            replaced.add(directory)
        plan = build_minimal_plan(model.splice_plan.expected_signature, rules)
        pairs.setdefault(directory, []).extend(plan.pairs)
        first.setdefault(directory, index)
    written = (each.sidecar.job.output for each in sidecars if each.plan is not None)
    settled = set(map(os.path.abspath, written))
    settled.update(
        os.path.abspath(finding.name)
        for each in sidecars
        for finding in each.findings
        if finding.code == STALE_CODE
    )
    is_left = any("off" in each.sidecar.facts for each in sidecars)
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
                replaced_paths=settled,
                others=others,
                is_left=is_left,
                is_replaced=directory in replaced,
            )
        )
        stale = {finding.name for finding in findings}
        known = [f for f in model.report.findings if f.code != "KV404" or f.name not in stale]
        checked[index] = model._replace(report=model.report._replace(findings=(*known, *findings)))
    return tuple(checked)
