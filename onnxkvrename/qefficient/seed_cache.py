"""Put renamed exports where QEfficient looks for them under their new names."""

from __future__ import annotations

import os
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from onnxkvrename.errors import KvRenameError, ModelError
from onnxkvrename.files.find import RenameJob, build_job
from onnxkvrename.files.read import is_occupied
from onnxkvrename.findings import Finding, build_finding
from onnxkvrename.model.file import open_model
from onnxkvrename.qefficient.export_cache import (
    WEIGHTS_FILE,
    CacheEntry,
    build_elsewhere_hint,
    build_occupied_finding,
    build_renamed_entry,
    build_unrecognized_finding,
    explain_token_refusal,
    find_checkpoint,
    identify_export,
    read_export_params,
    render_export_params,
)
from onnxkvrename.renaming.prepare_sidecars import Sidecar
from onnxkvrename.rules.kv_model import read_kv_model
from onnxkvrename.rules.plan import RenamePlan, TokenChange, build_rename_plan
from onnxkvrename.rules.profile import Rules
from onnxkvrename.rules.qefficient import MERGED, PARAMS_FILE, find_exports, shorten_path
from onnxkvrename.rules.request import Request, format_rename
from onnxkvrename.rules.results import ModelReport, report_model
from onnxkvrename.sidecars.rewrite import RewrittenSidecar
from onnxkvrename.text import quote_path

_OLD_MERGE_FOLDER = "final_data"
"""The directory in an export where older releases put merged files, and all look for them."""


class Seed(NamedTuple):
    """One export of the cache.

    Attributes:
        directory: Its directory.
        target: The directory where QEfficient looks for it under its new names.
        entry: The entry after the rename, ``None`` if the export is not recognised.
        finding: Why it cannot be put there.
    """

    directory: Path
    target: Path
    entry: CacheEntry | None
    finding: Finding | None = None

    @property
    def needs_copy(self) -> bool:
        """True if QEfficient looks for the renamed export in another directory."""
        return self.finding is None and self.target != self.directory


@dataclass(frozen=True, slots=True)
class SeedPlan:
    """The exports of a run, and what a rename does with each.

    Attributes:
        seeds: The exports that the models belong to, in the order of the models.
        refused: Reports on the models that cannot be seeded, because QEfficient would not look
            for them; each has KV407 with the reason, and then no export is.
        kept: Reports on the models of exports that stay, as they are the result of an earlier
            seeding with another token.
    """

    seeds: tuple[Seed, ...]
    refused: tuple[ModelReport, ...] = ()
    kept: tuple[ModelReport, ...] = ()

    def redirect_jobs(self, jobs: Sequence[RenameJob]) -> tuple[RenameJob, ...]:
        """Return the jobs with outputs in the new directories of their exports.

        Models of an export that is the result of another one in this plan are left out, and
        those that are refused or kept.

        Raises:
            ModelError: A model is in no export.
        """
        seed_by_directory = {seed.directory: seed for seed in self.seeds}
        left_out = {model.path for model in (*self.refused, *self.kept)}
        redirected = []
        for job in jobs:
            if str(job.model) in left_out:
                continue
            seed = seed_by_directory[_require_export_directory(job.model)]
            if seed.directory in self._results:
                continue
            path_in_export = Path(os.path.abspath(job.model)).relative_to(seed.directory)
            output = seed.target / path_in_export if seed.needs_copy else job.model
            redirected.append(build_job(job.model, output, seed.directory.parent))
        return tuple(redirected)

    def build_sidecars(self, jobs: Sequence[RenameJob]) -> tuple[Sidecar, ...]:
        """Return the files of each export that QEfficient reads as sidecars of its models."""
        return tuple(
            sidecar
            for seed in self.seeds
            if seed.directory not in self._results
            for sidecar in _build_sidecars(seed, jobs)
        )

    @property
    def _results(self) -> set[Path]:
        return {seed.target for seed in self.seeds if seed.needs_copy}


def plan_seeds(models: Sequence[Path], rules: Rules, request: Request) -> SeedPlan:
    """Return the plan for the exports that models belong to; nothing is written.

    Args:
        models: The models of the run.
        rules: The rules that recognise KV names.
        request: What is asked for.

    Raises:
        ModelError: A model is in no export, or QEfficient would look for none of them with a
            token.
    """
    models_by_directory: dict[Path, list[Path]] = {}
    errors: list[ModelError] = []
    for model in models:
        try:
            models_by_directory.setdefault(_require_export_directory(model), []).append(model)
        except ModelError as error:
            errors.append(error)
    seeds: list[Seed] = []
    refused: list[ModelReport] = []
    kept: list[ModelReport] = []
    for directory, own_models in models_by_directory.items():
        try:
            seed = _plan_seed(directory, rules, request.change)
        except ModelError as error:
            errors.append(error)
            continue
        if _is_earlier_seed(seed, models_by_directory, rules, request.change):
            kept += (report_model(read_kv_model(model, rules)) for model in own_models)
            continue
        reports: list[ModelReport] = []
        if seed.entry is not None and seed.finding is None:
            reports += _report_refused(directory, seed.entry, own_models, rules)
        if not reports:
            seeds.append(seed)
        refused += reports
    encoders = [report for report in refused if not report.pairs]  # they fill buffers
    if encoders:
        filled = [_require_export_directory(Path(report.path)) for report in encoders]
        for seed in tuple(seeds):
            own_models = models_by_directory[seed.directory]
            unfed = list(_report_unfed(seed.directory, own_models, filled, rules))
            if unfed:
                seeds.remove(seed)
            refused += unfed
    if refused and not _takes_token(seeds, rules):
        finding = refused[0].findings[0]
        raise ModelError(finding.message, path=refused[0].path, hint=finding.hint)
    others = [
        shorten_path(seed.directory, models_by_directory[seed.directory][0])
        for seed in seeds
        if seed.needs_copy
    ]
    if others:
        hint = f"`{format_rename(request._replace(models=tuple(others)))}` seeds the others"
        for failure in errors:
            failure.hint = hint
        refused = [
            report._replace(findings=tuple(each._replace(hint=hint) for each in report.findings))
            for report in refused
        ]
        seeds = [
            seed._replace(finding=seed.finding._replace(hint=hint))
            if seed.finding is not None and seed.entry is None  # nobody looks for it
            else seed
            for seed in seeds
        ]
    if errors:
        raise errors[0]
    return SeedPlan(tuple(seeds), tuple(refused), tuple(kept))


def _is_earlier_seed(
    seed: Seed, directories: Container[Path], rules: Rules, change: TokenChange
) -> bool:
    """Return whether an export has another token, and the run seeds the one without a token.

    It is then what an earlier run made of that one, and has a user of its own.
    """
    entry = identify_export(seed.directory.name, read_export_params(seed.directory))
    if change.strip or entry is None:
        return False
    plain = build_renamed_entry(entry, rules, TokenChange(None, strip=True))
    here = build_renamed_entry(plain, rules, change)
    if entry.directory_name in (plain.directory_name, here.directory_name):
        return False
    return seed.directory.with_name(plain.directory_name) in directories


def _require_export_directory(model: Path) -> Path:
    for directory in find_exports(model):
        return directory
    raise ModelError(
        f"is not part of a QEfficient export: there is no {PARAMS_FILE} beside or above it",
        path=str(model),
        hint=build_elsewhere_hint([model]),
    )


def _plan_seed(directory: Path, rules: Rules, change: TokenChange) -> Seed:
    params = read_export_params(directory)
    entry = identify_export(directory.name, params)
    if entry is None:
        unrecognized = build_unrecognized_finding(directory, params)
        return Seed(directory, directory, None, unrecognized)
    if explain_token_refusal(params, rules) is not None:
        return Seed(directory, directory, entry)
    new_entry = build_renamed_entry(entry, rules, change)
    target = directory.parent / new_entry.directory_name
    is_taken = target != directory and is_occupied(target)
    if is_taken and not _has_entry(target, new_entry):
        return Seed(directory, target, new_entry, build_occupied_finding(str(target)))
    return Seed(directory, target, new_entry)


def _has_entry(directory: Path, entry: CacheEntry) -> bool:
    try:
        return read_export_params(directory) == entry.params
    except KvRenameError:
        return False


def _takes_token(seeds: Sequence[Seed], rules: Rules) -> bool:
    """Return whether one of the exports can have a token, so that there is something to seed."""
    return any(
        seed.entry is None or explain_token_refusal(seed.entry.params, rules) is None
        for seed in seeds
    )


def _build_sidecars(seed: Seed, jobs: Sequence[RenameJob]) -> Iterator[Sidecar]:
    """Yield the parameters of an export, and the list of its weights if there is one."""
    target = seed.target if seed.needs_copy else seed.directory
    models = (Path(os.path.abspath(each.model)) for each in jobs)
    owners = tuple(index for index, model in enumerate(models) if seed.directory in model.parents)
    rewriters = {PARAMS_FILE: partial(_rewrite_params, seed)}
    if target != seed.directory and is_occupied(seed.directory / WEIGHTS_FILE):
        rewriters[WEIGHTS_FILE] = partial(_copy_weights_file, seed.directory, target)
    for name, rewrite in rewriters.items():
        job = build_job(seed.directory / name, target / name, seed.directory.parent)
        yield Sidecar(job, owners, rewrite)


def _rewrite_params(seed: Seed, data: bytes) -> RewrittenSidecar:
    findings = () if seed.finding is None else (seed.finding,)
    old_params = read_export_params(seed.directory)
    if findings or seed.entry is None or old_params == seed.entry.params:
        return RewrittenSidecar(data, findings=findings)
    old_names = old_params["export_params"]["output_names"]
    name_pairs = zip(old_names, seed.entry.output_names, strict=False)
    renamed = tuple((old, new) for old, new in name_pairs if old != new)
    return RewrittenSidecar(render_export_params(seed.entry.params).encode("utf-8"), renamed)


def _copy_weights_file(directory: Path, target: Path, data: bytes) -> RewrittenSidecar:
    """Return a list of weights as it is, with KV502 if the weights are not found by the copy."""
    name = find_checkpoint(data)
    link = directory / name
    if not name or not is_occupied(link) or is_occupied(target / name):
        return RewrittenSidecar(data)
    finding = build_finding(
        "KV502",
        str(directory / WEIGHTS_FILE),
        f"lists weights of {name}, which is not copied: no compile of the result finds them",
        f"`ln -s {quote_path(str(link))} {quote_path(str(target))}` afterwards",
    )
    return RewrittenSidecar(data, findings=(finding._replace(severity="warning"),))


def _report_refused(
    directory: Path, entry: CacheEntry, models: Sequence[Path], rules: Rules
) -> Iterator[ModelReport]:
    """Yield a report on each model of an export that cannot be seeded, with the reason.

    A model without KV names, such as most vision encoders, stays, and needs no word.
    """
    reason = explain_token_refusal(entry.params, rules) or _explain_missing_merge(
        directory, models, rules
    )
    for model in models if reason is not None else ():
        with open_model(model) as opened:
            try:
                plan = build_rename_plan(opened.signature, rules, TokenChange(None))
            except ModelError as error:
                raise opened.source.build_error(error.message, hint=error.hint) from None
        if plan.pairs or plan.feeds:
            yield _build_refusal(model, plan, f"cannot be seeded: {reason}", directory)


def _report_unfed(
    directory: Path, models: Sequence[Path], encoders: Sequence[Path], rules: Rules
) -> Iterator[ModelReport]:
    """Yield a report on each decoder whose buffers an encoder fills, which is not seeded.

    QEfficient looks for the encoder under its plain names whatever the token, so the two would
    no longer connect.
    """
    for path in models:
        model = read_kv_model(path, rules, check_data=False)
        if model.needs:
            message = (
                f"cannot be seeded: QEfficient's vision encoder fills {model.needs[0]}, "
                "and that name never gets a token"
            )
            yield _build_refusal(path, model.plan, message, *encoders, directory)


def _build_refusal(path: Path, plan: RenamePlan, message: str, *directories: Path) -> ModelReport:
    """Build the report on a model of exports that can be renamed elsewhere, all together."""
    finding = build_finding("KV407", "", message, build_elsewhere_hint(directories))
    return ModelReport(str(path), str(path), "failed", pairs=plan.pairs, findings=(finding,))


def _explain_missing_merge(directory: Path, models: Sequence[Path], rules: Rules) -> str | None:
    """Return why QEfficient would not find a layerwise export, ``None`` if it would."""
    parts = {model: rules.set_rule.parse_path(model.as_posix()) for model in models}
    if None in parts.values():
        return None
    for model, part in parts.items():
        if part is not None and (part.name.stage, part.name.first_layer) == (MERGED, 0):
            folder = Path(os.path.abspath(model)).parent
            if folder in (directory, directory / _OLD_MERGE_FOLDER):
                return None
    return (
        "QEfficient reads only merged_0-N.onnx from the export's directory, not the windows or "
        "pref_0.onnx"
    )
