"""Will the hand-off from prefill to decode work: what differs, and what then goes wrong when.

Root causes are looked for in the graphs, consequences by rehearsing the hand-off;
a buffer that only lies elsewhere because of another one is no finding of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from onnxkvrename.findings import Finding, build_finding
from onnxkvrename.handoff.buffer_diff import (
    BufferPair,
    Difference,
    build_difference_finding,
    check_missing_buffers,
    find_differences,
    format_buffer_type,
    format_other_buffers,
    pair_buffers,
)
from onnxkvrename.handoff.consumer import Consumer
from onnxkvrename.handoff.simulate import (
    PromptRanges,
    SimulationResult,
    TransferSetup,
    build_transfer_setup,
    is_in_ranges,
    merge_ranges,
    simulate_transfer,
)
from onnxkvrename.handoff.slots import BufferId, MemorySlot, find_clipped_axes, format_token_count
from onnxkvrename.handoff.tensor_parallel import (
    TensorParallelSizes,
    check_tensor_parallelism,
    list_sharding_notes,
)
from onnxkvrename.handoff.verdict import HandoffVerdict, RootCause, build_verdict
from onnxkvrename.handoff.worker import (
    UNKNOWN_SIZE,
    UNLIMITED_LENGTH,
    HandoffSide,
    check_buffers_exist,
    check_each_side,
    check_side_tokens,
    check_startup,
    check_unmatched_non_kv,
    fill_missing_sizes,
    find_longest_prompt,
    find_shared_symbols,
    list_order_notes,
)
from onnxkvrename.layout.layout import Layout

_WINDOW_PLACEHOLDER = 1 << 30
"""Stands for a window of which no size is known: shorter than the longest prompt."""


class PairResult(NamedTuple):
    """A pair of buffers: the code of its own fault, if it has one, and where it goes wrong.

    ``open`` says that sizes are wanted to tell, its own or those of one before it.
    """

    pair: BufferPair
    code: str | None
    wrong_ranges: PromptRanges
    is_undecided: bool = False


class SimulatedPrompt(NamedTuple):
    """One simulated prompt; ``refused``: decode finds its memory too small."""

    tokens: int
    prefill_slots: tuple[MemorySlot, ...]
    decode_slots: tuple[MemorySlot, ...]
    wrong_buffer_ids: tuple[BufferId, ...]
    is_refused: bool


class Handoff(NamedTuple):
    """Two sides held against each other as a consumer would join them.

    ``asked`` are the prompt lengths that somebody wanted to know about, ``agreeing`` the
    symbols without a size that must be the same on both sides.
    """

    consumer_name: str
    full_transfer: bool
    ranks: TensorParallelSizes | None
    prefill: HandoffSide
    decode: HandoffSide
    pair_results: tuple[PairResult, ...]
    simulated_prompts: tuple[SimulatedPrompt, ...]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    verdict: HandoffVerdict
    requested_lengths: tuple[int, ...] = ()
    shared_symbols: tuple[str, ...] = ()

    @property
    def failed(self) -> bool:
        """Whether anything is wrong."""
        return bool(self.findings)


def compare_sides(
    prefill: HandoffSide,
    decode: HandoffSide,
    target: Consumer,
    *,
    ranks: TensorParallelSizes | None = None,
    whole: bool = False,
    tokens: Sequence[int] = (),
) -> Handoff:
    """Everything that differs between two sides, and what comes of it at which prompt length.

    ``whole`` is for a consumer that moves all of each buffer; ``tokens`` are prompt
    lengths to simulate beside those at which something changes; one that is longer than a
    side's context is not simulated.
    """
    longest = min(find_longest_prompt(prefill.layout), find_longest_prompt(decode.layout))
    filled = prefill.original_layout.buffers and decode.original_layout.buffers
    pairs = pair_buffers(prefill.original_layout, decode.original_layout) if filled else ()
    differing = _compare_pairs(pairs, prefill, decode, target, whole)
    asked = [
        fault
        for _, fault in differing
        if fault.code == "KV614" and fault.is_certain and fault.needed_symbols
    ]
    near = max(1, min(longest, _WINDOW_PLACEHOLDER) // 2) if asked else None
    scene = build_transfer_setup(
        fill_missing_sizes(prefill.layout, near),
        fill_missing_sizes(decode.layout, near),
        target,
        whole=whole,
        longest=longest,
    )
    shown = None if any(fault.is_undecided for _, fault in differing) else _try_simulation(scene)
    roots = _find_root_causes(pairs, differing, scene, shown, near)
    findings, notes = _collect_findings(pairs, scene, shown, roots, prefill, decode, near)
    if ranks is not None:
        findings += check_tensor_parallelism(prefill.layout, decode.layout, ranks)
        notes += list_sharding_notes(prefill.layout, decode.layout, ranks)
    broken = (prefill.model_finding or decode.model_finding) if filled else None
    lengths = (
        (1,) if near else _choose_lengths(prefill.layout, decode.layout, shown, longest, tokens)
    )
    return Handoff(
        consumer_name=target.name,
        full_transfer=whole,
        ranks=ranks,
        prefill=prefill,
        decode=decode,
        pair_results=_build_pair_results(pairs, scene, shown, roots, broken),
        simulated_prompts=tuple(_build_simulated_prompt(scene, shown, n) for n in lengths)
        if shown and not (near and whole)
        else (),
        findings=tuple(findings),
        notes=tuple(notes),
        verdict=build_verdict(findings, roots, shown, scene, near, broken),
        requested_lengths=tuple(dict.fromkeys(tokens)),
        shared_symbols=find_shared_symbols((prefill, decode), target, whole),
    )


def _collect_findings(
    pairs: Sequence[BufferPair],
    scene: TransferSetup,
    shown: SimulationResult | None,
    roots: Sequence[RootCause],
    prefill: HandoffSide,
    decode: HandoffSide,
    near: int | None,
) -> tuple[list[Finding], list[str]]:
    """All findings, causes before consequences, and notes."""
    target = scene.consumer
    absent = [*check_buffers_exist(prefill, decode)]
    if absent:
        return absent, []
    findings = [
        *check_side_tokens(prefill, decode, target),
        *check_startup(prefill, decode, target),
    ]
    findings += check_unmatched_non_kv(prefill, decode, target)
    findings += (root.finding for root in roots)
    turned = _check_order(scene)
    findings += turned
    findings += _check_each_side(findings, prefill, decode, scene)
    if shown is not None and not turned:
        findings += _check_shifted_buffers(
            {twin.buffer_id: twin.name for twin in pairs},
            scene,
            shown,
            {ident for root in roots for ident in root.buffer_ids},
            near,
        )
    return findings, [*list_order_notes(prefill, decode, target)]


def _check_each_side(
    findings: Sequence[Finding], prefill: HandoffSide, decode: HandoffSide, scene: TransferSetup
) -> list[Finding]:
    """What a side gets wrong by itself, unless it follows from what was found already."""
    told = {found.code for found in findings}
    if told & {"KV608", "KV617"}:
        told.add("KV609")
    found = check_each_side(prefill, decode, scene.consumer, scene.full_transfer)
    return [one for one in found if one.code not in told]


def _build_pair_results(
    pairs: Sequence[BufferPair],
    scene: TransferSetup,
    shown: SimulationResult | None,
    roots: Sequence[RootCause],
    broken: Finding | None,
) -> tuple[PairResult, ...]:
    own = {ident: root for root in reversed(roots) for ident in root.buffer_ids}
    moved = {one.buffer_id for one in scene.prefill_outputs} & {
        one.buffer_id for one in scene.decode_inputs
    }
    wrong = shown.wrong_ranges if shown is not None else {}
    lost = "KV616" if broken is None else broken.code
    open_roots = {
        ident
        for root in roots
        if root.difference and root.difference.is_undecided
        for ident in root.buffer_ids
    }
    places = [one.buffer_id for one in scene.decode_inputs]
    first = next((at for at, ident in enumerate(places) if ident in open_roots), len(places))
    behind = set(places[first:])
    found = []
    for twin in pairs:
        root = own.get(twin.buffer_id)
        code = root.finding.code if root else None if twin.buffer_id in moved else lost
        is_open = twin.buffer_id in (behind if code is None else open_roots)
        found.append(PairResult(twin, code, wrong.get(twin.buffer_id, ()), is_open))
    return tuple(found)


def _try_simulation(scene: TransferSetup) -> SimulationResult | None:
    """The rehearsal, ``None`` where shapes are not known at all, or nothing is selected."""
    if not scene.prefill_inputs or not scene.decode_inputs:
        return None
    try:
        return simulate_transfer(scene)
    except ValueError:
        return None


def _compare_pairs(
    pairs: Sequence[BufferPair],
    prefill: HandoffSide,
    decode: HandoffSide,
    target: Consumer,
    whole: bool,
) -> list[tuple[BufferPair, Difference]]:
    """What each pair differs in."""
    found = []
    for twin in pairs:
        shape = twin.present_buffer.shape
        clipped = find_clipped_axes(target, len(shape), whole) if shape else frozenset[int]()
        for fault in find_differences(
            twin, prefill.original_layout, decode.original_layout, clipped
        ):
            found.append((twin, fault))
    return found


def _find_root_causes(
    pairs: Sequence[BufferPair],
    differing: Sequence[tuple[BufferPair, Difference]],
    scene: TransferSetup,
    shown: SimulationResult | None,
    near: int | None,
) -> list[RootCause]:
    """What is wrong in the graphs themselves, each with the buffers that it is about."""
    roots = [
        RootCause(found, tuple(twin.buffer_id for twin in group))
        for found, group in check_missing_buffers(pairs, alike=not differing)
    ]
    groups: dict[tuple[Difference, int | None], list[tuple[BufferPair, Difference]]] = {}
    moved = {one.buffer_id for one in scene.prefill_outputs} & {
        one.buffer_id for one in scene.decode_inputs
    }
    # What a buffer itself shows does not depend on sizes that are wanted for another one.
    seen = shown or _try_simulation(scene)
    for twin, fault in differing:
        own = () if seen is None else seen.differing_ranges.get(twin.buffer_id, ())
        if shown is None and (fault.is_certain or fault.needed_symbols):
            own = ()
        stuck = shown is None or shown.refused_ranges or twin.buffer_id not in moved
        if own or fault.is_undecided or (fault.is_certain and stuck):
            last = own[0][0] - 1 if own else near
            longer = None if last == near else last
            groups.setdefault((fault, longer), []).append((twin, fault))
    for (fault, longer), group in groups.items():
        idents = tuple(twin.buffer_id for twin, _ in group)
        roots.append(RootCause(build_difference_finding(fault.code, group, longer), idents, fault))
    return [*roots, *_find_truncated_states(pairs, scene, shown)]


def _find_truncated_states(
    pairs: Sequence[BufferPair], scene: TransferSetup, shown: SimulationResult | None
) -> Iterator[RootCause]:
    """States of which short prompts move only a part, on both sides alike."""
    groups: dict[tuple[str, int], list[BufferPair]] = {}
    for twin in pairs:
        cut = () if shown is None else shown.truncated_ranges.get(twin.buffer_id, ())
        if cut and twin.decode is not None:
            said = format_buffer_type(scene.decode, twin.decode)
            groups.setdefault((said, cut[-1][1]), []).append(twin)
    for (said, last), group in groups.items():
        up_to = f"prompts of up to {format_token_count(last)}"
        found = build_finding(
            "KV605",
            group[0].name,
            f"is a state of {said}{format_other_buffers(group)}: "
            f"{up_to if last < UNLIMITED_LENGTH else 'short prompts'} move a part of it only",
            "move all of each buffer: VLLM_QAIC_USE_FULL_KV_TRANSFER=1, here --full-transfer",
        )
        yield RootCause(found, tuple(twin.buffer_id for twin in group))


def _check_order(scene: TransferSetup) -> list[Finding]:
    """KV617: what both sides have, but not in the same order."""
    there = {one.buffer_id for one in scene.prefill_outputs} & {
        one.buffer_id for one in scene.decode_inputs
    }
    sent = [one for one in scene.prefill_outputs if one.buffer_id in there]
    read = [one for one in scene.decode_inputs if one.buffer_id in there]
    wrong = [(a, b) for a, b in zip(sent, read, strict=False) if a.buffer_id != b.buffer_id]
    if not wrong:
        return []
    first, place = wrong[0]
    more = f", one of {len(wrong)} in the wrong place" if len(wrong) > 1 else ""
    return [
        build_finding(
            "KV617",
            first.value.name,
            f"would land in the place of {place.value.name}{more}: the order of prefill's "
            f"outputs is not that of decode's inputs",
            "name both sides alike: order is all that the consumer pairs by",
        )
    ]


def _check_shifted_buffers(
    called: Mapping[BufferId, str],
    scene: TransferSetup,
    shown: SimulationResult,
    roots: set[BufferId],
    near: int | None,
) -> Iterator[Finding]:
    """KV618: the buffers that are right in themselves and lie elsewhere, all as one."""
    moved = {one.buffer_id for one in scene.decode_inputs} & {
        one.buffer_id for one in scene.prefill_outputs
    }
    behind = [
        ident
        for ident, ranges in shown.wrong_ranges.items()
        if ranges and ident in moved and ident not in roots
    ]
    if not behind:
        return
    first = merge_ranges(*(shown.wrong_ranges[ident] for ident in behind))[0][0]
    ident = next(one for one in behind if is_in_ranges(first, shown.wrong_ranges[one]))
    noticed = is_in_ranges(first, shown.refused_ranges)
    yield build_finding(
        "KV618",
        called.get(ident, ident[1]),
        f"is looked for {_format_offsets(ident, scene, first, near)}{_format_later_count(len(behind) - 1)}; "
        + ("decode finds its memory too small" if noticed else "decode does not notice"),
        f"{'mend what stands above' if roots else 'compile both for the same context'}: "
        "each side counts offsets from its own shapes",
    )


def _format_offsets(ident: BufferId, scene: TransferSetup, tokens: int, near: int | None) -> str:
    """Where a buffer is looked for, and where it is."""
    sent = zip(scene.prefill_outputs, scene.build_prefill_slots(tokens), strict=False)
    there = next(slot.offset for one, slot in sent if one.buffer_id == ident)
    here = next(slot.offset for slot in scene.build_decode_slots(tokens) if slot.buffer_id == ident)
    guessed = near is not None and (scene.full_transfer or tokens > near)
    if guessed or max(there, here) >= UNKNOWN_SIZE:
        return "at another byte than prefill wrote it to"
    prompt = format_token_count(tokens)
    return f"at byte {here:,}, but was written to byte {there:,}, for a prompt of {prompt}"


def _format_later_count(count: int) -> str:
    if count == 0:
        return ""
    return ", and so is the one behind it" if count == 1 else f", and so are {count} behind it"


def _choose_lengths(
    prefill: Layout,
    decode: Layout,
    shown: SimulationResult | None,
    longest: int,
    more: Iterable[int],
) -> tuple[int, ...]:
    """One token, each window and one more, the contexts, and wherever something changes."""
    found = {1, *more}
    for layout in (prefill, decode):
        for buffer in layout.buffers:
            size = layout.resolve_shape((buffer.window,))[0]
            if isinstance(size, int):
                found |= {size, size + 1}
        found.add(find_longest_prompt(layout))
    ranges = (
        merge_ranges(*shown.wrong_ranges.values(), shown.refused_ranges)
        if shown is not None
        else ()
    )
    each = [*(shown.wrong_ranges.values() if shown is not None else ()), ranges]
    found |= {length for some in each for first, last in some for length in (first, last + 1)}
    return tuple(sorted(n for n in found if 1 <= n <= longest and n < UNLIMITED_LENGTH))


def _build_simulated_prompt(
    scene: TransferSetup, shown: SimulationResult, tokens: int
) -> SimulatedPrompt:
    wrong = (i for i, ranges in shown.wrong_ranges.items() if is_in_ranges(tokens, ranges))
    refused = is_in_ranges(tokens, shown.refused_ranges)
    return SimulatedPrompt(
        tokens,
        scene.build_prefill_slots(tokens),
        scene.build_decode_slots(tokens),
        tuple(wrong),
        refused,
    )
