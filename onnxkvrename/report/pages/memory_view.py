"""The memory of a hand-off as elements of a page, for one prompt length, and the data for all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, zip_longest
from types import MappingProxyType
from typing import Any, NamedTuple
from xml.etree.ElementTree import Element

from onnxkvrename.handoff.consumer import MemoryKind
from onnxkvrename.handoff.slots import format_token_count
from onnxkvrename.report.inert import escape_text, shorten_text
from onnxkvrename.report.pages.buffer_states import BufferState, PromptOutcome, StateKind
from onnxkvrename.report.pages.elements import build, isolate
from onnxkvrename.report.pages.memory_map import (
    MapRow,
    MapSlot,
    MemoryMap,
    Pieces,
    compute_bytes,
)

MARKS: Mapping[StateKind, str] = MappingProxyType(
    {"correct": "✓", "wrong": "✕", "none": "○", "unknown": "?"}
)
"""A mark for each state, so that no color has to be seen."""
_STATE_TEXTS: Mapping[StateKind, str] = MappingProxyType(
    {"correct": "correct", "wrong": "wrong", "none": "not transferred", "unknown": "unknown"}
)
_KINDS = tuple(MARKS)
_HEADINGS = ("Buffer", "Bytes", "Written at", "Read at", "State")
_TRACK_HEIGHT, _READ_TOP, _PICTURE_HEIGHT = "2.875rem", "5.625rem", "8.5rem"
"""In letters, so that labels have room at any size of text."""
_MAX_LINKS = 300
"""The most lines between the two tracks; of more, only those of the chosen buffer are drawn."""
_MAX_NAME = 160
_PAGE_WIDTH, _LETTER_WIDTH = 1000, 8
"""Pixels that are assumed before the script measures, to leave out labels without room."""


class Placement(NamedTuple):
    """Where a slot is.

    Attributes:
        offset: Its first byte in shared memory, else its position among the arrays.
        nbytes: Its bytes.
        left: Where it is drawn, in bytes.
    """

    offset: int
    nbytes: int
    left: int


class MemoryView:
    """Renders a memory map for one prompt length.

    Args:
        memory_map: The map.
        tokens: The prompt's length.
        memory: Where the consumer puts what it hands over.
        condition: What has to be done before anything is transferred; empty for nothing.
    """

    def __init__(
        self, memory_map: MemoryMap, tokens: int, memory: MemoryKind, condition: str
    ) -> None:
        self.memory_map = memory_map
        self.tokens = tokens
        self.condition = condition
        self._has_causes = any(state.cause for row in memory_map.rows for state in row.states)
        self._headings = (
            *_HEADINGS,
            *(("Cause",) if self._has_causes else ()),
            f"All prompts, {condition}" if condition else "All prompts",
        )
        self._condition_class = "conditional" if condition else ""
        self._is_shared = memory == "shared"
        sides = (memory_map.prefill, memory_map.decode)
        sizes = [[compute_bytes(slot.pieces, tokens) for slot in slots] for slots in sides]
        columns = [max(pair) for pair in zip_longest(*sizes, fillvalue=0)]
        self._written, self._read = (
            self._place_slots(slots, side, side if self._is_shared else columns)
            for slots, side in zip(sides, sizes, strict=True)
        )
        self._scale = max(1, *map(sum, sizes if self._is_shared else (columns, ())))

    def _place_slots(
        self, slots: Sequence[MapSlot], sizes: Sequence[int], widths: Sequence[int]
    ) -> list[Placement]:
        """Return where slots are; arrays of their own are drawn below each other."""
        lefts = [0, *accumulate(widths)]
        positions = [0, *accumulate(self._count_buffers(slot) for slot in slots)]
        offsets = lefts if self._is_shared else positions
        return [Placement(offsets[at], size, lefts[at]) for at, size in enumerate(sizes)]

    def _count_buffers(self, slot: MapSlot) -> int:
        return 1 if slot.row is None else self.memory_map.rows[slot.row].buffer_count

    def find_outcome(self) -> PromptOutcome:
        """Return what becomes of a prompt of this length."""
        outcomes = reversed(self.memory_map.outcomes)
        return next(each for each in outcomes if each.first <= self.tokens)

    def build_strip(self) -> Element:
        """Return a bar with the outcome of every prompt length."""
        last = self.memory_map.last
        firsts = [outcome.first for outcome in self.memory_map.outcomes]
        ends = [*firsts[1:], last + 1]
        bars = (
            build(
                "rect",
                x=_percent(first - 1, last),
                width=_percent(end - first, last),
                height="100%",
                class_=outcome.kind,
            )
            for outcome, first, end in zip(self.memory_map.outcomes, firsts, ends, strict=True)
        )
        return build("svg", bars, class_="strip", aria_hidden="true")

    def build_tracks(self) -> Element:
        """Return both sides' memory as two tracks, one above the other, to the same scale."""
        prefill, decode = self.memory_map.prefill, self.memory_map.decode
        picture = build(
            "svg",
            _build_patterns(),
            build("g", self._build_links(), id="links", aria_hidden="true"),
            self._build_track("written", "What prefill writes", prefill, self._written, "0"),
            self._build_track("read", "What decode reads", decode, self._read, _READ_TOP),
            id="tracks",
            width="100%",
            height=_PICTURE_HEIGHT,
            role="group",
            aria_label="Memory of both sides, to one scale",
        )
        legend = (
            build("li", build("span", MARKS[kind], class_=f"key {kind}"), f" {_STATE_TEXTS[kind]}")
            for kind in _KINDS
        )
        return build(
            "div",
            self._build_total("Prefill writes", self._written),
            build("div", picture, class_="scroll", tabindex=0, role="region", aria_label="Memory"),
            self._build_total("Decode looks for", self._read),
            build("ul", legend, class_="legend"),
            build(
                "p",
                "Point at a buffer, or move to it with the arrow keys, to see its bytes.",
                id="detail",
                hidden=True,
            ),
            class_="memory",
        )

    def _build_track(
        self,
        identifier: str,
        label: str,
        slots: Sequence[MapSlot],
        placements: Sequence[Placement],
        top: str,
    ) -> Element:
        items = (
            self._build_slot(slot, placement, top)
            for slot, placement in zip(slots, placements, strict=True)
        )
        return build("g", items, id=identifier, role="listbox", aria_label=label)

    def _build_slot(self, slot: MapSlot, placement: Placement, top: str) -> Element:
        row = None if slot.row is None else self.memory_map.rows[slot.row]
        state = None if row is None else self._find_state(row)
        kind: StateKind = "none" if state is None else state.kind
        mark, text = self._describe_kind(kind)
        name = "nothing" if row is None else _format_row_name(row)
        label = "" if row is None else escape_text(row.label)
        parity = "even" if slot.row is None or slot.row % 2 == 0 else "odd"
        width = placement.nbytes / self._scale * _PAGE_WIDTH
        narrow = " narrow" if width < len(label) * _LETTER_WIDTH else ""
        narrow += " tiny" if width < 2 * _LETTER_WIDTH else ""
        return build(
            "svg",
            build("title", name),
            build("rect", width="100%", height="100%"),
            build("text", label, x=4, y="1.125rem") if label else None,
            build("text", mark, x=4, y="2.3rem", class_="mark"),
            class_=f"slot {kind} {parity}{narrow}",
            x=_percent(placement.left, self._scale),
            y=top,
            width=_percent(placement.nbytes, self._scale),
            height=_TRACK_HEIGHT,
            role="option",
            aria_selected="false",
            aria_describedby="detail",
            aria_label=f"{name}: {'empty' if state is None else text}",
        )

    def _build_links(self) -> Iterator[Element]:
        """Return a line for each buffer, from where it is written to where it is read."""
        rows = self.memory_map.rows if len(self.memory_map.rows) <= _MAX_LINKS else ()
        for row in rows:
            if row.written is not None and row.read is not None:
                yield build(
                    "line",
                    x1=_percent(self._written[row.written].left, self._scale),
                    x2=_percent(self._read[row.read].left, self._scale),
                    y1=_TRACK_HEIGHT,
                    y2=_READ_TOP,
                    class_=self._find_state(row).kind,
                )
        for _ in range(2):  # both ends of the chosen buffer
            yield build(
                "line", y1=_TRACK_HEIGHT, y2=_READ_TOP, class_="chosen", visibility="hidden"
            )

    def build_table(self) -> Element:
        """Return a row for each buffer: its bytes, its places, its state, the cause if any."""
        hidden = self.memory_map.hidden_rows
        length = build("span", format_token_count(self.tokens), id="caption-length")
        caption = build(
            "caption",
            *(("For a prompt of ", length) if self.memory_map.is_drawn else ("On both sides",)),
            f"; {hidden:,} more buffers are not in the table" if hidden else None,
        )
        headings = (build("th", text, scope="col", role="columnheader") for text in self._headings)
        return build(
            "table",
            caption,
            build("thead", build("tr", headings, role="row"), role="rowgroup"),
            build("tbody", map(self._build_row, self.memory_map.rows), id="rows", role="rowgroup"),
            role="table",
            class_=f"buffers {self._condition_class}",
        )

    def _build_row(self, row: MapRow) -> Element:
        state = self._find_state(row)
        written, read = (
            None if index is None or not placements else placements[index]
            for index, placements in ((row.written, self._written), (row.read, self._read))
        )
        name = build(
            "th",
            isolate(_format_row_name(row)),
            (build("span", text, class_="type") for text in _list_types(row)),
            scope="row",
            role="rowheader",
        )
        cells = (
            _format_bytes(written, read),
            self._format_place(written),
            self._format_place(read),
            " ".join(self._describe_kind(state.kind)),
            *((state.cause,) if self._has_causes else ()),
            row.summary,
        )
        return build(
            "tr",
            name,
            (
                build("td", text, role="cell", data_label=heading)
                for heading, text in zip(self._headings[1:], cells, strict=True)
            ),
            class_=state.kind,
            role="row",
        )

    def serialize(self) -> dict[str, Any]:
        """Return what the script needs for all prompt lengths, as JSON values.

        ``sizes`` has the pieces of each size: the first prompt length, the bytes, the growth.
        ``written`` and ``read`` have a size, a row, -1 for none, and the number of buffers of each
        slot; ``rows`` has the slots of each row, -1 for none, and its states: the first prompt
        length, the kind and the cause.
        """
        memory_map = self.memory_map
        sizes: dict[Pieces, int] = {}
        causes: dict[str, int] = {}

        def serialize_slots(slots: Sequence[MapSlot]) -> list[tuple[int, int, int]]:
            return [
                (
                    sizes.setdefault(slot.pieces, len(sizes)),
                    -1 if slot.row is None else slot.row,
                    self._count_buffers(slot),
                )
                for slot in slots
            ]

        def serialize_states(states: Sequence[BufferState]) -> list[tuple[int, int, int]]:
            return [
                (first, _KINDS.index(kind), causes.setdefault(cause, len(causes)))
                for first, kind, cause in states
            ]

        return {
            "tokens": self.tokens,
            "last": memory_map.last,
            "shared": self._is_shared,
            "kinds": [(kind, *self._describe_kind(kind)) for kind in _KINDS],
            "outcomes": [(each.first, each.kind, each.text) for each in memory_map.outcomes],
            "written": serialize_slots(memory_map.prefill),
            "read": serialize_slots(memory_map.decode),
            "rows": [
                (
                    -1 if row.written is None else row.written,
                    -1 if row.read is None else row.read,
                    serialize_states(row.states),
                )
                for row in memory_map.rows
            ],
            "sizes": list(sizes),
            "causes": list(causes),
        }

    def _find_state(self, row: MapRow) -> BufferState:
        return next(each for each in reversed(row.states) if each.first <= self.tokens)

    def _describe_kind(self, kind: StateKind) -> tuple[str, str]:
        """Return the mark and the text of a state; nothing that is not transferred is fine."""
        text = _STATE_TEXTS[kind]
        if not self.condition or kind == "none":
            return MARKS[kind], text
        mark = MARKS["none"] if kind == "correct" else MARKS[kind]
        return mark, f"{_STATE_TEXTS['none']}; {self.condition}: {text}"

    def _format_place(self, placement: Placement | None) -> str:
        if placement is None:
            return "—"
        return f"{'byte' if self._is_shared else 'array'} {placement.offset:,}"

    def _build_total(self, side: str, placements: Sequence[Placement]) -> Element:
        """Return the bytes of a side, the number of which the script changes."""
        arrays = "" if self._is_shared else "in arrays, "
        total = build("span", f"{sum(each.nbytes for each in placements):,}")
        return build("p", f"{side}: {arrays}", total, " bytes", class_="total")


def _build_patterns() -> Element:
    """Return hatches for what is wrong and for what is not transferred."""
    return build(
        "defs",
        (
            build(
                "pattern",
                build("rect", width=8, height=8),
                build("path", d="M-2 2 l4 -4 M0 8 l8 -8 M6 10 l4 -4"),
                id=f"hatch-{kind}",
                class_=f"hatch {kind}",
                width=8,
                height=8,
                patternUnits="userSpaceOnUse",
            )
            for kind in ("wrong", "none")
        ),
    )


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.4f}%"


def _format_row_name(row: MapRow) -> str:
    name = shorten_text(escape_text(row.name), _MAX_NAME)
    if row.buffer_count == 1:
        return name
    last = shorten_text(escape_text(row.last_name), _MAX_NAME)
    return f"{name} to {last} ({row.buffer_count:,} buffers)"


def _list_types(row: MapRow) -> tuple[str, ...]:
    """Return dtype and shape once, or with the side where they differ or one lacks it."""
    prefill, decode = row.types
    if decode in ("", "same"):
        return (prefill,)
    sides = (("prefill", prefill), ("decode", decode))
    return tuple(f"{label}: {'does not have it' if text == '-' else text}" for label, text in sides)


def _format_bytes(written: Placement | None, read: Placement | None) -> str:
    sizes = [None if placement is None else placement.nbytes for placement in (written, read)]
    if None not in sizes and sizes[0] != sizes[1]:
        return f"{sizes[0]:,} written, {sizes[1]:,} read"
    known = [size for size in sizes if size is not None]
    return f"{known[0]:,}" if known else "—"
