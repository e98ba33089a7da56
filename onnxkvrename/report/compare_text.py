"""What is to be expected of a hand-off, for a person; strings out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from click import style

from onnxkvrename.findings import CODES, Finding
from onnxkvrename.handoff import simulate as rehearsing
from onnxkvrename.handoff import worker as sides
from onnxkvrename.handoff.buffer_diff import Twin, type_text, windows_text
from onnxkvrename.handoff.compare import HandOff, Row
from onnxkvrename.handoff.simulate import Ranges
from onnxkvrename.handoff.slots import length_text
from onnxkvrename.handoff.verdict import Outcome, Stretch, Verdict
from onnxkvrename.report.rename_text import show
from onnxkvrename.rules.results import ModelReport
from onnxkvrename.rules.window_diff import layers_text

_SOME = "prompts, from a length on that depends on sizes"


def outcome(found: HandOff) -> Outcome:
    """What becomes of the hand-off as the models stand."""
    if not bare(found):
        return found.verdict.outcome
    return "fails" if found.prefill.bare else "corrupts"


def sentence(found: HandOff) -> str:
    """The verdict in one line."""
    without = bare(found)
    if not without:
        return f"hand-off {_expected(found)}"
    what = "fail" if found.prefill.bare else "corrupt every prompt"
    return (
        f"hand-off would {what}: {found.target} selects nothing on {' and '.join(without)} "
        f"(KV616); renamed, it {_expected(found)}"
    )


def bare(found: HandOff) -> list[str]:
    """The sides of which nothing is selected, though both have buffers."""
    both = (found.prefill, found.decode)
    return [side.label for side in both if side.bare] if all(s.layout.buffers for s in both) else []


def _expected(found: HandOff) -> str:
    verdict = found.verdict
    cause = "" if verdict.cause is None else f": {_cause(verdict.cause)}"
    if verdict.outcome == "works":
        return f"works: {_what(found)}"
    if verdict.outcome == "corrupts":
        return _corrupted(verdict) if verdict.corrupt else f"would corrupt {_SOME}{cause}"
    if verdict.outcome == "loses":
        return f"would leave something behind{cause}"
    if verdict.outcome == "unknown":
        return f"cannot be foretold{_open(found) or cause}"
    if verdict.refused and not _stopping(found):
        what = "decode would find its memory too small"
        if len(verdict.stretches) == 1:
            return f"would fail for {span(verdict.refused, verdict)}: {what}{_because(verdict)}"
        return f"would fail, as {what}, for {_each(verdict.stretches, verdict)}"
    return f"would fail at start-up{cause}"


def _open(found: HandOff) -> str:
    """What is open, and the sizes that would tell; empty where nothing is."""
    wanted = _wanted(found)
    if not wanted:
        return ""
    codes = ", ".join(dict.fromkeys(one.code for one in wanted))
    return f": it depends on sizes ({codes}), give {_sizes(wanted)}"


def _wanted(found: HandOff) -> list[Finding]:
    """The findings that sizes are wanted for."""
    about = {(row.code, row.twin.name) for row in found.rows if row.open}
    return [one for one in found.findings if (one.code, one.name) in about]


def _sizes(wanted: Sequence[Finding]) -> str:
    """The options that would tell, each once: ``--decode-dim sliding_window=SIZE``."""
    hints = dict.fromkeys(one.hint.removeprefix("give ") for one in wanted)
    return " ".join(map(show, hints))


def _stopping(found: HandOff) -> list[str]:
    """The codes of what stops a side before any hand-off."""
    return [one.code for one in found.findings if one.code in sides.STOPS]


def _corrupted(verdict: Verdict) -> str:
    """What is corrupted and what is refused: the causes once, or those of each length."""
    refused = [one for one in verdict.stretches if one.refused]
    corrupt = [one for one in verdict.stretches if not one.refused]
    if len({_codes(one) for one in verdict.stretches}) > 1:
        stops = f"; decode would stop at {_each(refused, verdict)}" if refused else ""
        return f"would corrupt {_each(corrupt, verdict)}{stops}"
    stops = f", and decode would stop at {span(verdict.refused, verdict)}" if refused else ""
    return f"would corrupt {span(verdict.corrupt, verdict)}{stops}{_because(verdict)}"


def _each(stretches: Sequence[Stretch], verdict: Verdict) -> str:
    """Lengths with their causes: ``prompts of 1 token: … (KV605), and prompts longer than …``."""
    return ", and ".join(f"{span(one.ranges, verdict)}{_causes(one)}" for one in stretches)


def _because(verdict: Verdict) -> str:
    """The causes that all lengths have in common."""
    return _causes(verdict.stretches[0])


def _causes(one: Stretch) -> str:
    said = dict.fromkeys(map(_cause, one.causes))
    return f": {' and '.join(said)}" if said else ""


def _codes(one: Stretch) -> tuple[str, ...]:
    return tuple(dict.fromkeys(found.code for found in one.causes))


def _cause(found: Finding) -> str:
    """A cause in general words, or, where it is something missing, what that is."""
    said = CODES[found.code][1]
    if found.code == "KV001":
        said = show(found.message)
    elif found.code in ("KV611", "KV620"):
        what = "layers of a draft model" if found.code == "KV620" else ""
        said = show(found.message.partition(": ")[0]) + (f", perhaps {what}" if what else "")
    elif found.code == "KV614":
        said = windows_text(found)
    return f"{said} ({found.code})"


def _what(found: HandOff) -> str:
    layers = layers_text(found.decode.layout.layers)
    count = len(found.decode.layout.buffers)
    said, sizes = f"{count} buffers of {layers}", _provided(found)
    if found.verdict.longest is not None:
        return f"{said}, prompts of up to {found.verdict.longest} tokens{sizes}"
    return f"{said}{sizes or ', prompts of any length'}"


def _provided(found: HandOff) -> str:
    """What goes for sizes that are not known: any do, or they must be the same on both sides."""
    missing = {*found.prefill.layout.missing, *found.decode.layout.missing}
    free = ", ".join(map(show, sorted(missing.difference(found.agreeing))))
    same = ", ".join(map(show, found.agreeing))
    said = f", whatever {free} may be" if free and found.verdict.longest is None else ""
    return said + (f", as long as both have the same {same}" if same else "")


def span(ranges: Ranges, verdict: Verdict) -> str:
    """Prompt lengths in words: ``prompts longer than 128 tokens``."""
    end = sides.LONGEST if verdict.longest is None else verdict.longest
    if not ranges:
        return _SOME
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
    return length_text(tokens)


def lines(found: HandOff, *, color: bool = False) -> Iterator[str]:
    """The table as aligned lines."""
    table = [heads(found), *rows(found)]
    widths = [max(len(row[at]) for row in table) for at in range(len(table[0]))]
    for number, row in enumerate(table):
        *cells, last = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        last = last.rstrip()
        if color and number:
            last = style(last, fg=state_color(last))
        yield "  ".join((*cells, last))


def state_color(state: str) -> str:
    """The colour of what becomes of a buffer."""
    return "green" if state == "ok" else "red"


def heads(found: HandOff) -> tuple[str, ...]:
    """What stands above the columns of the table."""
    last = "ONCE RENAMED" if bare(found) else "HAND-OFF"
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


def prompts(found: HandOff) -> Iterator[str]:
    """A line for each prompt length that was asked for."""
    once = ", once renamed" if bare(found) else ""
    for tokens in found.asked:
        yield f"a prompt of {length_text(tokens)}{once}: {_fate(found, tokens)}"


def _fate(found: HandOff, tokens: int) -> str:
    """What becomes of a prompt, or the sizes that it takes to tell."""
    verdict, cause = found.verdict, found.verdict.cause
    stopping = _stopping(found)
    if stopping:
        return f"never begins ({stopping[0]})"
    longest = sides.LONGEST - 1 if verdict.longest is None else verdict.longest
    if tokens > longest:
        limit = "any context can be" if verdict.longest is None else f"the context of {longest}"
        return f"longer than {limit}"
    wanted = _wanted(found)
    if wanted:
        return f"cannot be told, give {_sizes(wanted)}"
    moved = next((one for one in found.transfers if one.tokens == tokens), None)
    missing = {*found.prefill.layout.missing, *found.decode.layout.missing}
    if moved is None or (verdict.near is not None and tokens > 1):
        asked = [verdict.beyond] if verdict.beyond is not None else sorted(missing)
        dims = " ".join(f"--dim {show(symbol)}=SIZE" for symbol in asked)
        return f"cannot be told, give {dims}" if dims else "cannot be told"
    here = [one for one in verdict.stretches if rehearsing.within(tokens, one.ranges)]
    why = f" ({', '.join(_codes(here[0]))})" if here and here[0].causes else ""
    if moved.refused:
        return f"refused, decode would find its memory too small{why}"
    if here:
        wrong = sum(row.twin.ident in moved.wrong for row in found.rows)
        count = f"{wrong} of {len(found.rows)} buffers" if moved.wrong else "all of it"
        return f"{count} wrong{why}"
    left = sum(row.twin.decode is None for row in found.rows)
    if left:
        return f"{left} of {len(found.rows)} buffers left behind"
    if verdict.outcome == "unknown" and cause is not None:
        return f"cannot be told ({cause.code})"
    return f"ok{_provided(found)}"


def notes(found: HandOff) -> Iterator[str]:
    """What is worth knowing beside."""
    yield from (f"note: {show(note)}" for note in found.notes)


def report(found: HandOff, *, both: bool) -> ModelReport:
    """The findings as those of a model: of decode's, or of ``both`` for a reader."""
    labels = [
        side.path or (side.given.models or (side.label,))[0]
        for side in (found.prefill, found.decode)
    ]
    path = " -> ".join(labels) if both else labels[1]
    return ModelReport(
        path, path, "failed" if found.failed else "unchanged", findings=found.findings
    )
