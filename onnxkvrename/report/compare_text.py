"""What is to be expected of a hand-off, for a person; strings out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from click import style

from onnxkvrename.findings import CODES, Finding
from onnxkvrename.handoff.buffer_diff import BufferPair, describe_windows, format_buffer_type
from onnxkvrename.handoff.compare import Handoff, PairResult
from onnxkvrename.handoff.simulate import PromptRanges, is_in_ranges, subtract_ranges
from onnxkvrename.handoff.slots import format_token_count
from onnxkvrename.handoff.verdict import AffectedRange, HandoffVerdict, Outcome
from onnxkvrename.handoff.worker import STARTUP_FAILURE_CODES, UNLIMITED_LENGTH
from onnxkvrename.report.rename_text import escape_unprintable
from onnxkvrename.rules.results import ModelReport
from onnxkvrename.rules.window_diff import format_layers

_SOME_PROMPTS = "prompts, from a length on that depends on sizes"


def resolve_outcome(found: Handoff) -> Outcome:
    """What becomes of the hand-off as the models stand."""
    if not list_sides_without_token(found):
        return found.verdict.outcome
    return "fails" if found.prefill.lacks_token else "corrupts"


def format_handoff_verdict(found: Handoff) -> str:
    """The verdict in one line."""
    without = list_sides_without_token(found)
    if not without:
        return f"hand-off {_format_outcome(found)}"
    what = "fail" if found.prefill.lacks_token else "corrupt every prompt"
    return (
        f"hand-off would {what}: {found.consumer_name} selects nothing on {' and '.join(without)} "
        f"(KV616); renamed, it {_format_outcome(found)}"
    )


def list_sides_without_token(found: Handoff) -> list[str]:
    """The sides of which nothing is selected, though both have buffers."""
    both = (found.prefill, found.decode)
    return (
        [side.label for side in both if side.lacks_token]
        if all(s.layout.buffers for s in both)
        else []
    )


def _format_outcome(found: Handoff) -> str:
    verdict = found.verdict
    cause = "" if verdict.first_cause is None else f": {_format_cause(verdict.first_cause)}"
    if verdict.outcome == "works":
        return f"works: {_format_transferred(found)}"
    if verdict.outcome == "corrupts":
        return (
            _format_corruption(verdict)
            if verdict.corrupt_ranges
            else f"would corrupt {_SOME_PROMPTS}{cause}"
        )
    if verdict.outcome == "loses":
        return f"would leave something behind{cause}"
    if verdict.outcome == "unknown":
        return f"cannot be foretold{_format_undecided(found) or cause}"
    if verdict.refused_ranges and not _list_startup_codes(found):
        what = "decode would find its memory too small"
        if len(verdict.affected_ranges) == 1:
            return f"would fail for {format_prompt_ranges(verdict.refused_ranges, verdict)}: {what}{_format_common_causes(verdict)}"
        return f"would fail, as {what}, for {_format_each_range(verdict.affected_ranges, verdict)}"
    return f"would fail at start-up{cause}"


def _format_undecided(found: Handoff) -> str:
    """What is open, and the sizes that would tell; empty where nothing is."""
    wanted = _find_undecided(found)
    if not wanted:
        return ""
    codes = ", ".join(dict.fromkeys(one.code for one in wanted))
    return f": it depends on sizes ({codes}), give {_format_size_options(wanted)}"


def _find_undecided(found: Handoff) -> list[Finding]:
    """The findings that sizes are wanted for."""
    about = {(row.code, row.pair.name) for row in found.pair_results if row.is_undecided}
    return [one for one in found.findings if (one.code, one.name) in about]


def _format_size_options(wanted: Sequence[Finding]) -> str:
    """The options that would tell, each once: ``--decode-dim sliding_window=SIZE``."""
    hints = dict.fromkeys(one.hint.removeprefix("give ") for one in wanted)
    return " ".join(map(escape_unprintable, hints))


def _list_startup_codes(found: Handoff) -> list[str]:
    """The codes of what stops a side before any hand-off."""
    return [one.code for one in found.findings if one.code in STARTUP_FAILURE_CODES]


def _format_corruption(verdict: HandoffVerdict) -> str:
    """What is corrupted and what is refused: the causes once, or those of each length."""
    refused = [one for one in verdict.affected_ranges if one.is_refused]
    corrupt = [one for one in verdict.affected_ranges if not one.is_refused]
    if len({_list_codes(one) for one in verdict.affected_ranges}) > 1:
        stops = f"; decode would stop at {_format_each_range(refused, verdict)}" if refused else ""
        return f"would corrupt {_format_each_range(corrupt, verdict)}{stops}"
    stops = (
        f", and decode would stop at {format_prompt_ranges(verdict.refused_ranges, verdict)}"
        if refused
        else ""
    )
    return f"would corrupt {format_prompt_ranges(verdict.corrupt_ranges, verdict)}{stops}{_format_common_causes(verdict)}"


def _format_each_range(stretches: Sequence[AffectedRange], verdict: HandoffVerdict) -> str:
    """Lengths with their causes: ``prompts of 1 token: … (KV605), and prompts longer than …``."""
    return ", and ".join(
        f"{format_prompt_ranges(one.ranges, verdict)}{_format_causes(one)}" for one in stretches
    )


def _format_common_causes(verdict: HandoffVerdict) -> str:
    """The causes that all lengths have in common."""
    return _format_causes(verdict.affected_ranges[0])


def _format_causes(one: AffectedRange) -> str:
    said = dict.fromkeys(map(_format_cause, one.causes))
    return f": {' and '.join(said)}" if said else ""


def _list_codes(one: AffectedRange) -> tuple[str, ...]:
    return tuple(dict.fromkeys(found.code for found in one.causes))


def _format_cause(found: Finding) -> str:
    """A cause in general words, or, where it is something missing, what that is."""
    said = CODES[found.code][1]
    if found.code == "KV001":
        said = escape_unprintable(found.message)
    elif found.code in ("KV611", "KV620"):
        what = "layers of a draft model" if found.code == "KV620" else ""
        said = escape_unprintable(found.message.partition(": ")[0]) + (
            f", perhaps {what}" if what else ""
        )
    elif found.code == "KV614":
        said = describe_windows(found)
    return f"{said} ({found.code})"


def _format_transferred(found: Handoff) -> str:
    layers = format_layers(found.decode.layout.layers)
    count = len(found.decode.layout.buffers)
    said, sizes = f"{count} buffers of {layers}", _format_conditions(found)
    if found.verdict.longest_prompt is not None:
        return f"{said}, prompts of up to {found.verdict.longest_prompt} tokens{sizes}"
    return f"{said}{sizes or ', prompts of any length'}"


def _format_conditions(found: Handoff) -> str:
    """What goes for sizes that are not known: any do, or they must be the same on both sides."""
    missing = {*found.prefill.layout.unresolved_symbols, *found.decode.layout.unresolved_symbols}
    free = ", ".join(map(escape_unprintable, sorted(missing.difference(found.shared_symbols))))
    same = ", ".join(map(escape_unprintable, found.shared_symbols))
    said = f", whatever {free} may be" if free and found.verdict.longest_prompt is None else ""
    return said + (f", as long as both have the same {same}" if same else "")


def format_prompt_ranges(ranges: PromptRanges, verdict: HandoffVerdict) -> str:
    """Prompt lengths in words: ``prompts longer than 128 tokens``."""
    end = UNLIMITED_LENGTH if verdict.longest_prompt is None else verdict.longest_prompt
    if not ranges:
        return _SOME_PROMPTS
    if ranges == ((1, end),):
        return "every prompt"
    return f"prompts {' and '.join(_format_range(first, last, end, verdict) for first, last in ranges)}"


def _format_range(first: int, last: int, end: int, verdict: HandoffVerdict) -> str:
    if last == end:
        return f"longer than {_format_length(first - 1, verdict)}"
    if first == 1:
        return f"of up to {_format_length(last, verdict)}"
    if first == last:
        return f"of {_format_length(last, verdict)}"
    return f"of {first} to {_format_length(last, verdict)}"


def _format_length(tokens: int, verdict: HandoffVerdict) -> str:
    """A length, by the name of a window where that is all that is known of it."""
    if tokens == verdict.window_placeholder and verdict.window_symbol is not None:
        return escape_unprintable(verdict.window_symbol)
    return format_token_count(tokens)


def render_handoff_table(found: Handoff, *, color: bool = False) -> Iterator[str]:
    """The table as aligned lines."""
    table = [list_table_headings(found), *build_table_rows(found)]
    widths = [max(len(row[at]) for row in table) for at in range(len(table[0]))]
    for number, row in enumerate(table):
        *cells, last = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        last = last.rstrip()
        if color and number:
            last = style(last, fg=choose_state_color(last))
        yield "  ".join((*cells, last))


def choose_state_color(state: str) -> str:
    """The colour of what becomes of a buffer."""
    return "green" if state == "ok" else "red"


def list_table_headings(found: Handoff) -> tuple[str, ...]:
    """What stands above the columns of the table."""
    last = "ONCE RENAMED" if list_sides_without_token(found) else "HAND-OFF"
    return "LAYERS", "PARTS", "PREFILL", "DECODE", last


def build_table_rows(found: Handoff) -> list[tuple[str, ...]]:
    """Buffers that are alike and fare alike in one row, layers and parts folded."""
    alike: dict[tuple[str, str, str, str], list[int]] = {}
    for row in found.pair_results:
        mine, theirs = _format_pair_types(found, row.pair)
        key = (
            escape_unprintable(row.pair.present_buffer.part),
            mine,
            theirs,
            _format_state(row, found.verdict),
        )
        alike.setdefault(key, []).append(row.pair.present_buffer.layer)
    merged: dict[tuple[tuple[int, ...], str, str, str], list[str]] = {}
    for (part, mine, theirs, state), layers in alike.items():
        merged.setdefault((tuple(layers), mine, theirs, state), []).append(part)
    return [
        (format_layers(layers).partition(" ")[2], ", ".join(parts), mine, theirs, state)
        for (layers, mine, theirs, state), parts in merged.items()
    ]


def _format_pair_types(found: Handoff, twin: BufferPair) -> tuple[str, str]:
    sides_of = ((found.prefill, twin.prefill), (found.decode, twin.decode))
    mine, theirs = (
        "-" if buffer is None else escape_unprintable(format_buffer_type(side.layout, buffer))
        for side, buffer in sides_of
    )
    return mine, "same" if mine == theirs else theirs


def _format_state(row: PairResult, verdict: HandoffVerdict) -> str:
    why = "" if row.code is None else f" ({row.code})"
    if row.pair.decode is None:
        return f"left behind{why}"
    if row.is_undecided:
        return f"depends on sizes{why}"
    corrupt = subtract_ranges(row.wrong_ranges, verdict.refused_ranges)
    if corrupt:
        what = "wrong" if row.code is not None else "shifted"
        return f"{what} for {format_prompt_ranges(corrupt, verdict)}{why}"
    if row.wrong_ranges:
        return f"refused for {format_prompt_ranges(row.wrong_ranges, verdict)}{why}"
    if row.code is not None and verdict.refused_ranges:
        return f"refused for {format_prompt_ranges(verdict.refused_ranges, verdict)}{why}"
    return f"wrong{why}" if why else "ok"


def render_prompt_lines(found: Handoff) -> Iterator[str]:
    """A line for each prompt length that was asked for."""
    once = ", once renamed" if list_sides_without_token(found) else ""
    for tokens in found.requested_lengths:
        yield f"a prompt of {format_token_count(tokens)}{once}: {_format_prompt_outcome(found, tokens)}"


def _format_prompt_outcome(found: Handoff, tokens: int) -> str:
    """What becomes of a prompt, or the sizes that it takes to tell."""
    verdict, cause = found.verdict, found.verdict.first_cause
    stopping = _list_startup_codes(found)
    if stopping:
        return f"never begins ({stopping[0]})"
    longest = UNLIMITED_LENGTH - 1 if verdict.longest_prompt is None else verdict.longest_prompt
    if tokens > longest:
        limit = (
            "any context can be" if verdict.longest_prompt is None else f"the context of {longest}"
        )
        return f"longer than {limit}"
    wanted = _find_undecided(found)
    if wanted:
        return f"cannot be told, give {_format_size_options(wanted)}"
    moved = next((one for one in found.simulated_prompts if one.tokens == tokens), None)
    missing = {*found.prefill.layout.unresolved_symbols, *found.decode.layout.unresolved_symbols}
    if moved is None or (verdict.window_placeholder is not None and tokens > 1):
        asked = [verdict.window_symbol] if verdict.window_symbol is not None else sorted(missing)
        dims = " ".join(f"--dim {escape_unprintable(symbol)}=SIZE" for symbol in asked)
        return f"cannot be told, give {dims}" if dims else "cannot be told"
    here = [one for one in verdict.affected_ranges if is_in_ranges(tokens, one.ranges)]
    why = f" ({', '.join(_list_codes(here[0]))})" if here and here[0].causes else ""
    if moved.is_refused:
        return f"refused, decode would find its memory too small{why}"
    if here:
        wrong = sum(row.pair.buffer_id in moved.wrong_buffer_ids for row in found.pair_results)
        count = (
            f"{wrong} of {len(found.pair_results)} buffers"
            if moved.wrong_buffer_ids
            else "all of it"
        )
        return f"{count} wrong{why}"
    left = sum(row.pair.decode is None for row in found.pair_results)
    if left:
        return f"{left} of {len(found.pair_results)} buffers left behind"
    if verdict.outcome == "unknown" and cause is not None:
        return f"cannot be told ({cause.code})"
    return f"ok{_format_conditions(found)}"


def render_handoff_notes(found: Handoff) -> Iterator[str]:
    """What is worth knowing beside."""
    yield from (f"note: {escape_unprintable(note)}" for note in found.notes)


def build_handoff_report(found: Handoff, *, both: bool) -> ModelReport:
    """The findings as those of a model: of decode's, or of ``both`` for a reader."""
    labels = [
        side.path or (side.original_layout.models or (side.label,))[0]
        for side in (found.prefill, found.decode)
    ]
    path = " -> ".join(labels) if both else labels[1]
    return ModelReport(
        path, path, "failed" if found.failed else "unchanged", findings=found.findings
    )
