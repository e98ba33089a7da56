"""What is to be expected of a hand-off, for programs: each buffer, each slot, the verdict; JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onnxkvrename.errors import KvRenameError
from onnxkvrename.findings import render_json_document, serialize_finding
from onnxkvrename.handoff.compare import Handoff, PairResult, SimulatedPrompt
from onnxkvrename.handoff.simulate import PromptRanges, merge_ranges
from onnxkvrename.handoff.slots import MemorySlot
from onnxkvrename.handoff.worker import UNKNOWN_SIZE, UNLIMITED_LENGTH, HandoffSide
from onnxkvrename.layout.layout import Buffer
from onnxkvrename.report.compare_text import (
    format_handoff_verdict,
    list_sides_without_token,
    resolve_outcome,
)
from onnxkvrename.rules.results import ModelReport

SCHEMA = "onnxkvrename.compare/1"
ModelReports = Sequence[ModelReport]


def handoff_to_json(
    found: Handoff | None,
    code: int,
    fault: KvRenameError | None = None,
    reports: tuple[ModelReports, ModelReports] = ((), ()),
) -> str:
    """One document, held against ``schemas/compare-1.json`` by the tests."""
    content = _build_empty_content() if found is None else _build_content(found, reports)
    return render_json_document(SCHEMA, "compare", code, fault, **content)


def _build_empty_content() -> dict[str, Any]:
    absent = ("target", "full_transfer", "tensor_parallelism", "prefill", "decode", "verdict")
    return {**dict.fromkeys(absent), "pairs": [], "transfers": [], "findings": [], "notes": []}


def _build_content(found: Handoff, reports: tuple[ModelReports, ModelReports]) -> dict[str, Any]:
    ranks = found.ranks
    return {
        "target": found.consumer_name,
        "full_transfer": found.full_transfer,
        "tensor_parallelism": None if ranks is None else ranks._asdict(),
        "prefill": _side_to_json(found.prefill, reports[0]),
        "decode": _side_to_json(found.decode, reports[1]),
        "verdict": _verdict_to_json(found),
        "pairs": [_pair_to_json(found, row) for row in found.pair_results],
        "transfers": [_prompt_to_json(one) for one in found.simulated_prompts],
        "findings": [serialize_finding(one) for one in found.findings],
        "notes": list(found.notes),
    }


def _side_to_json(side: HandoffSide, reports: ModelReports) -> dict[str, Any]:
    return {
        "models": list(side.layout.models),
        "selected": not side.lacks_token,
        "tokens": list(side.tokens),
        "order": side.order,
        "sizes": dict(side.layout.sizes),
        "missing": list(side.layout.unresolved_symbols),
        "findings": [serialize_finding(one) for report in reports for one in report.findings],
    }


def _verdict_to_json(found: Handoff) -> dict[str, Any]:
    verdict = found.verdict
    near = verdict.window_placeholder
    wrong = [
        one for one in merge_ranges(verdict.corrupt_ranges, verdict.refused_ranges) if not near
    ]
    return {
        "outcome": resolve_outcome(found),
        "renamed": verdict.outcome if list_sides_without_token(found) else None,
        "sentence": format_handoff_verdict(found),
        "first_wrong": wrong[0][0] if wrong else None,
        "corrupt": _ranges_to_json(verdict.corrupt_ranges, near),
        "refused": _ranges_to_json(verdict.refused_ranges, near),
        "beyond": verdict.window_symbol,
        "longest": verdict.longest_prompt,
    }


def _ranges_to_json(ranges: PromptRanges, near: int | None) -> list[dict[str, int | None]]:
    """Ranges for programs; an end that the graphs do not show is null."""
    unknown = (UNLIMITED_LENGTH, near)
    return [
        {
            "first": None if near is not None and first == near + 1 else first,
            "last": None if last in unknown else last,
        }
        for first, last in ranges
    ]


def _pair_to_json(found: Handoff, row: PairResult) -> dict[str, Any]:
    return {
        "layer": row.pair.present_buffer.layer,
        "part": row.pair.present_buffer.part,
        "prefill": _buffer_to_json(found.prefill, row.pair.prefill),
        "decode": _buffer_to_json(found.decode, row.pair.decode),
        "fault": row.code,
        "wrong": _ranges_to_json(row.wrong_ranges, found.verdict.window_placeholder),
    }


def _buffer_to_json(side: HandoffSide, buffer: Buffer | None) -> dict[str, Any] | None:
    if buffer is None:
        return None
    shape = buffer.shape
    return {
        "input": buffer.input,
        "output": buffer.output,
        "kind": buffer.kind,
        "dtype": buffer.dtype,
        "shape": None if shape is None else list(shape),
        "sized": None if shape is None else list(side.layout.resolve_shape(shape)),
    }


def _prompt_to_json(one: SimulatedPrompt) -> dict[str, Any]:
    names = {slot.buffer_id: slot.name for slot in one.decode_slots}
    return {
        "tokens": one.tokens,
        "refused": one.is_refused,
        "wrong": [names[ident] for ident in one.wrong_buffer_ids if ident in names],
        "prefill": _slots_to_json(one.prefill_slots),
        "decode": _slots_to_json(one.decode_slots),
    }


def _slots_to_json(slots: Sequence[MemorySlot]) -> dict[str, Any]:
    total = slots[-1].offset + slots[-1].nbytes if slots else 0
    return {
        "bytes": _mask_unknown(total),
        "slots": [
            {
                "position": position,
                "name": slot.name,
                "layer": slot.buffer_id[0] if slot.buffer_id[0] >= 0 else None,
                "part": slot.buffer_id[1] if slot.buffer_id[0] >= 0 else None,
                "dtype": slot.dtype,
                "shape": [_mask_unknown(dim) for dim in slot.shape],
                "bytes": _mask_unknown(slot.nbytes),
                "offset": _mask_unknown(slot.offset),
            }
            for position, slot in enumerate(slots)
        ],
    }


def _mask_unknown(number: object) -> int | None:
    """A number, unless a size went into it that is not known."""
    return number if isinstance(number, int) and number < UNKNOWN_SIZE else None
