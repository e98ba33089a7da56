"""The state of each buffer of a hand-off, and what becomes of a prompt, for every prompt length.

All of it is decided by the comparison. This module only looks up which of its ranges a prompt
length is in, and names the cause.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple, TypeVar

from onnxkvrename.findings import CODES
from onnxkvrename.handoff.compare import Handoff, SimulatedPrompt
from onnxkvrename.handoff.selection import BufferId
from onnxkvrename.handoff.simulate import (
    PromptRanges,
    SimulationResult,
    is_in_ranges,
    merge_ranges,
)
from onnxkvrename.handoff.verdict import REFUSALS, AffectedRange, PairResult, RootCause
from onnxkvrename.report.compare_text import (
    format_cause,
    format_prompt_outcome,
    list_startup_codes,
)

StateKind = Literal["correct", "wrong", "none", "unknown"]
"""Whether decode reads what prefill wrote; ``none``: it reads nothing, or there is nothing."""
_Decision = tuple[StateKind, str]
_StateT = TypeVar("_StateT", "BufferState", "PromptOutcome")


class BufferState(NamedTuple):
    """The state of a buffer, from a prompt length on.

    Attributes:
        first: The first prompt length in tokens.
        kind: The state.
        cause: Why, in words with the code of the finding; empty if it is correct.
    """

    first: int
    kind: StateKind
    cause: str


class PromptOutcome(NamedTuple):
    """What becomes of a prompt, from a length on.

    Attributes:
        first: The first prompt length in tokens.
        kind: The state of the hand-off as a whole.
        text: The outcome, as the text of the comparison has it.
    """

    first: int
    kind: StateKind
    text: str


class Subject(NamedTuple):
    """What the state of a buffer depends on.

    Attributes:
        buffer_id: The buffer.
        code: The code of its own finding, `None` for none.
        wrong_ranges: The prompt lengths at which decode reads wrong bytes.
        is_undecided: Whether this depends on sizes that are not known.
        is_read: Whether decode has it.
    """

    buffer_id: BufferId
    code: str | None
    wrong_ranges: PromptRanges
    is_undecided: bool = False
    is_read: bool = True


def build_subject(result: PairResult) -> Subject:
    """Return what the state of a compared pair depends on."""
    return Subject(
        result.pair.buffer_id,
        result.code,
        result.wrong_ranges,
        result.is_undecided,
        result.pair.decode is not None,
    )


class StateRules:
    """Looks up the state of buffers and prompts in the result of a comparison.

    Args:
        handoff: The result.
    """

    def __init__(self, handoff: Handoff) -> None:
        self._handoff = handoff
        self._simulation = handoff.comparison.simulation or SimulationResult({}, {}, {}, ())
        self._is_simulated = handoff.comparison.simulation is not None
        self._misread_ranges = merge_ranges(*self._simulation.wrong_ranges.values())
        self._transferred_ids = handoff.comparison.setup.transferred_ids
        self._startup_codes = list_startup_codes(handoff)
        self._is_undecided = any(root.is_undecided for root in handoff.root_causes)
        self._own_causes = {
            (buffer_id, root.finding.code): root
            for root in reversed(handoff.root_causes)
            for buffer_id in root.buffer_ids
        }

    def list_states(self, subject: Subject, last: int) -> tuple[BufferState, ...]:
        """Return the states of a buffer; each differs from the one before.

        Args:
            subject: The buffer.
            last: The longest prompt in tokens; the shortest has 1.
        """
        simulation = self._simulation
        ranges = (
            subject.wrong_ranges,
            simulation.differing_ranges.get(subject.buffer_id, ()),
            simulation.truncated_ranges.get(subject.buffer_id, ()),
            *self._list_common_ranges(),
        )
        states = (
            BufferState(tokens, *self._decide(subject, tokens))
            for tokens in _list_bounds(ranges, last)
        )
        return tuple(_drop_repeated(states))

    def list_outcomes(self, last: int) -> tuple[PromptOutcome, ...]:
        """Return what becomes of prompts; each outcome differs from the one before.

        Args:
            last: The longest prompt in tokens; the shortest has 1.
        """
        wrong = self._simulation.wrong_ranges.values()
        bounds = _list_bounds((*wrong, *self._list_common_ranges()), last)
        return tuple(_drop_repeated(map(self._find_outcome, bounds)))

    def _list_common_ranges(self) -> Iterator[PromptRanges]:
        yield self._simulation.refused_ranges
        yield from (affected.ranges for affected in self._handoff.verdict.affected_ranges)

    def _find_outcome(self, tokens: int) -> PromptOutcome:
        handoff, simulation = self._handoff, self._simulation
        wrong_ids = tuple(
            buffer_id
            for buffer_id, ranges in simulation.wrong_ranges.items()
            if is_in_ranges(tokens, ranges)
        )
        is_refused = is_in_ranges(tokens, simulation.refused_ranges)
        prompt = SimulatedPrompt(tokens, (), (), wrong_ids, is_refused)
        prompts = (prompt,) if handoff.simulated_prompts else ()
        text = format_prompt_outcome(handoff._replace(simulated_prompts=prompts), tokens)
        affected = self._find_affected(tokens)
        kind: StateKind = "correct"
        if self._startup_codes or is_refused:
            kind = "none"
        elif affected is not None:
            kind = "wrong"
        elif not prompts or handoff.verdict.outcome == "unknown":
            kind = "unknown"
        elif any(result.pair.decode is None for result in handoff.pair_results):
            kind = "none"
        return PromptOutcome(tokens, kind, text)

    def _find_affected(self, tokens: int) -> AffectedRange | None:
        affected = self._handoff.verdict.affected_ranges
        return next((each for each in affected if is_in_ranges(tokens, each.ranges)), None)

    def _decide(self, subject: Subject, tokens: int) -> _Decision:
        own_cause = self._describe_own_cause(subject)
        if self._startup_codes:
            code = self._startup_codes[0]
            return "none", f"the hand-off never begins: {CODES[code][1]} ({code})"
        if not subject.is_read:
            return "none", own_cause or "decode does not read it"
        if not self._is_simulated:
            return self._decide_without_simulation(subject, own_cause)
        affected = self._find_affected(tokens)
        causes = "" if affected is None else _join_causes(affected.causes)
        if is_in_ranges(tokens, self._simulation.refused_ranges):
            return "none", f"{REFUSALS[self._handoff.memory]}: {causes}".removesuffix(": ")
        if is_in_ranges(tokens, subject.wrong_ranges):
            is_own = subject.code is not None and self._is_wrong_itself(subject, tokens)
            return "wrong", own_cause if is_own else self._describe_shift(causes)
        if affected is not None and not is_in_ranges(tokens, self._misread_ranges):
            return "wrong", causes or own_cause  # wherever its bytes are
        is_always_wrong = not (subject.wrong_ranges or self._simulation.refused_ranges)
        if subject.code is not None and is_always_wrong:
            return "wrong", own_cause
        if self._handoff.verdict.outcome == "unknown":
            first = self._handoff.verdict.first_cause
            return "unknown", "" if first is None else format_cause(first)
        return "correct", ""

    def _decide_without_simulation(self, subject: Subject, own_cause: str) -> _Decision:
        if subject.is_undecided:
            return "unknown", own_cause or "depends on the size of a buffer before it"
        if subject.code is not None:
            return "wrong", own_cause
        if self._is_undecided:
            return "correct", ""
        return "unknown", "its bytes depend on sizes or shapes that are not known"

    def _is_wrong_itself(self, subject: Subject, tokens: int) -> bool:
        """Return whether a buffer differs, is cut, or was never written; else only its place."""
        ranges = (self._simulation.differing_ranges, self._simulation.truncated_ranges)
        return subject.buffer_id not in self._transferred_ids or any(
            is_in_ranges(tokens, each.get(subject.buffer_id, ())) for each in ranges
        )

    def _describe_own_cause(self, subject: Subject) -> str:
        if subject.code is None:
            return ""
        root = self._own_causes.get((subject.buffer_id, subject.code))
        return f"{CODES[subject.code][1]} ({subject.code})" if root is None else format_cause(root)

    def _describe_shift(self, causes: str) -> str:
        is_shared = self._handoff.memory == "shared"
        text = "prefill wrote it to other bytes" if is_shared else "prefill wrote another array"
        return f"{text}: {causes}" if causes else text


def _list_bounds(range_lists: Iterable[PromptRanges], limit: int) -> list[int]:
    """Return 1, and each length up to `limit` at which a range begins or is over."""
    bounds = {1}
    for ranges in range_lists:
        bounds |= {bound for first, last in ranges for bound in (first, last + 1)}
    return sorted(bound for bound in bounds if bound <= limit)


def _drop_repeated(states: Iterable[_StateT]) -> Iterator[_StateT]:
    """Yield states that differ from the one before in more than their length."""
    previous: tuple[object, ...] | None = None
    for state in states:
        if state[1:] != previous:
            yield state
        previous = state[1:]


def _join_causes(causes: Sequence[RootCause]) -> str:
    return " and ".join(dict.fromkeys(map(format_cause, causes)))
