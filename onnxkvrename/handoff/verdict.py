"""What would become of a hand-off, and which cause goes with which lengths of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from onnxkvrename.findings import Finding
from onnxkvrename.handoff.buffer_diff import Difference
from onnxkvrename.handoff.simulate import (
    PromptRanges,
    SimulationResult,
    TransferSetup,
    merge_ranges,
    subtract_ranges,
)
from onnxkvrename.handoff.slots import BufferId
from onnxkvrename.handoff.worker import STARTUP_FAILURE_CODES, UNLIMITED_LENGTH

Outcome = Literal["works", "corrupts", "fails", "loses", "unknown"]

_MISPLACING_CODES = ("KV608", "KV609", "KV617")
"""What makes places disagree whatever the prompt."""


class RootCause(NamedTuple):
    """What is wrong in the graphs themselves, and with which buffers."""

    finding: Finding
    buffer_ids: tuple[BufferId, ...]
    difference: Difference | None = None


class AffectedRange(NamedTuple):
    """Lengths of a prompt that go wrong alike, aloud if ``refused``, for the same causes."""

    ranges: PromptRanges
    is_refused: bool
    causes: tuple[Finding, ...]


class HandoffVerdict(NamedTuple):
    """What would become of the hand-off, once the names are right.

    ``corrupt`` are the prompt lengths at which decode would take wrong bytes without a
    word, ``refused`` those at which it would stop. ``longest`` is the longest prompt that
    both take, ``None`` where the graphs do not limit it. ``beyond`` is a window of
    which no size is known, but that it goes wrong beyond it; in the ranges ``near`` stands for it.
    ``cause`` is the finding to begin with; ``stretches`` have those of each length.
    """

    outcome: Outcome
    corrupt_ranges: PromptRanges
    refused_ranges: PromptRanges
    longest_prompt: int | None
    window_symbol: str | None
    window_placeholder: int | None
    first_cause: Finding | None
    affected_ranges: tuple[AffectedRange, ...] = ()


def build_verdict(
    findings: Sequence[Finding],
    roots: Sequence[RootCause],
    shown: SimulationResult | None,
    scene: TransferSetup,
    near: int | None,
    broken: Finding | None,
) -> HandoffVerdict:
    """The verdict of all that was found; ``broken`` is what is wrong with a model itself."""
    about = [found for found in findings if found.code != "KV616"]
    stopping = [found for found in about if found.code in STARTUP_FAILURE_CODES]
    first = next(iter((*([broken] if broken else []), *stopping, *about)), None)
    faults = [root.difference for root in roots if root.difference is not None]
    refused, corrupt = _find_wrong_ranges(findings, shown, scene)
    certain = shown is None and any(fault.is_certain for fault in faults)
    blamed, other = (
        [one for one in roots if _can_affect_others(one, scene)],
        _find_fallback_cause(findings, broken),
    )
    outcome: Outcome = "works"
    if stopping:
        outcome = "fails"
    elif corrupt or certain or any(found.code in ("KV609", "KV617") for found in about):
        outcome = "corrupts"
    elif shown is None:
        outcome = "unknown"
    elif refused:
        outcome = "fails"
    elif any(found.code != "KV602" for found in about):
        outcome = "loses"
    elif first is not None:
        outcome = "unknown"
    return HandoffVerdict(
        outcome,
        corrupt,
        refused,
        longest_prompt=None if scene.longest_prompt == UNLIMITED_LENGTH else scene.longest_prompt,
        window_symbol=next(
            (fault.needed_symbols[0] for fault in faults if near and fault.needed_symbols), None
        ),
        window_placeholder=near,
        first_cause=first,
        affected_ranges=(
            *_group_by_cause(corrupt, False, blamed, shown, other),
            *_group_by_cause(refused, True, blamed, shown, other),
        ),
    )


def _find_wrong_ranges(
    findings: Sequence[Finding], shown: SimulationResult | None, scene: TransferSetup
) -> tuple[PromptRanges, PromptRanges]:
    """The lengths that are refused, and those that are corrupted."""
    if shown is None:
        return (), ()
    turned = any(found.code == "KV609" for found in findings)
    every = ((1, scene.longest_prompt),) if turned else ()
    return shown.refused_ranges, subtract_ranges(
        merge_ranges(*shown.wrong_ranges.values(), every), shown.refused_ranges
    )


def _group_by_cause(
    ranges: PromptRanges,
    refused: bool,
    roots: Sequence[RootCause],
    shown: SimulationResult | None,
    other: Finding | None,
) -> tuple[AffectedRange, ...]:
    """Lengths that go wrong, together where it is for the same causes; ``other`` where no root."""
    if shown is None:
        return ()
    alike: dict[tuple[Finding, ...], list[tuple[int, int]]] = {}
    for run in ranges:
        causes: list[Finding] = []
        left: PromptRanges = (run,)
        for root in roots:
            rest = subtract_ranges(left, _find_blamed_ranges(root, shown, run))
            if rest != left:
                causes.append(root.finding)
            left = rest
        if left and other is not None:
            causes.insert(0, other)
        alike.setdefault(tuple(causes), []).append(run)
    return tuple(AffectedRange(tuple(runs), refused, causes) for causes, runs in alike.items())


def _can_affect_others(root: RootCause, scene: TransferSetup) -> bool:
    """Whether others may go wrong with it: what prefill alone has at the end only stays behind."""
    taken = {one.buffer_id for one in scene.decode_inputs}
    common = [at for at, one in enumerate(scene.prefill_outputs) if one.buffer_id in taken]
    behind = {one.buffer_id for one in scene.prefill_outputs[common[-1] + 1 if common else 0 :]}
    return not behind.issuperset(root.buffer_ids)


def _find_blamed_ranges(
    root: RootCause, shown: SimulationResult, run: tuple[int, int]
) -> PromptRanges:
    """The lengths within a run that a root can be blamed for."""
    shows = shown.differing_ranges if root.difference is not None else shown.truncated_ranges
    found = merge_ranges(*(shows.get(ident, ()) for ident in root.buffer_ids))
    return found or (run,)


def _find_fallback_cause(findings: Sequence[Finding], broken: Finding | None) -> Finding | None:
    """What is to blame where no root is: a broken model, the order, or what is not selected."""
    half = (found for found in findings if found.code == "KV616" and found.name)
    places = (found for found in findings if found.code in _MISPLACING_CODES)
    shifted = (found for found in findings if found.code == "KV618")
    return next(iter((*([broken] if broken else []), *places, *half, *shifted)), None)
