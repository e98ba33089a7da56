"""Exports to where QEfficient looks for them under their new names."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

from onnxkvrename.errors import KvRenameError, ModelError, WriteError
from onnxkvrename.findings import Finding
from onnxkvrename.model import file as onnxfile
from onnxkvrename.qefficient import export_cache as exportcache
from onnxkvrename.qefficient.export_cache import Entry
from onnxkvrename.qefficient.find_export import PARAMS_FILE, find_exports
from onnxkvrename.renaming.extra_files import MAX_TEXT, Companion, Followed
from onnxkvrename.rules import find_models as discovery
from onnxkvrename.rules import plan as planning
from onnxkvrename.rules.plan import Wish
from onnxkvrename.rules.profile import Rules
from onnxkvrename.rules.results import Job, ModelReport, Report, TextReport
from onnxkvrename.storage import lock as locks
from onnxkvrename.storage import read as files
from onnxkvrename.storage import temp_file as drafts
from onnxkvrename.storage import transaction as changeset


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


def read(directory: Path) -> exportcache.Params:
    """The parameters of an export. Raises :class:`ModelError` for what are none."""
    path = directory / PARAMS_FILE
    return exportcache.parse(files.read_text(path, MAX_TEXT), str(path))


def seeds(models: Sequence[Path], rules: Rules, wish: Wish, *, in_place: bool) -> tuple[Seed, ...]:
    """The exports that models belong to, in their order.

    Raises :class:`ModelError` for a model that is in no export, for one that
    QEfficient would never look for with a token, and where an export would be
    renamed in place by half.
    """
    found: dict[Path, Seed] = {}
    for model in models:
        directory = _directory(model)
        if directory not in found:
            found[directory] = _seed(directory, rules, wish, in_place=in_place)
        seed = found[directory]
        if seed.entry is not None and not seed.moves and seed.finding is None:
            _check_unmoved(model, seed.entry, rules)
    for seed in found.values() if in_place else ():
        if seed.moves:
            _check_whole(seed.directory, models)
    return tuple(found.values())


def _directory(model: Path) -> Path:
    for directory in find_exports(model):
        return directory
    raise ModelError(
        f"is in no export of QEfficient: there is no {PARAMS_FILE} beside or above it",
        path=str(model),
        hint="-d DIR writes it elsewhere",
    )


def _seed(directory: Path, rules: Rules, wish: Wish, *, in_place: bool) -> Seed:
    params = read(directory)
    entry = exportcache.recognise(directory.name, params)
    begun = _begun(directory, params, rules, wish) if entry is None else None
    if begun is not None and not in_place:
        raise ModelError(
            f"is on its way to {begun.directory}: a run with --in-place was killed",
            path=str(directory),
            hint="run that command again",
        )
    entry = entry or begun
    if entry is None:
        unknown = exportcache.unrecognised(directory.name, params)
        return Seed(directory, directory, None, unknown)
    if exportcache.token_refusal(params, rules) is not None:
        return Seed(directory, directory, entry)
    new = exportcache.seeded(entry, rules, wish)
    target = directory.parent / new.directory
    taken = target != directory and os.path.lexists(target)
    same = taken and _holds(target, new)
    if taken and (in_place or not same):
        return Seed(directory, target, new, exportcache.occupied(str(target), same=same))
    return Seed(directory, target, new)


def _begun(directory: Path, params: exportcache.Params, rules: Rules, wish: Wish) -> Entry | None:
    """The export whose parameters stand already in a directory that has its old name.

    A run that was killed has left word of the new one; where it could not, that
    follows from the token that was there before, if it is known.
    """
    for mark in changeset.announcements(directory.parent):
        if mark.move[0] == directory.name:
            entry = exportcache.recognise(mark.move[1], params)
            if entry is not None:
                return entry
    before = Wish(wish.token) if wish.strip else Wish(None, strip=True)
    if before.token is None and not before.strip:
        return None
    entry = exportcache.recognise(directory.name, exportcache.retold(params, rules, before))
    return entry and exportcache.seeded(entry, rules, wish)


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


def _check_whole(directory: Path, models: Sequence[Path]) -> None:
    """An export whose directory gets another name has to be renamed as a whole."""
    given = {os.path.realpath(model) for model in models}
    for job in discovery.find([directory]):
        if os.path.realpath(job.model) not in given:
            raise ModelError(
                "would not be renamed, though it is of the same export",
                path=str(job.model),
                hint=f"give the whole of it: {directory}",
            )


def tidy(found: Sequence[Seed]) -> None:
    """Take away what killed runs have left of exports that have their new names already."""
    for seed in found:
        parent = seed.directory.parent
        for mark in changeset.announcements(parent):
            old, new = (parent / name for name in mark.move)
            if seed.directory == new and not os.path.lexists(old):
                with suppress(WriteError), locks.held([old, new]):
                    changeset.take_back({old: new})


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
    results = {seed.target for seed in found if seed.moves}
    return tuple(
        _told(seed, seed.directory if in_place or not seed.moves else seed.target)
        for seed in found
        if seed.directory not in results
    )


def _told(seed: Seed, directory: Path) -> Companion:
    def follow(data: bytes, models: Sequence[ModelReport]) -> Followed:
        if seed.finding is not None or seed.entry is None:
            return Followed(data, 0, (seed.finding,) if seed.finding is not None else ())
        before = read(seed.directory)
        if before == seed.entry.params:
            return Followed(data, 0)
        names = seed.entry.params["export_params"]["output_names"]
        old = before["export_params"]["output_names"]
        changed = sum(one != other for one, other in zip(old, names, strict=False))
        return Followed(exportcache.text_of(seed.entry.params).encode("utf-8"), changed)

    return Companion(seed.directory / PARAMS_FILE, directory / PARAMS_FILE, follow)


def moves(found: Sequence[Seed]) -> dict[Path, Path]:
    """What directories are to be called of exports that are renamed in place."""
    return {seed.directory: seed.target for seed in found if seed.moves}


def moved(report: Report, moves: Mapping[Path, Path], *, done: bool) -> Report:
    """The report with the names that directories have in the end, ``done`` or not.

    A text is told of as changed where its directory alone gets another name.
    """
    texts = []
    for text in report.texts:
        there = _moved(text, moves)
        if there.output != text.output and text.status == "unchanged":
            there = there._replace(status="renamed" if done else "would-rename")
        texts.append(there)
    models = []
    for model in report.models:
        told = _moved(model, moves)
        call = model.feed_back and model.feed_back.replace(model.output, told.output)
        models.append(told._replace(feed_back=call))
    return Report(tuple(models), tuple(texts))


_Report = TypeVar("_Report", ModelReport, TextReport)


def _moved(item: _Report, moves: Mapping[Path, Path]) -> _Report:
    path = Path(os.path.abspath(item.output))
    there = drafts.moved(path, moves)
    return item if there == path else item._replace(output=str(there))
