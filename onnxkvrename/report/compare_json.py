"""What is to be expected of a hand-off, for programs: each buffer, each slot, the verdict; JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onnxkvrename.errors import KvRenameError
from onnxkvrename.findings import document, finding_values
from onnxkvrename.handoff import simulate as rehearsing
from onnxkvrename.handoff import worker as sides
from onnxkvrename.handoff.compare import HandOff, Row, Transfer
from onnxkvrename.handoff.simulate import Ranges
from onnxkvrename.handoff.slots import Slot
from onnxkvrename.handoff.worker import Side
from onnxkvrename.layout.layout import Buffer
from onnxkvrename.report import compare_text as outlook
from onnxkvrename.rules.results import ModelReport

SCHEMA = "onnxkvrename.compare/1"
Reports = Sequence[ModelReport]


def as_json(
    found: HandOff | None,
    code: int,
    fault: KvRenameError | None = None,
    reports: tuple[Reports, Reports] = ((), ()),
) -> str:
    """One document, held against ``schemas/compare-1.json`` by the tests."""
    content = _nothing() if found is None else _content(found, reports)
    return document(SCHEMA, "compare", code, fault, **content)


def _nothing() -> dict[str, Any]:
    absent = ("target", "full_transfer", "tensor_parallelism", "prefill", "decode", "verdict")
    return {**dict.fromkeys(absent), "pairs": [], "transfers": [], "findings": [], "notes": []}


def _content(found: HandOff, reports: tuple[Reports, Reports]) -> dict[str, Any]:
    ranks = found.ranks
    return {
        "target": found.target,
        "full_transfer": found.whole,
        "tensor_parallelism": None if ranks is None else ranks._asdict(),
        "prefill": _side(found.prefill, reports[0]),
        "decode": _side(found.decode, reports[1]),
        "verdict": _verdict(found),
        "pairs": [_pair(found, row) for row in found.rows],
        "transfers": [_transfer(one) for one in found.transfers],
        "findings": [finding_values(one) for one in found.findings],
        "notes": list(found.notes),
    }


def _side(side: Side, reports: Reports) -> dict[str, Any]:
    return {
        "models": list(side.layout.models),
        "selected": not side.bare,
        "tokens": list(side.tokens),
        "order": side.order,
        "sizes": dict(side.layout.sizes),
        "missing": list(side.layout.missing),
        "findings": [finding_values(one) for report in reports for one in report.findings],
    }


def _verdict(found: HandOff) -> dict[str, Any]:
    verdict = found.verdict
    near = verdict.near
    wrong = [one for one in rehearsing.union(verdict.corrupt, verdict.refused) if not near]
    return {
        "outcome": outlook.outcome(found),
        "renamed": verdict.outcome if outlook.bare(found) else None,
        "sentence": outlook.sentence(found),
        "first_wrong": wrong[0][0] if wrong else None,
        "corrupt": _ranges(verdict.corrupt, near),
        "refused": _ranges(verdict.refused, near),
        "beyond": verdict.beyond,
        "longest": verdict.longest,
    }


def _ranges(ranges: Ranges, near: int | None) -> list[dict[str, int | None]]:
    """Ranges for programs; an end that the graphs do not show is null."""
    unknown = (sides.LONGEST, near)
    return [
        {
            "first": None if near is not None and first == near + 1 else first,
            "last": None if last in unknown else last,
        }
        for first, last in ranges
    ]


def _pair(found: HandOff, row: Row) -> dict[str, Any]:
    return {
        "layer": row.twin.any.layer,
        "part": row.twin.any.part,
        "prefill": _buffer(found.prefill, row.twin.prefill),
        "decode": _buffer(found.decode, row.twin.decode),
        "fault": row.code,
        "wrong": _ranges(row.wrong, found.verdict.near),
    }


def _buffer(side: Side, buffer: Buffer | None) -> dict[str, Any] | None:
    if buffer is None:
        return None
    shape = buffer.shape
    return {
        "input": buffer.input,
        "output": buffer.output,
        "kind": buffer.kind,
        "dtype": buffer.dtype,
        "shape": None if shape is None else list(shape),
        "sized": None if shape is None else list(side.layout.sized(shape)),
    }


def _transfer(one: Transfer) -> dict[str, Any]:
    names = {slot.ident: slot.name for slot in one.read}
    return {
        "tokens": one.tokens,
        "refused": one.refused,
        "wrong": [names[ident] for ident in one.wrong if ident in names],
        "prefill": _memory(one.sent),
        "decode": _memory(one.read),
    }


def _memory(slots: Sequence[Slot]) -> dict[str, Any]:
    total = slots[-1].offset + slots[-1].bytes if slots else 0
    return {
        "bytes": _known(total),
        "slots": [
            {
                "position": position,
                "name": slot.name,
                "layer": slot.ident[0] if slot.ident[0] >= 0 else None,
                "part": slot.ident[1] if slot.ident[0] >= 0 else None,
                "dtype": slot.dtype,
                "shape": [_known(dim) for dim in slot.shape],
                "bytes": _known(slot.bytes),
                "offset": _known(slot.offset),
            }
            for position, slot in enumerate(slots)
        ],
    }


def _known(number: object) -> int | None:
    """A number, unless a size went into it that is not known."""
    return number if isinstance(number, int) and number < sides.FAR else None
