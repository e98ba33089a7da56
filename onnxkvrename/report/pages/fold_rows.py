"""Fold the rows of a memory map where there are too many for a page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from onnxkvrename.report.pages.memory_map import MapRow, MapSlot, MemoryMap, Pieces, SizePiece

MAX_SINGLE_ROWS = 600
"""Up to so many buffers each has a row of its own."""
MAX_ROWS = 2000
"""The most rows of a page; memory that needs more is not drawn."""
_FOLDED_ROWS = 256
"""Buffers that are all alike are folded into about so many rows."""


def fold_rows(memory_map: MemoryMap) -> MemoryMap:
    """Return a map with at most `MAX_ROWS` rows.

    Neighbors in the memory of both sides that are alike in size and state share a row, whose bytes
    are theirs together. If the rows are still too many, those that are wrong for some prompt come
    first, the rest is left out, and no memory is drawn.
    """
    if len(memory_map.rows) <= MAX_SINGLE_ROWS:
        return memory_map
    longest = -(-len(memory_map.rows) // _FOLDED_ROWS)
    groups = list(_group_alike(memory_map, longest))
    if len(groups) <= MAX_ROWS:
        return _merge_groups(memory_map, groups)
    folded = [_merge_rows(memory_map.rows, group, None, None) for group in groups]
    folded.sort(key=lambda row: all(state.kind == "correct" for state in row.states))
    return memory_map._replace(
        prefill=(),
        decode=(),
        rows=tuple(folded[:MAX_ROWS]),
        gap=f"{len(memory_map.rows):,} buffers are too many to draw: the table has those that are "
        "wrong first, compare --format json has all.",
        hidden_rows=sum(row.buffer_count for row in folded[MAX_ROWS:]),
    )


def _group_alike(memory_map: MemoryMap, longest: int) -> Iterator[range]:
    """Yield rows that can share one, at most `longest` each."""
    start = 0
    traits = [_find_traits(memory_map, row) for row in memory_map.rows]
    for index, (row, following) in enumerate(pairwise(memory_map.rows), 1):
        is_alike = (
            traits[index - 1] == traits[index]
            and index - start < longest
            and _is_next(row.written, following.written)
            and _is_next(row.read, following.read)
        )
        if not is_alike:
            yield range(start, index)
            start = index
    yield range(start, len(memory_map.rows))


class _Traits(NamedTuple):
    """What rows must have in common to share one."""

    types: tuple[str, str]
    states: tuple[object, ...]
    summary: str
    sizes: tuple[Pieces | None, Pieces | None]


def _find_traits(memory_map: MemoryMap, row: MapRow) -> _Traits:
    prefill, decode = (
        None if index is None or not slots else slots[index].pieces
        for slots, index in ((memory_map.prefill, row.written), (memory_map.decode, row.read))
    )
    return _Traits(row.types, row.states, row.summary, (prefill, decode))


def _is_next(first: int | None, second: int | None) -> bool:
    return second is None if first is None else second == first + 1


def _merge_groups(memory_map: MemoryMap, groups: Sequence[range]) -> MemoryMap:
    row_groups = {index: group for group in groups for index in group}
    prefill, written = _merge_slots(memory_map.prefill, row_groups)
    decode, read = _merge_slots(memory_map.decode, row_groups)
    numbers = {group[0]: number for number, group in enumerate(groups)}
    prefill, decode = (
        tuple(slot if slot.row is None else slot._replace(row=numbers[slot.row]) for slot in slots)
        for slots in (prefill, decode)
    )
    rows = (
        _merge_rows(memory_map.rows, group, written.get(group[0]), read.get(group[0]))
        for group in groups
    )
    return memory_map._replace(prefill=prefill, decode=decode, rows=tuple(rows))


def _merge_slots(
    slots: Sequence[MapSlot], groups: dict[int, range]
) -> tuple[tuple[MapSlot, ...], dict[int, int]]:
    """Return one slot for each group, whose row is its first, and the position of each."""
    merged: list[MapSlot] = []
    positions: dict[int, int] = {}
    for slot in slots:
        if slot.row is None:
            merged.append(slot)
            continue
        group = groups[slot.row]
        if slot.row == group[0]:
            positions[slot.row] = len(merged)
            merged.append(slot._replace(pieces=_multiply(slot.pieces, len(group))))
    return tuple(merged), positions


def _multiply(pieces: Pieces, count: int) -> Pieces:
    return tuple(
        SizePiece(first, nbytes * count, growth * count) for first, nbytes, growth in pieces
    )


def _merge_rows(
    rows: Sequence[MapRow], group: range, written: int | None, read: int | None
) -> MapRow:
    first, last = rows[group[0]], rows[group[-1]]
    if len(group) == 1:
        return first._replace(written=written, read=read)
    return first._replace(
        last_name=last.name,
        buffer_count=len(group),
        label=f"{first.label} to {last.label}",
        written=written,
        read=read,
    )
