"""Find the states of a model by dataflow: which output is a later state of which input.

No name and no rule counts. An input is a state if it is a float, or eight bits or fewer as a
quantized cache is, and one output alone

- is a later state of it, as :mod:`dataflow` defines that, on every branch that carries anything;
- or holds the new positions that the graph itself joins to it (`delta`);
- or holds, in the branch of an If that has no cache yet, the value that the other branch reads
  from this input in the very same place (`once`).

An input with which the model computes needs more (:mod:`hidden_states`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from onnxkvrename.layout.updates import BufferUpdate, DimChange, build_delta, compare_dims
from onnxkvrename.limits import MAX_BUFFERS, build_limit_error
from onnxkvrename.model.signature import UNDECLARED, Signature, Value, is_dtype_compatible
from onnxkvrename.rules.plan import KvPair, PairSide
from onnxkvrename.verification.dataflow import PROVED_VERDICTS, decide_flow
from onnxkvrename.verification.graph_bodies import ModelGraph
from onnxkvrename.verification.operators import SizeChange
from onnxkvrename.verification.pairs.hidden_states import (
    LoneState,
    StatePair,
    drop_hidden_states,
    drop_unread_values,
)
from onnxkvrename.verification.pairs.value_uses import (
    find_branch_states,
    find_gated_inputs,
    find_joined_outputs,
)
from onnxkvrename.verification.provenance import FlowPath, Origin, select_cheapest_paths
from onnxkvrename.verification.tracing import OriginTransfer, trace
from onnxkvrename.verification.unfollowed import StateClaim, find_unfollowed_inputs

_RANK_WITH_HEADS = 4
"""The axes of a cache that has one for its heads, which logits have not."""
_QUANTIZED_DTYPES = frozenset({"UINT8", "INT8", "UINT4", "INT4", "UINT2", "INT2"})


class FoundStates(NamedTuple):
    """The states of a model.

    Attributes:
        pairs: Each input that an output is a later state of, with that output, in the order of
            the inputs. An input or an output is in one pair at most.
        unproved: Outputs that seem to be later states, but of which another input may be the
            state.
    """

    pairs: tuple[StatePair, ...]
    unproved: tuple[LoneState, ...] = ()


def find_states(graph: ModelGraph, signature: Signature) -> FoundStates:
    """Find each input that an output is a later state of.

    Raises:
        ModelError: More than `MAX_BUFFERS` inputs may be states.
    """
    candidates = _list_candidates(graph, signature)
    dtypes = {value.dtype for value in candidates}
    input_names = {value.name for value in signature.inputs}
    outputs = [
        value
        for value in _select_unique(signature.outputs)
        if value.dtype in (*dtypes, UNDECLARED) and value.name not in input_names
    ]
    if not candidates or not outputs:
        return FoundStates(())
    transfer = OriginTransfer()
    candidates, origins = _trace_outputs(graph, transfer, candidates, outputs)
    names = [value.name for value in candidates]
    matches = (
        _match_output(output, origin, candidates, names)
        for output, origin in zip(outputs, origins, strict=True)
    )
    matched = _select_only(_mark_gated(graph, [pair for pair in matches if pair is not None]))
    claims = [StateClaim(pair.input, pair.output) for pair in matched]
    doubts = find_unfollowed_inputs(
        graph, claims, follows_all=transfer.follows_all, are_types_guessed=True
    )
    matched = [pair for pair in matched if pair.output.name not in doubts]
    unproved = tuple(LoneState(doubt.name, name, doubt.reason) for name, doubt in doubts.items())
    paired = {pair.input.name for pair in matched}
    free_inputs = [value for value in candidates if value.name not in paired]
    free_outputs = [output for output, origin in zip(outputs, origins, strict=True) if not origin]
    indirect = _find_indirect_pairs(graph, free_inputs, free_outputs)
    read = drop_unread_values(matched, graph, signature)
    pairs = drop_hidden_states([*read, *indirect], graph, signature)
    order = {value.name: number for number, value in enumerate(signature.inputs)}
    pairs = sorted(pairs, key=lambda pair: order[pair.input.name])
    return FoundStates(tuple(pairs), unproved)


def _list_candidates(graph: ModelGraph, signature: Signature) -> list[Value]:
    """Return the inputs that may be states: floats and quantized values without a default."""
    weights = graph.main.constants
    candidates = [
        value
        for value in _select_unique(signature.inputs)
        if value.name not in weights and may_be_state(value.dtype)
    ]
    if len(candidates) > MAX_BUFFERS:
        raise build_limit_error(MAX_BUFFERS, "inputs that may be states")
    return candidates


def may_be_state(dtype: str) -> bool:
    """Return whether values of a dtype may be states: a float, or eight bits or fewer."""
    return dtype.startswith(("FLOAT", "BFLOAT", "DOUBLE")) or dtype in _QUANTIZED_DTYPES


def _select_unique(values: Sequence[Value]) -> list[Value]:
    """Return the values whose name no other one has."""
    counts = Counter(value.name for value in values)
    return [value for value in values if counts[value.name] == 1]


def _trace_outputs(
    graph: ModelGraph,
    transfer: OriginTransfer,
    candidates: list[Value],
    outputs: Sequence[Value],
) -> tuple[list[Value], tuple[Origin, ...]]:
    """Return the origins of the outputs, and the inputs that are their sources.

    An input of which as much is in several outputs as of another one is new to each of them,
    as the positions that are joined to all caches: it is not a source. One of which each has only
    a part may hold the caches of all layers: it stays.
    """
    names = [value.name for value in outputs]
    origins = trace(graph, transfer, [value.name for value in candidates], names)
    tied = Counter[int]()
    whole: set[int] = set()
    for origin in origins:
        parts = _find_tied(origin)
        tied.update(parts.keys())
        whole |= {number for number, is_part in parts.items() if not is_part}
    new = {number for number, count in tied.items() if count > 1} & whole
    if new:
        candidates = [value for number, value in enumerate(candidates) if number not in new]
        origins = trace(graph, transfer, [value.name for value in candidates], names)
    return candidates, origins


def _find_tied(origin: Origin) -> dict[int, bool]:
    """Return the sources of which an output has as much as of another one.

    Each comes with whether only a part of it is in the output.
    """
    tied: dict[int, bool] = {}
    for paths in map(select_cheapest_paths, origin):
        for (number, is_certain), path in paths.items() if len(paths) > 1 else ():
            if is_certain:
                is_part = all(each.changes & SizeChange.CUTS for each in path.resizings)
                tied[number] = is_part and tied.get(number, True)
    return tied


def _match_output(
    output: Value, origin: Origin, candidates: Sequence[Value], names: Sequence[str]
) -> StatePair | None:
    """Return the one input that an output is a later state of, whatever branch is taken."""
    nearest = [select_cheapest_paths(paths) for paths in origin]
    numbers = {number for paths in nearest for number, is_certain in paths if is_certain}
    if len(numbers) != 1:
        return None
    number = numbers.pop()
    source = candidates[number]
    if not is_dtype_compatible(source, output) or not _has_same_rank(source, output):
        return None
    flow = decide_flow(build_pair(source, output), origin, number, names)
    if flow.verdict not in PROVED_VERDICTS:
        return None
    taken = [path for paths in nearest for path in paths.values()]
    is_chosen = any(
        path.updated_by is not None and path.updated_by.op_type == "Where" for path in taken
    )
    is_computed = any(path.cost != (0, 0) for path in taken)
    is_joined = any(_is_joined(path) for path in taken)
    changes = compare_dims(source.shape, output.shape)
    if (is_computed or is_chosen) and not _is_size_known(changes, is_joined=is_joined):
        return None
    if is_chosen and len(source.shape or ()) < _RANK_WITH_HEADS:  # a mask of logits does that
        is_computed = True
    if is_joined and flow.update.kind in ("append", "shift"):  # as nothing is to a hidden state
        is_computed = False
    return StatePair(source, output, flow.update, is_computed)


def _is_joined(path: FlowPath) -> bool:
    """Return whether an operator joins something to what it carries."""
    joins = SizeChange.APPENDS | SizeChange.FITS
    return any(resizing.changes & joins for resizing in path.resizings)


def _is_size_known(changes: Sequence[DimChange] | None, *, is_joined: bool) -> bool:
    """Return whether a value that is computed with has the size that its operators give it.

    Something else is larger than it was, though nothing was joined to it: it was broadcast, as a
    temperature or a mask is, or written over another value.
    """
    if changes is None or "shrinks" in changes:
        return False
    return is_joined or all(change == "same" for change in changes)


def _has_same_rank(first: Value, second: Value) -> bool:
    """Return whether two values may have the same number of axes."""
    return first.shape is None or second.shape is None or len(first.shape) == len(second.shape)


def build_pair(source: Value, output: Value | None = None) -> KvPair:
    """Return an input, and an output that may be a later state of it, as a pair without rules."""
    sides = [value and PairSide(value, "", value.name) for value in (source, output)]
    return KvPair("", "", "", 0, sides[0], sides[1])


def _mark_gated(graph: ModelGraph, pairs: Sequence[StatePair]) -> Iterator[StatePair]:
    """Yield the pairs, those marked whose output gates alone make from the input."""
    computed = [pair for pair in pairs if pair.is_computed]
    outputs = [pair.output.name for pair in computed]
    gated = find_gated_inputs(graph, {pair.input.name for pair in computed}, outputs)
    for pair in pairs:
        yield pair._replace(is_gated=gated.get(pair.output.name) == frozenset({pair.input.name}))


def _select_only(pairs: Iterable[StatePair]) -> list[StatePair]:
    """Return the pairs of inputs that have one output alone, computed with as little as can be.

    What is computed from a state, such as a copy in another scale, does not take it away from
    the output that carries it on. Nor does what a cell shows of its state take it away from the
    output that gates make.
    """
    by_input: dict[str, list[StatePair]] = {}
    for pair in pairs:
        by_input.setdefault(pair.input.name, []).append(pair)
    selected = []
    for same_input in by_input.values():
        lowest = min(pair.is_computed for pair in same_input)
        best = [pair for pair in same_input if pair.is_computed == lowest]
        if len(best) > 1:
            best = [pair for pair in best if pair.is_gated] or best
        if len(best) > 1:
            best = [pair for pair in best if pair.update.kind != "unknown"]
        selected += best if len(best) == 1 else []
    return selected


# States that no output carries on


def _find_indirect_pairs(
    graph: ModelGraph, inputs: Sequence[Value], outputs: Sequence[Value]
) -> Iterator[StatePair]:
    """Yield the pairs of what is joined to an input, and of what replaces it in a branch."""
    if not inputs or not outputs:
        return
    values = {value.name: value for value in (*inputs, *outputs)}
    joined = find_joined_outputs(
        graph, [value.name for value in inputs], [value.name for value in outputs]
    )
    for found, update in (
        (joined, None),
        (
            find_branch_states(
                graph, [v.name for v in inputs], [v.name for v in outputs if v.name not in joined]
            ),
            BufferUpdate("once"),
        ),
    ):
        for output_name, input_name in found.items():
            source, output = values[input_name], values[output_name]
            if is_dtype_compatible(source, output) and _has_same_rank(source, output):
                update_found = update or build_delta(compare_dims(source.shape, output.shape))
                yield StatePair(source, output, update_found, feeds_back=False)
