"""Exports to where QEfficient looks for them under their new names."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

from onnxkvrename.errors import KvRenameError, ModelError, WriteError
from onnxkvrename.findings import Finding
from onnxkvrename.model.file import open_model
from onnxkvrename.qefficient.export_cache import (
    CacheEntry,
    ExportParams,
    build_occupied_finding,
    build_renamed_entry,
    build_unrecognized_finding,
    explain_token_refusal,
    identify_export,
    parse_export_params,
    rename_export_params,
    render_export_params,
)
from onnxkvrename.qefficient.find_export import PARAMS_FILE, find_exports
from onnxkvrename.renaming.extra_files import MAX_SIDECAR_SIZE, RewrittenText, Sidecar
from onnxkvrename.rules.find_models import build_job, find_jobs
from onnxkvrename.rules.plan import TokenChange, build_rename_plan
from onnxkvrename.rules.profile import Rules
from onnxkvrename.rules.results import ModelReport, RenameJob, Report, SidecarReport
from onnxkvrename.storage.lock import hold_locks
from onnxkvrename.storage.read import read_text_file
from onnxkvrename.storage.temp_file import resolve_moved_path
from onnxkvrename.storage.transaction import clear_intent, find_intents


class Seed(NamedTuple):
    """One export: where it stands, and where it is looked for under its new names.

    ``finding`` is what stands against that.
    """

    directory: Path
    target: Path
    entry: CacheEntry | None
    finding: Finding | None = None

    @property
    def needs_move(self) -> bool:
        """Whether the export is looked for elsewhere."""
        return self.finding is None and self.target != self.directory


def read_export_params(directory: Path) -> ExportParams:
    """The parameters of an export. Raises :class:`ModelError` for what are none."""
    path = directory / PARAMS_FILE
    return parse_export_params(read_text_file(path, MAX_SIDECAR_SIZE), str(path))


def plan_seeds(
    models: Sequence[Path], rules: Rules, wish: TokenChange, *, in_place: bool
) -> tuple[Seed, ...]:
    """The exports that models belong to, in their order.

    Raises :class:`ModelError` for a model that is in no export, for one that
    QEfficient would never look for with a token, and where an export would be
    renamed in place by half.
    """
    found: dict[Path, Seed] = {}
    for model in models:
        directory = _require_export_directory(model)
        if directory not in found:
            found[directory] = _plan_seed(directory, rules, wish, in_place=in_place)
        seed = found[directory]
        if seed.entry is not None and not seed.needs_move and seed.finding is None:
            _check_token_accepted(model, seed.entry, rules)
    for seed in found.values() if in_place else ():
        if seed.needs_move:
            _check_complete(seed.directory, models)
    return tuple(found.values())


def _require_export_directory(model: Path) -> Path:
    for directory in find_exports(model):
        return directory
    raise ModelError(
        f"is in no export of QEfficient: there is no {PARAMS_FILE} beside or above it",
        path=str(model),
        hint="-d DIR writes it elsewhere",
    )


def _plan_seed(directory: Path, rules: Rules, wish: TokenChange, *, in_place: bool) -> Seed:
    params = read_export_params(directory)
    entry = identify_export(directory.name, params)
    begun = _find_interrupted_entry(directory, params, rules, wish) if entry is None else None
    if begun is not None and not in_place:
        raise ModelError(
            f"is on its way to {begun.directory_name}: a run with --in-place was killed",
            path=str(directory),
            hint="run that command again",
        )
    entry = entry or begun
    if entry is None:
        unknown = build_unrecognized_finding(directory.name, params)
        return Seed(directory, directory, None, unknown)
    if explain_token_refusal(params, rules) is not None:
        return Seed(directory, directory, entry)
    new = build_renamed_entry(entry, rules, wish)
    target = directory.parent / new.directory_name
    taken = target != directory and os.path.lexists(target)
    same = taken and _has_entry(target, new)
    if taken and (in_place or not same):
        return Seed(directory, target, new, build_occupied_finding(str(target), same=same))
    return Seed(directory, target, new)


def _find_interrupted_entry(
    directory: Path, params: ExportParams, rules: Rules, wish: TokenChange
) -> CacheEntry | None:
    """The export whose parameters stand already in a directory that has its old name.

    A run that was killed has left word of the new one; where it could not, that
    follows from the token that was there before, if it is known.
    """
    for mark in find_intents(directory.parent):
        if mark.move[0] == directory.name:
            entry = identify_export(mark.move[1], params)
            if entry is not None:
                return entry
    before = TokenChange(wish.token) if wish.strip else TokenChange(None, strip=True)
    if before.token is None and not before.strip:
        return None
    entry = identify_export(directory.name, rename_export_params(params, rules, before))
    return entry and build_renamed_entry(entry, rules, wish)


def _has_entry(target: Path, entry: CacheEntry) -> bool:
    """Whether a directory is that of an export."""
    try:
        return read_export_params(target) == entry.params
    except KvRenameError:
        return False


def _check_token_accepted(model: Path, entry: CacheEntry, rules: Rules) -> None:
    """An export that stays where it is may have no KV buffers."""
    reason = explain_token_refusal(entry.params, rules)
    if reason is None:
        return
    with open_model(model) as found:
        pairs = build_rename_plan(found.signature, rules, TokenChange(None)).pairs
    if pairs:
        raise ModelError(
            f"would be seeded in vain: {reason}", path=str(model), hint="-d DIR writes it elsewhere"
        )


def _check_complete(directory: Path, models: Sequence[Path]) -> None:
    """An export whose directory gets another name has to be renamed as a whole."""
    given = {os.path.realpath(model) for model in models}
    for job in find_jobs([directory]):
        if os.path.realpath(job.model) not in given:
            raise ModelError(
                "would not be renamed, though it is of the same export",
                path=str(job.model),
                hint=f"give the whole of it: {directory}",
            )


def clear_finished_intents(found: Sequence[Seed]) -> None:
    """Take away what killed runs have left of exports that have their new names already."""
    for seed in found:
        parent = seed.directory.parent
        for mark in find_intents(parent):
            old, new = (parent / name for name in mark.move)
            if seed.directory == new and not os.path.lexists(old):
                with suppress(WriteError), hold_locks([old, new]):
                    clear_intent({old: new})


def redirect_jobs(
    given: Sequence[RenameJob], found: Sequence[Seed], *, in_place: bool
) -> tuple[RenameJob, ...]:
    """The same models, with their places in the directories of their seeds.

    Without those that are results of an earlier run on others of them.
    """
    homes = {seed.directory: seed for seed in found}
    results = {seed.target for seed in found if seed.needs_move}
    placed = []
    for job in given:
        seed = homes[_require_export_directory(job.model)]
        if seed.directory in results:
            continue
        inside = Path(os.path.abspath(job.model)).relative_to(seed.directory)
        stays = in_place or not seed.needs_move
        placed.append(build_job(job.model, job.model if stays else seed.target / inside))
    return tuple(placed)


def build_params_sidecars(found: Sequence[Seed], *, in_place: bool) -> tuple[Sidecar, ...]:
    """The parameters of each seed, retold, and what stands against it."""
    results = {seed.target for seed in found if seed.needs_move}
    return tuple(
        _build_params_sidecar(
            seed, seed.directory if in_place or not seed.needs_move else seed.target
        )
        for seed in found
        if seed.directory not in results
    )


def _build_params_sidecar(seed: Seed, directory: Path) -> Sidecar:
    def follow(data: bytes, models: Sequence[ModelReport]) -> RewrittenText:
        if seed.finding is not None or seed.entry is None:
            return RewrittenText(data, 0, (seed.finding,) if seed.finding is not None else ())
        before = read_export_params(seed.directory)
        if before == seed.entry.params:
            return RewrittenText(data, 0)
        names = seed.entry.params["export_params"]["output_names"]
        old = before["export_params"]["output_names"]
        changed = sum(one != other for one, other in zip(old, names, strict=False))
        return RewrittenText(render_export_params(seed.entry.params).encode("utf-8"), changed)

    return Sidecar(seed.directory / PARAMS_FILE, directory / PARAMS_FILE, follow)


def build_directory_map(found: Sequence[Seed]) -> dict[Path, Path]:
    """What directories are to be called of exports that are renamed in place."""
    return {seed.directory: seed.target for seed in found if seed.needs_move}


def update_report_paths(report: Report, moves: Mapping[Path, Path], *, done: bool) -> Report:
    """The report with the names that directories have in the end, ``done`` or not.

    A text is told of as changed where its directory alone gets another name.
    """
    texts = []
    for text in report.sidecars:
        there = _update_output(text, moves)
        if there.output != text.output and text.status == "unchanged":
            there = there._replace(status="renamed" if done else "would-rename")
        texts.append(there)
    models = []
    for model in report.models:
        told = _update_output(model, moves)
        call = model.feed_back_call and model.feed_back_call.replace(model.output, told.output)
        models.append(told._replace(feed_back_call=call))
    return Report(tuple(models), tuple(texts))


_ReportItem = TypeVar("_ReportItem", ModelReport, SidecarReport)


def _update_output(item: _ReportItem, moves: Mapping[Path, Path]) -> _ReportItem:
    path = Path(os.path.abspath(item.output))
    there = resolve_moved_path(path, moves)
    return item if there == path else item._replace(output=str(there))
