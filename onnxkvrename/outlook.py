"""What is to be expected of a hand-off, as lines or JSON; strings out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from onnxkvrename import rehearsing, sides
from onnxkvrename.checking import CODES
from onnxkvrename.comparing import layers_text
from onnxkvrename.errors import KvRenameError
from onnxkvrename.handoff import HandOff, Outcome, Row, Transfer, Verdict
from onnxkvrename.layouts import Buffer
from onnxkvrename.pairing import Twin, type_text
from onnxkvrename.rehearsing import Ranges
from onnxkvrename.reporting import document, finding_values, show
from onnxkvrename.results import ModelReport
from onnxkvrename.sides import Side
from onnxkvrename.transfer import Slot

SCHEMA = "onnxkvrename.compare/1"
Reports = Sequence[ModelReport]


def outcome(found: HandOff) -> Outcome:
    """What becomes of the hand-off as the models stand."""
    if found.prefill.bare:
        return "fails"
    return "corrupts" if found.decode.bare else found.verdict.outcome


def sentence(found: HandOff) -> str:
    """The verdict in one line."""
    bare = [side.label for side in (found.prefill, found.decode) if side.bare]
    if not bare or not (found.prefill.layout.buffers and found.decode.layout.buffers):
        return f"hand-off {_expected(found)}"
    what = "fail" if found.prefill.bare else "corrupt every prompt"
    return (
        f"hand-off would {what}: {found.target} selects nothing on {' and '.join(bare)} (KV616); "
        f"renamed, it {_expected(found)}"
    )


def _expected(found: HandOff) -> str:
    verdict = found.verdict
    cause = "" if verdict.cause is None else f": {_cause(verdict)}"
    if verdict.outcome == "works":
        return f"works: {_what(found)}"
    if verdict.outcome == "corrupts":
        more = span(verdict.refused, verdict)
        stops = f", and decode would stop at {more}" if verdict.refused else ""
        return f"would corrupt {span(verdict.corrupt, verdict)}{stops}{cause}"
    if verdict.outcome == "loses":
        return f"would leave something behind{cause}"
    if verdict.outcome == "unknown":
        hint = "" if verdict.cause is None else f": {show(verdict.cause.hint)}"
        return f"cannot be foretold{hint}"
    if verdict.refused and verdict.cause and verdict.cause.code not in sides.STOPS:
        lengths = span(verdict.refused, verdict)
        return f"would fail for {lengths}: decode would find its memory too small{cause}"
    return f"would fail at start-up{cause}"


def _cause(verdict: Verdict) -> str:
    assert verdict.cause is not None
    return f"{CODES[verdict.cause.code][1]} ({verdict.cause.code})"


def _what(found: HandOff) -> str:
    layers = layers_text(found.decode.layout.layers)
    unknown = {*found.prefill.layout.missing, *found.decode.layout.missing}
    count = len(found.decode.layout.buffers)
    said = f"{count} buffers of {layers}"
    if found.verdict.longest is not None:
        return f"{said}, prompts of up to {found.verdict.longest} tokens"
    sizes = ", ".join(map(show, sorted(unknown)))
    return f"{said}, whatever {sizes} may be" if sizes else f"{said}, prompts of any length"


def span(ranges: Ranges, verdict: Verdict) -> str:
    """Prompt lengths in words: ``prompts longer than 128 tokens``."""
    end = sides.LONGEST if verdict.longest is None else verdict.longest
    if not ranges:
        return "prompts, from a length on that depends on sizes"
    if ranges == ((1, end),):
        return "every prompt"
    return f"prompts {' and '.join(_run(first, last, end, verdict) for first, last in ranges)}"


def _run(first: int, last: int, end: int, verdict: Verdict) -> str:
    if last == end:
        return f"longer than {_length(first - 1, verdict)}"
    if first == 1:
        return f"of up to {_length(last, verdict)}"
    if first == last:
        return f"of {_length(last, verdict)}"
    return f"of {first} to {_length(last, verdict)}"


def _length(tokens: int, verdict: Verdict) -> str:
    """A length, by the name of a window where that is all that is known of it."""
    if tokens == verdict.near and verdict.beyond is not None:
        return show(verdict.beyond)
    return "1 token" if tokens == 1 else f"{tokens} tokens"


def lines(found: HandOff) -> Iterator[str]:
    """The table as aligned lines."""
    table = [heads(found), *rows(found)]
    widths = [max(len(row[at]) for row in table) for at in range(len(table[0]))]
    for row in table:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join(cells).rstrip()


def heads(found: HandOff) -> tuple[str, ...]:
    """What stands above the columns of the table."""
    last = "ONCE RENAMED" if found.prefill.bare or found.decode.bare else "HAND-OFF"
    return "LAYERS", "PARTS", "PREFILL", "DECODE", last


def rows(found: HandOff) -> list[tuple[str, ...]]:
    """Buffers that are alike and fare alike in one row, layers and parts folded."""
    alike: dict[tuple[str, str, str, str], list[int]] = {}
    for row in found.rows:
        mine, theirs = _types(found, row.twin)
        key = (show(row.twin.any.part), mine, theirs, _state(row, found.verdict))
        alike.setdefault(key, []).append(row.twin.any.layer)
    merged: dict[tuple[tuple[int, ...], str, str, str], list[str]] = {}
    for (part, mine, theirs, state), layers in alike.items():
        merged.setdefault((tuple(layers), mine, theirs, state), []).append(part)
    return [
        (layers_text(layers).partition(" ")[2], ", ".join(parts), mine, theirs, state)
        for (layers, mine, theirs, state), parts in merged.items()
    ]


def _types(found: HandOff, twin: Twin) -> tuple[str, str]:
    sides_of = ((found.prefill, twin.prefill), (found.decode, twin.decode))
    mine, theirs = (
        "-" if buffer is None else show(type_text(side.layout, buffer)) for side, buffer in sides_of
    )
    return mine, "same" if mine == theirs else theirs


def _state(row: Row, verdict: Verdict) -> str:
    why = "" if row.code is None else f" ({row.code})"
    if row.twin.decode is None:
        return f"left behind{why}"
    if row.open:
        return f"depends on sizes{why}"
    corrupt = rehearsing.without(row.wrong, verdict.refused)
    if corrupt:
        what = "wrong" if row.code is not None else "shifted"
        return f"{what} for {span(corrupt, verdict)}{why}"
    if row.wrong:
        return f"refused for {span(row.wrong, verdict)}{why}"
    if row.code is not None and verdict.refused:
        return f"refused for {span(verdict.refused, verdict)}{why}"
    return f"wrong{why}" if why else "ok"


def notes(found: HandOff) -> Iterator[str]:
    """What is worth knowing beside."""
    yield from (f"note: {show(note)}" for note in found.notes)


def report(found: HandOff, *, both: bool) -> ModelReport:
    """The findings as those of a model: of decode's, or of ``both`` for a reader."""
    labels = [(side.given.models or (side.label,))[0] for side in (found.prefill, found.decode)]
    path = " -> ".join(labels) if both else labels[1]
    return ModelReport(
        path, path, "failed" if found.failed else "unchanged", findings=found.findings
    )


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
    bare = found.prefill.bare or found.decode.bare
    near = verdict.near
    wrong = [one for one in rehearsing.union(verdict.corrupt, verdict.refused) if not near]
    return {
        "outcome": outcome(found),
        "renamed": verdict.outcome if bare else None,
        "sentence": sentence(found),
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
