"""Find the root causes of a failing hand-off: the buffers that are wrong themselves.

A buffer that is only shifted by another one is not a root cause.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass

from onnxkvrename.findings import (
    CODES,
    Finding,
    begin_message,
    build_finding,
    format_layers,
    format_list,
)
from onnxkvrename.handoff.comparison import (
    BufferPair,
    Comparison,
    Difference,
    format_buffer_type,
    try_simulation,
)
from onnxkvrename.handoff.consumer_checks import describe_content
from onnxkvrename.handoff.selection import BufferId
from onnxkvrename.handoff.slots import format_token_count
from onnxkvrename.handoff.worker import UNLIMITED_LENGTH
from onnxkvrename.layout.scales import find_different_scales

_HINTS = {
    "KV612": "compile both with the same precision, and pass its file: --custom-io FILE",
    "KV613": "export both from the same model with the same settings",
    "KV614": "export and compile both with the same settings: enable_chunking, retain_full_kv, "
    "sliding_window",
    "KV615": "export both with the same version of the exporter",
    "KV618": "compile both for the same context",
    "KV626": "quantize both with the same calibration, so that their scales are equal",
}
_MAX_DRAFT_LAYERS = 3
"""The most layers of a draft model."""


@dataclass(frozen=True, slots=True)
class RootCause:
    """A finding that explains why a hand-off fails, with the buffers that have it.

    Attributes:
        finding: The finding.
        buffer_ids: The buffers that are wrong themselves; empty if it is not about buffers.
        difference: The difference between the two sides of these buffers, if it is about one.
        summary: The finding in a few words, for a verdict of one line.
    """

    finding: Finding
    buffer_ids: tuple[BufferId, ...]
    difference: Difference | None
    summary: str

    @property
    def is_undecided(self) -> bool:
        """True if it is a difference only for some sizes that are not known."""
        return self.difference is not None and self.difference.is_undecided


def build_root_cause(
    finding: Finding,
    pairs: Sequence[BufferPair] = (),
    difference: Difference | None = None,
    summary: str | None = None,
) -> RootCause:
    """Return a cause; by default its summary is the meaning of the finding's code."""
    return RootCause(
        finding,
        tuple(pair.buffer_id for pair in pairs),
        difference,
        CODES[finding.code][1] if summary is None else summary,
    )


def find_root_causes(comparison: Comparison) -> tuple[RootCause, ...]:
    """Return missing buffers, differing buffers and truncated ones, in this order."""
    return (
        *_find_missing_buffers(comparison.pairs, is_otherwise_equal=not comparison.differences),
        *_find_differing_buffers(comparison),
        *_find_truncated_buffers(comparison),
    )


def _find_missing_buffers(
    pairs: Sequence[BufferPair], *, is_otherwise_equal: bool
) -> Iterator[RootCause]:
    """Find buffers on one side only: KV620 if they may be a draft model's, otherwise KV611.

    A draft model that shares the graph has one to three whole layers, directly after the last
    layer of its target model, and fewer than that one. All else must be equal.
    """
    prefill_layers = {pair.present_buffer.layer for pair in pairs if pair.prefill is not None}
    decode_layers = {pair.present_buffer.layer for pair in pairs if pair.decode is not None}
    incomplete = [pair for pair in pairs if None in pair]
    prefill_only = [pair for pair in incomplete if pair.decode is None]
    decode_only = [pair for pair in incomplete if pair.prefill is None]
    for side, other_side, other_layers, group in (
        ("prefill", "decode", decode_layers, prefill_only),
        ("decode", "prefill", prefill_layers, decode_only),
    ):
        if not group:
            continue
        summary = f"{_begin_missing_layers(group, other_layers)} on {side} only"
        text = _describe_missing_buffers(group, side)
        if is_otherwise_equal and group == incomplete and _can_be_draft_layers(group, other_layers):
            text += f", directly after the last layer of {other_side} ({max(other_layers)})"
            hint = (
                "export both sides with the layers of the draft model, or both without; or check "
                f"whether {other_side} is cut short"
            )
            finding = build_finding("KV620", "", text, hint)
            summary += ", perhaps those of a draft model"
        else:
            hint = (
                f"check whether {other_side} is another model, cut short, or passed without some "
                "of its windows"
            )
            finding = build_finding("KV611", "", text, hint)
        yield build_root_cause(finding, group, summary=summary)


def _can_be_draft_layers(group: Sequence[BufferPair], other_layers: Set[int]) -> bool:
    layers = sorted({pair.present_buffer.layer for pair in group})
    first = max(other_layers, default=-1) + 1
    has_room = len(layers) <= min(_MAX_DRAFT_LAYERS, len(other_layers) - 1)
    return has_room and layers == [*range(first, first + len(layers))]


def _begin_missing_layers(group: Sequence[BufferPair], other_layers: Set[int]) -> str:
    """Return the layers and a verb, with parts if the other side has the rest: ``layer 1 is``."""
    layers = sorted({pair.present_buffer.layer for pair in group})
    text = format_layers(layers)
    if other_layers.isdisjoint(layers):
        return f"{text} {'is' if len(layers) == 1 else 'are'}"
    return f"{_format_parts(group)} of {text} {'is' if len(group) == 1 else 'are'}"


def _describe_missing_buffers(group: Sequence[BufferPair], side: str) -> str:
    """Return the whole sentence: ``4 buffers (first: past_key.2) are on decode only: …``."""
    beginning = begin_message(
        [pair.name for pair in group], f"{group[0].name} is", "are", "buffers"
    )
    layers = format_layers(sorted({pair.present_buffer.layer for pair in group}))
    return f"{beginning} on {side} only ({_format_parts(group)} of {layers})"


def _format_parts(group: Sequence[BufferPair]) -> str:
    return format_list(list(dict.fromkeys(pair.present_buffer.part for pair in group)))


def _find_differing_buffers(comparison: Comparison) -> Iterator[RootCause]:
    """Find pairs whose difference affects a prompt, or may; one cause for equal differences."""
    simulation, placeholder = comparison.simulation, comparison.window_placeholder
    transferred = comparison.setup.transferred_ids
    # The lengths at which a buffer itself differs do not depend on sizes that another one needs.
    visible = simulation or try_simulation(comparison.setup)
    groups: dict[tuple[Difference, int | None], list[BufferPair]] = {}
    for pair, difference in comparison.differences:
        ranges = () if visible is None else visible.differing_ranges.get(pair.buffer_id, ())
        if simulation is None and (difference.is_certain or difference.needed_symbols):
            ranges = ()
        is_never_read = (
            simulation is None
            or simulation.refused_ranges
            or pair.buffer_id not in transferred
            or difference.has_moved_batch
        )
        if ranges or difference.is_undecided or (difference.is_certain and is_never_read):
            last_equal = ranges[0][0] - 1 if ranges else placeholder
            known_last = None if last_equal == placeholder else last_equal
            groups.setdefault((difference, known_last), []).append(pair)
    for (difference, known_last), pairs in groups.items():
        finding = _build_difference_finding(difference, pairs, known_last)
        summary = _summarize_windows(difference) if finding.code == "KV614" else None
        yield build_root_cause(finding, pairs, difference, summary)


def _build_difference_finding(
    difference: Difference, pairs: Sequence[BufferPair], last_equal: int | None
) -> Finding:
    """Return one finding for buffers with the same difference.

    The longest prompt that it does not affect has `last_equal` tokens, `None` if that is not known.
    """
    message = f"{_begin_difference(pairs)} {difference.prefill} on prefill and "
    message += f"{difference.decode} on decode"
    if difference.code == "KV626":
        message = f"{_begin_difference(pairs)} {_describe_scales(pairs[0])}"
    if len(pairs) > 1:
        message += f" ({format_layers(sorted({pair.present_buffer.layer for pair in pairs}))})"
    if difference.window_sizes:
        message += f": {_summarize_windows(difference)}"
    if difference.code == "KV614" and last_equal:
        message += f"; prompts longer than {format_token_count(last_equal)} differ"
    elif difference.code == "KV614" and difference.is_certain and difference.needed_symbols:
        if last_equal is None:
            symbols = " or ".join(difference.needed_symbols)
            message += f"; prompts longer than {symbols} differ"
    elif difference.is_undecided:
        symbols = " and ".join(difference.needed_symbols)
        message += f"; whether the sides differ depends on {symbols}"
    hint = _HINTS[difference.code]
    if difference.needed_symbols and difference.is_certain:
        hint = f"pass {difference.size_arguments} to see from which prompt length on"
    elif difference.needed_symbols:
        hint = f"pass {difference.size_arguments}"
    return build_finding(difference.code, pairs[0].name, message, hint)


def _describe_scales(pair: BufferPair) -> str:
    """Return with which scales a buffer is stored and read, the first that differ."""
    scales = (None if side is None else side.scales for side in pair)
    written, read = find_different_scales(*scales) or ("", "")
    return f"stored with scale {written} on prefill and read with scale {read} on decode"


def _summarize_windows(difference: Difference) -> str:
    if difference.window_sizes is None:
        return "a window on one side, the whole context on the other"
    prefill_size, decode_size = difference.window_sizes
    return f"windows of {prefill_size} and {decode_size} tokens"


def _begin_difference(pairs: Sequence[BufferPair]) -> str:
    return begin_message([pair.name for pair in pairs], "is", "are", "buffers")


def _find_truncated_buffers(comparison: Comparison) -> Iterator[RootCause]:
    """Find KV605: buffers of which short prompts move only a part, the same on both sides."""
    if comparison.simulation is None:
        return
    groups: dict[tuple[str, str, int], list[BufferPair]] = {}
    for pair in comparison.pairs:
        ranges = comparison.simulation.truncated_ranges.get(pair.buffer_id, ())
        if ranges and pair.decode is not None:
            type_text = format_buffer_type(comparison.setup.decode, pair.decode)
            key = (describe_content(pair.decode), type_text, ranges[-1][1])
            groups.setdefault(key, []).append(pair)
    for (content, type_text, last), pairs in groups.items():
        is_limited = last < UNLIMITED_LENGTH
        prompts = (
            f"a prompt of up to {format_token_count(last)}" if is_limited else "a short prompt"
        )
        beginning = _begin_difference(pairs)
        finding = build_finding(
            "KV605",
            pairs[0].name,
            f"{beginning} {type_text} ({content}), and {prompts} moves only a part",
            "set VLLM_QAIC_USE_FULL_KV_TRANSFER=1 on both sides to move all of each buffer, and "
            "pass `--full-transfer`",
        )
        yield build_root_cause(finding, pairs)
