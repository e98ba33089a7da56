"""Simulate a hand-off to find the prompt lengths at which decode reads wrong bytes.

The simulation needs only offsets, no bytes. Offsets grow linearly with the prompt until a buffer
is full, so the two ends of each linear segment determine all lengths between them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from onnxkvrename.handoff.consumer import Consumer
from onnxkvrename.handoff.selection import BufferId, ConsumerView, SelectedValue
from onnxkvrename.handoff.slots import (
    MemorySlot,
    build_slots,
    compute_memory_size,
    find_clipped_axes,
)
from onnxkvrename.layout.layout import KvBuffer, Layout, Shape

PromptRanges = tuple[tuple[int, int], ...]
"""Ranges of prompt lengths in tokens, first and last of each, sorted and disjoint."""


class TransferSetup(NamedTuple):
    """Both sides of a transfer as the consumer sees them, with all relevant sizes known.

    Prefill's inputs make its slots, its outputs are written to them, and decode's inputs make its
    own; all are in the consumer's order.
    """

    prefill: Layout
    decode: Layout
    prefill_inputs: tuple[SelectedValue, ...]
    prefill_outputs: tuple[SelectedValue, ...]
    decode_inputs: tuple[SelectedValue, ...]
    consumer: Consumer
    full_transfer: bool
    longest_prompt: int

    @property
    def transferred_ids(self) -> frozenset[BufferId]:
        """The buffers that prefill writes and decode reads."""
        written_ids = {each.buffer_id for each in self.prefill_outputs}
        return frozenset(written_ids & {each.buffer_id for each in self.decode_inputs})

    def build_prefill_slots(self, tokens: int) -> tuple[MemorySlot, ...]:
        """Return prefill's slots for a prompt of this length."""
        length = None if self.full_transfer else tokens
        return build_slots(self.prefill_inputs, self.prefill, self.consumer, length)

    def build_decode_slots(self, tokens: int) -> tuple[MemorySlot, ...]:
        """Return decode's slots for a prompt of this length."""
        length = None if self.full_transfer else tokens
        return build_slots(self.decode_inputs, self.decode, self.consumer, length)


class SimulationResult(NamedTuple):
    """The prompt lengths at which a hand-off fails or corrupts buffers.

    Attributes:
        wrong_ranges: For each buffer of decode, the lengths at which decode does not read exactly
            the bytes that prefill wrote for it. Windows of different sizes count as wrong even at
            lengths where they agree by chance.
        differing_ranges: The lengths at which the buffer itself differs between the sides.
        truncated_ranges: The lengths at which only a part of the buffer is moved. At the remaining
            wrong lengths, only the offset of the buffer differs.
        refused_ranges: The lengths at which decode finds the memory too small and stops.
    """

    wrong_ranges: Mapping[BufferId, PromptRanges]
    differing_ranges: Mapping[BufferId, PromptRanges]
    truncated_ranges: Mapping[BufferId, PromptRanges]
    refused_ranges: PromptRanges


class _PromptState(NamedTuple):
    """The state of a hand-off at one prompt length.

    Attributes:
        offset_shifts: Decode's offset of each buffer minus prefill's, in bytes.
        differing: The buffers whose shape, dtype or byte order differs.
        truncated: The buffers of which only a part is moved.
        excess: By how much decode needs more than prefill writes.
    """

    offset_shifts: Mapping[BufferId, int]
    differing: frozenset[BufferId]
    truncated: frozenset[BufferId]
    excess: int


class _SlotContent(NamedTuple):
    """A slot and its buffer; ``None`` if the value is not a KV buffer."""

    slot: MemorySlot
    buffer: KvBuffer | None
    layout: Layout

    @property
    def full_shape(self) -> Shape:
        """The shape of one full sequence; the slot's own shape if the ranks differ."""
        if self.buffer is None or len(self.buffer.shape or ()) != len(self.slot.shape):
            return self.slot.shape
        return (1, *self.layout.resolve_shape(self.buffer.shape or ())[1:])


def build_transfer_setup(
    writer: ConsumerView, reader: ConsumerView, *, longest_prompt: int
) -> TransferSetup:
    """Return both sides in the consumer's order, without outputs that have no slot.

    With separate memory decode makes the slots, and prefill fills one with each output.
    """
    inputs, outputs = writer.selection.inputs, writer.selection.outputs
    if writer.consumer.memory == "separate":
        values = {value.name: value for value in writer.layout.inputs}
        inputs = tuple(
            each._replace(value=values.get(each.graph_input_name, each.value)) for each in outputs
        )
    return TransferSetup(
        writer.layout,
        reader.layout,
        inputs,
        outputs[: len(inputs)],
        reader.selection.inputs,
        writer.consumer,
        writer.full_transfer,
        longest_prompt,
    )


def simulate_transfer(setup: TransferSetup) -> SimulationResult:
    """Simulate the transfer at all prompt lengths from 1 to the longest.

    Raises:
        ValueError: A shape, or the size of an axis, is not known.
    """
    buffer_ids = dict.fromkeys((buffer.layer, buffer.part) for buffer in setup.decode.buffers)
    buffer_ids |= dict.fromkeys(each.buffer_id for each in setup.decode_inputs)
    wrong: dict[BufferId, list[tuple[int, int]]] = {each: [] for each in buffer_ids}
    differing: dict[BufferId, list[tuple[int, int]]] = {each: [] for each in buffer_ids}
    truncated: dict[BufferId, list[tuple[int, int]]] = {each: [] for each in buffer_ids}
    refused: list[tuple[int, int]] = []
    for first, last in find_linear_segments(setup):
        start, end = _simulate_prompt(setup, first), _simulate_prompt(setup, last)
        refused += _find_positive_ranges(first, last, start.excess, end.excess)
        for each in buffer_ids:
            if each in start.differing:
                differing[each].append((first, last))
            if each in start.truncated:
                truncated[each].append((first, last))
            if each in start.differing | start.truncated or each not in start.offset_shifts:
                wrong[each].append((first, last))
            else:
                wrong[each] += _find_nonzero_ranges(
                    first, last, start.offset_shifts[each], end.offset_shifts[each]
                )
    return SimulationResult(
        _merge_each(wrong), _merge_each(differing), _merge_each(truncated), merge_ranges(refused)
    )


def merge_ranges(*range_lists: Iterable[tuple[int, int]]) -> PromptRanges:
    """Return the union of some ranges."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(pair for ranges in range_lists for pair in ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(last, merged[-1][1])
        else:
            merged.append((first, last))
    return tuple(merged)


def subtract_ranges(ranges: PromptRanges, excluded: PromptRanges) -> PromptRanges:
    """Return the parts of `ranges` outside of `excluded`."""
    for start, end in excluded:
        parts = [
            part
            for first, last in ranges
            for part in ((first, min(last, start - 1)), (max(first, end + 1), last))
            if part[0] <= part[1]
        ]
        ranges = merge_ranges(parts)
    return ranges


def is_in_ranges(tokens: int, ranges: PromptRanges) -> bool:
    """Return whether a prompt of this length is in one of the ranges."""
    return any(first <= tokens <= last for first, last in ranges)


def _merge_each(
    ranges: Mapping[BufferId, Sequence[tuple[int, int]]],
) -> dict[BufferId, PromptRanges]:
    return {buffer_id: merge_ranges(parts) for buffer_id, parts in ranges.items()}


def find_linear_segments(setup: TransferSetup) -> Iterator[tuple[int, int]]:
    """Yield ranges of lengths within which no buffer becomes full, so that offsets are linear.

    The setup must have a size for every axis.
    """
    sizes = {1, *find_full_lengths(setup)}
    bends = {length for size in sizes for length in (size, size + 1)}
    starts = sorted({1, *(bend for bend in bends if 1 < bend <= setup.longest_prompt)})
    ends = [*(start - 1 for start in starts[1:]), setup.longest_prompt]
    yield from zip(starts, ends, strict=True)


def find_full_lengths(setup: TransferSetup) -> set[int]:
    """Return the prompt lengths with which a buffer becomes full, as far as they are known."""
    sides = ((setup.prefill_inputs, setup.prefill), (setup.decode_inputs, setup.decode))
    return {
        dim
        for values, layout in sides
        for each in values
        for axis, dim in enumerate(layout.resolve_shape(each.value.shape or ()))
        if isinstance(dim, int) and axis in _find_prompt_axes(each, setup)
    }


def _find_prompt_axes(selected: SelectedValue, setup: TransferSetup) -> frozenset[int | None]:
    """Return the axes that are cut to the prompt's length, and the axis of its tokens.

    A buffer of unknown kind may have its tokens on each axis.
    """
    rank = len(selected.value.shape or ())
    if _has_open_axis(selected.buffer):
        return frozenset(range(1, rank))
    clipped = find_clipped_axes(setup.consumer, rank, setup.full_transfer)
    return clipped | {None if selected.buffer is None else selected.buffer.prompt_axis}


def _simulate_prompt(setup: TransferSetup, tokens: int) -> _PromptState:
    prefill_slots = setup.build_prefill_slots(tokens)
    decode_slots = setup.build_decode_slots(tokens)
    written = {
        output.buffer_id: _SlotContent(slot, output.buffer, setup.prefill)
        for output, slot in zip(setup.prefill_outputs, prefill_slots, strict=False)
    }
    own_slots = {slot.buffer_id: slot for slot in prefill_slots}
    shifts: dict[BufferId, int] = {}
    differing, truncated = set[BufferId](), set[BufferId]()
    for decode_input, slot in zip(setup.decode_inputs, decode_slots, strict=True):
        buffer_id = slot.buffer_id
        source = written.get(buffer_id)
        if source is None:
            continue
        reader = _SlotContent(slot, decode_input.buffer, setup.decode)
        shifts[buffer_id] = slot.offset - source.slot.offset
        fits = _has_same_type(source.slot, own_slots.get(buffer_id, source.slot))
        if setup.consumer.memory == "separate":
            fits = fits and _has_same_type(source.slot, slot)
        fits = fits and _has_same_dtype(source, reader)
        if not (fits and _has_matching_bytes(source, reader, tokens)):
            differing.add(buffer_id)
        if any(_is_truncated(content, tokens) for content in (source, reader)):
            truncated.add(buffer_id)
    return _PromptState(
        shifts,
        frozenset(differing),
        frozenset(truncated),
        _count_excess(setup, prefill_slots, decode_slots),
    )


def _has_same_type(first: MemorySlot, second: MemorySlot) -> bool:
    return (first.shape, first.dtype) == (second.shape, second.dtype)


def _has_same_dtype(source: _SlotContent, reader: _SlotContent) -> bool:
    """Return whether both buffers have the same dtype in use."""
    if source.buffer is None or reader.buffer is None:
        return True
    return source.buffer.dtype == reader.buffer.dtype


def _has_matching_bytes(source: _SlotContent, reader: _SlotContent, tokens: int) -> bool:
    """Return whether the bytes of all tokens are at the same positions.

    If tokens are the first axis, the capacities of the sides may differ.
    """
    orders = _resolve_byte_orders(source, reader)
    if source.slot.dtype != reader.slot.dtype or orders[0] == orders[1]:
        return source.slot.dtype == reader.slot.dtype
    capacities = [order[0][0] if order and order[0][1] else 1 for order in orders]
    per_token = [order[1:] if order and order[0][1] else order for order in orders]
    return per_token[0] == per_token[1] and min(capacities) >= tokens


_ByteOrder = list[tuple[int, bool]]
"""Size of each axis longer than 1, outermost first, and whether it is the token axis."""


def _resolve_byte_orders(
    source: _SlotContent, reader: _SlotContent
) -> tuple[_ByteOrder, _ByteOrder]:
    """Return the byte order on both sides.

    The shape of a buffer with fixed sizes does not show the token axis; then the other side's
    token axis is used.
    """
    contents = (source, reader)
    known_buffers = [each.buffer for each in contents if not _has_open_axis(each.buffer)]
    if len(known_buffers) == 2:
        return _resolve_byte_order(source), _resolve_byte_order(reader)
    axis = next((buffer.prompt_axis for buffer in known_buffers if buffer is not None), None)
    return _build_byte_order(source.slot.shape, axis), _build_byte_order(reader.slot.shape, axis)


def _resolve_byte_order(content: _SlotContent) -> _ByteOrder:
    """Return the byte order of a buffer of known kind.

    All axes except the token axis count in full, even if less is moved: if two states differ,
    so do their first bytes.
    """
    shape, full_shape = content.slot.shape, content.full_shape
    axis = None if content.buffer is None else content.buffer.prompt_axis
    dims = (shape[index] if index == axis else dim for index, dim in enumerate(full_shape))
    return _build_byte_order(tuple(dims), axis)


def _build_byte_order(shape: Shape, token_axis: int | None) -> _ByteOrder:
    dims = ((int(dim or 0), axis) for axis, dim in enumerate(shape))
    return [(dim, axis == token_axis) for dim, axis in dims if dim != 1]


def _has_open_axis(buffer: KvBuffer | None) -> bool:
    """Return whether the token axis is unknown: the kind is, or all sizes are fixed."""
    if buffer is None or buffer.has_no_prompt_axis:
        return False
    return buffer.kind == "unknown" or buffer.prompt_axis is None


def _is_truncated(content: _SlotContent, tokens: int) -> bool:
    """Return whether less is moved than the prompt fills: all of each axis except the context."""
    slot, buffer = content.slot, content.buffer
    if buffer is None or _has_open_axis(buffer):
        return False
    return any(
        isinstance(size, int)
        and isinstance(moved, int)
        and moved < (min(tokens, size) if axis == buffer.prompt_axis else size)
        for axis, (moved, size) in enumerate(zip(slot.shape, content.full_shape, strict=True))
    )


def _count_excess(
    setup: TransferSetup, prefill_slots: Sequence[MemorySlot], decode_slots: Sequence[MemorySlot]
) -> int:
    """Return by how much decode needs more than prefill writes; above 0, decode refuses.

    With separate memory, the number of arrays counts, not bytes: prefill must write each of
    decode's arrays, and may have one output more. The result is then 0 or 1.
    """
    if setup.consumer.memory == "shared":
        return compute_memory_size(decode_slots) - compute_memory_size(prefill_slots)
    return int(len(setup.prefill_outputs) - len(decode_slots) not in (0, 1))


def _find_nonzero_ranges(first: int, last: int, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the lengths at which a line from `start` at `first` to `end` at `last` is not 0."""
    yield from _find_positive_ranges(first, last, start, end)
    yield from _find_positive_ranges(first, last, -start, -end)


def _find_positive_ranges(first: int, last: int, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the lengths at which a line from `start` at `first` to `end` at `last` is above 0."""
    if start > 0 and end > 0:
        yield first, last
    elif start <= 0 < end:
        yield first + -start * (last - first) // (end - start) + 1, last
    elif end <= 0 < start:
        yield first, first + -(-start * (last - first) // (start - end)) - 1
