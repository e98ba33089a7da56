"""Group the models of a run into sets that change together: all models of a set, or none."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from itertools import takewhile
from pathlib import Path

from onnxkvrename.errors import ModelError
from onnxkvrename.rules.kv_model import KvModel
from onnxkvrename.rules.profile import MERGED, PartPath, Rules
from onnxkvrename.storage.read import is_directory, is_occupied, resolve_path


def group_models(
    paths: Sequence[Path],
    models: Sequence[KvModel | None],
    rules: Rules,
    linked: Iterable[Sequence[int]] = (),
) -> tuple[tuple[int, ...], ...]:
    """Return the sets of models, by their indexes; a model that needs no other is one alone.

    Models belong together if they are windows of one model or merged from them, if one fills
    buffers of the other, if they lie in one folder and have only one side of buffers, or if
    they share external data. What cannot be read belongs to all models that it may belong to.

    Args:
        paths: The models of a run, and paths that lead to none.
        models: What was read of them; ``None`` for one that cannot be read.
        rules: The rules that recognize the parts of sets.
        linked: Further models that belong together, such as those that one sidecar refers to.

    Raises:
        ModelError: It cannot be determined where a data file leads.
    """
    leaders = list(range(len(paths)))

    def find_leader(index: int) -> int:
        while leaders[index] != index:
            leaders[index] = index = leaders[leaders[index]]
        return index

    for indexes in (
        *linked,
        *_link_parts(paths, rules),
        *_link_feeds(paths, models),
        *_link_lone_sides(paths, models),
        *_link_data(models),
        *_link_unread(paths, models, rules),
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
            by_set[_find_place(part[0] or "."), part[1].model_name].append(index)
    yield from by_set.values()
    sets = sorted(by_set)
    for root, name in sets:
        for other_root, other_name in sets:
            is_below = other_root == root or other_root.startswith(root.rstrip(os.sep) + os.sep)
            if is_below and (name == other_name or "" in (name, other_name)):
                yield [by_set[root, name][0], by_set[other_root, other_name][0]]


def _link_feeds(paths: Sequence[Path], models: Sequence[KvModel | None]) -> Iterator[list[int]]:
    """Yield each model that fills buffers of others, or is filled, with the nearest of those.

    A model that cannot be read may be any of those.
    """
    fills: defaultdict[tuple[str, int], set[int]] = defaultdict(set)
    takes: defaultdict[tuple[str, int], set[int]] = defaultdict(set)
    unread = frozenset(index for index, model in enumerate(models) if model is None)
    for index, model in enumerate(models):
        if model is not None:
            for key in _list_fills(model):
                fills[key].add(index)
            for pair in model.pairs:
                if pair.input is not None:
                    takes[pair.buffer, pair.layer].add(index)
    for index, model in enumerate(models):
        if model is None:
            continue
        feeds = [(feed.buffer, feed.layer) for feed in model.plan.feeds]
        # A lone output need not have a taker; where it has one, that is filled by it.
        searches = {
            *((frozenset(fills.get(key, ())), True) for key in _list_needs(model)),
            *((frozenset(takes.get(key, ())), True) for key in feeds),
            *((frozenset(takes.get(key, ())), False) for key in _list_fills(model)),
        }
        for others, takes_all in searches:
            nearest = _find_nearest(paths, index, (others | unread) - {index})
            if linked := nearest if takes_all else nearest & unread:
                yield [index, *linked]


def _list_fills(model: KvModel) -> list[tuple[str, int]]:
    """Return the buffers that a model writes for another one: it has no input for them."""
    return [
        *((feed.buffer, feed.layer) for feed in model.plan.feeds),
        *((pair.buffer, pair.layer) for pair in model.pairs if pair.input is None),
    ]


def _list_needs(model: KvModel) -> list[tuple[str, int]]:
    """Return the buffers of a model that only another one writes."""
    return [
        (pair.buffer, pair.layer)
        for pair in model.pairs
        if pair.input is not None and (pair.output is None or pair.input.old_name in model.needs)
    ]


def _find_nearest(paths: Sequence[Path], index: int, others: Set[int]) -> Set[int]:
    """Return those of some models that share most directories with the one at an index."""
    own = Path(os.path.abspath(paths[index])).parts
    depths = {}
    for other in others:
        parts = zip(own, Path(os.path.abspath(paths[other])).parts, strict=False)
        depths[other] = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], parts))
    return {other for other, depth in depths.items() if depth == max(depths.values())}


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


def _find_place(path: str | Path) -> str:
    """Return the path without links; where links lead in a circle, as it is written."""
    try:
        return resolve_path(path)
    except ModelError:
        return os.path.abspath(path)


def _is_surely(query: Callable[[Path], bool], path: Path) -> bool:
    """Return what a query says of a path; false if it cannot be determined."""
    try:
        return query(path)
    except ModelError:
        return False


def _is_merged(part: PartPath | None) -> bool:
    return part is not None and part.name.stage == MERGED


def _link_unread(
    paths: Sequence[Path], models: Sequence[KvModel | None], rules: Rules
) -> Iterator[list[int]]:
    """Yield each path of which nothing was read with all models that it may belong to.

    The name of a window says which these are. All else may belong to the models of its folder.
    A missing path, or a directory, may have been a window of any name.
    """
    if all(model is not None for model in models):
        return
    folders = [Path(_find_place(path.parent)) for path in paths]
    parts = [rules.set_rule.parse_path(path.as_posix()) for path in paths]
    roots = [None if part is None else Path(_find_place(part[0] or ".")) for part in parts]
    for index, path in enumerate(paths):
        is_folder = _is_surely(is_directory, path)
        is_known = _is_surely(is_occupied, path) and not is_folder
        if models[index] is not None or (is_known and parts[index] is not None):
            continue
        places = set() if is_folder else {folders[index]}
        below = None
        if is_folder or not (is_known or path.suffix == ".onnx"):
            below = Path(_find_place(path))
            places.add(below)
        windows = set() if is_known else places | {place.parent for place in places}
        above = set() if below is None else set(below.parents)
        yield [
            index,
            *(
                other
                for other, folder in enumerate(folders)
                if folder in places
                or below in folder.parents
                or roots[other] in windows
                # A merged file may lie anywhere above the windows that it is made of.
                or (roots[other] in above and _is_merged(parts[other]))
            ),
        ]
