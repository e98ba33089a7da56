"""Fold the summaries of the windows of one model into one."""

from __future__ import annotations

import posixpath
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from itertools import chain

from onnxkvrename.layout.inspect import ExternalFile, InspectedBuffer, ModelSummary
from onnxkvrename.model.statistics import ModelStats
from onnxkvrename.rules.profile import MERGED


def fold_windows(summaries: Iterable[ModelSummary]) -> tuple[ModelSummary, ...]:
    """Return the summaries with those of alike windows of a set as one, where the first was.

    Windows are alike if the same exporter made them and they have the same stamp; no two of them
    may have the same buffer. What is different from layer to layer is what the summary shows.
    Models that cannot be read, and those outside of sets, stay as they are.
    """
    sets: dict[Hashable, list[ModelSummary]] = {}
    for number, summary in enumerate(summaries):
        sets.setdefault(_find_set(summary) or number, []).append(summary)
    return tuple(
        folded
        for windows in sets.values()
        for folded in ([_fold(windows)] if _can_fold(windows) else windows)
    )


def _find_set(summary: ModelSummary) -> Hashable:
    """Return what alike windows of a set have in common; ``None`` for another model."""
    part = summary.part
    if part is None or part.name.stage == MERGED or summary.error is not None:
        return None
    return part.root, part.name.stage, part.name.model_name, summary.export, summary.stamp


def _can_fold(windows: Sequence[ModelSummary]) -> bool:
    buffers = [(item.buffer, item.layer) for window in windows for item in window.buffers]
    return len(windows) > 1 and len(set(buffers)) == len(buffers)


def _fold(windows: Sequence[ModelSummary]) -> ModelSummary:
    ordered = sorted(windows, key=_find_first_layer)
    tokens: Counter[str] = Counter()
    for window in ordered:
        tokens.update(dict(window.token_counts))
    kept = {(item.name, item.reason): item for window in ordered for item in window.kept}
    first = ordered[0]
    return ModelSummary(
        path="" if first.part is None else first.part.root,
        size=sum(window.size for window in ordered),
        export=first.export,
        weight=_add_stats([window.weight for window in ordered]),
        files=_list_files(ordered),
        buffers=_sort_buffers(chain.from_iterable(window.buffers for window in ordered)),
        token_counts=tuple(tokens.most_common()),
        name_count=sum(window.name_count for window in ordered),
        kept=tuple(kept.values()),
        findings=tuple(chain.from_iterable(window.findings for window in ordered)),
        stamp=first.stamp,
        part=first.part,
        windows=tuple(ordered),
    )


def _find_first_layer(window: ModelSummary) -> int:
    return 0 if window.part is None else window.part.name.first_layer


def _sort_buffers(buffers: Iterable[InspectedBuffer]) -> tuple[InspectedBuffer, ...]:
    return tuple(sorted(buffers, key=lambda item: item.layer))


def _add_stats(stats: Sequence[ModelStats]) -> ModelStats:
    names = dict.fromkeys(chain.from_iterable(item.function_names for item in stats))
    return ModelStats(
        sum(item.node_count for item in stats),
        tuple(names),
        sum(item.inline_tensor_count for item in stats),
        sum(item.inline_bytes for item in stats),
        sum(item.external_tensor_count for item in stats),
    )


def _list_files(windows: Iterable[ModelSummary]) -> tuple[ExternalFile, ...]:
    """Return the files of external data; windows in one directory may have the same ones."""
    files: dict[tuple[str, str], ExternalFile] = {}
    for window in windows:
        directory = posixpath.dirname(window.path.replace("\\", "/"))
        for file in window.files:
            files.setdefault((directory, file.location), file)
    return tuple(files.values())
