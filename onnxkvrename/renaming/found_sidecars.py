"""Decide what becomes of a sidecar that was found beside models, and not named by the user."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from onnxkvrename.errors import ModelError
from onnxkvrename.findings import CODES, Finding, build_finding, quote_path
from onnxkvrename.limits import shorten_text
from onnxkvrename.rules.plan import KvPair, build_minimal_plan
from onnxkvrename.rules.profile import Rules
from onnxkvrename.rules.results import RenameJob
from onnxkvrename.sidecars.bindings import BoundModels
from onnxkvrename.sidecars.formats import MODEL_SUFFIX, SidecarFormat
from onnxkvrename.sidecars.model_names import ModelNames
from onnxkvrename.sidecars.rewrite import STALE_CODE, RewrittenSidecar, rewrite_sidecar
from onnxkvrename.sidecars.search import LEAVE_HINT, FoundSidecar, Neighbours, read_neighbours
from onnxkvrename.sidecars.stale import build_unknown_finding, find_stale_sidecars

if TYPE_CHECKING:
    from onnxkvrename.renaming.prepare import PreparedModel
    from onnxkvrename.renaming.prepare_sidecars import PreparedSidecar


def rewrite_found_sidecar(
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

    Args:
        data: Its content.
        found: The sidecar.
        names: The names of its models.
        models: The same models one by one.
        jobs: Its models.
        is_left: Whether the user wants it left as it is.

    Raises:
        ModelError: The content of a file whose name shows its format cannot be read or rewritten.
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

    Args:
        models: The models in the order of the command.
        sidecars: Those of the run. What is written, or has KV406 already, does not matter.
        rules: The rules that recognise KV names.

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
