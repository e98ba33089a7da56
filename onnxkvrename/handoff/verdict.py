"""Explain a hand-off: which buffers are wrong themselves, and what follows for which prompts.

From the facts of a comparison, in this order: root causes, and the findings about buffers that only
follow from them; the state of each pair; the verdict, with the causes of each prompt length. A
buffer that is only shifted by another one is not a root cause.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple

from onnxkvrename.findings import (
    CODES,
    UNKNOWN_TRANSFER,
    Finding,
    begin_message,
    build_finding,
    report_names,
)
from onnxkvrename.handoff.comparison import (
    BufferPair,
    Comparison,
    Difference,
    format_buffer_type,
)
from onnxkvrename.handoff.consumer import MemoryKind
from onnxkvrename.handoff.consumer_checks import describe_content
from onnxkvrename.handoff.selection import BufferId
from onnxkvrename.handoff.simulate import (
    PromptRanges,
    SimulationResult,
    TransferSetup,
    is_in_ranges,
    merge_ranges,
    subtract_ranges,
)
from onnxkvrename.handoff.slots import format_token_count
from onnxkvrename.handoff.worker import HAS_NO_BUFFER, UNKNOWN_SIZE, UNLIMITED_LENGTH
from onnxkvrename.text import format_layers, format_list

Outcome = Literal["works", "corrupts", "fails", "loses", "unknown"]

STARTUP_FAILURE_CODES = (
    "KV001",
    "KV120",
    "KV603",
    "KV604",
    "KV606",
    "KV610",
    "KV624",
)
"""Findings that stop a side before any hand-off: it cannot be compiled, started, connected, run."""
COUNT_CODES = ("KV604", "KV624")
"""Those that stop it at start-up or at the first prompt, as its consumer counts buffers."""
_CORRUPTING_CODES = ("KV609", "KV615", "KV617")
"""Findings after which decode reads wrong values, even if a simulated prompt does not show it."""
_UNDECIDED_CODES = ("KV602", UNKNOWN_TRANSFER)
"""Findings after which the hand-off may work."""
_TOKEN_CODE = "KV616"
"""The finding of names without the token; the verdict assumes that they are renamed."""
_FALLBACK_RANKS = {
    **dict.fromkeys(("KV608", "KV609", "KV617"), 0),  # positions on the two sides differ
    _TOKEN_CODE: 1,
    "KV618": 2,
}
"""Findings that explain a prompt which no root cause explains, the likeliest first."""

REFUSALS: Mapping[MemoryKind, str] = MappingProxyType(
    {
        "shared": "decode finds the shared memory too small and stops",
        "separate": "prefill writes a different number of buffers than decode has",
    }
)
"""Why a hand-off is refused, by the memory that it goes through."""
_HINTS = {
    "KV612": "export both with the same precision",
    "KV613": "export both from the same model with the same settings",
    "KV614": "export and compile both with the same settings: enable_chunking, retain_full_kv, "
    "sliding_window",
    "KV615": "export both with the same version of the exporter",
    "KV618": "compile both for the same context",
}
_SHIFTING_CAUSES = {
    **dict.fromkeys(("KV613", "KV614", "KV615", "KV618"), "shape mismatch"),
    "KV612": "dtype mismatch",
    "KV611": "missing buffers",
    "KV605": "truncated buffers",
}
"""Codes of root causes that shift other buffers, with a short name for each."""


class RootCause(NamedTuple):
    """A finding that explains why a hand-off fails, with the buffers that have it.

    Attributes:
        finding: The finding.
        buffer_ids: The buffers that are wrong themselves; empty if it is not about buffers.
        difference: The difference between the two sides of these buffers, if it is about one.
        own_summary: A summary that says more than the title of the finding's code.
    """

    finding: Finding
    buffer_ids: tuple[BufferId, ...] = ()
    difference: Difference | None = None
    own_summary: str = ""

    @property
    def summary(self) -> str:
        """The finding in a few words: in general, the title of its code.

        KV001 says which side has no cache, KV624 which names the consumer does not select, KV630
        what is not known.
        """
        if self.finding.code == "KV001":
            before, words, _ = self.finding.message.partition(HAS_NO_BUFFER)
            return before + words
        if self.finding.code == UNKNOWN_TRANSFER:
            return self.finding.message
        if self.finding.code == "KV624" and self.finding.name:
            return f"{self.finding.subject} {self.finding.message.partition(';')[0]}".lstrip()
        return self.own_summary or CODES[self.finding.code].title

    @property
    def is_undecided(self) -> bool:
        """True if it is a difference only for some sizes that are not known."""
        return self.difference is not None and self.difference.is_undecided


class Evidence(NamedTuple):
    """What the verdict follows from: facts, and findings with causes before consequences.

    An error of a model itself, if there is one, is the `model_cause`: it comes before all others.
    """

    comparison: Comparison
    root_causes: tuple[RootCause, ...]
    findings: tuple[Finding, ...]
    model_cause: RootCause | None

    @property
    def codes(self) -> frozenset[str]:
        """The codes of the findings, without that of the model."""
        return frozenset(finding.code for finding in self.findings)


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


class AffectedRange(NamedTuple):
    """Prompt lengths that go wrong for the same causes.

    Attributes:
        ranges: The lengths.
        is_refused: Whether decode stops with an error; otherwise it reads wrong bytes.
        causes: The causes, the most likely first.
    """

    ranges: PromptRanges
    is_refused: bool
    causes: tuple[RootCause, ...]


class HandoffVerdict(NamedTuple):
    """The prediction for the hand-off, assuming that the names are right.

    Attributes:
        outcome: The overall result.
        corrupt_ranges: The prompt lengths at which decode would read wrong bytes silently.
        refused_ranges: The prompt lengths at which decode would stop.
        longest_prompt: The longest prompt in tokens that both sides have room for, `None` if the
            graphs do not limit it.
        window_symbol: The symbol of a window of unknown size; longer prompts go wrong. `None` if
            there is none.
        window_placeholder: The number that the ranges have for this window.
        first_cause: The cause to fix first.
        affected_ranges: The causes for each prompt length that goes wrong.
    """

    outcome: Outcome
    corrupt_ranges: PromptRanges
    refused_ranges: PromptRanges
    longest_prompt: int | None
    window_symbol: str | None
    window_placeholder: int | None
    first_cause: RootCause | None
    affected_ranges: tuple[AffectedRange, ...] = ()


def find_root_causes(comparison: Comparison) -> tuple[RootCause, ...]:
    """Return missing buffers, differing buffers and truncated ones, in this order."""
    return (
        *_find_missing_buffers(comparison.pairs),
        *_find_differing_buffers(comparison),
        *_find_truncated_buffers(comparison),
    )


def _list_ids(pairs: Sequence[BufferPair]) -> tuple[BufferId, ...]:
    return tuple(pair.buffer_id for pair in pairs)


def _list_layers(pairs: Iterable[BufferPair]) -> list[int]:
    return sorted({pair.present_buffer.layer for pair in pairs})


def _find_missing_buffers(pairs: Sequence[BufferPair]) -> Iterator[RootCause]:
    """Find KV611: buffers on one side only."""
    incomplete = [pair for pair in pairs if None in pair]
    for index, (side, other_side) in enumerate((("prefill", "decode"), ("decode", "prefill"))):
        group = [pair for pair in incomplete if pair[index] is not None]
        if not group:
            continue
        layers = _list_layers(group)
        other_layers = _list_layers(pair for pair in pairs if pair[1 - index] is not None)
        parts = format_list(list(dict.fromkeys(pair.present_buffer.part for pair in group)))
        buffers = f"{parts} of {format_layers(layers)}"
        verb = "is" if len(group) == 1 else "are"
        summary = f"{buffers} {verb} on {side} only"
        if set(layers).isdisjoint(other_layers):
            verb = "is" if len(layers) == 1 else "are"
            summary = f"{format_layers(layers)} {verb} on {side} only"
        names = [pair.name for pair in group]
        text = f"{begin_message(names, f'{names[0]} is', 'are', 'buffers')} on {side} only"
        text += f" ({buffers})"
        hint = (
            f"check whether {other_side} is another model, cut short, or passed without some of "
            "its windows"
        )
        finding = build_finding("KV611", "", text, hint)
        yield RootCause(finding, _list_ids(group), own_summary=summary)


def _find_differing_buffers(comparison: Comparison) -> Iterator[RootCause]:
    """Find pairs whose difference affects a prompt, or may; one cause for equal differences."""
    simulation, placeholder = comparison.simulation, comparison.window_placeholder
    transferred = comparison.setup.transferred_ids
    visible = comparison.any_simulation
    groups: dict[tuple[Difference, int | None], list[BufferPair]] = {}
    for pair, difference in comparison.differences:
        ranges = () if visible is None else visible.differing_ranges.get(pair.buffer_id, ())
        if simulation is None and (difference.is_certain or difference.needed_symbols):
            ranges = ()
        is_never_read = (
            simulation is None
            or simulation.refused_ranges
            or pair.buffer_id not in transferred
            or difference.has_moved_batch
        )
        if ranges or difference.is_undecided or (difference.is_certain and is_never_read):
            last_equal = ranges[0][0] - 1 if ranges else placeholder
            known_last = None if last_equal == placeholder else last_equal
            groups.setdefault((difference, known_last), []).append(pair)
    for (difference, known_last), pairs in groups.items():
        hint = _HINTS[difference.code]
        finding = _build_difference_finding(difference, pairs, known_last, hint)
        summary = _summarize_windows(difference) if finding.code == "KV614" else ""
        yield RootCause(finding, _list_ids(pairs), difference, summary)


def _build_difference_finding(
    difference: Difference, pairs: Sequence[BufferPair], last_equal: int | None, hint: str
) -> Finding:
    """Return one finding for buffers with the same difference.

    The longest prompt that it does not affect has `last_equal` tokens, `None` if that is not known.
    The hint is replaced where sizes decide.
    """
    message = f"{_begin_difference(pairs)} {difference.prefill} on prefill and "
    message += f"{difference.decode} on decode"
    if len(pairs) > 1:
        message += f" ({format_layers(_list_layers(pairs))})"
    if difference.window_sizes:
        message += f": {_summarize_windows(difference)}"
    if difference.code == "KV614" and last_equal:
        message += f"; prompts longer than {format_token_count(last_equal)} differ"
    elif difference.code == "KV614" and difference.is_certain and difference.needed_symbols:
        if last_equal is None:
            symbols = " or ".join(difference.needed_symbols)
            message += f"; prompts longer than {symbols} differ"
    elif difference.is_undecided:
        symbols = " and ".join(difference.needed_symbols)
        message += f"; whether the sides differ depends on {symbols}"
    if difference.needed_symbols and difference.is_certain:
        hint = f"pass {' '.join(difference.size_arguments)} to see from which prompt length on"
    elif difference.needed_symbols:
        hint = f"pass {' '.join(difference.size_arguments)}"
    return build_finding(difference.code, pairs[0].name, message, hint)


def _summarize_windows(difference: Difference) -> str:
    if difference.window_sizes is None:
        return "a window on one side, the whole context on the other"
    prefill_size, decode_size = difference.window_sizes
    return f"windows of {prefill_size} and {decode_size} tokens"


def _begin_difference(pairs: Sequence[BufferPair]) -> str:
    return begin_message([pair.name for pair in pairs], "is", "are", "buffers")


def _find_truncated_buffers(comparison: Comparison) -> Iterator[RootCause]:
    """Find KV605: buffers of which short prompts move only a part, the same on both sides."""
    if comparison.simulation is None:
        return
    groups: dict[tuple[str, str, int], list[BufferPair]] = {}
    for pair in comparison.pairs:
        ranges = comparison.simulation.truncated_ranges.get(pair.buffer_id, ())
        if ranges and pair.decode is not None:
            type_text = format_buffer_type(comparison.setup.decode, pair.decode)
            key = (describe_content(pair.decode), type_text, ranges[-1][1])
            groups.setdefault(key, []).append(pair)
    for (content, type_text, last), pairs in groups.items():
        prompts = "a short prompt"
        if last < UNLIMITED_LENGTH:
            prompts = f"a prompt of up to {format_token_count(last)}"
        finding = build_finding(
            "KV605",
            pairs[0].name,
            f"{_begin_difference(pairs)} {type_text} ({content}), and {prompts} moves only a part",
            "set VLLM_QAIC_USE_FULL_KV_TRANSFER=1 on both sides to move all of each buffer, and "
            "pass `--full-transfer`",
        )
        yield RootCause(finding, _list_ids(pairs))


def check_order(setup: TransferSetup) -> Iterator[Finding]:
    """Yield KV617 if buffers that both sides have are not in the same order."""
    transferred = setup.transferred_ids
    written, read = (
        [each for each in values if each.buffer_id in transferred]
        for values in (setup.prefill_outputs, setup.decode_inputs)
    )
    pairs = [*zip(written, read, strict=False)]
    misplaced = [(out, place) for out, place in pairs if out.buffer_id != place.buffer_id]
    where = "where decode reads "
    if len(misplaced) > 1:
        where += "other buffers, the first one where it reads "
    first = misplaced[0][1].value.name if misplaced else ""
    return report_names(
        "KV617",
        [output.value.name for output, _ in misplaced],
        ("is", "are"),
        f"written {where}{first}: prefill's outputs and decode's inputs have different orders",
        "use the same names on both sides: the consumer pairs by order only",
        "outputs",
    )


def check_shifted_buffers(
    comparison: Comparison, root_causes: Sequence[RootCause]
) -> Iterator[Finding]:
    """Yield KV618, once for all buffers that are right themselves but have another offset."""
    setup, simulation = comparison.setup, comparison.simulation
    if simulation is None:
        return
    root_ids = {buffer_id for root in root_causes for buffer_id in root.buffer_ids}
    candidates = setup.transferred_ids - root_ids
    shifted = {
        buffer_id: ranges
        for buffer_id, ranges in simulation.wrong_ranges.items()
        if ranges and buffer_id in candidates
    }
    if not shifted:
        return
    tokens = merge_ranges(*shifted.values())[0][0]
    buffer_id = next(each for each, ranges in shifted.items() if is_in_ranges(tokens, ranges))
    names = {pair.buffer_id: pair.name for pair in comparison.pairs}
    is_refused = is_in_ranges(tokens, simulation.refused_ranges)
    later = f"{_format_later_count(len(shifted) - 1)}, and " if len(shifted) > 1 else ""
    effect = REFUSALS[setup.consumer.memory] if is_refused else "decode cannot detect it"
    yield build_finding(
        "KV618",
        names.get(buffer_id, buffer_id[1]),
        f"is shifted: {_format_offsets(buffer_id, comparison, tokens)}; {later}{effect}",
        _choose_shift_hint(comparison, root_causes),
    )


def _choose_shift_hint(comparison: Comparison, root_causes: Sequence[RootCause]) -> str:
    """Return the hint for shifted buffers: fix the root cause, or use the same names or context."""
    if comparison.setup.consumer.memory == "separate":
        return "use the same names on both sides: buffers are handed over by position"
    reported = {root.finding.code for root in root_causes if root.buffer_ids}
    cause = next((name for code, name in _SHIFTING_CAUSES.items() if code in reported), None)
    if cause is not None:
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


def judge_pairs(evidence: Evidence) -> tuple[PairResult, ...]:
    """Return the result for each pair."""
    comparison, root_causes = evidence.comparison, evidence.root_causes
    setup, simulation = comparison.setup, comparison.simulation
    wrong_ranges = simulation.wrong_ranges if simulation is not None else {}
    codes = {
        buffer_id: root.finding.code
        for root in reversed(root_causes)
        for buffer_id in root.buffer_ids
    }
    lost_code = "KV624" if "KV624" in evidence.codes else _TOKEN_CODE
    if evidence.model_cause is not None:
        lost_code = evidence.model_cause.finding.code
    undecided = {each for root in root_causes if root.is_undecided for each in root.buffer_ids}
    positions = [each.buffer_id for each in setup.decode_inputs]
    first = next((i for i, each in enumerate(positions) if each in undecided), len(positions))
    shiftable = set(positions[first:])
    transferred = setup.transferred_ids
    results = []
    for pair in comparison.pairs:
        code = codes.get(pair.buffer_id, None if pair.buffer_id in transferred else lost_code)
        if code is None and _is_resized(pair):
            code = "KV120"
        is_undecided = pair.buffer_id in (shiftable if code is None else undecided)
        ranges = wrong_ranges.get(pair.buffer_id, ())
        results.append(PairResult(pair, code, ranges, is_undecided))
    return tuple(results)


def _is_resized(pair: BufferPair) -> bool:
    """Return whether a retained output and its input differ in size, on either side."""
    return any(side is not None and side.update.is_resized for side in (pair.prefill, pair.decode))


def build_verdict(evidence: Evidence) -> HandoffVerdict:
    """Return the verdict."""
    comparison = evidence.comparison
    refused, corrupt = _find_wrong_ranges(evidence)
    placeholder, longest = comparison.window_placeholder, comparison.setup.longest_prompt
    symbols = (
        root.difference.needed_symbols[0]
        for root in evidence.root_causes
        if root.difference is not None and root.difference.needed_symbols
    )
    return HandoffVerdict(
        outcome=_decide_outcome(evidence, refused, corrupt),
        corrupt_ranges=corrupt,
        refused_ranges=refused,
        longest_prompt=None if longest == UNLIMITED_LENGTH else longest,
        window_symbol=next(symbols, None) if placeholder else None,
        window_placeholder=placeholder,
        first_cause=_find_first_cause(evidence),
        affected_ranges=(
            *_group_by_cause(evidence, corrupt, is_refused=False),
            *_group_by_cause(evidence, refused, is_refused=True),
        ),
    )


def _find_wrong_ranges(evidence: Evidence) -> tuple[PromptRanges, PromptRanges]:
    """Return the lengths that decode refuses, and those at which it reads wrong bytes."""
    simulation = evidence.comparison.simulation
    if simulation is None:
        return (), ()
    is_all_wrong = "KV609" in evidence.codes
    all_lengths = ((1, evidence.comparison.setup.longest_prompt),) if is_all_wrong else ()
    wrong = merge_ranges(*simulation.wrong_ranges.values(), all_lengths)
    return simulation.refused_ranges, subtract_ranges(wrong, simulation.refused_ranges)


def _decide_outcome(evidence: Evidence, refused: PromptRanges, corrupt: PromptRanges) -> Outcome:
    codes = evidence.codes - {_TOKEN_CODE}
    if not codes.isdisjoint(STARTUP_FAILURE_CODES):
        return "fails"
    if refused and not corrupt:
        return "fails"  # a prompt that is refused is not read wrongly, whatever else is wrong
    if corrupt or not codes.isdisjoint(_CORRUPTING_CODES):
        return "corrupts"
    if evidence.comparison.simulation is None:
        differences = [root.difference for root in evidence.root_causes]
        is_certain = any(each is not None and each.is_certain for each in differences)
        return "corrupts" if is_certain else "unknown"
    if codes.difference(_UNDECIDED_CODES):
        return "loses"
    return "unknown" if codes or evidence.model_cause is not None else "works"


def _find_first_cause(evidence: Evidence) -> RootCause | None:
    """Return the error of a model, else what stops a side, else the first finding but KV616."""
    if evidence.model_cause is not None:
        return evidence.model_cause
    candidates = [finding for finding in evidence.findings if finding.code != _TOKEN_CODE]
    stopping = [finding for finding in candidates if finding.code in STARTUP_FAILURE_CODES]
    first = next(iter((*stopping, *candidates)), None)
    if first is None:
        return None
    return next((root for root in evidence.root_causes if root.finding == first), RootCause(first))


def _group_by_cause(
    evidence: Evidence, ranges: PromptRanges, *, is_refused: bool
) -> Iterator[AffectedRange]:
    """Yield the lengths that go wrong for the same causes."""
    setup, simulation = evidence.comparison.setup, evidence.comparison.simulation
    if simulation is None:
        return
    blamed = [root for root in evidence.root_causes if _can_affect_others(root, setup)]
    fallback = _find_fallback_cause(evidence)
    groups: dict[tuple[RootCause, ...], list[tuple[int, int]]] = {}
    for prompt_range in ranges:
        causes: list[RootCause] = []
        unexplained: PromptRanges = (prompt_range,)
        for root in blamed:
            remaining = subtract_ranges(
                unexplained, _find_blamed_ranges(root, simulation, prompt_range)
            )
            if remaining != unexplained:
                causes.append(root)
            unexplained = remaining
        if unexplained and fallback is not None:
            causes.insert(0, fallback)
        groups.setdefault(tuple(causes), []).append(prompt_range)
    for group, lengths in groups.items():
        yield AffectedRange(tuple(lengths), is_refused, group)


def _can_affect_others(root: RootCause, setup: TransferSetup) -> bool:
    """Return whether a cause may shift other buffers.

    Prefill's buffers after the last one that decode reads do not shift others.
    """
    read_ids = {each.buffer_id for each in setup.decode_inputs}
    written_ids = [each.buffer_id for each in setup.prefill_outputs]
    last = max((i for i, each in enumerate(written_ids) if each in read_ids), default=-1)
    return not set(written_ids[last + 1 :]).issuperset(root.buffer_ids)


def _find_blamed_ranges(
    root: RootCause, simulation: SimulationResult, prompt_range: tuple[int, int]
) -> PromptRanges:
    """Return the lengths that a cause explains; the whole range if the simulation shows none."""
    is_difference = root.difference is not None
    ranges = simulation.differing_ranges if is_difference else simulation.truncated_ranges
    return merge_ranges(*(ranges.get(each, ()) for each in root.buffer_ids)) or (prompt_range,)


def _find_fallback_cause(evidence: Evidence) -> RootCause | None:
    """Return the cause of lengths without a root cause, such as a broken model; or `None`."""
    if evidence.model_cause is not None:
        return evidence.model_cause
    candidates = [
        finding
        for finding in evidence.findings
        if finding.code in _FALLBACK_RANKS
        if finding.name or finding.code != _TOKEN_CODE  # whole sides are assumed to be renamed
    ]
    first = min(candidates, key=lambda each: _FALLBACK_RANKS[each.code], default=None)
    return None if first is None else RootCause(first)
