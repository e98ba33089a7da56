"""Check each side of a hand-off: its token, and what stops it before any hand-off.

The problems of a side come from `find_problems`, which checks one layout for a consumer. This
module adds which side it is about and what that means for a hand-off.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from onnxkvrename.findings import (
    UNKNOWN_TRANSFER,
    Finding,
    begin_message,
    build_finding,
    report_names,
)
from onnxkvrename.handoff.consumer import Consumer
from onnxkvrename.handoff.consumer_checks import (
    ConsumerProblem,
    StartupCause,
    count_appended_outputs,
    find_count_failure,
    find_problems,
)
from onnxkvrename.handoff.name_checks import (
    NAMES_HINT,
    describe_non_kv,
    format_renaming_hint,
)
from onnxkvrename.handoff.selection import (
    BufferId,
    ConsumerView,
    SelectedValue,
    build_view,
    find_misnamed_logits,
    find_unselected_buffers,
)
from onnxkvrename.handoff.worker import HAS_NO_BUFFER, HandoffSide
from onnxkvrename.model.signature import format_shape
from onnxkvrename.rules.request import suggest_rename
from onnxkvrename.text import format_count, format_list

_SIDE_CODES = ("KV120", "KV602", "KV606", "KV609", "KV610", UNKNOWN_TRANSFER)
"""Findings of one side that are also findings of a hand-off, if they are errors.

The others are either checked in more detail (KV601, KV603 to KV605, KV608), or do not affect a
hand-off (KV607).
"""
_VALUE_CAUSES: tuple[StartupCause, ...] = ("layer", "dtype", "shape")


class CheckedSide(NamedTuple):
    """One side of a hand-off as the consumer sees it, with the problems that it has by itself."""

    side: HandoffSide
    view: ConsumerView
    problems: tuple[ConsumerProblem, ...]


def check_side(side: HandoffSide, consumer: Consumer, full_transfer: bool) -> CheckedSide:
    """Return a side with the values that the consumer selects and the problems that it has."""
    rename = side.rename._replace(target=consumer.name, full_transfer=full_transfer)
    view = build_view(side.layout, consumer, full_transfer, rename)
    problems = tuple(find_problems(view))
    if consumer.token and any(map(_is_refusing, problems)):
        plain = side.rename._replace(token=consumer.token)
        view = build_view(side.layout, consumer, full_transfer, plain)
        problems = tuple(find_problems(view))
    return CheckedSide(side, view, problems)


def _is_refusing(problem: ConsumerProblem) -> bool:
    """Return whether a rename for the consumer, which checks the result, is refused."""
    names = ("KV601", "KV602")  # which a rename changes
    errors = (each for each in problem.findings if each.severity == "error")
    return problem.startup_cause == "output_count" or any(e.code not in names for e in errors)


def check_buffers_exist(prefill: HandoffSide, decode: HandoffSide) -> Iterator[Finding]:
    """Yield KV001 for a side without a buffer, which cannot take part in a hand-off."""
    for side in (prefill, decode):
        if not side.layout.buffers:
            where = f"{side.label} ({side.path})" if side.path else side.label
            message = f"{where}{HAS_NO_BUFFER}"
            hint = "pass the model that has the cache; --profile or --rules sets which names it has"
            known = side.model_finding
            if known is not None and known.code == "KV001":
                reason = known.message.removeprefix("no KV buffer here: ")
                message, hint = f"{message}: {reason}", known.hint
            yield build_finding("KV001", "", message, hint)


def check_side_tokens(prefill: CheckedSide, decode: CheckedSide) -> Iterator[Finding]:
    """Yield KV616 for sides, and for single buffers, without the consumer's token."""
    checked = [each for each in (prefill, decode) if each.side.lacks_token]
    if len(checked) == 2 and prefill.side.tokens == decode.side.tokens:
        yield _build_token_finding("prefill and decode", prefill, decode)
    else:
        yield from (_build_token_finding(each.side.label, each) for each in checked)
    partial = [each for each in (prefill, decode) if not each.side.lacks_token]
    lacking = [_list_lacking(each) for each in partial]
    if len(partial) == 2 and prefill.side.path == decode.side.path and lacking[0] == lacking[1]:
        yield from _report_lacking("prefill and decode", lacking[0], prefill)
    else:
        for each, names in zip(partial, lacking, strict=True):
            yield from _report_lacking(each.side.label, names, each)


def _build_token_finding(label: str, checked: CheckedSide, *others: CheckedSide) -> Finding:
    side, consumer = checked.side, checked.view.consumer
    if consumer.token:
        count = "token" if len(side.tokens) == 1 else "tokens"
        tokens = f"the {count} {format_list(side.tokens)}" if side.tokens else "no token"
        reason = (
            f"the names of {label} carry {tokens}; {consumer.name} requires {consumer.token} and"
        )
    else:
        reason = f"no name of {label} matches {consumer.selected_inputs}; {consumer.name}"
    hint = _choose_token_hint((checked, *others), replace=bool(side.tokens))
    return build_finding("KV616", "", f"{reason} selects no buffer", hint)


def _choose_token_hint(sides: Sequence[CheckedSide], *, replace: bool) -> str:
    """Return what makes the consumer select names; only the token if ``--target`` would refuse."""
    side, consumer = sides[0].side, sides[0].view.consumer
    hint = consumer.unselected_hint
    if consumer.token:
        renames = [each.view.rename for each in sides]
        rename = next((each for each in renames if each.target is None), renames[0])
        models = tuple(dict.fromkeys(path for each in renames for path in each.models))
        rename = rename._replace(models=models, replace=replace)
        hint = suggest_rename(rename)
    return _choose_hint(side, hint)


def _choose_hint(side: HandoffSide, hint: str) -> str:
    """Return a hint about names, or which finding to fix first.

    A model with an error is not renamed, nor is a cache that grows (KV120) renamed for a consumer.
    """
    if side.model_finding is not None:
        return f"fix {side.model_finding.code} first"
    if any(buffer.update.is_resized for buffer in side.layout.buffers):
        return "fix KV120 first"
    return hint


def _list_lacking(checked: CheckedSide) -> list[str]:
    """Return the buffers without the token on a side where others have it, by their first names."""
    side, consumer, selection = checked.side, checked.view.consumer, checked.view.selection
    buffers = find_unselected_buffers(selection.inputs, side.layout.buffers)
    if side.label == "prefill":
        unwritten = find_unselected_buffers(selection.outputs, side.layout.buffers)
        buffers = tuple(dict.fromkeys((*buffers, *unwritten)))
    if consumer.token:
        buffers = tuple(b for b in buffers if any(consumer.token not in name for name in b.names))
    return [buffer.names[0] for buffer in buffers]


def _report_lacking(label: str, names: Sequence[str], checked: CheckedSide) -> Iterator[Finding]:
    """Yield KV616 for buffers of a side that lack the token, or of both sides if they are one."""
    side, consumer = checked.side, checked.view.consumer
    reason = f"match {consumer.selected_inputs}"
    if consumer.token:
        reason = f"carry {consumer.token} in every name"
    ignored = f"this buffer on {label}" if len(names) == 1 else "these buffers"
    is_replaced = any(token != consumer.token for token in side.tokens)
    yield from report_names(
        "KV616",
        names,
        ("does", "do"),
        f"not {reason}; {consumer.name} ignores {ignored}",
        _choose_token_hint((checked,), replace=is_replaced),
        f"buffers of {label}",
    )


def check_startup(prefill: CheckedSide, decode: CheckedSide) -> Iterator[Finding]:
    """Yield KV603, KV604, KV610 and KV624: what stops a side before any hand-off."""
    for checked in (prefill, decode):
        for cause in _VALUE_CAUSES:
            problems = [each for each in checked.problems if each.startup_cause == cause]
            values = [value for problem in problems for value in problem.values]
            yield from _report_startup(cause, values, checked)
    # Shared memory is laid out by prefill's inputs; separate arrays are decode's inputs.
    counting = prefill if prefill.view.consumer.memory == "shared" else decode
    if any(each.startup_cause == "output_count" for each in counting.problems):
        yield _build_output_count_finding(counting)


def _report_startup(
    cause: StartupCause, values: Sequence[SelectedValue], checked: CheckedSide
) -> Iterator[Finding]:
    consumer, label = checked.view.consumer.name, checked.side.label
    if cause == "layer":
        code, text = "KV603", f"no number where {consumer} reads the layer; {label} cannot start"
        hint = NAMES_HINT
    elif cause == "dtype":
        dtypes = format_list(sorted({each.value.dtype for each in values}))
        code, text = (
            "KV610",
            f"the dtype {dtypes}, which {consumer} cannot move; {label} cannot start",
        )
        hint = "export the model with a cache of another dtype"
    else:
        shape = values[0].value.shape if values else None
        sizes = "no shape" if shape is None else f"the shape {format_shape(shape)}"
        code, text = (
            "KV610",
            (f"{sizes} on {label}; {consumer} has nothing to move, or cannot compute how much"),
        )
        hint = "export the model with a name or a size for each dimension"
    return report_names(code, [each.input_name for each in values], ("has", "have"), text, hint)


def _build_output_count_finding(checked: CheckedSide) -> Finding:
    """Return KV604 if the appended outputs are too few or too many, otherwise KV624."""
    label, view, consumer = checked.side.label, checked.view, checked.view.consumer
    inputs, outputs = len(view.selection.inputs), len(view.selection.outputs)
    when = find_count_failure(view.layout, consumer)
    if outputs - inputs in (0, 1):
        appended = count_appended_outputs(view)
        name = find_misnamed_logits(view.layout)
        no_logits = f"has logits called {name}" if name else "has no logits output"
        cause = (
            f"has {appended} outputs that start with log; {consumer.name} drops only 1 of them, and"
            if appended
            else f"{no_logits}; {consumer.name} then drops the last KV buffer instead, and"
        )
        return build_finding(
            "KV604",
            "",
            f"{label} {cause} fails {when}",
            f"export {label} with logits, without sampling on the device",
        )
    buffers = find_unselected_buffers(view.selection.outputs, view.layout.buffers)
    unselected = [buffer.output for buffer in buffers if buffer.output is not None]
    selected = f"{format_count(inputs, 'input')} but {format_count(outputs, 'output')}"
    counts = f"{label} selects {selected} and fails {when}"
    if not unselected:
        hint = _choose_hint(checked.side, "verify says which pairs are broken")
        return build_finding("KV624", "", counts, hint)
    names = consumer.selected_outputs or consumer.selected_inputs
    required = f"match {names}" if names else f"have a name that {consumer.name} selects"
    return build_finding(
        "KV624",
        unselected[0],
        f"{begin_message(unselected, 'does', 'do', 'outputs')} not {required}; {counts}",
        _choose_hint(checked.side, NAMES_HINT),
    )


def check_each_side(
    prefill: CheckedSide, decode: CheckedSide, reported_codes: Collection[str]
) -> Iterator[Finding]:
    """Yield the findings of each side by itself, except the codes that are reported already."""
    has_own_arrays = prefill.view.consumer.memory == "separate"
    for checked in (prefill, decode):
        for finding in (each for problem in checked.problems for each in problem.findings):
            if finding.severity != "error":
                continue  # nothing says that it stops the consumer; KV113 is a note
            if finding.code == "KV609" and checked is prefill and has_own_arrays:
                continue  # decode's inputs are what prefill's outputs are paired with
            if finding.code in _SIDE_CODES and finding.code not in reported_codes:
                hint = finding.hint
                if finding.code == "KV609":
                    hint = _choose_hint(checked.side, hint)
                message = f"{finding.message} ({checked.side.label})"
                yield finding._replace(message=message, hint=hint)


def check_unmatched_non_kv(prefill: CheckedSide, decode: CheckedSide) -> Iterator[Finding]:
    """Yield KV608 for values that are not KV buffers and that only one side selects.

    Prefill's values after the last one that decode reads do no harm and are not reported.
    """
    inputs = prefill.view.selection.inputs
    outputs = prefill.view.selection.outputs[: len(inputs)]
    decode_inputs = decode.view.selection.inputs
    read_ids = {each.buffer_id for each in decode_inputs}
    if prefill.view.selection.is_ordered:
        inputs, outputs = (_drop_unread_tail(values, read_ids) for values in (inputs, outputs))
    for checked, values, other_values in (
        (prefill, (*inputs, *outputs), decode_inputs),
        (decode, decode_inputs, outputs),
    ):
        other_ids = {each.buffer_id for each in other_values}
        unmatched = (v for v in values if v.buffer is None and v.buffer_id not in other_ids)
        names = list(dict.fromkeys(each.input_name for each in unmatched))
        if names:
            consumer = checked.view.consumer
            place = "takes a place" if len(names) == 1 else "they take places"
            yield build_finding(
                "KV608",
                names[0],
                f"{describe_non_kv(names, consumer)}; {place} among the buffers of "
                f"{checked.side.label} only",
                format_renaming_hint(consumer),
            )


def _drop_unread_tail(
    values: tuple[SelectedValue, ...], read_ids: Collection[BufferId]
) -> tuple[SelectedValue, ...]:
    """Return the values up to the last one that decode reads."""
    places = [place for place, each in enumerate(values, 1) if each.buffer_id in read_ids]
    return values[: max(places, default=0)]


def list_update_notes(prefill: CheckedSide, decode: CheckedSide) -> list[str]:
    """Return a note on each side whose buffers may grow, if that is not an error."""
    return [
        f"{checked.side.label}: {f'{finding.subject} {finding.message}'.lstrip()} ({finding.code})"
        for checked in (prefill, decode)
        for problem in checked.problems
        for finding in problem.findings
        if finding.code == "KV113" and finding.severity != "error"
    ]
