"""Exports to where QEfficient looks for them under their new names."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from onnxkvrename import changeset, exportcache, files, locks, onnxfile, planning
from onnxkvrename.checking import Finding
from onnxkvrename.companions import MAX_TEXT, Companion, Followed
from onnxkvrename.errors import KvRenameError, ModelError
from onnxkvrename.exportcache import Entry
from onnxkvrename.planning import Wish
from onnxkvrename.results import Job, ModelReport, Report
from onnxkvrename.rules import Rules

_ABOVE = 3
"""Directories from a window up to that of its export."""


class Seed(NamedTuple):
    """One export: where it stands, and where it is looked for under its new names.

    ``finding`` is what stands against that.
    """

    directory: Path
    target: Path
    entry: Entry | None
    finding: Finding | None = None

    @property
    def moves(self) -> bool:
        """Whether the export is looked for elsewhere."""
        return self.finding is None and self.target != self.directory


def home(model: Path) -> Path | None:
    """The directory of the export that a model belongs to, if it stands in the cache."""
    for directory in list(Path(os.path.abspath(model)).parents)[:_ABOVE]:
        if exportcache.named(directory.name) and os.path.isfile(directory / exportcache.FILE):
            return directory
    return None


def read(directory: Path) -> exportcache.Params:
    """The parameters of an export. Raises :class:`ModelError` for what are none."""
    path = directory / exportcache.FILE
    return exportcache.parse(files.read_text(path, MAX_TEXT), str(path))


def seeds(models: Sequence[Path], rules: Rules, wish: Wish) -> tuple[Seed, ...]:
    """The exports that models belong to, in their order.

    Raises :class:`ModelError` for a model that is in no export, and for one that
    QEfficient would never look for with a token.
    """
    found: dict[Path, Seed] = {}
    for model in models:
        directory = _directory(model)
        if directory not in found:
            found[directory] = _seed(directory, rules, wish)
        seed = found[directory]
        if seed.entry is not None and not seed.moves and seed.finding is None:
            _check_unmoved(model, seed.entry, rules)
    return tuple(found.values())


def _directory(model: Path) -> Path:
    for directory in list(Path(os.path.abspath(model)).parents)[:_ABOVE]:
        if os.path.isfile(directory / exportcache.FILE):
            return directory
    raise ModelError(
        f"is in no export of QEfficient: there is no {exportcache.FILE} beside or above it",
        path=str(model),
        hint="-d DIR writes it elsewhere",
    )


def _seed(directory: Path, rules: Rules, wish: Wish) -> Seed:
    params = read(directory)
    entry = exportcache.recognise(directory.name, params)
    if entry is None and wish.target:  # one that was stopped before its directory moved
        before = exportcache.retold(params, rules, Wish(None, strip=True))
        entry = exportcache.recognise(directory.name, before)
    if entry is None:
        unknown = exportcache.unrecognised(directory.name, params)
        return Seed(directory, directory, None, unknown)
    if exportcache.token_refusal(params, rules) is not None:
        return Seed(directory, directory, entry)
    new = exportcache.seeded(entry, rules, wish)
    target = directory.parent / new.directory
    if target != directory and os.path.lexists(target) and not _holds(target, new):
        return Seed(directory, target, new, exportcache.occupied(str(target)))
    return Seed(directory, target, new)


def _holds(target: Path, entry: Entry) -> bool:
    """Whether a directory is that of an export."""
    try:
        return read(target) == entry.params
    except KvRenameError:
        return False


def _check_unmoved(model: Path, entry: Entry, rules: Rules) -> None:
    """An export that stays where it is may have no KV buffers."""
    reason = exportcache.token_refusal(entry.params, rules)
    if reason is None:
        return
    with onnxfile.opened(model) as found:
        pairs = planning.plan(found.signature, rules, Wish(None)).pairs
    if pairs:
        raise ModelError(
            f"would be seeded in vain: {reason}", path=str(model), hint="-d DIR writes it elsewhere"
        )


def jobs(given: Sequence[Job], found: Sequence[Seed], *, in_place: bool) -> tuple[Job, ...]:
    """The same models, with their places in the directories of their seeds.

    Without those that are results of an earlier run on others of them.
    """
    homes = {seed.directory: seed for seed in found}
    results = {seed.target for seed in found if seed.moves}
    placed = []
    for job in given:
        seed = homes[_directory(job.model)]
        if seed.directory in results:
            continue
        inside = Path(os.path.abspath(job.model)).relative_to(seed.directory)
        stays = in_place or not seed.moves
        placed.append(Job(job.model, job.model if stays else seed.target / inside))
    return tuple(placed)


def companions(found: Sequence[Seed], *, in_place: bool) -> tuple[Companion, ...]:
    """The parameters of each seed, retold, and what stands against it."""
    made = []
    for seed in found:
        if seed.entry is None or seed.finding is not None or not seed.moves:
            if seed.finding is not None:
                made.append(_told(seed, seed.directory))
            continue
        made.append(_told(seed, seed.directory if in_place else seed.target))
    return tuple(made)


def _told(seed: Seed, directory: Path) -> Companion:
    def follow(text: str, models: Sequence[ModelReport]) -> Followed:
        if seed.finding is not None or seed.entry is None:
            return Followed(text, 0, (seed.finding,) if seed.finding is not None else ())
        told = exportcache.text_of(seed.entry.params)
        names = seed.entry.params["export_params"]["output_names"]
        before = exportcache.parse(text, str(seed.directory))["export_params"]["output_names"]
        changed = sum(one != other for one, other in zip(before, names, strict=False))
        return Followed(text if exportcache.parse(text, "") == seed.entry.params else told, changed)

    return Companion(seed.directory / exportcache.FILE, directory / exportcache.FILE, follow)


def move(found: Sequence[Seed], report: Report) -> Report:
    """Give directories that were renamed in place the names under which they are looked for.

    The report then says where the models are. Raises :class:`WriteError`; the same
    command again then ends the work.
    """
    for seed in found:
        if seed.moves and seed.directory.is_dir():
            with locks.held([seed.directory, seed.target]):
                changeset.move(seed.directory, seed.target)
    targets = {seed.directory: seed.target for seed in found if seed.moves}
    return report._replace(models=tuple(_moved(model, targets) for model in report.models))


def _moved(model: ModelReport, targets: Mapping[Path, Path]) -> ModelReport:
    path = Path(os.path.abspath(model.output))
    for directory, target in targets.items():
        if directory in path.parents:
            output = str(target / path.relative_to(directory))
            call = model.feed_back and model.feed_back.replace(model.output, output)
            return model._replace(output=output, feed_back=call)
    return model
