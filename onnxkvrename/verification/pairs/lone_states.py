"""Find outputs that look like later states of inputs, though no dataflow proves it.

A state that each step replaces, such as the last token of a token shift, is carried on by nothing
in the graph; and an operator that is not known may carry anything on. Names tell such a state:
they differ as those of the states that are proved, or one of them contains the other. Names alone
do not count: dtypes and declared shapes must be the same, as nothing that is laid out like tokens
has them, or those of a state that is proved.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Container, Iterable, Sequence
from itertools import takewhile

from onnxkvrename.findings import format_list
from onnxkvrename.limits import MAX_ENTRIES
from onnxkvrename.model.signature import (
    UNDECLARED,
    Dim,
    Signature,
    Value,
    is_dtype_compatible,
)
from onnxkvrename.verification.dataflow import PROVED_VERDICTS, BufferFlow, trace_buffer_flows
from onnxkvrename.verification.graph_bodies import ModelGraph
from onnxkvrename.verification.pairs.find_pairs import build_pair, may_be_state
from onnxkvrename.verification.pairs.hidden_states import LoneState, StatePair
from onnxkvrename.verification.tracing import trace_dependencies

_Types = tuple[str, tuple[Dim, ...] | None, tuple[Dim, ...] | None]
_LETTERS_AND_NUMBER = re.compile("(?=.*[0-9])(?=.*[A-Za-z]{2})")


def find_lone_states(
    graph: ModelGraph, pairs: Sequence[StatePair], signature: Signature
) -> tuple[LoneState, ...]:
    """Return the outputs that look like states of the same kind as those of some pairs."""
    paired = {name for pair in pairs for name in (pair.input.name, pair.output.name)}
    inputs = [
        value
        for value in signature.inputs
        if value.name not in paired and may_be_state(value.dtype)
    ]
    outputs = [
        value
        for value in signature.outputs
        if value.name not in paired and (may_be_state(value.dtype) or value.dtype == UNDECLARED)
    ]
    if not pairs or len(inputs) * len(outputs) > MAX_ENTRIES:
        return ()
    changes = {_find_change(pair.input.name, pair.output.name) for pair in pairs}
    types = {_get_types(pair.input, pair.output) for pair in pairs}
    symbols = {dim for pair in pairs for dim in pair.input.shape or () if isinstance(dim, str)}
    found = {}
    for source in inputs:
        alike = [each for each in outputs if _are_alike(source, each, types, symbols)]
        named = [each for each in alike if _are_related(source.name, each.name, changes)]
        if len(named) == 1:
            found[source.name] = build_pair(source, named[0])
    if not found:
        return ()
    lone_outputs = {pair.sides[1].old_name for pair in found.values()}
    other_outputs = [value.name for value in signature.outputs if value.name not in lone_outputs]
    read = 0
    for bits in trace_dependencies(graph, [*found], other_outputs):
        read |= bits
    lone = [pair for number, pair in enumerate(found.values()) if read >> number & 1]
    proved = [build_pair(pair.input) for pair in pairs]  # which a lone one may come from
    return tuple(map(_explain, trace_buffer_flows(graph, [*lone, *proved])))


def _are_alike(
    source: Value, output: Value, types: Container[_Types], symbols: Container[Dim]
) -> bool:
    """Return whether two values have the types of a pair, or one size with none but its symbols."""
    if source.name == output.name or not source.shape or not is_dtype_compatible(source, output):
        return False
    return _get_types(source, output) in types or (
        source.shape == output.shape
        and all(isinstance(dim, int) or dim in symbols for dim in source.shape)
    )


def _get_types(source: Value, output: Value) -> _Types:
    return source.dtype, source.shape, output.shape


def _explain(flow: BufferFlow) -> LoneState:
    """Return a state with the reason why its flow does not prove it."""
    source, output = (side.old_name for side in flow.pair.sides)
    reason = flow.reason
    if flow.verdict in PROVED_VERDICTS:
        reason = "what is carried into it may be a hidden state"
    elif flow.other_inputs:
        reason = f"it is computed from {format_list(list(flow.other_inputs))}"
    return LoneState(source, output, reason or "no node carries its values on")


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
