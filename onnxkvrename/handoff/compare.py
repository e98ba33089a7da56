"""Will the hand-off from prefill to decode work: what differs, and what then goes wrong when.

Root causes are looked for in the graphs, consequences by rehearsing the hand-off;
a buffer that only lies elsewhere because of another one is no finding of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from onnxkvrename.findings import Finding, finding
from onnxkvrename.handoff import buffer_diff as pairing
from onnxkvrename.handoff import simulate as rehearsing
from onnxkvrename.handoff import slots as transfer
from onnxkvrename.handoff import tensor_parallel as sharding
from onnxkvrename.handoff import verdict as outcomes
from onnxkvrename.handoff import worker as sides
from onnxkvrename.handoff.buffer_diff import Fault, Twin
from onnxkvrename.handoff.consumer import Target
from onnxkvrename.handoff.simulate import Ranges, Rehearsal, Stage, union
from onnxkvrename.handoff.slots import Ident, Slot
from onnxkvrename.handoff.tensor_parallel import Parallel
from onnxkvrename.handoff.verdict import Root, Verdict
from onnxkvrename.handoff.worker import Side
from onnxkvrename.layout.layout import Layout

_NEAR = 1 << 30
"""Stands for a window of which no size is known: shorter than the longest prompt."""


class Row(NamedTuple):
    """A pair of buffers: the code of its own fault, if it has one, and where it goes wrong.

    ``open`` says that sizes are wanted to tell, its own or those of one before it.
    """

    twin: Twin
    code: str | None
    wrong: Ranges
    open: bool = False


class Transfer(NamedTuple):
    """One simulated prompt; ``refused``: decode finds its memory too small."""

    tokens: int
    sent: tuple[Slot, ...]
    read: tuple[Slot, ...]
    wrong: tuple[Ident, ...]
    refused: bool


class HandOff(NamedTuple):
    """Two sides held against each other as a consumer would join them.

    ``asked`` are the prompt lengths that somebody wanted to know about, ``agreeing`` the
    symbols without a size that must be the same on both sides.
    """

    target: str
    whole: bool
    ranks: Parallel | None
    prefill: Side
    decode: Side
    rows: tuple[Row, ...]
    transfers: tuple[Transfer, ...]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    verdict: Verdict
    asked: tuple[int, ...] = ()
    agreeing: tuple[str, ...] = ()

    @property
    def failed(self) -> bool:
        """Whether anything is wrong."""
        return bool(self.findings)


def compare(
    prefill: Side,
    decode: Side,
    target: Target,
    *,
    ranks: Parallel | None = None,
    whole: bool = False,
    tokens: Sequence[int] = (),
) -> HandOff:
    """Everything that differs between two sides, and what comes of it at which prompt length.

    ``whole`` is for a consumer that moves all of each buffer; ``tokens`` are prompt
    lengths to simulate beside those at which something changes; one that is longer than a
    side's context is not simulated.
    """
    longest = min(sides.capacity(prefill.layout), sides.capacity(decode.layout))
    filled = prefill.given.buffers and decode.given.buffers
    pairs = pairing.twins(prefill.given, decode.given) if filled else ()
    differing = _differing(pairs, prefill, decode, target, whole)
    asked = [
        fault for _, fault in differing if fault.code == "KV614" and fault.certain and fault.ask
    ]
    near = max(1, min(longest, _NEAR) // 2) if asked else None
    scene = rehearsing.stage(
        sides.filled(prefill.layout, near),
        sides.filled(decode.layout, near),
        target,
        whole=whole,
        longest=longest,
    )
    shown = None if any(fault.open for _, fault in differing) else _rehearsed(scene)
    roots = _roots(pairs, differing, scene, shown, near)
    findings, notes = _found(pairs, scene, shown, roots, prefill, decode, near)
    if ranks is not None:
        findings += sharding.check(prefill.layout, decode.layout, ranks)
        notes += sharding.notes(prefill.layout, decode.layout, ranks)
    broken = (prefill.broken or decode.broken) if filled else None
    lengths = (1,) if near else _lengths(prefill.layout, decode.layout, shown, longest, tokens)
    return HandOff(
        target=target.name,
        whole=whole,
        ranks=ranks,
        prefill=prefill,
        decode=decode,
        rows=_rows(pairs, scene, shown, roots, broken),
        transfers=tuple(_transfer(scene, shown, n) for n in lengths)
        if shown and not (near and whole)
        else (),
        findings=tuple(findings),
        notes=tuple(notes),
        verdict=outcomes.verdict(findings, roots, shown, scene, near, broken),
        asked=tuple(dict.fromkeys(tokens)),
        agreeing=sides.agreeing((prefill, decode), target, whole),
    )


def _found(
    pairs: Sequence[Twin],
    scene: Stage,
    shown: Rehearsal | None,
    roots: Sequence[Root],
    prefill: Side,
    decode: Side,
    near: int | None,
) -> tuple[list[Finding], list[str]]:
    """All findings, causes before consequences, and notes."""
    target = scene.target
    absent = [*sides.absent(prefill, decode)]
    if absent:
        return absent, []
    findings = [*sides.unselected(prefill, decode, target), *sides.stops(prefill, decode, target)]
    findings += sides.strangers(prefill, decode, target)
    findings += (root.finding for root in roots)
    turned = _order_faults(scene)
    findings += turned
    findings += _alone(findings, prefill, decode, scene)
    if shown is not None and not turned:
        findings += _shifted(
            {twin.ident: twin.name for twin in pairs},
            scene,
            shown,
            {ident for root in roots for ident in root.idents},
            near,
        )
    return findings, [*sides.order_notes(prefill, decode, target)]


def _alone(findings: Sequence[Finding], prefill: Side, decode: Side, scene: Stage) -> list[Finding]:
    """What a side gets wrong by itself, unless it follows from what was found already."""
    told = {found.code for found in findings}
    if told & {"KV608", "KV617"}:
        told.add("KV609")
    found = sides.alone(prefill, decode, scene.target, scene.whole)
    return [one for one in found if one.code not in told]


def _rows(
    pairs: Sequence[Twin],
    scene: Stage,
    shown: Rehearsal | None,
    roots: Sequence[Root],
    broken: Finding | None,
) -> tuple[Row, ...]:
    own = {ident: root for root in reversed(roots) for ident in root.idents}
    moved = {one.ident for one in scene.written} & {one.ident for one in scene.taken}
    wrong = shown.wrong if shown is not None else {}
    lost = "KV616" if broken is None else broken.code
    open_roots = {
        ident for root in roots if root.fault and root.fault.open for ident in root.idents
    }
    places = [one.ident for one in scene.taken]
    first = next((at for at, ident in enumerate(places) if ident in open_roots), len(places))
    behind = set(places[first:])
    found = []
    for twin in pairs:
        root = own.get(twin.ident)
        code = root.finding.code if root else None if twin.ident in moved else lost
        is_open = twin.ident in (behind if code is None else open_roots)
        found.append(Row(twin, code, wrong.get(twin.ident, ()), is_open))
    return tuple(found)


def _rehearsed(scene: Stage) -> Rehearsal | None:
    """The rehearsal, ``None`` where shapes are not known at all, or nothing is selected."""
    if not scene.given or not scene.taken:
        return None
    try:
        return rehearsing.rehearse(scene)
    except ValueError:
        return None


def _differing(
    pairs: Sequence[Twin], prefill: Side, decode: Side, target: Target, whole: bool
) -> list[tuple[Twin, Fault]]:
    """What each pair differs in."""
    found = []
    for twin in pairs:
        shape = twin.any.shape
        clipped = transfer.clipped(target, len(shape), whole) if shape else frozenset[int]()
        for fault in pairing.faults(twin, prefill.given, decode.given, clipped):
            found.append((twin, fault))
    return found


def _roots(
    pairs: Sequence[Twin],
    differing: Sequence[tuple[Twin, Fault]],
    scene: Stage,
    shown: Rehearsal | None,
    near: int | None,
) -> list[Root]:
    """What is wrong in the graphs themselves, each with the buffers that it is about."""
    roots = [
        Root(found, tuple(twin.ident for twin in group))
        for found, group in pairing.missing(pairs, alike=not differing)
    ]
    groups: dict[tuple[Fault, int | None], list[tuple[Twin, Fault]]] = {}
    moved = {one.ident for one in scene.written} & {one.ident for one in scene.taken}
    # What a buffer itself shows does not depend on sizes that are wanted for another one.
    seen = shown or _rehearsed(scene)
    for twin, fault in differing:
        own = () if seen is None else seen.own.get(twin.ident, ())
        if shown is None and (fault.certain or fault.ask):
            own = ()
        stuck = shown is None or shown.refused or twin.ident not in moved
        if own or fault.open or (fault.certain and stuck):
            last = own[0][0] - 1 if own else near
            longer = None if last == near else last
            groups.setdefault((fault, longer), []).append((twin, fault))
    for (fault, longer), group in groups.items():
        idents = tuple(twin.ident for twin, _ in group)
        roots.append(Root(pairing.said(fault.code, group, longer), idents, fault))
    return [*roots, *_cuts(pairs, scene, shown)]


def _cuts(pairs: Sequence[Twin], scene: Stage, shown: Rehearsal | None) -> Iterator[Root]:
    """States of which short prompts move only a part, on both sides alike."""
    groups: dict[tuple[str, int], list[Twin]] = {}
    for twin in pairs:
        cut = () if shown is None else shown.cut.get(twin.ident, ())
        if cut and twin.decode is not None:
            said = pairing.type_text(scene.decode, twin.decode)
            groups.setdefault((said, cut[-1][1]), []).append(twin)
    for (said, last), group in groups.items():
        up_to = f"prompts of up to {transfer.length_text(last)}"
        found = finding(
            "KV605",
            group[0].name,
            f"is a state of {said}{pairing.others(group)}: "
            f"{up_to if last < sides.LONGEST else 'short prompts'} move a part of it only",
            "move all of each buffer: VLLM_QAIC_USE_FULL_KV_TRANSFER=1, here --full-transfer",
        )
        yield Root(found, tuple(twin.ident for twin in group))


def _order_faults(scene: Stage) -> list[Finding]:
    """KV617: what both sides have, but not in the same order."""
    there = {one.ident for one in scene.written} & {one.ident for one in scene.taken}
    sent = [one for one in scene.written if one.ident in there]
    read = [one for one in scene.taken if one.ident in there]
    wrong = [(a, b) for a, b in zip(sent, read, strict=False) if a.ident != b.ident]
    if not wrong:
        return []
    first, place = wrong[0]
    more = f", one of {len(wrong)} in the wrong place" if len(wrong) > 1 else ""
    return [
        finding(
            "KV617",
            first.value.name,
            f"would land in the place of {place.value.name}{more}: the order of prefill's "
            f"outputs is not that of decode's inputs",
            "name both sides alike: order is all that the consumer pairs by",
        )
    ]


def _shifted(
    called: Mapping[Ident, str],
    scene: Stage,
    shown: Rehearsal,
    roots: set[Ident],
    near: int | None,
) -> Iterator[Finding]:
    """KV618: the buffers that are right in themselves and lie elsewhere, all as one."""
    moved = {one.ident for one in scene.taken} & {one.ident for one in scene.written}
    behind = [
        ident
        for ident, ranges in shown.wrong.items()
        if ranges and ident in moved and ident not in roots
    ]
    if not behind:
        return
    first = union(*(shown.wrong[ident] for ident in behind))[0][0]
    ident = next(one for one in behind if rehearsing.within(first, shown.wrong[one]))
    noticed = rehearsing.within(first, shown.refused)
    yield finding(
        "KV618",
        called.get(ident, ident[1]),
        f"is looked for {_place(ident, scene, first, near)}{_behind(len(behind) - 1)}; "
        + ("decode finds its memory too small" if noticed else "decode does not notice"),
        f"{'mend what stands above' if roots else 'compile both for the same context'}: "
        "each side counts offsets from its own shapes",
    )


def _place(ident: Ident, scene: Stage, tokens: int, near: int | None) -> str:
    """Where a buffer is looked for, and where it is."""
    sent = zip(scene.written, scene.sent(tokens), strict=False)
    there = next(slot.offset for one, slot in sent if one.ident == ident)
    here = next(slot.offset for slot in scene.read(tokens) if slot.ident == ident)
    guessed = near is not None and (scene.whole or tokens > near)
    if guessed or max(there, here) >= sides.FAR:
        return "at another byte than prefill wrote it to"
    prompt = transfer.length_text(tokens)
    return f"at byte {here:,}, but was written to byte {there:,}, for a prompt of {prompt}"


def _behind(count: int) -> str:
    if count == 0:
        return ""
    return ", and so is the one behind it" if count == 1 else f", and so are {count} behind it"


def _lengths(
    prefill: Layout, decode: Layout, shown: Rehearsal | None, longest: int, more: Iterable[int]
) -> tuple[int, ...]:
    """One token, each window and one more, the contexts, and wherever something changes."""
    found = {1, *more}
    for layout in (prefill, decode):
        for buffer in layout.buffers:
            size = layout.sized((buffer.window,))[0]
            if isinstance(size, int):
                found |= {size, size + 1}
        found.add(sides.capacity(layout))
    ranges = union(*shown.wrong.values(), shown.refused) if shown is not None else ()
    each = [*(shown.wrong.values() if shown is not None else ()), ranges]
    found |= {length for some in each for first, last in some for length in (first, last + 1)}
    return tuple(sorted(n for n in found if 1 <= n <= longest and n < sides.LONGEST))


def _transfer(scene: Stage, shown: Rehearsal, tokens: int) -> Transfer:
    wrong = (i for i, ranges in shown.wrong.items() if rehearsing.within(tokens, ranges))
    refused = rehearsing.within(tokens, shown.refused)
    return Transfer(tokens, scene.sent(tokens), scene.read(tokens), tuple(wrong), refused)
