"""Compare prefill and decode: decide whether a hand-off works, which prompts fail, and why."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from onnxkvrename.errors import KvRenameError
from onnxkvrename.findings import (
    Finding,
    begin_message,
    build_finding,
    promote_to_errors,
    quote_path,
)
from onnxkvrename.handoff.comparison import BufferPair, Comparison, build_comparison
from onnxkvrename.handoff.consumer import Consumer, MemoryKind
from onnxkvrename.handoff.root_causes import RootCause, find_root_causes
from onnxkvrename.handoff.selection import BufferId
from onnxkvrename.handoff.side_checks import (
    Basis,
    check_buffers_exist,
    check_each_side,
    check_same_model,
    check_scales_known,
    check_side,
    check_side_tokens,
    check_startup,
    check_unmatched_non_kv,
    find_basis,
    list_model_notes,
    list_update_notes,
)
from onnxkvrename.handoff.simulate import (
    PromptRanges,
    TransferSetup,
    find_full_lengths,
    is_in_ranges,
    merge_ranges,
)
from onnxkvrename.handoff.slots import MemorySlot, format_token_count
from onnxkvrename.handoff.tensor_parallel import (
    TensorParallelSizes,
    check_tensor_parallelism,
    list_sharding_notes,
)
from onnxkvrename.handoff.verdict import (
    DIFFERENT_MODELS,
    REFUSALS,
    HandoffVerdict,
    build_verdict,
)
from onnxkvrename.handoff.worker import (
    UNKNOWN_SIZE,
    UNLIMITED_LENGTH,
    HandoffSide,
    find_longest_prompt,
    find_shared_symbols,
    list_order_notes,
)

_UNLIMITED_SAMPLE = 4096
"""A prompt of at least so many tokens is simulated where the graphs do not limit the context."""
_SHIFTING_CAUSES = {
    ("KV613", "KV614", "KV615", "KV618"): "shape mismatch",
    ("KV612",): "dtype mismatch",
    ("KV611", "KV620"): "missing buffers",
    ("KV605",): "truncated buffers",
}
"""Codes of root causes that shift other buffers, with a short name for each group."""


class PairResult(NamedTuple):
    """The result of comparing a pair of buffers.

    Attributes:
        pair: The buffer on both sides.
        code: The code of the finding about this pair, `None` if the pair itself is right.
        wrong_ranges: The prompt lengths at which decode reads wrong bytes.
        is_undecided: Whether the result depends on sizes that are not known: those of this pair,
            or of a pair before it.
    """

    pair: BufferPair
    code: str | None
    wrong_ranges: PromptRanges
    is_undecided: bool = False


class SimulatedPrompt(NamedTuple):
    """A simulated hand-off of one prompt.

    Attributes:
        tokens: The length of the prompt in tokens.
        prefill_slots: The slots as prefill writes them.
        decode_slots: The slots as decode reads them.
        wrong_buffer_ids: The buffers for which decode reads wrong bytes.
        is_refused: Whether decode finds the memory too small and stops.
    """

    tokens: int
    prefill_slots: tuple[MemorySlot, ...]
    decode_slots: tuple[MemorySlot, ...]
    wrong_buffer_ids: tuple[BufferId, ...]
    is_refused: bool


class Handoff(NamedTuple):
    """The result of a comparison.

    Attributes:
        consumer_name: The consumer on both sides.
        memory: Where the consumer puts the buffers that it hands over.
        has_token: Whether the consumer selects buffers by a token, which a rename can add.
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
    """

    consumer_name: str
    memory: MemoryKind
    has_token: bool
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
    strict: bool = False,
) -> Handoff:
    """Compare two sides, and simulate the hand-off between them for every prompt length.

    Args:
        prefill: The side that writes.
        decode: The side that reads.
        consumer: The consumer on both sides.
        ranks: The tensor parallel sizes; `None` to skip the check of heads and states.
        full_transfer: Whether the consumer moves all of each buffer, whatever the prompt.
        tokens: Prompt lengths to simulate, in addition to those at which something changes.
            Lengths beyond the context of a side are not simulated.
        more_findings: Further findings about the two sides together.
        more_notes: Further notes about them.
        strict: Whether scales that are not known are a finding, not a note.

    Raises:
        KvRenameError: The consumer does not hand buffers from one model to another.
    """
    if consumer.memory == "none":
        model = quote_path(prefill.path or "MODEL")
        raise KvRenameError(
            f"nothing to compare: {consumer.name} runs prefill and decode with one model",
            hint=f"`onnxkvrename check-consumer {model} --target {consumer.name}` checks one model",
        )
    comparison = build_comparison(prefill, decode, consumer, full_transfer)
    root_causes = find_root_causes(comparison)
    findings, notes = _collect_findings(prefill, decode, comparison, root_causes, strict=strict)
    if ranks is not None:
        findings += check_tensor_parallelism(prefill.layout, decode.layout, ranks)
        notes += list_sharding_notes(prefill.layout, decode.layout, ranks)
    findings += more_findings
    notes += more_notes
    model_finding = (prefill.model_finding or decode.model_finding) if comparison.pairs else None
    return Handoff(
        consumer_name=consumer.name,
        memory=consumer.memory,
        has_token=bool(consumer.token),
        full_transfer=full_transfer,
        ranks=ranks,
        prefill=prefill,
        decode=decode,
        pair_results=_build_pair_results(
            comparison,
            root_causes,
            model_finding,
            {finding.code for finding in findings},
        ),
        simulated_prompts=_simulate_prompts(prefill, decode, comparison, tokens),
        findings=tuple(findings),
        notes=tuple(notes),
        verdict=build_verdict(findings, root_causes, comparison, model_finding),
        comparison=comparison,
        requested_lengths=tuple(dict.fromkeys(tokens)),
        shared_symbols=find_shared_symbols((prefill, decode), consumer, full_transfer),
        root_causes=root_causes,
        basis=find_basis((prefill, decode), consumer, comparison.pairs),
    )


def _collect_findings(
    prefill: HandoffSide,
    decode: HandoffSide,
    comparison: Comparison,
    root_causes: Sequence[RootCause],
    *,
    strict: bool,
) -> tuple[list[Finding], list[str]]:
    """Return all findings, causes before consequences, and notes."""
    empty_sides = list(check_buffers_exist(prefill, decode))
    if empty_sides:
        return empty_sides, []
    setup = comparison.setup
    writer = check_side(prefill, setup.consumer, setup.full_transfer)
    reader = check_side(decode, setup.consumer, setup.full_transfer)
    findings = [
        *check_side_tokens(writer, reader),
        *check_same_model(writer, reader),
        *check_startup(writer, reader),
        *check_unmatched_non_kv(writer, reader),
        *(root.finding for root in root_causes),
    ]
    order_findings = _check_order(setup)
    findings += order_findings
    reported = {finding.code for finding in findings}
    if not reported.isdisjoint(("KV608", "KV617")):
        reported.add("KV609")
    findings += check_each_side(writer, reader, reported)
    if not order_findings:
        findings += _check_shifted_buffers(comparison, root_causes)
    notes = list_order_notes(prefill, decode, setup.consumer)
    if setup.consumer.memory == "separate" and comparison.differences:
        notes.append(
            f"it is not documented how the runtime of {setup.consumer.name} treats an array of "
            "another size; it may refuse it"
        )
    if {finding.code for finding in findings} <= {"KV616"}:  # it works, once renamed
        notes += list_model_notes(writer, reader)
    for finding in check_scales_known(comparison.pairs):
        if strict:
            findings += promote_to_errors([finding])
        else:
            notes.append(f"{finding.subject} {finding.message} ({finding.code})".lstrip())
    return findings, [*notes, *list_update_notes(writer, reader)]


def _build_pair_results(
    comparison: Comparison,
    root_causes: Sequence[RootCause],
    model_finding: Finding | None,
    reported: Collection[str],
) -> tuple[PairResult, ...]:
    """Return the result for each pair.

    An error of a model itself, if there is one, is the `model_finding`; the codes of all findings
    are `reported`.
    """
    all_wrong = DIFFERENT_MODELS if DIFFERENT_MODELS in reported else None
    setup, simulation = comparison.setup, comparison.simulation
    wrong_ranges = simulation.wrong_ranges if simulation is not None else {}
    codes = {
        buffer_id: root.finding.code
        for root in reversed(root_causes)
        for buffer_id in root.buffer_ids
    }
    lost_code = "KV624" if "KV624" in reported else "KV616"
    if model_finding is not None:
        lost_code = model_finding.code
    undecided = {each for root in root_causes if root.is_undecided for each in root.buffer_ids}
    positions = [each.buffer_id for each in setup.decode_inputs]
    first = next((i for i, each in enumerate(positions) if each in undecided), len(positions))
    shiftable = set(positions[first:])
    transferred = setup.transferred_ids
    results = []
    for pair in comparison.pairs:
        code = codes.get(pair.buffer_id, None if pair.buffer_id in transferred else lost_code)
        if code is None and setup.consumer.needs_in_place and _is_resized(pair):
            code = "KV120"
        code = code or all_wrong
        is_undecided = pair.buffer_id in (shiftable if code is None else undecided)
        ranges = wrong_ranges.get(pair.buffer_id, ())
        results.append(PairResult(pair, code, ranges, is_undecided))
    return tuple(results)


def _is_resized(pair: BufferPair) -> bool:
    """Return whether a retained output and its input differ in size, on either side."""
    return any(side is not None and side.update.is_resized for side in (pair.prefill, pair.decode))


def _check_order(setup: TransferSetup) -> list[Finding]:
    """Return KV617 if buffers that both sides have are not in the same order."""
    transferred = setup.transferred_ids
    written, read = (
        [each for each in values if each.buffer_id in transferred]
        for values in (setup.prefill_outputs, setup.decode_inputs)
    )
    misplaced = [
        (output, place)
        for output, place in zip(written, read, strict=False)
        if output.buffer_id != place.buffer_id
    ]
    if not misplaced:
        return []
    _, place = misplaced[0]
    names = [each.value.name for each, _ in misplaced]
    where = f"where decode reads {place.value.name}"
    if len(names) > 1:
        where = f"where decode reads other buffers, the first one where it reads {place.value.name}"
    finding = build_finding(
        "KV617",
        names[0],
        f"{begin_message(names, 'is', 'are', 'outputs')} written {where}: prefill's outputs and "
        "decode's inputs have different orders",
        "use the same names on both sides: the consumer pairs by order only",
    )
    return [finding]


def _check_shifted_buffers(
    comparison: Comparison, root_causes: Sequence[RootCause]
) -> list[Finding]:
    """Return KV618, once for all buffers that are right themselves but have another offset."""
    setup, simulation = comparison.setup, comparison.simulation
    if simulation is None:
        return []
    root_ids = {buffer_id for root in root_causes for buffer_id in root.buffer_ids}
    candidates = setup.transferred_ids - root_ids
    shifted = {
        buffer_id: ranges
        for buffer_id, ranges in simulation.wrong_ranges.items()
        if ranges and buffer_id in candidates
    }
    if not shifted:
        return []
    tokens = merge_ranges(*shifted.values())[0][0]
    buffer_id = next(each for each, ranges in shifted.items() if is_in_ranges(tokens, ranges))
    names = {pair.buffer_id: pair.name for pair in comparison.pairs}
    is_refused = is_in_ranges(tokens, simulation.refused_ranges)
    later = f"{_format_later_count(len(shifted) - 1)}, and " if len(shifted) > 1 else ""
    effect = REFUSALS[setup.consumer.memory] if is_refused else "decode cannot detect it"
    finding = build_finding(
        "KV618",
        names.get(buffer_id, buffer_id[1]),
        f"is shifted: {_format_offsets(buffer_id, comparison, tokens)}; {later}{effect}",
        _choose_shift_hint(comparison, root_causes),
    )
    return [finding]


def _choose_shift_hint(comparison: Comparison, root_causes: Sequence[RootCause]) -> str:
    """Return the hint for shifted buffers: fix the root cause, or use the same names or context."""
    if comparison.setup.consumer.memory == "separate":
        return "use the same names on both sides: buffers are handed over by position"
    for codes, cause in _SHIFTING_CAUSES.items():
        if any(root.buffer_ids and root.finding.code in codes for root in root_causes):
            return f"fix the {cause} above"
    return "compile both for the same context: each side computes offsets from its own shapes"


def _format_offsets(buffer_id: BufferId, comparison: Comparison, tokens: int) -> str:
    """Return a clause that says where decode reads a buffer and where prefill wrote it."""
    setup, placeholder = comparison.setup, comparison.window_placeholder
    if setup.consumer.memory == "separate":
        return "decode reads it from a different array than prefill wrote it to"
    written = zip(setup.prefill_outputs, setup.build_prefill_slots(tokens), strict=False)
    written_at = next(slot.offset for output, slot in written if output.buffer_id == buffer_id)
    decode_slots = setup.build_decode_slots(tokens)
    read_at = next(slot.offset for slot in decode_slots if slot.buffer_id == buffer_id)
    depends_on_placeholder = placeholder is not None and (
        setup.full_transfer or tokens > placeholder
    )
    if depends_on_placeholder or max(written_at, read_at) >= UNKNOWN_SIZE:
        return "decode reads it at a different byte than prefill wrote it to"
    prompt = format_token_count(tokens)
    return (
        f"decode reads it at byte {read_at:,}, prefill wrote it at {written_at:,} (prompt of "
        f"{prompt})"
    )


def _format_later_count(count: int) -> str:
    return "1 later buffer shifts too" if count == 1 else f"{count:,} later buffers shift too"


def _simulate_prompts(
    prefill: HandoffSide, decode: HandoffSide, comparison: Comparison, tokens: Sequence[int]
) -> tuple[SimulatedPrompt, ...]:
    """Simulate prompts of all lengths of interest; none if offsets depend on unknown windows."""
    setup, simulation = comparison.setup, comparison.simulation
    if simulation is None or (comparison.window_placeholder and setup.full_transfer):
        return ()
    lengths = _choose_lengths(prefill, decode, comparison, tokens)
    return tuple(
        SimulatedPrompt(
            length,
            setup.build_prefill_slots(length),
            setup.build_decode_slots(length),
            tuple(i for i, each in simulation.wrong_ranges.items() if is_in_ranges(length, each)),
            is_in_ranges(length, simulation.refused_ranges),
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
