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
from onnxkvrename.handoff.verdict import (
    Evidence,
    HandoffVerdict,
    PairResult,
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
        prefill: The side that writes.
        decode: The side that reads.
        pair_results: The result for each buffer, sorted by layer.
        simulated_prompts: The simulated prompts, the shortest first.
        findings: All findings, causes before consequences.
        notes: Harmless differences that are worth knowing.
        verdict: The overall result.
        comparison: The paired buffers and the simulation, from which the rest follows.
        shared_symbols: The symbols without a size that must be equal on both sides.
        root_causes: The findings that are not consequences of others, with their buffers.
        conditions: What is not compared, each to be continued after ``both sides``.
    """

    consumer: Consumer
    full_transfer: bool
    prefill: HandoffSide
    decode: HandoffSide
    pair_results: tuple[PairResult, ...]
    simulated_prompts: tuple[SimulatedPrompt, ...]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    verdict: HandoffVerdict
    comparison: Comparison
    shared_symbols: tuple[str, ...] = ()
    root_causes: tuple[RootCause, ...] = ()
    conditions: tuple[str, ...] = ()

    @property
    def failed(self) -> bool:
        """True if there is any finding."""
        return bool(self.findings)


def compare_sides(
    prefill: HandoffSide,
    decode: HandoffSide,
    consumer: Consumer,
    *,
    full_transfer: bool = False,
) -> Handoff:
    """Compare two sides, and simulate the hand-off between them for every prompt length."""
    writer, reader = (check_side(side, consumer, full_transfer) for side in (prefill, decode))
    comparison = build_comparison(writer, reader)
    root_causes = find_root_causes(comparison)
    findings, notes = _collect_findings(writer, reader, comparison, root_causes)
    model_finding = prefill.model_finding or decode.model_finding
    model_cause = RootCause(model_finding) if model_finding and comparison.pairs else None
    evidence = Evidence(comparison, root_causes, tuple(findings), model_cause)
    verdict = build_verdict(evidence)
    return Handoff(
        consumer=consumer,
        full_transfer=full_transfer,
        prefill=prefill,
        decode=decode,
        pair_results=judge_pairs(evidence),
        simulated_prompts=_simulate_prompts(prefill, decode, comparison, verdict),
        findings=evidence.findings,
        notes=tuple(notes),
        verdict=verdict,
        comparison=comparison,
        shared_symbols=find_shared_symbols((prefill, decode), consumer, full_transfer),
        root_causes=root_causes,
        conditions=_list_conditions((prefill.layout, decode.layout)),
    )


def _list_conditions(layouts: tuple[Layout, Layout]) -> tuple[str, ...]:
    """Return what is not compared, and must hold of both sides."""
    is_scaled = any(is_quantized(buffer.dtype) for layout in layouts for buffer in layout.buffers)
    return (
        "have the same weights",
        *(["use the same scales"] if is_scaled else []),
        "are compiled with the same precision",
    )


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
) -> tuple[SimulatedPrompt, ...]:
    """Simulate prompts of all lengths of interest; none if offsets depend on unknown windows."""
    setup, simulation = comparison.setup, comparison.simulation
    if simulation is None or (comparison.window_placeholder and setup.full_transfer):
        return ()
    return tuple(
        SimulatedPrompt(
            length,
            setup.build_prefill_slots(length),
            setup.build_decode_slots(length),
            tuple(i for i, each in simulation.wrong_ranges.items() if is_in_ranges(length, each)),
            is_in_ranges(length, verdict.refused_ranges),
        )
        for length in _choose_lengths(prefill, decode, comparison)
    )


def _choose_lengths(
    prefill: HandoffSide, decode: HandoffSide, comparison: Comparison
) -> tuple[int, ...]:
    """Return the prompt lengths to simulate, in ascending order.

    These are 1, each window and one more, the contexts, those at which a result changes or a
    buffer becomes full, so that all sizes between two of them are on a straight line. Where nothing
    limits the context, the last is a sample. With a window of unknown size, only the result for 1
    token is certain.
    """
    if comparison.window_placeholder or comparison.simulation is None:
        return (1,)
    lengths = {1}
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
