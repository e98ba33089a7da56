"""A hand-off in the mind: at which prompt lengths which buffer goes wrong.

Bytes are not needed for that, only offsets. They grow with the prompt in straight
lines that bend where a buffer is full, so a few lengths tell of all others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from onnxkvrename.handoff import slots as transfer
from onnxkvrename.handoff.consumer import Target
from onnxkvrename.handoff.slots import Ident, Selected, Slot
from onnxkvrename.layout.dims import Shape
from onnxkvrename.layout.layout import Buffer, Layout

Ranges = tuple[tuple[int, int], ...]
"""Prompt lengths, first and last of each run, in order and apart."""


class Stage(NamedTuple):
    """Both sides as the consumer sees them; every size that matters is known.

    ``given`` are prefill's inputs, which make its slots, ``written`` its outputs, and
    ``taken`` decode's inputs. ``longest`` is the longest prompt. ``whole`` says that
    all of each buffer is moved.
    """

    prefill: Layout
    decode: Layout
    given: tuple[Selected, ...]
    written: tuple[Selected, ...]
    taken: tuple[Selected, ...]
    target: Target
    whole: bool
    longest: int

    def sent(self, tokens: int) -> tuple[Slot, ...]:
        """Prefill's slots for a prompt of this length."""
        length = None if self.whole else tokens
        return transfer.laid(self.given, self.prefill, self.target, length)

    def read(self, tokens: int) -> tuple[Slot, ...]:
        """Decode's slots for the same prompt."""
        length = None if self.whole else tokens
        return transfer.laid(self.taken, self.decode, self.target, length)


class Rehearsal(NamedTuple):
    """The prompt lengths at which things go wrong.

    ``wrong`` has those of each buffer of decode: other bytes than prefill wrote for it,
    or not all of them; windows of two sizes may agree by luck at some, and count as wrong.
    ``own`` are those at which the buffer differs by itself,
    ``cut`` those at which not all of it is moved; at all others it only lies
    elsewhere. ``refused`` are the lengths at which decode itself finds the memory too small.
    """

    wrong: Mapping[Ident, Ranges]
    own: Mapping[Ident, Ranges]
    cut: Mapping[Ident, Ranges]
    refused: Ranges


class _Moment(NamedTuple):
    """One prompt length: how far each buffer lies from where it was written, in bytes."""

    shift: Mapping[Ident, int]
    own: frozenset[Ident]
    cut: frozenset[Ident]
    excess: int


class _Held(NamedTuple):
    """A place in the memory, and the buffer that a side has there, if it is one."""

    slot: Slot
    buffer: Buffer | None
    layout: Layout

    @property
    def full(self) -> Shape:
        """The shape of all that one sequence has of it; in a place of another rank, the place's."""
        if self.buffer is None or len(self.buffer.shape or ()) != len(self.slot.shape):
            return self.slot.shape
        return (1, *self.layout.sized(self.buffer.shape or ())[1:])


def stage(prefill: Layout, decode: Layout, target: Target, *, whole: bool, longest: int) -> Stage:
    """Both sides, in the consumer's order; an output for which there is no slot is not written."""
    given = transfer.inputs(prefill, target)
    return Stage(
        prefill,
        decode,
        given,
        transfer.outputs(prefill, target)[: len(given)],
        transfer.inputs(decode, target),
        target,
        whole,
        longest,
    )


def rehearse(scene: Stage) -> Rehearsal:
    """What goes wrong at which of the lengths from 1 to the longest, all of them."""
    wanted = dict.fromkeys((buffer.layer, buffer.part) for buffer in scene.decode.buffers)
    wanted |= dict.fromkeys(one.ident for one in scene.taken)
    wrong: dict[Ident, list[tuple[int, int]]] = {ident: [] for ident in wanted}
    own: dict[Ident, list[tuple[int, int]]] = {ident: [] for ident in wanted}
    cut: dict[Ident, list[tuple[int, int]]] = {ident: [] for ident in wanted}
    refused: list[tuple[int, int]] = []
    for first, last in _segments(scene):
        start, end = _moment(scene, first), _moment(scene, last)
        refused += _above(first, last, start.excess, end.excess)
        for ident in wanted:
            if ident in start.own:
                own[ident].append((first, last))
            if ident in start.cut:
                cut[ident].append((first, last))
            if ident in start.own | start.cut or ident not in start.shift:
                wrong[ident].append((first, last))
            else:
                wrong[ident] += _unequal(first, last, start.shift[ident], end.shift[ident])
    return Rehearsal(_joined(wrong), _joined(own), _joined(cut), union(refused))


def union(*given: Iterable[tuple[int, int]]) -> Ranges:
    """All the lengths of some ranges."""
    found: list[tuple[int, int]] = []
    for first, last in sorted(one for ranges in given for one in ranges):
        if found and first <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(last, found[-1][1])
        else:
            found.append((first, last))
    return tuple(found)


def without(ranges: Ranges, others: Ranges) -> Ranges:
    """The lengths of some ranges that are not in others."""
    for start, end in others:
        parts = [
            part
            for first, last in ranges
            for part in ((first, min(last, start - 1)), (max(first, end + 1), last))
            if part[0] <= part[1]
        ]
        ranges = union(parts)
    return ranges


def within(tokens: int, ranges: Ranges) -> bool:
    """Whether a prompt of this length is among them."""
    return any(first <= tokens <= last for first, last in ranges)


def _joined(found: Mapping[Ident, Sequence[tuple[int, int]]]) -> dict[Ident, Ranges]:
    return {ident: union(ranges) for ident, ranges in found.items()}


def _segments(scene: Stage) -> Iterator[tuple[int, int]]:
    """Runs of lengths between which no buffer fills up: in each, all is straight."""
    both = ((scene.given, scene.prefill), (scene.taken, scene.decode))
    sizes = {
        dim
        for found, layout in both
        for one in found
        for axis, dim in enumerate(layout.sized(one.value.shape or ()))
        if isinstance(dim, int) and axis in _bending(one, scene)
    }
    bends = {length for size in {1, *sizes} for length in (size, size + 1)}
    starts = sorted({1, *(bend for bend in bends if 1 < bend <= scene.longest)})
    yield from zip(starts, [*(start - 1 for start in starts[1:]), scene.longest], strict=True)


def _bending(one: Selected, scene: Stage) -> frozenset[int | None]:
    """The axes along which a prompt counts: those that it cuts, and that of its tokens.

    Where a buffer does not say which that is, it may be any.
    """
    rank = len(one.value.shape or ())
    if _is_unknown(one.buffer):
        return frozenset(range(1, rank))
    cut = transfer.clipped(scene.target, rank, scene.whole)
    return cut | {None if one.buffer is None else one.buffer.sequence}


def _moment(scene: Stage, tokens: int) -> _Moment:
    sent, read = scene.sent(tokens), scene.read(tokens)
    written = {
        one.ident: _Held(slot, one.buffer, scene.prefill)
        for one, slot in zip(scene.written, sent, strict=False)
    }
    meant = {slot.ident: slot for slot in sent}
    shift: dict[Ident, int] = {}
    own, cut = set[Ident](), set[Ident]()
    for one, slot in zip(scene.taken, read, strict=True):
        mine, theirs = written.get(slot.ident), _Held(slot, one.buffer, scene.decode)
        if mine is None:
            continue
        shift[slot.ident] = slot.offset - mine.slot.offset
        fits = _same(mine.slot, meant.get(slot.ident, mine.slot))
        if not fits or not _alike(mine, theirs, tokens):
            own.add(slot.ident)
        if any(_is_cut(held, scene.target, tokens) for held in (mine, theirs)):
            cut.add(slot.ident)
    return _Moment(shift, frozenset(own), frozenset(cut), _total(read) - _total(sent))


def _same(place: Slot, meant: Slot) -> bool:
    """Whether a place is like the one that was meant for what is written there."""
    return (place.shape, place.dtype) == (meant.shape, meant.dtype)


def _alike(mine: _Held, theirs: _Held, tokens: int) -> bool:
    """Whether the bytes of all tokens stand alike; tokens that come first may have room left."""
    forms = _forms(mine, theirs)
    if mine.slot.dtype != theirs.slot.dtype or forms[0] == forms[1]:
        return mine.slot.dtype == theirs.slot.dtype
    lengths = [form[0][0] if form and form[0][1] else 1 for form in forms]
    rests = [form[1:] if form and form[0][1] else form for form in forms]
    return rests[0] == rests[1] and min(lengths) >= tokens


_Form = list[tuple[int, bool]]
"""The order of the bytes: axes longer than 1, and which of them are tokens."""


def _forms(mine: _Held, theirs: _Held) -> tuple[_Form, _Form]:
    """Of both. One of fixed sizes does not say what its axes are; the other may."""
    told = [held.buffer for held in (mine, theirs) if not _is_unknown(held.buffer)]
    if len(told) == 2:
        return _form(mine), _form(theirs)
    axis = next((buffer.sequence for buffer in told if buffer is not None), None)
    return _axes(mine.slot.shape, axis), _axes(theirs.slot.shape, axis)


def _form(held: _Held) -> _Form:
    """Where axes are known, all but the tokens' count in full, however little is moved.

    Not even the beginnings are alike of states that differ.
    """
    moved, full = held.slot.shape, held.full
    axis = None if held.buffer is None else held.buffer.sequence
    return _axes(tuple(moved[at] if at == axis else dim for at, dim in enumerate(full)), axis)


def _axes(shape: Shape, tokens: int | None) -> _Form:
    dims = ((int(dim or 0), axis) for axis, dim in enumerate(shape))
    return [(dim, axis == tokens) for dim, axis in dims if dim != 1]


def _is_unknown(buffer: Buffer | None) -> bool:
    return buffer is not None and buffer.kind == "unknown"


def _is_cut(held: _Held, target: Target, tokens: int) -> bool:
    """Whether less is moved than a prompt fills: a state is full from the first token on."""
    slot, buffer = held.slot, held.buffer
    if buffer is None or buffer.kind == "unknown":
        return False
    return any(
        isinstance(size, int)
        and isinstance(moved, int)
        and moved < (min(tokens, size) if axis == buffer.sequence else size)
        for axis, (moved, size) in enumerate(zip(slot.shape, held.full, strict=True))
    )


def _total(slots: Sequence[Slot]) -> int:
    return slots[-1].offset + slots[-1].bytes if slots else 0


def _unequal(first: int, last: int, start: int, end: int) -> Iterator[tuple[int, int]]:
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


def _above(first: int, last: int, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Where a straight line from ``start`` to ``end`` is above 0."""
    if start > 0 and end > 0:
        yield first, last
    elif start <= 0 < end:
        yield first + -start * (last - first) // (end - start) + 1, last
    elif end <= 0 < start:
        yield first, first + -(-start * (last - first) // (start - end)) - 1
