"""What would become of a hand-off, and which cause goes with which lengths of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from onnxkvrename.findings import Finding
from onnxkvrename.handoff import simulate as rehearsing
from onnxkvrename.handoff import worker as sides
from onnxkvrename.handoff.buffer_diff import Fault
from onnxkvrename.handoff.simulate import Ranges, Rehearsal, Stage, union
from onnxkvrename.handoff.slots import Ident

Outcome = Literal["works", "corrupts", "fails", "loses", "unknown"]

_EVERYWHERE = ("KV608", "KV609", "KV617")
"""What makes places disagree whatever the prompt."""


class Root(NamedTuple):
    """What is wrong in the graphs themselves, and with which buffers."""

    finding: Finding
    idents: tuple[Ident, ...]
    fault: Fault | None = None


class Stretch(NamedTuple):
    """Lengths of a prompt that go wrong alike, aloud if ``refused``, for the same causes."""

    ranges: Ranges
    refused: bool
    causes: tuple[Finding, ...]


class Verdict(NamedTuple):
    """What would become of the hand-off, once the names are right.

    ``corrupt`` are the prompt lengths at which decode would take wrong bytes without a
    word, ``refused`` those at which it would stop. ``longest`` is the longest prompt that
    both take, ``None`` where the graphs do not limit it. ``beyond`` is a window of
    which no size is known, but that it goes wrong beyond it; in the ranges ``near`` stands for it.
    ``cause`` is the finding to begin with; ``stretches`` have those of each length.
    """

    outcome: Outcome
    corrupt: Ranges
    refused: Ranges
    longest: int | None
    beyond: str | None
    near: int | None
    cause: Finding | None
    stretches: tuple[Stretch, ...] = ()


def verdict(
    findings: Sequence[Finding],
    roots: Sequence[Root],
    shown: Rehearsal | None,
    scene: Stage,
    near: int | None,
    broken: Finding | None,
) -> Verdict:
    """The verdict of all that was found; ``broken`` is what is wrong with a model itself."""
    about = [found for found in findings if found.code != "KV616"]
    stopping = [found for found in about if found.code in sides.STOPS]
    first = next(iter((*([broken] if broken else []), *stopping, *about)), None)
    faults = [root.fault for root in roots if root.fault is not None]
    refused, corrupt = _ranges(findings, shown, scene)
    certain = shown is None and any(fault.certain for fault in faults)
    blamed, other = [one for one in roots if _harms(one, scene)], _otherwise(findings, broken)
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
    return Verdict(
        outcome,
        corrupt,
        refused,
        longest=None if scene.longest == sides.LONGEST else scene.longest,
        beyond=next((fault.ask[0] for fault in faults if near and fault.ask), None),
        near=near,
        cause=first,
        stretches=(
            *_stretches(corrupt, False, blamed, shown, other),
            *_stretches(refused, True, blamed, shown, other),
        ),
    )


def _ranges(
    findings: Sequence[Finding], shown: Rehearsal | None, scene: Stage
) -> tuple[Ranges, Ranges]:
    """The lengths that are refused, and those that are corrupted."""
    if shown is None:
        return (), ()
    turned = any(found.code == "KV609" for found in findings)
    every = ((1, scene.longest),) if turned else ()
    return shown.refused, rehearsing.without(union(*shown.wrong.values(), every), shown.refused)


def _stretches(
    ranges: Ranges,
    refused: bool,
    roots: Sequence[Root],
    shown: Rehearsal | None,
    other: Finding | None,
) -> tuple[Stretch, ...]:
    """Lengths that go wrong, together where it is for the same causes; ``other`` where no root."""
    if shown is None:
        return ()
    alike: dict[tuple[Finding, ...], list[tuple[int, int]]] = {}
    for run in ranges:
        causes: list[Finding] = []
        left: Ranges = (run,)
        for root in roots:
            rest = rehearsing.without(left, _reach(root, shown, run))
            if rest != left:
                causes.append(root.finding)
            left = rest
        if left and other is not None:
            causes.insert(0, other)
        alike.setdefault(tuple(causes), []).append(run)
    return tuple(Stretch(tuple(runs), refused, causes) for causes, runs in alike.items())


def _harms(root: Root, scene: Stage) -> bool:
    """Whether others may go wrong with it: what prefill alone has at the end only stays behind."""
    taken = {one.ident for one in scene.taken}
    common = [at for at, one in enumerate(scene.written) if one.ident in taken]
    behind = {one.ident for one in scene.written[common[-1] + 1 if common else 0 :]}
    return not behind.issuperset(root.idents)


def _reach(root: Root, shown: Rehearsal, run: tuple[int, int]) -> Ranges:
    """The lengths within a run that a root can be blamed for."""
    shows = shown.own if root.fault is not None else shown.cut
    found = union(*(shows.get(ident, ()) for ident in root.idents))
    return found or (run,)


def _otherwise(findings: Sequence[Finding], broken: Finding | None) -> Finding | None:
    """What is to blame where no root is: a broken model, the order, or what is not selected."""
    half = (found for found in findings if found.code == "KV616" and found.name)
    places = (found for found in findings if found.code in _EVERYWHERE)
    shifted = (found for found in findings if found.code == "KV618")
    return next(iter((*([broken] if broken else []), *places, *half, *shifted)), None)
