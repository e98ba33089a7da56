"""Find outputs that look like later states of inputs, though no dataflow proves it.

A state that each step replaces, such as the last token of a token shift, is carried on by nothing
in the graph. Its names tell it: they differ as those of the states that are proved, or one of
them contains the other. Names alone do not count: dtype and declared shape must be the same, as
nothing that is laid out like tokens has them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from itertools import takewhile

from onnxkvrename.limits import MAX_ENTRIES
from onnxkvrename.model.signature import Signature, Value
from onnxkvrename.verification.graph_bodies import ModelGraph
from onnxkvrename.verification.pairs.find_pairs import may_be_state
from onnxkvrename.verification.pairs.hidden_states import StatePair
from onnxkvrename.verification.tracing import trace_dependencies

_LETTERS_AND_NUMBER = re.compile("(?=.*[0-9])(?=.*[A-Za-z]{2})")


def find_lone_states(
    graph: ModelGraph, pairs: Sequence[StatePair], signature: Signature
) -> tuple[str, ...]:
    """Return the outputs that look like states of the same kind as those of some pairs."""
    paired = {name for pair in pairs for name in (pair.input.name, pair.output.name)}
    symbols = {dim for pair in pairs for dim in pair.input.shape or () if isinstance(dim, str)}
    inputs, outputs = (
        [value for value in values if value.name not in paired and _has_fixed_size(value, symbols)]
        for values in (signature.inputs, signature.outputs)
    )
    if not pairs or len(inputs) * len(outputs) > MAX_ENTRIES:
        return ()
    changes = {_find_change(pair.input.name, pair.output.name) for pair in pairs}
    found = {}
    for source in inputs:
        alike = [each for each in outputs if _is_same_type(source, each)]
        named = [each for each in alike if _are_related(source.name, each.name, changes)]
        if len(named) == 1:
            found[source.name] = named[0].name
    if not found:
        return ()
    other_outputs = [value.name for value in signature.outputs if value.name not in found.values()]
    read = 0
    for bits in trace_dependencies(graph, [*found], other_outputs):
        read |= bits
    return tuple(output for number, output in enumerate(found.values()) if read >> number & 1)


def _has_fixed_size(value: Value, symbols: Collection[str]) -> bool:
    """Return whether a value has the shape of a state: no symbol but those of the states."""
    shape = value.shape
    if not shape or not may_be_state(value.dtype):
        return False
    return all(isinstance(dim, int) or dim in symbols for dim in shape)


def _is_same_type(source: Value, output: Value) -> bool:
    return source.name != output.name and (source.dtype, source.shape) == (
        output.dtype,
        output.shape,
    )


def _are_related(source: str, output: str, changes: Collection[tuple[str, str]]) -> bool:
    """Return whether the names of an input and an output are those of one state."""
    if re.search(rf"(?<![0-9A-Za-z]){re.escape(source)}(?![0-9a-z])", output):
        return True
    change = _find_change(source, output)
    kept = len(source) - len(change[0])
    if kept and change in changes:
        return True
    tail = _find_common_start(source[::-1], output[::-1])[::-1]
    return _LETTERS_AND_NUMBER.match(re.sub("^[0-9A-Za-z]*", "", tail)) is not None


def _find_change(source: str, output: str) -> tuple[str, str]:
    """Return what has changed between two names, without what they begin and end with."""
    start = len(_find_common_start(source, output))
    end = len(_find_common_start(source[start:][::-1], output[start:][::-1]))
    return source[start : len(source) - end], output[start : len(output) - end]


def _find_common_start(first: Iterable[str], second: Iterable[str]) -> str:
    return "".join(
        one
        for one, _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    )
