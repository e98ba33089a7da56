"""Check names at one consumer: what it selects, the layers that it reads, and how it pairs.

The checks hold for every consumer, by the fields that it has.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from onnxkvrename.findings import Finding, build_finding
from onnxkvrename.handoff.consumer import Consumer
from onnxkvrename.handoff.selection import Selection, find_non_kv_selected
from onnxkvrename.layout.layout import KvBuffer, Layout

_TEMPLATE_HINT = (
    "mend the template in your rules (--rules FILE): the consumer expects another place"
)


RULES_HINT = "say in your rules how names are made: input_name and output_name (--rules FILE)"
"""What to do where a name lacks what a consumer selects, and no token helps."""


class BufferName(NamedTuple):
    """The input or output name of a buffer."""

    buffer: KvBuffer
    name: str
    side: Literal["input", "output"]
    is_selected: bool


def format_rename_command(layout: Layout, consumer: Consumer, *options: str) -> str:
    """Return the command that gives a layout's models the names that a consumer selects."""
    model = shlex.quote(layout.models[0]) if len(layout.models) == 1 else "MODEL..."
    return " ".join(("onnxkvrename", model, "--target", consumer.name, *options))


def format_renaming_hint(consumer: Consumer) -> str:
    """Return what to do about the name of a selected value that is no KV buffer."""
    if consumer.token:
        return f"take {consumer.token} out of that name where the model is exported"
    return "give it another name where the model is exported"


def format_similar_count(names: Sequence[str]) -> str:
    """Return how many names there are besides the first: ``, like 7 more``, or nothing."""
    return f", like {len(names) - 1} more" if len(names) > 1 else ""


def list_buffer_names(layout: Layout, consumer: Consumer) -> Iterator[BufferName]:
    """Yield all names of KV buffers, each with whether the consumer selects it."""
    for buffer in layout.buffers:
        if buffer.input is not None:
            is_selected = consumer.selects_input(buffer.input)
            yield BufferName(buffer, buffer.input, "input", is_selected)
        if buffer.output is not None:
            is_selected = consumer.selects_output(buffer.output)
            yield BufferName(buffer, buffer.output, "output", is_selected)


def check_unselected_names(
    names: Sequence[BufferName], layout: Layout, consumer: Consumer
) -> Iterator[Finding]:
    """Yield KV601, once for all names that are not selected for the same reason."""
    selected = {each.name for each in names if each.is_selected}
    groups: dict[tuple[str, str, str], list[str]] = {}
    for each in names:
        if each.name not in selected:
            is_half = any(name in selected for name in each.buffer.names)
            where = f"its {each.side} only" if is_half else "both sides"
            reason, hint = _explain_unselected(each, is_half, layout, consumer)
            groups.setdefault((reason, where, hint), []).append(each.name)
    for (reason, where, hint), unselected in groups.items():
        lost = "is handed over" if where == "both sides" else "pairs"
        yield build_finding(
            "KV601",
            unselected[0],
            f"{reason}, on {where}{format_similar_count(unselected)}: {consumer.name} does not "
            f"select it, and nothing of it {lost}",
            hint,
        )


def _explain_unselected(
    unselected: BufferName, is_half: bool, layout: Layout, consumer: Consumer
) -> tuple[str, str]:
    """Return why a name is not selected, and what helps."""
    name, token = unselected.name, consumer.token
    if not token:
        is_output = is_half and unselected.side == "output"
        if is_output and consumer.selected_outputs:
            return f"is not named {consumer.selected_outputs}", RULES_HINT
        return f"is not named {consumer.selected_inputs}", consumer.unselected_hint or RULES_HINT
    if name.endswith(token):
        selected = consumer.selected_outputs
        required = f" ({selected})" if selected else ""
        return f"carries the token, but not the end that is selected{required}", RULES_HINT
    reason, option = f"does not carry {token}", ""
    if token in name:
        reason = "carries the token, but ends otherwise than what is selected"
        option = "--normalize"
    elif token.lower() in name.lower():
        reason, option = f"carries {token} with other capitals", "--replace"
    elif unselected.buffer.token != "":
        reason, option = f"carries another token than {token}", "--replace"
    return reason, format_rename_command(layout, consumer, *option.split())


def check_output_suffixes(layout: Layout, consumer: Consumer) -> Iterator[Finding]:
    """Yield KV602 for selected outputs from whose names no input name is derived."""
    names = [
        buffer.output
        for buffer in layout.buffers
        if buffer.output is not None
        and consumer.selects_output(buffer.output)
        and consumer.input_name_of(buffer.output) == buffer.output
    ]
    if names:
        yield build_finding(
            "KV602",
            names[0],
            f"is selected{format_similar_count(names)}, but its end is not what {consumer.name} "
            "takes off, so that it never goes by its input's name",
            format_rename_command(layout, consumer, "--normalize"),
        )


def check_unreadable_layers(
    names: Sequence[BufferName], selection: Selection, consumer: Consumer
) -> Iterator[Finding]:
    """Yield KV603 for the buffers in whose names the consumer cannot read a layer."""
    unreadable = {each.value.name for each in selection.unreadable}
    affected = [each.name for each in names if each.is_selected and each.name in unreadable]
    if affected:
        yield build_finding(
            "KV603",
            affected[0],
            f"has no number where {consumer.name} reads the layer"
            f"{format_similar_count(affected)}: it cannot start",
            _TEMPLATE_HINT,
        )


def check_layer_numbers(
    names: Sequence[BufferName], selection: Selection, consumer: Consumer
) -> Iterator[Finding]:
    """Yield KV603 for the buffers in whose names the consumer reads another layer."""
    if consumer.sort_key is None:
        return
    unreadable = {each.value.name for each in selection.unreadable}
    wrong: list[tuple[BufferName, int]] = []
    for each in names:
        if each.is_selected and each.name not in unreadable:
            name = each.name if each.side == "input" else consumer.input_name_of(each.name)
            layer, _ = consumer.sort_key(name)
            if layer != each.buffer.layer:
                wrong.append((each, layer))
    if wrong:
        first, layer = wrong[0]
        more = format_similar_count([each.name for each, _ in wrong])
        yield build_finding(
            "KV603",
            first.name,
            f"is of layer {first.buffer.layer}, but {consumer.name} reads {layer}{more}: its order "
            "is not that of the layers",
            _TEMPLATE_HINT,
        )


def check_order(
    names: Sequence[BufferName], layout: Layout, selection: Selection, consumer: Consumer
) -> Iterator[Finding]:
    """Yield KV609, unless a name that is not selected or is not a KV buffer explains it."""
    if not selection.is_ordered or selection.is_paired:
        return
    if consumer.pairs_by_name:
        yield from _check_names_pair(names, selection, consumer)
        return
    if not all(each.is_selected for each in names) or find_non_kv_selected(layout, selection):
        return
    if len(selection.inputs) != len(selection.outputs):
        yield build_finding(
            "KV609",
            _find_unpaired_name(layout, selection),
            f"stands alone: {consumer.name} selects {len(selection.inputs)} inputs and "
            f"{len(selection.outputs)} outputs, and pairs them by position",
            "export the model again: a buffer needs both sides",
        )
        return
    pairs = zip(selection.inputs, selection.outputs, strict=True)
    for position, (selected_input, output) in enumerate(pairs):
        # One name on both sides is a broken graph (KV106), which no order repairs.
        if selected_input.value.name not in (output.graph_input_name, output.value.name):
            yield build_finding(
                "KV609",
                output.value.name,
                f"comes in place {position} of the outputs, where {selected_input.value.name} "
                f"stands among the inputs: {consumer.name} would hand it to that one",
                "both names of a buffer must sort alike: mend the templates in your rules "
                "(--rules FILE)",
            )
            return


def _check_names_pair(
    names: Sequence[BufferName], selection: Selection, consumer: Consumer
) -> Iterator[Finding]:
    """Yield KV609 for inputs of which a consumer that pairs by name finds no output.

    It does not look for the input of an output: the outputs of an encoder have none.
    """
    selected = {each.name for each in names if each.is_selected}
    is_elsewhere = consumer.is_written_elsewhere or (lambda name: False)
    alone = [
        source.name
        for source, result in selection.value_pairs
        if source is not None and result is None and source.name in selected
        if not is_elsewhere(source.name)
    ]
    if alone:
        yield build_finding(
            "KV609",
            alone[0],
            f"stands alone{format_similar_count(alone)}: {consumer.name} pairs by name, and no "
            "output has the name that belongs to it",
            "export the model again: a buffer needs both sides",
        )


def _find_unpaired_name(layout: Layout, selection: Selection) -> str:
    """Return a name of a buffer with one side only, or one that is on the wrong side as well."""
    single = (b.names[0] for b in layout.buffers if b.input is None or b.output is None)
    values = (*selection.inputs, *selection.outputs)
    return (*single, *(each.value.name for each in values if each.buffer is None))[0]
