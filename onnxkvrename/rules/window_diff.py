"""Exports held against each other: values, buffers, and what most of them have in common."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from onnxkvrename.findings import listed
from onnxkvrename.model.signature import Export, Value, same, shape_text, type_text
from onnxkvrename.rules.plan import Pair

Traits = Mapping[tuple[str, ...], frozenset[str]]
"""What all parts of one export share: the values of each, in one of them."""


class Buffers(NamedTuple):
    """The buffers of some models, by layer, then by kind and name, with the model's path.

    ``layers`` are sorted; ``paths`` are those of all the models.
    """

    paths: tuple[str, ...]
    layers: tuple[int, ...]
    found: Mapping[int, Mapping[tuple[str, str], tuple[str, Pair]]]


def usual(values: Sequence[Value]) -> Value:
    """One of those of which there are most, the first of them; symbols do not count."""
    forms = [(value.dtype, None if value.shape is None else _sizes(value)) for value in values]
    counts = Counter(forms)
    return values[forms.index(max(counts, key=lambda form: counts[form]))]


def _sizes(value: Value) -> tuple[int | None, ...]:
    return tuple(dim if isinstance(dim, int) else None for dim in value.shape or ())


def layers_text(layers: Iterable[int]) -> str:
    """Sorted layers in few words: ``layer 3``, ``layers 0-2, 5``."""
    return spans_text(runs(layers))


def runs(layers: Iterable[int]) -> tuple[range, ...]:
    """Sorted layers as runs without a gap."""
    ends: list[list[int]] = []
    for layer in layers:
        if ends and ends[-1][1] == layer - 1:
            ends[-1][1] = layer
        else:
            ends.append([layer, layer])
    return tuple(range(first, last + 1) for first, last in ends)


def run_text(run: range) -> str:
    """``3``, or ``0-2``."""
    return str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}"


def runs_text(layers: Iterable[int]) -> str:
    """Sorted layers, all of them: ``0-2, 5``."""
    return ", ".join(map(run_text, runs(layers)))


def spans_text(spans: Sequence[range]) -> str:
    """Runs of layers in few words, however long they are."""
    texts = [run_text(span) for span in spans if span]
    if not texts:
        return "no layer"
    return (
        f"layer {texts[0]}" if texts[0].isdigit() and len(texts) == 1 else f"layers {listed(texts)}"
    )


def buffers(models: Iterable[tuple[str, Sequence[Pair]]]) -> Buffers:
    """The buffers of models given by their paths; of two that are one the first counts."""
    paths, found = [], defaultdict[int, dict[tuple[str, str], tuple[str, Pair]]](dict)
    for path, pairs in models:
        paths.append(path)
        for pair in pairs:
            found[pair.layer].setdefault((pair.kind, pair.buffer), (path, pair))
    return Buffers(tuple(paths), tuple(sorted(found)), dict(found))


def differences(mine: Buffers, theirs: Buffers, layers: range) -> list[str]:
    """What ``mine`` has otherwise than ``theirs``, which are of the same model, in some layers.

    Scopes and tokens do not matter: they differ between the stages of an export.
    """
    lacking, extra = (defaultdict[str, list[int]](list) for _ in range(2))
    where, unlike = "", list[str]()
    for layer in _within(layers, theirs.layers):
        own = mine.found.get(layer, {})
        for key, (path, pair) in theirs.found[layer].items():
            if key in own:
                unlike += _unlike(own[key][1], pair, path)
            else:
                where = where or path
                lacking[key[1]].append(layer)
    for layer in _within(layers, mine.layers):
        for key in mine.found[layer]:
            if key not in theirs.found.get(layer, {}):
                extra[key[1]].append(layer)
    around = " to ".join(dict.fromkeys((theirs.paths[0], theirs.paths[-1])))
    return [
        *(f"no {buffer} of {layers_text(at)}, unlike {where}" for buffer, at in lacking.items()),
        *(f"{buffer} of {layers_text(at)}, unlike {around}" for buffer, at in extra.items()),
        *unlike,
    ]


def _within(span: range, layers: Sequence[int]) -> Sequence[int]:
    return layers[bisect_left(layers, span.start) : bisect_left(layers, span.stop)]


def _unlike(own: Pair, other: Pair, path: str) -> Iterator[str]:
    for mine, theirs in ((own.input, other.input), (own.output, other.output)):
        if mine is not None and theirs is not None and not same(mine.value, theirs.value):
            yield f"{mine.old} as {type_text(mine.value)}, but {type_text(theirs.value)} in {path}"


def traits(export: Export, pairs: Iterable[Pair], apart: Collection[str]) -> Traits:
    """What all parts of one export share, by what it is; ``apart`` are kinds that no model mixes.

    Shapes are held against each other where their symbols are the same: layers
    with a sliding window may well have other heads than the rest.
    """
    found, kinds = defaultdict[tuple[str, ...], set[str]](set), set()
    found["IR version",].add(str(export.ir_version))
    found["producer",].add(f"{export.producer} {export.producer_version}".strip() or "unknown")
    for domain, version in export.opsets:
        found["opset " + (domain or "ai.onnx"),].add(str(version))
    for pair in pairs:
        shape = pair.ends[0].value.shape
        if pair.kind in apart:
            kinds.add(pair.kind)
        if shape is not None:
            key = pair.buffer, *("" if isinstance(dim, int) else str(dim) for dim in shape)
            found[key].add(shape_text(shape))
    if kinds:
        found["buffers of kind",].add(" and ".join(sorted(kinds)))
    return {key: frozenset(values) for key, values in found.items()}


def odd(models: Sequence[tuple[str, Traits]]) -> Iterator[tuple[int, list[str]]]:
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
