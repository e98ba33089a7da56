"""Group the models of a run into sets that change together: all models of a set, or none."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path

from onnxkvrename.rules.kv_model import KvModel
from onnxkvrename.rules.profile import Rules
from onnxkvrename.storage.read import resolve_path


def group_models(
    paths: Sequence[Path],
    models: Sequence[KvModel | None],
    rules: Rules,
    linked: Iterable[Sequence[int]] = (),
) -> tuple[tuple[int, ...], ...]:
    """Return the sets of models, by their indexes; a model that needs no other is one alone.

    Models belong together if they are windows of one model or merged from them, if one fills
    buffers of the other, if they lie in one folder and have only one side of buffers, or if
    they share external data.

    Args:
        paths: The models of a run.
        models: What was read of them; ``None`` for one that cannot be read.
        rules: The rules that tell the parts of sets.
        linked: Further models that belong together, such as those that one sidecar refers to.

    Raises:
        ModelError: It cannot be determined where a path leads.
    """
    leaders = list(range(len(paths)))

    def find_leader(index: int) -> int:
        while leaders[index] != index:
            leaders[index] = index = leaders[leaders[index]]
        return index

    for indexes in (
        *linked,
        *_link_parts(paths, rules),
        *_link_feeds(models),
        *_link_lone_sides(paths, models),
        *_link_data(models),
    ):
        for index in indexes[1:]:
            first, second = sorted((find_leader(indexes[0]), find_leader(index)))
            leaders[second] = first
    groups: defaultdict[int, list[int]] = defaultdict(list)
    for index in range(len(paths)):
        groups[find_leader(index)].append(index)
    return tuple(map(tuple, groups.values()))


def _link_parts(paths: Sequence[Path], rules: Rules) -> Iterator[list[int]]:
    """Yield the parts of each model; what is merged may lie above the windows it is made of."""
    by_set: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for index, path in enumerate(paths):
        part = rules.set_rule.parse_path(path.as_posix())
        if part is not None:
            by_set[resolve_path(part[0] or "."), part[1].model_name].append(index)
    yield from by_set.values()
    sets = sorted(by_set)
    for root, name in sets:
        for other_root, other_name in sets:
            is_below = other_root == root or other_root.startswith(root.rstrip(os.sep) + os.sep)
            if is_below and (name == other_name or "" in (name, other_name)):
                yield [by_set[root, name][0], by_set[other_root, other_name][0]]


def _link_feeds(models: Sequence[KvModel | None]) -> Iterator[list[int]]:
    """Yield each model that fills buffers of others, or is filled, with the nearest of those."""
    fills: defaultdict[tuple[str, int], set[int]] = defaultdict(set)
    takes: defaultdict[tuple[str, int], set[int]] = defaultdict(set)
    for index, model in enumerate(models):
        for feed in model.plan.feeds if model is not None else ():
            fills[feed.buffer, feed.layer].add(index)
    for index, model in enumerate(models):
        for pair in model.pairs if model is not None else ():
            if pair.input is not None and (key := (pair.buffer, pair.layer)) in fills:
                takes[key].add(index)
    for index, model in enumerate(models):
        if model is None:
            continue
        needs = {pair.input.old_name: pair for pair in model.pairs if pair.input is not None}
        keys = [(needs[name].buffer, needs[name].layer) for name in model.needs]
        others = {other for key in keys for other in fills.get(key, ())}
        others |= {
            other for feed in model.plan.feeds for other in takes.get((feed.buffer, feed.layer), ())
        }
        if others := others - {index}:
            depths = {other: _count_common_parts(models, index, other) for other in others}
            nearest = max(depths.values())
            yield [index, *(other for other, depth in depths.items() if depth == nearest)]


def _count_common_parts(models: Sequence[KvModel | None], index: int, other: int) -> int:
    """Return how many directories two models share."""
    sides = (models[index], models[other])
    parts = [Path(os.path.abspath(model.path)).parts for model in sides if model is not None]
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(*parts, strict=False)))


def _link_lone_sides(
    paths: Sequence[Path], models: Sequence[KvModel | None]
) -> Iterator[list[int]]:
    """Yield the models of each folder where one has only one side of its buffers.

    Such a model writes or reads what another one of the folder keeps.
    """
    by_folder: defaultdict[Path, list[int]] = defaultdict(list)
    for index, path in enumerate(paths):
        by_folder[path.parent].append(index)
    for indexes in by_folder.values():
        read = [model for model in (models[index] for index in indexes) if model is not None]
        if any(len(pair.sides) == 1 for model in read for pair in model.pairs):
            yield indexes


def _link_data(models: Sequence[KvModel | None]) -> Iterator[list[int]]:
    by_file: defaultdict[str, list[int]] = defaultdict(list)
    for index, model in enumerate(models):
        for file in model.data_files if model is not None else ():
            by_file[resolve_path(file.path)].append(index)
    yield from by_file.values()
