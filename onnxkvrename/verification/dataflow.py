"""Prove that each buffer flows from its input to its output.

In a decoder nearly everything depends on everything below it, so it proves nothing
that an output can be reached from an input. What counts is which input an output is
a *later state* of: where its elements are carried from. Going back from the output,

- an operator that moves elements (Identity, Transpose, Slice, Gather, ...) leads
  to what it moves; a scatter leads to the data it writes into and, as second choice,
  to what it writes; Concat and Where lead to each of what they join;
- an elementwise operator (Mul, Add, ...) leads to its operands, each time at the
  cost of one step, since a linear state is decayed and added to;
- an operator that mixes its operands (MatMul, Softmax, Conv, ...) leads nowhere:
  that is where layers and the attention between key and value end;
- a shape, an index, a condition, and what a constant leaves out lead nowhere;
- a custom operator without a body may lead to any operand or to none: uncertain.

The output is a later state of the input with the cheapest path (overwritten least
often, then fewest steps), and this must be its own input. So a recurrent state may
depend on the convolution state of its layer: its own input is nearer. Each branch of
an If must fulfil this by itself, except one that carries no buffer at all, as where a
cache begins.

The operators on the path, and the declared shapes, also tell how the output is made: written
in place, appended to, or otherwise.

An output that reaches its own input only through what mixes, only by an uncertain path, or no
sooner than another one, is not proved, but not called wrong either; nor is one into which
another buffer is copied, or which loses its new positions. One whose axes change places, or that
is written along its heads, is wrong (:mod:`axis_faults`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple

from onnxkvrename.display import show_briefly
from onnxkvrename.findings import Finding, build_finding
from onnxkvrename.layout.updates import (
    UNKNOWN_UPDATE,
    BufferFault,
    BufferUpdate,
    DimChange,
    are_same_sizes,
    build_delta,
    build_fault_finding,
    build_update_finding,
    choose_worst_update,
    compare_dims,
    find_growth,
    is_meant_without_input,
    is_reported_shape,
)
from onnxkvrename.rules.plan import KvPair
from onnxkvrename.text import format_list
from onnxkvrename.verification.axis_faults import find_axis_fault
from onnxkvrename.verification.graph_bodies import ModelGraph
from onnxkvrename.verification.operators import SizeChange
from onnxkvrename.verification.pairs.value_uses import find_joined_outputs
from onnxkvrename.verification.provenance import (
    FlowPath,
    FlowPaths,
    NodeLocation,
    Origin,
    Resizing,
    find_copies,
    select_cheapest_paths,
)
from onnxkvrename.verification.tracing import OriginTransfer, trace, trace_dependencies
from onnxkvrename.verification.unfollowed import StateClaim, find_unfollowed_inputs

FlowVerdict = Literal["updated", "passed through", "not from its input", "untraced"]
_INPLACE = BufferUpdate("inplace")
_SHIFT = BufferUpdate("shift")
_ONCE = BufferUpdate("once")
PROVED_VERDICTS = ("updated", "passed through")
_VERDICTS_WORST_FIRST: tuple[FlowVerdict, ...] = (
    "not from its input",
    "untraced",
    "updated",
    "passed through",
)


@show_briefly
class BufferFlow(NamedTuple):
    """The verdict on one buffer.

    Attributes:
        pair: The buffer's input and output.
        verdict: How the output relates to the input.
        updated_by: The last node on the path that makes a new state; in a local
            function or subgraph its name is `inner in outer`. `None` if the buffer
            only passes through, or a part of it, or nothing is known.
        other_inputs: The inputs of other buffers that the output is a state of
            instead, or as much as of its own.
        reason: Why the verdict is `untraced`; empty for the others.
        update: How the output is made from the input; of several branches the worst.
        fault: Why the output is not a later state of the input, if it is its axes.
    """

    pair: KvPair
    verdict: FlowVerdict
    updated_by: NodeLocation | None = None
    other_inputs: tuple[str, ...] = ()
    reason: str = ""
    update: BufferUpdate = UNKNOWN_UPDATE
    fault: BufferFault | None = None


def trace_buffer_flows(graph: ModelGraph, pairs: Iterable[KvPair]) -> tuple[BufferFlow, ...]:
    """Return the flow of every pair that has both an input and an output, in their order.

    Args:
        graph: The graph of the model.
        pairs: All pairs of the model; an input without an output still counts as a
            buffer that others may be mixed up with.

    Returns:
        A flow for each complete pair. What cannot be followed is `untraced`;
        nothing is raised for nodes that can be read.
    """
    pairs = tuple(pairs)
    sources = [pair.input.old_name for pair in pairs if pair.input is not None]
    source_numbers = {name: number for number, name in enumerate(sources)}
    complete = [
        (pair, source_numbers[pair.input.old_name], pair.output.old_name)
        for pair in pairs
        if pair.input is not None and pair.output is not None
    ]
    outputs = [output for _, _, output in complete]

    transfer = OriginTransfer()
    origins = trace(graph, transfer, sources, outputs)

    def decide_flows(dependencies: Sequence[int]) -> tuple[BufferFlow, ...]:
        flows = [
            decide_flow(pair, origin, own_number, sources, bits)
            for (pair, own_number, _), origin, bits in zip(
                complete, origins, dependencies, strict=True
            )
        ]
        numbers = [own_number for _, own_number, _ in complete]
        return tuple(_excuse_sums(flows, origins, numbers))

    flows = decide_flows([0] * len(outputs))
    if not all(flow.verdict in PROVED_VERDICTS for flow in flows):
        # Only a buffer that is not proved needs to know what else it depends on: that takes a walk
        # through the whole graph.
        flows = decide_flows(trace_dependencies(graph, sources, outputs))
        flows = _find_joined_positions(graph, flows)
    return _doubt_unfollowed(graph, flows, follows_all=transfer.follows_all)


def _doubt_unfollowed(
    graph: ModelGraph, flows: Sequence[BufferFlow], *, follows_all: bool
) -> tuple[BufferFlow, ...]:
    """Return the flows; what is proved may be new, where another input is not followed."""
    claims = [
        StateClaim(flow.pair.sides[0].value, flow.pair.sides[1].value)
        for flow in flows
        if flow.verdict in PROVED_VERDICTS
    ]
    doubts = find_unfollowed_inputs(graph, claims, follows_all=follows_all)
    doubtful = []
    for flow in flows:
        doubt = doubts.get(flow.pair.sides[1].old_name)
        if doubt is not None and flow.verdict in PROVED_VERDICTS:
            reason = f"{doubt.reason}, and it may be a later state of {doubt.name}"
            update = _decide_update_without_input(_compare_sides(flow.pair), is_read=True)
            flow = flow._replace(verdict="untraced", reason=reason, update=update)
        doubtful.append(flow)
    return tuple(doubtful)


def _find_joined_positions(
    graph: ModelGraph, flows: Sequence[BufferFlow]
) -> tuple[BufferFlow, ...]:
    """Return the flows; an output that the graph itself joins to its input has new positions."""
    loose = {
        flow.pair.sides[1].old_name: flow.pair.sides[0].old_name
        for flow in flows
        if flow.verdict == "not from its input" and not flow.other_inputs
    }
    joined = find_joined_outputs(graph, [*loose.values()], [*loose]) if loose else {}
    return tuple(
        flow._replace(update=build_delta(_compare_sides(flow.pair)))
        if (flow.pair.sides[1].old_name, flow.pair.sides[0].old_name) in joined.items()
        else flow
        for flow in flows
    )


def check_buffer_flows(
    flows: Iterable[BufferFlow],
    updates_by_kind: Mapping[str, str] = MappingProxyType({}),
    profile: str = "",
    hint: str = "",
) -> Iterator[Finding]:
    """Yield KV104, KV110, KV113, KV114 and KV120 for flows that are wrong or not proved.

    An output that has only the new positions is an error until rules say so, and has KV120 alone.

    The updates are those that a profile, which messages call `profile`, says of each kind; the hint
    is how to get rules with others.
    """
    for flow in flows:
        if flow.pair.input is None or flow.pair.output is None:
            continue
        meant = updates_by_kind.get(flow.pair.kind, "")
        if flow.fault is not None and is_reported_shape(flow.pair, flow.fault, meant):
            continue
        has_new_only = flow.update.kind == "delta" and flow.verdict == "not from its input"
        if not (has_new_only or is_meant_without_input(flow.update, meant)):
            yield from _check_flow(flow)
        if flow.verdict == "updated" and flow.update.kind == "unknown" and meant:
            yield build_finding(
                "KV113",
                flow.pair.output.old_name,
                f"cannot be proved to have the size of {flow.pair.input.old_name}: its operators "
                "do not keep the size, or the declared shapes differ",
                "examples/run_retention.py runs the model and compares the sizes",
            )
        if flow.update.is_resized and meant != flow.update.kind:
            finding = build_update_finding(
                flow.pair.input.old_name,
                flow.pair.output.old_name,
                flow.update,
                (flow.pair.input.value.shape, flow.pair.output.value.shape),
                needed_by=f"profile {profile}" if meant in ("inplace", "once") else None,
                hint=hint,
            )
            yield finding._replace(severity="error") if has_new_only else finding


def _check_flow(flow: BufferFlow) -> Iterator[Finding]:
    """Yield KV104, KV110, KV113 or KV114 for a flow with another verdict than `updated`."""
    pair = flow.pair
    if pair.input is None or pair.output is None or flow.verdict == "updated":
        return
    input_name, output_name = pair.input.old_name, pair.output.old_name
    if flow.fault is not None:
        shapes = pair.input.value.shape, pair.output.value.shape
        yield build_fault_finding(input_name, output_name, flow.fault, shapes)
    elif flow.verdict == "not from its input":
        yield build_fault_finding(input_name, output_name, BufferFault(flow.other_inputs))
    elif flow.verdict == "untraced":
        yield build_finding(
            "KV113",
            output_name,
            f"could not be traced to its input {input_name}, so retention is not proved: "
            f"{flow.reason}",
            "look at how the model updates this buffer",
        )
    else:
        yield build_finding(
            "KV114",
            output_name,
            f"is its input {input_name}, unchanged: the model never writes to this buffer",
            "check the export, unless another model fills the buffer, such as a vision encoder",
        )


def decide_flow(
    pair: KvPair, origin: Origin, own_number: int, sources: Sequence[str], dependencies: int = 0
) -> BufferFlow:
    """Return the worst verdict, and the worst update, over the outcomes that branches may have.

    The pair has both sides, its output has the `origin`, and its input is number `own_number` of
    the sources. What is not proved is `untraced` only if the input is among the `dependencies`:
    those sources that the output depends on at all, as bits.
    """
    depends_on_own = bool(dependencies >> own_number & 1)
    if not origin:
        update = _decide_update_without_input(_compare_sides(pair), is_read=depends_on_own)
        if depends_on_own:
            reason = "it is reached only through operators that mix values"
            return BufferFlow(pair, "untraced", reason=reason, update=update)
        return BufferFlow(pair, "not from its input", update=update)
    flows = [
        _decide_outcome(pair, paths, own_number, sources, depends_on_own=depends_on_own)
        for paths in origin
    ]
    worst = min(
        flows, key=lambda flow: (_VERDICTS_WORST_FIRST.index(flow.verdict), flow.fault is None)
    )
    if worst.fault is not None:
        return worst
    return worst._replace(update=choose_worst_update([flow.update for flow in flows]))


def _excuse_sums(
    flows: Sequence[BufferFlow], origins: Sequence[Origin], own_numbers: Sequence[int]
) -> Iterator[BufferFlow]:
    """Yield the flows; what is added up of its own input and other states is not called wrong.

    That holds where each of those has a later state of its own: so nothing was swapped.
    """
    sound = {
        flow.pair.input.old_name
        for flow in flows
        if flow.verdict in PROVED_VERDICTS and flow.pair.input is not None
    }
    for flow, origin, own_number in zip(flows, origins, own_numbers, strict=True):
        is_wrong = flow.verdict == "not from its input" and flow.other_inputs
        if is_wrong and sound.issuperset(flow.other_inputs) and _is_summand(origin, own_number):
            others = format_list(list(flow.other_inputs))
            reason = f"it is computed from {others}, and from its own input in more steps"
            flow = flow._replace(verdict="untraced", reason=reason)
        yield flow


def _is_summand(origin: Origin, number: int) -> bool:
    """Return whether a source is in each outcome, and not as what is written over another."""
    return all(
        (number, True) in paths
        and paths[number, True].cost[0] == min(path.cost[0] for path in paths.values())
        for paths in origin
    )


def _compare_sides(pair: KvPair) -> tuple[DimChange, ...] | None:
    """Return how the declared size of each axis changes from the input to the output."""
    if pair.input is None or pair.output is None:
        return None
    return compare_dims(pair.input.value.shape, pair.output.value.shape)


def _decide_outcome(
    pair: KvPair,
    paths: FlowPaths,
    own_number: int,
    sources: Sequence[str],
    *,
    depends_on_own: bool,
) -> BufferFlow:
    """Return the verdict on one outcome by its cheapest paths, and by copies on others."""
    cheapest = select_cheapest_paths(paths)
    certain = {number for number, is_certain in cheapest if is_certain}
    if certain == {own_number}:
        path = cheapest[own_number, True]
        changes = _compare_sides(pair)
        if not _has_batch_symbol(pair):
            whole = (each._replace(sliced_axes=frozenset[int]()) for each in path.resizings)
            path = path._replace(resizings=frozenset(whole))
        update = _decide_update(path, changes)
        fault = find_axis_fault(pair, path)
        if fault is not None:
            return BufferFlow(pair, "untraced", path.updated_by, reason=str(fault), fault=fault)
        copies = tuple(sources[number] for number in find_copies(paths) if number != own_number)
        reason = "" if update.is_resized else _find_doubt(path)
        if copies:
            reason = f"values of {format_list(list(copies))} are copied or added into it as well"
        if reason:
            update = _decide_update_without_input(changes, is_read=True)
            return BufferFlow(pair, "untraced", path.updated_by, copies, reason, update)
        is_moved_only = path.updated_by is None
        if is_moved_only and not any(map(_takes_or_adds_values, path.resizings)):
            return BufferFlow(pair, "passed through", update=update)
        return BufferFlow(pair, "updated", path.updated_by, update=update)
    location = next(iter(cheapest.values())).updated_by
    nearest = certain or {number for number, _ in cheapest}
    other_inputs = tuple(sources[number] for number in sorted(nearest - {own_number}))
    may_be_own = own_number in certain or (own_number, False) in cheapest
    if not depends_on_own or (certain and not may_be_own):
        return BufferFlow(pair, "not from its input", location, other_inputs)
    if own_number in certain:
        reason = (
            f"it is computed from {format_list(list(other_inputs))} as much as from its own input"
        )
    else:
        reason = next(path.uncertainty for path in cheapest.values() if path.uncertainty)
    update = _decide_update_without_input(_compare_sides(pair), is_read=True)
    return BufferFlow(pair, "untraced", location, other_inputs, reason, update)


def _find_doubt(path: FlowPath) -> str:
    """Return why the only input on the cheapest paths may not be retained; empty if it is."""
    drops, several = SizeChange.DROPS_NEW, SizeChange.SEVERAL
    drops_new = all(each.changes & (drops | several) == drops for each in path.resizings)
    if drops_new and not path.is_written_again:
        return "its first values are kept, and what is appended to them may be cut off again"
    return ""


def _has_batch_symbol(pair: KvPair) -> bool:
    """Return whether the first axis, the batch, has any size: then a slice may be less than it."""
    shape = (pair.input and pair.input.value.shape) or (None,)
    return isinstance(shape[0], str)


def _decide_update(path: FlowPath, changes: Sequence[DimChange] | None) -> BufferUpdate:
    """Return how an output is made that is a later state of its input.

    What the operators do is proved, a declared shape is only a claim. So a Concat makes a
    buffer longer whatever its shapes say, unless something on the path takes a part of it;
    where the operators leave the size open, the shapes decide.

    The changes are those of the declared size of each axis; ``None`` if they are not known.
    """
    if path.uncertainty:
        return _decide_update_without_input(changes, is_read=True)
    updates = [_decide_resizing(resizing, path, changes) for resizing in path.resizings]
    return choose_worst_update(updates)


def _decide_update_without_input(
    changes: Sequence[DimChange] | None, *, is_read: bool
) -> BufferUpdate:
    """Return how an output is made that is not a later state of its input, or not surely.

    The changes are those of the declared size of each axis; ``None`` if they are not known. The
    output depends on the input at all if that `is_read`.
    """
    grown = find_growth(changes)
    if grown is not None:
        return grown
    if is_read or changes is None:
        return UNKNOWN_UPDATE
    if "shrinks" in changes:
        return BufferUpdate("delta", changes.index("shrinks"))
    return _ONCE if are_same_sizes(changes) else UNKNOWN_UPDATE


def _decide_resizing(
    resizing: Resizing, path: FlowPath, changes: Sequence[DimChange] | None
) -> BufferUpdate:
    flags = resizing.changes
    if flags & ~SizeChange.MOVES_AXES == SizeChange.SHIFTS:
        return _SHIFT  # the operator keeps the size, whatever the symbols are called
    grown = find_growth(changes)
    appends, cuts = bool(flags & SizeChange.APPENDS), bool(flags & SizeChange.CUTS)
    is_written_over = path.cost[0] > 0  # then the size is that of the other value
    is_open = is_written_over or bool(flags & (SizeChange.RESIZES | SizeChange.SEVERAL))
    if appends and not (is_open or _may_cancel_out(resizing, changes)):
        return grown or BufferUpdate("append", _find_axis(resizing, changes))
    if grown is not None:
        return grown
    if flags & SizeChange.FITS and changes is not None and not are_same_sizes(changes):
        return BufferUpdate("append", _find_axis(resizing, changes))
    if appends or cuts or is_open or flags & SizeChange.FITS:
        is_kept = are_same_sizes(changes) and not _is_size_lost(resizing, path, changes)
        if not is_kept:
            return UNKNOWN_UPDATE
        return _SHIFT if appends and cuts else _INPLACE
    if changes is not None and "shrinks" in changes:
        return UNKNOWN_UPDATE
    return _ONCE if path.updated_by is None else _INPLACE


def _may_cancel_out(resizing: Resizing, changes: Sequence[DimChange] | None) -> bool:
    """Return whether what is cut may be as long as what is joined: along the same axis."""
    grown_axes, cut_axes = _count_from_front(resizing, changes)
    if None in cut_axes or not grown_axes:
        return bool(cut_axes)
    return grown_axes <= cut_axes


def _count_from_front(
    resizing: Resizing, changes: Sequence[DimChange] | None
) -> tuple[frozenset[int], frozenset[int | None]]:
    """Return the axes that grow and those that are cut; without a rank all may be the same."""
    known_axes = [*resizing.grown_axes, *(axis for axis in resizing.cut_axes if axis is not None)]
    rank = 0 if changes is None else len(changes)
    if all(axis >= 0 for axis in known_axes):
        return resizing.grown_axes, resizing.cut_axes
    if not all(-rank <= axis < rank for axis in known_axes):
        unknown: frozenset[int | None] = frozenset({None} if resizing.cut_axes else ())
        return frozenset(), unknown
    return (
        frozenset(axis % rank for axis in resizing.grown_axes),
        frozenset(None if axis is None else axis % rank for axis in resizing.cut_axes),
    )


def _takes_or_adds_values(resizing: Resizing) -> bool:
    """Return whether a value is not what came in, even if no operator writes to it."""
    return bool(resizing.changes & ~SizeChange.MOVES_AXES)


def _is_size_lost(resizing: Resizing, path: FlowPath, changes: Sequence[DimChange] | None) -> bool:
    """Return whether operators make a size that equal declared shapes do not prove.

    A part of the input is not all of it, unless something is joined to it along that axis. A
    choice along the first axis, the batch, may have all of it in another order; a slice not.
    """
    if path.cost[0] > 0:  # it is written over another value, whose size it has
        return False
    if path.updated_by is None or resizing.changes & SizeChange.RESIZES:
        return True
    grown_axes, cut_axes = _count_from_front(resizing, changes)
    if resizing.changes & SizeChange.APPENDS and (None in cut_axes or not grown_axes):
        return False
    sliced = {axis % len(changes) for axis in resizing.sliced_axes} if changes else set[int]()
    return bool(cut_axes - grown_axes - ({0} - sliced))


def _find_axis(resizing: Resizing, changes: Sequence[DimChange] | None) -> int | None:
    """Return the axis that grows: the one that shapes leave open, else the operators'."""
    if changes is None:
        return resizing.axis if resizing.axis is None or resizing.axis >= 0 else None
    grown_axes, cut_axes = _count_from_front(resizing, changes)
    if len(grown_axes - cut_axes) == 1:
        return next(iter(grown_axes - cut_axes))
    candidates = [axis for axis, change in enumerate(changes) if change != "same"]
    if resizing.axis is not None and -len(changes) <= resizing.axis < len(changes):
        return resizing.axis % len(changes)
    return candidates[0] if len(candidates) == 1 else None
