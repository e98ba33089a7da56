"""Find outputs that look like later states of inputs, though no dataflow proves it.

A state that each step replaces, such as the last token of a token shift, is carried on by nothing
in the graph; and an operator that is not known may carry anything on. Names tell such a state:
they differ as those of the states that are proved, or one of them contains the other. Names alone
do not count: dtypes and declared shapes must be the same, as nothing that is laid out like tokens
has them, or those of a state that is proved.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from itertools import takewhile

from onnxkvrename.limits import MAX_ENTRIES
from onnxkvrename.model.signature import (
    UNDECLARED,
    Dim,
    Signature,
    Value,
    is_dtype_compatible,
)
from onnxkvrename.text import format_list
from onnxkvrename.verification.dataflow import PROVED_VERDICTS, BufferFlow, trace_buffer_flows
from onnxkvrename.verification.graph_bodies import ModelGraph
from onnxkvrename.verification.pairs.find_pairs import build_pair, may_be_state
from onnxkvrename.verification.pairs.hidden_states import LoneState, StatePair
from onnxkvrename.verification.provenance import Origin
from onnxkvrename.verification.tracing import trace_dependencies, trace_origins
from onnxkvrename.verification.unfollowed import has_packed_dtype, list_token_dims

_Types = tuple[str, tuple[Dim, ...] | None, tuple[Dim, ...] | None]
_LETTERS_AND_NUMBER = re.compile("(?=.*[0-9])(?=.*[A-Za-z]{2})")
_WORD = re.compile("[a-z]+|[0-9]+")


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


def find_stopped_states(graph: ModelGraph, signature: Signature) -> tuple[LoneState, ...]:
    """Return the outputs into which an input may be carried in a way that is not followed.

    That is for a model without pairs. Both have the same size, except for one axis. Each output
    comes with the input whose name is most like its own, and which no other output comes with; if
    some names share words, only those count.
    """
    weights = graph.main.constants
    inputs = [v for v in signature.inputs if may_be_carried(v) and v.name not in weights]
    tokens = set(list_token_dims(v for v in signature.inputs if v.name not in weights))
    inputs = [v for v in inputs if not _has_row_for_each_token(v, tokens)]
    names = {value.name for value in inputs}
    outputs = [v for v in signature.outputs if may_be_carried(v) and v.name not in names]
    if len(inputs) * len(outputs) > MAX_ENTRIES:
        return ()
    outputs = [v for v in outputs if any(_differ_in_one_axis(source, v) for source in inputs)]
    if not outputs:
        return ()
    sources, traced = [v.name for v in inputs], [v.name for v in outputs]
    origins = trace_origins(graph, sources, traced)
    reached = trace_dependencies(graph, sources, traced)
    stopped = [
        (_count_shared_words(source.name, output.name), source.dtype == output.dtype, state)
        for output, origin, bits in zip(outputs, origins, reached, strict=True)
        for number, source in enumerate(inputs)
        if bits >> number & 1 and _differ_in_one_axis(source, output)
        for state in _list_stops(number, output, origin, inputs)
    ]
    is_named = any(shared for shared, _, _ in stopped)
    used: set[str] = set()
    found: dict[str, LoneState] = {}
    for shared, _, state in sorted(stopped, key=lambda each: each[:2], reverse=True):
        if state.input not in used and state.output not in found and (shared or not is_named):
            used.add(state.input)
            found[state.output] = state
    return tuple(found[name] for name in traced if name in found)


def may_be_carried(value: Value) -> bool:
    """Return whether an input or output may be a state, or hold states in another form."""
    if has_packed_dtype(value):
        return value.shape is None or len(value.shape) > 2  # ids and positions have two axes
    return may_be_state(value.dtype) or value.dtype == UNDECLARED


def _list_stops(
    number: int, output: Value, origin: Origin, inputs: Sequence[Value]
) -> Iterator[LoneState]:
    """Yield an input and an output that depends on it, with the reason why nothing proves more.

    Nothing if only operators that mix values lead from the one to the other.
    """
    source = inputs[number]
    packed = [value.dtype for value in (source, output) if has_packed_dtype(value)]
    uncertain = [paths[number, False] for paths in origin if (number, False) in paths]
    moved = [paths[number, True] for paths in origin if (number, True) in paths]
    others = {n for paths in origin for n, is_certain in paths if is_certain and n != number}
    reason = ""
    if packed and (uncertain or moved or has_packed_dtype(output)):
        reason = f"{packed[0]} is not followed"
    elif uncertain:
        reason = uncertain[0].uncertainty
    elif moved and all(path.cost == (0, 0) for path in moved):
        if others:
            maker = next((path.updated_by.op_type for path in moved if path.updated_by), "a branch")
            names = format_list([inputs[n].name for n in sorted(others)])
            reason = (
                f"{maker} joins {source.name} and {names}, and {output.name} may be a later state "
                f"of {'either' if len(others) == 1 else 'any'}"
            )
        elif not is_dtype_compatible(source, output):
            reason = f"{source.dtype} is made {output.dtype} on the way"
    if reason:
        yield LoneState(source.name, output.name, reason)


def _has_row_for_each_token(value: Value, tokens: Container[Dim]) -> bool:
    """Return whether an input is laid out as embeddings and hidden states are."""
    shape = value.shape or ()
    return len(shape) == 3 and isinstance(shape[1], str) and shape[1] in tokens


def _differ_in_one_axis(source: Value, output: Value) -> bool:
    """Return whether two values have the same size as far as they say, except for one axis."""
    if source.shape is None or output.shape is None:
        return True
    if len(source.shape) != len(output.shape):
        return False
    return sum(one != other for one, other in zip(source.shape, output.shape, strict=True)) <= 1


def _count_shared_words(first: str, second: str) -> int:
    """Return how many words and numbers two names share."""
    words = (set(_WORD.findall(name.lower())) for name in (first, second))
    return len(set.intersection(*words))


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
