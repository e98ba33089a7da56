"""Render the comparison of prefill and decode as text for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from onnxkvrename.handoff.compare import Handoff, SimulatedPrompt
from onnxkvrename.handoff.comparison import BufferPair, format_buffer_type
from onnxkvrename.handoff.consumer import MemoryKind
from onnxkvrename.handoff.consumer_checks import find_count_failure
from onnxkvrename.handoff.simulate import (
    PromptRanges,
    is_in_ranges,
    merge_ranges,
    subtract_ranges,
)
from onnxkvrename.handoff.slots import format_token_count
from onnxkvrename.handoff.verdict import (
    COUNT_CODES,
    STARTUP_FAILURE_CODES,
    AffectedRange,
    HandoffVerdict,
    Outcome,
    PairResult,
    RootCause,
)
from onnxkvrename.handoff.worker import UNLIMITED_LENGTH
from onnxkvrename.layout.layout import fold_alike
from onnxkvrename.report.formats import FileResult, Line, Span
from onnxkvrename.report.formats.text import BOLD, GREEN, RED, build_verdict_line
from onnxkvrename.report.layout_text import format_missing_windows
from onnxkvrename.report.tables import Cell, render_table, wrap_line
from onnxkvrename.text import format_count, format_layer_numbers, format_layers

_SOME_PROMPTS = "prompts from some length on, which depends on unknown sizes"
_REFUSALS: dict[MemoryKind, str] = {
    "shared": "the shared memory is too small for decode",
    "separate": "prefill writes a different number of buffers than decode has",
}


def resolve_outcome(handoff: Handoff) -> Outcome:
    """Return the outcome of the hand-off with the names that the models have now."""
    if not list_sides_without_token(handoff):
        return handoff.verdict.outcome
    return "fails" if handoff.prefill.lacks_token else "corrupts"


def format_handoff_verdict(handoff: Handoff) -> str:
    """Return the verdict in one line."""
    sides = list_sides_without_token(handoff)
    if not sides:
        if handoff.verdict.outcome == "unknown":
            return _format_undecided(handoff)
        return f"hand-off {_format_outcome(handoff)}"
    result = "fail" if handoff.prefill.lacks_token else "corrupt every prompt"
    text = f"hand-off would {result}: {handoff.consumer.name} selects no buffer on "
    text += f"{' and '.join(sides)} (KV616)"
    if not handoff.consumer.token:
        return text
    if handoff.verdict.outcome == "unknown":
        return f"{text}; after a rename, {_format_undecided(handoff)}"
    return f"{text}; after a rename, it {_format_outcome(handoff)}"


def list_sides_without_token(handoff: Handoff) -> list[str]:
    """Return the sides on which nothing is selected; none if a side has no buffer at all."""
    sides = (handoff.prefill, handoff.decode)
    if not all(side.layout.buffers for side in sides):
        return []
    return [side.label for side in sides if side.lacks_token]


def _format_outcome(handoff: Handoff) -> str:
    verdict = handoff.verdict
    cause = "" if verdict.first_cause is None else f": {format_cause(verdict.first_cause)}"
    if verdict.outcome == "works":
        return f"works: {_format_transferred(handoff)}"
    if verdict.outcome == "corrupts":
        if verdict.corrupt_ranges:
            return _format_corruption(verdict)
        return f"would corrupt {_SOME_PROMPTS}{cause}"
    if verdict.outcome == "loses":
        return f"would lose data{cause}"
    if not verdict.refused_ranges or list_startup_codes(handoff):
        first = None if verdict.first_cause is None else verdict.first_cause.finding.code
        return f"would fail {_find_failure_time(handoff, first)}{cause}"
    if len(verdict.affected_ranges) > 1:
        ranges = _format_each_range(verdict.affected_ranges, verdict)
        return f"would fail because {_REFUSALS[handoff.consumer.memory]}, for {ranges}"
    prompts = format_prompt_ranges(verdict.refused_ranges, verdict)
    causes = _format_causes(verdict.affected_ranges[0])
    return f"would fail for {prompts} because {_REFUSALS[handoff.consumer.memory]}{causes}"


def _find_failure_time(handoff: Handoff, code: str | None) -> str:
    """Return when a side fails before any hand-off."""
    if code in COUNT_CODES:
        side = handoff.prefill if handoff.consumer.memory == "shared" else handoff.decode
        return find_count_failure(side.layout, handoff.consumer)
    return "at start-up"


def _format_undecided(handoff: Handoff) -> str:
    """Return why the result is not known: sizes, with the arguments that decide, or a cause."""
    undecided = _find_undecided(handoff)
    cause = handoff.verdict.first_cause
    if not undecided:
        return "cannot decide" if cause is None else f"cannot decide: {format_cause(cause)}"
    codes = ", ".join(dict.fromkeys(root.finding.code for root in undecided))
    symbols = " and ".join(_list_needed_symbols(undecided))
    arguments = _format_size_arguments(undecided)
    return f"cannot decide: the result depends on {symbols} ({codes}); pass {arguments}"


def _list_needed_symbols(undecided: Sequence[RootCause]) -> list[str]:
    differences = (root.difference for root in undecided if root.difference is not None)
    return list(dict.fromkeys(symbol for each in differences for symbol in each.needed_symbols))


def _find_undecided(handoff: Handoff) -> list[RootCause]:
    return [root for root in handoff.root_causes if root.is_undecided]


def _format_size_arguments(undecided: Sequence[RootCause]) -> str:
    """Return the arguments that decide, each once: ``--dim decode:ctx_len=SIZE``."""
    differences = (root.difference for root in undecided if root.difference is not None)
    arguments = dict.fromkeys(
        argument for difference in differences for argument in difference.size_arguments
    )
    return " ".join(arguments)


def _format_stop(handoff: Handoff, code: str) -> str:
    """Return that nothing is handed over, as a side does not start or stops at the first prompt."""
    when = _find_failure_time(handoff, code)
    return f"{'not started' if when == 'at start-up' else f'fails {when}'} ({code})"


def list_startup_codes(handoff: Handoff) -> list[str]:
    """Return the codes of the findings that stop a side before any hand-off."""
    codes = [finding.code for finding in handoff.findings]
    return [code for code in codes if code in STARTUP_FAILURE_CODES]


def _format_corruption(verdict: HandoffVerdict) -> str:
    """Return which prompts are corrupted and refused, with causes: common ones once."""
    refused = [each for each in verdict.affected_ranges if each.is_refused]
    corrupt = [each for each in verdict.affected_ranges if not each.is_refused]
    if len({_list_codes(each) for each in verdict.affected_ranges}) > 1:
        stops = f"; decode would stop at {_format_each_range(refused, verdict)}" if refused else ""
        return f"would corrupt {_format_each_range(corrupt, verdict)}{stops}"
    prompts = format_prompt_ranges(verdict.corrupt_ranges, verdict)
    if refused:
        refused_prompts = format_prompt_ranges(verdict.refused_ranges, verdict)
        prompts += f", and decode would stop at {refused_prompts}"
    return f"would corrupt {prompts}{_format_causes(verdict.affected_ranges[0])}"


def _format_each_range(affected: Sequence[AffectedRange], verdict: HandoffVerdict) -> str:
    """Return prompts with causes: ``prompts of 1 token: … (KV605), and prompts longer than …``."""
    return ", and ".join(
        f"{format_prompt_ranges(each.ranges, verdict)}{_format_causes(each)}" for each in affected
    )


def _format_causes(affected: AffectedRange) -> str:
    causes = dict.fromkeys(map(format_cause, affected.causes))
    return f": {' and '.join(causes)}" if causes else ""


def _list_codes(affected: AffectedRange) -> tuple[str, ...]:
    return tuple(dict.fromkeys(cause.finding.code for cause in affected.causes))


def format_cause(cause: RootCause) -> str:
    """Return a cause in few words, with the code of its finding."""
    return f"{cause.summary} ({cause.finding.code})"


def _format_transferred(handoff: Handoff) -> str:
    layout, longest = handoff.decode.layout, handoff.verdict.longest_prompt
    buffers = f"{format_count(len(layout.buffers), 'buffer')} of {format_layers(layout.layers)}"
    lengths = _format_free_sizes(handoff) or ", prompts of any length"
    if longest is not None:
        lengths = f", prompts of up to {format_token_count(longest)}"
    conditions = _join_conditions([*_list_size_conditions(handoff), *handoff.conditions])
    missing = format_missing_windows(layout)
    return f"{buffers}{lengths}{conditions}; based on {handoff.consumer.name}'s rules{missing}"


def _format_free_sizes(handoff: Handoff) -> str:
    """Return which unknown sizes may be any."""
    free_symbols = sorted(_find_unresolved(handoff).difference(handoff.shared_symbols))
    free = ", ".join(free_symbols)
    return f", for any {free}" if free and handoff.verdict.longest_prompt is None else ""


def _list_size_conditions(handoff: Handoff) -> list[str]:
    """Return which unknown sizes must be equal on both sides, if any."""
    shared = ", ".join(handoff.shared_symbols)
    return [f"have the same {shared}"] if shared else []


def _join_conditions(conditions: Sequence[str]) -> str:
    """Return conditions on both sides as a clause; empty for none."""
    if not conditions:
        return ""
    *first, last = conditions
    return f", if both sides {', '.join(first)}{' and ' if first else ''}{last}"


def _find_unresolved(handoff: Handoff) -> set[str]:
    """Return the symbols of both sides that have no size."""
    prefill, decode = handoff.prefill.layout, handoff.decode.layout
    return {*prefill.unresolved_symbols, *decode.unresolved_symbols}


def format_prompt_ranges(ranges: PromptRanges, verdict: HandoffVerdict) -> str:
    """Return prompt lengths as text: ``prompts longer than 128 tokens``.

    Args:
        ranges: The prompt lengths in tokens; empty if they are not known.
        verdict: The verdict that they belong to, for the longest prompt and the window of
            unknown size.
    """
    end = UNLIMITED_LENGTH if verdict.longest_prompt is None else verdict.longest_prompt
    if not ranges:
        return _SOME_PROMPTS
    if ranges == ((1, end),):
        return "every prompt"
    texts = (_format_range(first, last, end, verdict) for first, last in ranges)
    return f"prompts {' and '.join(texts)}"


def _format_range(first: int, last: int, end: int, verdict: HandoffVerdict) -> str:
    if last == end:
        return f"longer than {_format_length(first - 1, verdict)}"
    if first == 1:
        return f"of up to {_format_length(last, verdict)}"
    if first == last:
        return f"of {_format_length(last, verdict)}"
    return f"of {first:,} to {_format_length(last, verdict)}"


def _format_length(tokens: int, verdict: HandoffVerdict) -> str:
    """Return a length in tokens, or the window's name where its size is not known."""
    if tokens == verdict.window_placeholder and verdict.window_symbol is not None:
        return verdict.window_symbol
    return format_token_count(tokens)


def render_handoff(handoff: Handoff, width: int | None) -> Iterator[Line]:
    """Yield the verdict, the buffers as a table, and notes.

    Args:
        handoff: The compared hand-off; with a side that has no buffer there is no table.
        width: The columns of the terminal; `None` for a pipe.
    """
    style = f"{RED if handoff.failed else GREEN};{BOLD}"
    verdict = build_verdict_line("", format_handoff_verdict(handoff), style)
    yield from wrap_line(verdict, width)
    if handoff.prefill.layout.buffers and handoff.decode.layout.buffers:
        yield from _render_table(handoff, width)
    for note in handoff.notes:
        yield from wrap_line(Line(f"note: {note}"), width)


def _render_table(handoff: Handoff, width: int | None) -> Iterator[Line]:
    rows: list[tuple[Cell, ...]] = [list_table_headings(handoff)]
    for *cells, state in build_table_rows(handoff):
        rows.append((*cells, Span(state, GREEN if state == "ok" else RED)))
    yield from render_table(rows, width)


def list_table_headings(handoff: Handoff) -> tuple[str, ...]:
    """Return the headings of the columns."""
    is_renamed = handoff.consumer.token and list_sides_without_token(handoff)
    last = "AFTER RENAME" if is_renamed else "HAND-OFF"
    return "LAYERS", "PARTS", "PREFILL", "DECODE", last


def build_table_rows(handoff: Handoff) -> list[tuple[str, ...]]:
    """Return the rows: buffers with equal types and results in one, layers and parts folded."""
    rows = fold_alike(
        (
            result.pair.present_buffer.part,
            result.pair.present_buffer.layer,
            (
                *format_pair_types(handoff, result.pair),
                format_state(handoff, result),
            ),
        )
        for result in handoff.pair_results
    )
    return [
        (format_layer_numbers(layers), ", ".join(parts), *traits) for parts, layers, traits in rows
    ]


def format_pair_types(handoff: Handoff, pair: BufferPair) -> tuple[str, str]:
    """Return dtype and shape of a buffer on prefill and on decode, ``same`` if they are equal."""
    sides = ((handoff.prefill, pair.prefill), (handoff.decode, pair.decode))
    prefill, decode = (
        "-" if buffer is None else format_buffer_type(side.layout, buffer) for side, buffer in sides
    )
    return prefill, "same" if prefill == decode else decode


def format_state(handoff: Handoff, result: PairResult) -> str:
    """Return what becomes of a buffer for all prompts: ``ok``, ``wrong for every prompt``."""
    verdict = handoff.verdict
    code = "" if result.code is None else f" ({result.code})"
    if result.pair.decode is None:
        return f"not read by decode{code}"
    if result.is_undecided:
        return f"depends on sizes{code}"
    corrupt = subtract_ranges(result.wrong_ranges, verdict.refused_ranges)
    if corrupt:
        prompts = format_prompt_ranges(corrupt, verdict)
        if code and not _is_moved_only(handoff, result.pair, corrupt):
            return f"wrong for {prompts}{code}"
        return f"shifted for {prompts}"
    if result.wrong_ranges:
        return f"refused for {format_prompt_ranges(result.wrong_ranges, verdict)}{code}"
    if code and not verdict.refused_ranges:
        return f"wrong{code}"
    return _format_common_state(handoff, code)


def _is_moved_only(handoff: Handoff, pair: BufferPair, ranges: PromptRanges) -> bool:
    """Return whether the finding about a buffer is about other prompts than these."""
    simulation = handoff.comparison.simulation
    if simulation is None:
        return False
    differing, truncated = simulation.differing_ranges, simulation.truncated_ranges
    own = merge_ranges(differing.get(pair.buffer_id, ()), truncated.get(pair.buffer_id, ()))
    return bool(own) and subtract_ranges(ranges, own) == ranges


def _format_common_state(handoff: Handoff, code: str) -> str:
    """Return what becomes of a buffer that is right by itself, as of the hand-off as a whole."""
    verdict = handoff.verdict
    startup_codes = list_startup_codes(handoff)
    if startup_codes:
        return _format_stop(handoff, startup_codes[0])
    if verdict.refused_ranges:
        return f"refused for {format_prompt_ranges(verdict.refused_ranges, verdict)}{code}"
    misread = merge_ranges(*(each.wrong_ranges for each in handoff.pair_results))
    for affected in verdict.affected_ranges:
        ranges = subtract_ranges(affected.ranges, misread)
        if ranges:  # wherever its bytes are
            codes = f" ({', '.join(_list_codes(affected))})" if affected.causes else ""
            return f"wrong for {format_prompt_ranges(ranges, verdict)}{codes}"
    if verdict.outcome == "unknown" and not _find_undecided(handoff):
        cause = verdict.first_cause
        return "cannot decide" if cause is None else f"cannot decide ({cause.finding.code})"
    return "ok"


def format_prompt_outcome(handoff: Handoff, prompt: SimulatedPrompt) -> str:
    """Return the result for one prompt."""
    verdict = handoff.verdict
    startup_codes = list_startup_codes(handoff)
    if startup_codes:
        return _format_stop(handoff, startup_codes[0])
    tokens = prompt.tokens
    affected = [each for each in verdict.affected_ranges if is_in_ranges(tokens, each.ranges)]
    codes = f" ({', '.join(_list_codes(affected[0]))})" if affected and affected[0].causes else ""
    if prompt.is_refused:
        return f"refused: {_REFUSALS[handoff.consumer.memory]}{codes}"
    count = format_count(len(handoff.pair_results), "buffer")
    if affected:
        wrong_ids = prompt.wrong_buffer_ids
        wrong = sum(result.pair.buffer_id in wrong_ids for result in handoff.pair_results)
        return f"{f'{wrong} of {count}' if wrong_ids else f'all of {count}'} wrong{codes}"
    left = sum(result.pair.decode is None for result in handoff.pair_results)
    if left:
        return f"{left} of {count} not read by decode"
    if verdict.outcome == "unknown" and verdict.first_cause is not None:
        return f"cannot decide ({verdict.first_cause.finding.code})"
    return f"ok{_format_free_sizes(handoff)}{_join_conditions(_list_size_conditions(handoff))}"


def build_handoff_result(handoff: Handoff) -> FileResult:
    """Return the findings of a hand-off as those of decode, which text calls by both paths."""
    paths = [
        side.path or (side.original_layout.models or (side.label,))[0]
        for side in (handoff.prefill, handoff.decode)
    ]
    return FileResult(paths[1], handoff.findings, label=" -> ".join(paths))
