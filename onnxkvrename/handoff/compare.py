"""Compare prefill and decode: decide whether a hand-off works, which prompts fail, and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from onnxkvrename.display import show_briefly
from onnxkvrename.findings import Finding
from onnxkvrename.handoff.comparison import Comparison, build_comparison
from onnxkvrename.handoff.consumer import Consumer
from onnxkvrename.handoff.selection import BufferId
from onnxkvrename.handoff.side_checks import (
    CheckedSide,
    check_buffers_exist,
    check_each_side,
    check_side,
    check_side_tokens,
    check_startup,
    check_unmatched_non_kv,
    list_update_notes,
)
from onnxkvrename.handoff.simulate import find_full_lengths, is_in_ranges
from onnxkvrename.handoff.slots import MemorySlot
from onnxkvrename.handoff.tensor_parallel import (
    TensorParallelSizes,
    check_tensor_parallelism,
    list_sharding_notes,
)
from onnxkvrename.handoff.verdict import (
    NO_FAULTS,
    Evidence,
    HandoffVerdict,
    PairResult,
    PromptFaults,
    RootCause,
    build_verdict,
    check_order,
    check_shifted_buffers,
    find_root_causes,
    judge_pairs,
)
from onnxkvrename.handoff.worker import (
    UNLIMITED_LENGTH,
    HandoffSide,
    find_longest_prompt,
    find_shared_symbols,
    list_order_notes,
)
from onnxkvrename.layout.layout import Layout, is_quantized

_UNLIMITED_SAMPLE = 4096
"""A prompt of at least so many tokens is simulated where the graphs do not limit the context."""


class Basis(NamedTuple):
    """What a success rests on.

    Attributes:
        facts: What was compared, and is equal.
        conditions: What is not known, each to be continued after ``both sides``.
    """

    facts: tuple[str, ...] = ()
    conditions: tuple[str, ...] = ()


NO_BASIS = Basis()


class SimulatedPrompt(NamedTuple):
    """A simulated hand-off of one prompt: what is written and read, and what decode reads wrongly.

    It is refused if decode finds the memory too small and stops.
    """

    tokens: int
    prefill_slots: tuple[MemorySlot, ...]
    decode_slots: tuple[MemorySlot, ...]
    wrong_buffer_ids: tuple[BufferId, ...]
    is_refused: bool


@show_briefly
class Handoff(NamedTuple):
    """The result of a comparison.

    Attributes:
        consumer: The consumer on both sides.
        full_transfer: Whether all of each buffer is moved, whatever the prompt.
        ranks: The requested tensor parallel sizes, `None` without a request.
        prefill: The side that writes.
        decode: The side that reads.
        pair_results: The result for each buffer, sorted by layer.
        simulated_prompts: The simulated prompts, the shortest first.
        findings: All findings, causes before consequences.
        notes: Harmless differences that are worth knowing.
        verdict: The overall result.
        comparison: The paired buffers and the simulation, from which the rest follows.
        requested_lengths: The requested prompt lengths in tokens.
        shared_symbols: The symbols without a size that must be equal on both sides.
        root_causes: The findings that are not consequences of others, with their buffers.
        basis: What a success rests on.
        context_limits: The tokens that prefill and decode take of a prompt and its answer, as they
            are started; ``None`` where that is not said.
    """

    consumer: Consumer
    full_transfer: bool
    ranks: TensorParallelSizes | None
    prefill: HandoffSide
    decode: HandoffSide
    pair_results: tuple[PairResult, ...]
    simulated_prompts: tuple[SimulatedPrompt, ...]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    verdict: HandoffVerdict
    comparison: Comparison
    requested_lengths: tuple[int, ...] = ()
    shared_symbols: tuple[str, ...] = ()
    root_causes: tuple[RootCause, ...] = ()
    basis: Basis = Basis()
    context_limits: tuple[int | None, int | None] = (None, None)

    @property
    def failed(self) -> bool:
        """True if there is any finding."""
        return bool(self.findings)


def compare_sides(
    prefill: HandoffSide,
    decode: HandoffSide,
    consumer: Consumer,
    *,
    ranks: TensorParallelSizes | None = None,
    full_transfer: bool = False,
    tokens: Sequence[int] = (),
    more_findings: Sequence[Finding] = (),
    more_notes: Sequence[str] = (),
    more_basis: Basis = NO_BASIS,
    faults: PromptFaults = NO_FAULTS,
    context_limits: tuple[int | None, int | None] = (None, None),
    connectors: tuple[str | None, str | None] = (None, None),
) -> Handoff:
    """Compare two sides, and simulate the hand-off between them for every prompt length.

    Without `ranks`, heads and states are not checked. Prompts of the lengths in `tokens` are
    simulated, in addition to those at which something changes, unless they are beyond the context
    of a side. Further findings, notes and what a success rests on are about both sides together;
    further findings explain the `faults` of prompts. `context_limits` are as in `Handoff`;
    `connectors` are what vLLM is started with, if that is said.
    """
    writer, reader = (
        check_side(side, consumer, full_transfer, connector)
        for side, connector in zip((prefill, decode), connectors, strict=True)
    )
    comparison = build_comparison(writer, reader)
    root_causes = find_root_causes(comparison)
    findings, notes = _collect_findings(writer, reader, comparison, root_causes)
    if ranks is not None:
        findings += check_tensor_parallelism(prefill.layout, decode.layout, ranks)
        notes += list_sharding_notes(prefill.layout, decode.layout, ranks)
    findings += more_findings
    notes += more_notes
    basis = find_basis((prefill.layout, decode.layout), consumer)
    model_finding = prefill.model_finding or decode.model_finding
    model_cause = RootCause(model_finding) if model_finding and comparison.pairs else None
    evidence = Evidence(comparison, root_causes, tuple(findings), model_cause, faults)
    verdict = build_verdict(evidence)
    return Handoff(
        consumer=consumer,
        full_transfer=full_transfer,
        ranks=ranks,
        prefill=prefill,
        decode=decode,
        pair_results=judge_pairs(evidence),
        simulated_prompts=_simulate_prompts(prefill, decode, comparison, verdict, tokens),
        findings=evidence.findings,
        notes=tuple(notes),
        verdict=verdict,
        comparison=comparison,
        requested_lengths=tuple(dict.fromkeys(tokens)),
        shared_symbols=find_shared_symbols((prefill, decode), consumer, full_transfer),
        root_causes=root_causes,
        context_limits=context_limits,
        basis=Basis((*basis.facts, *more_basis.facts), (*basis.conditions, *more_basis.conditions)),
    )


def find_basis(layouts: tuple[Layout, Layout], consumer: Consumer) -> Basis:
    """Return what the success of a hand-off from prefill to decode rests on."""
    facts, conditions = list[str](), ["have the same weights"]
    if any(is_quantized(buffer.dtype) for layout in layouts for buffer in layout.buffers):
        conditions.append("use the same scales")
    if consumer.is_paged:  # nothing is compiled, and no rule is about a graph
        facts.append("equal layers, dtypes and sizes")
    else:
        facts.append(f"{consumer.name}'s rules")
        if all(layout.has_compiled_dtypes for layout in layouts):
            facts.append("the precision of both compiles")
        else:
            conditions.append("are compiled with the same precision")
    return Basis(tuple(facts), tuple(conditions))


def _collect_findings(
    writer: CheckedSide,
    reader: CheckedSide,
    comparison: Comparison,
    root_causes: Sequence[RootCause],
) -> tuple[list[Finding], list[str]]:
    """Return all findings, causes before consequences, and notes."""
    empty_sides = list(check_buffers_exist(writer.side, reader.side))
    if empty_sides:
        return empty_sides, []
    setup = comparison.setup
    findings = [
        *check_side_tokens(writer, reader),
        *check_startup(writer, reader),
        *check_unmatched_non_kv(writer, reader),
        *(root.finding for root in root_causes),
    ]
    order_findings = [*check_order(setup)]
    findings += order_findings
    reported = {finding.code for finding in findings}
    if not reported.isdisjoint(("KV608", "KV617")):
        reported.add("KV609")
    findings += check_each_side(writer, reader, reported)
    if not order_findings:
        findings += check_shifted_buffers(comparison, root_causes)
    notes = list_order_notes(writer.side, reader.side, setup.consumer)
    if setup.consumer.memory == "separate" and comparison.differences:
        notes.append(
            f"it is not documented how the runtime of {setup.consumer.name} treats an array of "
            "another size; it may refuse it"
        )
    return findings, [*notes, *list_update_notes(writer, reader)]


def _simulate_prompts(
    prefill: HandoffSide,
    decode: HandoffSide,
    comparison: Comparison,
    verdict: HandoffVerdict,
    tokens: Sequence[int],
) -> tuple[SimulatedPrompt, ...]:
    """Simulate prompts of all lengths of interest; none if offsets depend on unknown windows.

    Pages have no offsets that depend on the prompt: then only `tokens` are of interest.
    """
    setup, simulation = comparison.setup, comparison.simulation
    if simulation is None or (comparison.window_placeholder and setup.full_transfer):
        return ()
    is_paged = setup.consumer.is_paged
    lengths = tokens if is_paged else _choose_lengths(prefill, decode, comparison, tokens)
    return tuple(
        SimulatedPrompt(
            length,
            () if is_paged else setup.build_prefill_slots(length),
            () if is_paged else setup.build_decode_slots(length),
            tuple(i for i, each in simulation.wrong_ranges.items() if is_in_ranges(length, each)),
            is_in_ranges(length, verdict.refused_ranges),
        )
        for length in lengths
    )


def _choose_lengths(
    prefill: HandoffSide, decode: HandoffSide, comparison: Comparison, tokens: Sequence[int]
) -> tuple[int, ...]:
    """Return the prompt lengths to simulate, in ascending order.

    These are 1, each window and one more, the contexts, those at which a result changes or a
    buffer becomes full, so that all sizes between two of them are on a straight line, and
    `tokens`. Where nothing limits the context, the last is a sample. With a window of unknown
    size, only the result for 1 token is certain.
    """
    if comparison.window_placeholder or comparison.simulation is None:
        return (1,)
    lengths = {1, *tokens}
    for layout in (prefill.layout, decode.layout):
        for buffer in layout.buffers:
            window = layout.resolve_shape((buffer.window,))[0]
            if isinstance(window, int):
                lengths |= {window, window + 1}
        lengths.add(find_longest_prompt(layout))
    simulation = comparison.simulation
    for ranges in (*simulation.wrong_ranges.values(), simulation.refused_ranges):
        lengths |= {length for first, last in ranges for length in (first, last + 1)}
    lengths |= find_full_lengths(comparison.setup)
    known = [length for length in lengths if length < UNLIMITED_LENGTH]
    lengths.add(max(_UNLIMITED_SAMPLE, 2 * max(known)))
    limit = min(comparison.setup.longest_prompt, UNLIMITED_LENGTH - 1)
    return tuple(sorted(length for length in lengths if 1 <= length <= limit))
