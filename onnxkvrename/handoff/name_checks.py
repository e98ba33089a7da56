"""Check names for one consumer: whether it selects them, reads their layers and pairs them.

The checks apply to every consumer, by the fields of `Consumer`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from onnxkvrename.findings import Finding, begin_message, build_finding, report_names
from onnxkvrename.handoff.consumer import Consumer
from onnxkvrename.handoff.selection import BufferName, ConsumerView
from onnxkvrename.rules.request import suggest_rename
from onnxkvrename.text import format_count

_BOTH_SIDES_HINT = "export the model again: a buffer needs both sides"
NAMES_HINT = (
    "export the model with names as QEfficient gives them, such as past_key.3 and "
    "past_key.3_RetainedState: a rename only adds the token"
)
"""The hint for names that a consumer cannot use, if a token does not help."""


_DO, _HAVE = ("does", "do"), ("has", "have")


def format_rename_command(view: ConsumerView, *, replace: bool = False) -> str:
    """Return the command that makes the names those that the consumer selects, in backticks.

    All files of a set must be renamed together, a merged model with its windows.
    """
    rename = view.rename._replace(replace=replace or view.rename.replace)
    return suggest_rename(rename)


def _format_normalizing(view: ConsumerView) -> str:
    rename = view.rename._replace(normalize=True)
    return suggest_rename(rename)


def format_renaming_hint(consumer: Consumer) -> str:
    """Return the hint for a selected value that is not a KV buffer."""
    if consumer.token:
        return f"export the model without {consumer.token} in that name"
    return "export the model with another name for it"


def describe_non_kv(names: Sequence[str], consumer: Consumer) -> str:
    """Return a clause on selected values that are not KV buffers: their names, why selected."""
    beginning = begin_message(names, "is not a KV buffer", "are not KV buffers", "values")
    them = "it" if len(names) == 1 else "them"
    return f"{beginning}, but {consumer.name} selects {them} by {consumer.selecting_trait}"


def check_selected_names(view: ConsumerView) -> Iterator[Finding]:
    """Yield KV601 for names that are not selected, and KV602 for outputs that give no input."""
    yield from _check_unselected_names(view)
    yield from _check_half_names(view)


def _check_unselected_names(view: ConsumerView) -> Iterator[Finding]:
    """Yield KV601, once for all names that are not selected for the same reason."""
    consumer, names = view.consumer, view.buffer_names
    selected = {each.name for each in names if each.is_selected}
    groups: _Groups = {}
    for each in names:
        if each.name not in selected:
            is_half = any(name in selected for name in each.buffer.names)
            reason, hint = _explain_unselected(each, is_half, view)
            groups.setdefault((reason, each.side if is_half else "", hint), []).append(each.name)
    for (reason, side, hint), unselected in _join_token_groups(groups, view).items():
        yield from report_names(
            "KV601",
            unselected,
            reason.verbs,
            f"{reason.text}; {consumer.name} ignores {_describe_loss(side, len(unselected))}",
            hint,
        )


class _Reason(NamedTuple):
    """Why names are not selected, and how they lack the token if that is the reason."""

    verbs: tuple[str, str]
    text: str
    token_fault: Literal["", "none", "different"] = ""


_Groups = dict[tuple[_Reason, str, str], list[str]]


def _join_token_groups(groups: _Groups, view: ConsumerView) -> _Groups:
    """Return the groups with one for all names that lack the token, if some have another one.

    One command adds the token to some and replaces it in the others.
    """
    joined: _Groups = {}
    for (reason, side, hint), names in groups.items():
        lacking = [key for key in groups if key[0].token_fault and key[1] == side]
        if not reason.token_fault or len(lacking) == 1:
            joined[reason, side, hint] = names
            continue
        other = sum(len(groups[key]) for key in lacking if key[0].token_fault == "different")
        text = f"not carry the token {view.consumer.token} ({other:,} carry a different one)"
        whole = _Reason(_DO, text, "different")
        command = format_rename_command(view, replace=True)
        joined.setdefault((whole, side, command), []).extend(names)
    return joined


def _describe_loss(side: str, count: int) -> str:
    """Return a clause that says what is ignored: whole buffers, or one side of them.

    The side is ``input`` or ``output``; empty for whole buffers.
    """
    if not side:
        return "this buffer" if count == 1 else "these buffers"
    other = "output" if side == "input" else "input"
    if count == 1:
        return f"this {side}, so its {other} has no pair"
    return f"these {side}s, so their {other}s have no pair"


def _explain_unselected(
    unselected: BufferName, is_half: bool, view: ConsumerView
) -> tuple[_Reason, str]:
    """Return why a name is not selected, and the hint."""
    consumer, name = view.consumer, unselected.name
    token = consumer.token
    if not token:
        is_output = is_half and unselected.side == "output"
        if is_output and consumer.selected_outputs:
            return _Reason(_DO, f"not match {consumer.selected_outputs}"), NAMES_HINT
        reason = _Reason(_DO, f"not match {consumer.selected_inputs}")
        return reason, consumer.unselected_hint or NAMES_HINT
    if token in name:
        required = consumer.output_suffix or consumer.selected_outputs
        text = f"the token but not the suffix that {consumer.name} requires"
        reason = _Reason(_HAVE, f"{text} ({required})" if required else text)
        if name.endswith("_InternalRetainedState"):
            return reason, _format_normalizing(view)
        return reason, NAMES_HINT
    if token.lower() in name.lower():
        text = f"from the token {token} in upper and lower case"
        reason = _Reason(("differs", "differ"), text, "different")
        replace = True
    elif is_half:
        other = "input" if unselected.side == "output" else "output"
        text = f"not carry the token {token}, which is in the name of the {other}"
        reason, replace = _Reason(_DO, text, "none"), True
    elif unselected.buffer.token != "":
        text = f"a different token than {token}"
        reason = _Reason(("carries", "carry"), text, "different")
        replace = True
    else:
        reason, replace = _Reason(_DO, f"not carry the token {token}", "none"), False
    return reason, format_rename_command(view, replace=replace)


def _check_half_names(view: ConsumerView) -> Iterator[Finding]:
    """Yield KV602 for buffers that are selected although only one of their names has a token.

    The compiler retains a buffer only if the name of its input follows from that of its output.
    """
    selected = {each.name for each in view.buffer_names if each.is_selected}
    halves = [
        buffer.output
        for buffer in view.layout.buffers
        if buffer.token is None and buffer.output and selected.issuperset(buffer.names)
    ]
    yield from report_names(
        "KV602",
        halves,
        _DO,
        "not carry the same token as the input, so the compiler does not retain the buffer",
        format_rename_command(view, replace=True)
        if view.consumer.token
        else view.consumer.unselected_hint or NAMES_HINT,
        "outputs",
    )


def report_suffixes(view: ConsumerView, suffix: str, effect: str) -> Iterator[Finding]:
    """Yield KV602 for outputs from which no input is derived, with the option that renames them."""
    return report_names(
        "KV602",
        view.underived_outputs,
        _DO,
        f"not end in {suffix}; {effect}",
        _format_normalizing(view),
        "outputs",
    )


def check_unreadable_layers(view: ConsumerView) -> Iterator[Finding]:
    """Yield KV603 for the buffers in whose names the consumer cannot read a layer."""
    unreadable = {each.value.name for each in view.selection.unreadable}
    consumer = view.consumer.name
    return report_names(
        "KV603",
        [each.name for each in view.buffer_names if each.is_selected and each.name in unreadable],
        _HAVE,
        f"no number where {consumer} reads the layer; {consumer} cannot start",
        NAMES_HINT,
    )


def check_layer_numbers(view: ConsumerView) -> Iterator[Finding]:
    """Yield KV603 for the buffers in whose names the consumer reads another layer."""
    consumer = view.consumer
    unreadable = {each.value.name for each in view.selection.unreadable}
    wrong: list[tuple[BufferName, int]] = []
    for each in view.buffer_names:
        if each.is_selected and each.name not in unreadable:
            name = each.name if each.side == "input" else consumer.input_name_of(each.name)
            layer, _ = consumer.sort_key(name)
            if layer != each.buffer.layer:
                wrong.append((each, layer))
    if wrong:
        first, layer = wrong[0]
        layers = f"to layer {first.buffer.layer}, but {consumer.name} reads layer {layer}"
        if len(wrong) > 1:
            layers = (
                f"to other layers than {consumer.name} reads: the first is of layer "
                f"{first.buffer.layer}, read as {layer}"
            )
        yield from report_names(
            "KV603",
            [each.name for each, _ in wrong],
            ("belongs", "belong"),
            f"{layers}; {consumer.name} then sorts the buffers in a wrong order",
            NAMES_HINT,
        )


def check_order(view: ConsumerView) -> Iterator[Finding]:
    """Yield KV609, unless a name that is not selected or is not a KV buffer explains it."""
    selection, consumer = view.selection, view.consumer
    if not selection.is_ordered or selection.is_paired:
        return
    if not all(each.is_selected for each in view.buffer_names) or view.non_kv_values:
        return
    if len(selection.inputs) != len(selection.outputs):
        yield build_finding(
            "KV609",
            _find_unpaired_name(view),
            f"has no pair: {consumer.name} selects {format_count(len(selection.inputs), 'input')} "
            f"and {format_count(len(selection.outputs), 'output')}, and pairs them by position",
            _BOTH_SIDES_HINT,
        )
        return
    pairs = zip(selection.inputs, selection.outputs, strict=True)
    for position, (selected_input, output) in enumerate(pairs, 1):
        # One name on both sides is a broken graph (KV106), which no order repairs.
        if selected_input.value.name not in (output.graph_input_name, output.value.name):
            yield build_finding(
                "KV609",
                output.value.name,
                f"would be paired with {selected_input.value.name}: {consumer.name} pairs by "
                f"position, and each is number {position} in its order",
                NAMES_HINT,
            )
            return


def _find_unpaired_name(view: ConsumerView) -> str:
    """Return a name of a buffer with one side only, or one that is also on the wrong side."""
    single = [b.names[0] for b in view.layout.buffers if b.input is None or b.output is None]
    values = (*view.selection.inputs, *view.selection.outputs)
    lone = [each.value.name for each in values if each.buffer is None]
    return next(iter((*single, *lone)), "")  # a layout file may leave out what its buffers name
