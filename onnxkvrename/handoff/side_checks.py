"""Check each side of a hand-off, its token, and whether both sides are the same model.

The problems of a side come from `find_problems`, which checks one layout for a consumer. This
module adds which side it is about and what that means for a hand-off.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from onnxkvrename.findings import (
    Finding,
    begin_message,
    build_finding,
    format_count,
    format_list,
)
from onnxkvrename.handoff.comparison import BufferPair
from onnxkvrename.handoff.consumer import Consumer
from onnxkvrename.handoff.consumer_checks import (
    ConsumerProblem,
    StartupCause,
    count_appended_outputs,
    find_problems,
)
from onnxkvrename.handoff.name_checks import (
    RULES_HINT,
    choose_hint,
    describe_non_kv,
    format_rename_command,
    format_renaming_hint,
)
from onnxkvrename.handoff.selection import (
    BufferId,
    SelectedValue,
    Selection,
    find_misnamed_logits,
    find_unselected_buffers,
    select_values,
)
from onnxkvrename.handoff.worker import HandoffSide, list_rename_paths
from onnxkvrename.layout.layout import Layout
from onnxkvrename.model.signature import format_shape
from onnxkvrename.model.weights import Weight

STARTUP_FAILURE_CODES = (
    "KV001",
    "KV120",
    "KV603",
    "KV604",
    "KV610",
    "KV619",
    "KV622",
    "KV624",
)
"""Findings that stop a side before any hand-off: it cannot be compiled or started."""
_SIDE_CODES = ("KV120", "KV602", "KV609", "KV610")
"""Findings of one side that are also findings of a hand-off.

The others are either checked in more detail (KV601, KV603 to KV605, KV608), or do not affect a
hand-off (KV606, KV607).
"""
_VALUE_CAUSES: tuple[StartupCause, ...] = ("layer", "dtype", "shape")


@dataclass(frozen=True, slots=True)
class CheckedSide:
    """One side of a hand-off, with the selected values and the problems that it has by itself."""

    side: HandoffSide
    consumer: Consumer
    selection: Selection
    problems: tuple[ConsumerProblem, ...]


def check_side(side: HandoffSide, consumer: Consumer, full_transfer: bool) -> CheckedSide:
    """Return a side with the values that the consumer selects and the problems that it has."""
    return CheckedSide(
        side,
        consumer,
        select_values(side.layout, consumer),
        tuple(find_problems(side.layout, consumer, full_transfer)),
    )


def check_buffers_exist(prefill: HandoffSide, decode: HandoffSide) -> Iterator[Finding]:
    """Yield KV001 for a side without a buffer, which cannot take part in a hand-off."""
    for side in (prefill, decode):
        if not side.layout.buffers:
            where = f"{side.label} ({side.path})" if side.path else side.label
            hint = "pass the model that has the cache; --profile or --rules sets which names it has"
            yield build_finding("KV001", "", f"{where} has no KV buffer", hint)


def check_side_tokens(prefill: CheckedSide, decode: CheckedSide) -> Iterator[Finding]:
    """Yield KV616 for sides, and for single buffers, without the consumer's token."""
    checked = [each for each in (prefill, decode) if each.side.lacks_token]
    if len(checked) == 2 and prefill.side.tokens == decode.side.tokens:
        yield _build_token_finding("prefill and decode", prefill, decode)
    else:
        yield from (_build_token_finding(each.side.label, each) for each in checked)
    yield from _check_partial_token(prefill)
    yield from _check_partial_token(decode)


def _build_token_finding(label: str, checked: CheckedSide, *others: CheckedSide) -> Finding:
    side, consumer = checked.side, checked.consumer
    if not consumer.token:
        return build_finding(
            "KV616",
            "",
            f"no name of {label} matches {consumer.selected_inputs}; {consumer.name} selects no "
            "buffer",
            choose_hint(side.layout, consumer, consumer.unselected_hint),
        )
    count = "token" if len(side.tokens) == 1 else "tokens"
    tokens = f"the {count} {format_list(side.tokens)}" if side.tokens else "no token"
    options = ("--replace",) if side.tokens else ()
    return build_finding(
        "KV616",
        "",
        f"the names of {label} carry {tokens}; {consumer.name} requires {consumer.token} and "
        "selects no buffer",
        choose_hint(
            side.layout,
            consumer,
            _format_rename_command((checked, *others), *options),
        ),
    )


def _format_rename_command(sides: Sequence[CheckedSide], *options: str) -> str:
    """Return the command that renames sides; only with the token if ``--target`` would refuse."""
    return format_rename_command(
        sides[0].side.original_layout,
        sides[0].consumer,
        *options,
        paths=[path for each in sides for path in list_rename_paths(each.side)],
        is_refused=any(p.startup_cause == "output_count" for each in sides for p in each.problems),
    )


def _check_partial_token(checked: CheckedSide) -> Iterator[Finding]:
    """Yield KV616 for buffers without the token on a side where others have it."""
    side, consumer, selection = checked.side, checked.consumer, checked.selection
    if side.lacks_token:
        return
    buffers = find_unselected_buffers(selection.inputs, side.layout.buffers)
    if side.label == "prefill":
        unwritten = find_unselected_buffers(selection.outputs, side.layout.buffers)
        buffers = tuple(dict.fromkeys((*buffers, *unwritten)))
    lacking = [b for b in buffers if any(consumer.token not in name for name in b.names)]
    if not consumer.token:
        lacking = list(buffers)
    if lacking:
        names = [buffer.names[0] for buffer in lacking]
        beginning = begin_message(names, "does", "do", f"buffers of {side.label}")
        reason = (
            f"carry {consumer.token} in every name"
            if consumer.token
            else f"match {consumer.selected_inputs}"
        )
        where = f" on {side.label}" if len(names) == 1 else ""
        yield build_finding(
            "KV616",
            names[0],
            f"{beginning} not {reason}; {consumer.name} ignores "
            f"{'this buffer' if len(names) == 1 else 'these buffers'}{where}",
            choose_hint(
                side.layout,
                consumer,
                _format_rename_command((checked,), "--replace")
                if consumer.token
                else consumer.unselected_hint,
            ),
        )


def check_startup(prefill: CheckedSide, decode: CheckedSide) -> Iterator[Finding]:
    """Yield KV603, KV604, KV610 and KV624: what stops a side before any hand-off."""
    for checked in (prefill, decode):
        for cause in _VALUE_CAUSES:
            values = [
                value
                for problem in checked.problems
                if problem.startup_cause == cause
                for value in problem.values
            ]
            if values:
                yield _build_startup_finding(cause, values, checked)
    # Shared memory is laid out by prefill's inputs; separate arrays are decode's inputs.
    counting = prefill if prefill.consumer.memory == "shared" else decode
    if any(each.startup_cause == "output_count" for each in counting.problems):
        yield _build_output_count_finding(counting)


def _build_startup_finding(
    cause: StartupCause, values: Sequence[SelectedValue], checked: CheckedSide
) -> Finding:
    consumer, label = checked.consumer, checked.side.label
    names = [each.input_name for each in values]
    beginning = begin_message(names, "has", "have")
    end = f"{label} cannot start"
    if cause == "layer":
        return build_finding(
            "KV603",
            names[0],
            f"{beginning} no number where {consumer.name} reads the layer; {end}",
            "the layer must follow the first dot, as in past_key.3_TOKEN",
        )
    if cause == "dtype":
        dtypes = format_list(sorted({each.value.dtype for each in values}))
        return build_finding(
            "KV610",
            names[0],
            f"{beginning} the dtype {dtypes}, which {consumer.name} cannot move; {end}",
            "compile with a precision that it can move, and pass its file: --custom-io FILE",
        )
    shape = values[0].value.shape
    text = "no shape" if shape is None else f"the shape {format_shape(shape)}"
    return build_finding(
        "KV610",
        names[0],
        f"{beginning} {text} on {label}; {consumer.name} has nothing to move, or cannot compute "
        "how much",
        "export the model with a name or a size for each dimension",
    )


def _build_output_count_finding(checked: CheckedSide) -> Finding:
    """Return KV604 if the appended outputs are too few or too many, otherwise KV624."""
    inputs, outputs = len(checked.selection.inputs), len(checked.selection.outputs)
    label = checked.side.label
    if outputs - inputs in (0, 1):
        appended = count_appended_outputs(checked.side.layout, checked.consumer)
        name = find_misnamed_logits(checked.side.layout)
        no_logits = f"has logits called {name}" if name else "has no logits output"
        cause = (
            f"has {appended} outputs that start with log; {checked.consumer.name} drops only 1 of "
            "them, and"
            if appended
            else f"{no_logits}; {checked.consumer.name} then drops the last KV buffer instead, and"
        )
        return build_finding(
            "KV604",
            "",
            f"{label} {cause} fails at the first prompt",
            f"export {label} with logits, without sampling on the device",
        )
    consumer, buffers = checked.consumer, checked.side.layout.buffers
    unselected = [
        buffer.output
        for buffer in find_unselected_buffers(checked.selection.outputs, buffers)
        if buffer.output is not None
    ]
    selected = f"{format_count(inputs, 'input')} but {format_count(outputs, 'output')}"
    counts = f"{label} selects {selected} and fails at the first prompt"
    if not unselected:
        return build_finding("KV624", "", counts, "verify says which pairs are broken")
    names = consumer.selected_outputs or consumer.selected_inputs
    required = f"match {names}" if names else f"have a name that {consumer.name} selects"
    return build_finding(
        "KV624",
        unselected[0],
        f"{begin_message(unselected, 'does', 'do', 'outputs')} not {required}; {counts}",
        choose_hint(checked.side.layout, consumer, RULES_HINT),
    )


def check_each_side(
    prefill: CheckedSide, decode: CheckedSide, reported_codes: Collection[str]
) -> Iterator[Finding]:
    """Yield the findings of each side by itself, except the codes that are reported already."""
    has_own_arrays = prefill.consumer.memory == "separate"
    for checked in (prefill, decode):
        for finding in (each for problem in checked.problems for each in problem.findings):
            if finding.code == "KV120" and finding.severity != "error":
                continue  # a note: nothing says that it stops the consumer
            if finding.code == "KV609" and checked is prefill and has_own_arrays:
                continue  # decode's inputs are what prefill's outputs are paired with
            if finding.code in _SIDE_CODES and finding.code not in reported_codes:
                yield finding._replace(message=f"{finding.message} ({checked.side.label})")


def check_unmatched_non_kv(prefill: CheckedSide, decode: CheckedSide) -> Iterator[Finding]:
    """Yield KV608 for values that are not KV buffers and that only one side selects.

    Prefill's values after the last one that decode reads do no harm and are not reported.
    """
    inputs = prefill.selection.inputs
    outputs = prefill.selection.outputs[: len(inputs)]
    decode_inputs = decode.selection.inputs
    read_ids = {each.buffer_id for each in decode_inputs}
    if prefill.selection.is_ordered:
        inputs, outputs = (_drop_unread_tail(values, read_ids) for values in (inputs, outputs))
    for checked, values, other_values in (
        (prefill, (*inputs, *outputs), decode_inputs),
        (decode, decode_inputs, outputs),
    ):
        other_ids = {each.buffer_id for each in other_values}
        unmatched = (v for v in values if v.buffer is None and v.buffer_id not in other_ids)
        names = list(dict.fromkeys(each.input_name for each in unmatched))
        if names:
            consumer = checked.consumer
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


def check_same_model(prefill: CheckedSide, decode: CheckedSide) -> Iterator[Finding]:
    """Yield KV623 if weights or logits show that the two sides are different models.

    Exports of one model may differ in their graphs, lengths and generated names. A parameter name
    of the framework that both sides have is the same parameter; a name that only one side has is
    ignored.
    """
    layouts = prefill.side.layout, decode.side.layout
    weights, logits = _find_different_weights(*layouts), _compare_logits(*layouts)
    if not weights and not logits:
        return
    texts = [_format_different_weights(weights, len(_pair_weights(*layouts)))] if weights else []
    if logits:
        texts.append(f"logits {logits}" if weights else logits)
    texts.append(
        "prefill and decode are different models, and decode reads what the other model wrote"
    )
    yield build_finding(
        "KV623",
        weights[0][0] if weights else "logits",
        "; ".join(texts),
        "export both from the same model, with the same weights",
    )


def list_model_notes(prefill: CheckedSide, decode: CheckedSide) -> list[str]:
    """Return a note if it is not known whether both sides are the same model.

    Equal sizes are not enough: two trainings of one architecture have the same sizes.
    """
    layouts = prefill.side.layout, decode.side.layout
    pairs = _pair_weights(*layouts)
    is_compared = any(_have_comparable_values(*pair) for pair in pairs)
    if layouts[0].models == layouts[1].models or is_compared:
        return []
    silent = [each.side for each in (prefill, decode) if each.side.layout.weights is None]
    reason = (
        f"the weights of {' and '.join(side.label for side in silent)} are not known"
        if silent
        else "only the sizes of weights could be compared, not their values"
        if pairs
        else "no weight has the same name on both sides"
    )
    return [f"cannot tell whether both sides are the same model: {reason}"]


class Basis(NamedTuple):
    """What a success rests on.

    Attributes:
        facts: What was compared, and is equal.
        conditions: What is not known, each to be continued after ``both sides``.
    """

    facts: tuple[str, ...] = ()
    conditions: tuple[str, ...] = ()


def find_basis(
    sides: tuple[HandoffSide, HandoffSide], consumer: Consumer, pairs: Sequence[BufferPair]
) -> Basis:
    """Return what the success of a hand-off from prefill to decode rests on."""
    layouts = sides[0].layout, sides[1].layout
    facts, conditions = [f"{consumer.name}'s rules"], []
    if all(layout.has_compiled_dtypes for layout in layouts):
        facts.append("the precision of both compiles")
    else:
        conditions.append("are compiled with the same precision")
    scales = [pair.has_known_scales for pair in pairs]
    if False in scales:
        conditions.append("use the same scales (KV627)")
    elif True in scales:
        facts.append(f"equal scales of {format_count(scales.count(True), 'buffer')}")
    compared = sum(_have_comparable_values(*pair) for pair in _pair_weights(*layouts))
    if layouts[0].models == layouts[1].models:
        facts.append("one model on both sides")
    elif compared:
        facts.append(format_count(compared, "equal weight"))
    else:
        conditions.append("are the same model")
    return Basis(tuple(facts), tuple(conditions))


def check_scales_known(pairs: Sequence[BufferPair]) -> Iterator[Finding]:
    """Yield KV627, once, for quantized buffers whose scales could not be compared."""
    names = [pair.name for pair in pairs if pair.has_known_scales is False]
    if names:
        yield build_finding(
            "KV627",
            names[0],
            f"{begin_message(names, 'is', 'are', 'buffers')} quantized, and the scales are not "
            "constants of both graphs: whether decode reads the values that prefill stored is not "
            "known",
            "compare the results of both sides for one prompt",
        )


def _find_different_weights(prefill: Layout, decode: Layout) -> list[tuple[str, str]]:
    """Return the name of each weight that differs, with a text that describes the difference."""
    pairs = _pair_weights(prefill, decode)
    return [
        (first.name, text) for first, second in pairs if (text := _describe_weights(first, second))
    ]


def _format_different_weights(differences: Sequence[tuple[str, str]], compared: int) -> str:
    names, texts = zip(*differences, strict=True)
    noun = f"of {compared} compared weights"
    beginning = begin_message(names, f"{texts[0]} (1 {noun})", "differ", noun)
    return beginning if len(names) == 1 else f"{beginning}: the first {texts[0]}"


def _compare_logits(prefill: Layout, decode: Layout) -> str:
    """Return how the logits differ; empty if they do not, or if the last layers are different.

    A model without its last layers has hidden states instead of logits, possibly with that name.
    """
    if _find_last_layer(prefill) != _find_last_layer(decode):
        return ""
    first, second = (_find_vocabulary(layout) for layout in (prefill, decode))
    if None in (first, second) or first == second:
        return ""
    return f"has {first} entries on prefill and {second} on decode"


def _find_last_layer(layout: Layout) -> int:
    return max((buffer.layer for buffer in layout.buffers), default=-1)


def _pair_weights(prefill: Layout, decode: Layout) -> list[tuple[Weight, Weight]]:
    """Return the pairs of weights that have the same name on both sides."""
    others = {weight.name: weight for weight in decode.weights or ()}
    return [(w, others[w.name]) for w in prefill.weights or () if w.name in others]


def _have_comparable_values(first: Weight, second: Weight) -> bool:
    """Return whether both have a digest, and the same dtype and shape."""
    is_same_type = (first.dtype, first.shape) == (second.dtype, second.shape)
    return is_same_type and None not in (first.sha256, second.sha256)


def _describe_weights(first: Weight, second: Weight) -> str:
    """Return how two weights with the same name differ, empty if they do not."""
    if sorted(first.shape) != sorted(second.shape):  # one of them may be transposed
        shapes = (format_shape(each.shape) for each in (first, second))
        return "is {} on prefill and {} on decode".format(*shapes)
    if _have_comparable_values(first, second) and first.sha256 != second.sha256:
        return "has different values on decode"
    return ""


def _find_vocabulary(layout: Layout) -> int | None:
    """Return the number of logits for a token, ``None`` if the graph does not show it.

    In a set of windows, other values may be named ``logits``, so there it is ``None``.
    """
    if len(layout.models) > 1:
        return None
    shapes = (value.shape for value in layout.outputs if value.name == "logits")
    last = next((shape[-1] for shape in shapes if shape), None)
    return last if isinstance(last, int) else None


def list_update_notes(prefill: CheckedSide, decode: CheckedSide) -> list[str]:
    """Return a note on each side whose buffers grow or may grow, if that is not an error."""
    return [
        f"{checked.side.label}: {f'{finding.subject} {finding.message}'.lstrip()} ({finding.code})"
        for checked in (prefill, decode)
        for problem in checked.problems
        for finding in problem.findings
        if finding.code in ("KV113", "KV120") and finding.severity != "error"
    ]
