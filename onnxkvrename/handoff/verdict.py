"""Decide the result of a hand-off, and which causes affect which prompt lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple

from onnxkvrename.findings import CODES, Finding
from onnxkvrename.handoff.comparison import Comparison
from onnxkvrename.handoff.consumer import MemoryKind
from onnxkvrename.handoff.root_causes import RootCause, build_root_cause
from onnxkvrename.handoff.side_checks import STARTUP_FAILURE_CODES
from onnxkvrename.handoff.simulate import (
    PromptRanges,
    SimulationResult,
    TransferSetup,
    merge_ranges,
    subtract_ranges,
)
from onnxkvrename.handoff.worker import UNLIMITED_LENGTH

Outcome = Literal["works", "corrupts", "fails", "loses", "unknown"]

REFUSALS: Mapping[MemoryKind, str] = MappingProxyType(
    {
        "shared": "decode finds the shared memory too small and stops",
        "separate": "prefill writes a different number of buffers than decode has",
    }
)
"""Why a hand-off is refused, by the memory that it goes through."""
DIFFERENT_MODELS = "KV623"
"""The finding that makes every prompt wrong, even if all bytes are at the right places."""
_CORRUPTING_CODES = ("KV609", "KV615", "KV617", DIFFERENT_MODELS)
"""Findings after which decode reads wrong values, even if a simulated prompt does not show it."""
ALWAYS_CORRUPTING = (DIFFERENT_MODELS, "KV626")
"""Findings that make every prompt wrong, whatever sizes are not known."""
_MISPLACING_CODES = ("KV608", "KV609", "KV617")
"""Findings that make the positions on the two sides differ, whatever the prompt."""


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


def build_verdict(
    findings: Sequence[Finding],
    root_causes: Sequence[RootCause],
    comparison: Comparison,
    model_finding: Finding | None,
) -> HandoffVerdict:
    """Return the verdict.

    The findings have causes before consequences. An error of a model itself, if there is one, is
    the `model_finding`, which is reported before all others.
    """
    simulation, placeholder = comparison.simulation, comparison.window_placeholder
    refused, corrupt = _find_wrong_ranges(findings, comparison)
    blamed = [root for root in root_causes if _can_affect_others(root, comparison.setup)]
    fallback = _find_fallback_cause(findings, model_finding)
    foreign = tuple(build_root_cause(each) for each in findings if each.code == DIFFERENT_MODELS)
    affected: tuple[AffectedRange, ...] = ()
    if simulation is not None:
        affected = (
            *_group_by_cause(corrupt, False, blamed, simulation, fallback),
            *_group_by_cause(refused, True, blamed, simulation, fallback),
        )
        affected = tuple(
            each._replace(causes=tuple(dict.fromkeys((*foreign, *each.causes))))
            for each in affected
        )
    symbols = (
        root.difference.needed_symbols[0]
        for root in root_causes
        if root.difference is not None and root.difference.needed_symbols
    )
    longest = comparison.setup.longest_prompt
    return HandoffVerdict(
        outcome=_decide_outcome(findings, root_causes, comparison, model_finding),
        corrupt_ranges=corrupt,
        refused_ranges=refused,
        longest_prompt=None if longest == UNLIMITED_LENGTH else longest,
        window_symbol=next(symbols, None) if placeholder else None,
        window_placeholder=placeholder,
        first_cause=_find_first_cause(findings, root_causes, model_finding),
        affected_ranges=affected,
    )


def _decide_outcome(
    findings: Sequence[Finding],
    root_causes: Sequence[RootCause],
    comparison: Comparison,
    model_finding: Finding | None,
) -> Outcome:
    simulation = comparison.simulation
    codes = {finding.code for finding in findings} - {"KV616"}
    refused, corrupt = _find_wrong_ranges(findings, comparison)
    differs_unsimulated = simulation is None and any(
        root.difference is not None and root.difference.is_certain for root in root_causes
    )
    if not codes.isdisjoint(STARTUP_FAILURE_CODES):
        return "fails"
    if refused and not corrupt:
        return "fails"  # a prompt that is refused is not read wrongly, whatever else is wrong
    if corrupt or differs_unsimulated or not codes.isdisjoint(_CORRUPTING_CODES):
        return "corrupts"
    if simulation is None:
        return "unknown"
    if codes - {"KV602", "KV627"}:
        return "loses"
    return "unknown" if codes or model_finding is not None else "works"


def _find_first_cause(
    findings: Sequence[Finding],
    root_causes: Sequence[RootCause],
    model_finding: Finding | None,
) -> RootCause | None:
    """Return the error of a model, else what stops a side, else the first finding but KV616."""
    if model_finding is not None:
        return build_root_cause(model_finding)
    candidates = [finding for finding in findings if finding.code != "KV616"]
    stopping = [finding for finding in candidates if finding.code in STARTUP_FAILURE_CODES]
    first = next(iter((*stopping, *candidates)), None)
    if first is None:
        return None
    own = next((root for root in root_causes if root.finding == first), None)
    return own or build_root_cause(first, summary=_summarize(first))


def _summarize(finding: Finding) -> str:
    """Return a finding in a few words: in general, the meaning of its code.

    KV001 says which side has no cache, KV624 which names the consumer does not select.
    """
    if finding.code == "KV001":
        return finding.message
    if finding.code == "KV624" and finding.name:
        return f"{finding.subject} {finding.message.partition(';')[0]}".lstrip()
    return CODES[finding.code][1]


def _find_wrong_ranges(
    findings: Sequence[Finding], comparison: Comparison
) -> tuple[PromptRanges, PromptRanges]:
    """Return the lengths that decode refuses, and those at which it reads wrong bytes."""
    simulation = comparison.simulation
    if simulation is None:
        return (), ()
    is_all_wrong = any(finding.code in ("KV609", DIFFERENT_MODELS) for finding in findings)
    all_lengths = ((1, comparison.setup.longest_prompt),) if is_all_wrong else ()
    wrong = merge_ranges(*simulation.wrong_ranges.values(), all_lengths)
    return simulation.refused_ranges, subtract_ranges(wrong, simulation.refused_ranges)


def _group_by_cause(
    ranges: PromptRanges,
    is_refused: bool,
    root_causes: Sequence[RootCause],
    simulation: SimulationResult,
    fallback: RootCause | None,
) -> tuple[AffectedRange, ...]:
    """Group lengths that go wrong for the same causes; `fallback` if there is no root cause."""
    groups: dict[tuple[RootCause, ...], list[tuple[int, int]]] = {}
    for prompt_range in ranges:
        causes: list[RootCause] = []
        unexplained: PromptRanges = (prompt_range,)
        for root in root_causes:
            blamed = _find_blamed_ranges(root, simulation, prompt_range)
            remaining = subtract_ranges(unexplained, blamed)
            if remaining != unexplained:
                causes.append(root)
            unexplained = remaining
        if unexplained and fallback is not None:
            causes.insert(0, fallback)
        groups.setdefault(tuple(causes), []).append(prompt_range)
    return tuple(
        AffectedRange(tuple(group), is_refused, causes) for causes, group in groups.items()
    )


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


def _find_fallback_cause(
    findings: Sequence[Finding], model_finding: Finding | None
) -> RootCause | None:
    """Return the cause of lengths without a root cause, such as a broken model; or `None`."""
    foreign = (finding for finding in findings if finding.code == DIFFERENT_MODELS)
    misplacing = (finding for finding in findings if finding.code in _MISPLACING_CODES)
    partial_token = (finding for finding in findings if finding.code == "KV616" and finding.name)
    shifted = (finding for finding in findings if finding.code == "KV618")
    model = (model_finding,) if model_finding is not None else ()
    first = next(iter((*model, *foreign, *misplacing, *partial_token, *shifted)), None)
    return None if first is None else build_root_cause(first)
