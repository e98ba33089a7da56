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
- a shape, an index or a condition leads nowhere;
- a custom operator without a body may lead to any operand or to none: uncertain.

The output is a later state of the input with the cheapest path (overwritten least
often, then fewest steps), and this must be its own input. So a recurrent state may
depend on the convolution state of its layer: its own input is nearer. Each branch of
an If must fulfil this by itself, except one that carries no buffer at all, as where a
cache begins.

An output that reaches its own input only through what mixes, only by an uncertain
path, or no sooner than the input of another buffer is not proved, but not called
wrong either.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
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
from onnxkvrename.verification.tracing import trace_dependencies, trace_origins

FlowVerdict = Literal["updated", "passed through", "not from its input", "untraced"]
_PROVED_VERDICTS = ("updated", "passed through")
_VERDICTS_WORST_FIRST: tuple[FlowVerdict, ...] = (
    "not from its input",
    "untraced",
    "updated",
    "passed through",
)


class BufferFlow(NamedTuple):
    """The verdict on one buffer.

    Attributes:
        pair: The buffer's input and output.
        verdict: How the output relates to the input.
        updated_by: The last node on the path that makes a new state; in a local
            function or subgraph its name is `inner in outer`. `None` if the buffer
            only passes through, or nothing is known.
        other_inputs: The inputs of other buffers that the output is a state of
            instead, or as much as of its own.
        reason: Why the verdict is `untraced`; empty for the others.
    """

    pair: KvPair
    verdict: FlowVerdict
    updated_by: NodeLocation | None = None
    other_inputs: tuple[str, ...] = ()
    reason: str = ""


def trace_buffer_flows(model: ModelProto, pairs: Iterable[KvPair]) -> tuple[BufferFlow, ...]:
    """Return the flow of every pair that has both an input and an output, in their order.

    Args:
        model: A parsed model; weights are not needed.
        pairs: All pairs of the model; an input without an output still counts as a
            buffer that others may be mixed up with.

    Returns:
        A flow for each complete pair. What cannot be followed is `untraced`;
        nothing is raised for a model that could be parsed.
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

    def decide_flows(origins: Iterable[Origin]) -> tuple[BufferFlow, ...]:
        return tuple(
            _decide_flow(pair, origin, own_number, sources)
            for (pair, own_number, _), origin in zip(complete, origins, strict=True)
        )

    origins = trace_origins(model, sources, outputs)
    flows = decide_flows(origins)
    if all(flow.verdict in _PROVED_VERDICTS for flow in flows):
        return flows
    # Only a buffer that is not proved needs to know what else it depends on: that takes a walk
    # through the whole graph.
    dependencies = trace_dependencies(model, sources, outputs)
    return decide_flows(
        Origin(origin.outcomes, origin.dependency_bits | bits)
        for origin, bits in zip(origins, dependencies, strict=True)
    )


def check_buffer_flows(flows: Iterable[BufferFlow]) -> Iterator[Finding]:
    """Yield KV110, KV113 and KV114 for flows that are wrong or not proved."""
    for flow in flows:
        if flow.pair.input is None or flow.pair.output is None or flow.verdict == "updated":
            continue
        input_name, output_name = flow.pair.input.old_name, flow.pair.output.old_name
        if flow.verdict == "not from its input":
            other_inputs = format_list(list(flow.other_inputs)) or "no buffer"
            yield build_finding(
                "KV110",
                output_name,
                f"is made of {other_inputs}, not of its own input {input_name}",
                "the cache would be mixed up or lost; export the model again",
            )
        elif flow.verdict == "untraced":
            yield build_finding(
                "KV113",
                output_name,
                f"could not be traced to its input {input_name}, so this is not proved: "
                f"{flow.reason}",
                "look at how the model updates this buffer",
            )
        else:
            yield build_finding(
                "KV114",
                output_name,
                f"is what came in as {input_name}: nothing is written to this buffer",
                "check the export; harmless only if this model never adds to the cache",
            )


def _decide_flow(
    pair: KvPair, origin: Origin, own_number: int, sources: Sequence[str]
) -> BufferFlow:
    """Return the worst verdict over the outcomes that branches may have."""
    depends_on_own = bool(origin.dependency_bits >> own_number & 1)
    if not origin.outcomes and depends_on_own:
        reason = "it is reached only through operators that mix values"
        return BufferFlow(pair, "untraced", reason=reason)
    if not origin.outcomes:
        return BufferFlow(pair, "not from its input")
    flows = [
        _decide_outcome(
            pair, select_cheapest_paths(paths), own_number, sources, depends_on_own=depends_on_own
        )
        for paths in origin.outcomes
    ]
    return min(flows, key=lambda flow: _VERDICTS_WORST_FIRST.index(flow.verdict))


def _decide_outcome(
    pair: KvPair,
    cheapest: FlowPaths,
    own_number: int,
    sources: Sequence[str],
    *,
    depends_on_own: bool,
) -> BufferFlow:
    """Return the verdict on one outcome by its cheapest paths."""
    certain = {number for number, is_certain in cheapest if is_certain}
    if certain == {own_number}:
        location = cheapest[own_number, True].updated_by
        return BufferFlow(pair, "passed through" if location is None else "updated", location)
    location = next(iter(cheapest.values())).updated_by
    nearest = certain or {number for number, _ in cheapest}
    other_inputs = tuple(sources[number] for number in sorted(nearest - {own_number}))
    may_be_own = own_number in certain or (own_number, False) in cheapest
    if not depends_on_own or (certain and not may_be_own):
        return BufferFlow(pair, "not from its input", location, other_inputs)
    if own_number in certain:
        reason = f"it is made of {format_list(list(other_inputs))} as much as of its own"
    else:
        reason = next(path.uncertainty for path in cheapest.values() if path.uncertainty)
    return BufferFlow(pair, "untraced", location, other_inputs, reason)
