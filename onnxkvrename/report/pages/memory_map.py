"""The memory of a hand-off on both sides, for every prompt length, as plain values for a page.

All that is decided here is the comparison's: sizes are those of its slots, states those of its
simulation. Between the lengths at which a buffer becomes full sizes are straight lines, so a few
numbers are enough for all lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from onnxkvrename.handoff.compare import Handoff
from onnxkvrename.handoff.selection import BufferId
from onnxkvrename.handoff.simulate import TransferSetup, find_linear_segments
from onnxkvrename.handoff.slots import MemorySlot
from onnxkvrename.handoff.verdict import PairResult
from onnxkvrename.handoff.worker import UNKNOWN_SIZE, UNLIMITED_LENGTH
from onnxkvrename.layout.layout import format_size_option
from onnxkvrename.report.compare_text import format_pair_types, format_state, list_startup_codes
from onnxkvrename.report.pages.buffer_states import (
    BufferState,
    PromptOutcome,
    StateRules,
    Subject,
    build_subject,
)

_LEAST_SHOWN_CONTEXT = 4096
"""Where the graphs do not limit the context, prompts of at least so many tokens are shown."""
_MAX_EXACT = (1 << 53) - 1
"""The largest number that JavaScript has exactly."""
_NO_BUFFERS = "Nothing can be handed over: a side has no KV buffer."
_UNEVEN_BYTES = (
    "The bytes do not grow evenly with the prompt, so only a prompt of 1 token is shown."
)


class SizePiece(NamedTuple):
    """The bytes of a slot, from a prompt length on.

    Attributes:
        first: The first prompt length in tokens.
        nbytes: The bytes at this length.
        growth: The bytes that each further token adds.
    """

    first: int
    nbytes: int
    growth: int


Pieces = tuple[SizePiece, ...]


class MapSlot(NamedTuple):
    """A place in the memory of a side.

    Attributes:
        pieces: Its bytes, by the prompt's length.
        row: The index of the row whose bytes go there, or are looked for there; `None` for a
            place that prefill leaves empty.
    """

    pieces: Pieces
    row: int | None


class MapRow(NamedTuple):
    """A buffer, or neighbors that are alike.

    Attributes:
        name: The name on prefill, on decode if prefill lacks it; of the first of several.
        last_name: The name of the last of several, else empty.
        buffer_count: How many buffers it represents.
        label: The layer and the part in short.
        types: Dtype and shape on prefill and on decode; empty for a value that is not a KV buffer.
        written: The index of its slot on prefill, `None` for none.
        read: The index of its slot on decode, `None` for none.
        states: Its states, by the prompt's length.
        summary: Its state for all prompts, as the text of the comparison has it.
    """

    name: str
    last_name: str
    buffer_count: int
    label: str
    types: tuple[str, str]
    written: int | None
    read: int | None
    states: tuple[BufferState, ...]
    summary: str


class MemoryMap(NamedTuple):
    """The memory of both sides.

    Attributes:
        last: The longest prompt in tokens that is shown; the shortest has 1.
        prefill: Prefill's slots in their order; empty if no memory can be drawn.
        decode: Decode's, likewise.
        rows: All buffers, in the order of decode's slots.
        outcomes: What becomes of a prompt, by its length.
        gap: Why no memory is drawn, or not for all lengths; empty if it is.
        hidden_rows: How many rows were left out because there are too many.
    """

    last: int
    prefill: tuple[MapSlot, ...]
    decode: tuple[MapSlot, ...]
    rows: tuple[MapRow, ...]
    outcomes: tuple[PromptOutcome, ...]
    gap: str
    hidden_rows: int = 0

    @property
    def is_drawn(self) -> bool:
        """True if there is memory to draw."""
        return bool(self.prefill or self.decode)


def build_memory_map(handoff: Handoff) -> MemoryMap:
    """Return the memory of a compared hand-off, with a row for each buffer."""
    rules = StateRules(handoff)
    if not handoff.pair_results:
        return MemoryMap(1, (), (), (), rules.list_outcomes(1), _NO_BUFFERS)
    if not handoff.simulated_prompts:
        rows = _list_rows(handoff, rules, 1)
        return MemoryMap(1, (), (), rows, rules.list_outcomes(1), _describe_unknown_bytes(handoff))
    setup = handoff.comparison.setup
    last, gap = _find_last_length(handoff)
    sides = _trace_sides(setup, last)
    if sides is None:
        last, gap = 1, _UNEVEN_BYTES
        sides = _trace_sides(setup, last) or ((), ())
    rows = _list_rows(handoff, rules, last)
    outcomes = rules.list_outcomes(last)
    is_open = bool(handoff.shared_symbols) and handoff.verdict.window_placeholder is None
    if is_open or not all(_has_known_sizes(side, last) for side in sides):
        return MemoryMap(last, (), (), rows, outcomes, _describe_unknown_bytes(handoff))
    written = {row.written: index for index, row in enumerate(rows)}
    read = {row.read: index for index, row in enumerate(rows)}
    return MemoryMap(
        last,
        tuple(MapSlot(pieces, written.get(at)) for at, pieces in enumerate(sides[0])),
        tuple(MapSlot(pieces, read.get(at)) for at, pieces in enumerate(sides[1])),
        rows,
        outcomes,
        gap,
    )


def compute_bytes(pieces: Pieces, tokens: int) -> int:
    """Return the bytes of a slot for a prompt of this length."""
    piece = next(each for each in reversed(pieces) if each.first <= tokens)
    return piece.nbytes + piece.growth * (tokens - piece.first)


def _list_rows(handoff: Handoff, rules: StateRules, last: int) -> tuple[MapRow, ...]:
    """Return a row for each buffer, and for all else that the consumer selects."""
    setup, simulation = handoff.comparison.setup, handoff.comparison.simulation
    written = {each.buffer_id: index for index, each in enumerate(setup.prefill_outputs)}
    read = {each.buffer_id: index for index, each in enumerate(setup.decode_inputs)}
    rows = []
    for result in handoff.pair_results:
        states = rules.list_states(build_subject(result), last)
        row = MapRow(
            result.pair.name,
            "",
            1,
            f"{result.pair.present_buffer.layer} {result.pair.present_buffer.part}",
            format_pair_types(handoff, result.pair),
            written.get(result.pair.buffer_id),
            read.get(result.pair.buffer_id),
            states,
            _summarize(result, states, handoff),
        )
        rows.append(row)
    known: set[BufferId] = {result.pair.buffer_id for result in handoff.pair_results}
    for buffer_id in dict.fromkeys((*read, *written)):
        if buffer_id not in known:
            ranges = () if simulation is None else simulation.wrong_ranges.get(buffer_id, ())
            subject = Subject(buffer_id, None, ranges, is_read=buffer_id in read)
            row = MapRow(
                buffer_id[1],
                "",
                1,
                buffer_id[1],
                ("", ""),
                written.get(buffer_id),
                read.get(buffer_id),
                rules.list_states(subject, last),
                "not a KV buffer",
            )
            rows.append(row)
    if simulation is not None:
        rows.sort(key=lambda row: (row.read is None, row.read or 0, row.written or 0))
    return tuple(rows)


def _summarize(result: PairResult, states: Sequence[BufferState], handoff: Handoff) -> str:
    """Return the state of a pair for all prompts; ``ok`` only where the hand-off can be."""
    if list_startup_codes(handoff):
        return "never transferred"
    text = format_state(handoff, result)
    is_open = {state.kind for state in states} == {"unknown"}
    return "cannot decide" if is_open and text == "ok" else text


def _describe_unknown_bytes(handoff: Handoff) -> str:
    """Return why no memory is drawn, and the options for the sizes that are missing."""
    sides = (handoff.prefill.layout, handoff.decode.layout)
    unresolved = dict.fromkeys(symbol for side in sides for symbol in side.unresolved_symbols)
    options = " ".join(map(format_size_option, handoff.shared_symbols or unresolved))
    hint = f": pass {options}" if options else ""
    return f"The bytes depend on sizes that are not known, so no memory is drawn{hint}."


def _find_last_length(handoff: Handoff) -> tuple[int, str]:
    """Return the longest prompt to show, and why longer ones are not shown."""
    setup, verdict = handoff.comparison.setup, handoff.verdict
    if verdict.window_placeholder is not None:
        symbol = verdict.window_symbol or "?"
        return 1, (
            f"For longer prompts the bytes depend on {symbol}: "
            f"{format_size_option(symbol)} shows them."
        )
    if setup.longest_prompt < UNLIMITED_LENGTH:
        return setup.longest_prompt, ""
    bends = [first for first, _ in find_linear_segments(setup)]
    last = max(_LEAST_SHOWN_CONTEXT, 2 * max((*bends, *handoff.requested_lengths)))
    last = min(last, UNLIMITED_LENGTH - 1)
    return last, f"The graphs do not limit the prompt: shown are up to {last:,} tokens."


def _trace_sides(
    setup: TransferSetup, last: int
) -> tuple[tuple[Pieces, ...], tuple[Pieces, ...]] | None:
    """Return the bytes of each slot of prefill and decode for all lengths up to `last`.

    Returns:
        `None` if they are not straight lines, as those of a consumer that rounds.
    """
    sides: list[list[list[SizePiece]]] = [
        [[] for _ in setup.prefill_inputs],
        [[] for _ in setup.decode_inputs],
    ]
    for first, end in find_linear_segments(setup):
        if first > last:
            break
        end = min(end, last)
        middle = (first + end) // 2
        for pieces, build_slots in zip(
            sides, (setup.build_prefill_slots, setup.build_decode_slots), strict=True
        ):
            slots = zip(build_slots(first), build_slots(middle), build_slots(end), strict=True)
            for slot_pieces, (start, halfway, stop) in zip(pieces, slots, strict=True):
                growth = _find_growth(start, halfway, stop, (first, middle, end))
                if growth is None:
                    return None
                _add_piece(slot_pieces, SizePiece(first, start.nbytes, growth), first == end)
    prefill, decode = (tuple(map(tuple, side)) for side in sides)
    return prefill, decode


def _find_growth(
    start: MemorySlot, halfway: MemorySlot, stop: MemorySlot, lengths: tuple[int, int, int]
) -> int | None:
    """Return the bytes that each token adds, `None` if they are not a straight line."""
    first, middle, end = lengths
    growth = (stop.nbytes - start.nbytes) // max(1, end - first)
    expected = [start.nbytes + growth * (length - first) for length in (middle, end)]
    return growth if expected == [halfway.nbytes, stop.nbytes] else None


def _add_piece(pieces: list[SizePiece], piece: SizePiece, is_single: bool) -> None:
    """Add a piece, unless the one before continues; a single length takes the slope beside it."""
    if pieces:
        first, nbytes, growth = pieces[-1]
        reached = nbytes + growth * (piece.first - first)
        if reached == piece.nbytes and (is_single or growth == piece.growth):
            return
        if piece.first == first + 1 and nbytes + piece.growth == piece.nbytes:
            pieces[-1] = SizePiece(first, nbytes, piece.growth)
            return
    pieces.append(piece)


def _has_known_sizes(side: Sequence[Pieces], last: int) -> bool:
    """Return whether no slot has a size in place of an unknown one, and all are exact."""
    bounds = [
        max(*(piece.nbytes for piece in pieces), compute_bytes(pieces, last)) for pieces in side
    ]
    return max(bounds, default=0) < UNKNOWN_SIZE and sum(bounds) <= _MAX_EXACT
