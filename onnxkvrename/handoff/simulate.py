"""A hand-off in the mind: at which prompt lengths which buffer goes wrong.

Bytes are not needed for that, only offsets. They grow with the prompt in straight
lines that bend where a buffer is full, so a few lengths tell of all others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from onnxkvrename.handoff.consumer import Consumer
from onnxkvrename.handoff.slots import (
    BufferId,
    MemorySlot,
    SelectedValue,
    find_clipped_axes,
    lay_out_slots,
    list_selected_inputs,
    list_selected_outputs,
)
from onnxkvrename.layout.dims import Shape
from onnxkvrename.layout.layout import Buffer, Layout

PromptRanges = tuple[tuple[int, int], ...]
"""Prompt lengths, first and last of each run, in order and apart."""


class TransferSetup(NamedTuple):
    """Both sides as the consumer sees them; every size that matters is known.

    ``given`` are prefill's inputs, which make its slots, ``written`` its outputs, and
    ``taken`` decode's inputs. ``longest`` is the longest prompt. ``whole`` says that
    all of each buffer is moved.
    """

    prefill: Layout
    decode: Layout
    prefill_inputs: tuple[SelectedValue, ...]
    prefill_outputs: tuple[SelectedValue, ...]
    decode_inputs: tuple[SelectedValue, ...]
    consumer: Consumer
    full_transfer: bool
    longest_prompt: int

    def build_prefill_slots(self, tokens: int) -> tuple[MemorySlot, ...]:
        """Prefill's slots for a prompt of this length."""
        length = None if self.full_transfer else tokens
        return lay_out_slots(self.prefill_inputs, self.prefill, self.consumer, length)

    def build_decode_slots(self, tokens: int) -> tuple[MemorySlot, ...]:
        """Decode's slots for the same prompt."""
        length = None if self.full_transfer else tokens
        return lay_out_slots(self.decode_inputs, self.decode, self.consumer, length)


class SimulationResult(NamedTuple):
    """The prompt lengths at which things go wrong.

    ``wrong`` has those of each buffer of decode: other bytes than prefill wrote for it,
    or not all of them; windows of two sizes may agree by luck at some, and count as wrong.
    ``own`` are those at which the buffer differs by itself,
    ``cut`` those at which not all of it is moved; at all others it only lies
    elsewhere. ``refused`` are the lengths at which decode itself finds the memory too small.
    """

    wrong_ranges: Mapping[BufferId, PromptRanges]
    differing_ranges: Mapping[BufferId, PromptRanges]
    truncated_ranges: Mapping[BufferId, PromptRanges]
    refused_ranges: PromptRanges


class _PromptState(NamedTuple):
    """One prompt length: how far each buffer lies from where it was written, in bytes."""

    offset_shifts: Mapping[BufferId, int]
    differing: frozenset[BufferId]
    truncated: frozenset[BufferId]
    excess_bytes: int


class _SlotContent(NamedTuple):
    """A place in the memory, and the buffer that a side has there, if it is one."""

    slot: MemorySlot
    buffer: Buffer | None
    layout: Layout

    @property
    def full_shape(self) -> Shape:
        """The shape of all that one sequence has of it; in a place of another rank, the place's."""
        if self.buffer is None or len(self.buffer.shape or ()) != len(self.slot.shape):
            return self.slot.shape
        return (1, *self.layout.resolve_shape(self.buffer.shape or ())[1:])


def build_transfer_setup(
    prefill: Layout, decode: Layout, target: Consumer, *, whole: bool, longest: int
) -> TransferSetup:
    """Both sides, in the consumer's order; an output for which there is no slot is not written."""
    given = list_selected_inputs(prefill, target)
    return TransferSetup(
        prefill,
        decode,
        given,
        list_selected_outputs(prefill, target)[: len(given)],
        list_selected_inputs(decode, target),
        target,
        whole,
        longest,
    )


def simulate_transfer(scene: TransferSetup) -> SimulationResult:
    """What goes wrong at which of the lengths from 1 to the longest, all of them."""
    wanted = dict.fromkeys((buffer.layer, buffer.part) for buffer in scene.decode.buffers)
    wanted |= dict.fromkeys(one.buffer_id for one in scene.decode_inputs)
    wrong: dict[BufferId, list[tuple[int, int]]] = {ident: [] for ident in wanted}
    own: dict[BufferId, list[tuple[int, int]]] = {ident: [] for ident in wanted}
    cut: dict[BufferId, list[tuple[int, int]]] = {ident: [] for ident in wanted}
    refused: list[tuple[int, int]] = []
    for first, last in _find_linear_segments(scene):
        start, end = _simulate_prompt(scene, first), _simulate_prompt(scene, last)
        refused += _find_positive_ranges(first, last, start.excess_bytes, end.excess_bytes)
        for ident in wanted:
            if ident in start.differing:
                own[ident].append((first, last))
            if ident in start.truncated:
                cut[ident].append((first, last))
            if ident in start.differing | start.truncated or ident not in start.offset_shifts:
                wrong[ident].append((first, last))
            else:
                wrong[ident] += _find_nonzero_ranges(
                    first, last, start.offset_shifts[ident], end.offset_shifts[ident]
                )
    return SimulationResult(
        _merge_each(wrong), _merge_each(own), _merge_each(cut), merge_ranges(refused)
    )


def merge_ranges(*given: Iterable[tuple[int, int]]) -> PromptRanges:
    """All the lengths of some ranges."""
    found: list[tuple[int, int]] = []
    for first, last in sorted(one for ranges in given for one in ranges):
        if found and first <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(last, found[-1][1])
        else:
            found.append((first, last))
    return tuple(found)


def subtract_ranges(ranges: PromptRanges, others: PromptRanges) -> PromptRanges:
    """The lengths of some ranges that are not in others."""
    for start, end in others:
        parts = [
            part
            for first, last in ranges
            for part in ((first, min(last, start - 1)), (max(first, end + 1), last))
            if part[0] <= part[1]
        ]
        ranges = merge_ranges(parts)
    return ranges


def is_in_ranges(tokens: int, ranges: PromptRanges) -> bool:
    """Whether a prompt of this length is among them."""
    return any(first <= tokens <= last for first, last in ranges)


def _merge_each(
    found: Mapping[BufferId, Sequence[tuple[int, int]]],
) -> dict[BufferId, PromptRanges]:
    return {ident: merge_ranges(ranges) for ident, ranges in found.items()}


def _find_linear_segments(scene: TransferSetup) -> Iterator[tuple[int, int]]:
    """Runs of lengths between which no buffer fills up: in each, all is straight."""
    both = ((scene.prefill_inputs, scene.prefill), (scene.decode_inputs, scene.decode))
    sizes = {
        dim
        for found, layout in both
        for one in found
        for axis, dim in enumerate(layout.resolve_shape(one.value.shape or ()))
        if isinstance(dim, int) and axis in _find_prompt_axes(one, scene)
    }
    bends = {length for size in {1, *sizes} for length in (size, size + 1)}
    starts = sorted({1, *(bend for bend in bends if 1 < bend <= scene.longest_prompt)})
    yield from zip(
        starts, [*(start - 1 for start in starts[1:]), scene.longest_prompt], strict=True
    )


def _find_prompt_axes(one: SelectedValue, scene: TransferSetup) -> frozenset[int | None]:
    """The axes along which a prompt counts: those that it cuts, and that of its tokens.

    Where a buffer does not say which that is, it may be any.
    """
    rank = len(one.value.shape or ())
    if _has_unknown_kind(one.buffer):
        return frozenset(range(1, rank))
    cut = find_clipped_axes(scene.consumer, rank, scene.full_transfer)
    return cut | {None if one.buffer is None else one.buffer.sequence_axis}


def _simulate_prompt(scene: TransferSetup, tokens: int) -> _PromptState:
    sent, read = scene.build_prefill_slots(tokens), scene.build_decode_slots(tokens)
    written = {
        one.buffer_id: _SlotContent(slot, one.buffer, scene.prefill)
        for one, slot in zip(scene.prefill_outputs, sent, strict=False)
    }
    meant = {slot.buffer_id: slot for slot in sent}
    shift: dict[BufferId, int] = {}
    own, cut = set[BufferId](), set[BufferId]()
    for one, slot in zip(scene.decode_inputs, read, strict=True):
        mine, theirs = written.get(slot.buffer_id), _SlotContent(slot, one.buffer, scene.decode)
        if mine is None:
            continue
        shift[slot.buffer_id] = slot.offset - mine.slot.offset
        fits = _has_same_type(mine.slot, meant.get(slot.buffer_id, mine.slot))
        if not fits or not _has_matching_bytes(mine, theirs, tokens):
            own.add(slot.buffer_id)
        if any(_is_truncated(held, scene.consumer, tokens) for held in (mine, theirs)):
            cut.add(slot.buffer_id)
    return _PromptState(
        shift,
        frozenset(own),
        frozenset(cut),
        _compute_memory_size(read) - _compute_memory_size(sent),
    )


def _has_same_type(place: MemorySlot, meant: MemorySlot) -> bool:
    """Whether a place is like the one that was meant for what is written there."""
    return (place.shape, place.dtype) == (meant.shape, meant.dtype)


def _has_matching_bytes(mine: _SlotContent, theirs: _SlotContent, tokens: int) -> bool:
    """Whether the bytes of all tokens stand alike; tokens that come first may have room left."""
    forms = _resolve_byte_orders(mine, theirs)
    if mine.slot.dtype != theirs.slot.dtype or forms[0] == forms[1]:
        return mine.slot.dtype == theirs.slot.dtype
    lengths = [form[0][0] if form and form[0][1] else 1 for form in forms]
    rests = [form[1:] if form and form[0][1] else form for form in forms]
    return rests[0] == rests[1] and min(lengths) >= tokens


_ByteOrder = list[tuple[int, bool]]
"""The order of the bytes: axes longer than 1, and which of them are tokens."""


def _resolve_byte_orders(mine: _SlotContent, theirs: _SlotContent) -> tuple[_ByteOrder, _ByteOrder]:
    """Of both. One of fixed sizes does not say what its axes are; the other may."""
    told = [held.buffer for held in (mine, theirs) if not _has_unknown_kind(held.buffer)]
    if len(told) == 2:
        return _resolve_byte_order(mine), _resolve_byte_order(theirs)
    axis = next((buffer.sequence_axis for buffer in told if buffer is not None), None)
    return _build_byte_order(mine.slot.shape, axis), _build_byte_order(theirs.slot.shape, axis)


def _resolve_byte_order(held: _SlotContent) -> _ByteOrder:
    """Where axes are known, all but the tokens' count in full, however little is moved.

    Not even the beginnings are alike of states that differ.
    """
    moved, full = held.slot.shape, held.full_shape
    axis = None if held.buffer is None else held.buffer.sequence_axis
    return _build_byte_order(
        tuple(moved[at] if at == axis else dim for at, dim in enumerate(full)), axis
    )


def _build_byte_order(shape: Shape, tokens: int | None) -> _ByteOrder:
    dims = ((int(dim or 0), axis) for axis, dim in enumerate(shape))
    return [(dim, axis == tokens) for dim, axis in dims if dim != 1]


def _has_unknown_kind(buffer: Buffer | None) -> bool:
    return buffer is not None and buffer.kind == "unknown"


def _is_truncated(held: _SlotContent, target: Consumer, tokens: int) -> bool:
    """Whether less is moved than a prompt fills: a state is full from the first token on."""
    slot, buffer = held.slot, held.buffer
    if buffer is None or buffer.kind == "unknown":
        return False
    return any(
        isinstance(size, int)
        and isinstance(moved, int)
        and moved < (min(tokens, size) if axis == buffer.sequence_axis else size)
        for axis, (moved, size) in enumerate(zip(slot.shape, held.full_shape, strict=True))
    )


def _compute_memory_size(slots: Sequence[MemorySlot]) -> int:
    return slots[-1].offset + slots[-1].nbytes if slots else 0


def _find_nonzero_ranges(first: int, last: int, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Where a straight line from ``start`` to ``end`` is not 0: everywhere but at its root."""
    if start == end == 0:
        return
    root = None
    if start != end:
        steps, rest = divmod(-start * (last - first), end - start)
        root = first + steps if rest == 0 and 0 <= steps <= last - first else None
    if root is None:
        yield first, last
        return
    if root > first:
        yield first, root - 1
    if root < last:
        yield root + 1, last


def _find_positive_ranges(first: int, last: int, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Where a straight line from ``start`` to ``end`` is above 0."""
    if start > 0 and end > 0:
        yield first, last
    elif start <= 0 < end:
        yield first + -start * (last - first) // (end - start) + 1, last
    elif end <= 0 < start:
        yield first, first + -(-start * (last - first) // (start - end)) - 1
