"""Exports held against each other: values, buffers, and what most of them have in common."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from onnxkvrename.findings import format_list
from onnxkvrename.model.signature import (
    ExportInfo,
    Value,
    format_shape,
    format_value_type,
    is_type_compatible,
)
from onnxkvrename.rules.plan import KvPair

Traits = Mapping[tuple[str, ...], frozenset[str]]
"""What all parts of one export share: the values of each, in one of them."""


class BufferIndex(NamedTuple):
    """The buffers of some models, by layer, then by kind and name, with the model's path.

    ``layers`` are sorted; ``paths`` are those of all the models.
    """

    paths: tuple[str, ...]
    layers: tuple[int, ...]
    by_layer: Mapping[int, Mapping[tuple[str, str], tuple[str, KvPair]]]


def most_common(values: Sequence[Value]) -> Value:
    """One of those of which there are most, the first of them; symbols do not count."""
    forms = [
        (value.dtype, None if value.shape is None else _list_static_sizes(value))
        for value in values
    ]
    counts = Counter(forms)
    return values[forms.index(max(counts, key=lambda form: counts[form]))]


def _list_static_sizes(value: Value) -> tuple[int | None, ...]:
    return tuple(dim if isinstance(dim, int) else None for dim in value.shape or ())


def format_layers(layers: Iterable[int]) -> str:
    """Sorted layers in few words: ``layer 3``, ``layers 0-2, 5``."""
    return format_layer_runs(group_layer_runs(layers))


def group_layer_runs(layers: Iterable[int]) -> tuple[range, ...]:
    """Sorted layers as runs without a gap."""
    ends: list[list[int]] = []
    for layer in layers:
        if ends and ends[-1][1] == layer - 1:
            ends[-1][1] = layer
        else:
            ends.append([layer, layer])
    return tuple(range(first, last + 1) for first, last in ends)


def format_layer_run(run: range) -> str:
    """``3``, or ``0-2``."""
    return str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}"


def format_layer_numbers(layers: Iterable[int]) -> str:
    """Sorted layers, all of them: ``0-2, 5``."""
    return ", ".join(map(format_layer_run, group_layer_runs(layers)))


def format_layer_runs(spans: Sequence[range]) -> str:
    """Runs of layers in few words, however long they are."""
    texts = [format_layer_run(span) for span in spans if span]
    if not texts:
        return "no layer"
    return (
        f"layer {texts[0]}"
        if texts[0].isdigit() and len(texts) == 1
        else f"layers {format_list(texts)}"
    )


def index_buffers(models: Iterable[tuple[str, Sequence[KvPair]]]) -> BufferIndex:
    """The buffers of models given by their paths; of two that are one the first counts."""
    paths, found = [], defaultdict[int, dict[tuple[str, str], tuple[str, KvPair]]](dict)
    for path, pairs in models:
        paths.append(path)
        for pair in pairs:
            found[pair.layer].setdefault((pair.kind, pair.buffer), (path, pair))
    return BufferIndex(tuple(paths), tuple(sorted(found)), dict(found))


def describe_differences(mine: BufferIndex, theirs: BufferIndex, layers: range) -> list[str]:
    """What ``mine`` has otherwise than ``theirs``, which are of the same model, in some layers.

    Scopes and tokens do not matter: they differ between the stages of an export.
    """
    lacking, extra = (defaultdict[str, list[int]](list) for _ in range(2))
    where, unlike = "", list[str]()
    for layer in _slice_layers(layers, theirs.layers):
        own = mine.by_layer.get(layer, {})
        for key, (path, pair) in theirs.by_layer[layer].items():
            if key in own:
                unlike += _describe_type_differences(own[key][1], pair, path)
            else:
                where = where or path
                lacking[key[1]].append(layer)
    for layer in _slice_layers(layers, mine.layers):
        for key in mine.by_layer[layer]:
            if key not in theirs.by_layer.get(layer, {}):
                extra[key[1]].append(layer)
    around = " to ".join(dict.fromkeys((theirs.paths[0], theirs.paths[-1])))
    return [
        *(f"no {buffer} of {format_layers(at)}, unlike {where}" for buffer, at in lacking.items()),
        *(f"{buffer} of {format_layers(at)}, unlike {around}" for buffer, at in extra.items()),
        *unlike,
    ]


def _slice_layers(span: range, layers: Sequence[int]) -> Sequence[int]:
    return layers[bisect_left(layers, span.start) : bisect_left(layers, span.stop)]


def _describe_type_differences(own: KvPair, other: KvPair, path: str) -> Iterator[str]:
    for mine, theirs in ((own.input, other.input), (own.output, other.output)):
        if (
            mine is not None
            and theirs is not None
            and not is_type_compatible(mine.value, theirs.value)
        ):
            yield f"{mine.old_name} as {format_value_type(mine.value)}, but {format_value_type(theirs.value)} in {path}"


def collect_traits(export: ExportInfo, pairs: Iterable[KvPair], apart: Collection[str]) -> Traits:
    """What all parts of one export share, by what it is; ``apart`` are kinds that no model mixes.

    Shapes are held against each other where their symbols are the same: layers
    with a sliding window may well have other heads than the rest.
    """
    found, kinds = defaultdict[tuple[str, ...], set[str]](set), set()
    found["IR version",].add(str(export.ir_version))
    found["producer",].add(f"{export.producer_name} {export.producer_version}".strip() or "unknown")
    for domain, version in export.opsets:
        found["opset " + (domain or "ai.onnx"),].add(str(version))
    for pair in pairs:
        shape = pair.sides[0].value.shape
        if pair.kind in apart:
            kinds.add(pair.kind)
        if shape is not None:
            key = pair.buffer, *("" if isinstance(dim, int) else str(dim) for dim in shape)
            found[key].add(format_shape(shape))
    if kinds:
        found["buffers of kind",].add(" and ".join(sorted(kinds)))
    return {key: frozenset(values) for key, values in found.items()}


def find_outliers(models: Sequence[tuple[str, Traits]]) -> Iterator[tuple[int, list[str]]]:
    """The models, by index, that differ from most, and in what; of a tie the first is right.

    What takes two values within one model varies by layer, and tells nothing.
    """
    counts = defaultdict[tuple[str, ...], Counter[frozenset[str]]](Counter)
    shown: dict[tuple[tuple[str, ...], frozenset[str]], str] = {}
    for path, own in models:
        for key, values in own.items():
            counts[key][values] += 1
            shown.setdefault((key, values), path)
    most = {
        key: max(found, key=lambda values: found[values])
        for key, found in counts.items()
        if all(len(values) == 1 for values in found)
    }
    for index, (_, own) in enumerate(models):
        differing = [
            f"{key[0]} {''.join(values)} ({''.join(most[key])} in {shown[key, most[key]]})"
            for key, values in own.items()
            if key in most and values != most[key]
        ]
        if differing:
            yield index, differing
