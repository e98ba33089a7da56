"""The comparison of prefill and decode as JSON: each buffer, each slot, the verdict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

from onnxkvrename.findings import Finding
from onnxkvrename.handoff.compare import Handoff, SimulatedPrompt
from onnxkvrename.handoff.consumer import MemoryKind
from onnxkvrename.handoff.selection import SelectedValue
from onnxkvrename.handoff.simulate import PromptRanges, merge_ranges
from onnxkvrename.handoff.slots import MemorySlot, compute_memory_size
from onnxkvrename.handoff.verdict import Outcome, PairResult
from onnxkvrename.handoff.worker import (
    UNKNOWN_SIZE,
    UNLIMITED_LENGTH,
    BufferOrder,
    HandoffSide,
)
from onnxkvrename.layout.layout import ByteTotals, KvBuffer, compute_byte_totals
from onnxkvrename.layout.updates import UpdateKind
from onnxkvrename.model.signature import Dim
from onnxkvrename.records import Document, fill_record
from onnxkvrename.report.compare_text import (
    format_handoff_verdict,
    format_prompt_outcome,
    format_state,
    list_sides_without_token,
    resolve_outcome,
)
from onnxkvrename.rules.profile import ProfileChoice
from onnxkvrename.rules.results import ModelReport

ModelReports = Sequence[ModelReport]


class Side(NamedTuple):
    """One side of the hand-off.

    Attributes:
        models: The paths of the models of this side.
        selected: Whether the consumer selects any buffer; if not, everything else is about the
            names after a rename.
        tokens: The tokens in the names.
        order: How the graph lists its buffers: by layer, by name as text, or neither.
        sizes: The sizes of symbols that are known.
        missing: Symbols whose sizes are not known.
        totals: The bytes of all buffers at these sizes.
        findings: What is wrong with the models of this side on their own.
    """

    models: tuple[str, ...]
    selected: bool
    tokens: tuple[str, ...]
    order: BufferOrder
    sizes: Mapping[str, int]
    missing: tuple[str, ...]
    totals: ByteTotals
    findings: tuple[Finding, ...]


class Range(NamedTuple):
    """Prompt lengths. `None` is an end that the graphs or the sizes do not show.

    Attributes:
        first: The shortest prompt.
        last: The longest prompt.
    """

    first: int | None
    last: int | None


class Verdict(NamedTuple):
    """Whether the hand-off works.

    Attributes:
        outcome: For the models as they are.
        renamed: The outcome if all names had the consumer's token; `None` if they have it.
        sentence: The verdict in words.
        first_wrong: The shortest prompt whose buffers do not arrive.
        corrupt: Prompts whose buffers decode reads wrongly and does not detect it.
        refused: Prompts that decode refuses because its memory is too small.
        beyond: The window, of unknown size, beyond which it goes wrong.
        longest: The longest prompt that both sides have room for; `None` where that is not known.
    """

    outcome: Outcome
    renamed: Outcome | None
    sentence: str
    first_wrong: int | None
    corrupt: tuple[Range, ...]
    refused: tuple[Range, ...]
    beyond: str | None
    longest: int | None


class Buffer(NamedTuple):
    """A KV buffer on one side.

    Attributes:
        input: The graph input of the pair; `None` if it is missing.
        output: The retained output of the pair; `None` if it is missing.
        kind: The kind of the buffer, in vLLM's words.
        update: How the retained output is made from its input.
        dtype: The element type, in ONNX's words.
        shape: Sizes and symbols, and `None` for an unknown axis; `None` without a rank.
        sized: The shape with the sizes that are known.
    """

    input: str | None
    output: str | None
    kind: str
    update: UpdateKind
    dtype: str
    shape: tuple[Dim, ...] | None
    sized: tuple[Dim, ...] | None


class Pair(NamedTuple):
    """A buffer on both sides.

    Attributes:
        layer: The number of the layer.
        part: What is in the buffer, such as key or value.
        prefill: The buffer of prefill; `None` if it has none.
        decode: The buffer of decode; `None` if it has none.
        fault: The code of what is wrong with this pair itself; `None` if nothing is, though it may
            be shifted.
        wrong: Prompts for which decode reads wrong bytes of this buffer.
        state: What becomes of it, in words, such as ok.
    """

    layer: int
    part: str
    prefill: Buffer | None
    decode: Buffer | None
    fault: str | None
    wrong: tuple[Range, ...]
    state: str


class Slot(NamedTuple):
    """The place of a buffer. Numbers are `None` where a size goes into them that is not known.

    Attributes:
        position: The position in the consumer's order, from 0.
        name: The name of the output that prefill writes, or of the input that decode reads; of a
            value that is not a KV buffer the consumer's own name. `None` for a place that prefill
            leaves empty.
        layer: The number of its layer; `None` for a value that is not a KV buffer.
        part: What is in the buffer, such as key or value; `None` likewise.
        dtype: The element type, in ONNX's words.
        shape: The sizes that are moved.
        bytes: The number of bytes.
        offset: The first byte, from the beginning of the memory; `None` if each slot has memory
            of its own.
    """

    position: int
    name: str | None
    layer: int | None
    part: str | None
    dtype: str
    shape: tuple[int | None, ...]
    bytes: int | None
    offset: int | None


class Memory(NamedTuple):
    """The memory that is handed over, as one side lays it out.

    Attributes:
        bytes: The bytes of all slots; `None` if a size is unknown.
        slots: In the consumer's order.
    """

    bytes: int | None
    slots: tuple[Slot, ...]


class Transfer(NamedTuple):
    """A simulated hand-off of one prompt.

    Attributes:
        tokens: The length of the prompt, in tokens.
        outcome: What becomes of the prompt, in words, such as ok.
        refused: Whether decode refuses the prompt: its memory is too small.
        wrong: Decode's inputs that get wrong bytes.
        prefill: What prefill writes.
        decode: What decode reads.
    """

    tokens: int
    outcome: str
    refused: bool
    wrong: tuple[str, ...]
    prefill: Memory
    decode: Memory


class CompareContent(NamedTuple):
    """Whether a hand-off of KV buffers from prefill to decode will work.

    Attributes:
        profile: The rules that identify KV names; `None` if the job could not be done.
        target: The consumer.
        full_transfer: Whether all of each buffer is moved, whatever the prompt.
        prefill: The prefill side; `None` if the job could not be done.
        decode: The decode side; `None` if the job could not be done.
        verdict: Whether the hand-off works; `None` if the job could not be done.
        pairs: Buffers by layer and part.
        transfers: Simulated prompts: one token, each window and one more, the context, and where
            something changes, so that all sizes between two of them are on a straight line; none
            where sizes are missing that matter. Where nothing limits the context, the last is a
            sample.
        findings: Causes first, consequences last.
        notes: Worth knowing, but nothing is wrong.
    """

    profile: ProfileChoice | None = None
    target: str | None = None
    full_transfer: bool | None = None
    prefill: Side | None = None
    decode: Side | None = None
    verdict: Verdict | None = None
    pairs: tuple[Pair, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()


DOCUMENT = Document("onnxkvrename.compare/1", "compare", CompareContent())


def describe_handoff(
    handoff: Handoff,
    reports: tuple[ModelReports, ModelReports],
    profile: ProfileChoice,
) -> CompareContent:
    """Return whether a hand-off works.

    Args:
        handoff: The result of the comparison.
        reports: The reports on the models of prefill, and of decode.
        profile: The profile that recognizes KV names.
    """
    return fill_record(
        CompareContent,
        handoff,
        profile=profile,
        target=handoff.consumer.name,
        prefill=_describe_side(handoff.prefill, reports[0]),
        decode=_describe_side(handoff.decode, reports[1]),
        verdict=_describe_verdict(handoff),
        pairs=tuple(_describe_pair(handoff, result) for result in handoff.pair_results),
        transfers=tuple(_describe_prompt(handoff, each) for each in handoff.simulated_prompts),
    )


def _describe_side(side: HandoffSide, reports: ModelReports) -> Side:
    return fill_record(
        Side,
        side,
        models=side.layout.models,
        selected=not side.lacks_token,
        sizes=side.layout.sizes,
        missing=side.layout.unresolved_symbols,
        totals=compute_byte_totals(side.layout),
        findings=tuple(finding for report in reports for finding in report.findings),
    )


def _describe_verdict(handoff: Handoff) -> Verdict:
    verdict = handoff.verdict
    placeholder = verdict.window_placeholder
    wrong = merge_ranges(verdict.corrupt_ranges, verdict.refused_ranges)
    return Verdict(
        outcome=resolve_outcome(handoff),
        renamed=verdict.outcome if list_sides_without_token(handoff) else None,
        sentence=format_handoff_verdict(handoff),
        first_wrong=wrong[0][0] if wrong and not placeholder else None,
        corrupt=_describe_ranges(verdict.corrupt_ranges, placeholder),
        refused=_describe_ranges(verdict.refused_ranges, placeholder),
        beyond=verdict.window_symbol,
        longest=verdict.longest_prompt,
    )


def _describe_ranges(ranges: PromptRanges, placeholder: int | None) -> tuple[Range, ...]:
    """Return ranges without the ends that the graphs do not show."""
    unknown = (UNLIMITED_LENGTH, placeholder)
    return tuple(
        Range(
            None if placeholder is not None and first == placeholder + 1 else first,
            None if last in unknown else last,
        )
        for first, last in ranges
    )


def _describe_pair(handoff: Handoff, result: PairResult) -> Pair:
    return Pair(
        result.pair.present_buffer.layer,
        result.pair.present_buffer.part,
        _describe_buffer(handoff.prefill, result.pair.prefill),
        _describe_buffer(handoff.decode, result.pair.decode),
        result.code,
        _describe_ranges(result.wrong_ranges, handoff.verdict.window_placeholder),
        format_state(handoff, result),
    )


def _describe_buffer(side: HandoffSide, buffer: KvBuffer | None) -> Buffer | None:
    if buffer is None:
        return None
    sized = None if buffer.shape is None else side.layout.resolve_shape(buffer.shape)
    return fill_record(Buffer, buffer, update=buffer.update.kind, sized=sized)


def _describe_prompt(handoff: Handoff, prompt: SimulatedPrompt) -> Transfer:
    setup = handoff.comparison.setup
    names = {slot.buffer_id: slot.name for slot in prompt.decode_slots}
    return Transfer(
        prompt.tokens,
        format_prompt_outcome(handoff, prompt),
        prompt.is_refused,
        tuple(names[each] for each in prompt.wrong_buffer_ids if each in names),
        _describe_memory(
            prompt.prefill_slots, setup.prefill_outputs, handoff.prefill, handoff, prompt.tokens
        ),
        _describe_memory(
            prompt.decode_slots, setup.decode_inputs, handoff.decode, handoff, prompt.tokens
        ),
    )


def _describe_memory(
    slots: Sequence[MemorySlot],
    values: Sequence[SelectedValue],
    side: HandoffSide,
    handoff: Handoff,
    tokens: int,
) -> Memory:
    """Return the places of `values`, which go to the slots one by one."""
    shown = tuple(_hide_open_sizes(slots, side, handoff, tokens))
    described = (
        _describe_slot(position, slot, value, handoff.consumer.memory)
        for position, (slot, value) in enumerate(zip_longest(shown, values[: len(shown)]))
    )
    return Memory(_mask_unknown(compute_memory_size(shown)), tuple(described))


def _describe_slot(
    position: int, slot: MemorySlot, value: SelectedValue | None, memory: MemoryKind
) -> Slot:
    buffer = None if value is None else value.buffer
    return Slot(
        position=position,
        name=None if value is None else value.value.name if buffer else value.input_name,
        layer=None if buffer is None else buffer.layer,
        part=None if buffer is None else buffer.part,
        dtype=slot.dtype,
        shape=tuple(map(_mask_unknown, slot.shape)),
        bytes=_mask_unknown(slot.nbytes),
        offset=_mask_unknown(slot.offset) if memory == "shared" else None,
    )


def _hide_open_sizes(
    slots: Sequence[MemorySlot], side: HandoffSide, handoff: Handoff, tokens: int
) -> Iterator[MemorySlot]:
    """Yield slots, without what depends on sizes that are not known.

    Slots are cut to the prompt, and so a window may look as long as that.
    """
    shapes = {
        (each.layer, each.part): side.layout.resolve_shape(each.shape or ())
        for each in side.layout.buffers
    }
    is_shifted = False
    for slot in slots:
        offset = UNKNOWN_SIZE if is_shifted else slot.offset
        dims = shapes.get(slot.buffer_id, ()) if tokens > 1 else ()
        is_open = [dim in handoff.shared_symbols for dim in dims]
        if any(is_open):
            shape = (
                UNKNOWN_SIZE if each else dim
                for dim, each in zip(slot.shape, is_open, strict=False)
            )
            slot = slot._replace(shape=tuple(shape), nbytes=UNKNOWN_SIZE)
        is_shifted = is_shifted or any(is_open)
        yield slot._replace(offset=offset)


def _mask_unknown(number: object) -> int | None:
    """Return a number, or `None` if it was computed from a size that is not known."""
    return number if isinstance(number, int) and number < UNKNOWN_SIZE else None
