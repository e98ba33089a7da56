"""The page of ``compare --html``: the memory of both sides for a prompt of any length.

It shows what the JSON document of the comparison says. The document has the sizes and results of
some prompts; between two of them sizes are on a straight line, and results are those of the
shorter one. The template writes every element for one prompt; the script only changes numbers,
states and positions.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise, zip_longest
from types import MappingProxyType
from typing import NamedTuple

from onnxkvrename.handoff.verdict import STARTUP_FAILURE_CODES
from onnxkvrename.layout.layout import format_size_option
from onnxkvrename.model.signature import Dim, format_dtype, format_shape
from onnxkvrename.report.documents.compare_json import (
    Buffer,
    CompareContent,
    Memory,
    Pair,
    Side,
    Slot,
    Transfer,
)
from onnxkvrename.report.pages.page import render_page, shorten_path

STATES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "correct": ("✓", "correct"),
        "wrong": ("✕", "wrong"),
        "none": ("○", "not transferred"),
        "unknown": ("?", "unknown"),
    }
)
"""The states of a buffer and of a prompt, with a mark so that no color has to be seen."""
_VERDICTS = {"works": "correct", "corrupts": "wrong", "unknown": "unknown"}
_MAX_ROWS = 1000
"""Buffers of the longest table. The memory of more is not drawn."""
_MAX_EXACT = (1 << 53) - 1
"""The largest number that JavaScript has exactly."""
_MAX_TITLE = 48
_LABEL_SHARE = 0.06
"""The share of a bar that the number of a layer takes on a small window."""

_Key = tuple[int | None, str | None]
"""The layer and the part of a buffer, or `None` and the name of another value."""


class Row(NamedTuple):
    """A buffer, or another value that is handed over.

    Attributes:
        name: Its name on prefill, or on decode if prefill lacks it.
        part: What is in it, such as key.
        types: Its dtype and shape, that of each side where they differ.
        places: Its position on prefill and on decode; -1 for none.
        states: Its state in each transfer.
        summary: What becomes of it for all prompts, in words.
    """

    name: str
    part: str
    types: tuple[str, ...]
    places: tuple[int, int]
    states: tuple[str, ...]
    summary: str


class Place(NamedTuple):
    """The place of a slot in the drawing, for one prompt.

    Attributes:
        row: The row of what is there; -1 for nothing.
        offset: Its first byte, or its position where each slot has memory of its own.
        nbytes: Its bytes.
        left: Where it begins, in percent.
        width: Its width, in percent.
        label: The number of its layer at the first slot of some layers, else empty.
    """

    row: int
    offset: int
    nbytes: int
    left: float
    width: float
    label: str


def render_compare_page(content: CompareContent) -> str:
    """Return the page of a comparison that was made.

    At first it shows the shortest prompt that does not work, else the longest.

    Args:
        content: The JSON document.
    """
    assert content.prefill  # all three are there where it was made
    assert content.decode
    assert content.verdict
    transfers, gap = _choose_transfers(content)
    rows = _list_rows(content, transfers)
    outcomes = [_decide_prompt(transfer, content) for transfer in transfers]
    shown = _choose_shown(outcomes)
    condition = "after a rename" if content.verdict.renamed else ""
    is_shared = any(each.offset is not None for t in transfers[:1] for each in t.decode.slots)
    tracks = _place_slots(transfers[shown], rows, is_shared) if transfers else ()
    states = {kind: _describe_state(kind, condition) for kind in STATES}
    data = {
        "shown": shown,
        "shared": is_shared,
        "lengths": [transfer.tokens for transfer in transfers],
        "outcomes": [
            (kind, transfer.outcome) for kind, transfer in zip(outcomes, transfers, strict=True)
        ],
        "states": states,
        "rows": [(row.places, row.states, row.part) for row in rows],
        "tracks": [
            _list_slots(transfers, side, [place.row for place in track])
            for side, track in enumerate(tracks)
        ],
    }
    return render_page(
        "compare",
        with_script=bool(tracks),
        content=content,
        sides=(("Prefill", content.prefill), ("Decode", content.decode)),
        titles=_name_sides(content.prefill, content.decode),
        verdict_state=_VERDICTS.get(content.verdict.outcome, "none"),
        gap=gap,
        condition=condition,
        is_shared=is_shared,
        transfers=transfers,
        outcomes=outcomes,
        shown=shown,
        tracks=tracks,
        rows=rows[:_MAX_ROWS],
        states=states,
        plain_states=STATES,
        list_sizes=_list_sizes,
        script_data=data,
    )


def _list_slots(
    transfers: Sequence[Transfer], side: int, rows: Sequence[int]
) -> list[tuple[int, int | None, list[int | None]]]:
    """Return the row of each slot of a side, its layer, and its bytes in each transfer."""
    memories = [_list_memories(transfer)[side] for transfer in transfers]
    slots = zip(*(memory.slots for memory in memories), strict=True)
    return [
        (row, sizes[0].layer, [slot.bytes for slot in sizes])
        for row, sizes in zip(rows, slots, strict=True)
    ]


def _choose_transfers(content: CompareContent) -> tuple[tuple[Transfer, ...], str]:
    """Return the transfers to draw, and why no others are; none where sizes are not known."""
    verdict, transfers = content.verdict, content.transfers
    if not content.pairs:
        return (), "Nothing can be handed over: a side has no KV buffer."
    memories = [memory for transfer in transfers for memory in _list_memories(transfer)]
    count = max((len(memory.slots) for memory in memories), default=0)
    if count > _MAX_ROWS:
        return (), f"{count:,} buffers are too many to draw; compare --format json lists all."
    if not memories or any(each.bytes is None or each.bytes > _MAX_EXACT for each in memories):
        sides = [side for side in (content.prefill, content.decode) if side is not None]
        missing = dict.fromkeys(symbol for side in sides for symbol in side.missing)
        options = " ".join(map(format_size_option, missing))
        hint = f": pass {options}" if options else ""
        return (), f"The bytes depend on sizes that are not known, so no memory is drawn{hint}."
    if not all(_is_even(*each) for each in pairwise(transfers)):
        gap = "The bytes do not grow evenly with the prompt, so only a prompt of 1 token is shown."
        return transfers[:1], gap
    if verdict is not None and verdict.beyond is not None:
        option = format_size_option(verdict.beyond)
        return transfers, f"For longer prompts the bytes depend on a window: {option} shows them."
    if verdict is not None and verdict.longest is None:
        last = transfers[-1].tokens
        return transfers, f"The graphs do not limit the prompt: shown up to {last:,} tokens."
    return transfers, ""


def _list_memories(transfer: Transfer) -> tuple[Memory, Memory]:
    return transfer.prefill, transfer.decode


def _is_even(first: Transfer, second: Transfer) -> bool:
    """Return whether each token between two transfers can add the same bytes to a slot."""
    return all(
        ((after.bytes or 0) - (before.bytes or 0)) % (second.tokens - first.tokens) == 0
        for start, end in zip(_list_memories(first), _list_memories(second), strict=True)
        for before, after in zip(start.slots, end.slots, strict=True)
    )


def _list_rows(content: CompareContent, transfers: Sequence[Transfer]) -> list[Row]:
    """Return a row for each buffer and each other value, in the order of decode's memory.

    Where no memory is drawn, those that are not fine come first.
    """
    sides: list[dict[_Key, Slot]] = [{}, {}]
    for transfer in transfers[:1]:
        sides = [
            {_find_key(slot): slot for slot in memory.slots if slot.name is not None}
            for memory in _list_memories(transfer)
        ]
    pairs: dict[_Key, Pair | None] = {(pair.layer, pair.part): pair for pair in content.pairs}
    pairs |= {key: None for side in sides for key in side if key not in pairs}
    rows = [
        _build_row(key, pair, [side.get(key) for side in sides], content, transfers)
        for key, pair in pairs.items()
    ]
    if transfers:
        return sorted(rows, key=lambda row: (row.places[1] < 0, row.places[1], row.places[0]))
    return sorted(rows, key=lambda row: row.summary == "ok")


def _find_key(slot: Slot) -> _Key:
    return (None, slot.name) if slot.layer is None else (slot.layer, slot.part)


def _build_row(
    key: _Key,
    pair: Pair | None,
    slots: Sequence[Slot | None],
    content: CompareContent,
    transfers: Sequence[Transfer],
) -> Row:
    buffers = (None, None) if pair is None else (pair.prefill, pair.decode)
    names = [each.input or each.output for each in buffers if each is not None]
    written, read = (-1 if slot is None else slot.position for slot in slots)
    reads = "" if slots[1] is None else slots[1].name or ""
    return Row(
        name=next((name for name in names if name), key[1]) or "",
        part=key[1] or "",
        types=() if pair is None else tuple(_list_types(*buffers)),
        places=(written, read),
        states=tuple(_decide_buffer(pair, reads, transfer, content) for transfer in transfers),
        summary="not a KV buffer" if pair is None else pair.state,
    )


def _list_types(prefill: Buffer | None, decode: Buffer | None) -> list[str]:
    texts = [_format_type(buffer) for buffer in (prefill, decode)]
    if texts[0] == texts[1]:
        return texts[:1]
    return [f"{label}: {text}" for label, text in zip(("prefill", "decode"), texts, strict=True)]


def _format_type(buffer: Buffer | None) -> str:
    if buffer is None:
        return "does not have it"
    if buffer.shape is None or buffer.sized is None:
        return format_dtype(buffer.dtype)
    dims: list[Dim] = [
        dim if dim == size else f"{dim}={size}"
        for dim, size in zip(buffer.shape, buffer.sized, strict=True)
    ]
    return f"{buffer.dtype} {format_shape(tuple(dims))}"


def _decide_prompt(transfer: Transfer, content: CompareContent) -> str:
    """Return the state of a hand-off of one prompt as a whole."""
    assert content.verdict
    if _fails_to_start(content) or transfer.refused:
        return "none"
    if transfer.wrong or _is_corrupt(transfer, content):
        return "wrong"
    if "unknown" in (content.verdict.outcome, content.verdict.renamed):
        return "unknown"
    return "none" if any(pair.decode is None for pair in content.pairs) else "correct"


def _decide_buffer(
    pair: Pair | None, reads: str, transfer: Transfer, content: CompareContent
) -> str:
    """Return the state of a buffer in a transfer, which decode reads with the input `reads`."""
    assert content.verdict
    if _fails_to_start(content) or transfer.refused or not reads:
        return "none"
    if reads in transfer.wrong:
        return "wrong"
    if not transfer.wrong and _is_corrupt(transfer, content):
        return "wrong"  # wherever its bytes are
    if pair is not None and pair.fault and not pair.wrong and not content.verdict.refused:
        return "wrong"
    is_unknown = "unknown" in (content.verdict.outcome, content.verdict.renamed)
    return "unknown" if is_unknown else "correct"


def _fails_to_start(content: CompareContent) -> bool:
    return any(finding.code in STARTUP_FAILURE_CODES for finding in content.findings)


def _is_corrupt(transfer: Transfer, content: CompareContent) -> bool:
    assert content.verdict
    return any(
        each.first is not None
        and each.first <= transfer.tokens
        and (each.last is None or transfer.tokens <= each.last)
        for each in content.verdict.corrupt
    )


def _choose_shown(outcomes: Sequence[str]) -> int:
    """Return the index of the transfer that the page shows at first."""
    failing = (index for index, outcome in enumerate(outcomes) if outcome != "correct")
    return next(failing, len(outcomes) - 1)


def _describe_state(kind: str, condition: str) -> tuple[str, str]:
    """Return the mark and the text of a state; nothing that is not transferred is fine."""
    mark, text = STATES[kind]
    if not condition or kind == "none":
        return mark, text
    nothing, not_transferred = STATES["none"]
    return nothing if kind == "correct" else mark, f"{not_transferred}; {condition}: {text}"


def _place_slots(
    transfer: Transfer, rows: Sequence[Row], is_shared: bool
) -> tuple[tuple[Place, ...], ...]:
    """Return where the slots of both sides are; arrays of their own are below each other."""
    memories = _list_memories(transfer)
    sizes = [[slot.bytes or 0 for slot in memory.slots] for memory in memories]
    columns = [max(pair) for pair in zip_longest(*sizes, fillvalue=0)]
    scale = max(1, *map(sum, sizes if is_shared else (columns, ())))
    tracks = []
    for side, (memory, own) in enumerate(zip(memories, sizes, strict=True)):
        positions = {row.places[side]: index for index, row in enumerate(rows)}
        lefts = [0, *accumulate(own if is_shared else columns)]
        labels = _label_layers(memory.slots, [left / scale for left in lefts])
        tracks.append(
            tuple(
                Place(
                    positions.get(at, -1),
                    lefts[at] if is_shared else at,
                    size,
                    100 * lefts[at] / scale,
                    100 * size / scale,
                    label,
                )
                for at, (size, label) in enumerate(zip(own, labels, strict=True))
            )
        )
    return tuple(tracks)


def _label_layers(slots: Sequence[Slot], lefts: Sequence[float]) -> list[str]:
    """Return a label at the first slot of each layer, or of some where there are many."""
    count = len({slot.layer for slot in slots})
    step = next((step for step in (1, 2, 5, 10, 20, 50) if step >= _LABEL_SHARE * count), 100)
    labels = []
    layer: int | None = None
    end = 0.0
    for slot, left in zip(slots, lefts, strict=False):
        is_first, layer = slot.layer != layer, slot.layer
        if is_first and layer is not None and layer % step == 0 and left >= end:
            labels.append(f"{'' if end else 'layer '}{layer}")
            end = left + (_LABEL_SHARE if end else 3 * _LABEL_SHARE)
        else:
            labels.append("")
    return labels


def _list_sizes(side: Side) -> str:
    """Return the sizes of a side: ``ctx_len=4096, sliding_window=?``."""
    sizes = [f"{symbol}={size}" for symbol, size in side.sizes.items()]
    return ", ".join((*sizes, *(f"{symbol} not known" for symbol in side.missing)))


def _name_sides(*sides: Side) -> list[str]:
    """Return both paths for the heading: of long ones without the folders that they share."""
    names = [_find_path(side) for side in sides]
    if max(map(len, names)) > _MAX_TITLE:
        folders = [f"{name.replace(chr(92), '/').rpartition('/')[0]}/" for name in names]
        shared = len(posixpath.commonprefix(folders).rpartition("/")[0])
        names = [f"…/{name[shared + 1 :]}" if shared else name for name in names]
    return [shorten_path(name, _MAX_TITLE) for name in names]


def _find_path(side: Side) -> str:
    """Return the path of a side, or what its windows have in common."""
    if len(side.models) < 2:
        return side.models[0] if side.models else "nothing"
    folder = posixpath.commonprefix([path.rpartition("/")[0] for path in side.models])
    return f"{len(side.models):,} windows in {folder or '.'}"
