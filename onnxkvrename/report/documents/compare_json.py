"""Render the comparison of prefill and decode as JSON: each buffer, each slot, the verdict."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from onnxkvrename.errors import KvRenameError
from onnxkvrename.findings import render_json_document, serialize_finding
from onnxkvrename.handoff.compare import Handoff, PairResult, SimulatedPrompt
from onnxkvrename.handoff.consumer import MemoryKind
from onnxkvrename.handoff.simulate import PromptRanges, merge_ranges
from onnxkvrename.handoff.slots import MemorySlot, compute_memory_size
from onnxkvrename.handoff.worker import UNKNOWN_SIZE, UNLIMITED_LENGTH, HandoffSide
from onnxkvrename.layout.layout import KvBuffer
from onnxkvrename.report.compare_text import (
    format_handoff_verdict,
    list_sides_without_token,
    resolve_outcome,
)
from onnxkvrename.rules.profile import ProfileChoice, serialize_choice
from onnxkvrename.rules.results import ModelReport

SCHEMA = "onnxkvrename.compare/1"
ModelReports = Sequence[ModelReport]


def handoff_to_json(
    handoff: Handoff | None,
    code: int,
    fault: KvRenameError | None = None,
    reports: tuple[ModelReports, ModelReports] = ((), ()),
    profile: ProfileChoice | None = None,
) -> str:
    """Return the JSON document of the command, as in ``schemas/compare-1.json``.

    Args:
        handoff: The result, `None` if the job could not be done.
        code: The exit code.
        fault: Why the job could not be done.
        reports: The reports on the models of prefill, and of decode.
        profile: The profile that recognizes KV names.
    """
    content = _build_empty_content() if handoff is None else _build_content(handoff, reports)
    return render_json_document(
        SCHEMA, "compare", code, fault, profile=serialize_choice(profile), **content
    )


def _build_empty_content() -> dict[str, Any]:
    absent = ("target", "full_transfer", "tensor_parallelism", "prefill", "decode", "verdict")
    return {**dict.fromkeys(absent), "pairs": [], "transfers": [], "findings": [], "notes": []}


def _build_content(handoff: Handoff, reports: tuple[ModelReports, ModelReports]) -> dict[str, Any]:
    ranks = handoff.ranks
    return {
        "target": handoff.consumer_name,
        "full_transfer": handoff.full_transfer,
        "tensor_parallelism": None if ranks is None else ranks._asdict(),
        "prefill": _side_to_json(handoff.prefill, reports[0]),
        "decode": _side_to_json(handoff.decode, reports[1]),
        "verdict": _verdict_to_json(handoff),
        "pairs": [_pair_to_json(handoff, result) for result in handoff.pair_results],
        "transfers": [_prompt_to_json(handoff, each) for each in handoff.simulated_prompts],
        "findings": [serialize_finding(finding) for finding in handoff.findings],
        "notes": list(handoff.notes),
    }


def _side_to_json(side: HandoffSide, reports: ModelReports) -> dict[str, Any]:
    return {
        "models": list(side.layout.models),
        "selected": not side.lacks_token,
        "tokens": list(side.tokens),
        "order": side.order,
        "sizes": dict(side.layout.sizes),
        "missing": list(side.layout.unresolved_symbols),
        "findings": [serialize_finding(each) for report in reports for each in report.findings],
    }


def _verdict_to_json(handoff: Handoff) -> dict[str, Any]:
    verdict = handoff.verdict
    placeholder = verdict.window_placeholder
    wrong = merge_ranges(verdict.corrupt_ranges, verdict.refused_ranges)
    return {
        "outcome": resolve_outcome(handoff),
        "renamed": verdict.outcome if list_sides_without_token(handoff) else None,
        "sentence": format_handoff_verdict(handoff),
        "first_wrong": wrong[0][0] if wrong and not placeholder else None,
        "corrupt": _ranges_to_json(verdict.corrupt_ranges, placeholder),
        "refused": _ranges_to_json(verdict.refused_ranges, placeholder),
        "beyond": verdict.window_symbol,
        "longest": verdict.longest_prompt,
    }


def _ranges_to_json(ranges: PromptRanges, placeholder: int | None) -> list[dict[str, int | None]]:
    """Return ranges for JSON; an end that the graphs do not show is null."""
    unknown = (UNLIMITED_LENGTH, placeholder)
    return [
        {
            "first": None if placeholder is not None and first == placeholder + 1 else first,
            "last": None if last in unknown else last,
        }
        for first, last in ranges
    ]


def _pair_to_json(handoff: Handoff, result: PairResult) -> dict[str, Any]:
    return {
        "layer": result.pair.present_buffer.layer,
        "part": result.pair.present_buffer.part,
        "prefill": _buffer_to_json(handoff.prefill, result.pair.prefill),
        "decode": _buffer_to_json(handoff.decode, result.pair.decode),
        "fault": result.code,
        "wrong": _ranges_to_json(result.wrong_ranges, handoff.verdict.window_placeholder),
    }


def _buffer_to_json(side: HandoffSide, buffer: KvBuffer | None) -> dict[str, Any] | None:
    if buffer is None:
        return None
    shape = buffer.shape
    return {
        "input": buffer.input,
        "output": buffer.output,
        "kind": buffer.kind,
        "update": buffer.update.kind,
        "dtype": buffer.dtype,
        "shape": None if shape is None else list(shape),
        "sized": None if shape is None else list(side.layout.resolve_shape(shape)),
    }


def _prompt_to_json(handoff: Handoff, prompt: SimulatedPrompt) -> dict[str, Any]:
    names = {slot.buffer_id: slot.name for slot in prompt.decode_slots}
    prefill, decode = (
        _slots_to_json(_hide_open_sizes(slots, side, handoff, prompt.tokens), handoff.memory)
        for slots, side in (
            (prompt.prefill_slots, handoff.prefill),
            (prompt.decode_slots, handoff.decode),
        )
    )
    return {
        "tokens": prompt.tokens,
        "refused": prompt.is_refused,
        "wrong": [names[each] for each in prompt.wrong_buffer_ids if each in names],
        "prefill": prefill,
        "decode": decode,
    }


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


def _slots_to_json(slots: Iterable[MemorySlot], memory: MemoryKind) -> dict[str, Any]:
    slots = tuple(slots)
    return {
        "bytes": _mask_unknown(compute_memory_size(slots)),
        "slots": [
            {
                "position": position,
                "name": slot.name,
                "layer": slot.buffer_id[0] if slot.buffer_id[0] >= 0 else None,
                "part": slot.buffer_id[1] if slot.buffer_id[0] >= 0 else None,
                "dtype": slot.dtype,
                "shape": [_mask_unknown(dim) for dim in slot.shape],
                "bytes": _mask_unknown(slot.nbytes),
                "offset": _mask_unknown(slot.offset) if memory == "shared" else None,
            }
            for position, slot in enumerate(slots)
        ],
    }


def _mask_unknown(number: object) -> int | None:
    """Return a number, or `None` if it was computed from a size that is not known."""
    return number if isinstance(number, int) and number < UNKNOWN_SIZE else None
