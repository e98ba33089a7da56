"""Compare exports of one model: values, buffers, and the traits that most of them share."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from onnxkvrename.model.signature import (
    ExportInfo,
    Value,
    format_shape,
    format_value_type,
    is_type_compatible,
)
from onnxkvrename.rules.layer_ranges import format_layers
from onnxkvrename.rules.plan import KvPair

Traits = Mapping[tuple[str, ...], frozenset[str]]
"""Properties that all parts of one export should share, with their values in one part."""


class BufferIndex(NamedTuple):
    """The buffers of some models.

    Attributes:
        paths: The paths of all the models.
        layers: The layers that have buffers, sorted.
        by_layer: For each layer the buffers by kind and name, each with its model's path.
    """

    paths: tuple[str, ...]
    layers: tuple[int, ...]
    by_layer: Mapping[int, Mapping[tuple[str, str], tuple[str, KvPair]]]


def most_common(values: Sequence[Value]) -> Value:
    """Return the first of the values whose type occurs most often, whatever its symbols are."""
    types = [
        (value.dtype, None if value.shape is None else _list_static_sizes(value))
        for value in values
    ]
    counts = Counter(types)
    return values[types.index(max(counts, key=lambda key: counts[key]))]


def _list_static_sizes(value: Value) -> tuple[int | None, ...]:
    return tuple(dim if isinstance(dim, int) else None for dim in value.shape or ())


def index_buffers(models: Iterable[tuple[str, Sequence[KvPair]]]) -> BufferIndex:
    """Index the buffers of models; if several have the same buffer, the first counts.

    Args:
        models: The path and the buffers of each model.
    """
    paths, by_layer = [], defaultdict[int, dict[tuple[str, str], tuple[str, KvPair]]](dict)
    for path, pairs in models:
        paths.append(path)
        for pair in pairs:
            by_layer[pair.layer].setdefault((pair.kind, pair.buffer), (path, pair))
    return BufferIndex(tuple(paths), tuple(sorted(by_layer)), dict(by_layer))


def describe_differences(
    described: BufferIndex, reference: BufferIndex, layers: range
) -> list[str]:
    """Describe how buffers of one model differ between files, for some layers.

    Scopes and tokens do not matter: they differ between the stages of an export.

    Args:
        described: The buffers that are described.
        reference: The buffers that they are compared with.
        layers: The layers to compare.

    Returns:
        Buffers that are missing, then buffers that only `described` has, then those with
        another type. All can follow "has".
    """
    missing, extra = (defaultdict[str, list[int]](list) for _ in range(2))
    missing_from, type_differences = "", list[str]()
    for layer in _slice_layers(layers, reference.layers):
        own = described.by_layer.get(layer, {})
        for key, (path, pair) in reference.by_layer[layer].items():
            if key in own:
                type_differences += _describe_type_differences(own[key][1], pair, path)
            else:
                missing_from = missing_from or path
                missing[key[1]].append(layer)
    for layer in _slice_layers(layers, described.layers):
        for key in described.by_layer[layer]:
            if key not in reference.by_layer.get(layer, {}):
                extra[key[1]].append(layer)
    compared = " to ".join(dict.fromkeys((reference.paths[0], reference.paths[-1])))
    return [
        *(
            f"no {buffer} of {format_layers(numbers)}, which {missing_from} has"
            for buffer, numbers in missing.items()
        ),
        *(
            f"{buffer} of {format_layers(numbers)}, which {compared} does not have"
            for buffer, numbers in extra.items()
        ),
        *type_differences,
    ]


def _slice_layers(layer_range: range, layers: Sequence[int]) -> Sequence[int]:
    return layers[bisect_left(layers, layer_range.start) : bisect_left(layers, layer_range.stop)]


def _describe_type_differences(own: KvPair, other: KvPair, path: str) -> Iterator[str]:
    for own_side, other_side in ((own.input, other.input), (own.output, other.output)):
        if (
            own_side is not None
            and other_side is not None
            and not is_type_compatible(own_side.value, other_side.value)
        ):
            own_type, other_type = map(format_value_type, (own_side.value, other_side.value))
            yield f"{own_side.old_name} as {own_type}, but {other_type} in {path}"


def collect_traits(
    export: ExportInfo, pairs: Iterable[KvPair], exclusive_kinds: Collection[str]
) -> Traits:
    """Collect the traits of one part that all parts of its export should share.

    Shapes are compared only where their symbols are the same: layers with a sliding
    window may have a different number of heads.

    Args:
        export: Who exported the model, and for which operator sets.
        pairs: Its buffers.
        exclusive_kinds: Kinds of buffers that no model mixes.
    """
    traits, kinds = defaultdict[tuple[str, ...], set[str]](set), set()
    producer = f"{export.producer} {export.producer_version}".strip()
    traits["IR version",].add(str(export.ir_version))
    traits["producer",].add(producer or "unknown")
    for domain, version in export.opsets:
        traits["opset " + (domain or "ai.onnx"),].add(str(version))
    for pair in pairs:
        shape = pair.sides[0].value.shape
        if pair.kind in exclusive_kinds:
            kinds.add(pair.kind)
        if shape is not None:
            key = pair.buffer, *("" if isinstance(dim, int) else str(dim) for dim in shape)
            traits[key].add(format_shape(shape))
    if kinds:
        traits["buffers of kind",].add(" and ".join(sorted(kinds)))
    return {key: frozenset(values) for key, values in traits.items()}


def find_outliers(models: Sequence[tuple[str, Traits]]) -> Iterator[tuple[int, list[str]]]:
    """Yield the models that differ from most others, by index, with their differences.

    In a tie the first counts as right. A trait with two values within one model varies by
    layer, so it is not compared.

    Args:
        models: The path and the traits of each model.
    """
    counts = defaultdict[tuple[str, ...], Counter[frozenset[str]]](Counter)
    examples: dict[tuple[tuple[str, ...], frozenset[str]], str] = {}
    for path, traits in models:
        for key, values in traits.items():
            counts[key][values] += 1
            examples.setdefault((key, values), path)
    usual = {
        key: max(values_counts, key=lambda values: values_counts[values])
        for key, values_counts in counts.items()
        if all(len(values) == 1 for values in values_counts)
    }
    for index, (_, traits) in enumerate(models):
        differences = [
            f"{key[0]} {''.join(values)} ({''.join(usual[key])} in {examples[key, usual[key]]})"
            for key, values in traits.items()
            if key in usual and values != usual[key]
        ]
        if differences:
            yield index, differences
