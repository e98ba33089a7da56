"""Does each buffer really flow from its input to its output?

In a decoder nearly everything depends on everything below it, so that an output
can be reached from an input proves nothing. What counts is what an output is a
*later state* of: where its elements are carried from. Going back from it,

- an operator that moves elements (Identity, Transpose, Slice, Gather, ...) leads
  to what it moves, a scatter to the data it writes into, and, as second choice,
  to what it writes; Concat and Where lead to each of what they join;
- an elementwise operator (Mul, Add, ...) leads to its operands, each time at the
  cost of one step, since a linear state is decayed and added to;
- an operator that mixes its operands (MatMul, Softmax, Conv, ...) leads nowhere:
  that is where layers and the attention between key and value end;
- a shape, an index or a condition leads nowhere;
- a custom operator without a body may lead to any operand, or to none: in doubt.

The input with the cheapest way (fewest times written over something, then fewest
steps) is what the output is a later state of, and it must be its own. So a
recurrent state may depend on the convolution state of its layer: its own input
is nearer. Branches of an If are each held to this by themselves, except one that
carries no buffer at all, as where a cache begins.

An output that reaches its own input only through what mixes, only in doubt, or
no sooner than another buffer's, is not proved; nor is it called wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

from onnx import ModelProto

from onnxkvrename.findings import Finding, build_finding, format_list
from onnxkvrename.rules.plan import KvPair
from onnxkvrename.verification.provenance import (
    FlowPaths,
    NodeLocation,
    Origin,
    select_cheapest_paths,
)
from onnxkvrename.verification.tracing import trace_origins

FlowVerdict = Literal["updated", "passed through", "not from its input", "untraced"]
_PROVED_VERDICTS = ("updated", "passed through")
_VERDICTS_WORST_FIRST: tuple[FlowVerdict, ...] = (
    "not from its input",
    "untraced",
    "updated",
    "passed through",
)


class BufferFlow(NamedTuple):
    """What became of one buffer.

    ``where`` is the node that updates it, the last one on its way; in a local
    function or subgraph its name is ``inner in outer``. ``others`` are the inputs
    of other buffers that the output is a state of instead, or just as much.
    ``reason`` says why it is untraced.
    """

    pair: KvPair
    verdict: FlowVerdict
    updated_by: NodeLocation | None = None
    other_inputs: tuple[str, ...] = ()
    reason: str = ""


def trace_buffer_flows(model: ModelProto, pairs: Iterable[KvPair]) -> tuple[BufferFlow, ...]:
    """The flow of every pair with both ends, in their order.

    ``model`` needs no weights. Nothing is raised for a model that could be
    parsed; what cannot be followed is ``untraced``.
    """
    pairs = tuple(pairs)
    sources = [pair.input.old_name for pair in pairs if pair.input is not None]
    numbers = {name: number for number, name in enumerate(sources)}
    both = [pair for pair in pairs if len(pair.sides) == 2]
    ends = [
        (numbers[given.old_name], made.old_name) for given, made in (pair.sides for pair in both)
    ]
    outputs = [name for _, name in ends]

    def judged(found: Iterable[Origin]) -> tuple[BufferFlow, ...]:
        return tuple(
            _decide_flow(pair, origin, own, sources)
            for pair, origin, (own, _) in zip(both, found, ends, strict=True)
        )

    ways = trace_origins(model, sources, outputs)
    flows = judged(ways)
    if all(flow.verdict in _PROVED_VERDICTS for flow in flows):
        return flows
    # Only what is not proved asks what else it depends on: that takes a walk of the whole graph.
    depends = trace_origins(model, sources, outputs, deep=True)
    return judged(
        Origin(way.outcomes, way.dependency_bits | each.dependency_bits)
        for way, each in zip(ways, depends, strict=True)
    )


def check_buffer_flows(flows: Iterable[BufferFlow]) -> Iterator[Finding]:
    """KV110, KV113 and KV114: what is wrong with the flows, or not proved."""
    for flow in flows:
        if flow.pair.input is None or flow.pair.output is None or flow.verdict == "updated":
            continue
        given, name = flow.pair.input.old_name, flow.pair.output.old_name
        others = format_list(list(flow.other_inputs))
        if flow.verdict == "not from its input":
            found = f"is made of {others}" if others else "is made of no buffer"
            yield build_finding(
                "KV110",
                name,
                f"{found}, not of its own input {given}",
                "the cache would be mixed up or lost; export the model again",
            )
        elif flow.verdict == "untraced":
            yield build_finding(
                "KV113",
                name,
                f"could not be traced to its input {given}, so this is not proved: {flow.reason}",
                "look at how the model updates this buffer",
            )
        else:
            yield build_finding(
                "KV114",
                name,
                f"is what came in as {given}: nothing is written to this buffer",
                "check the export; harmless only if this model never adds to the cache",
            )


def _decide_flow(pair: KvPair, origin: Origin, own: int, sources: list[str]) -> BufferFlow:
    """The verdict on one output: the worst over what branches may come to."""
    if not origin.outcomes and origin.dependency_bits >> own & 1:
        return BufferFlow(
            pair, "untraced", reason="it is reached only through operators that mix values"
        )
    if not origin.outcomes:
        return BufferFlow(pair, "not from its input")
    lost = not origin.dependency_bits >> own & 1
    flows = [
        _decide_outcome(pair, select_cheapest_paths(ways), own, sources, lost=lost)
        for ways in origin.outcomes
    ]
    return min(flows, key=lambda flow: _VERDICTS_WORST_FIRST.index(flow.verdict))


def _decide_outcome(
    pair: KvPair, ends: FlowPaths, own: int, sources: list[str], *, lost: bool
) -> BufferFlow:
    """The verdict on one outcome, by its nearest sources; ``lost`` if its own is out of reach."""
    where = next(iter(ends.values())).updated_by
    sure = {number for number, known in ends if known}
    if sure == {own}:
        where = ends[own, True].updated_by
        return BufferFlow(pair, "passed through" if where is None else "updated", where)
    found = sure or {number for number, _ in ends}
    others = tuple(sources[number] for number in sorted(found - {own}))
    if lost or (sure and own not in sure and (own, False) not in ends):
        return BufferFlow(pair, "not from its input", where, others)
    if own in sure:
        reason = f"it is made of {format_list(list(others))} as much as of its own"
    else:
        reason = next(way.uncertainty for way in ends.values() if way.uncertainty)
    return BufferFlow(pair, "untraced", where, others, reason)
